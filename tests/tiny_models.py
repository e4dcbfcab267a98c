"""One tiny random model per architecture. To test a new row of the table of architectures, add its row here."""

import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_normswap import list_placements

VOCABULARY, WIDTH, LAYERS = 96, 32, 3

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # with the usual 0.02 a broken cache or mask can go unnoticed
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_BERT = {
    **_COMMON,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": 0.1,
    "type_vocab_size": 2,
}
_GPT2 = {**_COMMON, "n_inner": 48, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
_LLAMA = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "attention_dropout": 0.1, "head_dim": 8}
_OPT = {
    **_COMMON,
    "ffn_dim": 48,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "word_embed_proj_dim": WIDTH,
    "init_std": 0.5,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# name of the case -> (model type, fields of its config)
TINY = {
    "bert": ("bert", _BERT),
    "bert-chunked": ("bert", {**_BERT, "chunk_size_feed_forward": 1}),
    "roberta": ("roberta", _BERT),
    "xlm-roberta": ("xlm-roberta", _BERT),
    "camembert": ("camembert", _BERT),
    "electra": ("electra", {**_BERT, "embedding_size": 16}),
    "roberta-prelayernorm": ("roberta-prelayernorm", _BERT),
    "megatron-bert": ("megatron-bert", _BERT),
    "gpt2": ("gpt2", _GPT2),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "gpt_bigcode-multihead": ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "opt": ("opt", _OPT),
    "opt-post": ("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "biogpt": (
        "biogpt",
        {
            **_COMMON,
            "intermediate_size": 48,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "activation_dropout": 0.1,
            "layerdrop": 0.0,
        },
    ),
    "llama": ("llama", _LLAMA),
    "mistral": ("mistral", _LLAMA),
    "ministral": ("ministral", _LLAMA),
    "mixtral": ("mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen2_moe": ("qwen2_moe", {**_LLAMA, **_MOE, "shared_expert_intermediate_size": 24}),
    "qwen3": ("qwen3", _LLAMA),
    "qwen3_moe": ("qwen3_moe", {**_LLAMA, **_MOE}),
    "smollm3": ("smollm3", _LLAMA),
    "olmo": ("olmo", _LLAMA),
    "gemma": ("gemma", _LLAMA),
    "glm": ("glm", _LLAMA),
    "granite": ("granite", {**_LLAMA, "residual_multiplier": 0.3, "embedding_multiplier": 2.0}),
    "starcoder2": ("starcoder2", {**_LLAMA, "residual_dropout": 0.1, "embedding_dropout": 0.1}),
    "phi3": ("phi3", {**_LLAMA, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "stablelm": ("stablelm", {**_LLAMA, "hidden_dropout": 0.1}),
    "gpt_neox": (
        "gpt_neox",
        {
            **_COMMON,
            "intermediate_size": 48,
            "use_parallel_residual": False,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
    ),
    "olmo2": ("olmo2", _LLAMA),
    "gemma2": ("gemma2", {**_LLAMA, "query_pre_attn_scalar": 8}),
    "glm4": ("glm4", _LLAMA),
}

# what the slower tests convert every case to: each name, a list of one for each layer, and coordinates
TARGETS = {
    **{name: name for name in list_placements()},
    "hybrid": ["post", "pre", "gated"],
    "custom": {
        "skip_norm": 0.5,
        "output_norm": 1.0,
        "skip_gain": 1.5,
        "branch_gain": 0.5,
        "learned": [["branch_gain", "channel"]],
    },
}


def starts_at_stock(architecture, placement) -> bool:
    """Whether a model that was converted without a warm start computes what the stock model does."""
    if placement in ("gated", architecture.native) or (placement == "admin" and architecture.native == "post"):
        return True  # gates and gains start neutral
    # Peri-LN is a sandwich with a norm on the embeddings: where that norm is stock, they are one
    return placement == "peri" and architecture.native == "sandwich" and architecture.has_stem_norm


# the head that the slower tests use
MASKED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "roberta-prelayernorm", "megatron-bert")


def tiny_config(case: str, **overrides):
    """The stock config of a case."""
    model_type, fields = TINY[case]
    return CONFIG_MAPPING[model_type](**{**fields, **overrides})


def head_of(case: str) -> str:
    """The language-modelling Auto class of a case."""
    return "AutoModelForMaskedLM" if TINY[case][0] in MASKED else "AutoModelForCausalLM"


def auto_classes(config) -> dict:
    """Every Auto class that knows a config, and makes a model of its type."""
    classes = {name: cls for name, cls in vars(modeling_auto).items() if name.startswith("AutoModel")}
    classes = {name: cls for name, cls in classes.items() if type(config) in cls._model_mapping}
    return {
        name: cls for name, cls in classes.items() if cls._model_mapping[type(config)].config_class is type(config)
    }


def tiny_model(case: str, auto: str | None = None, seed: int = 0, **overrides):
    """A random stock model whose norms are not symmetric: every weight and bias of a norm differs from its default."""
    config = tiny_config(case, **overrides)
    torch.manual_seed(seed)
    model = getattr(modeling_auto, auto or head_of(case)).from_config(config)
    return scramble(model).eval()


def scramble(model):
    """Give every one-dimensional parameter a random value, so that no two norms are alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def tiny_batch(batch: int = 2, length: int = 9, padding: int = 2, seed: int = 1):
    """Token ids and an attention mask, the first row padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(4, VOCABULARY, (batch, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :padding] = 0
    input_ids[0, :padding] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def config_class(model_type: str):
    """The stock config class of a model type."""
    return AutoConfig.for_model(model_type).__class__
