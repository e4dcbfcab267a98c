"""Warm starts: exact ones compute what the source does, calibrated ones nearly so, at the plain corner."""

import pytest
import torch
from tiny_models import TARGETS, TINY, tiny_batch, tiny_model

from hf_normswap import convert_checkpoint


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
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    if dtype is torch.float32:
        converted.save_pretrained(tmp_path)
        loaded, info = type(converted).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values())
        assert distance(logits(loaded), expected) <= limit
