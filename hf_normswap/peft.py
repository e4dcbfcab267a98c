"""PEFT for converted models: configs of adapters that train norms and learned coordinates too, and that say which placement
they are for. PEFT itself trains, saves, loads, disables and merges such adapters.

Importing this module, which happens behind `import peft`, has PEFT compare an adapter that it loads with its base model."""

import re
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import peft
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers.pytorch_utils import Conv1D

from .conversion import is_converted, present_spec
from .modeling.architectures import ARCHITECTURES, get_architecture
from .modeling.modeling_normswap import stock_models
from .modeling.placements import NormSwapError, per_layer

KINDS = ("lora", "norms")
TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
    "AutoModel": "FEATURE_EXTRACTION",
}


@dataclass
class LoraConfig(peft.LoraConfig):
    """[`~peft.LoraConfig`] with the placement of the base model, by a name that says it where PEFT alone does not know it."""

    needs_base_converted_by_hf_normswap: str | dict | list | None = None

    def to_dict(self):
        fields = super().to_dict()
        if self.needs_base_converted_by_hf_normswap is None:
            del fields["needs_base_converted_by_hf_normswap"]
        return fields


class LoraModel(peft.LoraModel):
    """[`~peft.LoraModel`] that warns if an adapter is for another placement than that of the model."""

    def _prepare_model(self, peft_config, model):
        wanted = getattr(peft_config, "needs_base_converted_by_hf_normswap", None)
        if wanted is not None and not fits(wanted, model):
            warnings.warn(
                f"This adapter is for a base model with the norm placement {wanted!r}, and {type(model).__name__} has "
                f"{placement_of(model)!r}: convert the base model first, `convert_checkpoint(model, {wanted!r})`.",
                stacklevel=2,
            )
        super()._prepare_model(peft_config, model)


PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.LORA] = LoraConfig
PEFT_TYPE_TO_TUNER_MAPPING[peft.PeftType.LORA] = LoraModel


def placement_of(model: Any) -> Any:
    """The placement of a model as a config spells it, or that to which a morph leads it; `None` of what cannot have another."""
    config: Any = getattr(model, "config", None)
    known = hasattr(config, "stock_model_type") or getattr(config, "model_type", None) in ARCHITECTURES
    return present_spec(config, aim=True) if known else None


def fits(placement: Any, model: Any) -> bool:
    """Whether a model, converted or not, has a placement."""
    try:
        depth, native = model.config.num_hidden_layers, get_architecture(model.config).native
        return per_layer(placement, depth, native) == per_layer(placement_of(model), depth, native)
    except (AttributeError, NormSwapError):  # another kind of model, or of another depth
        return False


def adapter_config(model: Any, kind: str = "lora", **kwargs) -> LoraConfig:
    """
    What PEFT needs to know to adapt a converted model: `peft.get_peft_model(model, adapter_config(model))`.

    Everything that it trains is saved with the adapter, goes with `disable_adapter()` and is merged by
    `merge_and_unload()`: all norms that the placement reads, learned gates and gains, and the head of a classifier.

    Args:
        model (`PreTrainedModel`): the result of [`convert_checkpoint`].
        kind (`str`, *optional*, defaults to `"lora"`):
            `"lora"` trains low-rank adapters beside these, in the matrices that PEFT has as defaults for the stock model, or
            where it has none in all linear maps of the layers; `"norms"` trains these alone.
        kwargs:
            Fields of [`~peft.LoraConfig`]. `task_type` follows from the head; `modules_to_save` comes on top.

    Returns:
        `peft.LoraConfig`: for [`~peft.get_peft_model`], trainers that take a `peft_config`, and `heal(lora=...)`. An adapter
        that was made with it warns when it is loaded into a model with another placement.

    Raises:
        [`NormSwapError`]: for an unknown kind, a model that was not converted, and one that has adapters already.
    """
    if kind not in KINDS:
        raise NormSwapError(f"unknown kind of adapter {kind!r}. Available: {', '.join(KINDS)}.")
    if any(isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for part in model.modules()):
        raise NormSwapError(f"{type(model).__name__} has adapters already: make the config before the first is added.")
    if not is_converted(model):
        raise NormSwapError(f"{type(model).__name__} is not a converted model: `convert_checkpoint` it first.")
    stock = stock_models(type(model.config))
    task = next((task for auto, task in TASKS.items() if isinstance(model, stock.get(auto, ()))), None)
    defaults: dict = {"task_type": task, "fan_in_fan_out": any(isinstance(part, Conv1D) for part in model.modules())}
    if kind == "norms":
        defaults["target_modules"] = DUMMY_TARGET_MODULES  # what PEFT calls none
    elif model.config.model_type not in peft.LoraModel.target_module_mapping and not kwargs.get("target_parameters"):
        defaults["target_modules"] = matrices(model)
    saved = [*(kwargs.pop("modules_to_save", None) or ()), *vectors(model)]
    return LoraConfig(
        **(defaults | kwargs), modules_to_save=saved, needs_base_converted_by_hf_normswap=placement_of(model)
    )


def matrices(model: Any) -> list[str]:
    """The ends of the names of all linear maps in the layers, as PEFT's `"all-linear"`, which takes some of heads, too. What
    has one output is a gate."""
    inside = re.compile(rf"(?:.*\.)?{re.escape(get_architecture(model.config).layers)}\.\d+\.(.+)")
    found = {
        match[1]
        for name, module in model.named_modules()
        if (match := inside.fullmatch(name)) and isinstance(module, nn.Linear) and module.out_features > 1
    }
    return sorted(found)


def vectors(model: Any) -> list[str]:
    """The modules that train vectors only, which are norms and learned coordinates (what a norm has that is not read are
    buffers). PEFT goes by how names end: those that all layers have, and nothing else, start at the layer."""
    names: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        own = list(module.parameters())
        leaf = own and not list(module.children()) and all(parameter.ndim == 1 for parameter in own)
        (names if leaf else others).append(name)
    layers = re.escape(get_architecture(model.config).layers)
    ends = {name: re.sub(rf"^(.*\.)?{layers}\.\d+\.", "", name) for name in names}
    counts = Counter(ends.values())
    taken = {end for end in counts if any(other.endswith(end) for other in others)}
    short = {end for end in counts if counts[end] == model.config.num_hidden_layers} - taken
    return list(dict.fromkeys(end if end in short else name for name, end in ends.items()))
