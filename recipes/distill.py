"""Distil a model into one with another norm placement: another checkpoint, or its own conversion.

python recipes/distill.py --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --placement pre \
    --train_file sentences.txt --output_dir out
accelerate launch recipes/distill.py --teacher_name_or_path gpt2-medium --model_name_or_path distilgpt2 --placement post \
    --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --temperature 2 --label_weight 0.5 --output_dir out

The student is `--model_name_or_path`, converted to `--placement` if that is given; without `--teacher_name_or_path` the model
before its conversion is the teacher. Language models learn the distribution of their teacher's tokens, and with
`--label_weight` the text; encoders without a head for tokens the last hidden state, on one row of text at a time.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from hf_normswap import NormSwapError
from hf_normswap.language_modeling import (
    MODELS,
    TextArguments,
    check_text,
    default_objective,
    load_text,
    make_blocks,
    make_labels,
    make_loaders,
    ratio,
    token_losses,
)
from hf_normswap.training import (
    ModelArguments,
    RunArguments,
    add_adapters,
    convert,
    evaluate,
    make_accelerator,
    option,
    start,
    train,
)


@dataclass
class DistillArguments:
    """From what to learn, and how."""

    teacher_name_or_path: str | None = option(None, "By default the model itself, before its conversion.")
    temperature: float = option(1.0, "Divides the logits of both; the loss is multiplied by its square.")
    label_weight: float = option(0.0, "Weight of the language modelling loss on the text.")

    def __post_init__(self):
        if self.temperature <= 0:
            raise NormSwapError(f"`--temperature` must be positive, got {self.temperature}.")


def check_pair(configs: list, tokenizers: list, objective: str):
    """Refuse a teacher from which the student cannot learn."""
    vocabularies = [tokenizer.get_vocab() for tokenizer in tokenizers]
    if different := vocabularies[0].items() ^ vocabularies[1].items():
        raise NormSwapError(
            f"teacher and student have different tokenizers (they differ in {min(different)[0]!r} and {len(different) - 1} "
            "more): take two models of one family."
        )
    if objective != "states" and default_objective(configs[0]) != objective:
        raise NormSwapError(
            f"the teacher is no {objective} language model, as the student is: take one with the same head."
        )
    sizes = [config.hidden_size for config in configs]
    if objective == "states" and sizes[0] != sizes[1]:
        raise NormSwapError(
            f"the teacher's hidden states have size {sizes[0]}, the student's {sizes[1]}: without logits they must be equal."
        )


def distance(wanted, found, mask, temperature: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row what to divide by what: the divergence of the logits summed over tokens and their number, without a
    temperature the squared error of the last hidden states and their square."""
    if temperature is None:
        wanted, found = (output.last_hidden_state.float() for output in (wanted, found))
        parts = (found - wanted).pow(2), wanted.pow(2)
        return tuple((part.sum(-1) * mask).sum(1) for part in parts)
    width = min(output.logits.shape[-1] for output in (wanted, found))  # one may be padded
    wanted, found = ((output.logits[..., :width].float() / temperature).log_softmax(-1) for output in (wanted, found))
    divergence = nn.functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    return temperature**2 * (divergence * mask).sum(1), mask.sum(1)


def run(
    model_args: ModelArguments, text_args: TextArguments, distill_args: DistillArguments, args: RunArguments
) -> dict[str, float]:
    """Distil, evaluate and save the student."""
    if distill_args.teacher_name_or_path is None and model_args.placement is None:
        raise NormSwapError("the student equals its teacher: give `--placement`, or `--teacher_name_or_path`.")
    accelerator = make_accelerator(args)
    names = [distill_args.teacher_name_or_path or model_args.model_name_or_path, model_args.model_name_or_path]
    configs = [AutoConfig.from_pretrained(name) for name in names]
    tokenizers = [AutoTokenizer.from_pretrained(name) for name in names]
    objective = default_objective(configs[1])
    check_pair(configs, tokenizers, objective)
    if objective == "states":
        text_args = replace(text_args, line_by_line=True)
        if distill_args.label_weight:
            raise NormSwapError("`--label_weight` is for language models, and the student has no head for tokens.")
    sizes = [check_text(text_args, *pair, objective).block_size for pair in zip(tokenizers, configs)]
    text_args, tokenizer = replace(text_args, block_size=min(sizes)), tokenizers[1]
    with accelerator.main_process_first():
        blocks = make_blocks(load_text(text_args, args), text_args, args, tokenizer, objective)
    loaders = make_loaders(blocks, text_args, args, tokenizer)

    teacher, source = (MODELS[objective].from_pretrained(name, dtype=torch.float32) for name in names)
    student, morph = convert(source, model_args, loaders["calibration"])
    student = add_adapters(accelerator, student, model_args, args.output_dir)
    for name, parameter in student.named_parameters():
        if name.startswith("pooler."):  # not in the loss, and several processes would wait for its gradient
            parameter.requires_grad_(False)
    teacher.to(accelerator.device).eval()

    label = make_labels(text_args, tokenizer, objective)
    temperature = None if objective == "states" else distill_args.temperature

    def compare(model, batch):
        batch = label(batch)
        labels = batch.pop("labels", None)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        with torch.no_grad(), accelerator.autocast():
            wanted = teacher(**batch)
        found = model(**batch)
        parts = distance(wanted, found, mask, temperature)
        return parts if labels is None else parts + token_losses(found.logits, labels, objective == "causal")

    def loss(model, batch):
        sums, counts, *of_labels = (part.sum() for part in compare(model, batch))
        task = distill_args.label_weight * of_labels[0] / of_labels[1].clamp(min=1) if distill_args.label_weight else 0
        return sums / counts + task

    def measure(model):
        sums, counts, *of_labels = evaluate(accelerator, model, validation, compare)
        found = {"loss": ratio(sums, counts)}
        if of_labels:
            nll = ratio(*of_labels)
            found |= {"divergence": found["loss"], "perplexity": torch.tensor(nll).exp().item()}
            found["loss"] += distill_args.label_weight * nll
        return found

    validation = accelerator.prepare(loaders["validation"])
    return train(
        accelerator,
        student,
        loaders["train"],
        args,
        task="distillation",
        source=source,
        morph=morph,
        loss=loss,
        evaluate=measure,
        metric="loss",
        tokenizer=tokenizer,
        arguments=(model_args, text_args, distill_args),
    )


def main():
    start(run, __doc__, ModelArguments, TextArguments, DistillArguments, RunArguments)


if __name__ == "__main__":
    main()
