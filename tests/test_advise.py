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
from hf_normswap.advice import (
    COSTS,
    FEW,
    FIELDS,
    MEASURES,
    MUCH,
    PRIORITIES,
    PURPOSES,
    THUMB,
    Facts,
    as_results,
    describe,
)
from hf_normswap.cli import app
from hf_normswap.conversion import converted_config

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
        ("bert", 12, {}, "post", "none"),
        (
            "bert",
            24,
            {"num_samples": 100, "budget": 10},
            "post",
            "none",
        ),  # an exact conversion has to earn itself, too
        ("bert", 12, {"priorities": "int8"}, "post", "none"),
        ("bert", 48, {}, "deepnorm", "exact"),
        ("gpt2", 6, {}, "pre", "none"),
        ("gpt2", 12, {}, "pre", "none"),
        ("llama", 30, {}, "pre", "none"),
        ("llama", 30, {"num_samples": 100, "budget": 0}, "pre", "none"),
        ("llama", 30, {"priorities": ["latency"]}, "pre", "none"),
        ("gemma2", 26, {}, "sandwich", "none"),
        ("bert", 6, {"task": "pretraining"}, "post", "none"),  # nothing to lose
        ("llama", 48, {"task": "pretraining"}, "sandwich", "none"),
        ("bert", 48, {"task": "pretraining"}, "deepnorm", "none"),
    ],
)
def test_what_wins(case, depth, arguments, best, warm_start):
    first = advise(config(case, depth), **arguments)[0]
    assert (first.placement, first.warm_start) == (best, warm_start)
    scratch = "task" in arguments
    assert (first.keep and not scratch) == ("keep it" in str(first))
    assert (first.keep and not scratch) == ("nothing is lost and nothing has to be healed" in str(first))
    assert scratch == ("train it from new weights" in str(first))


def test_equal_scores_are_ranked_by_what_the_conversion_costs():
    ranking = list(advise(config("llama", 30)))
    assert [one.placement for one in ranking[:2]] == ["pre", "gated"]
    for one, other in zip(ranking, ranking[1:]):
        assert (one.score, one.reasons[0].points) >= (other.score, other.reasons[0].points)


@pytest.mark.parametrize("case, depth", [("bert", 3), ("llama", 12), ("olmo2", 25)])
@pytest.mark.parametrize("task", PURPOSES)
def test_the_account(case, depth, task):
    for arguments in ({}, {"num_samples": 100, "budget": 20, "priorities": PRIORITIES}, {"num_samples": 2 * MUCH}):
        advice = advise(config(case, depth), task, **arguments)
        assert {*by_name(advice)} == {*list_placements()} | ({"hybrid"} if depth > 3 else set())
        scores = [one.score for one in advice]
        assert scores == sorted(scores, reverse=True) and sum(one.keep for one in advice) == 1
        for one in advice:
            assert one.score == pytest.approx(sum(reason.points for reason in one.reasons))
            assert len({str(reason) for reason in one.reasons}) == len(one.reasons) and one.name in str(advice)
            assert one.reasons[0].topic == "conversion" and one.reasons[0].points <= 0
            assert (one.reasons[0].points == 0) or not (one.keep or task == "pretraining")
            assert not one.heal_steps or one.warm_start == "calibrated"
            assert one.settings.learning_rate > 0 and one.settings.reasons
        json.dumps(advice.to_dict(), allow_nan=False)
        scores = {name: one.score for name, one in by_name(advice).items()}
        if depth > 24:
            assert all(scores["post"] < scores[name] for name in ("deepnorm", "resi_dual"))


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


HYBRIDS = (["post", "pre", "pre", "gated"], {"skip_norm": 1.0, "output_norm": 1.0}, ["post", "pre", "pre", "pre"])


@pytest.mark.parametrize(
    "case, present",
    [("llama", one) for one in (None, *list_placements(), *HYBRIDS)]
    + [("bert", one) for one in (None, "gated", "admin", "deepnorm")]
    + [("gemma2", None), ("gemma2", "peri")],
    ids=str,
)
def test_the_advice_can_be_followed(case, present):
    """From each placement to each: the start is accepted, leads to a plain placement, and is exact where that is said."""
    model = tiny_model(case, num_hidden_layers=4)
    model = model if present is None else convert_checkpoint(model, present)
    batch = tiny_batch()
    before, advice = model(**batch).logits, advise(model)
    assert sum(one.keep for one in advice) == 1 and str(advice)
    for one in advice:
        given = {"calibration": [batch]} if one.warm_start == "calibrated" else {}
        converted = convert_checkpoint(model, one.placement, warm_start=one.warm_start, **given)
        assert not list_moves(converted)  # a plain placement, that needs no morph
        same = torch.allclose(converted(**batch).logits, before, atol=2e-3)
        assert same or not (one.keep or one.warm_start != "calibrated"), one.name


@pytest.mark.parametrize(
    "spec, words",
    [
        ("pre", "pre"),
        (["post"] + ["pre"] * 3, "post in layer 0, pre in layers 1 to 3"),
        (["pre"] * 2 + ["post"] * 3 + ["gated"] * 3, "pre in layers 0 to 1, post in layers 2 to 4, gated in layers 5 to 7"),
        ({"skip_norm": 1.0, "output_norm": 1.0}, "skip_norm=1, output_norm=1"),
        ({"skip_norm": 1.0, "learned": [["skip_norm", "layer"]]}, "skip_norm=1, skip_norm learned"),
    ],
)  # fmt: skip
def test_placements_in_words(spec, words):
    assert describe(spec) == words
    depth = len(spec) if isinstance(spec, list) else 8
    [kept] = [one for one in advise(converted_config(config("llama", depth), spec, None)) if one.keep]
    assert kept.name == words and words in str(kept)


def test_a_hybrid_is_ranked_once():
    hybrid = ["post"] * 2 + ["pre"] * 6
    names = [one.name for one in advise(converted_config(config("llama", 8), hybrid, None))]
    assert len({*names}) == len(names) == len(list_placements()) + 1 and names[0] == describe(hybrid)


@pytest.mark.parametrize(
    "arguments, steps, words",
    [  # of post, with 6 layers
        ({}, 4000, "warmup_steps = 10% of the steps, at most 4,000: "),
        ({"num_samples": 3668}, 69, "in a run of 345: 3 epochs in batches of 32"),
        ({"num_samples": 3668, "budget": 100}, 20, "in a run of 100: what is left of the budget"),
        ({"budget": 0}, 0, "in a run of 1: what is left of the budget"),
        ({"num_samples": 3668, "task": "pretraining"}, 4000, "10% of the steps"),
    ],
)
def test_the_warm_up_fits_the_run(arguments, steps, words):
    first = by_name(advise(config("bert", 6), **arguments))["post"]
    assert first.settings.warmup_steps == steps and words in str(first)


# --- measurements -----------------------------------------------------------------------------------------------------

STEEP, FLAT = {"layers": [1.0, 5.0, 11.0]}, {"layers": [1.0, 1.1, 1.2]}
IDLE, BUSY = {"angular_distance": [0.2] * 15 + [0.01] * 15}, {"angular_distance": [0.2] * 30}


def both(name, pre, post):
    return {"pre": {name: pre}, "post": {name: post}}


def sides(**post):
    return {"cost": {"models": {"as it is": {"prefill": {"ratio": 1.0}}, "post": post}}}


INT8 = {"loss": 2.0, "loss_int8_weights": 2.0, "loss_int8_dynamic": 2.1}
BETTER = {**INT8, "loss_int8_dynamic": 2.01}
MOVED = {**INT8, "output_change_int8_weights": 0.01, "output_change_int8_dynamic": 0.02}


def no_task(name, **result):
    """A result of a model that predicts nothing."""
    return {name: {"objective": "random target", **result}}


@pytest.mark.parametrize(
    "measured, name, points, words",
    [
        ({"gradient_profile": STEEP}, "pre", -2, "differ by a factor of 11"),
        ({"gradient_profile": FLAT}, "pre", 1, "differ by a factor of 1.2"),
        ({"gradient_profile": {"layers": [1.0, 5.0]}}, "pre", 0, "factor of 5"),
        ({"gradient_profile": {"layers": [0.0, 1.0, 1.0]}}, "pre", 1, "factor of 1"),  # a frozen layer
        (no_task("gradient_profile", **STEEP), "pre", 0, "factor of 11; they are those of a random target, and of no task"),
        (no_task("gradient_profile", **FLAT), "pre", 0, "of no task"),
        (no_task("cost", models={"pre": MOVED, "post": {**BETTER, **MOVED, "output_change_int8_dynamic": 0.05}}), "post", -1,
         "int8 changes its output by 0.05 of its size, and that of the present placement by 0.02"),
        (no_task("cost", models={"pre": MOVED, "post": {**MOVED, "output_change_int8_dynamic": 0.01}}), "post", 1, "by 0.01 of its size"),
        (no_task("cost", models={"pre": MOVED, "post": {**MOVED, "loss_int8_dynamic": 9.0}}), "post", 0, "by 0.02 of its size"),
        ({"collapse": IDLE}, "pre", -1, "15 of its 15 upper layers turn the stream by less than 9 degrees"),
        ({"collapse": BUSY}, "pre", 1, "all 15 upper layers turn the stream by at least 9 degrees"),
        ({"collapse": {"angular_distance": [0.2, 0.2, 0.01, 0.2, 0.2]}}, "pre", 0, "1 of its 3 upper layers turn"),
        (both("sensitivity", {"output_change": 1.0}, {"output_change": 3.0}), "post", -1, "3 times as sensitive"),
        (both("sensitivity", {"output_change": 1.0}, {"output_change": 1.2}), "post", 0, "1.2 times as sensitive"),
        (both("stability", {"max_learning_rate": 1e-2}, {"max_learning_rate": 1e-3}), "post", -1, "up to a learning rate of 0.001"),
        (both("stability", {"max_learning_rate": 1e-3}, {"max_learning_rate": None}), "post", 1, "at every learning rate tried"),
        (both("stability", {"max_learning_rate": None}, {"max_learning_rate": None}), "post", 0, "at every learning rate tried"),
        (both("stability", {"max_learning_rate": 1e-3}, {"max_learning_rate": 0.0}), "post", -1, "at no learning rate tried"),
        (both("sensitivity", {"output_change": 1.0}, {"output_change": 1.0}), "post", 0, "is as sensitive to its weights as"),
        (both("stability", {"max_learning_rate": 1e-3}, {"max_learning_rate": 0.0}), "post", -1, "at no learning rate tried"),
        (sides(prefill={"ratio": 1.08}), "post", -1, "1.08 times the time"),
        (sides(prefill={"ratio": 0.84, "spread": 0.06}), "post", 0, "0.84 ± 0.06 times the time of the present placement, which "
         "is not distinguishable"),
        (sides(prefill={"ratio": 0.84, "spread": 0.01}), "post", 1, "0.84 ± 0.01 times the time"),
        (sides(prefill={"ratio": 1.04, "spread": 0.001}), "post", 0, "not distinguishable"),
        (sides(prefill={"ratio": 1.01}, decode={"ratio": 2.0, "spread": 1.0}), "post", 0, "not distinguishable"),
        ({"cost": {"models": {"pre": {"prefill": {"ratio": 1.0}, **INT8}, "post": {"prefill": {"ratio": 1.0}, **BETTER}}}},
         "post", 1, "int8 adds 0.01 to its loss, and 0.1 to that of the present placement"),
    ],
)  # fmt: skip
def test_a_measurement_counts(measured, name, points, words):
    rules, found = (
        by_name(advise(config("llama", 30), measured=one, priorities=PRIORITIES)) for one in (None, measured)
    )
    [reason] = [one for one in found[name].reasons if one.measured and words in one.text]
    assert reason.points == points and "measured on this model" in reason.source
    overruled = [one for one in found[name].reasons if one.overruled]
    opposite = [one for one in rules[name].reasons if one.topic == reason.topic and one.points * points < 0]
    assert [one.text for one in overruled] == [one.text for one in opposite]
    counted = sum(one.points for one in found[name].reasons if one.measured)
    assert found[name].score == pytest.approx(rules[name].score + counted - sum(one.points for one in overruled))


@pytest.mark.parametrize("layers", [STEEP, FLAT], ids=["steep", "flat"])
@pytest.mark.parametrize("depth", [6, 18, 30])
def test_nothing_wins_because_it_was_not_measured(depth, layers):
    """What was not measured is taken to be as in the present placement, and gates start as that."""
    rules, found = (
        by_name(advise(config("llama", depth), measured=one)) for one in ({}, {"gradient_profile": layers})
    )
    for name, one in found.items():
        [reason] = [reason for reason in one.reasons if "gradients of its layers" in reason.text]
        assert reason.measured == (name in ("pre", "gated"))
        if not reason.measured:
            assert "not measured, taken as pre" in reason.text
            assert one.score == rules[name].score + reason.points and not any(
                reason.overruled for reason in one.reasons
            )
    assert found["pre"].score == found["gated"].score + 1
    assert next(one for one in found).startswith("pre")


NAN = {"loss": None, "loss_int8_weights": None, "loss_int8_dynamic": 1e9}
SAYS_NOTHING = {
    "gradients that are not finite": {"gradient_profile": {"layers": [None] * 30}},
    "one that is not": {"gradient_profile": {"layers": [1.0, math.nan, 2.0]}},
    "frozen layers": {"gradient_profile": {"layers": [0.0] * 30}},
    "no layers": {"gradient_profile": {"layers": []}},
    "one layer": {"gradient_profile": {"layers": [1.0]}},
    "one layer that is trained": {"gradient_profile": {"layers": [0.0] * 29 + [1.0]}},
    "int8 losses of no task": no_task("cost", models={"pre": INT8, "post": BETTER}),
    "int8 that changes nothing": no_task(
        "cost",
        models={"pre": MOVED, "post": {**MOVED, "output_change_int8_weights": 0.0, "output_change_int8_dynamic": 0.0}},
    ),
    "angles that are not finite": {"collapse": {"angular_distance": [None] * 30}},
    "no angles": {"collapse": {"angular_distance": []}},
    "words for angles": {"collapse": {"angular_distance": ["a", "b"]}},
    "no change": both("sensitivity", {"output_change": 0.0}, {"output_change": 0.0}),
    "a change that is not finite": both("sensitivity", {"output_change": math.inf}, {"output_change": 1.0}),
    "a change of nothing": both("sensitivity", {"output_change": 1.0}, {"output_change": 0.0}),
    "times of nothing": sides(prefill={"ratio": None}),
    "no times": sides(),
    "losses that are not finite": {"cost": {"models": {"as it is": INT8, "post": NAN}}},
    "a cost of no models": {"cost": {"models": {}}},
    "a stream, which says nothing of placements": {"residual_stream": {"rms": [None]}},
}


@pytest.mark.parametrize("case", SAYS_NOTHING)
def test_what_says_nothing_gives_no_reason(case):
    rules, found = (
        advise(config("llama", 30), measured=one, priorities=PRIORITIES) for one in ({}, SAYS_NOTHING[case])
    )
    assert found.to_dict() == rules.to_dict()
    half = {"pre": {"collapse": BUSY, **SAYS_NOTHING[case].get("pre", {})}}
    assert any(reason.measured for reason in by_name(advise(config("llama", 30), measured=half))["pre"].reasons)


def test_int8_that_explodes_is_worse():
    worse = {"cost": {"models": {"as it is": INT8, "post": {**INT8, "loss_int8_weights": 1000.0}}}}
    found = by_name(advise(config("llama", 30), measured=worse, priorities=["int8"]))["post"]
    assert [one.points for one in found.reasons if one.measured] == [-1]


def test_disagreement_is_said():
    deep = config("bert", 30)
    agreed, contradicted = (advise(deep, measured={"gradient_profile": one}) for one in (STEEP, FLAT))
    assert agreed.disagreements == []
    [text] = contradicted.disagreements
    assert (
        text.startswith("post, gated: beyond 24 layers") and "but measured, gradients of its layers differ by" in text
    )
    assert f"Disagreement: {text}" in str(contradicted)
    scores = [by_name(one)["post"].score for one in (agreed, contradicted)]
    assert scores[1] - scores[0] == 3 + 2 + 1  # the rule, and what was measured
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
    for _, found in as_results(measured, "pre").items():
        assert all(FIELDS[name] in one for name, one in found.items() if name != "cost")


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
        ({"num_samples": math.inf}, "`num_samples` must be at least 1, got inf: a whole number"),
        ({"num_samples": "many"}, "`num_samples` must be at least 1, got 'many': a whole number"),
        ({"budget": -1}, "`budget` must be at least 0"),
        ({"budget": 0.5}, "`budget` must be at least 0, got 0.5: a whole number"),
        ({"priorities": ["speed"]}, r"unknown priorities \['speed'\]. Available: latency, int8"),
        ({"priorities": "speed"}, r"unknown priorities \['speed'\]"),
        ({"measured": {"post": {"colapse": {}}}}, "unknown diagnostic 'colapse' in `measured`. Available: .*collapse"),
        ({"measured": {"posst": {"collapse": BUSY}}}, "Did you mean post"),
        ({"measured": {"collaps": {}}}, "in `measured`: unknown norm placement 'collaps'.* Diagnostics: .*collapse"),
        ({"measured": {"collapse": {}}}, "`collapse` of post has no `angular_distance`"),
        ({"measured": {"collapse": None}}, "`collapse` of post must be results by name, got NoneType"),
        ({"measured": {"cost": {}}}, "`cost` of post has no `models`"),
        ({"measured": {"cost": {"models": [1]}}}, "`models` of `cost` must be results by name, got list"),
        ({"measured": {"pre": [1]}}, "what was `measured` of pre must be results by name, got list"),
        ({"measured": [1]}, "`measured` must be results by name, got list"),
        ({"measured": "x"}, "`measured` must be results by name, got str"),
        ({"measured": {"measures": {}, "source": "pre", "about": {"layers": 6}}}, "another model: 6 layers of pre, and this one"),
        ({"measured": {"measures": {}, "source": "post", "about": {"layers": 7}}}, "another model: 7 layers"),
    ],
)  # fmt: skip
def test_refuses(arguments, message):
    with pytest.raises(NormSwapError, match=message):
        advise(config("bert", 6), **arguments)


@pytest.mark.parametrize(
    "model, message",
    [
        (None, "expected a Transformers model, its config, a folder or a model id, got NoneType"),
        ({"model_type": "llama"}, "got dict"),
        ("./nonexistent", "nonexistent cannot be read"),
        (config("bert", 0), "no layers"),
    ],
)
def test_refuses_what_is_no_model(model, message):
    with pytest.raises(NormSwapError, match=message):
        advise(model)


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
