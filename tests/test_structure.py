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
from hf_normswap.modeling.placements import admin_omega, deepnorm_gains

CASES = [case for case in TINY if case != "bert-chunked"]  # its MLP is called once for each position
SQUARE = {
    "opt-post": {"word_embed_proj_dim": WIDTH},
    "electra": {"embedding_size": WIDTH},
}  # no projections at the ends


def converted(case, placement, **kwargs):
    return convert_checkpoint(tiny_model(case, "AutoModel", **SQUARE.get(case, {})), placement, **kwargs).eval()


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
@pytest.mark.parametrize("case", CASES)
def test_which_norm_feeds_what(case, placement):
    """Every norm is made to return a number of its own, which the branches and the end must then see."""
    model = converted(case, placement)
    row, norms, layers = row_of(model), norms_of(model), layers_of(model)
    if row.norm_after:
        norms[0] = model.embeddings.LayerNorm if row.has_stem_norm else None
    dual_norm = getattr(layers[-1], "dual_norm", None)
    numbers, seen = {norm: float(k) for k, norm in enumerate([*norms, dual_norm], 1) if norm is not None}, []
    for norm in numbers:
        norm.register_forward_hook(lambda module, args, output: torch.full_like(output, numbers[module]))
    for layer in layers:
        for path in READERS.get(row.family, (row.attn, row.mlp[0])):
            reader = attrgetter(path)(layer)
            reader.register_forward_pre_hook(lambda m, a, k: seen.append(first_tensor(a, k)), with_kwargs=True)
    last = run(model).last_hidden_state

    assert len(seen) == len(norms) - 1 == 2 * LAYERS
    reads_stream = placement == "res_post" or (placement == "gated" and row.native == "res_post")
    for k, (tensor, norm) in enumerate(zip(seen, norms)):
        if norm is not None and (not reads_stream or (k == 0 and row.norm_after)):
            assert (tensor == numbers[norm]).all()
        else:
            assert not (tensor == tensor[0, 0, 0]).all()
    apart = dual_norm is not None and row.norm_after  # elsewhere the last norm adds the dual stream
    assert (last == numbers[norms[-1]] + (numbers[dual_norm] if apart else 0)).all()


@pytest.mark.parametrize("placement", list_placements())
@pytest.mark.parametrize("case", CASES)
def test_one_norm_at_the_end(case, placement):
    model = converted(case, placement)
    calls = []
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and not list(module.children()):
            module.register_forward_hook(lambda m, a, output: calls.append((first_tensor(a, {}), output)))
    state, count = run(model).last_hidden_state, 0
    if placement == "resi_dual" and row_of(model).norm_after:
        (_, main), (_, dual) = calls[-2:]
        assert torch.equal(state, main + dual)
        state = main
    while origin := [source for source, output in calls if output.data_ptr() == state.data_ptr()]:
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
        actual = deepnorm_gains(branches * layers)
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
_GPT2, _LLAMA = {**_WIDE, "n_inner": 192}, {**_WIDE, "head_dim": 16}  # LLaMA's queries are grouped: 2 key-value heads
_ATTENTION = {"q_proj": [1], "k_proj": [1], "v_proj": ["beta"], "o_proj": ["beta"]}

# case -> fields, and of each matrix of a layer the gain, or the gains of the parts of equal or given size.
GAINS = {
    "bert": (
        {**_WIDE, "is_decoder": True},
        {
            "attention.self.query": [1],
            "attention.self.key": [1],
            "attention.self.value": ["beta"],
            "attention.output.dense": ["beta"],
            "intermediate.dense": ["beta"],
            "output.dense": ["beta"],
        },
    ),
    "llama": (
        _LLAMA,
        {f"self_attn.{name}": gain for name, gain in _ATTENTION.items()}
        | {f"mlp.{name}_proj": ["beta"] for name in ("gate", "up", "down")},
    ),
    "phi3": (
        _LLAMA,
        {
            "self_attn.qkv_proj": [(1, 128), (1, 32), ("beta", 32)],
            "self_attn.o_proj": ["beta"],
            "mlp.gate_up_proj": ["beta", "beta"],
            "mlp.down_proj": ["beta"],
        },
    ),
    "mixtral": (
        {**_LLAMA, "num_local_experts": 3},
        {f"self_attn.{name}": gain for name, gain in _ATTENTION.items()}
        | {"mlp.experts.gate_up_proj": ["beta", "beta"], "mlp.experts.down_proj": ["beta"], "mlp.gate": [None]},
    ),
    "gpt2": (
        {**_GPT2, "add_cross_attention": True},
        {
            "attn.c_attn": [1, 1, "beta"],
            "attn.c_proj": ["beta"],
            "crossattention.q_attn": [1],
            "crossattention.c_attn": [1, "beta"],
            "crossattention.c_proj": ["beta"],
            "mlp.c_fc": ["beta"],
            "mlp.c_proj": ["beta"],
        },
    ),
    "gpt_bigcode": (  # one key-value head
        _GPT2,
        {
            "attn.c_attn": [(1, 128), (1, 16), ("beta", 16)],
            "attn.c_proj": ["beta"],
            "mlp.c_fc": ["beta"],
            "mlp.c_proj": ["beta"],
        },
    ),
    "gpt_neox": (
        _WIDE,
        {
            "attention.query_key_value": [1, 1, "beta"],
            "attention.dense": ["beta"],
            "mlp.dense_h_to_4h": ["beta"],
            "mlp.dense_4h_to_h": ["beta"],
        },
    ),
}


def matrices(layer, path):
    """The matrices of a module (experts have several) as `(out_features, in_features)`, fused heads sorted by kind."""
    module = attrgetter(path)(layer)
    weight = module if isinstance(module, nn.Parameter) else module.weight
    if isinstance(module, Conv1D):
        weight = weight.T
    if path == "attention.query_key_value":  # by head
        weight = weight.unflatten(0, (8, 3, 16)).transpose(0, 1).flatten(0, 2)
    return weight if weight.ndim == 3 else weight[None]


def new_model(case, placement, auto=AutoModel, seed=5, **overrides):
    config = tiny_config(case, **overrides)
    if placement is not None:
        fields = {key: value for key, value in config.to_dict().items() if key != "model_type"}
        config = config_class(config.model_type)(**fields, norm_placement=placement)
    torch.manual_seed(seed)
    return auto.from_config(config)


@pytest.mark.parametrize("head", [False, True], ids=["base", "head"])
@pytest.mark.parametrize("case", GAINS)
def test_deepnorm_gains(case, head):
    fields, gains = GAINS[case]
    model = new_model(case, "deepnorm", AutoModelForCausalLM if head else AutoModel, **fields).base_model
    _, beta = deepnorm_gains(LAYERS * len(branches_of(model)))
    for layer in layers_of(model):
        assert {name for name, parameter in layer.named_parameters() if parameter.ndim > 1} == {
            path if "experts" in path else f"{path}.weight" for path in gains
        }
        for path, parts in gains.items():
            for matrix in matrices(layer, path):
                sizes = [part[1] if isinstance(part, tuple) else len(matrix) // len(parts) for part in parts]
                for part, weight in zip(parts, matrix.split(sizes)):
                    gain = part[0] if isinstance(part, tuple) else part
                    std = math.sqrt(2 / sum(weight.shape)) * (beta if gain == "beta" else gain) if gain else 0.02
                    assert weight.std().item() == pytest.approx(std, rel=0.08 if gain else 0.2), path
                    assert abs(weight.mean()) < 0.2 * std
        assert not any(parameter.any() for name, parameter in layer.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("placement", [name for name in list_placements() if name != "deepnorm"])
@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "gemma2", "mixtral", "phi3"])
def test_other_placements_start_as_the_stock_model(case, placement):
    stock, model = new_model(case, None), new_model(case, placement)
    state = model.state_dict()
    for name, tensor in stock.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    if case == "gpt2":  # scaled with depth
        model = new_model(case, placement, AutoModelForCausalLM).transformer
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


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_come_back(case, tmp_path):
    """On disk experts lie apart, in memory they are stacked: that of a loaded model, too."""
    tiny_model(case).save_pretrained(tmp_path / "stock")
    model = convert_checkpoint(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), "post")
    model.save_pretrained(tmp_path / "converted")
    for folder, config in (("converted", None), ("stock", model.config)):
        loaded, info = type(model).from_pretrained(tmp_path / folder, config=config, output_loading_info=True)
        assert not any(info.values()), info
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))
