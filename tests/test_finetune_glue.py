"""The GLUE recipe and the training loop that the recipes share, on tiny models and local files."""

import json
import math
import re
import runpy
import statistics
import sys
from pathlib import Path

import compare
import finetune_glue
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from finetune_glue import METRICS, TASKS, DataArguments
from peft import AutoPeftModelForSequenceClassification
from tiny_models import VOCABULARY, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast, set_seed

from hf_normswap import NormSwapError, convert_checkpoint, parameter_groups
from hf_normswap.training import ModelArguments, RunArguments, checkpoints

SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
WORDS = [*SPECIAL.values(), *[f"w{number}" for number in range(4, VOCABULARY)]]


def save_checkpoint(folder, case="bert", pad=True, head=None, edges=False, **overrides):
    """A tiny base model, or one with a head, and its tokenizer, which puts tokens around a text if it is told to."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if edges:
        words.post_processor = processors.BertProcessing(("[EOS]", 3), ("[BOS]", 2))
    special = SPECIAL if pad else {key: value for key, value in SPECIAL.items() if key != "pad_token"}
    PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special).save_pretrained(folder)
    config = tiny_config(case, initializer_range=0.1, **overrides)
    set_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    (model if head else model.base_model).save_pretrained(folder)
    return str(folder)


def rows(count, labels=("no", "yes"), seed=0):
    """Texts whose label is whether there are more words of the second half of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(4, VOCABULARY, (int(torch.randint(3, 9, (), generator=generator)),), generator=generator)
        yield " ".join(f"w{number}" for number in ids.tolist()), labels[int((ids > 50).float().mean() > 0.5)]


def write_csv(path, content, header="text,label"):
    path.write_text("\n".join([header, *[",".join(map(str, row)) for row in content]]) + "\n")
    return str(path)


@pytest.fixture
def files(tmp_path):
    return {
        "train_file": write_csv(tmp_path / "train.csv", rows(22)),
        "validation_file": write_csv(tmp_path / "validation.csv", rows(13, seed=1)),
    }


def finetune(checkpoint, files, output_dir, data=(), **options):
    names = ModelArguments.__dataclass_fields__
    model = {key: options.pop(key) for key in list(options) if key in names}
    options = {"per_device_train_batch_size": 4, "max_train_steps": 3} | options
    arguments = ModelArguments(checkpoint, **model), DataArguments(**files, **dict(data))
    return finetune_glue.run(*arguments, RunArguments(str(output_dir), **options))


def history(folder):
    return json.loads((folder / "history.json").read_text())


@pytest.mark.parametrize(
    "case, placement", [("bert", "pre"), ("gpt2", "post"), ("llama", "resi_dual"), ("bert", None)]
)
def test_trains_evaluates_and_saves(case, placement, tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", case, pad=case == "bert")
    out = tmp_path / "out"
    options = {"max_train_steps": 30, "learning_rate": 3e-3}
    results = finetune(checkpoint, files, out, placement=placement and [placement], **options)
    assert results["samples"] == 13 and results["step"] == 30
    assert json.loads((out / "all_results.json").read_text()) == results
    assert (out / "curves.png").stat().st_size > 1000
    described = json.loads((out / "run.json").read_text())
    assert described["command"] and {"torch", "transformers", "accelerate"} <= set(described["versions"])

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.label2id == {"no": 0, "yes": 1}
    assert getattr(model.config, "norm_placement", None) == placement
    assert model.config.pad_token_id == tokenizer.pad_token_id
    texts, labels = zip(*rows(13, seed=1))
    assert tokenizer.padding_side == "right"
    with torch.no_grad():  # alone and beside longer ones
        together = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    found = [model.config.id2label[index] for index in together.argmax(-1).tolist()]
    assert results["accuracy"] == pytest.approx(sum(map(str.__eq__, found, labels)) / 13)
    learned = [entry["train_loss"] for entry in history(out) if "train_loss" in entry]
    assert statistics.median(learned[-10:]) < 0.8 * statistics.median(learned[:5])


def test_same_seed_same_bits(tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    tensors = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finetune(checkpoint, files, tmp_path / name, placement=["pre"], warm_start="none", seed=seed)
        tensors.append(AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(tensors[1][key], value) for key, value in tensors[0].items())
    assert any(not torch.equal(tensors[2][key], value) for key, value in tensors[0].items())


RESUMED = {  # options of runs that are interrupted
    "accumulation": {"gradient_accumulation_steps": 2},
    "morph": {"placement": ["pre"], "morph_steps": 5, "gradient_accumulation_steps": 2},
    "early stopping": {"placement": ["deepnorm"], "eval_steps": 1, "early_stopping_patience": 4},
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("stop", [2, 4])
def test_resumed_equals_uninterrupted(name, stop, tmp_path, files, monkeypatch):
    """22 rows in batches of 4, two at a time: step 3 ends the first epoch, with a part of a batch."""
    checkpoint, options = save_checkpoint(tmp_path / "checkpoint"), {"max_train_steps": 7, **RESUMED[name]}
    finetune(checkpoint, files, tmp_path / "whole", **options)

    class Killed(Exception):
        pass

    import hf_normswap.training as training

    save = training.save_checkpoint

    def save_and_die(accelerator, model, tokenizer, args, step):
        save(accelerator, model, tokenizer, args, step)
        if step == stop:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training, "save_checkpoint", save_and_die)
        finetune(checkpoint, files, tmp_path / "resumed", save_steps=1, save_total_limit=2, **options)
    left = checkpoints(tmp_path / "resumed")
    assert [path.name for path in left] == [f"checkpoint-{stop - 1}", f"checkpoint-{stop}"]
    AutoModelForSequenceClassification.from_pretrained(left[-1])
    finetune(checkpoint, files, tmp_path / "resumed", resume_from_checkpoint="latest", **options)
    assert history(tmp_path / "resumed") == history(tmp_path / "whole")
    first, second = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("whole", "resumed")
    )
    assert all(torch.equal(second[key], value) for key, value in first.items())


def test_a_morph_leaves_a_plain_model(tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    finetune(checkpoint, files, tmp_path / "out", placement=["pre"], morph_steps=2)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.norm_placement == "pre" and model.config.norm_target is None


@pytest.mark.parametrize("case, placement", [("bert", "pre"), ("gpt2", "gated"), ("llama", "resi_dual")])
@pytest.mark.parametrize("kind", ["lora", "norms"])
def test_adapters(case, placement, kind, tmp_path, files):
    checkpoint, out = save_checkpoint(tmp_path / "checkpoint", case), tmp_path / "out"
    options = {"placement": [placement], "warm_start": "none", "learning_rate": 1e-2, "eval_steps": 2}
    results = finetune(checkpoint, files, out, peft=kind, early_stopping_patience=5, max_train_steps=4, **options)
    assert (out / "adapter_config.json").is_file() and not (out / "model.safetensors").exists()
    model = AutoPeftModelForSequenceClassification.from_pretrained(out).eval()
    assert model.get_base_model().config.norm_placement == placement
    tokenizer = AutoTokenizer.from_pretrained(out)
    texts, labels = zip(*rows(13, seed=1))
    with torch.no_grad():
        logits = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits
    wanted = torch.tensor([model.config.label2id[label] for label in labels])
    assert torch.nn.functional.cross_entropy(logits, wanted).item() == pytest.approx(results["loss"], rel=1e-4)
    untrained = AutoModelForSequenceClassification.from_pretrained(out / "base_model").eval()
    with torch.no_grad():
        assert not torch.allclose(
            untrained(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits, logits
        )


def test_early_stopping_keeps_the_best(tmp_path, files, monkeypatch):
    accuracies = iter([0.5, 0.9, 0.6, 0.6, 0.95])
    monkeypatch.setattr(finetune_glue, "load_metrics", lambda *_: lambda *_: {"accuracy": next(accuracies)})
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    options = {
        "eval_steps": 1,
        "early_stopping_patience": 2,
        "max_train_steps": 9,
        "learning_rate": 1e-2,
        "save_steps": 1,
    }
    results = finetune(checkpoint, files, tmp_path / "out", warmup_steps=0, **options)
    assert results["step"] == 2 and results["accuracy"] == 0.9
    assert max(entry["step"] for entry in history(tmp_path / "out")) == 4
    kept, best, last = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / part).classifier.weight
        for part in ("", "checkpoint-2", "checkpoint-3")
    )
    assert torch.equal(kept, best) and not torch.equal(kept, last)


def test_learning_rate_counts_optimizer_steps(tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    options = {"gradient_accumulation_steps": 3, "learning_rate": 1.0, "warmup_steps": 2, "max_train_steps": 6}
    finetune(checkpoint, files, tmp_path / "out", placement=["pre"], **options)
    rates = [entry["learning_rate"] for entry in history(tmp_path / "out") if "learning_rate" in entry]
    assert rates == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])


def test_settings_follow_from_the_placement(tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    settings = {}
    for name, options in {"post": {}, "pre": {"placement": ["pre"]}, "given": {"max_grad_norm": 7.0}}.items():
        finetune(checkpoint, files, tmp_path / name, max_train_steps=1, **options)
        settings[name] = json.loads((tmp_path / name / "run.json").read_text())["settings"]
    assert (
        settings["post"]["max_grad_norm"] < settings["pre"]["max_grad_norm"] < settings["given"]["max_grad_norm"] == 7
    )
    assert settings["given"]["reasons"]["max_grad_norm"] == "given"
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "post")  # BERT has 1e-12
    assert model.config.layer_norm_eps == model.bert.encoder.layer[0].output.LayerNorm.eps == 1e-6


def test_keeps_the_order_of_trained_labels(tmp_path, files):
    labels = {"id2label": {0: "yes", 1: "no"}, "label2id": {"yes": 0, "no": 1}}
    checkpoint = save_checkpoint(tmp_path / "checkpoint", head=True, **labels)
    finetune(checkpoint, files, tmp_path / "out", max_train_steps=1)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "yes", 1: "no"}


def test_regression_pairs_and_predictions(tmp_path):
    content = [(text, text[::-1].replace(" ", ""), len(text) / 10) for text, _ in rows(9)]
    files = {
        f"{split}_file": write_csv(tmp_path / f"{split}.csv", content, "first,second,label")
        for split in ("train", "validation", "test")
    }
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    results = finetune(checkpoint, files, tmp_path / "out", max_train_steps=2)
    assert {"pearson", "spearmanr", "loss"} <= set(results)  # 9 rows in batches of 8: the last has one
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 1 and model.config.problem_type == "regression"
    lines = (tmp_path / "out" / "test.csv").read_text().splitlines()
    assert len(lines) == 10 and float(lines[-1].split(",")[1]) != round(float(lines[-1].split(",")[1]))


def test_auxiliary_classifiers_are_trained_and_not_saved(tmp_path, files, monkeypatch):
    built = []

    class Remembered(finetune_glue.AuxiliaryClassifiers):
        def __init__(self, config):
            super().__init__(config)
            self.first = [head.weight.detach().clone() for head in self.heads]
            built.append(self)

    monkeypatch.setattr(finetune_glue, "AuxiliaryClassifiers", Remembered)
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    finetune(checkpoint, files, tmp_path / "out", data={"auxiliary_loss": 0.5}, max_train_steps=3)
    assert built[0].depths == [1, 2]
    assert not any(torch.equal(head.weight, first) for head, first in zip(built[0].heads, built[0].first))
    _, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]


def test_each_task_has_metrics():
    predictions, labels = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 0])
    expected = {
        "accuracy": 0.75,
        "f1": 2 / 3,
        "matthews_correlation": 0.57735,
        "pearson": 0.57735,
        "spearmanr": 0.57735,
    }
    for name, function in METRICS.items():
        assert function(predictions.numpy(), labels.numpy()) == pytest.approx(expected[name], abs=1e-5)
    assert set(TASKS) == {"cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli", "ax"}
    assert {name for task in TASKS.values() for name in task.metrics} == set(METRICS)


def change(files, split, content, header="text,label"):
    return files | {f"{split}_file": write_csv(Path(files[f"{split}_file"]), content, header)}


def store(files, split, columns, **types):
    """A parquet file in place of a split's: columns by name, and the features of those that `datasets` cannot guess."""
    data = Dataset.from_dict(columns)
    path = Path(files[f"{split}_file"]).with_suffix(".parquet")
    data.cast(Features(data.features | types)).to_parquet(path)
    return files | {f"{split}_file": str(path)}


NAMED = {"label": ClassLabel(names=["no", "yes"])}
NUMBERS = [("w4 w5", 0.5), ("w6", 1.5)]


def named_labels(files, labels=(0, 1, 0)):
    return store(files, "train", {"text": ["w4"] * len(labels), "label": labels}, **NAMED)


def scores(files, train=NUMBERS, validation=NUMBERS):
    return change(change(files, "train", train), "validation", validation)


BAD = {  # what is wrong -> files, options, what the error names
    "numbers for names": (
        lambda files: change(named_labels(files), "validation", [("w4", 0), ("w5", 1)]),
        {},
        "validation data has the labels 0, 1, and the training data no, yes",
    ),
    "other names": (
        lambda files: store(files, "validation", {"text": ["w4"], "label": [1]}, label=ClassLabel(names=["no", "si"])),
        {},
        "has the labels si, and the training data no, yes",
    ),
    "unknown class": (lambda files: named_labels(files, [0, 1, -1]), {}, "train data.*without a label.*row 2"),
    "empty label": (lambda files: change(files, "train", [*rows(3), ("w4", "")]), {}, "without a label.*row 3"),
    "empty number": (lambda files: scores(files, [*NUMBERS, ("w4", "")]), {}, "train data.*without a label.*row 2"),
    "one label": (lambda files: named_labels(files, [1, 1]), {}, "one label only, 'yes'"),
    "no token": (
        lambda files: store(files, "validation", {"text": ["w4", None], "label": ["no", "yes"]}),
        {},
        "row 1 of the validation data is empty, without a single token",
    ),
    "list": (lambda files: store(files, "train", {"text": ["w4"], "label": [["no"]]}), {}, "column 'label'.*List"),
    "list of texts": (
        lambda files: store(files, "train", {"text": [["w4"]], "label": ["no"]}) | {"text_columns": ["text"]},
        {},
        "column 'text' of the train file.*List",
    ),
    "no text": (lambda files: store(files, "train", {"text": [["w4"]], "label": ["no"]}), {}, "column of text"),
    "one number": (lambda files: scores(files, validation=NUMBERS[:1]), {}, "correlation needs two"),
    "one is left": (scores, {"max_eval_samples": 1}, "correlation needs two"),
    "word for number": (lambda files: scores(files, validation=[("w4", "high"), ("w5", 1)]), {}, "'high'.*no finite"),
    "nan": (lambda files: scores(files, [*NUMBERS, ("w4", "nan")]), {}, "train data has the labels nan"),
    "infinite": (lambda files: scores(files, validation=[*NUMBERS, ("w4", "inf")]), {}, "label inf.*no finite number"),
    "max_length": (lambda files: files | {"max_length": 0}, {}, "max_length.*at least 1"),
    "no room": (lambda files: files | {"max_length": 2}, {}, "2 tokens leave no room.*max_length"),
    "three columns": (lambda files: files | {"text_columns": list("abc")}, {}, "text_columns.*one or two.*a, b, c"),
    "label as text": (
        lambda files: files | {"text_columns": ["text", "label"]},
        {},
        "text_columns.*without the label",
    ),
    "column": (lambda files: change(files, "validation", [("w4", 1)], "sentence,label"), {}, "text"),
    "label": (lambda files: change(files, "train", [("w4", 1)], "text,score"), {}, "label"),
    "unknown label": (lambda files: change(files, "validation", [("w4", "perhaps")]), {}, "perhaps"),
    "empty": (lambda files: change(files, "train", []), {}, "no rows"),
    "missing": (lambda files: files | {"train_file": "nowhere.csv"}, {}, "nowhere.csv"),
    "kind": (lambda files: files | {"train_file": "train.xml"}, {}, "train.xml"),
    "head": (lambda files: change(files, "train", [*rows(9), ("w6", "c")]), {}, "2 labels.*c, no, yes"),
    "placement": (lambda files: files, {"placement": ["sideways"]}, "sideways"),
    "no morph": (lambda files: files, {"placement": ["pre"], "warm_start": "exact"}, "morph_steps"),
    "no checkpoint": (lambda files: files, {"resume_from_checkpoint": "nowhere"}, "nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_training(name, tmp_path, files):
    make, options, named = BAD[name]
    checkpoint = save_checkpoint(tmp_path / "checkpoint", head=name == "head", edges=name == "no room")
    with pytest.raises(NormSwapError, match=named):
        finetune(checkpoint, make(files), tmp_path / "out", **options)
    assert not (tmp_path / "out" / "run.json").exists()


GOOD = {  # files -> the labels of the model, and, of the training data, how many tokens each text has
    "missing words": (lambda files: change(files, "train", [("NA", "no"), ("null", "yes")]), ["no", "yes"], [1, 1]),
    "missing texts": (
        lambda files: store(files, "train", {"a": ["w4", None, "w5"], "b": ["w6", "w7", None], "label": [0, 1, 1]}),
        [0, 1],
        [2, 1, 1],
    ),
    "other columns": (
        lambda files: store(files, "train", {"n": [[1]] * 2, "s": [{"x": "y"}] * 2, "a": ["w4"] * 2, "label": [1, 0]}),
        [0, 1],
        [1, 1],
    ),
    "long": (lambda files: change(files, "train", [("w4 " * 99, 0), ("w5", 1)]), [0, 1], [64, 1]),
    "order of their own": (lambda files: named_labels(files, [1, 0]), ["no", "yes"], [1, 1]),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_files_say_is_what_is_learned(name, tmp_path, files, monkeypatch):
    make, labels, lengths = GOOD[name]
    files = make(files)
    files["validation_file"] = files["train_file"]
    checkpoint, seen = save_checkpoint(tmp_path / "checkpoint"), {}
    tokenize = finetune_glue.tokenize
    monkeypatch.setattr(finetune_glue, "tokenize", lambda split, *rest: seen.setdefault(split, tokenize(split, *rest)))
    results = finetune(checkpoint, files, tmp_path / "out", max_train_steps=1)
    assert [len(ids) for ids in seen["train"]["input_ids"]] == lengths
    assert set(seen["train"]["labels"]) == {0, 1} and math.isfinite(results["loss"])
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert config.id2label == dict(enumerate(map(str, labels)))


def test_files_of_one_data_set_may_differ_in_form(tmp_path, files):
    """Labels are the same by name: those of a file that has no words are read as numbers."""
    files = change(files, "train", [("w4", 0), ("w5", 1), ("w6", "both")])
    files = change(files, "validation", [("w4", 0), ("w5", 1)])
    files["test_file"] = write_csv(tmp_path / "test.csv", [("w4", "perhaps")])
    results = finetune(save_checkpoint(tmp_path / "checkpoint"), files, tmp_path / "out", max_train_steps=1)
    assert results["samples"] == 2 and math.isfinite(results["loss"])
    assert (tmp_path / "out" / "test.csv").read_text().splitlines()[1][2:] in ("0", "1", "both")


def test_constant_numbers_are_told(tmp_path, files, caplog):
    files = scores(files, validation=[("w4", 2.5), ("w5", 2.5)])
    results = finetune(save_checkpoint(tmp_path / "checkpoint"), files, tmp_path / "out", max_train_steps=1)
    assert math.isnan(results["pearson"]) and math.isfinite(results["loss"])
    assert "All labels of the validation data are 2.5" in caplog.text


def test_checkpoints_of_other_runs_are_refused(tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    finetune(checkpoint, files, tmp_path / "out", placement=["pre"], save_steps=1)
    with pytest.raises(NormSwapError, match="resume_from_checkpoint"):
        finetune(checkpoint, files, tmp_path / "out", placement=["pre"])
    with pytest.raises(NormSwapError, match="norm_placement"):
        finetune(checkpoint, files, tmp_path / "out", placement=["deepnorm"], resume_from_checkpoint="latest")


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, files, monkeypatch):
    from accelerate import Accelerator

    write = Accelerator.save_state

    def full(self, folder, **options):
        if "checkpoint-2" in str(folder):
            raise OSError(28, "No space left on device")
        return write(self, folder, **options)

    monkeypatch.setattr(Accelerator, "save_state", full)
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(NormSwapError, match="No space left.*checkpoint-1"):
        finetune(checkpoint, files, tmp_path / "out", save_steps=1)
    assert {path.name for path in (tmp_path / "out").glob("*checkpoint*")} == {"checkpoint-1"}


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("placement", ["pre", "post", "deepnorm", "admin", "resi_dual", "peri", "gated"])
def test_vectors_do_not_decay(case, placement):
    model = AutoModelForSequenceClassification.from_config(tiny_config(case))
    converted = convert_checkpoint(model, placement)
    groups = parameter_groups(model, converted, 1.0, weight_decay=0.1)
    decayed = {group["weight_decay"]: {parameter.ndim for parameter in group["params"]} for group in groups}
    assert decayed == {0.1: {2}, 0.0: {1}}
    assert sum(len(group["params"]) for group in groups) == len(list(converted.parameters()))


def run_grid(
    options, recipe, folder, monkeypatch, measured=lambda command: {"step": 1, "accuracy": 0.5}, started=None
):
    """The commands that a grid starts; in their stead the results are written."""
    started = [] if started is None else started

    def finished(command, **options):
        folder, results = command[command.index("--output_dir") + 1], measured(command)
        started.append(command)
        for name, content in {
            "all_results": results,
            "history": [{"step": 1, "train_loss": 1.0}, {"step": 1} | results],
        }.items():
            Path(folder, f"{name}.json").write_text(json.dumps(content))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(compare.subprocess, "run", finished)
    monkeypatch.setattr(sys, "argv", f"compare {options} --output_dir {folder} {recipe}".split())
    compare.main()
    return started


def test_compare_runs_a_grid(tmp_path, monkeypatch, capsys):
    options = "--placements native post,pre,Pre-LN --seeds 0 1 0 --learning_rates 0.1 0.2"
    recipe = "recipe.py --train_file rows.csv"

    def measured(command):
        seed, rate = (float(command[command.index(name) + 1]) for name in ("--seed", "--learning_rate"))
        return {"step": 2, "accuracy": 0.5 + seed / 10 + rate}

    started = run_grid(options, recipe, tmp_path, monkeypatch, measured)
    assert len(started) == 8 and not any("--warm_start" in command for command in started)
    assert all(command[command.index("recipe.py") :][1:3] == ["--train_file", "rows.csv"] for command in started)
    hybrid = next(command for command in started if "--placement" in command)
    assert hybrid[hybrid.index("--placement") + 1 :][:3] == ["post", "pre", "pre"]
    table = (tmp_path / "table.md").read_text()
    assert "| native, 0.1 | 0.6500 ± 0.0707 |" in table and table in capsys.readouterr().out + "\n"
    assert (tmp_path / "curves.png").is_file() and (tmp_path / "sensitivity.png").is_file()
    assert not run_grid(options, recipe, tmp_path, monkeypatch, measured)  # all is there
    (tmp_path / "native-0.1-seed0" / "history.json").unlink()
    (again,) = run_grid(options, recipe, tmp_path, monkeypatch, measured)
    assert again in started


UNEVEN = {  # the results of seeds 0 and 1 -> the cells of the table
    "not a number": ([{"accuracy": math.nan}, {"accuracy": 0.5}], "| pre | nan ± nan | 2 |"),
    "infinite": ([{"accuracy": math.inf}, {"accuracy": 0.5}], "| pre | inf ± nan | 2 |"),
    "fewer": ([{"accuracy": 0.25, "f1": 0.5}, {"accuracy": 0.75}], "| pre | 0.5000 ± 0.3536 | 0.5000 | 2 |"),
    "more": ([{"accuracy": 0.25}, {"accuracy": 0.75, "f1": 0.5}], "| pre | 0.5000 ± 0.3536 | 0.5000 | 2 |"),
    "others": ([{"accuracy": 0.25}, {"f1": 0.5}], "| pre | 0.2500 | 0.5000 | 2 |"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_compare_has_a_table_of_whatever_was_measured(name, tmp_path, monkeypatch):
    results, row = UNEVEN[name]
    options = "--placements pre --seeds 0 1"
    run_grid(
        options, "a.py", tmp_path, monkeypatch, lambda command: results[int(command[command.index("--seed") + 1])]
    )
    assert row in (tmp_path / "table.md").read_text() and (tmp_path / "curves.png").is_file()


BAD_GRIDS = {  # options, the recipe, what the error says; after a grid of `--placements pre a.py --x 1`
    "metric": ("--placements post --metric f1", "a.py --x 1", "a.py measures step, accuracy, not 'f1'.*--metric", 1),
    "arguments": ("--placements post pre", "a.py --x 2", "pre-seed0 has a run of a.py --x 1 .*--output_dir", 0),
    "recipe": ("--placements pre", "b.py --x 1", "pre-seed0 has a run of a.py", 0),
    "placement": ("--placements post sideways", "a.py --x 1", "unknown norm placement 'sideways'", 0),
    "path": ("--placements ../x", "a.py --x 1", "unknown norm placement '../x'", 0),
    "hybrid": ("--placements pre,,post", "a.py --x 1", "unknown norm placement ''", 0),
}


@pytest.mark.parametrize("name", BAD_GRIDS)
def test_bad_grids_are_refused(name, tmp_path, monkeypatch, capsys):
    options, recipe, named, count = BAD_GRIDS[name]
    run_grid("--placements pre", "a.py --x 1", tmp_path, monkeypatch)
    started = []
    with pytest.raises(SystemExit) as end:
        run_grid(options, recipe, tmp_path, monkeypatch, started=started)
    assert re.search(named, f"{end.value.code} {capsys.readouterr().err}") and len(started) == count


BAD_COMMANDS = {  # of the recipes that take no dataclasses -> what is said
    "make_cards.py nothing": "there is no nothing, but .*minilm-pre",
    "finetune_demo.py --train_rows 0": "--train_rows.*positive",
    "finetune_demo.py --validation_rows -3": "--validation_rows.*positive",
    "finetune_demo.py --train_rows 20 --validation_rows 20": "there are 30 rows",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_bad_commands_are_refused(command, monkeypatch, capsys):
    monkeypatch.setattr("assets.movie_reviews", lambda: [{"text": "w4", "label": "no"}] * 30)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(Path(compare.__file__).with_name(sys.argv[0])), run_name="__main__")
    assert re.search(BAD_COMMANDS[command], f"{end.value.code} {capsys.readouterr().err}")
