"""What the recipes for language models share: text in blocks of tokens, masks, and an evaluation that is exact."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, Features, IterableDataset, Sequence, Value, load_dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, DataCollatorForLanguageModeling

from .calibration import is_causal
from .data_files import load_file
from .modeling.placements import NormSwapError
from .training import RunArguments, evaluate, option

MODELS: dict[str, Any] = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "states": AutoModel}
WITH_HEAD = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "BertForPreTraining")  # how names of classes end
FROM_PADDING = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm")  # count positions from the padding's id
NEEDED = {"causal": {"eos_token": "ends a document"}, "masked": {"mask_token": "hides what is to be found"}}
LONGEST = 1024  # block by default, in tokens


@dataclass
class TextArguments:
    """What to read. A row of text is a document, but one that ends with a line break goes on in the next."""

    dataset_name: str | None = option(None, "A data set on the Hub, or a folder that load_dataset takes.")
    dataset_config_name: str | None = option(None, "The configuration of the data set.")
    train_file: str | None = option(None, "txt, csv, tsv, json, jsonl or parquet; a txt file is one document.")
    validation_file: str | None = option(None, "The same, for evaluation.")
    validation_split_percentage: int = option(5, "The part of the training data to evaluate on if there is no other.")
    text_column: str = option("text", "The column of text.")
    block_size: int | None = option(None, "In tokens; by default what the model takes, at most 1024.")
    line_by_line: bool = option(False, "Rows are cut and padded, one by one, instead of joined and packed.")
    mlm_probability: float = option(0.15, "The part of the tokens that a masked language model has to find.")
    streaming: bool = option(False, "Read the training data while training, without storing it.")
    shuffle_buffer_size: int = option(1000, "Streaming: so many blocks are shuffled at a time; 1 keeps the order.")
    preprocessing_num_workers: int | None = option(None, "Processes that tokenize.")

    def __post_init__(self):
        if (self.dataset_name is None) == (self.train_file is None):
            raise NormSwapError("give either `--dataset_name` or `--train_file`.")
        limits = {"validation_split_percentage": (1, 99), "block_size": (2, None), "shuffle_buffer_size": (1, None)}
        limits |= {"mlm_probability": (0.01, 1), "preprocessing_num_workers": (1, None)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None and (value < least or most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"between {least} and {most}"
                raise NormSwapError(f"`--{name}` must be {allowed}, got {value}.")


# --- models and tokenizers --------------------------------------------------------------------------------------------


def default_objective(config) -> str:
    """What a checkpoint was trained for: `"causal"` or `"masked"`, or `"states"` without a head for tokens."""
    if config.architectures and not config.architectures[0].endswith(WITH_HEAD):
        return "states"
    return "causal" if is_causal(config) else "masked"


def count_positions(config) -> int | None:
    """The tokens that a model has positions for; `None` where there is no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and getattr(config, "stock_model_type", config.model_type) in FROM_PADDING:
        limit -= config.pad_token_id + 1
    return limit


def check_text(args: TextArguments, tokenizer, config, objective: str) -> TextArguments:
    """The arguments with their block size; refuses models and tokenizers that do not fit each other or the objective."""
    reads = "causal" if is_causal(config) else "masked"
    if objective not in (reads, "states") or type(config) not in MODELS[objective]._model_mapping:
        raise NormSwapError(
            f"this {config.model_type!r} model is a {reads} language model, not a {objective} one: take another model, or the "
            f"recipe for {reads} ones."
        )
    if len(tokenizer) > config.vocab_size:
        raise NormSwapError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model {config.vocab_size}: take the model's own tokenizer, "
            "or `resize_token_embeddings` and save it."
        )
    for needed, purpose in NEEDED.get(objective, {}).items():
        if getattr(tokenizer, needed) is None:
            raise NormSwapError(f"the tokenizer has no `{needed}`, which {purpose}: set one, and save it.")
    if args.line_by_line and tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise NormSwapError("the tokenizer has neither a padding token nor an end of text: add one, and save it.")
        tokenizer.pad_token = tokenizer.eos_token
    limit = count_positions(config)
    if limit is not None and args.block_size is not None and args.block_size > limit:
        raise NormSwapError(f"`--block_size {args.block_size}` is longer than the {limit} positions of the model.")
    return replace(args, block_size=args.block_size or min(limit or LONGEST, LONGEST))


# --- text in blocks ---------------------------------------------------------------------------------------------------


def load_text(args: TextArguments, run: RunArguments) -> dict[str, Any]:
    """The rows for training and for validation, checked to have text."""
    if args.streaming and run.max_train_steps is None:
        raise NormSwapError("a streaming data set has no length: give `--max_train_steps`.")
    if args.streaming and args.validation_file is None and run.max_eval_samples is None:
        raise NormSwapError("a streaming data set has no end: give `--max_eval_samples`, or a `--validation_file`.")
    data = {}
    if args.dataset_name is not None:
        found = load_dataset(args.dataset_name, args.dataset_config_name, streaming=args.streaming)
        data = {name: found[name] for name in ("train", "validation") if name in found}
        if "train" not in data:
            raise NormSwapError(f"{args.dataset_name} has no split `train`, only {', '.join(found)}.")
    for split, file in (("train", args.train_file), ("validation", args.validation_file)):
        if file is not None:
            data[split] = load_file(file, split, streaming=args.streaming and split == "train")
    if "validation" not in data:
        rows, percent = data["train"], args.validation_split_percentage
        if args.streaming:

            def held_out(row, index):  # of 5 % each 20th
                return (index + 1) * percent // 100 > index * percent // 100

            data["validation"] = rows.filter(held_out, with_indices=True)
            data["train"] = rows.filter(lambda row, index: not held_out(row, index), with_indices=True)
        else:
            cut = -(-len(rows) * percent // 100)
            data["validation"], data["train"] = rows.select(range(cut)), rows.select(range(cut, len(rows)))
    for split, rows in data.items():
        first = next(iter(rows), None)
        if first is None:
            raise NormSwapError(f"the {split} data has no rows: give more, or a `--validation_file`.")
        if not isinstance(first.get(args.text_column, 0), str | None):
            raise NormSwapError(
                f"the {split} data has the columns {', '.join(first)}, and no text in {args.text_column!r}: say where it is "
                "with `--text_column`."
            )
        data[split] = rows.select_columns([args.text_column])
    return data


def make_blocks(
    data: dict[str, Any], args: TextArguments, run: RunArguments, tokenizer, objective: str
) -> dict[str, Any]:
    """
    Rows of token ids from rows of text, all but the tail; for validation of masked language models with masks and labels.

    Causal models get one document behind the other, each with an end of text, cut into blocks. The blocks of other models
    begin and end as the tokenizer has it, and a separator is between documents (FULL-SENTENCES of RoBERTa, Liu et al. 2019,
    arXiv:1907.11692).

    Args:
        data (`dict`): from [`load_text`].
        args ([`TextArguments`]): from [`check_text`].
        run ([`RunArguments`]): how many blocks of each split at most; the seed that shuffles a streaming data set.
        tokenizer (`PreTrainedTokenizerBase`): of the model.
        objective (`str`): `"causal"`, `"masked"` or `"states"`.

    Returns:
        `dict`: a `datasets.Dataset` for each split; for streaming training data a `datasets.IterableDataset`, whose blocks
        are the same each time it is read in the same epoch.
    """
    edges = tokenizer("")["input_ids"]  # what the tokenizer puts around a text
    start, end = edges[: (len(edges) + 1) // 2], edges[(len(edges) + 1) // 2 :]
    if objective == "causal":
        start = [token for token in start if token == tokenizer.bos_token_id != tokenizer.eos_token_id]
        end = [tokenizer.eos_token_id]
    size, one_by_one = args.block_size or LONGEST, args.line_by_line
    joined = objective == "causal" and not one_by_one
    before, after = ([], []) if joined else (start, end)  # of each block
    room = size - len(before) - len(after)
    if room < 1:
        raise NormSwapError(f"`--block_size {size}` leaves no room for text beside special tokens: take a larger one.")

    def tokenize(batch):
        texts = [text for text in batch[args.text_column] if text]
        ends = [not text.endswith("\n") for text in texts]
        if one_by_one:
            texts = [text.strip() for text in texts if text.strip()]
            ends = [True] * len(texts)
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return {"input_ids": ids, "ends": ends}

    def blocks(rows, limit) -> Iterator[dict[str, list[int]]]:
        made, rest, fresh = 0, [], True
        for row in rows:
            ids = row["input_ids"]
            if one_by_one:
                parts = [ids[:room]]
            else:
                rest += [*(start if joined and fresh else []), *ids, *(end if row["ends"] else [])]
                fresh, whole = row["ends"], len(rest) // room * room
                parts, rest = [rest[at : at + room] for at in range(0, whole, room)], rest[whole:]
            for part in parts:
                yield {"input_ids": [*before, *part, *after]}
                made += 1
                if made == limit:
                    return

    found = {}
    limits = {"train": run.max_train_samples, "validation": run.max_eval_samples}
    ids = Sequence(Value("int32"))
    tokenized, packed = Features({"input_ids": ids, "ends": Value("bool")}), Features({"input_ids": ids})
    for split, rows in data.items():
        stored = isinstance(rows, Dataset)
        options = {"num_proc": args.preprocessing_num_workers, "desc": "Tokenizing"} if stored else {}
        rows = rows.map(tokenize, batched=True, remove_columns=[args.text_column], features=tokenized, **options)
        if next(blocks(rows, 1), None) is None:
            raise NormSwapError(f"the {split} data is shorter than a block of {size} tokens: lower `--block_size`.")
        given = {"rows": rows, "limit": limits[split]}
        if stored:
            rows = Dataset.from_generator(blocks, packed, gen_kwargs=given)
        elif split == "validation":
            rows = Dataset.from_list(list(blocks(**given)), packed)
        else:
            rows = IterableDataset.from_generator(blocks, packed, gen_kwargs=given)
        if split == "validation" and objective == "masked":
            rows = mask_rows(rows, mask_tokens(tokenizer, args.mlm_probability))
        if split == "train" and not stored and args.shuffle_buffer_size > 1:
            rows = rows.shuffle(seed=run.seed, buffer_size=args.shuffle_buffer_size)
        found[split] = rows
    return found


def mask_rows(rows: Dataset, mask: Callable) -> Dataset:
    """Rows with masks and labels that depend on the number of the row alone."""

    def mask_row(row, index):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            ids, labels = mask(torch.tensor([row["input_ids"]]))
        return {"input_ids": ids[0].tolist(), "labels": labels[0].tolist()}

    return rows.map(mask_row, with_indices=True, desc="Masking")


def make_loaders(blocks: dict[str, Any], args: TextArguments, run: RunArguments, tokenizer) -> dict[str, DataLoader]:
    """Batches of blocks, not prepared: `"train"`, `"validation"`, and `"calibration"`, which are those of training in an
    order of their own."""
    padding = tokenizer.pad_token_id or 0

    def collate(rows):
        batch = {key: [torch.tensor(row[key]) for row in rows] for key in rows[0]}
        if args.line_by_line:
            batch["attention_mask"] = [torch.ones_like(ids) for ids in batch["input_ids"]]
            for values in batch.values() if args.streaming else ():  # processes get parts of one batch
                values.append(torch.zeros(args.block_size or LONGEST, dtype=torch.long))
        pads = {"input_ids": padding, "attention_mask": 0, "labels": -100}
        return {key: pad_sequence(values, True, pads[key])[: len(rows)] for key, values in batch.items()}

    sizes = {"train": run.per_device_train_batch_size, "validation": run.per_device_eval_batch_size}
    loaders = {}
    for name, split in (("train", "train"), ("validation", "validation"), ("calibration", "train")):
        shuffle = split == "train" and not args.streaming
        generator = torch.Generator().manual_seed(run.seed) if name == "calibration" else None
        loaders[name] = DataLoader(blocks[split], sizes[split], shuffle, collate_fn=collate, generator=generator)
    return loaders


# --- losses -----------------------------------------------------------------------------------------------------------


def mask_tokens(tokenizer, probability: float) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A function of token ids to masked ids and labels. It draws from torch's generator, on the CPU."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)
    special = torch.tensor(tokenizer.all_special_ids)

    def mask(ids):
        masked = ids.to("cpu", copy=True)
        parts = collator.torch_mask_tokens(masked, special_tokens_mask=torch.isin(masked, special))
        return parts[0].to(ids.device), parts[1].to(ids.device)

    return mask


def make_labels(args: TextArguments, tokenizer, objective: str) -> Callable[[dict], dict]:
    """A function of a batch to one with labels: masked anew for masked language models, unless it has labels already."""
    mask = mask_tokens(tokenizer, args.mlm_probability) if objective == "masked" else None

    def label(batch):
        ids, keep = batch["input_ids"], batch.get("attention_mask")
        if "labels" in batch or objective == "states":
            return dict(batch)
        if mask is not None:
            return {**batch, **dict(zip(("input_ids", "labels"), mask(ids)))}
        return {**batch, "labels": ids if keep is None else ids.masked_fill(keep == 0, -100)}

    return label


def token_losses(logits: torch.Tensor, labels: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row the sum of the losses of its labelled tokens, and their number."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
    return losses.sum(1), (labels != -100).sum(1)


def mean_loss(model, batch: dict, causal: bool) -> torch.Tensor:
    """The loss of a batch with labels; 0 where nothing happened to be masked."""
    if causal:
        return model(**batch).loss  # with what experts add to it
    labels = batch["labels"]
    sums, counts = token_losses(model(**{**batch, "labels": None}).logits, labels, causal)
    return sums.sum() / counts.sum().clamp(min=1)


def ratio(sums: torch.Tensor, counts: torch.Tensor) -> float:
    """The mean over all rows, of sums and counts for each."""
    return (sums.double().sum() / counts.double().sum()).item()


def measure(accelerator: Accelerator, model, loader, label: Callable, causal: bool) -> dict[str, float]:
    """Loss and perplexity over all tokens of a prepared loader, however they are spread over batches and processes."""

    def predict(model, batch):
        batch = label(batch)
        labels = batch.pop("labels")
        return token_losses(model(**batch).logits, labels, causal)

    sums, counts = evaluate(accelerator, model, loader, predict)
    loss = ratio(sums, counts)
    return {"loss": loss, "perplexity": torch.tensor(loss).exp().item(), "tokens": int(counts.sum())}
