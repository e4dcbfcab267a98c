"""The recipes for language models, on tiny models and local files."""

import json
import math
import pydoc
import shutil
import sys
from pathlib import Path

import distill
import finetune_clm
import finetune_mlm
import pretrain
import pytest
import torch
from matplotlib.figure import Figure
from tiny_models import VOCABULARY, scramble, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    set_seed,
)

from hf_normswap import NormSwapError, NormSwapGPT2Config, convert_checkpoint
from hf_normswap.language_modeling import MODELS, TextArguments, check_text, load_text, make_blocks
from hf_normswap.training import ModelArguments, RunArguments

NAMES = (
    "unk_token",
    "pad_token",
    "bos_token",
    "eos_token",
    "mask_token",
    "cls_token",
    "sep_token",
)  # of tokens 0 to 6
OBJECTIVES = {"gpt2": "causal", "llama": "causal", "bert": "masked", "roberta": "masked"}
RECIPES = {"finetune_clm": finetune_clm, "finetune_mlm": finetune_mlm, "pretrain": pretrain, "distill": distill}


@pytest.fixture(autouse=True)
def fast_and_clean(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("hf_normswap.training.plot_history", lambda history: Figure())  # most of the time


def save_tokenizer(folder, case="gpt2", without=(), words=VOCABULARY):
    """Special tokens, and words w7, w8, ...; encoders get [CLS] in front of a text and [SEP] behind it."""
    vocabulary = [f"[{name.removesuffix('_token').upper()}]" for name in NAMES] + [f"w{i}" for i in range(7, words)]
    vocabulary = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = OBJECTIVES[case] == "masked"
    if encoder:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 6), ("[CLS]", 5))
    special = dict(zip(NAMES if encoder else NAMES[:5], vocabulary))
    special = {name: token for name, token in special.items() if name not in without}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_checkpoint(folder, case="gpt2", head=True, seed=0, without=(), init=0.1, **overrides):
    set_seed(seed)
    model = scramble(MODELS[OBJECTIVES[case]].from_config(tiny_config(case, initializer_range=init, **overrides)))
    (model if head else model.base_model).save_pretrained(folder)
    save_tokenizer(folder, case, without)
    return str(folder)


def documents(count, seed=0):
    """Texts in which a word mostly says which the next one is."""
    generator = torch.Generator().manual_seed(seed)
    for length in torch.randint(3, 12, (count,), generator=generator).tolist():
        word, text = int(torch.randint(7, VOCABULARY, (), generator=generator)), []
        for jump in torch.randint(1, 3, (length,), generator=generator).tolist():
            text.append(f"w{word}")
            word = 7 + (word - 7 + jump) % (VOCABULARY - 7)
        yield " ".join(text)


def write(path, texts, column="text"):
    """As csv or as txt, by the name."""
    lines = [column, *texts] if path.suffix == ".csv" else texts
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def files(tmp_path):
    return {
        "train_file": write(tmp_path / "train.csv", documents(60)),
        "validation_file": write(tmp_path / "validation.csv", documents(20, seed=1)),
    }


def recipe(name, output_dir, text, model=(), own=(), **options):
    """Run a recipe with `model` and `own` for its dataclasses of arguments and `options` for the run."""
    module, options = RECIPES[name], {"per_device_train_batch_size": 4, "max_train_steps": 2} | options
    text = TextArguments(**{"block_size": 16} | text)
    args = RunArguments(str(output_dir), **options)
    if name == "pretrain":
        return module.run(pretrain.NewModelArguments(**dict(model)), text, args)
    extra = {"finetune_clm": "HealArguments", "distill": "DistillArguments"}.get(name)
    return module.run(
        ModelArguments(**dict(model)), text, *([getattr(module, extra)(**dict(own))] if extra else []), args
    )


def history(folder, key=None):
    entries = json.loads((folder / "history.json").read_text())
    return entries if key is None else [entry[key] for entry in entries if key in entry]


def blocks(checkpoint, text, case="gpt2", objective=None, **options):
    """The blocks of a recipe, as lists."""
    tokenizer, objective = AutoTokenizer.from_pretrained(checkpoint), objective or OBJECTIVES[case]
    args = RunArguments("unused", **options)
    text = check_text(TextArguments(**text), tokenizer, tiny_config(case), objective)
    return {
        split: list(rows)
        for split, rows in make_blocks(load_text(text, args), text, args, tokenizer, objective).items()
    }


def joined(rows):
    return [token for row in rows for token in row["input_ids"]]


def tokens(texts, start=(), end=(3,)):
    return [token for text in texts for token in [*start, *[int(word[1:]) for word in text.split()], *end]]


@pytest.mark.parametrize("name", RECIPES)
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        RECIPES[name].main()
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"--{flag} " in out for flag in ("block_size", "placement", "learning_rate"))


# --- text in blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_packing_loses_but_the_tail(streaming, tmp_path, files):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    options = {"streaming": streaming, "shuffle_buffer_size": 1, "block_size": 16}
    found = blocks(tmp_path / "tokenizer", files | options, max_train_steps=1, max_eval_samples=9)
    wanted = tokens(documents(60))
    assert joined(found["train"]) == wanted[: len(wanted) // 16 * 16]
    assert joined(found["validation"]) == tokens(documents(20, seed=1))[: 9 * 16]
    assert {len(row["input_ids"]) for row in found["train"]} == {16}
    assert tokenizer.eos_token_id in found["train"][0]["input_ids"]


def test_lines_of_a_text_file_are_one_document(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    files = {
        "train_file": write(tmp_path / "a.txt", documents(60)),
        "validation_file": write(tmp_path / "b.txt", ["w9 w8"]),
    }
    found = blocks(tmp_path / "tokenizer", files | {"block_size": 2})
    wanted = tokens(documents(60), end=())
    assert joined(found["train"]) == wanted[: len(wanted) // 2 * 2] and joined(found["validation"]) == [9, 8]


def test_words_for_nothing_are_text(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    file = write(tmp_path / "a.csv", ["null", "NA", "w9"])
    found = blocks(tmp_path / "tokenizer", {"train_file": file, "validation_file": file, "block_size": 2})
    assert joined(found["train"]) == [0, 3, 0, 3, 9, 3]


def test_documents_begin_as_the_tokenizer_has_it(tmp_path, files):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 2)]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    found = blocks(tmp_path / "tokenizer", files | {"block_size": 16})
    wanted = tokens(documents(60), start=(2,))
    assert joined(found["train"]) == wanted[: len(wanted) // 16 * 16]
    found = blocks(tmp_path / "tokenizer", files | {"block_size": 6, "line_by_line": True})
    assert [row["input_ids"] for row in found["train"]] == [
        [2, *tokens([text], end=())[:4], 3] for text in documents(60)
    ]


def test_blocks_of_encoders_are_whole(tmp_path, files):
    save_tokenizer(tmp_path / "tokenizer", "bert")
    found = blocks(tmp_path / "tokenizer", files | {"block_size": 16}, "bert")
    assert all(row["input_ids"][0] == 5 and row["input_ids"][-1] == 6 for row in found["train"])
    inside = [token for row in found["train"] for token in row["input_ids"][1:-1]]
    wanted = tokens(documents(60), end=(6,))
    assert inside == wanted[: len(wanted) // 14 * 14]
    for row in found["validation"]:
        masked = [label != -100 for label in row["labels"]]
        assert len(masked) == 16 and not masked[0] and not masked[-1] and sum(masked) < 10
        assert all(token == 4 or token > 0 for token, hidden in zip(row["input_ids"], masked) if hidden)
    assert found == blocks(tmp_path / "tokenizer", files | {"block_size": 16}, "bert", seed=7)


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_rows_are_not_trained_on(streaming, tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    texts = [f"w{number} w{number}" for number in range(7, 67)]
    files = {"train_file": write(tmp_path / "train.csv", texts), "validation_split_percentage": 10}
    options = {"streaming": streaming, "block_size": 3}
    found = blocks(tmp_path / "tokenizer", files | options, max_train_steps=1, max_eval_samples=100)
    assert len(found["validation"]) == 6 and len(found["train"]) == 54
    assert set(joined(found["validation"])) & set(joined(found["train"])) == {3}


# --- recipes ----------------------------------------------------------------------------------------------------------


def nll(model, rows, causal, batch_size=1):
    """Sum and number of the losses of tokens, with the rows one by one."""
    total, count = 0.0, 0
    for row in rows:
        ids, labels = (torch.tensor([row.get(key, row["input_ids"])]) for key in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits.log_softmax(-1)
        logits, labels = (logits[0, :-1], labels[0, 1:]) if causal else (logits[0], labels[0])
        kept = labels != -100
        total -= logits[kept].gather(-1, labels[kept][:, None]).sum().item()
        count += int(kept.sum())
    return total, count


@pytest.mark.parametrize(
    "case, placement", [("gpt2", "post"), ("llama", None), ("bert", "pre"), ("roberta", "deepnorm")]
)
def test_trains_and_measures_perplexity(case, placement, tmp_path, files):
    checkpoint, out = save_checkpoint(tmp_path / "checkpoint", case), tmp_path / "out"
    causal, name = OBJECTIVES[case] == "causal", "finetune_clm" if OBJECTIVES[case] == "causal" else "finetune_mlm"
    model = {"model_name_or_path": checkpoint, "placement": placement and [placement]}
    options = {"max_train_steps": 40, "learning_rate": 1e-2, "eval_steps": 20, "per_device_eval_batch_size": 3}
    results = recipe(name, out, files, model, **options)
    loaded = MODELS[OBJECTIVES[case]].from_pretrained(out)
    assert getattr(loaded.config, "norm_placement", None) == placement
    total, count = nll(loaded, blocks(checkpoint, files | {"block_size": 16}, case)["validation"], causal)
    assert results["tokens"] == count and results["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert results["loss"] == pytest.approx(total / count, rel=1e-5)
    assert len(history(out, "perplexity")) == 2
    assert sum(history(out, "train_loss")[-5:]) < 0.96 * sum(history(out, "train_loss")[:5])
    assert len(AutoTokenizer.from_pretrained(out)) == VOCABULARY


@pytest.mark.parametrize("name, case", [("finetune_clm", "gpt2"), ("finetune_mlm", "bert")])
def test_evaluation_does_not_depend_on_batches(name, case, tmp_path, files):
    checkpoint, found = save_checkpoint(tmp_path / "checkpoint", case), []
    for line_by_line in (False, True):
        for size in (1, 7):
            options = {"per_device_eval_batch_size": size, "learning_rate": 1e-9, "max_train_steps": 1, "seed": size}
            text = files | {"line_by_line": line_by_line}
            found.append(
                recipe(name, tmp_path / f"{line_by_line}{size}", text, {"model_name_or_path": checkpoint}, **options)
            )
    for one, other in (found[:2], found[2:]):
        assert one["tokens"] == other["tokens"] and one["loss"] == pytest.approx(other["loss"], rel=1e-5)


STREAMS = {  # recipe, case, text, options
    "causal": ("finetune_clm", "gpt2", {}, {}),
    "masked": ("finetune_mlm", "bert", {}, {"gradient_accumulation_steps": 2}),
    "rows": ("finetune_mlm", "bert", {"line_by_line": True}, {}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_resumed_stream_equals_an_uninterrupted_one(name, tmp_path, files):
    name, case, text, options = STREAMS[name]
    text = files | {"streaming": True, "shuffle_buffer_size": 5} | text
    options = {"save_steps": 1, "max_train_steps": 8, "per_device_train_batch_size": 12} | options
    model = {"model_name_or_path": save_checkpoint(tmp_path / "checkpoint", case), "placement": ["peri"]}
    recipe(name, tmp_path / "whole", text, model, **options)
    wanted = MODELS[OBJECTIVES[case]].from_pretrained(tmp_path / "whole").state_dict()
    for step in (1, 7):  # in the first epoch, and in a later one
        resume = {"resume_from_checkpoint": str(tmp_path / "whole" / f"checkpoint-{step}")}
        recipe(name, tmp_path / f"resumed{step}", text, model, **options, **resume)
        assert history(tmp_path / f"resumed{step}") == history(tmp_path / "whole")
        found = MODELS[OBJECTIVES[case]].from_pretrained(tmp_path / f"resumed{step}").state_dict()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_healing_comes_first(tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", init=0.4)
    trained = {"max_train_steps": 20, "learning_rate": 1e-2}
    recipe("finetune_clm", tmp_path / "source", files, {"model_name_or_path": checkpoint}, **trained)
    model = {"model_name_or_path": str(tmp_path / "source"), "placement": ["post"], "warm_start": "none"}
    found = {}
    options = {"max_train_steps": 3, "save_steps": 2, "learning_rate": 1e-6, "gradient_accumulation_steps": 2}
    for steps in (0, 50):
        found[steps] = recipe("finetune_clm", tmp_path / f"{steps}", files, model, {"heal_steps": steps}, **options)
    losses = json.loads((tmp_path / "50" / "healing.json").read_text())
    assert len(losses) == 50 and sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert found[50]["loss"] < found[0]["loss"] - 0.02
    assert not (tmp_path / "50" / "healing").exists()
    resumed = options | {"resume_from_checkpoint": str(tmp_path / "50" / "checkpoint-2")}
    again = recipe("finetune_clm", tmp_path / "again", files, model, {"heal_steps": 50}, **resumed)
    assert again == found[50]


def test_healing_with_a_morph(tmp_path, files):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", "llama")
    model = {"model_name_or_path": checkpoint, "placement": ["post"], "morph_steps": 4}
    recipe("finetune_clm", tmp_path / "out", files, model, {"heal_steps": 5})
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert config.norm_placement == "post" and config.norm_target is None


INTERRUPTED = {  # what is interrupted, at which folder of the output
    "writing a tokenizer": ("transformers.PreTrainedTokenizerBase.save_pretrained", "tokenizer"),
    "removing healing": ("shutil.rmtree", "healing"),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_folders_are_whole_or_not_there(name, tmp_path, files, monkeypatch):
    function, folder = INTERRUPTED[name]
    checkpoint, options = save_checkpoint(tmp_path / "checkpoint"), {"max_train_steps": 1}
    model = {"model_name_or_path": checkpoint, "placement": ["post"], "warm_start": "none"}
    model, own, kind = model, {"heal_steps": 2}, "finetune_clm"
    if folder == "tokenizer":
        model, own, kind = NEW | {"tokenizer_name": checkpoint, "vocab_size": 20}, {}, "pretrain"
    module, _, attribute = function.rpartition(".")
    whole = getattr(pydoc.locate(module), attribute)

    def part(*args, **kwargs):
        path = Path(next(arg for arg in args if isinstance(arg, (str, Path))))
        if path.name.strip(".") != folder or not path.exists() and folder != "tokenizer":
            return whole(*args, **kwargs)
        path.mkdir(exist_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(function, part)
        recipe(kind, tmp_path / "out", files, model, own, **options)
    assert not (tmp_path / "out" / folder).exists() and (tmp_path / "out" / f".{folder}").exists()
    recipe(kind, tmp_path / "out", files, model, own, resume_from_checkpoint="latest", **options)
    assert not (tmp_path / "out" / f".{folder}").exists()


FROM_SCRATCH = {  # arguments -> placement, class, layers
    "stock": ({"model_type": "llama"}, None, "LlamaForCausalLM"),
    "deep": ({"model_type": "gpt2", "placement": ["deepnorm"]}, "deepnorm", "NormSwapGPT2LMHeadModel"),
    "hybrid": (
        {"model_type": "bert", "placement": ["post", "pre", "gated"]},
        ["post", "pre", "gated"],
        "NormSwapBertForMaskedLM",
    ),
    "decoder": (
        {"model_type": "bert", "placement": ["peri"], "objective": "causal"},
        "peri",
        "NormSwapBertLMHeadModel",
    ),
}
DEPTHS = {"stock": 2, "deep": 40, "hybrid": 3, "decoder": 2}


@pytest.mark.parametrize("name", DEPTHS)
def test_pretrains_any_placement_and_depth(name, tmp_path, files):
    model, placement, cls = FROM_SCRATCH[name]
    case = "bert" if model["model_type"] == "bert" and "objective" not in model else "gpt2"
    save_tokenizer(tmp_path / "tokenizer", case)
    model = model | {"tokenizer_name": str(tmp_path / "tokenizer")}
    model["config_overrides"] = f"num_hidden_layers={DEPTHS[name]},hidden_size=32,num_attention_heads=4"
    model["config_overrides"] += ",intermediate_size=48" if model["model_type"] != "gpt2" else ",resid_pdrop=0"
    results = recipe("pretrain", tmp_path / "out", files, model, learning_rate=1e-12, warmup_steps=0)
    assert results["perplexity"] == pytest.approx(VOCABULARY, rel=0.3)
    loaded = (AutoModelForMaskedLM if case == "bert" else AutoModelForCausalLM).from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == cls and getattr(loaded.config, "norm_placement", None) == placement
    assert loaded.config.num_hidden_layers == DEPTHS[name] and loaded.config.eos_token_id == 3
    if name == "deep":
        sizes = {"n_layer": 40, "n_embd": 32, "n_head": 4, "resid_pdrop": 0, "vocab_size": VOCABULARY}
        set_seed(42)
        config = NormSwapGPT2Config(norm_placement="deepnorm", **sizes, bos_token_id=2, eos_token_id=3, pad_token_id=1)
        fresh = AutoModelForCausalLM.from_config(config).state_dict()
        for key, value in loaded.state_dict().items():
            torch.testing.assert_close(value, fresh[key], rtol=0, atol=1e-6)
        gain = (
            loaded.transformer.h[0].mlp.c_proj.weight.std() / loaded.transformer.h[0].attn.c_attn.weight[:, :32].std()
        )
        assert gain < 0.5  # of DeepNorm at this depth; a stock model has no other than that of the fan-in


def test_pretrains_a_tokenizer_and_takes_a_config(tmp_path, files):
    save_tokenizer(tmp_path / "tokenizer")
    convert_checkpoint(AutoModelForCausalLM.from_config(tiny_config("gpt2")), "post").save_pretrained(
        tmp_path / "model"
    )
    model = {"config_name": str(tmp_path / "model"), "tokenizer_name": str(tmp_path / "tokenizer"), "vocab_size": 20}
    model["config_overrides"] = "num_hidden_layers=2,activation_function=relu,attn_pdrop=0.0,scale_attn_weights=false"
    recipe("pretrain", tmp_path / "out", files, model, save_steps=1)
    loaded, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert len(tokenizer) == loaded.config.vocab_size == 20
    assert tokenizer.get_vocab() != AutoTokenizer.from_pretrained(tmp_path / "tokenizer").get_vocab()
    assert loaded.config.norm_placement == "post" and loaded.config.num_hidden_layers == 2
    assert loaded.config.activation_function == "relu" and loaded.config.scale_attn_weights is False
    assert loaded.config.eos_token_id == tokenizer.eos_token_id
    shutil.rmtree(tmp_path / "out" / "checkpoint-1")
    recipe(
        "pretrain",
        tmp_path / "out",
        files,
        model | {"placement": ["pre"]},
        resume_from_checkpoint="latest",
        max_train_steps=1,
    )


PAIRS = {  # case, head, placement of the student, own arguments
    "states": ("bert", False, {"placement": ["pre"], "warm_start": "none"}, {}),
    "masked": ("bert", True, {"placement": ["pre"], "warm_start": "none"}, {"temperature": 2.0}),
    "causal": ("gpt2", True, {"placement": ["post"], "warm_start": "none"}, {"label_weight": 0.5}),
    "another": ("llama", True, {}, {}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_distils(name, tmp_path, files):
    case, head, model, own = PAIRS[name]
    checkpoint = save_checkpoint(tmp_path / "teacher", case, head, init=0.4)
    if name == "another":
        own = {"teacher_name_or_path": checkpoint}
        checkpoint = save_checkpoint(tmp_path / "student", case, seed=1, num_hidden_layers=1)
    options = {"max_train_steps": 40, "eval_steps": 20, "learning_rate": 3e-3, "warmup_steps": 0}
    model = model | {"model_name_or_path": checkpoint}
    first = recipe("distill", tmp_path / "first", files, model, own, max_train_steps=1, learning_rate=1e-9)
    results = recipe("distill", tmp_path / "out", files, model, own, **options)
    key = "loss" if name == "states" else "divergence"
    assert results[key] < (0.9 if name == "another" else 0.7) * first[key]
    assert results["loss"] == pytest.approx(
        results[key] + own.get("label_weight", 0) * math.log(results.get("perplexity", 1))
    )
    auto = AutoModel if name == "states" else MODELS[OBJECTIVES[case]]
    student, teacher = (auto.from_pretrained(tmp_path / folder).eval() for folder in ("out", "teacher"))
    assert getattr(student.config, "norm_placement", None) == (model.get("placement") or [None])[0]
    tokenizer, errors, sizes, scale = AutoTokenizer.from_pretrained(checkpoint), 0.0, 0.0, own.get("temperature", 1.0)
    if name == "states":  # one text at a time is what a sentence encoder gets
        batches = [tokenizer(text, return_tensors="pt") for text in documents(20, seed=1)]
    else:
        validation = blocks(checkpoint, files | {"block_size": 16}, case)["validation"]
        batches = [{"input_ids": torch.tensor([row["input_ids"]])} for row in validation]
    for batch in batches:
        with torch.no_grad():
            wanted, found = (one(**batch)[0] for one in (teacher, student))
        if name == "states":
            errors, sizes = errors + (found - wanted).pow(2).sum().item(), sizes + wanted.pow(2).sum().item()
        else:
            wanted, found = ((logits / scale).log_softmax(-1) for logits in (wanted, found))
            errors += scale**2 * (wanted.exp() * (wanted - found)).sum().item()
            sizes += wanted.shape[1]
    assert results[key] == pytest.approx(errors / sizes, rel=1e-3)


# --- refusals ---------------------------------------------------------------------------------------------------------

GPT2 = {"model_name_or_path": "gpt2"}
NEW = {"model_type": "gpt2", "tokenizer_name": "gpt2", "config_overrides": "n_layer=2,n_embd=32,n_head=4"}
BAD = {  # recipe, text, model, own, what the error names
    "column": ("finetune_clm", {"text_column": "body"}, GPT2, {}, "columns text.*'body'.*text_column"),
    "numbers": ("finetune_clm", {"train_file": "numbers.csv"}, GPT2, {}, "no text in 'text'"),
    "empty": ("finetune_clm", {"train_file": "empty.txt"}, GPT2, {}, "empty.txt is empty"),
    "missing": ("finetune_clm", {"train_file": "nowhere.txt"}, GPT2, {}, "nowhere.txt"),
    "kind": ("finetune_clm", {"train_file": "train.xml"}, GPT2, {}, "train.xml.*parquet"),
    "no rows": ("finetune_clm", {"validation_file": "header.csv"}, GPT2, {}, "header.csv.*no rows"),
    "short": ("finetune_clm", {"validation_file": "short.csv"}, GPT2, {}, "validation data is shorter.*block_size"),
    "long block": ("finetune_clm", {"block_size": 65}, GPT2, {}, "65.*64 positions"),
    "roberta": ("finetune_mlm", {"block_size": 63}, {"model_name_or_path": "roberta"}, {}, "63.*62 positions"),
    "eos": ("finetune_clm", {}, {"model_name_or_path": "without eos_token"}, {}, "no `eos_token`.*set"),
    "mask": ("finetune_mlm", {}, {"model_name_or_path": "without mask_token"}, {}, "no `mask_token`"),
    "encoder": ("finetune_clm", {}, {"model_name_or_path": "bert"}, {}, "masked language model, not a causal"),
    "decoder": ("finetune_mlm", {}, GPT2, {}, "causal language model, not a masked"),
    "stream": ("finetune_clm", {"streaming": True, "validation_file": None}, GPT2, {}, "max_eval_samples"),
    "heal": ("finetune_clm", {}, GPT2, {"heal_steps": 2}, "heal_steps.*placement"),
    "morph": ("finetune_clm", {}, GPT2 | {"placement": ["post"], "morph_steps": 3}, {"heal_steps": 2}, "at most 2"),
    "placement": ("finetune_mlm", {}, {"model_name_or_path": "bert", "placement": ["sideways"]}, {}, "sideways"),
    "override": ("pretrain", {}, NEW | {"config_overrides": "n_layers=2"}, {}, "n_layers=2.*n_layer"),
    "type": ("pretrain", {}, NEW | {"config_overrides": "n_layer=two"}, {}, "n_layer"),
    "depth": ("pretrain", {}, NEW | {"placement": ["post"] * 3}, {}, "3 placements for 2 layers"),
    "vocabulary": ("pretrain", {}, NEW | {"config_overrides": "vocab_size=90"}, {}, "96 tokens.*90"),
    "heads": ("pretrain", {}, NEW | {"config_overrides": "n_embd=32"}, {}, "hidden_size 32.*num_attention_heads 12"),
    "objective": ("pretrain", {}, NEW | {"objective": "masked"}, {}, "not a masked"),
    "tokenizers": ("distill", {}, GPT2, {"teacher_name_or_path": "other"}, "different tokenizers.*w95"),
    "sizes": ("distill", {}, {"model_name_or_path": "states"}, {"teacher_name_or_path": "bert wide"}, "48.*32"),
    "head": ("distill", {}, {"model_name_or_path": "bert"}, {"teacher_name_or_path": "states"}, "no masked language"),
    "itself": ("distill", {}, GPT2, {}, "equals its teacher"),
    "weight": ("distill", {}, {"model_name_or_path": "states", "placement": ["pre"]}, {"label_weight": 1.0}, "label_weight"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Checkpoints and files by name."""
    folder = tmp_path_factory.mktemp("shelf")
    save_checkpoint(folder / "gpt2")
    save_checkpoint(folder / "without eos_token", without=["eos_token"])
    save_checkpoint(folder / "roberta", "roberta")
    save_checkpoint(folder / "bert", "bert")
    save_checkpoint(folder / "states", "bert", head=False)
    save_checkpoint(folder / "bert wide", "bert", hidden_size=48)
    save_checkpoint(folder / "without mask_token", "bert", without=["mask_token"])
    save_checkpoint(folder / "other")
    save_tokenizer(folder / "other", words=95)
    (
        write(folder / "train.csv", documents(30)),
        write(folder / "numbers.csv", ["1", "2"]),
        write(folder / "header.csv", []),
    )
    write(folder / "short.csv", ["w7 w8"]), (folder / "empty.txt").touch()
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_training(name, shelf, tmp_path, monkeypatch):
    name, text, model, own, named = BAD[name]
    monkeypatch.chdir(shelf)
    text = {"train_file": "train.csv", "validation_file": "train.csv"} | text
    with pytest.raises(NormSwapError, match=named):
        recipe(name, tmp_path / "out", text, model, own)
    assert not (tmp_path / "out" / "run.json").exists()


BAD_ARGUMENTS = [
    (TextArguments, {}, "dataset_name"),
    (TextArguments, {"train_file": "a", "dataset_name": "b"}, "either"),
    (TextArguments, {"train_file": "a", "block_size": 1}, "block_size.*at least 2"),
    (TextArguments, {"train_file": "a", "validation_split_percentage": 100}, "between 1 and 99"),
    (pretrain.NewModelArguments, {"tokenizer_name": "a"}, "model_type.*config_name"),
    (RunArguments, {"output_dir": "a", "max_grad_norm": 0.0}, "max_grad_norm.*positive"),
    (RunArguments, {"output_dir": "a", "learning_rate": math.nan}, "learning_rate.*positive"),
    (RunArguments, {"output_dir": "a", "num_train_epochs": 0.0}, "num_train_epochs.*positive"),
    (RunArguments, {"output_dir": "a", "warmup_steps": -1}, "warmup_steps.*at least 0"),
    (RunArguments, {"output_dir": "a", "weight_decay": -0.1}, "weight_decay.*at least 0"),
    (RunArguments, {"output_dir": "a", "lr_scheduler_type": "sawtooth"}, "lr_scheduler_type.*linear.*got sawtooth"),
    (RunArguments, {"output_dir": "a", "lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_type"),
    (distill.DistillArguments, {"temperature": 0.0}, "temperature"),
]


@pytest.mark.parametrize("cls, options, named", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(cls, options, named):
    with pytest.raises(NormSwapError, match=named):
        cls(**options)
