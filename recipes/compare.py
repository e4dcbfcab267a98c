"""Run a recipe over a grid of placements, warm starts, learning rates, warm-ups and seeds, and put the results side by side.

python recipes/compare.py --placements native pre deepnorm --seeds 0 1 2 --output_dir results recipes/finetune_glue.py \
    --model_name_or_path bert-base-uncased --task_name mrpc --num_train_epochs 1

What follows the recipe's name goes to the recipe. "native" is the model as it is; the placements of a hybrid are joined by
commas. Each run has a folder; a grid that was interrupted goes on where it was. Writes `table.md`, `runs.json`,
`curves.png` and, where learning rates or warm-ups differ, `sensitivity.png`.
"""

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm.auto import tqdm

from hf_normswap.conversion import WARM_STARTS

AXES = ("placement", "warm_start", "learning_rate", "warmup_steps")  # of a variant; seeds are averaged over


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", nargs="+", required=True)
    parser.add_argument("--warm_starts", nargs="+", choices=WARM_STARTS, default=["calibrated"])
    parser.add_argument(
        "--learning_rates", nargs="+", type=float, default=[None], help="by default the placement's own"
    )
    parser.add_argument("--warmup_steps", nargs="+", type=int, default=[None], help="by default the placement's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--metric", default="accuracy", help="what the plots show")
    parser.add_argument("--launcher", default=f"{shlex.quote(sys.executable)} -m accelerate.commands.launch")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("recipe", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the recipe")
    return parser.parse_args()


def grid(args) -> list[dict]:
    """The variants; the model as it is has no warm start."""
    points = itertools.product(args.placements, args.warm_starts, args.learning_rates, args.warmup_steps)
    variants = [dict(zip(AXES, point)) for point in points]
    for variant in variants:
        if variant["placement"] == "native":
            variant["warm_start"] = None
    return [variant for index, variant in enumerate(variants) if variant not in variants[:index]]


def title(variant: dict) -> str:
    """The values of a variant that are given."""
    return ", ".join(str(value) for value in variant.values() if value is not None)


def launch(args, variant: dict, seed: int, folder: Path) -> bool:
    """One run, unless it was done before; whether it came to its end. What it printed is in its folder."""
    if (folder / "all_results.json").is_file():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *shlex.split(args.launcher),
        args.recipe,
        *args.arguments,
        "--output_dir",
        str(folder),
        "--seed",
        str(seed),
    ]
    command += ["--resume_from_checkpoint", "latest"]
    for name, value in variant.items():
        if value is not None and (name, value) != ("placement", "native"):
            command += [f"--{name}", *str(value).split(",")]
    with open(folder / "log.txt", "w") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode == 0


def read(variant: dict, seed: int, folder: Path) -> dict:
    """A run as tables and plots take it."""
    files = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("all_results", "history")}
    return {
        "variant": title(variant),
        **variant,
        "seed": seed,
        "results": files["all_results"],
        "history": files["history"],
    }


def by_variant(runs: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(run["variant"], []).append(run)
    return groups


def mean_and_spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def markdown(runs: list[dict]) -> str:
    """A row for each variant with mean and standard deviation of all metrics over the seeds."""
    names = [name for name in runs[0]["results"] if name not in ("step", "samples")]
    lines = [f"| | {' | '.join(names)} | seeds |", f"|---|{'---|' * (len(names) + 1)}"]
    for variant, group in by_variant(runs).items():
        cells = [mean_and_spread([run["results"][name] for run in group]) for name in names]
        lines.append(f"| {variant} | {' | '.join(cells)} | {len(group)} |")
    return "\n".join(lines)


def plot_curves(runs: list[dict], metrics: list[str]):
    """A matplotlib figure with a panel for each metric: the mean of each variant by step, and, of few, the range over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(metrics) + 2, 3.5), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
        for variant, group in by_variant(runs).items():
            curves = [{entry["step"]: entry[metric] for entry in run["history"] if metric in entry} for run in group]
            steps = [step for step in curves[0] if all(step in curve for curve in curves)]
            values = [[curve[step] for curve in curves] for step in steps]
            (line,) = axes.plot(steps, [statistics.mean(column) for column in values], label=variant)
            if len(by_variant(runs)) <= 6:  # more hide each other
                axes.fill_between(
                    steps,
                    [min(column) for column in values],
                    [max(column) for column in values],
                    color=line.get_color(),
                    alpha=0.15,
                )
        axes.set(title=metric, xlabel="optimizer steps")
    add_legend(figure, axes)
    return figure


def add_legend(figure, axes):
    """The legend of one panel, to the right of all."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")


def plot_sensitivity(runs: list[dict], metric: str):
    """A matplotlib figure of the metric over learning rate and warm-up, a line for each placement; `None` if neither
    differs."""
    from matplotlib.figure import Figure

    axes_names = [name for name in ("learning_rate", "warmup_steps") if len({run[name] for run in runs}) > 1]
    if not axes_names:
        return None
    figure = Figure(figsize=(4.5 * len(axes_names) + 2, 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(axes_names), squeeze=False)[0], axes_names):
        lines: dict[str, dict[float, list[float]]] = {}
        for run in runs:
            line = title({key: run[key] for key in AXES if key != name})
            lines.setdefault(line, {}).setdefault(run[name], []).append(run["results"][metric])
        for number, (line, points) in enumerate(lines.items()):
            values = sorted(points)
            apart = [value * 1.015**number for value in values]  # else the bars hide each other
            spreads = [statistics.stdev(points[value]) if len(points[value]) > 1 else 0 for value in values]
            means = [statistics.mean(points[value]) for value in values]
            axes.errorbar(apart, means, spreads, marker=".", capsize=2, label=line)
        axes.set(xlabel=name, ylabel=metric, xscale="log" if name == "learning_rate" else "linear")
    add_legend(figure, axes)
    return figure


def write_report(runs: list[dict], metric: str, folder: Path):
    """The table, the figures and all numbers."""
    (folder / "table.md").write_text(markdown(runs) + "\n")
    (folder / "runs.json").write_text(json.dumps(runs, indent=2) + "\n")
    plot_curves(runs, ["train_loss", metric]).savefig(folder / "curves.png", dpi=120)
    if (figure := plot_sensitivity(runs, metric)) is not None:
        figure.savefig(folder / "sensitivity.png", dpi=120)


def main():
    args = parse_args()
    runs, failed = [], []
    jobs = [(variant, seed) for variant in grid(args) for seed in args.seeds]
    for variant, seed in (bar := tqdm(jobs, desc="Runs")):
        name = title(variant)
        bar.set_postfix_str(f"{name}, seed {seed}")
        folder = args.output_dir / f"{name.replace(', ', '-').replace(',', '+')}-seed{seed}"
        if launch(args, variant, seed, folder):
            runs.append(read(variant, seed, folder))
            write_report(runs, args.metric, args.output_dir)
        else:
            failed.append(folder)
    if runs:
        print(markdown(runs))
    if failed:
        sys.exit("These runs failed: " + ", ".join(f"{folder} (see log.txt in it)" for folder in failed))


if __name__ == "__main__":
    main()
