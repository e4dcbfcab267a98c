"""The morph leads from the exact start to the plain corner, and goes on where it was when training is resumed."""

import pytest
import torch
from tiny_models import TARGETS, TINY, tiny_batch, tiny_model
from transformers import Trainer, TrainingArguments

from hf_normswap import NormMorph, NormSwapError, convert_checkpoint, list_moves
from hf_normswap.morph import SCHEDULES


def logits(model):
    with torch.no_grad():
        return model(**tiny_batch()).logits


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", TINY)
def test_the_end_is_the_plain_corner(case, target):
    model = tiny_model(case)
    start = convert_checkpoint(model, TARGETS[target], warm_start="exact")
    corner = convert_checkpoint(model, TARGETS[target])
    moves = list_moves(start)
    assert (start.config.norm_target is None) == (not moves)
    morph = NormMorph(start, steps=2)
    morph.step()
    if moves:
        halfway = [(move.start + move.target) / 2 for move in moves]
        assert [move.tensor.mean().item() for move in moves] == pytest.approx(halfway, rel=1e-6)
        assert not torch.equal(logits(start), logits(model))
    morph.step()
    arrived = logits(start)
    assert morph.finish() is start
    assert torch.allclose(logits(start), arrived, rtol=1e-5, atol=1e-5 * arrived.abs().max())
    configs = [{**one.config.to_dict(), "norm_conversion": None} for one in (start, corner)]  # how it came there
    assert configs[0] == configs[1]
    for kind in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(start, kind)()] == [name for name, _ in getattr(corner, kind)()]
    changed = [
        name for name, tensor in corner.state_dict().items() if not torch.equal(tensor, start.state_dict()[name])
    ]
    if not changed:
        assert torch.equal(logits(start), logits(corner))
    else:  # a new second stream is closed; a skip that stays normed takes its new gain at once
        assert "dual" in target or "deepnorm" in target or target == "custom", changed


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_lead_from_zero_to_one(name):
    schedule = SCHEDULES[name]
    for branches in (1, 2, 60):
        for branch in range(branches):
            way = [schedule(step / 100, branch, branches) for step in range(101)]
            assert way[0] == 0 and way[-1] == 1 and way == sorted(way)
    middle = [schedule(0.5, branch, 60) for branch in range(60)]
    order = {"bottom_up": 1, "one_by_one": 1, "top_down": -1}.get(name, 0)
    assert (middle[0] - middle[-1]) * order > 0 if order else middle[0] == middle[-1] == pytest.approx(0.5)


def train(folder, stop=None, resume=None):
    """Eight steps of training along a morph of six; `stop` interrupts it."""
    model = convert_checkpoint(tiny_model("gpt2"), "sandwich", warm_start="exact")
    morph = NormMorph(model, steps=6, schedule="bottom_up")
    rows = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(4, 96, (8, 7), generator=torch.Generator().manual_seed(3))
    ]
    arguments = TrainingArguments(
        folder, max_steps=8, per_device_train_batch_size=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[morph])
    if stop is not None:

        class Stop(type(morph).__mro__[1]):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = state.global_step >= stop

        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    return model, morph


def test_trainer_resumes_a_morph_bit_for_bit(tmp_path):
    whole, morph = train(tmp_path / "whole")
    assert morph.position == 8
    assert all(move.tensor.item() == move.target for move in morph.moves)
    for stop in (1, 4, 7):
        folder = tmp_path / f"stopped-{stop}"
        half, morph = train(folder, stop=stop)
        assert morph.position == stop
        resumed, _ = train(folder, resume=True)
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
        )


def test_a_checkpoint_on_the_way_is_a_model(tmp_path):
    model = convert_checkpoint(tiny_model("llama"), "post", warm_start="exact")
    morph = NormMorph(model, steps=4)
    morph.step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    again = NormMorph(loaded, steps=4)
    again.load_state_dict(morph.state_dict())
    morph.step(), again.step()
    assert torch.equal(logits(loaded), logits(model))


def test_a_morph_moves_a_model_that_was_cast_compiled_or_wrapped():
    from peft import LoraConfig, get_peft_model

    model = convert_checkpoint(tiny_model("llama"), "post", warm_start="exact")
    morph = NormMorph(model, steps=4)
    model.to(torch.bfloat16)
    morph.step()
    assert all(move.tensor.item() == 0.25 for move in morph.moves)
    for wrapped in (torch.compile(model), get_peft_model(model, LoraConfig(target_modules=["q_proj"]))):
        assert len(list_moves(wrapped)) == len(morph.moves)
        NormMorph(wrapped, steps=2).step()
        assert all(move.tensor.item() == 0.5 for move in morph.moves)


def test_a_morph_has_to_be_finished_before_other_conversions():
    model = convert_checkpoint(tiny_model("llama"), "post", warm_start="exact")
    for options in ({"layers": [0]}, {"warm_start": "calibrated", "calibration": torch.zeros(4, 8).long()}):
        with pytest.raises(NormSwapError, match="finish"):
            convert_checkpoint(model, "pre", **options)
    assert convert_checkpoint(model, "sandwich").config.norm_target is None


def test_refusals():
    model = tiny_model("llama")
    with pytest.raises(NormSwapError, match="not a converted model"):
        NormMorph(model, steps=3)
    converted = convert_checkpoint(model, "post", warm_start="exact")
    with pytest.raises(NormSwapError, match="Available: linear, cosine"):
        NormMorph(converted, steps=3, schedule="quadratic")
    with pytest.raises(NormSwapError, match="between 0 and 1"):
        NormMorph(converted, steps=3, schedule=lambda progress, branch, branches: 2.0).step()
    with pytest.raises(NormSwapError, match="finish"):
        convert_checkpoint(converted, "pre", warm_start="exact")
    with pytest.raises(NormSwapError, match="norm_gate"):
        convert_checkpoint(model, "gated", warm_start="exact", norm_gate=0.5)
