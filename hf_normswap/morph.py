"""The morph: from an exact start to the target placement, a little with every training step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from .conversion import is_converted, remove, unwrap
from .model_card import note_training
from .modeling.architectures import get_architecture
from .modeling.placements import COORDINATES, NormSwapError, per_layer
from .modeling.residual import tensor_name
from .modeling.surgery import install, placements_of, resolved

logger = logging.get_logger(__name__)


def _window(progress: float, place: float, width: float) -> float:
    """How far one of many is that move one behind the other, `width` of the way at a time."""
    return min(max((progress - place * (1 - width)) / width, 0.0), 1.0)


# (progress of the morph, number of the branch from the bottom, number of branches) -> how far that branch is; all but the
# last argument from 0 to 1 or from 0 to the number of branches less one
SCHEDULES: dict[str, Callable[[float, int, int], float]] = {
    "linear": lambda progress, branch, branches: progress,
    "cosine": lambda progress, branch, branches: (1 - math.cos(math.pi * progress)) / 2,
    "bottom_up": lambda progress, branch, branches: _window(progress, branch / max(branches - 1, 1), 0.5),
    "top_down": lambda progress, branch, branches: _window(progress, 1 - branch / max(branches - 1, 1), 0.5),
    "one_by_one": lambda progress, branch, branches: _window(progress, branch / max(branches - 1, 1), 1 / branches),
}


@dataclass
class Move:
    """A coordinate that has to move."""

    layer: int
    branch: str  # or "stream"
    coordinate: str
    start: float
    target: float
    module: nn.Module  # the layer
    name: str  # of its coordinate, whose buffer is another tensor once the model was moved

    @property
    def tensor(self) -> torch.Tensor:
        """Where the coordinate is now, of shape `(1,)`."""
        return getattr(self.module, self.name)(None)

    def __str__(self):
        now = self.tensor.mean().item()
        return f"layer {self.layer}, {self.branch}: {self.coordinate} {self.start:g} -> {self.target:g}, now {now:g}"


def list_moves(model: Any) -> list[Move]:
    """What still separates a model with an exact start from its target placement, from the bottom up."""
    model = unwrap(model)
    if not is_converted(model) or (target := model.config.norm_target) is None:
        return []
    config: Any = model.config
    architecture = get_architecture(config)
    layers = attrgetter(architecture.layers)(model.base_model)
    targets = per_layer(target, len(layers), architecture.native)
    num_branches = sum(len(layer.plan.branches) for layer in layers)
    moves = []
    for layer, placement, goal in zip(layers, placements_of(config), targets):
        end = resolved(config, goal, num_branches)
        for name in [name for name, kind in placement.learned if kind == "morph"]:
            for owner in [branch.name for branch in layer.plan.branches] if name in COORDINATES else ["stream"]:
                if (tensor := tensor_name(owner, name)) in layer.plan.tensors:
                    start = layer.plan.tensors[tensor][1]
                    moves.append(Move(layer.plan.index, owner, name, start, end[name], layer, tensor))
    return moves


class NormMorph(TrainerCallback):
    """
    Moves the coordinates of a model with an exact start to those of its target placement.

    As a callback of [`~transformers.Trainer`] it follows the optimizer steps by itself, and a resumed run goes on where it
    was. In a loop of your own call [`~NormMorph.step`] after each `optimizer.step()`, and save its `state_dict` with the
    optimizer's (`accelerator.register_for_checkpointing(morph)`). The coordinates are buffers, saved with the weights.

    Args:
        model (`PreTrainedModel`): the result of `convert_checkpoint(..., warm_start="exact")`.
        steps (`int`): the number of optimizer steps that the way takes.
        schedule (`str` or `Callable`, *optional*, defaults to `"linear"`):
            `"linear"`, `"cosine"`; `"bottom_up"` or `"top_down"`, where each branch takes half of the steps and starts later
            than the one below or above; `"one_by_one"`, from the bottom; or a function of the progress (0 to 1), the number
            of the branch and the number of branches that returns how far the branch is (0 to 1).

    Raises:
        [`NormSwapError`]: if the model was not converted, or for an unknown schedule.
    """

    def __init__(self, model, steps: int, schedule: str | Callable[[float, int, int], float] = "linear"):
        model = unwrap(model)
        if not is_converted(model):
            raise NormSwapError(
                f'{type(model).__name__} is not a converted model: `convert_checkpoint(..., warm_start="exact")` first.'
            )
        if isinstance(schedule, str) and schedule not in SCHEDULES:
            raise NormSwapError(f"unknown schedule {schedule!r}. Available: {', '.join(SCHEDULES)}.")
        if steps < 1:
            raise NormSwapError(f"`steps` must be at least 1, got {steps}.")
        self.model: Any = model
        self.steps = steps
        self.schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
        self.moves = list_moves(model)
        self.position = 0
        if not self.moves:
            logger.warning(
                f"Nothing has to move: the norm placement of the model is {model.config.norm_placement!r} already."
            )

    @torch.no_grad()
    def set_position(self, position: int):
        """Go to where the morph is after `position` optimizer steps."""
        self.position = position
        progress = min(position / self.steps, 1.0)
        places = dict.fromkeys((move.layer, move.branch) for move in self.moves)
        numbers = {place: number for number, place in enumerate(places)}
        for move in self.moves:
            done = self.schedule(progress, numbers[move.layer, move.branch], len(numbers))
            if not 0 <= done <= 1:
                raise NormSwapError(f"the schedule returned {done} at {progress:.0%}: it must stay between 0 and 1.")
            move.tensor.fill_(move.start + (move.target - move.start) * done)

    def step(self):
        """Move on by one optimizer step."""
        self.set_position(self.position + 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]):
        self.set_position(state_dict["position"])

    def on_train_begin(self, args, state, control, **kwargs):
        self.set_position(state.global_step)

    on_step_begin = on_step_end = on_train_begin

    def finish(self):
        """Put the model at its target, in place, and return it: a plain converted model without a trace of the morph."""
        model = self.model
        away = [move for move in self.moves if (move.tensor != move.tensor.new_tensor(move.target)).any()]
        if away:
            logger.warning(f"{len(away)} coordinates are not at their targets yet, and jump there: {away[0]}, ...")
        if model.config.norm_target is not None:
            extras = remove(model.base_model, model.config)
            model.config.norm_placement, model.config.norm_target = model.config.norm_target, None
            note_training(model.config, "morph_steps", self.position)
            install(
                model.base_model,
                model.config,
                {key: value for key, value in extras.items() if isinstance(value, (nn.Module, nn.Parameter))},
            )
        self.moves = []
        return model
