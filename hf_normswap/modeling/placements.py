"""The placement space: where the norms of a residual branch stand, as coordinates, and the published corners by name.

Write `z` for the residual stream, `N` for the norm in front of a branch, `F` for the branch (attention, cross-attention
or MLP) and `N'` for a norm behind it. One formula covers them all:

    y  = N(z)
    x  = (1 - input_norm) * z + input_norm * y                         what the branch reads
    f  = branch_gain * ((1 - output_norm) * F(x) + output_norm * N'(F(x)))
    z' = (1 - skip_norm) * z + skip_norm * skip_gain * y + f           what the skip carries, plus the branch
    d' = d + f                                                         the second stream of `dual` placements
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIXES = ("skip_norm", "input_norm", "output_norm", "stem_norm", "dual")  # between 0 and 1
COORDINATES = (*MIXES[:3], "skip_gain", "branch_gain")  # of each branch


class NormSwapError(ValueError):
    """What hf_normswap raises when it refuses: it names the thing, the reason and the way out, before any change."""


@dataclass(frozen=True)
class Placement:
    """A point of the placement space, the same for every branch of a layer."""

    skip_norm: float = 0.0  # 0: the skip carries z, 1: it carries N(z)
    input_norm: float = 1.0  # 0: the branch reads z, 1: it reads N(z)
    output_norm: float = 0.0  # 1: the branch's output passes a norm of its own
    skip_gain: float = 1.0  # factor on the normed skip
    branch_gain: float = 1.0  # factor on the branch
    depth_exponent: float | None = None  # if given, skip_gain = (number of branches in the model) ** depth_exponent
    dual: float = 0.0  # 1: a second, never normed stream, whose norm is added at the end
    stem_norm: float = 0.0  # 1: the embeddings are normed, where the architecture does not do so already
    learned: tuple[tuple[str, str], ...] = ()  # tensors: trained per "branch" or "channel", or moved by a "morph"
    name: str = field(default="custom", compare=False)
    formula: str = field(default="", compare=False, repr=False)
    diagram: str = field(default="", compare=False, repr=False)
    paper: str = field(default="", compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "learned", tuple(dict(self.learned).items()))
        for name in {*MIXES, *COORDINATES}:
            limit = 1 if name in MIXES else 1e9
            if not isinstance(value := getattr(self, name), (int, float)) or not 0 <= value <= limit:
                raise NormSwapError(f"`{name}` of a placement must lie between 0 and {limit:g}, got {value!r}.")
        names, kinds = dict.fromkeys(COORDINATES + MIXES), ("branch", "channel", "layer", "morph")
        if any(name not in names or kind not in kinds for name, kind in self.learned):
            raise NormSwapError(f"`learned` takes {', '.join(names)}, each one of {', '.join(kinds)}.")

    def uses(self, name: str) -> bool:
        """Whether what a mix leads to is computed at all: `N(z)`, `N'(F(x))`, the norm of the stem, the second stream."""
        return getattr(self, name) > 0 or name in dict(self.learned)

    @property
    def uses_norm(self) -> bool:
        """Whether `y = N(z)` is read at all."""
        return self.uses("skip_norm") or self.uses("input_norm")

    @property
    def uses_stream(self) -> bool:
        """Whether `z` itself is read besides `y`."""
        return self.skip_norm < 1 or self.input_norm < 1 or any(name in COORDINATES[:2] for name, _ in self.learned)


# fmt: off
_ROWS: tuple = (  # name, formula, diagram, paper, coordinates
    ("pre", "z' = z + F(N(z))", "z ─┬─────────────────(+)─ z'\n   └── N ── F ─────────┘",
     "Xiong et al. 2020, On Layer Normalization in the Transformer Architecture, arXiv:2002.04745", {}),
    ("post", "z' = N(z) + F(N(z))", "z ── N ─┬────────────(+)─ z'\n        └── F ────────┘",
     "Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762", {"skip_norm": 1.0}),
    ("deepnorm", "z' = α·N(z) + F(N(z)), α = branches^¼", "z ── N ─┬──── ×α ────(+)─ z'\n        └── F ────────┘",
     "Wang et al. 2022, DeepNet, arXiv:2203.00555", {"skip_norm": 1.0, "depth_exponent": 0.25}),
    ("admin", "z' = ω⊙N(z) + F(N(z)), ω trained", "z ── N ─┬──── ⊙ω ────(+)─ z'\n        └── F ────────┘",
     "Liu et al. 2020, Admin, arXiv:2004.08249", {"skip_norm": 1.0, "learned": (("skip_gain", "channel"),)}),
    ("resi_dual", "z' = N(z) + F(N(z)), d' = d + F(N(z)); at the end N_final(z) + N_dual(d)",
     "z ── N ─┬────────────(+)─ z'\n        └── F ──┬─────┘\nd ─────────────(+)─────── d'",
     "Xie et al. 2023, ResiDual, arXiv:2304.14802", {"skip_norm": 1.0, "dual": 1.0}),
    ("sandwich", "z' = z + N'(F(N(z)))", "z ─┬─────────────────(+)─ z'\n   └── N ── F ── N' ───┘",
     "Ding et al. 2021, CogView, arXiv:2105.13290", {"output_norm": 1.0}),
    ("peri", "z' = z + N'(F(N(z))), z₀ = N(embeddings)", "z ─┬─────────────────(+)─ z'\n   └── N ── F ── N' ───┘",
     "Kim et al. 2025, Peri-LN, arXiv:2502.02732", {"output_norm": 1.0, "stem_norm": 1.0}),
    ("res_post", "z' = z + N'(F(z))", "z ─┬─────────────────(+)─ z'\n   └─────── F ── N' ───┘",
     "Liu et al. 2022, Swin V2, arXiv:2111.09883; OLMo 2, arXiv:2501.00656", {"input_norm": 0.0, "output_norm": 1.0}),
    ("gated", "z' = (1 - g)·z + g·N(z) + F(N(z)), g trained, one per branch; other norms as in the architecture",
     "z ─┬────────── ×(1-g) ───(+)─ z'\n   └── N ─┬──── ×g ────────┤\n          └──── F ─────────┘",
     "the line from Pre-Norm (g = 0) to Post-Norm (g = 1), learned", {"learned": (("skip_norm", "branch"),)}),
)
# fmt: on
_TEXTS = ("name", "formula", "diagram", "paper")
PLACEMENTS = {row[0]: Placement(**row[4], **dict(zip(_TEXTS, row))) for row in _ROWS}


def canonical_name(name: str) -> str:
    """`"ResiDual"`, `"resi-dual"`, `"Post-LN"`, ... as the table spells them; [`NormSwapError`] with the nearest names."""
    squashed = re.sub(r"[^a-z0-9]", "", str(name).lower())
    table = {key.replace("_", ""): key for key in PLACEMENTS}
    for candidate in (squashed, re.sub(r"(layernorm|norm|ln)$", "", squashed)):
        if candidate in table:
            return table[candidate]
    near = " or ".join(table[key] for key in difflib.get_close_matches(squashed, table, cutoff=0.4))
    hint = f"Did you mean {near}? " if near else ""
    raise NormSwapError(f"unknown norm placement {str(name)!r}. {hint}Available: {', '.join(PLACEMENTS)}.")


def get_placement(spec, native: str = "pre") -> Placement:
    """The [`Placement`] of a name, of a `dict` of coordinates or of a `Placement`; `gated` starts at the `native` one."""
    if isinstance(spec, str):
        row, start = PLACEMENTS[canonical_name(spec)], {name: getattr(PLACEMENTS[native], name) for name in MIXES}
        return dataclasses.replace(row, **start) if row.name == "gated" else row
    if isinstance(spec, Mapping):
        known = [entry.name for entry in dataclasses.fields(Placement) if entry.compare]
        if unknown := sorted(set(spec) - set(known)):
            raise NormSwapError(f"unknown placement coordinates {unknown}. Available: {', '.join(known)}.")
        return Placement(**spec)
    if isinstance(spec, Placement):
        return spec
    raise NormSwapError(f"a norm placement is a name, a dict of coordinates, or a list of these, got {spec!r}.")


def canonical_spec(spec):
    """`spec` as a config stores it: a name, the coordinates that differ from `pre` as a `dict`, or a list of these."""
    if isinstance(spec, str):
        return canonical_name(spec)
    if isinstance(spec, Sequence):
        return [canonical_spec(entry) for entry in spec]
    placement = get_placement(spec)
    if (named := PLACEMENTS.get(placement.name)) == placement:
        return named.name
    changed, pre = [entry.name for entry in dataclasses.fields(Placement) if entry.compare], Placement()
    return {key: getattr(placement, key) for key in changed if getattr(placement, key) != getattr(pre, key)} or "pre"


def per_layer(spec, num_layers: int, native: str = "pre") -> tuple[Placement, ...]:
    """One [`Placement`] for each layer; [`NormSwapError`] if a list has another length or dual layers do not adjoin."""
    if isinstance(spec, (str, Mapping, Placement)):
        return (get_placement(spec, native),) * num_layers
    placements = tuple(get_placement(entry, native) for entry in spec)
    if len(placements) != num_layers:
        raise NormSwapError(f"{len(placements)} placements for {num_layers} layers: give one name, or one per layer.")
    dual = [index for index, placement in enumerate(placements) if placement.uses("dual")]
    if dual and len(dual) != dual[-1] - dual[0] + 1:
        raise NormSwapError(f"layers with a second stream (resi_dual) must adjoin, got layers {dual}.")
    return placements


def deepnorm_gains(num_branches: int, exponent: float = 0.25) -> tuple[float, float]:
    """DeepNet's α of the skip and β of the initialisation: (2N)^¼, (8N)^-¼ for N two-branch layers (arXiv:2203.00555, 4.3)."""
    return float(num_branches) ** exponent, float(4 * num_branches) ** -exponent


def admin_omega(num_branches: int) -> float:
    """Admin's first skip gain without profiling, for output changes of O(log n) (`admin_torch/admin.py`)."""
    return math.sqrt((num_branches + 1) / math.log(num_branches + 1) - 1)
