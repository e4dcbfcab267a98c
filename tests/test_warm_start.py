"""Warm starts: exact ones compute what the source does, calibrated ones nearly so, at the plain corner."""

import pytest
import torch
from tiny_models import TARGETS, TINY, tiny_batch, tiny_model

from hf_normswap import NormSwapError, convert_checkpoint, list_moves


def logits(model):
    with torch.no_grad():  # unpadded: stock Gemma-2 gives NaN for padding in float64
        return model(**tiny_batch(padding=0)).logits


def distance(first, second):
    return ((first - second).abs().max() / second.abs().max()).item()


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", TINY)
def test_exact_starts_compute_what_the_source_does(case, target, dtype, limit, tmp_path):
    model = tiny_model(case, experts_implementation="eager").to(dtype)
    expected = logits(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    converted = convert_checkpoint(model, TARGETS[target], warm_start="exact")
    assert distance(logits(converted), expected) <= limit
    corner = convert_checkpoint(model, TARGETS[target]).config.norm_placement  # there, or on the way to it
    assert corner in (converted.config.norm_placement, converted.config.norm_target)
    assert bool(list_moves(converted)) == (converted.config.norm_placement != corner)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    if dtype is torch.float32:
        converted.save_pretrained(tmp_path)
        loaded, info = type(converted).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values())
        assert distance(logits(loaded), expected) <= limit


# what a source is converted to first, then with an exact start, and with which options
CHAINS = {
    "a gain, with raw streams above": (["post", "pre", "pre"], "deepnorm", {"layers": [0]}),
    "a gain, with raw streams between": (["post", "pre", "post"], "deepnorm", {}),
    "a gain, under a second stream": ("resi_dual", "deepnorm", {}),
    "a second stream, closed": ("resi_dual", "pre", {}),
    "a gain for another": ("deepnorm", "post", {}),
    "a gain for another of the options": ("deepnorm", "deepnorm", {"norm_alpha": 5.0}),
    "no gain for one of the options": ("deepnorm", "post", {"norm_alpha": 5.0}),
    "sandwich": ("sandwich", ["post", "res_post", "peri"], {}),
    "custom": (TARGETS["custom"] | {"learned": []}, "resi_dual", {}),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("case", ["bert", "roberta-prelayernorm", "gpt2", "llama", "olmo", "opt-post", "gemma2"])
def test_exact_starts_of_converted_models(case, chain):
    first, second, options = CHAINS[chain]
    source = convert_checkpoint(tiny_model(case).double(), first)
    for name, parameter in source.named_parameters():
        if "dual_norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    converted = convert_checkpoint(source, second, warm_start="exact", **options)
    assert distance(logits(converted), logits(source)) <= 1e-9


# what cannot start exactly is refused, with the way out
REFUSED = {
    "a longer second stream": (["resi_dual", "resi_dual", "pre"], "resi_dual", {}, "second stream"),
    "an earlier second stream": (["pre", "resi_dual", "resi_dual"], "resi_dual", {}, "second stream"),
    "another epsilon": ("resi_dual", "pre", {"norm_dual_eps": 1e-3}, "norm_dual"),
    "trained gains": ("admin", "pre", {}, "calibrated"),
    "gates": ("gated", "post", {}, "harden"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_exact_starts_refuse_what_would_not_be_exact(case):
    first, second, options, words = REFUSED[case]
    source = convert_checkpoint(tiny_model("llama"), first)
    with pytest.raises(NormSwapError, match=words):
        convert_checkpoint(source, second, warm_start="exact", **options)


def test_quantised_weights_are_refused_where_they_have_to_change():
    model = torch.ao.quantization.quantize_dynamic(tiny_model("bert"), {torch.nn.Linear})
    assert list_moves(convert_checkpoint(model, "pre", warm_start="exact"))
    for target, warm_start in (("deepnorm", "exact"), ("pre", "calibrated")):
        given = {"calibration": [tiny_batch()]} if warm_start == "calibrated" else {}
        with pytest.raises(NormSwapError, match="quantised"):
            convert_checkpoint(model, target, warm_start=warm_start, **given)


@pytest.mark.parametrize("target", ["pre", "post", "deepnorm", "sandwich"])
@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "gemma", "mixtral"])
def test_exact_starts_in_bfloat16(case, target):
    model = tiny_model(case, experts_implementation="eager")
    converted = convert_checkpoint(model, target, warm_start="exact").to(torch.bfloat16)
    assert distance(logits(converted).float(), logits(model.to(torch.bfloat16)).float()) <= 0.05
