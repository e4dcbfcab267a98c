"""Conversions that went wrong in ways that nothing else would have shown."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_normswap import NormSwapError, Placement, advise, convert_checkpoint, revert_checkpoint, token_batches, verify
from hf_normswap.conversion import present_spec
from hf_normswap.peft import placement_of
from hf_normswap.training import RunArguments, choose_settings


def logits(model):
    return model.eval()(**tiny_batch()).logits


def test_the_empty_placement_is_pre_everywhere():
    for spec in (Placement(), {}, {"skip_norm": 0.0}, [{}] * 3):
        assert convert_checkpoint(tiny_model("bert"), spec).config.norm_placement == "pre"


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "llama", "bert"])
def test_extras_come_back_from_disk_of_a_model_that_came_from_disk(case, tmp_path):
    auto = {"bert": "AutoModel"}.get(case)
    stock = tiny_model(case, auto)
    stock.save_pretrained(tmp_path / "stock")
    for placement in ("gated", "admin", "sandwich", "resi_dual"):
        model = convert_checkpoint(tmp_path / "stock", placement)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "_skip_gate" in name or "_gain" in name or "_output_norm" in name or "dual_norm" in name:
                    parameter.add_(torch.rand_like(parameter) * 0.3)
        model.save_pretrained(tmp_path / placement)
        loaded, report = type(model).from_pretrained(tmp_path / placement, output_loading_info=True)
        assert not any(report.values())
        outputs = (each.eval()(**tiny_batch())[0] for each in (loaded, model))
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)  # stacked experts may lie in memory in another way


def test_accelerate_hooks_follow_the_twin():
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model("llama")
    expected = logits(convert_checkpoint(model, "post"))
    for module in list(model.modules()):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    twin = convert_checkpoint(model, "post")
    assert torch.equal(logits(twin), expected)
    logits(twin).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(logits(revert_checkpoint(twin)), logits(model))


@pytest.mark.parametrize("packed", [False, True])
def test_gguf_leftovers_go_only_if_the_weights_were_unpacked(packed, tmp_path):
    model = tiny_model("llama")
    model.config.quantization_config = SimpleNamespace(quant_method="gguf", to_dict=dict)
    model.hf_quantizer = SimpleNamespace(packed_modules={"model.layers.0.mlp.up_proj": None} if packed else {})
    converted = convert_checkpoint(model, "post")
    assert hasattr(converted, "hf_quantizer") == hasattr(converted.config, "quantization_config") == packed
    assert hasattr(model, "hf_quantizer") and hasattr(model.config, "quantization_config")
    if not packed:
        converted.save_pretrained(tmp_path)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(converted))


@pytest.mark.parametrize("of", ["model", "base", "layer"])
def test_compiled_parts_are_not_taken_along(of):
    model = tiny_model("llama")
    expected = logits(convert_checkpoint(model, "post"))
    {"model": model, "base": model.model, "layer": model.model.layers[0]}[of].compile(backend="eager")
    assert torch.equal(logits(convert_checkpoint(model, "post")), expected)


def patch_instance(model, monkeypatch):
    layer = model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: args[0])


def patch_class(model, monkeypatch):
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda self, hidden_states, **kwargs: hidden_states)


def cut_layers(model, monkeypatch):
    model.model.layers = model.model.layers[:2]


def take_our_config(model, monkeypatch):
    model.config = convert_checkpoint(model, "post").config


def come_from_a_folder(model, monkeypatch):
    model.__class__ = type("NormSwapLlamaForCausalLM", (type(model),), {"__module__": "transformers_modules.a"})


def shard(model, monkeypatch):
    model.lm_head.weight.ds_id = 0


@pytest.mark.parametrize(
    "damage, words",
    [
        (patch_instance, "replaced"),
        (patch_class, "patched"),
        (cut_layers, "num_hidden_layers"),
        (shard, "ZeRO-3"),
        (take_our_config, "does not have"),
        (come_from_a_folder, "import hf_normswap"),
    ],
)
def test_models_that_are_not_what_they_seem_are_refused(damage, words, monkeypatch):
    model = tiny_model("llama")
    damage(model, monkeypatch)
    with pytest.raises(NormSwapError, match=words):
        convert_checkpoint(model, "resi_dual")


def test_reentrant_checkpointing_that_was_on_is_refused():
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(NormSwapError, match="use_reentrant"):
        convert_checkpoint(model, "resi_dual")
    logits(convert_checkpoint(model, "post"))


@pytest.mark.parametrize("case", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("target", ["post", "gated"])
def test_a_stock_class_makes_a_stock_model_of_a_converted_folder(case, target, tmp_path, caplog):
    """Whatever it leaves in the config: a conversion of that starts from the stock placement, and says so."""
    from transformers.utils.logging import warning_once

    stock = tiny_model(case)
    away = "pre" if case == "bert" else "post"
    convert_checkpoint(stock, away, norm_alpha=3.0).save_pretrained(tmp_path / "converted")
    type(stock).from_pretrained(tmp_path / "converted").save_pretrained(tmp_path / "stock")
    warning_once.cache_clear()
    model = convert_checkpoint(tmp_path / "stock", target)
    disk = convert_checkpoint(tmp_path / "stock", target, output_dir=tmp_path / "disk")
    assert caplog.text.count("are left out") == 1
    native = "post" if case == "bert" else "pre"
    loaded = type(stock).from_pretrained(tmp_path / "stock")
    assert loaded.config.norm_placement == away  # all that looks at it takes no notice
    assert present_spec(loaded.config) == placement_of(loaded) == advise(loaded).facts.placement == native
    args = RunArguments(output_dir="unused")
    assert choose_settings(loaded, args, "causal_lm", 9, 100) == choose_settings(stock, args, "causal_lm", 9, 100)
    expected = convert_checkpoint(stock, target)
    for made in (model, AutoModelForCausalLM.from_pretrained(disk) if case != "bert" else model):
        assert made.config.norm_conversion["placement"] == native and made.config.norm_alpha is None
        assert torch.equal(made.eval()(**tiny_batch())[0], expected.eval()(**tiny_batch())[0])
    with pytest.raises(NormSwapError, match="nothing to revert"):
        revert_checkpoint(tmp_path / "stock")


@pytest.mark.parametrize("given", [None, ["A text."]])
def test_few_tokens_are_told_by_where_they_come_from(given, caplog):
    list(token_batches(given, tiny_model("llama"), lambda text, **_: {"input_ids": [5, 6, 7]}))
    assert ("No text was given" in caplog.text) == (given is None) and "tokens" in caplog.text


def gates(model):
    return [value.tolist() for name, value in model.named_parameters() if "_skip_gate" in name]


def test_extras_of_an_earlier_placement_are_kept_only_where_they_fit(tmp_path):
    model = tiny_model("llama")
    third = convert_checkpoint(model, "gated", norm_gate=0.3)
    assert gates(third) == [[pytest.approx(0.3)]] * 6
    assert gates(convert_checkpoint(third, "gated", norm_gate=0.7)) == [[pytest.approx(0.7)]] * 6
    assert gates(convert_checkpoint(convert_checkpoint(third, "pre"), "gated")) == [[0.0]] * 6
    channels = convert_checkpoint(third, {"learned": {"skip_norm": "channel"}})
    assert len(gates(channels)[0]) == 32
    admin = convert_checkpoint(model, "admin")
    scalar = convert_checkpoint(admin, Placement(skip_norm=1.0, learned=(("skip_gain", "branch"),)))
    scalar.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(scalar))
    eps = convert_checkpoint(convert_checkpoint(model, "resi_dual"), "resi_dual", norm_dual_eps=0.5)
    assert eps.model.layers[-1].dual_norm.variance_epsilon == 0.5


@pytest.mark.parametrize("layers", [[0, 1], [-3, -2], (index for index in range(2)), range(2)])
def test_layers(layers, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    assert convert_checkpoint(tmp_path, "post", layers=layers).config.norm_placement == ["post", "post", "pre"]


def drop_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop_architectures(folder):
    text = (folder / "config.json").read_text().replace('"architectures"', '"arch"')
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("damage, words", [(drop_tensor, "lacks 1 tensors"), (drop_architectures, "None")])
def test_incomplete_checkpoints_are_refused(damage, words, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(NormSwapError, match=words):
        convert_checkpoint(tmp_path, "post")


def test_offloaded_weights_are_refused(tmp_path):
    pytest.importorskip("accelerate")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    where = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    where |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    with pytest.raises(NormSwapError, match="offload"):
        convert_checkpoint(tmp_path / "model", "post", device_map=where, offload_folder=tmp_path / "offload")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x", None, -1.0])
@pytest.mark.parametrize("coordinate", ["skip_gain", "branch_gain", "skip_norm", "dual"])
def test_coordinates_are_validated(coordinate, value):
    with pytest.raises(NormSwapError, match=coordinate):
        Placement(**{coordinate: value})


@pytest.mark.parametrize("case", ["llama", "bert", "gemma2", "opt-post"])
@pytest.mark.parametrize("freeze", [False, True])
def test_verify_of_heads_and_frozen_models(case, freeze):
    heads = ["AutoModelForSequenceClassification", "AutoModel"] + ["AutoModelForMultipleChoice"] * (case == "bert")
    for auto in heads:
        model = convert_checkpoint(tiny_model(case, auto, pad_token_id=None if case == "llama" else 1), "sandwich")
        report = verify(model.requires_grad_(not freeze), save=False)
        assert report, report


def test_a_config_that_was_shortened_after_the_fact():
    config = convert_checkpoint(tiny_model("llama"), ["post", "pre", "pre"]).config
    config.num_hidden_layers = 2
    with pytest.raises(NormSwapError, match="3 placements for 2 layers"):
        AutoModelForCausalLM.from_config(config)


def test_stock_folder_in_a_derived_class(tmp_path):
    from hf_normswap import NormSwapLlamaForCausalLM

    stock = tiny_model("llama")
    stock.save_pretrained(tmp_path)
    model = NormSwapLlamaForCausalLM.from_pretrained(tmp_path)
    assert model.config.norm_placement == "pre" and torch.equal(logits(model), logits(stock))
    assert type(LlamaForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM
