"""The command line: `normswap list | convert | verify | revert | advise | diagnose | fidelity | push`."""

import contextlib
import dataclasses
import json
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Change the norm placement of pretrained Transformers models, and change it back.",
)
console = Console()
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if there is one.")]
ShardSize = Annotated[
    str | None, typer.Option(help="The most bytes in a file of weights, a number or 5GB; by default as in the source.")
]


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Turn an expected error into one line on stderr and exit code 2. What only a fault of ours raises keeps its traceback: a
    `KeyError`, an `AttributeError`, ..., and a `TypeError` but for those of libraries, which files of others can provoke."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    expected = (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
        MemoryError,
        ImportError,
        SafetensorError,
        StrictDataclassError,
    )
    try:
        yield
    except expected as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, TypeError) and Path(__file__).parent in raised_in.parents:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"Error: {message[:600]}", err=True)
        raise typer.Exit(2) from None


def check_input(source: str):
    """Refuse a folder that is not there or holds no model, before anything is loaded."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not list(path.glob("*.gguf")):
            raise ValueError(f"{source} has no config.json, so it is not a checkpoint folder.")
    elif path.exists():
        raise ValueError(f"{source} is a file: give the folder that holds config.json.")
    elif source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise ValueError(f"{source} is neither a folder nor a model id of the form name/model.")


def parse_layers(text: str | None) -> list[int] | None:
    """`"0-3,8,-1"` as a list of layers."""
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(-?\d{1,6})\s*|\s*(\d{1,6})-(\d{1,6})\s*", part)
        if found is None:
            raise ValueError(f"cannot read layers {text!r}: write numbers and ranges, such as 0-3,8,-1.")
        single, start, end = found.groups()
        if single is None and int(end) < int(start):
            raise ValueError(f"the layers {start}-{end} are none: write the lower one first.")
        layers += range(int(start), int(end) + 1) if single is None else [int(single)]
    return layers


def read_texts(path: Path, option: str = "--calibration") -> list[str]:
    """The lines of a text file that are not empty."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: `{option}` takes a text file.")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_data(path: Path) -> Any:
    """A file as data to measure on: csv, tsv, json, jsonl and parquet by their column `text`, any other as one running text."""
    from .data_files import READERS, load_file

    if not path.is_file():
        raise ValueError(f"there is no file {path}: `--data` takes one.")
    kind = path.suffix[1:].lower()
    if kind in READERS and kind != "txt":
        rows = load_file(str(path), "data")
        if "text" not in rows.column_names:
            raise ValueError(f"{path} has the columns {', '.join(rows.column_names)}: `--data` needs a column `text`.")
        return rows.select_columns("text")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{path} is no text in UTF-8: `--data` takes text, csv, tsv, json, jsonl and parquet files.")
    if not text.strip():
        raise ValueError(f"{path} is empty.")
    return text


def read_json(path: Path, option: str) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of its encoding
        raise ValueError(f"`{option}`: {path} is no JSON ({error}).") from None


def show(data, text: str, as_json: bool):
    typer.echo(json.dumps(data, indent=2) if as_json else text)


@app.command("list")
def list_(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option(help="Print the tables of the README.")] = False,
):
    """List placements and architectures.

    [dim]Example:[/dim] normswap list
    """
    from .modeling.architectures import ARCHITECTURES
    from .modeling.placements import PLACEMENTS

    if markdown:
        print("```text")
        print("\n\n".join(f"{name}: {row.formula}\n\n{row.diagram}" for name, row in PLACEMENTS.items()))
        print(f"```\n\n| architecture | {' | '.join(PLACEMENTS)} |\n|---|{':-:|' * len(PLACEMENTS)}")
        for name, stock in ARCHITECTURES.items():
            print(f"| {name} | {' | '.join('native' if stock.native == key else '✓' for key in PLACEMENTS)} |")
        return

    if as_json:
        placements = {name: {"formula": row.formula, "paper": row.paper} for name, row in PLACEMENTS.items()}
        typer.echo(json.dumps({"placements": placements, "architectures": list(ARCHITECTURES)}, indent=2))
        return
    table = Table("placement", "formula", "paper", show_lines=True)
    for name, row in PLACEMENTS.items():
        table.add_row(name, f"{row.formula}\n[dim]{row.diagram}[/dim]", row.paper)
    console.print(table)
    table = Table("architecture", "native placement")
    for name, architecture in ARCHITECTURES.items():
        table.add_row(name, architecture.native)
    console.print(table)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint folder or a model id.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    placement: Annotated[
        str, typer.Option(help="A placement, or one per layer with commas between: post,post,pre,gated.")
    ],
    layers: Annotated[str | None, typer.Option(help="Convert only these layers, such as 0-3,8,-1.")] = None,
    warm_start: Annotated[
        str,
        typer.Option(
            help="none: weights as they are; calibrated: fitted on text; exact: the function of the source, for NormMorph."
        ),
    ] = "none",
    calibration: Annotated[
        Path | None, typer.Option(help="A file with a text per line, some thousand tokens. By default 650 of English.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="DeepNorm's skip gain, if not by depth.")] = None,
    gate: Annotated[float | None, typer.Option(help="What gates start from: 0 is pre, 1 is post.")] = None,
    dual_scale: Annotated[float | None, typer.Option(help="Scale of ResiDual's second stream (fp16: 0.05).")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="The GGUF file in the folder, if it is one.")] = None,
    overwrite: Overwrite = False,
    max_shard_size: ShardSize = None,
    as_json: AsJson = False,
):
    """Convert a checkpoint to another norm placement, with its tokenizer and generation files.

    [dim]Examples:[/dim]

    normswap convert ./minilm ./minilm-pre --placement pre

    normswap convert ./smollm2 ./smollm2-post --placement post --warm-start calibrated

    normswap convert ./smollm2 ./smollm2-mix --placement post --layers 0-7
    """
    from transformers import AutoConfig

    from .conversion import convert_checkpoint
    from .modeling.architectures import get_architecture
    from .modeling.placements import canonical_spec

    with one_sentence():
        spec = canonical_spec(placement.split(",") if "," in placement else placement)
        check_input(source)
        options: dict = {"norm_alpha": alpha, "norm_gate": gate, "norm_dual_scale": dual_scale}
        gguf = {} if gguf_file is None else {"gguf_file": gguf_file}
        options = {key: value for key, value in options.items() if value is not None} | gguf
        if calibration is not None:
            options["calibration"] = read_texts(calibration)
        options |= {"output_dir": target, "overwrite": overwrite, "max_shard_size": max_shard_size}
        folder = convert_checkpoint(source, spec, warm_start=warm_start, layers=parse_layers(layers), **options)
        config = AutoConfig.from_pretrained(folder)
    data = {"class": config.architectures[0], "norm_placement": config.norm_placement, "folder": str(folder)}
    placed = config.norm_placement
    if config.norm_target is not None:
        data["norm_target"] = config.norm_target
        placed = f"{get_architecture(config).native}, on the way to {config.norm_target} (NormMorph leads there),"
    show(data, f"{data['class']} with norm placement {placed} is in {folder}", as_json)
    card = (folder / "README.md").read_text(encoding="utf-8").splitlines() if (folder / "README.md").is_file() else []
    for line in card:  # where it lost what its source does
        if line.endswith("train it before you use it."):
            typer.echo(line, err=True)


@app.command()
def revert(
    source: Annotated[str, typer.Argument(help="A converted checkpoint folder or model id.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    overwrite: Overwrite = False,
    max_shard_size: ShardSize = None,
    as_json: AsJson = False,
):
    """Write the stock checkpoint of a converted one: stock class, stock tensors.

    [dim]Example:[/dim] normswap revert ./minilm-pre ./minilm-again
    """
    from transformers import AutoConfig

    from .conversion import revert_checkpoint

    with one_sentence():
        check_input(source)
        folder = revert_checkpoint(source, output_dir=target, overwrite=overwrite, max_shard_size=max_shard_size)
        config = AutoConfig.from_pretrained(folder)
    data = {"class": config.architectures[0], "folder": str(folder)}
    show(data, f"{data['class']} is in {folder}", as_json)


@app.command()
def advise(
    source: Annotated[
        str, typer.Argument(help="A checkpoint folder or a model id, of which only the config is read.")
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="generation, understanding, multi_task, vision, distillation, pretraining, or as in training."
        ),
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="Rows of training data.")] = None,
    budget: Annotated[int | None, typer.Option(help="Optimizer steps that can be spent, healing included.")] = None,
    priority: Annotated[list[str] | None, typer.Option(help="latency or int8; may be given twice.")] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="JSON with results of hf_normswap.diagnostics, or what `diagnose -o report.json` writes."),
    ] = None,
    as_json: AsJson = False,
):
    """Rank the norm placements for a model and a task, with warm start, settings, reasons and sources.

    [dim]Examples:[/dim]

    normswap advise ./minilm --task classification --num-samples 3668

    normswap advise ./minilm --priority int8 --measured report.json
    """
    from .advice import advise as run

    with one_sentence():
        check_input(source)
        results = None if measured is None else read_json(measured, "--measured")
        advice = run(source, task, num_samples, budget, results, priorities=priority or ())
    show(advice.to_dict(), str(advice), as_json)


@app.command()
def diagnose(
    source: Annotated[str, typer.Argument(help="A checkpoint folder or a model id.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text, some thousand tokens; csv, tsv, json, jsonl and parquet with a column text. By default 650 tokens of English."
        ),
    ] = None,
    compare: Annotated[str, typer.Option(help="Placements, with commas between.")] = "post,pre,deepnorm,resi_dual",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A page (.html) or data (.json) to write.")
    ] = None,
    warm_start: Annotated[
        str | None,
        typer.Option(
            help="Of the conversions: none, calibrated or exact; by default exact where nothing has to move, else calibrated."
        ),
    ] = None,
    measures: Annotated[str | None, typer.Option(help="Only these, with commas between: collapse,cost.")] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="More tokens and repeats, every layer by itself, training runs: hours.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="How many tokens to measure.")] = None,
    task: Annotated[str | None, typer.Option(help="As in advise.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="As in advise.")] = None,
    budget: Annotated[int | None, typer.Option(help="As in advise.")] = None,
    priority: Annotated[list[str] | None, typer.Option(help="As in advise.")] = None,
    as_json: AsJson = False,
):
    """Measure a model and its conversions side by side: a page with plots, tables and advice.

    [dim]Examples:[/dim]

    normswap diagnose ./minilm --data corpus.txt -o report.html

    normswap diagnose ./smollm2 --data corpus.txt --compare post,deepnorm -o report.json
    """
    from .report import check_target
    from .report import diagnose as run

    with one_sentence():
        check_input(source)
        if output is not None:
            check_target(output)
        diagnosis = run(
            source,
            None if data is None else read_data(data),
            compare=compare.split(","),
            warm_start=warm_start,
            measures=None if measures is None else measures.split(","),
            thorough=thorough,
            max_tokens=max_tokens,
            task=task,
            num_samples=num_samples,
            budget=budget,
            priorities=priority or (),
        )
        if data is not None:
            diagnosis.about["data"] = data.name
        if output is not None:
            diagnosis.save(output)
    show(diagnosis.to_dict(), str(diagnosis) + (f"\n\nin {output}" if output else ""), as_json)


@app.command()
def verify(
    source: Annotated[str, typer.Argument(help="A checkpoint folder or a model id.")],
    as_json: AsJson = False,
):
    """Check that a converted checkpoint is sound; exit code 1 if it is not.

    [dim]Example:[/dim] normswap verify ./minilm-pre
    """
    from .verification import verify as run

    with one_sentence():
        check_input(source)
        report = run(source)
    show(report.to_dict(), str(report), as_json)
    sys.exit(0 if report else 1)


@app.command()
def fidelity(
    source: Annotated[str, typer.Argument(help="The source: a checkpoint folder or a model id.")],
    converted: Annotated[Path, typer.Argument(help="The folder of its conversion; its card gets the figures.")],
    data: Annotated[Path, typer.Option(help="A file with a text per line that the conversion was not calibrated on.")],
    name: Annotated[
        str | None, typer.Option(help="What the card calls that text; by default the file's name.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="How many tokens to compare.")] = 4096,
    as_json: AsJson = False,
):
    """Measure what a converted checkpoint kept of its source, and write it into its model card.

    [dim]Example:[/dim] normswap fidelity ./smollm2 ./smollm2-post --data held_out.txt
    """
    from .calibration import token_batches
    from .conversion import load_model
    from .model_card import load_config, write_card
    from .modeling.modeling_normswap import NormSwapModel
    from .modeling.placements import NormSwapError
    from .verification import fidelity as run

    with one_sentence():
        check_input(source)
        load_config(converted)
        texts, model = read_texts(data, "--data"), load_model(source)
        if isinstance(model, NormSwapModel):
            raise NormSwapError(f"{source} is itself converted: name the model that {converted} was made from.")
        batches = list(token_batches(texts, model, max_tokens=max_tokens))
        report = run(model, load_model(converted), batches)
        card = write_card(converted, fidelity={**report.to_dict(), "data": name or data.name})
    show(report.to_dict(), f"{report}\n\nin {card}", as_json)


@app.command()
def push(
    source: Annotated[Path, typer.Argument(help="A folder with a converted checkpoint.")],
    repo_id: Annotated[str, typer.Argument(help="Where it goes on the Hub: name/model.")],
    dry_run: Annotated[bool, typer.Option(help="Only show the files and the card that would be uploaded.")] = True,
    private: Annotated[bool | None, typer.Option(help="Whether a new repository is private.")] = None,
    commit_message: Annotated[str | None, typer.Option(help="Of the one commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch.")] = None,
    tags: Annotated[str | None, typer.Option(help="More tags for the card, with commas between.")] = None,
    license: Annotated[str | None, typer.Option(help="By default that of the source, if it is known.")] = None,
    extra_files: Annotated[
        list[str] | None,
        typer.Option(help="A pattern of more files to upload, such as 'images/*.png'; may be given twice."),
    ] = None,
    ignore_patterns: Annotated[
        list[str] | None, typer.Option(help="A pattern of files to leave out; may be given twice.")
    ] = None,
    as_json: AsJson = False,
):
    """Upload a converted checkpoint with its code and a model card to the Hub, in one commit.

    [dim]Examples:[/dim]

    normswap push ./minilm-pre me/minilm-pre

    normswap push ./minilm-pre me/minilm-pre --no-dry-run
    """
    from .hub import push as run

    with one_sentence():
        check_input(str(source))
        result = run(
            source,
            repo_id,
            private=private,
            commit_message=commit_message,
            create_pr=create_pr,
            revision=revision,
            tags=tags.split(",") if tags else None,
            license=license,
            extra_files=extra_files,
            ignore_patterns=ignore_patterns,
            dry_run=dry_run,
        )
    show(dataclasses.asdict(result), str(result), as_json)


if __name__ == "__main__":
    app()
