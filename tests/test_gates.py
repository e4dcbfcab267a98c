"""Learned placement: gates per branch, layer or channel can be read, regularised and turned into plain corners."""

import pytest
import torch
from tiny_models import WIDTH, tiny_batch, tiny_model

from hf_normswap import NormSwapError, convert_checkpoint, gate_penalty, harden, list_gates, plot_gates


def logits(model):
    with torch.no_grad():
        return model(**tiny_batch()).logits


KINDS = {"branch": (2, 1), "layer": (1, 1), "channel": (2, WIDTH)}  # gates in a layer, size of each


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case, start", [("bert", 1.0), ("gpt2", 0.0), ("gemma2", 0.0)])
def test_gates_start_at_the_source_learn_and_harden(case, start, kind, tmp_path):
    model = tiny_model(case)
    native = {"bert": {"skip_norm": 1.0}, "gpt2": {}, "gemma2": {"output_norm": 1.0}}[case]
    gated = convert_checkpoint(model, native | {"learned": [["skip_norm", kind]]})
    assert torch.equal(logits(gated), logits(model))
    gates = list_gates(gated)
    number, size = KINDS[kind]
    assert len(gates) == 3 * number and {len(gate.tensor) for gate in gates} == {size}
    assert all((gate.tensor == start).all() for gate in gates) and f"{start:.3f}" in str(gates[0])

    gated.save_pretrained(tmp_path)
    assert torch.equal(logits(type(gated).from_pretrained(tmp_path)), logits(gated))
    gated(**tiny_batch(), labels=tiny_batch()["input_ids"]).loss.backward()
    # nothing norms the embeddings of BERT once more, so its first gate lies between two equals
    assert all(gate.tensor.grad.abs().min() > 0 for gate in gates[case == "bert" and kind != "layer" :])

    with torch.no_grad():
        for gate, value in zip(gates, [0.9, 0.8, 0.1, 0.3, 0.2, 0.9] if number == 2 else [0.9, 0.1, 0.8]):
            gate.tensor.fill_(value)
    hard = harden(gated)
    expected = [1.0, 0.0, 1.0]
    specs = [{**native, "skip_norm": value} for value in expected]
    assert torch.equal(logits(hard), logits(convert_checkpoint(model, specs)))
    assert hard.config.norm_gate is None
    if case != "gemma2":
        assert hard.config.norm_placement == ["post", "pre", "post"]
    with pytest.raises(NormSwapError, match="no gates"):
        list_gates(hard)
    assert plot_gates(gated, tmp_path / "gates.png").axes[0].lines and (tmp_path / "gates.png").stat().st_size > 0


def test_the_penalty_drives_gates_to_an_end():
    for start, end in ((0.3, 0.0), (0.7, 1.0), (-0.4, 0.0), (1.4, 1.0)):
        model = convert_checkpoint(tiny_model("llama"), {"learned": [["skip_norm", "branch"]]})
        gates = [gate.tensor for gate in list_gates(model)]
        with torch.no_grad():
            for gate in gates:
                gate.fill_(start)
        optimizer = torch.optim.SGD(gates, lr=0.02)
        for _ in range(400):
            optimizer.zero_grad()
            gate_penalty(model).backward()
            optimizer.step()
        assert all(abs(gate.item() - end) < 0.02 for gate in gates)
    assert gate_penalty(convert_checkpoint(tiny_model("llama"), "gated", norm_gate=0.5)).item() == 1
