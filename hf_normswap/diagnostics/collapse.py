"""Representation collapse: layers whose output is what they were given."""

import math
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from .measuring import Report, draw, layers_of, mean_loss, measuring, outputs, prepare, streams, tokens_of


@dataclass(repr=False)
class Collapse(Report):
    """
    How different the layers' representations are. Streams are those of [`ResidualStream`].

    Args:
        objective (`str`): what the loss is.
        loss (`float`): the mean loss of the batches.
        cosine (`list` of `float`): of what enters and what leaves each layer, mean over tokens.
        angular_distance (`list` of `float`): arccos(cosine) / π of each token, mean over tokens, from 0 to 1.
        effective_rank (`list` of `float`): of what enters each layer and of what leaves the last.
        skip_loss (`list` of `float`, *optional*): the loss without the layer, less the loss.
        skip_distance (`list` of `float`, *optional*): angular distance of the last hidden states without the layer to those
            with it, mean over tokens.
    """

    objective: str
    loss: float
    cosine: list[float]
    angular_distance: list[float]
    effective_rank: list[float]
    skip_loss: list[float] | None
    skip_distance: list[float] | None

    def plot(self, path: str | PathLike | None = None):
        """Draw all of it by layer; saves to `path` if given and returns the figure."""

        def panel(title, label, **series):
            return title, "layer", label, {name: (range(len(y)), y) for name, y in series.items() if y is not None}

        panels = [
            panel("Change of direction", "angular distance", layer=self.angular_distance, skipped=self.skip_distance),
            panel("Effective rank", "dimensions", rank=self.effective_rank),
        ]
        if self.skip_loss is not None:
            panels.append(panel("Without the layer", "added loss", loss=self.skip_loss))
        return draw(path, *panels)


def angles(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Angular distances of vectors in the last dimension: arccos(cosine) / π."""
    a, b = (nn.functional.normalize(part.double(), dim=-1) for part in (a, b))
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) / math.pi  # arccos loses what is near 1


def effective_rank(matrix: torch.Tensor) -> float:
    """exp(H(p)), with p the singular values of a matrix of shape `(tokens, hidden_size)` divided by their sum and H the entropy
    in nats (Roy and Vetterli 2007, The effective rank, EUSIPCO). Columns are not centred."""
    values = torch.linalg.svdvals(matrix.float())
    p = values / values.sum()
    return torch.exp(torch.special.entr(p).sum()).item()


def collapse(
    model: Any,
    batches: Any = None,
    *,
    tokenizer: Any = None,
    max_tokens: int = 2048,
    rank_tokens: int = 512,
    skip_layers: bool = True,
) -> Collapse:
    """
    How much each layer turns the representation, how many dimensions it has, and what the model is without the layer.

    In Pre-Norm the stream grows and what a layer adds gets ever smaller beside it, so that the upper layers do almost nothing
    (Liu et al. 2020, arXiv:2004.08249; ResiDual, Xie et al. 2023, arXiv:2304.14802, where the difference of consecutive inputs
    falls as 1/√k). The angular distance of consecutive layers and the loss without a layer are the measures of Mix-LN (Li et
    al. 2024, arXiv:2412.13795; Gromov et al. 2024, arXiv:2403.17887, where it is that of the last token only).

    A layer is left out with all of its branches and norms; what enters it goes on to the next. In Pre-Norm-like placements of
    BERT the norm that its last branch would have applied goes with it.

    Args:
        model (`PreTrainedModel`): stock or converted, also offloaded. It stays as it is.
        batches (*optional*): text, token ids, or batches, as [`token_batches`] takes them; batches may have `labels`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one that the model was loaded with.
        max_tokens (`int`, *optional*, defaults to 2048): how many tokens to read.
        rank_tokens (`int`, *optional*, defaults to 512): of how many tokens the rank is; it cannot be larger.
        skip_layers (`bool`, *optional*, defaults to `True`): whether to run the model without each layer, L times.

    Returns:
        [`Collapse`]: by layer `cosine`, `angular_distance`, `effective_rank`, `skip_loss` and `skip_distance`, and the `loss`;
        `help(Collapse)` says what each is.
    """
    with measuring(model) as twin:
        data, objective = prepare(batches, twin, tokenizer, max_tokens)
        layers = list(layers_of(twin))
        loss, wanted = mean_loss(twin, data, objective), outputs(twin, data)
        cosines, distances = ([0.0] * len(layers) for _ in range(2))
        kept: list[list] = [[] for _ in range(len(layers) + 1)]
        count = 0
        for batch in data:
            with streams(twin) as seen:
                twin(**{key: value for key, value in batch.items() if key != "labels"})
            states = [tokens_of(state, batch).cpu() for state in seen]
            for index, (before, after) in enumerate(zip(states, states[1:])):
                turned = angles(before, after)
                distances[index] += turned.sum().item()
                cosines[index] += torch.cos(turned * math.pi).sum().item()
            for rows, state in zip(kept, states):
                rows.append(state[: max(rank_tokens - count, 0)])
            count += len(states[0])
        skip_loss, skip_distance = [], []
        for layer in layers if skip_layers else ():
            plan, layer.plan = layer.plan, replace(layer.plan, branches=[])
            skip_loss.append(mean_loss(twin, data, objective) - loss)
            skip_distance.append(angles(outputs(twin, data), wanted).mean().item())
            layer.plan = plan
    return Collapse(
        objective,
        loss,
        cosine=[total / count for total in cosines],
        angular_distance=[total / count for total in distances],
        effective_rank=[effective_rank(torch.cat(rows)) for rows in kept],
        skip_loss=skip_loss if skip_layers else None,
        skip_distance=skip_distance if skip_layers else None,
    )
