"""The residual stream: how large it is, what is in it, and how much the layers still change it."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from os import PathLike
from typing import Any

import torch

from ..modeling.residual import mix, scale
from .measuring import Report, draw, layers_of, measuring, prepare, streams, tokens_of

SINK_RATIO = 10.0  # times the median; on SmolLM2-135M the first token has 168 times the others' rms
MOST_SINKS = 16


@dataclass(repr=False)
class ResidualStream(Report):
    """
    The residual stream of L layers. Entry i of L + 1 is of what enters layer i, and the last of what leaves the last layer, in
    front of the final norm. In models whose norms follow the skip (BERT) it is the normed stream in Post-Norm-like placements,
    and what leaves the last layer is normed in all.

    Args:
        rms (`list` of `float`): median over the tokens of the root mean square of the channels, L + 1 entries.
        rms_max (`list` of `float`): the largest of all tokens.
        rms_by_position (`list` of `list` of `float`): mean over the sequences, for the first positions, padding not counted.
        sinks (`list` of `dict`): tokens whose rms is over 10 times the median somewhere, the largest first: `position`,
            `token` (its id), `count` (how many of them), `ratio` (the largest) and `layer` (where).
        branches (`list` of `dict`): from the bottom up, `layer`, `branch`, `rms` (median of what the branch adds), `share`
            (of the squared stream behind it, if branch and skip are uncorrelated: |b|² / (|b|² + |s|²), mean over tokens) and
            `final_share` (what is left of it at the end).
        embedding_share (`float`): what is left of the embeddings at the end. With all `final_share`s it adds up to 1.
        change (`list` of `float`): |x' - x| / |x|, mean over the tokens, for each of the L layers.
    """

    rms: list[float]
    rms_max: list[float]
    rms_by_position: list[list[float]]
    sinks: list[dict[str, Any]]
    branches: list[dict[str, Any]]
    embedding_share: float
    change: list[float]

    def plot(self, path: str | PathLike | None = None):
        """Draw rms, shares and change by layer; saves to `path` if given and returns the figure."""
        shares: dict = defaultdict(lambda: ([], []))
        for entry in self.branches:
            for series, value in zip(shares[entry["branch"]], (entry["layer"], entry["final_share"])):
                series.append(value)
        x = range(len(self.rms))
        return draw(
            path,
            ("Residual stream", "layer", "rms", {"median": (x, self.rms), "largest": (x, self.rms_max)}),
            ("Share in the last stream", "layer", "share of the square", dict(shares)),
            ("Change by a layer", "layer", "|x' − x| / |x|", {"change": (range(len(self.change)), self.change)}),
            log="y",
        )


@contextmanager
def branches_added(twin: Any) -> Iterator[list[tuple[int, str, torch.Tensor, torch.Tensor]]]:
    """Fills a list with the layer, the name, what is added and what the skip carries, at each branch of a forward."""
    layers, seen = list(layers_of(twin)), []

    def record(layer):
        def join(branch, z, y, dual, f):
            output = type(layer).join(layer, branch, z, y, dual, f)
            if branch.coordinates["output_norm"] != 0:
                f = mix(f, attrgetter(branch.output_norm)(layer)(f), layer.coordinate(branch, "output_norm"))
            added = scale(f, layer.coordinate(branch, "branch_gain"))
            seen.append((layer.plan.index, branch.name, added, output[0] - added))
            return output

        return join

    for layer in layers:
        layer.join = record(layer)
    try:
        yield seen
    finally:
        for layer in layers:
            del layer.join


def final_shares(shares: list[float]) -> tuple[list[float], float]:
    """What is left at the end of each share of the stream, and of the embeddings: each later branch leaves `1 - share`."""
    left, rest = [], 1.0
    for share in reversed(shares):
        left.append(share * rest)
        rest *= 1 - share
    return left[::-1], rest


def size(states: torch.Tensor) -> torch.Tensor:
    """The root mean square of the channels, of shape `(tokens,)`."""
    return states.pow(2).mean(-1).sqrt().cpu()


def residual_stream(
    model: Any, batches: Any = None, *, tokenizer: Any = None, max_tokens: int = 2048, positions: int = 32
) -> ResidualStream:
    """
    What the residual stream carries.

    The share of a branch is the squared dependency β² of the stream on it (Liu et al. 2020, Admin, arXiv:2004.08249, section
    4.2): at initialisation about 1/2 in Post-Norm, at any depth, and 1/k for the k-th branch of Pre-Norm, whose stream grows.
    Sinks are found by their size in the stream (massive activations: Sun et al. 2024, arXiv:2402.17762), to which the attention
    of trained models goes (Xiao et al. 2023, arXiv:2309.17453); attention itself is not measured. Of ResiDual's two streams it
    is the one that the branches read.

    Args:
        model (`PreTrainedModel`): stock or converted, also offloaded. It stays as it is.
        batches (*optional*): text, token ids, or batches, as [`token_batches`] takes them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one that the model was loaded with.
        max_tokens (`int`, *optional*, defaults to 2048): how many tokens to read.
        positions (`int`, *optional*, defaults to 32): for how many positions `rms_by_position` is.

    Returns:
        [`ResidualStream`]: by layer `rms`, `rms_max`, `rms_by_position` and `change`, `sinks`, `branches` and `embedding_share`;
        `help(ResidualStream)` says what each is.
    """
    sizes: dict[int, list] = defaultdict(list)
    changes: dict[int, list] = defaultdict(list)
    added: dict[tuple[int, str], list] = defaultdict(list)
    tokens, places = [], []
    with measuring(model) as twin:
        data, _ = prepare(batches, twin, tokenizer, max_tokens)
        for batch in data:
            with streams(twin) as seen, branches_added(twin) as joined:
                twin(**{key: value for key, value in batch.items() if key != "labels"})
            states = [tokens_of(state, batch) for state in seen]
            mask = batch["attention_mask"].bool()
            tokens.append(batch["input_ids"][mask].cpu())
            places.append((mask.long().cumsum(-1) - 1)[mask].cpu())
            for index, state in enumerate(states):
                sizes[index].append(size(state))
            for index, (before, after) in enumerate(zip(states, states[1:])):
                changes[index].append(size(after.to(before.device) - before) / size(before).clamp_min(1e-30))
            for layer, branch, *parts in joined:
                added[layer, branch].append(torch.stack([size(tokens_of(part, batch)) for part in parts]))
    rms = torch.stack([torch.cat(sizes[index]) for index in sorted(sizes)])
    token, place = torch.cat(tokens), torch.cat(places)
    means = [
        [row[place == index].mean().item() for index in range(min(positions, int(place.max()) + 1))] for row in rms
    ]
    entries, shares = [], []
    for (layer, branch), rows in added.items():
        one, skip = torch.cat(rows, 1).unbind()
        shares.append((one.pow(2) / (one.pow(2) + skip.pow(2))).nan_to_num().mean().item())
        entries.append({"layer": layer, "branch": branch, "rms": one.median().item(), "share": shares[-1]})
    left, rest = final_shares(shares)
    for entry, share in zip(entries, left):
        entry["final_share"] = share
    return ResidualStream(
        rms=rms.median(1).values.tolist(),
        rms_max=rms.max(1).values.tolist(),
        rms_by_position=means,
        sinks=find_sinks(rms, token, place),
        branches=entries,
        embedding_share=rest,
        change=[torch.cat(changes[index]).mean().item() for index in sorted(changes)],
    )


def find_sinks(rms: torch.Tensor, token: torch.Tensor, place: torch.Tensor) -> list[dict[str, Any]]:
    """The outliers of `rms`, of shape `(layers + 1, tokens)`, by position and token."""
    ratio, layer = (rms / rms.median(1, keepdim=True).values.clamp_min(1e-30)).max(0)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for index in (ratio > SINK_RATIO).nonzero().flatten().tolist():
        key = int(place[index]), int(token[index])
        entry = found.setdefault(key, {"position": key[0], "token": key[1], "count": 0, "ratio": 0.0, "layer": 0})
        entry["count"] += 1
        if ratio[index] > entry["ratio"]:
            entry |= {"ratio": ratio[index].item(), "layer": int(layer[index])}
    ranked = sorted(found.values(), key=lambda entry: -entry["ratio"] if math.isfinite(entry["ratio"]) else -math.inf)
    return ranked[:MOST_SINKS]
