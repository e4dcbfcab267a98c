"""What the recipes share: their arguments, and a training loop for Accelerate that can be interrupted anywhere."""

import atexit
import json
import logging
import math
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel, set_seed, slice_tensors
from safetensors import SafetensorError
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import AutoConfig, HfArgumentParser, get_scheduler
from transformers.integrations import unset_hf_deepspeed_config

from .advice import TrainingDefaults, start_of, training_defaults
from .conversion import WARM_STARTS, convert_checkpoint, is_converted, present_spec, unwrap
from .doctor import Finding, TrainingDoctor
from .healing import parameter_groups
from .model_card import mark_of, write_card_of
from .modeling.architectures import get_architecture
from .modeling.placements import NormSwapError
from .morph import SCHEDULES, NormMorph, list_moves

logger = get_logger(__name__)

UNWRITTEN = (OSError, RuntimeError, SafetensorError)  # what a full disk raises
SCHEDULERS = (  # those of transformers.get_scheduler that need no more than the steps
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


def option(default: Any, help: str, choices=None):
    """A field of a dataclass of arguments."""
    metadata = {"help": help} | ({"choices": list(choices)} if choices else {})
    return field(default=default, metadata=metadata)


@dataclass
class ModelArguments:
    """Which model in which placement."""

    model_name_or_path: str = field(metadata={"help": "A folder or a model id on the Hub, stock or converted."})
    placement: list[str] | None = option(None, "The placement to convert to: one name, or one for each layer.")
    warm_start: str | None = option(
        None, "By default exact with --morph_steps or where no norm has to move, else calibrated.", WARM_STARTS
    )
    layers: list[int] | None = option(None, "The layers to convert, from 0; by default all.")
    morph_steps: int = option(0, "Move from the old placement to the new one over so many optimizer steps.")
    morph_schedule: str = option("linear", "In which order the layers move.", SCHEDULES)
    peft: str = option("none", "Train LoRA adapters, or norms only.", ("none", "lora", "norms"))

    def __post_init__(self):
        if self.morph_steps:
            self.warm_start = "exact"
        if self.placement is None and (self.layers or self.morph_steps):
            raise NormSwapError("`--layers` and `--morph_steps` say how to convert, but there is no `--placement`.")
        if self.morph_steps and self.peft != "none":
            raise NormSwapError("adapters belong to one placement: give `--peft` or `--morph_steps`, not both.")


@dataclass
class RunArguments:
    """How to train, in the words of [`~transformers.TrainingArguments`]. What is `None` follows from the placement."""

    output_dir: str = field(metadata={"help": "Where the model, checkpoints and results are written."})
    per_device_train_batch_size: int = option(8, "Rows in a batch of each process.")
    per_device_eval_batch_size: int = option(8, "Rows in a batch of each process.")
    gradient_accumulation_steps: int = option(1, "Batches of each process that one optimizer step sees.")
    num_train_epochs: float = option(3.0, "Passes over the training data.")
    max_train_steps: int | None = option(None, "Optimizer steps; overrides --num_train_epochs.")
    learning_rate: float | None = option(None, "The highest learning rate.")
    warmup_steps: int | None = option(None, "Optimizer steps over which the learning rate rises.")
    max_grad_norm: float | None = option(None, "The norm to which gradients are clipped.")
    weight_decay: float | None = option(None, "For matrices; nothing with one dimension decays.")
    lr_scheduler_type: str | None = option(None, "How the learning rate goes on after the warm-up.", SCHEDULERS)
    seed: int = option(42, "For initialization, order of the data and dropout.")
    max_train_samples: int | None = option(None, "Train on the first so many rows.")
    max_eval_samples: int | None = option(None, "Evaluate on the first so many rows.")
    eval_steps: int | None = option(None, "Evaluate every so many optimizer steps; by default after every epoch.")
    save_steps: int | None = option(None, "Write a checkpoint every so many optimizer steps.")
    save_total_limit: int | None = option(None, "Keep the last so many checkpoints.")
    resume_from_checkpoint: str | None = option(None, 'A checkpoint, or "latest" for the last one in the output_dir.')
    early_stopping_patience: int | None = option(None, "Stop after so many evaluations without a better one.")
    gradient_checkpointing: bool = option(False, "Compute activations again instead of keeping them.")
    mixed_precision: str | None = option(None, "By default that of the launch.", ("no", "fp16", "bf16"))
    torch_compile: bool = option(False, "Compile the model.")
    report_to: str | None = option(None, "A tracker of Accelerate: tensorboard, wandb, ... or all.")

    def __post_init__(self):
        at_least_one = (
            "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_train_steps"
        )
        at_least_one += (
            " max_train_samples max_eval_samples eval_steps save_steps save_total_limit early_stopping_patience"
        )
        for name in at_least_one.split():
            if (value := getattr(self, name)) is not None and value < 1:
                raise NormSwapError(f"`--{name}` must be at least 1, got {value}.")
        for name in ("learning_rate", "max_grad_norm", "num_train_epochs"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise NormSwapError(f"`--{name}` must be positive, got {value}.")
        for name in ("warmup_steps", "weight_decay"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise NormSwapError(f"`--{name}` must be at least 0, got {value}.")
        if self.lr_scheduler_type not in (None, *SCHEDULERS):
            raise NormSwapError(
                f"`--lr_scheduler_type` is one of {', '.join(SCHEDULERS)}, got {self.lr_scheduler_type}."
            )


def start(run: Callable, description: str | None, *kinds: Any):
    """Read the command line into dataclasses and run a recipe; what is refused is said in one sentence, with exit code 1."""
    try:
        run(*HfArgumentParser(kinds, description=description).parse_args_into_dataclasses())
    except NormSwapError as error:
        sys.exit(f"Error: {error}")


def make_accelerator(args: RunArguments) -> Accelerator:
    """Seeded, with the precision, accumulation and tracker of the arguments; makes the output folder, and logs from the main
    process."""
    checkpoint_to_resume(args)  # refuses before anything is loaded
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=args.report_to,
        project_dir=args.output_dir,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    if accelerator.state.deepspeed_plugin is not None:
        unset_hf_deepspeed_config()  # else ZeRO-3 spreads weights as they are loaded, and they cannot be converted
    if "gloo" in str(accelerator.state.backend):  # its threads abort, or hang, if Python ends while they free tensors
        atexit.register(time.sleep, 0.1)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
    set_seed(args.seed)
    return accelerator


def convert(model, args: ModelArguments, calibration: Any = None) -> tuple[Any, NormMorph | None]:
    """The model of the arguments from the loaded one, with its morph if one is asked for."""
    if args.placement is None:
        return model, None
    placement: Any = args.placement[0] if len(args.placement) == 1 else args.placement
    start = args.warm_start
    if start is None:
        start = "exact" if args.morph_steps else start_of(unwrap(model), placement, args.layers) or "none"
    given = {"calibration": calibration} if start == "calibrated" else {}
    if given and calibration is not None:
        given["norm_conversion"] = {"calibration_data": "the training texts"}  # for the card
    converted = convert_checkpoint(model, placement, warm_start=start, layers=args.layers, **given)
    morph = NormMorph(converted, args.morph_steps, args.morph_schedule) if args.morph_steps else None
    if morph is None and list_moves(converted):
        raise NormSwapError("`--warm_start exact` needs a morph that leads to the placement: give `--morph_steps`.")
    return converted, morph


def add_adapters(accelerator: Accelerator, model, args: ModelArguments, output_dir: str):
    """The model with the adapters of the arguments, if they ask for any. A model that was just converted is written to the
    folder `base_model`, for the adapters to be loaded on."""
    if args.peft == "none":
        return model
    from peft import get_peft_model

    from .peft import adapter_config

    config = adapter_config(model, args.peft)
    if args.placement is not None:
        folder = Path(output_dir) / "base_model"
        if accelerator.is_main_process:
            scratch = folder.with_name(f".{folder.name}")
            model.save_pretrained(scratch)
            replace_folder(scratch, folder)
        model.name_or_path = str(folder.resolve())
    return get_peft_model(model, config)


def choose_settings(model, args: RunArguments, task: str, num_samples: int | None, steps: int) -> TrainingDefaults:
    """The settings for the placement of the model, with what the arguments give in their stead."""
    config: Any = unwrap(model).config
    target, native = present_spec(config, aim=True), get_architecture(config).native
    defaults = training_defaults(target, config.num_hidden_layers, task, num_samples, steps, native=native)
    if any(".lora_" in name for name, _ in model.named_parameters()):
        reason = {"learning_rate": "LoRA: as for GPT-2 in Hu et al. 2021, arXiv:2106.09685, appendix D"}
        defaults = replace(defaults, learning_rate=2e-4, reasons=defaults.reasons | reason)
    names = ("learning_rate", "warmup_steps", "max_grad_norm", "weight_decay", "lr_scheduler_type")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(defaults, **given, reasons=defaults.reasons | dict.fromkeys(given, "given"))


def raise_norm_eps(model, least: float | None):
    """Give norms, and the field of the config that says so, an epsilon of at least `least`."""
    for key in ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"):
        if least is not None and (eps := getattr(model.config, key, least)) < least:
            setattr(model.config, key, least)
            for module in model.modules():
                for name in {"eps", "variance_epsilon"}.intersection(vars(module)):
                    if getattr(module, name) == eps:
                        setattr(module, name, least)


class Progress:
    """Where a run is and what it has measured: a part of each checkpoint."""

    def __init__(self):
        self.steps = 0  # of the optimizer
        self.epoch = 0
        self.batches = 0  # of this epoch, on each process
        self.history: list[dict[str, float]] = []
        self.best: dict[str, float] = {}  # of the evaluations
        self.evaluations_since_best = 0
        self.best_weights: dict[str, torch.Tensor] = {}

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


def train(
    accelerator: Accelerator,
    model: Any,
    loader: Any,
    args: RunArguments,
    *,
    task: str,
    source: Any = None,
    morph: NormMorph | None = None,
    loss: Callable[[Any, Any], torch.Tensor] = lambda model, batch: model(**batch).loss,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    metric: str | None = None,
    tokenizer: Any = None,
    arguments: Sequence[Any] = (),
) -> dict[str, float]:
    """
    Train a model, which changes in place, and write it to `args.output_dir`.

    What is drawn in a step (dropout, masks) depends on the seed, the number of the batch and the process alone, and the order
    of the data on the seed and the epoch: a run that was interrupted and resumed ends with the weights of one that was not.

    Args:
        accelerator (`accelerate.Accelerator`): from [`make_accelerator`].
        model (`PreTrainedModel` or `PeftModel`): any, converted or not.
        loader (`torch.utils.data.DataLoader`): shuffled training batches, not prepared; random choices belong into `loss`.
        args ([`RunArguments`]): how to train.
        task (`str`): as in [`training_defaults`].
        source (`PreTrainedModel`, *optional*):
            What the model was converted from, to scale the learning rates of what a warm start scaled.
        morph ([`NormMorph`], *optional*): of the model; finished at the end.
        loss (`Callable`, *optional*): `(model, batch)` to a scalar; by default the loss that the model returns.
        evaluate (`Callable`, *optional*): the prepared model to its metrics.
        metric (`str`, *optional*): the one that decides about early stopping; better is more, but for `"loss"` and
            `"perplexity"`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): saved beside the weights.
        arguments (`Sequence` of dataclasses, *optional*): what else `run.json` tells.

    Returns:
        `dict`: the metrics of the weights that were kept, as in `all_results.json`. `history.json` has the loss and the
        learning rate of every step and the metrics of every evaluation.

    Raises:
        [`NormSwapError`]: without data, for a checkpoint of another model or run, when the loss is not finite, and when a
        checkpoint cannot be written; the last whole one is intact then.
        `SystemExit`: with code 143 after SIGTERM, 130 after Ctrl-C, and a checkpoint.
    """
    total = count_steps(accelerator, loader, args)
    if morph is not None and morph.steps > total:
        raise NormSwapError(f"the run has {total} steps, and the morph takes {morph.steps}: lower `--morph_steps`.")
    streams = isinstance(loader.dataset, IterableDataset)
    settings = choose_settings(model, args, task, None if streams else len(loader.dataset), total)
    logger.info(f"Training for {total} steps with\n{settings}")
    groups = parameter_groups(source or model, model, settings.learning_rate, settings.weight_decay)
    if not groups:
        raise NormSwapError("nothing is trained: all parameters of the model are frozen.")
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if args.torch_compile:
        model.compile()
    raise_norm_eps(unwrap(model), settings.norm_eps)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, settings.adam_beta2 or 0.999))
    # Neither prepared nor stepped by Accelerate, which would count the steps of all processes.
    scheduler = get_scheduler(settings.lr_scheduler_type, optimizer, settings.warmup_steps, total)
    doctor = TrainingDoctor(model, optimizer, warmup_steps=settings.warmup_steps, total_steps=total)
    data, zero = loader, accelerator.state.deepspeed_plugin
    if zero is not None and zero.is_auto("gradient_clipping"):
        zero.deepspeed_config["gradient_clipping"] = settings.max_grad_norm  # it clips by itself
    if zero is not None and zero.zero_stage == 3 and args.early_stopping_patience is not None:
        raise NormSwapError("`--early_stopping_patience` keeps whole weights, which ZeRO-3 spreads: take ZeRO-2.")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, scheduler, *([] if morph is None else [morph]))
    checkpoint = checkpoint_to_resume(args)
    if checkpoint is not None:
        check_checkpoint(checkpoint, accelerator.unwrap_model(model))
        accelerator.load_state(str(checkpoint / "state"))
        doctor.run.step = progress.steps
        doctor.findings = read_findings(args)
        doctor.told = len(doctor.findings)
        logger.info(f"Resumed from {checkpoint} at step {progress.steps} of {total}.")
    if args.report_to is not None:
        accelerator.init_trackers("hf_normswap", config=flat(args))
    description = describe_run([*arguments, args], settings, accelerator)
    write_json(accelerator, args, "run.json", description | {"findings": [one.to_dict() for one in doctor.findings]})

    def record(values: dict[str, float]):
        progress.history.append({"step": progress.steps, **values})
        accelerator.log(values, step=progress.steps)

    def examine(**numbers):
        if doctor.step(**numbers):
            findings = [finding.to_dict() for finding in doctor.findings]
            write_json(accelerator, args, "run.json", description | {"findings": findings})

    def save():
        save_checkpoint(accelerator, model, tokenizer, args, progress.steps)

    bar = tqdm(total=total, initial=progress.steps, desc="Training", disable=not accelerator.is_main_process)
    losses: list[torch.Tensor] = []
    grad_norm = None
    with stopping_on_signals(accelerator) as received:
        while progress.steps < total:
            model.train()
            loader.set_epoch(progress.epoch)
            batches = accelerator.skip_first_batches(loader, progress.batches) if progress.batches else loader
            batches.set_epoch(progress.epoch)
            step_before = progress.steps
            for batch in batches:
                set_seed(args.seed + 1_000_003 * progress.epoch + progress.batches, device_specific=True)
                rows, weight = share_of_step(accelerator, data, progress.batches)
                with accelerator.accumulate(model):
                    value = loss(model, slice_tensors(batch, rows))
                    accelerator.backward(value * weight)
                    losses.append(torch.stack([value.detach().float(), torch.ones_like(value).float()]) * weight)
                    if accelerator.sync_gradients:
                        grad_norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                progress.batches += 1
                if not accelerator.sync_gradients:
                    continue
                learning_rate = settings.learning_rate * scheduler.get_last_lr()[0] / scheduler.base_lrs[0]
                if not accelerator.optimizer_step_was_skipped:
                    scheduler.step()
                weighted, weights = accelerator.reduce(torch.stack(losses).sum(0), "mean").tolist()
                mean = weighted / weights
                losses.clear()
                examine(loss=mean, learning_rate=learning_rate, grad_norm=grad_norm)
                if not math.isfinite(mean):
                    raise NormSwapError(f"the loss is {mean} at step {progress.steps}: lower the `--learning_rate`.")
                progress.steps += 1
                if morph is not None:
                    morph.step()
                record({"train_loss": mean, "learning_rate": learning_rate})
                bar.set_postfix(loss=f"{mean:.3f}")
                bar.update()
                ends_epoch = accelerator.gradient_state.end_of_dataloader
                if ends_epoch:
                    progress.epoch, progress.batches = progress.epoch + 1, 0
                finished = progress.steps == total
                if evaluate is not None and (
                    finished or (progress.steps % args.eval_steps == 0 if args.eval_steps else ends_epoch)
                ):
                    metrics = evaluate(model)
                    record(metrics)
                    examine(eval_loss=metrics.get("loss"))
                    model.train()
                    if morph is None or progress.steps >= morph.steps:  # before, it is another model
                        finished |= note_best(model, progress, args, metric)
                stopped = accelerator.check_trigger()
                if (args.save_steps and progress.steps % args.save_steps == 0 and not finished) or stopped:
                    save()
                if stopped:
                    number = signal.Signals(received[0] if received else signal.SIGTERM)  # or of another process
                    logger.warning(
                        f"Stopped by {number.name} after step {progress.steps}: go on with `--resume_from_checkpoint latest`."
                    )
                    raise SystemExit(128 + number)
                if finished:
                    total = progress.steps
                    break
            if progress.steps == step_before:
                raise NormSwapError("there is no training data.")
    bar.close()
    for name, tensor in accelerator.unwrap_model(model).state_dict().items():
        if name in progress.best_weights:
            copy_whole(progress.best_weights[name], tensor)
    if morph is not None:
        morph.finish()
    accelerator.wait_for_everyone()
    try:
        write_model(accelerator, model, tokenizer, Path(args.output_dir))
    except UNWRITTEN as error:
        raise unwritten("the model", args, error) from error
    results = write_results(accelerator, args, progress)
    if accelerator.is_main_process and is_converted(unwrap(model)):
        mark = {"findings": [one.to_dict() for one in doctor.findings], "conversion": mark_of(unwrap(model).config)}
        write_json(accelerator, args, "run.json", description | mark)  # of which model the results are
        write_card_of(unwrap(model), args.output_dir)  # with them
    found = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
    logger.info(f"The model is in {args.output_dir}: {found}.")
    for tracker in accelerator.trackers:  # `end_training` would also part the processes, which may have more to do
        tracker.finish()
    return results


def count_steps(accelerator: Accelerator, loader: Any, args: RunArguments) -> int:
    """The optimizer steps of the run."""
    if isinstance(loader.dataset, IterableDataset):
        if args.max_train_steps is None:
            raise NormSwapError("a streaming data set has no length: give `--max_train_steps`.")
        return args.max_train_steps
    if not len(loader.dataset):
        raise NormSwapError("there is no training data.")
    batches = math.ceil(len(loader) / accelerator.num_processes)
    per_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    return args.max_train_steps or math.ceil(args.num_train_epochs * per_epoch)


def share_of_step(accelerator: Accelerator, loader: Any, number: int) -> tuple[slice, float]:
    """
    The rows of a process's batch that count, and the weight of their mean in the mean over all rows of the optimizer step.

    Accelerate fills the last batches of an epoch with rows from its start, and takes the mean over batches and processes. With
    these a step is the same however its rows are spread over them. `loader` is not prepared; `number` counts from 0.
    """
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return slice(None), 1.0
    size, processes, batches = loader.batch_size, accelerator.num_processes, accelerator.gradient_accumulation_steps
    total = len(loader.dataset) - (len(loader.dataset) % (size * processes) if loader.drop_last else 0)
    rows = min(max(total - (number * processes + accelerator.process_index) * size, 0), size)
    step = size * processes * batches
    return slice(max(rows, 1)), rows * processes * batches / min(step, total - number // batches * step)


def evaluate(accelerator: Accelerator, model, loader, predict: Callable) -> tuple[torch.Tensor, ...]:
    """What `predict(model, batch)` returns for the rows of a prepared loader (tensors with a row for each), from all processes,
    each row once."""
    model.eval()
    parts = []
    for batch in tqdm(loader, desc="Evaluating", leave=False, disable=not accelerator.is_main_process):
        with torch.no_grad():
            parts.append([part.cpu() for part in accelerator.gather_for_metrics(predict(model, batch))])
    return tuple(torch.cat(part) for part in zip(*parts))


def note_best(model, progress: Progress, args: RunArguments, metric: str | None) -> bool:
    """Keep the weights of the best evaluation; whether there were enough without a better one."""
    if args.early_stopping_patience is None:
        return False
    metrics = progress.history[-1]
    name = metric or "loss"
    sign = -1 if name in ("loss", "perplexity") else 1
    if not progress.best or sign * metrics[name] > sign * progress.best[name]:
        parameters = extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
        progress.best, progress.evaluations_since_best = metrics, 0
        progress.best_weights = {name: whole(one.detach()) for name, one in parameters if one.requires_grad}
    else:
        progress.evaluations_since_best += 1
    return progress.evaluations_since_best >= args.early_stopping_patience


def whole(tensor: Any) -> torch.Tensor:
    """A copy in the memory of the CPU, also of a tensor that FSDP2 spread over processes."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor.to("cpu", copy=True)


def copy_whole(values: torch.Tensor, target: Any):
    """The way back."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, target.device_mesh, target.placements).to_local()
        target = target.to_local()
    target.copy_(values)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoints(output_dir: str) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    paths = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    return sorted(paths, key=lambda path: int(path.name.partition("-")[2]))


def checkpoint_to_resume(args: RunArguments) -> Path | None:
    """The checkpoint that the arguments name; with "latest" none if there is none yet."""
    if args.resume_from_checkpoint is None:
        if checkpoints(args.output_dir):
            raise NormSwapError(
                f"{args.output_dir} has checkpoints: go on with `--resume_from_checkpoint latest`, or take another folder."
            )
        return None
    if args.resume_from_checkpoint.lower() in ("latest", "true"):
        return next(reversed(checkpoints(args.output_dir)), None)
    checkpoint = Path(args.resume_from_checkpoint)
    if not (checkpoint / "state").is_dir():
        raise NormSwapError(f"{checkpoint} is no checkpoint of a run: it has no folder `state`.")
    return checkpoint


def check_checkpoint(checkpoint: Path, model):
    """Refuse the checkpoint of another architecture or placement, and adapters of another kind."""
    adapters = [json.loads(path.read_text()) for path in checkpoint.glob("adapter_config.json")]
    configs = [one.to_dict() for one in getattr(model, "peft_config", {}).values()]
    for name in ("needs_base_converted_by_hf_normswap", "r", "target_modules"):
        found, expected = ([one.get(name) for one in side] for side in (adapters, configs))
        if name == "target_modules":  # a list in the file, a set here
            found, expected = (["".join(sorted(one or "")) for one in side] for side in (found, expected))
        if found != expected:
            raise NormSwapError(
                f"{checkpoint} has adapters with {name} {found}, and this run {expected}: resume with the command it was made with."
            )
    if not adapters:
        config = AutoConfig.from_pretrained(checkpoint)
        for name in ("model_type", "norm_placement", "norm_target", "num_hidden_layers"):
            saved, wanted = (getattr(one, name, None) for one in (config, unwrap(model).config))
            if saved != wanted:
                raise NormSwapError(
                    f"{checkpoint} has {name} {saved!r}, and this run {wanted!r}: resume with the command it was made with."
                )


def write_model(accelerator: Accelerator, model, tokenizer, folder: Path):
    """Weights, config and tokenizer, for `from_pretrained`."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        whole_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        if not hasattr(whole_model, "peft_config"):
            for stale in folder.glob("adapter_*"):  # of another run: it would be loaded on top
                stale.unlink()
        whole_model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def unwritten(what: str, args: RunArguments, error: Exception) -> NormSwapError:
    """What to say if the disk is full."""
    last = next(reversed(checkpoints(args.output_dir)), None)
    way_out = "start again" if last is None else f"resume from {last}"
    return NormSwapError(f"{what} could not be written ({error}). Make room and {way_out}.")


def replace_folder(new: Path, folder: Path):
    """Give a complete folder its name, in place of an older one."""
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def save_checkpoint(accelerator: Accelerator, model, tokenizer, args: RunArguments, step: int):
    """Write weights and state under another name first; older checkpoints beyond the limit go when the new one is whole."""
    folder = Path(args.output_dir) / f"checkpoint-{step}"
    scratch = folder.with_name(f".{folder.name}")
    try:
        write_model(accelerator, model, tokenizer, scratch)
        accelerator.save_state(str(scratch / "state"))
    except UNWRITTEN as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise unwritten(f"the checkpoint of step {step}", args, error) from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        replace_folder(scratch, folder)
        for old in checkpoints(args.output_dir)[: -args.save_total_limit] if args.save_total_limit else []:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


@contextmanager
def stopping_on_signals(accelerator: Accelerator) -> Iterator[list[int]]:
    """SIGTERM and the first Ctrl-C set Accelerate's trigger, which the loop checks after each step, and are listed."""
    received: list[int] = []

    def note(number, _):
        received.append(number)
        accelerator.set_trigger()
        signal.signal(number, before[number])  # a second one ends at once

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what stays in the output folder ----------------------------------------------------------------------------------


def describe_run(arguments: Sequence[Any], settings: TrainingDefaults, accelerator: Accelerator) -> dict[str, Any]:
    """The command line, the settings with their reasons, and the versions."""
    packages = ("hf_normswap", "torch", "transformers", "accelerate", "datasets", "peft")
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass
    return {
        "command": shlex.join([sys.executable, *sys.argv]),
        "arguments": {key: value for part in arguments for key, value in asdict(part).items()},
        "settings": asdict(settings),
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "versions": versions,
    }


def read_findings(args: RunArguments) -> list[Finding]:
    """What the doctor had found before the run was interrupted."""
    path = Path(args.output_dir) / "run.json"
    found = json.loads(path.read_text()).get("findings", []) if path.is_file() else []
    return [Finding(**one) for one in found]


def flat(args) -> dict[str, Any]:
    """Arguments as trackers take them."""
    return {key: value for key, value in asdict(args).items() if isinstance(value, (int, float, str, bool))}


def write_json(accelerator: Accelerator, args: RunArguments, name: str, content):
    """Write a file of the output folder, under another name first."""
    if accelerator.is_main_process:
        path = Path(args.output_dir) / name
        scratch = path.with_name(f".{name}")
        scratch.write_text(json.dumps(content, indent=2) + "\n")
        scratch.rename(path)


def write_results(accelerator: Accelerator, args: RunArguments, progress: Progress) -> dict[str, float]:
    """`history.json`, `all_results.json` (of the weights that were kept) and, with matplotlib, `curves.png`."""
    evaluations = [entry for entry in progress.history if "train_loss" not in entry]
    losses = [entry["train_loss"] for entry in progress.history if "train_loss" in entry]
    results = progress.best or (evaluations or [{"step": progress.steps}])[-1]
    results = results | {"train_loss": statistics.mean(losses[-10:])}
    write_json(accelerator, args, "history.json", progress.history)
    write_json(accelerator, args, "all_results.json", results)
    if accelerator.is_main_process:
        try:
            plot_history(progress.history).savefig(Path(args.output_dir) / "curves.png")
        except ImportError:
            logger.warning("Without matplotlib there are no curves: pip install hf_normswap[plot].")
    return results


def plot_history(history: list[dict[str, float]]):
    """A matplotlib figure with a panel for the training loss, the learning rate, and each metric."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for entry in history for name in entry if name != "step"))
    figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        axes.plot(*zip(*points), marker="." if len(points) < 20 else "")
        axes.set(title=name, xlabel="optimizer steps")
    return figure
