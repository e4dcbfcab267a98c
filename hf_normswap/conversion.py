"""Converting a model from one norm placement to another, and back."""

import copy
import dataclasses
import json
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from .calibration import token_batches
from .folders import appearing, check_folder, check_size, check_target, local_folder, write_beside
from .model_card import SOURCE_KEYS, describe_source
from .modeling import modeling_normswap
from .modeling.architectures import ARCHITECTURES, BRANCHES, get_architecture
from .modeling.modeling_normswap import (
    NormSwapConfig,
    NormSwapModel,
    __version__,
    adopt,
    auto_map,
    config_class,
    model_class,
    models_around,
    register_models,
)
from .modeling.placements import (
    COORDINATES,
    MIXES,
    PLACEMENTS,
    NormSwapError,
    Placement,
    canonical_spec,
    get_placement,
)
from .modeling.residual import Coordinate, tensor_name
from .modeling.surgery import install, placements_of, stock_norms
from .shards import PICKLED, told
from .streaming import Checkpoint, check_depth, rewrite
from .warm_start import calibrate, exact_config, set_parameter, start_exactly

logger = logging.get_logger(__name__)

WARM_STARTS = ("none", "exact", "calibrated")
LOCATION = ("revision", "token", "cache_dir", "local_files_only", "force_download")  # which files on the Hub

_PARALLEL = "attention and MLP read one norm and are added to the skip together, so there is one norm for two branches"
REFUSED = {
    "codegen": _PARALLEL,
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "falcon": _PARALLEL + " (in most of its checkpoints)",
    "gptj": _PARALLEL,
    "phi": _PARALLEL,
    "albert": "all its layers share one set of weights, so a layer has no norm of its own",
    "bart": "it is an encoder-decoder, and only single stacks are supported",
    "bloom": "its attention and MLP modules add the skip themselves",
    "minimax": "its layers already scale skip and branch by factors of the config",
    "modernbert": "its first layer has no attention norm, which no row covers yet",
    "t5": "it is an encoder-decoder, and only single stacks are supported",
}


@torch.inference_mode(False)
def convert_checkpoint(
    model_or_path: PreTrainedModel | str | PathLike,
    placement: str | Placement | dict | list,
    *,
    warm_start: str = "none",
    calibration: Any = None,
    tokenizer: Any = None,
    layers: Iterable[int] | None = None,
    output_dir: str | PathLike | None = None,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
    **kwargs,
) -> Any:
    """
    Convert a model to another norm placement.

    Args:
        model_or_path (`PreTrainedModel`, `str` or `os.PathLike`):
            A loaded model with any head, a folder, or a model id on the Hub. It may be converted already; then it is
            converted from where it is.
        placement (`str`, `dict`, [`Placement`] or `list`):
            A name of [`list_placements`] in any spelling (`"ResiDual"`, `"post-ln"`), coordinates, or a list with one
            of these for each layer.
        warm_start (`str`, *optional*, defaults to `"none"`):
            What is done so that the model keeps what it learned.

            - `"none"`: nothing. The weights stay as they are, and except where the new placement starts at the old one
              (`"gated"`), the model computes something else.
            - `"calibrated"`: weights for the new placement are fitted, in closed form, to what the source computes on
              some text: in the layers only, and without training.
            - `"exact"`: the result computes what the source does, in a structure from which [`NormMorph`] leads to the new
              placement during training. Where no coordinate has to move (Post-Norm to DeepNorm or ResiDual), it is there
              already.
        calibration (`str`, `list`, `torch.Tensor`, `datasets.Dataset` or `Iterable`, *optional*):
            What the model is calibrated on: texts, token ids, or batches as [`token_batches`] takes them, of which the
            first 4,096 tokens are read. By default a few paragraphs of English in the public domain.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For calibration on texts; by default the one that the model was loaded with.
        layers (`Iterable[int]`, *optional*):
            The layers to convert, counted from 0 (negative from the end); the others stay as they are.
        output_dir (`str` or `os.PathLike`, *optional*):
            A folder to write, complete with tokenizer and generation files; it appears when it is finished. A folder or
            model id is then converted on disk, with one layer in memory at a time, and weights keep their dtype unless it rounds.
            (GGUF files and loaded models are converted in memory and saved.)
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether `output_dir` may be replaced, if it is a checkpoint folder without other files than a checkpoint's own.
        max_shard_size (`int` or `str`, *optional*):
            The most bytes in a file of weights (or `"5GB"`); by default tensors stay in the files in which they are in the source.
        kwargs:
            Fields of the config (`norm_alpha`, `norm_alpha_exponent`, `norm_gate`, `norm_dual_scale`,
            `norm_dual_eps`; see [`NormSwapConfig`]); with a path also any argument of
            [`~transformers.PreTrainedModel.from_pretrained`] (`dtype`, `device_map`, `gguf_file`, ...).

    Returns:
        `PreTrainedModel`: a new model of the derived class (`NormSwapLlamaForCausalLM`, ...) on the same device, with
        the same dtype, training mode, generation config, ties and labels. **It shares the storage of its tensors with
        the source**, but for those that a warm start rewrites: training one of the two changes both. `copy.deepcopy`
        the result to part them. With `output_dir` instead its `Path`.

    Raises:
        [`NormSwapError`]: if the architecture or the placement cannot be had; nothing has been changed then.
    """
    if warm_start not in WARM_STARTS:
        raise NormSwapError(f"unknown warm start {warm_start!r}. Available: {', '.join(WARM_STARTS)}.")
    if warm_start != "calibrated" and (calibration is not None or tokenizer is not None):
        raise NormSwapError(f'`calibration` and `tokenizer` are for `warm_start="calibrated"`, not {warm_start!r}.')
    layers = None if layers is None else list(layers)
    fields = {key: kwargs.pop(key) for key in list(kwargs) if key in NormSwapConfig.FIELDS}
    placement = canonical_spec(placement)
    if isinstance(model_or_path, (str, PathLike)):  # refuse before weights are read
        converted_config(load_config(model_or_path, **kwargs), placement, layers, **fields)

    def change(model, checkpoint: Checkpoint | None = None):
        config = converted_config(model.config, placement, layers, warm_start, **fields)
        if warm_start == "none":
            return restructure(model, config, dropped=fields)
        resident = {} if checkpoint is None else {"resident": checkpoint.resident}
        current = converted_config(
            model.config, [canonical_spec(entry) for entry in placements_of(model.config)], None
        )
        if warm_start == "exact":
            twin = restructure(model, exact_config(model, current, config))
            start_exactly(current, twin, **resident)
        else:
            if checkpoint is not None:
                checkpoint.fill_around()
            twin = restructure(model, config, dropped=fields)
            batches = list(token_batches(calibration, model, tokenizer))
            calibrate(restructure(model, current), twin, batches, **resident)
            masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches]
            config.norm_conversion["calibration_tokens"] = int(sum(mask.sum() for mask in masks))
            if calibration is None:
                text = "the Declaration of Independence and the Gettysburg Address"
                config.norm_conversion.setdefault("calibration_data", text)
        return twin

    return apply(change, model_or_path, output_dir, overwrite, max_shard_size, **kwargs)


def apply(
    change: Callable,
    model_or_path: PreTrainedModel | str | PathLike,
    output_dir: str | PathLike | None,
    overwrite: bool,
    max_shard_size: int | str | None,
    **kwargs,
) -> Any:
    """What `change` makes of a model, in memory, or as the folder `output_dir`. There it gets the [`Checkpoint`] as well."""
    if output_dir is None:
        if overwrite or max_shard_size is not None:
            raise NormSwapError("`overwrite` and `max_shard_size` are for a folder to write: pass `output_dir`.")
        return change(resolve_model(model_or_path, **kwargs))
    max_shard_size = check_size(max_shard_size)
    target = check_target(model_or_path, Path(output_dir), overwrite)
    if not isinstance(model_or_path, (str, PathLike)) or "gguf_file" in kwargs:
        source = model_or_path if isinstance(model_or_path, (str, PathLike)) else None
        options = {"gguf_file": kwargs.get("gguf_file")} | (
            {"max_shard_size": max_shard_size} if max_shard_size else {}
        )
        with appearing(target, overwrite) as new:
            write_beside(change(resolve_model(model_or_path, **kwargs)), source, new, **options)
        return target
    if unknown := sorted(kwargs.keys() - {*LOCATION, "subfolder"}):
        raise NormSwapError(
            f"{', '.join(unknown)}: on disk a checkpoint keeps its dtype and needs no device. Leave them out, or convert in "
            "memory and save the result."
        )
    folder = local_folder(model_or_path, **kwargs)
    config = load_config(folder)
    config._name_or_path = str(model_or_path)
    cls = named_class(config, folder)
    with appearing(target, overwrite) as new:
        checkpoint = Checkpoint(folder, cls, config)
        rewrite(checkpoint, lambda checkpoint: change(checkpoint.model, checkpoint), new, max_shard_size)
    return target


def restructure(model: PreTrainedModel, config, dropped: Iterable[str] = ()) -> PreTrainedModel:
    """A new model on the tensors of `model` with the placements in `config`. Gates and dual norms that `model` has are kept
    unless the field that sets them is `dropped`."""
    twin, hooks = share(model, config)
    extras = remove(twin.base_model, model.config) if isinstance(model, NormSwapModel) else {}
    if "norm_gate" in dropped:
        extras = {key: value for key, value in extras.items() if not key[1].endswith("_skip_gate")}
    if "norm_dual_eps" in dropped:
        extras = {key: value for key, value in extras.items() if key[1] != "dual_norm"}
    for module in models_around(twin):
        if not isinstance(module, NormSwapModel):
            adopt(module, model_class(type(module)))  # type: ignore[arg-type]
    install(twin.base_model, config, extras)
    rehook(hooks)
    layers = attrgetter(get_architecture(config).layers)(twin.base_model)
    for layer in layers:
        for name, (size, value, _) in layer.plan.tensors.items():
            if (
                weight := getattr(layer, name).weight
            ).is_meta:  # as the matrices of a model on disk, where norms have no weights
                set_parameter(getattr(layer, name), "weight", torch.full((size,), value, dtype=weight.dtype))
    layer = layers[0]
    if layer.gradient_checkpointing:  # refuse if it cannot follow
        twin._set_gradient_checkpointing(gradient_checkpointing_func=layer._gradient_checkpointing_func)
    if config.architectures:  # else the first save sets it, as for any new model
        config.architectures = [type(twin).__name__]
    config.auto_map = auto_map(type(config))
    return twin


@torch.inference_mode(False)
def revert_checkpoint(
    model_or_path: PreTrainedModel | str | PathLike,
    *,
    output_dir: str | PathLike | None = None,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
    **kwargs,
) -> Any:
    """
    The stock model of a converted one: stock class, stock config, stock tensors under their stock names.

    If nothing was trained or calibrated, the tensors equal those of the source bit for bit, however often it was saved and loaded in
    between. Whatever the placement had added is dropped. Like [`convert_checkpoint`], shares storage with its argument.

    Args:
        model_or_path (`PreTrainedModel`, `str` or `os.PathLike`): a converted model, a folder, or a model id.
        output_dir, overwrite, max_shard_size: a folder to write instead, on disk, as in [`convert_checkpoint`].
        kwargs: with a path, arguments of [`~transformers.PreTrainedModel.from_pretrained`].
    """

    def change(model, checkpoint=None):
        return revert(model)

    return apply(change, model_or_path, output_dir, overwrite, max_shard_size, **kwargs)


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """The stock model on the tensors of a converted one."""
    if not isinstance(model, NormSwapModel):
        raise NormSwapError(f"{type(model).__name__} is not a converted model: there is nothing to revert.")
    if '"calibrated"' in json.dumps(model.config.norm_conversion):
        source = model.config.norm_conversion.get("source", "the source")
        logger.warning(
            f"A calibrated start had rewritten some weights: this is a {type(model).__mro__[2].__name__} again, but with these "
            f"weights it does not do what {source} does."
        )
    config = stock_config(model.config)
    twin, hooks = share(model, config)
    remove(twin.base_model, model.config)
    for module in models_around(twin):
        adopt(module, type(module).__mro__[2])
    rehook(hooks)
    if config.architectures:
        config.architectures = [type(twin).__name__]
    return twin


def list_placements() -> list[str]:
    """The names that `norm_placement` and [`convert_checkpoint`] accept."""
    return list(PLACEMENTS)


def list_architectures() -> list[str]:
    """The stock model types that can be converted."""
    return list(ARCHITECTURES)


def unwrap(model: Any) -> Any:
    """The Transformers model in what `torch.compile`, DDP, FSDP or PEFT made of it."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_converted(model: Any) -> bool:
    """Whether a model has layers of ours."""
    return isinstance(model, NormSwapModel)


def resolve_model(model_or_path, **kwargs) -> PreTrainedModel:
    """The model, checked, of a model or of a path with arguments for `from_pretrained`."""
    if isinstance(model_or_path, (str, PathLike)):
        return check_model(load_model(model_or_path, **kwargs))
    if kwargs:
        raise TypeError(
            f"unexpected keyword arguments for a loaded model: {', '.join(sorted(kwargs))}. "
            f"Fields of the config: {', '.join(NormSwapConfig.FIELDS)}."
        )
    return check_model(model_or_path)


def load_config(path: str | PathLike, **kwargs):
    """The config of a folder or model id; refuses what cannot be converted."""
    folder = Path(path).expanduser() / kwargs.get("subfolder", "")
    keys = (*LOCATION, "gguf_file", "subfolder", "proxies")
    options = {key: kwargs[key] for key in keys if key in kwargs}
    with told(f"{path} cannot be used") if folder.is_dir() else nullcontext():
        tensors = check_folder(folder) if "gguf_file" not in kwargs and folder.is_dir() else None
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
        check_config(config)
        if tensors is not None:
            check_depth(folder, config, tensors)
    return config


def load_model(path: str | PathLike, **kwargs) -> PreTrainedModel:
    """Load a stock or converted model with the head that its config names."""
    config = load_config(path, **kwargs)
    gguf = "gguf_file" in kwargs
    cls: Any = transformers.AutoModelForCausalLM if gguf else named_class(config, path)
    try:
        with told(f"{kwargs['gguf_file']} of {path} cannot be used") if gguf else nullcontext():
            model, report = cls.from_pretrained(path, **{**kwargs, "output_loading_info": True})
    except pickle.UnpicklingError:
        raise NormSwapError(f"{path} {PICKLED}") from None
    if report["missing_keys"]:
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise NormSwapError(
            f"{path} lacks {len(report['missing_keys'])} tensors of {type(model).__name__} ({some}, ...): it is incomplete, or "
            "has another head. Load the model yourself and pass it instead of its path if they may be random."
        )
    return model


def named_class(config, path: str | PathLike) -> Any:
    """The class that a config names, if it is one of Transformers or ours."""
    names = config.architectures
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(modeling_normswap if str(name).startswith("NormSwap") else transformers, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is type(config)):
        raise NormSwapError(
            f"the config of {path} names the class {name!r}, which is no Transformers model of type "
            f"{config.model_type!r}: load the model yourself and pass it instead of its path."
        )
    return cls


def check_config(config):
    """Raise [`NormSwapError`] with the reason if models of this config cannot be converted."""
    model_type = getattr(config, "stock_model_type", config.model_type)
    if model_type in REFUSED:
        raise NormSwapError(
            f"cannot change the norm placement of model type {model_type!r}: {REFUSED[model_type]}. "
            f"Supported: {', '.join(ARCHITECTURES)}."
        )
    architecture = get_architecture(config)
    if architecture.refuse is not None and (reason := architecture.refuse(config)):
        raise NormSwapError(f"cannot change the norm placement of this {model_type!r} model: {reason}.")


def check_model(model) -> PreTrainedModel:
    """Refuse what cannot be converted, with the way out; returns the model itself, uncompiled."""
    model = getattr(model, "_orig_mod", model)
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise NormSwapError(
            f"{kind} carries PEFT adapters: convert the base model first and add the adapters to the result, or merge "
            "them with `merge_and_unload()`."
        )
    if not isinstance(model, PreTrainedModel):
        raise NormSwapError(
            f"expected a Transformers model, a folder or a model id, got {kind}: unwrap it first "
            "(`accelerator.unwrap_model(model)`), and convert before `accelerator.prepare`."
        )
    check_config(model.config)
    modules = list(model.named_modules())
    parameters = [one for _, module in modules for one in module._parameters.values() if one is not None]
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in parameters):
        raise NormSwapError(
            f"the weights of {kind} are spread over processes (ZeRO-3 or FSDP): convert before the model is prepared."
        )
    if not type(model).__module__.startswith(("transformers.", NormSwapModel.__module__)):
        raise NormSwapError(
            f"{kind} comes from {type(model).__module__}, not from Transformers, whose layers are the only ones known: "
            + (
                "pass its folder or model id, or `import hf_normswap` and load it without `trust_remote_code`."
                if kind.startswith("NormSwap")
                else "convert the Transformers class that it extends, without `trust_remote_code`."
            )
        )
    if isinstance(model.config, NormSwapConfig) and not isinstance(model, NormSwapModel):
        raise NormSwapError(
            f"{kind} was made from the config of a converted model, whose placement it does not have: load that with an Auto "
            "class, or give this model a stock config."
        )
    if any(parameter.is_meta for parameter in parameters):
        raise NormSwapError(
            f"{kind} has weights without data (meta device, or offloaded): load the model without offloading."
        )
    layers = attrgetter(get_architecture(model.config).layers)(model.base_model)
    known = ("transformers.", NormSwapModel.__module__.rpartition(".")[0])
    for name, module in modules:
        patched = "forward" in vars(module) and "_hf_hook" not in vars(module)
        if patched and (module in layers or not isinstance(module.forward, types.MethodType)):
            raise NormSwapError(f"the forward of {name} was replaced: convert the model before it is patched.")
    for layer in layers:
        if not type(layer).forward.__module__.startswith(known):
            raise NormSwapError(
                f"the layers' forward comes from {type(layer).forward.__module__}, and only that of Transformers is known: "
                "convert the model before it is patched."
            )
    return model


def present_spec(config, aim: bool = False) -> Any:
    """The placement that the model of a config has, as a config spells it; with `aim` that to which a morph leads it. A stock
    config is native, whatever fields it carries."""
    if not hasattr(config, "stock_model_type"):
        return get_architecture(config).native
    return (config.norm_target if aim else None) or config.norm_placement


def converted_config(config, placement, layers: list[int] | None, warm_start: str = "none", **fields):
    """The config of `config`'s model after conversion; raises [`NormSwapError`] for what does not fit it."""
    architecture = get_architecture(config)
    current = list(placements_of(config))
    targets = placement if isinstance(placement, list) else [placement] * len(current)
    if layers is not None and any(type(index) is not int for index in layers):
        raise NormSwapError(f"`layers` takes whole numbers, got {list(layers)}.")
    missing = sorted({index for index in layers or () if not -len(current) <= index < len(current)})
    chosen = range(len(current)) if layers is None else [index + len(current) * (index < 0) for index in layers]
    if len(targets) != len(current):
        raise NormSwapError(f"{len(targets)} placements for {len(current)} layers: give one name, or one per layer.")
    if missing:
        row = len(missing) > 2 and missing[-1] - missing[0] == len(missing) - 1
        which = f"{missing[0]} to {missing[-1]}" if row else ", ".join(map(str, missing[:5]))
        raise NormSwapError(f"there is no layer {which}: the model has {len(current)}, from 0.")
    specs = [canonical_spec(placement) for placement in current]
    for index in chosen:
        specs[index] = targets[index]
        if targets[index] == "gated" and current[index] != PLACEMENTS[architecture.native]:
            learned = dict(current[index].learned) | dict(PLACEMENTS["gated"].learned)  # from where it is
            point = dataclasses.replace(current[index], learned=tuple(learned.items()))
            specs[index] = "gated" if point == get_placement("gated", architecture.native) else canonical_spec(point)
    new = copy.deepcopy(config)
    ours = isinstance(config, NormSwapConfig)
    rows = NormSwapConfig.FIELDS.items()
    if strays := [key for key, (_, default, _) in rows if not ours and vars(config).get(key, default) != default]:
        logger.warning_once(
            f"{', '.join(strays)} in the config of {config._name_or_path or 'the source'} are left out: it is a stock "
            f"{config.model_type} model, whose placement is {architecture.native}. A stock class that loads a converted "
            "checkpoint and saves it leaves them there."
        )
    new.__class__ = config_class(architecture.model_type)
    register_models(type(new))  # no constructor ran
    new.__dict__.pop("model_type", None)  # one read from a file; the class has its own
    for key, (_, default, _) in rows:
        setattr(new, key, fields.get(key, getattr(config, key, default) if ours else default))
    new.norm_target = None
    new.norm_placement = specs[0] if all(spec == specs[0] for spec in specs) else specs
    new.validate_norm_placement()
    if any("morph" in dict(placement.learned).values() for placement in placements_of(new)):
        raise NormSwapError("some layers are on their way to another placement: `finish()` their morph first.")
    gated = [
        any("skip_norm" in dict(placement.learned) for placement in side) for side in (current, placements_of(new))
    ]
    if "norm_gate" not in fields and not all(gated):
        new.norm_gate = None  # of gates that are gone
    earlier = config.norm_conversion if ours else None
    if not isinstance(earlier, (dict, type(None))):
        raise NormSwapError("`norm_conversion` of the config is no dictionary: remove it.")
    if earlier is None or warm_start != "none" or new.norm_placement != config.norm_placement:
        carried = {key: earlier[key] for key in SOURCE_KEYS if key in earlier} if earlier else None
        known: dict = describe_source(str(config._name_or_path)) if carried is None else carried
        record = {"placement": present_spec(config)}
        record |= {"warm_start": warm_start, "version": __version__}
        if earlier:
            record["previous"] = {key: value for key, value in earlier.items() if key not in known}
        new.norm_conversion = {**known, **record, **(fields.get("norm_conversion") or {})}
    return new


def stock_config(config):
    """The stock config of a converted one."""
    stock = copy.deepcopy(config)
    stock.__class__ = type(config).__mro__[2]
    for key in (*NormSwapConfig.FIELDS, "auto_map", "model_type"):
        stock.__dict__.pop(key, None)
    return stock


def share(model: PreTrainedModel, config) -> tuple[PreTrainedModel, list]:
    """A second model of the same structure with `config`, on the same tensors (ties included); and which of its modules
    accelerate had hooked in the first, with the hooks."""
    parameters: dict[int, nn.Parameter] = {}
    modules: dict[int, nn.Module] = {}
    hooks: list[tuple[nn.Module, Any]] = []
    source_config = model.config
    plain, containers = {bool, int, float, str, type(None)}, {dict, OrderedDict, list, set}

    def share_parameter(parameter):
        if type(parameter) is not nn.Parameter:  # quantised weights carry their state with them
            return parameter
        if id(parameter) not in parameters:
            parameters[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        return parameters[id(parameter)]

    def share_module(module):
        if module is None or id(module) in modules:
            return modules.get(id(module))
        twin = modules[id(module)] = object.__new__(type(module))
        attributes, hook = vars(twin), vars(module).get("_hf_hook")
        if hook is not None:
            hooks.append((twin, hook))
        for key, value in vars(module).items():
            if (kind := type(value)) not in plain:
                if key == "_compiled_call_impl" or (
                    hook is not None and key in ("forward", "_old_forward", "_hf_hook")
                ):
                    continue  # they are bound to the source's modules
                if kind is types.FunctionType and hasattr(type(module), key):
                    continue  # so is what shadows a method
                if kind in containers:
                    value = value.copy() if value else kind()  # most are empty, and an OrderedDict takes its time
                elif value is source_config:
                    value = config
                elif kind is types.MethodType and value.__self__ is module:
                    value = types.MethodType(value.__func__, twin)
            attributes[key] = value
        for key, value in module._parameters.items():
            attributes["_parameters"][key] = share_parameter(value)
        for key, value in module._modules.items():
            attributes["_modules"][key] = share_module(value)
        return twin

    twin = share_module(model)
    if "generation_config" in twin.__dict__:
        twin.generation_config = copy.deepcopy(model.generation_config)
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    if method == "gguf" and not getattr(quantizer, "packed_modules", None):  # the weights were dequantised on loading
        del config.quantization_config
        for key in ("hf_quantizer", "is_quantized", "quantization_method"):
            twin.__dict__.pop(key, None)
    return twin, hooks


def rehook(hooks: Iterable[tuple[nn.Module, Any]]):
    """Give modules the hooks with which accelerate moves inputs between devices."""
    for module, hook in hooks:
        from accelerate.hooks import add_hook_to_module

        hook = copy.copy(hook)
        hook.init_hook = lambda module: module  # the tensors are where they belong
        add_hook_to_module(module, hook)


def remove(base: nn.Module, config) -> dict:
    """Make the layers of a converted base model stock again, in place; returns what had been added, by `(layer, name)`."""
    architecture = get_architecture(config)
    added = {"stem_norm", "dual_norm"} | {
        f"{branch}_{kind}_norm" for branch in BRANCHES for kind in ("input", "output")
    }
    added |= {tensor_name(owner, name) for owner in (*BRANCHES, "stream") for name in (*COORDINATES, *MIXES)}
    extras = {}
    for index, layer in enumerate(attrgetter(architecture.layers)(base)):
        for name in added.intersection(layer._modules):
            extra = getattr(layer, name)
            extras[index, name] = extra.weight if isinstance(extra, Coordinate) else extra
            delattr(layer, name)
        for norm in stock_norms(layer, architecture).values():
            for name, buffer in list(norm.named_buffers(recurse=False)):  # the norm was parked
                delattr(norm, name)
                norm.register_parameter(name, nn.Parameter(buffer, any(p.requires_grad for p in layer.parameters())))
        del layer.architecture, layer.plan
    for module in base.modules():  # the final norm, an encoder
        if (stock := vars(type(module)).get("_stock_class")) is not None:
            module.__class__ = stock
    return extras
