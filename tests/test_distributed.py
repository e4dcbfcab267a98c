"""Several processes do what one does. The processes that tests start run functions of this file, too."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate.commands.launch as launch
import finetune_clm
import finetune_glue
import pytest
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from matplotlib.figure import Figure
from safetensors.torch import load_file
from test_finetune_glue import rows, save_checkpoint, write_csv
from tiny_models import TARGETS, TINY, head_of, tiny_batch, tiny_model
from transformers import AutoModelForSequenceClassification, HfArgumentParser

from hf_normswap import NormSwapError, convert_checkpoint, heal, parameter_groups, training

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "recipes" / "configs"
ONE_OF_EACH_FAMILY = ("bert", "megatron-bert", "gpt2", "llama", "gemma2", "opt", "opt-post")
NAMES = ("one_cpu", "two_cpus", "one_gpu", "multi_gpu", "multi_node", "fsdp2", "zero2", "zero3")
WITHOUT_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0)


# --- processes --------------------------------------------------------------------------------------------------------


def finetune(*arguments):
    """What `python recipes/finetune_glue.py` does, in this process."""
    training.plot_history = lambda history: Figure()  # most of the time
    AcceleratorState._reset_state(True), GradientState._reset_state()
    kinds = [finetune_glue.ModelArguments, finetune_glue.DataArguments, finetune_glue.RunArguments]
    finetune_glue.run(*HfArgumentParser(kinds).parse_args_into_dataclasses(list(arguments)))
    AcceleratorState._reset_state(True), GradientState._reset_state()


def start(command, *arguments, **environment):
    """Run a command as from a shell in the root of the repository, on CPUs and with the python of the tests."""
    modules = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}
    words = shlex.split(command.replace("accelerate launch", "accelerate"))
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    found = [sys.executable, "-m", modules[words[0]], *words[1:], *arguments]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **environment, **settings}
    done = subprocess.run(found, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def in_two_processes(*calls, **environment):
    """Call functions of this file in two processes: a name and arguments for each."""
    command = f"ACCELERATE_USE_CPU=1 torchrun --standalone --nproc_per_node 2 {shlex.quote(__file__)}"
    start(command, json.dumps(calls), **environment)


def as_if_on_gpus():
    """Accelerate takes FSDP and ZeRO for GPUs only; their code runs on CPUs, too."""
    del os.environ["ACCELERATE_USE_CPU"]
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)


def launched(name, *options):
    """The arguments of `accelerate launch` with a file, and what it makes of them."""
    parser = launch.launch_command_parser()
    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), *options]
    return launch._validate_launch_command(parser.parse_args([*words, "recipe.py"]))[0]


def history(folder):
    return json.loads((folder / "history.json").read_text())


def assert_same_course(found, expected):
    """The same steps, learning rates and numbers of samples, and the same losses and metrics but for rounding."""
    for folder in (found, expected):
        assert all(math.isfinite(value) for entry in history(folder) for value in entry.values())
    assert [entry.keys() for entry in history(found)] == [entry.keys() for entry in history(expected)]
    exact = ("step", "learning_rate", "samples")
    for one, other in zip(history(found), history(expected)):
        assert [one[key] for key in exact if key in one] == [other[key] for key in exact if key in other]
        assert one == pytest.approx(other, rel=0, abs=1e-4)
    results = [json.loads((folder / "all_results.json").read_text()) for folder in (found, expected)]
    assert results[0] == pytest.approx(results[1], rel=0, abs=1e-4) and results[0]["samples"] == 13


def assert_same_bits(found, expected):
    tensors = [load_file(folder / "model.safetensors") for folder in (found, expected)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][key], value) for key, value in tensors[1].items())
    assert history(found) == history(expected)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Arguments for a tiny BERT without dropout, 19 rows to train on and 13 to evaluate on."""
    folder = tmp_path_factory.mktemp("distributed")
    files = [
        write_csv(folder / f"{name}.csv", rows(count, seed=count)) for name, count in (("train", 19), ("dev", 13))
    ]
    checkpoint = save_checkpoint(folder / "checkpoint", "bert", **WITHOUT_DROPOUT)
    found = ["--model_name_or_path", checkpoint, "--train_file", files[0], "--validation_file", files[1]]
    return [*found, "--learning_rate", "1e-3", "--num_train_epochs", "2"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# --- the files --------------------------------------------------------------------------------------------------------


def header_commands(name):
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    header = "\n".join(line[1:] for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")])
    return re.findall(r"^ {3}(\S.*)$", header.replace("\\\n", " "), re.MULTILINE)


def test_each_file_is_here():
    assert {path.stem for path in CONFIGS.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_config(name, monkeypatch):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert max(map(len, text.splitlines())) < 120
    load_config_from_file(str(CONFIGS / f"{name}.yaml"))  # refuses fields that it does not know
    args, fields = launched(name), yaml.safe_load(text)
    assert fields.pop("compute_environment") == "LOCAL_MACHINE"
    kind = {"FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed", "MULTI_GPU": "multi_gpu", "NO": "use_cpu"}
    assert getattr(args, kind[fields.pop("distributed_type")]) == (name != "one_gpu")
    for key in ("fsdp_config", "deepspeed_config"):
        fields |= fields.pop(key, {})
    assert {key: getattr(args, key) for key in fields} == fields  # none is ignored

    parser, commands, parsed = launch.launch_command_parser(), header_commands(name), []
    assert f"accelerate launch --config_file recipes/configs/{name}.yaml " in commands[0]
    for words in map(shlex.split, commands):
        script = next(index for index, word in enumerate(words) if word.endswith(".py"))
        if "launch" in words:
            assert parser.parse_args(words[words.index("launch") + 1 :]).training_script == words[script]
        assert (ROOT / words[script]).is_file()
        recipe = {"finetune_glue": finetune_glue, "finetune_clm": finetune_clm}[Path(words[script]).stem]
        monkeypatch.setattr(recipe, "run", lambda *arguments: parsed.append(arguments))
        monkeypatch.setattr(sys, "argv", words[script:])
        recipe.main()
    assert len(parsed) == len(commands)


def test_what_the_processes_are_told(monkeypatch):
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    environment = prepare_multi_gpu_env(launched("fsdp2", "--num_processes", "2"))
    told = {"VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "CPU_RAM_EFFICIENT_LOADING": "false"}
    assert told.items() <= {key[5:]: value for key, value in environment.items() if key.startswith("FSDP_")}.items()
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in environment
    for stage in "23":
        environment = zero_environment(stage)
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == stage
        assert environment["ACCELERATE_GRADIENT_CLIPPING"] == "auto"
        assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environment
    environment = prepare_multi_gpu_env(args := launched("multi_node", "--machine_rank", "1"))
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert args.rdzv_endpoint == "10.0.0.1:29500"


def zero_environment(stage, *options):
    args = launched(f"zero{stage}", *options)
    args.deepspeed_fields_from_accelerate_config = ""
    return prepare_deepspeed_cmd_env(args)[1]


# --- two processes are one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, batches, drop_last", [(4, 1, False), (3, 2, False), (2, 3, False), (3, 2, True)])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_row_counts_once(size, batches, drop_last, processes):
    for total in range(1, 40):
        loader = SimpleNamespace(batch_size=size, drop_last=drop_last, dataset=range(total))
        kept = total // (size * processes) * size * processes if drop_last else total
        weights = {}  # of each row of the epoch, in each optimizer step
        for number in range(math.ceil(kept / (size * processes))):
            for process in range(processes):
                accelerator = SimpleNamespace(
                    num_processes=processes, process_index=process, gradient_accumulation_steps=batches
                )
                batch, weight = training.share_of_step(accelerator, loader, number)
                if weight:  # else a repeated row, so that the process has something to do
                    first = (number * processes + process) * size
                    shares = dict.fromkeys(range(first, first + batch.stop), weight / batch.stop / processes / batches)
                    weights.setdefault(number // batches, {}).update(shares)
        assert [row for step in weights.values() for row in step] == list(range(kept))
        assert all(step == pytest.approx(dict.fromkeys(step, 1 / len(step))) for step in weights.values())


def test_one_cpu(options, tmp_path):
    finetune(*options, "--placement", "gated", "--output_dir", str(tmp_path / "here"))
    command = header_commands("one_cpu")[0].partition(" --model_name_or_path")[0]
    start(command, *options, "--placement", "gated", "--output_dir", str(tmp_path / "launched"))
    assert_same_course(tmp_path / "launched", tmp_path / "here")
    assert json.loads((tmp_path / "launched" / "run.json").read_text())["processes"] == 1


@pytest.mark.parametrize("number", [0, 1], ids=["accelerate", "torchrun"])
def test_the_commands_for_two_cpus(number, options, tmp_path):
    more = [
        *options,
        "--placement",
        "pre",
        "--eval_steps",
        "1",
        "--test_file",
        options[options.index("--train_file") + 1],
    ]
    finetune(*more, "--output_dir", str(tmp_path / "one"), "--per_device_train_batch_size", "8")
    command = header_commands("two_cpus")[number].partition(" --model_name_or_path")[0]
    start(command, *more, "--output_dir", str(tmp_path / "two"), "--per_device_train_batch_size", "4")
    assert_same_course(tmp_path / "two", tmp_path / "one")
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    assert [entry["step"] for entry in history(tmp_path / "two") if "train_loss" in entry] == [1, 2, 3, 4, 5, 6]
    predictions = [(tmp_path / name / "test.csv").read_text() for name in ("one", "two")]
    assert predictions[0] == predictions[1] and len(predictions[0].splitlines()) == 1 + 19


ACCUMULATED = ["--gradient_accumulation_steps", "2", "--placement", "resi_dual", "--auxiliary_loss", "0.3"]
SAVED = ["--placement", "pre", "--num_train_epochs", "3", "--save_steps", "4", "--early_stopping_patience", "9"]


def test_accumulation_resuming_and_parameters(options, tmp_path):
    halves = [*options, "--per_device_train_batch_size", "4", "--output_dir"]
    saved = [*halves[:-1], *SAVED, "--output_dir"]
    in_two_processes(
        ["finetune", *halves, str(tmp_path / "two"), *ACCUMULATED],
        ["finetune", *saved, str(tmp_path / "whole")],
        [
            "finetune",
            *saved,
            str(tmp_path / "resumed"),
            "--resume_from_checkpoint",
            str(tmp_path / "whole/checkpoint-4"),
        ],
        ["compare_gradients"],
    )
    finetune(*options, "--per_device_train_batch_size", "8", "--output_dir", str(tmp_path / "one"), *ACCUMULATED)
    assert_same_course(tmp_path / "two", tmp_path / "one")
    assert [entry["step"] for entry in history(tmp_path / "two") if "train_loss" in entry] == [1, 2, 3, 4]
    finetune(*options, "--per_device_train_batch_size", "2", *ACCUMULATED[2:], "--gradient_accumulation_steps", "8",
             "--output_dir", str(tmp_path / "small"))  # fmt: skip
    assert_same_course(tmp_path / "small", tmp_path / "one")
    assert_same_bits(tmp_path / "resumed", tmp_path / "whole")


def compare_gradients():
    """In each process: DDP finds a gradient for every parameter, and it is that of one process."""
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    rank, batch = torch.distributed.get_rank(), tiny_batch(batch=4, padding=0)
    half = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
    for case in ONE_OF_EACH_FAMILY:
        for name, target in TARGETS.items():
            model = convert_checkpoint(tiny_model(case), target)
            model(**batch).logits.pow(2).mean().backward()
            expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
            model.zero_grad()
            parallel = torch.nn.parallel.DistributedDataParallel(model)
            for _ in range(2):  # a parameter without a gradient raises in the second step
                model.zero_grad()
                parallel(**half).logits.pow(2).mean().backward()
            scale = max(gradient.abs().max() for gradient in expected.values())
            for key, parameter in model.named_parameters():
                assert (parameter.grad - expected[key]).abs().max() <= 1e-4 * scale, (case, name, key)


@pytest.mark.parametrize("case", TINY)
def test_each_parameter_is_in_a_group_and_vectors_do_not_decay(case):
    stock = tiny_model(case)
    for target in TARGETS.values():
        model = convert_checkpoint(stock, target)
        groups = parameter_groups(stock, model, 1e-3, weight_decay=0.1)
        grouped = [parameter for group in groups for parameter in group["params"]]
        assert len(grouped) == len(set(grouped)) and set(grouped) == set(model.parameters())
        for group in groups:
            assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] == 0.1}


# --- sharded ----------------------------------------------------------------------------------------------------------

SHARDED = [("llama", "post"), ("llama", "resi_dual"), ("llama", "gated"), ("gpt2", "post"), ("bert", "pre"), ("bert", "deepnorm")]  # fmt: skip


def sharded_model(case, target):
    """A converted model, a batch with labels, and its Auto class. GPT-2 ties its embeddings."""
    auto, batch = head_of(case), tiny_batch(batch=4, padding=0)
    batch["labels"] = batch["input_ids"]
    if case == "bert":
        auto, batch["labels"] = "AutoModelForSequenceClassification", torch.tensor([0, 1, 1, 0])
    return convert_checkpoint(tiny_model(case, auto), target), batch, auto


def three_steps(model, batch, accelerator=None):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    accelerator = accelerator or SimpleNamespace(
        prepare=lambda *given: given,
        backward=torch.Tensor.backward,
        clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
        reduce=lambda loss, how: loss,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return model, losses


def shard(folder):
    """In each process: train sharded models, and save them."""
    for case, target in SHARDED:
        os.environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
        if case == "bert":
            os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "BertLayer"
        AcceleratorState._reset_state(True)
        accelerator = Accelerator()
        assert accelerator.is_fsdp2 and accelerator.num_processes == 2
        model, batch, _ = sharded_model(case, target)
        rank = accelerator.process_index
        half = {key: value[2 * rank : 2 * rank + 2] for key, value in batch.items()}
        model, losses = three_steps(model, half, accelerator)
        spread = [parameter for parameter in model.parameters() if hasattr(parameter, "full_tensor")]
        assert len(spread) == len(list(model.parameters())) and spread[-1].to_local().numel() < spread[-1].numel()
        training.write_model(accelerator, model, None, Path(folder) / f"{case}-{target}")
        (Path(folder) / f"{case}-{target}-{rank}.json").write_text(json.dumps(losses))


def test_fsdp2(options, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    environment = prepare_multi_gpu_env(launched("fsdp2", "--num_processes", "2", "--mixed_precision", "no"))
    environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "BertLayer"
    saved = [*options, "--per_device_train_batch_size", "4", *SAVED, "--output_dir"]
    in_two_processes(
        ["as_if_on_gpus"],
        ["finetune", *saved, str(tmp_path / "whole")],
        [
            "finetune",
            *saved,
            str(tmp_path / "resumed"),
            "--resume_from_checkpoint",
            str(tmp_path / "whole/checkpoint-4"),
        ],
        ["finetune", *saved, str(tmp_path / "bf16"), "--mixed_precision", "bf16"],
        ["shard", str(tmp_path)],
        **environment,
    )
    finetune(*options, "--per_device_train_batch_size", "8", *SAVED, "--output_dir", str(tmp_path / "one"))
    assert_same_course(tmp_path / "whole", tmp_path / "one")
    assert_same_bits(tmp_path / "resumed", tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "all_results.json").read_text())["step"] == 3  # not the last: the best
    logits = []
    for folder in ("whole", "one"):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder)
        with torch.no_grad():
            logits.append(model(**tiny_batch()).logits)
    assert torch.allclose(*logits, rtol=0, atol=1e-4)
    losses = [
        [entry["train_loss"] for entry in history(tmp_path / name) if "train_loss" in entry]
        for name in ("bf16", "one")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=0.05)
    for case, target in SHARDED:
        model, batch, auto = sharded_model(case, target)
        expected = three_steps(model, batch)[1]
        for rank in (0, 1):
            found = json.loads((tmp_path / f"{case}-{target}-{rank}.json").read_text())
            assert found == pytest.approx(expected, rel=0, abs=1e-4)
        loaded, info = getattr(transformers, auto).from_pretrained(
            tmp_path / f"{case}-{target}", output_loading_info=True
        )
        assert not any(info.values()) and type(loaded) is type(model)
        with torch.no_grad():
            assert torch.allclose(loaded(**batch).logits, model(**batch).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("given, wanted", [("auto", 0.05), (2.0, 2.0)])
def test_deepspeed_clips_as_asked_and_refuses_what_it_cannot(given, wanted, tmp_path):
    Accelerator()  # for the loggers
    config = {"gradient_clipping": given}
    plugin = SimpleNamespace(zero_stage=3, deepspeed_config=config, is_auto=lambda key: config[key] == "auto")
    accelerator = SimpleNamespace(num_processes=1, state=SimpleNamespace(deepspeed_plugin=plugin))
    model, loader = convert_checkpoint(tiny_model("llama"), "post"), torch.utils.data.DataLoader(range(8))
    args = training.RunArguments(str(tmp_path), max_grad_norm=0.05, early_stopping_patience=1)
    with pytest.raises(NormSwapError, match="ZeRO-2"):
        training.train(accelerator, model, loader, args, task="causal_lm")
    assert config["gradient_clipping"] == wanted
    with pytest.raises(NormSwapError, match="DDP or FSDP2"):
        heal(tiny_model("llama"), model, torch.ones(1, 8).long(), 1, accelerator=accelerator)


@pytest.mark.slow
@pytest.mark.parametrize("stage", "23")
def test_zero(stage, options, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    environment = zero_environment(stage, "--num_processes", "2", "--mixed_precision", "no") | {
        "DS_ACCELERATOR": "cpu"
    }
    saved = [
        "--placement",
        "post",
        "--max_grad_norm",
        "0.05",
        "--gradient_accumulation_steps",
        "2",
        "--save_steps",
        "2",
    ]
    halves = [*options, "--per_device_train_batch_size", "4", *saved, "--output_dir"]
    in_two_processes(
        ["as_if_on_gpus"],
        ["finetune", *halves, str(tmp_path / "whole")],
        [
            "finetune",
            *halves,
            str(tmp_path / "resumed"),
            "--resume_from_checkpoint",
            str(tmp_path / "whole/checkpoint-2"),
        ],
        **environment,
    )
    finetune(*options, "--per_device_train_batch_size", "8", *saved, "--output_dir", str(tmp_path / "one"))
    assert_same_course(tmp_path / "whole", tmp_path / "one")
    assert_same_bits(tmp_path / "resumed", tmp_path / "whole")


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    ["--gradient_checkpointing", "--mixed_precision bf16", pytest.param("--torch_compile", marks=pytest.mark.slow)],
)
def test_options(option, options, tmp_path):
    more = [*options, "--placement", "resi_dual", "--num_train_epochs", "10", "--output_dir"]
    finetune(*more, str(tmp_path / "with"), *option.split())
    finetune(*more, str(tmp_path / "without"))
    with_it, without = (
        [entry["train_loss"] for entry in history(tmp_path / name) if "train_loss" in entry]
        for name in ("with", "without")
    )
    assert sum(with_it[-5:]) < 0.8 * sum(with_it[:5]) and all(map(math.isfinite, with_it))
    assert with_it != without or option == "--gradient_checkpointing"
    assert with_it[:10] == pytest.approx(without[:10], rel=0.05 if "bf16" in option else 1e-3)


if __name__ == "__main__":
    for name, *arguments in json.loads(sys.argv[1]):
        globals()[name](*arguments)
