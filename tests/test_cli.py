"""The command line: what it writes, what it says, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_batch, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_normswap import verify
from hf_normswap.cli import app


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "source"
    tiny_model("llama").save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"not to be copied")
    return folder


def test_convert_verify_revert(checkpoint, tmp_path):
    data = json.loads(run("convert", checkpoint, tmp_path / "post", "--placement", "Post-LN", "--json").stdout)
    assert data["class"] == "NormSwapLlamaForCausalLM" and data["norm_placement"] == "post"
    names = {path.name for path in (tmp_path / "post").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "1_Pooling", "modeling_normswap.py"} <= names
    assert "pytorch_model.bin" not in names
    source = AutoModelForCausalLM.from_pretrained(checkpoint)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "post")
    assert not torch.allclose(source(**tiny_batch()).logits, converted(**tiny_batch()).logits)
    report = json.loads(run("verify", tmp_path / "post", "--json").stdout)
    assert report["passed"] and report["norm_placement"] == "post"
    assert "ok" in run("verify", tmp_path / "post").stdout
    run("revert", tmp_path / "post", tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # no half-written folder


def test_layers_and_options(checkpoint, tmp_path):
    run("convert", checkpoint, tmp_path / "a", "--placement", "post", "--layers", "0-1")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["norm_placement"] == ["post", "post", "pre"]
    run("convert", checkpoint, tmp_path / "b", "--placement", "post,pre,gated", "--gate", "0.25")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert model.model.layers[2].attn_skip_gate.weight.item() == 0.25 and not hasattr(
        model.model.layers[1], "attn_skip_gate"
    )
    run("convert", checkpoint, tmp_path / "c", "--placement", "deepnorm", "--alpha", "2.5")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["norm_alpha"] == 2.5


@pytest.mark.parametrize(
    "options, lost",
    [
        (["--placement", "post"], True),
        (["--placement", "post", "--layers", "1", "--json"], True),
        (["--placement", "gated"], False),
        (["--placement", "pre"], False),
        (["--placement", "post", "--warm-start", "exact"], False),
    ],
)
def test_what_lost_its_function_says_so(options, lost, checkpoint, tmp_path):
    assert ("train it before you use it" in run("convert", checkpoint, tmp_path / "out", *options).stderr) == lost


def test_sizes_in_bytes(checkpoint, tmp_path):
    run("convert", checkpoint, tmp_path / "a", "--placement", "post", "--max-shard-size", "30000")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    run("revert", tmp_path / "a", tmp_path / "b", "--max-shard-size", "1GB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 1


def corrupt(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def rename_type(folder, model_type="gptj"):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, "architectures": None}))


BAD_INPUT = {  # arguments after `convert SOURCE TARGET`, what is done to the source first, words of the message
    "unknown placement": (["--placement", "postt"], None, ["postt", "Did you mean post"]),
    "unknown warm start": (["--placement", "post", "--warm-start", "magic"], None, ["magic", "none"]),
    "list too short": (["--placement", "post,pre"], None, ["2 placements for 3 layers"]),
    "layer too high": (["--placement", "post", "--layers", "7"], None, ["no layer 7:", "has 3"]),
    "many layers too high": (["--placement", "post", "--layers", "0-99"], None, ["no layer 3 to 99:", "has 3"]),
    "layer too low": (["--placement", "post", "--layers", "-4,1,9"], None, ["no layer -4, 9:", "has 3"]),
    "layers from the end": (["--placement", "post", "--layers", "5-1"], None, ["5-1", "lower one first"]),
    "endless layers": (["--placement", "post", "--layers", "0-99999999999"], None, ["cannot read"]),
    "no layers": (["--placement", "post", "--layers", ""], None, ["cannot read"]),
    "size of nothing": (["--placement", "post", "--max-shard-size", "0"], None, ["'0'", "5GB"]),
    "size that is none": (["--placement", "post", "--max-shard-size", "large"], None, ["'large'", "5GB"]),
    "layers unreadable": (["--placement", "post", "--layers", "a-b"], None, ["a-b", "0-3"]),
    "gate out of range": (["--placement", "gated", "--gate", "1.5"], None, ["1.5", "between 0"]),
    "alpha negative": (["--placement", "deepnorm", "--alpha", "-1"], None, ["norm_alpha", "positive"]),
    "dual not contiguous": (["--placement", "resi_dual,pre,resi_dual"], None, ["adjoin"]),
    "corrupt weights": (["--placement", "post"], corrupt, ["header"]),
    "truncated weights": (["--placement", "post"], truncate, ["incomplete"]),
    "parallel residual": (["--placement", "post"], rename_type, ["gptj", "Supported: bert"]),
    "unknown type": (["--placement", "post"], lambda folder: rename_type(folder, "whisper"), ["whisper", "Supported"]),
    "no config": (["--placement", "post"], lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "broken config": (
        ["--placement", "post"],
        lambda folder: (folder / "config.json").write_text("{"),
        ["config.json"],
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_writes_nothing(case, checkpoint, tmp_path):
    arguments, prepare, words = BAD_INPUT[case]
    if prepare is not None:
        prepare(checkpoint)
    before = sorted(path.name for path in tmp_path.iterdir())
    result = run("convert", checkpoint, tmp_path / "out", *arguments, code=2)
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and "Traceback" not in result.stderr
    assert all(word in errors[0] for word in words), errors[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_other_refusals(checkpoint, tmp_path):
    assert (
        "neither a folder" in run("convert", tmp_path / "nowhere", tmp_path / "o", "--placement", "pre", code=2).stderr
    )
    run("convert", checkpoint, tmp_path / "pre", "--placement", "pre")
    assert "--overwrite" in run("convert", checkpoint, tmp_path / "pre", "--placement", "post", code=2).stderr
    run("convert", checkpoint, tmp_path / "pre", "--placement", "post", "--overwrite")
    assert json.loads((tmp_path / "pre" / "config.json").read_text())["norm_placement"] == "post"
    assert "nothing to revert" in run("revert", checkpoint, tmp_path / "o", code=2).stderr
    assert not (tmp_path / "o").exists()


def test_warm_starts(checkpoint, tmp_path):
    run("convert", checkpoint, tmp_path / "exact", "--placement", "post", "--warm-start", "exact")
    config = json.loads((tmp_path / "exact" / "config.json").read_text())
    assert config["norm_target"] == "post" and config["norm_placement"] != "post"
    text = tmp_path / "text"
    text.write_text("A text.\n")
    calibrated = ("--placement", "post", "--warm-start", "calibrated", "--calibration")
    for file, word in ((text, "tokenizer"), (tmp_path / "none", "there is no file")):
        assert word in run("convert", checkpoint, tmp_path / "o", *calibrated, file, code=2).stderr
        assert not (tmp_path / "o").exists()


def test_list_and_help():
    assert "resi_dual" in run("list").stdout
    data = json.loads(run("list", "--json").stdout)
    assert "gated" in data["placements"] and "llama" in data["architectures"]
    for command in ("list", "convert", "verify", "revert"):
        assert "Example" in run(command, "--help").stdout


def test_verify_finds_a_broken_model(monkeypatch):
    model = tiny_model("llama")
    assert verify(model, save=False)
    monkeypatch.setattr("hf_normswap.verification.parameters_without_gradient", lambda *_: ["a"])
    report = verify(model, save=False)
    assert not report and "FAILED" in str(report)
