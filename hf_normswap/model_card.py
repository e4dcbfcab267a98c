"""Model cards of converted checkpoints: what it is, where it is from, how good, how to load it, how to go back.

In a README.md our text lies between two comments, and only what is there is written again; in the metadata, what somebody else
set or removed stays so.
"""

import contextlib
import functools
import json
import os
import re
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .modeling.architectures import get_architecture
from .modeling.modeling_normswap import NormSwapConfig, NormSwapModel, config_class
from .modeling.placements import PLACEMENTS, NormSwapError, Placement, get_placement
from .modeling.surgery import placements_of, resolved

logger = logging.get_logger(__name__)

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
BEGIN = "<!-- hf_normswap: begin; up to the end mark this is written anew at every save -->"
END = "<!-- hf_normswap: end"
PIPELINES = {  # of the first Auto class that makes the model, as the Hub calls tasks
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForNextSentencePrediction": None,
    "AutoModelForPreTraining": None,
    "AutoModel": "feature-extraction",
}
CARRIED = {  # from the source's card, if it, or each of a list, is a text like this
    "license": r"(?!null$)[\w.+-]{1,100}",
    "license_name": r"(?!null$)[\w.+-]{1,100}",
    "license_link": r"https?://[\w.+:/~#?=&%@-]{1,300}",
    "language": r"(?!null$)[\w-]{1,40}",
}
LONGEST_CARD, LONGEST_LIST = 2**22, 500  # characters and values of a source's card, far beyond what true ones have
LONGEST_TEXT, LONGEST_JSON = 200, 2**25  # characters of a name, and bytes of a file of results
# Nearer than this, a model stands in for its source: 0.1 nats are a tenth more perplexity, and at a cosine of 0.9 two vectors
# of one length differ by 0.45 of it. Closer than `SAME`, they differ by rounding.
NEAR, SAME = {"loss": 0.1, "cosine": 0.9}, 0.9999
FIGURES = (
    "source_loss",
    "converted_loss",
    "kl",
    "top1_agreement",
    "tokens",
    "hidden_cosine",
    "sentence_cosine",
    "drift",
)
REPO_ID = r"[\w.-]+(/[\w.-]+)?"
SOURCE_KEYS = ("source", "base_model", *CARRIED)  # in `norm_conversion` of a config
SETTINGS = ("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "weight_decay", "norm_eps")
ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_train_steps",
    "max_train_samples",
    "seed",
)
DATA = ("task_name", "train_file", "validation_file")
STARTS = {
    "none": "the weights as they were",
    "calibrated": "a calibrated start: weights for the new placement were fitted, in closed form and without training, to what "
    "the source computes on {text}",
    "exact": "an exact start, which computes what the source does",
}


def describe_source(name_or_path: str) -> dict[str, Any]:
    """What is known of a source by the name it was loaded with: `source`, its name; `base_model`, if it is on the Hub; and what its
    card says of licence and language. Nothing that is not known is in it."""
    if name_or_path in ("", "None"):
        return {}
    path, repo_id, card = Path(name_or_path).expanduser(), None, None
    if path.is_dir():
        cached = re.search(r"models--([^/]+)/snapshots/", path.as_posix() + "/")
        repo_id = cached[1].replace("--", "/", 1) if cached else None
        card = path / "README.md"
    elif re.fullmatch(REPO_ID, name_or_path):
        from huggingface_hub import try_to_load_from_cache

        repo_id, found = name_or_path, try_to_load_from_cache(name_or_path, "README.md")
        card = Path(found) if isinstance(found, str) else None
    known = {"source": repo_id or path.absolute().name} | ({"base_model": repo_id} if repo_id else {})
    try:
        metadata = read_metadata(read_text(card, LONGEST_CARD), as_text=True)[1] if card is not None else {}
    except (OSError, ValueError):  # nobody's business here
        metadata = {}
    return known | carried(metadata)


def carried(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What is taken over of somebody's metadata, or of a record: what has the form of a licence or of languages."""

    def fits(key, value):
        values = value if isinstance(value, list) else [value]
        texts = all(isinstance(one, str) and re.fullmatch(CARRIED[key], one) for one in values)
        return 0 < len(values) <= LONGEST_LIST and texts

    return {key: metadata[key] for key in CARRIED if key in metadata and fits(key, metadata[key])}


def plain(value: Any) -> Any:
    """Names and texts that others wrote, also in lists and `dict`s, without what Markdown or HTML would take for a mark of its own.
    All that a card takes from files goes through here."""
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, str):
        return value
    value = value[:LONGEST_TEXT].replace("://", " ")  # addresses are links without any mark
    return " ".join("".join(char if char.isprintable() and char not in "<>[]()|`" else " " for char in value).split())


@contextlib.contextmanager
def left_alone(what: Any):
    """Whatever goes wrong with a card, for what others wrote in it or beside it, as one sentence."""
    try:
        yield
    except NormSwapError:
        raise
    except Exception as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise NormSwapError(f"{what} was left as it is: {reason}") from error


def note_training(config, name: str, steps: int):
    """Add steps that led from a conversion to what a config stands for to what it says about that conversion."""
    if config.norm_conversion:
        config.norm_conversion = {**config.norm_conversion, name: steps + config.norm_conversion.get(name, 0)}


def write_card(
    folder: str | os.PathLike,
    config: Any = None,
    *,
    fidelity: Any = None,
    repo_id: str | None = None,
    tags: list[str] | None = None,
    license: str | None = None,
) -> Path:
    """
    Make or update the README.md of a folder with a converted checkpoint.

    What it says comes from the config, and from `fidelity.json`, `run.json` and `all_results.json` if they lie in the folder and say
    that they are of this conversion. A second call changes nothing, and other text and metadata stay as they are. The file is
    replaced at once.

    Args:
        folder (`str` or `os.PathLike`): of the checkpoint.
        config (`PreTrainedConfig` or `dict`, *optional*): by default the `config.json` of the folder.
        fidelity ([`FidelityReport`] or `dict`, *optional*): from now on in `fidelity.json`. As a `dict`, its `to_dict()`, to which
            `data`, the name of the text that was compared, may be added.
        repo_id (`str`, *optional*): where it will lie on the Hub, for the code that loads it.
        tags (`list[str]`, *optional*): more of them.
        license (`str`, *optional*): if not that of the source.

    Returns:
        `Path`: of the README.md.

    Raises:
        [`NormSwapError`]: if the checkpoint is not a converted one, or a README.md that is there, or what the card would be made
            from, cannot be read.
    """
    folder = Path(folder)
    path, config = folder / "README.md", load_config(folder, config)
    figures = figures_of(fidelity, config)
    with left_alone(path):
        former = read_text(path)
        text = merge(former, folder, config, figures, repo_id=repo_id, tags=tags, license=license)
        if figures is not None:
            write_text(folder / "fidelity.json", json.dumps(figures, indent=2) + "\n")
        if text != former:
            write_text(path, text)
    return path


def figures_of(fidelity: Any, config: Any) -> dict[str, Any] | None:
    """A [`FidelityReport`] as `fidelity.json` has it: with the mark of the conversion that it is of."""
    if fidelity is None:
        return None
    figures = fidelity if isinstance(fidelity, dict) else getattr(fidelity, "to_dict", dict)()
    if not complete(figures):
        raise NormSwapError(
            "`fidelity` takes what `hf_normswap.fidelity` returns, or its `to_dict()`: this is neither."
        )
    return {**public_figures(figures), "conversion": mark_of(config)}


def public_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """What of a `fidelity.json` is for others: its numbers, and the name of the text without the folders it lies in."""
    kept = {key: figures[key] for key in FIGURES if key in figures}
    if not (isinstance(drift := kept.get("drift", []), list) and all(map(is_number, drift))):
        del kept["drift"]
    return kept | ({"data": name} if (name := text_name(figures.get("data"))) else {})


def text_name(name: Any) -> str:
    """The name of a text or data set, without the folders in which it lies."""
    if not isinstance(name, str):
        return ""
    if re.fullmatch(REPO_ID, name) and not re.search(r"\.(txt|csv|tsv|jsonl?|parquet|md)$", name):
        return name  # of a data set on the Hub
    return plain(re.split(r"[/\\]", name.rstrip("/\\"))[-1])


def mark_of(config: Any) -> str:
    """A mark of how a model was converted: figures that carry another one are another model's."""
    return fingerprint({key: getattr(config, key) for key in NormSwapConfig.FIELDS})


def load_config(folder: Path, config: Any = None) -> Any:
    """The config of a converted checkpoint, of its class."""
    file = folder / "config.json"
    if config is None and not file.is_file():
        raise NormSwapError(f"{folder} has no config.json, so it is not a checkpoint.")
    if hasattr(config, "stock_model_type"):
        return config
    try:
        fields = (
            config if isinstance(config, Mapping) else json.loads(file.read_text("utf-8")) if config is None else {}
        )
        if str(fields.get("model_type")).startswith("normswap_"):
            return config_class(fields["model_type"].removeprefix("normswap_")).from_dict(dict(fields))
    except Exception as error:  # a config may hold anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise NormSwapError(f"the config of {folder} cannot be used: {reason}") from error
    raise NormSwapError(f"{folder} is not a converted checkpoint: `convert_checkpoint` makes one.")


def merge(former: str, folder: Path, config: Any, fidelity: dict | None = None, **options) -> str:
    """A README.md with our part and metadata brought up to date."""
    from huggingface_hub.utils import yaml_dump

    newline = "\r\n" if 0 < former.count("\n") == former.count("\r\n") else "\n"  # mixed ones stay as they are
    block, metadata, text = read_metadata(former.replace("\r\n", "\n") if newline == "\r\n" else former)
    if is_template(text):
        options["tags"] = [*(options.get("tags") or []), *(metadata.get("tags") or [])]
        metadata = {key: value for key, value in metadata.items() if key not in ("tags", "library_name")}
        block, text = yaml_dump(metadata, sort_keys=False) if metadata else "", ""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if rest and not mark:
        raise ValueError(
            "the end mark of the part that hf_normswap writes is gone; put it back, or remove the begin mark."
        )
    fingerprints, _, after = after.partition("-->") if mark else ("", "", "")
    try:
        written = dict(json.loads(fingerprints or "{}"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "the end mark of the part that hf_normswap writes was changed; remove that part with both marks."
        ) from error

    data, facts = collect(folder, config, fidelity, **options)
    facts["heading"] = not re.search(r"^# ", before + after, re.MULTILINE)
    wanted = data.to_dict()
    # What somebody else set or removed since stays so.
    theirs = {key for key in metadata if key not in written or fingerprint(metadata[key]) != written[key]}
    theirs |= written.keys() - metadata.keys()
    merged = {key: wanted.get(key, value) if key not in theirs else value for key, value in metadata.items()}
    merged = {key: value for key, value in merged.items() if key in theirs or key in wanted}
    added = {key: value for key, value in wanted.items() if key not in metadata and key not in theirs}
    if merged != metadata:
        block = yaml_dump(merged, sort_keys=False).strip()
    header = block.rstrip() if block.strip() else ""  # its lines, comments included, as they are
    header = "\n".join(filter(None, [header, yaml_dump(added, sort_keys=False).strip() if added else ""]))

    part = re.sub(r"\n{3,}", "\n\n", template().render(facts).strip())
    marks = {key: fingerprint(value) for key, value in wanted.items()}
    if not mark:
        before, after = before.rstrip("\n") + "\n\n" if before.strip() else "", "\n"
    text = f"---\n{header}\n---\n{before}{BEGIN}\n\n{part}\n\n{END} {json.dumps(marks)} -->{after}"
    return text.replace("\n", newline) if newline == "\r\n" else text


@functools.cache
def template():
    """The template of our part, compiled."""
    import jinja2

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def collect(folder: Path, config: Any, fidelity=None, *, repo_id=None, tags=None, license=None) -> tuple[Any, dict]:
    """The metadata, as a `ModelCardData`, and what the template needs."""
    from huggingface_hub import EvalResult, ModelCardData

    record = plain(config.norm_conversion or {})
    native, rows = get_architecture(config).native, placements_of(config)
    specs = config.norm_placement if isinstance(config.norm_placement, list) else [config.norm_placement] * len(rows)
    stock_class, auto = classes_of(config)
    source, base_model = record.get("source"), record.get("base_model")
    short = source.rpartition("/")[2] if source else stock_class
    base_model = base_model if re.fullmatch(REPO_ID, base_model or "") else None
    fidelity = stored_figures(folder, config) if fidelity is None else fidelity
    settings, results, data = training(folder, config)
    near = fidelity is not None and distance(fidelity) < 1
    same = fidelity is not None and min(fidelity["hidden_cosine"], fidelity["sentence_cosine"]) > SAME
    quantised = quantisation(config)
    rewritten = '"calibrated"' in json.dumps(record)
    tuned = bool(settings or results)
    healed = any(name in json.dumps(record) for name in ('"healing_steps"', '"morph_steps"'))

    of_source = carried(config.norm_conversion or {})  # as it was written, not what `plain` makes of it
    if license is not None:
        of_source = carried({"license": license, "language": of_source.get("language")})
        if "license" not in of_source:
            raise NormSwapError(f"{license!r} is no licence as the Hub names them, like 'mit' or 'apache-2.0'.")
    metadata: dict[str, Any] = {key: of_source.get(key) for key in CARRIED}
    # Of the Hub's four relations (adapter, merge, quantized, finetune) none is a model with the source's own weights in another
    # structure: it has no relation. One whose weights were fitted or trained on text is called finetune.
    relation = "quantized" if quantised else "finetune" if rewritten or tuned or healed else None
    metadata |= {"base_model": base_model, "base_model_relation": relation if base_model else None}
    metadata |= {"library_name": "transformers", "pipeline_tag": PIPELINES.get(auto)}
    start = specs if config.norm_target is None else record.get("placement", native)  # what a morph leads away from
    names = list(dict.fromkeys(filter(None, map(name_of, start if isinstance(start, list) else [start]))))
    kinds = ["sentence-transformers"] if (folder / "modules.json").is_file() else []
    metadata["tags"] = ["hf_normswap", "norm-placement", *names, *kinds]
    metadata["tags"] += [tags] if isinstance(tags, str) else tags or []
    measured = results if data else {}
    if measured:
        where = {"task_type": PIPELINES.get(auto) or "other", **data}
        metadata["eval_results"] = [
            EvalResult(metric_type=key, metric_value=measured[key], **where) for key in measured
        ]
        metadata["model_name"] = "-".join([short, *names])
    licence = of_source.get("license_name") or of_source.get("license")
    at_gates = config.norm_gate is None or config.norm_gate == PLACEMENTS[native].skip_norm
    moved = not at_gates or any(replace(row, learned=()) != PLACEMENTS[native] for row in rows)
    differing = [(which, spec) for which, spec in groups(specs) if name_of(spec) != native]
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    repo = repo_id or "path/to/this/folder"
    return ModelCardData(**metadata), {
        "title": f"{short} with {title_of(config, start, differing)}",
        "article": "An" if stock_class[0] in "AEIOU" else "A",
        "stock_class": stock_class,
        "shape": f" with {config.num_hidden_layers} layers of width {config.hidden_size}",
        "stock_type": config.stock_model_type,
        "start": quote(start),
        "stand": ", ".join(f"as in {quote(spec)} in {which}" for which, spec in differing)
        if len(groups(specs)) > 1
        else f"as in {quote(specs)}"
        if names
        else "as the formula below says",
        "native": native,
        "target": config.norm_target and quote(config.norm_target),
        "layers": layers_of(specs),
        "placements": [
            describe(spec, config, at_gates) for spec in {json.dumps(spec): spec for spec in specs}.values()
        ],
        "source": f"[{source}](https://huggingface.co/{source})" if source and base_model == source else f"`{source}`",
        "known_source": source is not None,
        "licence": ", ".join(licence if isinstance(licence, list) else [licence]) if licence else None,
        "steps": steps_of(record, config.norm_target or config.norm_placement, len(specs)),
        "rewritten": rewritten,
        "quantised": quantised,
        "tuned": tuned,
        "moved": moved,
        "needs_training": record.get("warm_start") == "none" and moved and not tuned and not healed and not near,
        "far": fidelity is not None and not near and not tuned,
        "same": same,
        "version": version_of(record.get("version")),
        "fidelity": fidelity,
        "results": results,
        "data": data.get("dataset_name"),
        "settings": settings,
        "auto": auto,
        "repo": repo,
        "tokenizer": repo if has_tokenizer else base_model or repo,
        "encoder": bool(kinds),
        "transformers_version": version_of(read_json(folder / "config.json").get("transformers_version")),
    }


def version_of(value: Any) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,40}", value) else None


def quantisation(config: Any) -> str | None:
    """The method by which the weights were quantised, if they were."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", None)
    return plain(str(getattr(method, "value", method)))


def stored_figures(folder: Path, config: Any) -> dict[str, Any] | None:
    """The numbers in a `fidelity.json`, if it has them all and is of this conversion."""
    figures = read_json(folder / "fidelity.json")
    return public_figures(figures) if complete(figures) and figures.get("conversion") == mark_of(config) else None


def distance(figures: dict[str, Any]) -> float:
    """How far a model is from its source, in units of what is near."""
    cosine = min(figures["hidden_cosine"], figures["sentence_cosine"])
    loss = (figures.get("converted_loss") or 0) - (figures.get("source_loss") or 0)
    return max((1 - cosine) / (1 - NEAR["cosine"]), loss / NEAR["loss"])


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def complete(figures: dict[str, Any]) -> bool:
    """Whether these are the numbers of a [`FidelityReport`]; some models have no loss."""
    pairs = [
        (figures.get("source_loss"), figures.get("converted_loss")),
        (figures.get("kl"), figures.get("top1_agreement")),
    ]
    always = all(is_number(figures.get(key)) for key in ("tokens", "hidden_cosine", "sentence_cosine"))
    return always and all(pair == (None, None) or all(map(is_number, pair)) for pair in pairs)


def public_run(run: dict[str, Any]) -> dict[str, Any]:
    """What of a `run.json` is for others: what the card tells, without paths and anything else of the machine."""

    def group(name, keys=None):
        values = run.get(name) if isinstance(run.get(name), dict) else {}
        kept = {key: values[key] for key in values if keys is None or key in keys}
        return {
            key: value for key, value in plain(kept).items() if value is None or isinstance(value, (str, int, float))
        }

    try:
        command = shlex.split(str(run.get("command", "")))
    except ValueError:  # a quote that nobody closed
        command = []
    given = {key.removeprefix("--"): Path(value).name for key, value in zip(command, command[1:])}
    words = [word for key in DATA if key in given for word in (f"--{key}", given[key])]
    return {
        "command": shlex.join(words),
        "arguments": group("arguments", ARGUMENTS),
        "settings": group("settings", SETTINGS),
        "versions": group("versions"),
        **{key: plain(run.get(key)) for key in ("processes", "mixed_precision", "conversion")},
        "data": text_name(run.get("data")) or None,
    }


def public_results(results: dict[str, Any]) -> dict[str, Any]:
    """What of an `all_results.json` is for others: its numbers."""
    return {key: value for key, value in plain(results).items() if is_number(value)}


def training(folder: Path, config: Any) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """The settings, the results and the data of a recipe's run, from its output folder; empty where there are none, or where they
    are not of this conversion."""
    run, results = read_json(folder / "run.json"), public_results(read_json(folder / "all_results.json"))
    numbers = {key: value for key, value in results.items() if not key.startswith(("step", "samples", "train_loss"))}
    parts = all(isinstance(run.get(key), dict) for key in ("settings", "arguments", "versions"))
    if not parts or run.get("conversion") != mark_of(config):
        return {}, {}, {}
    run = public_run(run)
    command = shlex.split(run["command"])
    files = {key.removeprefix("--"): plain(name) for key, name in zip(command[::2], command[1::2])}
    task, data = files.get("task_name"), {}

    def named(file):
        return f"{run['data']} ({file})" if run["data"] and file else file

    if task:
        data = {"dataset_type": "glue", "dataset_name": f"GLUE {task.upper()}", "dataset_config": task}
    elif "validation_file" in files:
        kind = Path(files["validation_file"]).suffix[1:] or "other"
        data = {"dataset_type": kind, "dataset_name": named(files["validation_file"])}
    settings = {key: run["settings"].get(key) for key in SETTINGS} | {
        key: run["arguments"].get(key) for key in ARGUMENTS
    }
    settings |= {"training data": data.get("dataset_name") if task else named(files.get("train_file"))}
    settings |= {"processes": run.get("processes"), "mixed precision": run.get("mixed_precision")}
    settings |= {"versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items())}
    if settings["max_train_steps"]:
        settings["num_train_epochs"] = None  # overridden
    return {key: value for key, value in settings.items() if value not in (None, "")}, numbers, data


def steps_of(record: Any, target: Any, depth: int) -> list[str]:
    """How a model came to be, one sentence for each conversion, the first one first."""
    steps: list[str] = []
    while record:
        text = f"{record['calibration_tokens']:,} tokens" if "calibration_tokens" in record else "some text"
        text += f" of {name}" if (name := text_name(record.get("calibration_data"))) else ""
        start = STARTS.get(record.get("warm_start"), "an unknown start").format(text=text)
        before = record.get("placement")
        pairs = zip(*(spec if isinstance(spec, list) else [spec] * depth for spec in (before, target)))
        changed = [(which, new) for which, (old, new) in groups(list(pairs)) if old != new]
        if isinstance(target, list) and changed:
            way = ": " + ", ".join(f"{which} moved to {quote(new)}" for which, new in changed) + ","
        else:
            way = f" to {quote(target)}"
        text = f"From {quote(before)}{way} with {start}."
        if "morph_steps" in record:
            text += f" A morph led its norms there over {record['morph_steps']:,} steps of training."
        if "healing_steps" in record:
            text += f" Then {record['healing_steps']:,} steps of self-distillation brought it nearer to its source."
        steps.append(text)
        target, record = before, record.get("previous")
    return steps[::-1]


def quote(spec: Any) -> str:
    names = dict.fromkeys(map(name_of, spec if isinstance(spec, list) else [spec]))
    return ", ".join(f"`{name}`" if name else "an unnamed placement" for name in names)


def name_of(spec: Any) -> str | None:
    """The name of a placement, if it has one."""
    return spec if isinstance(spec, str) and spec in PLACEMENTS else None


def groups(values: list) -> list[tuple[str, Any]]:
    """Layers that adjoin and have the same, as `("layers 0 to 2", what they have)`."""
    found, start = [], 0
    for value, members in groupby(values):
        end = start + len(list(members)) - 1
        found.append((f"layer {start}" if end == start else f"layers {start} to {end}", value))
        start = end + 1
    return found


def title_of(config, start: Any, differing: list) -> str:
    def word(spec):
        names = dict.fromkeys(map(name_of, spec if isinstance(spec, list) else [spec]))
        return " and ".join(name or "one without a name" for name in names)

    if config.norm_target is not None:
        return f"norm placement {word(start)}, on its way to {word(config.norm_target)}"
    if len(groups(start)) > 1:
        return " and ".join(f"{which} moved to {word(spec)}" for which, spec in differing)
    return f"norm placement {name_of(start[0])}" if name_of(start[0]) else "a norm placement without a name"


def layers_of(specs: list) -> str | None:
    """Which layers have which placement, if they differ."""
    if len(groups(specs)) == 1:
        return None
    return (
        "From the bottom, counted from 0: "
        + "; ".join(f"{which}: {quote(spec)}" for which, spec in groups(specs))
        + "."
    )


def describe(spec, config, at_gates: bool) -> dict[str, str]:
    """A row of the table of placements, or what the coordinates come to; `here`, what it is in this model."""
    native = get_architecture(config).native
    row = get_placement(spec, native)
    cross = bool(getattr(config, "add_cross_attention", False))
    numbers = resolved(config, row, config.num_hidden_layers * (2 + cross))
    if not isinstance(spec, str):
        return {
            "name": "",
            "formula": formula_of(row, numbers, config.norm_dual_scale),
            "diagram": "",
            "paper": "",
            "here": "",
        }
    here = ""
    if spec == "deepnorm":
        here = f"Here α = {numbers['skip_gain']:.4g}."
    elif spec == "gated":
        start = PLACEMENTS[native].skip_norm if config.norm_gate is None else config.norm_gate
        what = "computes what its source does" if at_gates else "does not compute what its source does"
        here = f"Its gates start at g = {start:g}, where it {what}, and move when it is trained."
    return {key: getattr(row, key) for key in ("name", "formula", "diagram", "paper")} | {"here": here}


def formula_of(row: Placement, numbers: dict[str, float], dual_scale: float) -> str:
    """The formula of the placement space with the numbers of one point in it; what is trained or moved keeps its name."""
    learned = dict(row.learned)
    value = {name: name if name in learned else f"{number:.4g}" for name, number in numbers.items()}

    def mix(name, without, full):
        fixed = {"0": without, "1": full}
        return fixed.get(value[name], f"(1 - {value[name]})·{without} + {value[name]}·{full}")

    def times(name, text):
        return text if value[name] == "1" else f"{value[name]}·({text})" if " " in text else f"{value[name]}·{text}"

    lines = [f"z₀ = {mix('stem_norm', 'embeddings', 'N(embeddings)')}"] if row.uses("stem_norm") else []
    lines += ["y  = N(z)", f"x  = {mix('input_norm', 'z', 'y')}"]
    lines += ["f  = " + times("branch_gain", mix("output_norm", "F(x)", "N'(F(x))"))]
    lines += [f"z' = {mix('skip_norm', 'z', times('skip_gain', 'y'))} + f"]
    if row.uses("dual"):
        factor = "" if dual_scale == 1 else f"{dual_scale:g}·"
        lines += [f"d' = d + {factor}f", f"at the end: N_final(z) + {times('dual', 'N_dual(d)')}"]
    kinds = {"morph": "moved by NormMorph", "branch": "trained, one per branch", "layer": "trained, one per layer"}
    kinds["channel"] = "trained, one per channel"
    return "\n".join([*lines, *(f"{name}: {kinds[kind]}, from {numbers[name]:.4g}" for name, kind in row.learned)])


def classes_of(config) -> tuple[str, str]:
    """The stock class of a converted checkpoint, and the Auto class that makes it."""
    names = [config.architectures[0]] if config.architectures else []
    derived = next((name for name in names if re.fullmatch(r"\w+", str(name))), "")
    table = {auto: str(name).rpartition(".")[2] for auto, name in (getattr(config, "auto_map", None) or {}).items()}
    autos = [auto for auto in (*PIPELINES, *table) if table.get(auto) == derived and auto.isidentifier()]
    return derived.removeprefix("NormSwap") or config.stock_model_type, (autos or ["AutoModel"])[0]


def is_template(text: str) -> bool:
    """Whether a card is the one that Transformers' `push_to_hub` makes where there is none: a form that nobody has filled in."""
    from huggingface_hub import ModelCard, ModelCardData

    sentence = r"This is the model card of [^.\n]* has been pushed on the Hub\. This model card has been automatically generated\."
    if len(parts := re.split(sentence, text)) != 2:
        return False
    form = ModelCard.from_template(ModelCardData(), model_description="\0").text.replace("\r\n", "\n")
    return "\0".join(parts).split() == form.split()


def read_metadata(text: str, as_text: bool = False) -> tuple[str, dict[str, Any], str]:
    """The YAML block of a card, what it says (every value as it is written, if asked for), and the text behind it."""
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    match = REGEX_YAML_BLOCK.search(text)
    if match is None:
        return "", {}, text
    try:
        steps = ({"[": 1, "{": 1, "]": -1, "}": -1}.get(char, 0) for char in match[2])
        if max(accumulate(steps, initial=0)) > 100:  # far beyond a card's; the parser's time grows with the square
            raise ValueError("brackets in more than 100 others")
        if "*" in match[2] and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(match[2])):
            raise ValueError("aliases, which can stand for more than memory holds")
        metadata = yaml.load(match[2], yaml.BaseLoader if as_text else yaml.SafeLoader) or {}
    except Exception as error:  # of values that are no dates, of brackets without end, ...
        raise ValueError(f"its metadata is no YAML that can be used ({' '.join(str(error).split())}).") from error
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is no mapping.")
    return match[2], metadata, text[match.end() :]


def fingerprint(value) -> str:
    """A short mark by which a value that we wrote is known again."""
    return f"{zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode()):08x}"


def read_text(path: Path, limit: int = -1) -> str:
    if not path.is_file():  # a pipe would be waited for
        if path.exists():
            raise ValueError("it is no file.")
        return ""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return file.read(limit)


def read_json(path: Path) -> dict[str, Any]:
    try:
        readable = path.is_file() and path.stat().st_size <= LONGEST_JSON
        content = json.loads(path.read_text("utf-8")) if readable else {}
    except (OSError, RecursionError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_text(path: Path, text: str):
    """Write a file under another name first."""
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


# --- models of the installed package write a card when they are saved -------------------------------------------------


def save_pretrained(self, save_directory, is_main_process=True, *args, **kwargs):
    """[`~transformers.PreTrainedModel.save_pretrained`], and a model card."""
    super(NormSwapModel, self).save_pretrained(save_directory, is_main_process, *args, **kwargs)
    if is_main_process:
        write_card_of(self, save_directory)


def upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
    """The part of `push_to_hub` that uploads what was saved; it has put another card there."""
    write_card_of(self, working_dir, repo_id=repo_id)
    return super(NormSwapModel, self)._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def write_card_of(model, folder, **kwargs):
    if not Path(folder, "config.json").is_file():  # an adapter, or the weights of another process
        return
    try:
        write_card(folder, model.config, **kwargs)
    except NormSwapError as error:
        logger.warning(str(error))


NormSwapModel.save_pretrained = save_pretrained  # type: ignore[attr-defined]
NormSwapModel._upload_modified_files = upload_modified_files  # type: ignore[attr-defined]
