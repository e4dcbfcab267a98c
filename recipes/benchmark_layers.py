"""How long layers of each norm placement take, against the stock layers and against those of other packages.

All variants run in one process, in every round each of them once, in an order that rotates, and next to each the stock
model. What is reported is the median over the rounds of the two times' ratio, with half the width of a box plot's notch
(for the stock model, run twice, this is how far the machine can be trusted). Peers that are not installed are left out.

python recipes/benchmark_layers.py
python recipes/benchmark_layers.py --compile --threads 1 --placements pre post --output ratios.json
"""

import argparse
import gc
import importlib
import json
import math
import statistics
import sys
import time
import types
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig

from hf_normswap import convert_checkpoint, list_placements

# What a placement may cost, forward and backward, as a multiple of the stock layer's time.
LIMITS = {"pre": 1.02, "post": 1.02, "deepnorm": 1.02, "resi_dual": 1.06, "sandwich": 1.06, "gated": 1.06}
ACTIVATION = nn.functional.gelu


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", choices=["llama", "bert"], default=["llama", "bert"])
    parser.add_argument("--placements", nargs="+", default=list(LIMITS), help='names, or "all"')
    parser.add_argument("--no_peers", action="store_true", help="leave the other packages out")
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--sequence_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40, help="rounds")
    parser.add_argument("--threads", type=int, help="how many threads PyTorch uses")
    parser.add_argument(
        "--cpu_time", action="store_true", help="for busy machines: the process's own time, with 1 thread"
    )
    parser.add_argument("--compile", action="store_true", help="measure compiled variants as well")
    parser.add_argument("--output", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    if "all" in args.placements:
        args.placements = list_placements()
    return args


class Stack(nn.Module):
    """A base model without its embeddings, but with the norm behind them where it has one."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        if isinstance(self.model, BertModel):
            return self.model.encoder(self.model.embeddings.LayerNorm(x))[0]
        return self.model(inputs_embeds=x, use_cache=False)[0]


def llama(args) -> Stack:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=args.hidden_size,
        intermediate_size=inner_size("llama", args),
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
    )
    return Stack(AutoModel.from_config(config))


def bert(args) -> Stack:
    config = BertConfig(
        vocab_size=8,
        hidden_size=args.hidden_size,
        intermediate_size=inner_size("bert", args),
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=args.sequence_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Stack(AutoModel.from_config(config))


def inner_size(architecture: str, args) -> int:
    """Of the MLP: 4 times the width, or with a gate two thirds of that, in multiples of 32."""
    return 4 * args.hidden_size if architecture == "bert" else 32 * math.ceil(8 * args.hidden_size / 3 / 32)


# --- peers: (architecture, args) -> a module on embeddings, or None where the package has no such layer ----------------


def torch_layers(pre: bool):
    def build(architecture, args):
        if architecture != "bert":
            return None
        shape = args.hidden_size, args.hidden_size // 64, inner_size(architecture, args)
        layer = nn.TransformerEncoderLayer(*shape, 0.0, ACTIVATION, batch_first=True, norm_first=pre)
        norm = nn.LayerNorm(args.hidden_size) if pre else None
        return nn.TransformerEncoder(layer, args.layers, norm, enable_nested_tensor=False)

    return build


def x_transformers_layers(**placement):
    def build(architecture, args):
        module = importlib.import_module("x_transformers")
        shape = {"dim": args.hidden_size, "depth": args.layers, "heads": args.hidden_size // 64, "attn_flash": True}
        shape["ff_mult"] = inner_size(architecture, args) / args.hidden_size
        if architecture == "bert":
            return module.Encoder(**shape, **placement)
        llama = {"rotary_pos_emb": True, "rotary_emb_dim": 64, "use_rmsnorm": True}
        return module.Decoder(**shape, **llama, ff_glu=True, ff_swish=True, ff_no_bias=True, **placement)

    return build


def torchscale_layers(architecture, args):
    if architecture != "bert":  # it has no gated MLP
        return None
    if importlib.util.find_spec("timm") is None:  # it wants one function of timm, which these layers do not call
        for name in ("timm", "timm.models", "timm.models.layers"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["timm.models.layers"].drop_path = None
    config = importlib.import_module("torchscale.architecture.config").EncoderConfig(
        encoder_embed_dim=args.hidden_size,
        encoder_attention_heads=args.hidden_size // 64,
        encoder_ffn_embed_dim=inner_size(architecture, args),
        encoder_layers=args.layers,
        deepnorm=True,
        no_output_layer=True,
    )

    class Encoder(importlib.import_module("torchscale.architecture.encoder").Encoder):
        def forward(self, x):
            return super().forward(None, token_embeddings=x, features_only=True)["encoder_out"]

    return Encoder(config)


# name -> the placement whose time it is compared with, and how to build it
PEERS = {
    "torch.nn pre": ("pre", torch_layers(True)),
    "torch.nn post": ("post", torch_layers(False)),
    "torchscale deepnorm": ("deepnorm", torchscale_layers),
    "x-transformers pre": ("pre", x_transformers_layers()),
    "x-transformers post": ("post", x_transformers_layers(pre_norm=False)),
    "x-transformers sandwich": ("sandwich", x_transformers_layers(sandwich_norm=True)),
}


def build_variants(architecture: str, args, console) -> dict[str, nn.Module]:
    stock = {"llama": llama, "bert": bert}[architecture](args)
    variants = {"stock": stock}
    for placement in args.placements:
        variants[placement] = Stack(convert_checkpoint(stock.model, placement))
    for name, (placement, build) in {} if args.no_peers else PEERS.items():
        if placement in variants:
            try:
                peer = build(architecture, args)
            except ImportError as error:
                console.print(f"{name} is left out: {error}")
            else:
                if architecture == "bert" and placement in ("post", "deepnorm"):  # others have a final norm instead
                    peer = nn.Sequential(nn.LayerNorm(args.hidden_size), peer)  # as behind BERT's embeddings
                variants |= {} if peer is None else {name: peer}
    return variants


def measure(variants: dict[str, nn.Module], x, backward: bool, args, title: str) -> dict[str, list[tuple]]:
    """Of each variant, in each round: its seconds, and those of the stock model just before or just after."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    names, seconds = list(variants), {name: [] for name in variants}
    gradient = torch.randn_like(x)

    def run(name):
        begin = clock()
        if backward:
            variants[name](x).backward(gradient)
        else:
            with torch.no_grad():
                variants[name](x)
        elapsed = clock() - begin
        variants[name].zero_grad()
        return elapsed

    gc.collect()
    gc.disable()
    for number in tqdm(range(-2, args.repeats), desc=title, leave=False):  # two rounds to warm up
        start = number % len(names)
        for name in names[start:] + names[:start]:
            step = -1 if number % 2 else 1
            pair = [run(key) for key in (name, "stock")[::step]][::step]
            if number >= 0:
                seconds[name].append(tuple(pair))
    gc.enable()
    return seconds


def compiler_works(console) -> bool:
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except Exception as error:
        console.print(f"Compiled variants are left out, since torch.compile fails here: {str(error).splitlines()[0]}")
        return False
    torch._dynamo.config.recompile_limit = 64  # the variants share code
    return True


def summarize(seconds: dict[str, list[tuple]]) -> list[dict]:
    """One row per variant: its time, relative to the stock model's and, for a peer, that of our placement to its."""
    rows = []
    ratios = {name: [own / stock for own, stock in pairs] for name, pairs in seconds.items()}
    for name, pairs in seconds.items():
        quartiles = statistics.quantiles(ratios[name], n=4)
        row = {"variant": name, "seconds": statistics.median(own for own, _ in pairs)}
        row |= zip(("lower_quartile", "ratio", "upper_quartile"), quartiles)
        row["half_width"] = 1.57 * (quartiles[2] - quartiles[0]) / len(pairs) ** 0.5
        if name in PEERS:
            row["placement"] = PEERS[name][0]
            ours = ratios[row["placement"]]
            row["placement_to_peer"] = statistics.median(a / b for a, b in zip(ours, ratios[name]))
        rows.append(row)
    return rows


def show(results: dict[str, list[dict]], architecture: str, console):
    variants = [row["variant"] for row in next(iter(results.values()))]
    table = Table("", *results, "limit", title=f"{architecture}: time / time of the stock model")
    peers = Table("", *results, title=f"{architecture}: time of the same placement here / time of the peer")
    for index, name in enumerate(variants):
        rows = [column[index] for column in results.values()]
        cells = [f"{row['ratio']:.3f} ± {row['half_width']:.3f}" for row in rows]
        if name == "stock":
            cells = [f"{cell} ({1000 * row['seconds']:.0f} ms)" for cell, row in zip(cells, rows)]
        table.add_row(name, *cells, str(LIMITS.get(name, "")))
        if name in PEERS:
            peers.add_row(name, *[f"{row['placement_to_peer']:.3f}" for row in rows])
    console.print(table)
    if peers.row_count:
        console.print(peers)


def main():
    args = parse_args()
    console = Console()
    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    modes = ["eager"] + ["compiled"] * (args.compile and compiler_works(console))
    everything = []
    for architecture in args.architectures:
        variants, results = build_variants(architecture, args, console), {}
        x = torch.randn(args.batch_size, args.sequence_length, args.hidden_size)
        for mode in modes:
            run = variants if mode == "eager" else {name: torch.compile(v) for name, v in variants.items()}
            for what in ("forward", "forward+backward"):
                for variant in variants.values():
                    variant.train(what != "forward")
                title = f"{mode}, {what}"
                rows = summarize(measure(run, x, what != "forward", args, f"{architecture}, {title}"))
                results[title] = rows
                everything += [{"architecture": architecture, "mode": mode, "pass": what} | row for row in rows]
        show(results, architecture, console)
    if args.output:
        settings = {key: value for key, value in vars(args).items() if key != "output"}
        settings |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        args.output.write_text(json.dumps({"settings": settings, "results": everything}, indent=2) + "\n")


if __name__ == "__main__":
    main()
