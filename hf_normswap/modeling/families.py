"""How to call the branches of each block family bare: without their norm and without their skip.

Each is `(architecture, layer, x, kwargs) -> (f, attention_weights)`, `x` of shape `(batch, sequence, hidden_size)`. Dropout
between branch and skip belongs to the branch. `kwargs` pass through unnamed, since names change between releases.
"""

import torch
from torch import nn

ENCODER_ARGUMENTS = ("encoder_hidden_states", "encoder_attention_mask")
# Cross-attention attends to the encoder and may fill a cache; the decoder's own positions are nothing to it.
CROSS_ATTENTION_ARGUMENTS = (*ENCODER_ARGUMENTS, "cache", "past_key_values", "attention_mask", "output_attentions")


# BERT and its kin: `attention.self`, `attention.output.dense`, `intermediate.dense`, `output.dense`.
def _bert_attention(architecture, layer, x, kwargs, name="attention"):
    block = getattr(layer, name)
    context, *weights = block.self(x, **kwargs)
    return block.output.dropout(block.output.dense(context)), weights


def _bert_cross_attention(architecture, layer, x, kwargs):
    kwargs["attention_mask"] = kwargs.pop("encoder_attention_mask", None)
    return _bert_attention(architecture, layer, x, kwargs, "crossattention")


def _bert_mlp(architecture, layer, x, kwargs):
    def chunk(x):
        hidden_states = layer.intermediate.intermediate_act_fn(layer.intermediate.dense(x))
        return layer.output.dropout(layer.output.dense(hidden_states))

    size, dim = layer.chunk_size_feed_forward, layer.seq_len_dim
    if not size:  # a split by the length itself would tie exported graphs to it
        return chunk(x), []
    return torch.cat([chunk(part) for part in x.split(size, dim)], dim), []


# GPT-2, LLaMA and their kin: one attention and one MLP module, sometimes a dropout or a multiplier behind them.
def _finish(architecture, layer, f, dropout):
    f = f if dropout is None else getattr(layer, dropout)(f)
    return f if architecture.branch_multiplier is None else f * getattr(layer, architecture.branch_multiplier)


def _decoder_attention(architecture, layer, x, kwargs):
    f, *weights = getattr(layer, architecture.attn)(x, **kwargs)
    return _finish(architecture, layer, f, architecture.attn_dropout), weights


def _decoder_cross_attention(architecture, layer, x, kwargs):
    kwargs = {key: value for key, value in kwargs.items() if key in CROSS_ATTENTION_ARGUMENTS}
    f, *weights = layer.crossattention(x, **kwargs)
    return f, weights


def _decoder_mlp(architecture, layer, x, kwargs):
    return _finish(architecture, layer, layer.mlp(x), architecture.mlp_dropout), []


# OPT and BioGPT: fc1 and fc2 lie in the layer itself, dropout is a number.
def _opt_attention(architecture, layer, x, kwargs):
    f, weights = _decoder_attention(architecture, layer, x, kwargs)
    return nn.functional.dropout(f, p=layer.dropout, training=layer.training), weights


def _opt_mlp(architecture, layer, x, kwargs):
    f = layer.activation_fn(layer.fc1(x))
    f = nn.functional.dropout(f, p=getattr(layer, "activation_dropout", 0.0), training=layer.training)
    return nn.functional.dropout(layer.fc2(f), p=layer.dropout, training=layer.training), []


FAMILIES = {
    "bert": {"attn": _bert_attention, "cross_attn": _bert_cross_attention, "ffn": _bert_mlp},
    "decoder": {"attn": _decoder_attention, "cross_attn": _decoder_cross_attention, "ffn": _decoder_mlp},
    "opt": {"attn": _opt_attention, "ffn": _opt_mlp},
}
