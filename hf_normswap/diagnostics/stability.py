"""Stability of training: how large a learning rate a model stands, how much warm-up it needs, and how its loss spikes."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch

from ..modeling.placements import NormSwapError
from .measuring import Batch, Report, draw, loss_of, mean_loss, measuring, prepare, trained_parameters

SMOOTHING = 0.8  # of the exponential mean of the losses
RISE = 0.1  # of the first loss: by so much the smoothed loss may rise above its lowest point
TOLERANCE = 0.01  # of the first loss: what dropout and other texts make of it where nothing is learned
SPIKE_SIGMAS, SPIKE_WINDOW = 7.0, 1000  # OLMo 2 (arXiv:2501.00656): 7 standard deviations over the last 1,000 steps


@dataclass(repr=False)
class Stability(Report):
    """
    How stably a model trains.

    Args:
        objective (`str`): what the loss is.
        max_learning_rate (`float`, *optional*): the last learning rate of the ramp whose step left the loss sound; 0 if not even the
            first did, `None` if all did.
        learning_rates, losses (`list` of `float`): the ramp, up to where the loss diverged: each rate, and the loss behind its step.
        grid (`list` of `dict`): for each `learning_rate` and `warmup_steps`: `loss` (mean of the last quarter, `None` if diverged),
            `diverged` (the loss was not finite, or ended more than a hundredth above the first one), `spike_score` and `losses`.
        warmup_gain (`dict`): for each learning rate, the loss without warm-up less that with the longest, in the unit of the
            loss; `None` where one of the two diverged.

    Batches are not equally hard, so the order of the text would look like progress: of each loss the loss of the same batch before
    training (with dropout off) is taken, and the mean of those is added.
    """

    objective: str
    max_learning_rate: float | None
    learning_rates: list[float]
    losses: list[float]
    grid: list[dict[str, Any]]
    warmup_gain: dict[str, float | None]

    def plot(self, path: str | PathLike | None = None):
        """Draw the ramp, and the losses of the grid; saves to `path` if given and returns the figure."""
        runs = {f"{run['learning_rate']:g}, {run['warmup_steps']}": run["losses"] for run in self.grid}
        panels: list[Any] = [("Ramp", "learning rate", "loss", {"loss": (self.learning_rates, self.losses)})]
        panels += [
            ("Learning rate, warm-up", "step", "loss", {key: (range(1, len(y) + 1), y) for key, y in runs.items()})
        ]
        return draw(path, *panels, log="x")


def spike_score(losses: Sequence[float], *, sigmas: float = SPIKE_SIGMAS, window: int = SPIKE_WINDOW) -> float:
    """
    The share of losses that are at least `sigmas` standard deviations above the mean of the `window` losses before them, from 0 to
    1 (spike score of OLMo 2, arXiv:2501.00656, section 3). The first ten losses are not judged; one that is not finite is a spike.

    Args:
        losses (`Sequence` of `float`): the loss of each step.
        sigmas (`float`, *optional*, defaults to 7), window (`int`, *optional*, defaults to 1000): as in the source.
    """
    spikes = judged = 0
    for index in range(10, len(losses)):
        before = [value for value in losses[max(index - window, 0) : index] if math.isfinite(value)]
        judged += 1
        if not math.isfinite(losses[index]):
            spikes += 1
        elif before:
            mean = sum(before) / len(before)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in before) / len(before))
            spikes += losses[index] > mean + sigmas * deviation + 1e-12 * abs(mean)
    return spikes / judged if judged else 0.0


def training(
    twin: Any, data: list[Batch], objective: str, before: Sequence[float], rates: Sequence[float], seed: int
) -> Iterator[float]:
    """The loss in front of each step of AdamW with these learning rates, on a copy in float32 and with dropout; ends if it is not
    finite. `before` are the losses of the batches before training, from which their losses are counted."""
    student = copy.deepcopy(twin)
    if student.dtype in (torch.float16, torch.bfloat16):
        student.float()
    student.train()
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(trained_parameters(student).values(), weight_decay=0.0)
    for step, rate in enumerate(rates):
        loss = loss_of(student, data[step % len(data)], objective)
        yield loss.item() - before[step % len(data)] + sum(before) / len(data)
        if not math.isfinite(loss.item()):
            return
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def diverges(losses: Sequence[float]) -> bool:
    """Whether the last of these losses is not finite, or the smoothed loss has risen above its lowest point by a tenth of the
    first loss."""
    smoothed = lowest = losses[0]
    for loss in losses:
        smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * loss
        lowest = min(lowest, smoothed)
    return not math.isfinite(losses[-1]) or smoothed > lowest + RISE * abs(losses[0])


def stability(
    model: Any,
    batches: Any = None,
    *,
    tokenizer: Any = None,
    max_tokens: int = 4096,
    ramp_steps: int = 100,
    lowest: float = 1e-6,
    highest: float = 0.1,
    learning_rates: Sequence[float] = (1e-4, 1e-3),
    warmups: Sequence[float] = (0.0, 0.2),
    steps: int = 40,
    length: int = 128,
    seed: int = 0,
) -> Stability:
    """
    Train copies of a model: with a rising learning rate until the loss diverges, and on a grid of learning rates and warm-ups.

    Post-Norm needs warm-up and stands smaller learning rates than Pre-Norm (Xiong et al. 2020, arXiv:2002.04745). The ramp follows
    KEEL (Chen and Wei 2026, arXiv:2601.19895), where it is linear up to 0.05: here it is geometric, for in few steps a linear one
    would jump over the small limits of Post-Norm. AdamW without weight decay or clipping; after the last batch follows the first.

    Args:
        model (`PreTrainedModel`): stock or converted. It stays as it is: one copy after the other is trained, which takes, in
            memory, four times the size of the weights in float32 (weights, gradients, two moments). Under PEFT, adapters are trained.
        batches (*optional*): text, token ids, or batches, as [`token_batches`] takes them; batches may have `labels`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one that the model was loaded with.
        max_tokens (`int`, *optional*, defaults to 4096): how many tokens to read.
        ramp_steps (`int`, *optional*, defaults to 100): steps of the ramp; 0 for none.
        lowest, highest (`float`, *optional*, defaults to 1e-6 and 0.1): where the ramp begins and ends.
        learning_rates (`Sequence` of `float`, *optional*, defaults to `(1e-4, 1e-3)`): of the grid.
        warmups (`Sequence` of `float`, *optional*, defaults to `(0.0, 0.2)`): shares of the steps over which the rate rises.
        steps (`int`, *optional*, defaults to 40): of each run of the grid.
        length (`int`, *optional*, defaults to 128): the longest sequence, in tokens.
        seed (`int`, *optional*, defaults to 0): of dropout.

    Returns:
        [`Stability`]: `max_learning_rate` with the ramp (`learning_rates`, `losses`), the `grid` and `warmup_gain`; `help(Stability)`
        says what each is.

    Raises:
        [`NormSwapError`]: if nothing is trained, and for weights that are offloaded or spread over processes.
    """
    if ramp_steps and not 0 < lowest < highest:
        raise NormSwapError(f"the ramp must rise from above 0, got {lowest} to {highest}.")
    with measuring(model, gradients=True) as twin:
        data, objective = prepare(batches, twin, tokenizer, max_tokens, length)
        ramp = [lowest * (highest / lowest) ** (step / max(ramp_steps - 1, 1)) for step in range(ramp_steps)]
        run = partial(training, twin, data, objective, [mean_loss(twin, [batch], objective) for batch in data])
        losses: list[float] = []
        stable = None
        for loss in run([*ramp, 0.0] if ramp else [], seed):  # the last one is behind the last step
            losses.append(loss)
            if diverges(losses):
                stable = (
                    ramp[len(losses) - 3] if len(losses) > 2 else 0.0
                )  # the step in front of the one that broke it
                break
        grid = [grid_run(run, rate, warmup, steps, seed) for rate in learning_rates for warmup in warmups]
    losses = losses[1:]
    return Stability(objective, stable, ramp[: len(losses)], losses, grid, gains(grid))


def grid_run(train, rate: float, warmup: float, steps: int, seed: int) -> dict[str, Any]:
    """A run of the grid: the learning rate rises linearly and stays."""
    warmup_steps = round(warmup * steps)
    rates = [rate * min((step + 1) / (warmup_steps + 1), 1.0) for step in range(steps)]
    losses = list(train(rates, seed))
    last = losses[-max(len(losses) // 4, 1) :]
    loss = sum(last) / len(last)
    diverged = not math.isfinite(loss) or loss > losses[0] + TOLERANCE * abs(losses[0])
    run = {
        "learning_rate": rate,
        "warmup_steps": warmup_steps,
        "loss": None if diverged else loss,
        "diverged": diverged,
    }
    return run | {"spike_score": spike_score(losses), "losses": losses}


def gains(grid: list[dict[str, Any]]) -> dict[str, float | None]:
    """What the longest warm-up gains over the shortest, by learning rate."""
    found: dict[str, float | None] = {}
    for rate in dict.fromkeys(run["learning_rate"] for run in grid):
        runs = sorted((run for run in grid if run["learning_rate"] == rate), key=lambda run: run["warmup_steps"])
        first, last = runs[0]["loss"], runs[-1]["loss"]
        found[f"{rate:g}"] = None if first is None or last is None else first - last
    return found
