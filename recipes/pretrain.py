"""Train a language model from scratch, of any architecture, placement and depth.

python recipes/pretrain.py --model_type gpt2 --config_overrides num_hidden_layers=48,hidden_size=384 --placement deepnorm \
    --tokenizer_name gpt2 --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1 --block_size 256 --output_dir out
accelerate launch recipes/pretrain.py --model_type bert --config_overrides num_hidden_layers=4 --placement post post pre pre \
    --tokenizer_name bert-base-uncased --vocab_size 8000 --train_file corpus.txt --num_train_epochs 10 --output_dir out

The model is initialised as the paper of its placement says. What is not given (learning rate, warm-up, clipping) follows
from the placement, too, and is printed with its reasons.
"""

import ast
import difflib
import itertools
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_normswap import NormSwapError, list_architectures
from hf_normswap.calibration import is_causal
from hf_normswap.conversion import check_config
from hf_normswap.language_modeling import (
    MODELS,
    TextArguments,
    check_text,
    load_text,
    make_blocks,
    make_labels,
    make_loaders,
    mean_loss,
    measure,
)
from hf_normswap.modeling.modeling_normswap import config_class
from hf_normswap.training import RunArguments, make_accelerator, option, start, train

logger = get_logger(__name__)

TOKENIZER_ROWS = 100_000  # of a streaming data set that a tokenizer is trained on
OF_THE_FILE = (
    "model_type",
    "transformers_version",
    "architectures",
    "auto_map",
    "dtype",
    "norm_target",
)  # not the model's


@dataclass
class NewModelArguments:
    """Which model to make."""

    tokenizer_name: str = field(metadata={"help": "A folder or a model id on the Hub that has the tokenizer."})
    vocab_size: int | None = option(
        None, "Train a new tokenizer of its kind, of so many tokens, on the training text."
    )
    model_type: str | None = option(None, "The architecture, with its defaults.", list_architectures())
    config_name: str | None = option(None, "In its stead a folder or model id whose config to take.")
    config_overrides: str | None = option(None, "Fields of the config: num_hidden_layers=4,hidden_size=128.")
    placement: list[str] | None = option(None, "One name, or one for each layer; by default the architecture's own.")
    objective: str | None = option(None, "By default what the architecture is for.", ("causal", "masked"))

    def __post_init__(self):
        if (self.model_type is None) == (self.config_name is None):
            raise NormSwapError("give either `--model_type` or `--config_name`.")


def read_overrides(text: str | None, cls) -> dict:
    """The fields in `"hidden_size=128,hidden_act=gelu"`, which the config class must have."""
    fields, known = {}, [*vars(cls()), *cls.attribute_map]
    for part in text.split(",") if text else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known:
            near = ", ".join(difflib.get_close_matches(name, known)) or "the fields are in its documentation"
            raise NormSwapError(f"{cls.__name__} has no field {part.strip()!r} to override with name=value: {near}.")
        try:
            value = ast.literal_eval(value.title() if value in ("true", "false") else value)
        except (ValueError, SyntaxError):
            pass  # a string
        fields[cls.attribute_map.get(name, name)] = value
    return fields


def make_config(args: NewModelArguments, tokenizer):
    """The config: stock without a placement, else derived; its vocabulary and special tokens are those of the tokenizer."""
    fields, model_type = {}, args.model_type
    if args.config_name is not None:
        loaded = AutoConfig.from_pretrained(args.config_name)
        check_config(loaded)
        model_type = getattr(loaded, "stock_model_type", loaded.model_type)
        fields = {key: value for key, value in loaded.to_dict().items() if key not in OF_THE_FILE}
    cls = CONFIG_MAPPING[model_type]
    if args.placement is not None:
        fields["norm_placement"] = args.placement[0] if len(args.placement) == 1 else args.placement
    if "norm_placement" in fields:
        cls = config_class(model_type)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    fields |= {"vocab_size": len(tokenizer)} | {key: value for key, value in special.items() if value is not None}
    fields |= read_overrides(args.config_overrides, cls)
    try:
        config = cls(**fields)
        if args.objective == "causal" and not is_causal(config):
            config.is_decoder = True
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise NormSwapError(f"no {cls.__name__} can be made of this: {' '.join(str(error).split())}") from error
    if getattr(config, "head_dim", None) is None and config.hidden_size % config.num_attention_heads:
        raise NormSwapError(
            f"hidden_size {config.hidden_size} is no multiple of num_attention_heads {config.num_attention_heads}: say both in "
            "`--config_overrides`."
        )
    return config


def make_tokenizer(accelerator, args: NewModelArguments, data: dict, text_args: TextArguments, run: RunArguments):
    """The tokenizer, or a new one of its kind; a run that is resumed takes the one that it has made."""
    tokenizer, folder = AutoTokenizer.from_pretrained(args.tokenizer_name), Path(run.output_dir) / "tokenizer"
    if args.vocab_size is None:
        return tokenizer
    if not tokenizer.is_fast:
        raise NormSwapError(f"the tokenizer of {args.tokenizer_name} cannot be trained: take a fast one.")
    resumed = run.resume_from_checkpoint is not None and folder.is_dir()
    if accelerator.is_main_process and not resumed:
        rows = itertools.islice(data["train"], TOKENIZER_ROWS if text_args.streaming else None)
        texts = (row[text_args.text_column] for row in rows if row[text_args.text_column])
        trained, scratch = (
            tokenizer.train_new_from_iterator(texts, args.vocab_size),
            folder.with_name(f".{folder.name}"),
        )
        shutil.rmtree(scratch, ignore_errors=True)
        trained.save_pretrained(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    accelerator.wait_for_everyone()
    return AutoTokenizer.from_pretrained(folder)


def run(model_args: NewModelArguments, text_args: TextArguments, args: RunArguments) -> dict[str, float]:
    """Make a model, train, evaluate and save it."""
    accelerator = make_accelerator(args)
    with accelerator.main_process_first():
        data = load_text(text_args, args)
    tokenizer = make_tokenizer(accelerator, model_args, data, text_args, args)
    config = make_config(model_args, tokenizer)
    objective = model_args.objective or ("causal" if is_causal(config) else "masked")
    text_args = check_text(text_args, tokenizer, config, objective)
    with accelerator.main_process_first():
        blocks = make_blocks(data, text_args, args, tokenizer, objective)
    loaders = make_loaders(blocks, text_args, args, tokenizer)

    set_seed(args.seed)
    model = MODELS[objective].from_config(config, dtype=torch.float32)
    logger.info(f"{type(model).__name__} with {model.num_parameters():,} parameters and {len(tokenizer):,} tokens.")

    label, causal = make_labels(text_args, tokenizer, objective), objective == "causal"
    validation = accelerator.prepare(loaders["validation"])
    return train(
        accelerator,
        model,
        loaders["train"],
        args,
        task="pretraining",
        loss=lambda model, batch: mean_loss(model, label(batch), causal),
        evaluate=lambda model: measure(accelerator, model, validation, label, causal),
        metric="perplexity",
        tokenizer=tokenizer,
        arguments=(model_args, text_args),
    )


def main():
    start(run, __doc__, NewModelArguments, TextArguments, RunArguments)


if __name__ == "__main__":
    main()
