"""Config and model classes `NormSwap<Stock>`, derived when first asked for, as attributes of this module, and their
registration with the Auto classes: of the models of a type when its first config is made."""

import contextlib
import functools
import importlib.metadata
import sys

import transformers

__version__ = "0.1.0"  # of hf_normswap, written nowhere else

if [int(part) for part in transformers.__version__.split(".")[:2]] < [5, 6]:
    raise ImportError(f"this model needs transformers 5.6 or newer, not {transformers.__version__}: update it.")

from transformers import conversion_mapping
from transformers.configuration_utils import strict
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging
from transformers.utils.versions import version as versions  # `packaging.version`

from .architectures import ARCHITECTURES, get_architecture
from .families import FAMILIES as FAMILIES  # Transformers 4 copies only what is imported here
from .placements import NormSwapError, canonical_spec
from .residual import ResidualLayer, rebuild
from .surgery import initialize, install, placements_of


class NormSwapConfig:
    """Mixin in front of a stock config class."""

    stock_model_type: str
    _auto_class = "AutoConfig"
    FIELDS = {  # annotation, default, meaning
        "norm_placement": (str | dict | list | None, None, "a name, a `dict` of coordinates, or a list of these"),
        "norm_target": (str | dict | list | None, None, "where a morph leads, like `norm_placement`"),
        "norm_alpha": (float | int | None, None, "DeepNorm's skip gain; by default it follows from the depth"),
        "norm_alpha_exponent": (float | int | None, None, "the power of the depth in that gain, 0.25 in the paper"),
        "norm_gate": (float | int | None, None, "what gates start from; by default the architecture's own placement"),
        "norm_dual_scale": (float | int, 1.0, "scale of ResiDual's second stream (0.05 in its repository for fp16)"),
        "norm_dual_eps": (float | int, 1e-7, "epsilon of that stream's norm (same source)"),
        "norm_conversion": (dict | None, None, "how it was converted, for the model card"),
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.validate_norm_placement()
        register_models(type(self))

    def __setstate__(self, state):  # unpickling runs no constructor
        self.__dict__.update(state)
        register_models(type(self))

    def validate_norm_placement(self):
        """Part of `@strict`-powered validation: the placement exists and fits the number of layers."""
        spec = get_architecture(self).native if self.norm_placement is None else self.norm_placement
        self.norm_placement = canonical_spec(spec)
        placements_of(self)
        self.norm_target = self.norm_target and canonical_spec(self.norm_target)
        if self.norm_gate is not None and not 0 <= self.norm_gate <= 1:
            raise NormSwapError(f"`norm_gate` must lie between 0 (pre) and 1 (post), got {self.norm_gate}.")
        for name in ("norm_alpha", "norm_alpha_exponent", "norm_dual_scale", "norm_dual_eps"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise NormSwapError(f"`{name}` must be positive, got {value}.")

    def to_dict(self):
        # PEFT looks its default targets up by `model_type`, which it reads from here.
        for table in vars(sys.modules.get("peft.utils.constants", object)).values():
            if isinstance(table, dict) and self.stock_model_type in table:
                table.setdefault(self.model_type, table[self.stock_model_type])
        return super().to_dict()


class NormSwapModel:
    """Mixin in front of a stock model class: its layers get their placements before weights are made or loaded."""

    def post_init(self):
        for module in models_around(self):
            if not isinstance(module, NormSwapModel):
                adopt(module, model_class(type(module)))
                for part in module.modules():  # whose initialisation we may change
                    part.__dict__.pop("_is_hf_initialized", None)
        install(self.base_model, self.config)
        self.config.auto_map = auto_map(type(self.config))
        super().post_init()

    is_custom_code = classmethod(lambda cls: False)  # `_init_weights` must reach modules without parameters too

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, ResidualLayer):
            initialize(module, self.config)

    def _set_gradient_checkpointing(self, *args, **kwargs):
        function = kwargs.get("gradient_checkpointing_func")
        crosses = any(isinstance(module, ResidualLayer) and len(module.plan.sends) > 1 for module in self.modules())
        if crosses and function is not None and getattr(function, "keywords", {}).get("use_reentrant", True):
            way_out = 'pass `gradient_checkpointing_kwargs={"use_reentrant": False}`'
            raise NormSwapError(f"two streams cross layers here, and reentrant checkpointing follows one: {way_out}.")
        super()._set_gradient_checkpointing(*args, **kwargs)


def models_around(model) -> list:
    """The models in which the layers lie, from the outside in: `OPTForCausalLM`, `OPTModel` and `OPTDecoder`, say."""
    modules = [model, model.base_model]
    for name in get_architecture(model.config).layers.split(".")[:-1]:
        modules.append(getattr(modules[-1], name))
    return [module for module in dict.fromkeys(modules) if isinstance(module, transformers.PreTrainedModel)]


def adopt(model, cls):
    """Make a built model an instance of `cls`, its derived or its stock class."""
    if "_has_recorders" not in vars(cls):  # of hidden states and attentions: the constructor registers them by class
        transformers.PreTrainedModel.__init__(cls.__new__(cls), model.config)
        cls._has_recorders = True
    model.__class__ = cls


@functools.cache
def config_class(model_type: str):
    """The derived config class of a stock model type."""
    stock = CONFIG_MAPPING[model_type]
    arguments = [f"    {key} (`{kind}`): {text}" for key, (kind, _, text) in NormSwapConfig.FIELDS.items()]
    namespace: dict = {key: default for key, (_, default, _) in NormSwapConfig.FIELDS.items()}
    namespace["__annotations__"] = {key: annotation for key, (annotation, *_) in NormSwapConfig.FIELDS.items()}
    namespace["__doc__"] = "\n".join([f"[`{stock.__name__}`] with a norm placement.\n\nArgs:", *arguments])
    namespace |= {"__module__": __name__, "model_type": f"normswap_{model_type}", "stock_model_type": model_type}
    return strict(type(f"NormSwap{stock.__name__}", (NormSwapConfig, stock), namespace))


@functools.cache
def model_class(stock):
    """The derived class of a stock model class."""
    config = config_class(stock.config_class.model_type)
    auto = next((auto for auto, cls in stock_models(config).items() if cls is stock), "AutoModel")
    doc = f"[`{stock.__name__}`] with the norm placement of its config."
    namespace = {"__module__": __name__, "__doc__": doc, "config_class": config, "_auto_class": auto}
    readers = ("_can_set_attn_implementation", "_can_set_experts_implementation")  # of the class's source file
    namespace |= {reader: getattr(stock, reader) for reader in readers}
    if not hasattr(transformers, stock.__name__):  # then its name alone does not lead `__getattr__` to it
        namespace["__reduce__"] = lambda self: (rebuild, (model_class, stock), self.__dict__)
    return type(f"NormSwap{stock.__name__}", (NormSwapModel, stock), namespace)


def stock_models(config) -> dict[str, type]:
    """The stock model class behind each Auto class, for the stock config of a derived one."""
    stock = CONFIG_MAPPING[config.stock_model_type]
    mappings = {key: cls._model_mapping for key, cls in vars(modeling_auto).items() if key.startswith("AutoModel")}
    models = {key: mapping[stock] for key, mapping in mappings.items() if stock in mapping}
    return {key: model for key, model in models.items() if model.config_class is stock}  # not what borrows the config


def auto_map(config) -> dict[str, str]:
    """What `trust_remote_code` needs to know: the class behind each Auto class, in this file."""
    module = __name__.split(".")[-1]
    models = {auto: f"{module}.NormSwap{stock.__name__}" for auto, stock in stock_models(config).items()}
    return {"AutoConfig": f"{module}.{config.__name__}", **models}


def register_models(config):
    """Register the models and the tokenizer of a derived config class with the Auto classes, once."""
    if config in modeling_auto.AutoModel._model_mapping:
        return
    names = {config.stock_model_type: config.model_type}
    for auto, stock in stock_models(config).items():
        getattr(modeling_auto, auto).register(config, model_class(stock), exist_ok=True)
        names[stock.__name__] = model_class(stock).__name__
    for stock_name, name in names.items():  # what tensors are called on disk, where it differs (experts)
        if (mapping := conversion_mapping.get_checkpoint_conversion_mapping(stock_name)) is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    tokenizers = transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING
    if (stock := CONFIG_MAPPING[config.stock_model_type]) in tokenizers:
        tokenizers.register(config, tokenizers[stock], exist_ok=True)


package = None  # an installed hf_normswap that is no older than this file beside weights, which it stands in for
if __name__.startswith("transformers_modules."):
    logger = logging.get_logger("transformers.hf_normswap")
    with contextlib.suppress(ImportError, KeyError, TypeError, ValueError):  # not there, or no version
        version = importlib.metadata.version("hf_normswap")
        if versions.parse(version) < versions.parse(__version__):
            logger.warning(f"hf_normswap {version} is older than this model, whose own code is used: update it.")
        else:
            package = importlib.import_module("hf_normswap.modeling.modeling_normswap")
            logger.info(f"hf_normswap {version} is installed and used instead of the code beside the weights.")
    if package is None and int(transformers.__version__.split(".")[0]) > 5:
        logger.warning(f"This model's code was not tested with transformers {transformers.__version__}.")


def __getattr__(name):
    if package is not None:
        return getattr(package, name)
    stock = getattr(transformers, name.removeprefix("NormSwap"), None) if name.startswith("NormSwap") else None
    config = getattr(stock, "config_class", stock)
    if getattr(config, "model_type", None) in ARCHITECTURES:
        return config_class(config.model_type) if config is stock else model_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
