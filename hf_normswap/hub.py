"""Sharing converted checkpoints on the Hub, with a model card."""

import json
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import logging

from .conversion import check_model, is_converted, unwrap
from .model_card import BEGIN, figures_of, left_alone, load_config, merge, public_run, read_json, read_text
from .modeling.placements import NormSwapError

logger = logging.get_logger(__name__)

WEIGHTS = re.compile(
    r"(model|pytorch_model)(\.\w+)?\.(safetensors|bin)(\.index(\.\w+)?\.json)?"
)  # with their variants
UPLOADED = (  # besides the code that a config names: what a checkpoint is made of. Everything else in a folder stays there.
    *("model*.safetensors", "model.safetensors.index*.json", "pytorch_model*.bin", "pytorch_model.bin.index*.json"),
    *(
        "config.json",
        "generation_config.json",
        "*processor_config.json",
        "fidelity.json",
        "run.json",
        "all_results.json",
    ),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
    ),
    *("merges.txt", "*.model", "*.tiktoken", "chat_template.*", "additional_chat_templates/*.jinja"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),  # sentence-transformers
    *("[0-9]*_*/config.json", "[0-9]*_*/model.safetensors", "[0-9]*_*/pytorch_model.bin"),  # its modules
    *("curves.png", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


@dataclass
class Push:
    """What [`push`] uploads, or uploaded. Prints as text."""

    repo_id: str
    files: dict[str, int]  # path to size in bytes
    card: str
    left_out: list[str]  # what else lies in the folder
    url: str | None = None  # of the commit or pull request; `None` after a dry run

    def __str__(self):
        lines = [f"{size:>15,}  {name}" for name, size in self.files.items()]
        done = f"Uploaded to {self.url}" if self.url else f"Dry run: to {self.repo_id} would go"
        left = ["", "Stay here: " + ", ".join(self.left_out)] if self.left_out else []
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
    and what it is made from. Optimizers, states, logs, other folders, hidden files, links to elsewhere, and what else lies there
    stay, and of `run.json` goes what the card tells of it.

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
        fidelity ([`FidelityReport`] or `dict`, *optional*): figures for the card, and `fidelity.json`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): uploaded with a model.
        ignore_patterns (`list[str]`, *optional*): files to leave out, too.
        extra_files (`list[str]`, *optional*): patterns of other files of the folder to upload, such as `["images/*.png"]`.
        dry_run (`bool`, *optional*, defaults to `True`): upload nothing, and say what would be uploaded.

    Returns:
        [`Push`]: the files with their sizes, the card, and the address of the commit.

    Raises:
        [`NormSwapError`]: for what is not a converted checkpoint, or an incomplete one. Nothing is uploaded then.
    """
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    with TemporaryDirectory() as scratch:
        if isinstance(model_or_folder, (str, os.PathLike)):
            folder = Path(model_or_folder)
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
        names, left_out = list_files(folder, ignore_patterns or [], extra_files or [])
        files: dict[str, Any] = {name: folder / name for name in names}
        check_complete(folder, files, left_out)
        with left_alone(f"the card of {folder} or {repo_id}"):
            former = card_to_keep(folder, repo_id, revision, token)
            options = {"repo_id": repo_id, "tags": tags, "license": license}
            card = merge(former, folder, config, figures_of(fidelity), **options)
        files["README.md"] = card.encode()
        if "run.json" in files:
            files["run.json"] = json.dumps(public_run(read_json(folder / "run.json")), indent=2).encode() + b"\n"
        if fidelity is not None:
            files["fidelity.json"] = json.dumps(figures_of(fidelity), indent=2).encode() + b"\n"
        sizes = {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in sorted(files.items())
        }
        result = Push(repo_id, sizes, card, left_out)
        if dry_run:
            logger.warning(f"Dry run: nothing was uploaded to {repo_id}. `dry_run=False` (--no-dry-run) uploads it.")
            return result

        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi(token=token, library_name="hf_normswap")
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


def list_files(folder: Path, ignore_patterns: list[str], extra_files: list[str]) -> tuple[list[str], list[str]]:
    """The files of a folder to upload, and the others but for hidden ones."""
    root = folder.resolve()
    homes = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)  # of the Hub's cache
    code = modules(folder)
    uploaded: list[str] = []
    left_out: list[str] = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if not path.is_file() or any(part.startswith((".", "__pycache__")) for part in parts):
            continue
        name = "/".join(parts)
        known = name in code or any(fits(name, pattern) for pattern in UPLOADED) or matches(name, extra_files)
        inside = any(path.resolve().is_relative_to(home) for home in homes)
        (uploaded if known and inside and not matches(name, ignore_patterns) else left_out).append(name)
    return uploaded, left_out


def fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def modules(folder: Path) -> set[str]:
    """The files with code that the configs of a folder name, with what these import, whether they are there or not."""
    found: set[str] = set()
    for config in folder.glob("*config.json"):
        auto_map = read_json(config).get("auto_map")
        classes = auto_map.values() if isinstance(auto_map, dict) else []
        names = [
            name for one in classes for name in (one if isinstance(one, list) else [one]) if isinstance(name, str)
        ]
        todo = {f"{name.partition('.')[0]}.py" for name in names if re.fullmatch(r"\w+(\.\w+)+", name)}
        while todo := todo - found:
            found |= todo
            there = [folder / name for name in todo if (folder / name).is_file()]
            todo = {f"{name}.py" for path in there for name in get_relative_imports(path) if name.isidentifier()}
    return found


def check_complete(folder: Path, files, left_out):
    """Refuse a folder without all of its weights, or without the code that its config names and what that imports."""
    weights = {name for name in files if WEIGHTS.fullmatch(name)}
    if not weights:
        links = f" (those that lie here are not uploaded: {', '.join(left_out)})" if left_out else ""
        raise NormSwapError(f"{folder} has no weights{links}: save the whole model into it.")
    for index in [name for name in weights if name.endswith(".json")]:
        shards = read_json(folder / index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise NormSwapError(f"{folder / index} does not say where the weights are: save the whole model anew.")
        if missing := sorted({str(shard) for shard in shards.values()} - files.keys()):
            raise NormSwapError(
                f"{folder} lacks {', '.join(missing)}, which {index} names: save the whole model anew."
            )
    for name in [name for name in files if name.endswith(".safetensors")]:
        try:
            with safe_open(folder / name, "pt"):  # checks its length, too
                pass
        except (OSError, SafetensorError) as error:
            raise NormSwapError(
                f"{folder / name} is no whole file of weights ({error}): save the model anew."
            ) from error
    needed = modules(folder)
    if not read_json(folder / "config.json").get("auto_map") or (missing := sorted(needed - files.keys())):
        lacking = ", ".join(missing) if needed else "`auto_map`"
        raise NormSwapError(f"{folder} lacks {lacking}, which `trust_remote_code` needs: load it and save it again.")


def card_to_keep(folder: Path, repo_id: str, revision: str | None, token) -> str:
    """The card to bring up to date: that of the folder if somebody wrote in it, else that on the Hub if there is one."""
    from huggingface_hub import hf_hub_download

    local = read_text(folder / "README.md")
    if local and BEGIN not in local:
        return local
    try:
        return read_text(Path(hf_hub_download(repo_id, "README.md", revision=revision, token=token))) or local
    except Exception as error:  # there is none, or no network; uploading says what is wrong
        logger.info(f"No card of {repo_id} was read ({type(error).__name__}).")
        return local
