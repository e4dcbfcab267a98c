"""Which norm feeds what, what is added to what, and what new models start from."""

import math
from operator import attrgetter

import pytest
import torch
from chains import branches_of, layers_of, norms_of, output_norms_of, row_of, tensors_of
from tiny_models import LAYERS, TINY, WIDTH, scramble, tiny_batch, tiny_config, tiny_model
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, T5Config, T5Model
from transformers.pytorch_utils import Conv1D

from hf_normswap import NormSwapError, convert_checkpoint, list_placements
from hf_normswap.modeling.modeling_normswap import config_class
from hf_normswap.modeling.placements import admin_omega, deepnorm_alpha, deepnorm_beta


def converted(case, placement, **kwargs):
    overrides = {"word_embed_proj_dim": WIDTH} if case == "opt-post" else {}
    return convert_checkpoint(tiny_model(case, "AutoModel", **overrides), placement, **kwargs).eval()


@torch.no_grad()
def run(model, **kwargs):
    return model(**tiny_batch(), **kwargs)


def silence(model):
    """Zero every matrix and its bias in the layers, and with them the branches."""
    with torch.no_grad():
        for module in layers_of(model).modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, (nn.Linear, Conv1D)) or parameter.ndim > 1:
                    parameter.zero_()
    return model


# --- norms and streams ------------------------------------------------------------------------------------------------

READERS = {  # family -> what reads the input of each branch
    "bert": ("attention.self", "intermediate.dense"),
    "opt": ("self_attn", "fc1"),
}


def first_tensor(args, kwargs):
    value = args[0] if args else kwargs["hidden_states"]
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("placement", list_placements())
@pytest.mark.parametrize("case", TINY)
def test_which_norm_feeds_what(case, placement):
    """Every norm is made to return a number of its own, which the branches and the end must then see."""
    model = converted(case, placement)
    row, norms, layers = row_of(model), norms_of(model), layers_of(model)
    number, seen = {}, []
    stem = attrgetter("embeddings.LayerNorm")(model) if row.norm_after and row.has_stem_norm else None
    for value, norm in enumerate(
        [stem, *norms[1 if row.norm_after else 0 :], layers[-1].__dict__["_modules"].get("dual_norm")]
    ):
        if norm is not None:
            number[norm] = value + 1.0
            norm.register_forward_hook(lambda module, args, output: torch.full_like(output, number[module]))
    for layer in layers:
        for path in READERS.get(row.family, (row.attn, row.mlp[0])):
            reader = attrgetter(path)(layer)
            reader.register_forward_pre_hook(lambda m, a, k: seen.append(first_tensor(a, k)), with_kwargs=True)
    last = run(model).last_hidden_state

    reads_norm = model.config.norm_placement not in ("res_post",) and not (
        placement == "gated" and row.native == "res_post"
    )
    assert len(seen) == len(norms) - 1 == 2 * LAYERS
    for k, tensor in enumerate(seen):
        norm = stem if k == 0 and row.norm_after else norms[k]
        if reads_norm and norm is not None:
            assert (tensor == number[norm]).all()
        else:
            assert not (tensor == tensor[0, 0, 0]).all()
    dual = placement == "resi_dual" and row.norm_after  # elsewhere the last norm adds it
    assert (last == number[norms[-1]] + (number[layers[-1].dual_norm] if dual else 0)).all()


@pytest.mark.parametrize("placement", list_placements())
@pytest.mark.parametrize("case", TINY)
def test_one_norm_at_the_end(case, placement):
    model = converted(case, placement)
    calls = []
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.register_forward_hook(lambda m, a, output: calls.append((first_tensor(a, {}), output)))
    state, count = run(model).last_hidden_state, 0
    if placement == "resi_dual" and row_of(model).norm_after:
        (_, main), (_, dual) = calls[-2:]
        assert torch.equal(state, main + dual)
        state = main
    while origin := [source for source, output in calls if output is state]:
        state, count = origin[0], count + 1
    assert count == 1


@pytest.mark.parametrize("case", TINY)
def test_without_branches_a_pre_norm_stack_is_the_identity(case):
    model = silence(converted(case, "pre"))
    states = run(model, output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1
    assert all(torch.equal(state, states[0]) for state in states[:-1])
    assert torch.equal(states[-1], norms_of(model)[-1](states[0]))


@pytest.mark.parametrize("placement, alpha", [("post", 1.0), ("deepnorm", (2 * LAYERS) ** 0.25)])
@pytest.mark.parametrize("case", ["bert", "gpt2"])
def test_gain_is_on_the_skip(case, placement, alpha):
    model = converted(case, placement)
    layer, row = layers_of(model)[1], row_of(model)
    first, second = (attrgetter(row.norms[i])(layer) for i in (0, 2))
    x = torch.randn(2, 5, WIDTH)
    zero = torch.zeros_like(x)
    attention = layer.attention.self if case == "bert" else layer.attn
    with torch.no_grad():
        if case == "bert":  # only the branch is left where nothing comes over the skip
            y = first(layer.attention.output.dense(attention(zero)[0]))
            expected = second(alpha * y + layer.output.dense(layer.intermediate(y)))
        else:
            y = first(zero)
            z = alpha * y + attention(y)[0]
            expected = alpha * second(z) + layer.mlp(second(z))
        torch.testing.assert_close(layer(zero), expected, rtol=0, atol=1e-5)
        silence(model)  # only the skip is left
        before = case == "gpt2"
        expected = alpha * second(alpha * first(x)) if before else second(alpha * first(alpha * x))
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("placement", list_placements())
@pytest.mark.parametrize("case", ["bert", "gpt2", "llama"])
def test_training_mode_without_dropout_is_evaluation_mode(case, placement):
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    overrides = {name: 0.0 for name in (*names, "attention_dropout") if name in TINY[case][1]}
    model = scramble(convert_checkpoint(tiny_model(case, "AutoModel", **overrides), placement))
    assert torch.equal(run(model.eval()).last_hidden_state, run(model.train()).last_hidden_state)


def test_dual_scale_cancels():
    scales = [converted("gpt2", "resi_dual", norm_dual_scale=scale) for scale in (1.0, 0.05)]
    torch.testing.assert_close(*(run(model).last_hidden_state for model in scales), rtol=0, atol=2e-5)


# --- constants and initialisation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers, alpha, beta, cross_alpha, cross_beta",
    [
        (1, 1.18920711500272106, 0.59460355750136053, 1.31607401295249246, 0.53728496591177095),
        (6, 1.86120971820419919, 0.37991784282579627, 2.05976714390711775, 0.34329452398451962),
        (12, 2.21336383940064318, 0.31947155212313623, 2.44948974278317809, 0.28867513459481288),
        (18, 2.44948974278317809, 0.28867513459481288, 2.71080601082953449, 0.26084743001221455),
        (24, 2.63214802590498492, 0.26864248295588547, 2.91295063024394052, 0.24274588585366171),
        (48, 3.13016916014657463, 0.22590050090246120, 3.46410161513775458, 0.20412414523193150),
        (100, 3.76060309308639356, 0.18803015465431967, 4.16179145028781721, 0.16990442448471225),
        (1000, 6.68740304976422024, 0.10573712634405641, 7.40082804492285250, 0.09554427922043668),
    ],
)
def test_deepnorm_constants(layers, alpha, beta, cross_alpha, cross_beta):
    for branches, constants in ((2, (alpha, beta)), (3, (cross_alpha, cross_beta))):
        actual = deepnorm_alpha(branches * layers), deepnorm_beta(branches * layers)
        assert actual == pytest.approx(constants, rel=0, abs=1e-12)
    if layers > 24:
        return
    for case, fields, constants in (
        ("bert", {}, (alpha, beta)),
        ("gpt2", {}, (alpha, beta)),
        ("bert", {"is_decoder": True, "add_cross_attention": True}, (cross_alpha, cross_beta)),
    ):
        model = tiny_model(case, "AutoModel", num_hidden_layers=layers, **fields)
        plan = layers_of(convert_checkpoint(model, "deepnorm"))[-1].plan
        assert all(
            branch.coordinates["skip_gain"] == pytest.approx(constants[0], abs=1e-12) for branch in plan.branches
        )
        assert plan.deepnorm_beta == pytest.approx(constants[1], abs=1e-12)


def test_encoder_decoders_have_other_constants_and_are_refused():
    config = T5Config(vocab_size=32, d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=1)
    with pytest.raises(NormSwapError, match="encoder-decoder"):
        convert_checkpoint(T5Model(config), "deepnorm")


_WIDE = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 192, "initializer_range": 0.02}
_GPT2, _LLAMA = {**_WIDE, "n_inner": 192}, {**_WIDE, "head_dim": 16}
_ROWS = "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"


def split(weight, *sizes):
    return list(weight.split(sizes))


# case -> fields, and what of a layer has gain 1 and what has gain beta. Fused projections count as their parts do.
GAINS = {
    "bert": (
        _WIDE,
        lambda m: [attrgetter(name)(m).weight for name in _ROWS[:2]],
        lambda m: [attrgetter(name)(m).weight for name in (*_ROWS[2:], "intermediate.dense", "output.dense")],
    ),
    "llama": (  # grouped queries
        _LLAMA,
        lambda m: [m.self_attn.q_proj.weight, m.self_attn.k_proj.weight],
        lambda m: [
            m.self_attn.v_proj.weight,
            m.self_attn.o_proj.weight,
            *[p.weight for p in m.mlp.children() if hasattr(p, "weight")],
        ],
    ),
    "phi3": (
        _LLAMA,
        lambda m: split(m.self_attn.qkv_proj.weight, 128, 32, 32)[:2],
        lambda m: [
            split(m.self_attn.qkv_proj.weight, 128, 32, 32)[2],
            m.self_attn.o_proj.weight,
            *split(m.mlp.gate_up_proj.weight, 192, 192),
            m.mlp.down_proj.weight,
        ],
    ),
    "mixtral": (
        {**_LLAMA, "num_local_experts": 3},
        lambda m: [m.self_attn.q_proj.weight, m.self_attn.k_proj.weight],
        lambda m: [
            m.self_attn.v_proj.weight,
            m.self_attn.o_proj.weight,
            *[half for expert in m.mlp.experts.gate_up_proj for half in split(expert, 192, 192)],
            *m.mlp.experts.down_proj,
        ],
    ),
    "gpt2": (
        {**_GPT2, "is_decoder": True, "add_cross_attention": True},
        lambda m: [
            *m.attn.c_attn.weight.T.chunk(3)[:2],
            m.crossattention.q_attn.weight.T,
            m.crossattention.c_attn.weight.T.chunk(2)[0],
        ],
        lambda m: [
            m.attn.c_attn.weight.T.chunk(3)[2],
            m.crossattention.c_attn.weight.T.chunk(2)[1],
            *[p.weight.T for p in (m.attn.c_proj, m.crossattention.c_proj, m.mlp.c_fc, m.mlp.c_proj)],
        ],
    ),
    "gpt_bigcode": (
        _GPT2,
        lambda m: split(m.attn.c_attn.weight, 128, 16, 16)[:2],
        lambda m: [
            split(m.attn.c_attn.weight, 128, 16, 16)[2],
            *[p.weight for p in (m.attn.c_proj, m.mlp.c_fc, m.mlp.c_proj)],
        ],
    ),
    "gpt_neox": (
        _WIDE,
        lambda m: list(m.attention.query_key_value.weight.view(8, 3, 16, 128).unbind(1)[:2]),
        lambda m: [
            m.attention.query_key_value.weight.view(8, 3, 16, 128)[:, 2],
            *[p.weight for p in (m.attention.dense, m.mlp.dense_h_to_4h, m.mlp.dense_4h_to_h)],
        ],
    ),
}


def new_model(case, placement, auto=AutoModel, seed=5, **overrides):
    config = tiny_config(case, **overrides)
    if placement is not None:
        fields = {key: value for key, value in config.to_dict().items() if key != "model_type"}
        config = config_class(config.model_type)(**fields, norm_placement=placement)
    torch.manual_seed(seed)
    return auto.from_config(config)


@pytest.mark.parametrize("case", GAINS)
def test_deepnorm_gains(case):
    fields, ones, betas = GAINS[case]
    model = new_model(case, "deepnorm", **fields)
    beta = deepnorm_beta(LAYERS * len(branches_of(model)))
    for layer in layers_of(model):
        for matrices, gain in ((ones(layer), 1.0), (betas(layer), beta)):
            for matrix in matrices:
                matrix = matrix.flatten(0, -2)
                xavier = math.sqrt(2 / sum(matrix.shape))
                assert matrix.std().item() / xavier == pytest.approx(gain, rel=0.08), tuple(matrix.shape)
                assert abs(matrix.mean()) < 0.1 * xavier
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                assert not parameter.any(), name
    if case == "mixtral":  # the router only chooses
        assert layer.mlp.gate.weight.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("placement", [name for name in list_placements() if name != "deepnorm"])
@pytest.mark.parametrize("case", ["bert", "opt", "gpt2", "llama", "gemma2", "mixtral", "phi3"])
def test_other_placements_start_as_the_stock_model(case, placement):
    stock, model = new_model(case, None), new_model(case, placement)
    state = model.state_dict()
    for name, tensor in stock.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    if case == "gpt2":  # scaled with depth
        assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.5 / math.sqrt(2 * LAYERS), rel=0.1)


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama"])
def test_admin_omega(case):
    omega = math.sqrt((2 * LAYERS + 1) / math.log(2 * LAYERS + 1) - 1)
    assert admin_omega(2 * LAYERS) == omega
    for model, value in ((new_model(case, "admin"), omega), (converted(case, "admin"), 1.0)):
        for tensor in tensors_of(model, "skip_gain"):
            assert tensor.shape == (WIDTH,) and (tensor == torch.tensor(value)).all()


@pytest.mark.parametrize("case", ["llama", "gemma2", "bert"])
def test_new_norms_are_neutral(case):
    model = new_model(case, "sandwich")
    x = torch.randn(2, WIDTH)
    for norm in output_norms_of(model):
        assert norm(x).square().mean().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("placement", ["deepnorm", "admin"])
@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "mixtral"])
def test_initialised_once(case, placement, tmp_path):
    """Not again on loading, as often as that may be, nor when a head is missing."""
    model = new_model(case, placement, AutoModelForCausalLM, **({"is_decoder": True} if case == "bert" else {}))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for attempt in range(5):
        model.save_pretrained(tmp_path / str(attempt))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(attempt))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "0")
    prefix = classifier.base_model_prefix + "."
    for name, tensor in classifier.base_model.state_dict().items():
        assert prefix + name not in state or torch.equal(tensor, state[prefix + name])
    assert prefix + name in state or case == "bert"
