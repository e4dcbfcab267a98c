"""What the diagnostics share: a twin of the model to measure on, what it reads, and how findings are written and drawn.

Everything is measured on a *twin*: a second model on the tensors of the first, stock layers made ours at their native placement,
which is the same function bit for bit. Hooks, modes and gradients are the twin's own, and weights are replaced there instead of
being written to, so that there is nothing in the model itself to restore, even if a measurement is interrupted."""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from os import PathLike
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.distributed.tensor import DTensor

from ..calibration import is_causal, token_batches
from ..conversion import check_config, converted_config, is_converted, rehook, restructure, share, unwrap
from ..modeling.architectures import get_architecture
from ..modeling.placements import NormSwapError

MASKED_SHARE = 0.15  # of the tokens, for masked language models (Devlin et al. 2019, arXiv:1810.04805, section 3.1)

Batch = dict[str, Any]


class Report:
    """What a diagnostic found."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON: lists, strings, numbers, and `None` for what is not finite."""
        return plain(dataclasses.asdict(self))  # type: ignore[call-overload]

    def __repr__(self) -> str:
        """Its name and its figures in one line; of lists the ends."""
        shown = [one.name for one in dataclasses.fields(self) if one.repr]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={brief(getattr(self, name))}' for name in shown)})"


def brief(value: Any) -> str:
    """A figure of a report in a few characters."""
    if isinstance(value, dict):
        return f"{{{', '.join(map(str, value))}}}"
    if isinstance(value, list) and value and isinstance(value[0], (list, dict)):
        return f"[{len(value)} entries]"
    if isinstance(value, list):
        ends = value if len(value) < 3 else [value[0], "…", value[-1]]
        return f"[{', '.join(map(brief, ends))}]".replace("'…',", "…,")
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: str | PathLike | None, *panels: tuple[str, str, str, dict[str, tuple[Any, Any]]], log: str = ""):
    """A figure with a panel for each title, labels of the axes and series `{name: (x, y)}`; `log` names logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    for axes, (title, x_label, y_label, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name, (x, y) in series.items():
            axes.plot(x, y, marker=".", label=name)
        axes.set(title=title, xlabel=x_label, ylabel=y_label, **{f"{axis}scale": "log" for axis in log})
        if len(series) > 1:
            axes.legend(fontsize="small")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


@contextmanager
def measuring(model: Any, *, gradients: bool = False) -> Iterator[Any]:
    """
    A twin of a model in evaluation mode, with a random state of its own.

    Args:
        model (`PreTrainedModel`): stock or converted, also compiled, under PEFT, or dispatched over devices.
        gradients (`bool`, *optional*, defaults to `False`): whether gradients are to be had, for which all weights have to be in
            memory.

    Raises:
        [`NormSwapError`]: for an architecture that is not supported, for prompts that are trained, and for weights that are not there.
    """
    adapter = getattr(extract_model_from_parallel(model, keep_torch_compile=False), "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise NormSwapError(
            f"{type(adapter).__name__} puts virtual tokens in front of the text, which the diagnostics cannot follow: measure the model "
            "without them, `model.get_base_model()`."
        )
    model = unwrap(model)
    if getattr(model, "config", None) is None:
        raise NormSwapError(f"expected a Transformers model, got {type(model).__name__}.")
    check_config(model.config)
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise NormSwapError(
            f"the weights of {type(model).__name__} are spread over processes (ZeRO-3 or FSDP): measure the model before it is "
            "prepared, or load what was saved."
        )
    if gradients and any(parameter.is_meta for parameter in model.parameters()):
        raise NormSwapError(
            f"gradients need all weights in memory, and some of {type(model).__name__} are offloaded: load it without "
            "offloading. `residual_stream`, `collapse` and `cost` work as it is."
        )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        ExitStack() as stack,
    ):
        for kind in {"cpu", model.device.type} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield twin_of(model).eval()


def twin_of(model: Any) -> Any:
    """A second model on the same tensors with our layers; what accelerate hooked is hooked again."""
    if not is_converted(model):
        return restructure(model, converted_config(model.config, get_architecture(model.config).native, None))
    twin, hooks = share(model, model.config)  # with adapters in it the structure is better left alone
    rehook(hooks)
    return twin


def layers_of(twin: Any) -> Any:
    """The layers, from the bottom up."""
    return attrgetter(get_architecture(twin.config).layers)(twin.base_model)


def prepare(data: Any, twin: Any, tokenizer: Any, max_tokens: int, length: int = 512) -> tuple[list[Batch], str]:
    """
    The batches to measure on, and what the loss is: that of

    - `"labels"`, where the batches have some;
    - `"next token"` for causal language models;
    - `"masked tokens"` for masked ones, 15 % of the tokens, if the tokenizer has a token for the mask;
    - `"same tokens"` for masked ones without: the model is to tell the tokens that it sees;
    - `"random target"` otherwise: half the mean squared distance of the first output (the last hidden states) to a fixed
      Gaussian sample. It says how gradients flow, but not how good the model is.

    Batches in which there is nothing to predict (all labels are -100, or each row has one token) are left out, unless there are no
    others: then the target is random.
    """
    accepted = inspect.signature(twin.forward).parameters
    batches: list[Batch] = list(
        token_batches(data, twin, tokenizer, max_tokens=max_tokens, length=length, labels=True)
    )
    predicts = twin.get_output_embeddings() is not None and "labels" in accepted
    mask_token = getattr(tokenizer, "mask_token_id", None)
    objective, generator = "labels", torch.Generator().manual_seed(0)
    if 0 < (labelled := sum("labels" in batch for batch in batches)) < len(batches):
        raise NormSwapError(f"{labelled} of {len(batches)} batches have `labels`: give them to all, or to none.")
    if any(batch["attention_mask"].ndim != 2 for batch in batches if "attention_mask" in batch):
        raise NormSwapError("an attention mask must have the shape (batch, sequence), 0 where there is padding.")
    for batch in batches:
        batch |= {
            key: value.clone() for key, value in batch.items() if value.is_inference()
        }  # which have no gradients
        mask = batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        if "labels" not in batch and predicts:
            objective = "next token"
            if is_causal(twin.config):
                mask = mask & torch.nn.functional.pad(
                    mask, (1, -1), value=True
                )  # padding on the left predicts nothing
            else:
                objective = "same tokens"
                if mask_token is not None:
                    chosen = mask & (torch.rand(mask.shape, generator=generator) < MASKED_SHARE).to(mask.device)
                    if not chosen.any():  # something is; at the ends are tokens that no model predicts
                        chosen[tuple(mask.nonzero()[int(mask.sum()) // 2])] = True
                    mask, objective = chosen, "masked tokens"
            batch["labels"] = batch["input_ids"].masked_fill(~mask, -100)
            if objective == "masked tokens":
                batch["input_ids"] = batch["input_ids"].masked_fill(mask, mask_token)
        if "use_cache" in accepted:
            batch["use_cache"] = False
    batches = [batch for batch in batches if has_targets(twin, batch)] or [
        {key: value for key, value in batch.items() if key != "labels"} for batch in batches
    ]
    with torch.no_grad():
        first = twin(**batches[0]) if "labels" in batches[0] else {}
    return batches, objective if first.get("loss") is not None else "random target"


def has_targets(twin: Any, batch: Batch) -> bool:
    """Whether a batch has something to predict, if it has labels. Models of text that read from left to right predict no first token."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return True
    if (
        is_causal(twin.config)
        and twin.get_output_embeddings() is not None
        and labels.shape == batch["input_ids"].shape
    ):
        labels = labels[:, 1:]
    return bool((labels != -100).any())


def loss_of(twin: Any, batch: Batch, objective: str) -> torch.Tensor:
    """The loss of a batch, a scalar in float32 or better."""
    output = twin(**batch)
    if objective != "random target":
        return output.loss if output.loss.dtype == torch.float64 else output.loss.float()
    found = output[0] if output[0].dtype == torch.float64 else output[0].float()
    target = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).to(found)
    distance = (found - target).pow(2) / 2
    mask = batch["attention_mask"].bool().to(found.device)
    return (distance[mask] if found.shape[:2] == mask.shape else distance).mean()


@torch.no_grad()
def mean_loss(twin: Any, batches: list[Batch], objective: str) -> float:
    """The mean of the losses of the batches."""
    return sum(loss_of(twin, batch, objective).item() for batch in batches) / len(batches)


def trained_parameters(twin: Any) -> dict[str, nn.Parameter]:
    """What training would change, by name."""
    found = {name: parameter for name, parameter in twin.named_parameters() if parameter.requires_grad}
    if not found:
        raise NormSwapError("all parameters are frozen, so there is no gradient: `model.requires_grad_(True)`.")
    return found


def mean_gradient(
    twin: Any, batches: list[Batch], objective: str
) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """The mean loss; its gradient by name of the parameter, in float32 or better (a copy of what is trained); and the norm of its
    gradient for what enters each layer, over all tokens."""
    parameters = trained_parameters(twin)
    total = {
        name: torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        for name, parameter in parameters.items()
    }
    loss, squares = 0.0, [0.0] * len(layers_of(twin))
    embedding = twin.get_input_embeddings().weight
    embedding.requires_grad_(True)  # the streams have gradients even if nothing below them is trained
    try:
        for batch in batches:
            with streams(twin) as seen:
                value = loss_of(twin, batch, objective)
            sources = [*parameters.values(), *seen[:-1]]
            found = torch.autograd.grad(value / len(batches), sources, allow_unused=True)
            for name, gradient in zip(parameters, found):
                if gradient is not None:  # as it is for experts that got no token
                    total[name] += gradient
            for index, gradient in enumerate(found[len(parameters) :]):
                squares[index] += norm_of([tokens_of(gradient, batch)]) ** 2 if gradient is not None else 0.0
            loss += value.item() / len(batches)
    finally:
        embedding.requires_grad_(any(embedding is one for one in parameters.values()))
    return loss, total, [math.sqrt(square) for square in squares]


def norm_of(tensors: Any) -> float:
    """The Euclidean norm of several tensors together."""
    return math.hypot(*(torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in tensors))


@contextmanager
def streams(twin: Any) -> Iterator[list[torch.Tensor]]:
    """Fills a list in each forward with what enters each layer, and with what leaves the last one, in front of the final norm. Of
    several streams it is the first: `z`, or `y` for Post-Norm-like placements whose norms follow the skip."""
    layers, seen = layers_of(twin), []

    def first(value):
        return first(value[0]) if isinstance(value, tuple) else value

    hooks = [layer.register_forward_pre_hook(lambda _, inputs: seen.append(first(inputs))) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _, inputs, output: seen.append(first(output))))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def tokens_of(state: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The states of all tokens but padding, of shape `(tokens, hidden_size)`, in float32 or better."""
    state = state.detach()[batch["attention_mask"].bool().to(state.device)]
    return state if state.dtype == torch.float64 else state.float()


@torch.no_grad()
def outputs(twin: Any, batches: list[Batch]) -> torch.Tensor:
    """The last hidden states of all tokens, behind the final norm, of shape `(tokens, hidden_size)`."""
    keys = inspect.signature(twin.base_model.forward).parameters.keys() - {"labels"}
    return torch.cat(
        [
            tokens_of(twin.base_model(**{key: batch[key] for key in batch if key in keys})[0], batch).cpu()
            for batch in batches
        ]
    )
