"""Checkpoint folders rewritten tensor by tensor: a model is changed as in memory, but without its weights.

The model is built with matrices on the meta device, and only what has one dimension (norms, biases, gates) is read at once.
A conversion then runs on it as on any other. Tensors that it leaves alone stay in their shards, which are linked or copied;
matrices that a warm start changes are read when it comes to them and written to their place in the new shard; and what it
adds becomes one more shard. The folder appears when it is complete.
"""

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging

from .modeling.architectures import get_architecture
from .modeling.placements import NormSwapError

logger = logging.get_logger(__name__)

NOT_COPIED = (  # at the top of a folder: what is written anew, weights of other formats, and what tells of a run or its result
    *("config.json", "README.md", *(path.name for path in Path(__file__).parent.joinpath("modeling").glob("*.py"))),
    *("*.safetensors", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth", "*.ot", "*.index.json"),
    *("onnx", "openvino", "original", "*_results.json", "fidelity.json", "run.json", "history.json", "curves.png"),
    *("trainer_state.json", "checkpoint-*", "global_step*", "base_model", "state", "runs", "logs", "wandb", "*.log"),
)
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
CODE_CONFIGS = (  # in which `auto_map` may name code
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "video_preprocessor_config.json",
)
# Bytes of JSON that are read: the longest index that is published, DeepSeek-V3's, has 8.9 million.
LONGEST_JSON = 32_000_000
TYPES = {  # as safetensors calls them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# From this version on, safetensors replaces a file instead of writing into it, so that saving a model into a folder does not
# reach the file that shares the data through a hard link.
SAFE_TO_LINK = Version(safetensors.__version__) >= Version("0.8.0")
# Bytes. Longer writes make Linux look for longer runs of memory than it may have (2 instead of 0.2 seconds per GB were seen),
# and what goes through a pipe is aligned to the pipe.
WRITE, PIPE = 1 << 20, 1 << 16
FICLONE = 0x40049409  # linux/fs.h: share the blocks of a file until one of the two is written to


class Entry(NamedTuple):
    """A tensor in a shard: its dtype as safetensors calls it, and where in the file it lies."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(eq=False)
class Shard:
    """A file of tensors. `loaded` are those that have no file in this format: of a pickle, or new ones."""

    path: Path
    tensors: dict[str, Entry]
    header: bytes
    loaded: dict[str, torch.Tensor] | None = None
    written: set[str] = field(default_factory=set)  # what has its place in the edited copy
    edited: Path | None = None

    def read(self, key: str, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor, without mapping the file into memory; in `buffer` if that is long enough."""
        if self.loaded is not None:
            return self.loaded[key]
        entry = self.tensors[key]
        size, length = TYPES[entry.dtype].itemsize, entry.end - entry.start + 64
        data = torch.empty(length, dtype=torch.uint8) if buffer is None or len(buffer) < length else buffer
        shift = (
            entry.start - data.data_ptr()
        ) % 64  # as in a mapped file: it decides how sums of products are rounded
        data = data[shift if entry.start % size == 0 else 0 :][: entry.end - entry.start]
        view, offset = memoryview(data.numpy().data), entry.start
        with open(self.path, "rb", buffering=0) as file:
            while view:
                count = os.preadv(file.fileno(), [view], offset)
                if not count:
                    raise NormSwapError(f"{self.path} has become shorter while it was read.")
                view, offset = view[count:], offset + count
        return data.view(TYPES[entry.dtype]).view(entry.shape)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever is raised, in one sentence."""
    try:
        yield
    except NormSwapError:
        raise
    except Exception as error:  # of what a hostile file makes others raise
        reason = " ".join(str(error).split())[:200]
        raise NormSwapError(f"{what}: {type(error).__name__}: {reason}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; refuses what is no such thing, too long, or too deeply nested."""
    if path.stat().st_size > LONGEST_JSON:
        raise NormSwapError(f"{path} has {path.stat().st_size} bytes, and {LONGEST_JSON} are the most that is read.")
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NormSwapError(f"{path} cannot be read as JSON ({type(error).__name__}: {str(error)[:100]}).") from None
    if not isinstance(data, dict):
        raise NormSwapError(f"{path} holds no JSON object.")
    return data


def read_header(path: Path) -> Shard:
    """The tensors of a safetensors file, whose header is checked against the size of the file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_JSON:
                raise NormSwapError(f"{path} has a header of {length} bytes: it is damaged.")
            file.seek(0)
            header = file.read(8 + length)
        with safe_open(path, framework="pt"):  # checks dtypes, shapes, offsets and the length of the file
            pass
    except SafetensorError as error:
        raise NormSwapError(f"{path} is damaged or incomplete: {str(error)[:200]}.") from None
    rows = json.loads(header[8:])
    layout = rows.pop("__metadata__", {}).get("format", "pt")
    if layout != "pt":
        raise NormSwapError(f"{path} says that its tensors are laid out for {layout!r}, not for PyTorch.")
    tensors = {}
    for key, row in rows.items():
        start, end = (8 + length + offset for offset in row["data_offsets"])
        tensors[key] = Entry(row["dtype"], tuple(row["shape"]), start, end)
    return Shard(path, tensors, header)


def make_shard(path: Path, tensors: dict[str, Entry], loaded: dict[str, torch.Tensor] | None = None) -> Shard:
    """A shard in which tensors, of which only dtype, shape and size count, lie one behind the other."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, entry in tensors.items():
        rows[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [position, position]}
        position += entry.end - entry.start
        rows[key]["data_offsets"][1] = position
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    del rows["__metadata__"]
    placed = {
        key: Entry(entry.dtype, tuple(entry.shape), *(len(header) + offset for offset in rows[key]["data_offsets"]))
        for key, entry in tensors.items()
    }
    return Shard(path, placed, header, loaded)


def hold(path: Path, tensors: dict[str, torch.Tensor]) -> Shard:
    """A shard of tensors in memory."""
    names = {dtype: name for name, dtype in TYPES.items()}
    for key, tensor in tensors.items():
        if tensor.dtype not in names:
            raise NormSwapError(f"{key} in {path} has the dtype {tensor.dtype}: convert this checkpoint in memory.")
    entries = {key: Entry(names[one.dtype], tuple(one.shape), 0, one.nbytes) for key, one in tensors.items()}
    return make_shard(path, entries, tensors)


def read_pickle(path: Path) -> Shard:
    """The tensors of a `pytorch_model.bin`, mapped into memory; nothing that it says is executed."""
    import zipfile

    try:
        zipped = zipfile.is_zipfile(path)  # as written by PyTorch 1.6 and later
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise NormSwapError(
            f"{path} is damaged, or holds something else than tensors, which is not unpickled: {reason}."
        ) from None
    if not isinstance(data, dict) or not all(
        isinstance(one, torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu"
        for one in data.values()
    ):
        raise NormSwapError(f"{path} holds something else than a dictionary of dense tensors.")
    return hold(path, {str(key): tensor.detach() for key, tensor in data.items()})


def weights_name(folder: Path) -> str:
    """The file of the weights of a folder, or of their index."""
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    if name is None:
        raise NormSwapError(f"{folder} has no weights: there is none of {', '.join(NAMES)}.")
    return name


def shard_files(folder: Path) -> list[Path]:
    """The weights of a checkpoint folder, in the order of its index; refuses what lies outside the folder."""
    name = weights_name(folder)
    if not name.endswith(".index.json"):
        return [folder / name]
    weight_map = read_json(folder / name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise NormSwapError(f"{folder / name} has no `weight_map`.")
    files = list(dict.fromkeys(str(file) for file in weight_map.values()))
    suffix = Path(name.removesuffix(".index.json")).suffix
    for file in files:
        if Path(file).name != file or "\\" in file or not file.endswith(suffix):
            raise NormSwapError(f"{folder / name} names the shard {file!r}, which is no {suffix} file of this folder.")
        if not (folder / file).is_file():
            raise NormSwapError(f"{folder / name} names the shard {file!r}, which is not there: it is incomplete.")
    return [folder / file for file in files]


def read_shards(folder: Path, unpickle: bool = True) -> list[Shard]:
    """What tensors the shards of a folder hold; refuses shards that contradict each other or the index."""
    shards = []
    for path in shard_files(folder):
        if path.suffix == ".bin":
            shards += [read_pickle(path)] if unpickle else []
        else:
            shards.append(read_header(path))
    homes: dict[str, str] = {}
    for shard in shards:
        for key in shard.tensors:
            if homes.setdefault(key, shard.path.name) != shard.path.name:
                raise NormSwapError(f"{key} is in {homes[key]} and in {shard.path.name} of {folder}.")
    if (name := weights_name(folder)).endswith(".index.json") and len(shards) == len(shard_files(folder)):
        for key, file in read_json(folder / name)["weight_map"].items():
            if homes.get(key) != file:
                raise NormSwapError(f"{folder / name} says that {key} is in {file}, which lacks it.")
    return shards


def check_folder(folder: Path) -> int | None:
    """Refuse a folder whose config or weights are not what they claim, before anything is made of it; returns how many
    tensors there are, if the weights are no pickles.

    Whether numbers inside a tensor were changed cannot be seen: checkpoints have no checksums."""
    if not (folder / "config.json").is_file():
        raise NormSwapError(f"{folder} has no config.json, so it is not a checkpoint folder.")
    config = read_json(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        raise NormSwapError(
            f"{folder} holds a PEFT adapter: merge it into the model (`merge_and_unload()`), or remove adapter_config.json to "
            "convert the model without it."
        )
    for name in CODE_CONFIGS:
        data = read_json(folder / name) if (folder / name).is_file() else {}
        code = {key: data[key] for key in ("auto_map", "custom_pipelines") if key in data}
        if name == "config.json" and not str(config.get("model_type")).startswith("normswap_"):
            code.pop("auto_map", None)  # is not used
        if "--" in (text := json.dumps(code)):
            raise NormSwapError(
                f"{folder / name} takes its code from another repository ({text[:200]}), not from the folder: remove this "
                "entry if you trust the rest."
            )
    if not any((folder / name).is_file() for name in NAMES):
        return None
    shards = read_shards(folder, unpickle=False)
    sizes = [len(shard.tensors) for shard in shards]
    check_counts(
        folder,
        config,
        max((size for shard in shards for one in shard.tensors.values() for size in one.shape), default=0),
    )
    return sum(sizes) or None


def check_counts(place: Any, config: dict[str, Any], largest: int):
    """Refuse counts and lists beyond the `largest` size of a tensor: of layers and labels, configs make lists as they are read."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_counts(place, value, largest)
        count = len(value) if isinstance(value, list) else value if re.search("layer|label|expert|head", key) else 0
        if isinstance(count, int) and count > max(largest, 10_000):
            raise NormSwapError(f"{place} cannot have {count} {key}: its tensors are too small for that.")


def check_depth(folder: Path, config: Any, tensors: int):
    """Refuse a config that wants a model out of all proportion to the weights."""
    if not 0 < config.num_hidden_layers <= tensors:
        raise NormSwapError(
            f"{folder} has {tensors} tensors, but {config.num_hidden_layers} layers: one of the two is wrong."
        )


def local_folder(path: str | os.PathLike, subfolder: str = "", **kwargs) -> Path:
    """The folder of a path, or of a model id, whose files are downloaded; of these no pickles if there are safetensors."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        others = [
            "*.bin",
            "*.h5",
            "*.msgpack",
            "*.ot",
            "*.gguf",
            "*.pt",
            "*.pth",
            "onnx/*",
            "openvino/*",
            "original/*",
        ]
        folder = Path(snapshot_download(str(path), ignore_patterns=others, **kwargs))
        if not list((folder / subfolder).glob("*.safetensors")):
            folder = Path(snapshot_download(str(path), ignore_patterns=others[1:], **kwargs))
    return folder / subfolder


def stored_dtype(shards: list[Shard]) -> torch.dtype:
    """What `from_pretrained` takes where a config has no dtype: that of the first floats in the first file, by name."""
    first = min(shards, key=lambda shard: shard.path.name)
    if first.loaded is None:
        with safe_open(first.path, framework="pt") as file:
            keys = list(file.keys())
    else:
        keys = list(first.loaded)
    dtypes = [TYPES.get(first.tensors[key].dtype, torch.float8_e4m3fn) for key in keys]
    return next((one for one in dtypes if one.is_floating_point and one.itemsize > 1), torch.float32)


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
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if getattr(config, "quantization_config", None) is not None:
            raise NormSwapError(f"the weights of {folder} are quantised: load the model and convert it in memory.")
        check_depth(folder, config, sum(len(shard.tensors) for shard in self.shards))
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
        """Put a changed tensor where it belongs in the edited copy of its shard."""
        shard, key = place
        entry = shard.tensors[key]
        if shard.edited is None:
            assert self.scratch is not None
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
        for name, tensor in added.items():
            if tensor.is_meta:
                raise NormSwapError(f"{name} is new, and nothing says what it starts from: convert in memory.")
        sources = [(shard, list(kept[shard.path])) for shard in self.shards]
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


def write_shard(target: Path, places: list[tuple[Shard, str]]):
    """Write tensors of one or several shards as a file; a file that has just these is linked or, if edited, completed."""
    first = places[0][0]
    whole = all(shard is first for shard, _ in places) and len(places) == len(first.tensors)
    if whole and not first.written and first.loaded is None:
        return link(first.path, target)
    if whole:
        made = first
        if first.edited is not None:
            first.edited.rename(target)
            first.edited = target
    else:
        places = sorted(places, key=lambda place: -TYPES.get(place[0].tensors[place[1]].dtype, torch.uint8).itemsize)
        made = make_shard(target, {key: shard.tensors[key] for shard, key in places})
    with contextlib.ExitStack() as stack:
        files: dict[Path, Any] = {}
        file = stack.enter_context(open(target, "r+b" if target.exists() else "w+b", buffering=0))
        write_bytes(file, memoryview(made.header), 0)
        for shard, key in places:
            entry, start = shard.tensors[key], made.tensors[key].start
            path = shard.edited if key in shard.written else shard.path
            if path == target:
                continue
            if shard.loaded is not None and key not in shard.written:
                write_tensor(file, shard.loaded[key], start)
                continue
            assert path is not None
            if path not in files:
                files[path] = stack.enter_context(open(path, "rb", buffering=0))
            copy_range(files[path].fileno(), file.fileno(), entry.end - entry.start, entry.start, start)


def write_tensor(file: Any, tensor: torch.Tensor, offset: int):
    write_bytes(file, memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data), offset)


def write_bytes(file: Any, view: memoryview, offset: int):
    while view:
        count = os.pwrite(file.fileno(), view[:WRITE], offset)
        view, offset = view[count:], offset + count


def copy_range(source: int, target: int, count: int, start: int, to: int):
    """Copy bytes between files, inside the kernel where that can be."""
    fast = hasattr(os, "sendfile")  # a quarter faster than `copy_file_range` on ext4
    os.lseek(target, to, os.SEEK_SET)
    while count:
        done = 0
        if fast:
            try:
                done = os.sendfile(target, source, start, min(count, -start % PIPE or count))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK):
                    raise
                fast = False
        if not fast:
            done = os.pwrite(target, os.pread(source, min(count, WRITE), start), to)
        if not done:
            raise NormSwapError("a shard has become shorter while it was copied.")
        count, start, to = count - done, start + done, to + done


def link(source: Path, target: Path):
    """A second file with the same data, without copying it if the file system can do that."""
    source = source.resolve()  # in the Hub's cache, files are links
    try:
        import fcntl

        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new, FICLONE, old.fileno())
        return
    except (ImportError, OSError):
        target.unlink(missing_ok=True)
    if SAFE_TO_LINK:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def check_target(source: Any, target: Path, overwrite: bool) -> Path:
    """The absolute path of the folder to write; refuses one that must not be replaced, before anything is loaded."""
    target = Path(target).expanduser().resolve()
    if target in (Path.cwd(), *Path.cwd().parents):
        raise NormSwapError(f"{target} holds the current folder: name a new folder.")
    if isinstance(source, (str, os.PathLike)) and (origin := Path(source).expanduser().resolve()).is_dir():
        if target == origin or target in origin.parents:
            raise NormSwapError(f"{target} is or holds the source: name a new folder.")
        if origin in target.parents:
            raise NormSwapError(f"{target} lies inside the source: choose a folder beside it.")
    check_free(target, overwrite)
    return target


def check_free(target: Path, overwrite: bool):
    """Refuse what is there already, unless it is a checkpoint folder that may be replaced."""
    with told(f"{target} cannot be written"):
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            if not overwrite:
                raise NormSwapError(f"{target} exists: choose another folder, or pass --overwrite (`overwrite=True`).")
            if not (target / "config.json").is_file():
                raise NormSwapError(
                    f"{target} is not a checkpoint folder, so it is not replaced: choose another folder."
                )


@contextlib.contextmanager
def appearing(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder beside `target`, with an empty folder `new` in it that becomes `target` when the block ends well.

    What a killed run left there is removed, and a target that it had moved away for the new one is brought back. Whether
    there may be a target is looked at again by whoever holds the lock: before the block, and behind it."""
    scratch = target.parent / f".{target.name}.incomplete"
    new, old = scratch / "new", scratch / "old"
    missing = [folder for folder in scratch.parents if not folder.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(remove_empty, missing)
        with told(f"{target} cannot be written"):
            lock(scratch, stack)
            if strange := sorted(
                {path.name.partition("-")[0] for path in scratch.iterdir()} - {"new", "old", "edited"}
            ):
                raise NormSwapError(f"{scratch} holds {strange[0]}, which no conversion left there: move it away.")
            stack.callback(lambda: remove(scratch) if target.exists() or not old.exists() else None)
            if old.exists() and not target.exists():
                old.rename(target)
            check_free(target, overwrite)
            for rest in scratch.iterdir():
                remove(rest)
            new.mkdir()
        yield new
        check_free(target, overwrite)
        with contextlib.suppress(FileNotFoundError):
            target.rename(old) if overwrite else target.rmdir()  # which fails if something came to lie there
        try:
            new.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise


def lock(scratch: Path, stack: contextlib.ExitStack):
    """Make a folder that one process has at a time; a killed one loses it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return scratch.mkdir(parents=True, exist_ok=True)
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        handle = os.open(scratch, os.O_RDONLY)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise NormSwapError(f"another process is writing {scratch.name}: wait for it.") from None
        if scratch.exists() and os.path.samestat(os.fstat(handle), os.stat(scratch)):
            return


def remove(path: Path):
    """Remove a file or folder of ours, read-only folders in it too; what cannot be removed is left to the next run."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def remove_empty(folders: Iterable[Path]):
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def write_beside(model: PreTrainedModel, source: Any, folder: Path, gguf_file: str | None = None, **kwargs):
    """Write a model into a new folder: the files that lay beside its source's weights, and what `save_pretrained`, which
    gets `kwargs`, writes. The one place where files beside the weights are written."""
    if source is not None:
        copy_companions(source, folder, gguf_file)
    model.save_pretrained(folder, **kwargs)


def copy_companions(source: Any, target: Path, gguf_file: str | None = None):
    """Copy everything but weights, config, card, our code and what tells of a run: tokenizer, processor, pooling, ...

    Contents only, without modes and links."""
    folder = Path(source).expanduser()
    if not folder.is_dir() or gguf_file is not None:  # on the Hub, or inside a GGUF file
        AutoTokenizer.from_pretrained(source, gguf_file=gguf_file, trust_remote_code=False).save_pretrained(target)
        return
    root = folder.resolve()
    home = next(
        (one for one in root.parents if one.name.startswith("models--")), root
    )  # the Hub's cache links to `blobs`
    skipped, code = [], []
    for directory, folders, files in os.walk(folder):
        place = Path(directory).relative_to(folder)
        for names in (folders, files):
            names[:] = [name for name in names if name[0] != "." and name != "__pycache__"]
            if directory == str(folder):
                names[:] = [name for name in names if not any(fnmatchcase(name, one) for one in NOT_COPIED)]
        skipped += [str(place / name) for name in folders if (folder / place / name).is_symlink()]
        for name in files:
            path = folder / place / name
            if not path.is_file() or home not in path.resolve().parents:
                skipped.append(str(place / name))
                continue
            (target / place).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / place / name)
            if name.endswith(".py"):
                code.append(str(place / name))
    if skipped:
        logger.warning(f"Left out, for they are no files of {folder} itself: {', '.join(sorted(skipped))}.")
    if code:
        logger.warning(f"Copied from {folder}, and run by `trust_remote_code`: {', '.join(sorted(code))}. Read it.")


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
