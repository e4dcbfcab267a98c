"""Files of tensors: safetensors shards that are read, linked, copied and written tensor by tensor, and pickles that are read.

What a file says of itself is checked before it is believed.
"""

import contextlib
import errno
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from packaging.version import Version
from safetensors import SafetensorError, safe_open

from .modeling.placements import NormSwapError

NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
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
PICKLED = (
    "holds pickled data that is damaged or no tensor, which is not unpickled, for that could run code: take a version of it in "
    "safetensors."
)
NAMED = {dtype: name for name, dtype in TYPES.items()}
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
        shift = (entry.start - data.data_ptr()) % 64  # as in a mapped file: it decides how sums are rounded
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
    try:
        data = parse_json(path)
    except NormSwapError:
        raise
    except (ValueError, RecursionError) as error:
        raise NormSwapError(f"{path} cannot be read as JSON ({type(error).__name__}: {str(error)[:100]}).") from None
    if not isinstance(data, dict):
        raise NormSwapError(f"{path} holds no JSON object.")
    return data


def parse_json(path: Path) -> Any:
    """What a JSON file holds; refuses one that is too long."""
    if path.stat().st_size > LONGEST_JSON:
        raise NormSwapError(f"{path} has {path.stat().st_size} bytes, and {LONGEST_JSON} are the most that is read.")
    return json.loads(path.read_bytes())


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
    for key, tensor in tensors.items():
        if tensor.dtype not in NAMED:
            raise NormSwapError(f"{key} in {path} has the dtype {tensor.dtype}: convert this checkpoint in memory.")
    entries = {key: Entry(NAMED[one.dtype], tuple(one.shape), 0, one.nbytes) for key, one in tensors.items()}
    return make_shard(path, entries, tensors)


def read_pickle(path: Path) -> Shard:
    """The tensors of a `pytorch_model.bin`, mapped into memory; nothing that it says is executed."""
    try:
        zipped = zipfile.is_zipfile(path)  # as written by PyTorch 1.6 and later
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    except pickle.UnpicklingError:  # whose text tells how to run what it holds
        raise NormSwapError(f"{path} {PICKLED}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise NormSwapError(f"{path} is damaged: {' '.join(str(error).split())[:200]}.") from None
    if not isinstance(data, dict) or not all(
        isinstance(one, torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu"
        for one in data.values()
    ):
        raise NormSwapError(f"{path} holds something else than a dictionary of dense tensors.")
    return hold(path, {str(key): tensor.detach() for key, tensor in data.items()})


def lies_inside(path: Path, folder: Path) -> bool:
    """Whether a file is one of the folder, also through links; the Hub's cache links to `blobs`."""
    root = folder.resolve()
    home = next((one for one in root.parents if one.name.startswith("models--")), root)
    return home in path.resolve().parents


def check_inside(path: Path, folder: Path):
    if not lies_inside(path, folder):
        raise NormSwapError(f"{path} is a link that leads out of the folder: copy what it leads to there.")


def weights_name(folder: Path) -> str:
    """The file of the weights of a folder, or of their index."""
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    if name is None:
        raise NormSwapError(f"{folder} has no weights: there is none of {', '.join(NAMES)}.")
    check_inside(folder / name, folder)
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
        check_inside(folder / file, folder)
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


def write_shard(target: Path, places: list[tuple[Shard, str]]):
    """Write tensors of one or several shards as a file; a file that has just these is linked or, if edited, completed."""
    first = places[0][0]
    whole = bool(first.header) and all(shard is first for shard, _ in places) and len(places) == len(first.tensors)
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
