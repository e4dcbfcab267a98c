"""The residual formula as a layer: [`ResidualLayer`] is mixed into a stock layer class and calls its branches bare.

Where the norms lead the branches (GPT-2, LLaMA), a layer takes `z` and norms it itself. Where they follow the skip (BERT), it
takes `y` and ends by norming; if the next layer needs `z` too, the pair crosses. ResiDual's stream `d` crosses with them.
"""

import functools
import inspect
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from .families import ENCODER_ARGUMENTS, FAMILIES


@dataclass
class BranchPlan:
    """One branch of one layer."""

    name: str  # "attn", "cross_attn" or "ffn"
    norm: str  # path of the norm in front of the branch, or behind its skip where norms follow it
    output_norm: str  # path of the norm of the branch's output
    applies_norm: bool  # whether anything reads what `norm` makes
    coordinates: dict[str, float]  # its point in the placement space; what is missing is a tensor of the layer


@dataclass
class LayerPlan:
    """One layer: its branches, and which of the streams `z`, `y`, `d` enter and leave it."""

    index: int
    branches: list[BranchPlan]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    starts_dual: bool
    ends_dual: bool
    dual_scale: float
    coordinates: dict[str, float]  # of `stem_norm` and `dual`
    tensors: dict[str, tuple[int, float]]  # trained coordinates: size and first value
    deepnorm_beta: float | None


def tensor_name(branch: str, coordinate: str) -> str:
    """What a layer calls a coordinate that is a tensor: `attn_skip_gate`, `ffn_skip_gain`, ..."""
    return f"{branch}_{coordinate.replace('_norm', '_gate')}"


def mix(z, y, weight):
    """The point `weight` of the way from `z` to `y`; at the numbers 0 and 1 nothing is computed."""
    if isinstance(weight, torch.Tensor):
        return torch.lerp(z, y.to(z.dtype), weight.to(z.dtype))
    if weight in (0, 1):
        return y if weight else z
    return torch.lerp(z, y.to(z.dtype), weight)


def scale(x, gain):
    """`gain * x` in the dtype of `x`; at the number 1 nothing is computed."""
    if isinstance(gain, torch.Tensor):
        return x * gain.to(x.dtype)
    return x if gain == 1 else x * gain


def residual(z, y, f, skip_norm=0.0, skip_gain=1.0, branch_gain=1.0):
    """`(1 - skip_norm) * z + skip_norm * skip_gain * y + branch_gain * f`, without the arithmetic of zeros and ones."""
    f = scale(f, branch_gain)
    if isinstance(skip_norm, torch.Tensor) or skip_norm not in (0, 1):
        return mix(z, scale(y, skip_gain), skip_norm) + f
    if skip_norm == 0:
        return z + f
    if isinstance(skip_gain, torch.Tensor):
        return scale(y, skip_gain) + f
    return y + f if skip_gain == 1 else torch.add(f, y, alpha=skip_gain)


@functools.cache
def derive(mixin: Any, stock: Any):
    """The one class `(mixin, stock)`, under the stock name, by which FSDP and device maps look layers up."""
    arguments = tuple(inspect.signature(stock.forward).parameters)[2:]
    namespace = {"_stock_class": stock, "_argument_names": arguments}
    namespace["__reduce__"] = lambda self: (rebuild, (derive, mixin, stock), self.__dict__)  # for pickling
    return type(stock.__name__, (mixin, stock), namespace)


def rebuild(make, *stock):
    """An empty instance of a class that is made when needed, for unpickling."""
    return object.__new__(make(*stock))


class ResidualLayer:
    """A stock layer whose branches are joined as its `plan` says; the submodules and their names stay."""

    def forward(self, hidden_states, *args, **kwargs):
        architecture, plan = self.architecture, self.plan
        kwargs.update(zip(self._argument_names, args))  # the stock forward's, behind the hidden states
        if isinstance(hidden_states, tuple):
            streams = dict(zip(plan.receives, hidden_states))
            z, y, dual = streams.get("z"), streams.get("y"), streams.get("d")
            z = y if z is None else z
        else:
            stem = plan.coordinates["stem_norm"]
            z = y = mix(hidden_states, self.stem_norm(hidden_states), stem) if stem else hidden_states
            dual = None
        if plan.starts_dual:
            dual = scale(y if architecture.norm_after else z, plan.dual_scale)
        encoder = {name: kwargs.pop(name, None) for name in ENCODER_ARGUMENTS}
        attention_weights = []

        for branch in plan.branches:
            if branch.name == "cross_attn" and encoder["encoder_hidden_states"] is None:
                continue
            arguments = {**kwargs, **encoder} if branch.name == "cross_attn" else kwargs
            if not architecture.norm_after:
                y = attrgetter(branch.norm)(self)(z) if branch.applies_norm else None
            x = mix(z, y, self.coordinate(branch, "input_norm"))
            f, weights = FAMILIES[architecture.family][branch.name](architecture, self, x, arguments)
            output_norm = self.coordinate(branch, "output_norm")
            if isinstance(output_norm, torch.Tensor) or output_norm > 0:
                f = mix(f, attrgetter(branch.output_norm)(self)(f), output_norm)
            z = residual(
                z, y, f, *(self.coordinate(branch, name) for name in ("skip_norm", "skip_gain", "branch_gain"))
            )
            if dual is not None:
                dual = torch.add(dual, f, alpha=plan.dual_scale)
            if architecture.norm_after:
                y = attrgetter(branch.norm)(self)(z) if branch.applies_norm else None
            attention_weights += weights

        if plan.ends_dual:
            dual = scale(self.dual_norm(dual), plan.coordinates["dual"])
            if "d" not in plan.sends:  # else the model's final norm adds it
                z, y = z + dual, None if y is None else y + dual
        streams = {"z": z, "y": y, "d": dual}
        output = tuple(streams[name] for name in plan.sends) if len(plan.sends) > 1 else streams[plan.sends[0]]
        return (output, *attention_weights) if architecture.layer_returns_tuple else output

    def coordinate(self, branch: BranchPlan, name: str):
        """A coordinate of a branch: a number, or the layer's tensor."""
        value = branch.coordinates.get(name)
        return getattr(self, tensor_name(branch.name, name)) if value is None else value


class FirstStreams:
    """An encoder that collects its hidden states itself (Megatron): of two streams it shows the first, as others do."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **{**kwargs, "return_dict": True})
        states = output.hidden_states or ()
        output.hidden_states = tuple(state[0] if isinstance(state, tuple) else state for state in states) or None
        return output if kwargs.get("return_dict", True) else output.to_tuple()


class DualReadout:
    """The final norm of a model whose norms lead the branches: `N_final(z) + N_dual(d)` where a pair arrives."""

    def forward(self, hidden_states):
        if isinstance(hidden_states, tuple):
            return super().forward(hidden_states[0]) + hidden_states[1]
        return super().forward(hidden_states)
