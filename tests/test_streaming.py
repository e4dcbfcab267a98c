"""Conversion of folders, tensor by tensor: the same as in memory, all or nothing, and nothing that a hostile folder wants."""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY, VOCABULARY, head_of, tiny_batch, tiny_model
from transformers.models.auto import modeling_auto

from hf_normswap import NormSwapError, conversion, convert_checkpoint, folders, revert_checkpoint, shards, streaming

IDS = torch.randint(4, VOCABULARY, (40, 32), generator=torch.Generator().manual_seed(0))
EXACT, CALIBRATED = {"warm_start": "exact"}, {"warm_start": "calibrated", "calibration": IDS}


def make(folder: Path, case: str, auto: str | None = None, shards: int = 1, **overrides) -> Path:
    """A tiny checkpoint in so many shards at least, with a file beside the weights."""
    model = tiny_model(case, auto, **overrides)
    size = sum(one.numel() for one in model.parameters()) * 4 // shards + 1000 if shards > 1 else "1GB"
    model.save_pretrained(folder, max_shard_size=size)
    (folder / "vocab.txt").write_text("a\n")
    return folder


def fingerprint(folder: Path) -> dict:
    """What every file of a folder is, and when it was written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def weights(folder: Path) -> dict:
    return {key: one for path in sorted(folder.glob("*.safetensors")) for key, one in load_file(path).items()}


def assert_same(one: Path, other: Path, auto: str | None, names: bool = True):
    """Two folders hold the same model, bit for bit, and the same other files."""
    configs = [json.loads((folder / "config.json").read_text()) for folder in (one, other)]
    assert configs[0] == configs[1]
    files = [{path.name for path in folder.iterdir() if not path.name.startswith("model")} for folder in (one, other)]
    assert files[0] >= files[1] and files[0] - files[1] <= {"vocab.txt"}
    texts = [(folder / "generation_config.json") for folder in (one, other)]
    assert texts[0].is_file() == texts[1].is_file()
    assert not texts[0].is_file() or texts[0].read_text() == texts[1].read_text()
    if names:
        tensors = [weights(folder) for folder in (one, other)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    loaded = []
    for folder in (one, other):
        model, report = getattr(modeling_auto, auto).from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        loaded.append(model.state_dict())
    assert loaded[0].keys() == loaded[1].keys() and all(
        torch.equal(loaded[0][key], loaded[1][key]) for key in loaded[0]
    )


# case, head, shards, steps: placement and options of one conversion after the other
CHAINS = {
    "as it is": ("llama", None, 3, [("post", {})]),
    "gates, other gates, other size": (
        "llama",
        None,
        1,
        [("gated", {"norm_gate": 0.3}), ("gated", {"norm_gate": 0.6}), ({"learned": {"skip_norm": "channel"}}, {})],
    ),
    "parked norms": ("gemma2", None, 2, [("post", {}), ("sandwich", {})]),
    "norms without weights": ("olmo", None, 1, [("admin", {})]),
    "second stream": ("gpt2", None, 2, [("resi_dual", EXACT)]),
    "fold in LLaMA": ("llama", None, 3, [("post", {}), ("deepnorm", EXACT)]),
    "fold in BERT": ("bert", "AutoModelForSequenceClassification", 1, [("deepnorm", EXACT), ("pre", EXACT)]),
    "fold and dropped gates": ("llama", None, 1, [("gated", {"norm_gate": 1.0}), ("post", {}), ("deepnorm", EXACT)]),
    "tied, with a gate": ("llama", None, 2, [("peri", {"layers": [0, 1]})]),
    "experts": ("qwen2_moe", None, 3, [("sandwich", {}), ("gated", {})]),
    "renamed experts": ("mixtral", None, 2, [("resi_dual", {})]),
    "calibrated LLaMA": ("llama", None, 3, [("post", CALIBRATED)]),
    "calibrated GPT-2": ("gpt2", None, 2, [("post", CALIBRATED), ("pre", CALIBRATED)]),
    "calibrated BERT": ("bert", "AutoModel", 1, [("pre", CALIBRATED)]),
}


def output_of(folder: Path, auto: str) -> torch.Tensor:
    with torch.no_grad():
        return getattr(modeling_auto, auto).from_pretrained(folder).eval()(**tiny_batch())[0]


def run_chain(tmp_path, case, auto, shards, steps, overrides):
    auto = auto or head_of(case)
    source = first = make(tmp_path / "source", case, auto, shards, **overrides)
    before = fingerprint(source)
    rewritten = any("warm_start" in options for _, options in steps)
    for number, (placement, options) in enumerate(steps):
        target, memory = tmp_path / f"disk{number}", tmp_path / f"memory{number}"
        assert convert_checkpoint(source, placement, output_dir=target, **options) == target
        convert_checkpoint(source, placement, **options).save_pretrained(memory)
        assert_same(target, memory, auto)
        source = target
    back, memory = tmp_path / "back", tmp_path / "memory"
    assert revert_checkpoint(source, output_dir=back) == back
    revert_checkpoint(source).save_pretrained(memory)
    assert_same(back, memory, auto)
    if not rewritten:
        assert weights(back).keys() == weights(first).keys()
        assert all(torch.equal(one, weights(first)[key]) for key, one in weights(back).items())
    assert fingerprint(first) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("chain", CHAINS)
def test_the_same_as_in_memory(chain, tmp_path):
    case, auto, shards, steps = CHAINS[chain]
    run_chain(tmp_path, case, auto, shards, steps, {"tie_word_embeddings": True} if "tied" in chain else {})
    outputs = [output_of(tmp_path / name, auto or head_of(case)) for name in ("source", "disk0")]
    first, options = steps[0]
    neutral = options == EXACT or (first == "gated" and not options)
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5) == neutral


def to_pickle(folder: Path, shards: int):
    """Rewrite the weights of a folder as `pytorch_model.bin`, or several."""
    tensors = weights(folder)
    for path in folder.glob("model*"):
        path.unlink()
    keys = sorted(tensors)
    parts = [keys[number::shards] for number in range(shards)]
    names = [f"pytorch_model-{number:05d}-of-{shards:05d}.bin" for number in range(1, shards + 1)]
    for name, part in zip(names if shards > 1 else ["pytorch_model.bin"], parts):
        torch.save({key: tensors[key] for key in part}, folder / name)
    if shards > 1:
        index = {"metadata": {}, "weight_map": {key: name for name, part in zip(names, parts) for key in part}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def rename_keys(folder: Path, rename):
    tensors = weights(folder)
    save_file(
        {rename(key): one for key, one in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def with_leftovers(folder: Path):
    tensors = weights(folder)
    tensors["model.layers.0.attn_output_norm.weight"] = torch.full((32,), 7.0)  # has the name of an extra
    tensors["model.layers.0.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["secret.payload"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def mixed(folder: Path, matrices: torch.dtype, norms: torch.dtype, shards: int = 1):
    """Tensors of two dtypes, and a config that names none."""
    tensors = {key: one.to(matrices if one.ndim > 1 else norms) for key, one in weights(folder).items()}
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if key != "dtype"}))
    if shards == 1:
        return save_file(tensors, path, metadata={"format": "pt"})
    path.unlink()
    homes = {key: f"model-{1 + (one.ndim > 1)}.safetensors" for key, one in tensors.items()}
    for file in set(homes.values()):
        save_file({key: tensors[key] for key in homes if homes[key] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict(sorted(homes.items(), key=lambda item: item[1], reverse=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stored(folder: Path, dtype: str, matrices: torch.dtype, norms: torch.dtype):
    """Tensors of two dtypes, and a config that wants a third."""
    mixed(folder, matrices, norms)
    edit_json(folder / "config.json", dtype=dtype)


def untied_pickle(folder: Path):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    to_pickle(folder, 1)


# case, head, what is done to the folder, placement, options
FORMATS = {
    "mixed dtypes": ("llama", None, lambda folder: mixed(folder, torch.bfloat16, torch.float32), "deepnorm", EXACT),
    "mixed dtypes, other way": ("llama", None, lambda folder: mixed(folder, torch.float32, torch.float16), "post", {}),
    "mixed dtypes of two shards": (
        "llama",
        None,
        lambda folder: mixed(folder, torch.float32, torch.bfloat16, 2),
        "sandwich",
        {},
    ),
    **{
        f"{matrices} and {norms} for {dtype}, {warm['warm_start']}": (
            "bert",
            "AutoModelForSequenceClassification",
            partial(stored, dtype=dtype, matrices=getattr(torch, matrices), norms=getattr(torch, norms)),
            placement,
            warm,
        )
        for dtype, matrices, norms in (
            ("float32", "bfloat16", "bfloat16"),
            ("float32", "bfloat16", "float32"),
            ("float16", "bfloat16", "float32"),
            ("bfloat16", "float16", "float32"),
        )
        for placement, warm in (("deepnorm", EXACT), ("pre", CALIBRATED))
        if not (dtype == "float16" and warm is CALIBRATED)  # which is too narrow for it
    },
    "narrow pickle, fold": (
        "bert",
        "AutoModel",
        lambda folder: (stored(folder, "float32", torch.float16, torch.float16), to_pickle(folder, 2)),
        "deepnorm",
        EXACT,
    ),
    "a head that is not tied, though the config says so": ("llama", None, untied_pickle, "gated", {}),
    "a pickle": ("llama", None, lambda folder: to_pickle(folder, 1), "gated", {}),
    "pickles, fold": ("bert", "AutoModelForMaskedLM", lambda folder: to_pickle(folder, 3), "deepnorm", EXACT),
    "without the base model's prefix": (
        "gpt2",
        None,
        lambda folder: rename_keys(folder, lambda key: key.removeprefix("transformer.")),
        "sandwich",
        {},
    ),
    "gamma and beta": (
        "bert",
        "AutoModel",
        lambda folder: rename_keys(
            folder,
            lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        ),
        "pre",
        EXACT,
    ),
    "leftovers": ("llama", None, with_leftovers, "sandwich", {}),
}


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form, tmp_path):
    case, auto, prepare, placement, options = FORMATS[form]
    auto = auto or head_of(case)
    source = make(tmp_path / "source", case, auto)
    prepare(source)
    convert_checkpoint(source, placement, output_dir=tmp_path / "disk", **options)
    convert_checkpoint(source, placement, **options).save_pretrained(tmp_path / "memory")
    cls = getattr(modeling_auto, auto)
    if form == "leftovers":
        assert weights(tmp_path / "disk").keys() == weights(tmp_path / "memory").keys()
    states = []
    for folder in (tmp_path / "disk", tmp_path / "memory"):
        model, report = cls.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        assert states[0][key].dtype == states[1][key].dtype and torch.equal(states[0][key], states[1][key]), key


@pytest.mark.parametrize("size", ["20KB", 10**9])
def test_resharding(size, tmp_path):
    source = make(tmp_path / "source", "llama", shards=3)
    convert_checkpoint(source, "gated", output_dir=tmp_path / "disk", max_shard_size=size)
    files = list((tmp_path / "disk").glob("*.safetensors"))
    assert len(files) == 1 if size == 10**9 else len(files) > 4 and max(path.stat().st_size for path in files) < 26_000
    convert_checkpoint(source, "gated").save_pretrained(tmp_path / "memory")
    assert_same(tmp_path / "disk", tmp_path / "memory", "AutoModelForCausalLM")


def test_subfolder_and_loaded_models(tmp_path):
    make(tmp_path / "repo" / "part", "llama")
    convert_checkpoint(tmp_path / "repo", "post", subfolder="part", output_dir=tmp_path / "disk")
    model = tiny_model("llama")
    assert convert_checkpoint(model, "post", output_dir=tmp_path / "saved") == tmp_path / "saved"
    assert weights(tmp_path / "saved").keys() == weights(tmp_path / "disk").keys()
    with pytest.raises(NormSwapError, match="dtype"):
        convert_checkpoint(tmp_path / "repo" / "part", "post", output_dir=tmp_path / "o", dtype=torch.bfloat16)
    with pytest.raises(NormSwapError, match="output_dir"):
        convert_checkpoint(model, "post", overwrite=True)
    assert not (tmp_path / "o").exists()


def test_nothing_that_is_saved_later_reaches_the_source_through_a_link(tmp_path, monkeypatch):
    for safe in (shards.SAFE_TO_LINK, False):
        monkeypatch.setattr(shards, "SAFE_TO_LINK", safe)
        source, target = make(tmp_path / f"source{safe}", "llama"), tmp_path / f"disk{safe}"
        convert_checkpoint(source, "post", output_dir=target)
        same = (source / "model.safetensors").samefile(target / "model.safetensors")
        assert same in (safe, False)  # a copy where the file system can share blocks
        before = fingerprint(source)
        model = modeling_auto.AutoModelForCausalLM.from_pretrained(target)
        with torch.no_grad():
            model.model.norm.weight.fill_(2.0)
        model.save_pretrained(target)
        assert fingerprint(source) == before
        assert not torch.equal(weights(source)["model.norm.weight"], weights(target)["model.norm.weight"])


def test_weights_keep_their_dtype(tmp_path):
    """But for those that are computed anew, which do not fit into a narrower one than the model's."""
    source = make(tmp_path / "source", "llama")
    tensors = weights(source)
    tensors[NORM] = tensors[NORM].double()
    half = {key: one.bfloat16() if one.ndim > 1 else one for key, one in tensors.items()}
    save_file(half, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(source, "post", output_dir=tmp_path / "post")
    convert_checkpoint(tmp_path / "post", "deepnorm", output_dir=tmp_path / "disk", **EXACT)
    made = weights(tmp_path / "disk")
    assert made.keys() == half.keys()
    folded = {key for key in made if "o_proj" in key or "down_proj" in key}
    for key, one in made.items():
        assert one.dtype == (torch.float32 if key in folded else half[key].dtype), key
        assert torch.equal(one, half[key]) == (key not in folded)


def flip(path: Path, position: int, bit: int):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def edit_header(folder: Path, change):
    """Rewrite the header of a safetensors file: `change` gets its rows."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    rows = json.loads(data[8 : 8 + length])
    text = json.dumps(change(rows) or rows).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_json(path: Path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


NORM = "model.norm.weight"
CANARY = "canary"


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def pickle_bomb(folder: Path):
    (folder / "model.safetensors").unlink()
    tensors = {"model.embed_tokens.weight": torch.zeros(1), "x": Bomb(folder.parent / CANARY)}
    torch.save(tensors, folder / "pytorch_model.bin")


def old_pickle_bomb(folder: Path):
    pickle_bomb(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Bomb(folder.parent / CANARY)}))


def odd_pickle(folder: Path, kind: str):
    tensors = weights(folder)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to("meta" if kind == "meta" else "cpu")
    if kind == "sparse":
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to_sparse()
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def pickle_index(folder: Path, **files):
    tensors = weights(folder)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "a.bin")
    torch.save({"b": torch.zeros(1)}, folder / "b.bin")
    weight_map = dict.fromkeys(tensors, "a.bin") | {"b": "b.bin"} | files
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(folder: Path, **files):
    """An index that says where tensors are."""
    weight_map = dict.fromkeys(weights(folder), "model.safetensors") | files
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = {
        key: file.replace("model.safetensors", "model-00001-of-00001.safetensors") for key, file in weight_map.items()
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_text(folder: Path, text: str):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def outside(folder: Path, name: str):
    """A shard that exists, but not in the folder."""
    for place in (folder.parent / "secret.safetensors", folder / "sub" / "secret.safetensors"):
        place.parent.mkdir(exist_ok=True)
        shutil.copy(folder / "model.safetensors", place)
    index_of(folder, **{NORM: name.format(parent=folder.parent)})


def swap_offsets(rows):
    rows[NORM]["data_offsets"] = rows["lm_head.weight"]["data_offsets"][:1] * 2


def foreign_code(folder: Path, name: str, keys: str):
    """A file that names code of another repository under some keys."""
    data: object = "evil/repo--module.Class"
    for key in reversed(keys.split()):
        data = [data] if key == "0" else {key: data}
    occupy(folder / name, json.dumps(data))


def linked(folder: Path, name: str):
    """A file of the folder that lies elsewhere."""
    path, other = folder / name, folder.parent / "elsewhere"
    if "index" in name:
        index_of(folder)
    path.rename(other)
    path.symlink_to(other)


def layers_of_nothing(folder: Path, count: int, size: int):
    tensors = {key: one for key, one in weights(folder).items() if ".1." not in key and ".2." not in key}
    tensors |= {f"x{index}": torch.zeros(size) for index in range(count)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", num_hidden_layers=count, layer_types=None)


# what is done to a folder, words of the refusal
HOSTILE = {
    "shard in the parent": (lambda folder: outside(folder, "../secret.safetensors"), "no .safetensors file"),
    "shard at an absolute path": (
        lambda folder: outside(folder, "{parent}/secret.safetensors"),
        "no .safetensors file",
    ),
    "shard below": (lambda folder: outside(folder, "sub/secret.safetensors"), "no .safetensors file"),
    "shard with a backslash": (lambda folder: outside(folder, "..\\secret.safetensors"), "no .safetensors file"),
    "shard that is no string": (lambda folder: index_of(folder, **{NORM: "7"}), "no .safetensors file"),
    "shard of another kind": (lambda folder: index_of(folder, **{NORM: "config.json"}), "no .safetensors file"),
    "shard that is missing": (lambda folder: index_of(folder, **{NORM: "a.safetensors"}), "not there"),
    "tensor that the shard lacks": (lambda folder: index_of(folder, more="model.safetensors"), "lacks it"),
    "index without a map": (lambda folder: index_text(folder, '{"weight_map": []}'), "weight_map"),
    "index that is no object": (lambda folder: index_text(folder, "[]"), "no JSON object"),
    "index that nests": (lambda folder: index_text(folder, '{"weight_map":' + "[" * 200_000), "JSON"),
    "index that is huge": (
        lambda folder: index_text(folder, '{"weight_map": {"a": "' + "x" * shards.LONGEST_JSON + '"}}'),
        "bytes",
    ),
    "config that nests": (lambda folder: (folder / "config.json").write_text('{"a":' * 200_000), "JSON"),
    "more layers than tensors": (
        lambda folder: edit_json(folder / "config.json", num_hidden_layers=10**6, layer_types=None),
        "1000000 num_hidden_layers",
    ),
    "shape that is another": (
        lambda folder: edit_header(folder, lambda rows: rows[NORM].update(shape=[4, 8])),
        "shape",
    ),
    "shape that is larger": (
        lambda folder: edit_header(folder, lambda rows: rows[NORM].update(shape=[64])),
        "damaged",
    ),
    "shape that overflows": (
        lambda folder: edit_header(folder, lambda rows: rows[NORM].update(shape=[2**40, 2**40])),
        "damaged",
    ),
    "shape that is negative": (
        lambda folder: edit_header(folder, lambda rows: rows[NORM].update(shape=[-32])),
        "damaged",
    ),
    "dtype of another size": (
        lambda folder: edit_header(folder, lambda rows: rows[NORM].update(dtype="F64")),
        "damaged",
    ),
    "dtype that is none": (lambda folder: edit_header(folder, lambda rows: rows[NORM].update(dtype="F33")), "damaged"),
    "dtype of integers": (lambda folder: edit_header(folder, lambda rows: rows[NORM].update(dtype="I32")), "dtype"),
    "tensors that overlap": (lambda folder: edit_header(folder, swap_offsets), "damaged"),
    "tensors beyond the end": (
        lambda folder: edit_header(folder, lambda rows: rows[NORM].update(data_offsets=[10**9, 10**9 + 128])),
        "damaged",
    ),
    "tensor with another name": (
        lambda folder: edit_header(folder, lambda rows: {key.replace(NORM, "a"): row for key, row in rows.items()}),
        "lacks 1 tensors",
    ),
    "truncated data": (lambda folder: os.truncate(folder / "model.safetensors", 9_000), "incomplete"),
    "truncated header": (lambda folder: os.truncate(folder / "model.safetensors", 100), "incomplete"),
    "empty file": (lambda folder: os.truncate(folder / "model.safetensors", 0), "incomplete"),
    "header that nests": (
        lambda folder: edit_header(folder, lambda rows: rows.update(a=json.loads("[" * 500 + "]" * 500))),
        "damaged",
    ),
    "header that claims to be huge": (lambda folder: flip(folder / "model.safetensors", 5, 0), "header"),
    "flipped bit in the length": (lambda folder: flip(folder / "model.safetensors", 0, 3), "damaged"),
    "code of somebody else": (
        lambda folder: edit_json(
            folder / "config.json",
            model_type="normswap_llama",
            auto_map={"AutoConfig": "other/repo--evil.Config", "AutoModel": "other/repo--evil.Model"},
        ),
        "other/repo--evil.Config",
    ),
    "tokenizer code of somebody else": (
        lambda folder: (folder / "tokenizer_config.json").write_text(
            '{"auto_map": {"AutoTokenizer": ["a/b--c.D", null]}}'
        ),
        "another repository",
    ),
    "processor code of somebody else": (
        lambda folder: (folder / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "a/b--c.D"}}'),
        "another repository",
    ),
    **{
        f"code of somebody else, {name} {keys}": (partial(foreign_code, name=name, keys=keys), "another repository")
        for name, keys in {
            "processor_config.json": "image_processor auto_map AutoImageProcessor",
            "preprocessor_config.json": "feature_extractor auto_map AutoFeatureExtractor",
            "0_Transformer/tokenizer_config.json": "auto_map AutoTokenizer",
            "modules.json": "0 type",
            "router_config.json": "types query_0",
            "generation_config.json": "custom_generate",
            "1_Dense/config.json": "custom_pipelines x impl",
        }.items()
    },
    "companion that is huge": (
        lambda folder: (folder / "modules.json").write_text(f'["{"x" * shards.LONGEST_JSON}"]'),
        "bytes",
    ),
    "companion that nests": (lambda folder: (folder / "modules.json").write_text("[" * 200_000), "Recursion"),
    "weights named in the config": (
        lambda folder: edit_json(folder / "config.json", transformers_weights="other.safetensors"),
        "transformers_weights",
    ),
    "weights outside, named in the config": (
        lambda folder: edit_json(folder / "config.json", transformers_weights="../other.safetensors"),
        "transformers_weights",
    ),
    **{
        f"link to {name}": (partial(linked, name=name), "leads out of the folder")
        for name in ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
    },
    "link to a shard": (
        lambda folder: (index_of(folder), linked(folder, "model-00001-of-00001.safetensors")),
        "leads out",
    ),
    "link to a pickle": (lambda folder: (to_pickle(folder, 1), linked(folder, "pytorch_model.bin")), "leads out"),
    "layers of nothing": (lambda folder: layers_of_nothing(folder, 4000, 0), "at most 1 layers"),
    "layers of numbers": (lambda folder: layers_of_nothing(folder, 4000, 1), "at most 1 layers"),
    "pipeline of somebody else": (
        lambda folder: edit_json(folder / "config.json", custom_pipelines={"x": {"impl": "a/b--c.D"}}),
        "another repository",
    ),
    "an adapter beside the weights": (
        lambda folder: (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "other/base"}'),
        "adapter",
    ),
    "pickle with tensors of no data": (lambda folder: odd_pickle(folder, "meta"), "dense"),
    "pickle with sparse tensors": (lambda folder: odd_pickle(folder, "sparse"), "dense"),
    "pickle index that lies": (lambda folder: pickle_index(folder, more="a.bin"), "lacks it"),
    "pickle in another file than the index says": (lambda folder: pickle_index(folder, **{NORM: "b.bin"}), "lacks it"),
    "shard with a name that is too long": (lambda folder: index_of(folder, a="x" * 300 + ".safetensors"), "too long"),
    "class of somebody else": (
        lambda folder: edit_json(folder / "config.json", architectures=["os.system"]),
        "no Transformers model",
    ),
    "pickle that runs": (pickle_bomb, "not unpickled"),
    "old pickle that runs": (old_pickle_bomb, "not unpickled"),
}


@pytest.mark.parametrize("trick", HOSTILE)
def test_hostile_folders_are_refused(trick, tmp_path):
    prepare, words = HOSTILE[trick]
    source = make(tmp_path / "source", "llama")
    prepare(source)
    before, beside = fingerprint(source), sorted(tmp_path.iterdir())
    with pytest.raises(NormSwapError, match=words):
        convert_checkpoint(source, "gated", output_dir=tmp_path / "out")
    with pytest.raises(NormSwapError):
        revert_checkpoint(source, output_dir=tmp_path / "out")
    if (
        trick != "dtype of integers" and "pickle i" not in trick
    ):  # which Transformers reads as floats, and does not check
        with pytest.raises((NormSwapError, RuntimeError)):
            convert_checkpoint(source, "gated")
    for step in (partial(convert_checkpoint, source, "gated"), partial(revert_checkpoint, source)):
        if "runs" in trick:
            with pytest.raises(NormSwapError, match="safetensors") as refusal:
                step()
            assert "weights_only" not in str(refusal.value)
    assert fingerprint(source) == before and sorted(tmp_path.iterdir()) == beside
    assert not (tmp_path / CANARY).exists()


# what a config (or the generation config) says; whether it is refused
WILD = {
    "auto_map of ours, a string": ({"auto_map": "a--b", "model_type": "normswap_llama"}, None),
    "auto_map of ours, a list": ({"auto_map": ["a"], "model_type": "normswap_llama"}, None),
    "architectures, a number": ({"architectures": 5}, None),
    "architectures, nested": ({"architectures": [["a"]]}, None),
    "model type, a list": ({"model_type": ["llama"]}, None),
    "model type, a path": ({"model_type": "../../etc"}, None),
    "no layers": ({"num_hidden_layers": 0}, None),
    "fewer layers than none": ({"num_hidden_layers": -1}, None),
    "a list of layers": ({"num_hidden_layers": [3]}, None),
    "endless layers": ({"num_hidden_layers": 10**9, "layer_types": None}, None),
    "endless layers of Gemma 2": ({"num_hidden_layers": 10**9, "layer_types": None}, "gemma2"),
    "endless labels": ({"num_labels": 10**9, "id2label": None, "label2id": None}, None),
    "endless experts": ({"num_local_experts": 10**9}, "mixtral"),
    "endless words": ({"vocab_size": 10**14}, None),
    "endless positions": ({"max_position_embeddings": 10**13}, "bert"),
    "endless heads": ({"head_dim": 10**12}, None),
    "no heads": ({"num_attention_heads": 0}, None),
    "no width": ({"hidden_size": 0}, None),
    "endless placements": ({"norm_placement": ["post"] * 10**5}, None),
    "dtype, unknown": ({"dtype": "evil"}, None),
    "dtype, a function": ({"dtype": "load"}, None),
    "dtype, a number": ({"dtype": 7}, None),
    "activation": ({"hidden_act": "os.system"}, None),
    "rope": ({"rope_parameters": {"rope_type": "evil"}}, None),
    "quantisation": ({"quantization_config": "x"}, None),
    "conversion, wild": ({"norm_conversion": "x", "model_type": "normswap_llama"}, None),
    "generation, a list": ([], None),
    "generation, wild": ({"max_new_tokens": "x", "temperature": [1]}, "generation"),
}


@pytest.mark.parametrize("what", WILD)
def test_wild_configs_are_refused_in_a_sentence(what, tmp_path):
    """Before they take memory or time, and with nothing left."""
    fields, case = WILD[what]
    generation = isinstance(fields, list) or case == "generation"
    source = make(tmp_path / "source", "llama" if generation or case is None else case)
    if generation:
        (source / "generation_config.json").write_text(json.dumps(fields))
    else:
        edit_json(source / "config.json", **fields)
    start = time.process_time()
    for step in (partial(convert_checkpoint, source, "gated"), partial(revert_checkpoint, source)):
        with pytest.raises(NormSwapError):
            step(output_dir=tmp_path / "out")
    assert time.process_time() - start < 10
    assert list(tmp_path.iterdir()) == [source]


def test_bombs_go_off_where_pickles_are_trusted(tmp_path):
    """Else the tests above could not fail."""
    source = make(tmp_path / "source", "llama")
    old_pickle_bomb(source)
    pickle.loads((source / "pytorch_model.bin").read_bytes())
    assert (tmp_path / CANARY).exists()


def test_flipped_bits_in_a_header_are_seen(tmp_path):
    source = make(tmp_path / "source", "llama", num_hidden_layers=1)
    path = source / "model.safetensors"
    data = path.read_bytes()
    (original,) = shards.read_shards(source)
    checkpoint = streaming.Checkpoint(
        source, type(tiny_model("llama")), tiny_model("llama", num_hidden_layers=1).config
    )
    refused, positions = 0, range(0, 8 * len(original.header), 31)
    for position in positions:
        flip(path, position // 8, position % 8)
        try:
            checkpoint.shards = shards.read_shards(source)
            checkpoint.match()
        except NormSwapError:
            refused += 1
        else:  # what was flipped says nothing about a tensor
            assert checkpoint.shards[0].tensors == original.tensors
        path.write_bytes(data)
    assert refused > 0.9 * len(positions)


def test_the_old_folder_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    source, target = make(tmp_path / "source", "llama"), tmp_path / "out"
    convert_checkpoint(source, "post", output_dir=target)
    before = fingerprint(target)
    with pytest.raises(NormSwapError, match="overwrite"):
        convert_checkpoint(source, "gated", output_dir=target)
    with monkeypatch.context() as patch:
        patch.setattr(streaming, "write_shard", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert_checkpoint(source, "gated", output_dir=target, overwrite=True)
    assert fingerprint(target) == before and not (tmp_path / ".out.incomplete").exists()
    with folders.appearing(target, overwrite=True) as new:
        with pytest.raises(NormSwapError, match="another process"):
            convert_checkpoint(source, "gated", output_dir=target, overwrite=True)
        shutil.copytree(target, new, dirs_exist_ok=True)
    scratch = tmp_path / ".out.incomplete"  # as a run leaves it that is killed between its two renamings
    scratch.mkdir()
    target.rename(scratch / "old")
    with pytest.raises(NormSwapError, match="not a placement|unknown|Did you mean|magic"):
        convert_checkpoint(source, "magic", output_dir=target, overwrite=True)
    convert_checkpoint(source, "gated", output_dir=target, overwrite=True)
    assert json.loads((target / "config.json").read_text())["norm_placement"] == "gated" and not scratch.exists()


def occupy(path: Path, content: str | None = "mine"):
    if content is None:
        return path.mkdir(parents=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


# what lies at the target, or comes to lie there meanwhile; whether it may be replaced; words of the refusal, if it is refused
OCCUPIED = {
    "a foreign folder": (lambda target: occupy(target / "thesis.txt"), True, "not a checkpoint"),
    "a file": (lambda target: occupy(target), True, "not a checkpoint"),
    "a finished conversion": (lambda target: shutil.copytree(target.parent / "other", target), False, "exists"),
    "a finished conversion to replace": (lambda target: shutil.copytree(target.parent / "other", target), True, None),
    "an empty folder": (lambda target: occupy(target, None), False, None),
    "an empty folder to replace": (lambda target: occupy(target, None), True, None),
}


@pytest.mark.parametrize("when", ["before", "while it loads", "while it writes"])
@pytest.mark.parametrize("source", ["folder", "model"])
@pytest.mark.parametrize("what", OCCUPIED)
def test_occupied_targets(what, source, when, tmp_path, monkeypatch):
    prepare, overwrite, words = OCCUPIED[what]
    target, folder = tmp_path / "out", make(tmp_path / "source", "llama")
    convert_checkpoint(folder, "sandwich", output_dir=tmp_path / "other")
    before = {}

    def come():
        if not before:
            prepare(target)
            before.update(fingerprint(tmp_path))

    def first(function):
        return lambda *args, **kwargs: (come(), function(*args, **kwargs))[1]

    if when == "before":
        come()
    else:
        name = "told" if when == "while it loads" else "write_beside"
        home = folders if name == "told" else streaming if source == "folder" else conversion
        monkeypatch.setattr(home, name, first(getattr(home, name)))
    convert = partial(convert_checkpoint, folder if source == "folder" else tiny_model("llama"), "gated")
    if words is None:
        convert(output_dir=target, overwrite=overwrite)
        assert json.loads((target / "config.json").read_text())["norm_placement"] == "gated"
    else:
        with pytest.raises(NormSwapError, match=words):
            convert(output_dir=target, overwrite=overwrite)
        assert fingerprint(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


CARD = "# My text\n"
# what is done to a finished conversion, the step that replaces it, words of the refusal or what is left of it
REPLACED = {
    "as it is": (lambda folder: None, "convert", []),
    "notes": (lambda folder: occupy(folder / "notes.md"), "convert", "notes.md"),
    "a repository": (lambda folder: occupy(folder / ".git" / "config"), "convert", ".git"),
    "checkpoints of a run": (
        lambda folder: occupy(folder / "checkpoint-7" / "config.json"),
        "convert",
        "checkpoint-7",
    ),
    "other weights": (lambda folder: occupy(folder / "model_old.safetensors"), "convert", "model_old.safetensors"),
    "a link": (lambda folder: (folder / "data").symlink_to(folder.parent), "convert", "data"),
    "code of the source": (lambda folder: None, "convert", ["tok.py"]),
    "code that was changed": (lambda folder: occupy(folder / "tok.py", "y"), "convert", "tok.py"),
    "text in the card": (lambda folder: append(folder / "README.md", CARD), "convert", ["README.md"]),
    "another card": (lambda folder: occupy(folder / "README.md", CARD), "convert", "README.md"),
    "as it is, by its stock model": (lambda folder: None, "revert", []),
    "text in the card, by a stock model": (lambda folder: append(folder / "README.md", CARD), "revert", "README.md"),
}


def append(path: Path, text: str):
    path.write_text(path.read_text() + text)


# a loaded model has no code beside it
@pytest.mark.parametrize(
    "what, memory", [(what, one) for what in REPLACED for one in (False, True) if "code" not in what or not one]
)
def test_overwriting_loses_nothing(what, memory, tmp_path):
    """But what is a checkpoint's own: else it is refused, with names."""
    prepare, step, expected = REPLACED[what]
    source, target = make(tmp_path / "source", "llama"), tmp_path / "out"
    if "code" in what:
        occupy(source / "tok.py", "x")
    convert_checkpoint(source, "post", output_dir=target)
    other = convert_checkpoint(source, "sandwich", output_dir=tmp_path / "other")
    prepare(target)
    before = fingerprint(tmp_path)
    load = modeling_auto.AutoModelForCausalLM.from_pretrained
    if step == "revert":
        replace = partial(revert_checkpoint, load(other) if memory else other)
    else:
        replace = partial(convert_checkpoint, load(source) if memory else source, "gated")
    if isinstance(expected, str):
        with pytest.raises(NormSwapError, match=expected):
            replace(output_dir=target, overwrite=True)
        assert fingerprint(tmp_path) == before
        return
    replace(output_dir=target, overwrite=True)
    config = json.loads((target / "config.json").read_text())
    assert config.get("norm_placement") == ("gated" if step == "convert" else None)
    assert all((target / name).is_file() for name in expected)
    card = (target / "README.md").read_text() if step == "convert" else ""
    assert (CARD in card) == ("README.md" in expected) and (
        "# What it is" in card or "gated" in card or step == "revert"
    )
    assert (target / "README.md").exists() == (step == "convert")


@pytest.mark.parametrize("source", ["folder", "model"])
def test_a_full_disk_is_a_sentence(source, tmp_path):
    """Here a limit on the length of a file, of a process of its own."""
    folder = make(tmp_path / "source", "bert", "AutoModel")
    model = tiny_model("bert", "AutoModel")

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        with pytest.raises(NormSwapError, match="out cannot be written: .*File too large.*room"):
            convert_checkpoint(
                folder if source == "folder" else model, "deepnorm", output_dir=tmp_path / "out", **EXACT
            )

    in_a_fork(work)
    assert list(tmp_path.iterdir()) == [folder]


SIZES = {"30000": 30_000, "30KB": 30_000, 30_000: 30_000, "0.00003 GB": 30_000}


@pytest.mark.parametrize("size", [*SIZES, 0, -1, "0", "-1", "1|0", "", "5 apples", "0GB", "nan"])
def test_sizes_of_shards(size, tmp_path):
    source = make(tmp_path / "source", "llama")
    for number, start in enumerate((source, tiny_model("llama"))):
        convert = partial(
            convert_checkpoint, start, "gated", output_dir=tmp_path / f"out{number}", max_shard_size=size
        )
        if size in SIZES:
            assert len(list(convert().glob("*.safetensors"))) > 2
        else:
            with pytest.raises(NormSwapError, match="no size"):
                convert()


# what lies where a conversion is prepared, words of the refusal, or none where a killed run left it
LEFT = {
    "somebody's folder": (lambda scratch: occupy(scratch / "mine.txt"), "mine.txt"),
    "somebody's file": (lambda scratch: occupy(scratch), "FileExistsError"),
    "an empty folder": (lambda scratch: occupy(scratch, None), None),
    "a killed run": (lambda scratch: (occupy(scratch / "new" / "a"), occupy(scratch / "edited-0")), None),
    "read-only folders": (
        lambda scratch: (occupy(scratch / "new" / "a" / "b"), (scratch / "new" / "a").chmod(0o555)),
        None,
    ),
    "the target, killed between two renamings": (lambda scratch: occupy(scratch / "old" / "config.json"), "exists"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_beside_the_target(what, tmp_path):
    prepare, words = LEFT[what]
    source, target, scratch = make(tmp_path / "source", "llama"), tmp_path / "out", tmp_path / ".out.incomplete"
    prepare(scratch)
    before = fingerprint(tmp_path)
    if words is None:
        convert_checkpoint(source, "gated", output_dir=target)
        assert not scratch.exists() and target.exists()
        return
    with pytest.raises(NormSwapError, match=words):
        convert_checkpoint(source, "gated", output_dir=target)
    moved = {
        key.replace("out/", ".out.incomplete/old/") if key.startswith("out/") else key: one
        for key, one in fingerprint(tmp_path).items()
    }
    assert moved == before and target.exists() == (words == "exists")


def test_two_at_once_without_overwrite(tmp_path):
    """One of them writes, the other is refused, whichever comes first."""
    source, target = make(tmp_path / "source", "llama"), tmp_path / "out"
    with folders.appearing(target) as new:
        with pytest.raises(NormSwapError, match="another process"):
            convert_checkpoint(source, "post", output_dir=target)
        occupy(new / "config.json", "{}")
    with pytest.raises(NormSwapError, match="exists"), folders.appearing(target):
        pass
    assert (target / "config.json").read_text() == "{}"


def files_beside(folder: Path):
    """A folder with all that may lie beside weights; returns what a conversion takes over."""
    taken = ["LICENSE", "1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "tok.py"]
    taken += ["modules.json", "custom_generate/generate.py", "tokenizer_config.json", "vocab.txt"]
    left = ["all_results.json", "eval_results.json", "fidelity.json", "run.json", "history.json", "curves.png"]
    left += ["trainer_state.json", "training_args.bin", "optimizer.pt", "checkpoint-7/model.safetensors", "runs/a"]
    left += [
        "base_model/config.json",
        "rng_state_0.pth",
        "onnx/model.onnx",
        "tf_model.h5",
        ".git/config",
        "placements.py",
    ]
    left += ["wandb/x", "__pycache__/tok.pyc", "1_Pooling/.hidden"]
    for name in taken + left:
        occupy(folder / name, '{"auto_map": {"AutoTokenizer": ["tok.Tok", null]}}' if "config.json" in name else "x")
    return taken


def in_the_cache(folder: Path) -> list[str]:
    """Move a folder to where the Hub's cache would have it, with links to its blobs."""
    home = folder.parent / "models--me--it"
    (home / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
        path.rename(home / "blobs" / str(number))
        path.symlink_to(os.path.join("..", "..", "blobs", str(number)))
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / "abc")
    folder.symlink_to(home / "snapshots" / "abc")
    return ["vocab.txt"]


def strange_files(folder: Path) -> list[str]:
    """What is no file of the folder: links that lead out of it or around in it, pipes, devices."""
    occupy(folder.parent / "secret" / "id_rsa")
    (folder / "merges.txt").symlink_to(folder.parent / "secret" / "id_rsa")
    (folder / "assets").symlink_to(folder.parent / "secret")
    (folder / "loop").symlink_to(".")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "zero.txt").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    occupy(folder / "sub" / "a.txt")
    (folder / "inside.txt").symlink_to("sub/a.txt")
    return ["vocab.txt", "sub/a.txt", "inside.txt"]


def read_only(folder: Path) -> list[str]:
    occupy(folder / "sub" / "a.txt")
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    return ["vocab.txt", "sub/a.txt"]


BESIDE = {one.__name__: one for one in (files_beside, in_the_cache, strange_files, read_only)}


@pytest.mark.parametrize("what", BESIDE)
def test_files_beside_the_weights(what, tmp_path):
    """A conversion takes over what belongs to the model, as new files; reverting takes over the same."""
    source = make(tmp_path / "source", "llama")
    taken = set(BESIDE[what](source))
    written = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"}
    folder = source
    for target, step in (
        (tmp_path / "out", partial(convert_checkpoint, placement="post")),
        (tmp_path / "back", revert_checkpoint),
    ):
        step(folder, output_dir=target)
        found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
        code = {path.name for path in Path(folders.__file__).parent.glob("modeling/*.py")} | {"README.md"}
        assert found - written - (code if target.name == "out" else set()) == taken
        assert not any(path.is_symlink() for path in target.rglob("*"))
        for path in (target, *(path for path in target.rglob("*") if "model.safetensors" not in path.name)):
            assert path.stat().st_mode & 0o200, path
        folder = target
    if what == "read_only":
        for path in [source, *source.rglob("*")]:
            path.chmod(0o755)


@pytest.mark.parametrize("fields", [{}, {"max_length": 33, "temperature": 0.7, "do_sample": True}])
@pytest.mark.parametrize(
    "text", [None, "{", '{"eos_token_id": 5, "top_k": 3}', '{"do_sample": false, "temperature": 0.6}']
)
def test_generation_settings_stay(text, fields, tmp_path):
    """Wherever old and new Transformers have them."""
    source = make(tmp_path / "source", "gpt2")
    path = source / "generation_config.json"
    path.unlink() if text is None else path.write_text(text)
    edit_json(source / "config.json", **fields)
    convert_checkpoint(source, "post", output_dir=tmp_path / "disk")
    convert_checkpoint(source, "post").save_pretrained(tmp_path / "memory")
    assert_same(tmp_path / "disk", tmp_path / "memory", "AutoModelForCausalLM")
    written = json.loads((tmp_path / "disk" / "generation_config.json").read_text())
    expected = fields if text in (None, "{") else json.loads(text)
    assert written | expected == written


def test_what_is_harmless_is_no_reason_to_refuse(tmp_path):
    """Text beside the weights that looks like code of others, long and deep JSON, fields of one's own."""
    source = make(tmp_path / "source", "llama", shards=2, tie_word_embeddings=True)
    kept = {
        "examples.json": '[{"type": "dialogue -- casual"}, {"auto_map": "x--y"}]',
        "tokenizer_config.json": '{"extra": {"type": "a--b"}, "custom_pipelines": "x -- y"}',
        "train.json": "[" + " " * (shards.LONGEST_JSON + 1) + "]",
        "deep.json": "[" * 200_000,
        "broken.json": "{",
        "1_Pooling/config.json": '{"type": "a--b"}',
    }
    for name, text in kept.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    edit_json(source / "config.json", n_train_labels=123_456, keywords_label_count=50_000, notes={"layer": 10**6})
    target = convert_checkpoint(source, "post", output_dir=tmp_path / "out")
    assert all((target / name).read_text() == text for name, text in kept.items())
    on_disk = modeling_auto.AutoModelForCausalLM.from_pretrained(target)
    in_memory = convert_checkpoint(source, "post")
    logits = on_disk(**tiny_batch()).logits
    assert torch.equal(logits, in_memory.eval()(**tiny_batch()).logits)
    assert not torch.allclose(
        logits, modeling_auto.AutoModelForCausalLM.from_pretrained(source)(**tiny_batch()).logits
    )


def test_a_checkpoint_s_own_files_are_replaced(tmp_path):
    """Those of sentence-transformers and of tokenizers, too, also when they changed since."""
    source, target = make(tmp_path / "source", "bert"), tmp_path / "out"
    names = (
        "modules.json config_sentence_transformers.json sentence_bert_config.json 1_Pooling/config.json tokenizer.json"
    )
    for name in [*names.split(), "sentencepiece.bpe.model", "latest"]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    convert_checkpoint(source, "pre", output_dir=target)
    assert not (target / "latest").exists()
    for name in names.split():
        (target / name).write_text('{"changed": 1}')
    convert_checkpoint(source, "deepnorm", output_dir=target, overwrite=True)
    assert all((target / name).read_text() == "{}" for name in names.split())
    assert json.loads((target / "config.json").read_text())["norm_placement"] == "deepnorm"


def in_a_fork(work, kill_after: float | None = None, kill_at: int | None = None) -> tuple[float, int]:
    """Run `work` in a process that has everything imported, killed after some seconds or at one of its file operations;
    returns how long it took and, where it was not killed, how many file operations there were."""
    start = time.perf_counter()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status, operations = 1, 0

        def count(event: str, arguments) -> None:
            nonlocal operations
            if event == "open" or event.startswith("os."):
                operations += 1
                if operations == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            sys.addaudithook(count)
            work()
            os.write(writer, str(operations).encode())
            status = 0
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(writer)
    with open(reader) as report:
        operations = int(report.read() or 0)
    assert kill_after is not None or kill_at is not None or status == 0
    return time.perf_counter() - start, operations


JOBS = {
    "convert": lambda source, model, target: convert_checkpoint(
        source, "deepnorm", output_dir=target, overwrite=True, **EXACT
    ),
    "revert": lambda source, model, target: revert_checkpoint(source, output_dir=target, overwrite=True),
    "save": lambda source, model, target: convert_checkpoint(
        model, "deepnorm", output_dir=target, overwrite=True, **EXACT
    ),
}


@pytest.mark.parametrize(
    "moments, by_clock", [(4, False), *(pytest.param(20, clock, marks=pytest.mark.slow) for clock in (False, True))]
)
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_any_moment(job, moments, by_clock, tmp_path):
    """The output is absent or complete, the source as it was, and the next run starts over cleanly. Moments are file
    operations, or times of the clock, which fall where the machine lets them."""
    stock = make(tmp_path / "stock", "llama", shards=3)
    source = convert_checkpoint(stock, "post", output_dir=tmp_path / "source")
    model = convert_checkpoint(stock, "post")
    before = fingerprint(source)
    expected, target = tmp_path / "expected", tmp_path / "out"

    def work(target):
        return JOBS[job](source, model, target)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads do not survive a fork
    try:
        work(expected)
        tries = [in_a_fork(partial(work, tmp_path / f"try{number}")) for number in range(2)]
        duration, operations = map(min, zip(*tries))
        chance, absent = random.Random(0), 0
        for moment in range(moments):
            there = target.exists()
            part = (moment + chance.random()) / moments
            when = {"kill_after": duration * part} if by_clock else {"kill_at": 1 + int(operations * part)}
            in_a_fork(lambda: work(target), **when)
            assert fingerprint(source) == before
            absent += not target.exists()
            if target.exists():
                assert_same(target, expected, "AutoModelForCausalLM")
            elif there:  # killed between two renamings: the old folder comes back with the next run
                assert_same(tmp_path / ".out.incomplete" / "old", expected, "AutoModelForCausalLM")
            if moment % 2:
                shutil.rmtree(target, ignore_errors=True)
        assert absent or by_clock
        in_a_fork(lambda: work(target))
    finally:
        torch.set_num_threads(threads)
    assert_same(target, expected, "AutoModelForCausalLM")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["post", "admin", "resi_dual", "sandwich", "gated"])
@pytest.mark.parametrize("case", TINY)
def test_every_architecture(case, placement, tmp_path):
    run_chain(tmp_path, case, None, 2, [(placement, {})], {})


REFUSED = {  # case, placement, options, what is done to the folder, words
    "experts that would change": ("mixtral", "post", CALIBRATED, None, "in parts"),
    "quantised weights": (
        "llama",
        "post",
        {},
        lambda folder: edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised",
    ),
    "inside the source": ("llama", "post", {"output_dir": "source/out"}, None, "inside the source"),
    "the source itself": (
        "llama",
        "post",
        {"output_dir": "source", "overwrite": True},
        None,
        "is or holds the source",
    ),
    "a name that leaves no room for ours": ("llama", "post", {"output_dir": "new/" + "n" * 250}, None, "too long"),
    "a name that is too long": ("llama", "post", {"output_dir": "n" * 300}, None, "too long"),
    "weights that are missing, in new folders": (
        "llama",
        "post",
        {"output_dir": "new/folders/out"},
        lambda folder: rename_keys(folder, lambda key: key.replace("up_proj", "up")),
        "lacks",
    ),
    "another way to load": ("llama", "post", {"device_map": "auto"}, None, "device_map"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_leave_nothing(reason, tmp_path):
    case, placement, options, prepare, words = REFUSED[reason]
    source = make(tmp_path / "source", case)
    if prepare is not None:
        prepare(source)
    before = fingerprint(source)
    with pytest.raises(NormSwapError, match=words):
        convert_checkpoint(source, placement, **{**options, "output_dir": tmp_path / options.get("output_dir", "out")})
    assert fingerprint(source) == before and list(tmp_path.iterdir()) == [source]


def make_gguf(path: Path, model, without: str = ""):
    """A LLaMA model as a GGUF file, with a tokenizer, and `without` one tensor."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"t{index}" for index in range(config.vocab_size - 3))])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([2, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "embed_tokens": "token_embd",
        "lm_head": "output",
        "model.norm": "output_norm",
        "model.": "",
        "layers": "blk",
    }
    names |= {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for key, tensor in model.state_dict().items():
        for old, new in names.items():
            key = key.replace(old, new)
        if key != without:
            writer.add_tensor(key, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_in_safetensors_out(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "source").mkdir()
    model = tiny_model("llama", tie_word_embeddings=False)
    make_gguf(tmp_path / "source" / "tiny.gguf", model)
    convert_checkpoint(tmp_path / "source", "sandwich", gguf_file="tiny.gguf", output_dir=tmp_path / "out")
    tensors = weights(tmp_path / "out")
    for key in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):  # attention is stored in another order
        assert torch.equal(tensors[key], model.state_dict()[key])
    assert (tmp_path / "out" / "tokenizer.json").is_file() and "model.layers.2.ffn_output_norm.weight" in tensors


UP = "blk.1.ffn_up.weight"
DAMAGED = {  # what is done to a GGUF file, words of the refusal
    "lacks a tensor": (lambda path, model: make_gguf(path, model, UP), "lacks 1 tensors"),
    "a flipped bit in a name": (
        lambda path, model: flip(path, path.read_bytes().index(UP.encode()) + 6, 0),
        "lacks 1 tensors",
    ),
    "truncated": (lambda path, model: os.truncate(path, 20_000), "cannot be used"),
    "no GGUF": (lambda path, model: path.write_text("x" * 9_000), "cannot be used"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_gguf_files_are_refused(damage, tmp_path):
    pytest.importorskip("gguf")
    prepare, words = DAMAGED[damage]
    path, model = tmp_path / "source" / "tiny.gguf", tiny_model("llama", tie_word_embeddings=False)
    path.parent.mkdir()
    make_gguf(path, model)
    prepare(path, model)
    for options in ({}, {"output_dir": tmp_path / "out"}):
        with pytest.raises(NormSwapError, match=words):
            convert_checkpoint(path.parent, "post", gguf_file="tiny.gguf", **options)
    assert list(tmp_path.iterdir()) == [path.parent]
