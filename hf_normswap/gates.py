"""Learned placement: reading, regularising and hardening the gates that lie between Pre-Norm (0) and Post-Norm (1)."""

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from .conversion import convert_checkpoint, is_converted, unwrap
from .modeling.architectures import get_architecture
from .modeling.placements import PLACEMENTS, NormSwapError, canonical_spec
from .modeling.surgery import placements_of


@dataclass
class Gate:
    """A gate of a layer: of one `branch`, or of all of them ("stream")."""

    layer: int
    branch: str
    tensor: torch.Tensor  # of shape `(1,)`, or `(hidden_size,)` if there is one for each channel

    def __str__(self):
        low, mean, high = (getattr(self.tensor.float(), kind)().item() for kind in ("min", "mean", "max"))
        spread = "" if len(self.tensor) == 1 else f" ({low:.3f} to {high:.3f})"
        return f"layer {self.layer}, {self.branch}: {mean:.3f}{spread}"


def list_gates(model: Any) -> list[Gate]:
    """The gates of a model, from the bottom up; [`NormSwapError`] if it has none."""
    gates = []
    model = unwrap(model)
    if is_converted(model):
        for layer in attrgetter(get_architecture(model.config).layers)(model.base_model):
            for name, (_, _, trained) in layer.plan.tensors.items():
                if trained and name.endswith("_skip_gate"):
                    gates.append(Gate(layer.plan.index, name.removesuffix("_skip_gate"), getattr(layer, name)(None)))
    if not gates:
        raise NormSwapError(
            f'{type(model).__name__} has no gates: `convert_checkpoint(model, "gated")` gives it some.'
        )
    return gates


def gate_penalty(model: Any) -> torch.Tensor:
    """The mean of `4 g (1 - g)` over all gates, a scalar: 1 where they are undecided, 0 where each is pre or post.

    Outside of 0 to 1 it is the distance to the nearer end, so that gates are driven back. Add it to the loss, with a weight
    of your choice."""
    gates = torch.cat([gate.tensor for gate in list_gates(model)]).float()
    inside = gates.clamp(0, 1)
    return (4 * inside * (1 - inside) + (gates - inside).abs()).mean()


def harden(model: Any, threshold: float = 0.5):
    """
    Turn learned gates into plain corners, layer by layer.

    Args:
        model (`PreTrainedModel`): a model with gates.
        threshold (`float`, *optional*, defaults to 0.5): layers whose mean gate is at least this become post, others pre.

    Returns:
        `PreTrainedModel`: a new model on the same tensors, with a plain placement for each layer and without gates.
    """
    model, by_layer = unwrap(model), defaultdict(list)
    for gate in list_gates(model):
        by_layer[gate.layer].append(gate.tensor.detach().float().mean().item())
    specs: list = list(placements_of(model.config))
    for layer, values in by_layer.items():
        learned = tuple(pair for pair in specs[layer].learned if pair[0] != "skip_norm")
        post = float(sum(values) / len(values) >= threshold)
        corner = dataclasses.replace(specs[layer], skip_norm=post, learned=learned)
        specs[layer] = next((name for name, named in PLACEMENTS.items() if named == corner), canonical_spec(corner))
    return convert_checkpoint(model, specs)


def plot_gates(model: Any, path: Any = None):
    """Plot the mean of each gate over the layers, one line for each branch.

    Args:
        model (`PreTrainedModel`): a model with gates.
        path (`str` or `os.PathLike`, *optional*): where to save the picture.

    Returns:
        `matplotlib.figure.Figure`: the figure. Needs `pip install hf_normswap[plot]`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    lines = defaultdict(list)
    for gate in list_gates(model):
        lines[gate.branch].append((gate.layer, gate.tensor.detach().float().mean().item()))
    for branch, points in lines.items():
        axes.plot(*zip(*points), marker="o", label=branch)
    axes.set(xlabel="layer", ylabel="gate (0 = pre, 1 = post)")
    axes.legend()
    if path is not None:
        figure.savefig(path)
    return figure
