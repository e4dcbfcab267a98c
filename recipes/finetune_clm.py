"""Fine-tune a causal language model on text, in the norm placement of your choice.

python recipes/finetune_clm.py --model_name_or_path gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 \
    --placement post --heal_steps 200 --output_dir out
accelerate launch recipes/finetune_clm.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file book.txt \
    --block_size 512 --placement deepnorm --num_train_epochs 1 --output_dir out
python recipes/finetune_clm.py --model_name_or_path gpt2 --dataset_name HuggingFaceFW/fineweb-edu --streaming \
    --max_train_steps 1000 --max_eval_samples 500 --output_dir out

What is not given (learning rate, warm-up, clipping) follows from the placement, and is printed with its reasons.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.logging import get_logger
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_normswap import NormSwapError, heal
from hf_normswap.language_modeling import (
    TextArguments,
    check_text,
    load_text,
    make_blocks,
    make_labels,
    make_loaders,
    measure,
)
from hf_normswap.training import (
    ModelArguments,
    RunArguments,
    add_adapters,
    choose_settings,
    convert,
    make_accelerator,
    option,
    start,
    train,
    write_json,
)

logger = get_logger(__name__)


@dataclass
class HealArguments:
    """What comes before fine-tuning."""

    heal_steps: int = option(
        0,
        "First distil the model into its conversion, on the training text, for so many steps; then a morph moves here.",
    )


def heal_first(accelerator, source, model, morph, batches, args: RunArguments, steps: int):
    """Heal the converted model in place. Each step sees one batch on each process; resuming goes on from where it was."""
    settings = choose_settings(model, RunArguments(args.output_dir), "distillation", None, steps)
    losses = heal(
        source,
        model,
        batches,
        steps,
        learning_rate=settings.learning_rate,
        morph=morph,
        output_dir=Path(args.output_dir) / "healing",
        save_steps=min(args.save_steps or steps, steps),
        resume_from_checkpoint=args.resume_from_checkpoint is not None,
        accelerator=accelerator,
    )
    logger.info(f"Healing took the distance to the source from {losses[0]:.3f} to {losses[-1]:.3f}.")
    write_json(accelerator, args, "healing.json", losses)


def run(
    model_args: ModelArguments, text_args: TextArguments, heal_args: HealArguments, args: RunArguments
) -> dict[str, float]:
    """Heal if asked to, fine-tune, evaluate and save."""
    steps = heal_args.heal_steps
    if steps and model_args.placement is None:
        raise NormSwapError("`--heal_steps` heals what a conversion broke, but there is no `--placement`.")
    if 0 < steps < model_args.morph_steps:
        raise NormSwapError(
            f"the morph moves while healing: give `--morph_steps` of at most {steps}, or no `--heal_steps`."
        )
    accelerator = make_accelerator(args)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    text_args = check_text(text_args, tokenizer, config, "causal")
    with accelerator.main_process_first():
        blocks = make_blocks(load_text(text_args, args), text_args, args, tokenizer, "causal")
    loaders = make_loaders(blocks, text_args, args, tokenizer)

    source = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
    model, morph = convert(source, model_args, loaders["calibration"])
    if steps:
        heal_first(accelerator, source, model, morph, loaders["calibration"], args, steps)
        morph = None
    model = add_adapters(accelerator, model, model_args, args.output_dir)

    label = make_labels(text_args, tokenizer, "causal")
    validation = accelerator.prepare(loaders["validation"])
    results = train(
        accelerator,
        model,
        loaders["train"],
        args,
        task="causal_lm",
        source=source,
        morph=morph,
        loss=lambda model, batch: model(**label(batch)).loss,
        evaluate=lambda model: measure(accelerator, model, validation, label, causal=True),
        metric="perplexity",
        tokenizer=tokenizer,
        arguments=(model_args, text_args, heal_args),
    )
    healing = Path(args.output_dir) / "healing"
    if accelerator.is_main_process and healing.is_dir():
        gone = healing.with_name(f".{healing.name}")  # whole, or not there
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(healing.rename(gone), ignore_errors=True)
    return results


def main():
    start(run, __doc__, ModelArguments, TextArguments, HealArguments, RunArguments)


if __name__ == "__main__":
    main()
