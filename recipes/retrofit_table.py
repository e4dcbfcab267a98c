"""What is left of a checkpoint after its norms are moved: by hand, calibrated, and healed, side by side.

python recipes/retrofit_table.py --models minilm --steps 60 --output_dir results

MiniLM is measured by the mean cosine of its sentence embeddings to the source's, on 200 sentences of movie reviews;
SmolLM2-135M by its loss on 8 windows of 512 tokens of Emma, above that of the source. Training and calibration see other
sentences and other books. Writes a Markdown table, JSON and a plot of the healing.
"""

import argparse
import copy
import itertools
import json
import statistics
from pathlib import Path

import torch
from assets import gutenberg, minilm, movie_reviews, smollm2
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.utils import logging

from hf_normswap import NormMorph, convert_checkpoint, heal, list_moves

PLACEMENTS = {
    "minilm": ("pre", "deepnorm", "resi_dual", "sandwich"),
    "smollm2": ("post", "deepnorm", "resi_dual", "sandwich", "res_post", "gated"),
}
LEARNING_RATES = {"minilm": 1e-4, "smollm2": 6e-5}
MORPH = 0.7  # of the steps of healing


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PLACEMENTS), default=list(PLACEMENTS))
    parser.add_argument("--placements", nargs="+", help="by default those of the table, for each model")
    parser.add_argument("--heal", nargs="*", help="the placements to heal, by default all; none: calibration only")
    parser.add_argument(
        "--starts", nargs="+", choices=["none", "calibrated", "exact"], default=["calibrated", "exact"]
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of healing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="orders of the training data")
    parser.add_argument("--eval_every", type=int, default=20, help="steps between two points of the plot")
    parser.add_argument("--learning_rate", type=float, help="by default 1e-4 for MiniLM and 6e-5 for SmolLM2")
    parser.add_argument("--output_dir", type=Path, default=Path("results"))
    return parser.parse_args()


def bert_by_hand(source):
    """Post to pre as one moves the lines: each branch reads its own norm, and nothing norms the end."""
    model = convert_checkpoint(copy.deepcopy(source), "pre")
    layers = model.base_model.encoder.layer
    parts = [part for layer in layers for part in (layer.attention.output, layer.output)]
    first, *rest = [part.LayerNorm for part in parts]
    for part, norm in zip(parts, [*rest, nn.Identity()]):
        part.LayerNorm = norm
    attention = layers[0].attention
    attention.first_norm = first
    attention.self.register_forward_pre_hook(lambda module, inputs: (first(inputs[0]), *inputs[1:]))
    return model


class MiniLM:
    """Sentences of movie reviews of at least five words: every 50th is for evaluation, others to calibrate and train."""

    label_weight = 0.0
    metric = "cosine"

    def __init__(self):
        self.source = AutoModel.from_pretrained(minilm(), dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(minilm())
        texts = [row["text"] for row in movie_reviews() if len(row["text"].split()) >= 5]
        self.held_out = texts[::50][:200]
        self.calibration = texts[13::50]
        self.texts = [text for index, text in enumerate(texts) if index % 50 not in (0, 13)]
        self.wanted = self.embed(self.source)

    def embed(self, model):
        batch = self.tokenizer(self.held_out, padding=True, truncation=True, max_length=128, return_tensors="pt")
        with torch.no_grad():
            states = model.eval()(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return (states * mask).sum(1) / mask.sum(1)

    def score(self, model) -> float:
        return nn.functional.cosine_similarity(self.wanted, self.embed(model)).mean().item()

    def batches(self, seed: int, steps: int):
        """12 sentences of up to 32 tokens."""
        order = torch.randperm(len(self.texts), generator=torch.Generator().manual_seed(seed)).tolist()
        for step in range(steps):
            texts = [self.texts[order[index % len(order)]] for index in range(12 * step, 12 * step + 12)]
            yield dict(self.tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt"))

    def edit_by_hand(self):
        return bert_by_hand(self.source)


class SmolLM2:
    """Windows of 512 tokens of novels: Emma is for evaluation, Persuasion to train, two others to calibrate."""

    label_weight = 2.0
    metric = "loss"

    def __init__(self):
        self.source = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2())
        self.held_out = self.windows("austen-emma", 8)
        self.calibration = torch.cat([self.windows("austen-sense", 4), self.windows("carroll-alice", 4)])
        self.training = self.windows("austen-persuasion", 200)
        self.baseline = 0.0
        self.baseline = self.score(self.source)

    def windows(self, book: str, count: int) -> torch.Tensor:
        text = gutenberg(book)[2000 : 2000 + 3200 * count]
        ids = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        return ids[: min(count, len(ids) // 512) * 512].view(-1, 512)

    def score(self, model) -> float:
        with torch.no_grad():
            losses = [model.eval()(input_ids=ids, labels=ids).loss.item() for ids in self.held_out.split(2)]
        return sum(losses) / len(losses) - self.baseline

    def batches(self, seed: int, steps: int):
        order = torch.arange(len(self.training))
        if seed:
            order = torch.randperm(len(self.training), generator=torch.Generator().manual_seed(seed))
        for step in range(steps):
            yield {"input_ids": self.training[order[step % len(order)]][None]}

    def edit_by_hand(self):
        """Pre to post as one moves the lines: the norm of each branch behind its skip, the final norm as well."""
        model = convert_checkpoint(copy.deepcopy(self.source), "post")
        places = [
            (layer, name) for layer in model.model.layers for name in ("input_layernorm", "post_attention_layernorm")
        ]
        norms = [getattr(layer, name) for layer, name in places]
        for (layer, name), norm in zip(places, [nn.Identity(), *norms]):
            setattr(layer, name, norm)
        model.model.norm = nn.Sequential(norms[-1], model.model.norm)
        return model


TASKS = {"minilm": MiniLM, "smollm2": SmolLM2}


def healed(task, model, args, seed: int, learning_rate: float, morph=None) -> list[tuple[int, float]]:
    """Train `model`, and return its score on the way."""
    curve = [(0, task.score(model))]

    def watch(step: int, loss: float):
        if step % args.eval_every == 0 or step == args.steps:
            curve.append((step, task.score(model)))

    options = {"learning_rate": learning_rate, "label_weight": task.label_weight, "morph": morph, "on_step": watch}
    heal(task.source, model, task.batches(seed, args.steps), args.steps, **options)
    return curve


def trained(task, args, seed: int, learning_rate: float) -> list[tuple[int, float]]:
    """The same steps with the source itself, on its own loss."""
    model = copy.deepcopy(task.source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, max(args.steps // 10, 1), args.steps)
    curve = [(0, task.score(model))]
    for step, batch in enumerate(
        tqdm(task.batches(seed, args.steps), total=args.steps, desc="Training the source"), 1
    ):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % args.eval_every == 0 or step == args.steps:
            curve.append((step, task.score(model)))
    return curve


def measure(name: str, args, result: dict):
    """All rows of the table for one model, into `result`; yields after each."""
    task = TASKS[name]()
    learning_rate = args.learning_rate or LEARNING_RATES[name]
    placements = args.placements or PLACEMENTS[name]
    to_heal = placements if args.heal is None else args.heal
    result |= {"metric": task.metric, "source": task.score(task.source), "placements": {}}
    options = {"calibration": task.calibration, "tokenizer": task.tokenizer}
    if task.label_weight and args.heal != []:
        result["trained"] = [trained(task, args, seed, learning_rate) for seed in args.seeds]
        yield f"{name} source {result['trained']}"
    for placement in placements:
        row: dict = {}
        result["placements"][placement] = row
        row["none"] = task.score(convert_checkpoint(task.source, placement))
        if placement == PLACEMENTS[name][0]:
            row["by hand"] = task.score(task.edit_by_hand())
        row["exact"] = task.score(convert_checkpoint(task.source, placement, warm_start="exact"))
        row["calibrated"] = task.score(convert_checkpoint(task.source, placement, warm_start="calibrated", **options))
        yield f"{name} {placement} {row}"
        for start, seed in itertools.product(args.starts if placement in to_heal else (), args.seeds):
            given = options if start == "calibrated" else {}
            model = convert_checkpoint(task.source, placement, warm_start=start, **given)
            morph = NormMorph(model, max(round(MORPH * args.steps), 1)) if list_moves(model) else None
            curve = healed(task, model, args, seed, learning_rate, morph)
            row.setdefault("healed", {}).setdefault(start, []).append(curve)
            yield f"{name} {placement} {start} {seed} {curve}"


def ends(curves: list[list]) -> str:
    """The mean of the last points of curves, and their spread."""
    values = [curve[-1][1] for curve in curves]
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def markdown(results: dict, steps: int) -> str:
    lines = []
    for name, result in results.items():
        starts = list(dict.fromkeys(start for row in result["placements"].values() for start in row.get("healed", {})))
        titles = {"none": "as it is", "calibrated": "calibrated", "exact": "exact, with a morph"}
        heads = ["placement", "weights as they are", "edited by hand", "exact start", "calibrated"]
        heads += [f"{titles[start]}, {steps} steps" for start in starts]
        measured = "cosine to the source" if result["metric"] == "cosine" else "loss above the source's, in nats"
        lines += [f"{name}: {measured}", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for placement, row in result["placements"].items():
            cells = [f"{row[key]:.3f}" if key in row else "" for key in ("none", "by hand", "exact", "calibrated")]
            cells += [ends(row["healed"][start]) if start in row.get("healed", {}) else "" for start in starts]
            lines.append("| " + " | ".join([f"`{placement}`", *cells]) + " |")
        if "trained" in result:
            lines += ["", f"The source itself after the same steps on the same text: {ends(result['trained'])}."]
        lines.append("")
    return "\n".join(lines)


def plot(results: dict, path: Path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(results), 3.5), layout="constrained")
    for axes, (name, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items()):
        for placement, row in result["placements"].items():
            for start, curves in row.get("healed", {}).items():
                axes.plot(*zip(*curves[0]), marker=".", label=f"{placement}, {start}")
        if "trained" in result:
            axes.plot(*zip(*result["trained"][0]), "k--", label="source")
        axes.set(title=name, xlabel="steps of healing", ylabel=result["metric"])
        axes.legend(fontsize="small")
    figure.savefig(path)


def main():
    args = parse_args()
    logging.set_verbosity_error()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    results: dict = {}
    for name in args.models:
        for line in measure(name, args, results.setdefault(name, {})):
            print(line, flush=True)
            (args.output_dir / "retrofit_table.json").write_text(json.dumps(results, indent=2))
    table = markdown(results, args.steps)
    (args.output_dir / "retrofit_table.md").write_text(table)
    plot(results, args.output_dir / "retrofit_table.png")
    print(table)


if __name__ == "__main__":
    main()
