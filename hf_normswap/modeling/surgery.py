"""Putting placements into a model. No stock tensor moves; extras get names of their own. A stock norm that is not read is
*parked*: its parameters become buffers of the same name, which are saved but seen by no optimiser."""

import math
from operator import attrgetter

import torch
from torch import nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from .architectures import BRANCHES, Architecture, get_architecture
from .placements import COORDINATES, MIXES, NormSwapError, Placement, admin_omega, deepnorm_gains, per_layer
from .residual import BranchPlan, Coordinate, DualReadout, FirstStreams, LayerPlan, ResidualLayer, derive, tensor_name


def placements_of(config) -> tuple[Placement, ...]:
    """One [`Placement`] per layer of a converted config, or of a stock config (its native one)."""
    native = get_architecture(config).native
    spec = config.norm_placement if hasattr(config, "stock_model_type") else None  # whatever a stock config carries
    return per_layer(spec or native, config.num_hidden_layers, native)


def branch_names(layer: nn.Module, architecture: Architecture) -> list[str]:
    """The branches that a layer has, in order."""
    return [name for name in BRANCHES if name != "cross_attn" or hasattr(layer, architecture.cross_attn)]


def stock_norms(layer: nn.Module, architecture: Architecture) -> dict[str, nn.Module]:
    """The stock norms of a layer by path."""
    indices = [BRANCHES.index(name) for name in branch_names(layer, architecture)]
    paths = [norms[index] for index in indices for norms in (architecture.norms, architecture.output_norms)]
    return {path: attrgetter(path)(layer) for path in paths if path is not None}


def resolved(config, placement: Placement, num_branches: int) -> dict[str, float]:
    """The coordinates of a placement as numbers: DeepNorm's gain by depth, gates as the config has them start."""
    coordinates = {name: float(getattr(placement, name)) for name in dict.fromkeys(COORDINATES + MIXES)}
    if placement.depth_exponent is not None:
        exponent = config.norm_alpha_exponent or placement.depth_exponent
        coordinates["skip_gain"] = config.norm_alpha or deepnorm_gains(num_branches, exponent)[0]
    if config.norm_gate is not None and "skip_norm" in dict(placement.learned):
        coordinates["skip_norm"] = config.norm_gate
    return coordinates


def make_plans(config, architecture: Architecture, names: list[str]) -> list[LayerPlan]:
    """What each layer has to do for the placements in `config`; `names` are the branches of a layer."""
    placements = placements_of(config)
    num_branches = len(placements) * len(names)
    plans: list[LayerPlan] = []
    neighbours = zip((Placement(), *placements), placements, (*placements[1:], None))
    for index, (previous, placement, following) in enumerate(neighbours):
        values = resolved(config, placement, num_branches)
        uses_dual, ends_dual = placement.uses("dual"), following is None or not following.uses("dual")
        learned = dict(placement.learned)
        if index or architecture.has_stem_norm:
            values["stem_norm"] = 0.0
            learned.pop("stem_norm", None)
        tensors: dict = {}
        points: dict = {owner: values.copy() for owner in (*names, "stream")}
        for name, kind in learned.items():
            for owner in names if name in COORDINATES else ["stream"]:
                points[owner][name] = tensor = tensor_name("stream" if kind == "layer" else owner, name)
                tensors[tensor] = config.hidden_size if kind == "channel" else 1, values[name], kind != "morph"
        branches = []
        for name in names:
            norm = architecture.norms[BRANCHES.index(name)] or f"{name}_input_norm"
            output_norm = architecture.output_norms[BRANCHES.index(name)] or f"{name}_output_norm"
            branches.append(BranchPlan(name, norm, output_norm, placement.uses_norm, points[name]))
        sends: tuple[str, ...] = ("z",)
        if architecture.norm_after:
            branches[-1].applies_norm = following is None or following.uses_norm
            sends = ("y",) if following is None else ("z",) * following.uses_stream + ("y",) * following.uses_norm
        if uses_dual and (not ends_dual or (following is None and architecture.final_norm is not None)):
            sends += ("d",)
        receives = plans[-1].sends if plans else ()
        dual = uses_dual and not previous.uses("dual"), uses_dual and ends_dual, config.norm_dual_scale
        exponent = placement.depth_exponent and (config.norm_alpha_exponent or placement.depth_exponent)
        beta = deepnorm_gains(num_branches, exponent)[1] if exponent else None
        plans.append(LayerPlan(index, branches, receives, sends, *dual, points["stream"], tensors, beta))
    return plans


def identity_norm(stock: nn.Module, offset: float, eps: float | None = None) -> nn.Module:
    """A copy of a stock norm (class, dtype, device) that scales by one; `eps` replaces its own where it has one."""
    norm = object.__new__(type(stock))  # deepcopy takes as long as all the rest of a conversion
    vars(norm).update({key: value.copy() if isinstance(value, dict) else value for key, value in vars(stock).items()})
    for name, parameter in stock.named_parameters():
        norm._parameters[name] = nn.Parameter(torch.full_like(parameter, 0.0 if name == "bias" else 1.0 - offset))
    for name in ("eps", "variance_epsilon"):
        if eps is not None and hasattr(norm, name):
            setattr(norm, name, eps)
    return norm


def install(base: nn.Module, config, extras: dict | None = None):
    """Give the layers of a stock base model the placements in `config`, in place; converted layers are left alone.

    `extras` are norms and tensors of an earlier placement by `(layer, name)`; those still needed are put back."""
    architecture = get_architecture(config)
    if architecture.refuse is not None and (reason := architecture.refuse(config)):
        raise NormSwapError(f"cannot change the norm placement of this {architecture.model_type!r} model: {reason}.")
    layers = attrgetter(architecture.layers)(base)
    if isinstance(layers[0], ResidualLayer):
        return
    plans = make_plans(config, architecture, branch_names(layers[0], architecture))
    if len(layers) != len(plans):
        raise NormSwapError(f"{len(layers)} layers, but {len(plans)} in the config: set `num_hidden_layers`.")
    if getattr(config, "layerdrop", 0) and any(len(plan.sends) > 1 for plan in plans):
        raise NormSwapError("LayerDrop skips layers, but two streams run through these: set `layerdrop=0`.")
    for layer, plan in zip(layers, plans):
        stock = stock_norms(layer, architecture)
        template = next(iter(stock.values()))
        like = next(one for part in (template, layer) for one in part.parameters() if one.is_floating_point())
        layer.__class__ = derive(ResidualLayer, layer.__class__)
        layer.architecture, layer.plan = architecture, plan
        read = [branch.norm for branch in plan.branches if branch.applies_norm]
        read += [branch.output_norm for branch in plan.branches if branch.coordinates["output_norm"] != 0]
        read += ["stem_norm"] * (plan.coordinates["stem_norm"] != 0) + ["dual_norm"] * plan.ends_dual
        for name in [name for name in read if name not in stock]:
            eps = config.norm_dual_eps if name == "dual_norm" else None
            norm = (extras or {}).get((plan.index, name)) or identity_norm(template, architecture.norm_offset, eps)
            setattr(layer, name, norm)
        for name, (size, value, trained) in plan.tensors.items():
            tensor = (extras or {}).get((plan.index, name))
            if tensor is None or len(tensor) != size:
                tensor = torch.full((size,), value, dtype=like.dtype, device=like.device)
            layer.add_module(name, coordinate := Coordinate())
            if trained:
                coordinate.weight = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
            else:
                coordinate.register_buffer("weight", tensor.detach())
        for norm in [stock[path] for path in stock.keys() - read]:
            for name, parameter in list(norm.named_parameters(recurse=False)):
                delattr(norm, name)
                norm.register_buffer(name, parameter.detach())
    around: dict = {architecture.final_norm: DualReadout} if plans[-1].sends[-1] == "d" else {}
    if architecture.layer_returns_tuple and any(len(plan.sends) > 1 for plan in plans):
        around[architecture.layers.rpartition(".")[0]] = FirstStreams
    for path, mixin in around.items():
        module = attrgetter(path)(base)
        module.__class__ = derive(mixin, module.__class__)


def initialize(layer, config):
    """Initialise a new layer as the paper of its placement says; what was loaded from a checkpoint is not touched.

    DeepNorm: Xavier normal, with gain beta for value, output and MLP matrices, and 1 for query and key (section 4.3)."""
    architecture, plan = layer.architecture, layer.plan
    for name, (size, value, _) in plan.tensors.items():
        omega = size > 1 and name.endswith("skip_gain") and admin_omega(config.num_hidden_layers * len(plan.branches))
        init.constant_(getattr(layer, name).weight, omega or value)
    if plan.deepnorm_beta is None:
        return
    for module in architecture.mlp:
        for name, weight in getattr(layer, module).named_parameters():
            if weight.ndim > 1 and name.split(".")[0] not in ("gate", "shared_expert_gate"):  # routers choose only
                for matrix in weight if weight.ndim == 3 else [weight]:  # experts are stacked
                    for part in matrix.chunk(2 if "gate_up" in name else 1):
                        xavier_(weight, part, plan.deepnorm_beta)
    for branch in plan.branches[:-1]:
        for name, module in getattr(layer, getattr(architecture, branch.name)).named_modules():
            if isinstance(module, (nn.Linear, Conv1D)):
                matrix = module.weight.T if isinstance(module, Conv1D) else module.weight
                is_value, is_output = name == architecture.value, name == architecture.attn_output
                *parts, last = split_fused(matrix, config, architecture.value_part) if is_value else [matrix]
                for part in parts:
                    xavier_(module.weight, part, 1.0)
                xavier_(module.weight, last, plan.deepnorm_beta if is_value or is_output else 1.0)


def split_fused(matrix: torch.Tensor, config, part: str) -> list[torch.Tensor]:
    """Views of a projection of shape `(out_features, in_features)`: what is not values, and last the values."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if part == "all":
        return [matrix]
    if part == "per_head" and len(matrix) == 3 * heads * head_dim:
        return list(matrix.view(heads, 3, head_dim, matrix.shape[-1]).unbind(1))
    size = head_dim * (1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", heads))
    parts = matrix.split([matrix.shape[0] - 2 * size, size, size])  # a cross-attention's key-value pair has no query
    return [view for view in parts if len(view)]


def xavier_(owner: torch.Tensor, matrix: torch.Tensor, gain: float):
    """Xavier normal for `matrix`, a view of the parameter `owner`, unless that was loaded from a checkpoint."""
    if not getattr(owner, "_is_hf_initialized", False):
        fan_in = matrix.shape[-1]
        init.normal_(matrix, std=gain * math.sqrt(2.0 / (fan_in + matrix.numel() // fan_in)))
