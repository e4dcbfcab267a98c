"""Checkpoint folders: checked before they are read, with all that lies beside the weights, and appearing when complete."""

import contextlib
import filecmp
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .model_card import BEGIN, END
from .modeling.modeling_normswap import NormSwapModel
from .modeling.placements import NormSwapError
from .shards import NAMES, Entry, check_inside, lies_inside, parse_json, read_json, read_shards, told

logger = logging.get_logger(__name__)

OURS = tuple(path.name for path in Path(__file__).parent.joinpath("modeling").glob("*.py"))  # beside weights, too
NOT_COPIED = (  # at the top of a folder: what is written anew, weights of other formats, and what tells of a run or its result
    *("config.json", "README.md", *OURS),
    *("*.safetensors", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth", "*.ot", "*.index.json"),
    *("onnx", "openvino", "original", "*_results.json", "fidelity.json", "run.json", "history.json", "curves.png"),
    *("trainer_state.json", "checkpoint-*", "global_step*", "latest", "zero_to_fp32.py"),
    *("base_model", "state", "runs", "logs", "wandb", "*.log"),
)
CODE_CONFIGS = (  # in which `auto_map` may name code
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "video_preprocessor_config.json",
)
CODE = "auto_map|custom_pipelines|custom_generate"
CODE_FIELDS = {  # the last two are of sentence-transformers
    **dict.fromkeys((*CODE_CONFIGS, "generation_config.json"), CODE),
    **{"modules.json": "type", "router_config.json": "types"},
}
TOKENIZER = (
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tekken\.json|"
    r"(tokenizer|spiece|spm|sentencepiece(\.bpe)?)\.model(\.v\d+)?|(source|target)\.spm|(tokenizer|qwen)\.tiktoken"
)
ENCODER = r"modules\.json|sentence_\w+_config\.json|config_sentence_transformers\.json"  # sentence-transformers
WRITTEN = re.compile(  # what is a checkpoint's own, so that another one may replace it
    rf"{TOKENIZER}|{ENCODER}|\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)|"
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|fidelity\.json|"
    r"(generation_|\w*processor_)?config\.json|chat_template\.\w+|additional_chat_templates/\w+\.jinja|"
    + "|".join(map(re.escape, OURS))
)


def check_folder(folder: Path) -> dict[str, Entry] | None:
    """Refuse a folder whose config or weights are not what they claim, before anything is made of it; returns what tensors
    there are, if the weights are no pickles.

    Whether numbers inside a tensor were changed cannot be seen: checkpoints have no checksums."""
    if not (folder / "config.json").is_file():
        raise NormSwapError(f"{folder} has no config.json, so it is not a checkpoint folder.")
    for name in ("config.json", "generation_config.json"):
        check_inside(folder / name, folder)
    config = read_json(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        raise NormSwapError(
            f"{folder} holds a PEFT adapter: merge it into the model (`merge_and_unload()`), or remove adapter_config.json to "
            "convert the model without it."
        )
    if "transformers_weights" in config:
        raise NormSwapError(
            f"the config of {folder} names a file of weights itself (`transformers_weights`): give that file one of the names "
            f"{', '.join(NAMES)}, and remove the field."
        )
    model_type = str(config.get("model_type"))
    used = config if model_type.startswith("normswap_") else {**config, "auto_map": None}
    check_code(folder / "config.json", used, CODE)
    for path in (folder / one for one in companions(folder)[0]):
        if path.name in CODE_FIELDS:
            check_code(path, companion(path), CODE_FIELDS[path.name])
    if not any((folder / name).is_file() for name in NAMES):
        return None
    shards = read_shards(folder, unpickle=False)
    tensors = {key: one for shard in shards for key, one in shard.tensors.items()}
    check_counts(
        folder,
        config,
        max((size for one in tensors.values() for size in one.shape), default=0),
    )
    return tensors or None


def companion(path: Path) -> Any:
    """What a JSON file holds that others read; nothing if it is no JSON, for then they cannot."""
    with told(f"{path} cannot be read"):
        try:
            return parse_json(path)
        except (json.JSONDecodeError, UnicodeDecodeError):
            return None


def check_code(path: Path, data: Any, fields: str, named: bool = False):
    """Refuse JSON that takes code from another repository (`repository--module.Class`), however deep it says so."""
    if named and isinstance(data, str) and re.fullmatch(r"\S+--\S+", data):
        raise NormSwapError(
            f"{path} takes its code from another repository ({data[:200]}), not from the folder: remove this entry if you trust "
            "the rest."
        )
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            check_code(path, value, fields, named or re.fullmatch(fields, str(key)) is not None)


COUNTS = re.compile(
    r"(num|n)_((hidden|encoder|decoder)_)?(layers?|labels)|(num|n)_(\w+_)?(experts|heads?)|\w+coder_layers"
)


def check_counts(place: Any, config: dict[str, Any], largest: int):
    """Refuse counts and lists beyond the `largest` size of a tensor: of layers and labels, configs make lists as they are read."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_counts(place, value, largest)
        count = len(value) if isinstance(value, list) else value if COUNTS.fullmatch(key) else 0
        if isinstance(count, int) and count > max(largest, 10_000):
            raise NormSwapError(f"{place} cannot have {count} {key}: its tensors are too small for that.")


def local_folder(path: str | os.PathLike, subfolder: str = "", **kwargs) -> Path:
    """The folder of a path, or of a model id, whose files are downloaded; of these no pickles if there are safetensors."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        others = "*.bin *.h5 *.msgpack *.ot *.gguf *.pt *.pth onnx/* openvino/* original/*".split()
        folder = Path(snapshot_download(str(path), ignore_patterns=others, **kwargs))
        if not list((folder / subfolder).glob("*.safetensors")):
            folder = Path(snapshot_download(str(path), ignore_patterns=others[1:], **kwargs))
    return folder / subfolder


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
    if not isinstance(source, (str, os.PathLike)):
        check_lost(target)
    elif origin.is_dir():  # what is on the Hub is not here yet
        check_lost(target, origin)
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


def check_lost(target: Path, new: Path | None = None, complete: bool = False):
    """Refuse to replace a folder with files that are no checkpoint's own, unless the new one has the same."""
    lost = set()
    for path in target.rglob("*"):
        name = path.relative_to(target)
        twin = (new or target) / name
        if name == Path("README.md") and path.is_file():
            own = BEGIN in (text := path.read_text(encoding="utf-8", errors="replace"))
            if complete and not twin.is_file():  # a stock model has no card
                text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
                own = not re.sub(f"{BEGIN}.*?{END}.*?-->", "", text, flags=re.DOTALL).strip()
        else:
            own = bool(WRITTEN.fullmatch(name.as_posix())) or (path.is_dir() and not path.is_symlink())
        if not own and (new is None or not same(path, twin)):
            lost.add(name.parts[0])
    if lost:
        raise NormSwapError(
            f"{target} also holds {', '.join(sorted(lost)[:5])}{', ...' * (len(lost) > 5)}, which would be lost, so it is not "
            "replaced: move that away, or choose another folder."
        )


def same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def check_size(size: int | str | None) -> int | str | None:
    """The most bytes of a file, as Transformers reads it."""
    text = str(size).strip()
    if size is None or re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", text, re.IGNORECASE):
        return size
    if not re.fullmatch(r"[1-9]\d*", text):
        raise NormSwapError(
            f"{size!r} is no size of a file: `max_shard_size` is a number of bytes, or a text like 5GB."
        )
    return int(text)


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
            card = target / "README.md"
            if card.is_file() and BEGIN in card.read_text(encoding="utf-8", errors="replace"):
                shutil.copyfile(card, new / "README.md")  # the next save brings our part up to date
        try:
            yield new
        except (OSError, SafetensorError) as error:
            if not re.search("No space left|quota exceeded|File too large", str(error)):
                raise
            raise NormSwapError(
                f"{target} cannot be written: {str(error)[:200]}. Make room, or choose another place."
            ) from error
        check_free(target, overwrite)
        check_lost(target, new, complete=True)
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
    if not isinstance(model, NormSwapModel):
        (folder / "README.md").unlink(missing_ok=True)  # of a converted model, which lay there before
    model.save_pretrained(folder, **kwargs)


def copy_companions(source: Any, target: Path, gguf_file: str | None = None):
    """Copy everything but weights, config, card, our code and what tells of a run: tokenizer, processor, pooling, ...

    Contents only, without modes and links."""
    folder = Path(source).expanduser()
    if not folder.is_dir() or gguf_file is not None:  # on the Hub, or inside a GGUF file
        AutoTokenizer.from_pretrained(source, gguf_file=gguf_file, trust_remote_code=False).save_pretrained(target)
        return
    names, skipped = companions(folder)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)
    if skipped:
        logger.warning(f"Left out, for they are no files of {folder} itself: {', '.join(map(str, sorted(skipped)))}.")
    if code := sorted(str(name) for name in names if name.suffix == ".py"):
        logger.warning(f"Copied from {folder}, and run by `trust_remote_code`: {', '.join(code)}. Read it.")


def companions(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files beside the weights that are copied, and what is left out for it is no file of the folder; paths in the folder."""
    found: list[Path] = []
    skipped: list[Path] = []
    for directory, folders, files in os.walk(folder):
        place = Path(directory).relative_to(folder)
        for names in (folders, files):
            names[:] = [name for name in names if name[0] != "." and name != "__pycache__"]
            if directory == str(folder):
                names[:] = [name for name in names if not any(fnmatchcase(name, one) for one in NOT_COPIED)]
        skipped += [place / name for name in folders if (folder / place / name).is_symlink()]
        for name in files:
            path = folder / place / name
            (found if path.is_file() and lies_inside(path, folder) else skipped).append(place / name)
    return found, skipped
