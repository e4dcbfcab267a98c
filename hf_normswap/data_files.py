"""Local files as data sets, for the recipes."""

from pathlib import Path
from typing import Any

from datasets import load_dataset

from .modeling.placements import NormSwapError

WORDS: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}  # "NA", "null" and "None" are text
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # ending -> a builder of datasets, and its options
    "txt": ("text", {"keep_linebreaks": True}),
    "csv": ("csv", WORDS),
    "tsv": ("csv", {"delimiter": "\t", **WORDS}),
    **dict.fromkeys(("json", "jsonl"), ("json", {})),
    "parquet": ("parquet", {}),
}


def load_file(file: str, split: str, streaming: bool = False):
    """
    The rows of a local file.

    Args:
        file (`str`): a txt (a row for each line), csv, tsv, json, jsonl or parquet file.
        split (`str`): what it is for.
        streaming (`bool`, *optional*, defaults to `False`): read it when the rows are asked for.

    Returns:
        `datasets.Dataset` or `datasets.IterableDataset`: the rows.

    Raises:
        [`NormSwapError`]: for an unknown ending, and for what is not there, is empty, or cannot be read.
    """
    reader, options = READERS.get(Path(file).suffix[1:].lower(), (None, {}))
    if reader is None:
        raise NormSwapError(f"cannot read {file}: {', '.join(READERS)} files are read.")
    if not Path(file).is_file() or not Path(file).stat().st_size:
        raise NormSwapError(f"{file} is empty, or not there.")
    try:
        return load_dataset(reader, data_files={split: file}, split=split, streaming=streaming, **options)
    except Exception as error:  # its kind differs by the format of the file
        raise NormSwapError(f"{file} cannot be read, or has no rows: {error.__cause__ or error}") from error
