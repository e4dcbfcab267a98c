"""The experiments behind the README's table of claims: what a run yields, how effects are judged, how a grid goes on."""

import json
import math
import random
from dataclasses import asdict

import claims
import pytest
from claims import CLAIMS, HYBRID, Claim, Run, Seed, judge, make_model, measure
from scipy import stats

claims.VALIDATION_ROWS = claims.MEASURED_ROWS = 4
SMALL = {"depth": 3, "width": 16, "steps": 3, "rows": 2}


@pytest.mark.parametrize(
    "effects, verdict",
    [
        ([1.0, 1.1, 0.9, 1.0], "supported"),
        ([-1.0, -1.1, -0.9, -1.0], "not supported"),
        ([1.0, -1.1, 0.9, -1.0], "undecided at this scale"),
        ([0.2, 0.2, 0.2], "supported"),
        ([0.0, 0.0], "undecided at this scale"),
        ([1.0, math.nan], "undecided at this scale"),
        ([1e-5, 1e-5, 1e-5], "undecided at this scale"),  # too small to be shown
        ([(1.0, 0.5), (1.1, 0.6), (1.0, 0.5)], "supported"),
        ([(1.0, 0.5), (1.1, -0.6), (1.0, 0.5)], "undecided at this scale"),
        ([(1.0, -0.5), (1.1, -0.6), (1.0, -0.5)], "not supported"),
        ([(0.1, 0.3), (0.3, 0.1), (0.1, 0.3), (0.3, 0.1)], "supported"),  # though the least of each seed differs
    ],
)
def test_judge(effects, verdict):
    found = judge(effects)
    assert found["verdict"] == verdict
    if isinstance(effects[0], tuple):
        assert tuple(found["effects"]) in set(zip(*effects))
    elif len(set(effects)) > 1 and all(map(math.isfinite, effects)):
        assert (found["mean"] > 0 and stats.ttest_1samp(effects, 0).pvalue < 0.05) == (verdict == "supported")
        interval = stats.ttest_1samp(effects, 0).confidence_interval()
        assert (found["mean"] - found["half_width"], found["mean"] + found["half_width"]) == pytest.approx(interval)


def test_claims_want_runs():
    """Each but those about latency; a quick seed wants the same ones, shorter; each is of a placement that is there."""
    whole, quick = Seed(3, 1.0), Seed(3, 0.25)
    for claim in CLAIMS:
        if not claim.times:
            alone = Seed(3, 1.0)
            assert claim.effect(alone) == claim.effect(whole) == claim.effect(quick) and len(alone.found) >= 2
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS) and all(claim.source for claim in CLAIMS)
    assert [run.steps for run in quick.found] == [run.steps // 4 for run in whole.found]
    assert {run.seed for run in whole.found} == {3}
    for run in whole.found:
        make_model(Run(run.placement, depth=3, width=16))


def test_parts_do_not_bias_the_verdict():
    """Of placements that are alike, "beats both" is refuted as seldom as it is supported, but for chance."""
    draw, verdicts = random.Random(0), []
    for _ in range(600):
        losses = [[draw.gauss(2.6, 0.05) for _ in range(3)] for _ in range(8)]
        verdicts.append(judge([(pre - one, post - one) for pre, post, one in losses])["verdict"])
    assert verdicts.count("supported") < 15 and verdicts.count("not supported") < 40  # at 2.5 % for each part


def test_measure_is_of_its_run_alone(monkeypatch):
    assert measure(Run("post", **SMALL))["loss"] <= claims.GUESS
    monkeypatch.setattr(claims, "GUESS", 100.0)
    run = Run("post", **SMALL)
    found = measure(run)
    assert found == measure(run) and all(map(math.isfinite, found.values()))
    for other in ({"seed": 1}, {"warmup": 0.5}, {"clip": 0.01}, {"learning_rate": 1e-3}, {"placement": HYBRID}):
        assert measure(Run(**asdict(run) | other))["loss"] != found["loss"], other
    assert measure(Run("pre", teacher="post", **SMALL))["loss"] != measure(Run("pre", **SMALL))["loss"]


def test_a_run_that_explodes(monkeypatch):
    """It counts as a guess, and what cannot be measured of it is not a number."""
    monkeypatch.setattr(claims, "train", lambda run: make_model(run).apply(spoil))
    found = measure(Run("pre", **SMALL))
    assert found["loss"] == math.log(256) and math.isnan(found["similarity"]) and math.isnan(found["int8"])


def spoil(module):
    for parameter in module.parameters():
        parameter.data.fill_(math.nan)


class Inline:
    """A pool of processes that is this process."""

    def __init__(self, *arguments, **options):
        self.map = map

    __enter__ = lambda self: self  # noqa: E731
    __exit__ = lambda self, *error: None  # noqa: E731


def test_grid(tmp_path, monkeypatch, capsys):
    """Renders every row, goes on where it was cut in the middle of a line, and does not train anything twice."""
    monkeypatch.setattr(
        claims,
        "CLAIMS",
        (
            Claim("lower | better", "paper", lambda get: claims.lost(get, SMALL | {"placement": "post"}, SMALL)),
            Claim("faster", "practice", lambda latency: latency("post", "pre") - 1, "of the time", times=True),
        ),
    )
    monkeypatch.setattr(claims, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(claims, "latency", lambda first, second, seed, repeats: 1.0 + seed)
    monkeypatch.setattr("sys.argv", ["claims.py", "--seeds", "2", "--output_dir", str(tmp_path)])
    claims.main()
    runs = (tmp_path / "runs.jsonl").read_text().splitlines()
    table = (tmp_path / "claims.md").read_text()
    assert len(runs) == 4 and table.count("\n") == 4 and (tmp_path / "claims.png").stat().st_size > 1000
    written = json.loads((tmp_path / "claims.json").read_text())
    assert [row["effects"] for row in written["claims"]][1] == [0.0, 1.0]

    (tmp_path / "runs.jsonl").write_text("\n".join([*runs[:3], runs[3][:40]]))
    wanted = []
    monkeypatch.setattr(claims, "measure", lambda run: wanted.append(run) or dict(json.loads(runs[3])[1]))
    claims.main()
    assert wanted == [Run(**json.loads(runs[3])[0])]
    assert (tmp_path / "claims.md").read_text() == table and (tmp_path / "runs.jsonl").read_text().splitlines() == runs
