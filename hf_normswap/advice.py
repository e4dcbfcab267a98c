"""Advice: what to train a placement with, from a table whose rows each name their source."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .conversion import WARM_STARTS
from .modeling.placements import NormSwapError, Placement, canonical_name, canonical_spec, get_placement, per_layer

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
