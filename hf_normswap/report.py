"""A report on a model and its conversions: what the diagnostics measure, side by side, and the advice, as a page or as JSON."""

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers.utils import logging

from .advice import advise, read_config, read_facts, start_of, unevenness, whole
from .calibration import FEW_TOKENS, _tokenizer_of, token_batches
from .conversion import WARM_STARTS, convert_checkpoint, resolve_model, unwrap
from .diagnostics import collapse, cost, gradient_profile, residual_stream, sensitivity, stability
from .diagnostics.measuring import plain
from .model_card import write_text
from .modeling.architectures import get_architecture
from .modeling.modeling_normswap import __version__
from .modeling.placements import PLACEMENTS, NormSwapError, canonical_name
from .modeling.surgery import placements_of
from .verification import fidelity

logger = logging.get_logger(__name__)

TEMPLATE = Path(__file__).with_name("report.html.jinja")
COMPARE = ("post", "pre", "deepnorm", "resi_dual")
LENGTH, SEQUENCES = 128, 4  # tokens of a window, windows of a batch
MAX_TOKENS, CALIBRATION_TOKENS = (256, 2048), (1024, 4096)  # quick and thorough

# name of the measure -> quick and thorough options, what it is in one sentence. `fidelity` is of conversions only.
MEASURES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fidelity": (
        {},
        {},
        "What a conversion kept: 1 − cosine of the hidden states that enter each layer to those of the source, mean over tokens, and "
        "where there are predictions the change of the mean cross-entropy in nats per token.",
    ),
    "gradient_profile": (
        {},
        {},
        "Euclidean norm of the gradient of the mean loss for the parameters of each layer, and for what enters it, dropout off "
        "(Xiong et al. 2020, arXiv:2002.04745).",
    ),
    "residual_stream": (
        {},
        {},
        "Median over tokens of the root mean square of what enters each layer; the share of the squared stream that is left of a "
        "branch at the end (Liu et al. 2020, arXiv:2004.08249); and |x' − x| / |x| of each layer.",
    ),
    "collapse": (
        {"skip_layers": False, "rank_tokens": 256},
        {},
        "Angle between what enters and what leaves a layer, in half turns, and effective rank, exp of the entropy of the normalised "
        "singular values (Gromov et al. 2024, arXiv:2403.17887; Roy and Vetterli 2007).",
    ),
    "sensitivity": (
        {"draws": 1, "sequences": 4, "each_layer": False},
        {},
        "Relative change of the last hidden states, or of the gradient, when all matrices get Gaussian noise of ε times their root "
        "mean square, divided by ε; and the change after one step of Adam, much of which bf16 rounds away (Liu et al. 2020, "
        "arXiv:2004.08249; Wang et al. 2022, arXiv:2203.00555).",
    ),
    "cost": (
        {"repeats": 5, "decode_tokens": 4},
        {},
        "Time of a forward pass, and of a decoded token, over that of the model as it is, timed in turns; what a training step "
        "keeps for the backward pass; and the added loss in simulated int8.",
    ),
    "stability": (
        {},
        {"ramp_steps": 60, "steps": 20},
        "Copies are trained with AdamW, with a learning rate that rises until the loss diverges, and on a grid of learning rates "
        "and warm-ups (Chen and Wei 2026, arXiv:2601.19895).",
    ),
}
RUNS = {
    run.__name__: run for run in (gradient_profile, residual_stream, collapse, sensitivity, stability)
}  # of one model
QUICK = tuple(name for name in MEASURES if name != "stability")

LESS, MORE = "↓", "↑"  # what is better, where that can be said
# The rows of the table: what, measure, how it is read (a number, or one with its spread), format, what is better.
FIGURES: tuple[tuple[str, str, Callable[[dict], Any], str, str], ...] = (
    ("Loss, less that of the source (nats)", "fidelity", lambda f: f["converted_loss"] - f["source_loss"], "+.3f", LESS),
    ("Cosine of the hidden states to the source's", "fidelity", lambda f: f["hidden_cosine"], ".4f", MORE),
    ("Cosine of sentence means to the source's", "fidelity", lambda f: f["sentence_cosine"], ".4f", MORE),
    ("Same first choice as the source", "fidelity", lambda f: f["top1_agreement"], ".1%", MORE),
    ("Loss on what was measured (nats)", "gradient_profile", lambda f: f["loss"], ".3f", LESS),
    ("Gradient norm, largest over smallest layer", "gradient_profile", lambda f: unevenness(f["layers"]), ".3g", LESS),
    ("Gradient norm, growth from layer to layer", "gradient_profile", lambda f: f["growth"], ".3f", ""),
    (
        "Stream, last rms in front of a final norm over first",
        "residual_stream",
        lambda f: f["rms"][f["end"]] / f["rms"][0],
        ".3g",
        "",
    ),
    ("Stream, rms of the largest token over the median", "residual_stream", lambda f: _most(f["rms_max"], f["rms"]), ".3g", LESS),
    ("Share of the embeddings at the end", "residual_stream", lambda f: f["embedding_share"], ".2g", ""),
    ("Turn by each of the upper layers, mean (half turns)", "collapse", lambda f: _mean(_upper(f["angular_distance"])), ".3f", MORE),
    ("Effective rank behind the last layer, of {rank}", "collapse", lambda f: f["effective_rank"][-1], ".0f", MORE),
    ("Relative output change over noise in the weights", "sensitivity", lambda f: f["output_change"], ".3g", LESS),
    ("Relative gradient change over noise in the weights", "sensitivity", lambda f: f["gradient_change"], ".3g", LESS),
    ("Relative output change by one step of Adam at 1e-4", "sensitivity", lambda f: f["model_update"], ".3g", LESS),
    ("Variance of the gradient over its square", "sensitivity", lambda f: f["gradient_variance"], ".3g", LESS),
    ("Time of a forward pass over that as it is", "cost", lambda f: (f["prefill"]["ratio"], f["prefill"]["spread"]), ".2f", LESS),
    ("Time of a decoded token over that as it is", "cost", lambda f: (f["decode"]["ratio"], f["decode"]["spread"]), ".2f", LESS),
    ("Kept for the backward pass (MiB)", "cost", lambda f: f["activation_bytes"] / 2**20, ".1f", LESS),
    ("Added loss, int8 weights (nats)", "cost", lambda f: f["loss_int8_weights"] - f["loss"], "+.3f", LESS),
    ("Added loss, int8 weights and inputs (nats)", "cost", lambda f: f["loss_int8_dynamic"] - f["loss"], "+.3f", LESS),
    ("Relative output change, int8 weights and inputs", "cost", lambda f: f["output_change_int8_dynamic"], ".3g", LESS),
    ("Highest stable learning rate", "stability", lambda f: f["max_learning_rate"], ".2g", MORE),
)  # fmt: skip

# The plots: name, title, measure, label of x, label of y, how they are read (x or None for layers, y), logarithmic axes.
CURVES: tuple[tuple[str, str, str, str, str, Callable[[dict], tuple[Sequence | None, Sequence]], str], ...] = (
    ("drift", "Drift from the source", "fidelity", "layer", "1 − cosine", lambda f: (None, f["drift"]), ""),
    ("gradient", "Gradient for the parameters", "gradient_profile", "layer", "gradient norm", lambda f: (None, f["layers"]), "y"),
    ("gradient_stream", "Gradient for the stream", "gradient_profile", "layer", "gradient norm", lambda f: (None, f["stream"]), "y"),
    ("rms", "Residual stream", "residual_stream", "layer", "median rms", lambda f: (None, f["rms"]), "y"),
    ("share", "What is left of a layer", "residual_stream", "layer", "share of the squared stream", lambda f: _by_layer(f["branches"]), ""),
    ("change", "Change by a layer", "residual_stream", "layer", "|x' − x| / |x|", lambda f: (None, f["change"]), "y"),
    ("angle", "Turn by a layer", "collapse", "layer", "angle (half turns)", lambda f: (None, f["angular_distance"]), ""),
    ("rank", "Effective rank", "collapse", "layer", "dimensions, of {rank}", lambda f: (None, f["effective_rank"]), ""),
    ("skip_loss", "Without the layer", "collapse", "layer", "added loss (nats)", lambda f: (None, f["skip_loss"]), ""),
    ("skip_turn", "Output without the layer", "collapse", "layer", "angle (half turns)", lambda f: (None, f["skip_distance"]), ""),
    ("sensitivity", "Noise in one layer", "sensitivity", "layer", "output change / ε", lambda f: (None, f["by_layer"]), "y"),
    ("ramp", "Training with a rising rate", "stability", "learning rate", "loss (nats)", lambda f: (f["learning_rates"], f["losses"]), "x"),
)  # fmt: skip
# Plots with one point for each placement: name, title, measure, label, how value and spread are read, whether from zero.
POINTS: tuple[tuple[str, str, str, str, Callable[[dict], tuple[float, float]], bool], ...] = (
    ("prefill", "Forward pass", "cost", "time / time as it is", lambda f: (f["prefill"]["ratio"], f["prefill"]["spread"]), False),
    ("decode", "Decoded token", "cost", "time / time as it is", lambda f: (f["decode"]["ratio"], f["decode"]["spread"]), False),
    ("int8_weights", "int8 weights", "cost", "added loss (nats)", lambda f: (f["loss_int8_weights"] - f["loss"], 0.0), True),
    ("int8_dynamic", "int8 weights and inputs", "cost", "added loss (nats)", lambda f: (f["loss_int8_dynamic"] - f["loss"], 0.0), True),
    ("int8_output", "Output, int8 weights and inputs", "cost", "relative output change", lambda f: (f["output_change_int8_dynamic"], 0.0), True),
    ("noise", "Noise in all weights", "sensitivity", "relative output change / ε", lambda f: (f["output_change"], 0.0), True),
)  # fmt: skip
# What the headline says of conversions that differ from the source by far: words, measure, how it is read, when, format.
DECISIVE: tuple[tuple[str, str, Callable[[dict], Any], Callable[[Any, Any], bool], str], ...] = (
    ("gradients differ by {} times between layers", "gradient_profile", lambda f: (unevenness(f["layers"]),), lambda a, b: a[0] > 3 * b[0] or b[0] > 3 * a[0], ".3g"),
    ("int8 weights add {} nats", "cost", lambda f: (f["loss_int8_weights"] - f["loss"],), lambda a, b: abs(a[0] - b[0]) > 0.1, ".2g"),
    ("a forward pass takes {} times as long", "cost", lambda f: (f["prefill"]["ratio"], f["prefill"]["spread"]), lambda a, b: a[1] > 0 and abs(a[0] - b[0]) > max(0.05, 3 * a[1]), ".2f"),
)  # fmt: skip
# After Okabe and Ito, told apart by the colour-blind, on white and on black; dashes for curves that lie on each other.
COLOURS = (
    "#56a0d8",
    "#d55e00",
    "#00a37a",
    "#e09a00",
    "#cc79a7",
    "#8c7ae6",
    "#7f8c8d",
    "#c0392b",
    "#27ae60",
    "#b8860b",
)
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
INK = "#7d838c"  # of axes, on white as on black


def _write(value: Any, form: str) -> str:
    """A number, or a number and its spread; what is compared with itself has none."""
    if isinstance(value, tuple):
        return " ± ".join(format(one, form) for one in value) if value[1] else format(value[0], "g")
    return format(value, form)


def _names(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _upper(values: Sequence[float]) -> Sequence[float]:
    return values[len(values) // 2 :]


def _most(values: Sequence[float], by: Sequence[float]) -> float:
    return max(a / b for a, b in zip(values, by))


def _by_layer(branches: list[dict]) -> tuple[list[int], list[float]]:
    """What all branches of a layer together leave in the last stream."""
    shares: dict[int, float] = {}
    for entry in branches:
        shares[entry["layer"]] = shares.get(entry["layer"], 0.0) + entry["final_share"]
    return list(shares), list(shares.values())


@dataclass
class Diagnosis:
    """
    What was measured of a model and its conversions. All fields are plain JSON.

    Args:
        source (`str`): the placement that the model has.
        about (`dict`): the model, what was read, settings and versions.
        measures (`dict`): `{placement: {measure: result}}`, as `measured` of [`advise`] takes it; `cost` is under the source.
        fidelity (`dict`): of each conversion, see [`FidelityReport`].
        missing (`list` of `dict`): `placement`, `measure` and `reason` of what could not be had.
        advice (`dict`, *optional*): see [`Advice`].
        headline (`str`): what was found, in one sentence.
    """

    source: str
    about: dict[str, Any]
    measures: dict[str, dict[str, Any]]
    fidelity: dict[str, dict[str, Any]]
    missing: list[dict[str, str]]
    advice: dict[str, Any] | None
    headline: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return plain(asdict(self))

    def result(self, placement: str, measure: str) -> dict[str, Any] | None:
        """What a measure found of a placement, if it did."""
        if measure == "fidelity":
            return self.fidelity.get(placement)
        if measure == "residual_stream" and (found := self.measures.get(placement, {}).get(measure)):
            return found | {"end": -2 if self.about.get("norm_after") else -1}  # behind which the final norm is
        if measure == "cost":
            return self.measures[self.source].get("cost", {"models": {}})["models"].get(placement)
        return self.measures.get(placement, {}).get(measure)

    def read(self, placement: str, measure: str, getter: Callable[[dict], Any]) -> Any:
        """What `getter` reads of a result; `None` where it is not to be had."""
        found = self.result(placement, measure)
        try:
            return None if found is None else getter(found)
        except (LookupError, TypeError, ArithmeticError, ValueError):  # not measured, or not finite
            return None

    def number(self, placement: str, measure: str, getter: Callable[[dict], Any]) -> Any:
        """What `getter` reads, a number or one with its spread; `None` where it is not to be had, or not finite."""
        value = self.read(placement, measure, getter)
        parts = value if isinstance(value, tuple) else (value,)
        return value if all(isinstance(one, (int, float)) and math.isfinite(one) for one in parts) else None

    def speaks(self, name: str) -> bool:
        """Whether a figure says something: a loss with a random target does not."""
        return self.about.get("objective") != "random target" or not name.lower().startswith(("loss", "added loss"))

    def label(self, placement: str) -> str:
        return f"{placement}, as it is" if placement == self.source else placement

    def table(self) -> list[tuple[str, list[str]]]:
        """The key figures: for each its name, and its value for each placement."""
        rows = []
        for name, measure, getter, form, better in FIGURES:
            values = [self.number(placement, measure, getter) for placement in self.measures]
            if any(value is not None for value in values) and self.speaks(name):
                name = f"{name} {better}".rstrip().format(rank=self.about.get("rank"))
                rows.append((name, ["–" if value is None else _write(value, form) for value in values]))
        return rows

    def kept(self, placement: str) -> str:
        """What a conversion kept, in words; empty where that was not measured."""
        loss, cosine = (self.number(placement, *row[1:3]) for row in FIGURES[:2])
        words = [] if loss is None else [f"{loss:+.3f} nats"]
        return ", ".join(
            words + ([] if cosine is None else [f"a cosine of {cosine:.3f} to the hidden states of the source"])
        )

    def __str__(self) -> str:
        rows = [("", [self.label(placement) for placement in self.measures]), *self.table()]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  " + "  ".join(f"{value:>14}" for value in values) for name, values in rows]
        lines += [f"{row['measure']} of {row['placement']} is missing: {row['reason']}" for row in self.missing]
        return "\n".join([self.headline, "", *lines])

    def save(self, path: str | os.PathLike) -> Path:
        """
        Write it, at once or not at all.

        Args:
            path (`str` or `os.PathLike`): ends in `.html` for the page, in `.json` for the data.

        Raises:
            [`NormSwapError`]: for another ending or a folder that is not there, and for a page without bokeh.
        """
        path = check_target(path)
        text = self.to_html() if path.suffix.lower() != ".json" else json.dumps(self.to_dict(), indent=1)
        write_text(path, text)
        return path

    def to_html(self) -> str:
        """The page: plots, tables and text in one file that loads nothing."""
        check_bokeh()
        import bokeh
        import jinja2
        from bokeh.embed import components
        from bokeh.resources import Resources
        from markupsafe import Markup, escape

        figures = self.figures()
        script, divs = components(figures) if figures else ("", {})
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters["code"] = lambda text: Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        return template.render(
            diagnosis=self,
            about=self.about,
            colours=dict(zip(self.measures, COLOURS)),
            formulas={name: PLACEMENTS[name].formula for name in self.measures if name in PLACEMENTS},
            bokeh_js=Resources(mode="inline", components=["bokeh"]).render_js(),
            bokeh_version=bokeh.__version__,
            script=script,
            grids=[{name: divs[name] for name, *_ in rows if name in divs} for rows in (CURVES, POINTS)],
            definitions={name: MEASURES[name][2] for name in self.about["measures"]},
            better=(LESS, MORE),
        )

    def figures(self) -> dict[str, Any]:
        """The plots of the page by name, as bokeh has them: a renderer for each placement, named as it."""
        from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, Range1d
        from bokeh.models.annotations import TeeHead, Whisker

        found: dict[str, Any] = {}
        for name, title, measure, x_label, y_label, getter, log in CURVES:
            curves = {one: self.read(one, measure, getter) for one in self.measures}
            curves = {one: xy for one, xy in curves.items() if xy is not None and xy[1]}
            if not curves or not self.speaks(y_label):
                continue
            if name == "rms" and self.about.get("norm_after"):
                title += ", the last one normed"
            options: dict[str, Any] = {
                "x_axis_label": x_label,
                "y_axis_label": y_label.format(rank=self.about.get("rank")),
            }
            for axis in log:
                options[f"{axis}_axis_label"] += ", log scale"
                options[f"{axis}_axis_type"] = "log"
            plot = _figure(title, name=name, **options)
            if x_label == "layer":
                plot.xaxis.ticker = BasicTicker(mantissas=[1, 2, 5], min_interval=1)
            for axis in log:
                getattr(plot, f"{axis}axis").ticker.desired_num_ticks = 4
            steps: Sequence = ()
            columns: dict[str, list[float]] = {}
            for index, (one, (x, y)) in enumerate(curves.items()):
                style = list(self.measures).index(one)
                columns[one] = [_number(value) for value in y]
                x = range(len(y)) if x is None else x
                steps = max(steps, x, key=len)
                source = ColumnDataSource({"x": list(x), "y": columns[one]})
                width = 4 if one == self.source else 2  # so that it is seen below another
                options = {"color": COLOURS[style % len(COLOURS)], "source": source, "name": one}
                plot.line("x", "y", line_width=width, line_dash=DASHES[style % len(DASHES)], **options)
                plot.scatter("x", "y", size=5 if index else 7, **options)
            # one box with all values, at an invisible curve: boxes of curves that lie on each other would hide each other
            rows = {one: y + [math.nan] * (len(steps) - len(y)) for one, y in columns.items()}
            finite = [value for y in columns.values() for value in y if math.isfinite(value)]
            source = ColumnDataSource({"x": list(steps), "top": [max(finite, default=1.0)] * len(steps)} | rows)
            points = plot.line("x", "top", line_alpha=0, source=source, name="values")
            tips = [(x_label, "@x{%.4g}"), *((self.label(one), f"@{{{one}}}{{%.4g}}") for one in rows)]
            formats: Any = dict.fromkeys(["@x", *(f"@{{{one}}}" for one in rows)], "printf")
            hover = HoverTool(renderers=[points], tooltips=tips, formatters=formats, mode="vline")
            hover.update(line_policy="nearest", point_policy="follow_mouse")
            plot.add_tools(hover)
            found[name] = plot
        for name, title, measure, label, reader, from_zero in POINTS:
            values = {one: self.number(one, measure, reader) for one in self.measures}
            values = {one: pair for one, pair in values.items() if pair is not None}
            if not values or not self.speaks(label):
                continue
            factors = [self.label(one) for one in values]
            plot = _figure(title, x_axis_label=label, y_range=factors[::-1], name=name, height=70 + 32 * len(factors))
            low = min([value - spread for value, spread in values.values()] + [0.0] * from_zero)
            high = max([value + spread for value, spread in values.values()] + [0.0] * from_zero)
            plot.xaxis.ticker.desired_num_ticks = 3
            margin = (high - low) / 12 or abs(high) / 12 or 1.0
            plot.x_range = Range1d(low - margin, high + margin)
            dots = []
            for one, (value, spread) in values.items():
                colour = COLOURS[list(self.measures).index(one) % len(COLOURS)]
                data = {"x": [value], "y": [self.label(one)], "low": [value - spread], "high": [value + spread]}
                source = ColumnDataSource(data)
                if spread:
                    ends: dict[str, Any] = {
                        f"{end}_head": TeeHead(size=8, line_color=colour) for end in ("lower", "upper")
                    }
                    shape: Any = {
                        "base": "y",
                        "lower": "low",
                        "upper": "high",
                        "dimension": "width",
                        "line_color": colour,
                    }
                    plot.add_layout(Whisker(source=source, **shape, **ends))
                dots.append(plot.scatter("x", "y", size=11, color=colour, source=source, name=one))
            tips = [("", "@y"), (label, "@x{%.4g}"), ("from", "@low{%.4g} to @high{%.4g}")]
            formats = dict.fromkeys(("@x", "@low", "@high"), "printf")
            plot.add_tools(HoverTool(renderers=dots, tooltips=tips, formatters=formats))
            found[name] = plot
        return found


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _figure(title: str, height: int = 260, **options) -> Any:
    """A plain figure, for light and dark pages."""
    from bokeh.models import CategoricalAxis, PrintfTickFormatter
    from bokeh.plotting import figure

    fill: dict[str, Any] = {"background_fill_alpha": 0, "border_fill_alpha": 0, "outline_line_color": None}
    plot: Any = figure(
        title=title, height=height, sizing_mode="stretch_width", tools="", toolbar_location=None, **fill, **options
    )
    plot.title.text_color = INK
    plot.title.text_font = "system-ui, sans-serif"
    plot.title.text_font_size = "14px"
    for axis in plot.axis:
        if not isinstance(axis, CategoricalAxis):
            axis.formatter = PrintfTickFormatter(format="%.3g")
        axis.axis_line_color = axis.major_tick_line_color = INK
        axis.minor_tick_line_color = None
        axis.axis_label_text_color = axis.major_label_text_color = INK
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui, sans-serif"
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
    plot.grid.grid_line_color = INK
    plot.grid.grid_line_alpha = 0.2
    return plot


def check_bokeh():
    """Refuse a page without bokeh."""
    if find_spec("bokeh") is None:
        raise NormSwapError('the page needs bokeh: `pip install "hf_normswap[report]"`, or write to a .json file.')


def check_target(path: str | os.PathLike) -> Path:
    """Refuse a file that cannot be written, before anything is measured."""
    path = Path(path).expanduser()
    if path.suffix.lower() not in (".html", ".htm", ".json"):
        raise NormSwapError(f"cannot write {path}: its name must end in .html or .json.")
    try:
        if not path.parent.is_dir() or path.is_dir():
            raise NotADirectoryError(f"{'it is a' if path.is_dir() else f'{path.parent} is no'} folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("it is read-only")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise NormSwapError(f"cannot write {path}: {error.strerror or error}.") from None
    if path.suffix.lower() != ".json":
        check_bokeh()
    return path


def diagnose(
    model: Any,
    batches: Any = None,
    *,
    tokenizer: Any = None,
    compare: Iterable[str] = COMPARE,
    warm_start: str | None = None,
    measures: Iterable[str] | None = None,
    thorough: bool = False,
    max_tokens: int | None = None,
    task: str | None = None,
    num_samples: int | None = None,
    budget: int | None = None,
    priorities: Iterable[str] = (),
) -> Diagnosis:
    """
    Measure a model and its conversions to other placements side by side, and advise.

    The text is read in windows of 128 tokens: the first `max_tokens` are measured, and conversions are calibrated on the 1,024 that
    follow them (4,096 if `thorough`); on all of it, if fewer than 1,000 follow. What cannot be had (a conversion that is refused,
    gradients of a frozen model) is noted in `missing` with its reason, and the rest is measured. The model stays as it is.

    Args:
        model (`PreTrainedModel`, `str` or `os.PathLike`): stock or converted, a folder, or a model id. All conversions are in memory
            with it, each of which has its own layers if it is calibrated.
        batches (*optional*): text, token ids, or batches, as [`token_batches`] takes them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for texts; by default the one that the model was loaded with.
        compare (`Iterable[str]`, *optional*, defaults to `("post", "pre", "deepnorm", "resi_dual")`): names of placements. That of
            the model is measured in any case.
        warm_start (`str`, *optional*): of the conversions, as in [`convert_checkpoint`]; by default what [`advise`] recommends: exact
            where nothing has to move, else calibrated.
        measures (`Iterable[str]`, *optional*): of `"fidelity"` and the functions of [`hf_normswap.diagnostics`]; by default all but
            `"stability"`, and all if `thorough`.
        thorough (`bool`, *optional*, defaults to `False`): more tokens, every layer left out and perturbed by itself, more repeats,
            and training runs: hours instead of minutes for a model of 100 million parameters on a few CPU cores.
        max_tokens (`int`, *optional*): how many tokens to measure; by default 256, and 2,048 if `thorough`.
        task, num_samples, budget, priorities (*optional*): for [`advise`].

    Returns:
        [`Diagnosis`]

    Raises:
        [`NormSwapError`]: for an architecture that is not supported, unknown placements and measures, and text that cannot be read.
    """
    begin = time.perf_counter()
    if warm_start is not None and warm_start not in WARM_STARTS:
        raise NormSwapError(f"unknown warm start {warm_start!r}. Available: {', '.join(WARM_STARTS)}.")
    max_tokens = whole("max_tokens", max_tokens, 1) or MAX_TOKENS[thorough]
    wanted = (
        [measures]
        if isinstance(measures, str)
        else list(dict.fromkeys((MEASURES if thorough else QUICK) if measures is None else measures))
    )
    if unknown := [name for name in wanted if name not in MEASURES]:
        raise NormSwapError(f"unknown measures {', '.join(map(repr, unknown))}. Available: {', '.join(MEASURES)}.")
    names = [canonical_name(name) for name in ([compare] if isinstance(compare, str) else compare)]
    if isinstance(model, (str, os.PathLike)):
        model = resolve_model(model)
    config = read_config(unwrap(model))
    advice_options: dict[str, Any] = {
        "task": task,
        "num_samples": num_samples,
        "budget": budget,
        "priorities": priorities,
    }
    source = read_facts(config, **advice_options)[0].placement  # refuses before anything is measured
    names = [name for name in dict.fromkeys(names) if name != source]
    if tokenizer is None and config._name_or_path:
        try:
            tokenizer = _tokenizer_of(unwrap(model))
        except NormSwapError:  # token ids need none
            pass
    data, calibration = split_text(batches, unwrap(model), tokenizer, max_tokens, CALIBRATION_TOKENS[thorough])
    overlap = any(one is other for one in data for other in calibration)

    models = {source: model}
    found: dict[str, dict[str, Any]] = {source: {}}
    kept: dict[str, dict[str, Any]] = {}
    missing: list[dict[str, str]] = []
    starts: dict[str, str] = {}  # by placement
    singles = [name for name in wanted if name in RUNS]

    def attempt(placement: str, measure: str, run: Callable[[], Any]) -> Any:
        """The result of `run`, or `None` and a row that says why."""
        bar.set_postfix_str(f"{measure} of {placement}")
        try:
            return run()
        except Exception as error:
            reason = (str(error).strip() or "no message").splitlines()[0]
            reason = reason if isinstance(error, NormSwapError) else f"{type(error).__name__}: {reason}"
            missing.append({"placement": placement, "measure": measure, "reason": reason})
            logger.warning(f"{measure} of {placement} could not be had: {reason}")
        finally:
            bar.update()

    def convert(name: str) -> Any:
        starts[name] = warm_start or start_of(unwrap(model), name) or "none"
        given = {"calibration": calibration, "tokenizer": tokenizer} if starts[name] == "calibrated" else {}
        return convert_checkpoint(model, name, warm_start=starts[name], **given)

    steps = len(names) * (1 + ("fidelity" in wanted)) + (len(names) + 1) * len(singles) + ("cost" in wanted) + 1
    with tqdm(total=steps, desc="Diagnosing") as bar:
        for name in names:
            converted = attempt(name, "conversion", partial(convert, name))
            if converted is None:
                bar.update(len(singles) + ("fidelity" in wanted))
                continue
            models[name], found[name] = converted, {}
            if "fidelity" in wanted:
                result = attempt(
                    name, "fidelity", partial(fidelity, unwrap(model), converted, data, tokenizer=tokenizer)
                )
                kept |= {} if result is None else {name: plain(result.to_dict())}
        options: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": max_tokens}
        for placement, one in models.items():
            for measure in singles:
                run: Any = partial(RUNS[measure], one, data, **options, **options_of(measure, thorough))
                if (result := attempt(placement, measure, run)) is not None:
                    found[placement][measure] = result.to_dict()
        if "cost" in wanted:
            run = partial(cost, models, data, **options, **options_of("cost", thorough))
            if (result := attempt(", ".join(models), "cost", run)) is not None:
                found[source]["cost"] = result.to_dict()
        advice = attempt(source, "advice", partial(advise, unwrap(model), measured=found, **advice_options))

    objectives = [result["objective"] for result in found[source].values() if "objective" in result]
    about = {
        "name": Path(config._name_or_path).name or type(unwrap(model)).__name__,
        "class": type(unwrap(model)).__name__,
        "architecture": get_architecture(config).model_type,
        "layers": len(placements_of(config)),
        "hidden_size": config.hidden_size,
        "parameters": sum(one.numel() for one in unwrap(model).parameters()),
        "dtype": str(unwrap(model).dtype).removeprefix("torch."),
        "device": str(unwrap(model).device),
        "norm_after": get_architecture(config).norm_after,
        "objective": objectives[0] if objectives else None,
        "data": "the default text" if batches is None else None,
        "tokens": _tokens(data),
        "sequences": sum(len(batch["input_ids"]) for batch in data),
        "rank": min(config.hidden_size, _tokens(data), options_of("collapse", thorough).get("rank_tokens", 512)),
        "warm_starts": starts,
        "calibration_tokens": _tokens(calibration) if "calibrated" in starts.values() else 0,
        "calibrated_on_what_is_measured": overlap and "calibrated" in starts.values(),
        "measures": wanted,
        "options": {name: options_of(name, thorough) for name in wanted},
        "thorough": thorough,
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - begin,
        "versions": {"hf_normswap": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    diagnosis = Diagnosis(source, about, found, kept, missing, None if advice is None else plain(advice.to_dict()), "")
    diagnosis.headline = headline(diagnosis)
    return diagnosis


def options_of(measure: str, thorough: bool) -> dict[str, Any]:
    """What a measure is called with."""
    quick, full, _ = MEASURES[measure]
    return full if thorough else quick


def split_text(
    batches: Any, model: Any, tokenizer: Any, max_tokens: int, calibration_tokens: int
) -> tuple[list[dict], list[dict]]:
    """The batches to measure on, and those to calibrate on."""
    most = max_tokens + calibration_tokens
    sizes = {"length": LENGTH, "batch_size": max(min(SEQUENCES, max_tokens // LENGTH), 1)}
    windows = list(token_batches(batches, model, tokenizer, max_tokens=most, labels=True, **sizes))
    count, data = 0, []
    for batch in windows:
        if count >= max_tokens:
            break
        data.append(batch)
        count += _tokens([batch])
    rest = windows[len(data) :]
    return data, rest if _tokens(rest) >= FEW_TOKENS else windows


def _tokens(batches: list[dict]) -> int:
    """How many tokens there are, padding not counted."""
    return sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)


def headline(diagnosis: Diagnosis) -> str:
    """What was found, in one sentence: what to do, what the conversions lose, and in what they differ from the source by far."""
    source, parts = diagnosis.source, []
    lost: dict[str, list[str]] = {}
    kept: dict[str, list[str]] = {}
    for name in diagnosis.fidelity:
        loss, cosine = (diagnosis.number(name, *row[1:3]) for row in FIGURES[:2])
        if loss is not None and abs(loss) < 0.005:
            lost.setdefault("lose{s} nothing", []).append(name)
        elif loss is not None:
            lost.setdefault(f"{'lose' if loss > 0 else 'gain'}{{s}} {abs(loss):.2f} nats", []).append(name)
        elif cosine is not None:
            kept.setdefault(f"{cosine:.3f}", []).append(name)
    starts = {*diagnosis.about["warm_starts"].values()}
    said = [f"{_names(names)} {words.format(s='' if names[1:] else 's')}" for words, names in lost.items()]
    if kept:
        said.append(
            "hidden states keep a cosine of " + ", ".join(f"{one} in {_names(names)}" for one, names in kept.items())
        )
    if said:
        how = {"none": "with the weights as they are, ", "exact": "exact, ", "calibrated": "calibrated, "}
        parts.append((how[starts.pop()] if len(starts) == 1 else "") + ", ".join(said))
    for words, measure, getter, differs, form in DECISIVE:
        if diagnosis.about["objective"] == "random target" and (
            measure == "gradient_profile" or words.endswith("nats")
        ):
            continue  # these gradients and losses are of no task
        values = {one: diagnosis.number(one, measure, getter) for one in diagnosis.measures}
        own = values.pop(source)
        values = {one: value for one, value in values.items() if None not in (own, value) and differs(value, own)}
        if values:
            ends = dict.fromkeys(format(pick(value[0] for value in values.values()), form) for pick in (min, max))
            span = " to ".join(ends)
            parts.append(f"{words.format(span)} in {_names(list(values))} ({own[0]:{form}} in {source})")
    if not any(diagnosis.measures.values()) and not parts:
        return f"Nothing could be measured of {diagnosis.about['name']}."
    losses = [result["loss"] for result in diagnosis.measures[source].values() if "loss" in result]
    do = ""
    if None in losses:
        parts.insert(0, f"the outputs of the model as it is ({source}) are not finite")
    elif diagnosis.advice:
        best = diagnosis.advice["ranking"][0]
        unseen = "" if best["name"] in diagnosis.measures or best["keep"] else ", which was not measured here"
        do = f"keep {best['name']}" if best["keep"] else f"convert to {best['name']}{unseen}"
    if diagnosis.advice is None:
        why = [row["reason"].rstrip(".") for row in diagnosis.missing if row["measure"] == "advice"]
        parts.append(": ".join(["no advice", *why]))
    sentence = ": ".join(part for part in (do, "; ".join(parts)) if part)
    return sentence[:1].upper() + sentence[1:] + "."
