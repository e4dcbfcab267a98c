"""What to train a placement with: the values of the table, what holds for all of them, and that each names its source."""

import dataclasses
import math
import re

import pytest

from hf_normswap import NormSwapError, Placement
from hf_normswap.advice import KINDS, RULES, TASKS, training_defaults

HYBRID = {6: ["post"] * 2 + ["pre"] * 4, 12: ["post"] * 3 + ["pre"] * 9, 30: ["pre"] * 28 + ["resi_dual"] * 2}
NAMES = ["pre", "post", "deepnorm", "admin", "resi_dual", "sandwich", "peri", "res_post", "gated"]
SOURCE = re.compile(r"arXiv:\d{4}\.\d{5}|measured here|pytorch/pytorch#\d+")


@pytest.mark.parametrize(
    "placement, rates, clip, eps, warmups",
    [  # learning rates for 6, 12 and 30 layers; warm-up in runs of 96, 1,000, 100,000 and any number of steps
        ("pre", (1e-4, 1e-4, 6e-5), 1.0, None, (5, 50, 1000, 1000)),
        ("Post-LN", (5e-5, 3e-5, 2e-5), 0.4, 1e-6, (10, 100, 6000, 4000)),
        ("deepnorm", (5e-5, 5e-5, 5e-5), 1.0, 1e-6, (10, 100, 4000, 4000)),
        ("admin", (5e-5, 5e-5, 5e-5), 1.0, 1e-6, (10, 100, 8000, 8000)),
        ("ResiDual", (5e-5, 5e-5, 5e-5), 1.0, 1e-6, (6, 60, 4000, 4000)),
        ("sandwich", (1e-4, 1e-4, 6e-5), 1.0, None, (5, 50, 1000, 1000)),
        ("gated", (5e-5, 3e-5, 2e-5), 0.4, 1e-6, (10, 100, 6000, 4000)),
    ],
)
def test_values(placement, rates, clip, eps, warmups):
    for depth, rate in zip((6, 12, 30), rates):
        for steps, warmup in zip((96, 1000, 100_000, None), warmups):
            found = training_defaults(placement, depth, total_steps=steps)
            values = (found.learning_rate, found.warmup_steps, found.max_grad_norm, found.norm_eps)
            assert values == (rate, warmup, clip, eps)
            assert (found.weight_decay, found.lr_scheduler_type, found.adam_beta2) == (0.01, "linear", None)


@pytest.mark.parametrize(
    "placement, like",
    [
        ({"skip_norm": 0.5}, "post"),
        ({"skip_norm": 1.0, "depth_exponent": 0.0}, "post"),
        ({"skip_norm": 1.0, "output_norm": 1.0}, "post"),
        ({"learned": [["skip_norm", "channel"]]}, "post"),
        ({"skip_norm": 1.0, "learned": [["skip_gain", "morph"]]}, "post"),
        ({"skip_norm": 1.0, "skip_gain": 2.5}, "deepnorm"),
        ({"skip_norm": 1.0, "depth_exponent": 0.5}, "deepnorm"),
        ({"skip_norm": 1.0, "learned": [["skip_gain", "branch"]]}, "admin"),
        (Placement(skip_norm=1.0, dual=0.5), "resi_dual"),
        (Placement(branch_gain=0.5), "pre"),
        ("peri", "pre"),
        ("res_post", "pre"),
        ({}, "pre"),
    ],
)
def test_placements_without_a_name_are_known_by_their_coordinates(placement, like):
    found, named = (training_defaults(spec, 30, total_steps=100_000) for spec in (placement, like))
    assert dataclasses.replace(found, warnings=()) == dataclasses.replace(named, warnings=())


@pytest.mark.parametrize(
    "depth, rate, clip, warmups", [(6, 5e-5, 0.4, (10, 6000)), (12, 3e-5, 0.4, (10, 6000)), (30, 5e-5, 1.0, (6, 4000))]
)
def test_of_a_hybrid_the_most_cautious_layer_decides(depth, rate, clip, warmups):
    for spec in (HYBRID[depth], HYBRID[depth][::-1]):
        for steps, warmup in zip((96, 100_000), warmups):
            found = training_defaults(spec, depth, total_steps=steps)
            assert (found.learning_rate, found.max_grad_norm, found.warmup_steps) == (rate, clip, warmup)
            assert found.norm_eps == 1e-6
            assert found.reasons["learning_rate"].startswith(("post: ", "resi_dual: "))
    mixed = training_defaults(["post"] * 8 + ["admin"] * 8 + ["pre"] * 8, 24)  # each field has its own
    assert (mixed.learning_rate, mixed.warmup_steps, mixed.max_grad_norm) == (3e-5, 8000, 0.4)


@pytest.mark.parametrize(
    "placement, depth, rate, warmups",
    [  # in runs of 96, 1,000, 20,000 and any number of steps
        ("pre", 6, 5e-5, (5, 50, 1000, 1000)),
        ("post", 6, 3e-5, (20, 200, 2000, 2000)),
        ("post", 12, 3e-5, (20, 200, 2000, 2000)),
        ("post", 30, 2e-5, (20, 200, 2000, 2000)),
        ("deepnorm", 30, 3e-5, (10, 100, 2000, 4000)),
        ("resi_dual", 12, 3e-5, (6, 60, 1200, 4000)),
    ],
)
def test_little_data(placement, depth, rate, warmups):
    for steps, warmup in zip((96, 1000, 20_000, None), warmups):
        few, edge = (training_defaults(placement, depth, "classification", rows, steps) for rows in (2_500, 9_999))
        assert (few.learning_rate, few.warmup_steps) == (rate, warmup)
        assert few == edge
    assert training_defaults(placement, depth, num_samples=10_000) == training_defaults(placement, depth)
    blocks = {"task": "causal_lm", "num_samples": 10}  # which are no rows with labels
    assert training_defaults(placement, depth, **blocks) == training_defaults(placement, depth, "causal_lm")


@pytest.mark.parametrize(
    "task, placement, depth, expected",
    [
        ("classification", "pre", 12, (1e-4, 0.01, "linear", None)),
        ("multi_task", "post", 6, (5e-5, 0.01, "linear", None)),
        ("masked_lm", "post", 12, (3e-5, 0.01, "linear", None)),
        ("causal_lm", "pre", 30, (6e-5, 0.1, "cosine", None)),
        ("distillation", "pre", 6, (1e-4, 0.0, "linear", None)),
        ("distillation", "post", 6, (5e-5, 0.0, "linear", None)),
        ("distillation", "post", 30, (6e-5, 0.0, "linear", None)),
        ("pretraining", "pre", 12, (3e-4, 0.01, "linear", None)),
        ("pretraining", "post", 12, (1e-4, 0.01, "linear", 0.98)),
        ("pretraining", "deepnorm", 48, (1e-4, 0.01, "linear", 0.98)),
        ("pretraining", "admin", 18, (1e-3, 0.01, "linear", 0.98)),
        ("pretraining", "resi_dual", 12, (5e-4, 0.01, "linear", 0.98)),
    ],
)
def test_tasks(task, placement, depth, expected):
    found = training_defaults(placement, depth, task)
    assert (found.learning_rate, found.weight_decay, found.lr_scheduler_type, found.adam_beta2) == expected


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [1, 11, 12, 24, 25, 100])
def test_what_holds_everywhere(depth, task):
    for rows in (None, 500):
        for steps in (20, 96, 1000, 7777, 100_000, None):
            found = {name: training_defaults(name, depth, task, rows, steps) for name in NAMES}
            pre, post = found["pre"], found["post"]
            assert post.warmup_steps > pre.warmup_steps and post.learning_rate <= pre.learning_rate
            assert pre.max_grad_norm / 3 <= post.max_grad_norm <= pre.max_grad_norm / 2
            assert pre.warmup_steps <= 1000
            if steps:
                assert post.warmup_steps >= 0.06 * steps and pre.warmup_steps <= math.ceil(0.06 * steps)
            for one in found.values():
                assert isinstance(one.warmup_steps, int) and (not steps or one.warmup_steps <= steps // 2)
                values = {name for name, value in one.to_dict().items() if value is not None}
                assert one.reasons.keys() == values - {"reasons", "warnings"}
                assert all(SOURCE.search(reason) for reason in one.reasons.values())


def test_warmup_is_at_most_half_of_a_tiny_run():
    for placement in NAMES:
        found = [
            training_defaults(placement, 6, num_samples=10, total_steps=steps).warmup_steps for steps in (1, 2, 3)
        ]
        assert found == [0, 1, 1]


def test_every_row_of_the_table_is_sound():
    assert all(SOURCE.search(source) for _, _, source in TASKS.values())
    for field, rows in RULES.items():
        for names, (low, high), cases, _, source in rows:
            assert set(names.split()) <= {name for name, _ in KINDS} and low <= high, (field, names)
            assert set(cases.split()) <= {"finetune", "few", "distillation", "pretraining"}
            assert SOURCE.search(source), source


@pytest.mark.parametrize(
    "arguments, options, expected",
    [
        (("post", 20), {}, None),
        (("post", 21), {}, "deepnorm, resi_dual"),
        ((["post"] * 8 + ["pre"] * 22, 30), {}, "deepnorm, resi_dual"),
        (("deepnorm", 30), {}, None),
        (("pre", 12, "multi_task"), {}, "hybrid"),
        (("pre", 25, "multi_task"), {}, None),
        ((HYBRID[12], 12, "multi_task"), {}, None),
        (("post", 12), {"warm_start": "none"}, "heal"),
        (("post", 12), {"warm_start": "none", "native": "post"}, None),
        (("post", 12), {"warm_start": "exact"}, None),
        (("post", 12, "pretraining"), {"warm_start": "none"}, None),
        (("gated", 12), {"warm_start": "none"}, "weight decay"),
        (("admin", 12), {}, "weight decay"),
        (("resi_dual", 12), {}, "fp16"),
    ],
)
def test_warnings(arguments, options, expected):
    found = training_defaults(*arguments, **options)
    assert len(found.warnings) == (expected is not None)
    assert all(expected in text for text in found.warnings)


@pytest.mark.parametrize("name", ["post", "pre"])
def test_a_warm_start_changes_no_number(name):
    found = [training_defaults(name, 12, warm_start=start) for start in ("none", "exact", "calibrated")]
    assert len({str(dataclasses.replace(one, warnings=())) for one in found}) == 1


def test_prints_each_choice_with_its_reason():
    found = training_defaults(HYBRID[12], 12, num_samples=500, total_steps=1000, warm_start="none")
    lines = str(found).splitlines()
    assert lines[0].startswith("learning_rate = 3e-05: post: ") and "arXiv:1810.04805" in lines[0]
    assert lines[1].startswith("warmup_steps = 200: post: ")
    assert len(lines) == 6 + 1 and lines[-1] == f"warning: {found.warnings[0]}"
    assert found.to_dict()["warmup_steps"] == 200 and found.to_dict()["reasons"] == found.reasons
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.learning_rate = 1.0


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("post", 6, "ner"), {}, "unknown task 'ner'. Available: .*causal_lm.*pretraining"),
        (("post", 6), {"warm_start": "warm"}, "unknown warm start 'warm'. Available: none, exact, calibrated"),
        (("posst", 6), {}, "Did you mean post"),
        (("post", 6), {"native": "bert"}, "unknown norm placement 'bert'"),
        ((["post"] * 3, 6), {}, "3 placements for 6 layers"),
        (("post", 0), {}, "`depth` must be at least 1, got 0"),
        (("post", 6), {"num_samples": 0}, "`num_samples` must be at least 1"),
        (("post", 6), {"total_steps": -1}, "`total_steps` must be at least 1"),
    ],
)
def test_refuses(arguments, options, message):
    with pytest.raises(NormSwapError, match=message):
        training_defaults(*arguments, **options)
