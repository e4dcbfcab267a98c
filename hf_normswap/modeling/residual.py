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
class BranchPlan:  # one branch of one layer
    name: str  # "attn", "cross_attn" or "ffn"
    norm: str  # path of the norm in front of the branch, or behind its skip where norms follow it
    output_norm: str  # path of the norm of the branch's output
    applies_norm: bool  # whether anything reads what `norm` makes
    coordinates: dict[str, float | str]  # its point in the placement space: numbers, or names of the layer's tensors


@dataclass
class LayerPlan:  # one layer: its branches, and which of the streams `z`, `y`, `d` enter and leave it
    index: int
    branches: list[BranchPlan]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    starts_dual: bool
    ends_dual: bool
    dual_scale: float
    coordinates: dict[str, float | str]  # of `stem_norm` and `dual`
    tensors: dict[str, tuple[int, float, bool]]  # size, first value, whether it is trained
    deepnorm_beta: float | None


def tensor_name(branch: str, coordinate: str) -> str:
    """What a layer calls a [`Coordinate`]: `attn_skip_gate`, `ffn_skip_gain`, ..."""
    return f"{branch}_{coordinate.replace('_norm', '_gate')}"


def mix(z, y, weight):
    """The point `weight` of the way from `z` to `y`; at the numbers 0 and 1 nothing is computed."""
    if isinstance(weight, torch.Tensor):
        return torch.lerp(z, y.to(z.dtype), weight.to(z.dtype))
    return (y if weight else z) if weight in (0, 1) else torch.lerp(z, y.to(z.dtype), weight)


def scale(x, gain):
    """`gain * x` in the dtype of `x`; at the number 1 nothing is computed."""
    if isinstance(gain, torch.Tensor):
        return x * gain.to(x.dtype)
    return x if gain == 1 else x * gain


def residual(z, y, f, skip_norm=0.0, skip_gain=1.0, branch_gain=1.0):
    """`(1 - skip_norm) * z + skip_norm * skip_gain * y + branch_gain * f`, without the arithmetic of zeros and ones."""
    f = scale(f, branch_gain)
    if not isinstance(skip_norm, torch.Tensor) and skip_norm == 0:
        return z + f
    if not any(isinstance(value, torch.Tensor) for value in (skip_norm, skip_gain)) and skip_norm == 1:
        return torch.add(f, y, alpha=skip_gain)
    return mix(z, scale(y, skip_gain), skip_norm) + f


@functools.cache
def derive(mixin: Any, stock: Any):
    """The one class `(mixin, stock)`, under the stock name, by which FSDP and device maps look layers up."""
    namespace = {"_stock_class": stock, "_argument_names": tuple(inspect.signature(stock.forward).parameters)[2:]}
    namespace["__reduce__"] = lambda self: (rebuild, (derive, mixin, stock), self.__dict__)  # for pickling
    return type(stock.__name__, (mixin, stock), namespace)


def rebuild(make, *stock):
    """An empty instance of a class that is made when needed, for unpickling."""
    return object.__new__(make(*stock))


class Coordinate(torch.nn.Module):  # one that is a tensor, as a module, which PEFT can train and save like any other
    def forward(self, _):  # wrappers insist on an input
        return self.weight


class ResidualLayer:
    """A stock layer whose branches are joined as its `plan` says; the submodules and their names stay."""

    def forward(self, hidden_states, *args, **kwargs):
        kwargs.update(zip(self._argument_names, args))  # the stock forward's, behind the hidden states
        z, y, dual = self.enter(hidden_states)
        attention_weights = []
        for branch in self.plan.branches:
            if branch.name != "cross_attn" or kwargs.get("encoder_hidden_states") is not None:
                x, y = self.read(branch, z, y)
                f, weights = self.run(branch, x, kwargs)
                z, y, dual = self.join(branch, z, y, dual, f)
                attention_weights += weights
        output = self.leave(z, y, dual)
        return (output, *attention_weights) if self.architecture.layer_returns_tuple else output

    def enter(self, hidden_states):
        """The streams `(z, y, dual)` in front of the first branch."""
        plan = self.plan
        streams = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        named = dict(zip(plan.receives or ("z",), streams))
        z, y, dual = named.get("z", streams[0]), named.get("y", streams[0]), named.get("d")
        if plan.coordinates["stem_norm"] != 0:
            z = y = mix(z, self.stem_norm(z), self.coordinate(plan, "stem_norm"))
        if plan.starts_dual:
            dual = scale(y if self.architecture.norm_after else z, plan.dual_scale)
        return z, y, dual

    def read(self, branch, z, y):
        """What a branch reads, and the normed stream."""
        if not self.architecture.norm_after:
            y = attrgetter(branch.norm)(self)(z) if branch.applies_norm else None
        return mix(z, y, self.coordinate(branch, "input_norm")), y

    def run(self, branch, x, kwargs):
        """The bare branch: its output and a list of its attention weights, if it shows them."""
        dropped = () if branch.name == "cross_attn" else ENCODER_ARGUMENTS
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        return FAMILIES[self.architecture.family][branch.name](self.architecture, self, x, kwargs)

    def join(self, branch, z, y, dual, f):
        """The streams behind a branch."""
        if branch.coordinates["output_norm"] != 0:
            f = mix(f, attrgetter(branch.output_norm)(self)(f), self.coordinate(branch, "output_norm"))
        gains = (self.coordinate(branch, name) for name in ("skip_norm", "skip_gain", "branch_gain"))
        z = residual(z, y, f, *gains)
        if dual is not None:
            dual = torch.add(dual, f, alpha=self.plan.dual_scale)
        if self.architecture.norm_after:
            y = attrgetter(branch.norm)(self)(z) if branch.applies_norm else None
        return z, y, dual

    def leave(self, z, y, dual):
        """What goes to the next layer, or to the final norm."""
        if self.plan.ends_dual:
            dual = scale(self.dual_norm(dual), self.coordinate(self.plan, "dual"))
            if "d" not in self.plan.sends:  # else the model's final norm adds it
                z, y = z + dual, None if y is None else y + dual
        streams = tuple({"z": z, "y": y, "d": dual}[name] for name in self.plan.sends)
        return streams if len(streams) > 1 else streams[0]

    def coordinate(self, owner, name: str):
        """A coordinate of a branch or of the layer: a number, or the layer's tensor."""
        value = owner.coordinates[name]
        return getattr(self, value)(None) if isinstance(value, str) else value


class FirstStreams:
    """An encoder that collects its hidden states itself (Megatron): of two streams it shows the first, as others do."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **{**kwargs, "return_dict": True})
        states = output.hidden_states or ()
        output.hidden_states = tuple(state[0] if isinstance(state, tuple) else state for state in states) or None
        return output if kwargs.get("return_dict", True) else output.to_tuple()


class DualReadout:
    """The final norm where a pair arrives, in models whose norms lead the branches: `N_final(z) + N_dual(d)`."""

    def forward(self, hidden_states):
        z, d = hidden_states if isinstance(hidden_states, tuple) else (hidden_states, 0.0)
        return super().forward(z) + d
