"""How long a conversion on disk takes, against copying the files, and how much memory it needs.

Makes a random checkpoint in the shape of TinyLlama (1.1 billion parameters, bfloat16, 2.2 GB in 4 shards), and times in
turn, a few times, a copy of the folder and each conversion, in the same process with everything imported and all files read
before. What is reported is the median of the ratios of neighbours, of the time on the clock and of the processor time, which
says more on a busy machine. Peak memory is that of a process of its own, with the interpreter, PyTorch and Transformers,
which alone are printed in the first line. A model with two layers of the same shapes is converted both on disk and in
memory, and compared bit for bit.

python recipes/benchmark_conversion.py --folder /tmp/conversion
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from hf_normswap import convert_checkpoint

TINYLLAMA = {  # config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
VOCABULARY = 32_000
CASES = {  # name: the folder that is converted, the placement, the warm start
    "pre to post, as it is": ("pre", "post", "none"),
    "post to deepnorm, exact start (folds into output projections)": ("post", "deepnorm", "exact"),
    "pre to sandwich, as it is (adds norms)": ("pre", "sandwich", "none"),
    "pre to post, exact start": ("pre", "post", "exact"),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("conversion"), help="for 7 GB, removed at the end")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; several wait actively for each other")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--convert", nargs=4, help=argparse.SUPPRESS)  # in the process whose memory is measured
    return parser.parse_args()


def make(folder: Path, layers: int, vocabulary: int, dtype: str):
    """A random Pre-Norm checkpoint in 4 shards, and a Post-Norm one on the same tensors."""
    torch.manual_seed(0)
    config = LlamaConfig(**TINYLLAMA, num_hidden_layers=layers, vocab_size=vocabulary, dtype=dtype)
    with no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    noise = torch.randn(max(parameter.numel() for parameter in model.parameters())) / 50
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(noise[: parameter.numel()].view_as(parameter) + float(parameter.ndim == 1))
    total = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder / "pre", max_shard_size=int(total / 3.9))
    del model
    convert_checkpoint(folder / "pre", "post", output_dir=folder / "post")


def timed(function, *args, **kwargs) -> tuple[float, float]:
    """Seconds that a call takes: on the clock, and of the processors."""
    start = time.perf_counter(), time.process_time()
    function(*args, **kwargs)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def read(folder: Path):
    """Have all files of a folder in memory."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass


def peak(*arguments) -> float:
    """Megabytes that a process has at most."""
    command = [sys.executable, __file__, "--convert", *map(str, arguments)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1024


def same(folder: Path, source: str, placement: str, warm_start: str) -> bool:
    """Whether a small model becomes the same on disk and in memory."""
    convert_checkpoint(folder / source, placement, warm_start=warm_start, output_dir=folder / "disk")
    convert_checkpoint(folder / source, placement, warm_start=warm_start).save_pretrained(folder / "memory")
    states = [AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("disk", "memory")]
    equal = states[0].keys() == states[1].keys()
    equal &= all(torch.equal(one, states[1][key]) for key, one in states[0].items())
    shutil.rmtree(folder / "disk")
    shutil.rmtree(folder / "memory")
    return equal


def main():
    args = parse_args()
    if args.convert is not None:
        source, placement, warm_start, target = args.convert
        if source != "nothing":
            convert_checkpoint(source, placement, warm_start=warm_start, output_dir=target)
        # not `ru_maxrss`, which starts from that of the process that started this one
        print(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))
        return
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True)
    try:
        make(args.folder, args.layers, VOCABULARY, args.dtype)
        make(args.folder / "small", 2, 1000, args.dtype)
        shards = sorted((args.folder / "pre").glob("*.safetensors"))
        size = sum(path.stat().st_size for path in shards) / 1e9
        print(f"{size:.2f} GB of {args.dtype} in {len(shards)} shards", flush=True)
        print(f"imports alone: {peak('nothing', '', '', ''):.0f} MB", flush=True)
        target = args.folder / "out"
        for name, (source, placement, warm_start) in CASES.items():
            folder = args.folder / source
            read(folder)
            rows = []
            for index in range(args.repeats + 1):
                pair = [timed(shutil.copytree, folder, target)]
                shutil.rmtree(target)  # at once: what is not on the disk yet slows down whoever writes next
                pair.append(timed(convert_checkpoint, folder, placement, warm_start=warm_start, output_dir=target))
                shutil.rmtree(target)
                rows += [pair] if index else []  # the first warms up
            result: dict = {"conversion": name}
            for kind, unit in enumerate(("seconds", "cpu_seconds")):
                copies, conversions = ([pair[side][kind] for pair in rows] for side in (0, 1))
                ratio = statistics.median(one / other for one, other in zip(conversions, copies))
                result[unit] = [round(statistics.median(conversions), 2), round(statistics.median(copies), 2)]
                result[unit.replace("seconds", "ratio")] = round(ratio, 2)
            result |= {
                "peak_mb": round(peak(folder, placement, warm_start, target)),
                "same_as_in_memory": same(args.folder / "small", source, placement, warm_start),
            }
            shutil.rmtree(target)
            print(json.dumps(result), flush=True)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
