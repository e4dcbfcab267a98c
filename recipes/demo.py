"""Convert two real checkpoints to five norm placements, measure what each kept, save, load, generate and revert.

python recipes/demo.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
from assets import gutenberg, minilm, smollm2
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_normswap import convert_checkpoint, fidelity, revert_checkpoint, verify

PLACEMENTS = ("pre", "post", "deepnorm", "resi_dual", "sandwich")
CALIBRATION = gutenberg("carroll-alice")[1000:17_000]  # about 4,096 tokens
PROMPT = "The capital of France is"


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2, help="how many windows of text the fidelity is measured on")
    parser.add_argument("--length", type=int, default=256, help="tokens in each window")
    parser.add_argument("--output_dir", type=Path, help="keep the converted checkpoints here")
    return parser.parse_args()


def windows(tokenizer, count: int, length: int) -> list[torch.Tensor]:
    text = gutenberg("austen-emma")[2_000 : 2_000 + 8 * count * length]
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : count * length]
    return list(ids.view(count, 1, length))


def main():
    args = parse_args()
    console = Console()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    for name, path, auto in (("MiniLM", minilm, AutoModel), ("SmolLM2-135M", smollm2, AutoModelForCausalLM)):
        with console.status(f"Loading {name} (SmolLM2 is unpacked from its GGUF file the first time)"):
            source = auto.from_pretrained(path())
            tokenizer = AutoTokenizer.from_pretrained(path())
        batches = windows(tokenizer, args.windows, args.length)
        table = Table(
            "placement", "cosine", "loss", "KL", "saved and loaded", "reverted", title=f"{name}, weights as they are"
        )
        for placement in tqdm(PLACEMENTS, desc=f"{name}: convert, compare, save, load, revert"):
            converted = convert_checkpoint(source, placement).eval()
            report = fidelity(source, converted, batches)
            with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
                folder = Path(args.output_dir or scratch) / f"{name}-{placement}".lower()
                converted.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                loaded = auto.from_pretrained(folder)
                same = torch.equal(loaded(batches[0])[0], converted(batches[0])[0])
                reverted = revert_checkpoint(loaded)
                tensors = reverted.state_dict()
                equal = all(torch.equal(tensors[key], value) for key, value in source.state_dict().items())
            loss = f"{report.source_loss:.2f} → {report.converted_loss:.2f}" if report.source_loss else ""
            kl = f"{report.kl:.2f}" if report.kl is not None else ""
            figures = placement, f"{report.hidden_cosine:.3f}", loss, kl
            table.add_row(*figures, "identical" if same else "DIFFERS", "bit-equal" if equal else "DIFFERS")
        console.print(table)
        console.print(f"{type(source).__name__} → {type(loaded).__name__} → {type(reverted).__name__}")

    console.print(f"\nSmolLM2 continues {PROMPT!r} with the cache:")
    prompt = tokenizer(PROMPT, return_tensors="pt")
    options = {"calibration": CALIBRATION, "tokenizer": tokenizer}
    calibrated = convert_checkpoint(source, "post", warm_start="calibrated", **options)
    models = {
        "source": source,
        "gated": convert_checkpoint(source, "gated"),
        "post, weights as they are": convert_checkpoint(source, "post"),
        "post, calibrated": calibrated,
    }
    for name, model in models.items():
        tokens = model.generate(**prompt, max_new_tokens=10, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        text = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
        console.print(f"  {name:<26} {text!r}", markup=False)
    report = fidelity(source, calibrated, batches)
    console.print(
        "\nMoving the norms of a pretrained model and leaving its weights as they are breaks it, as the tables show. "
        f"Calibrated on {len(CALIBRATION):,} characters of another book, Post-Norm keeps what the model learned: the loss goes "
        f"from {report.source_loss:.2f} to {report.converted_loss:.2f}.\n"
    )
    console.print(str(verify(calibrated, save=False)), markup=False)


if __name__ == "__main__":
    main()
