"""What placements cost: time, memory, and accuracy in int8."""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..conversion import convert_checkpoint
from ..modeling.architectures import get_architecture
from ..modeling.placements import canonical_name
from ..verification import decodes
from .measuring import Batch, Report, draw, layers_of, loss_of, mean_loss, measuring, outputs, prepare
from .sensitivity import relative, replaced

LEAST_SECONDS = 0.1  # of a timed run: of shorter ones much is the interpreter's and the scheduler's


@dataclass(repr=False)
class Cost(Report):
    """
    What models cost, side by side; the first is the one that the others are compared with.

    Args:
        objective (`str`): what the loss is.
        batch_size, length (`int`): of the batch that is timed, in sequences and tokens.
        models (`dict`): for each model

            - `prefill`, `decode`, `compiled_prefill` (`dict`, *optional*): `milliseconds` (of one token for each sequence in
              `decode`), `tokens_per_second`, `ratio` to the first model, and `spread` of that ratio, see [`cost`]; `decode` if the
              model generates and has positions left, the last if asked for
            - `parameter_bytes`, `buffer_bytes`
            - `activation_bytes`: what a training step keeps for the backward pass of the batch, weights not counted; `None` where
              weights are offloaded
            - `loss`, `loss_int8_weights`, `loss_int8_dynamic`, and `output_change_int8_weights`, `output_change_int8_dynamic`:
              relative change of the last hidden states; if asked for
    """

    objective: str
    batch_size: int
    length: int
    models: dict[str, dict[str, Any]]

    def plot(self, path: str | PathLike | None = None):
        """Draw the ratios of the times, and the loss in int8; saves to `path` if given and returns the figure."""
        first = next(iter(self.models.values()))

        def series(pick: Callable[[dict[str, Any]], Any]):
            found = {name: pick(one) for name, one in self.models.items()}
            found = {name: value for name, value in found.items() if value is not None}
            return list(found), list(found.values())

        kinds = [kind for kind in ("prefill", "decode", "compiled_prefill") if kind in first]
        times = {kind: series(lambda one, kind=kind: one[kind]["ratio"]) for kind in kinds}  # type: ignore[misc]
        panels: list[Any] = [("Time", "", f"relative to {next(iter(self.models))}", times)]
        if "loss" in first:
            added = {
                kind: series(lambda one, key=key: one[key] - one["loss"])  # type: ignore[misc]
                for kind, key in (("weights", "loss_int8_weights"), ("dynamic", "loss_int8_dynamic"))
            }
            panels.append(("int8", "", "added loss", added))
        return draw(path, *panels)


def cost(
    model: Any,
    batches: Any = None,
    *,
    tokenizer: Any = None,
    max_tokens: int = 2048,
    placements: Sequence[str] = (),
    repeats: int = 10,
    decode_tokens: int = 8,
    compile_backend: str | None = None,
    quantization: bool = True,
) -> Cost:
    """
    Time, memory and int8 accuracy of a model and of others beside it.

    Models are timed in rounds, a run of each in random order, so that what else the machine does hits all alike; a run that takes
    less than 0.1 s is repeated until it takes that. Times are the first quartile of the rounds, since others' work only ever adds
    time; trust ratios rather than times. A ratio is the median of the ratios in the rounds, and its spread half the width of the
    interval that holds the true median with at least 90 %, whatever the distribution (the sign test's; with fewer than five rounds
    all that was seen). The first model has the spread of its own rounds, each over the one before. Prefill is a forward pass of the
    first batch, decoding is one token after the other with the cache, behind as much of the batch as leaves positions for them.

    int8 is simulated, in a few lines and for every device and kind of layer: weights are rounded to 255 symmetric levels for each
    output channel, and expert (weight-only), and inputs of linear layers and of experts to 256 levels between the least and the
    largest of them (dynamic, as in `torch.ao.quantization.quantize_dynamic`, which has kernels for `nn.Linear` on CPUs only). It says
    what accuracy is lost, not what time is gained. Only matrices in the layers are quantised, as usual; embeddings, heads, and
    routers of experts are not, nor what goes into the second matrix of experts whose implementation is `"eager"`.

    Args:
        model (`PreTrainedModel` or `dict` of them by name): stock or converted. They stay as they are. Quantisation takes a copy
            of the layers' matrices in memory, compilation what the compiler takes.
        batches (*optional*): text, token ids, or batches, as [`token_batches`] takes them; batches may have `labels`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one that the model was loaded with.
        max_tokens (`int`, *optional*, defaults to 2048): how many tokens to read.
        placements (`Sequence` of `str`, *optional*): what to convert the first model to, weights as they are, to be measured beside
            it: times and memory do not depend on weights. Not for models under PEFT, or with offloaded weights.
        repeats (`int`, *optional*, defaults to 10): timed runs of each, after one that is not.
        decode_tokens (`int`, *optional*, defaults to 8): tokens decoded in a run; 0 for none.
        compile_backend (`str`, *optional*): time the prefill of models compiled with it, too: `"inductor"` is PyTorch's default,
            and takes minutes.
        quantization (`bool`, *optional*, defaults to `True`): whether to measure losses in int8. Not for offloaded weights.

    Returns:
        [`Cost`]: `models`, with a `dict` for each; `help(Cost)` says what is in it.

    Raises:
        [`NormSwapError`]: for a placement or an architecture that cannot be had.
    """
    models = dict(model) if isinstance(model, Mapping) else {"as it is": model}
    first = next(iter(models.values()))
    for name in placements:
        models[canonical_name(name)] = convert_checkpoint(first, name)
    findings: dict[str, dict[str, Any]] = {name: {} for name in models}
    with ExitStack() as stack:
        twins = {name: stack.enter_context(measuring(one)) for name, one in models.items()}
        prepared = {name: prepare(batches, twin, tokenizer, max_tokens) for name, twin in twins.items()}
        data, objective = next(iter(prepared.values()))
        batch = {key: value for key, value in data[0].items() if key not in ("labels", "use_cache")}
        tokens, size = int(batch["attention_mask"].sum()), len(batch["input_ids"])

        runs = {name: prefill(twin, batch) for name, twin in twins.items()}
        record(findings, "prefill", interleaved(runs, repeats), tokens)
        if decode_tokens and all(generates(twin, batch) for twin in twins.values()):
            prompt = prompt_of(next(iter(twins.values())), batch, decode_tokens)
            if prompt is not None:
                runs = {name: decode(twin, prompt, decode_tokens) for name, twin in twins.items()}
                record(findings, "decode", interleaved(runs, repeats, decode_tokens), size)
        if compile_backend is not None:
            runs = {name: prefill(torch.compile(twin, backend=compile_backend), batch) for name, twin in twins.items()}
            for run in runs.values():
                run()  # compiles
            record(findings, "compiled_prefill", interleaved(runs, repeats), tokens)
        for name, twin in twins.items():
            data, objective = prepared[name]
            offloaded = any(parameter.is_meta for parameter in twin.parameters())
            findings[name] |= {
                "parameter_bytes": sum(one.nbytes for one in twin.parameters()),
                "buffer_bytes": sum(one.nbytes for one in twin.buffers()),
                "activation_bytes": None if offloaded else activation_bytes(twin, data[0], objective),
            }
            if quantization and not offloaded:
                findings[name] |= int8_losses(twin, data, objective)
    return Cost(objective, size, batch["input_ids"].shape[1], findings)


def prefill(twin: Any, batch: Batch) -> Callable[[], float]:
    """A function that runs the batch and returns the seconds that it took."""

    def run():
        return timed(lambda: twin(**batch))

    return run


def generates(twin: Any, batch: Batch) -> bool:
    """Whether a model goes on from a cache."""
    return decodes(twin, batch)


def prompt_of(twin: Any, batch: Batch, tokens: int) -> Batch | None:
    """As much of the beginning of a batch as leaves positions for so many more tokens, if there is something."""
    length = batch["input_ids"].shape[1]
    limit = getattr(twin.config, "max_position_embeddings", None) or length + tokens
    if get_architecture(twin.config).family == "bert":
        limit -= (twin.config.pad_token_id or 0) + 1  # RoBERTa counts positions from there
    if limit <= tokens:
        return None
    return {
        key: value[:, : limit - tokens] if torch.is_tensor(value) and value.shape[1:] == (length,) else value
        for key, value in batch.items()
    }


def decode(twin: Any, batch: Batch, tokens: int) -> Callable[[], float]:
    """A function that decodes tokens behind the batch, one by one, and returns the seconds that it took, prefill not counted."""

    def run():
        start = twin(**batch, use_cache=True)
        name = "cache" if "cache" in start else "past_key_values"
        ids, mask = batch["input_ids"][:, -1:], batch["attention_mask"]
        masks = [torch.cat([mask, mask.new_ones(len(mask), count)], 1) for count in range(1, tokens + 1)]

        def go_on():
            past = start[name]
            for longer in masks:
                past = twin(input_ids=ids, attention_mask=longer, use_cache=True, **{name: past})[name]

        return timed(go_on)

    return run


def timed(run: Callable[[], Any]) -> float:
    """The seconds that a function takes, until the accelerator is done."""
    for step in (synchronize, run, synchronize):
        if step is run:
            begin = time.perf_counter()
        step()
    return time.perf_counter() - begin


def synchronize():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interleaved(runs: Mapping[str, Callable[[], float]], repeats: int, parts: int = 1) -> dict[str, list[float]]:
    """The seconds of each run, in rounds of one of each, in random order, behind a round that only says how often a run is repeated
    to be long enough."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    seconds = min(runs[name]() for name in order)
    if seconds < LEAST_SECONDS:  # the first run warms up
        seconds = min(runs[name]() for name in order)
    count = max(math.ceil(LEAST_SECONDS / max(seconds, 1e-9)), 1)
    for _ in range(repeats):
        for name in order:
            times[name].append(sum(runs[name]() for _ in range(count)) / count / parts)
        shuffle(order)
    return times


def first_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def record(findings: dict[str, dict[str, Any]], kind: str, times: Mapping[str, list[float]], tokens: int):
    """Add times to the findings."""
    base = next(iter(times.values()))
    for name, values in times.items():
        ratios = [one / other for one, other in zip(values, base)]
        findings[name][kind] = {
            "milliseconds": 1000 * first_quartile(values),
            "tokens_per_second": tokens / first_quartile(values),
            "ratio": statistics.median(ratios),
            "spread": spread_of_median(
                ratios if values is not base else [one / other for one, other in zip(base[1:], base)]
            ),
        }


def spread_of_median(values: Sequence[float]) -> float:
    """Half the width of the interval between the k-th smallest and the k-th largest value, with the largest k for which it holds the
    median of the distribution with at least 90 %: the number of values below that is binomial."""
    count, cut, below = len(values), 0, 1
    while 2 * (below := below + math.comb(count, cut + 1)) <= 0.1 * 2**count:
        cut += 1
    ranked = sorted(values)
    return (ranked[-1 - cut] - ranked[cut]) / 2 if values else 0.0


def activation_bytes(twin: Any, batch: Batch, objective: str) -> int:
    """The bytes of the tensors that autograd keeps for the backward pass, each storage once, weights and buffers not counted."""
    weights = {one.untyped_storage().data_ptr() for one in itertools.chain(twin.parameters(), twin.buffers())}
    kept: dict[int, int] = {}
    alive = []  # else storages that were freed lend their addresses to others

    def pack(tensor):
        tensor = tensor.detach()  # a saved output would keep its graph, and the graph the output
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(twin, batch, objective)
    return sum(kept.values())


def matrices_of(module: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """The matrices of a linear module, or of all experts in one, and which of their dimensions is that of the inputs."""
    if isinstance(module, (nn.Linear, Conv1D)):
        return [(module.weight, -1 if isinstance(module, nn.Linear) else 0)]  # type: ignore[list-item]
    experts = [one for one in module.parameters(recurse=False) if one.ndim == 3]
    return [(one, 1 if getattr(module, "is_transposed", False) else -1) for one in experts]


def round_weight(weight: torch.Tensor, inputs: int = -1) -> torch.Tensor:
    """A weight as int8 would hold it, symmetric, with a scale for each output (and expert): the largest weight of all `inputs`, which
    is a dimension, divided by 127. In float32 or better, for fp16 has no scales as small as that."""
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scale = weight.abs().amax(inputs, keepdim=True) / 127
    return (weight / scale.where(scale > 0, 1.0)).round().clamp(-127, 127) * scale


def round_input(x: torch.Tensor) -> torch.Tensor:
    """A tensor as 256 levels from its least to its largest value, zero among them, would hold it."""
    fine = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = fine.amin().clamp_max(0), fine.amax().clamp_min(0)
    scale = (high - low) / 255
    scale = scale.where(scale > 0, 1.0)
    zero = (-low / scale).round()
    return ((((fine / scale).round() + zero).clamp(0, 255) - zero) * scale).to(x.dtype)


@contextmanager
def int8(twin: Any, dynamic: bool = False) -> Iterator[None]:
    """The linear modules of the layers, and their experts, in simulated int8."""
    matrices = {module: matrices_of(module) for layer in layers_of(twin) for module in layer.modules()}
    chosen = {module: [pair for pair in pairs if pair[0].is_floating_point()] for module, pairs in matrices.items()}
    modules = [module for module, pairs in chosen.items() if pairs and dynamic]
    gates = [
        module for module in modules if hasattr(module, "_apply_gate")
    ]  # behind it is the second matrix of an expert
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: (round_input(inputs[0]), *inputs[1:])) for module in modules
    ]
    weights = ((weight, round_weight(weight.data, inputs)) for pairs in chosen.values() for weight, inputs in pairs)
    try:
        for module in gates:
            module._apply_gate = lambda out, gate=module._apply_gate: round_input(gate(out))
        with replaced(weights):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in gates:
            vars(module).pop("_apply_gate", None)


def int8_losses(twin: Any, data: list[Batch], objective: str) -> dict[str, float]:
    """The loss as it is and in int8, and how far the output moves."""
    before = outputs(twin, data)
    found = {"loss": mean_loss(twin, data, objective)}
    for name, dynamic in (("weights", False), ("dynamic", True)):
        with int8(twin, dynamic):
            found[f"loss_int8_{name}"] = mean_loss(twin, data, objective)
            found[f"output_change_int8_{name}"] = relative(outputs(twin, data), before)
    return found
