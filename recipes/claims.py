"""Test what is said about norm placements, each claim with the smallest honest experiment, several seeds and a verdict.

python recipes/claims.py --output_dir results/claims        # the table of the README
python recipes/claims.py --quick --output_dir results/quick  # fewer steps and seeds: renders every row

The models are LLaMA-style byte-level language models trained from scratch on novels: what is decided here is decided for
models of some layers of some dozen channels and some hundred steps, no more. A claim is a number for each seed that is
positive where it holds. With the 95 % confidence interval of its mean above zero it is *supported*, below zero *not supported*,
and else *undecided*; a claim of two parts is as good as the weaker one. Writes `claims.md`, `claims.json` and a plot of the intervals, `claims.png`.
"""

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from assets import gutenberg
from scipy import stats
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, get_scheduler

from hf_normswap import NormSwapLlamaConfig, parameter_groups
from hf_normswap.diagnostics import collapse, cost, gradient_profile
from hf_normswap.diagnostics.measuring import plain

BOOKS = ("austen-persuasion", "austen-sense", "chesterton-brown", "chesterton-thursday", "edgeworth-parents")
VALIDATION = "austen-emma"
LENGTH, VALIDATION_ROWS, MEASURED_ROWS = 64, 128, 16
GUESS = math.log(256)  # nats per byte of a uniform guess: a run that exploded counts as one
LEAST, UNDECIDED = 5e-4, "undecided at this scale"  # of an effect: what three digits show
HYBRID = "hybrid"  # the lower third Post, the upper third gated, the rest Pre


@dataclass(frozen=True)
class Run:
    """A training run; what it yields does not depend on anything else."""

    placement: str = "pre"
    seed: int = 0
    depth: int = 12
    width: int = 64
    steps: int = 200
    rows: int = 16  # of a batch
    learning_rate: float = 2e-3
    warmup: float = 0.1  # of the steps
    clip: float = 1.0
    eps: float = 1e-6
    num_bytes: int = 2_000_000  # of the training text
    teacher: str | None = (
        None  # the placement of a model of twice the depth, trained alike, whose distribution is learned
    )


@functools.cache
def text(name: str) -> torch.Tensor:
    """A book as bytes."""
    return torch.frombuffer(bytearray(gutenberg(name).encode("latin-1")), dtype=torch.uint8).long()


def windows(data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Byte sequences of shape `(len(starts), LENGTH + 1)`."""
    return data[starts[:, None] + torch.arange(LENGTH + 1)]


def make_model(run: Run) -> nn.Module:
    """A new model, initialised as the paper of its placement says."""
    third = run.depth // 3
    hybrid = ["post"] * third + ["pre"] * (run.depth - 2 * third) + ["gated"] * third
    config = NormSwapLlamaConfig(
        norm_placement=hybrid if run.placement == HYBRID else run.placement,
        vocab_size=256,
        hidden_size=run.width,
        intermediate_size=2 * run.width,
        num_hidden_layers=run.depth,
        num_attention_heads=4,
        rms_norm_eps=run.eps,
        initializer_range=math.sqrt(2 / (5 * run.width)),  # Nguyen and Salazar 2019, arXiv:1910.05895
        use_cache=False,
    )
    torch.manual_seed(run.seed)
    return AutoModelForCausalLM.from_config(config)


def train(run: Run) -> nn.Module:
    """The model after the run."""
    model, generator = make_model(run), torch.Generator().manual_seed(run.seed)
    data = torch.cat([text(name) for name in BOOKS])[: run.num_bytes]
    teacher = None
    if run.teacher is not None:
        teacher = train(replace(run, placement=run.teacher, teacher=None, depth=2 * run.depth)).eval()
    optimizer = torch.optim.AdamW(parameter_groups(model, model, run.learning_rate, 0.1), betas=(0.9, 0.98))
    schedule = get_scheduler("cosine", optimizer, round(run.warmup * run.steps), max(run.steps, 1))
    for _ in range(run.steps):
        batch = windows(data, torch.randint(len(data) - LENGTH, (run.rows,), generator=generator))
        logits = model(batch[:, :-1]).logits
        if teacher is None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        else:
            with torch.no_grad():
                wanted = teacher(batch[:, :-1]).logits.softmax(-1)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def validation() -> torch.Tensor:
    """Rows of the validation book, of shape `(VALIDATION_ROWS, LENGTH)`."""
    data = text(VALIDATION)
    return windows(data, torch.linspace(0, len(data) - LENGTH - 1, VALIDATION_ROWS).long())[:, :-1]


def measure(run: Run) -> dict[str, float]:
    """What a run yields: the factor by which gradients grow from layer to layer at the start, and of the trained model the loss
    in nats per byte, what it loses in int8, and the mean cosine of what enters and what leaves the layers of the upper half."""
    torch.set_num_threads(1)
    rows = validation()
    found = {"gradient_growth": gradient_profile(make_model(run), rows[:MEASURED_ROWS]).growth}
    model = train(run)
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        return found | {"loss": GUESS, "int8": math.nan, "similarity": math.nan}
    costs = cost(model, rows, max_tokens=rows.numel(), repeats=1, decode_tokens=0).models["as it is"]
    found["loss"] = min(costs["loss"], GUESS)
    found["int8"] = costs["loss_int8_dynamic"] - costs["loss"]
    cosines = collapse(model, rows[:MEASURED_ROWS], skip_layers=False).cosine
    found["similarity"] = statistics.mean(cosines[len(cosines) // 2 :])
    return found


def latency(placement: str, other: str, seed: int, repeats: int) -> float:
    """The time that the one placement takes for a forward pass over that of the other."""
    run = Run(depth=6, width=256, seed=seed)
    models = {name: make_model(replace(run, placement=name)) for name in (other, placement)}
    costs = cost(models, validation()[:MEASURED_ROWS], repeats=repeats, decode_tokens=0, quantization=False)
    return costs.models[placement]["prefill"]["ratio"]


@dataclass(frozen=True)
class Claim:
    """What is said, where, and the number that is positive where it holds, from what runs of a seed yield."""

    text: str
    source: str
    # of `get`, which takes the settings of a run and returns what it yields, or of `latency`; a number, or one for each part
    effect: Callable
    unit: str = "nats"
    times: bool = False  # whether it is about latency


def lost(get, one: dict, other: dict) -> float:
    """How much higher the loss of the one run is than that of the other."""
    return get(**one)["loss"] - get(**other)["loss"]


def beats_both(get, placement: str) -> tuple[float, float]:
    return lost(get, PRE, {"placement": placement}), lost(get, POST, {"placement": placement})


def at_best_rate(get, **settings) -> float:
    return min(get(**settings, learning_rate=rate)["loss"] for rate in (1e-3, 2e-3, 4e-3))


@functools.cache
def loss_of_frequencies() -> float:
    """The loss on the validation book of the training text's byte frequencies: what a model has that ignores the context."""
    counts = torch.cat([text(name) for name in BOOKS]).bincount(minlength=256).double() + 1
    return -(counts / counts.sum()).log()[validation()].mean().item()


def trained(get, **settings) -> float:
    """How far a run got below the loss of a model that ignores the context; a tenth of a nat is the least that counts."""
    return loss_of_frequencies() - 0.1 - get(**settings)["loss"]


PRE, POST, FEW_BYTES = {"placement": "pre"}, {"placement": "post"}, {"num_bytes": 20_000}
TALL_COLD = {"depth": 24, "warmup": 0.0}
CLIPPED, TINY_EPS = {"clip": 0.4}, {"eps": 1e-12}
DEEP = {"depth": 48, "width": 32, "rows": 4}
DEEPER = DEEP | {"depth": 100, "steps": 400}  # of 200, one DeepNorm in three needs all to begin
TALL = {"depth": 24}


def upper_similarity_below(get, placement: str, other: str) -> float:
    return get(placement=other, **TALL)["similarity"] - get(placement=placement, **TALL)["similarity"]


def gradient_above(get, placement: str, other: str) -> float:
    return get(placement=placement, **TALL)["gradient_growth"] - get(placement=other, **TALL)["gradient_growth"]


XIONG, ADMIN = "Xiong et al. 2020, arXiv:2002.04745", "Liu et al. 2020, arXiv:2004.08249"
DEEPNET, RESIDUAL = "Wang et al. 2022, arXiv:2203.00555", "Xie et al. 2023, arXiv:2304.14802"
PRACTICE = "practice"
# fmt: off
CLAIMS = (
    Claim("a warm-up helps Post-Norm more than Pre-Norm (24 layers)", XIONG,
          lambda get: lost(get, POST | TALL_COLD, POST | TALL) - lost(get, PRE | TALL_COLD, PRE | TALL)),
    Claim("at the start, gradients grow towards the output in Post-Norm more than in Pre-Norm (24 layers)", XIONG,
          lambda get: gradient_above(get, "post", "pre"), "of growth per layer"),
    Claim("Pre-Norm's upper layers change less than Post-Norm's (24 layers)", f"{ADMIN}; {RESIDUAL}",
          lambda get: upper_similarity_below(get, "post", "pre"), "cosine"),
    Claim("DeepNorm trains at 100 layers, where Post-Norm does not", DEEPNET,
          lambda get: (trained(get, placement="deepnorm", **DEEPER), -trained(get, placement="post", **DEEPER))),
    Claim("ResiDual's gradients are flatter than Post-Norm's (24 layers)", RESIDUAL,
          lambda get: gradient_above(get, "post", "resi_dual"), "of growth per layer"),
    Claim("ResiDual's upper layers change more than Pre-Norm's (24 layers)", RESIDUAL,
          lambda get: upper_similarity_below(get, "resi_dual", "pre"), "cosine"),
    Claim("Admin trains at 48 layers better than Post-Norm", ADMIN,
          lambda get: lost(get, POST | DEEP, {"placement": "admin"} | DEEP)),
    Claim("Post-Norm beats Pre-Norm when shallow (4 layers, each at the best of three rates)", f"{ADMIN}; {PRACTICE}",
          lambda get: at_best_rate(get, placement="pre", depth=4) - at_best_rate(get, placement="post", depth=4)),
    Claim("little data favours Pre-Norm, much data Post-Norm", PRACTICE,
          lambda get: (lost(get, POST | FEW_BYTES, PRE | FEW_BYTES), lost(get, PRE, POST))),
    Claim("Post-Norm trains better with an epsilon of 1e-6 than with BERT's 1e-12", PRACTICE,
          lambda get: lost(get, POST | TINY_EPS, POST)),
    Claim("clipping at 0.4 instead of 1 helps Post-Norm more than Pre-Norm", PRACTICE,
          lambda get: lost(get, POST, POST | CLIPPED) - lost(get, PRE, PRE | CLIPPED)),
    Claim("Pre-Norm has 5 % lower latency than Post-Norm", PRACTICE,
          lambda latency: latency("post", "pre") - 1.05, "of the time", times=True),
    Claim("Post-Norm loses less in int8 than Pre-Norm", PRACTICE,
          lambda get: get(**PRE)["int8"] - get(**POST)["int8"]),
    Claim("a learned gate beats both fixed placements", "hf_normswap's gates; GPAS, arXiv:2506.22049",
          lambda get: beats_both(get, "gated")),
    Claim("a learned gate costs at most 3 % of the time", PRACTICE,
          lambda latency: 1.03 - latency("gated", "pre"), "of the time", times=True),
    Claim("a student gets farther in the same steps with a Pre-Norm teacher than with a Post-Norm one", PRACTICE,
          lambda get: lost(get, PRE | {"depth": 6, "teacher": "post"}, PRE | {"depth": 6, "teacher": "pre"})),
    Claim("a hybrid (bottom Post, middle Pre, top gated) beats Pre-Norm and Post-Norm", "Mix-LN, arXiv:2412.13795; practice",
          lambda get: beats_both(get, HYBRID)),
)
# fmt: on


class Seed:
    """What claims ask: it notes the runs of a seed that are wanted and, once they are there, says what they yielded."""

    def __init__(self, seed: int, scale: float):
        self.seed, self.scale = seed, scale
        self.found: dict[Run, dict[str, float]] = {}

    def __call__(self, **settings) -> dict[str, float]:
        run = Run(seed=self.seed, **settings)
        run = replace(run, steps=round(run.steps * self.scale))
        return self.found.setdefault(run, dict.fromkeys(("loss", "int8", "similarity", "gradient_growth"), 0.0))

    def latency(self, first: str, second: str) -> float:
        return latency(first, second, self.seed, repeats=round(100 * self.scale))


def judge(effects: list[Any]) -> dict:
    """The mean of the effects of the seeds with its 95 % confidence interval (Student's t), and the verdict; of effects in
    parts, those of the part that holds least."""
    if isinstance(effects[0], tuple):
        return min(
            map(judge, map(list, zip(*effects))), key=lambda part: part["mean"] / max(part["half_width"], LEAST)
        )
    mean, error = statistics.mean(effects), stats.sem(effects)
    half = float(stats.t.ppf(0.975, len(effects) - 1) * error)
    verdict = "supported" if mean > max(half, LEAST) else "not supported" if -mean > max(half, LEAST) else UNDECIDED
    return {"effects": effects, "mean": mean, "half_width": half, "verdict": verdict}


def markdown(rows: list[dict]) -> str:
    lines = ["| claim | effect (positive: it holds) | verdict | source |", "|---|---|---|---|"]
    for row in rows:
        effect = f"{row['mean']:+.3f} ± {row['half_width']:.3f} {row['unit']}"
        lines.append(f"| {row['claim']} | {effect} | **{row['verdict']}** | {row['source']} |")
    return "\n".join(lines)


def plot(rows: list[dict]):
    """A matplotlib figure: for each claim its effects, and the interval of their mean, each over its own width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.4 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(reversed(rows)):
        size = (
            max(map(abs, [*row["effects"], row["mean"] + row["half_width"], row["mean"] - row["half_width"]])) or 1.0
        )
        axes.errorbar(row["mean"] / size, height, xerr=row["half_width"] / size, fmt="o", capsize=3, color="C0")
        axes.plot([effect / size for effect in row["effects"]], [height] * len(row["effects"]), "|", color="C1")
    axes.set_yticks(range(len(rows)), [row["claim"] for row in reversed(rows)], fontsize="small")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="effect, over the row's largest", xlim=(-1.1, 1.1), title="does not hold  |  holds")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps, and two seeds")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time, each on one thread")
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: an interval needs two at least")
    seeds = [Seed(seed, 0.25 if args.quick else 1.0) for seed in range(2 if args.quick else args.seeds)]
    args.output_dir.mkdir(parents=True, exist_ok=True)

    for claim, seed in itertools.product(CLAIMS, seeds):
        if not claim.times:
            claim.effect(seed)
    file = args.output_dir / "runs.jsonl"  # where an interrupted grid goes on
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    lines = [line for line in lines if line.endswith("\n")]  # the last one may have been cut
    file.write_text("".join(lines))
    known = {Run(**settings): found for settings, found in map(json.loads, lines)}
    runs = [run for seed in seeds for run in seed.found]
    todo = [run for run in runs if run not in known]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool, file.open("a") as log:
        for run, found in zip(todo, tqdm(pool.map(measure, todo), total=len(todo), desc="Runs")):
            known[run] = found
            print(json.dumps([asdict(run), found]), file=log, flush=True)
    for run in runs:
        seeds[run.seed].found[run] = known[run]
    rows = []
    for claim in CLAIMS:
        effects = [claim.effect(seed.latency if claim.times else seed) for seed in seeds]
        rows.append({"claim": claim.text, "source": claim.source, "unit": claim.unit} | judge(effects))
    (args.output_dir / "claims.md").write_text(markdown(rows) + "\n")
    details = plain({"claims": rows, "runs": [asdict(run) | seeds[run.seed].found[run] for run in runs]})
    (args.output_dir / "claims.json").write_text(json.dumps(details, indent=2) + "\n")
    plot(rows).savefig(args.output_dir / "claims.png", dpi=120)
    print(markdown(rows))


if __name__ == "__main__":
    main()
