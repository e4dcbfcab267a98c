"""Checkpoint folders rewritten tensor by tensor: a model is changed as in memory, but without its weights.

The model is built with matrices on the meta device, and only what has one dimension (norms, biases, gates) is read at once.
A conversion then runs on it as on any other. Tensors that it leaves alone stay in their shards, which are linked or copied;
matrices that a warm start changes are read when it comes to them and written to their place in the new shard; and what it
adds becomes one more shard. The folder appears when it is complete.
"""

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging

from .folders import write_beside
from .modeling.architectures import get_architecture
from .modeling.placements import NormSwapError
from .shards import NAMED, TYPES, Entry, Shard, hold, read_shards, stored_dtype, told, write_shard, write_tensor


def check_depth(folder: Path, config: Any, tensors: dict[str, Entry]):
    """Refuse a config that wants a model out of all proportion to the weights: each layer has a tensor as long as the model
    is wide, whose name differs from that in the other layers in a number."""
    rows = Counter(
        name[: number.start()] + "*" + name[number.end() :]
        for name, entry in tensors.items()
        if math.prod(entry.shape) >= max(1, config.hidden_size)
        for number in re.finditer(r"\d+", name)
    )
    most = max(rows.values(), default=0)
    if not 0 < config.num_hidden_layers <= most:
        raise NormSwapError(
            f"{folder} has tensors of at most {most} layers, but {config.num_hidden_layers} layers: one of the two is wrong."
        )


def read_generation_config(folder: Path) -> GenerationConfig:
    """As `from_pretrained` has it: what is in no file of its own is in config.json (of old models)."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def stored_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` would write, by the names that they have in a checkpoint."""
    state = {key: one for key, one in model.state_dict().items() if key not in (model._keys_to_ignore_on_save or ())}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def storage(tensor: torch.Tensor) -> int:
    """What tells a tensor and those that share its data from all others, on the meta device too."""
    return tensor.untyped_storage()._cdata


class Checkpoint:
    """A model whose matrices are in the shards of a folder.

    Args:
        folder (`Path`): the folder.
        cls (`type`): the class of the model, stock or converted.
        config (`PreTrainedConfig`): its config.
    """

    def __init__(self, folder: Path, cls: Any, config: Any):
        self.folder, self.shards = folder, read_shards(folder)
        self.scratch: Path | None = None  # where edited shards go
        self.widened = Shard(folder, {}, b"")  # what does not fit into the dtype in which it was stored
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if getattr(config, "quantization_config", None) is not None:
            raise NormSwapError(
                f"the weights of {folder} are quantised: load the model, and pass that instead of its path."
            )
        check_depth(folder, config, {key: one for shard in self.shards for key, one in shard.tensors.items()})
        with told(f"the config of {folder} cannot be used"):
            dtype = config.dtype or stored_dtype(self.shards)
            with torch.device("meta"), no_init_weights():  # whatever sizes the config has, this takes no memory
                self.model = cls._from_config(config, dtype=dtype)
            self.model.tie_weights()
            self.homes = self.match()
            with init_empty_weights(include_buffers=False), no_init_weights():  # with buffers
                self.model = cls._from_config(config, dtype=dtype)
            self.model.tie_weights()
            if self.model.can_generate():
                self.model.generation_config = read_generation_config(folder)
        self.places: dict[int, tuple[Shard, str]] = {}  # by storage
        self.fill(lambda tensor: tensor.ndim < 2, self.model)

    def match(self) -> dict[str, tuple[Shard, str]]:
        """Where each tensor of the model is, by its name in a checkpoint; refuses a folder that lacks some, or whose
        shapes are not the model's."""
        model, state, wanted = self.model, self.model.state_dict(), stored_state(self.model)
        renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
        homes, known = {}, {}
        for shard in self.shards:
            for key in shard.tensors:
                name = key
                if name not in wanted:  # of an older Transformers, or of another head
                    name = rename_source_key(key, renamings, [], model.base_model_prefix, state)[0]
                known[name] = shard, key
                if name in wanted:
                    homes[name] = shard, key
        for name in wanted.keys() - homes.keys() & state.keys():  # a tie may be stored under its other name
            parameter = model.get_parameter_or_buffer(name)
            for other in known.keys() & state.keys():
                if model.get_parameter_or_buffer(other) is parameter:
                    homes[name] = known[other]
        missing = sorted(wanted.keys() - homes.keys())
        if missing:
            raise NormSwapError(
                f"{self.folder} lacks {len(missing)} tensors of {type(model).__name__} ({', '.join(missing[:3])}, ...): it is "
                "incomplete, or has another head. Load the model yourself and pass it instead of its path if they may be random."
            )
        for name, (shard, key) in homes.items():
            entry, shape = shard.tensors[key], tuple(wanted[name].shape)
            if entry.shape != shape:
                raise NormSwapError(f"{key} in {shard.path} has the shape {entry.shape}, and the model needs {shape}.")
            if wanted[name].is_floating_point() and not getattr(TYPES.get(entry.dtype), "is_floating_point", False):
                raise NormSwapError(f"{key} in {shard.path} has the dtype {entry.dtype}, which is none of a weight.")
        return homes

    def fill(self, chosen: Callable[[torch.Tensor], bool], *modules: nn.Module):
        """Read those tensors of modules of the model that are chosen and not read yet."""
        below = {id(part) for module in modules for part in module.modules()}
        for path, module in self.model.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    name = f"{path}.{key}" if path else key
                    if tensor is None or name not in self.homes:
                        continue
                    if tensor.is_meta and id(module) in below and chosen(tensor):
                        self.places.pop(storage(tensor), None)
                        table[key] = self.read(self.homes[name], tensor)
                    self.places[storage(table[key])] = self.homes[name]
        self.model.tie_weights()

    def read(self, place: tuple[Shard, str], like: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor in the dtype of the model, a parameter if `like` is one."""
        shard, key = place
        tensor = shard.read(key, buffer).to(like.dtype)
        return nn.Parameter(tensor, like.requires_grad) if isinstance(like, nn.Parameter) else tensor

    def fill_around(self):
        """Read what lies in the base model, but outside its layers: what a forward pass needs besides them."""
        base = self.model.base_model
        layers = attrgetter(get_architecture(self.model.config).layers)(base)
        inside = {id(part) for part in layers.modules()}
        self.fill(lambda tensor: True, *(OneModule(part) for part in base.modules() if id(part) not in inside))

    @contextlib.contextmanager
    def resident(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Hold the matrices of modules in memory; those that were replaced are written when the block ends."""
        held: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        table: dict[str, Any]
        for part in dict.fromkeys(part for module in modules for part in module.modules()):
            for table in (part._parameters, part._buffers):
                for key, tensor in table.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if storage(tensor) not in self.places:
                        raise NormSwapError(
                            f"{self.folder} stores {key} of {type(part).__name__} in parts (experts), and a warm start has to "
                            "change it: load the model and convert it in memory, or without a warm start."
                        )
                    held.append((table, key, tensor))
        stored = {storage(tensor): tensor for _, _, tensor in held}
        buffer = None
        if len(stored) == 1:  # in the memory of the one before, for fresh memory takes as long as reading
            length = held[0][2].numel() * 8 + 64
            if len(self.buffer) < length:
                self.buffer = torch.empty(length, dtype=torch.uint8)
            buffer = self.buffer
        read = {place: self.read(self.places[place], tensor, buffer) for place, tensor in stored.items()}
        for table, key, tensor in held:
            table[key] = read[storage(tensor)]
        yield
        for table, key, tensor in held:
            if table[key] is not read[storage(tensor)]:
                self.write(self.places[storage(tensor)], table[key])
            table[key] = tensor

    def write(self, place: tuple[Shard, str], tensor: torch.Tensor):
        """Put a changed tensor where it belongs in the edited copy of its shard, or where it would be rounded there, behind
        the others of the model's dtype."""
        shard, key = place
        entry = shard.tensors[key]
        assert self.scratch is not None
        if torch.promote_types(TYPES[entry.dtype], tensor.dtype) != TYPES[entry.dtype]:
            self.widened.path = self.scratch / "edited-widened"
            size = self.widened.path.stat().st_size if self.widened.tensors else 0
            self.widened.tensors[key] = Entry(NAMED[tensor.dtype], entry.shape, size, size + tensor.nbytes)
            with open(self.widened.path, "r+b" if size else "w+b", buffering=0) as file:
                write_tensor(file, tensor, size)
            return
        if shard.edited is None:
            shard.edited = self.scratch / f"edited-{self.shards.index(shard)}"
        with open(shard.edited, "r+b" if shard.edited.exists() else "w+b", buffering=0) as file:
            write_tensor(file, tensor.to(TYPES[entry.dtype]), entry.start)
        shard.written.add(key)

    def write_changes(self, model: PreTrainedModel, folder: Path, max_shard_size: int | str | None):
        """Write the weights that a model made of this one has, and their index."""
        state, added, kept = model.state_dict(), {}, {shard.path: dict(shard.tensors) for shard in self.shards}
        stored = stored_state(model)
        used = set(self.homes.values())
        for shard in self.shards:
            if shard.loaded is not None:  # in a pickle a tied tensor may have several names
                data = {key: (one.data_ptr(), one.shape, one.stride()) for key, one in shard.loaded.items()}
                known = {data[key] for key in data if (shard, key) in used}
                kept[shard.path] = {
                    key: one for key, one in shard.tensors.items() if (shard, key) in used or data[key] not in known
                }
        for name in self.homes.keys() - stored.keys():
            self.drop(kept, name)
        for name, other in stored.items():
            tensor, home = state.get(name, other), self.homes.get(name)
            if home is None:
                added[name] = tensor.contiguous()
                for tensors in kept.values():  # nothing that the model did not know
                    tensors.pop(name, None)
            elif not tensor.is_meta and self.places.get(storage(tensor)) != home:
                if home[0].tensors[home[1]].shape != tensor.shape:
                    self.drop(kept, name)
                    added[name] = tensor.contiguous()
                elif not torch.equal(tensor, home[0].read(home[1]).to(tensor.dtype)):
                    self.write(home, tensor)
        for shard in self.shards:  # what is written anyway loses what the model does not know
            if max_shard_size is not None or shard.written or kept[shard.path].keys() != shard.tensors.keys():
                kept[shard.path] = {key: one for key, one in kept[shard.path].items() if (shard, key) in used}
        for name, tensor in added.items():
            if tensor.is_meta:
                raise NormSwapError(f"{name} is new, and nothing says what it starts from: convert in memory.")
        sources = [
            (shard, [key for key in kept[shard.path] if key not in self.widened.tensors]) for shard in self.shards
        ]
        sources.append((self.widened, list(self.widened.tensors)))
        sources.append((hold(folder / "new", added), list(added)))
        groups = [[(shard, key) for key in keys] for shard, keys in sources if keys]
        if max_shard_size is not None:
            places = {key: (shard, key) for group in groups for shard, key in group}
            split = split_state_dict_into_shards_factory(
                {key: shard.tensors[key] for key, (shard, _) in places.items()},
                get_storage_size=lambda entry: entry.end - entry.start,
                filename_pattern="{suffix}",
                max_shard_size=max_shard_size,
            )
            groups = [[places[key] for key in keys] for keys in split.filename_to_tensors.values()]
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        if len(groups) == 1:
            names = ["model.safetensors"]
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(write_shard, [folder / name for name in names], groups))
        if len(groups) > 1:
            sizes = [shard.tensors[key].end - shard.tensors[key].start for group in groups for shard, key in group]
            metadata = {"total_parameters": model.num_parameters(), "total_size": sum(sizes)}
            weight_map = {key: name for name, group in zip(names, groups) for _, key in group}
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def drop(self, kept: dict[Path, dict[str, Entry]], name: str):
        shard, key = self.homes[name]
        kept[shard.path].pop(key)


class OneModule(NamedTuple):
    """A module without its submodules."""

    module: nn.Module

    def modules(self):
        return [self.module]


def rewrite(
    checkpoint: Checkpoint,
    change: Callable[[Checkpoint], PreTrainedModel],
    folder: Path,
    max_shard_size: int | str | None = None,
):
    """Write to a new folder that is [`appearing`] what `change` makes of a checkpoint."""
    checkpoint.scratch = folder.parent
    model = change(checkpoint)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of no weights
    try:  # first, for it removes shards that it did not write
        write_beside(model, checkpoint.folder, folder, state_dict={})
    finally:
        if shown:
            logging.enable_progress_bar()
    checkpoint.write_changes(model, folder, max_shard_size)
