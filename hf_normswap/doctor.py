"""The doctor: watches a training run, and says in one sentence what is going wrong and what to try."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import logging

from .advice import ADMIN, DEEPNET, KEEL, RESIDUAL, XIONG, ZHANG, kinds_of
from .conversion import unwrap
from .modeling.architectures import Architecture, get_architecture
from .modeling.placements import NormSwapError
from .modeling.surgery import branch_names, placements_of
from .symptoms import Model, Run
from .warm_start import evaluating

logger = logging.get_logger(__name__)

WAIT = 10  # steps for a first batch to look at, and first gradients
SINGLE = "single_label_classification"


@dataclass
class Finding:
    """What a rule found: said once, when it was found first."""

    rule: str
    step: int  # of the optimizer; 0 is before the first
    message: str  # what is going wrong, and what to try
    source: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as a `dict`."""
        return asdict(self)

    def __str__(self):
        return f"{self.message} ({self.source})"


@dataclass(frozen=True)
class Rule:
    """One row: what it looks at, whether it holds (then the numbers of the sentence), the sentence, its source."""

    name: str
    looks_at: str  # "model": the first batch; "gradients": the first step; "optimizer"; "run": each step
    holds: Callable[[Any], dict | None]
    sentence: str
    source: str


def _decayed(found: list[str]) -> dict | None:
    return {"count": len(found), "name": found[0]} if found else None


NORMED = {"post", "deepnorm", "admin", "resi_dual"}  # kinds whose skip is normed
# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("skip_is_cut", "model", lambda model: None if model.cut is None else {"layer": model.cut},
         "The skip path of layer {layer} is cut: without its branches nothing of its input comes out; add the residual back, or "
         "give the placement a `skip_gain` above 0.", "as in OpenNMT/OpenNMT-py#2199"),
    Rule("fp16_overflow", "model", lambda model: model.overflow(),
         "The residual stream {verb} float16 at layer {layer} ({peak} of 65,504): {fix}train in bfloat16.",
         f"{RESIDUAL}, opus.yaml; huggingface/transformers#9295"),
    Rule("dead_branches", "gradients", lambda model: {"branches": ", ".join(model.dead)} if model.dead else None,
         "These branches contribute nothing or get no gradient: {branches}; look for a gain or weights of 0, activations that "
         "are all 0, or a detached tensor.", "Lu et al. 2019, arXiv:1903.06733"),
    Rule("norms_decay", "optimizer", _decayed,
         "Weight decay pulls {count} vectors (norms, biases, gates) to 0, such as {name}: give one-dimensional parameters a "
         "group with `weight_decay=0` (`parameter_groups` does).", "practice, as in `Trainer.get_decay_parameter_names`"),
    Rule("warmup_too_short", "run", Run.warms_up_too_fast,
         "The learning rate was highest at step {top}, but its warm-up should take {asked}: Accelerate steps a prepared "
         "scheduler once for each process; multiply `warmup_steps` and the length by their number, or do not prepare it.",
         "Accelerate, `AcceleratedScheduler.step`"),
    Rule("warmup_too_long", "run", Run.warms_up_too_long,
         "The warm-up takes {asked} of {total} steps, so the learning rate never comes to its top: shorten it, or train longer.",
         "Transformers, `get_linear_schedule_with_warmup`"),
    Rule("not_finite", "run", Run.is_broken,
         "The {what} is {value}, which clipping does not repair: lower the learning rate, train in bfloat16 instead of float16, "
         "or look at the batch (rows without a label, a division by 0).", "Kalamkar et al. 2019, arXiv:1905.12322"),
    Rule("oscillates_post", "run", lambda run: run.oscillates() if run.kinds & NORMED else None,
         "The loss jumps about ({least:.3g} to {most:.3g}, where a guess costs {guess:.3g}) instead of falling: with normed "
         "skips gradients are large near the output at first; take a longer warm-up or a lower learning rate.", XIONG),
    Rule("oscillates_pre", "run", lambda run: None if run.kinds & NORMED else run.oscillates(),
         "The loss jumps about ({least:.3g} to {most:.3g}, where a guess costs {guess:.3g}) instead of falling: Pre-Norm "
         "hardly needs a warm-up; lower the learning rate.", f"{XIONG}; {KEEL}"),
    Rule("loss_rises", "run", Run.rises,
         "The loss rose from about {before:.3g} to {after:.3g}: lower the learning rate, unless the data became harder.",
         "Wortsman et al. 2023, arXiv:2309.14322"),
    Rule("loss_spike", "run", Run.spikes,
         "The loss jumped from about {before:.3g} to {after:.3g}{with_}: clip gradients at 0.1 to 0.3 (`max_grad_norm`).",
         "practice; spikes as in OLMo 2, arXiv:2501.00656"),
    Rule("validation_drop", "run", Run.drops,
         "Validation fell suddenly (its loss rose from {before:.3g} to {after:.3g}) while training did not get better: clip "
         "gradients at 0.1 to 0.3 (`max_grad_norm`).", f"practice; unstable fine-tuning as in {ZHANG}"),
    Rule("slow_and_deep", "run", lambda run: run.is_flat(deep=True),
         "{depth} Post-Norm layers hardly learn (their loss is {level:.3g}, where a guess costs {guess:.3g}): convert to pre, deepnorm or "
         "resi_dual, or add auxiliary losses to lower layers.",
         f"{DEEPNET}; {ADMIN}; auxiliary losses: Al-Rfou et al. 2019, arXiv:1808.04444"),
    Rule("does_not_fall", "run", lambda run: run.is_flat(deep=False),
         "The loss is still that of a guess ({level:.3g} and {guess:.3g}): take another learning rate, a higher one "
         "where it fell a little, and look whether labels fit inputs and weights are trained.",
         "Mosbach et al. 2021, arXiv:2006.04884"),
)
# fmt: on


class TrainingDoctor(TrainerCallback):
    """
    Watches a training run, and says once, in one sentence, what is going wrong and what to try.

    As a callback of [`~transformers.Trainer`] it finds what it needs by itself (losses as often as `logging_steps`). In a loop of
    your own call [`~TrainingDoctor.step`] after each optimizer step. It looks at the model when the first batch to train on
    comes (in training mode, with gradients, without a cache), with two forward passes without gradients or dropout, and at the
    first gradients that are not all 0; neither weights, modes nor random numbers change, and its hooks are gone then, or after
    ten steps. Compiled and sharded (FSDP, ZeRO-3, tensor-parallel) models are not looked at, only their optimizer and their run.

    Of the losses it says, where `guess` is the loss of a model that gives each token or label the same probability (known of
    language models and classifiers, if the first loss is below twice as much), and means are those of the last 32 losses:

    - `not_finite`: one is no number, or the gradient norm was none for 8 steps (the scaler of float16 may skip some);
    - `oscillates_post`, `oscillates_pre`: after 12 losses, and before the 50th step, twice the warm-up or a tenth of the run, their
      mean is a quarter above that of a guess and the first loss (twice as high with a classifier's new head), and four of five
      are above these;
    - `loss_rises`: their mean is twice its lowest, or a third and twice the noise (the median step from loss to loss) above it, and
      by 0.5; or twice the first loss, and by 1 and six times the noise, if that was a fifth below a guess; and four of five
      losses are as high; not while a model morphs, nor where the first losses are below 0.1, as in distillation from an exact start;
    - `loss_spike`: after 20 losses, three in a row are above the running mean, the first by half of it, by 0.1, and by
      seven standard deviations, the others by half as much;
    - `validation_drop`: from one evaluation to the next it is a fifth worse and by 0.1, while training got better by less than
      3 %; or twice as bad, while training got better by less than a tenth, or its losses were not seen;
    - `slow_and_deep`, `does_not_fall`: after 120 steps (over 20 Post-Norm layers) or 300, and twice the warm-up, it is what a
      guess costs, or the first loss if that was more, up to a quarter above (twice as much with a classifier's new head), and
      never was a tenth lower, nor the first loss half as high; not where the first ten steps were not seen.

    Args:
        model (`PreTrainedModel` or `PeftModel`): any supported one, converted or not.
        optimizer (`torch.optim.Optimizer`, *optional*): without it weight decay and gradients are not looked at.
        warmup_steps (`int`, *optional*): optimizer steps over which the learning rate should rise.
        total_steps (`int`, *optional*): optimizer steps of the run.
        step (`int`, *optional*, defaults to 0): steps done already, in a resumed run.

    Attributes:
        findings (`list[Finding]`): the rule, the step, the sentence and the source of each; at most one for a rule.

    Raises:
        [`NormSwapError`]: for an architecture that is not supported, or what is no model.
    """

    def __init__(self, model: Any, optimizer: Any = None, *, warmup_steps=None, total_steps=None, step: int = 0):
        base: Any = unwrap(model) if isinstance(model, nn.Module) else model
        if not isinstance(base, PreTrainedModel):
            raise NormSwapError(f"expected a Transformers model or one with adapters, got {type(model).__name__}.")
        self.config = base.config
        self.architecture = get_architecture(base.config)
        placements = placements_of(base.config)
        self.run = Run(kinds_of(placements), len(placements), warmup_steps, total_steps, step)
        self.run.guess = loss_of_guessing(base)
        self.run.headroom = 2.0 if "Classification" in type(base).__name__ else 1.25
        self.run.morphs = getattr(self.config, "norm_target", None) is not None
        self.state = Model(dual=any(placement.uses("dual") for placement in placements))
        self.findings: list[Finding] = []
        self.told = 0  # how many of them `step` has returned
        self.layers: list[nn.Module] = list(attrgetter(self.architecture.layers)(base.base_model))
        self.model = extract_model_from_parallel(model)  # with its adapters, and compiled if it is
        self.handles: list[Any] = []
        self.graded = True  # whether the first gradients were seen, if they are to be
        self.steps = 0  # since it began to look
        if is_whole(self.model):
            self.handles.append(self.model.register_forward_pre_hook(self.on_first_batch, with_kwargs=True))
        if optimizer is not None:
            self.watch(optimizer)

    def watch(self, optimizer: Any):
        """Look at the groups of an optimizer now, and at the gradients of its first step."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        decayed = [
            names[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if group.get("weight_decay") and parameter.requires_grad and parameter.ndim <= 1 and id(parameter) in names
        ]
        self.judge("optimizer", decayed)
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's holds the real one
        if is_whole(self.model) and isinstance(inner, torch.optim.Optimizer):
            self.handles.append(inner.register_step_pre_hook(lambda *_: self.on_first_gradients()))
            self.graded = False

    def __repr__(self):
        return "\n".join([f"{type(self).__name__}: {len(self.findings)} findings", *map(str, self.findings)])

    def step(self, loss=None, learning_rate=None, grad_norm=None, eval_loss=None) -> list[Finding]:
        """
        Take note of an optimizer step, of an evaluation, or of both.

        Args:
            loss (`float`, *optional*): of the step. A call with `eval_loss` alone is no step.
            learning_rate (`float`, *optional*): of the step.
            grad_norm (`float`, *optional*): of the step, before clipping.
            eval_loss (`float`, *optional*): of an evaluation; lower is better.

        Returns:
            `list[Finding]`: what was found since the last call.
        """
        if any(number is not None for number in (loss, learning_rate, grad_norm)):
            self.run.step += 1
            self.release_seen()
        self.see(loss, learning_rate, grad_norm, eval_loss)
        new, self.told = self.findings[self.told :], len(self.findings)
        return new

    def see(self, *numbers):
        """Take note of a loss, a learning rate, the norm of a gradient and the loss of an evaluation."""
        self.run.see(*map(plain, numbers))
        self.judge("run", self.run)

    def judge(self, looks_at: str, facts: Any):
        """Apply the rules that look at something and have not spoken yet."""
        for rule in RULES:
            if rule.looks_at == looks_at and rule.name not in {finding.rule for finding in self.findings}:
                numbers = rule.holds(facts)
                if numbers is not None:
                    finding = Finding(rule.name, self.run.step, rule.sentence.format(**numbers), rule.source)
                    self.findings.append(finding)
                    logger.warning(f"Step {finding.step}: {finding}")

    def release_seen(self):
        """Remove the hooks once they have seen what they are for, or when it did not come."""
        self.steps += 1
        if self.graded or self.steps >= WAIT:
            self.release()

    def release(self):
        """Remove what is left of the hooks."""
        while self.handles:
            self.handles.pop().remove()

    # --- as a callback ------------------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.run.step, self.run.total_steps = state.global_step, state.max_steps
        self.run.warmup_steps = args.get_warmup_steps(state.max_steps)
        if optimizer is not None:
            self.watch(optimizer)

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.run.step = state.global_step
        self.release_seen()
        if lr_scheduler is not None:
            self.see(None, lr_scheduler.get_last_lr()[0])

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        self.see(logs.get("loss"), None, logs.get("grad_norm"), logs.get("eval_loss"))

    def on_train_end(self, args, state, control, **kwargs):
        self.release()

    # --- what is looked at --------------------------------------------------------------------------------------------

    def on_first_batch(self, module, args, kwargs):
        """Look at the model before it does what it was called for, if that is to train on a batch."""
        trains = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not trains or module is not self.model or not all(map(is_plain, [*args, *kwargs.values()])):
            return
        self.handles.pop(0).remove()
        if not is_whole(module):
            return
        if "use_cache" in inspect.signature(type(unwrap(module)).forward).parameters:
            kwargs = {**kwargs, "use_cache": False}
        try:
            with torch.no_grad(), evaluating(module), kept_random_numbers(module):
                for hooks in (self.watch_streams, self.silence_branches):
                    with removed_after(hooks):
                        module.forward(*map(copied, args), **{name: copied(value) for name, value in kwargs.items()})
        except Exception as error:  # the run must go on: what is wrong with the batch, it will say itself
            logger.warning(f"The doctor could not look at the model: {error}")
        self.judge("model", self.state)

    def watch_streams(self) -> Iterator[Any]:
        """Hooks that note how large the streams of float16 get, and which branches add nothing."""

        def note_stream(index):
            def hook(module, args, output):
                for stream in leaves(output):
                    if stream.dtype == torch.float16:
                        peak = stream.abs().max().nan_to_num(nan=math.inf, posinf=math.inf).item()
                        if peak > self.state.peak:
                            self.state.peak, self.state.peak_layer = peak, index

            return hook

        def note_branch(place):
            return lambda module, args, output: None if first(output).any() else self.state.silent.add(place)

        for index, layer in enumerate(self.layers):
            yield layer.register_forward_hook(note_stream(index))
            for name, module, _ in branches(layer, self.architecture):
                yield module.register_forward_hook(note_branch((index, name)))

    def silence_branches(self) -> Iterator[Any]:
        """Hooks that let branches write zeros, and note the first layer from which all tokens come out alike."""

        def silence(module, args, output):
            zeros = torch.zeros_like(first(output))
            return (zeros, *output[1:]) if isinstance(output, tuple) else zeros

        def note(index):
            def hook(module, args, kwargs, output):
                entered = first(args[0] if args else kwargs["hidden_states"])
                if self.state.cut is None and differs(entered) and not differs(first(output)):
                    self.state.cut = index

            return hook

        for index, layer in enumerate(self.layers):
            yield layer.register_forward_hook(note(index), with_kwargs=True)
            for _, module, _ in branches(layer, self.architecture):
                yield module.register_forward_hook(silence)

    def on_first_gradients(self):
        """List the branches that are trained but get no gradient, and those that are not trained and add nothing."""
        skips_layers = getattr(self.config, "layerdrop", 0)
        if self.graded or skips_layers or not is_whole(self.model):
            return
        gradients = (one.grad for one in self.model.parameters() if one.grad is not None)  # DeepSpeed keeps its own
        if not any(gradient.any() for gradient in gradients):
            return
        self.graded = True
        for index, layer in enumerate(self.layers):
            for name, _, roots in branches(layer, self.architecture):
                trained = [
                    parameter
                    for root in roots
                    for parameter in root.parameters()
                    if parameter.ndim > 1 and parameter.requires_grad
                ]
                moves = any(parameter.grad is not None and parameter.grad.any() for parameter in trained)
                if not moves and (trained or (index, name) in self.state.silent):
                    self.state.dead.append(f"layer {index} {name}")
        self.judge("gradients", self.state)


def is_whole(model: Any) -> bool:
    """Whether hooks on its modules see plain tensors: not in compiled models, nor in those spread over processes."""
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    marks = ("device_mesh", "ds_id", "_is_flat_param")
    return not compiled and not any(hasattr(parameter, mark) for parameter in model.parameters() for mark in marks)


def is_plain(argument: Any) -> bool:
    """Whether an argument of a model is one that it only reads: no cache."""
    return argument is None or isinstance(argument, (torch.Tensor, bool, int, float, str))


def copied(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, torch.Tensor) else argument


def loss_of_guessing(model: Any) -> float:
    """The loss of a language model or a classifier that knows nothing; infinite of models with another loss."""
    kind, config = type(model).__name__, model.config
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        return math.log(config.get_text_config().vocab_size)
    classifies = kind.endswith(("ForSequenceClassification", "ForTokenClassification")) and config.num_labels > 1
    return math.log(config.num_labels) if classifies and config.problem_type in (None, SINGLE) else math.inf


def plain(number: Any) -> float | None:
    """A number as Python has it, also of a tensor that FSDP2 spread over processes; what is none ends no run."""
    try:
        if isinstance(number, torch.Tensor):
            number = number.detach()
            number = number.full_tensor() if hasattr(number, "full_tensor") else number
        return None if number is None else float(number)
    except Exception:
        logger.debug(f"The doctor takes no note of {number!r}, which is no number.")
        return None


def branches(layer: Any, architecture: Architecture) -> list[tuple[str, nn.Module, list[nn.Module]]]:
    """The branches of a layer: the name, the module that writes to the stream, the modules of which it is made."""
    found: list[tuple[str, nn.Module, list[nn.Module]]] = []
    for name in branch_names(layer, architecture):
        if name == "ffn":
            roots = [getattr(layer, root) for root in architecture.mlp]
            found.append((name, roots[-1].dense if architecture.family == "bert" else roots[-1], roots))
        else:
            root = getattr(layer, getattr(architecture, name))
            found.append((name, attrgetter(architecture.attn_output)(root), [root]))
    return found


def leaves(streams: Any) -> list[torch.Tensor]:
    """The tensors of the shape of a stream, in what a layer takes or gives."""
    if isinstance(streams, (tuple, list)):
        return [leaf for part in streams for leaf in leaves(part)]
    return [streams] if isinstance(streams, torch.Tensor) and streams.ndim == 3 else []


def first(streams: Any) -> torch.Tensor:
    """The first tensor."""
    while isinstance(streams, (tuple, list)):
        streams = streams[0]
    return streams


def differs(stream: torch.Tensor) -> bool:
    """Whether not all tokens of a stream of shape `(batch, sequence, hidden_size)` are alike."""
    tokens = stream.flatten(0, -2)
    return bool((tokens - tokens[0]).abs().max() > 1e-6 * tokens.abs().max())


@contextmanager
def removed_after(hooks: Callable[[], Iterator[Any]]) -> Iterator[None]:
    """Hooks that are there inside, and gone afterwards."""
    handles: list[Any] = []
    try:
        handles.extend(hooks())
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def kept_random_numbers(model: nn.Module) -> Iterator[None]:
    """Nothing drawn inside is drawn from the numbers outside."""
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("cpu"), torch.device("meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng([device.index for device in devices], device_type=kind):
        yield
