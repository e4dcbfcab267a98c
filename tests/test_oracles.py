"""Converted models against implementations that nobody here wrote, and against the papers' formulas in float64."""

import sys
import types
from operator import attrgetter

import pytest
import torch
from chains import layers_of, norms_of, output_norms_of, row_of, tensors_of
from tiny_models import LAYERS, WIDTH, scramble, tiny_batch, tiny_model
from torch import nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_normswap import convert_checkpoint, list_placements
from hf_normswap.modeling.architectures import BRANCHES

HEADS, HEAD, INNER = 4, WIDTH // 4, 48
ALPHA = (2 * LAYERS) ** 0.25


def converted(case, placement, **overrides):
    """A converted base model; what the placement adds is as random as the rest."""
    return scramble(convert_checkpoint(tiny_model(case, "AutoModel", **overrides), placement)).eval()


def states(model, batch, **kwargs):
    """What enters the first layer, and what comes out in the end."""
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True, **kwargs)
    return output.hidden_states[0], output.last_hidden_state


def assert_close(actual, expected, batch, tolerance=1e-6):
    keep = batch["attention_mask"].bool()
    assert (actual - expected)[keep].abs().max() <= tolerance * max(1, expected[keep].abs().max())


# --- Transformers' own models -----------------------------------------------------------------------------------------


def put_norms(oracle, norms, output_norms):
    """Put norms into a stock model, the first one in front of its layers where it has no place for it."""
    row, layers = row_of(oracle), layers_of(oracle)
    if row.norm_after:
        layers[0].register_forward_pre_hook(lambda layer, args, norm=norms[0]: (norm(args[0]), *args[1:]))
        norms = norms[1:]
    for paths, modules in ((row.norms, norms), (row.output_norms, output_norms)):
        for layer, pair in zip(layers, zip(modules[::2], modules[1::2])):
            for path, norm in zip((paths[0], paths[2]), pair):
                if path is not None:
                    layer.set_submodule(path, norm)
    if not row.norm_after:
        oracle.set_submodule(row.final_norm, norms[-1])


def without_query_key_norms(model):
    for layer in layers_of(model):
        if hasattr(layer, "self_attn") and hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    return model


def rename(state, *pairs):
    for old, new in pairs:
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    return state


def openai_weights(source, other):
    return rename(source.state_dict(), ("wte", "tokens_embed"), ("wpe", "positions_embed"))


def bloom_weights(source, other):
    """GPT-2's blocks in BLOOM's, without the positions of either."""
    nn.init.zeros_(source.wpe.weight)
    other.word_embeddings_layernorm = nn.Identity()
    other.build_alibi_tensor = lambda mask, heads, dtype: torch.zeros(len(mask) * heads, 1, mask.shape[1])
    state = {
        name: tensor.T if "h." in name and tensor.ndim == 2 else tensor for name, tensor in source.state_dict().items()
    }
    for name in [name for name in state if "c_attn" in name]:  # BLOOM sorts the fused projection by head
        state[name] = state[name].unflatten(0, (3, HEADS, HEAD)).transpose(0, 1).flatten(0, 2)
    return rename(
        state,
        ("wte", "word_embeddings"),
        ("attn.c_attn", "self_attention.query_key_value"),
        ("attn.c_proj", "self_attention.dense"),
        ("mlp.c_fc", "mlp.dense_h_to_4h"),
        ("mlp.c_proj", "mlp.dense_4h_to_h"),
    )


def minimax_weights(source, other):
    """The MLP is MiniMax's only expert, which is always chosen."""
    state = source.state_dict()
    for index, layer in enumerate(source.layers):
        experts = f"layers.{index}.mlp.experts"
        state[f"{experts}.gate_up_proj"] = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])[None]
        state[f"{experts}.down_proj"] = layer.mlp.down_proj.weight[None]
    return state


_MILD = {"initializer_range": 0.05}  # keeps rounding below 1e-6
_GPT1 = {**_MILD, "activation_function": "gelu_new", "n_inner": 4 * WIDTH}
_BLOOM = {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "apply_residual_connection_post_layernorm": True}
_MINIMAX = {
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention"] * LAYERS,
    "full_attn_alpha_factor": ALPHA,
    "mlp_alpha_factor": ALPHA,
    "rope_theta": 10000.0,
}
# case, placement, fields for both, oracle, fields of the oracle alone, weights; `None` if they have the same names
STOCK_PAIRS = [
    ("roberta", "pre", {}, "roberta-prelayernorm", {}, None),
    ("roberta-prelayernorm", "post", {}, "roberta", {}, None),
    ("opt", "post", {}, "opt", {"do_layer_norm_before": False}, None),
    ("opt-post", "pre", {"word_embed_proj_dim": WIDTH}, "opt", {"do_layer_norm_before": True}, None),
    ("llama", "res_post", {}, "olmo2", {}, None),
    ("olmo2", "pre", {}, "llama", {}, None),
    ("glm", "sandwich", {}, "glm4", {}, None),
    ("glm4", "pre", {}, "glm", {}, None),
    ("gemma", "sandwich", {}, "gemma2", {"query_pre_attn_scalar": HEAD, "attn_logit_softcapping": None}, None),
    ("gemma2", "pre", {"attn_logit_softcapping": None}, "gemma", {}, None),
    ("gpt2", "post", _GPT1, "openai-gpt", {"afn": "gelu"}, openai_weights),
    ("gpt2", "post", _GPT1, "bloom", _BLOOM, bloom_weights),
    ("llama", "deepnorm", _MILD, "minimax", _MINIMAX, minimax_weights),
]


@pytest.mark.parametrize(
    "case, placement, common, oracle, own, weights",
    STOCK_PAIRS,
    ids=[f"{row[0]}-{row[1]}-{row[3]}" for row in STOCK_PAIRS],
)
def test_stock_models(case, placement, common, oracle, own, weights):
    source = without_query_key_norms(tiny_model(case, "AutoModel", **common))
    model = scramble(convert_checkpoint(source, placement))  # on the same tensors
    fields = {key: value for key, value in source.config.to_dict().items() if key not in ("model_type", "layer_types")}
    other = without_query_key_norms(AutoModel.from_config(CONFIG_MAPPING[oracle](**{**fields, **own})))
    state = source.state_dict() if weights is None else weights(source, other)
    unset, _ = other.load_state_dict(
        {key: state[key] for key in state.keys() & other.state_dict().keys()}, strict=False
    )
    assert all("norm" in name.lower() or "ln_" in name or name.endswith("mlp.gate.weight") for name in unset)

    put_norms(other, norms_of(model), output_norms_of(model) if placement in ("sandwich", "res_post") else [])
    batch = tiny_batch(padding=2 if "roberta" in oracle else 0)
    model.set_attn_implementation("eager")
    other.set_attn_implementation("eager")
    if weights is not None:
        return assert_close(states(model, batch)[1], states(other.eval(), batch)[1], batch)
    for train in (False, True):  # the same numbers, even those of dropout
        outputs = []
        for network in (model, other):
            torch.manual_seed(3)
            outputs.append(states(network.train(train), batch)[1])
        assert torch.equal(*outputs)


# --- stacks of PyTorch, torchscale and x-transformers ------------------------------------------------------------------

# case -> fields, query, key, value, output and the two of the MLP; query, key and value are one in GPT-2
_BERT_LINEARS = ("query", "key", "value"), "attention.output.dense", "intermediate.dense", "output.dense"
STACKS = {
    "bert": ({}, *_BERT_LINEARS),
    "roberta-prelayernorm": ({}, *_BERT_LINEARS),
    "gpt2": ({"activation_function": "gelu"}, "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "opt": (
        {"activation_function": "gelu", "init_std": 0.05},
        ("q_proj", "k_proj", "v_proj"),
        "self_attn.out_proj",
        "fc1",
        "fc2",
    ),
}
CAUSAL = ("gpt2", "opt")


def linears_of(case, layer):
    """`(weight, bias)` of query, key, value, output and the two layers of the MLP."""
    _, qkv, *rest = STACKS[case]
    pairs = [attrgetter(path)(layer) for path in rest]
    if isinstance(qkv, str):
        fused = attrgetter(qkv)(layer)
        qkv = list(zip(fused.weight.T.chunk(3), fused.bias.chunk(3)))
        return qkv + [(module.weight.T, module.bias) for module in pairs]
    attention = layer.self_attn if case == "opt" else layer.attention.self
    return [(module.weight, module.bias) for module in (*[getattr(attention, name) for name in qkv], *pairs)]


def fill(modules, weights):
    with torch.no_grad():
        for module, (weight, bias) in zip(modules, weights):
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.copy_(bias)


def stack_case(case, placement, **overrides):
    model = converted(case, placement, **{**_MILD, **STACKS[case][0], **overrides})
    model.set_attn_implementation("eager")
    batch = tiny_batch(padding=0 if case in CAUSAL else 2)
    return model, batch, batch["attention_mask"] == 0, *states(model, batch)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("case", STACKS)
def test_torch(case, placement):
    model, batch, padding, stream, expected = stack_case(case, placement)
    first, norms = placement == "pre", norms_of(model)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, INNER, 0.0, nn.functional.gelu, norm_first=first, batch_first=True
    )
    stack = nn.TransformerEncoder(layer, LAYERS, norms[-1] if first else None, enable_nested_tensor=False)
    for index, (layer, own) in enumerate(zip(stack.layers, layers_of(model))):
        query, key, value, *rest = linears_of(case, own)
        with torch.no_grad():
            layer.self_attn.in_proj_weight.copy_(torch.cat([query[0], key[0], value[0]]))
            layer.self_attn.in_proj_bias.copy_(torch.cat([query[1], key[1], value[1]]))
        fill((layer.self_attn.out_proj, layer.linear1, layer.linear2), rest)
        layer.norm1, layer.norm2 = norms[2 * index + (not first) :][:2]
    mask = nn.Transformer.generate_square_subsequent_mask(stream.shape[1]) if case in CAUSAL else None
    actual = stack(
        stream if first else norms[0](stream), mask, None if case in CAUSAL else padding, is_causal=case in CAUSAL
    )
    assert_close(actual, expected, batch)


@pytest.fixture
def torchscale(monkeypatch):
    pytest.importorskip("torchscale", exc_type=ImportError)
    module = types.ModuleType("timm.models.layers")  # all that torchscale wants of timm, and not in use here
    module.drop_path = lambda x, *args: x
    for name in ("timm", "timm.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return pytest.importorskip("torchscale.architecture")


@pytest.mark.parametrize("placement", ["pre", "post", "deepnorm"])
@pytest.mark.parametrize("case, kind", [("bert", "encoder"), ("gpt2", "decoder")])
def test_torchscale(torchscale, case, kind, placement):
    from torchscale.architecture.config import DecoderConfig, EncoderConfig
    from torchscale.architecture.decoder import Decoder
    from torchscale.architecture.encoder import Encoder

    model, batch, padding, stream, expected = stack_case(case, placement)
    pre, norms = placement == "pre", norms_of(model)
    fields = {
        "embed_dim": WIDTH,
        "attention_heads": HEADS,
        "ffn_embed_dim": INNER,
        "layers": LAYERS,
        "normalize_before": pre,
    }
    fields = {f"{kind}_{key}": value for key, value in fields.items()} | {
        "subln": False,
        "deepnorm": placement == "deepnorm",
    }
    config, cls = (EncoderConfig, Encoder) if kind == "encoder" else (DecoderConfig, Decoder)
    stack = cls(config(**fields, no_output_layer=True)).eval()
    for index, (layer, own) in enumerate(zip(stack.layers, layers_of(model))):
        attention, ffn = layer.self_attn, layer.ffn
        names = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, ffn.fc1, ffn.fc2
        fill(names, linears_of(case, own))
        layer.self_attn_layer_norm, layer.final_layer_norm = norms[2 * index + (not pre) :][:2]
    stream = stream if pre else norms[0](stream)
    if pre:
        stack.layer_norm = norms[-1]
    if kind == "encoder":
        actual = stack(None, encoder_padding_mask=padding, token_embeddings=stream, features_only=True)["encoder_out"]
    else:
        actual, _ = stack(batch["input_ids"], token_embeddings=stream, features_only=True)
    assert_close(actual, expected, batch)


X_TRANSFORMERS = {
    "pre": {},
    "post": {"pre_norm": False},
    "deepnorm": {"pre_norm": False, "scale_residual_constant": ALPHA},
    "admin": {"pre_norm": False, "scale_residual": True},
    "sandwich": {"sandwich_norm": True},
}


@pytest.mark.parametrize("placement", X_TRANSFORMERS)
@pytest.mark.parametrize("case", ["bert", "roberta-prelayernorm", "gpt2"])
def test_x_transformers(case, placement):
    peer = pytest.importorskip("x_transformers")
    model, batch, padding, stream, expected = stack_case(case, placement)
    stack = (peer.Decoder if case in CAUSAL else peer.Encoder)(
        dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=HEAD, ff_mult=INNER / WIDTH, **X_TRANSFORMERS[placement]
    )
    norms, pre = norms_of(model), "pre_norm" not in X_TRANSFORMERS[placement]
    blocks = iter(stack.layers)
    for index, own in enumerate(layers_of(model)):
        weights = linears_of(case, own)
        for _, bias in weights[:4]:  # the peer's attention has none
            nn.init.zeros_(bias)
        for name, start in (("attn", 0), ("ffn", 4)):
            slots, branch, residual = next(blocks)
            linears = (
                [branch.to_q, branch.to_k, branch.to_v, branch.to_out]
                if start == 0
                else [branch.ff[0][0], branch.ff[2]]
            )
            fill(linears, weights[start:])
            slots[0 if pre else 2] = norms[2 * index + (start > 0) + (not pre)]
            if placement == "sandwich":
                slots[1] = getattr(own, f"{name}_output_norm")
            if placement == "admin":
                residual.residual_scale = getattr(own, f"{name}_skip_gain").weight
    if pre:
        stack.final_norm = norms[-1]
    expected = states(model, batch)[1]
    actual = stack(stream if pre else norms[0](stream), mask=~padding)
    assert_close(actual, expected, batch)


# --- the papers' formulas -------------------------------------------------------------------------------------------


def reference(placement, stream, norms, branches, output_norms, extra):
    """A whole stack as the paper of the placement writes it. `norms[k]` leads branch k, and the last one ends the stack."""
    if placement in ("post", "deepnorm", "admin"):  # x <- N(gain * x + F(x))
        x = norms[0](stream)
        for k, branch in enumerate(branches):
            x = norms[k + 1](extra["gain"][k] * x + branch(x))
        return x
    if placement == "resi_dual":  # x <- N(x + F(x)), d <- d + s * F(x); x + N_dual(d) in the end
        x, dual = norms[0](stream), extra["scale"] * stream
        for k, branch in enumerate(branches):
            f = branch(x)
            dual = dual + extra["scale"] * f
            x = norms[k + 1](x + f)
        return x + extra["dual_norm"](dual)
    x = extra["stem_norm"](stream) if placement == "peri" else stream
    for k, branch in enumerate(branches):
        if placement == "pre":
            x = x + branch(norms[k](x))
        elif placement in ("sandwich", "peri"):
            x = x + output_norms[k](branch(norms[k](x)))
        elif placement == "res_post":
            x = x + output_norms[k](branch(x))
        elif placement == "gated":
            y, gate = norms[k](x), extra["gate"][k]
            x = (1 - gate) * x + gate * y + branch(y)
    return norms[-1](x)


def bert_branches(layer, call):
    def attention(x):
        return layer.attention.output.dense(layer.attention.self(x, attention_mask=call["attention_mask"])[0])

    def cross_attention(x):
        encoder, mask = call["encoder_hidden_states"], call["encoder_attention_mask"]
        context = layer.crossattention.self(x, encoder_hidden_states=encoder, attention_mask=mask)[0]
        return layer.crossattention.output.dense(context)

    def mlp(x):
        return layer.output.dense(layer.intermediate(x))

    return [attention, cross_attention, mlp] if hasattr(layer, "crossattention") else [attention, mlp]


def gpt2_branches(layer, call):
    def cross_attention(x):
        encoder, mask = call["encoder_hidden_states"], call["encoder_attention_mask"]
        return layer.crossattention(x, encoder_hidden_states=encoder, encoder_attention_mask=mask)[0]

    branches = [lambda x: layer.attn(x, attention_mask=call["attention_mask"])[0], layer.mlp]
    return [branches[0], cross_attention, branches[1]] if hasattr(layer, "crossattention") else branches


def llama_branches(layer, call):
    kwargs = {name: call[name] for name in ("attention_mask", "position_embeddings")}
    return [lambda x: layer.self_attn(x, **kwargs)[0], layer.mlp]


_CROSS = {"is_decoder": True, "add_cross_attention": True}
REFERENCES = {
    "bert": ("bert", {}, bert_branches),
    "bert-cross-attention": ("bert", _CROSS, bert_branches),
    "gpt2": ("gpt2", {}, gpt2_branches),
    "gpt2-cross-attention": ("gpt2", _CROSS, gpt2_branches),
    "llama": ("llama", {}, llama_branches),
}


def layer_arguments(model, batch):
    """What the model passes to its layers, by name, and its outputs."""
    calls = []
    names = list(layers_of(model)[0]._argument_names)
    hook = lambda layer, args, kwargs: calls.append({**dict(zip(names, args[1:])), **kwargs})  # noqa: E731
    handle = layers_of(model)[0].register_forward_pre_hook(hook, with_kwargs=True)
    outputs = states(model, batch)
    handle.remove()
    return calls[0], outputs


def reference_case(name, placement, **fields):
    case, overrides, branches = REFERENCES[name]
    source = tiny_model(case, "AutoModel", **overrides).double()
    model = scramble(convert_checkpoint(source, placement, **fields))
    batch = tiny_batch()
    if overrides:
        generator = torch.Generator().manual_seed(4)
        batch["encoder_hidden_states"] = torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)
        batch["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    call, (stream, actual) = layer_arguments(model, batch)
    branches = [branch for layer in layers_of(model) for branch in branches(layer, call)]
    return model, batch, stream, actual, branches


@pytest.mark.parametrize("placement", list_placements())
@pytest.mark.parametrize("name", REFERENCES)
def test_reference(name, placement):
    scale = 0.05 if placement == "resi_dual" else 1.0
    model, batch, stream, actual, branches = reference_case(name, placement, norm_dual_scale=scale)
    first, last = layers_of(model)[0], layers_of(model)[-1]
    gains = {"post": [1.0] * len(branches), "deepnorm": [len(branches) ** 0.25] * len(branches)}
    extra = {
        "gain": gains.get(placement) or (placement == "admin" and tensors_of(model, "skip_gain")),
        "gate": placement == "gated" and tensors_of(model, "skip_gate"),
        "scale": scale,
        "dual_norm": getattr(last, "dual_norm", None),
        "stem_norm": getattr(first, "stem_norm", nn.Identity()),
    }
    assert (placement == "peri") == hasattr(first, "stem_norm") or "bert" in name  # which has one in its embeddings
    norms, output_norms = norms_of(model), []
    if placement in ("sandwich", "peri", "res_post"):
        output_norms = output_norms_of(model)
    if placement == "resi_dual":
        assert getattr(last.dual_norm, "eps", getattr(last.dual_norm, "variance_epsilon", None)) == 1e-7
        if not row_of(model).norm_after:  # the model's last norm also adds the dual stream, which here is done above
            final = norms[-1]
            norms[-1] = lambda x: final._stock_class.forward(final, x)
    with torch.no_grad():
        expected = reference(placement, stream, norms, branches, output_norms, extra)
    assert_close(actual, expected, batch, 1e-9)


# A step of each placement on the stream before the norm: a list of placements is a list of such steps.
STEPS = {
    "pre": lambda z, y, f: z + f(y),
    "post": lambda z, y, f: y + f(y),
    "deepnorm": lambda z, y, f: ALPHA * y + f(y),
    "gated": lambda z, y, f, gate: (1 - gate) * z + gate * y + f(y),
    "sandwich": lambda z, y, f, norm: z + norm(f(y)),
    "res_post": lambda z, y, f, norm: z + norm(f(z)),
}
HYBRIDS = [
    ("post", "pre", "gated"),
    ("post", "pre", "pre"),
    ("pre", "post", "sandwich"),
    ("res_post", "deepnorm", "res_post"),
    ("sandwich", "gated", "post"),
]


@pytest.mark.parametrize("placements", HYBRIDS, ids="-".join)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_hybrids(name, placements):
    model, batch, stream, actual, branches = reference_case(name, list(placements))
    norms = norms_of(model)
    with torch.no_grad():
        for k, branch in enumerate(branches):
            layer, name = layers_of(model)[k // 2], BRANCHES[k % 2 * 2]
            extra = [getattr(layer, f"{name}_skip_gate").weight] if hasattr(layer, f"{name}_skip_gate") else []
            extra += [getattr(layer, f"{name}_output_norm")] if hasattr(layer, f"{name}_output_norm") else []
            stream = STEPS[placements[k // 2]](stream, norms[k](stream), branch, *extra)
        assert_close(actual, norms[-1](stream), batch, 1e-9)
