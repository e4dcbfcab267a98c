"""Adapters of converted models: what they train, that they come back, and that they say which base model they are for."""

import json
import warnings
from operator import attrgetter

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_roundtrip import run_python
from tiny_models import VOCABULARY, tiny_batch, tiny_model

from hf_normswap import NormMorph, NormSwapError, convert_checkpoint, gate_penalty, heal, list_gates, revert_checkpoint
from hf_normswap.modeling.architectures import get_architecture

peft = pytest.importorskip("peft")
from hf_normswap.peft import KINDS, adapter_config  # noqa: E402

AUTO = {
    "bert": "AutoModelForSequenceClassification",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
}
TARGETS = {"bert": {"query", "value"}, "gpt2": {"c_attn"}, "llama": {"q_proj", "v_proj"}}  # PEFT's defaults
HYBRID = ["res_post", "gated", "post"]  # norms that one layer reads are parked in another
PLACEMENTS = {
    "pre": "pre",
    "post": "post",
    "gated": "gated",
    "resi_dual": "resi_dual",
    "admin": "admin",
    "res_post": "res_post",
    "hybrid": HYBRID,
}
NATIVE = {"bert": "post", "gpt2": "pre", "llama": "pre"}


def saved_base(case, placement, folder):
    """A converted model in double precision, from disk as PEFT will load it."""
    convert_checkpoint(tiny_model(case, AUTO[case]).double(), placement).save_pretrained(folder)
    return getattr(transformers, AUTO[case]).from_pretrained(folder).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(**tiny_batch()).logits


def trained(model):
    """The parameters that an adapter trains, by their names in its file."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name.replace("modules_to_save.default.", "").replace(".default", ""): found[name] for name in found}


def train(model, steps=2):
    parameters = list(trained(model).values())
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(steps):
        model.train()(**tiny_batch()).logits.pow(2).mean().backward()
        assert all(parameter.grad is not None for parameter in parameters)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def adapter(case, placement, kind, folder, **kwargs):
    """A trained adapter, saved in a folder beside its base model."""
    base = saved_base(case, placement, folder / "base")
    model = train(peft.get_peft_model(base, adapter_config(base, kind, **kwargs)))
    model.save_pretrained(folder / "adapter")
    return model


def load(model, folder):
    """An adapter on a model, and what PEFT and we have said about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = peft.PeftModel.from_pretrained(model, folder)
    return loaded, [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", AUTO)
def test_what_an_adapter_trains_comes_back_and_merges(case, placement, kind, tmp_path):
    base = saved_base(case, PLACEMENTS[placement], tmp_path / "base")
    keys, before = set(base.state_dict()), logits(base)
    vectors = {
        f"base_model.model.{name}.{key}"
        for name, module in base.named_modules()
        for key, _ in module.named_parameters(recurse=False)
        if "Norm" in type(module).__name__ or "skip_gate" in name or "skip_gain" in name
    }
    model = peft.get_peft_model(base, adapter_config(base, kind))
    start = {name: parameter.detach().clone() for name, parameter in trained(model).items()}
    train(model)

    low_rank = {name for name in start if "lora_" in name}
    assert {name.split(".")[-3] for name in low_rank} == (TARGETS[case] if kind == "lora" else set())
    head = {f"base_model.model.classifier.{key}" for key in ("weight", "bias")} if case == "bert" else set()
    assert set(start) == low_rank | vectors | head
    learned = {name for name in vectors if "skip_gate" in name or "skip_gain" in name}
    assert bool(learned) == (placement in ("gated", "admin", "hybrid"))
    still = {name for name, parameter in trained(model).items() if torch.equal(parameter, start[name])}
    first = "base_model.model.bert.encoder.layer.0.attn_skip_gate.weight"  # between equals: the embeddings are normed
    assert still == ({first} & learned if placement == "gated" else set())

    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert set(saved) == set(start)
    assert all(torch.equal(saved[name], parameter) for name, parameter in trained(model).items())

    auto = getattr(peft, AUTO[case].replace("Auto", "AutoPeft"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = auto.from_pretrained(tmp_path / "adapter")
    assert not [str(warning.message) for warning in caught if warning.category is UserWarning]
    expected = logits(model)
    assert (expected - before).abs().max() > 1e-3
    assert torch.equal(logits(loaded), expected)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), before)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-9, atol=1e-9)
    assert type(merged) is type(base) and set(merged.state_dict()) == keys
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged))
    assert set(revert_checkpoint(merged).state_dict()) == set(tiny_model(case, AUTO[case]).state_dict())


def test_heads_decide_the_task():
    tasks = {
        ("bert", "AutoModelForTokenClassification"): "TOKEN_CLS",
        ("bert", "AutoModelForQuestionAnswering"): "QUESTION_ANS",
        ("bert", "AutoModelForMaskedLM"): None,
        ("llama", "AutoModelForSequenceClassification"): "SEQ_CLS",
        ("llama", "AutoModel"): "FEATURE_EXTRACTION",
    }
    for (case, auto), task in tasks.items():
        assert adapter_config(convert_checkpoint(tiny_model(case, auto), "gated")).task_type == task


ALL = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
WITHOUT_DEFAULTS = {  # case -> what LoRA adapts in a layer of a type that PEFT has no default for; no head, no router
    "megatron-bert": {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}
    | {"intermediate.dense", "output.dense"},
    "roberta-prelayernorm": {"attention.self.query", "attention.self.key", "attention.self.value"}
    | {"attention.output.dense", "intermediate.dense", "output.dense"},
    "phi3": {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    "qwen3_moe": ALL,
    "qwen2_moe": ALL | {name.replace("mlp", "mlp.shared_expert") for name in MLP},
    "starcoder2": ALL | {"mlp.c_fc", "mlp.c_proj"},
    "olmo2": ALL | MLP,
    "glm4": ALL | {"mlp.gate_up_proj", "mlp.down_proj"},
}


@pytest.mark.parametrize("case", WITHOUT_DEFAULTS)
def test_types_without_defaults_adapt_all_linear_maps_of_their_layers(case):
    model = convert_checkpoint(tiny_model(case, "AutoModelForSequenceClassification"), "gated")
    adapted = peft.get_peft_model(model, adapter_config(model))
    names = {name.partition(".lora_A")[0] for name in trained(adapted) if "lora_A" in name}
    layers = f"base_model.model.{model.base_model_prefix}.{get_architecture(model.config).layers}"
    assert names == {f"{layers}.{index}.{end}" for index in range(3) for end in WITHOUT_DEFAULTS[case]}


def test_fields_of_the_config_are_passed_on():
    model = convert_checkpoint(tiny_model("llama"), "gated")
    config = adapter_config(model, r=3, target_modules=["k_proj"], modules_to_save=["lm_head"], task_type=None)
    assert (config.r, config.target_modules, config.task_type) == (3, {"k_proj"}, None)
    adapted = peft.get_peft_model(model, config)
    names = {name.split(".")[-2] for name in trained(adapted)}
    assert names >= {"lora_A", "lm_head", "attn_skip_gate", "input_layernorm"}
    assert {name.split(".")[-3] for name in trained(adapted) if "lora_" in name} == {"k_proj"}


def exact(stock, placement):
    return convert_checkpoint(stock, placement, warm_start="exact")


BASES = {  # what an adapter is loaded into, and whether that is the wrong base
    "stock": (lambda stock, placement: stock, True),
    "another placement": (lambda stock, placement: convert_checkpoint(stock, "deepnorm"), True),
    "a mixture": (lambda stock, placement: convert_checkpoint(stock, HYBRID), True),
    "the same": (convert_checkpoint, False),
    "layer by layer the same": (lambda stock, placement: convert_checkpoint(stock, [placement] * 3), False),
    "on the way there": (exact, False),
    "arrived": (lambda stock, placement: NormMorph(exact(stock, placement), 1).finish(), False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case, placement", [("bert", "pre"), ("gpt2", "post"), ("llama", "post")])
def test_an_adapter_warns_of_another_base(case, placement, kind, tmp_path):
    adapter(case, placement, kind, tmp_path)  # no name of a tensor says that the placement is not the stock one
    for base, (make, wrong) in BASES.items():
        _, messages = load(make(tiny_model(case, AUTO[case]).double(), placement), tmp_path / "adapter")
        assert len(messages) == wrong, base
        if wrong:
            assert messages[0].startswith(f"This adapter is for a base model with the norm placement '{placement}'")
            assert f"convert_checkpoint(model, '{placement}')" in messages[0] and "\n" not in messages[0]


def test_which_placements_are_the_same(tmp_path):
    adapter(
        "llama", "pre", "lora", tmp_path / "pre", target_modules=["q_proj"]
    )  # native: the stock model computes the same
    assert not load(tiny_model("llama").double(), tmp_path / "pre" / "adapter")[1]
    adapter("llama", HYBRID, "lora", tmp_path / "hybrid")
    assert not load(convert_checkpoint(tiny_model("llama").double(), HYBRID), tmp_path / "hybrid" / "adapter")[1]
    for other in (HYBRID[::-1], "gated", "pre"):
        (message,) = load(convert_checkpoint(tiny_model("llama").double(), other), tmp_path / "hybrid" / "adapter")[1]
        assert repr(HYBRID) in message
    shallow = convert_checkpoint(tiny_model("llama", num_hidden_layers=2).double(), "pre")
    assert load(shallow, tmp_path / "hybrid" / "adapter")[1]
    alien = transformers.XGLMConfig(d_model=32, ffn_dim=32, num_layers=1, attention_heads=4, vocab_size=VOCABULARY)
    messages = load(transformers.XGLMForCausalLM(alien), tmp_path / "pre" / "adapter")[1]
    assert "norm placement 'pre', and XGLMForCausalLM has None" in messages[0]
    coordinates = {"skip_norm": 0.5, "learned": [["skip_gain", "channel"]]}  # tuples in memory, lists on disk
    adapter("llama", coordinates, "lora", tmp_path / "point")
    assert not load(convert_checkpoint(tiny_model("llama").double(), coordinates), tmp_path / "point" / "adapter")[1]
    assert load(tiny_model("llama").double(), tmp_path / "point" / "adapter")[1]


def test_a_morph_leads_the_base_to_where_the_adapter_says(tmp_path):
    base = exact(tiny_model("llama").double(), "post")
    model = peft.get_peft_model(base, adapter_config(base))
    assert not any("skip_g" in name for name in trained(model))  # which the morph moves
    NormMorph(model, 1).finish()
    train(model).save_pretrained(tmp_path)
    assert not load(convert_checkpoint(tiny_model("llama").double(), "post"), tmp_path)[1]


def test_other_adapters_stay_as_they_are(tmp_path):
    stock = tiny_model("llama")
    peft.get_peft_model(stock, peft.LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "one")
    loaded, messages = load(tiny_model("llama"), tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("one", "two"))
    assert not messages and {**one, "target_modules": None} == {**two, "target_modules": None}
    loaded, messages = load(convert_checkpoint(tiny_model("llama"), "gated"), tmp_path / "one")
    assert not messages and "base_converted" not in (tmp_path / "two" / "adapter_config.json").read_text()


def test_an_adapter_is_trained_on_after_it_was_loaded(tmp_path):
    model = adapter("gpt2", "gated", "norms", tmp_path)
    base = saved_base("gpt2", "gated", tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert set(trained(loaded)) == set(trained(model))
    train(loaded).save_pretrained(tmp_path / "again")
    assert torch.equal(
        logits(load(saved_base("gpt2", "gated", tmp_path / "base"), tmp_path / "again")[0]), logits(loaded)
    )
    assert load(tiny_model("gpt2").double(), tmp_path / "again")[1]


def test_gates_are_read_and_penalised_through_an_adapter(tmp_path):
    base = convert_checkpoint(tiny_model("llama").double(), "gated", norm_gate=0.3)
    model = peft.get_peft_model(base, adapter_config(base, "norms"))
    gate_penalty(model).backward()
    gates = [parameter for name, parameter in trained(model).items() if "skip_gate" in name]
    assert len(gates) == 6 and all(gate.grad is not None for gate in gates)
    train(model)
    assert [gate.tensor.item() for gate in list_gates(model)] == [gate.item() for gate in gates]
    with model.disable_adapter():
        assert [gate.tensor.item() for gate in list_gates(model)] == [0.3] * 6
    assert [gate.tensor.item() for gate in list_gates(model.merge_and_unload())] == [gate.item() for gate in gates]


def test_healing_takes_the_config():
    source = tiny_model("llama")
    converted = convert_checkpoint(source, "gated", norm_gate=0.3)
    names = set(converted.state_dict())
    batch = torch.randint(4, VOCABULARY, (64,), generator=torch.Generator().manual_seed(0))
    heal(source, converted, batch, 3, learning_rate=1e-2, lora=adapter_config(converted))
    assert set(converted.state_dict()) == names
    assert all(gate.tensor.item() != pytest.approx(0.3, abs=1e-6) for gate in list_gates(converted))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_names_of_what_is_read_name_nothing_else(case):
    model = convert_checkpoint(tiny_model(case, AUTO[case]), HYBRID)
    ends = tuple(adapter_config(model).modules_to_save)
    layers = attrgetter(get_architecture(model.config).layers)(model.base_model)
    parked = [module for layer in layers for module in layer.modules() if module._buffers.get("weight") is not None]
    assert len(parked) == 2
    for name, module in model.named_modules():
        assert name.endswith(ends) == (0 < len(list(module.parameters())) <= 2 and next(module.parameters()).ndim == 1)
        assert not (module in parked and name.endswith(ends))


REFUSED = {
    "kind": (lambda model: adapter_config(model, "dora"), "unknown kind of adapter 'dora'. Available: lora, norms"),
    "stock": (lambda model: adapter_config(tiny_model("llama")), "LlamaForCausalLM is not a converted model"),
    "adapters": (
        lambda model: adapter_config(peft.get_peft_model(model, adapter_config(model))),
        "has adapters already",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    make, message = REFUSED[name]
    with pytest.raises(NormSwapError, match=message):
        make(convert_checkpoint(tiny_model("llama"), "post"))


PROCESS = """
import sys, warnings
{imports}
warnings.simplefilter("always")
from transformers import AutoModelForCausalLM
model = peft.AutoPeftModelForCausalLM.from_pretrained(sys.argv[1] + "/adapter") if "hf_normswap" in sys.modules else None
if model is not None:
    expected = torch.load(sys.argv[1] + "/expected.pt")
    print(torch.equal(model.eval()(**expected["batch"]).logits, expected["logits"]))
print("now the stock model", file=sys.stderr)
peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/stock"), sys.argv[1] + "/adapter")
"""
IMPORTS = {
    "ours first": "import hf_normswap, torch; assert 'peft' not in sys.modules; import peft",
    "ours last": "import peft, torch, hf_normswap",
    "PEFT alone": "import peft, torch",
}


@pytest.mark.parametrize("imports", IMPORTS)
def test_another_process(imports, tmp_path):
    tiny_model("llama").double().save_pretrained(tmp_path / "stock")
    model = adapter("llama", "gated", "lora", tmp_path)
    torch.save({"batch": tiny_batch(), "logits": logits(model)}, tmp_path / "expected.pt")
    code = PROCESS.format(imports=IMPORTS[imports])
    out, errors = run_python(code, tmp_path, cwd=tmp_path, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    right, stock = errors.split("now the stock model")
    assert out == ("" if imports == "PEFT alone" else "True\n")
    assert "UserWarning" not in right
    assert ("needs_base_converted_by_hf_normswap" in stock) == (imports == "PEFT alone")
    sentence = "This adapter is for a base model with the norm placement 'gated', and LlamaForCausalLM has 'pre'"
    assert stock.count(sentence) == (imports != "PEFT alone")
