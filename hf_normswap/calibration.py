"""Text for calibration and healing, in whatever form it comes, as batches of token ids."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer
from transformers.utils import logging

from .modeling.architectures import get_architecture
from .modeling.placements import NormSwapError

# The opening of the Declaration of Independence (1776) and the Gettysburg Address (1863); both in the public domain.
DEFAULT_TEXT = """\
When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have
connected them with another, and to assume among the powers of the earth, the separate and equal station to which the Laws
of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they should declare
the causes which impel them to the separation. We hold these truths to be self-evident, that all men are created equal,
that they are endowed by their Creator with certain unalienable Rights, that among these are Life, Liberty and the pursuit
of Happiness. That to secure these rights, Governments are instituted among Men, deriving their just powers from the
consent of the governed. That whenever any Form of Government becomes destructive of these ends, it is the Right of the
People to alter or to abolish it, and to institute new Government, laying its foundation on such principles and organizing
its powers in such form, as to them shall seem most likely to effect their Safety and Happiness. Prudence, indeed, will
dictate that Governments long established should not be changed for light and transient causes; and accordingly all
experience hath shewn, that mankind are more disposed to suffer, while evils are sufferable, than to right themselves by
abolishing the forms to which they are accustomed. But when a long train of abuses and usurpations, pursuing invariably
the same Object evinces a design to reduce them under absolute Despotism, it is their right, it is their duty, to throw
off such Government, and to provide new Guards for their future security.
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and
dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that
nation, or any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that war. We
have come to dedicate a portion of that field, as a final resting place for those who here gave their lives that that
nation might live. It is altogether fitting and proper that we should do this. But, in a larger sense, we can not
dedicate, we can not consecrate, we can not hallow this ground. The brave men, living and dead, who struggled here, have
consecrated it, far above our poor power to add or detract. The world will little note, nor long remember what we say
here, but it can never forget what they did here. It is for us the living, rather, to be dedicated here to the unfinished
work which they who fought here have thus far so nobly advanced. It is rather for us to be here dedicated to the great
task remaining before us, that from these honored dead we take increased devotion to that cause for which they gave the
last full measure of devotion, that we here highly resolve that these dead shall not have died in vain, that this nation,
under God, shall have a new birth of freedom, and that government of the people, by the people, for the people, shall not
perish from the earth.
"""

FEW_TOKENS = 1000

logger = logging.get_logger(__name__)


def token_batches(
    data: Any,
    model: Any,
    tokenizer: Any = None,
    *,
    max_tokens: int | None = 4096,
    length: int = 512,
    batch_size: int = 8,
    labels: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """
    Batches for a model, on its device.

    Args:
        data (`str`, `list`, `torch.Tensor`, `datasets.Dataset`, `Iterable` or `None`):
            A text or texts, token ids (one sequence or several, or a tensor of shape `(sequences, tokens)`), a data set
            with a column `input_ids` or `text`, or batches as models take them: mappings with `input_ids` of shape
            `(batch, sequence)`. `None` stands for a few paragraphs in the public domain.
        model (`PreTrainedModel`): models that read from left to right get their texts joined and cut into windows, others one by one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one the model was loaded with.
        max_tokens (`int`, *optional*, defaults to 4096): how many tokens to take, padding not counted; `None` for all.
        length (`int`, *optional*, defaults to 512): the longest sequence, in tokens.
        batch_size (`int`, *optional*, defaults to 8): how many sequences of texts and ids make a batch.
        labels (`bool`, *optional*, defaults to `False`): whether batches keep the `labels` that they come with.

    Raises:
        [`NormSwapError`]: if there is nothing in the data, or text without a tokenizer.
    """
    found = 0
    accepted = inspect.signature(model.forward).parameters.keys() - {"use_cache", "return_dict"}
    accepted -= set() if labels else {"labels"}
    device = "cpu" if model.device.type == "meta" else model.device  # offloaded: Accelerate moves what enters
    for batch in _batches(data, model, tokenizer, length, batch_size):
        if max_tokens is not None and found >= max_tokens:
            break
        batch = {key: torch.as_tensor(value).to(device) for key, value in batch.items() if key in accepted}
        tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()
        if tokens:
            found += tokens
            yield batch
    if not found:
        raise NormSwapError(
            "the calibration data is empty: pass texts, token ids or batches with at least some hundred tokens."
        )
    if found < min(FEW_TOKENS, max_tokens or FEW_TOKENS):
        what = (
            f"No text was given: the default has {found} tokens" if data is None else f"There are only {found} tokens"
        )
        logger.warning(f"{what}, and some thousand of text like the model's own do much better.")


def is_causal(config) -> bool:
    """Whether a model reads from left to right."""
    return getattr(config, "is_decoder", False) or get_architecture(config).family != "bert"


def _batches(data, model, tokenizer, length, batch_size) -> Iterator[Mapping[str, Any]]:
    causal = is_causal(model.config)
    padding = getattr(model.config, "pad_token_id", None) or 0
    limit = getattr(model.config, "max_position_embeddings", None) or length
    length = min(length, limit if causal else limit - padding - 1)  # RoBERTa counts positions from there
    if data is None:
        data = DEFAULT_TEXT if causal else DEFAULT_TEXT.replace("\n", " ").split(". ")
    if isinstance(data, (str, Mapping)) or (hasattr(data, "ndim") and data.ndim == 1):
        data = [data]
    items = iter(data)
    for first in items:  # not of an empty one
        items = itertools.chain([first], items)
        break
    else:
        return
    if isinstance(first, int):
        items = iter([list(items)])
    if isinstance(first, Mapping) and torch.is_tensor(first.get("input_ids")) and first["input_ids"].ndim == 2:
        yield from items
        return
    tokenize = functools.cache(lambda: tokenizer or _tokenizer_of(model))  # not needed for ids
    sequences = itertools.chain.from_iterable(_sequences(item, tokenize) for item in items)
    pieces = _windows(sequences, length) if causal else (part for ids in sequences for part in _windows([ids], length))
    while chunk := list(itertools.islice(pieces, batch_size)):
        yield {
            "input_ids": pad_sequence(chunk, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in chunk], batch_first=True),
        }


def _sequences(item, tokenize: Callable) -> Iterator[torch.Tensor]:
    """The token ids of a text, of ids, or of a row of a data set, without padding; `tokenize` returns a tokenizer."""
    if isinstance(item, Mapping):
        if "input_ids" in item:
            ids, mask = item["input_ids"], item.get("attention_mask")
            rows = [ids] if torch.as_tensor(ids[0]).ndim == 0 else ids
            masks = [None] * len(rows) if mask is None else [mask] if rows is not ids else mask
            for row, keep in zip(rows, masks):
                row = torch.as_tensor(row)
                yield row if keep is None else row[torch.as_tensor(keep).bool()]
            return
        if "text" not in item:
            raise NormSwapError(f"the data has {', '.join(map(str, item))}: it needs `input_ids` or `text`.")
        item = item["text"]
    if isinstance(item, str):
        if item.strip():
            yield torch.as_tensor(tokenize()(item, verbose=False)["input_ids"])
        return
    try:
        ids = torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.zeros(())
    if ids.ndim != 1 or ids.is_floating_point():
        raise NormSwapError(
            f"cannot read {type(item).__name__} as calibration data: pass texts, sequences of token ids, rows with `text` or "
            "`input_ids`, or batches with `input_ids` of shape (batch, sequence)."
        )
    yield ids


def _tokenizer_of(model):
    name = getattr(model.config, "_name_or_path", None)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise NormSwapError(
            f"calibration on text needs a tokenizer, and none was found for {name!r}: pass `tokenizer=`, or token ids."
        ) from error


def _windows(sequences: Iterable[torch.Tensor], length: int) -> Iterator[torch.Tensor]:
    """All sequences one behind the other, in windows; the last may be shorter."""
    rest = torch.tensor([], dtype=torch.long)
    for ids in sequences:
        rest = torch.cat([rest, ids])
        while len(rest) >= length:
            yield rest[:length]
            rest = rest[length:]
    if len(rest):
        yield rest
