"""Which placement: what wins when, that the account adds up, that measurements overrule, and that the advice can be followed."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from test_advice import SOURCE
from tiny_models import tiny_batch, tiny_config, tiny_model
from typer.testing import CliRunner

from hf_normswap import NormSwapError, advise, convert_checkpoint, list_moves, list_placements
from hf_normswap.advice import COSTS, FEW, MEASURES, MUCH, PRIORITIES, PURPOSES, THUMB, Facts, as_results
from hf_normswap.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def config(case, depth):
    return tiny_config(case, num_hidden_layers=depth)


def by_name(advice):
    return {"hybrid" if isinstance(one.placement, list) else one.placement: one for one in advice}


@pytest.mark.parametrize(
    "case, depth, arguments, best, warm_start",
    [
        ("bert", 6, {}, "post", "none"),  # to stay wins
        ("bert", 6, {"num_samples": 500}, "post", "none"),
        ("bert", 12, {}, "deepnorm", "exact"),  # what costs nothing and trains better, wins
        ("bert", 12, {"priorities": ["int8"]}, "deepnorm", "exact"),
        ("bert", 48, {}, "deepnorm", "exact"),
        ("gpt2", 6, {}, "pre", "none"),
        ("gpt2", 12, {}, "pre", "none"),
        ("llama", 30, {}, "pre", "none"),
        ("llama", 30, {"num_samples": 100, "budget": 0}, "pre", "none"),
        ("llama", 30, {"priorities": ["latency"]}, "pre", "none"),
        ("gemma2", 26, {}, "sandwich", "none"),
        ("bert", 6, {"task": "pretraining"}, "post", "none"),  # nothing to lose
        ("llama", 48, {"task": "pretraining"}, "peri", "none"),
        ("bert", 48, {"task": "pretraining"}, "deepnorm", "none"),
    ],
)
def test_what_wins(case, depth, arguments, best, warm_start):
    first = advise(config(case, depth), **arguments)[0]
    assert (first.placement, first.warm_start) == (best, warm_start)
    assert first.keep == ("keep it" in str(first))
    assert first.keep == ("nothing is lost and nothing has to be healed" in str(first))


@pytest.mark.parametrize("case", ["bert", "llama", "olmo2"])
@pytest.mark.parametrize("depth", [3, 12, 24, 25, 60])
@pytest.mark.parametrize("task", PURPOSES)
def test_the_account(case, depth, task):
    for arguments in ({}, {"num_samples": 100, "budget": 20, "priorities": PRIORITIES}, {"num_samples": 2 * MUCH}):
        advice = advise(config(case, depth), task, **arguments)
        assert {*by_name(advice)} == {*list_placements()} | ({"hybrid"} if depth > 3 else set())
        scores = [one.score for one in advice]
        assert scores == sorted(scores, reverse=True) and sum(one.keep for one in advice) == 1
        for one in advice:
            assert one.score == pytest.approx(sum(reason.points for reason in one.reasons))
            assert one.reasons[0].topic == "conversion" and one.reasons[0].points <= 0
            assert (one.reasons[0].points == 0) or not (one.keep or task == "pretraining")
            assert not one.heal_steps or one.warm_start == "calibrated"
            assert one.settings.learning_rate > 0 and one.settings.reasons
        json.dumps(advice.to_dict(), allow_nan=False)
        scores = {name: one.score for name, one in by_name(advice).items()}
        if depth > 24:
            assert all(
                scores["post"] < scores[name]
                for name in ("deepnorm", "resi_dual", "pre" if case == "llama" else "admin")
            )


@pytest.mark.parametrize("row", THUMB, ids=[f"{row[0]}-{n}" for n, row in enumerate(THUMB)])
def test_each_rule_of_thumb(row):
    """It holds of some models and not of others, changes the score by its points, and names a source."""
    topic, holds, points, why, source = row
    assert SOURCE.search(source) or re.search(r"measured here", source)
    assert points and not {*points} - {*list_placements(), "native", "hybrid"}
    found = set()
    for depth in (6, 12, 24, 25):
        for purpose in ("generation", "understanding", "multi_task", "vision"):
            for rows in (math.nan, FEW - 1, FEW, 2 * MUCH):
                for budget in (None, 999, 1000):
                    for priorities in ((), PRIORITIES):
                        found.add(holds(Facts(depth, purpose, rows, budget, priorities, "pre", "pre", False)))
    assert found == {False, True}


@pytest.mark.parametrize(
    "case, target, steps", [("llama", "post", 100), ("bert", "pre", 60), ("bert", "sandwich", 60)]
)
def test_a_budget_for_healing_is_worth_a_point(case, target, steps):
    rich, poor = (by_name(advise(config(case, 12), budget=budget))[target] for budget in (steps, steps - 1))
    assert rich.reasons[0].points == poor.reasons[0].points + 1
    assert (rich.heal_steps, poor.heal_steps) == (steps, 0)
    assert f"to heal takes {steps} steps, and there are {steps - 1}" in poor.reasons[0].text


def test_costs_are_the_figures_of_the_readme():
    for row in COSTS:
        for figure in re.findall(r"\d\.\d{3}", row[5]):
            assert figure in README, figure
    assert re.findall(r"\d\.\d{3}", " ".join(row[5] for row in COSTS))


@pytest.mark.parametrize("case", ["bert", "llama", "gemma2"])
def test_the_advice_can_be_followed(case):
    model = tiny_model(case, num_hidden_layers=4)
    batch = tiny_batch()
    for one in advise(model):
        given = {"calibration": [batch]} if one.warm_start == "calibrated" else {}
        converted = convert_checkpoint(model, one.placement, warm_start=one.warm_start, **given)
        assert not list_moves(converted)  # a plain placement, that needs no morph
        if one.keep or one.warm_start == "exact" or one.placement == "gated":
            same = torch.allclose(converted(**batch).logits, model(**batch).logits, atol=1e-3)
            assert same, one.placement


# --- measurements -----------------------------------------------------------------------------------------------------

STEEP, FLAT = {"layers": [1.0, 5.0, 11.0]}, {"layers": [1.0, 1.1, 1.2]}
IDLE, BUSY = {"angular_distance": [0.2] * 15 + [0.01] * 15}, {"angular_distance": [0.2] * 30}


def both(name, pre, post):
    return {"pre": {name: pre}, "post": {name: post}}


def sides(**post):
    return {"cost": {"models": {"as it is": {"prefill": {"ratio": 1.0}}, "post": post}}}


INT8 = {"loss": 2.0, "loss_int8_weights": 2.0, "loss_int8_dynamic": 2.1}
BETTER = {**INT8, "loss_int8_dynamic": 2.01}


@pytest.mark.parametrize(
    "measured, name, points, words",
    [
        ({"gradient_profile": STEEP}, "pre", -2, "differ by a factor of 11"),
        ({"gradient_profile": FLAT}, "pre", 1, "differ by a factor of 1.2"),
        ({"gradient_profile": {"layers": [1.0, 5.0]}}, "pre", 0, "factor of 5"),
        ({"gradient_profile": {"layers": [0.0, 1.0, 1.0]}}, "pre", 1, "factor of 1"),  # a frozen layer
        ({"collapse": IDLE}, "pre", -1, "15 of its 15 upper layers"),
        ({"collapse": BUSY}, "pre", 1, "0 of its 15 upper layers"),
        (both("sensitivity", {"output_change": 1.0}, {"output_change": 3.0}), "post", -1, "3 times as sensitive"),
        (both("sensitivity", {"output_change": 1.0}, {"output_change": 1.2}), "post", 0, "1.2 times as sensitive"),
        (both("stability", {"max_learning_rate": 1e-2}, {"max_learning_rate": 1e-3}), "post", -1, "up to a learning rate of 0.001"),
        (both("stability", {"max_learning_rate": 1e-3}, {"max_learning_rate": None}), "post", 1, "at every learning rate tried"),
        (both("stability", {"max_learning_rate": None}, {"max_learning_rate": None}), "post", 0, "at every learning rate tried"),
        (sides(prefill={"ratio": 1.08}), "post", -1, "1.08 times the time"),
        (sides(prefill={"ratio": 1.01}), "post", 0, "1.01 times the time"),
        ({"cost": {"models": {"pre": {"prefill": {"ratio": 1.0}, **INT8}, "post": {"prefill": {"ratio": 1.0}, **BETTER}}}},
         "post", 1, "loses +0.01"),
    ],
)  # fmt: skip
def test_a_measurement_counts(measured, name, points, words):
    rules, found = (
        by_name(advise(config("llama", 30), measured=one, priorities=PRIORITIES)) for one in (None, measured)
    )
    [reason] = [one for one in found[name].reasons if one.measured and words in one.text]
    assert reason.points == points and "measured on this model" in reason.source
    struck = [one.points for one in rules[name].reasons if one.topic == reason.topic]
    counted = sum(one.points for one in found[name].reasons if one.measured)
    overruled = [one for one in found[name].reasons if one.overruled]
    assert [one.points for one in overruled if one.topic == reason.topic] == struck
    assert found[name].score == pytest.approx(rules[name].score + counted - sum(one.points for one in overruled))


def test_disagreement_is_said():
    deep = config("bert", 30)
    agreed, contradicted = (advise(deep, measured={"gradient_profile": one}) for one in (STEEP, FLAT))
    assert agreed.disagreements == []
    [text] = contradicted.disagreements
    assert (
        "of post the rule says that beyond 24 layers" in text and "measured, gradients of its layers differ by" in text
    )
    assert f"Disagreement: {text}" in str(contradicted)
    scores = [by_name(one)["post"].score for one in (agreed, contradicted)]
    assert scores[1] - scores[0] == 3
    assert "overruled: beyond 24 layers" in "\n".join(map(str, by_name(contradicted)["post"].reasons))


def test_real_measurements_are_understood():
    diagnostics = pytest.importorskip("hf_normswap.diagnostics")
    model = tiny_model("llama", num_hidden_layers=4, initializer_range=0.02)
    batches = [tiny_batch(seed=seed, padding=0) for seed in range(2)]
    models = {"as it is": model, "post": convert_checkpoint(model, "post")}
    measured = {}
    for name, one in models.items():
        measured[name] = {
            "gradient_profile": diagnostics.gradient_profile(one, batches),
            "collapse": diagnostics.collapse(one, batches).to_dict(),
            "sensitivity": diagnostics.sensitivity(one, batches, draws=1),
            "residual_stream": diagnostics.residual_stream(one, batches),
        }
    measured["as it is"]["cost"] = diagnostics.cost(models, batches, repeats=1, decode_tokens=0)
    found = by_name(advise(model, measured=measured, priorities=PRIORITIES))
    topics = {name: [one.topic for one in found[name].reasons if one.measured] for name in ("pre", "post")}
    assert topics == {
        "pre": ["stability", "collapse"],
        "post": ["stability", "stability", "collapse", "latency", "int8"],
    }
    assert {*as_results(measured, "pre")} == {"pre", "post"} and len(MEASURES) == 6


# --- what it takes, what it refuses -----------------------------------------------------------------------------------


def test_takes_models_configs_and_folders(tmp_path):
    model = tiny_model("bert")
    converted = convert_checkpoint(model, ["post", "pre", "pre"])
    converted.config.save_pretrained(tmp_path)  # no weights
    for one in (converted, converted.config, str(tmp_path), tmp_path):
        advice = advise(one)
        [kept] = [one for one in advice if one.keep]
        assert kept.placement == ["post", "pre", "pre"] and kept.score == max(kept.score, 0)
        assert advice.facts.placement == "mixed" and advice.facts.side == "mixed"
    peft = pytest.importorskip("peft")
    assert by_name(advise(convert_checkpoint(model, "deepnorm")))["deepnorm"].keep
    plain = advise(model).to_dict()
    assert advise(peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))).to_dict() == plain


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"task": "ner"}, "unknown task 'ner'. Available: generation"),
        ({"num_samples": 0}, "`num_samples` must be at least 1, got 0"),
        ({"budget": -1}, "`budget` must be at least 0"),
        ({"priorities": ["speed"]}, r"unknown priorities \['speed'\]. Available: latency, int8"),
        ({"measured": {"post": {"colapse": {}}}}, "unknown diagnostic 'colapse' in `measured`. Available: collapse"),
        ({"measured": {"posst": {"collapse": BUSY}}}, "Did you mean post"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(NormSwapError, match=message):
        advise(config("bert", 6), **arguments)


def test_refuses_what_cannot_be_converted():
    from transformers import T5Config

    with pytest.raises(NormSwapError, match="encoder-decoder"):
        advise(T5Config())


def test_command_line(tmp_path):
    config("llama", 30).save_pretrained(tmp_path)
    (tmp_path / "measured.json").write_text(json.dumps({"collapse": BUSY}))

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["advise", str(tmp_path), *arguments])
        assert result.exit_code == code, result.output
        return result

    text = run("--num-samples", "5000").stdout
    assert text.startswith("30 layers of pre, for generation") and "1. pre (+" in text and "arXiv:" in text
    found = json.loads(run("--task", "multi_task", "--measured", str(tmp_path / "measured.json"), "--json").stdout)
    assert found["facts"]["purpose"] == "multi_task" and found["disagreements"]
    assert found["ranking"][0]["reasons"][0]["topic"] == "conversion"
    assert json.loads(run("--priority", "int8", "--priority", "latency", "--json").stdout)["facts"]["priorities"]
    assert "Error: unknown task" in run("--task", "ner", code=2).stderr
