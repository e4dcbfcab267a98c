"""Sharing converted checkpoints on the Hub, with a model card."""

import json
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.utils import logging

from .conversion import check_model, is_converted, unwrap
from .model_card import BEGIN, figures_of, load_config, merge, read_text
from .modeling.placements import NormSwapError

logger = logging.get_logger(__name__)

IGNORED = ("checkpoint-*", "base_model/*", "runs/*", "state/*", "*.log")  # of a recipe's folder
WEIGHTS = ("*.safetensors", "*.bin")


@dataclass
class Push:
    """What [`push`] uploads, or uploaded. Prints as text."""

    repo_id: str
    files: dict[str, int]  # path to size in bytes
    card: str
    url: str | None = None  # of the commit or pull request; `None` after a dry run

    def __str__(self):
        lines = [f"{size:>15,}  {name}" for name, size in self.files.items()]
        done = f"Uploaded to {self.url}" if self.url else f"Dry run: to {self.repo_id} would go"
        return "\n".join(
            [done, *lines, f"{sum(self.files.values()):>15,}  bytes in all", "", "README.md", "", self.card]
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
    dry_run: bool = True,
) -> Push:
    """
    Upload a converted checkpoint with its code and a model card to the Hub, in one commit.

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
        ignore_patterns (`list[str]`, *optional*): files of a folder to leave out; by default checkpoints and logs of training.
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
        files: dict[str, Any] = {name: folder / name for name in list_files(folder, ignore_patterns)}
        check_complete(folder, files, config)
        card = merge(
            card_to_keep(folder, repo_id, revision, token),
            folder,
            config,
            figures_of(fidelity),
            repo_id=repo_id,
            tags=tags,
            license=license,
        )
        files["README.md"] = card.encode()
        if fidelity is not None:
            files["fidelity.json"] = json.dumps(figures_of(fidelity), indent=2).encode() + b"\n"
        sizes = {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in sorted(files.items())
        }
        result = Push(repo_id, sizes, card)
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


def list_files(folder: Path, ignore_patterns: list[str] | None) -> list[str]:
    """The files of a folder to upload, hidden ones left out."""
    patterns = IGNORED if ignore_patterns is None else ignore_patterns
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    visible = [
        path.as_posix() for path in paths if not any(part.startswith((".", "__pycache__")) for part in path.parts)
    ]
    return [name for name in visible if not any(fnmatch(name, pattern) for pattern in patterns)]


def check_complete(folder: Path, files, config):
    """Refuse a folder without weights, or without the code that its config names."""
    if not any(fnmatch(name, pattern) for name in files for pattern in WEIGHTS):
        raise NormSwapError(f"{folder} has no weights: save the whole model into it.")
    modules = {f"{name.rpartition('.')[0]}.py" for name in (getattr(config, "auto_map", None) or {}).values()}
    if not modules or (missing := sorted(modules - files.keys())):
        lacking = ", ".join(missing) if modules else "`auto_map`"
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
