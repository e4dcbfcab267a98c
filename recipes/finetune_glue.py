"""Fine-tune a model on a GLUE task, or on sentences of your own, in the norm placement of your choice.

python recipes/finetune_glue.py --model_name_or_path bert-base-uncased --task_name mrpc --placement pre --output_dir out
accelerate launch recipes/finetune_glue.py --model_name_or_path gpt2 --train_file train.csv --validation_file dev.csv \
    --placement post --output_dir out

What is not given (learning rate, warm-up, clipping) follows from the placement, and is printed with its reasons.
"""

import csv
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.logging import get_logger
from datasets import ClassLabel, Value, load_dataset
from scipy import stats
from sklearn import metrics
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

from hf_normswap import NormSwapError
from hf_normswap.calibration import is_causal
from hf_normswap.conversion import unwrap
from hf_normswap.data_files import load_file
from hf_normswap.language_modeling import count_positions
from hf_normswap.training import (
    ModelArguments,
    RunArguments,
    add_adapters,
    convert,
    evaluate,
    make_accelerator,
    option,
    start,
    train,
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class Task:
    """A task of GLUE (Wang et al. 2018, arXiv:1804.07461), as it is called on the Hub."""

    texts: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    evaluation: tuple[str, ...] = ("validation",)  # splits with labels
    test: tuple[str, ...] = ("test",)  # splits without
    training: str | None = None  # another task whose training data it takes


TASKS = {
    "cola": Task(("sentence",), ("matthews_correlation",)),
    "sst2": Task(("sentence",)),
    "mrpc": Task(("sentence1", "sentence2"), ("accuracy", "f1")),
    "qqp": Task(("question1", "question2"), ("accuracy", "f1")),
    "stsb": Task(("sentence1", "sentence2"), ("pearson", "spearmanr")),
    "mnli": Task(
        ("premise", "hypothesis"),
        evaluation=("validation_matched", "validation_mismatched"),
        test=("test_matched", "test_mismatched"),
    ),
    "qnli": Task(("question", "sentence")),
    "rte": Task(("sentence1", "sentence2")),
    "wnli": Task(("sentence1", "sentence2")),
    "ax": Task(("premise", "hypothesis"), evaluation=("validation_matched",), training="mnli"),
}
METRICS = {
    "accuracy": lambda predictions, labels: metrics.accuracy_score(labels, predictions),
    "f1": lambda predictions, labels: metrics.f1_score(labels, predictions),
    "matthews_correlation": lambda predictions, labels: metrics.matthews_corrcoef(labels, predictions),
    "pearson": lambda predictions, labels: stats.pearsonr(predictions, labels)[0],
    "spearmanr": lambda predictions, labels: stats.spearmanr(predictions, labels)[0],
}
MISSING = ("na", "n/a", "nan", "null", "none", "inf", "-inf")  # in a column of numbers


@dataclass
class DataArguments:
    """What to learn."""

    task_name: str | None = option(None, "A task of GLUE, from the Hub.", TASKS)
    train_file: str | None = option(None, "csv, json or parquet with a column `label` and one or two of text.")
    validation_file: str | None = option(None, "The same, for evaluation.")
    test_file: str | None = option(None, "The same; a label is not needed. What the model says goes into test.csv.")
    text_columns: list[str] | None = option(None, "One or two columns of text; by default those of strings.")
    max_length: int = option(128, "In tokens; longer inputs are cut.")
    auxiliary_loss: float = option(
        0.0, "Weight of the loss of classifiers on layers between, which help deep Post-Norm models to start."
    )

    def __post_init__(self):
        files = self.train_file is not None and self.validation_file is not None
        if files == (self.task_name is not None):
            raise NormSwapError("give either `--task_name`, or `--train_file` and `--validation_file`.")
        if self.max_length < 1:
            raise NormSwapError(f"`--max_length` must be at least 1, got {self.max_length}.")
        columns = self.text_columns or []
        if len(columns) > 2 or "label" in columns:
            raise NormSwapError(
                f"`--text_columns` takes one or two columns without the label, got {', '.join(columns)}."
            )


def load_data(args: DataArguments) -> tuple[dict, Task]:
    """All splits, and how they are read: `task.texts` are the columns of text, and `label` is there where it is needed."""
    if args.task_name is not None:
        task = TASKS[args.task_name]
        data = dict(load_dataset("glue", args.task_name))
        if task.training is not None:
            more = load_dataset("glue", task.training)
            data |= {name: more[name] for name in ("train", *task.evaluation)}
        return data, task
    data = {}
    for split, file in (("train", args.train_file), ("validation", args.validation_file), ("test", args.test_file)):
        if file is not None:
            data[split] = load_file(file, split)
    features = data["train"].features
    strings = [name for name in features if name != "label" and kind(features[name]) in ("string", "large_string")]
    texts = tuple(args.text_columns or strings[:2])
    for split, rows in data.items():
        wanted = [*texts, *(["label"] if split != "test" else [])] if texts else ["a column of text"]
        if missing := [name for name in wanted if name not in rows.column_names]:
            raise NormSwapError(
                f"the {split} file has the columns {', '.join(rows.column_names)}, not {', '.join(missing)}: rename them, or "
                "say which hold text with `--text_columns`."
            )
        for name in wanted:
            if kind(rows.features[name]) is None:
                raise NormSwapError(
                    f"the column {name!r} of the {split} file holds {rows.features[name]}: write single words, texts or numbers."
                )
    regression = kind(features["label"]).startswith(("float", "double"))
    return data, Task(texts, ("pearson", "spearmanr") if regression else ("accuracy",))


def kind(feature) -> str | None:
    """The type of the single values of a column; `None` for lists, fields and mixtures."""
    return feature.dtype if isinstance(feature, (Value, ClassLabel)) else None


def first(rows, count: int | None):
    return rows if count is None else rows.select(range(min(count, len(rows))))


def read_labels(rows) -> list:
    """The labels of a split, by name where they have names, and `None` for what has none (GLUE's -1)."""
    names = getattr(rows.features["label"], "names", None)
    if names is None:
        return list(rows["label"])
    return [None if label is None or label < 0 else names[label] for label in rows["label"]]


def check_numbers(split: str, labels: list):
    """The labels of a split, for regression."""
    for label in labels:
        if isinstance(label, (bool, str)) or not math.isfinite(label):
            raise NormSwapError(f"the {split} data has the label {label!r}, which is no finite number.")
    if split != "train" and len(labels) < 2:
        raise NormSwapError(f"the {split} data has one row, and a correlation needs two: give more.")
    if len(set(labels)) == 1:
        logger.warning(f"All labels of the {split} data are {labels[0]}: correlations with them are not a number.")


def is_number(label) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


def find_labels(data: dict, task: Task, config) -> list | None:
    """The labels in the order of the model's outputs, `None` for regression. A head that was trained keeps its order."""
    found = {split: read_labels(data[split]) for split in ("train", *task.evaluation)}
    for split, values in found.items():
        if None in values:
            raise NormSwapError(f"the {split} data has rows without a label, the first is row {values.index(None)}.")
        if "pearson" in task.metrics:
            check_numbers(split, values)
    labels = None
    if "pearson" not in task.metrics:
        labels = sorted(set(found["train"]))
        if len(labels) < 2:
            raise NormSwapError(f"the training data has one label only, {labels[0]!r}: there is nothing to learn.")
        words = [label for label in labels if not is_number(label)]
        if len(words) < len(labels) and words and all(word.lower() in MISSING for word in words):
            raise NormSwapError(
                f"the train data has the labels {', '.join(words)} among numbers: leave these rows out."
            )
        labels = getattr(data["train"].features["label"], "names", labels)
        for split in task.evaluation:  # a file without words has numbers, which are the same labels
            if unknown := set(map(str, found[split])) - set(map(str, labels)):
                raise NormSwapError(
                    f"the {split} data has the labels {', '.join(sorted(unknown))}, and the training data "
                    f"{', '.join(map(str, labels))}: call them the same."
                )
    if not (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        return labels
    names = [str(config.id2label[index]) for index in range(config.num_labels)]
    if config.num_labels != (1 if labels is None else len(labels)):
        raise NormSwapError(
            f"the model has a head for {config.num_labels} labels ({', '.join(names)}), and the data has "
            f"{'numbers' if labels is None else ', '.join(map(str, labels))}: take a model without a head, or one that fits."
        )
    if labels is not None and sorted(names) == sorted(map(str, labels)):
        labels = sorted(labels, key=lambda label: names.index(str(label)))
    return labels


def load_metrics(args: DataArguments, task: Task):
    """`(predictions, labels)` to the metrics of a task: through evaluate, else computed here, from the same functions."""
    if args.task_name is not None:
        try:
            import evaluate as library

            name = "mnli" if args.task_name == "ax" else args.task_name
            metric = library.load("glue", name, experiment_id=str(os.getpid()))
            return lambda predictions, labels: metric.compute(predictions=predictions, references=labels)
        except Exception as error:  # offline, each release raises its own
            logger.info(
                f"evaluate cannot be reached ({type(error).__name__}): metrics are computed with scikit-learn and scipy."
            )
    return lambda predictions, labels: {name: float(METRICS[name](predictions, labels)) for name in task.metrics}


def tokenize(split: str, rows, tokenizer, task: Task, labels: list | None, max_length: int):
    """The features that the model takes, for a split; without labels for a test."""
    numbers = None if labels is None else {str(label): number for number, label in enumerate(labels)}
    names = getattr(rows.features.get("label"), "names", None)  # the data's own order

    def number(label):
        return float(label) if numbers is None else numbers[str(names[label] if names else label)]

    def features(batch, indices):
        texts = [["" if text is None else str(text) for text in batch[name]] for name in task.texts]
        found = tokenizer(*texts, truncation=True, max_length=max_length)
        for index, ids in zip(indices, found["input_ids"]):
            if not ids:
                raise NormSwapError(f"row {index} of the {split} data is empty, without a single token: leave it out.")
        if split not in task.test:
            found["labels"] = [number(label) for label in batch["label"]]
        return found

    options = {"batched": True, "with_indices": True, "remove_columns": rows.column_names}
    return rows.map(features, desc="Tokenizing", **options)


class AuxiliaryClassifiers(nn.Module):
    """Classifiers on the mean of the hidden states at a third and two thirds of a model's depth."""

    def __init__(self, config):
        super().__init__()
        self.depths = sorted({max(config.num_hidden_layers * part // 3, 1) for part in (1, 2)})
        self.heads = nn.ModuleList(nn.Linear(config.hidden_size, config.num_labels) for _ in self.depths)

    def forward(self, hidden_states, mask, labels):
        mask, losses = mask[..., None].to(hidden_states[0].dtype), []
        for depth, head in zip(self.depths, self.heads):
            logits = head((hidden_states[depth] * mask).sum(1) / mask.sum(1))
            losses.append(loss_of(logits, labels))
        return sum(losses) / len(losses)


def loss_of(logits, labels):
    if logits.shape[-1] == 1:
        return nn.functional.mse_loss(logits.squeeze(-1).float(), labels.float())
    return nn.functional.cross_entropy(logits.float(), labels)


def run(model_args: ModelArguments, data_args: DataArguments, args: RunArguments, edit=None) -> dict[str, float]:
    """Fine-tune, evaluate and save; `edit` takes the loaded model and returns the one to train, instead of a conversion."""
    accelerator = make_accelerator(args)
    with accelerator.main_process_first():
        data, task = load_data(data_args)
    data |= {name: first(data[name], args.max_eval_samples) for name in task.evaluation}
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    labels = find_labels(data, task, config)
    if labels is None:
        config.num_labels, config.problem_type = 1, "regression"
    else:
        config.id2label = dict(enumerate(map(str, labels)))
        config.label2id = {label: number for number, label in config.id2label.items()}
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise NormSwapError("the tokenizer has neither a padding token nor an end of text: add one, and save it.")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"  # so that positions do not depend on the length of the neighbours
    if is_causal(config):  # their heads look for the last token that is none
        config.pad_token_id = tokenizer.pad_token_id

    length = min(data_args.max_length, tokenizer.model_max_length, count_positions(config) or math.inf)
    if length <= tokenizer.num_special_tokens_to_add(pair=len(task.texts) > 1):
        raise NormSwapError(f"{length} tokens leave no room for text beside special tokens: raise `--max_length`.")
    data["train"] = first(data["train"], args.max_train_samples)
    splits = ["train", *task.evaluation, *[name for name in task.test if name in data]]
    rows = {}
    with accelerator.main_process_first():
        for name in splits:
            rows[name] = tokenize(name, data[name], tokenizer, task, labels, length)

    source = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path, config=config, dtype=torch.float32
    )
    if edit is None:
        calibration = rows["train"].select_columns(["input_ids"])
        model, morph = convert(source, model_args, calibration)
        model = add_adapters(accelerator, model, model_args, args.output_dir)
    else:
        model, morph = edit(source), None
    auxiliary = None
    if data_args.auxiliary_loss:
        auxiliary = unwrap(model).auxiliary = AuxiliaryClassifiers(
            config
        )  # a part of the model, but not of what is saved
        unwrap(model)._keys_to_ignore_on_save = [f"auxiliary.{name}" for name, _ in auxiliary.named_parameters()]

    collate = DataCollatorWithPadding(tokenizer)
    loaders = {
        name: DataLoader(
            rows[name],
            shuffle=name == "train",
            collate_fn=collate,
            batch_size=args.per_device_train_batch_size if name == "train" else args.per_device_eval_batch_size,
        )
        for name in splits
    }
    prepared = {name: accelerator.prepare(loaders[name]) for name in splits[1:]}
    compute = load_metrics(data_args, task)

    def loss(model, batch):
        output = model(**batch, output_hidden_states=auxiliary is not None)
        if auxiliary is None:
            return output.loss
        between = auxiliary(output.hidden_states, batch["attention_mask"], batch["labels"])
        return output.loss + data_args.auxiliary_loss * between

    def predict(model, batch):
        batch = dict(batch)
        wanted = batch.pop("labels", batch["input_ids"][:, 0])
        return model(**batch).logits.float(), wanted

    def measure(model):
        found = {}
        for name in task.evaluation:
            logits, wanted = evaluate(accelerator, model, prepared[name], predict)
            predictions = logits.squeeze(-1) if labels is None else logits.argmax(-1)
            values = compute(predictions.numpy(), wanted.numpy()) | {"loss": loss_of(logits, wanted).item()}
            suffix = name.removeprefix("validation") if len(task.evaluation) > 1 else ""
            found |= {f"{key}{suffix}": value for key, value in values.items()} | {f"samples{suffix}": len(wanted)}
        return found

    suffix = task.evaluation[0].removeprefix("validation") if len(task.evaluation) > 1 else ""
    results = train(
        accelerator,
        model,
        loaders["train"],
        args,
        task="classification",
        source=source,
        morph=morph,
        loss=loss,
        evaluate=measure,
        metric=task.metrics[0] + suffix,
        tokenizer=tokenizer,
        arguments=(model_args, data_args),
    )
    for name in splits[1 + len(task.evaluation) :]:
        logits, _ = evaluate(accelerator, model, prepared[name], predict)
        answers = (
            logits.squeeze(-1).tolist() if labels is None else [labels[index] for index in logits.argmax(-1).tolist()]
        )
        if accelerator.is_main_process:
            with open(Path(args.output_dir) / f"{name}.csv", "w", newline="") as file:
                csv.writer(file).writerows(itertools.chain([("index", "prediction")], enumerate(answers)))
    return results


def main():
    start(run, __doc__, ModelArguments, DataArguments, RunArguments)


if __name__ == "__main__":
    main()
