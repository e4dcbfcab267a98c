"""Warm starts: weights for a new placement that keep what the checkpoint learned, in closed form, without training.

`"exact"` starts at the source's point of the placement space, in a structure that has room for the target's; a morph leads
from the one to the other during training. `"calibrated"` finds static weights at the target itself: it walks through
source and target side by side, branch by branch, on a few thousand tokens, and for each branch

* gives the readers (the projections that read what the branch reads) an affine map from what they read now to what they
  read in the source. It is a ridge regression on the target's own stream, so that every branch makes up for what the
  branches before it got wrong, and one map serves all readers of the branch;
* scales what the branch writes as its skip is scaled. Post-norm with the gain r on the skip is pre-norm for each token whose
  stream has the root mean square r, and norms do not see the scale of what they norm;
* if only the source norms the skip, refits the MLP's output so that the *normed* stream becomes the source's.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from tqdm.auto import tqdm
from transformers.pytorch_utils import Conv1D

from .calibration import is_causal
from .modeling.architectures import Architecture, get_architecture
from .modeling.placements import COORDINATES, MIXES, NormSwapError, Placement, canonical_spec
from .modeling.residual import residual
from .modeling.surgery import branch_names, identity_norm, placements_of, resolved, stock_norms

# `N(gain * z)` is `N(z)` up to the epsilon of the norm, so a gain folds only where that is small: 1e-12 in BERT, but 1e-5
# in OPT and RoBERTa, where it is of the order of float32's own errors.
FOLDED_EPSILON, FOLDED_EPSILON_IN_FLOAT64 = 2e-5, 1e-9
# Ridge penalties, relative to the median second moment of a feature. Found by search at 4,096 tokens: for readers on
# SmolLM2-135M (0.5 and 10 cost 0.02 and 0.05 nats), for outputs on MiniLM (0.1 and 1 cost 0.005 and 0.001 of cosine).
READER_RIDGE = 2.0
OUTPUT_RIDGE = 0.3
# Attention sinks (Xiao et al. 2023, arXiv:2309.17453): tokens whose stream is so many times larger than the median token's,
# and in causal models the first. No static gain suits them, but everything attends to them: their keys and values are
# worth most. (SmolLM2-135M: 30 and 200 cost 0.05 nats, 1 costs 0.3.)
SINK_RATIO = 20.0
SINK_WEIGHT = 100.0


def exact_placement(start: Placement, target: Placement, gains: tuple[float, float], folds: bool, opens: bool):
    """`start` with room for a morph to `target`: the coordinates that have to move are tensors of kind "morph".

    Not the gain of a skip that is not normed, which is nobody's; nor, if it `folds` into what the branch writes, that of a
    skip that stays normed; nor a second stream, if it `opens` as the weight of its norm grows from zero. `gains` are the
    skip gains as numbers."""
    point = {name: getattr(start, name) for name in (*COORDINATES, *MIXES)} | {"skip_gain": gains[0]}
    learned = {name: kind for name, kind in target.learned if kind != "morph"}
    has_gain = "skip_gain" in learned or start.skip_norm == 0 or folds or gains[0] == gains[1]
    if has_gain and "skip_gain" not in learned:
        point |= {name: getattr(target, name) for name in ("skip_gain", "depth_exponent")}
    elif start.skip_norm == 0:
        point["skip_gain"] = gains[1]
    if opens:
        point["dual"] = max(start.dual, target.dual)
    moving = {name for name in (*COORDINATES, *MIXES) if name != "skip_gain" and point[name] != getattr(target, name)}
    if not has_gain and target.skip_norm > 0:
        moving.add("skip_gain")
    learned |= {name: "morph" for name in point if name in moving - learned.keys()}
    placement = Placement(**point, learned=tuple(learned.items()))
    return target if placement == target else placement


def exact_config(model, config, target):
    """The config from which a morph leads from the placements in `config`, those of `model`, to those in `target`."""
    starts, targets = placements_of(config), placements_of(target)
    if any(placement.learned for placement in starts):
        names = sorted({name for placement in starts for name, _ in placement.learned})
        raise NormSwapError(
            f"an exact start needs a source with fixed coordinates, and its {', '.join(names)} are trained or moving: "
            '`finish()` a morph, `harden()` gates, or take `warm_start="calibrated"`.'
        )
    if target.norm_gate is not None:
        raise NormSwapError("an exact start opens gates at the source's placement: leave out `norm_gate`.")
    architecture = get_architecture(config)
    layers = attrgetter(architecture.layers)(model.base_model)
    norm = next(iter(stock_norms(layers[0], architecture).values()))
    num_branches = len(layers) * len(branch_names(layers[0], architecture))
    gains = [
        (resolved(config, start, num_branches)["skip_gain"], resolved(target, goal, num_branches)["skip_gain"])
        for start, goal in zip(starts, targets)
    ]
    limit = FOLDED_EPSILON_IN_FLOAT64 if model.dtype is torch.float64 else FOLDED_EPSILON
    folds = (  # if nothing but norms sees the scale of the stream
        getattr(norm, "eps", getattr(norm, "variance_epsilon", 1.0)) <= limit
        and all(placement.skip_norm == placement.input_norm == 1 for placement in (*starts, *targets))
        and not any(placement.uses("dual") for placement in starts)
        and (architecture.norm_after or architecture.final_norm is not None)
    )
    opens = getattr(norm, "weight", None) is not None
    points = [exact_placement(*pair, gain, folds, opens) for *pair, gain in zip(starts, targets, gains)]
    dual = [[placement.uses("dual") for placement in placements] for placements in (starts, points)]
    if any(dual[0]):
        same = ("norm_dual_scale", "norm_dual_eps")
        if dual[0] != dual[1] or any(getattr(config, name) != getattr(target, name) for name in same):
            raise NormSwapError(
                "the source has a second stream, which an exact start can neither lengthen nor scale: keep its layers and "
                '`norm_dual_*`, or take `warm_start="calibrated"`.'
            )
    specs = target.norm_placement if isinstance(target.norm_placement, list) else [target.norm_placement] * len(points)
    specs = [spec if point is goal else canonical_spec(point) for point, goal, spec in zip(points, targets, specs)]
    new = copy.deepcopy(target)
    new.norm_placement = specs[0] if all(spec == specs[0] for spec in specs) else specs
    if new.norm_placement != target.norm_placement:
        new.norm_target = target.norm_placement
    return new


@torch.no_grad()
def start_exactly(config, model, resident: Callable = nullcontext):
    """Set the weights of a model converted with [`exact_config`] so that it computes what the source, with `config`, does.

    `resident` takes a list of modules whose matrices are needed, and makes a context in which they are in memory."""
    architecture = get_architecture(config)
    layers = attrgetter(architecture.layers)(model.base_model)
    num_branches = sum(len(layer.plan.branches) for layer in layers)
    starts = placements_of(config)
    for layer, start in zip(layers, starts):
        if layer.plan.ends_dual and not any(placement.uses("dual") for placement in starts):
            set_norm(layer.dual_norm, 0.0, 0.0, architecture.norm_offset)
        if start.skip_norm == 0:
            continue
        gain = resolved(config, start, num_branches)["skip_gain"]
        for branch in layer.plan.branches:
            new = branch.coordinates["skip_gain"]
            if not isinstance(new, str) and new != gain:
                scale_branch(layer, branch, architecture, model.config.hidden_size, new / gain, resident)


def scale_branch(layer, branch, architecture: Architecture, width: int, gain: float, resident: Callable = nullcontext):
    """Multiply what a branch adds to the stream."""
    if branch.coordinates["output_norm"] != 0:
        scale_norm(attrgetter(branch.output_norm)(layer), gain, architecture.norm_offset)
    if branch.coordinates["output_norm"] != 1:
        for module, key in projections(layer, branch.name, architecture, width)[1]:
            with resident([module]):
                scale_output(module, key, gain)


def set_parameter(module: Any, key: str, value: torch.Tensor):
    """Give a module a tensor of its own; the one that it shared stays as it was."""
    old = getattr(module, key)
    if key in module._buffers:  # of a parked norm
        module.register_buffer(key, value.to(old.dtype))
    else:
        module.register_parameter(key, nn.Parameter(value.to(old.dtype), old.requires_grad))


def has_bias(module: Any) -> bool:
    return getattr(module, "bias", None) is not None


def set_norm(norm: Any, weight: torch.Tensor | float, bias: torch.Tensor | float, offset: float):
    """Give a norm an affine, as far as it has one; `offset` is what it adds to its weight (1 in Gemma)."""
    for key, value in (("weight", weight - offset), ("bias", bias)):
        if isinstance(tensor := getattr(norm, key, None), torch.Tensor):
            set_parameter(norm, key, torch.zeros_like(tensor) + value)


def changes(gain: torch.Tensor | float) -> bool:
    """Whether a gain changes anything: what need not change stays shared with the source, bit for bit."""
    return bool((torch.as_tensor(gain) != 1).any())


def scale_norm(norm: Any, gain: torch.Tensor | float, offset: float):
    """Multiply what a norm makes, as far as it has an affine."""
    if getattr(norm, "weight", None) is not None and changes(gain):
        set_norm(norm, (norm.weight + offset) * gain, norm.bias * gain if has_bias(norm) else 0.0, offset)


def map_input(module: Any, key: str, matrix: torch.Tensor, shift: torch.Tensor):
    """Let a projection read `matrix @ x + shift` instead of `x`; the shift needs a bias."""
    weight, transposed = getattr(module, key), isinstance(module, Conv1D)
    dtype = torch.promote_types(weight.dtype, matrix.dtype)
    weight, matrix, shift = (tensor.to(dtype) for tensor in (weight, matrix, shift))
    if has_bias(module):
        set_parameter(module, "bias", module.bias + shift @ (weight if transposed else weight.T))
    set_parameter(module, key, matrix.T @ weight if transposed else weight @ matrix)


def scale_output(module: Any, key: str, gain: torch.Tensor | float):
    """Multiply what a projection writes by a number or, channel by channel, by a vector."""
    if not changes(gain):
        return
    weight = getattr(module, key)
    rows = gain[:, None] if isinstance(gain, torch.Tensor) and gain.ndim and not isinstance(module, Conv1D) else gain
    set_parameter(module, key, weight * rows)
    if has_bias(module):
        set_parameter(module, "bias", module.bias * gain)


def add_output(module: Any, key: str, matrix: torch.Tensor, shift: torch.Tensor):
    """Add `matrix @ a + shift` to what a projection writes."""
    set_parameter(module, key, getattr(module, key) + (matrix.T if isinstance(module, Conv1D) else matrix))
    if has_bias(module):
        set_parameter(module, "bias", module.bias + shift)


def projections(layer: nn.Module, name: str, architecture: Architecture, width: int) -> tuple[list, list]:
    """`(module, parameter name)` of the matrices that read what a branch reads, and of those that write to the stream
    (several in a mixture of experts). [`NormSwapError`] if they are quantised."""
    readers, writers = [], []
    quantised = NormSwapError(
        f"the weights of the {name} branch are quantised, and a warm start has to change them: convert before quantising, "
        'or with `warm_start="none"`.'
    )
    output = architecture.mlp_output if name == "ffn" else architecture.attn_output
    for root in architecture.mlp if name == "ffn" else (getattr(architecture, name),):
        for path, module in getattr(layer, root).named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                plain = type(parameter) is nn.Parameter  # torchao's tensors say that they are float32
                if not plain or parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                    raise quantised
                if parameter.ndim < 2:
                    continue
                full = ".".join(part for part in (path, key) if part).removesuffix(".weight")
                is_last = name != "ffn" or root == architecture.mlp[-1]
                if is_last and (full.endswith(output) if output else path == ""):
                    writers.append((module, key))
                elif parameter.shape[0 if isinstance(module, Conv1D) else -1] == width:
                    if name != "cross_attn" or path.endswith(("query", "q_attn")):  # the others read the encoder
                        readers.append((module, key))
    if not readers or not writers:
        raise quantised
    return readers, writers


def regress(features, targets, weights, ridge: float, intercept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ridge regression `targets ≈ features @ matrix.T + shift`, solved in float64 on the moments of float32 data.

    Args:
        features, targets (`torch.Tensor` of shapes `(tokens, p)` and `(tokens, q)`): what is read, what is wanted.
        weights (`torch.Tensor` of shape `(tokens,)`): of the squared errors.
        ridge (`float`): the penalty on `matrix`.
        intercept (`bool`): whether there is a shift, which is not penalised.
    """
    share = (weights / weights.sum())[:, None]
    means = [(share * data).sum(0) if intercept else torch.zeros_like(data[0]) for data in (features, targets)]
    features, targets = features - means[0], targets - means[1]
    weighted = (features * share).T
    moments, products = (weighted @ features).double(), (weighted @ targets).double()
    moments.diagonal().add_(ridge * moments.diagonal().median().clamp_min(1e-30))
    matrix = torch.cholesky_solve(products, torch.linalg.cholesky(moments)).T.to(features.dtype)
    return matrix, means[1] - matrix @ means[0]


def per_channel(features, targets, intercept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The least squares fit `targets ≈ gain * features + shift`, channel by channel."""
    means = [data.mean(0) if intercept else torch.zeros_like(data[0]) for data in (features, targets)]
    x, y = features - means[0], targets - means[1]
    gain = (x * y).sum(0) / x.pow(2).sum(0).clamp_min(1e-30)
    return gain, means[1] - gain * means[0]


def finite(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor itself; [`NormSwapError`] if something in it is not finite."""
    if not torch.isfinite(tensor).all():
        raise NormSwapError(
            f"{where}: NaN or infinite activations on the calibration data. Load the model in float32 or bfloat16, and "
            "check that the source computes finite values on these texts."
        )
    return tensor


@contextmanager
def recording(base: nn.Module, layers: list) -> Iterator[list]:
    """Let layers do nothing but record what they are called with."""
    calls: list = []

    def recorder(layer):
        def record(hidden_states, *args, **kwargs):
            calls.append((hidden_states, {**kwargs, **dict(zip(layer._argument_names, args))}))
            return (hidden_states,) if layer.architecture.layer_returns_tuple else hidden_states

        return record

    forwards = [vars(layer).pop("forward", None) for layer in layers]  # accelerate's hooks have replaced it
    try:
        for layer in layers:
            layer.forward = recorder(layer)
        yield calls
    finally:
        for layer, forward in zip(layers, forwards):
            del layer.forward
            if forward is not None:
                layer.forward = forward


class Calibration:
    """Fits the weights of `target` to what `source` computes; both are converted models on the same tensors."""

    def __init__(
        self, source: Any, target: Any, batches: list[dict[str, torch.Tensor]], resident: Callable = nullcontext
    ):
        self.resident = resident
        self.architecture = get_architecture(source.config)
        self.source, self.target = source.base_model, target.base_model
        layers = attrgetter(self.architecture.layers)
        self.layers = list(zip(layers(self.source), layers(self.target)))
        self.width = source.config.hidden_size
        for layer in layers(self.target):  # refuse before anything is computed
            for branch in layer.plan.branches:
                projections(layer, branch.name, self.architecture, self.width)
                if branch.name == "cross_attn" and not all("encoder_hidden_states" in batch for batch in batches):
                    raise NormSwapError(
                        "the model has cross-attention: calibrate on batches with `encoder_hidden_states`."
                    )
        self.masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool() for batch in batches]
        lengths = torch.cat([mask.sum(-1) for mask in self.masks])
        if lengths.max() < 2:
            raise NormSwapError("the calibration data has no sequence of two tokens: pass longer texts.")
        self.first = torch.zeros(int(lengths.sum()), dtype=torch.bool, device=lengths.device)
        if is_causal(source.config):
            self.first[(lengths.cumsum(0) - lengths)[lengths > 0]] = True
        options = {"use_cache": False} if "use_cache" in inspect.signature(self.source.forward).parameters else {}
        self.calls: list = []  # of each batch, for each layer
        with recording(self.source, [old for old, _ in self.layers]) as calls:
            for batch in batches:
                self.source(**batch, **options)
                self.calls.append(calls[:])
                calls.clear()

    def flat(self, states) -> torch.Tensor:
        """The tokens that are no padding, as float32 of shape `(tokens, width)`."""
        return torch.cat([state[mask.to(state.device)] for state, mask in zip(states, self.masks)]).float()

    def run(self):
        """Fit branch after branch."""
        self.bare_norms()
        hidden = [[call[0][0] for call in self.calls]] * 2
        with tqdm(total=len(self.layers), desc="Calibrating", unit="layer") as bar:
            for index, layers in enumerate(self.layers):
                with self.resident(layers):
                    device = next(layers[1].parameters()).device  # layers may be spread over several
                    hidden, kwargs = send_to_device((hidden, [call[index][1] for call in self.calls]), device)
                    if layers[1].plan.ends_dual and not layers[0].plan.ends_dual:
                        set_norm(layers[1].dual_norm, 0.0, 0.0, self.architecture.norm_offset)
                    stems = [layer.plan.coordinates["stem_norm"] for layer in layers]
                    if stems[1] != 0 and stems[0] == 0:
                        self.fit_norm(layers[1].stem_norm, hidden[1], hidden[1], "stem norm")
                    streams = [[layer.enter(state) for state in side] for layer, side in zip(layers, hidden)]
                    for branches in zip(*(layer.plan.branches for layer in layers)):
                        where = f"layer {index}, {branches[0].name} branch"
                        streams = self.fit_branch(layers, branches, streams, kwargs, where)
                    hidden = [[layer.leave(*stream) for stream in side] for layer, side in zip(layers, streams)]
                bar.update()
        loses_dual = self.has_dual(0) and not self.has_dual(1)
        if loses_dual or skip_norm(layers[0], branches[0]) > skip_norm(layers[1], branches[1]):
            if self.architecture.norm_after:
                norm, states, wanted = attrgetter(branches[1].norm)(layers[1]), [z for z, *_ in streams[1]], hidden[0]
                self.fit_norm(norm, states, wanted, "final norm")
            elif (name := self.architecture.final_norm) is not None:
                norm, wanted = attrgetter(name)(self.target), map(attrgetter(name)(self.source), hidden[0])
                self.fit_norm(norm, hidden[1], wanted, "final norm")

    def has_dual(self, side: int) -> bool:
        return any(layers[side].plan.ends_dual for layers in self.layers)

    def bare_norms(self):
        """Take the affine from norms that only one of the two skips carries; readers will make up for it."""
        self.affines: dict[int, tuple] = {}  # of the norm that a branch of the target reads, where it is known
        pairs = [
            pair for old, new in self.layers for pair in zip(*([(a, b) for b in a.plan.branches] for a in (old, new)))
        ]
        owners = [None, *pairs] if self.architecture.norm_after else pairs
        for (old, new), owner in zip(pairs, owners):
            if owner is None or skip_norm(*old) == skip_norm(*new) or not owner[1][1].applies_norm:
                continue
            norm = attrgetter(owner[1][1].norm)(owner[1][0])
            if skip_norm(*old) < skip_norm(*new) and old[0].coordinate(old[1], "input_norm") == 1:
                if getattr(norm, "weight", None) is not None:
                    bias = norm.bias.float() if has_bias(norm) else torch.zeros_like(norm.weight).float()
                    self.affines[id(new[1])] = norm.weight.float() + self.architecture.norm_offset, bias
            set_norm(norm, 1.0, 0.0, self.architecture.norm_offset)

    def fit_norm(self, norm: nn.Module, states, wanted, where: str):
        """Fit the affine of a norm."""
        offset = self.architecture.norm_offset
        set_norm(norm, 1.0, 0.0, offset)
        states = [state[0] if isinstance(state, tuple) else state for state in states]
        fit = per_channel(self.flat(map(norm, states)), self.flat(wanted), has_bias(norm))
        gain, shift = (finite(part, where) for part in fit)
        set_norm(norm, gain, shift, offset)

    def fit_branch(self, layers, branches, streams, kwargs, where: str):
        """Fit a branch of the target, and return the streams of both models behind it."""
        old, new = layers
        offset = self.architecture.norm_offset
        readers, writers = projections(new, branches[1].name, self.architecture, self.width)
        reads, skips = [], []
        for layer, branch, side in zip(layers, branches, streams):
            reads.append([layer.read(branch, z, y) for z, y, _ in side])
            gains = [layer.coordinate(branch, name) for name in ("skip_norm", "skip_gain")]
            skips.append([residual(z, y, torch.zeros_like(z), *gains) for (z, *_), (_, y) in zip(side, reads[-1])])
        skip_old, skip_new = (finite(self.flat(side), where) for side in skips)
        size = self.flat([z for z, *_ in streams[0]]).pow(2).mean(-1).sqrt()
        sinks = (size > SINK_RATIO * size.median()) | self.first.to(size.device)

        x_old, x_new = (finite(self.flat([x for x, _ in side]), where) for side in reads)
        if (x_old - x_new).abs().max() > 1e-4 * x_old.abs().max():
            intercept = all(has_bias(module) for module, _ in readers)
            affine = self.affines.get(id(branches[1])) or per_channel(x_new[~sinks], x_old[~sinks], intercept)
            gain, shift = affine
            rest = x_old - gain * x_new - shift
            matrix, more = regress(x_new, rest, torch.where(sinks, SINK_WEIGHT, 1.0), READER_RIDGE, intercept)
            for module, key in readers:
                map_input(module, key, finite(matrix, where) + torch.diag(gain), shift + more)

        normed = [branch.coordinates["output_norm"] != 0 for branch in branches]
        one_sided = skip_norm(old, branches[0]) > skip_norm(new, branches[1])
        refits = one_sided and branches[1].name == "ffn" and len(writers) == 1 and not any(normed)
        refits = (
            refits and isinstance(writers[0][0], (nn.Linear, Conv1D)) and self.architecture.branch_multiplier is None
        )
        outputs: list = [[], []]
        features, captured = [], []  # what the last projection reads, which may come in chunks
        hook = writers[0][0].register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
        for layer, branch, side, found in zip(layers, branches, reads, outputs):
            for (x, _), arguments in zip(side, kwargs):
                captured.clear()
                found.append(layer.run(branch, x, arguments)[0])
                if layer is new and refits:
                    features.append(torch.cat(captured, 1))
        hook.remove()
        streams = [[(z, y, d) for (z, _, d), (_, y) in zip(side, read)] for side, read in zip(streams, reads)]
        streams[0] = [old.join(branches[0], *stream, f) for stream, f in zip(streams[0], outputs[0])]

        # The branch writes at the scale of the skip.
        kept = ~sinks & (skip_old != 0).any(-1) & (skip_new != 0).any(-1)  # padding may be embedded as zeros
        x, y = skip_old[kept], skip_new[kept]
        if one_sided:
            x, y = x - x.mean(0), y - y.mean(0)
            gain = (x * y).sum() / x.pow(2).sum()
        else:
            gain = (y.pow(2).mean(-1) / x.pow(2).mean(-1)).clamp_min(1e-30).log().mean().div(2).exp()
        finite(gain, where)
        branch_gains = [layer.coordinate(branch, "branch_gain") for layer, branch in zip(layers, branches)]
        wanted = gain / branch_gains[1] * (finite(self.flat([z for z, *_ in streams[0]]), where) - skip_old)
        gain = gain * branch_gains[0] / branch_gains[1]
        if normed[1]:
            norm = attrgetter(branches[1].output_norm)(new)
            if normed[0]:
                scale_norm(norm, gain, offset)
            else:
                set_norm(norm, 1.0, 0.0, offset)
                set_norm(norm, *per_channel(self.flat(map(norm, outputs[1])), wanted, has_bias(norm)), offset)
        else:
            if normed[0]:
                gain, _ = per_channel(self.flat(outputs[1]), wanted, False)
            for module, key in writers:
                scale_output(module, key, gain)
            outputs[1] = [(f * gain).to(f.dtype) for f in outputs[1]]
        if refits:
            norm = identity_norm(attrgetter(branches[0].norm)(old), offset)
            streams_old = self.flat(norm(z) for z, *_ in streams[0])
            fit = refit(self.flat(features), skip_new + self.flat(outputs[1]), streams_old, has_bias(writers[0][0]))
            matrix, shift = (finite(part, where) for part in fit)
            add_output(writers[0][0], writers[0][1], matrix, shift)
            outputs[1] = [f + (a.float() @ matrix.T + shift).to(f.dtype) for f, a in zip(outputs[1], features)]
        streams[1] = [new.join(branches[1], *stream, f) for stream, f in zip(streams[1], outputs[1])]
        return streams


def refit(features, stream, target, intercept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What to add to an output projection, so that the stream behind it becomes `target` times the number at which the
    relative error is least. All of shape `(tokens, width)`, `features` being what the projection reads."""
    both = torch.cat([stream, target], -1)
    matrix, shift = regress(features, both, torch.ones_like(features[:, 0]), OUTPUT_RIDGE, intercept)
    rest = both - features @ matrix.T - shift
    (stream, target), (rest_stream, rest_target) = ((part - part.mean(0)).chunk(2, -1) for part in (both, rest))
    least = (stream * target).sum() / target.pow(2).sum()
    scale = (rest_stream.pow(2).sum() / (rest_stream * rest_target).sum()).clamp(least / 2, 3 * least)
    (m_stream, m_target), (s_stream, s_target) = matrix.chunk(2), shift.chunk(2)
    return scale * m_target - m_stream, scale * s_target - s_stream


def skip_norm(layer, branch) -> float:
    """The coordinate as a number, the mean where there is one for each channel."""
    return float(torch.as_tensor(layer.coordinate(branch, "skip_norm")).float().mean())


@torch.no_grad()
def calibrate(source, target, batches: list[dict[str, torch.Tensor]], resident: Callable = nullcontext):
    """
    Give a converted model weights with which it does at its placement what `source` does at its own.

    Args:
        source, target (`NormSwapModel`): two converted models on the same tensors. The tensors of `target` that change are
            replaced, so that `source` keeps its own.
        batches (`list` of `dict`): `input_ids` of shape `(batch, sequence)` and, if padded, an `attention_mask`.
        resident (`Callable`, *optional*): takes the layers to be fitted next, of both models, and makes a context in which
            their matrices are in memory; for models that are not in memory as a whole.

    Raises:
        [`NormSwapError`]: without tokens, with quantised weights, for cross-attention without `encoder_hidden_states`, out
        of memory, and when a statistic is not finite; the message names the branch. `target` is of no use then; `source`
        is as it was.
    """
    try:
        with evaluating(source, target):
            Calibration(source, target, batches, resident).run()
    except (torch.OutOfMemoryError, MemoryError) as error:
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        raise NormSwapError(
            f"calibration ran out of memory on {tokens} tokens: pass fewer, or shorter sequences, as `calibration`."
        ) from error


@contextmanager
def evaluating(*models: nn.Module):
    """Switch models to evaluation, and afterwards every module back to what it was."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
