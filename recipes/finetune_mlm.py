"""Fine-tune a masked language model on text, in the norm placement of your choice.

python recipes/finetune_mlm.py --model_name_or_path bert-base-uncased --dataset_name wikitext \
    --dataset_config_name wikitext-2-raw-v1 --placement pre --output_dir out
accelerate launch recipes/finetune_mlm.py --model_name_or_path roberta-base --train_file sentences.csv --line_by_line \
    --placement deepnorm --output_dir out

Tokens are masked anew in each epoch; those to evaluate on are masked once, in the same way in every run. What is not given
(learning rate, warm-up, clipping) follows from the placement, and is printed with its reasons.
"""

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from hf_normswap.language_modeling import (
    TextArguments,
    check_text,
    load_text,
    make_blocks,
    make_labels,
    make_loaders,
    mean_loss,
    measure,
)
from hf_normswap.training import ModelArguments, RunArguments, add_adapters, convert, make_accelerator, start, train


def run(model_args: ModelArguments, text_args: TextArguments, args: RunArguments) -> dict[str, float]:
    """Fine-tune, evaluate and save."""
    accelerator = make_accelerator(args)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    text_args = check_text(text_args, tokenizer, config, "masked")
    with accelerator.main_process_first():
        blocks = make_blocks(load_text(text_args, args), text_args, args, tokenizer, "masked")
    loaders = make_loaders(blocks, text_args, args, tokenizer)

    source = AutoModelForMaskedLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
    model, morph = convert(source, model_args, loaders["calibration"])
    model = add_adapters(accelerator, model, model_args, args.output_dir)

    # within the loss: what is drawn there is drawn again on resuming
    label = make_labels(text_args, tokenizer, "masked")
    validation = accelerator.prepare(loaders["validation"])
    return train(
        accelerator,
        model,
        loaders["train"],
        args,
        task="masked_lm",
        source=source,
        morph=morph,
        loss=lambda model, batch: mean_loss(model, label(batch), causal=False),
        evaluate=lambda model: measure(accelerator, model, validation, label, causal=False),
        metric="perplexity",
        tokenizer=tokenizer,
        arguments=(model_args, text_args),
    )


def main():
    start(run, __doc__, ModelArguments, TextArguments, RunArguments)


if __name__ == "__main__":
    main()
