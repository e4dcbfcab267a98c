"""Symptoms: what is seen of a training run and of its model, in a few numbers, and what each says is wrong."""

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch

SPIKE = 7.0  # standard deviations above the running mean (the spike score of OLMo 2, arXiv:2501.00656)
ROW = 3  # losses in a row that make a spike: two hard batches follow each other by chance in long runs
SMALL = 0.1  # nats; jumps below it cost nothing, and losses below it can hardly do anything but rise
SKIPS = 8  # steps in a row that the scaler of float16 may well skip at first, halving its factor each time
PATIENCE = 120, 300  # steps that a deep and any other model may need to become better than a guess
NEAR = 4.0  # within this factor of its largest number a stream approaches overflow: two doublings away
TOO_SHORT = 0.67  # of the warm-up asked for: two processes leave a half


@dataclass
class Model:
    """What the first batch shows of a model, and the first gradients."""

    cut: int | None = None  # the first layer whose output is the same for all tokens when its branches are silenced
    silent: set = field(default_factory=set)  # branches that add nothing but zeros, as `(layer, name)`
    dead: list = field(default_factory=list)  # branches that contribute nothing, or get no gradient
    peak: float = 0.0  # the largest magnitude in a stream of float16
    peak_layer: int = 0
    dual: bool = False  # whether a second stream runs through the model

    def overflow(self) -> dict | None:
        limit = torch.finfo(torch.float16).max
        if self.peak * NEAR < limit:  # not a number is neither more nor less
            return None
        verb = "approaches the end of" if self.peak <= limit else "overflows in"
        fix = "set `norm_dual_scale=0.05`, `norm_dual_eps=1e-7`, or " if self.dual else ""
        return {"layer": self.peak_layer, "peak": f"{self.peak:,.0f}", "verb": verb, "fix": fix}


def is_finite(number: float | None) -> bool:
    """Whether there is a number, and its square is one."""
    return number is not None and abs(number) < 1e100


@dataclass
class Run:
    """What was seen of a run: as many numbers after a million steps as after one."""

    kinds: set[str]  # as in `advice.KINDS`
    depth: int
    warmup_steps: int | None = None
    total_steps: int | None = None
    step: int = 0
    guess: float = math.inf  # the loss of a model that guesses, as far as known
    headroom: float = 1.25  # how many times as much a new model may cost; more where a new head sits on large states
    morphs: bool = False  # whether the model is on its way to another placement, which costs loss on the way
    seen: int = 0  # losses that are numbers
    first: float = math.nan  # the first loss
    first_step: int = 0  # when it was seen
    opening: float = math.nan  # mean of the first four
    recent: deque = field(default_factory=lambda: deque(maxlen=32))  # the last losses
    mean: float = math.nan  # of them
    lowest: float = math.inf  # the lowest mean of at least sixteen
    level: float = math.nan  # running mean of the loss, over about ten steps, without spikes
    variance: float = 0.0  # running, about it, over about fifty steps: it remembers a hard batch for as long
    outliers: list = field(default_factory=list)  # the last distances in a row that may be a spike
    broken: tuple[str, float] | None = None  # what is no finite number
    skips_since: int | None = None  # the step from which on gradient norms are none
    grad_norm: float | None = None
    top: float = -math.inf  # the highest learning rate
    top_step: int = 0
    rose: bool = False
    falls: bool = False  # whether the learning rate is past its top
    evaluations: tuple[float, float] = (math.nan, math.nan)  # the last two
    levels: tuple[float, float] = (math.nan, math.nan)  # of the training loss, at these

    def see(self, loss=None, learning_rate=None, grad_norm=None, eval_loss=None):
        """Take the numbers of a step into account."""
        self.grad_norm = grad_norm
        if learning_rate is not None:
            self.falls = self.rose and learning_rate <= self.top
            if learning_rate > self.top:
                self.rose = self.top > -math.inf
                self.top, self.top_step = learning_rate, self.step
        if grad_norm is not None:
            began = self.step if self.skips_since is None else self.skips_since
            self.skips_since = None if is_finite(grad_norm) else began
            if self.skips_since is not None and self.step - self.skips_since >= SKIPS - 1:
                self.broken = "gradient norm", grad_norm
        for name, number in (("loss", loss), ("validation loss", eval_loss)):
            if number is not None and not is_finite(number):
                self.broken = name, number
        if is_finite(loss):
            self.see_loss(loss)
        if is_finite(eval_loss):
            self.evaluations = self.evaluations[1], eval_loss
            self.levels = self.levels[1], self.mean

    @property
    def chance(self) -> float:
        """The loss of a guess, if that is the kind of loss: not one summed over tokens."""
        return self.guess if self.first < 2 * self.guess else math.inf

    def see_loss(self, loss: float):
        self.seen += 1
        self.recent.append(loss)
        self.mean = sum(self.recent) / len(self.recent)
        if self.seen == 1:
            self.first, self.first_step, self.level = loss, self.step, loss
        if self.seen == 4:
            self.opening = self.mean
        if self.seen >= 16:
            self.lowest = min(self.lowest, self.mean)
        distance = loss - self.level
        far = max(SPIKE * math.sqrt(self.variance), 0.5 * abs(self.level), SMALL)
        if self.seen > 20 and distance > (far / 2 if self.outliers else far):  # no part of what it is held against
            self.outliers = [*self.outliers, distance][-ROW:]
            return
        slow, fast = max(0.02, 1 / self.seen), max(0.1, 1 / self.seen)
        self.variance += slow * (distance**2 - self.variance) + slow * sum(one**2 for one in self.outliers)
        self.level += fast * distance
        self.outliers = []

    def is_broken(self) -> dict | None:
        """A loss that is no finite number, or as many norms of gradients as no scaler of float16 leaves out."""
        return None if self.broken is None else {"what": self.broken[0], "value": self.broken[1]}

    def above(self, bar: float) -> bool:
        """Whether four of five of the last losses are, so that neither a few large ones nor chance make it so."""
        return sum(loss > bar for loss in self.recent) >= 0.8 * len(self.recent)

    def oscillates(self) -> dict | None:
        """Early in the run the loss is above that of a guess, and of the first batch."""
        early = max(2 * (self.warmup_steps or 0), (self.total_steps or 0) // 10, 50)
        bar = max(self.chance, self.first)
        worse = 12 <= self.seen and self.step <= early and self.mean > self.headroom * bar and self.above(bar)
        return {"least": min(self.recent), "most": max(self.recent), "guess": self.guess} if worse else None

    def rises(self) -> dict | None:
        """The mean is far above its lowest, or above the first loss of a model that knew more than a guess."""
        noise = median(abs(after - before) for before, after in pairwise(self.recent)) if self.seen >= 12 else math.inf
        rise = min(max(self.lowest / 3, 2 * noise), self.lowest)  # what diverges is noisy, too
        starts = [(self.lowest, max(rise, 0.5))]  # half a nat is two fifths of the likelihood
        if SMALL < self.first < 0.8 * self.chance:  # one loss says less than a mean of sixteen
            starts.append((self.first, max(self.first, 1.0, 6 * noise)))
        for before, rise in starts if self.opening > SMALL and not self.morphs else ():
            if self.mean > before + rise and self.above(before + rise):
                return {"before": before, "after": self.mean}
        return None

    def spikes(self) -> dict | None:
        """Losses in a row far above the running mean."""
        gradient = "" if self.grad_norm is None else f" with a gradient norm of {self.grad_norm:.3g}"
        jumped = len(self.outliers) == ROW
        return {"before": self.level, "after": self.recent[-1], "with_": gradient} if jumped else None

    def drops(self) -> dict | None:
        """From one evaluation to the next the loss is much worse, and training is no better, which would be overfitting."""
        (before, after), (trained_before, trained) = self.evaluations, self.levels
        if math.isnan(before) or trained < max(0.9 * trained_before, SMALL):
            return None
        share = 0.2 if trained >= 0.97 * trained_before else 1.0  # also of what was not seen
        return {"before": before, "after": after} if after >= before + max(abs(before) * share, SMALL) else None

    def is_flat(self, deep: bool) -> dict | None:
        """Long after its learning rate was at its top the loss is that of a guess, and was never a tenth lower."""
        patience = max(2 * (self.warmup_steps or 0), 2 * self.top_step, PATIENCE[0 if deep else 1])
        judged = deep == (self.depth > 20 and "post" in self.kinds) and self.first_step <= 10 and self.step >= patience
        knew_more = min(self.lowest / 0.9, self.first / 0.5) <= self.chance
        near = 0.98 * self.chance < self.mean <= self.headroom * max(self.chance, self.first)
        flat = judged and near and not knew_more
        return {"depth": self.depth, "guess": self.guess, "level": self.mean} if flat else None

    def warms_up_too_long(self) -> dict | None:
        """The run ends before the learning rate is at its top."""
        asked, total = self.warmup_steps or 0, self.total_steps or math.inf
        return {"asked": asked, "total": total} if asked >= total > 0 else None

    def warms_up_too_fast(self) -> dict | None:
        """The learning rate was at its top long before the warm-up should end."""
        asked = self.warmup_steps or 0
        short = asked >= 4 and self.falls and self.top_step <= TOO_SHORT * asked + 1
        return {"top": self.top_step, "asked": asked} if short else None
