"""The native corner is the stock model, bit for bit; every other corner is another function."""

import pytest
import torch
from tiny_models import TINY, starts_at_stock, tiny_batch, tiny_model

from hf_normswap import convert_checkpoint, list_architectures, list_placements, revert_checkpoint
from hf_normswap.modeling.architectures import get_architecture


def forward(model, train=False, **kwargs):
    torch.manual_seed(7)
    model.train(train)
    output = model(**tiny_batch(), **kwargs)
    model.eval()
    return output.logits


def test_every_architecture_has_a_tiny_model():
    assert {model_type for model_type, _ in TINY.values()} == set(list_architectures())


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", TINY)
def test_native_corner_is_the_stock_model(case, train):
    model = tiny_model(case)
    native = get_architecture(model.config).native
    converted = convert_checkpoint(model, native)
    assert type(converted) is not type(model)
    assert torch.equal(forward(model, train), forward(converted, train))
    if train:  # the dropouts were on
        assert not torch.equal(forward(model, train), forward(model))


@pytest.mark.parametrize("placement", list_placements())
@pytest.mark.parametrize("case", TINY)
def test_other_corners_differ_and_revert(case, placement):
    model = tiny_model(case)
    architecture = get_architecture(model.config)
    converted = convert_checkpoint(model, placement)
    before, after = forward(model), forward(converted)
    assert after.isfinite().all()
    if starts_at_stock(architecture, placement):
        assert torch.equal(before, after)
    else:
        assert (before - after).abs().max() > 1e-3 * before.abs().max()
    reverted = revert_checkpoint(converted)
    assert type(reverted) is type(model) and list(reverted.state_dict()) == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), reverted.state_dict().values()))
    assert torch.equal(forward(reverted), before)
    assert reverted.config.to_dict() == model.config.to_dict()
