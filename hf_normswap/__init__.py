"""Retrofit norm placement: Pre-Norm, Post-Norm, DeepNorm, ResiDual and more for pretrained Transformers models.

Importing registers the derived configs with the Auto classes; models, conversion and the rest load when they are used.
"""

import importlib
import sys
from importlib.machinery import PathFinder
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from . import model_card as model_card  # models write a card when they are saved
from .modeling.architectures import ARCHITECTURES
from .modeling.modeling_normswap import __version__, config_class

_HOME = {
    "Placement": "modeling.placements",
    "NormSwapError": "modeling.placements",
    "list_placements": "conversion",
    "list_architectures": "conversion",
    "convert_checkpoint": "conversion",
    "revert_checkpoint": "conversion",
    "verify": "verification",
    "fidelity": "verification",
    "token_batches": "calibration",
    "NormMorph": "morph",
    "list_moves": "morph",
    "heal": "healing",
    "parameter_groups": "healing",
    "training_defaults": "advice",
    "advise": "advice",
    "TrainingDoctor": "doctor",
    "list_gates": "gates",
    "plot_gates": "gates",
    "gate_penalty": "gates",
    "harden": "gates",
    "gradient_profile": "diagnostics",
    "GradientHistory": "diagnostics",
    "residual_stream": "diagnostics",
    "collapse": "diagnostics",
    "sensitivity": "diagnostics",
    "stability": "diagnostics",
    "spike_score": "diagnostics",
    "cost": "diagnostics",
    "diagnose": "report",
}
__all__ = [*_HOME, "__version__"]

_logger = logging.get_logger(__name__)
for _type in ARCHITECTURES:
    if _type in CONFIG_MAPPING:  # an older Transformers may not have it
        _config = config_class(_type)
        _name = _config.model_type
        _holder = CONFIG_MAPPING[_name] if _name in CONFIG_MAPPING else _config
        if _holder.__module__ != _config.__module__:
            _logger.warning(
                f"{_holder.__module__} had registered the model type {_name!r}; hf_normswap takes it over."
            )
        AutoConfig.register(_name, _config, exist_ok=True)


class _BehindPeft:
    """A finder of `peft` that has `hf_normswap.peft` imported behind it, since importing PEFT from here would take seconds."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name == "peft" else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module):
                execute(module)
                importlib.import_module(".peft", __name__)

            loader.exec_module = exec_module
        return spec


if "peft" in sys.modules:
    importlib.import_module(".peft", __name__)
else:
    sys.meta_path.insert(0, _BehindPeft)


def __getattr__(name):
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    module = importlib.import_module(".modeling.modeling_normswap", __name__)
    if name.startswith("NormSwap"):
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_HOME})
