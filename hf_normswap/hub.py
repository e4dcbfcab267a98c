"""Sharing converted checkpoints on the Hub, with a model card."""

import ast
import contextlib
import json
import os
import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.utils import logging

from .calibration import FEW_TOKENS
from .conversion import check_model, is_converted, named_class, unwrap
from .folders import CODE_CONFIGS, ENCODER, TOKENIZER, check_folder
from .model_card import (
    BEGIN,
    figures_of,
    left_alone,
    load_config,
    mark_of,
    merge,
    public_results,
    public_run,
    read_json,
    read_text,
    stored_figures,
)
from .modeling import modeling_normswap
from .modeling.placements import NormSwapError
from .shards import NAMES, read_header, read_shards, shard_files, told, weights_name
from .streaming import Checkpoint

logger = logging.get_logger(__name__)

MODULE = modeling_normswap.__name__.rpartition(".")[2]
RESULTS = ("fidelity.json", "run.json", "all_results.json", "curves.png")  # uploaded if the card tells them
UPLOADED = {  # besides weights, results, and the code that a config names. Everything else in a folder stays there.
    *("README.md", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *CODE_CONFIGS,
}
PATTERNS = rf"{TOKENIZER}|{ENCODER}|additional_chat_templates/\w[\w-]*\.jinja|(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)(\.txt|\.md)?"
TRAINED = (
    "Dense",
    "LayerNorm",
    "CNN",
    "LSTM",
    "WeightedLayerPooling",
)  # modules of sentence-transformers with weights
WAIT = 5.0  # seconds, for a card on the Hub


@dataclass
class Push:
    """What [`push`] uploads, or uploaded. Prints as text."""

    repo_id: str
    files: dict[str, int]  # path to size in bytes
    card: str
    left_out: list[str]  # what else lies in the folder
    url: str | None = None  # of the commit or pull request; `None` after a dry run
    notes: list[str] = field(default_factory=list)  # what whoever loads it will miss

    def __str__(self):
        lines = [f"{size:>15,}  {name}" for name, size in self.files.items()]
        done = f"Uploaded to {self.url}" if self.url else f"Dry run: to {self.repo_id} would go"
        left = ["", "Stay here: " + ", ".join(self.left_out)] if self.left_out else []
        left += ["", *(f"Note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(
            [done, *lines, f"{sum(self.files.values()):>15,}  bytes in all", *left, "", "README.md", "", self.card]
        )


def push(
    model_or_folder: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
    license: str | None = None,
    fidelity: Any = None,
    tokenizer: Any = None,
    ignore_patterns: list[str] | None = None,
    extra_files: list[str] | None = None,
    dry_run: bool = True,
) -> Push:
    """
    Upload a converted checkpoint with its code and a model card to the Hub, in one commit.

    Of a folder only what a checkpoint is made of is uploaded: weights, configs, tokenizer, the code that the configs name, the card
    and what it is made from. Optimizers, states, logs, other folders, hidden files, links to elsewhere, further weights, and what
    else lies there stay; of `fidelity.json`, `run.json` and `all_results.json` goes what the card tells of them, if they are of
    this conversion.

    Args:
        model_or_folder (`PreTrainedModel`, `str` or `os.PathLike`): a converted model, or the folder of one. It stays as it is.
        repo_id (`str`): `"name/model"`; made if there is none.
        private (`bool`, *optional*): whether a new repository is private; by default as the account has it.
        commit_message, commit_description (`str`, *optional*): of the commit.
        create_pr (`bool`, *optional*, defaults to `False`): open a pull request instead of changing the branch.
        revision (`str`, *optional*): the branch; made if there is none.
        token (`str` or `bool`, *optional*): by default that of `hf auth login`.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): of the weights of a model.
        tags, license (*optional*): for the card; the licence is by default that of the source, if it is known.
        fidelity ([`FidelityReport`] or `dict`, *optional*): figures for the card, and `fidelity.json`; see
            [`~model_card.write_card`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): uploaded with a model.
        ignore_patterns (`list[str]`, *optional*): files to leave out, too.
        extra_files (`list[str]`, *optional*): patterns of other files of the folder to upload, such as `["images/*.png"]`.
        dry_run (`bool`, *optional*, defaults to `True`): upload nothing, and say what would be uploaded.

    Returns:
        [`Push`]: the files with their sizes, what stays, notes, the card, and the address of the commit.

    Raises:
        [`NormSwapError`]: for what is not a converted checkpoint, or one that a stranger could not load: with weights or code
            that lack something or are not what the config says. Nothing is uploaded then. Also if the Hub cannot be reached.
    """
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    with TemporaryDirectory() as scratch:
        if isinstance(model_or_folder, (str, os.PathLike)):
            folder = Path(model_or_folder).expanduser()
            if tokenizer is not None:
                raise NormSwapError("`tokenizer` goes with a model: save it into the folder.")
        else:
            model, folder = check_model(unwrap(model_or_folder)), Path(scratch)
            if not is_converted(model):
                raise NormSwapError(
                    f"{type(model).__name__} is not a converted model: `convert_checkpoint` makes one."
                )
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        config = load_config(folder)
        with told(f"{folder} is no whole checkpoint"):
            check_whole(folder, config)
        names, left_out, notes = list_files(folder, ignore_patterns or [], extra_files or [])
        files: dict[str, Any] = {name: folder / name for name in names}
        check_uploaded(folder, files)
        figures = figures_of(fidelity, config) or stored_figures(folder, config)
        with left_alone(f"the card of {folder} or {repo_id}"):
            former = card_to_keep(folder, repo_id, revision, token, dry_run)
            card = merge(former, folder, config, figures, repo_id=repo_id, tags=tags, license=license)
        run = public_run(read_json(folder / "run.json"))
        public: dict[str, Any] = {"README.md": card.encode()}
        if run["conversion"] == mark_of(config):
            public |= {"run.json": as_bytes(run), "curves.png": folder / "curves.png"}
            public["all_results.json"] = as_bytes(public_results(read_json(folder / "all_results.json")))
        if figures is not None:
            public["fidelity.json"] = as_bytes({**figures, "conversion": mark_of(config)})
        given = {"README.md"} if fidelity is None else {"README.md", "fidelity.json"}
        left_out = sorted([*left_out, *(name for name in RESULTS if name in files and name not in public)])
        files = {name: file for name, file in files.items() if name not in RESULTS}
        files |= {name: data for name, data in public.items() if name in names or name in given}
        if not any(re.fullmatch(TOKENIZER, name) for name in files):
            notes.append("there is no tokenizer: save it into the folder, or pass `tokenizer`.")
        if figures is not None and figures["tokens"] < FEW_TOKENS:
            notes.append(f"the figures are of {figures['tokens']} tokens: {FEW_TOKENS:,} or more say how good it is.")
        sizes = {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in sorted(files.items())
        }
        result = Push(repo_id, sizes, card, left_out, notes=notes)
        if dry_run:
            logger.warning(f"Dry run: nothing was uploaded to {repo_id}. `dry_run=False` (--no-dry-run) uploads it.")
            return result

        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi(token=token, library_name="hf_normswap")
        with reaching():
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            commit = api.create_commit(  # `upload_folder` may make several
                repo_id,
                [CommitOperationAdd(name, file) for name, file in sorted(files.items())],
                commit_message=commit_message or f"Upload {config.architectures[0]} with norm placement",
                commit_description=commit_description,
                create_pr=create_pr,
                revision=revision,
            )
        result.url = commit.pr_url or commit.commit_url
        return result


def as_bytes(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=2).encode() + b"\n"


@contextlib.contextmanager
def reaching():
    """A Hub that cannot be reached, in one sentence; what it answers stays as it is."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except HfHubHTTPError:
        raise
    except (
        OfflineModeIsEnabled,
        HfHubHTTPError.__mro__[1],
    ) as error:  # the `HTTPError` of httpx, or of what took its place
        raise NormSwapError(f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error}).") from error


def list_files(
    folder: Path, ignore_patterns: list[str], extra_files: list[str]
) -> tuple[list[str], list[str], list[str]]:
    """The files of a folder to upload, all others, and what is to be said of `extra_files`."""
    root = folder.resolve()
    homes = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)  # of the Hub's cache
    weights = weights_name(folder)
    known = {*UPLOADED, *RESULTS, *modules(folder), weights}
    known |= {f"{path}/{name}" for path in encoder_modules(folder) for name in ("config.json", *NAMES)}
    known |= {path.name for path in shard_files(folder)}
    uploaded: list[str] = []
    left_out: list[str] = []
    for directory, folders, files in os.walk(folder):
        place = Path(directory).relative_to(folder)
        closed = {
            name for name in folders if name.startswith((".", "__pycache__")) or (folder / place / name).is_symlink()
        }
        folders[:] = sorted({*folders} - closed)
        left_out += [(place / name).as_posix() + "/" for name in closed]
        for name in sorted(files):
            path, name = folder / place / name, (place / name).as_posix()
            wanted = name in known or re.fullmatch(PATTERNS, name) or matches(name, extra_files)
            inside = path.is_file() and any(path.resolve().is_relative_to(home) for home in homes)
            goes = wanted and inside and path.name[0] != "." and not matches(name, ignore_patterns)
            (uploaded if goes else left_out).append(name)
    lost = [pattern for pattern in extra_files if not any(fnmatch(name, pattern) for name in uploaded)]
    notes = [
        f"nothing goes for {pattern!r} of `extra_files`: no file has such a name, or it is hidden, a link, or ignored."
        for pattern in lost
    ]
    return sorted(uploaded), sorted(left_out), notes


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def encoder_modules(folder: Path) -> dict[str, str]:
    """The folders of the further modules of a sentence-transformers model, with their kinds."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        parts = json.loads((folder / "modules.json").read_bytes()) if (folder / "modules.json").is_file() else []
        named = [(str(part.get("path")), str(part.get("type"))) for part in parts if isinstance(part, dict)]
        return {path: kind.rpartition(".")[2] for path, kind in named if re.fullmatch(r"\w[\w.-]*", path)}
    return {}


def modules(folder: Path) -> dict[str, set[str]]:
    """The files with code that the configs of a folder name and that these import, with the names that each has to define."""
    found: dict[str, set[str]] = {}
    todo: list[tuple[str, str]] = []
    for config in CODE_CONFIGS:
        auto_map = read_json(folder / config).get("auto_map")
        classes = auto_map.values() if isinstance(auto_map, dict) else []
        for one in classes:
            named = [name for name in (one if isinstance(one, list) else [one]) if isinstance(name, str)]
            todo += [
                (file, name) for file, _, name in (one.rpartition(".") for one in named) if re.fullmatch(r"\w+", file)
            ]
    while todo:
        module, name = todo.pop()
        if (file := f"{module}.py") not in found:
            found[file] = set()
            todo += [(other, one) for other, names in relative_imports(folder / file).items() for one in [*names, ""]]
        found[file] |= {name} - {""}
    return found


def parse(path: Path) -> ast.Module:
    with told(f"{path} is no whole file of code"):
        return ast.parse(path.read_bytes() if path.is_file() else b"")


def relative_imports(path: Path) -> dict[str, list[str]]:
    """The files beside a file that it imports from, with the names."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module is None:
                found |= {alias.name: [] for alias in node.names}
            else:
                found.setdefault(node.module, []).extend(alias.name for alias in node.names if alias.name != "*")
    return found


def defined(path: Path) -> set[str]:
    """The names that a file of code defines at its top; `__getattr__` may define any."""
    names: set[str] = set()
    todo: list[ast.AST] = [*parse(path).body]
    for node in todo:
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            todo += ast.iter_child_nodes(node)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return names


def check_whole(folder: Path, config: Any):
    """Refuse a folder whose weights are not those that its config needs, or whose config names other code than ours."""
    check_folder(folder)
    if (index := f"{weights_name(folder)}.index.json") in NAMES and (folder / index).is_file():
        raise NormSwapError(
            f"{folder} has {weights_name(folder)} and {index}: remove the one that is not the model's."
        )
    if getattr(config, "quantization_config", None) is None:
        Checkpoint(folder, named_class(config, folder), config)
    else:
        read_shards(folder)
    auto_map = read_json(folder / "config.json").get("auto_map") or {}
    ours, name = modeling_normswap.auto_map(type(config)), str((config.architectures or [None])[0])
    strange = not isinstance(auto_map, dict) or any(ours.get(key, value) != value for key, value in auto_map.items())
    if strange or auto_map.get("AutoConfig") != ours["AutoConfig"] or f"{MODULE}.{name}" not in auto_map.values():
        raise NormSwapError(
            f"the `auto_map` of {folder / 'config.json'} does not name the classes of hf_normswap that `trust_remote_code` "
            "needs: load it and save it again."
        )


def check_uploaded(folder: Path, files: dict[str, Any]):
    """Refuse files that lack weights or code, and those that are cut off."""
    weights = {weights_name(folder), *(path.name for path in shard_files(folder))}
    needed = modules(folder)
    if missing := sorted({*weights, *needed} - files.keys()):
        raise NormSwapError(
            f"{folder} lacks {', '.join(missing)}, or they are links or ignored: load it and save it again."
        )
    for name, names in needed.items():
        lost = set() if "__getattr__" in (there := defined(folder / name)) else names - there
        if lost or not there:
            raise NormSwapError(
                f"{folder / name} does not define {', '.join(sorted(lost)) or 'anything'}, which other code here needs: load it "
                "and save it again."
            )
    for name in [name for name in files if name.endswith(".safetensors")]:
        read_header(folder / name)
    for path, kind in encoder_modules(folder).items():
        if kind in TRAINED and not files.keys() & {f"{path}/{one}" for one in NAMES}:
            raise NormSwapError(f"{folder / path} lacks the weights of a {kind}: load it and save it again.")
    for name in [name for name in files if name.endswith(".json") and name not in (*RESULTS, *weights)]:
        with told(f"{folder / name} is no whole file of JSON"):
            json.loads((folder / name).read_bytes())


def card_to_keep(folder: Path, repo_id: str, revision: str | None, token, dry_run: bool) -> str:
    """The card to bring up to date: that of the folder if somebody wrote in it, else that on the Hub if there is one."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    local = read_text(folder / "README.md")
    if local and BEGIN not in local:
        return local
    try:
        with reaching():  # once: a client that tries again makes a dry run without a network wait
            url, headers = hf_hub_url(repo_id, "README.md", revision=revision), build_hf_headers(token=token)
            answer = get_session().get(url, headers=headers, timeout=WAIT, follow_redirects=True)
    except NormSwapError as error:
        if not dry_run:
            raise
        logger.info(f"No card of {repo_id} was read ({error}).")
        return local
    if answer.status_code == 200:
        return answer.content.decode("utf-8-sig")
    if answer.status_code not in (401, 403, 404) and not dry_run:
        raise ValueError(f"the card on the Hub could not be read (status {answer.status_code}).")
    return local
