"""Make the cards in model_cards/: convert real checkpoints, measure what they keep, and store all of it but the weights.

```bash
python recipes/make_cards.py                          # all of them, some minutes
python recipes/make_cards.py minilm-pre smollm2-post  # some
python recipes/make_cards.py --render                 # only write them anew from what is stored
```
"""

import argparse
import csv
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import assets
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_normswap import convert_checkpoint, fidelity, token_batches
from hf_normswap.model_card import write_card

ROOT = Path(__file__).parent.parent
MINILM = (assets.minilm, AutoModel, {"source": "sentence-transformers/all-MiniLM-L6-v2"})
SMOLLM2 = (  # the licence is that of its card on the Hub; the package that carries it has no card
    assets.smollm2,
    AutoModelForCausalLM,
    {"source": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0", "language": "en"},
)
VARIANTS = {
    "minilm-pre": (MINILM, "pre", "calibrated"),
    "smollm2-post": (SMOLLM2, "post", "calibrated"),
    "minilm-deepnorm": (MINILM, "deepnorm", "calibrated"),
    "minilm-admin": (MINILM, "admin", "calibrated"),
    "minilm-resi_dual": (MINILM, "resi_dual", "exact"),
    "minilm-sandwich": (MINILM, "sandwich", "calibrated"),
    "minilm-peri": (MINILM, "peri", "calibrated"),
    "minilm-res_post": (MINILM, "res_post", "none"),
    "minilm-gated": (MINILM, "gated", "none"),
    "minilm-mixed": (MINILM, ["post"] * 3 + ["pre"] * 3, "calibrated"),
}
TRAINED = {  # a name here, the arguments of finetune_glue.py
    "minilm-pre-reviews": "--placement pre --max_train_steps 150 --learning_rate 3e-4 --per_device_train_batch_size 16 --max_train_samples 2400"
}
KEPT = (
    "config.json",
    "fidelity.json",
    "run.json",
    "all_results.json",
    "README.md",
    "tokenizer_config.json",
    "modules.json",
)
CALIBRATION, HELD_OUT = ("carroll-alice", "Alice's Adventures in Wonderland"), ("austen-emma", "Emma")
REVIEWS = "the movie reviews of VADER's ground truth"


def convert(name: str, folder: Path):
    """Write a variant of `VARIANTS` without its weights."""
    (locate, auto, known), placement, warm_start = VARIANTS[name]
    model, tokenizer = auto.from_pretrained(locate()), AutoTokenizer.from_pretrained(locate())
    record, given = {**known, "base_model": known["source"]}, {}
    if warm_start == "calibrated":
        record["calibration_data"] = CALIBRATION[1]
        given["calibration"] = read(CALIBRATION[0], model, tokenizer)
    converted = convert_checkpoint(model, placement, warm_start=warm_start, norm_conversion=record, **given)
    report = fidelity(model, converted, read(HELD_OUT[0], model, tokenizer))
    converted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (modules := locate() / "modules.json").is_file():
        shutil.copyfile(modules, folder / modules.name)
    write_card(folder, fidelity={**report.to_dict(), "data": HELD_OUT[1]})
    print(f"{name}: {report}")


def read(book: str, model, tokenizer) -> list[dict]:
    """The first four thousand tokens of a book, in paragraphs or windows of at most 128."""
    paragraphs = [" ".join(part.split()) for part in assets.gutenberg(book).split("\n\n") if len(part) > 80]
    return list(token_batches(paragraphs, model, tokenizer, max_tokens=4096, length=128))


def fine_tune(name: str, folder: Path):
    """Train MiniLM on sentences of movie reviews with a recipe, from files."""
    rows = assets.movie_reviews()
    random.Random(0).shuffle(rows)
    with TemporaryDirectory() as scratch:
        for split, part in (("train", rows[:3000]), ("validation", rows[3000:3600])):
            with open(Path(scratch) / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ["text", "label"])
                writer.writeheader()
                writer.writerows(part)
        # as in the Hub's cache
        source = Path(scratch, "models--sentence-transformers--all-MiniLM-L6-v2", "snapshots", "local")
        source.parent.mkdir(parents=True)
        source.symlink_to(assets.minilm(), target_is_directory=True)
        command = f"--model_name_or_path {source.relative_to(scratch)} --train_file train.csv --validation_file validation.csv"
        script = Path(__file__).with_name("finetune_glue.py")
        arguments = [*command.split(), "--output_dir", folder, *TRAINED[name].split()]
        subprocess.run([sys.executable, script, *arguments], cwd=scratch, check=True)
    run = (folder / "run.json").read_text()  # without where this was
    for place, text in {sys.executable: "python", script: "recipes/finetune_glue.py", folder: name}.items():
        run = run.replace(str(place), text)
    (folder / "run.json").write_text(json.dumps({**json.loads(run), "data": REVIEWS}, indent=2) + "\n")
    write_card(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="by default all")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "model_cards")
    parser.add_argument("--render", action="store_true", help="write the cards anew from what is stored")
    args = parser.parse_args()
    if unknown := set(args.names) - {*VARIANTS, *TRAINED}:  # argparse's `choices` do not admit that there are none
        parser.error(f"there is no {', '.join(sorted(unknown))}, but {', '.join([*VARIANTS, *TRAINED])}")
    for name in args.names or [*VARIANTS, *TRAINED]:
        if args.render:
            (args.output_dir / name / "README.md").unlink(missing_ok=True)
            write_card(args.output_dir / name)
            continue
        with TemporaryDirectory() as scratch:
            made = Path(scratch) / name
            (convert if name in VARIANTS else fine_tune)(name, made)
            target = args.output_dir / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for file in KEPT:
                if (made / file).is_file():
                    shutil.copyfile(made / file, target / file)
