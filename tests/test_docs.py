"""The documents say what the code does, and the package keeps its shape."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from typer.testing import CliRunner

import hf_normswap
from hf_normswap.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLOSURE = sorted((ROOT / "hf_normswap" / "modeling").glob("*.py"))
ORDER = ["placements", "families", "architectures", "residual", "surgery", "modeling_normswap"]


def test_readme_has_the_generated_tables():
    result = CliRunner().invoke(app, ["list", "--markdown"])
    assert result.exit_code == 0 and result.output.strip() in README


def test_readme_mentions_every_public_name():
    missing = [name for name in hf_normswap.__all__ if name not in README and name != "__version__"]
    assert not missing
    assert all(getattr(hf_normswap, name).__doc__ for name in hf_normswap.__all__ if name != "__version__")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_code_runs(block, monkeypatch, tmp_path):
    model = tiny_model("llama", num_hidden_layers=30)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda name: model)

    def tokenizer(text, return_tensors=None, **kwargs):
        ids = torch.arange(4, 12)
        return {"input_ids": ids[None] if return_tensors else ids.tolist()}

    tokenizer.save_pretrained = lambda folder: None
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name, **_: tokenizer)

    (tmp_path / "corpus.txt").write_text("Call me Ishmael.\n" * 20)
    block = block.replace("steps=200", "steps=2")
    exec(block, {"model": model, "tokenizer": tokenizer})


def test_readme_commands_exist():
    for command in re.findall(r"`(normswap \w+[^`]*)`", README):
        assert CliRunner().invoke(app, [command.split()[1], "--help"]).exit_code == 0, command
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= set(targets)


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


def test_closure_is_flat_small_and_points_one_way():
    assert {path.stem for path in CLOSURE} == {"__init__", *ORDER}
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in CLOSURE) < 900
    allowed = {*sys.stdlib_module_names, "torch", "transformers"}
    for path in CLOSURE:
        for level, module in imports(path):
            if level:
                assert level == 1 and ORDER.index(module) < ORDER.index(path.stem), f"{path.name} imports {module}"
            else:
                assert module.split(".")[0] in allowed, f"{path.name} imports {module}"


def test_package_imports_point_one_way():
    order = [
        "modeling",
        "model_card",
        "calibration",
        "warm_start",
        "shards",
        "folders",
        "streaming",
        "conversion",
        "verification",
        "morph",
        "healing",
        "gates",
        "diagnostics",
        "advice",
        "symptoms",
        "doctor",
        "report",
    ]
    order += ["peft", "training", "data_files", "language_modeling", "hub", "cli"]
    for path in (ROOT / "hf_normswap").glob("*.py"):
        for level, module in imports(path):
            if level and path.stem in order:
                assert order.index(module.split(".")[0]) < order.index(path.stem), f"{path.name} imports {module}"
    for path in (ROOT / "hf_normswap" / "diagnostics").glob("*.py"):
        for level, module in imports(path):
            if level == 2:
                assert order.index(module.split(".")[0]) < order.index("diagnostics"), f"{path.name} imports {module}"


def test_importing_is_light():
    code = (
        "import sys, hf_normswap; "
        "print([m for m in sys.modules if m.startswith('transformers.models.') and '.modeling_' in m and '.auto.' not in m])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_nothing_but_the_project():
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout.split()
    top = {name.split("/")[0] for name in files if not name.startswith(".")}
    allowed = {"pyproject.toml", "hf_normswap", "recipes", "tests", "model_cards", "README.md", "Makefile", "LICENSE"}
    assert top <= allowed | {"CONTRIBUTING.md", "CHANGELOG.md"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "model_cards/README.md"])
def test_local_links_lead_somewhere(name):
    page = ROOT / name
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
    assert links or name == "CONTRIBUTING.md"
