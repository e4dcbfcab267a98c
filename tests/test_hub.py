"""Pushing to a Hub, and loading from it, over HTTP."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from local_hub import local_hub
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import dynamic_module_utils
from typer.testing import CliRunner

from hf_normswap import NormSwapError, convert_checkpoint
from hf_normswap.cli import app
from hf_normswap.hub import push
from hf_normswap.model_card import load_config, mark_of, public_run, write_card
from hf_normswap.modeling import modeling_normswap

ROOT = Path(__file__).parent.parent
FIGURES = {
    **{"tokens": 16, "source_loss": None, "converted_loss": None, "kl": None, "top1_agreement": None},
    **{"hidden_cosine": 1.0, "sentence_cosine": 1.0, "drift": [0.0]},
}

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


def change(folder, name, text):
    (folder / name).write_text(text)


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


SPOILT = {  # what is done to a folder with several files of weights, and what is said then
    "no weights": (lambda folder: [path.unlink() for path in folder.glob("model*")], "has no weights"),
    "other weights": (
        lambda folder: [*[path.unlink() for path in folder.glob("model*")], change(folder, "training_args.bin", "")],
        "has no weights",
    ),
    "no shard": (lambda folder: shards(folder)[1].unlink(), "which is not there: it is incomplete"),
    "half a shard": (
        lambda folder: shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:-8]),
        "is damaged or incomplete",
    ),
    "half a pickle": (lambda folder: pickle_of(folder, 0.5), "is damaged|is no whole checkpoint"),
    "a tensor less": (lambda folder: alter(folder, lambda tensors, key: tensors.pop(key)), "lacks 1 tensors|lacks it"),
    "another shape": (
        lambda folder: alter(folder, lambda tensors, key: tensors.update({key: tensors[key][:1].clone()})),
        "has the shape",
    ),
    "an index of other shards": (lambda folder: mix(folder), "says that .* is in"),
    "an index out of the folder": (
        lambda folder: change(
            folder, "model.safetensors.index.json", '{"weight_map": {"a": "../secret.safetensors"}}'
        ),
        "is no .safetensors file of this folder",
    ),
    "one file and an index": (
        lambda folder: save_file({"x": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"}),
        "remove the one that is not",
    ),
    "code of others": (lambda folder: rename(folder, "evil/r--a.{}"), "from another repository"),
    "code of another name": (
        lambda folder: (rename(folder, "secret_keys.{}"), change(folder, "secret_keys.py", "KEY = 1")),
        "does not name the classes",
    ),
    "no class of the config": (
        lambda folder: edit(folder, auto_map={"AutoModelForCausalLM": "modeling_normswap.NormSwapLlamaForCausalLM"}),
        "does not name the classes",
    ),
    "empty code": (lambda folder: change(folder, "modeling_normswap.py", ""), "modeling_normswap.py does not define"),
    "empty code of that code": (lambda folder: change(folder, "residual.py", ""), "residual.py does not define"),
    "half of the code": (
        lambda folder: change(folder, "surgery.py", (folder / "surgery.py").read_text()[:3000]),
        "surgery.py (does not define|is no whole file)",
    ),
    "a tokenizer of others": (
        lambda folder: change(
            folder, "tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["evil/r--a.B", null]}}'
        ),
        "from another repository",
    ),
    "a tokenizer without its class": (
        lambda folder: (
            change(folder, "tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'),
            change(folder, "own.py", "class Other: pass"),
        ),
        "own.py does not define Own",
    ),
    "half a module's weights": (lambda folder: dense(folder, "x"), "2_Dense/model.safetensors is damaged"),
    "no weights of a module": (lambda folder: dense(folder, None), "2_Dense lacks the weights of a Dense"),
    "half a tokenizer": (lambda folder: change(folder, "tokenizer.json", '{"a":'), "is no whole file of JSON"),
    "half of the settings": (lambda folder: change(folder, "generation_config.json", "{"), "is no whole file of JSON"),
    "no index": (lambda folder: (folder / "model.safetensors.index.json").unlink(), "has no weights"),
    "broken index": (lambda folder: change(folder, "model.safetensors.index.json", "{"), "cannot be read as JSON"),
    "no code": (lambda folder: (folder / "modeling_normswap.py").unlink(), "lacks modeling_normswap.py"),
    "no code of that code": (lambda folder: (folder / "residual.py").unlink(), "lacks residual.py"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda folder: change(folder, "config.json", "{"), "the config of"),
    "a list for a config": (lambda folder: change(folder, "config.json", "[]"), "the config of"),
    "stock": (lambda folder: edit(folder, model_type="llama"), "is not a converted checkpoint"),
    "wild": (lambda folder: edit(folder, num_hidden_layers="x"), "the config of"),
    "broken card": (lambda folder: change(folder, "README.md", "---\na: [\n---\n"), "the card of"),
    "Latin-1 card": (lambda folder: (folder / "README.md").write_bytes(b"\xc4"), "the card of"),
}


def dense(folder, weights):
    """A further module of sentence-transformers."""
    (folder / "2_Dense").mkdir()
    change(folder, "2_Dense/config.json", "{}")
    change(folder, "modules.json", '[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]')
    if weights is not None:
        change(folder, "2_Dense/model.safetensors", weights)


def rename(folder, pattern):
    names = {"AutoConfig": "NormSwapLlamaConfig", "AutoModelForCausalLM": "NormSwapLlamaForCausalLM"}
    edit(folder, auto_map={key: pattern.format(name) for key, name in names.items()})


def alter(folder, how):
    """Change the tensors of the first shard, and what the index says of them."""
    tensors = load_file(shards(folder)[0])
    how(tensors, sorted(tensors)[0])
    save_file(tensors, shards(folder)[0], metadata={"format": "pt"})


def mix(folder):
    """Send the index's tensors of the first shard to the second."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    one, two = (path.name for path in shards(folder)[:2])
    index["weight_map"] = {key: two if name == one else name for key, name in index["weight_map"].items()}
    change(folder, "model.safetensors.index.json", json.dumps(index))


def pickle_of(folder, part):
    tensors = {key: one for path in shards(folder) for key, one in load_file(path).items()}
    [path.unlink() for path in folder.glob("model[-.]*")]
    torch.save(tensors, folder / "pytorch_model.bin")
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: int(len(data) * part)])


def edit(folder, **fields):
    change(folder, "config.json", json.dumps(json.loads((folder / "config.json").read_text()) | fields))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder that is taken, with several files of weights."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(folder, max_shard_size="20KB")
    assert len(shards(folder)) > 1 and push(folder, "me/model").files
    return folder


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_not_a_whole_converted_checkpoint_is_refused(how, whole, tmp_path):
    spoil, message = SPOILT[how]
    shutil.copytree(whole, tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(NormSwapError, match=message):
        push(tmp_path / "model", "me/model")
    result = CliRunner().invoke(app, ["push", str(tmp_path / "model"), "me/model"])
    assert result.exit_code == 2 and result.output.startswith("Error: ") and "Traceback" not in result.output


@pytest.mark.parametrize("case", ["bert", "gpt2", "gemma2", "mixtral", "qwen2_moe", "opt"])
def test_whole_checkpoints_of_all_kinds_are_taken(case, tmp_path):
    model = convert_checkpoint(tiny_model(case), "resi_dual")
    assert "model.safetensors" in push(model, "me/model").files
    model.half().save_pretrained(tmp_path, max_shard_size="20KB")
    assert {path.name for path in shards(tmp_path)} <= push(tmp_path, "me/model").files.keys()


def test_a_pickle_that_is_whole_is_taken(tmp_path):
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(tmp_path, max_shard_size="20KB")
    pickle_of(tmp_path, 1)
    assert "pytorch_model.bin" in push(tmp_path, "me/model").files


def private(folder):
    """What lies in folders beside a checkpoint, and is nobody else's business."""
    names = (
        *("secrets.env", "token", "hf_token.txt", "id_rsa", "credentials.json", "notes.txt", "my_code.py"),
        *(
            "optimizer.pt",
            "scheduler.pt",
            "rng_state_0.pth",
            "trainer_state.json",
            "training_args.bin",
            "history.json",
        ),
        *("wandb/run-1/files/config.json", "checkpoint-5/model.safetensors", "out/checkpoint-7/config.json"),
        *("global_step5/model.safetensors", "runs/x/events", "logs/config.json", "base_model/config.json"),
        *("model_old.safetensors", "model-backup-private.safetensors", "model-00009-of-00009.safetensors"),
        *("model.fp16.safetensors", "pytorch_model.bin", "pytorch_model_optimizer.bin", "LICENSE_KEY.pem"),
        *("chat_template.bak", "USE_POLICY~", "2024_taxes/config.json", "me@home.model", ".env", "own_config.json"),
        *("fidelity.json", "run.json", "all_results.json", "curves.png"),  # of no conversion
    )
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("SECRET")
    (folder.parent / "outside").write_text("SECRET")
    for name in ("vocab.txt", "merges.txt"):
        (folder / name).symlink_to(folder.parent / "outside")
    (folder / "loop").symlink_to(folder)
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("SECRET")
    return {*names, "vocab.txt", "merges.txt", ".git/", "loop/"}


def test_only_what_a_checkpoint_is_made_of_is_uploaded(tmp_path):
    folder = tmp_path / "model"
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(folder)
    checkpoint = {path.name for path in folder.iterdir()}
    left_out = private(folder)
    others = {
        *("tokenizer.json", "spiece.model", "tokenization_own.py", "1_Pooling/config.json", "LICENSE", "LICENSE.txt"),
        *("sentencepiece.model", "source.spm", "tokenizer.model.v3", "tekken.json", "sentence_roberta_config.json"),
        *("3_My.Dense-x/config.json", "helper_own.py"),
        *("additional_chat_templates/tools.jinja", "modules.json", "chat_template.jinja", "preprocessor_config.json"),
    }
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "tokenization_own.py").write_text("from .helper_own import Base\n\nclass Own(Base):\n    pass\n")
    (folder / "helper_own.py").write_text("try:\n    import x\nexcept ImportError:\n    class Base:\n        pass\n")
    parts = ["", "1_Pooling", "3_My.Dense-x", "../outside"]
    (folder / "modules.json").write_text(json.dumps([*({"path": part} for part in parts), 5]))
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", null]}}')
    expected = checkpoint | others | {"tokenizer_config.json"}
    for ignored, extra in ((None, None), (["LICENSE"], ["notes.*", "vocab.txt", ".env", "images/*"])):
        result = push(folder, "me/model", ignore_patterns=ignored, extra_files=extra)
        refused = [pattern for pattern in (extra or [])[1:] if any(repr(pattern) in note for note in result.notes)]
        assert refused == (extra or [])[1:] and len(result.notes) == len(refused)
        assert all(f"Note: {note}" in str(result) for note in result.notes)
        added, gone = ({"notes.txt"}, {"LICENSE"}) if extra else (set(), set())
        assert set(result.files) == expected - gone | added
        assert set(result.left_out) == left_out - added | gone and "id_rsa" in str(result)


def test_a_folder_of_the_hub_s_cache_is_uploaded(tmp_path):
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(folder)
    blobs.mkdir()
    names = {path.name for path in folder.iterdir()}
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    assert set(push(folder, "me/model").files) == names


def test_runs_are_shared_without_what_is_of_the_machine(tmp_path):
    run = {
        "command": "python /home/me/x.py --train_file '/home/me/my data/train.csv' --validation_file v.csv --output_dir /home/o",
        "arguments": {"output_dir": "/home/me/o", "seed": 42},
        "settings": {"learning_rate": 1e-5},
        "versions": {"torch": "2.13.0"},
        "host": "mine",
        "data": None,
        "conversion": None,
    }
    shared = public_run(run)
    assert shared["command"] == "--train_file train.csv --validation_file v.csv" and public_run(shared) == shared
    assert shared["arguments"] == {"seed": 42} and "me" not in json.dumps(shared).split('"') and "host" not in shared
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(tmp_path)
    mark = {"conversion": mark_of(load_config(tmp_path))}
    (tmp_path / "run.json").write_text(json.dumps(run | mark))
    results = {"accuracy": 0.5, "note": "/home/me", "output": {"a": 1}}
    (tmp_path / "all_results.json").write_text(json.dumps(results))
    (tmp_path / "curves.png").write_bytes(b"png")
    write_card(tmp_path, fidelity=FIGURES)
    figures = json.loads((tmp_path / "fidelity.json").read_text())
    (tmp_path / "fidelity.json").write_text(json.dumps(figures | {"path": "/home/me"}))
    result = push(tmp_path, "me/model")
    assert "/home/" not in result.card and "| training data | train.csv |" in result.card
    shared = {"run.json": shared | mark, "all_results.json": {"accuracy": 0.5}, "fidelity.json": figures}
    assert "curves.png" in result.files
    for name, content in shared.items():
        assert result.files[name] == len(json.dumps(content, indent=2)) + 1
    assert any("of 16 tokens" in note for note in result.notes) and any(
        "no tokenizer" in note for note in result.notes
    )
    with pytest.raises(NormSwapError, match="`fidelity` takes"):
        push(tmp_path, "me/model", fidelity={"tokens": 1})


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


UNREACHABLE = """
import sys, time
from typer.testing import CliRunner
from hf_normswap.cli import app

start = time.time()
for arguments in ([], ["--no-dry-run"]):
    result = CliRunner().invoke(app, ["push", "model", "me/model", *arguments])
    print(result.exit_code, type(result.exception).__name__, result.output.splitlines()[-1])
print(time.time() - start < 10)
"""


def test_a_hub_that_cannot_be_reached_is_told_at_once(tmp_path):
    convert_checkpoint(tiny_model("llama"), "post").save_pretrained(tmp_path / "model")
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "local"}
    (dry, wet, soon), _ = run(UNREACHABLE, tmp_path, [str(ROOT)], **environment)
    assert dry.startswith("0 NoneType") and soon == "True"
    assert wet.startswith("2 SystemExit Error: http://127.0.0.1:9 cannot be reached")


def test_the_command_line_measures_into_a_card(tmp_path):
    convert_checkpoint(tiny_tokenized(tmp_path / "source"), "post", output_dir=tmp_path / "model")
    (tmp_path / "held_out.txt").write_text("a b c d e f g\n" * 200)
    texts = ["--data", str(tmp_path / "held_out.txt")]
    result = CliRunner().invoke(app, ["fidelity", str(tmp_path / "source"), str(tmp_path / "model"), *texts])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "model" / "fidelity.json").read_text())
    assert figures["tokens"] > 1000 and figures["data"] == "held_out.txt"
    assert f"{figures['hidden_cosine']:.4f}" in (tmp_path / "model" / "README.md").read_text()
    pushed = CliRunner().invoke(
        app, ["push", str(tmp_path / "model"), "me/model", "--extra-files", "x*", "--ignore-patterns", "fid*"]
    )
    assert "Note: nothing goes for 'x*'" in pushed.output and "Stay here: fidelity.json" in pushed.output
    assert "no tokenizer" not in pushed.output
    result = CliRunner().invoke(app, ["fidelity", str(tmp_path / "source"), str(tmp_path / "source"), *texts])
    assert result.exit_code == 2 and "not a converted checkpoint" in result.output


def tiny_tokenized(folder):
    """A folder with a stock model and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate("?abcdefg")}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_model("llama").save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


VERSIONS = {  # of an installed package -> whether it is used instead of the code beside the weights
    "{}": True,
    "{}.0.0": True,
    "{short}": True,
    "v{}": True,
    "{}+local": True,
    "99": True,
    "{}rc1": False,
    "{}.dev3": False,
    "0.0.9": False,
    "no version": False,
    None: False,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_which_packages_are_used_instead_of_the_code(version, tmp_path, monkeypatch):
    folder = tmp_path / f"version_{list(VERSIONS).index(version)}"
    shutil.copytree(Path(modeling_normswap.__file__).parent, folder, ignore=shutil.ignore_patterns("__*"))
    ours = modeling_normswap.__version__
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    found = version and version.format(ours, short=ours.removesuffix(".0"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    used = dynamic_module_utils.get_class_from_dynamic_module("modeling_normswap.package", folder)
    assert used is (modeling_normswap if VERSIONS[version] else None)
