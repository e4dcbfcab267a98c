"""Pushing to a Hub, and loading from it, over HTTP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_hub import local_hub
from tiny_models import tiny_model
from typer.testing import CliRunner

from hf_normswap import NormSwapError, convert_checkpoint
from hf_normswap.cli import app
from hf_normswap.hub import push

ROOT = Path(__file__).parent.parent

PUSH = """
import pathlib, sys, torch
from huggingface_hub import ModelCard
from tiny_models import tiny_batch, tiny_model
from hf_normswap import convert_checkpoint, fidelity
from hf_normswap.hub import push

source = tiny_model("llama")
source.config.name_or_path = "someone/tiny-llama"
model = convert_checkpoint(source, "post")
with torch.no_grad():
    torch.save({"batch": tiny_batch(), "logits": model(**tiny_batch()).logits}, "expected.pt")
report = fidelity(source, model, [tiny_batch()])
print(len(push(model, "me/dry", fidelity=report).files))
result = push(model, "me/pushed", fidelity=report, tags=["tiny"], license="mit", dry_run=False, commit_message="First")
print(result.url)
model.push_to_hub("me/stock")
model.save_pretrained("folder", push_to_hub=True, repo_id="me/saved")
pathlib.Path("folder/checkpoint-1").mkdir()
pathlib.Path("folder/checkpoint-1/optimizer.bin").write_text("state")
print(push("folder", "me/pushed", create_pr=True, dry_run=False).url)
push("folder", "me/pushed", revision="next", dry_run=False)
for name in ("me/pushed", "me/stock", "me/saved"):
    ModelCard.load(name).validate()
"""

LOAD = """
import sys, torch
sys.modules["hf_normswap"] = None  # not importable
from transformers import AutoConfig, AutoModelForCausalLM
expected = torch.load("expected.pt")
try:
    AutoModelForCausalLM.from_pretrained("me/pushed", trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code" in str(error))
for name, revision in (("me/pushed", "main"), ("me/stock", "main"), ("me/pushed", "next"), ("me/pushed", "refs/pr/1")):
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, revision=revision)
    with torch.no_grad():
        print(type(model).__name__, torch.equal(model(**expected["batch"]).logits, expected["logits"]))
"""


def run(code, folder, path, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_push_and_load(tmp_path):
    with local_hub() as hub:
        local = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "local"}
        places = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
        (count, url, pull_request), messages = run(PUSH, tmp_path, [str(ROOT), str(ROOT / "tests")], **local, **places)
        assert "Dry run: nothing was uploaded to me/dry" in messages and int(count) == 11
        assert set(hub.repos) == {"me/pushed", "me/stock", "me/saved"}
        places["HF_HOME"] = str(tmp_path / "another home")
        lines, _ = run(LOAD, tmp_path, [], **local, **places)
        assert lines == ["True", *["NormSwapLlamaForCausalLM True"] * 4]
        branches = hub.repos["me/pushed"]
        main, request = branches["main"], branches["refs/pr/1"]
        assert not [request for request in hub.unknown if "agent-harnesses" not in request]  # a habit of the client
    assert url == f"{hub.endpoint}/me/pushed/commit/{main['sha']}" and main["header"]["summary"] == "First"
    assert pull_request == f"{hub.endpoint}/me/pushed/discussions/1" and set(branches) == {"main", "refs/pr/1", "next"}
    assert main["files"].keys() >= {"model.safetensors", "config.json", "README.md", "fidelity.json", "placements.py"}
    assert not any("checkpoint" in name for name in request["files"])
    assert json.loads(main["files"]["fidelity.json"])["tokens"] == 16
    card = main["files"]["README.md"].decode()
    for text in (
        "license: mit",
        "- tiny",
        "base_model: someone/tiny-llama",
        'from_pretrained("me/pushed", trust',
        "| KL",
    ):
        assert text.replace("| KL", "| Kullback") in card
    for repo in ("me/stock", "me/saved"):  # the stock methods make the same card, but for the figures and the options
        stock = hub.repos[repo]["main"]["files"]["README.md"].decode()
        assert "[More Information Needed]" not in stock and stock.count("# How to load it") == 1
        assert (
            f'from_pretrained("{repo}", trust_remote_code=True)' in stock and "base_model: someone/tiny-llama" in stock
        )


def spoil(folder, how):
    config = json.loads((folder / "config.json").read_text())
    if how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "no code":
        (folder / "placements.py").rename(folder / "elsewhere.py")
        (folder / "modeling_normswap.py").unlink()
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "stock":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


SPOILT = {
    "no weights": "has no weights",
    "no code": "lacks modeling_normswap.py",
    "no config": "has no config.json",
    "stock": "is not a converted checkpoint",
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_not_a_converted_checkpoint_is_refused(how, tmp_path):
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(tmp_path / "model")
    spoil(tmp_path / "model", how)
    with pytest.raises(NormSwapError, match=SPOILT[how]):
        push(tmp_path / "model", "me/model")
    result = CliRunner().invoke(app, ["push", str(tmp_path / "model"), "me/model"])
    assert result.exit_code == 2 and SPOILT[how] in result.output.replace("\n", " ")


def test_models_that_are_not_converted_are_refused():
    with pytest.raises(NormSwapError, match="LlamaForCausalLM is not a converted model"):
        push(tiny_model("llama"), "me/model")


def test_the_command_line_shows_what_would_be_uploaded(tmp_path):
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(tmp_path / "model")
    before = {path: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    result = CliRunner().invoke(
        app, ["push", str(tmp_path / "model"), "me/model", "--tags", "a,b", "--license", "mit"]
    )
    assert result.exit_code == 0, result.output
    for text in (
        "Dry run: to me/model would go",
        "model.safetensors",
        "license: mit",
        "- a\n- b",
        '("me/model", trust',
    ):
        assert text in result.output
    assert before == {path: path.read_bytes() for path in (tmp_path / "model").iterdir()}
