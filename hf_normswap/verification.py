"""What a conversion did to a model: [`verify`] checks that it is sound, [`fidelity`] measures what it kept."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from tempfile import TemporaryDirectory

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .conversion import convert_checkpoint, load_model, resolve_model, revert_checkpoint
from .modeling.architectures import get_architecture
from .modeling.modeling_normswap import NormSwapModel
from .modeling.placements import PLACEMENTS
from .modeling.surgery import placements_of


@dataclass
class Check:
    """One finding of [`verify`]: `passed` is `None` where the check does not apply."""

    name: str
    passed: bool | None
    detail: str


@dataclass
class VerificationReport:
    """The findings of [`verify`]. Prints as a table; `bool(report)` is whether nothing failed."""

    model: str
    norm_placement: str | dict | list
    checks: list[Check] = field(default_factory=list)

    def __bool__(self):
        return all(check.passed is not False for check in self.checks)

    def to_dict(self) -> dict:
        return {"passed": bool(self), **dataclasses.asdict(self)}

    def __str__(self):
        marks = {True: "ok", False: "FAILED", None: "-"}
        lines = [f"{self.model}, norm placement {self.norm_placement}"]
        return "\n".join(lines + [f"  {marks[check.passed]:<7}{check.name}: {check.detail}" for check in self.checks])


def verify(model_or_path: PreTrainedModel | str | PathLike, *, save: bool = True, **kwargs) -> VerificationReport:
    """
    Check a converted (or stock) model on random tokens. The model itself is not changed.

    The checks: the architecture's native placement equals the stock model bit for bit; this placement is another
    function than stock; decoding with the cache equals decoding without it; every trainable parameter gets a gradient;
    and the model that is saved and loaded again gives the same output.

    Args:
        model_or_path (`PreTrainedModel`, `str` or `os.PathLike`): a model, a folder or a model id.
        save (`bool`, *optional*, defaults to `True`): whether to save and load it, which takes its size on disk.
        kwargs: with a path, arguments of [`~transformers.PreTrainedModel.from_pretrained`].
    """
    model = resolve_model(model_or_path, **kwargs)
    architecture, placements = get_architecture(model.config), placements_of(model.config)
    converted = isinstance(model, NormSwapModel)
    stock = revert_checkpoint(model if converted else convert_checkpoint(model, architecture.native)).eval()
    spec = model.config.norm_placement if converted else architecture.native
    report = VerificationReport(type(model).__name__, spec)
    twin = convert_checkpoint(model, spec).eval()  # has gradients and a mode of its own
    batch = random_batch(model)

    def check(name, passed, detail):
        report.checks.append(Check(name, passed, detail))

    with torch.no_grad():
        expected, actual = first_output(stock, batch), first_output(twin, batch)
        native = first_output(convert_checkpoint(stock, architecture.native).eval(), batch)
        difference = _relative(native, expected)
        check("native placement equals stock", torch.equal(native, expected), f"difference {difference:.1e}")
        difference = _relative(actual, expected)
        native_point = PLACEMENTS[architecture.native]
        moved = any(dataclasses.replace(placement, learned=()) != native_point for placement in placements)
        passed = difference > 0 if converted and moved else None  # gates and gains may be anywhere
        check("this placement differs from stock", passed, f"difference {difference:.1e}")
        if decodes(twin, batch):
            uncached = twin(**batch, use_cache=False).logits
            length = batch["input_ids"].shape[1] // 2
            ids, encoder = batch["input_ids"], {key: batch[key] for key in batch if key.startswith("encoder")}
            start = twin(input_ids=ids[:, :length], use_cache=True, **encoder)
            name = "cache" if "cache" in start else "past_key_values"  # what older releases call it
            rest = twin(input_ids=ids[:, length:], **{name: start[name]}, **encoder).logits
            difference = _relative(rest, uncached[:, length:])
            tolerance = 1e-4 if actual.dtype in (torch.float32, torch.float64) else 0.1
            check("cached decoding equals uncached", difference < tolerance, f"difference {difference:.1e}")
        else:
            check("cached decoding equals uncached", None, "the model does not generate")
    trainable = any(parameter.requires_grad for parameter in twin.parameters())
    missing = parameters_without_gradient(twin, batch) if trainable else []
    detail = f"missing: {', '.join(missing[:5])}" if missing else "all" if trainable else "nothing is trainable"
    check("gradients reach every parameter", not missing if trainable else None, detail)
    if save:
        with TemporaryDirectory() as folder, torch.no_grad():
            twin.save_pretrained(folder)
            loaded = first_output(load_model(folder, device_map=actual.device).eval(), batch)
        difference = _relative(loaded, actual)
        # Rotary frequencies that were cast to half precision with the model come back in full precision.
        tolerance = 0.05 if actual.dtype in (torch.float16, torch.bfloat16) else 0.0
        check("saved and loaded, it is the same", difference <= tolerance, f"difference {difference:.1e}")
    return report


def random_batch(model: PreTrainedModel, batch_size: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    """Token ids of shape `(batch_size, length)`, the same every time."""
    config = model.config
    length = min(length, getattr(config, "max_position_embeddings", length + 2) - 2)
    if getattr(config, "pad_token_id", None) is None and "Classification" in type(model).__name__:
        batch_size = 1  # without a padding token there is one sequence at a time
    generator = torch.Generator().manual_seed(0)
    embeddings = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    input_ids = torch.randint(embeddings // 2, embeddings, (batch_size, length), generator=generator).to(model.device)
    batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if "MultipleChoice" in type(model).__name__:
        batch = {key: value[:, None].repeat(1, 2, 1) for key, value in batch.items()}
    if getattr(config, "add_cross_attention", False):
        states = torch.randn(batch_size, length, config.hidden_size, generator=generator)
        batch["encoder_hidden_states"] = states.to(model.device, model.dtype)
    return batch


def decodes(model: PreTrainedModel, batch: dict) -> bool:
    """Whether a model returns a cache to go on from."""
    return model.can_generate() and any(key in model(**batch, use_cache=True) for key in ("cache", "past_key_values"))


def first_output(model: PreTrainedModel, batch: dict) -> torch.Tensor:
    """The logits of a model, or its last hidden state."""
    return model(**batch)[0]


def parameters_without_gradient(model: PreTrainedModel, batch: dict) -> list[str]:
    """The trainable parameters that the output of a model does not depend on. Experts that got no token do not count."""
    outputs = [value for value in model(**batch).to_tuple() if isinstance(value, torch.Tensor) and value.requires_grad]
    torch.stack([output.float().pow(2).mean() for output in outputs]).sum().backward()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    missing = [name for name, parameter in named if parameter.grad is None]
    model.zero_grad(set_to_none=True)
    return missing


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-12)).item()


@dataclass
class FidelityReport:
    """
    What a converted model kept of its source. Prints as text; [`~FidelityReport.plot`] draws the drift.

    Args:
        tokens (`int`): tokens compared, padding not counted.
        source_loss, converted_loss (`float`, *optional*): mean cross-entropy in nats per token, for causal models or
            where the batches have labels.
        kl (`float`, *optional*): mean Kullback-Leibler divergence of the converted model's predictions from the
            source's in nats, where there are logits per token.
        top1_agreement (`float`, *optional*): share of tokens for which both models rank the same token first.
        hidden_cosine (`float`): mean cosine of the last hidden states per token.
        sentence_cosine (`float`): mean cosine of the mean-pooled last hidden states per sequence.
        drift (`list` of `float`): 1 - cosine of the hidden states that enter each layer, and of the last.
    """

    tokens: int
    source_loss: float | None
    converted_loss: float | None
    kl: float | None
    top1_agreement: float | None
    hidden_cosine: float
    sentence_cosine: float
    drift: list[float]

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def __str__(self):
        lines = [f"{self.tokens} tokens"]
        if self.source_loss is not None and self.converted_loss is not None:
            delta = self.converted_loss - self.source_loss
            lines.append(f"loss {self.source_loss:.3f} -> {self.converted_loss:.3f} ({delta:+.3f} nats)")
        if self.kl is not None:
            lines.append(f"KL {self.kl:.3f} nats, same first choice {self.top1_agreement:.1%}")
        lines.append(f"cosine of hidden states {self.hidden_cosine:.4f}, of sentence means {self.sentence_cosine:.4f}")
        return "\n".join(lines)

    def plot(self, path: str | PathLike | None = None):
        """Draw the drift by layer with matplotlib; saves to `path` if given and returns the figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(range(len(self.drift)), self.drift, marker=".")
        axes.set(xlabel="layer", ylabel="1 − cosine to the source", title="Drift of the hidden states", ylim=(0, None))
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


CAPTURING = "_output_capturing_hooks_installed"  # where Transformers notes that its hooks for hidden states are there, for good


@torch.no_grad()
def fidelity(
    source: PreTrainedModel,
    converted: PreTrainedModel,
    batches: Iterable,
    *,
    tokenizer=None,
    max_length: int = 512,
) -> FidelityReport:
    """
    Compare a converted model with its source on the same text.

    Args:
        source, converted (`PreTrainedModel`): two models with the same vocabulary and depth.
        batches (`Iterable`): batches as both models take them (`dict` with `input_ids`, ...), tensors of token ids of
            shape `(batch, sequence)`, or texts if `tokenizer` is given.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts, each of which is a batch of its own.
        max_length (`int`, *optional*, defaults to 512): where texts are cut.

    Returns:
        [`FidelityReport`]

    Raises:
        `ValueError`: if there is nothing in `batches`, or they are texts and there is no tokenizer.
    """
    modules = [module for model in (source, converted) for module in model.modules()]
    modes = [module.training for module in modules]
    hooks = [module._forward_hooks.copy() for module in modules]
    hooked = [CAPTURING in vars(module) for module in modules]
    source.eval(), converted.eval()
    sums: dict[str, float] = {}
    drift: list[float] = []
    counts = {"tokens": 0, "predicted": 0, "sequences": 0}
    try:
        for batch in tqdm([batches] if isinstance(batches, str) else batches, desc="Comparing", leave=False):
            batch = _as_batch(batch, tokenizer, max_length)
            mask = batch["attention_mask"].bool()
            outputs = []
            for model in (source, converted):
                on_device = {key: value.to(model.device) for key, value in batch.items()}
                outputs.append(model(**on_device, output_hidden_states=True))
            _accumulate(sums, drift, counts, batch, mask, outputs, source)
    finally:
        for module, mode, before, was in zip(modules, modes, hooks, hooked):
            module.training = mode
            for key in module._forward_hooks.keys() - before.keys():
                del module._forward_hooks[key]
            if not was:
                vars(module).pop(CAPTURING, None)
    if not counts["tokens"]:
        raise ValueError("`batches` is empty: there is nothing to compare.")

    def mean(key, count):
        return sums[key] / counts[count] if key in sums and counts[count] else None

    return FidelityReport(
        tokens=counts["tokens"],
        source_loss=mean("source_loss", "predicted"),
        converted_loss=mean("converted_loss", "predicted"),
        kl=mean("kl", "tokens"),
        top1_agreement=mean("top1", "tokens"),
        hidden_cosine=1 - drift[-1] / counts["tokens"],
        sentence_cosine=sums["sentence"] / counts["sequences"],
        drift=[total / counts["tokens"] for total in drift],
    )


def _as_batch(batch, tokenizer, max_length: int) -> dict[str, torch.Tensor]:
    if isinstance(batch, str):
        if tokenizer is None:
            raise ValueError("got texts to compare: pass `tokenizer`, or batches of token ids.")
        batch = tokenizer(batch, return_tensors="pt", truncation=True, max_length=max_length)
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch}
    batch = dict(batch)
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    return batch


def _accumulate(sums, drift, counts, batch, mask, outputs, model):
    def add(key, value):
        sums[key] = sums.get(key, 0.0) + value.sum().item()

    states = [[state.float().cpu() for state in output.hidden_states] for output in outputs]
    for index, (a, b) in enumerate(zip(*states)):
        if index == len(drift):
            drift.append(0.0)
        drift[index] += (1 - nn.functional.cosine_similarity(a, b, dim=-1))[mask].sum().item()
    means = [(state[-1] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for state in states]
    add("sentence", nn.functional.cosine_similarity(*means, dim=-1))
    counts["tokens"] += int(mask.sum())
    counts["sequences"] += len(mask)
    logits = [output["logits"].float().cpu() for output in outputs if "logits" in output]
    if not logits or logits[0].shape[:2] != mask.shape:
        return
    ours, theirs = (value.log_softmax(-1) for value in logits)
    add("kl", (ours.exp() * (ours - theirs)).sum(-1)[mask])
    add("top1", (ours.argmax(-1) == theirs.argmax(-1))[mask])
    labels = batch.get("labels")
    if labels is None and model.can_generate():
        labels = batch["input_ids"].masked_fill(~mask, -100)
    if labels is None:
        return
    shift = int(model.can_generate())  # causal models predict the next token
    labels = labels[:, shift:].cpu()
    counts["predicted"] += int((labels != -100).sum())
    for key, value in (("source_loss", ours), ("converted_loss", theirs)):
        value = value[:, : value.shape[1] - shift]
        add(key, nn.functional.nll_loss(value.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100))


def perplexity(loss: float) -> float:
    """`exp(loss)`, infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
