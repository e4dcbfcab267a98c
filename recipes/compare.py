"""Run a recipe over a grid of placements, warm starts, learning rates, warm-ups and seeds, and put the results side by side.

python recipes/compare.py --placements native pre deepnorm --seeds 0 1 2 --output_dir results recipes/finetune_glue.py \
    --model_name_or_path bert-base-uncased --task_name mrpc --num_train_epochs 1

What follows the recipe's name goes to the recipe. "native" is the model as it is; the placements of a hybrid are joined by
commas. Each run has a folder; a grid that was interrupted goes on where it was, with the same command. Writes `table.md`, `runs.json`,
`curves.png` and, where learning rates or warm-ups differ, `sensitivity.png`.
"""

import argparse
import itertools
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from hf_normswap import NormSwapError
from hf_normswap.conversion import WARM_STARTS
from hf_normswap.modeling.placements import canonical_name

AXES = ("placement", "warm_start", "learning_rate", "warmup_steps")  # of a variant; seeds are averaged over


def placement(text: str) -> str:
    """One placement, or those of a hybrid, as they are called."""
    try:
        return text if text == "native" else ",".join(map(canonical_name, text.split(",")))
    except NormSwapError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", nargs="+", type=placement, required=True)
    parser.add_argument(
        "--warm_starts", nargs="+", choices=WARM_STARTS, default=[None], help="by default the recipe's own"
    )
    parser.add_argument(
        "--learning_rates", nargs="+", type=float, default=[None], help="by default the placement's own"
    )
    parser.add_argument("--warmup_steps", nargs="+", type=int, default=[None], help="by default the placement's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--metric", default="accuracy", help="of the recipe, for the plots")
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


def command_of(args, variant: dict, seed: int) -> list[str]:
    """The recipe with all that decides about the results of a run."""
    command = [args.recipe, *args.arguments, "--seed", str(seed)]
    for name, value in variant.items():
        if value is not None and (name, value) != ("placement", "native"):
            command += [f"--{name}", *str(value).split(",")]
    return command


def is_done(folder: Path) -> bool:
    return all((folder / f"{name}.json").is_file() for name in ("all_results", "history"))


def check_folder(folder: Path, command: list[str]):
    """Refuse the folder of another run."""
    known = (folder / "command.txt").read_text().strip() if (folder / "command.txt").is_file() else None
    if known != shlex.join(command) and (known is not None or is_done(folder)):
        sys.exit(f"Error: {folder} has a run of {known or 'an unknown command'}: take another `--output_dir`.")


def launch(args, command: list[str], folder: Path) -> bool:
    """One run, unless it was done before; whether it came to its end. What it printed is in its folder."""
    if is_done(folder):
        return True
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    command = [*shlex.split(args.launcher), *command, "--output_dir", str(folder)]
    command += ["--resume_from_checkpoint", "latest"]
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
    if not values:
        return "–"
    return f"{np.mean(values):.4f}" + (f" ± {deviation(values):.4f}" if len(values) > 1 else "")


def deviation(values: list[float]) -> float:
    """The standard deviation of a sample; 0 of a single value, and not a number where one is none or infinite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def markdown(runs: list[dict]) -> str:
    """A row for each variant with mean and standard deviation of all metrics over the seeds."""
    names = dict.fromkeys(name for run in runs for name in run["results"] if name not in ("step", "samples"))
    lines = [f"| | {' | '.join(names)} | seeds |", f"|---|{'---|' * (len(names) + 1)}"]
    for variant, group in by_variant(runs).items():
        cells = [mean_and_spread([run["results"][name] for run in group if name in run["results"]]) for name in names]
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
            (line,) = axes.plot(steps, [np.mean(column) for column in values], label=variant)
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
            lines.setdefault(line, {}).setdefault(run[name], []).append(run["results"].get(metric, math.nan))
        for number, (line, points) in enumerate(lines.items()):
            values = sorted(points)
            apart = [value * 1.015**number for value in values]  # else the bars hide each other
            spreads = [deviation(points[value]) for value in values]
            means = [np.mean(points[value]) for value in values]
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
    jobs = []
    for variant, seed in itertools.product(grid(args), dict.fromkeys(args.seeds)):
        folder = args.output_dir / f"{title(variant).replace(', ', '-').replace(',', '+')}-seed{seed}"
        jobs.append((variant, seed, folder, command_of(args, variant, seed)))
        check_folder(*jobs[-1][2:])
    for variant, seed, folder, command in (bar := tqdm(jobs, desc="Runs")):
        bar.set_postfix_str(f"{title(variant)}, seed {seed}")
        if launch(args, command, folder):
            runs.append(read(variant, seed, folder))
            if len(runs) == 1 and args.metric not in (known := runs[0]["results"]):
                sys.exit(
                    f"Error: {args.recipe} measures {', '.join(known)}, not {args.metric!r}: say which with `--metric`."
                )
            write_report(runs, args.metric, args.output_dir)
        else:
            failed.append(folder)
    if runs:
        print(markdown(runs))
    if failed:
        sys.exit("These runs failed: " + ", ".join(f"{folder} (see log.txt in it)" for folder in failed))


if __name__ == "__main__":
    main()
