"""The norms of a base model, stock or converted, in the order in which they are applied."""

from operator import attrgetter

from torch import nn

from hf_normswap.modeling.architectures import BRANCHES, Architecture, get_architecture

# Stock models that cannot be converted, but that others can be converted to.
ORACLES = {
    "openai-gpt": Architecture(
        "openai-gpt", norm_after=True, layers="h", norms=("ln_1", None, "ln_2"), final_norm=None
    ),
    "bloom": Architecture("bloom", layers="h", final_norm="ln_f"),
    "minimax": Architecture("minimax"),
}


def row_of(model) -> Architecture:
    return ORACLES.get(model.config.model_type) or get_architecture(model.config)


def layers_of(model) -> nn.ModuleList:
    return attrgetter(row_of(model).layers)(model)


def branches_of(model) -> list[int]:
    return [i for i in range(3) if i != 1 or hasattr(layers_of(model)[0], row_of(model).cross_attn)]


def norms_of(model) -> list[nn.Module | None]:
    """The norms in front of the branches (if any), and the final one. In BERT the stem's norm leads the first branch."""
    row = row_of(model)
    paths = [row.norms[i] or f"{BRANCHES[i]}_input_norm" for i in branches_of(model)]
    norms = [dict(layer.named_modules()).get(path) for layer in layers_of(model) for path in paths]
    if row.norm_after:
        return [nn.Identity(), *norms]
    return norms if row.final_norm is None else [*norms, attrgetter(row.final_norm)(model)]


def output_norms_of(model) -> list[nn.Module]:
    """The norms behind the branches."""
    paths = [row_of(model).output_norms[i] or f"{BRANCHES[i]}_output_norm" for i in branches_of(model)]
    return [attrgetter(path)(layer) for layer in layers_of(model) for path in paths]


def tensors_of(model, name: str) -> list[nn.Parameter]:
    """A tensor that a placement has added, of each branch."""
    return [getattr(layer, f"{BRANCHES[i]}_{name}").weight for layer in layers_of(model) for i in branches_of(model)]
