"""Where converted models are used: by tools that know nothing of norm placements, on a folder that was saved.

Pipelines, `generate` and PEFT are in `test_ecosystem.py` and `test_peft.py`. Tests of packages that are not installed are
skipped; `make test-uses` installs them.
"""

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers
from test_ecosystem import PER_FAMILY, layers_of
from tiny_models import LAYERS, MASKED, TARGETS, tiny_batch, tiny_model
from torch.export import Dim
from transformers import AttentionInterface, AutoModel, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from typer.testing import CliRunner

from hf_normswap import NormSwapError, convert_checkpoint, revert_checkpoint
from hf_normswap.cli import app
from recipes.assets import minilm, smollm2

ROOT = Path(__file__).parent.parent
SENTENCES = ["A man is eating food.", "The girl is carrying a baby.", "Norms moved, and nothing else did."]
DYNAMIC = {0: Dim("batch"), 1: Dim("sequence", max=64)}
EXPORTED = [("bert", target) for target in ("post", "pre", "gated", "resi_dual")]


def export_case(case, target):
    """A converted encoder, the example that it is exported with, and others of other sizes."""
    model = convert_checkpoint(tiny_model(case), TARGETS[target])
    batches = [tiny_batch(), tiny_batch(3, 14, 4), tiny_batch(5, 33, 1)]
    return model, batches[0], batches


def largest(found, expected):
    """The largest difference, relative to the largest value where that exceeds one."""
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1)).item()


@pytest.mark.parametrize(
    "case, target",
    [
        EXPORTED[-1],
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [*EXPORTED[:-1], ("llama", "resi_dual")]),
    ],
)
def test_torch_export_with_sizes_that_vary(case, target):
    model, example, batches = export_case(case, target)
    options = {} if case in MASKED else {"use_cache": False}
    shapes = {**dict.fromkeys(example, DYNAMIC), **dict.fromkeys(options)}
    program = torch.export.export(model, (), {**example, **options}, dynamic_shapes=shapes).module()
    with torch.no_grad():
        for batch in batches:
            assert largest(program(**batch, **options).logits, model(**batch).logits) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case, target", EXPORTED)
def test_onnx_export(case, target, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, example, batches = export_case(case, target)
    shapes = dict.fromkeys(example, DYNAMIC)
    torch.onnx.export(
        model, (), tmp_path / "model.onnx", kwargs=example, dynamic_shapes=shapes, dynamo=True, verbose=False
    )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch in batches:
        found = torch.from_numpy(session.run(None, {key: value.numpy() for key, value in batch.items()})[0])
        with torch.no_grad():
            assert largest(found, model(**batch).logits) <= 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Real checkpoints, converted and saved: MiniLM in one and two streams, SmolLM2 with gates."""
    folder = tmp_path_factory.mktemp("folders")
    for name, source, target in (
        ("minilm-pre", minilm(), "pre"),
        ("minilm-resi_dual", minilm(), "resi_dual"),
        ("smollm2-gated", smollm2(), "gated"),
    ):
        result = CliRunner().invoke(app, ["convert", str(source), str(folder / name), "--placement", target])
        assert result.exit_code == 0, result.output
    return folder


def environment(folder):
    """Of a process with modules of its own, without this repository on its path."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": ""}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm-pre", "minilm-resi_dual"])
def test_sentence_transformers(name, folders, tmp_path):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    folder = folders / name
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None].float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))

    sentences = SentenceTransformer(str(folder), device="cpu")
    assert type(sentences[0].auto_model) is type(model)
    assert torch.allclose(torch.from_numpy(sentences.encode(SENTENCES)), expected, atol=1e-6)
    sentences.save(str(tmp_path / "again"))

    script = (
        "import sys, torch\nsys.modules['hf_normswap'] = None\nfrom sentence_transformers import SentenceTransformer\n"
        f"model = SentenceTransformer({str(tmp_path / 'again')!r}, device='cpu', trust_remote_code=True)\n"
        f"torch.save(model.encode({SENTENCES!r}, convert_to_tensor=True), {str(tmp_path / 'found.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=environment(tmp_path), stdin=subprocess.DEVNULL)
    assert torch.allclose(torch.load(tmp_path / "found.pt"), expected, atol=1e-6)


TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
QUESTIONS = [
    ("The capital of France is", [" Paris", " Berlin"], 0),
    ("The capital of Germany is", [" Madrid", " Berlin"], 1),
    ("The sun rises in the", [" east", " spoon"], 0),
    ("Two plus two is", [" purple", " four"], 1),
]


@pytest.mark.slow
def test_lm_evaluation_harness(folders, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [dict(zip(("question", "choices", "answer"), row)) for row in QUESTIONS]
    (tmp_path / "capitals.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "capitals.yaml").write_text(TASK.format(data=tmp_path / "capitals.json"))
    given = f"pretrained={folders / 'smollm2-gated'},trust_remote_code=True"
    command = ["-m", "lm_eval", "--model", "hf", "--model_args", given, "--tasks", "capitals", "--device", "cpu"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results"), "--batch_size", "2"]
    subprocess.run([sys.executable, *command], check=True, env=environment(tmp_path), cwd=tmp_path)
    (results,) = (tmp_path / "results").rglob("results*.json")
    assert json.loads(results.read_text())["results"]["capitals"]["acc,none"] == 1.0


@pytest.mark.slow
def test_transformers_serve(folders, tmp_path):
    pytest.importorskip("fastapi"), pytest.importorskip("uvicorn"), pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # It looks the class up in `transformers` by the name in the config, and only there; an Auto class leads on.
    name = str(shutil.copytree(folders / "smollm2-gated", tmp_path / "served"))
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    config["architectures"] = ["AutoModelForCausalLM"]
    (tmp_path / "served" / "config.json").write_text(json.dumps(config))
    start = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", start, "serve", name, "--trust-remote-code", "--device", "cpu"]
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": name, "messages": [question], "max_tokens": 12, "temperature": 0, "stream": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with subprocess.Popen([*command, "--port", str(port)], env=environment(tmp_path), cwd=tmp_path) as server:
        try:
            for _ in range(150):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    assert server.poll() is None
                    time.sleep(1)
            answer = json.load(urllib.request.urlopen(request, timeout=120))
        finally:
            server.terminate()
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gated", "post", "resi_dual"])
def test_torchao_int8_weights(target, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    stock = tiny_model("llama", initializer_range=0.1)
    converted, batch = convert_checkpoint(stock, target), tiny_batch(padding=0)
    converted.save_pretrained(tmp_path / "converted")
    load = transformers.AutoModelForCausalLM.from_pretrained
    settings = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    quantised = load(tmp_path / "converted", quantization_config=settings)
    assert type(quantised) is type(converted)
    assert type(layers_of(quantised)[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    quantised.save_pretrained(tmp_path / "quantised")
    by_hand = copy.deepcopy(converted)
    quantize_(by_hand, Int8WeightOnlyConfig())
    with torch.no_grad():
        logits = quantised(**batch).logits
        assert torch.equal(load(tmp_path / "quantised")(**batch).logits, logits)
        for found in (logits, by_hand(**batch).logits):
            assert torch.cosine_similarity(found, converted(**batch).logits, dim=-1).min() > 0.99
        quantize_(stock, Int8WeightOnlyConfig())
        afterwards = convert_checkpoint(stock, target)
        assert torch.equal(afterwards(**batch).logits, by_hand(**batch).logits)
        assert torch.equal(revert_checkpoint(afterwards)(**batch).logits, stock(**batch).logits)
    for model in (stock, load(tmp_path / "quantised")):
        with pytest.raises(NormSwapError, match="quantised.*convert before quantising"):
            convert_checkpoint(model, "sandwich", warm_start="calibrated", calibration=[batch])


class Float32Lookalike(torch.nn.Parameter):
    """As torchao's tensors: a subclass that says that it is float32, and takes no arithmetic."""


def test_weights_of_unknown_classes_are_quantised_to_a_warm_start():
    model = tiny_model("llama")
    projection = layers_of(model)[0].mlp.down_proj
    projection.weight = Float32Lookalike(projection.weight.detach())
    with pytest.raises(NormSwapError, match="quantised.*convert before quantising"):
        convert_checkpoint(model, "post", warm_start="calibrated", calibration=[tiny_batch()])


# What vLLM asks of a model for its Transformers backend (documentation and source of 0.33): `auto_map` with `AutoModel`,
# `is_backend_compatible()`, a base model that is made on the meta device and hands unknown arguments through to attention,
# which is called by way of `ALL_ATTENTION_FUNCTIONS` with the number of the layer, and weights on disk that are all
# parameters or saved buffers.
@pytest.mark.parametrize("target", ["post", "resi_dual"])
@pytest.mark.parametrize("case", [*PER_FAMILY, "mixtral"])
def test_what_vllm_asks_for(case, target):
    stock = tiny_model(case, "AutoModel")
    converted = convert_checkpoint(stock, TARGETS[target])
    assert "AutoModel" in converted.config.auto_map
    assert converted.is_backend_compatible() == type(stock).is_backend_compatible()
    if not stock.is_backend_compatible():
        pytest.skip(f"{type(stock).__name__} calls attention in its own way")
    assert converted.tp_plan == stock.tp_plan
    calls = []

    def attention(module, query, key, value, attention_mask, attention_instances=None, **kwargs):
        calls.append((attention_instances, module.layer_idx))
        kwargs.pop("softcap", None)  # Gemma-2's, which this one cannot do
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("probe", attention)
    config = copy.deepcopy(converted.config)
    config._attn_implementation = "probe"
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    saved = converted.state_dict()
    assert saved.keys() == model.state_dict().keys()  # parameters and buffers that are saved

    model = AutoModel.from_config(config).eval()
    model.load_state_dict(saved)
    ids = tiny_batch(batch=1, padding=0)["input_ids"]
    given = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "use_cache": False}
    with torch.no_grad():
        model(**given, return_dict=False, attention_instances="theirs")
    assert calls == [("theirs", index) for index in range(LAYERS)]
