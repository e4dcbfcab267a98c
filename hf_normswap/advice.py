"""Advice: which placement, and what to train it with, from tables whose rows each name their source."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from os import PathLike
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig
from transformers.initialization import no_init_weights

from .conversion import WARM_STARTS, check_config, converted_config, load_config, present_spec, unwrap
from .diagnostics.measuring import plain
from .model_card import groups
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
from .warm_start import exact_config

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
    warmup_ratio: float | None = None  # while the number of steps is not known; `warmup_steps` is the most then
    reasons: dict[str, str] = field(default_factory=dict)  # for each value, with the source
    warnings: tuple[str, ...] = ()  # advice that is not a number

    def to_dict(self) -> dict[str, Any]:
        """The fields as a `dict`."""
        return asdict(self)

    def __str__(self) -> str:
        values = dict(vars(self))
        if (ratio := values.pop("warmup_ratio")) is not None:
            values["warmup_steps"] = f"{ratio:.0%} of the steps, at most {self.warmup_steps:,}"
        lines = [f"{key} = {value}: {self.reasons[key]}" for key, value in values.items() if key in self.reasons]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def whole(name: str, number: Any, least: int) -> int | None:
    """A number that may be `None`; [`NormSwapError`] if it is not whole, or below the least."""
    if number is None:
        return None
    if not (isinstance(number, Real) and float(number).is_integer() and float(number) >= least):
        raise NormSwapError(f"`{name}` must be at least {least}, got {number!r}: a whole number.")
    return int(float(number))


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
        whole(name, number, 1)
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
                chosen = warmup(best, total_steps) if name == "warmup_steps" else best
                found += [(chosen, f"{kind}: {source}", best) for kind in names.split() if kind in kinds]
        if found:
            values[name], reasons[name], row = CAUTIOUS[name](found, key=lambda entry: entry[0])
            if name == "warmup_steps" and total_steps is None:
                values["warmup_ratio"], reasons["warmup_ratio"] = row[0] / 100, reasons[name]

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
COGVIEW = "Ding et al. 2021, arXiv:2105.13290"
SPEED = "measured here: `recipes/benchmark_layers.py`"
MUCH = 1_000_000  # rows; ours
EPOCHS, BATCH = 3, 32  # of a run whose steps are not known, but whose rows are (Devlin et al. 2019, appendix A.3)
NATIVE, HYBRID = "native", "hybrid"  # the placement that the model has; a quarter of the layers post, the others pre

# fmt: off
PURPOSES: dict[str, tuple[str | None, str]] = {  # task -> what it is for (None: as the architecture), task of `training_defaults`
    "generation": ("generation", "causal_lm"), "causal_lm": ("generation", "causal_lm"),
    "understanding": ("understanding", "classification"), "classification": ("understanding", "classification"),
    "masked_lm": ("understanding", "masked_lm"), "multi_task": ("multi_task", "multi_task"),
    "vision": ("vision", "classification"), "distillation": (None, "distillation"), "pretraining": (None, "pretraining"),
}
PRIORITIES = ("latency", "int8")
NORMED_SKIPS = dict.fromkeys(NORMED.split(), 1)
# Points are ours, the sources give the direction: 1 is a reason to try, 2 a reason to choose, 3 or more nearly forbids
# (below 0) the rest. (topic, when, points by placement, why, source)
THUMB: tuple[tuple[str, Callable[[Any], bool], Mapping[str, float], str, str], ...] = (
    ("stability", lambda facts: facts.depth < 12, NORMED_SKIPS,
     "with 6 layers a normed skip trains, and ends better than Pre-Norm (Post-Norm 27.8 against 27.3 BLEU, ResiDual 35.6 "
     "against 35.1)",
     f"{ADMIN}; {RESIDUAL}"),
    ("stability", lambda facts: 12 <= facts.depth <= 24, {"post": -1},
     "with 12 to 24 layers Post-Norm fails in some runs, or needs a long warm-up", f"{ADMIN}; {RESIDUAL}"),
    ("stability", lambda facts: 12 <= facts.depth <= 24, {"pre": 1, "sandwich": 1, "peri": 1, "deepnorm": 1, "admin": 1, "resi_dual": 1},
     "with 12 to 24 layers it trains without accidents", f"{XIONG}; {DEEPNET}; {ADMIN}; {RESIDUAL}; {COGVIEW}; {PERI}"),
    ("stability", lambda facts: facts.depth > 24, {"post": -3, HYBRID: -1},
     "beyond 24 layers Post-Norm diverges without a remedy, in single layers too", f"{DEEPNET}; {KEEL}"),
    ("stability", lambda facts: facts.depth > 24, {"pre": 2, "sandwich": 2, "peri": 2, "deepnorm": 2, "resi_dual": 2},
     "beyond 24 layers it still trains", f"{XIONG}; {DEEPNET}; {RESIDUAL}; {COGVIEW}; {PERI}"),
    ("collapse", lambda facts: facts.depth > 24, {"pre": -1},
     "the upper layers of a deep Pre-Norm change little", f"{RESIDUAL}; {MIX}; {GROMOV}"),
    ("task", lambda facts: facts.purpose == "generation", {"pre": 1, "sandwich": 1, "peri": 1},
     "language models for generation are Pre-Norm, or norm the branches too", f"{LLAMA}; {PERI}"),
    ("task", lambda facts: facts.purpose == "understanding", {"post": 1},
     "encoders for understanding are Post-Norm since BERT", f"{DEVLIN}; {ROBERTA}"),
    ("task", lambda facts: facts.purpose == "multi_task", {HYBRID: 1},
     "for several tasks lower layers in Post-Norm and the others in Pre-Norm did better (41.3 against 36.9 on average; not "
     "in all replications)", f"{MIX}; contradicted in Sun et al. 2025, arXiv:2502.05795"),
    ("task", lambda facts: facts.purpose == "vision", {"pre": 1, "res_post": 1},
     "vision models are Pre-Norm, or norm the branches when large", f"{VIT}; {SWIN}"),
    ("data", lambda facts: facts.rows < FEW, {NATIVE: 1},
     "with little data fine-tuning is unstable, and cannot teach the layers another placement", f"{ZHANG}; measured here: README"),
    ("data", lambda facts: MUCH < facts.rows < math.inf, NORMED_SKIPS,
     "much data pays for the harder start of a normed skip with a better end", f"{ADMIN}; {KEEL}"),
    ("budget", lambda facts: facts.budget is not None and facts.budget < 1000, {"post": -1, "deepnorm": -1, "admin": -1},
     "of fewer than 1,000 steps its warm-up takes a large part", f"{XIONG}; {ZHANG}"),
    ("latency", lambda facts: "latency" in facts.priorities, {"resi_dual": -0.5, "sandwich": -0.5, "peri": -0.5, "gated": -0.5},
     "a second stream, norm or gate is more to compute, about 2 % in a LLaMA and less than the spread in BERT (that Post-Norm is 5 "
     "to 8 % slower than Pre-Norm, as practice says, was not seen)", SPEED),
    ("int8", lambda facts: "int8" in facts.priorities, NORMED_SKIPS,
     "in practice a normed stream loses less in int8; outliers grow in un-normed ones", INT8),
)
# What conversions cost that are not exact: (skips of the model, placements it goes to, points, points if there are `steps` to heal,
# steps, what is lost)
HEALED = "measured here: `recipes/retrofit_table.py`"
EXACT = -1  # points: what keeps the function changes how it trains on, and has to earn that
COSTS: tuple[tuple[str, str, float, float, int, str], ...] = (
    ("post", "pre hybrid", -3, -2, 60, "calibrated, MiniLM keeps a cosine of 0.953 to its embeddings, healed 0.966 (0.976 after 200 "
     "steps)"),
    ("post", "sandwich peri res_post", -4, -3, 60, "calibrated, MiniLM keeps a cosine of 0.766 to its embeddings, healed 0.885"),
    ("pre", "post deepnorm resi_dual admin", -3, -2, 100, "calibrated, SmolLM2 loses 0.302 nats; healed for 100 steps, it is 0.100 "
     "nats below the source, which gains 0.205 nats itself if trained as long"),
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
    measured: bool = False  # on the user's model, in this placement
    overruled: bool = False  # by a measurement that says the opposite; then the points do not count

    def __str__(self):
        points = "overruled" if self.overruled else f"{self.points:+g}"
        return f"{points}: {self.text} ({self.source})"


@dataclass
class Recommendation:
    """A placement, how to get there, what to train it with, and why."""

    placement: Any  # as `convert_checkpoint` takes it
    name: str  # of the placement, in words
    score: float
    warm_start: str
    start: str  # what to do, in words
    heal_steps: int  # with [`heal`], before or while it is trained for the task
    reasons: list[Reason]
    settings: TrainingDefaults
    keep: bool  # whether the model has it already

    def __str__(self):
        lines = [f"{self.name} ({self.score:+g}): {self.start}", *(f"  {reason}" for reason in self.reasons)]
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
        return plain(asdict(self))

    def __str__(self):
        present = next(one.name for one in self.ranking if one.keep)
        lines, others = [f"{self.facts.depth} layers of {present}, for {self.facts.purpose}"], []
        for number, one in enumerate(self.ranking, 1):
            if number <= 3 or one.keep:
                lines.append(f"{number}. {one}")
            else:
                others.append(f"{number}. {one.name} ({one.score:+g})")
        lines += [f"Behind these: {', '.join(others)}."] if others else []
        return "\n\n".join(lines + [f"Disagreement: {text}" for text in self.disagreements])


def describe(spec: Any) -> str:
    """A placement in words."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Mapping):
        learned = [f"{name} learned" for name, _ in spec.get("learned", ())]
        return ", ".join([f"{name}={value:g}" for name, value in spec.items() if name != "learned"] + learned)
    return ", ".join(f"{name} in {which}" for which, name in groups(list(map(describe, spec))))


def unevenness(layers: Iterable[float]) -> float:
    """The largest norm of the gradient of a layer over the smallest; frozen layers, which have none, do not count."""
    trained = [value for value in layers if value != 0]
    if len(trained) < 2:
        raise ValueError("there are no two layers to compare")
    return max(trained) / min(trained)


def _no_task(*results: dict) -> bool:
    """Whether the loss was that of a random target, as it is of models that predict nothing."""
    return any(found.get("objective") == "random target" for found in results if found)


# Each reads the result of a diagnostic for a placement, and for the present one: points, and words. The thresholds are ours.
# What they raise for a result that says nothing (`None` for what is not finite, zeros, empty lists) is caught in `read_measures`.
def _gradients(found: dict, reference: dict) -> tuple[float, str]:
    factor = unevenness(found["layers"])
    words = f"gradients of its layers differ by a factor of {factor:.3g}"
    if _no_task(found):
        return 0, f"{words}; they are those of a random target, and of no task"
    return -2 if factor > 10 else 1 if factor < 3 else 0, words


def _collapse(found: dict, reference: dict) -> tuple[float, str]:
    upper = found["angular_distance"][len(found["angular_distance"]) // 2 :]
    idle = sum(angle < 0.05 for angle in upper)
    if min(upper) >= 0.05:
        return 1, f"all {len(upper)} upper layers turn the stream by at least 9 degrees"
    return -(idle > len(upper) / 2), f"{idle} of its {len(upper)} upper layers turn the stream by less than 9 degrees"


def _sensitivity(found: dict, reference: dict) -> tuple[float, str]:
    ratio = found["output_change"] / reference["output_change"]
    words = f"its output is {ratio:.2g} times as sensitive".replace("is 1 times as", "is as")
    return _less(math.log(ratio), math.log(1.5)), f"{words} to its weights as that of the present placement"


def _max_rate(found: dict, reference: dict) -> tuple[float, str]:
    rates = [math.inf if (rate := one["max_learning_rate"]) is None else rate for one in (found, reference)]
    ends = {0.0: "at no learning rate tried", math.inf: "at every learning rate tried"}
    words = [ends.get(rate, f"up to a learning rate of {rate:.2g}") for rate in rates]
    ratio = 1.0 if rates[0] == rates[1] else rates[1] / (rates[0] or 1e-30)
    return (1 if ratio < 0.5 else -1 if ratio > 2 else 0), f"it is stable {words[0]}, the present placement {words[1]}"


def _latency(found: dict, reference: dict) -> tuple[float, str]:
    kinds = [kind for kind in ("prefill", "decode") if kind in found and kind in reference]
    pairs = []  # how much longer it takes, and what is noise
    for kind in kinds:
        spread = max(one[kind].get("spread") or 0.0 for one in (found, reference))
        pairs.append((found[kind]["ratio"] / reference[kind]["ratio"], spread, max(0.05, 3 * spread)))
    ratio, spread, noise = max(pairs, key=lambda pair: abs(pair[0] - 1) / pair[2])
    words = f"it takes {ratio:.3g}{f' ± {spread:.1g}' if spread else ''} times the time of the present placement"
    return _less(ratio - 1, noise), words if abs(ratio - 1) > noise else f"{words}, which is not distinguishable"


def _int8(found: dict, reference: dict) -> tuple[float, str]:
    if _no_task(found, reference):
        moved, other = (
            max(one[f"output_change_int8_{kind}"] for kind in ("weights", "dynamic")) for one in (found, reference)
        )
        words = f"int8 changes its output by {moved:.2g} of its size, and that of the present placement by {other:.2g}"
        return _less(math.log(moved / other), math.log(1.5)), words
    lost, other = (
        max(one[f"loss_int8_{kind}"] - one["loss"] for kind in ("weights", "dynamic")) for one in (found, reference)
    )
    return _less(
        lost - other, 0.01
    ), f"int8 adds {lost:.3g} to its loss, and {other:.3g} to that of the present placement"


def _less(difference: float, margin: float) -> float:
    """One point for less than the present placement by a margin, one lost for more."""
    return 1 if difference < -margin else -1 if difference > margin else 0


# name of the diagnostic -> what it speaks to, how it is read, definition
MEASURES: tuple[tuple[str, str, Callable[[dict, dict], tuple[float, str]], str], ...] = (
    ("gradient_profile", "stability", _gradients, f", as in {XIONG}"),
    ("stability", "stability", _max_rate, f", as in {KEEL}"),
    ("sensitivity", "stability", _sensitivity, f", as in {ADMIN}"),
    ("collapse", "collapse", _collapse, f", as in {GROMOV}"),
    ("cost", "latency", _latency, " and machine"),
    ("cost", "int8", _int8, ""),
)
FIELDS = {  # what each diagnostic has in any case
    "gradient_profile": "layers",
    "stability": "max_learning_rate",
    "sensitivity": "output_change",
    "collapse": "angular_distance",
    "cost": "models",
    "residual_stream": "rms",
}


def as_results(measured: Any, present: str, depth: int | None = None) -> dict[str, dict[str, dict]]:
    """`measured` as results by placement and name of the diagnostic: `{"post": {"collapse": {...}}}`."""

    def mapping(value: Any, what: str) -> dict:
        value = value.to_dict() if hasattr(value, "to_dict") else value
        if not isinstance(value, Mapping):
            raise NormSwapError(f"{what} must be results by name, got {type(value).__name__}.")
        return plain(value)

    def side_of(name: str) -> str:
        if name in ("as it is", NATIVE, present, HYBRID):
            return name if name == HYBRID else present
        try:
            return canonical_name(name)
        except NormSwapError as error:
            raise NormSwapError(f"in `measured`: {error} Diagnostics: {', '.join(FIELDS)}.") from None

    measured = mapping({} if measured is None else measured, "`measured`")
    if "measures" in measured:  # a report
        about = mapping(measured.get("about"), "`about` of a report")
        if (measured.get("source"), about.get("layers")) != (present, depth):
            theirs = f"{about.get('layers')} layers of {measured.get('source')}"
            raise NormSwapError(f"the report is of another model: {theirs}, and this one has {depth} of {present}.")
        measured = mapping(measured["measures"], "`measures` of a report")
    if measured and not set(measured) - FIELDS.keys():
        measured = {present: measured}
    results: dict[str, dict[str, dict]] = {}
    for placement, found in measured.items():
        where = side_of(placement)
        for name, result in mapping(found, f"what was `measured` of {placement}").items():
            if name not in FIELDS:
                raise NormSwapError(f"unknown diagnostic {name!r} in `measured`. Available: {', '.join(FIELDS)}.")
            result = mapping(result, f"`{name}` of {placement}")
            if FIELDS[name] not in result:
                raise NormSwapError(f"`{name}` of {placement} has no `{FIELDS[name]}`: it is no result of `{name}`.")
            sides = mapping(result["models"], "`models` of `cost`") if name == "cost" else {where: result}
            kept = {"objective": result["objective"]} if "objective" in result else {}
            for side, one in sides.items():  # a cost compares placements itself
                results.setdefault(side_of(side), {})[name] = kept | mapping(one, f"`{name}` of {side}")
    return results


def read_config(model_or_config: Any) -> Any:
    """The config of a model, of a folder or id, or itself; refuses what cannot be converted."""
    config = model_or_config
    if isinstance(config, (str, PathLike)):
        try:
            config = load_config(config)
        except (OSError, ValueError) as error:
            if isinstance(error, NormSwapError):
                raise
            raise NormSwapError(f"{model_or_config} cannot be read: {' '.join(str(error).split())}") from error
    elif hasattr(config, "parameters"):
        config = unwrap(config).config
    if not isinstance(config, PreTrainedConfig):
        kind = type(config).__name__
        raise NormSwapError(f"expected a Transformers model, its config, a folder or a model id, got {kind}.")
    check_config(config)
    if not placements_of(config):
        raise NormSwapError("the model has no layers, so there is no placement to choose.")
    return config


def read_facts(config: Any, task, num_samples, budget, priorities) -> tuple[Facts, str]:
    """The facts, and the task of [`training_defaults`]."""
    decodes = get_architecture(config).family != "bert" or getattr(config, "is_decoder", False)
    task = task or ("generation" if decodes else "understanding")
    if task not in PURPOSES:
        raise NormSwapError(f"unknown task {task!r}. Available: {', '.join(PURPOSES)}.")
    num_samples, budget = whole("num_samples", num_samples, 1), whole("budget", budget, 0)
    priorities = (priorities,) if isinstance(priorities, str) else tuple(priorities or ())
    if unknown := sorted({*priorities} - {*PRIORITIES}):
        raise NormSwapError(f"unknown priorities {unknown}. Available: {', '.join(PRIORITIES)}.")
    purpose, trained_as = PURPOSES[task]
    purpose = purpose or ("generation" if decodes else "understanding")
    layers = placements_of(config)
    skips: set[Any] = {"learned" if "skip_norm" in dict(layer.learned) else layer.skip_norm for layer in layers}
    side = (
        "mixed"
        if layers[0].uses("output_norm") or len(skips) > 1
        else {0.0: "pre", 1.0: "post"}.get(skips.pop(), "mixed")
    )
    rows = math.nan if num_samples is None else num_samples
    spec = present_spec(config)
    name = spec if isinstance(spec, str) else "mixed"
    return Facts(len(layers), purpose, rows, budget, priorities, name, side, task == "pretraining"), trained_as


def start_of(model: Any, placement: Any, layers: list[int] | None = None) -> str | None:
    """
    The warm start for a placement: what the conversion itself says.

    Args:
        model (`PreTrainedModel`): stock or converted; it may be without data.
        placement (`str`, `Placement`, `dict` or `list`): as in [`convert_checkpoint`].
        layers (`list` of `int`, *optional*): as there.

    Returns:
        `str` or `None`: `"exact"` where nothing has to move, `"none"` for gates on what is learned, which start where the model is,
        else `"calibrated"`; `None` if the model has this placement.
    """
    config = model.config
    current = converted_config(config, [canonical_spec(layer) for layer in placements_of(config)], None)
    target = converted_config(config, canonical_spec(placement), layers)
    if placements_of(target) == placements_of(current):
        return None
    try:
        return "calibrated" if exact_config(model, current, target).norm_target is not None else "exact"
    except NormSwapError:
        return "none" if placement == "gated" else "calibrated"


def price(facts: Facts, name: str, start: str | None) -> tuple[Reason, str, int]:
    """What a conversion costs, what to do in words, and the steps of healing."""
    if facts.scratch:
        reason = Reason(0, "a new model has nothing to lose", "by definition", "conversion")
        return reason, "train it from new weights", 0
    if start is None:
        text = "it is what the model has: nothing is lost and nothing has to be healed"
        return Reason(0, text, "by definition", "conversion"), "keep it: nothing is converted", 0
    if start != "calibrated":
        text = "the conversion is exact: it differs in how it trains on, which has to earn the change"
        return Reason(EXACT, text, "README", "conversion"), f'`warm_start="{start}"`', 0
    fitting = (row for row in COSTS if row[0] in (facts.side, "any") and (row[1] == "any" or name in row[1].split()))
    _, _, points, healed, steps, lost = next(fitting)
    if facts.budget is None or facts.budget >= steps:
        reason = Reason(healed, lost, HEALED, "conversion")
        return reason, f'`warm_start="calibrated"`, then heal for {steps} steps', steps
    lost += f"; to heal takes {steps} steps, and there are {facts.budget}"
    return Reason(points, lost, HEALED, "conversion"), '`warm_start="calibrated"`', 0


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
    present placement costs nothing, so that another one has to earn its conversion; of equal scores the cheaper conversion comes
    first. A measurement overrules a rule on the same topic if it says the opposite, and that is said; else both count. What was
    not measured of a placement is taken to be as in the present one, so that nothing wins because it was not looked at. Gates
    start as the present placement, so that its rules and measurements are theirs.

    Args:
        model_or_config (`PreTrainedModel`, `PreTrainedConfig`, `str` or `os.PathLike`):
            The model, stock or converted, its config, its folder or its id on the Hub; only the config is read.
        task (`str`, *optional*): `"generation"` (`"causal_lm"`), `"understanding"` (`"classification"`, `"masked_lm"`),
            `"multi_task"`, `"vision"`, `"distillation"` or `"pretraining"` (from scratch); by default as the architecture is used.
        num_samples (`int`, *optional*): rows of training data. Without a budget, the warm-up is that of 3 epochs in batches of 32.
        budget (`int`, *optional*): optimizer steps that can be spent, healing included; by default enough.
        measured (`dict` or [`Diagnosis`], *optional*): results of [`hf_normswap.diagnostics`], as such or as `dict`s, by the name of
            the function (`{"collapse": ...}`), of the model as it is, or of several placements (`{"pre": {"collapse": ...}, ...}`);
            or what [`diagnose`] found. A result that says nothing (it is not finite, say) gives no reason.
        priorities (`str` or `Iterable[str]`, *optional*): of `"latency"` and `"int8"`, what matters besides the loss.

    Returns:
        [`Advice`]: the ranking, with a [`Recommendation`] for each placement, and the disagreements.

    Raises:
        [`NormSwapError`]: for an unknown architecture, task, priority, placement or diagnostic, and for a model without layers.
    """
    config = read_config(model_or_config)
    facts, trained_as = read_facts(config, task, num_samples, budget, priorities)
    results = as_results(measured, facts.placement, facts.depth)
    model: Any = unwrap(model_or_config) if hasattr(model_or_config, "parameters") else None
    if model is None:
        with torch.device("meta"), no_init_weights():
            model = AutoModel.from_config(config, trust_remote_code=False)
    lower = facts.depth // 4
    candidates: dict[str, Any] = {facts.placement: present_spec(config), **{name: name for name in PLACEMENTS}}
    if lower:
        candidates[HYBRID] = ["post"] * lower + ["pre"] * (facts.depth - lower)
    ranking: list[Recommendation] = []
    contradicted: dict[str, list[str]] = {}
    for name, placement in candidates.items():
        start = None if name == facts.placement else start_of(model, placement)
        keep = name == facts.placement
        if start is None and not keep:
            continue  # another name of the present one
        cost, words, steps = price(facts, name, start)
        evidence = list(read_measures(results, name, facts))
        reasons = [cost]
        for topic, holds, points, why, source in THUMB:
            value = points.get(name, 0) + (points.get(NATIVE, 0) if keep and not facts.scratch else 0)
            value += points.get(facts.placement, 0) if name == "gated" and not keep else 0
            if not value or not holds(facts):
                continue
            against = [one for one in evidence if one.measured and one.topic == topic and one.points * value < 0]
            reasons.append(Reason(value, why, source, topic, overruled=bool(against)))
            if against:
                text = f"{why} ({source}); but measured, {'; '.join(one.text for one in against)}"
                contradicted.setdefault(text, []).append(name)
        reasons += evidence
        left, run = run_length(facts, steps)
        settings = training_defaults(
            placement,
            facts.depth,
            trained_as,
            None if math.isnan(facts.rows) else int(facts.rows),
            left,
            warm_start=start or "exact",
            native=get_architecture(config).native,
        )
        settings.reasons["warmup_steps"] += run
        score = sum(reason.points for reason in reasons if not reason.overruled)
        warm_start = "none" if facts.scratch or start is None else start
        ranking.append(
            Recommendation(placement, describe(placement), score, warm_start, words, steps, reasons, settings, keep)
        )
    seen = [describe(candidates[name]) for name in results if name in candidates]
    ranking.sort(key=lambda one: (-one.score, -one.reasons[0].points, not one.keep, one.name not in seen))
    return Advice(facts, ranking, [f"{', '.join(names)}: {text}." for text, names in contradicted.items()])


def run_length(facts: Facts, heal_steps: int) -> tuple[int | None, str]:
    """The optimizer steps of training, if they are known or can be guessed, and where they are from."""
    if facts.budget is not None:
        steps, words = max(facts.budget - heal_steps, 1), "what is left of the budget"
    elif facts.rows > 0 and not facts.scratch:
        steps, words = EPOCHS * math.ceil(facts.rows / BATCH), f"{EPOCHS} epochs in batches of {BATCH}"
    else:
        return None, ""
    return steps, f"; in a run of {steps:,}: {words}"


def read_measures(results: dict[str, dict[str, dict]], name: str, facts: Facts) -> Iterator[Reason]:
    """What was measured of a placement, as reasons."""
    for diagnostic, topic, read, source in MEASURES:
        if topic in PRIORITIES and topic not in facts.priorities:
            continue
        reference = results.get(facts.placement, {}).get(diagnostic)
        compares = read not in (_gradients, _collapse)
        if compares and (reference is None or name == facts.placement):
            continue
        own = results.get(name, {}).get(diagnostic)
        for found in (own,) if compares else (own, reference):
            try:
                points, text = read(found, reference)  # type: ignore[arg-type]
            except (TypeError, KeyError, ValueError, ArithmeticError):  # it was not measured, or says nothing
                continue
            where = "this model"
            if found is not own:
                where = f"{facts.placement}, as which it starts" if name == "gated" else facts.placement
                text = text if name == "gated" else f"not measured, taken as {facts.placement}: {text}"
            measured = found is own or name == "gated"
            yield Reason(points, text, f"measured on {where}{source}", topic, measured=measured)
            break
