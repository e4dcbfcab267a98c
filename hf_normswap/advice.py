"""Advice: which placement, and what to train it with, from tables whose rows each name their source."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from .conversion import WARM_STARTS, check_config, load_config, unwrap
from .modeling.architectures import get_architecture
from .modeling.placements import (
    PLACEMENTS,
    NormSwapError,
    Placement,
    canonical_name,
    canonical_spec,
    get_placement,
    per_layer,
)
from .modeling.surgery import placements_of

FEW = 10_000  # rows of training data under which fine-tuning BERT is unstable (Zhang et al. 2020, section 3)
VASWANI, DEVLIN = "Vaswani et al. 2017, arXiv:1706.03762", "Devlin et al. 2019, arXiv:1810.04805"
XIONG, ZHANG = "Xiong et al. 2020, arXiv:2002.04745", "Zhang et al. 2020, arXiv:2006.05987"
ADMIN, DEEPNET = "Liu et al. 2020, arXiv:2004.08249, microsoft/admin-torch", "Wang et al. 2022, arXiv:2203.00555"
RESIDUAL, KEEL = "Xie et al. 2023, arXiv:2304.14802", "Chen and Wei 2026, arXiv:2601.19895, table 1"
ROBERTA, LLAMA = "Liu et al. 2019, arXiv:1907.11692", "Touvron et al. 2023, arXiv:2302.13971"
LLAMA2, BERT = "Touvron et al. 2023, arXiv:2307.09288", f"practice of fine-tuning BERT ({DEVLIN}: 2e-5 to 5e-5)"
HERE = "`recipes/retrofit_table.py`"

# fmt: off
KINDS: tuple[tuple[str, Any], ...] = (  # what a placement is trained like: the first that holds of its coordinates
    ("pre", lambda placement: not placement.uses("skip_norm")),  # or sandwich, Peri-LN (arXiv:2502.02732), res-post
    ("resi_dual", lambda placement: placement.uses("dual")),
    ("admin", lambda placement: dict(placement.learned).get("skip_gain", "morph") != "morph"),
    ("deepnorm", lambda placement: (placement.depth_exponent or 0) > 0 or placement.skip_gain > 1),
    ("post", lambda placement: True),  # or gates, which may lead there
)
TASKS: dict[str, tuple[str, float, str]] = {  # scheduler, weight decay, source
    "classification": ("linear", 0.01, f"practice of fine-tuning BERT ({DEVLIN})"),
    "multi_task": ("linear", 0.01, f"as for one task ({DEVLIN}); as MT-DNN (Liu et al. 2019, arXiv:1901.11504)"),
    "causal_lm": ("cosine", 0.1, f"as Llama 2 was pretrained and fine-tuned ({LLAMA2})"),
    "distillation": ("linear", 0.0, f"measured here: with the defaults of `heal` ({HERE})"),
    **dict.fromkeys(("masked_lm", "pretraining"), ("linear", 0.01, f"as BERT was pretrained ({DEVLIN})")),
}
ANY, SHALLOW, MIDDLE, DEEP = (1, math.inf), (1, 11), (12, 24), (25, math.inf)  # numbers of layers, both included
TUNE, NORMED = "finetune few distillation", "post deepnorm admin resi_dual"  # not pretraining, not pre
RULES: dict[str, list[tuple[str, tuple[float, float], str, Any, str]]] = {  # kinds, layers, cases, value, source
    "learning_rate": [
        ("pre", SHALLOW, TUNE, 1e-4, f"as for 12 to 24 layers; measured here: 6 layers heal with it ({HERE})"),
        ("pre", MIDDLE, TUNE, 1e-4, f"practice; Pre-Norm stands larger rates than Post-Norm ({XIONG}; {KEEL})"),
        ("pre", DEEP, TUNE, 6e-5, f"measured here: 30 layers train with it ({HERE}); less with depth, as in {KEEL}"),
        ("pre", ANY, "few", 5e-5, f"for little data the upper end of the {BERT}"),
        ("post", SHALLOW, TUNE, 5e-5, f"the upper end of the {BERT}"),
        ("post", MIDDLE, TUNE, 3e-5, f"between those for fewer and for more layers, from the {BERT}"),
        ("post", DEEP, "finetune few", 2e-5, f"the lower end of the {BERT}"),
        ("post", DEEP, "distillation", 6e-5, f"measured here: 30 layers heal to Post-Norm with it ({HERE})"),
        ("deepnorm admin resi_dual", ANY, TUNE, 5e-5, "that of a shallow Post-Norm at every depth, for which they are "
         f"made ({DEEPNET}; {ADMIN}; {RESIDUAL}); DeepNorm's limit is near Post-Norm's at 64 and 512 layers ({KEEL})"),
        (NORMED, ANY, "few", 3e-5, f"for little data, from the {BERT}"),
        ("pre", ANY, "pretraining", 3e-4, f"as LLaMA-7B ({LLAMA})"),
        ("post deepnorm", ANY, "pretraining", 1e-4, f"as BERT ({DEVLIN}); the limits are 3e-4 and 3.5e-4 in {KEEL}"),
        ("resi_dual", ANY, "pretraining", 5e-4, f"translation, width 256 ({RESIDUAL}, iwslt.yaml)"),
        ("admin", ANY, "pretraining", 1e-3, f"translation, width 512 ({ADMIN}, example)"),
    ],
    "warmup_steps": [  # per cent of the run, but at most so many steps, but at least so many per cent
        ("pre", ANY, "", (5, 1000, 0), f"5 % as in `heal`, 1,000 steps at most: it trains without, too ({XIONG})"),
        ("post", ANY, "finetune distillation pretraining", (10, 4000, 6), "against large gradients near the output "
         f"({XIONG}): 10 % ({ZHANG}), at most 4,000 steps ({VASWANI}), but never under 6 % ({ROBERTA})"),
        ("post", ANY, "few", (20, 2000, 6), f"practice: 2,000 steps, at most twice the 10 % in {ZHANG}"),
        ("deepnorm", ANY, "", (10, 4000, 0), f"10 % as in ProRes, arXiv:2603.05369; at most 4,000 as in {VASWANI}"),
        ("admin", ANY, "", (10, 8000, 0), f"10 % as in {ZHANG}; at most 8,000 steps as in {ADMIN}"),
        ("resi_dual", ANY, "", (6, 4000, 0), f"6 % as in {ROBERTA}; at most 4,000 steps as in {RESIDUAL}"),
    ],
    "max_grad_norm": [
        ("pre", ANY, "", 1.0, f"as in fine-tuning BERT ({ZHANG}) and Llama 2 ({LLAMA2})"),
        ("post", ANY, "", 0.4, f"practice: a third to a half of Pre-Norm's, for gradients near the output ({XIONG})"),
        ("deepnorm admin resi_dual", ANY, "", 1.0, f"as a guard; the scripts of {ADMIN}, and {RESIDUAL} do not clip"),
    ],
    "norm_eps": [(NORMED, ANY, "", 1e-6, "the least: BERT's 1e-12 is 0 in half precision (pytorch/pytorch#41527)")],
    "adam_beta2": [(NORMED, ANY, "pretraining", 0.98, f"as in {VASWANI}; {ADMIN}; {RESIDUAL}")],
}
# fmt: on
CAUTIOUS: dict[str, Any] = dict.fromkeys(RULES, min) | {"warmup_steps": max, "norm_eps": max}


@dataclass(frozen=True)
class TrainingDefaults:
    """What to train a placement with, under the names of [`~transformers.TrainingArguments`], and why."""

    learning_rate: float  # the highest
    warmup_steps: int  # of the optimizer, however many processes and accumulated batches make one
    max_grad_norm: float
    weight_decay: float  # for matrices
    lr_scheduler_type: str
    norm_eps: float | None = None  # the least epsilon of the norms; None: they keep theirs
    adam_beta2: float | None = None  # None: that of the optimizer
    reasons: dict[str, str] = field(default_factory=dict)  # for each value, with the source
    warnings: tuple[str, ...] = ()  # advice that is not a number

    def to_dict(self) -> dict[str, Any]:
        """The fields as a `dict`."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{key} = {value}: {self.reasons[key]}" for key, value in vars(self).items() if key in self.reasons]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def kinds_of(layers: Iterable[Placement]) -> set[str]:
    """The kinds that the placements of layers are."""
    return {next(kind for kind, holds in KINDS if holds(layer)) for layer in layers}


def warmup(share: tuple[int, int, int], total: int | None) -> int:
    """The steps that a row of `RULES` gives in a run of `total` steps, at most half of it, or in a long run."""
    percent, most, least = share
    if total is None:
        return most
    return min(max(min(math.ceil(total * percent / 100), most), math.ceil(total * least / 100)), total // 2)


def training_defaults(
    placement: Any,
    depth: int,
    task: str = "classification",
    num_samples: int | None = None,
    total_steps: int | None = None,
    *,
    warm_start: str = "calibrated",
    native: str = "pre",
) -> TrainingDefaults:
    """
    What to train a model of a placement with, from papers, practice and measurements.

    Args:
        placement (`str`, `Placement`, `dict` or `list`): as in [`convert_checkpoint`]; of a list the most cautious.
        depth (`int`): the number of layers.
        task (`str`, *optional*, defaults to `"classification"`):
            Or `"multi_task"`, `"masked_lm"`, `"causal_lm"`, `"distillation"` (as [`heal`] does), `"pretraining"`.
        num_samples (`int`, *optional*): rows with labels; under 10,000 the rules for little data hold.
        total_steps (`int`, *optional*): steps of the optimizer, which bound the warm-up; by default a long run.
        warm_start (`str`, *optional*, defaults to `"calibrated"`): how the model was converted.
        native (`str`, *optional*, defaults to `"pre"`): the placement in which it was pretrained.

    Returns:
        [`TrainingDefaults`]: the values, with a reason for each.

    Raises:
        [`NormSwapError`]: for an unknown placement, task or warm start, and for numbers below 1.
    """
    for name, number in (("depth", depth), ("num_samples", num_samples), ("total_steps", total_steps)):
        if number is not None and number < 1:
            raise NormSwapError(f"`{name}` must be at least 1, got {number!r}.")
    for name, value, known in (("task", task, TASKS), ("warm start", warm_start, WARM_STARTS)):
        if value not in known:
            raise NormSwapError(f"unknown {name} {value!r}. Available: {', '.join(known)}.")
    native = canonical_name(native)
    layers = per_layer(canonical_spec(placement), depth, native)
    kinds = kinds_of(layers)
    few = task in ("classification", "multi_task") and num_samples is not None and num_samples < FEW
    case = "few" if few else "finetune"
    case = task if task in ("pretraining", "distillation") else case

    values: dict[str, Any] = dict(zip(("lr_scheduler_type", "weight_decay"), TASKS[task]))
    reasons = dict.fromkeys(values, TASKS[task][2])
    for name, rows in RULES.items():
        found = []
        for names, (low, high), cases, best, source in rows:
            if low <= depth <= high and case in (cases or case).split():
                best = warmup(best, total_steps) if name == "warmup_steps" else best
                found += [(best, f"{kind}: {source}") for kind in names.split() if kind in kinds]
        if found:
            values[name], reasons[name] = CAUTIOUS[name](found, key=lambda pair: pair[0])

    if total_steps is None:
        reasons["warmup_steps"] += "; this is the most, in a long run: the number of steps is not known"
    moved = any(layer != get_placement(native) and "skip_norm" not in dict(layer.learned) for layer in layers)
    warnings = []
    if depth > 20 and "post" in kinds:
        warnings.append(f"Post-Norm is hard to train beyond 20 to 24 layers: pre, deepnorm, resi_dual ({DEEPNET}).")
    if task == "multi_task" and 12 <= depth <= 24 and len({*layers}) == 1:
        warnings.append("For several tasks try a hybrid: lower layers post, others pre (Mix-LN, arXiv:2412.13795).")
    if moved and warm_start == "none" and task != "pretraining":
        warnings.append('Weights as they are lose what they learned (README): `warm_start="calibrated"`, then `heal`.')
    if any(kind != "morph" for layer in layers for _, kind in layer.learned):
        warnings.append("Keep gates and gains out of weight decay: `Trainer` spares norms and biases only.")
    if any(layer.uses("dual") for layer in layers):
        warnings.append(f"In fp16 set `norm_dual_scale=0.05`, `norm_dual_eps=1e-7` ({RESIDUAL}, opus.yaml).")
    return TrainingDefaults(**values, reasons=reasons, warnings=tuple(warnings))


# --- which placement --------------------------------------------------------------------------------------------------

PERI, MIX = "Kim et al. 2025, arXiv:2502.02732", "Li et al. 2025, arXiv:2412.13795"
SWIN, VIT = "Liu et al. 2022, arXiv:2111.09883", "Dosovitskiy et al. 2021, arXiv:2010.11929"
INT8, GROMOV = "Dettmers et al. 2022, arXiv:2208.07339", "Gromov et al. 2024, arXiv:2403.17887"
SPEED = "measured here: `recipes/benchmark_layers.py`"
MUCH = 1_000_000  # rows; ours
NATIVE, HYBRID = "native", "hybrid"  # the placement that the model has; a quarter of the layers post, the others pre

# fmt: off
PURPOSES: dict[str, tuple[str | None, str]] = {  # task -> what it is for (None: as the architecture), task of `training_defaults`
    "generation": ("generation", "causal_lm"), "causal_lm": ("generation", "causal_lm"),
    "understanding": ("understanding", "classification"), "classification": ("understanding", "classification"),
    "masked_lm": ("understanding", "masked_lm"), "multi_task": ("multi_task", "multi_task"),
    "vision": ("vision", "classification"), "distillation": (None, "distillation"), "pretraining": (None, "pretraining"),
}
PRIORITIES = ("latency", "int8")
# Points are ours, the sources give the direction: 1 is a reason to try, 2 a reason to choose, 3 or more nearly forbids
# (below 0) the rest. (topic, when, points by placement, why, source)
THUMB: tuple[tuple[str, Callable[[Any], bool], dict[str, float], str, str], ...] = (
    ("stability", lambda facts: facts.depth < 12, {"post": 1, "resi_dual": 1},
     "with 6 layers a normed skip trains, and ends better than Pre-Norm (Post-Norm 27.8 against 27.3 BLEU, ResiDual 35.6 "
     "against 35.1)",
     f"{ADMIN}; {RESIDUAL}"),
    ("stability", lambda facts: 12 <= facts.depth <= 24, {"post": -1},
     "with 12 to 24 layers Post-Norm fails in some runs, or needs a long warm-up", f"{ADMIN}; {RESIDUAL}"),
    ("stability", lambda facts: 12 <= facts.depth <= 24, {"pre": 1, "sandwich": 1, "peri": 1, "deepnorm": 1, "admin": 1, "resi_dual": 1},
     "with 12 to 24 layers it trains without accidents", f"{XIONG}; {DEEPNET}; {RESIDUAL}; {PERI}"),
    ("stability", lambda facts: facts.depth > 24, {"post": -3, HYBRID: -1},
     "beyond 24 layers Post-Norm diverges without a remedy, in single layers too", f"{DEEPNET}; {KEEL}"),
    ("stability", lambda facts: facts.depth > 24, {"pre": 2, "sandwich": 2, "peri": 2, "deepnorm": 2, "resi_dual": 2},
     "beyond 24 layers it still trains", f"{XIONG}; {DEEPNET}; {RESIDUAL}; {PERI}"),
    ("collapse", lambda facts: facts.depth > 24, {"pre": -1},
     "the upper layers of a deep Pre-Norm change little", f"{RESIDUAL}; {MIX}; {GROMOV}"),
    ("task", lambda facts: facts.purpose == "generation", {"pre": 1, "peri": 1},
     "language models for generation are Pre-Norm, or norm the branches too", f"{LLAMA}; {PERI}"),
    ("task", lambda facts: facts.purpose == "understanding", {"post": 1, "deepnorm": 0.5},
     "encoders for understanding are Post-Norm since BERT", f"{DEVLIN}; {ROBERTA}"),
    ("task", lambda facts: facts.purpose == "multi_task", {HYBRID: 1},
     "for several tasks lower layers in Post-Norm and the others in Pre-Norm did better (41.3 against 36.9 on average; not "
     "in all replications)", f"{MIX}; contradicted in Sun et al. 2025, arXiv:2502.05795"),
    ("task", lambda facts: facts.purpose == "vision", {"pre": 1, "res_post": 1},
     "vision models are Pre-Norm, or norm the branches when large", f"{VIT}; {SWIN}"),
    ("data", lambda facts: facts.rows < FEW, {"post": -1, "deepnorm": -0.5, "resi_dual": -0.5},
     "with little data fine-tuning is unstable, and what newer placements gain is less", f"{ZHANG}; {KEEL}"),
    ("data", lambda facts: facts.rows < FEW, {NATIVE: 1},
     "little data cannot teach the layers another placement", f"{ZHANG}; measured here: README"),
    ("data", lambda facts: MUCH < facts.rows < math.inf, {"post": 0.5, "deepnorm": 1, "resi_dual": 1},
     "much data pays for a harder start with a better end", f"{ADMIN}; {KEEL}"),
    ("budget", lambda facts: facts.budget is not None and facts.budget < 1000, {"post": -1},
     "of fewer than 1,000 steps the warm-up takes a large part", f"{XIONG}; {ZHANG}"),
    ("latency", lambda facts: "latency" in facts.priorities, {"pre": 0.5},
     "practice says that Pre-Norm answers 5 to 8 % faster than Post-Norm; here it was 0.6 %, within the spread", SPEED),
    ("latency", lambda facts: "latency" in facts.priorities, {"resi_dual": -0.5, "sandwich": -0.5, "peri": -0.5, "gated": -0.5},
     "a second stream, norm or gate takes about 2 % more time", SPEED),
    ("int8", lambda facts: "int8" in facts.priorities, {"post": 1, "deepnorm": 1, "pre": -0.5},
     "practice says that a normed stream loses less in int8; outliers grow in un-normed ones", INT8),
)
# (placements that the model has, those it goes to, points, points if there are `steps` to heal, steps, what is lost, source)
HEALED = "measured here: `recipes/retrofit_table.py`"
COSTS: tuple[tuple[str, str, float, float, int, str], ...] = (
    ("any", "gated", 0, 0, 0, "it starts exactly where the model is"),
    ("post", "deepnorm resi_dual admin", 0, 0, 0, "the conversion is exact, and differs only in how it trains on"),
    ("post", "pre hybrid", -3, -2, 60, "calibrated, MiniLM keeps a cosine of 0.953 to its embeddings, healed 0.966 (0.976 after 200 "
     "steps)"),
    ("post", "sandwich peri res_post", -4, -3, 60, "calibrated, MiniLM keeps a cosine of 0.766 to its embeddings, healed 0.885"),
    ("pre", "post deepnorm resi_dual admin", -3, -2, 100, "calibrated, SmolLM2 loses 0.302 nats; healed for 100 steps it is at "
     "-0.100, where the source itself, trained as long, is at -0.205"),
    ("pre", "hybrid", -2, -1, 100, "as to Post-Norm, in a quarter of the layers"),
    ("pre", "sandwich peri", -4, -3, 100, "calibrated, SmolLM2 loses 1.619 nats"),
    ("pre", "res_post", -5, -4, 100, "calibrated, SmolLM2 loses 2.144 nats"),
    ("any", "any", -4, -3, 100, "what this conversion loses was not measured here: expect more than a nat"),
)
# fmt: on


@dataclass
class Facts:
    """What the rules of thumb look at."""

    depth: int
    purpose: str  # "generation", "understanding", "multi_task" or "vision"
    rows: float  # of training data; nan if not known
    budget: int | None  # optimizer steps
    priorities: tuple[str, ...]
    placement: str  # what the model has: a name, or "mixed"
    side: str  # whether its skips are normed: "post", or not: "pre"; else "mixed"
    scratch: bool  # whether there is nothing to keep


@dataclass
class Reason:
    """One line of the account of a placement."""

    points: float
    text: str
    source: str
    topic: str
    measured: bool = False  # on the user's model
    overruled: bool = False  # by a measurement; then the points do not count

    def __str__(self):
        points = "overruled" if self.overruled else f"{self.points:+g}"
        return f"{points}: {self.text} ({self.source})"


@dataclass
class Recommendation:
    """A placement, how to get there, what to train it with, and why."""

    placement: str | list[str]
    score: float
    warm_start: str
    heal_steps: int  # with [`heal`], before or while it is trained for the task
    reasons: list[Reason]
    settings: TrainingDefaults
    keep: bool  # whether the model has it already

    @property
    def name(self) -> str:
        """The placement in words."""
        if isinstance(self.placement, str):
            return self.placement
        return f"post in the lower {self.placement.count('post')} layers, pre in the others"

    def __str__(self):
        start = "keep it: nothing is converted" if self.keep else f'`warm_start="{self.warm_start}"`'
        start += f", then heal for {self.heal_steps} steps" if self.heal_steps else ""
        lines = [f"{self.name} ({self.score:+g}): {start}", *(f"  {reason}" for reason in self.reasons)]
        return "\n".join(lines + ["  " + line for line in str(self.settings).splitlines()])


@dataclass
class Advice:
    """Placements, the best first, and where measurements contradict the rules of thumb."""

    facts: Facts
    ranking: list[Recommendation]
    disagreements: list[str]

    def __iter__(self):
        return iter(self.ranking)

    def __getitem__(self, index: int) -> Recommendation:
        return self.ranking[index]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        found = asdict(self)
        found["facts"]["rows"] = None if math.isnan(self.facts.rows) else self.facts.rows
        return found

    def __str__(self):
        lines = [f"{self.facts.depth} layers of {self.facts.placement}, for {self.facts.purpose}"]
        lines += [f"{number}. {one}" for number, one in enumerate(self.ranking[:3], 1)]
        if others := [f"{one.name} ({one.score:+g})" for one in self.ranking[3:]]:
            lines.append(f"Behind these: {', '.join(others)}.")
        return "\n\n".join(lines + [f"Disagreement: {text}" for text in self.disagreements])


# Each reads the result of a diagnostic for a placement, and for the present one: points, and words. The thresholds are ours.
def _gradients(found: dict, reference: dict) -> tuple[float, str]:
    layers = [value for value in found["layers"] if value]
    factor = max(layers) / min(layers)
    return (
        -2 if factor > 10 else 1 if factor < 3 else 0
    ), f"gradients of its layers differ by a factor of {factor:.3g}"


def _collapse(found: dict, reference: dict) -> tuple[float, str]:
    upper = found["angular_distance"][len(found["angular_distance"]) // 2 :]
    idle = sum(angle < 0.05 for angle in upper)
    points = -1 if idle > len(upper) / 2 else 1 if idle == 0 else 0
    return points, f"{idle} of its {len(upper)} upper layers turn the stream by less than 0.05 of a half turn"


def _sensitivity(found: dict, reference: dict) -> tuple[float, str]:
    ratio = found["output_change"] / reference["output_change"]
    return _less(
        ratio, 1.5
    ), f"its output is {ratio:.3g} times as sensitive to its weights as that of the present placement"


def _max_rate(found: dict, reference: dict) -> tuple[float, str]:
    rates = [math.inf if (rate := one["max_learning_rate"]) is None else rate for one in (found, reference)]
    ends = {0.0: "at no learning rate tried", math.inf: "at every learning rate tried"}
    words = [ends.get(rate, f"up to a learning rate of {rate:.2g}") for rate in rates]
    ratio = 1.0 if rates[0] == rates[1] else rates[1] / (rates[0] or 1e-30)
    return _less(ratio, 2), f"it is stable {words[0]}, the present placement {words[1]}"


def _latency(found: dict, reference: dict) -> tuple[float, str]:
    ratios = [found[kind]["ratio"] / reference[kind]["ratio"] for kind in ("prefill", "decode") if kind in found]
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    return _less(worst, 1.03), f"it takes {worst:.3g} times the time of the present placement"


def _int8(found: dict, reference: dict) -> tuple[float, str]:
    lost, other = (
        max(one[f"loss_int8_{kind}"] - one["loss"] for kind in ("weights", "dynamic")) for one in (found, reference)
    )
    return _less(
        math.exp(lost - other), 1.01
    ), f"in int8 it loses {lost:+.3g} of the loss, the present placement {other:+.3g}"


def _less(ratio: float, margin: float) -> float:
    """One point for less than the present placement by a margin, one lost for more."""
    return 1 if ratio < 1 / margin else -1 if ratio > margin else 0


# name of the diagnostic -> what it speaks to, how it is read, definition
MEASURES: tuple[tuple[str, str, Callable[[dict, dict], tuple[float, str]], str], ...] = (
    ("gradient_profile", "stability", _gradients, XIONG),
    ("stability", "stability", _max_rate, KEEL),
    ("sensitivity", "stability", _sensitivity, ADMIN),
    ("collapse", "collapse", _collapse, GROMOV),
    ("cost", "latency", _latency, "measured on this machine"),
    ("cost", "int8", _int8, "measured on this machine"),
)


def as_results(measured: Any, present: str) -> dict[str, dict[str, dict]]:
    """`measured` as results by placement and name of the diagnostic: `{"post": {"collapse": {...}}}`."""
    names = {name for name, *_ in MEASURES} | {"residual_stream"}
    if measured and not set(measured) - names:
        measured = {present: measured}
    results: dict[str, dict[str, dict]] = {}

    def key(name: str) -> str:
        return present if name in ("as it is", NATIVE, present) else name if name == HYBRID else canonical_name(name)

    for placement, found in (measured or {}).items():
        for name, result in found.items():
            if name not in names:
                raise NormSwapError(
                    f"unknown diagnostic {name!r} in `measured`. Available: {', '.join(sorted(names))}."
                )
            result = result.to_dict() if hasattr(result, "to_dict") else result
            sides = result["models"] if name == "cost" else {placement: result}  # a cost compares placements itself
            for side, one in sides.items():
                results.setdefault(key(side), {})[name] = one
    return results


def read_facts(model_or_config: Any, task, num_samples, budget, priorities) -> tuple[Facts, Any, str, str]:
    """The facts, the placement that the model has, its native one, and the task of [`training_defaults`]."""
    config = model_or_config
    if isinstance(config, (str, PathLike)):
        config = load_config(config)
    elif hasattr(config, "parameters"):
        config = unwrap(config).config
    check_config(config)
    architecture = get_architecture(config)
    decodes = architecture.family != "bert" or getattr(config, "is_decoder", False)
    task = task or ("generation" if decodes else "understanding")
    if task not in PURPOSES:
        raise NormSwapError(f"unknown task {task!r}. Available: {', '.join(PURPOSES)}.")
    for name, number, least in (("num_samples", num_samples, 1), ("budget", budget, 0)):
        if number is not None and number < least:
            raise NormSwapError(f"`{name}` must be at least {least}, got {number!r}.")
    if unknown := sorted({*priorities} - {*PRIORITIES}):
        raise NormSwapError(f"unknown priorities {unknown}. Available: {', '.join(PRIORITIES)}.")
    purpose, trained_as = PURPOSES[task]
    purpose = purpose or ("generation" if decodes else "understanding")
    layers = placements_of(config)
    spec = getattr(config, "norm_placement", None) or architecture.native
    skips = {layer.uses("skip_norm") for layer in layers}
    side = "mixed" if len(skips) > 1 else "post" if skips == {True} else "pre"
    if layers[0].uses("output_norm"):
        side = "mixed"
    rows = math.nan if num_samples is None else num_samples
    name = spec if isinstance(spec, str) else "mixed"
    scratch = task == "pretraining"
    facts = Facts(len(layers), purpose, rows, budget, tuple(priorities), name, side, scratch)
    return facts, spec, architecture.native, trained_as


def price(facts: Facts, name: str) -> tuple[Reason, str, int]:
    """What a conversion costs, the warm start, and the steps of healing."""
    if name == facts.placement:
        return (
            Reason(0, "it is what the model has: nothing is lost and nothing has to be healed", HEALED, "conversion"),
            "none",
            0,
        )
    if facts.scratch:
        return Reason(0, "a new model has nothing to lose", "by definition", "conversion"), "none", 0
    fitting = (row for row in COSTS if row[0] in (facts.side, "any") and (row[1] == "any" or name in row[1].split()))
    _, _, points, healed, steps, lost = next(fitting)
    enough = steps and (facts.budget is None or facts.budget >= steps)
    reason = Reason(healed if enough else points, lost, HEALED, "conversion")
    if steps and not enough:
        reason.text += f"; to heal takes {steps} steps, and there are {facts.budget}"
    start = "none" if name == "gated" else "calibrated" if steps else "exact"
    return reason, start, steps if enough else 0


def advise(
    model_or_config: Any,
    task: str | None = None,
    num_samples: int | None = None,
    budget: int | None = None,
    measured: Any = None,
    *,
    priorities: Iterable[str] = (),
) -> Advice:
    """
    Which norm placement to train a model in: rules of thumb, what conversions cost, and what was measured on the model.

    Points are added up: those of the rules (`THUMB`), of the conversion (`COSTS`) and of measurements (`MEASURES`). To keep the
    present placement costs nothing, so that another one has to earn its conversion. Where a measurement speaks to the topic of a
    rule, the measurement counts and the rule does not; where the two say the opposite, that is said.

    Args:
        model_or_config (`PreTrainedModel`, `PretrainedConfig`, `str` or `os.PathLike`):
            The model, stock or converted, its config, its folder or its id on the Hub; only the config is read.
        task (`str`, *optional*): `"generation"` (`"causal_lm"`), `"understanding"` (`"classification"`, `"masked_lm"`),
            `"multi_task"`, `"vision"`, `"distillation"` or `"pretraining"` (from scratch); by default as the architecture is used.
        num_samples (`int`, *optional*): rows of training data.
        budget (`int`, *optional*): optimizer steps that can be spent, healing included; by default enough.
        measured (`dict`, *optional*): results of [`hf_normswap.diagnostics`], as such or as `dict`s, by the name of the function
            (`{"collapse": ...}`), of the model as it is, or of several placements (`{"pre": {"collapse": ...}, ...}`).
        priorities (`Iterable[str]`, *optional*): of `"latency"` and `"int8"`, what matters besides the loss.

    Returns:
        [`Advice`]: the ranking, with a [`Recommendation`] for each placement, and the disagreements.

    Raises:
        [`NormSwapError`]: for an unknown architecture, task, priority or diagnostic.
    """
    facts, spec, native, trained_as = read_facts(model_or_config, task, num_samples, budget, tuple(priorities))
    results = as_results(measured, facts.placement)
    lower = facts.depth // 4
    candidates: dict[str, Any] = {facts.placement: spec, **{name: name for name in PLACEMENTS}}
    if lower:
        candidates[HYBRID] = ["post"] * lower + ["pre"] * (facts.depth - lower)
    ranking, disagreements = [], []
    for name, placement in candidates.items():
        cost, warm_start, steps = price(facts, name)
        reasons = [cost]
        evidence = list(read_measures(results, name, facts))
        topics = {reason.topic for reason in evidence}
        for topic, holds, points, why, source in THUMB:
            value = points.get(name, 0) + (
                points.get(NATIVE, 0) if name == facts.placement and not facts.scratch else 0
            )
            if value and holds(facts):
                reasons.append(rule := Reason(value, why, source, topic, overruled=topic in topics))
                for found in evidence:
                    if found.topic == topic and found.points * value < 0:
                        disagreements.append(
                            f"of {name} the rule says that {rule.text} ({source}), but measured, {found.text}."
                        )
        reasons += evidence
        score = sum(reason.points for reason in reasons if not reason.overruled)
        left = max(budget - steps, 1) if budget else None
        settings = training_defaults(
            placement, facts.depth, trained_as, num_samples, left, warm_start=warm_start, native=native
        )
        keep = name == facts.placement
        ranking.append(Recommendation(placement, score, warm_start, steps, reasons, settings, keep))
    ranking.sort(key=lambda one: (-one.score, not one.keep))
    return Advice(facts, ranking, disagreements)


def read_measures(results: dict[str, dict[str, dict]], name: str, facts: Facts) -> Iterator[Reason]:
    """What was measured of a placement, as reasons."""
    for diagnostic, topic, read, source in MEASURES:
        if topic in PRIORITIES and topic not in facts.priorities:
            continue
        found = results.get(name, {}).get(diagnostic)
        reference = results.get(facts.placement, {}).get(diagnostic)
        compares = read not in (_gradients, _collapse)
        if found is None or (compares and (reference is None or name == facts.placement)):
            continue
        if topic == "int8" and "loss_int8_weights" not in found:
            continue
        points, text = read(found, reference or {})
        yield Reason(points, text, f"measured on this model, as in {source}", topic, measured=True)
