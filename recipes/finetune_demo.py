"""Fine-tune MiniLM on sentences of movie reviews: as it is, converted, and with its norms moved by hand, over several seeds.

python recipes/finetune_demo.py --output_dir results
"""

import argparse
import csv
import json
import random
import sys
import tempfile
from pathlib import Path

from assets import minilm, movie_reviews
from compare import markdown, write_report
from finetune_glue import DataArguments, run
from retrofit_table import bert_by_hand
from tqdm.auto import tqdm

from hf_normswap.training import ModelArguments, RunArguments

BATCH_SIZE = 16
VARIANTS = {  # name -> arguments of the conversion, and an edit in its place
    "as it is (post)": ({}, None),
    "pre, calibrated": ({"placement": ["pre"], "warm_start": "calibrated"}, None),
    "deepnorm, calibrated": ({"placement": ["deepnorm"], "warm_start": "calibrated"}, None),
    "pre, edited by hand": ({}, bert_by_hand),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_rows", type=int, default=1000)
    parser.add_argument("--validation_rows", type=int, default=1000)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--learning_rate", type=float, help="by default the placement's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, help="keep the models, the table and the plot here")
    args = parser.parse_args()
    if min(args.train_rows, args.validation_rows) < 1 or args.epochs <= 0:
        parser.error("--train_rows, --validation_rows and --epochs must be positive.")
    return args


def write_rows(rows: list[dict], path: Path) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def main():
    args = parse_args()
    rows = movie_reviews()
    if args.train_rows + args.validation_rows > len(rows):
        sys.exit(f"Error: there are {len(rows)} rows: lower `--train_rows` or `--validation_rows`.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.output_dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        random.Random(0).shuffle(rows)
        data = DataArguments(
            train_file=write_rows(rows[: args.train_rows], folder / "train.csv"),
            validation_file=write_rows(rows[-args.validation_rows :], folder / "validation.csv"),
        )
        runs = []
        for name, seed in (
            bar := tqdm([(name, seed) for name in VARIANTS for seed in args.seeds], desc="Fine-tuning")
        ):
            bar.set_postfix_str(f"{name}, seed {seed}")
            conversion, edit = VARIANTS[name]
            output_dir = folder / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
            training = RunArguments(
                str(output_dir),
                per_device_train_batch_size=BATCH_SIZE,
                per_device_eval_batch_size=64,
                num_train_epochs=args.epochs,
                eval_steps=max(round(args.epochs * args.train_rows / BATCH_SIZE / 3), 1),  # three points of the curve
                learning_rate=args.learning_rate,
                seed=seed,
            )
            results = run(ModelArguments(str(minilm()), **conversion), data, training, edit)
            history = json.loads((output_dir / "history.json").read_text())
            axes = {"placement": name, "warm_start": None, "learning_rate": None, "warmup_steps": None}
            runs.append({"variant": name, **axes, "seed": seed, "results": results, "history": history})
        write_report(runs, "accuracy", folder)
        print(markdown(runs))
        if args.output_dir:
            print(f"\nModels, table.md, runs.json and curves.png are in {args.output_dir}.")


if __name__ == "__main__":
    main()
