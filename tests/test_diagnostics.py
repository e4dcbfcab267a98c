"""Diagnostics measure what their definitions say, order placements as the papers do, and leave the model alone."""

import contextlib
import copy
import gc
import json
import math
import random
import sys
import weakref
from operator import attrgetter

import numpy
import pytest
import scipy
import torch
import transformers
from tiny_models import VOCABULARY, tiny_batch, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import hf_normswap
from hf_normswap import GradientHistory, NormSwapError, convert_checkpoint
from hf_normswap.diagnostics import (
    collapse,
    cost,
    gradient_profile,
    residual_stream,
    sensitivity,
    spike_score,
    stability,
)
from hf_normswap.diagnostics.collapse import effective_rank
from hf_normswap.diagnostics.cost import (
    activation_bytes,
    int8,
    interleaved,
    matrices_of,
    prompt_of,
    record,
    round_input,
    round_weight,
    spread_of_median,
)
from hf_normswap.diagnostics.gradients import growth
from hf_normswap.diagnostics.measuring import layers_of, loss_of, mean_loss, measuring, outputs, plain, prepare
from hf_normswap.diagnostics.sensitivity import perturbed
from hf_normswap.diagnostics.stability import diverges
from hf_normswap.diagnostics.stream import final_shares, find_sinks
from hf_normswap.modeling.architectures import get_architecture

MEASURES = {
    "gradient_profile": gradient_profile,
    "residual_stream": residual_stream,
    "collapse": collapse,
    "sensitivity": lambda model, batches: sensitivity(model, batches, draws=1, sequences=2),
    "stability": lambda model, batches: stability(
        model, batches, ramp_steps=3, learning_rates=(1e-3,), warmups=(0.0,), steps=2
    ),
    "cost": lambda model, batches: cost(model, batches, repeats=1, decode_tokens=2),
}


@pytest.fixture(autouse=True)
def single_runs(monkeypatch):
    """What is timed runs once, so that tests take no longer than they have to, and always count the same."""
    monkeypatch.setattr(sys.modules[cost.__module__], "LEAST_SECONDS", 0.0)


def two_layers(case="gpt2", **fields):
    """A model of two layers in double precision without dropout, and a batch without padding."""
    return tiny_model(case, num_hidden_layers=2, initializer_range=0.1, **fields).double(), tiny_batch(padding=0)


def losses_by_hand(model, batch):
    """The mean loss of the next token, from logits."""
    logits = model(**batch).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


# definitions


def test_gradients_by_hand():
    model, batch = two_layers()
    other = tiny_batch(padding=0, seed=5)
    found = gradient_profile(model, [batch, other])
    twin = copy.deepcopy(model)
    loss = (losses_by_hand(twin, batch) + losses_by_hand(twin, other)) / 2
    loss.backward()
    groups = {"attention": ("attn",), "mlp": ("mlp",), "norms": ("ln_1", "ln_2")}
    for group, names in groups.items():
        for index, layer in enumerate(twin.transformer.h):
            parts = [one.grad.flatten() for name in names for one in getattr(layer, name).parameters()]
            assert getattr(found, group)[index] == pytest.approx(torch.cat(parts).norm().item(), rel=1e-5)
    rest = [one.grad.flatten() for name, one in twin.named_parameters() if ".h." not in name]
    assert found.outside == pytest.approx(torch.cat(rest).norm().item(), rel=1e-5)
    everything = torch.cat([one.grad.flatten() for one in twin.parameters()]).norm().item()
    assert math.hypot(*found.layers, found.outside) == pytest.approx(everything, rel=1e-5)
    assert found.loss == pytest.approx(loss.item()) and found.objective == "next token"

    squares = [0.0, 0.0]
    for one in (batch, other):
        states = twin(**one, output_hidden_states=True).hidden_states
        labels = one["input_ids"][:, 1:].flatten()
        logits = twin.lm_head(states[-1])[:, :-1].flatten(0, 1)
        for index, gradient in enumerate(
            torch.autograd.grad(nn.functional.cross_entropy(logits, labels) / 2, states[:2])
        ):
            squares[index] += gradient.pow(2).sum().item()
    assert found.stream == pytest.approx([math.sqrt(square) for square in squares], rel=1e-5)


def test_growth_is_a_regression():
    norms = [0.3, 0.5, 0.4, 0.9, 1.7]
    assert growth(norms) == pytest.approx(math.exp(scipy.stats.linregress(range(5), numpy.log(norms)).slope))
    assert growth([2.0, 1.0, 0.5]) == pytest.approx(0.5) and growth([4.0, 0.0, 1.0]) == pytest.approx(0.5)
    for nothing in ([0.0, 0.0], [1.0], [math.nan] * 3, [1.0, math.inf, 1.0]):
        assert math.isnan(growth(nothing))


@pytest.mark.parametrize("padding", [0, 3])
def test_stream_by_hand(padding):
    model, _ = two_layers("gpt2", n_inner=64)
    batch = tiny_batch(padding=padding)
    mask, added, skips = batch["attention_mask"].bool(), [], []
    for layer in model.transformer.h:  # the stock modules themselves
        layer.ln_1.register_forward_pre_hook(lambda _, inputs: skips.append(inputs[0][mask]))
        layer.ln_2.register_forward_pre_hook(lambda _, inputs: skips.append(inputs[0][mask]))
        layer.attn.register_forward_hook(lambda _, inputs, output: added.append(output[0][mask]))
        layer.mlp.register_forward_hook(lambda _, inputs, output: added.append(output[mask]))
    with torch.no_grad():
        model(**batch)
    found = residual_stream(model, [batch])
    skips, added = skips[:4], added[:4]  # hooks go on, in the measurement
    states = [*skips[::2], skips[-1] + added[-1]]
    rms = [numpy.sqrt(numpy.square(state.numpy()).mean(-1)) for state in states]
    assert found.rms_max == pytest.approx([values.max() for values in rms])
    for row, values in zip(found.rms_by_position, rms):
        assert row[0] == pytest.approx((values[0] + values[9 - padding]) / 2)  # of both first real tokens
    assert [(entry["layer"], entry["branch"]) for entry in found.branches] == [
        (0, "attn"),
        (0, "ffn"),
        (1, "attn"),
        (1, "ffn"),
    ]
    for entry, one, skip in zip(found.branches, added, skips):
        share = one.pow(2).sum(-1) / (one.pow(2).sum(-1) + skip.pow(2).sum(-1))
        assert entry["share"] == pytest.approx(share.mean().item())
    for change, before, after in zip(found.change, states, states[1:]):
        assert change == pytest.approx(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean().item())
    assert sum(entry["final_share"] for entry in found.branches) + found.embedding_share == pytest.approx(1)


def test_final_shares_are_admins_dependencies():
    # branches of unit variance: Post-Norm halves what was there with each, Pre-Norm has n + 1 equal parts
    assert final_shares([0.5] * 3) == ([0.125, 0.25, 0.5], 0.125)
    shares, rest = final_shares([1 / (k + 2) for k in range(9)])
    assert [*shares, rest] == pytest.approx([0.1] * 10)


def test_sinks():
    rms = torch.ones(3, 6)
    rms[1, 0], rms[2, 3], rms[2, 4] = 20.0, 30.0, 9.0
    token, place = torch.tensor([5, 6, 7, 5, 6, 7]), torch.tensor([0, 1, 2, 0, 1, 2])
    assert find_sinks(rms, token, place) == [{"position": 0, "token": 5, "count": 2, "ratio": 30.0, "layer": 2}]
    with torch.no_grad():
        model = tiny_model("gpt2")
        model.transformer.wte.weight[7] *= 100
    batch = {"input_ids": torch.tensor([[7, 8, 9, 10, 11, 12, 13]])}
    [sink] = residual_stream(model, [batch]).sinks
    assert (sink["position"], sink["token"], sink["layer"]) == (0, 7, 0) and sink["ratio"] > 30


@pytest.mark.parametrize("case, placement", [("gpt2", None), ("llama", "post"), ("bert", None), ("bert", "pre")])
def test_collapse_by_hand(case, placement):
    model = tiny_model(case)
    model = model if placement is None else convert_checkpoint(model, placement)
    batch = tiny_batch(padding=0)
    found = collapse(model, [batch])
    with torch.no_grad():
        states = [state.flatten(0, 1).numpy() for state in model(**batch, output_hidden_states=True).hidden_states]
    for index, (before, after) in enumerate(zip(states, states[1:-1])):
        cosines = numpy.array([1 - scipy.spatial.distance.cosine(a, b) for a, b in zip(before, after)])
        assert found.cosine[index] == pytest.approx(cosines.mean(), abs=1e-5)
        assert found.angular_distance[index] == pytest.approx((numpy.arccos(cosines) / math.pi).mean(), abs=1e-4)
    for rank, state in zip(found.effective_rank, states[:-1]):
        values = scipy.linalg.svdvals(state)
        assert rank == pytest.approx(numpy.exp(scipy.stats.entropy(values / values.sum())), rel=1e-4)
    if placement is None:  # a layer less in the list is the same
        for index in range(len(found.skip_loss)):
            shorter = copy.deepcopy(model)
            del attrgetter(get_architecture(model.config).layers)(shorter.base_model)[index]
            if case == "gpt2":
                loss = losses_by_hand(shorter, batch)
            else:
                loss = nn.functional.cross_entropy(shorter(**batch).logits.flatten(0, 1), batch["input_ids"].flatten())
            assert found.skip_loss[index] == pytest.approx(loss.item() - found.loss, abs=1e-5)


def test_effective_rank_in_closed_form():
    rank = effective_rank
    assert rank(torch.eye(7)) == pytest.approx(7) and rank(torch.ones(5, 3)) == pytest.approx(1, abs=1e-4)
    assert rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(4 / 3**0.75, rel=1e-6)  # H = ln 4 - 3/4 ln 3


def test_output_change_is_the_jacobians():
    """To first order E|Δf|² is ε² Σ rms(W)² |∂f/∂W|², the Jacobian taken entry by entry."""
    model, _ = two_layers(
        "llama", hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    found = sensitivity(model, [batch], draws=100, epsilon=1e-4, sequences=1)
    output = model.model(**batch)[0].flatten()
    names = [name for name, one in model.model.named_parameters() if "layers" in name and one.ndim == 2]
    weights = [one for name, one in model.model.named_parameters() if name in names]
    expected = 0.0
    for entry in output:
        for weight, gradient in zip(weights, torch.autograd.grad(entry, weights, retain_graph=True)):
            expected += (weight.pow(2).mean() * gradient.pow(2).sum()).item()
    assert found.output_change == pytest.approx(math.sqrt(expected) / output.norm().item(), rel=0.1)
    assert found.by_skip == {
        "identity": {"layers": 2, "output_change": found.output_change, "gradient_change": found.gradient_change}
    }


@pytest.mark.parametrize("shape", [(40, 50), (3, 40, 50)])
def test_noise_is_in_proportion_to_each_matrix(shape):
    """Also to that of each expert."""
    layer = nn.Module()
    sizes = torch.tensor([1e-3, 1.0, 1e3])[:, None, None] if len(shape) == 3 else 2.0
    layer.weight = nn.Parameter(sizes * torch.randn(shape))
    [(parameter, value)] = perturbed([layer], 0.1, seed=0)
    change = (value - parameter).pow(2).mean((-2, -1)) / parameter.pow(2).mean((-2, -1))
    assert change.sqrt().flatten().tolist() == pytest.approx([0.1] * change.numel(), rel=0.1)


def test_model_update_and_gradient_variance_by_hand():
    model, batch = two_layers()
    found = sensitivity(model, [batch], draws=1, learning_rate=1e-3)
    trained = copy.deepcopy(model)
    losses_by_hand(trained, batch).backward()
    torch.optim.Adam(trained.parameters(), lr=1e-3, eps=1e-20).step()
    with torch.no_grad():
        before, after = (one.transformer(**batch)[0] for one in (model, trained))
    assert found.model_update == pytest.approx(((after - before).norm() / before.norm()).item(), rel=1e-4)
    rows = []
    for row in range(2):
        trained = copy.deepcopy(model)
        losses_by_hand(trained, {key: value[row : row + 1] for key, value in batch.items()}).backward()
        rows.append(torch.cat([one.grad.flatten() for one in trained.parameters()]).numpy())
    expected = numpy.var(rows, axis=0, ddof=1).sum() / numpy.square(numpy.mean(rows, axis=0)).sum()
    assert found.gradient_variance == pytest.approx(expected, rel=1e-4)


def test_kinds_of_skips():
    model = convert_checkpoint(
        tiny_model("bert", num_hidden_layers=5), ["resi_dual", "post", "deepnorm", "pre", "gated"]
    )
    found = sensitivity(model, [tiny_batch()], draws=1, sequences=2).by_skip
    assert {kind: entry["layers"] for kind, entry in found.items()} == dict.fromkeys(
        ("two streams", "normed", "scaled", "identity", "learned"), 1
    )
    assert len({entry["output_change"] for entry in found.values()}) == 5


def test_spikes_and_divergence():
    noise = numpy.random.default_rng(0).normal(5, 0.1, 400)
    noise[[100, 300]] = 9.0
    expected = sum(
        noise[index] > noise[max(index - 50, 0) : index].mean() + 7 * noise[max(index - 50, 0) : index].std()
        for index in range(10, 400)
    )
    assert expected == 2
    assert spike_score(list(noise), window=50) == pytest.approx(expected / 390)
    assert spike_score([1.0] * 30) == 0 and spike_score([1.0] * 19 + [math.nan]) == pytest.approx(0.1)
    falling = [5.0 - 0.1 * step for step in range(30)]
    assert not diverges(falling) and diverges([*falling, math.inf]) and diverges([*falling, *[2.0, 4.0, 5.0]])
    assert not diverges([*falling, 3.0])  # one spike does not make an end


def test_stability_trains_a_copy_as_by_hand():
    model, batch = two_layers(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    found = stability(
        model, [batch], ramp_steps=25, lowest=1e-4, highest=100.0, learning_rates=(1e-2,), warmups=(0.0, 0.5), steps=8
    )
    for run, rates in zip(found.grid, ([1e-2] * 8, [2e-3, 4e-3, 6e-3, 8e-3] + [1e-2] * 4)):
        student, losses = copy.deepcopy(model), []
        optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.0)
        for rate in rates:
            loss = losses_by_hand(student, batch)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        assert run["losses"] == pytest.approx(losses, rel=1e-5) and run["loss"] == pytest.approx(sum(losses[-2:]) / 2)
    first, last = (run["loss"] for run in found.grid)
    assert found.warmup_gain == {"0.01": pytest.approx(first - last)} and found.grid[1]["warmup_steps"] == 4
    before = found.grid[0]["losses"][0]
    assert diverges([before, *found.losses]) and not diverges([before, *found.losses[:-1]])
    assert 1e-3 < found.max_learning_rate == found.learning_rates[-2] and len(found.losses) == len(
        found.learning_rates
    )


@pytest.mark.parametrize("lowest, expected", [(1e20, [0.0]), (1e-6, [1e-6]), (1e-12, [None])])
def test_the_last_step_that_left_the_loss_sound(lowest, expected):
    """Two steps, the second of which is 10⁹ times as large, and of 1 breaks any model; 10⁻³ does not."""
    model, batch = two_layers(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ramp = {"lowest": lowest, "highest": 1e9 * lowest, "ramp_steps": 2}
    found = stability(model, [batch], learning_rates=(), **ramp)
    assert [found.max_learning_rate] == expected


def test_stability_does_not_depend_on_the_order_of_the_text():
    """A model that knows one text by heart, and another not at all: which comes first must not look like progress."""
    model, easy = two_layers(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    hard = tiny_batch(padding=0, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        losses_by_hand(model, easy).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses_by_hand(model, easy) < 0.5 < 5 < losses_by_hand(model, hard)
    options = {"ramp_steps": 40, "learning_rates": (1e-6,), "warmups": (0.0,), "steps": 6}
    found = [stability(model, batches, **options) for batches in ([easy, hard], [hard, easy])]
    assert 0.2 < found[0].max_learning_rate / found[1].max_learning_rate < 5
    for one in found:
        assert one.max_learning_rate > 1e-4 and not one.grid[0]["diverged"]
        assert one.grid[0]["loss"] == pytest.approx(
            sum(losses_by_hand(model, b).item() for b in (easy, hard)) / 2, 0.05
        )


def test_int8_by_hand():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(6, 16, generator=generator), torch.randn(3, 16, generator=generator)
    scales = weight.abs().amax(1) / 127
    expected = torch.quantize_per_channel(weight, scales, torch.zeros(6, dtype=torch.long), 0, torch.qint8)
    assert torch.allclose(round_weight(weight), expected.dequantize(), atol=1e-6)
    assert torch.allclose(round_weight(weight.T, 0), expected.dequantize().T, atol=1e-6)
    scale = ((x.max() - x.min()) / 255).item()
    expected = torch.quantize_per_tensor(x, scale, round(-x.min().item() / scale), torch.quint8)
    assert torch.allclose(round_input(x), expected.dequantize(), atol=1e-5)


def test_int8_of_experts_by_hand():
    """The stock modules, with each matrix of each expert quantised by torch."""
    for case in ("mixtral", "qwen2_moe", "qwen3_moe"):
        model = tiny_model(case)
        with measuring(model) as twin:
            data, objective = prepare([tiny_batch()], twin, None, 100)
            before = mean_loss(twin, data, objective)
            with int8(twin):
                found = outputs(twin, data)
            with int8(twin, dynamic=True):
                assert before != mean_loss(twin, data, objective)
            assert mean_loss(twin, data, objective) == before
        for name, parameter in model.model.layers.named_parameters():
            if parameter.ndim == 1 or name.endswith("mlp.gate.weight"):  # the router
                continue
            for matrix in parameter.data if parameter.ndim == 3 else [parameter.data]:  # (outputs, inputs)
                scales = matrix.abs().amax(1) / 127
                zeros = torch.zeros(len(matrix), dtype=torch.long)
                matrix.copy_(torch.quantize_per_channel(matrix, scales, zeros, 0, torch.qint8).dequantize())
        with torch.no_grad():
            expected = model.model(**tiny_batch())[0][tiny_batch()["attention_mask"].bool()]
        assert torch.allclose(found, expected, atol=1e-4), case


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_int8_of_what_enters_experts(implementation):
    """What the matrices of experts read has 256 levels."""
    model = tiny_model("mixtral")
    model.set_experts_implementation(implementation)
    batch, seen = tiny_batch(padding=0), []
    with measuring(model) as twin:
        experts = layers_of(twin)[0].mlp.experts
        plain, x = experts._apply_gate, torch.randn(50, 2 * 48)
        with int8(twin, dynamic=True):
            experts.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0].unique())))
            twin(**batch)
            assert len(experts._apply_gate(x).unique()) <= 256 < len(plain(x).unique())
        assert "_apply_gate" not in vars(experts)
        twin(**batch)
    assert seen[0] <= 256 < seen[1]


def test_where_the_inputs_of_experts_are():
    """A matrix is of (outputs, inputs) or the other way round, as Transformers' own modules say."""
    found = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(
        transformers.GptOssConfig(hidden_size=8, intermediate_size=24, num_local_experts=3)
    )
    modules = {"gpt_oss": (found, 8, 24)}
    for case, sizes in {"mixtral": (32, 48), "qwen2_moe": (32, 24), "qwen3_moe": (32, 24)}.items():
        modules[case] = tiny_model(case).model.layers[0].mlp.experts, *sizes
    for module, hidden, intermediate in modules.values():
        read = {id(weight): weight.shape[inputs] for weight, inputs in matrices_of(module)}
        assert read == {id(module.gate_up_proj): hidden, id(module.down_proj): intermediate}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_int8_of_small_numbers(dtype):
    """Scales below what the type holds, and rows of zeros, as in a fresh LoRA."""
    for size in (1.0, 1e-5, 0.0):
        x = size * torch.linspace(-1, 1, 64).reshape(4, 16).to(dtype)
        x[2] = 0
        for rounded in (round_weight(x), round_input(x)):
            assert rounded.isfinite().all() and (rounded[2] == 0).all()
            assert (rounded - x).abs().max() <= 0.01 * size
        assert round_input(x).dtype == dtype
    model = tiny_model("llama").to(dtype)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] = 0
    models = [model]
    if dtype == torch.float16:
        models.append(peft_model(tiny_model("llama")).to(dtype))
    for one in models:
        [found] = cost(one, [tiny_batch()], repeats=1, decode_tokens=0).models.values()
        assert all(map(math.isfinite, (found["loss_int8_weights"], found["loss_int8_dynamic"])))


@pytest.mark.filterwarnings("ignore")
def test_int8_is_near_torchs_dynamic_quantisation():
    model = tiny_model("bert", auto="AutoModel", initializer_range=0.1)
    scheme = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
    quantized = copy.deepcopy(model)
    torch.ao.quantization.quantize_dynamic(quantized.encoder, scheme, inplace=True)
    with measuring(model) as twin:
        data, _ = prepare([tiny_batch()], twin, None, 100)
        before = outputs(twin, data)
        with int8(twin, dynamic=True):
            ours = outputs(twin, data) - before
        assert torch.equal(outputs(twin, data), before)
    with torch.no_grad():
        theirs = quantized(**tiny_batch())[0][tiny_batch()["attention_mask"].bool()] - before
    # the kernel rounds inputs to 128 levels on some processors, so that errors are alike and not the same
    assert 0.4 < ours.norm() / theirs.norm() < 1.5 and ours.norm() < 0.1 * before.norm()


def test_times_are_compared_within_rounds(monkeypatch):
    monkeypatch.setattr(sys.modules[cost.__module__], "LEAST_SECONDS", 0.1)
    clock = iter([9, 9, *range(1, 9)])  # the first round says only how long a run takes
    times = interleaved({"a": lambda: next(clock), "b": lambda: next(clock)}, 4)
    assert sorted(times["a"] + times["b"]) == list(range(1, 9)) and len(times["a"]) == 4
    findings: dict = {"a": {}, "b": {}}
    record(findings, "prefill", {"a": [0.1] * 4, "b": [0.2, 0.3, 0.2, 0.3]}, 50)
    assert findings["b"]["prefill"] == {
        "milliseconds": pytest.approx(200),
        "tokens_per_second": pytest.approx(250),
        "ratio": pytest.approx(2.5),
        "spread": pytest.approx(0.5),
    }
    record(findings, "prefill", {"a": [0.1, 0.2, 0.1, 0.1]}, 50)
    assert (findings["a"]["prefill"]["ratio"], findings["a"]["prefill"]["spread"]) == (1, pytest.approx(0.75))
    clock = iter([0.05, 0.04, *range(1, 100)])  # short runs are repeated, three times here, behind one that warms up
    assert interleaved({"a": lambda: next(clock)}, 2) == {"a": [2.0, 5.0]}


@pytest.mark.parametrize("count", [5, 8, 10, 20, 40])
def test_spread_of_a_median(count):
    """It is the interval of the sign test, and holds the median of a skewed distribution as often as it says."""
    test = scipy.stats.quantile_test(numpy.arange(count, dtype=float), q=0, p=0.5)
    interval = test.confidence_interval(0.9)
    assert spread_of_median(list(numpy.arange(count))) <= (interval.high - interval.low) / 2
    rows = numpy.sort(numpy.random.default_rng(0).lognormal(size=(4000, count)), axis=1)
    found = spread_of_median(list(rows[0]))
    [cut] = [one for one in range(count // 2) if (rows[0][-1 - one] - rows[0][one]) / 2 == found]
    assert ((rows[:, cut] <= 1) & (rows[:, -1 - cut] >= 1)).mean() >= 0.89  # the median is 1
    if cut + 1 < count / 2:
        assert ((rows[:, cut + 1] <= 1) & (rows[:, -2 - cut] >= 1)).mean() < 0.91


def test_cost_side_by_side():
    model = tiny_model("llama")
    found = cost(model, [tiny_batch()], placements=["post", "ResiDual"], repeats=2, decode_tokens=2)
    assert list(found.models) == ["as it is", "post", "resi_dual"]
    size = sum(one.nbytes for one in model.parameters())
    assert [one["parameter_bytes"] - size for one in found.models.values()] == [0, 0, 32 * 4]  # the dual norm
    for one in found.models.values():
        assert one["prefill"]["milliseconds"] > 0 and one["decode"]["ratio"] > 0
        assert 0 < one["output_change_int8_weights"] < one["output_change_int8_dynamic"] < 0.3
    compiled = cost(model, [tiny_batch()], repeats=1, decode_tokens=0, compile_backend="eager", quantization=False)
    [one] = compiled.models.values()
    assert one["compiled_prefill"]["ratio"] == 1 and "decode" not in one and "loss" not in one
    with measuring(model) as twin:
        sizes, inner = [], []
        layers_of(twin)[0].register_forward_hook(lambda module, inputs, output: inner.append(weakref.ref(output)))
        for rows in (2, 4):
            [batch], objective = prepare([tiny_batch(rows, padding=0)], twin, None, 1000)
            sizes.append(activation_bytes(twin, batch, objective))
    assert 1.8 < sizes[1] / sizes[0] < 2  # all but positions grow with the batch
    gc.collect()
    assert len(inner) >= 2 and all(one() is None for one in inner)  # the graphs are gone


@pytest.mark.parametrize(
    "case, auto, batch, objective",
    [
        ("llama", "AutoModelForCausalLM", {}, "next token"),
        ("bert", "AutoModelForMaskedLM", {}, "same tokens"),
        ("bert", "AutoModel", {}, "random target"),
        ("gpt2", "AutoModelForSequenceClassification", {"labels": torch.tensor([0, 1])}, "labels"),
        ("bert", "AutoModelForSequenceClassification", {}, "random target"),
    ],
)
def test_objectives(case, auto, batch, objective):
    model = tiny_model(case, auto)
    found = gradient_profile(model, [tiny_batch() | batch])
    assert found.objective == objective and found.loss > 0 and min(found.layers) > 0
    if objective == "labels":
        assert found.loss == pytest.approx(model(**tiny_batch(), **batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "case, length, decodes", [("gpt2", 64, True), ("gpt2", 63, True), ("opt", 64, True), ("llama", 64, True)]
)
def test_decoding_stays_within_the_positions(case, length, decodes):
    ids = torch.randint(4, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
    [found] = cost(tiny_model(case), [{"input_ids": ids}], repeats=1, quantization=False).models.values()
    assert ("decode" in found) is decodes
    with measuring(tiny_model(case)) as twin:
        [batch], _ = prepare([{"input_ids": ids}], twin, None, 1000)
        assert prompt_of(twin, batch, 8)["attention_mask"].shape == (2, 56) and prompt_of(twin, batch, 64) is None


def test_masked_tokens_are_hidden():
    class Tokenizer:
        mask_token_id = 4

    model = tiny_model("bert")
    with measuring(model) as twin:
        [batch], objective = prepare([tiny_batch(8, 20)], twin, Tokenizer(), 1000)
    chosen = batch["labels"] != -100
    assert objective == "masked tokens" and (batch["input_ids"][chosen] == 4).all() and 5 < chosen.sum() < 50
    assert not (chosen & ~tiny_batch(8, 20)["attention_mask"].bool()).any()


IDS = tiny_batch(padding=0)["input_ids"]
NOTHING = torch.full_like(IDS, -100)
LAST = torch.zeros_like(IDS).index_fill(1, torch.tensor(IDS.shape[1] - 1), 1)  # rows of one token
ONLY_FIRST = IDS.where(torch.arange(IDS.shape[1]) == 0, -100)  # which no model predicts from the left
GOOD = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize(
    "case, batches, objective, kept",
    [
        ("llama", [GOOD, GOOD | {"labels": NOTHING}], "labels", [0]),
        ("llama", [GOOD | {"labels": ONLY_FIRST}, GOOD], "labels", [1]),
        ("bert", [GOOD | {"labels": ONLY_FIRST}, GOOD], "labels", [0, 1]),
        ("llama", [{"input_ids": IDS, "attention_mask": LAST}, {"input_ids": IDS}], "next token", [1]),
        ("llama", [GOOD | {"labels": NOTHING}] * 2, "random target", [0, 1]),
        ("llama", [{"input_ids": IDS, "attention_mask": LAST}], "random target", [0]),
        ("llama", [{"input_ids": IDS[:1, :1]}], "random target", [0]),
        ("bert", [{"input_ids": IDS[:1, :3]}], "masked tokens", [0]),
        ("bert", [tiny_batch(1, 40, padding=38)], "masked tokens", [0]),
        ("bert", [{"input_ids": IDS[:1, :1]}, {"input_ids": IDS, "attention_mask": LAST}], "masked tokens", [0, 1]),
    ],
)
def test_batches_without_anything_to_predict(case, batches, objective, kept):
    """They are left out, and no loss is `nan`."""

    class Tokenizer:
        mask_token_id = 4

    with measuring(tiny_model(case)) as twin:
        data, found = prepare(batches, twin, Tokenizer(), 1000)
        losses = [loss_of(twin, batch, found).item() for batch in data]
    assert found == objective and all(map(math.isfinite, losses))
    assert [batch["input_ids"].shape for batch in data] == [batches[index]["input_ids"].shape for index in kept]
    for batch in data:
        assert objective != "masked tokens" or not ((batch["labels"] != -100) & ~batch["attention_mask"].bool()).any()
    found = gradient_profile(tiny_model(case), batches, tokenizer=Tokenizer())
    assert math.isfinite(found.loss) and all(map(math.isfinite, (*found.layers, found.growth)))


def test_history_along_training(tmp_path):
    model = tiny_model("gpt2").train()
    history = GradientHistory(model, every=2)
    losses_by_hand(model, tiny_batch()).backward()
    for _ in range(3):
        history.step()
    assert history.steps == [0, 2] and history.layers[0] == history.layers[1]
    wanted = torch.cat([one.grad.flatten() for one in model.transformer.h[1].attn.parameters()]).norm()
    assert history.attention[0][1] == pytest.approx(wanted.item(), rel=1e-5)
    assert history.growth[0] == pytest.approx(growth(history.layers[0]))

    model.zero_grad()
    trained = GradientHistory(convert_checkpoint(model, "post"))
    rows = [{"input_ids": row, "labels": row} for row in tiny_batch(6, padding=0)["input_ids"]]
    options = {"report_to": "none", "use_cpu": True, "max_steps": 3, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=2, **options)
    transformers.Trainer(trained.model, arguments, train_dataset=rows, callbacks=[trained]).train()
    assert trained.steps == [0, 1, 2] and min(min(norms) for norms in trained.mlp) > 0
    json.dumps(trained.to_dict(), allow_nan=False)
    with pytest.raises(NormSwapError, match="every"):
        GradientHistory(model, every=0)


# order


def random_model(family, placement, seed):
    """24 layers of width 64, initialised as in the papers: Xavier, or what DeepNorm prescribes."""
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 24, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    sizes |= {"norm_placement": placement, "max_position_embeddings": 64}
    if family == "opt":
        sizes |= {"ffn_dim": 256, "word_embed_proj_dim": 64, "init_std": 1.0}
        model = AutoModelForCausalLM.from_config(hf_normswap.NormSwapOPTConfig(**sizes))
    else:
        sizes |= {"intermediate_size": 256, "hidden_act": "relu"}
        model = AutoModelForMaskedLM.from_config(hf_normswap.NormSwapBertConfig(**sizes))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layer" in name and placement != "deepnorm":
            nn.init.xavier_normal_(parameter)
        if any(part in name for part in ("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
            nn.init.zeros_(parameter)  # as Xiong et al. (section 3.2) assume
    ids = torch.randint(4, 128, (4, 16), generator=torch.Generator().manual_seed(seed))
    return model, [{"input_ids": ids}]


@pytest.mark.parametrize(
    "family, seeds",
    [
        ("opt", (0, 1, 2)),
        pytest.param("opt", range(3, 8), marks=pytest.mark.slow),
        pytest.param("bert", range(5), marks=pytest.mark.slow),
    ],
)
def test_the_order_of_the_papers(family, seeds):
    """Ratios of measures of two placements, in the geometric mean over the seeds, exceed a margin."""
    names = ("post", "resi_dual", "pre", "deepnorm")
    found: dict = {name: {} for name in names}
    for name in names:
        for seed in seeds:
            model, batches = random_model(family, name, seed)
            gradients = gradient_profile(model, batches)
            turned = collapse(model, batches, skip_layers=False).angular_distance
            moved = sensitivity(model, batches, draws=1, sequences=1, each_layer=False)
            shares = [entry["final_share"] for entry in residual_stream(model, batches).branches]
            measures = {
                "last gradient": gradients.mlp[-1],  # theorem 1 of Xiong et al.
                "growth": gradients.growth,
                "turn above": sum(turned[12:]) / 12,  # Mix-LN
                "turn kept": sum(turned[12:]) / sum(turned[1:12]),
                "output change": moved.output_change,  # Admin
                "model update": moved.model_update,  # DeepNet
                "last shares": sum(shares[-8:]),
            }
            for key, value in measures.items():
                found[name].setdefault(key, []).append(value)

    def exceeds(key, larger, smaller, margin):
        """In the geometric mean over the seeds."""
        ratio = scipy.stats.gmean(found[larger][key]) / scipy.stats.gmean(found[smaller][key])
        assert ratio > margin, (
            f"{key}: {larger} / {smaller} is {ratio:.3f}, {found[larger][key]}, {found[smaller][key]}"
        )

    for normed in ("post", "resi_dual"):
        exceeds("last gradient", normed, "pre", 1.7)
        exceeds("growth", normed, "pre", 1.01)
        exceeds("turn above", normed, "pre", 2.5)
        exceeds("turn kept", normed, "pre", 1.3)
        exceeds("output change", normed, "pre", 1.2)
        exceeds("model update", normed, "pre", 1.5)
        exceeds("last shares", normed, "pre", 2.0)
    for key in ("last gradient", "output change", "model update"):
        exceeds(key, "pre", "deepnorm", 1.3)
    for value in found["deepnorm"]["growth"]:
        assert value == pytest.approx(1, abs=0.01)
    exceeds("growth", "deepnorm", "pre", 1.02)
    exceeds("turn kept", "deepnorm", "pre", 1.2)


# nothing changes


def peft_model(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=["input_layernorm"]))


def dispatched(model):
    accelerate = pytest.importorskip("accelerate")
    name = get_architecture(model.config).layers.split(".")[-1]
    layers = {f"model.{name}.{index}": "cpu" for index in range(3)}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, layers | places, main_device="cpu", force_hooks=True)


MODELS = {
    "stock": lambda: tiny_model("llama"),
    "post-norm stock": lambda: tiny_model("bert"),
    "converted": lambda: convert_checkpoint(tiny_model("bert"), "pre"),
    "two streams": lambda: convert_checkpoint(tiny_model("gpt2"), "resi_dual"),
    "adapted": lambda: peft_model(tiny_model("llama")),
    "converted and adapted": lambda: peft_model(convert_checkpoint(tiny_model("llama"), "admin")),
    "bf16": lambda: convert_checkpoint(tiny_model("llama"), "post").to(torch.bfloat16),
    "dispatched": lambda: dispatched(tiny_model("llama")),
    "converted and dispatched": lambda: dispatched(convert_checkpoint(tiny_model("llama"), "resi_dual")),
}
HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


def everything(model):
    """All that could have changed in a model and around it, comparable."""
    state = [
        (name, id(one), one.data_ptr(), one.detach().clone(), one.requires_grad, one.grad, one._version)
        for name, one in (*model.named_parameters(), *model.named_buffers())
    ]
    modules = [
        (
            name,
            id(module),
            type(module),
            module.training,
            sorted(vars(module)),
            *(list(vars(module)[one]) for one in HOOKS),
        )
        for name, module in model.named_modules()
    ]
    rng = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    return state, modules, str(model.config.to_dict()), rng, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def same(before, after):
    if isinstance(before, (tuple, list)):
        return len(before) == len(after) and all(map(same, before, after))
    if isinstance(before, torch.Tensor):
        return before is after or (before.dtype == after.dtype and torch.equal(before, after))
    return before == after


class Counter:
    """Counts the linear maps, and interrupts at one of them."""

    def __init__(self, monkeypatch):
        self.calls, self.stop = 0, None
        for cls in (nn.Linear, transformers.pytorch_utils.Conv1D):
            monkeypatch.setattr(cls, "forward", self.wrap(cls.forward))

    def wrap(self, forward):
        def counted(*args, **kwargs):
            self.calls += 1
            if self.calls == self.stop:
                raise KeyboardInterrupt
            return forward(*args, **kwargs)

        return counted


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_changes(kind, monkeypatch):
    model = MODELS[kind]()
    model.train()
    next(
        iter(attrgetter(get_architecture(model.config).layers)(hf_normswap.conversion.unwrap(model).base_model))
    ).eval()
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in trained[::2]:
        one.grad = torch.randn_like(one)
    model(**tiny_batch())  # which makes caches of its own
    torch.manual_seed(7)
    before = everything(model)
    counter = Counter(monkeypatch)
    for name, measure in MEASURES.items():
        counter.calls, counter.stop = 0, None
        report = measure(model, [tiny_batch()])
        assert same(before, everything(model)), name
        json.dumps(report.to_dict(), allow_nan=False)
        assert json.loads(json.dumps(report.to_dict())) == plain(report.to_dict())
        counter.calls, counter.stop = 0, counter.calls // 2
        with pytest.raises(KeyboardInterrupt):
            measure(model, [tiny_batch()])
        assert same(before, everything(model)), f"{name}, interrupted"
    with torch.inference_mode():
        assert gradient_profile(model, [tiny_batch()]).loss > 0


@pytest.mark.parametrize("case", ["llama", "bert", "gpt2"])
def test_no_hooks_stay_behind_a_comparison(case, monkeypatch):
    """Transformers' own hooks for hidden states, which it installs once and leaves, go again; those of the user stay."""
    model, seen = tiny_model(case), []
    layers_of(model)[0].register_forward_hook(lambda *_: seen.append(1))
    converted = convert_checkpoint(model, "post" if case != "bert" else "pre")
    before = [everything(one) for one in (model, converted)]
    found = hf_normswap.fidelity(model, converted, [tiny_batch()])
    assert seen and same(before, [everything(one) for one in (model, converted)])
    counter = Counter(monkeypatch)
    counter.stop = 5
    with pytest.raises(KeyboardInterrupt):
        hf_normswap.fidelity(model, converted, [tiny_batch()])
    counter.stop = None
    assert same(before, [everything(one) for one in (model, converted)])
    assert hf_normswap.fidelity(model, converted, [tiny_batch()]) == found
    states = model(**tiny_batch(), output_hidden_states=True).hidden_states
    assert len(states) == len(layers_of(model)) + 1
    hf_normswap.fidelity(model, converted, [tiny_batch()])
    assert len(model(**tiny_batch(), output_hidden_states=True).hidden_states) == len(states)  # not twice


@pytest.mark.parametrize("placement", [None, "pre", "resi_dual"])
def test_offloaded_models(placement, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("gpt2")
    model = model if placement is None else convert_checkpoint(model, placement)
    expected = [measure(model, [tiny_batch()]) for measure in (residual_stream, collapse)]
    places = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.h.0": "cpu", "transformer.h.1": "disk"}
    places |= {"transformer.h.2": "disk", "transformer.ln_f": "disk", "lm_head": "cpu"}
    model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    before = everything_offloaded(model)
    assert any(one.is_meta for one in model.parameters())
    for measure, wanted in zip((residual_stream, collapse), expected):
        assert measure(model, [tiny_batch()]) == wanted
    assert cost(model, [tiny_batch()], repeats=1).models["as it is"]["activation_bytes"] is None
    for name in ("gradient_profile", "sensitivity", "stability"):
        with pytest.raises(NormSwapError, match="offloaded"):
            MEASURES[name](model, [tiny_batch()])
    assert everything_offloaded(model) == before


def everything_offloaded(model):
    return [(name, id(one), one.device.type) for name, one in model.named_parameters()]


def test_reports_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    model = convert_checkpoint(tiny_model("llama"), "resi_dual")
    history = GradientHistory(model)
    for name, report in [(name, measure(model, [tiny_batch()])) for name, measure in MEASURES.items()] + [
        ("none", history)
    ]:
        with contextlib.suppress(FileNotFoundError):
            report.plot(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert VOCABULARY == model.config.vocab_size


def test_what_comes_with_a_batch():
    """Positions for all rows at once, in whatever precision the caller computes."""
    model = tiny_model("llama")
    batches = {
        "plain": [{"input_ids": IDS}],
        "positions": [{"input_ids": IDS, "position_ids": torch.arange(IDS.shape[1])[None]}],
    }
    found = {name: sensitivity(model, data, draws=1, each_layer=False).to_dict() for name, data in batches.items()}
    assert found["plain"] == found["positions"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sensitivity(model, batches["plain"], draws=1, each_layer=False).to_dict() == found["plain"]


def test_reports_in_one_line():
    history = GradientHistory(tiny_model("gpt2"))
    for report in (*(measure(history.model, [tiny_batch()]) for measure in MEASURES.values()), history):
        text = repr(report)
        assert text == str(report) and text.startswith(type(report).__name__) and "\n" not in text and len(text) < 500
    found = collapse(history.model, [tiny_batch()])
    assert f"loss={found.loss:.4g}, cosine=[{found.cosine[0]:.4g}, …, {found.cosine[-1]:.4g}]" in repr(found)


def test_refusals():
    class Other(nn.Linear):
        pass

    with pytest.raises(NormSwapError, match="expected a Transformers model"):
        collapse(Other(2, 2))
    with pytest.raises(NormSwapError, match="frozen"):
        gradient_profile(tiny_model("gpt2").requires_grad_(False), [tiny_batch()])
    with pytest.raises(NormSwapError, match="1 of 2 batches have `labels`"):
        gradient_profile(tiny_model("llama"), [GOOD, {"input_ids": IDS}])
    with pytest.raises(NormSwapError, match="shape"):
        residual_stream(tiny_model("llama"), [{"input_ids": IDS, "attention_mask": torch.ones(2, 1, 9, 9).tril()}])
    peft = pytest.importorskip("peft")
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        with pytest.raises(NormSwapError, match=f"{kind.__name__} puts virtual tokens"):
            collapse(peft.get_peft_model(tiny_model("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)), IDS)
    with pytest.raises(NormSwapError, match="ramp"):
        stability(tiny_model("gpt2"), [tiny_batch()], lowest=1.0, highest=0.1)
