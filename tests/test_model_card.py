"""Model cards: they say what is true, validate, and leave alone what somebody else wrote."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from local_hub import check_metadata
from tiny_models import TARGETS, VOCABULARY, tiny_batch, tiny_model
from transformers import AutoModelForCausalLM
from transformers.utils.hub import create_and_tag_model_card

from hf_normswap import NormMorph, NormSwapError, convert_checkpoint, heal, revert_checkpoint
from hf_normswap.model_card import BEGIN, END, describe_source, load_config, mark_of, write_card
from hf_normswap.modeling.placements import PLACEMENTS

ROOT = Path(__file__).parent.parent
CARDS = sorted((ROOT / "model_cards").glob("*/README.md"))
FIGURES = {
    "tokens": 1234,
    "source_loss": 3.25,
    "converted_loss": 3.5,
    "kl": 0.125,
    "top1_agreement": 0.75,
    "hidden_cosine": 0.9375,
    "sentence_cosine": 0.96875,
    "drift": [],
}
RUN = {
    "command": "python finetune.py --train_file data/train.csv --validation_file data/validation.csv",
    "arguments": {"per_device_train_batch_size": 8, "seed": 42},
    "settings": {"learning_rate": 2e-5, "warmup_steps": 100},
    "processes": 1,
    "mixed_precision": "no",
    "versions": {"torch": "2.13.0"},
}


def mark(folder):
    """What makes figures those of the conversion in a folder."""
    return {"conversion": mark_of(load_config(folder))}


def check(path):
    """Validate the metadata of a card, and its way through huggingface_hub's classes and back."""
    content = path.read_text(encoding="utf-8")
    assert check_metadata(content) == [], content
    card = ModelCard(content)
    assert str(card) == content and isinstance(card.data, ModelCardData)
    assert content.count(BEGIN) == content.count(END) == 1
    if card.data.eval_results:
        index = eval_results_to_model_index(card.data.model_name, card.data.eval_results)
        assert model_index_to_eval_results(index) == (card.data.model_name, card.data.eval_results)
    assert "None" not in content.partition(BEGIN)[2] and "\n\n\n" not in content
    return content


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["bert", "gemma2", "llama"])
def test_every_placement_has_a_card(case, target, tmp_path):
    model = tiny_model(case)
    converted = convert_checkpoint(model, TARGETS[target])
    converted.save_pretrained(tmp_path)
    content = check(tmp_path / "README.md")
    specs = TARGETS[target] if isinstance(TARGETS[target], list) else [TARGETS[target]]
    for spec in specs:
        row = PLACEMENTS.get(spec) if isinstance(spec, str) else None
        assert row is None or all(text in content for text in (f"`{row.formula}`", row.diagram, row.paper[1:]))
    task = "fill-mask" if case == "bert" else "text-generation"
    for text in (
        f"pipeline_tag: {task}",
        "library_name: transformers",
        f"# {type(model).__name__}",
        "## How to go back",
    ):
        assert text in content
    assert "base_model" not in content and "license:" not in content  # not known
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    converted.save_pretrained(tmp_path)
    write_card(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.fixture
def folder(tmp_path):
    """A saved conversion of a model from the Hub."""
    source = tiny_model("llama")
    source.config.name_or_path = "someone/tiny-llama"
    record = {"license": "mit"}
    convert_checkpoint(source, "post", norm_conversion=record).save_pretrained(tmp_path / "post")
    return tmp_path / "post"


OURS = "license: mit\nbase_model: someone/tiny-llama"
# What was there before, what must be there after, what must not.
FORMER = {
    "no metadata": ("# Mine\n\nMy text.\n", ["# Mine\n\nMy text.\n\n<!--", "license: mit"], ["# tiny-llama with"]),
    "metadata with comments": (
        "---\n# mine\nlicense: gpl-3.0  # yes\ntags: [a]\n---\n\n\nText without an end",
        [
            "---\n# mine\nlicense: gpl-3.0  # yes\ntags: [a]\nbase_model: someone",
            "---\n\n\nText without an end\n\n<!--",
        ],
        ["license: mit", "- post"],
    ),
    "carriage returns": (
        "---\r\nlicense: gpl-3.0\r\n---\r\n# Mine\r\n",
        ["# Mine\r\n\r\n<!--", "## Limits\r\n"],
        ["mit"],
    ),
    "carriage returns in places": (
        "---\nlicense: gpl-3.0\n---\n# Mine\r\nOne.\nTwo.\r\n",
        ["# Mine\r\nOne.\nTwo.\r\n\n<!--", "## Limits\n"],
        ["mit"],
    ),
    "odd values": (
        "---\nother: {1: a, b: 2024-01-01}\nlanguage: no\n---\n# Mine\n",
        ["other: {1: a, b: 2024-01-01}\nlanguage: no\n", "license: mit\n"],
        ["language: en"],
    ),
    "only metadata": ("---\nlanguage: fr\n---\n", ["language: fr\n", "license: mit\n"], ["language: en"]),
}


@pytest.mark.parametrize("former", FORMER)
def test_what_somebody_wrote_stays(former, folder):
    before, present, absent = FORMER[former]
    (folder / "README.md").write_bytes(before.encode())
    for _ in range(2):
        write_card(folder)
        content = (folder / "README.md").read_bytes().decode()
        assert all(text in content for text in present), content
        metadata = content.partition("\n---")[0]
        assert not any(text in metadata or f"\n{text}" in content for text in absent)
        assert content.count(BEGIN) == 1 and check_metadata(content) == []
    everywhere = before.count("\r") == before.count("\n")
    assert content.count("\r") == (content.count("\n") if everywhere else before.count("\r"))


def test_changes_to_our_part_and_metadata(folder):
    path = folder / "README.md"
    text = path.read_text().replace("license: mit", "license: apache-2.0").replace("- norm-placement\n", "")
    text = text.replace("pipeline_tag: text-generation\n", "").replace("## Limits", "## Changed")
    path.write_text(text.replace(BEGIN, f"Before.\n\n{BEGIN}") + "\nBehind.\n")
    write_card(folder, fidelity=FIGURES, tags=["more"])
    content = path.read_text()
    metadata = content.partition("\n---")[0]
    assert "license: apache-2.0" in metadata and "norm-placement" not in metadata and "- more" not in metadata
    assert "pipeline_tag" not in metadata and "base_model: someone/tiny-llama" in metadata
    assert "Before.\n\n<!--" in content and content.endswith("-->\n\nBehind.\n")
    assert "## Changed" not in content and "| 3.250 | 3.500 |" in content


def test_metadata_of_ours_follows_the_model(folder):
    converted = convert_checkpoint(folder, "sandwich")
    converted.save_pretrained(folder)
    content = check(folder / "README.md")
    assert "- sandwich\n" in content and "- post\n" not in content
    steps = content.partition("## Where it comes from")[2].partition("## How good")[0]
    assert steps.index("From `pre` to `post`") < steps.index("From `post` to `sandwich`")
    assert "someone/tiny-llama" in steps and "licence mit" in steps


DEEP = "[" * 20_000
LAUGHS = "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9) if a else 'x'}]\n" for a, b in zip(["", *"abcdefgh"], "abcdefghi")
)
BROKEN = {
    "end mark gone": (f"# Mine\n\n{BEGIN}\n\ntext\n", "the end mark"),
    "metadata is no YAML": ("---\na: [\n---\n# Mine\n", "its metadata is no YAML"),
    "metadata is deep": (f"---\na: {DEEP}\n---\n# Mine\n", "its metadata is no YAML"),
    "metadata unfolds": (f"---\n{LAUGHS}license: *i\n---\n# Mine\n", "its metadata is no YAML"),
    "metadata of ours is odd": (
        f'---\nlicense: {{1: a, b: c}}\n---\n{BEGIN}\n{END} {{"license": "0"}} -->\n',
        "TypeError",
    ),
    "end mark is a list": (f"# Mine\n{BEGIN}\n{END} [1] -->\n", "the end mark"),
    "end mark is no JSON": (f"# Mine\n{BEGIN}\n{END} {{bad -->\n", "the end mark"),
    "Latin-1": ("# \xc4\n".encode("latin-1"), "UnicodeDecodeError"),
    "metadata is a list": ("---\n- a\n---\n# Mine\n", "its metadata is no mapping"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_cannot_be_read_is_left_alone(broken, folder, monkeypatch, caplog):
    content, message = BROKEN[broken]
    content = content if isinstance(content, bytes) else content.encode()
    (folder / "README.md").write_bytes(content)
    with pytest.raises(NormSwapError, match=message):
        write_card(folder, fidelity=FIGURES)
    monkeypatch.setattr(logging.getLogger("hf_normswap"), "propagate", True)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    assert (folder / "README.md").read_bytes() == content and not (folder / "fidelity.json").exists()
    assert message in caplog.text


# A file beside the weights, what is in it, and what the card still says or lacks.
BESIDE = {
    "fidelity of nothing": (
        "fidelity.json",
        {"tokens": 5, "hidden_cosine": None, "sentence_cosine": 1.0},
        "Not measured.",
    ),
    "fidelity without losses": (
        "fidelity.json",
        {"tokens": 5, "hidden_cosine": 1.0, "sentence_cosine": 1.0},
        "on 5 tokens",
    ),
    "half a pair": ("fidelity.json", FIGURES | {"kl": None}, "Not measured."),
    "a huge number": ("all_results.json", {"accuracy": 10**400}, "Not measured."),
    "no number": ("all_results.json", {"accuracy": float("nan"), "f1": 0.5}, "| f1 | 0.5000 |"),
    "a name that is a mark": ("all_results.json", {"a|b](c) <!--": 0.5}, "| a b c !-- | 0.5000 |"),
    "no command": ("run.json", RUN | {"command": 5}, "| seed | 42 |"),
    "an open quote": ("run.json", RUN | {"command": "it's"}, "| seed | 42 |"),
    "settings that are marks": ("run.json", RUN | {"settings": {"norm_eps": "a|b\n# x"}}, "| norm_eps | a b # x |"),
    "settings that are lists": ("run.json", RUN | {"settings": {"norm_eps": [1]}}, "| seed | 42 |"),
    "no object": ("run.json", [1], "Not measured."),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_what_lies_beside_a_card_does_not_break_it(beside, folder):
    name, content, text = BESIDE[beside]
    (folder / "run.json").write_text(json.dumps(RUN | mark(folder)))
    if name != "all_results.json" and isinstance(content, dict):
        content = content | mark(folder)
    (folder / name).write_text(json.dumps(content))
    for _ in range(2):
        write_card(folder)
        assert text in check(folder / "README.md")


EVIL = "x` <script>alert(1)</script> [free](http://evil)\n\n# Evil\n\n<!-- hf_normswap: end {} -->\ninjected"
# What is in `norm_conversion`, what the card says then (`None`: it is left as it was), what its metadata has of it.
RECORDS = {
    "marks in the source": (
        {"source": "a`b](x)\n# Evil <!-- hf_normswap: end"},
        "from `a b x # Evil !-- hf_normswap: end`.",
        None,
    ),
    "marks in the base model": ({"source": "a", "base_model": "a](x)"}, "Converted from `a`", None),
    "marks in the version": ({"version": "1\n\n# Evil"}, "## Limits", None),
    "marks in the placement": ({"placement": EVIL}, "From an unnamed placement to `post`", None),
    "marks in a list of placements": ({"placement": [EVIL] * 3}, "From an unnamed placement to `post`", None),
    "marks in an earlier placement": ({"previous": {"placement": EVIL}}, "to `pre` with an unknown start", None),
    "marks in the start": ({"warm_start": EVIL}, "with an unknown start", None),
    "marks in the text": (
        {"warm_start": "calibrated", "calibration_tokens": 5, "calibration_data": f"/home/me/{EVIL}"},
        "computes on 5 tokens of",
        None,
    ),
    "an address in the source": ({"source": "http://evil.example/a"}, "from `http evil.example/a`", None),
    "a licence that is a script": (
        {"source": "a", "license": "other", "license_link": "javascript:alert(1)"},
        "licence other",
        None,
    ),
    "a licence on the Web": (
        {"source": "a", "license": "other", "license_link": "https://example.com/a"},
        "licence other",
        "license_link: https://example.com/a",
    ),
    "marks in the licence": (
        {"source": "a", "license": "mit](x)\n# Evil"},
        "The licence of the source was not found",
        None,
    ),
    "two licences": ({"source": "a", "license": ["mit", "apache-2.0"]}, "licence mit, apache-2.0.", "- apache-2.0"),
    "a licence of nothing": ({"source": "a", "license": {"a": 1}}, "The licence of the source was not found", None),
    "Norwegian": ({"language": ["en", "no"]}, "## Limits", "- 'no'"),
    "a source that is a list": ({"source": ["a"]}, None, None),
    "steps that are text": ({"morph_steps": "x"}, None, None),
    "something before that is text": ({"previous": "x"}, None, None),
}


@pytest.mark.parametrize("record", RECORDS)
def test_what_a_config_says_does_not_break_a_card(record, folder, monkeypatch, caplog):
    fields, text, metadata = RECORDS[record]
    monkeypatch.setattr(logging.getLogger("hf_normswap"), "propagate", True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.norm_conversion = {"placement": "pre", "warm_start": "none", **fields}
    (folder / "README.md").unlink()
    for _ in range(2):
        model.save_pretrained(folder)
        if text is None:
            assert "was left as it is" in caplog.text and not (folder / "README.md").exists()
            continue
        content = (folder / "README.md").read_text()
        assert text in content and content.count(BEGIN) == content.count(END) == 1
        evil = ("\n# Evil", "](x)", "<script>", "](http://evil)", "javascript", "\ninjected", "/home/me", "//evil")
        assert not any(text in content for text in evil)
        assert metadata is None or metadata in content.partition("\n---")[0]
    convert_checkpoint(model, "sandwich").save_pretrained(folder)  # it can still be brought up to date
    assert text is None or "- sandwich\n" in (folder / "README.md").read_text()


def test_a_licence_that_cannot_be_one_is_refused(folder):
    with pytest.raises(NormSwapError, match="is no licence"):
        write_card(folder, license="all rights\nreserved")


def test_what_is_not_converted_has_no_card(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(NormSwapError, match="not a converted checkpoint"):
        write_card(tmp_path)
    with pytest.raises(NormSwapError, match="no config.json"):
        write_card(tmp_path / "nothing")
    assert not list(tmp_path.glob("*.md*"))


def test_a_card_keeps_the_conversion_through_training_and_loses_it_on_reverting(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(**tiny_batch(), labels=tiny_batch()["input_ids"]).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "tuned")
    content = check(tmp_path / "tuned" / "README.md")
    assert OURS.splitlines()[1] in content and "From `pre` to `post` with the weights as they were." in content
    stock = revert_checkpoint(tmp_path / "tuned")
    assert not hasattr(stock.config, "norm_conversion")
    stock.save_pretrained(tmp_path / "stock")
    assert "norm_conversion" not in (tmp_path / "stock" / "config.json").read_text()
    assert not (tmp_path / "stock" / "README.md").exists()


def test_healing_morphs_and_calibration_are_told(tmp_path):
    source = tiny_model("llama")
    ids = torch.randint(4, VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(0))
    morph = NormMorph(convert_checkpoint(source, "post", warm_start="exact"), steps=3)
    morph.model.save_pretrained(tmp_path / "on the way")
    assert "leads them to `post`" in check(tmp_path / "on the way" / "README.md")
    for _ in range(3):
        morph.step()
    healed = convert_checkpoint(source, "post", warm_start="calibrated", calibration=ids)
    heal(source, healed, ids, steps=2)
    sentences = {
        "morph": (morph.finish(), ["with an exact start", "over 3 steps of training", "bit for bit"]),
        "heal": (
            healed,
            ["computes on 256 tokens", "Then 2 steps of self-distillation", "the calibrated start rewrote"],
        ),
    }
    for name, (model, texts) in sentences.items():
        model.save_pretrained(tmp_path / name)
        content = check(tmp_path / name / "README.md")
        assert all(text in content for text in texts), content


def test_settings_and_results(folder):
    (folder / "run.json").write_text(json.dumps(RUN | mark(folder)))
    (folder / "all_results.json").write_text(
        json.dumps({"step": 9, "accuracy": 0.875, "loss": 0.5, "train_loss": 1.0})
    )
    write_card(folder)
    content = check(folder / "README.md")
    for text in (
        "| accuracy | 0.8750 |",
        "| learning_rate | 2e-05 |",
        "Then it was fine-tuned on train.csv: see [Training](#training).",
        "After training, on validation.csv:",
        "| training data | train.csv |",
        "base_model_relation: finetune",
    ):
        assert text in content
    assert "data/" not in content  # no paths
    results = ModelCard(content).data.eval_results
    assert {result.metric_type: result.metric_value for result in results} == {"accuracy": 0.875, "loss": 0.5}
    assert {(result.dataset_name, result.dataset_type) for result in results} == {("validation.csv", "csv")}
    (folder / "run.json").write_text(json.dumps(RUN | mark(folder) | {"data": "/home/me/Reviews"}))
    write_card(folder, fidelity=FIGURES)
    content = check(folder / "README.md")
    assert {result.dataset_name for result in ModelCard(content).data.eval_results} == {"Reviews (validation.csv)"}
    for text in (
        "fine-tuned on Reviews (train.csv)",
        "| training data | Reviews (train.csv) |",
        "Before it was fine-tuned, compared with",
    ):
        assert text in content
    assert "train it before you use it" not in content


def test_figures_of_another_conversion_are_left_out(folder):
    source = tiny_model("llama")
    write_card(folder, fidelity=FIGURES)
    (folder / "run.json").write_text(json.dumps(RUN | mark(folder)))
    (folder / "all_results.json").write_text(json.dumps({"accuracy": 0.125}))
    write_card(folder)
    ours = ("0.9375", "| accuracy | 0.1250 |", "## Training")
    assert all(text in check(folder / "README.md") for text in ours)
    for placement, options in {
        "resi_dual": {},
        "post": {"layers": [0]},
        "gated": {"norm_gate": 0.5},
        "deepnorm": {"norm_alpha": 2.0},
    }.items():
        convert_checkpoint(source, placement, **options).save_pretrained(folder)
        content = check(folder / "README.md")
        assert not any(text in content for text in ours) and "Not measured." in content


PRE, FAR = {"placement": "pre"}, "train it before you use it."
# What a model is converted to, and how -> what its card says, and lacks.
SAID = {
    "a point": (
        {"placement": {"skip_norm": 0.5, "output_norm": 0.25, "branch_gain": 0.75, "stem_norm": 1.0}},
        [
            "# tiny-llama with a norm placement without a name",
            "z₀ = N(embeddings)\ny  = N(z)\nx  = y\nf  = 0.75·((1 - 0.25)·F(x) + 0.25·N'(F(x)))\nz' = (1 - 0.5)·z + 0.5·y + f\n```",
        ],
        ["custom", "skip_gain", "`unnamed", FAR + " x"],
    ),
    "a point with what is trained": (
        {"placement": {"skip_norm": 1, "dual": 1, "learned": [["skip_gain", "channel"]]}},
        [
            "z' = skip_gain·y + f\nd' = d + f\nat the end: N_final(z) + N_dual(d)\nskip_gain: trained, one per channel, from 1\n",
        ],
        ["custom"],
    ),
    "on its way": (
        {"placement": "deepnorm", "warm_start": "exact"},
        [
            "# tiny-llama with norm placement pre, on its way to deepnorm",
            "still act as in `pre`, and `NormMorph` of hf_normswap leads them to `deepnorm`",
            "z' = (1 - skip_norm)·z + skip_norm·1.565·y + f\nskip_norm: moved by NormMorph, from 0\n",
            "- pre\n",
        ],
        ["custom", "- deepnorm", FAR],
    ),
    "a gain by depth": ({"placement": "deepnorm"}, ["Here α = 1.565.", FAR], []),
    "a gain that is given": ({"placement": "deepnorm", "norm_alpha": 2.5}, ["Here α = 2.5."], []),
    "gates": (
        {"placement": "gated"},
        ["start at g = 0, where it computes what its source does", "mere warning, without what was added"],
        [FAR, "base_model_relation"],
    ),
    "gates in between": (
        {"placement": "gated", "norm_gate": 0.2},
        ["start at g = 0.2, where it does not compute", "mere warning, and computes something else", FAR],
        [],
    ),
    "some layers": (
        {"placement": ["pre", "post", "post"]},
        [
            "# tiny-llama with layers 1 to 2 moved to post",
            "as in `post` in layers 1 to 2;",
            "From `pre`: layers 1 to 2 moved",
        ],
        ["`pre`, `post`"],
    ),
    "as it is": ({"placement": "post"}, ["# tiny-llama with norm placement post", FAR], ["base_model_relation"]),
    "calibrated": (
        {"placement": "post", "warm_start": "calibrated", "calibration": [[*range(4, 36)] * 40]},
        ["base_model_relation: finetune", "expect it to be farther"],
        [" tokens of"],
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_what_a_card_says_of_a_conversion(said, tmp_path):
    options, present, absent = SAID[said]
    source = tiny_model("llama")
    source.config.name_or_path = "someone/tiny-llama"
    convert_checkpoint(source, **options).save_pretrained(tmp_path)
    content = check(tmp_path / "README.md")
    for text in present:
        assert text in content, content
    assert not any(text in content for text in absent), content


MEASURED = {  # figures that differ from FIGURES -> what the card says, and lacks
    "near": ({"converted_loss": 3.34}, [], [FAR]),
    "far by its loss": ({"converted_loss": 3.36}, [FAR], []),
    "far by a cosine": ({"converted_loss": 3.3, "sentence_cosine": 0.89}, [FAR], []),
    "the same": (
        {"converted_loss": 3.25, "hidden_cosine": 0.99999, "sentence_cosine": 1.0},
        ["Up to rounding"],
        [FAR, "expect it to be farther"],
    ),
    "a name": ({"data": "Emma"}, ["on 1,234 tokens of Emma:"], []),
    "a data set": ({"data": "stanfordnlp/imdb"}, ["on 1,234 tokens of stanfordnlp/imdb:"], []),
    "a path": ({"data": "/home/me/secret/held_out.txt"}, ["on 1,234 tokens of held_out.txt:"], ["/home", "secret"]),
    "a path from here": ({"data": "secret/held_out.txt"}, ["on 1,234 tokens of held_out.txt:"], ["secret"]),
    "a path of Windows": ({"data": "C:\\me\\held_out.txt"}, ["on 1,234 tokens of held_out.txt:"], ["me\\"]),
    "marks": ({"data": "[a](http://b) <script>"}, ["on 1,234 tokens of "], ["](", "<script"]),
}


@pytest.mark.parametrize("measured", MEASURED)
def test_what_figures_come_to(measured, tmp_path):
    changed, present, absent = MEASURED[measured]
    ids = [[*range(4, 36)] * 40]
    convert_checkpoint(tiny_model("llama"), "post", warm_start="calibrated", calibration=ids).save_pretrained(tmp_path)
    write_card(tmp_path, fidelity=FIGURES | changed)
    content, figures = check(tmp_path / "README.md"), json.loads((tmp_path / "fidelity.json").read_text())
    assert all(text in content for text in present), content
    assert not any(text in content or text in json.dumps(figures) for text in absent), content


NO_FIGURES = ({"tokens": 1}, {}, "abc", 5, [FIGURES], FIGURES | {"hidden_cosine": "<script>"}, FIGURES | {"kl": {1}})


@pytest.mark.parametrize("figures", NO_FIGURES, ids=range(len(NO_FIGURES)))
def test_what_are_no_figures_is_refused(figures, folder):
    before = (folder / "README.md").read_bytes()
    with pytest.raises(NormSwapError, match="`fidelity` takes"):
        write_card(folder, fidelity=figures)
    assert (folder / "README.md").read_bytes() == before and not (folder / "fidelity.json").exists()


def test_how_to_load_a_model_with_its_tokenizer(folder):
    assert 'AutoTokenizer.from_pretrained("someone/tiny-llama")' in (folder / "README.md").read_text()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modules.json").write_text("[]")
    write_card(folder, repo_id="me/model")
    content = check(folder / "README.md")
    for text in (
        'AutoTokenizer.from_pretrained("me/model", trust_remote_code=True)',
        'SentenceTransformer("me/model", trust_remote_code=True)',
        "- sentence-transformers\n",
    ):
        assert text in content


def test_a_quantised_model_is_called_that(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": "int8"}
    (folder / "config.json").write_text(json.dumps(config))
    write_card(folder)
    content = check(folder / "README.md")
    assert "Its weights are quantised (torchao)." in content and "base_model_relation: quantized" in content
    assert "with these quantised tensors" in content and "bit for bit" not in content


@pytest.mark.parametrize("name", ["README.md", "fidelity.json", "run.json", "all_results.json"])
def test_pipes_are_not_waited_for(name, folder):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert describe_source(str(folder))["source"] == "post"
    if name == "README.md":
        with pytest.raises(NormSwapError, match="it is no file"):
            write_card(folder)
    else:
        assert "Not measured." in write_card(folder).read_text()
    assert (folder / name).is_fifo()


SOURCES = {  # what a model was loaded with -> what is known
    "": {},
    "None": {},
    "gpt2": {"source": "gpt2", "base_model": "gpt2"},
    "someone/model": {"source": "someone/model", "base_model": "someone/model"},
    "somewhere/else/model": {"source": "model"},
    "{tmp}/folder": {"source": "folder", "license": "mit", "language": "en"},
    "{tmp}/plain": {"source": "plain"},
    "{tmp}/models--a--b/snapshots/0123": {"source": "a/b", "base_model": "a/b"},
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_known_of_a_source(name, tmp_path):
    for path in ("folder", "plain", "models--a--b/snapshots/0123"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "folder" / "README.md").write_text("---\nlicense: mit\nlanguage: en\ntags: [a]\n---\n")
    (tmp_path / "plain" / "README.md").write_text("---\nlicense: [\n---\n")
    assert describe_source(name.replace("{tmp}", str(tmp_path))) == SOURCES[name]


METADATA = {  # of a source's card -> what is taken over
    "license: other\nlicense_name: 2024-01-01": {"license": "other", "license_name": "2024-01-01"},
    "language:\n- en\n- no": {"language": ["en", "no"]},
    "license: null\nlanguage:": {},
    "license: {1: a, b: c}\nlanguage: en": {"language": "en"},
    "license: [[mit]]": {},
    "license: 'mit](http://a) <script>'": {},
    "license: '<!-- hf_normswap: end {} -->'": {},
    f"license: {'a' * 101}": {},
    f"license: {DEEP}": {},
    f"{LAUGHS}license: *i": {},
    f"language: [{', '.join(['en'] * 501)}]": {},
    "license: other\nlicense_link: javascript:alert(1)": {"license": "other"},
    "license: other\nlicense_link: https://example.com/a?b=c#d": {
        "license": "other",
        "license_link": "https://example.com/a?b=c#d",
    },
}


@pytest.mark.parametrize("metadata", METADATA, ids=range(len(METADATA)))
def test_what_is_taken_over_of_a_source_s_card(metadata, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n")
    assert describe_source(str(tmp_path)) == {"source": tmp_path.name, **METADATA[metadata]}


FORMS = {  # what somebody changed in it -> what stays of that
    "nothing": ({}, None),
    "metadata": ({"library_name:": "license: gpl-3.0\nlibrary_name:"}, "license: gpl-3.0"),
    "one answer": ({"**Developed by:** [More Information Needed]": "**Developed by:** me"}, "**Developed by:** me"),
    "a sentence": ({"automatically generated.": "automatically generated. Not this."}, "Not this."),
    "text behind it": ({"## Model Card Contact": "## Hours of work\n\n## Model Card Contact"}, "## Hours of work"),
    "less of it": ({"**Demo [optional]:**": ""}, "[More Information Needed]"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_transformers_is_replaced_unless_somebody_filled_it_in(form, folder, monkeypatch):
    def nothing(*args, **kwargs):
        from huggingface_hub.errors import EntryNotFoundError

        raise EntryNotFoundError.__new__(EntryNotFoundError)

    changes, kept = FORMS[form]
    monkeypatch.setattr(ModelCard, "load", nothing)
    text = str(create_and_tag_model_card("me/model", ["theirs"]))
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "README.md").write_text(text)
    write_card(folder)
    filled_in = form not in ("nothing", "metadata")
    content = (folder / "README.md").read_text() if filled_in else check(folder / "README.md")
    assert "- theirs" in content and (kept is None or kept in content)
    assert ("More Information" in content) == filled_in and ("- post" in content) != filled_in


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)
def test_the_cards_here_are_up_to_date(card, tmp_path):
    for file in card.parent.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "README.md").unlink()
    write_card(tmp_path)
    assert check(tmp_path / "README.md") == card.read_text(encoding="utf-8"), "python recipes/make_cards.py"


def test_every_placement_and_variant_has_a_card_here():
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from make_cards import TRAINED, VARIANTS
    finally:
        sys.path.pop(0)
    assert {*VARIANTS} <= {card.parent.name for card in CARDS} <= {*VARIANTS, *TRAINED}
    assert {spec for _, spec, _ in VARIANTS.values() if isinstance(spec, str)} == set(PLACEMENTS)
    for path in CARDS:
        content = path.read_text(encoding="utf-8")
        assert ("After training" if path.parent.name in TRAINED else "tokens of Emma:") in content
        assert path.parent.name in (ROOT / "model_cards" / "README.md").read_text()
