"""The commands of the README's section on fine-tuning, and each recipe's `--help`, on tiny models and local files."""

import json
import re
import runpy
import shlex
import sys

import datasets
import pytest
from test_docs import README, ROOT
from test_recipes_lm import documents, save_checkpoint

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.py") if path.name != "assets.py")
SECTION = README[README.index("## Fine-tune") : README.index("## The API")]
COMMANDS = re.findall(r"^(?:python|accelerate launch) recipes/(\w+\.py) (.*)$", SECTION, re.MULTILINE)
SMALLER = {
    "num_hidden_layers=48,hidden_size=256,": "num_hidden_layers=12,hidden_size=32,",
    "--block_size 256": "--block_size 16",
    "--heal_steps 100": "--heal_steps 2",
    "--morph_steps 100": "--morph_steps 2",
    "--seeds 0 1": "--seeds 0",
    "native pre deepnorm": "pre",
}
MODELS = {"google-bert/bert-base-uncased": "bert", "openai-community/gpt2": "gpt2"}


def run(name: str, arguments: list[str], monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"recipes/{name}", *arguments])
    runpy.run_path(str(ROOT / "recipes" / name), run_name="__main__")


@pytest.mark.parametrize("name", RECIPES)
def test_help(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(name, ["--help"], monkeypatch)
    text = capsys.readouterr().out
    assert end.value.code in (0, None) and "--" in text and f"recipes/{name}" in text


def test_every_recipe_for_training_is_in_the_readme():
    others = "benchmark_conversion benchmark_layers claims demo finetune_demo make_cards retrofit_table"
    assert {name for name, _ in COMMANDS} == set(RECIPES) - {f"{name}.py" for name in others.split()}


@pytest.mark.parametrize("name, arguments", COMMANDS)
def test_command(name, arguments, tmp_path, monkeypatch):
    for words, fewer in SMALLER.items():
        arguments = arguments.replace(words, fewer)
    arguments = shlex.split(arguments)
    for number, argument in enumerate(arguments):
        if argument in MODELS:
            folder = tmp_path / MODELS[argument]
            arguments[number] = str(folder) if folder.is_dir() else save_checkpoint(folder, MODELS[argument])
    texts = list(documents(40))
    rows = [{"text": text, "label": ("no", "yes")[len(text.split()) > 6]} for text in texts]
    for split, part in (("train", rows[:27]), ("validation", rows[27:])):
        (tmp_path / f"{split}.csv").write_text(
            "\n".join(["text,label", *[",".join(row.values()) for row in part]]) + "\n"
        )
    (tmp_path / "book.txt").write_text("\n".join(texts * 16) + "\n")
    if "--task_name" in arguments:
        features = {"sentence1": datasets.Value("string"), "sentence2": datasets.Value("string")}
        features |= {
            "label": datasets.ClassLabel(names=["not_equivalent", "equivalent"]),
            "idx": datasets.Value("int32"),
        }
        columns = {"sentence1": texts[:20], "sentence2": texts[20:], "label": [0, 1] * 10, "idx": list(range(20))}
        data = datasets.Dataset.from_dict(columns, datasets.Features(features))
        splits = datasets.DatasetDict({"train": data, "validation": data, "test": data})
        monkeypatch.setattr(datasets, "load_dataset", lambda *names: splits if names == ("glue", "mrpc") else None)
    monkeypatch.chdir(tmp_path)
    arguments = [str(ROOT / part) if part.startswith("recipes/") else part for part in arguments]
    run(name, [*arguments, "--max_train_steps", "2"], monkeypatch)
    if name == "compare.py":
        assert (tmp_path / "grid" / "table.md").read_text().count("\n") == 3
    else:
        folder = tmp_path / arguments[arguments.index("--output_dir") + 1]
        assert json.loads((folder / "all_results.json").read_text())["step"] == 2
