"""What is saved comes back: in a fresh process, as remote code, from a pickle, reverted, or converted once more."""

import copy
import json
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import (
    TARGETS,
    TINY,
    VOCABULARY,
    auto_classes,
    head_of,
    starts_at_stock,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import hf_normswap
from hf_normswap import NormSwapError, convert_checkpoint, list_architectures, revert_checkpoint
from hf_normswap.modeling.architectures import get_architecture
from hf_normswap.modeling.modeling_normswap import NormSwapConfig
from hf_normswap.modeling.placements import PLACEMENTS

PER_FAMILY = ("bert", "megatron-bert", "gpt2", "llama", "gemma2", "opt", "opt-post")


def every_case_and_target(test):
    return pytest.mark.parametrize("case", TINY)(pytest.mark.parametrize("target", TARGETS)(test))


def outputs(model, auto=""):
    """Every tensor that a model returns, as arrays, which go to another process by value."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.data_ptr() % 64:  # as in a mapped file: some kernels round differently then
            tensor.data = tensor.data.clone()
    batch = tiny_batch()
    if auto == "AutoModelForMultipleChoice":
        batch = {key: value[None] for key, value in batch.items()}
    with torch.no_grad():
        leaves = tree_leaves(model(**batch).to_tuple())
    return [leaf.numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def same(first, second):
    return len(first) == len(second) > 0 and all((a == b).all() for a, b in zip(first, second))


def same_tensors(first, second):
    first, second = first.state_dict(), second.state_dict()
    return list(first) == list(second) and all(torch.equal(a, b) for a, b in zip(first.values(), second.values()))


def names(model):
    return type(model).__name__, type(model.base_model).__name__, getattr(model, "loss_type", None)


def load_heads(folders):
    """In another process: what each Auto class makes of its folder."""
    loaded = []
    for auto, folder in folders.items():
        model, info = getattr(modeling_auto, auto).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        loaded.append((*names(model), outputs(model, auto)))
    return loaded


def load_pickles(*paths):
    return [outputs(torch.load(path, weights_only=False)) for path in paths]


@pytest.fixture(scope="module")
def fresh():
    """Calls functions in a process that imports hf_normswap and never converts anything."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@every_case_and_target
def test_every_head_loads_in_a_fresh_process(case, target, tmp_path, fresh):
    config = tiny_config(case)
    folders, expected = {}, {}
    for auto, cls in auto_classes(config).items():
        stock = cls._model_mapping[type(config)].__name__
        if stock not in expected:
            model = tiny_model(case, auto)
            converted = convert_checkpoint(model, TARGETS[target])
            converted.save_pretrained(tmp_path / stock)
            derived = [f"NormSwap{name}" for name in names(model)[:2]]
            expected[stock] = (*derived, names(model)[2], outputs(converted, auto))
        folders[auto] = tmp_path / stock
    for (auto, folder), (*found, after) in zip(folders.items(), fresh(load_heads, folders)):
        *wanted, before = expected[folder.name]
        assert found == wanted, auto
        assert same(before, after), auto


@every_case_and_target
def test_folders_and_configs(case, target, tmp_path):
    model = tiny_model(case)
    model.save_pretrained(tmp_path / "stock")
    converted = convert_checkpoint(model, TARGETS[target])
    converted.save_pretrained(tmp_path / "converted")
    expected = outputs(converted)
    with safe_open(tmp_path / "stock" / "model.safetensors", "pt") as stock_file:
        with safe_open(tmp_path / "converted" / "model.safetensors", "pt") as file:
            assert set(stock_file.keys()) <= set(file.keys())
    from_folder = convert_checkpoint(str(tmp_path / "stock"), TARGETS[target])
    assert type(from_folder) is type(converted) and same(outputs(from_folder), expected)

    config = AutoConfig.from_pretrained(tmp_path / "converted")
    config.name_or_path = ""
    assert type(config) is type(converted.config) and config.to_dict() == converted.config.to_dict()
    assert type(config).from_dict(json.loads(config.to_json_string())).to_dict() == config.to_dict()
    written = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert written.keys() >= NormSwapConfig.FIELDS.keys() and written["norm_placement"]
    assert written["model_type"] == f"normswap_{model.config.model_type}"
    assert written["architectures"] == [type(converted).__name__]
    assert written.get("tie_word_embeddings") == model.config.to_dict().get("tie_word_embeddings")

    reverted = revert_checkpoint(tmp_path / "converted")
    assert type(reverted) is type(model) and same_tensors(reverted, model) and same(outputs(reverted), outputs(model))
    reverted.save_pretrained(tmp_path / "reverted")
    files = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "reverted")]
    assert files[0] == files[1]
    assert not list((tmp_path / "reverted").glob("*.py")) + list((tmp_path / "reverted").glob("*.md"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("stock", "reverted"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    if target == "sandwich":
        again, report = type(model).from_pretrained(tmp_path / "reverted", output_loading_info=True)
        assert not any(report.values()) and same_tensors(again, model)


@every_case_and_target
def test_ties_parked_norms_copies_and_pickles(case, target, tmp_path, fresh):
    model = tiny_model(case)
    stock, parameters = model.state_dict(), dict(model.named_parameters())
    converted = convert_checkpoint(model, TARGETS[target])
    expected = outputs(converted)

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    copied = copy.deepcopy(converted)
    for other in (converted, copied, copy.deepcopy(converted).to(torch.float64)):
        weights = other.get_output_embeddings().weight, other.get_input_embeddings().weight
        assert (weights[0].data_ptr() == weights[1].data_ptr()) == tied
    assert converted.all_tied_weights_keys == model.all_tied_weights_keys

    state, buffers = converted.state_dict(), dict(converted.named_buffers())
    assert state.keys() >= stock.keys() and all(torch.equal(state[name], stock[name]) for name in stock)
    parked = parameters.keys() - dict(converted.named_parameters()).keys()
    assert parked <= buffers.keys() and not any(buffers[name].requires_grad for name in parked)
    assert parked == set() or any("norm" in name.lower() or ".ln" in name for name in parked)
    native = convert_checkpoint(converted, get_architecture(model.config).native)
    assert parked <= dict(native.named_parameters()).keys() and same(outputs(native), outputs(model))

    assert same(outputs(copied), expected)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert same(outputs(converted), expected)
    torch.save(converted, tmp_path / "converted.pt")
    torch.save(copy.deepcopy(converted), tmp_path / "copied.pt")
    assert all(
        same(after, expected) for after in fresh(load_pickles, tmp_path / "converted.pt", tmp_path / "copied.pt")
    )


@every_case_and_target
def test_converting_twice_and_by_way_of_others(case, target):
    model = tiny_model(case)
    before, converted = outputs(model), convert_checkpoint(model, TARGETS[target])
    expected = outputs(converted)
    again = convert_checkpoint(converted, TARGETS[target])
    assert type(again) is type(converted) and same_tensors(again, converted)
    assert same(outputs(again), expected) and again.config.to_dict() == converted.config.to_dict()
    for other in ("resi_dual", "sandwich", "res_post"):
        away = convert_checkpoint(converted, other)
        assert same(outputs(away), outputs(convert_checkpoint(model, other)))
        if target not in ("gated", "hybrid"):  # gates start from where the model is
            assert same(outputs(convert_checkpoint(away, TARGETS[target])), expected)
        assert same_tensors(revert_checkpoint(away), model)
    assert same(outputs(converted), expected) and same(outputs(model), before)


@pytest.mark.parametrize("case", TINY)
def test_gates_start_from_where_the_model_is(case):
    for target, placement in TARGETS.items():
        converted = convert_checkpoint(tiny_model(case), placement)
        gated = convert_checkpoint(converted, "gated")
        for before, after in zip(outputs(converted), outputs(gated)):
            assert abs(before - after).max() <= 1e-4 * abs(before).max(), target


@every_case_and_target
def test_from_scratch_is_not_initialised_again_on_loading(case, target, tmp_path):
    stock = tiny_config(case)
    config = CONFIG_MAPPING[f"normswap_{stock.model_type}"]
    config = config.from_dict(stock.to_dict() | {"model_type": config.model_type, "norm_placement": TARGETS[target]})
    auto = getattr(modeling_auto, head_of(case))
    model = auto.from_config(config).eval()
    assert type(model).__name__.startswith("NormSwap") and not any((~(x == x)).any() for x in outputs(model))
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and same_tensors(loaded, model) and same(outputs(loaded), outputs(model))
    with torch.device("meta"):
        assert auto.from_config(config).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "opt"])
def test_alpha_follows_the_depth(case):
    model = tiny_model(case)
    config = convert_checkpoint(model, "deepnorm").config
    gains = []
    for layers in (3, 48):
        config.num_hidden_layers = layers
        deeper = getattr(modeling_auto, head_of(case)).from_config(copy.deepcopy(config))
        layer = next(module for module in deeper.modules() if hasattr(module, "plan"))
        gains.append({branch.coordinates["skip_gain"] for branch in layer.plan.branches})
    assert gains == [{6**0.25}, {96**0.25}]


BAD = {
    "typo": ("psot", {}, "unknown norm placement 'psot'. Did you mean .*post"),
    "far from all": ("xyzzy", {}, "unknown norm placement 'xyzzy'. Available: pre, post, deepnorm"),
    "typo in a list": (["pre", "sandwhich", "pre"], {}, "Did you mean sandwich"),
    "no name": (3, {}, "a name, a dict of coordinates, or a list"),
    "short list": (["pre"] * 2, {}, "2 placements for 3 layers"),
    "long list": (["pre"] * 4, {}, "4 placements for 3 layers"),
    "short list for some layers": (["pre"] * 2, {"layers": [0, 1]}, "2 placements for 3 layers"),
    "layer past the end": ("pre", {"layers": [3]}, "the model has 3"),
    "layer before the start": ("pre", {"layers": [-4]}, "the model has 3"),
    "second streams apart": (["resi_dual", "pre", "resi_dual"], {}, r"must adjoin, got layers \[0, 2\]"),
    "unknown coordinate": ({"skip_nrom": 1.0}, {}, r"\['skip_nrom'\]. Available: skip_norm"),
    "coordinate out of range": ({"skip_norm": 1.5}, {}, "`skip_norm` of a placement must lie between 0 and 1"),
    "unknown learned coordinate": ({"learned": [["gate", "branch"]]}, {}, "`learned` takes"),
    "gate out of range": ("gated", {"norm_gate": 1.5}, "`norm_gate` must lie between 0 .* and 1"),
    "gate that is no number": ("gated", {"norm_gate": float("nan")}, "`norm_gate` must lie between 0 .* and 1"),
    "negative alpha": ("deepnorm", {"norm_alpha": -1.0}, "`norm_alpha` must be positive"),
    "zero scale": ("resi_dual", {"norm_dual_scale": 0.0}, "`norm_dual_scale` must be positive"),
    "unknown warm start": ("post", {"warm_start": "magic"}, "unknown warm start 'magic'"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("case", ["bert", "llama"])
def test_bad_input_is_refused_before_anything_changes(case, bad):
    placement, arguments, message = BAD[bad]
    model = tiny_model(case)
    before = outputs(model), model.config.to_dict()
    with pytest.raises(NormSwapError, match=message):
        convert_checkpoint(model, placement, **arguments)
    assert same(outputs(model), before[0]) and model.config.to_dict() == before[1]
    if bad != "no name" and not arguments.keys() - NormSwapConfig.FIELDS.keys():
        with pytest.raises(NormSwapError, match=message):
            cls = CONFIG_MAPPING[f"normswap_{case}"]
            cls(**model.config.to_dict() | arguments | {"norm_placement": placement})


def test_spellings_and_layers():
    model = tiny_model("llama")
    for spelling in ("ResiDual", "resi-dual", "RESI_DUAL", "resi dual", PLACEMENTS["resi_dual"]):
        assert convert_checkpoint(model, spelling).config.norm_placement == "resi_dual"
    some = convert_checkpoint(model, "post", layers=[0, -1])
    assert some.config.norm_placement == ["post", "pre", "post"]
    assert convert_checkpoint(some, "post", layers=[1]).config.norm_placement == "post"
    assert convert_checkpoint(model, ["post", "sandwich", "deepnorm"], layers=[1]).config.norm_placement[0] == "pre"
    assert same(outputs(convert_checkpoint(model, "post", layers=[])), outputs(model))
    with pytest.raises(TypeError, match="dtype"):
        convert_checkpoint(model, "post", dtype=torch.bfloat16)


@pytest.mark.parametrize("case", TINY)
def test_a_stock_class_does_not_load_a_converted_folder_silently(case, tmp_path, caplog, monkeypatch):
    model = tiny_model(case)
    convert_checkpoint(model, "sandwich").save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    type(model).from_pretrained(tmp_path)
    assert f"You are using a model of type `normswap_{model.config.model_type}`" in caplog.text


def run_python(code, *args, cwd, **environment):
    """The standard output and error of `code` in a new interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


IMPORT_TWICE = """
import importlib, sys
from transformers import AutoModel, PreTrainedModel
before = set(sys.modules)
import hf_normswap
new = {name for name in sys.modules if name.partition(".")[0] != "hf_normswap"} - before
print(sorted(name for name in new if ".modeling_" in name and "transformers.models.auto." not in name))
print(sorted(name for name in new if name.partition(".")[0] in ("accelerate", "peft", "scipy", "typer", "rich", "tqdm")))
del sys.modules["hf_normswap"]
import hf_normswap
importlib.reload(hf_normswap)
hf_normswap.NormSwapLlamaConfig()
importlib.reload(hf_normswap)
print(type(AutoModel.from_config(hf_normswap.NormSwapLlamaConfig(
    vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))).__name__)
"""

PLUGIN_FIRST = """
from transformers import AutoConfig, LlamaConfig
class PluginConfig(LlamaConfig):
    model_type = "normswap_llama"
AutoConfig.register("normswap_llama", PluginConfig)
import hf_normswap
print(AutoConfig.for_model("normswap_llama").__class__.__name__)
"""


def test_importing_is_light_and_can_be_repeated(tmp_path):
    out, err = run_python(IMPORT_TWICE, cwd=tmp_path)
    assert out.splitlines() == ["[]", "[]", "NormSwapLlamaModel"] and "hf_normswap" not in err


def test_another_holder_of_our_names_is_reported(tmp_path):
    out, err = run_python(PLUGIN_FIRST, cwd=tmp_path)
    assert out.strip() == "NormSwapLlamaConfig"
    assert "__main__ had registered the model type 'normswap_llama'; hf_normswap takes it over." in err


# Neither a conversion nor a pickle makes a config by calling its class.
BUILD_FROM_A_CONFIG_THAT_WAS_NOT_CALLED = """
import pickle, sys
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
if sys.argv[1] == "convert":
    import hf_normswap
    stock = AutoModelForCausalLM.from_pretrained(sys.argv[2])
    config = hf_normswap.convert_checkpoint(stock, "deepnorm").config
else:
    config = pickle.load(open(sys.argv[2], "rb"))
print(type(AutoModelForSequenceClassification.from_config(config)).__name__)
"""


@pytest.mark.parametrize("way, name", [("convert", "stock"), ("unpickle", "config.pkl")])
def test_the_config_of_a_model_is_enough_for_the_auto_classes(way, name, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "stock")
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(convert_checkpoint(model, "deepnorm").config))
    out, _ = run_python(BUILD_FROM_A_CONFIG_THAT_WAS_NOT_CALLED, way, tmp_path / name, cwd=tmp_path)
    assert out.strip() == "NormSwapLlamaForSequenceClassification"


def test_names_are_our_own():
    for model_type in list_architectures():
        config = CONFIG_MAPPING[f"normswap_{model_type}"]
        assert config.model_type == f"normswap_{model_type}" not in CONFIG_MAPPING_NAMES
        assert config.__name__.startswith("NormSwap") and not hasattr(transformers, config.__name__)
        assert getattr(hf_normswap, config.__name__) is config
    with pytest.raises(AttributeError):
        _ = hf_normswap.NormSwapT5Config


def test_every_head_is_registered():
    for case in TINY:
        stock = tiny_config(case)
        converted = type(CONFIG_MAPPING[f"normswap_{stock.model_type}"]())  # its first config registers the models
        for auto, cls in auto_classes(stock).items():
            derived = cls._model_mapping[converted]
            assert derived.__name__ == f"NormSwap{cls._model_mapping[type(stock)].__name__}", auto
            assert getattr(hf_normswap, derived.__name__) is derived and derived.config_class is converted


# Loads each folder, the last one first, from the code beside the weights, saves it elsewhere and loads that.
WITHOUT_PACKAGE = """
import pathlib, sys, torch
sys.modules["hf_normswap"] = None  # not importable
from transformers.models.auto import modeling_auto
failures, root = [], pathlib.Path(sys.argv[1])
for folder in sorted(root.iterdir(), reverse=True):
    saved = torch.load(folder / "expected.pt")
    auto = getattr(modeling_auto, saved["auto"])
    if saved["copied"]:
        try:
            auto.from_pretrained(folder, trust_remote_code=False)
            failures.append(f"{folder.name} was loaded without its code")
        except ValueError as error:
            if "trust_remote_code=True" not in str(error):
                failures.append(f"{folder.name}: {error}")
    loads = [(folder, auto, "outputs")] + [(folder, modeling_auto.AutoModel, "base")] * ("base" in saved)
    if saved["copied"]:
        second = folder.parent.parent / "second" / folder.name
        auto.from_pretrained(folder, trust_remote_code=True).save_pretrained(second)
        loads.append((second, auto, "outputs"))
    for place, cls, key in loads:
        model = cls.from_pretrained(place, trust_remote_code=True)
        if not type(model).__module__.startswith("transformers_modules."):
            failures.append(f"{place.name} is {type(model)}")
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.data_ptr() % 64:  # as in a mapped file: some kernels round differently then
                tensor.data = tensor.data.clone()
        with torch.no_grad():
            output = model(**saved["batch"])[0]
        if not torch.equal(output, saved[key]) or not type(model.base_model).__name__.startswith("NormSwap"):
            failures.append(f"{place.name}, {cls.__name__}: {(output - saved[key]).abs().max()}")
print(failures)
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}


def save_with_outputs(folder, case, auto, placement, copied=False):
    """Save a converted model, and what it and its base model compute."""
    stock = tiny_model(case, auto)
    converted = convert_checkpoint(stock, placement)
    converted.save_pretrained(folder)
    batch = tiny_batch()
    if auto == "AutoModelForMultipleChoice":
        batch = {key: value[None] for key, value in batch.items()}
    with torch.no_grad():
        saved = {"auto": auto, "copied": copied, "batch": batch, "outputs": converted(**batch)[0]}
        if batch["input_ids"].ndim == 2 and "AutoModel" in converted.config.auto_map:
            saved["base"] = converted.base_model(**batch)[0] if auto == head_of(case) else None
        is_stock = torch.equal(saved["outputs"], stock(**batch)[0])
        assert is_stock == starts_at_stock(get_architecture(stock.config), placement)
    torch.save({key: value for key, value in saved.items() if value is not None}, folder / "expected.pt")


def check_remote_code(tmp_path, cells):
    """Save `(case, Auto class, target, whether it is copied)` in this process, and load them without the package."""
    for case, auto, target, copied in cells:
        save_with_outputs(tmp_path / "first" / f"{case}-{target}-{auto}", case, auto, TARGETS[target], copied)
    modules = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    out, _ = run_python(WITHOUT_PACKAGE, tmp_path / "first", cwd=tmp_path, **OFFLINE, **modules)
    assert out.splitlines()[-1] == "[]", out


def heads(case):
    """An Auto class for each model class of a case."""
    config = tiny_config(case)
    classes = {cls._model_mapping[type(config)]: name for name, cls in auto_classes(config).items()}
    return list(classes.values())


def test_remote_code_in_a_fresh_process_without_the_package(tmp_path):
    cells = [(case, head_of(case), target, target == "hybrid") for case in PER_FAMILY for target in TARGETS]
    for case in ("bert", "gpt2", "llama", "opt"):
        cells += [(case, auto, "sandwich", False) for auto in heads(case) if auto != head_of(case)]
    check_remote_code(tmp_path, cells)


@pytest.mark.slow
@pytest.mark.parametrize("case", TINY)
def test_remote_code_of_every_cell(case, tmp_path):
    check_remote_code(tmp_path, [(case, auto, target, True) for target in TARGETS for auto in heads(case)])


# What of an installed package and of another Transformers the code beside the weights sees.
BESIDE_A_PACKAGE = """
import sys
import transformers
from transformers import AutoModelForCausalLM
transformers.logging.set_verbosity_info()
for folder, version in zip(sys.argv[1::2], sys.argv[2::2]):
    transformers.__version__ = version if version != "as it is" else transformers.__version__
    try:
        print(type(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)).__module__.partition(".")[0])
    except ImportError as error:
        print(error)
"""
PACKAGES = {  # version of the package -> what Transformers' version is in turn, what is printed, what is logged once
    "as it is": (["as it is", "as it is"], ["hf_normswap"] * 2, ["is installed and used instead of the code beside"]),
    "0.0.1": (
        ["5.5.4", "6.0.0"],
        ["this model needs transformers 5.6 or newer, not 5.5.4: update it.", "transformers_modules"],
        ["hf_normswap 0.0.1 is older than this model, whose own code is used", "not tested with transformers 6.0.0"],
    ),
}


@pytest.mark.parametrize("version", PACKAGES)
def test_an_installed_package_is_used_if_it_is_no_older(version, tmp_path):
    versions, printed, logged = PACKAGES[version]
    folders = [tmp_path / "post", tmp_path / "sandwich"]
    for folder in folders:
        convert_checkpoint(tiny_model("llama"), folder.name).save_pretrained(folder)
    installed = hf_normswap.__version__ if version == "as it is" else version
    metadata = tmp_path / "site" / f"hf_normswap-{installed}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: hf_normswap\nVersion: {installed}\n")
    root = os.path.dirname(os.path.dirname(hf_normswap.__file__))
    path = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), root]),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    arguments = [part for pair in zip(folders, versions) for part in pair]
    out, messages = run_python(BESIDE_A_PACKAGE, *arguments, cwd=tmp_path, **OFFLINE | path)
    assert out.splitlines() == printed
    assert [messages.count(text) for text in logged] == [1] * len(logged), messages


def test_the_oldest_transformers_is_the_same_everywhere():
    root = Path(hf_normswap.__file__).parent.parent
    code = (root / "hf_normswap" / "modeling" / "modeling_normswap.py").read_text()
    floor = re.search(r'"transformers>=(\d+)\.(\d+),<(\d+)"', (root / "pyproject.toml").read_text()).groups()
    assert f"< [{floor[0]}, {floor[1]}]:" in code and f"transformers {floor[0]}.{floor[1]} or newer" in code
    assert f"> {int(floor[2]) - 1}:" in code
    parts = {path.stem for path in (root / "hf_normswap" / "modeling").glob("[!_]*.py")} - {"modeling_normswap"}
    assert set(re.findall(r"^from \.(\w+) import", code, re.MULTILINE)) == parts  # else an old one lacks files
    card = (root / "hf_normswap" / "model_card.md.jinja").read_text()
    assert f"Needs transformers {floor[0]}.{floor[1]} or newer, below {floor[2]}" in card
    assert len(re.findall(rf'"{re.escape(hf_normswap.__version__)}"', code)) == 1


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "opt", "gemma"])
def test_tokenizers_are_found_as_for_the_stock_type(case, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"<{index}>": index for index in range(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<0>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<0>", pad_token="<1>")
    model = tiny_model(case)
    converted = convert_checkpoint(model, "post")
    for name, saved in (("stock", model), ("converted", converted)):
        saved.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "converted", config=converted.config)
    assert loaded("<7> <8>")["input_ids"] == [7, 8]
    for name in ("stock", "converted"):
        file = tmp_path / name / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        del settings["tokenizer_class"]
        file.write_text(json.dumps(settings))
    stock = AutoTokenizer.from_pretrained(tmp_path / "stock")
    for arguments in ({}, {"config": converted.config}):
        ours = AutoTokenizer.from_pretrained(tmp_path / "converted", **arguments)
        assert type(ours) is type(stock) and ours("<7> <8>")["input_ids"] == stock("<7> <8>")["input_ids"]


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_what_a_dequantised_gguf_leaves_behind(case, tmp_path):
    from transformers.utils.quantization_config import GgufConfig, QuantizationMethod

    model = tiny_model(case)
    expected = outputs(convert_checkpoint(model, "post"))
    model.config.quantization_config = GgufConfig(gguf_file="model.gguf")
    model.quantization_method, model.is_quantized = QuantizationMethod.GGUF, True
    converted = convert_checkpoint(model, "post")
    assert same(outputs(converted), expected) and not getattr(converted, "is_quantized", False)
    converted.save_pretrained(tmp_path)
    assert same(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    reverted = revert_checkpoint(converted)
    assert same_tensors(reverted, model) and not hasattr(reverted.config, "quantization_config")
