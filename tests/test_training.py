"""The training loop that the recipes share: folders that were used before, disks that are full, runs that are stopped."""

import json
import os
import signal

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from safetensors import SafetensorError
from test_finetune_glue import finetune, history, rows, save_checkpoint, write_csv
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_normswap.training as training
from hf_normswap import NormSwapError, convert_checkpoint
from hf_normswap.training import RunArguments, checkpoints


@pytest.fixture
def files(tmp_path):
    return {
        "train_file": write_csv(tmp_path / "train.csv", rows(22)),
        "validation_file": write_csv(tmp_path / "validation.csv", rows(13, seed=1)),
    }


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(tmp_path / "checkpoint")


def loss_of_saved(auto, folder):
    """What the saved model makes of the validation data."""
    model, tokenizer = auto.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts, labels = zip(*rows(13, seed=1))
    wanted = torch.tensor([{"no": 0, "yes": 1}[label] for label in labels])
    with torch.no_grad():
        logits = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits
    return torch.nn.functional.cross_entropy(logits, wanted).item()


PLAIN = {"placement": ["pre"], "warm_start": "none"}
USED_FOLDERS = {  # the runs into one folder, and how the last one's result is loaded
    "another base": ([PLAIN | {"peft": "lora"}, PLAIN | {"placement": ["deepnorm"], "peft": "lora"}], True),
    "another start": ([PLAIN | {"peft": "lora"}, PLAIN | {"warm_start": "calibrated", "peft": "lora"}], True),
    "adapters, then all": ([PLAIN | {"peft": "lora"}, PLAIN], False),
    "all, then adapters": ([PLAIN, PLAIN | {"peft": "norms"}], True),
}


@pytest.mark.parametrize("name", USED_FOLDERS)
def test_a_folder_has_what_was_trained_last(name, tmp_path, files, checkpoint):
    runs, adapted = USED_FOLDERS[name]
    for options in runs:
        results = finetune(checkpoint, files, tmp_path / "out", learning_rate=0.01, **options)
    auto = AutoPeftModelForSequenceClassification if adapted else AutoModelForSequenceClassification
    assert loss_of_saved(auto, tmp_path / "out") == pytest.approx(results["loss"], rel=1e-4)


OTHERS = {  # a run with checkpoints, what is resumed from them, what is said
    "adapters of another placement": (PLAIN | {"peft": "lora"}, PLAIN | {"placement": ["post"], "peft": "lora"}, "adapters with"),
    "adapters of another kind": (PLAIN | {"peft": "lora"}, PLAIN | {"peft": "norms"}, "adapters with"),
    "adapters for a whole model": (PLAIN | {"peft": "lora"}, PLAIN, "adapters with"),
    "a whole model for adapters": (PLAIN, PLAIN | {"peft": "lora"}, "adapters with"),
    "another placement": (PLAIN, PLAIN | {"placement": ["post"]}, "norm_placement"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_checkpoints_that_do_not_fit_are_refused(name, tmp_path, files, checkpoint):
    first, second, message = OTHERS[name]
    finetune(checkpoint, files, tmp_path / "out", save_steps=1, **first)
    with pytest.raises(NormSwapError, match=message):
        finetune(checkpoint, files, tmp_path / "out", resume_from_checkpoint="latest", max_train_steps=5, **second)


def test_resuming_from_an_older_checkpoint(tmp_path, files, checkpoint):
    finetune(checkpoint, files, tmp_path / "out", save_steps=1, max_train_steps=5)
    (tmp_path / "out" / "checkpoint-best").mkdir()  # of somebody else
    last = history(tmp_path / "out")
    options = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-2"), "save_steps": 1, "max_train_steps": 5}
    finetune(checkpoint, files, tmp_path / "out", **options)
    assert history(tmp_path / "out") == last
    assert [path.name for path in checkpoints(tmp_path / "out")] == [f"checkpoint-{step}" for step in range(1, 5)]
    assert not list((tmp_path / "out").glob(".checkpoint*"))


def test_a_morph_ends_within_the_run_and_is_judged_at_its_end(tmp_path, files, checkpoint):
    with pytest.raises(NormSwapError, match="--morph_steps"):
        finetune(checkpoint, files, tmp_path / "out", placement=["pre"], morph_steps=4)
    options = {"morph_steps": 4, "max_train_steps": 6, "eval_steps": 1, "early_stopping_patience": 1}
    results = finetune(checkpoint, files, tmp_path / "out", placement=["pre"], learning_rate=1e-6, **options)
    assert results["step"] >= 4
    assert loss_of_saved(AutoModelForSequenceClassification, tmp_path / "out") == pytest.approx(
        results["loss"], rel=1e-4
    )


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), SafetensorError("No space left"), RuntimeError("No space left")]
)
@pytest.mark.parametrize("when", ["checkpoint", "end"])
def test_a_full_disk(error, when, tmp_path, files, checkpoint, monkeypatch):
    write = training.write_model

    def full(accelerator, model, tokenizer, folder):
        if (folder.name == ".checkpoint-2") if when == "checkpoint" else (folder.name == "out"):
            folder.mkdir(exist_ok=True)
            (folder / "model.safetensors").write_text("half")
            raise error
        write(accelerator, model, tokenizer, folder)

    monkeypatch.setattr(training, "write_model", full)
    with pytest.raises(NormSwapError, match="No space left.*resume from .*checkpoint-"):
        finetune(checkpoint, files, tmp_path / "out", save_steps=1)
    assert not list((tmp_path / "out").glob(".checkpoint*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_write_a_checkpoint(number, tmp_path, files, checkpoint, monkeypatch):
    finetune(checkpoint, files, tmp_path / "whole", max_train_steps=4)
    doctor_step, steps = training.TrainingDoctor.step, []

    def step(self, **numbers):
        steps.append(numbers)
        if len(steps) == 2:
            os.kill(os.getpid(), number)
        return doctor_step(self, **numbers)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(training.TrainingDoctor, "step", step)
        finetune(checkpoint, files, tmp_path / "stopped", max_train_steps=4)
    assert end.value.code == 128 + number
    assert [path.name for path in checkpoints(tmp_path / "stopped")] == ["checkpoint-2"]
    finetune(checkpoint, files, tmp_path / "stopped", max_train_steps=4, resume_from_checkpoint="latest")
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")


def test_what_the_doctor_found_is_kept_on_resuming(tmp_path, files, checkpoint):
    out = tmp_path / "out"
    finetune(checkpoint, files, out, save_steps=1)
    finding = {"rule": "loss_spike", "step": 1, "message": "The loss jumped.", "source": "practice"}
    described = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(described | {"findings": [finding]}))
    finetune(checkpoint, files, out, resume_from_checkpoint="latest", max_train_steps=4)
    described = json.loads((out / "run.json").read_text())
    assert described["findings"] == [finding]
    assert described["arguments"]["model_name_or_path"] == checkpoint


@pytest.mark.parametrize(
    "source, placement, start",
    [
        (None, "deepnorm", "exact"),
        (None, "resi_dual", "exact"),
        (None, "pre", "calibrated"),
        ("gated", "pre", "calibrated"),  # from gates there is no exact start
        ("resi_dual", "post", "calibrated"),  # nor from a second stream
        ("gated", "gated", "none"),  # which it has already
    ],
)
def test_the_start_follows_from_the_placements(source, placement, start, tmp_path, files, checkpoint):
    if source is not None:
        convert_checkpoint(checkpoint, source, output_dir=tmp_path / "source")
        checkpoint = str(tmp_path / "source")
    finetune(checkpoint, files, tmp_path / "out", placement=[placement])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["norm_conversion"]["warm_start"] == start


def test_refusals_are_one_sentence(monkeypatch, capsys):
    def run(args):
        raise NormSwapError("no")

    monkeypatch.setattr("sys.argv", ["recipe.py", "--output_dir", "out"])
    with pytest.raises(SystemExit, match="^Error: no$"):
        training.start(run, None, RunArguments)
