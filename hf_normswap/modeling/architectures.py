"""What each `model_type` calls its parts: one row per architecture.

Names are attribute paths: of the base model for `layers` and `final_norm`, of a layer for the rest. Beware of names:
`post_attention_layernorm` is the norm *before* the MLP in LLaMA and GLM-4 and the norm *behind* attention in Gemma-2
and OLMo-2. The tests check every row against the stock model bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .placements import NormSwapError

BRANCHES = ("attn", "cross_attn", "ffn")  # not "mlp": renames of experts on disk would match `.mlp_`


@dataclass(frozen=True)
class Architecture:
    """One row. `norms` and `output_norms` have an entry for each of `BRANCHES`, `None` where there is no such norm."""

    model_type: str  # the stock one
    family: str = "decoder"  # how its branches are called, a key of `families.FAMILIES`
    native: str = "pre"  # the placement of the stock model
    norm_after: bool = False  # the norms follow the skip, so that a branch reads the previous branch's norm (BERT)
    layers: str = "layers"
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm")  # N
    output_norms: tuple[str | None, ...] = (None, None, None)  # N'
    final_norm: str | None = "norm"  # behind the last layer, in the base model
    has_stem_norm: bool = False  # whether the embeddings end with a norm
    norm_offset: float = 0.0  # 1 where a norm multiplies by `1 + weight` (Gemma)
    attn: str = "self_attn"
    cross_attn: str = "crossattention"
    mlp: tuple[str, ...] = ("mlp",)
    value: str = "v_proj"  # below `attn`
    value_part: str = "all"  # or the "tail" of a fused projection, or its last third "per_head" where that fits
    attn_output: str = "o_proj"  # below `attn`
    mlp_output: str = "down_proj"  # below the last of `mlp`, or that module itself
    attn_dropout: str | None = None  # modules of the layer between branch and skip
    mlp_dropout: str | None = None
    branch_multiplier: str | None = None  # attribute of the layer that multiplies each branch
    layer_returns_tuple: bool = False  # of hidden states and attention weights
    adapt: Callable | None = None  # config -> the fields of this row that it changes
    refuse: Callable | None = None  # config -> why it cannot be converted, or None


def _opt_variant(config):
    if not config.do_layer_norm_before:  # opt-350m: Post-Norm with neither a stem norm nor a final one
        return {"native": "post", "norm_after": True, "final_norm": None}
    return {"final_norm": None} if config._remove_final_layer_norm else {}


def _parallel(config):
    return "its branches are parallel (`use_parallel_residual=True`)" if config.use_parallel_residual else None


# fmt: off
_BERT = Architecture("bert", family="bert", native="post", norm_after=True, layers="encoder.layer", final_norm=None,
                     norms=("attention.output.LayerNorm", "crossattention.output.LayerNorm", "output.LayerNorm"),
                     has_stem_norm=True, attn="attention", mlp=("intermediate", "output"),
                     value="self.value", attn_output="output.dense", mlp_output="dense")
_GPT2 = Architecture("gpt2", layers="h", norms=("ln_1", "ln_cross_attn", "ln_2"), final_norm="ln_f", attn="attn",
                     value="c_attn", value_part="tail", attn_output="c_proj", mlp_output="c_proj")
_OPT = Architecture("opt", family="opt", layers="decoder.layers", final_norm="decoder.final_layer_norm",
                    norms=("self_attn_layer_norm", None, "final_layer_norm"), mlp=("fc1", "fc2"),
                    attn_output="out_proj", mlp_output="", adapt=_opt_variant)
_LLAMA = Architecture("llama")
_ROWS = (
    *(replace(_BERT, model_type=name) for name in ("bert", "roberta", "xlm-roberta", "camembert", "electra")),
    replace(_BERT, model_type="roberta-prelayernorm", native="pre", norm_after=False, final_norm="LayerNorm",
            norms=("attention.LayerNorm", "crossattention.LayerNorm", "intermediate.LayerNorm")),
    replace(_BERT, model_type="megatron-bert", native="pre", norm_after=False, final_norm="encoder.ln",
            norms=("attention.ln", "crossattention.ln", "ln"), has_stem_norm=False, layer_returns_tuple=True),
    _GPT2,
    replace(_GPT2, model_type="gpt_bigcode", value_part="per_head"),
    _OPT,
    replace(_OPT, model_type="biogpt", layers="layers", final_norm="layer_norm", adapt=None),
    *(replace(_LLAMA, model_type=name) for name in (
        "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "olmo", "glm",
    )),
    replace(_LLAMA, model_type="gemma", norm_offset=1.0),
    replace(_LLAMA, model_type="granite", branch_multiplier="residual_multiplier"),
    replace(_LLAMA, model_type="starcoder2", mlp_output="c_proj"),
    replace(_LLAMA, model_type="phi3", value="qkv_proj", value_part="tail",
            attn_dropout="resid_attn_dropout", mlp_dropout="resid_mlp_dropout"),
    replace(_LLAMA, model_type="stablelm", mlp_dropout="dropout", refuse=_parallel),
    replace(_LLAMA, model_type="gpt_neox", final_norm="final_layer_norm", attn="attention", refuse=_parallel,
            value="query_key_value", value_part="per_head", attn_output="dense", mlp_output="dense_4h_to_h",
            attn_dropout="post_attention_dropout", mlp_dropout="post_mlp_dropout"),
    replace(_LLAMA, model_type="olmo2", native="res_post", norms=(None, None, None),
            output_norms=("post_attention_layernorm", None, "post_feedforward_layernorm")),
    replace(_LLAMA, model_type="gemma2", native="sandwich", norm_offset=1.0,
            norms=("input_layernorm", None, "pre_feedforward_layernorm"),
            output_norms=("post_attention_layernorm", None, "post_feedforward_layernorm")),
    replace(_LLAMA, model_type="glm4", native="sandwich",
            output_norms=("post_self_attn_layernorm", None, "post_mlp_layernorm")),
)
# fmt: on
ARCHITECTURES = {row.model_type: row for row in _ROWS}


def get_architecture(config) -> Architecture:
    """The row for a stock or converted config, adapted to its flags; [`NormSwapError`] if there is none."""
    model_type = getattr(config, "stock_model_type", config.model_type)
    if model_type not in ARCHITECTURES:
        raise NormSwapError(f"model type {model_type!r} has no row here. Supported: {', '.join(ARCHITECTURES)}.")
    row = ARCHITECTURES[model_type]
    return replace(row, **row.adapt(config)) if row.adapt is not None else row
