"""Sensitivity: how far the output moves when the parameters do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from .measuring import Report, draw, has_targets, layers_of, mean_gradient, measuring, norm_of, outputs, prepare


@dataclass(repr=False)
class Sensitivity(Report):
    """
    How sensitive a model is to its parameters. A relative change of the output is the root of E|Δf|² / E|f|² over the last hidden
    states of all tokens.

    Args:
        objective (`str`): what the loss is.
        output_change (`float`): relative change of the output when the matrices of all layers are perturbed by a relative ε,
            divided by ε.
        gradient_change (`float`): the same of the gradient.
        by_layer (`list` of `float`, *optional*): as `output_change`, if only one layer is perturbed.
        by_skip (`dict`): for each kind of skip that layers have (`identity`, `normed`, `scaled`, `two streams`, `learned`), the
            number of those `layers`, and `output_change` and `gradient_change` if only they are perturbed.
        model_update (`float`): relative change of the output after one step of Adam, in the dtype of the weights. In bf16 it is far
            too low, and so it is for norms in fp16: what of the step is finer than the weights is rounded away. Measure a
            float32 copy to compare.
        learning_rate (`float`): of that step.
        gradient_variance (`float`): tr Cov(g) / |E g|² of the gradients of single sequences; 0 for a single one.
    """

    objective: str
    output_change: float
    gradient_change: float
    by_layer: list[float] | None
    by_skip: dict[str, dict[str, float]]
    model_update: float
    learning_rate: float
    gradient_variance: float

    def plot(self, path: str | PathLike | None = None):
        """Draw the output change by layer; saves to `path` if given and returns the figure."""
        values = self.by_layer or []
        series = {"output": (range(len(values)), values)}
        return draw(path, ("Output change by perturbed layer", "layer", "relative change / ε", series))


def skip_kind(layer: Any) -> str:
    """What the skip of a layer carries."""
    plan, point = layer.plan, layer.plan.branches[0].coordinates
    if plan.ends_dual or "d" in plan.sends:
        return "two streams"
    if isinstance(point["skip_norm"], str):
        return "learned"
    if point["skip_norm"] == 0:
        return "identity"
    return "normed" if point["skip_norm"] == 1 and point["skip_gain"] == 1 else "scaled"


@contextmanager
def replaced(values: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    """Other tensors for parameters of a twin, a copy of each; those that it shares are not written to."""
    kept = []
    try:
        for parameter, value in values:
            kept.append((parameter, parameter.data))
            parameter.data = value.to(parameter.dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def perturbed(layers: list, epsilon: float, seed: int):
    """The matrices of layers with Gaussian noise of `epsilon` times their root mean square."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                data = parameter.data.float() if parameter.dtype != torch.float64 else parameter.data
                noise = torch.randn(data.shape, generator=generator, dtype=data.dtype).to(data.device)
                yield (
                    parameter,
                    data + epsilon * data.pow(2).mean((-2, -1), keepdim=True).sqrt() * noise,
                )  # also of each expert


def relative(found: torch.Tensor, before: torch.Tensor) -> float:
    """The root of E|Δf|² / E|f|²."""
    return (norm_of([found - before])) / max(norm_of([before]), 1e-30)


def sensitivity(
    model: Any,
    batches: Any = None,
    *,
    tokenizer: Any = None,
    max_tokens: int = 1024,
    epsilon: float = 1e-2,
    draws: int = 3,
    learning_rate: float = 1e-4,
    sequences: int = 8,
    each_layer: bool = True,
) -> Sensitivity:
    """
    How far output and gradient move when parameters are perturbed, and when they are trained for one step.

    * E|f(x, W) − f(x, W + δ)|² is Admin's measure of why Post-Norm is hard to train: it grows with the number n of branches as
      O(n) in Post-Norm, and as O(log n) in Pre-Norm and Admin (Liu et al. 2020, arXiv:2004.08249, section 4; microsoft/admin-torch). Here
      δ is Gaussian, ε times the root mean square of each matrix, since what initialisers differ in is the size of the matrices.
    * The model update |ΔF| after one step is what DeepNorm bounds (Wang et al. 2022, DeepNet, arXiv:2203.00555, theorem 4.2, for
      SGD). Here it is a step of Adam, which the paper trains with and whose first step is the learning rate times the sign
      of the gradient.
    * Change of activations and gradients when parameters are randomly perturbed, by kind of skip, is the question of
      Catformer (Davis et al. 2021, ICML): its exact formula is not reproduced here.
    * The variance of the gradient is the simple noise scale of McCandlish et al. 2018, arXiv:1812.06162, section 2.2.

    Args:
        model (`PreTrainedModel`): stock or converted. It stays as it is: other weights are put into a twin. Takes, in memory, a
            copy of the layers' matrices and two float32 copies of the gradients of what is trained.
        batches (*optional*): text, token ids, or batches, as [`token_batches`] takes them; batches may have `labels`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one that the model was loaded with.
        max_tokens (`int`, *optional*, defaults to 1024): how many tokens to read.
        epsilon (`float`, *optional*, defaults to 1e-2): the relative size of the perturbation; in bf16, which rounds to 4e-3, not
            much less.
        draws (`int`, *optional*, defaults to 3): how many perturbations are averaged; single layers have one.
        learning_rate (`float`, *optional*, defaults to 1e-4): of the step of Adam.
        sequences (`int`, *optional*, defaults to 8): of how many sequences the variance of the gradient is.
        each_layer (`bool`, *optional*, defaults to `True`): whether to perturb each layer by itself, too, in L more forward passes.

    Returns:
        [`Sensitivity`]: `output_change`, `gradient_change`, `by_layer`, `by_skip`, `model_update` and `gradient_variance`;
        `help(Sensitivity)` says what each is.

    Raises:
        [`NormSwapError`]: if nothing is trained, and for weights that are offloaded or spread over processes.
    """
    with measuring(model, gradients=True) as twin:
        data, objective = prepare(batches, twin, tokenizer, max_tokens)
        layers = list(layers_of(twin))
        before = outputs(twin, data)
        _, gradient, _ = mean_gradient(twin, data, objective)
        size = max(norm_of(gradient.values()), 1e-30)

        def change(chosen, draws, with_gradient=True):
            output, moved = 0.0, 0.0
            for seed in range(draws):
                with replaced(perturbed(chosen, epsilon, seed)):
                    output += relative(outputs(twin, data), before) ** 2 / draws
                    if with_gradient:
                        _, other, _ = mean_gradient(twin, data, objective)
                        moved += (norm_of(other[name] - gradient[name] for name in other) / size) ** 2 / draws
            return {"output_change": output**0.5 / epsilon, "gradient_change": moved**0.5 / epsilon}

        total = change(layers, draws)
        kinds: dict[str, list] = {}
        for layer in layers:
            kinds.setdefault(skip_kind(layer), []).append(layer)
        by_skip = {
            kind: {"layers": len(chosen), **(total if len(kinds) == 1 else change(chosen, draws))}
            for kind, chosen in kinds.items()
        }
        by_layer = [change([layer], 1, with_gradient=False)["output_change"] for layer in layers if each_layer]

        parameters = dict(twin.named_parameters())
        step = (
            (one, one.data - learning_rate * gradient[name].sign())
            for name, one in parameters.items()
            if name in gradient
        )
        with replaced(step):
            update = relative(outputs(twin, data), before)
        return Sensitivity(
            objective,
            **total,
            by_layer=by_layer if each_layer else None,
            by_skip=by_skip,
            model_update=update,
            learning_rate=learning_rate,
            gradient_variance=variance(twin, data, objective, sequences),
        )


def variance(twin: Any, data: list, objective: str, sequences: int) -> float:
    """tr Cov(g) / |E g|² of the gradients of the first so many sequences."""
    rows: list[dict] = []
    for batch in data:
        for index in range(len(batch["input_ids"])):
            one = {
                key: value[index : index + 1]
                if torch.is_tensor(value) and value.shape[:1] == batch["input_ids"].shape[:1]
                else value
                for key, value in batch.items()
            }  # positions may be those of all rows
            if len(rows) < sequences and has_targets(twin, one):
                rows.append(one)
    if len(rows) < 2:
        return 0.0
    squares = 0.0
    mean: dict[str, torch.Tensor] = {}
    for row in rows:
        _, gradient, _ = mean_gradient(twin, [row], objective)
        squares += norm_of(gradient.values()) ** 2
        mean = {name: value / len(rows) + mean.get(name, 0.0) for name, value in gradient.items()}
    square = norm_of(mean.values()) ** 2
    return max(squares - len(rows) * square, 0.0) / (len(rows) - 1) / max(square, 1e-30)
