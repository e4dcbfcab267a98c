"""How gradients are spread over the layers, now and along training."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from os import PathLike
from typing import Any

import torch
from transformers import TrainerCallback

from ..conversion import unwrap
from ..modeling.architectures import Architecture, get_architecture
from ..modeling.placements import NormSwapError
from .measuring import Report, draw, mean_gradient, measuring, norm_of, plain, prepare

GROUPS = ("attention", "mlp", "norms")


def group_of(name: str, architecture: Architecture) -> str:
    """The group of a parameter by its name in the layer: attention, MLP, or norms, gains and gates."""
    norms = [path for path in (*architecture.norms, *architecture.output_norms) if path is not None]
    for group, paths in (
        ("norms", norms),
        ("attention", (architecture.attn, architecture.cross_attn)),
        ("mlp", architecture.mlp),
    ):
        if any(name.startswith(f"{path}.") for path in paths):
            return group
    return "norms"  # what a placement adds


def by_layer(
    gradients: dict[str, torch.Tensor], architecture: Architecture, num_layers: int
) -> dict[str, list[float]]:
    """The norm of the gradient of each group of each layer, and of the rest of the model, from below and from above."""
    parts: dict[str, list[list]] = {group: [[] for _ in range(num_layers)] for group in GROUPS}
    outside: list = []
    for name, gradient in gradients.items():
        _, found, rest = f".{name}".partition(f".{architecture.layers}.")
        if found:
            index, _, inner = rest.partition(".")
            parts[group_of(inner, architecture)][int(index)].append(gradient)
        else:
            outside.append(gradient)
    norms = {group: [norm_of(layer) for layer in layers] for group, layers in parts.items()}
    norms["layers"] = [math.hypot(*(norms[group][index] for group in GROUPS)) for index in range(num_layers)]
    return norms | {"outside": [norm_of(outside)]}


def growth(norms: list[float]) -> float:
    """The factor by which norms grow from one layer to the next: the slope of a straight line through their logarithms. Layers without
    gradient do not count; `nan` with fewer than two others, or if one is not finite."""
    points = [(index, math.log(value)) for index, value in enumerate(norms) if value != 0]
    if len(points) < 2 or not all(math.isfinite(value) for value in norms):
        return math.nan
    x, y = (sum(column) / len(points) for column in zip(*points))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return math.exp(slope)


@dataclass(repr=False)
class GradientProfile(Report):
    """
    The gradient by layer, from the bottom up, and by group of parameters: Euclidean norms.

    Args:
        objective (`str`): what the loss is.
        loss (`float`): the mean loss of the batches.
        attention, mlp, norms (`list` of `float`): by layer; `norms` has gains, gates and whatever else a placement adds.
        layers (`list` of `float`): all three together.
        outside (`float`): of embeddings, head and final norm.
        stream (`list` of `float`): gradient of the mean loss for what enters each layer, over all tokens; of two streams, the first.
        growth (`float`): the factor by which `layers` grows from one layer to the next, fitted to the logarithms; `nan` if fewer than
            two layers have a gradient, or one is not finite.
    """

    objective: str
    loss: float
    attention: list[float]
    mlp: list[float]
    norms: list[float]
    layers: list[float]
    outside: float
    stream: list[float]
    growth: float

    def plot(self, path: str | PathLike | None = None):
        """Draw the norms by layer; saves to `path` if given and returns the figure."""
        x = range(len(self.layers))
        groups = {name: (x, getattr(self, name)) for name in (*GROUPS, "layers") if any(getattr(self, name))}
        panels = ("Gradient of the parameters", "layer", "norm", groups)
        return draw(path, panels, ("Gradient of the stream", "layer", "norm", {"stream": (x, self.stream)}), log="y")


def gradient_profile(
    model: Any, batches: Any = None, *, tokenizer: Any = None, max_tokens: int = 2048
) -> GradientProfile:
    """
    The norm of the gradient by layer and group of parameters, at the present weights, with dropout off.

    At initialisation Post-Norm has large gradients near the output, in the last layer Θ(d·√ln d) against Pre-Norm's
    O(d·√(ln d / L)), and they fall towards the bottom (Xiong et al. 2020, arXiv:2002.04745, theorem 1); Pre-Norm's are about
    equal in all layers. ResiDual keeps the larger of Post-Norm's and Pre-Norm's (Xie et al. 2023, arXiv:2304.14802).

    Args:
        model (`PreTrainedModel`): stock or converted. It stays as it is. With adapters, what they train is measured.
        batches (*optional*): text, token ids, or batches, as [`token_batches`] takes them; batches may have `labels`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one that the model was loaded with.
        max_tokens (`int`, *optional*, defaults to 2048): how many tokens to read.

    Returns:
        [`GradientProfile`]: `loss`, norms by layer (`layers` of `attention`, `mlp` and `norms`, `stream`), `outside` and `growth`;
        `help(GradientProfile)` says what each is. Takes a float32 copy of the gradients in memory.

    Raises:
        [`NormSwapError`]: if nothing is trained, and for weights that are offloaded or spread over processes.
    """
    with measuring(model, gradients=True) as twin:
        data, objective = prepare(batches, twin, tokenizer, max_tokens)
        loss, gradients, stream = mean_gradient(twin, data, objective)
        norms = by_layer(gradients, get_architecture(twin.config), len(stream))
        [outside] = norms.pop("outside")
        return GradientProfile(
            objective, loss, **norms, outside=outside, stream=stream, growth=growth(norms["layers"])
        )


@dataclass(eq=False, repr=False)
class GradientHistory(Report, TrainerCallback):
    """
    Records the norm of the gradient by layer and group of parameters along training.

    As a callback of [`~transformers.Trainer`] it records in front of each optimizer step, behind the clipping: what the
    optimizer sees. In a loop of your own call [`~GradientHistory.step`] between `loss.backward()` and `optimizer.step()`;
    gradients of a `GradScaler` have to be unscaled. Not for weights that are spread over processes (FSDP, ZeRO-3).

    Args:
        model (`PreTrainedModel`): the model that is trained, stock or converted, also under PEFT or DDP.
        every (`int`, *optional*, defaults to 1): record each so many steps.

    Attributes:
        steps (`list` of `int`): the optimizer steps recorded, from 0.
        attention, mlp, norms, layers (`list` of `list` of `float`): for each of them, the norms by layer.
        growth (`list` of `float`): for each of them, the factor from one layer to the next.
    """

    model: Any = field(repr=False)
    every: int = 1
    steps: list[int] = field(default_factory=list, init=False)
    attention: list[list[float]] = field(default_factory=list, init=False)
    mlp: list[list[float]] = field(default_factory=list, init=False)
    norms: list[list[float]] = field(default_factory=list, init=False)
    layers: list[list[float]] = field(default_factory=list, init=False)
    growth: list[float] = field(default_factory=list, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self):
        self.model = unwrap(self.model)
        self.architecture = get_architecture(self.model.config)
        if self.every < 1:
            raise NormSwapError(f"`every` must be at least 1, got {self.every}.")

    @torch.no_grad()
    def step(self):
        """Record the gradients that the parameters have now."""
        if self.position % self.every == 0:
            gradients = {
                name: one.grad.detach() for name, one in self.model.named_parameters() if one.grad is not None
            }
            num_layers = len(attrgetter(self.architecture.layers)(self.model.base_model))
            norms = by_layer(gradients, self.architecture, num_layers)
            self.steps.append(self.position)
            for name in (*GROUPS, "layers"):
                getattr(self, name).append(norms[name])
            self.growth.append(growth(norms["layers"]))
        self.position += 1

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.position = state.global_step
        self.step()

    def to_dict(self) -> dict[str, Any]:
        """What was recorded, as plain JSON."""
        names = ("every", "steps", *GROUPS, "layers", "growth")
        return plain({name: getattr(self, name) for name in names})

    def plot(self, path: str | PathLike | None = None):
        """Draw the norms of some layers, and the growth, over the steps; saves to `path` if given and returns the figure."""
        num_layers = len(self.layers[0]) if self.layers else 0
        chosen = sorted({0, num_layers // 4, num_layers // 2, 3 * num_layers // 4, max(num_layers - 1, 0)})
        series = {f"layer {index}": (self.steps, [norms[index] for norms in self.layers]) for index in chosen}
        growth = {"growth": (self.steps, self.growth)}
        panels = ("Gradient by layer", "step", "norm", series), ("Growth per layer", "step", "factor", growth)
        return draw(path, *panels, log="y")
