"""Healing: a converted model learns from its source, on unlabelled text, what the conversion lost."""

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn
from tqdm.auto import tqdm
from transformers import get_scheduler

from .calibration import token_batches
from .conversion import is_converted, unwrap
from .model_card import note_training
from .modeling.placements import NormSwapError
from .modeling.surgery import placements_of
from .morph import NormMorph
from .warm_start import evaluating

# Share of the steps over which the learning rate rises, without and with normed skips: Post-Norm needs a longer warm-up
# (Xiong et al. 2020, arXiv:2002.04745).
WARMUP_RATIOS = (0.05, 0.1)
# How much faster norms and biases are healed than matrices, whose entries are about ten times smaller: AdamW's steps do not
# depend on size. With 1 SmolLM2 was 0.03 nats behind after 50 steps (`recipes/retrofit_table.py`).
VECTOR_RATE = 10.0


def distillation_loss(wanted: Any, found: Any, mask: torch.Tensor) -> torch.Tensor:
    """How far a model's output is from its source's over the tokens in `mask`, of shape `(batch, sequence)`: the relative
    squared error of the last hidden state and, where there are logits for tokens, the KL divergence in nats."""
    states = [output.hidden_states[-1][mask].float() for output in (wanted, found)]
    loss = (states[1] - states[0]).pow(2).sum() / states[0].pow(2).sum()
    logits: Any = [getattr(output, "logits", None) for output in (wanted, found)]
    if logits[0] is not None and logits[0].shape[:2] == mask.shape:
        source, student = (part[mask].float().log_softmax(-1) for part in logits)
        loss = loss + nn.functional.kl_div(student, source, reduction="batchmean", log_target=True)
    return loss


def parameter_groups(
    source: Any, converted: Any, learning_rate: float, weight_decay: float = 0.0, vector_rate: float = 1.0
) -> list[dict]:
    """
    What an optimizer that normalises its steps, such as AdamW, needs for a model with a warm start.

    A matrix that was divided by the scale of the stream learns as it did before if its learning rate is divided too.

    Args:
        source, converted (`PreTrainedModel`): a model and its conversion, whose parameters have the same names.
        learning_rate (`float`): for parameters of the size that they have in the source.
        weight_decay (`float`, *optional*, defaults to 0): for matrices; norms, biases and gates do not decay.
        vector_rate (`float`, *optional*, defaults to 1): multiplies the learning rate of norms, biases and gates.

    Returns:
        `list[dict]`: groups of the parameters that are trained, one for each learning rate and weight decay.
    """
    source, converted = (extract_model_from_parallel(model, keep_torch_compile=False) for model in (source, converted))
    sizes = [{name: size(parameter) for name, parameter in model.named_parameters()} for model in (source, converted)]
    groups: dict[tuple[float, float], list] = {}
    for name, parameter in converted.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim > 1:
            ratio = sizes[1][name] / sizes[0][name] if sizes[0].get(name) else 1.0
            key = learning_rate * ratio, weight_decay
        else:
            key = learning_rate * vector_rate, 0.0
        groups.setdefault(key, []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def size(parameter: torch.Tensor) -> float:
    """The root mean square."""
    return parameter.detach().float().pow(2).mean().sqrt().item()


class _Progress:
    """The number of steps done, as a part of a checkpoint."""

    def __init__(self):
        self.steps = 0
        self.losses: list[float] = []

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


def heal(
    source: Any,
    converted: Any,
    batches: Any,
    steps: int,
    *,
    tokenizer: Any = None,
    learning_rate: float = 1e-4,
    warmup_steps: int | None = None,
    lr_scheduler_type: str = "linear",
    weight_decay: float = 0.0,
    label_weight: float = 0.0,
    max_grad_norm: float = 1.0,
    morph: NormMorph | None = None,
    lora: Any = None,
    output_dir: str | os.PathLike | None = None,
    save_steps: int | None = None,
    resume_from_checkpoint: bool = False,
    on_step: Callable[[int, float], None] | None = None,
    accelerator: Accelerator | None = None,
) -> list[float]:
    """
    Distil a model into its own conversion, which is trained in place, with dropout off.

    Args:
        source (`PreTrainedModel`): what `converted` was converted from. It stays as it is.
        converted (`PreTrainedModel`): the result of [`convert_checkpoint`]. It gets tensors of its own.
        batches (`str`, `list`, `torch.Tensor`, `datasets.Dataset` or `Iterable`):
            Unlabelled text in any form that [`token_batches`] takes. Process i of n takes every n-th batch from the i-th;
            after the last follows the first.
        steps (`int`): the number of optimizer steps.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for text; by default the one that the model was loaded with.
        learning_rate (`float`, *optional*, defaults to 1e-4):
            The highest learning rate of matrices, as in [`parameter_groups`]; that of norms and biases is ten times higher.
        warmup_steps (`int`, *optional*):
            By default a tenth of the steps where a skip is normed or comes to be, else a twentieth; at least 10 of 20.
        lr_scheduler_type (`str`, *optional*, defaults to `"linear"`): a name that [`~transformers.get_scheduler`] knows.
        weight_decay (`float`, *optional*, defaults to 0): for matrices.
        label_weight (`float`, *optional*, defaults to 0):
            Weight of a causal model's own loss on the text, which is added to the distillation.
        max_grad_norm (`float`, *optional*, defaults to 1.0): the norm to which gradients are clipped.
        morph ([`NormMorph`], *optional*): of `converted`; it moves with the steps and is finished at the end.
        lora (`peft.LoraConfig`, *optional*):
            Train adapters and norms only; the adapters are merged into the weights at the end.
        output_dir (`str` or `os.PathLike`, *optional*): where checkpoints go; the last one is kept.
        save_steps (`int`, *optional*): after how many steps a checkpoint is written; by default none is.
        resume_from_checkpoint (`bool`, *optional*, defaults to `False`): go on from the checkpoint in `output_dir`.
        on_step (`Callable`, *optional*): called with the number of steps done and the loss after each.
        accelerator (`accelerate.Accelerator`, *optional*): for mixed precision and several processes.

    Returns:
        `list[float]`: the loss of each step.

    Raises:
        [`NormSwapError`]: without data or anything to train, for a model that was not converted, a morph of another model,
        `label_weight` without a causal head, checkpoints without `output_dir`, and when the loss is not finite.
    """
    source, converted = unwrap(source), unwrap(converted)
    if not is_converted(converted):
        raise NormSwapError(f"{type(converted).__name__} is not a converted model: `convert_checkpoint` it first.")
    if (save_steps or resume_from_checkpoint) and output_dir is None:
        raise NormSwapError("checkpoints need an `output_dir`.")
    if morph is not None and morph.model is not converted:
        raise NormSwapError("the morph is that of another model: make it of `converted`.")
    if label_weight and not converted.can_generate():
        raise NormSwapError(f"`label_weight` is for causal language models, and {type(converted).__name__} is none.")
    accelerator = accelerator or Accelerator()
    if accelerator.state.deepspeed_plugin is not None:
        raise NormSwapError(
            "healing is not for DeepSpeed: heal in one process, or with DDP or FSDP2, and train the result."
        )
    processes = accelerator.num_processes
    texts = token_batches(batches, converted, tokenizer, max_tokens=None)
    data = list(itertools.islice(texts, steps * processes))
    own_tensors(converted, source)

    with evaluating(source, converted), registered(accelerator) as register, adapted(converted, lora) as student:
        groups = parameter_groups(source, student, learning_rate, weight_decay, VECTOR_RATE)
        if not groups:
            raise NormSwapError("nothing is trained: all parameters of the converted model are frozen.")
        optimizer = torch.optim.AdamW(groups, lr=learning_rate)
        if warmup_steps is None:
            normed = any(placement.uses("skip_norm") for placement in placements_of(converted.config))
            warmup_steps = max(math.ceil(steps * WARMUP_RATIOS[normed]), min(10, steps // 2))
        # Accelerate moves a scheduler on once for each process.
        scheduler = get_scheduler(lr_scheduler_type, optimizer, warmup_steps * processes, steps * processes)
        model, optimizer, scheduler = accelerator.prepare(student, optimizer, scheduler)
        progress = _Progress()
        register(*[part for part in (progress, morph) if part is not None])
        checkpoint = None if output_dir is None else Path(output_dir) / "checkpoint"
        if resume_from_checkpoint and checkpoint is not None and checkpoint.is_dir():
            accelerator.load_state(str(checkpoint))
        source.to(accelerator.device), student.eval()

        bar = tqdm(total=steps, initial=progress.steps, desc="Healing", disable=not accelerator.is_main_process)
        while progress.steps < steps:
            batch = data[(progress.steps * processes + accelerator.process_index) % len(data)]
            batch = {key: value.to(accelerator.device) for key, value in batch.items()}
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            options = {"output_hidden_states": True, "return_dict": True}
            with torch.no_grad(), accelerator.autocast():
                wanted = source(**batch, **options)
            if label_weight:
                options["labels"] = batch["input_ids"].masked_fill(~mask, -100)
            found = model(**batch, **options)
            loss = distillation_loss(wanted, found, mask) + (label_weight * found.loss if label_weight else 0)
            if not torch.isfinite(loss):
                raise NormSwapError(f"the loss is {loss.item()} at step {progress.steps}: lower the `learning_rate`.")
            accelerator.backward(loss * accelerator.gradient_accumulation_steps)  # which it divides by
            accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if morph is not None:
                morph.step()
            progress.steps += 1
            progress.losses.append(loss.item())
            if save_steps and checkpoint is not None and progress.steps % save_steps == 0:
                save_checkpoint(accelerator, checkpoint)
            if on_step is not None:
                on_step(progress.steps, loss.item())
            bar.set_postfix(loss=f"{loss.item():.3f}")
            bar.update()
        bar.close()
        accelerator.wait_for_everyone()
        if lora is not None:
            student.merge_and_unload()
    if morph is not None:
        morph.finish()
    note_training(converted.config, "healing_steps", steps)
    return progress.losses


def own_tensors(converted: nn.Module, source: nn.Module):
    """Part a model from another with which it shares storage; ties within it stay."""
    shared = {tensor.data_ptr() for tensor in (*source.parameters(), *source.buffers())}
    for parameter in converted.parameters():
        if parameter.data_ptr() in shared:
            parameter.data = parameter.data.clone()
    for module in converted.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.data_ptr() in shared:
                module._buffers[name] = buffer.clone()


@contextmanager
def adapted(model: Any, lora: Any) -> Iterator[Any]:
    """The model itself, or with adapters, with which only they and the norms are trained; at the end as it was."""
    if lora is None:
        yield model
        return
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    student: Any = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # of norms, biases, gates
            parameter.requires_grad_(True)
    try:
        yield student
    finally:
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):  # interrupted
            student.unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable[name])


@contextmanager
def registered(accelerator: Accelerator) -> Iterator[Callable]:
    """Registers what belongs into checkpoints; at the end the accelerator forgets all that was given to it meanwhile."""
    lists = [accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._custom_objects]
    kept = [list(items) for items in lists]
    for items in lists:
        items.clear()
    try:
        yield accelerator.register_for_checkpointing
    finally:
        for items, before in zip(lists, kept):
            items[:] = before


def save_checkpoint(accelerator: Accelerator, folder: Path):
    """Write the state of the training under another name first, so that there is always a whole checkpoint."""
    scratch, previous = (folder.with_name(f".{folder.name}-{name}") for name in ("new", "previous"))
    accelerator.save_state(str(scratch))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)  # of a run that was killed here
            folder.rename(previous)
        scratch.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
    accelerator.wait_for_everyone()
