"""The report: what is measured side by side, as data, and as a page in a real browser."""

import json
import math
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
import typer
from tiny_models import VOCABULARY, tiny_config, tiny_model
from typer.testing import CliRunner

import hf_normswap.report
from hf_normswap import NormSwapError, advise, diagnose
from hf_normswap.cli import app, one_sentence, read_data
from hf_normswap.report import CURVES, FIGURES, MEASURES, POINTS, QUICK, Diagnosis, headline

SIZE = 3_000_000  # bytes, the most that a page may weigh
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
# plot -> where in the data its curve is: the measure and the field, in words of the JSON
CURVE_FIELDS = {
    "drift": ("fidelity", "drift"),
    "gradient": ("gradient_profile", "layers"),
    "gradient_stream": ("gradient_profile", "stream"),
    "rms": ("residual_stream", "rms"),
    "change": ("residual_stream", "change"),
    "angle": ("collapse", "angular_distance"),
    "rank": ("collapse", "effective_rank"),
    "skip_loss": ("collapse", "skip_loss"),
    "skip_turn": ("collapse", "skip_distance"),
    "sensitivity": ("sensitivity", "by_layer"),
    "ramp": ("stability", "losses"),
}


def rows(count=24, length=64):
    return list(torch.randint(4, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3)))


@pytest.fixture(scope="module")
def thorough():
    """All measures with the settings of a test: the plots of the page are all there."""
    with pytest.MonkeyPatch.context() as patch:
        small = {
            "stability": {"ramp_steps": 3, "learning_rates": (1e-3,), "warmups": (0.0,), "steps": 2},
            "sensitivity": {"draws": 1, "sequences": 2},
            "cost": {"repeats": 1, "decode_tokens": 2},
        }
        for name, options in small.items():
            patch.setitem(MEASURES, name, (options, options, MEASURES[name][2]))
        model = tiny_model("llama")
        return model, diagnose(model, rows(), compare=["post", "gated"], thorough=True, max_tokens=256)


def test_everything_is_measured(thorough, tmp_path):
    model, found = thorough
    assert not found.missing and found.source == "pre" and list(found.measures) == ["pre", "post", "gated"]
    data = json.loads(found.save(tmp_path / "report.json").read_text())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert Diagnosis(**data).to_dict() == data
    for placement in ("pre", "post", "gated"):
        assert all(found.result(placement, name) for name in MEASURES if (name, placement) != ("fidelity", "pre"))
    assert set(found.fidelity) == {"post", "gated"}
    assert found.about["tokens"] == 256 and found.about["calibration_tokens"] == 24 * 64 - 256
    assert not found.about["calibrated_on_what_is_measured"] and found.about["thorough"]
    advice = json.loads(json.dumps(advise(model, measured=found.measures).to_dict()))
    assert found.advice == advice and advice != json.loads(json.dumps(advise(model).to_dict()))
    cosine = found.fidelity["gated"]["hidden_cosine"]
    assert "gated lose" in found.headline and " nothing" in found.headline and cosine > 0.999
    assert found.headline.endswith(".") and str(found).startswith(found.headline)
    assert found.about["warm_starts"] == {"post": "calibrated", "gated": "exact"}
    starts = {one["name"]: one["warm_start"] for one in found.advice["ranking"]}
    assert {"post": starts["post"], "gated": starts["gated"]} == found.about["warm_starts"]
    for one in (found, data):  # the report, and its file, are what `advise` takes as measured
        assert json.loads(json.dumps(advise(model, measured=one).to_dict())) == advice


def test_measures_are_those_of_the_functions():
    model, data = tiny_model("gpt2"), rows(8)
    found = diagnose(model, data, compare=["post"], warm_start="none", measures=["collapse"], max_tokens=10**6)
    converted = hf_normswap.convert_checkpoint(model, "post")
    batch = [{"input_ids": torch.stack(data).reshape(-1, 64)[:, :64]}]
    for placement, one in (("pre", model), ("post", converted)):
        direct = hf_normswap.collapse(one, batch, skip_layers=False)
        assert found.measures[placement]["collapse"]["angular_distance"] == pytest.approx(
            direct.angular_distance, abs=0.02
        )
    assert found.about["tokens"] == 8 * 64 and set(found.measures["pre"]) == {"collapse"} and not found.fidelity


def frozen():
    return tiny_model("llama").requires_grad_(False)


def broken():
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.weight.data.fill_(math.nan)
    return model


def no_layer(model, placement, **options):
    raise MemoryError("no room for it\nsecond line")


# what cannot be had: model, what is replaced, (placement, measure) that are missing, part of the reason
MISSING = {
    "frozen": (
        frozen,
        {},
        {(name, measure) for name in ("pre", "post") for measure in ("gradient_profile", "sensitivity")},
        "frozen",
    ),
    "conversion": (
        lambda: tiny_model("llama"),
        {"convert_checkpoint": no_layer},
        {("post", "conversion")},
        "MemoryError: no room for it",
    ),
    "fidelity": (lambda: tiny_model("llama"), {"fidelity": no_layer}, {("post", "fidelity")}, "TypeError"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_cannot_be_had_is_a_row(case, monkeypatch, tmp_path):
    make, replaced, rows_missing, reason = MISSING[case]
    for name, function in replaced.items():
        monkeypatch.setattr(hf_normswap.report, name, function)
    measures = ["fidelity", "gradient_profile", "residual_stream", "sensitivity"]
    found = diagnose(make(), rows(), compare=["post"], measures=measures, warm_start="none")
    assert {(row["placement"], row["measure"]) for row in found.missing} == rows_missing
    assert all(reason in row["reason"] and "\n" not in row["reason"] for row in found.missing)
    assert found.measures["pre"]["residual_stream"] and found.headline
    page = found.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="missing"' in page and reason in page


def test_numbers_that_are_not_finite(tmp_path):
    found = diagnose(broken(), rows(), compare=["post"], warm_start="none", measures=QUICK)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert found.advice and str(found) and Diagnosis(**data).table() == found.table()
    assert not any("nan" in value or "None" in value for _, values in found.table() for value in values)
    assert found.save(tmp_path / "x.html").is_file()
    assert found.headline.startswith("The outputs of the model as it is (pre) are not finite")


def test_a_model_on_its_way_is_measured_but_not_advised(tmp_path):
    model = hf_normswap.convert_checkpoint(tiny_model("llama"), "post", warm_start="exact")
    found = diagnose(model, rows(), compare=[], measures=["collapse"])
    [row] = found.missing
    assert row["measure"] == "advice" and "`finish()` their morph first" in row["reason"] and found.advice is None
    assert found.headline == f"No advice: {row['reason']}"
    assert found.measures["mixed"]["collapse"] and "<code>finish()</code>" in found.save(
        tmp_path / "x.html"
    ).read_text("utf-8")


@pytest.mark.parametrize(
    "missing, measures, said",
    [
        ([("advice", "it failed")], {"collapse": {}}, "No advice: it failed."),
        ([("conversion", "no room"), ("advice", "it failed.")], {"collapse": {}}, "No advice: it failed."),
        ([("advice", "it failed")], {"collapse": {"loss": None}}, "The outputs of the model as it is (pre) are not finite; no advice: it failed."),
        ([], {"collapse": {}}, "No advice."),
    ],
)  # fmt: skip
def test_the_headline_without_advice(missing, measures, said):
    about = {"objective": "next token", "warm_starts": {}, "name": "x"}
    rows_missing = [{"placement": "pre", "measure": measure, "reason": reason} for measure, reason in missing]
    assert headline(Diagnosis("pre", about, {"pre": measures}, {}, rows_missing, None, "")) == said


@pytest.mark.parametrize(
    "layers, value",
    [([0.0, 1.0, 3.0], "3"), ([2.0, 1.0], "2"), ([0.0, 1.0], None), ([1.0], None), ([0.0, 0.0], None), ([], None), ([1.0, None], None)],
)  # fmt: skip
def test_frozen_layers_have_no_gradient_to_compare(layers, value):
    """The row of the table, and the advice."""
    found = Diagnosis("pre", {}, {"pre": {"gradient_profile": {"layers": layers}}}, {}, [], None, "")
    figures = [values for name, values in found.table() if name.startswith("Gradient norm, largest")]
    assert figures == ([] if value is None else [[value]])
    measured = [one.text for one in advise(tiny_config("llama"), measured=found.measures)[0].reasons if one.measured]
    assert measured == ([] if value is None else [f"gradients of its layers differ by a factor of {value}"])


@pytest.mark.parametrize("measure", MEASURES)
def test_a_measure_that_is_not_finite(measure, thorough):
    """Of one placement: the plots and the rest of the table stay."""
    _, found = thorough
    data = json.loads(json.dumps(found.to_dict()))
    one = data["fidelity"]["post"] if measure == "fidelity" else data["measures"]["post"].get(measure)
    one = data["measures"]["pre"]["cost"]["models"]["post"] if measure == "cost" else one
    one.update({key: [None] * len(value) if isinstance(value, list) else None for key, value in one.items()})
    rest = Diagnosis(**data)
    assert set(rest.figures()) == set(found.figures())
    for (name, values), (_, before) in zip(rest.table(), found.table(), strict=True):
        row = next(row for row in FIGURES if name.startswith(row[0].split("{")[0]))
        assert values == ([before[0], "–", before[2]] if row[1] == measure else before), name


HEADLINES = {  # what the conversions lose, or keep; gradients and int8 of source and conversions; what is said
    "far off": ((0.342, 0.341), (4.6, 226.0, 261.0), (0.004, 1.2, 1.3), "nats",
                "Keep pre: calibrated, post and deepnorm lose 0.34 nats; gradients differ by 226 to 261 times between layers in post and "
                "deepnorm (4.6 in pre); int8 weights add 1.2 to 1.3 nats in post and deepnorm (0.004 in pre)."),
    "one of them": ((0.342, 0.001), (4.6, 226.0, 5.0), (0.004, 0.01, 0.0), "nats",
                    "Keep pre: calibrated, post loses 0.34 nats, deepnorm loses nothing; gradients differ by 226 times between layers in "
                    "post (4.6 in pre)."),
    "a gain": ((-0.1, None), (4.6, 5.0, 6.0), (0.0, 0.0, 0.0), "nats", "Keep pre: calibrated, post gains 0.10 nats."),
    "no task": ((0.9, 0.9), (4.6, 226.0, 261.0), (0.0, 1.2, 1.3), "random target",
                "Keep pre: calibrated, hidden states keep a cosine of 0.900 in post and deepnorm."),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADLINES)
def test_the_headline(case):
    lost, steep, int8, objective, said = HEADLINES[case]
    names = ("pre", "post", "deepnorm")
    fidelity = {
        name: {"hidden_cosine": value}
        if objective == "random target"
        else {"converted_loss": value, "source_loss": 0.0}
        for name, value in zip(names[1:], lost)
        if value is not None
    }
    measures = {name: {"gradient_profile": {"loss": 1.0, "layers": [1.0, value]}} for name, value in zip(names, steep)}
    models = {name: {"loss": 0.0, "loss_int8_weights": value} for name, value in zip(names, int8)}
    measures["pre"]["cost"] = {"models": models}
    about = {"objective": objective, "warm_starts": dict.fromkeys(names[1:], "calibrated"), "name": "x"}
    advice = json.loads(json.dumps(advise(tiny_config("llama")).to_dict()))
    assert headline(Diagnosis("pre", about, measures, fidelity, [], advice, "")) == said


REFUSED = {
    "placement": ({"compare": ["pots"]}, "pots"),
    "measure": ({"measures": ["collaps"]}, "collaps"),
    "warm start": ({"warm_start": "warm"}, "warm"),
    "task": ({"task": "chess"}, "chess"),
    "no tokens": ({"max_tokens": 0}, "`max_tokens` must be at least 1, got 0"),
    "fewer": ({"max_tokens": -3}, "`max_tokens` must be at least 1, got -3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_measured(case, monkeypatch):
    monkeypatch.setattr(hf_normswap.report, "token_batches", None)
    options, name = REFUSED[case]
    with pytest.raises(NormSwapError, match=name):
        diagnose(tiny_model("llama"), rows(), **options)


@pytest.mark.parametrize(
    "name", ["report.txt", "nowhere/report.html", "report", "/proc/report.json", f"{'a' * 300}.json"]
)
def test_targets_that_are_refused(name, tmp_path):
    empty = Diagnosis("pre", {}, {"pre": {}}, {}, [], None, "Nothing.")
    with pytest.raises(NormSwapError, match="cannot write"):
        empty.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_page_needs_bokeh_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(hf_normswap.report, "find_spec", lambda name: None)
    empty = Diagnosis("pre", {}, {"pre": {}}, {}, [], None, "Nothing.")
    with pytest.raises(NormSwapError, match=r"hf_normswap\[report\]"):
        empty.save(tmp_path / "report.html")
    assert empty.save(tmp_path / "report.json").is_file()


def test_command_line(tmp_path):
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    arguments = ["diagnose", str(folder), "--compare", "post", "--warm-start", "none", "--measures", "residual_stream"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "report.txt")])
    assert result.exit_code == 2 and ".html or .json" in result.stderr
    result = CliRunner().invoke(app, [*arguments, "--data", str(tmp_path / "none.txt")])
    assert result.exit_code == 2 and "--data" in result.stderr
    (tmp_path / "tokenizer.json").write_text("{}")
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "report.json"), "--json"])
    assert result.exit_code == 2 and "tokenizer" in result.stderr and not (tmp_path / "report.json").exists()


def test_command_line_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_normswap.report, "split_text", lambda *_: ([{"input_ids": torch.stack(rows(4))}],) * 2)
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    arguments = ["diagnose", str(folder), "--compare", "post", "--warm-start", "none", "--measures", "collapse"]
    (tmp_path / "words.txt").write_text("Call me Ishmael.")
    arguments += ["--data", str(tmp_path / "words.txt")]
    for name in ("report.json", "report.html"):
        result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / name), "--json"])
        assert result.exit_code == 0, result.output
        assert set(json.loads(result.stdout)["measures"]) == {"pre", "post"}
        assert (tmp_path / name).stat().st_size < SIZE
    assert json.loads((tmp_path / "report.json").read_text())["measures"] == json.loads(result.stdout)["measures"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "model",
        "words.txt",
        "report.json",
        "report.html",
    }  # nothing half-written
    assert "tokens from words.txt" in (tmp_path / "report.html").read_text(encoding="utf-8")
    result = CliRunner().invoke(app, ["advise", str(folder), "--measured", str(tmp_path / "report.json"), "--json"])
    assert result.exit_code == 0 and "measured on this model" in result.stdout


TEXTS = {  # name -> bytes, and what is read, or part of the refusal
    "a.txt": (b"One line\nand another.\n\nA paragraph.\n", "One line\nand another.\n\nA paragraph.\n"),
    "a.md": (b"# Title\n", "# Title\n"),
    "a": (b"text", "text"),
    "a.csv": (b"text,label\nfirst,1\nsecond,0\n", ["first", "second"]),
    "a.jsonl": (b'{"text": "first"}\n{"text": "second"}\n', ["first", "second"]),
    "b.csv": (b"words,label\nfirst,1\n", ValueError("needs a column `text`")),
    "b.txt": (bytes(range(256)), ValueError("no text in UTF-8")),
    "c.txt": (b"text\0text", ValueError("no text in UTF-8")),
    "d.txt": (b" \n\n", ValueError("is empty")),
    "b.jsonl": (b"", ValueError("is empty, or not there")),
    "b.parquet": (b"PAR1", ValueError("cannot be read")),
}


@pytest.mark.parametrize("name", TEXTS)
def test_files_to_measure_on(name, tmp_path):
    content, expected = TEXTS[name]
    (tmp_path / name).write_bytes(content)
    if isinstance(expected, ValueError):
        with pytest.raises(ValueError, match=str(expected)):
            read_data(tmp_path / name)
    else:
        found = read_data(tmp_path / name)
        assert (found if isinstance(found, str) else list(found["text"])) == expected


@pytest.mark.parametrize(
    "error", [OSError, ValueError, RuntimeError, NormSwapError, TypeError, KeyError, AttributeError]
)
def test_what_becomes_a_sentence(error):
    """What a user or a file can cause; not what only a fault of ours can."""
    with pytest.raises(typer.Exit), one_sentence():
        raise error("word") if issubclass(error, (OSError, ValueError, RuntimeError, TypeError)) else typer.Exit(2)
    ours = compile("raise error('word')", hf_normswap.report.__file__, "exec")
    expected = typer.Exit if issubclass(error, (OSError, ValueError, RuntimeError)) else error
    with pytest.raises(expected), one_sentence():
        exec(ours, {"error": error})


# in a browser


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, and nothing if there is none."""
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("there is no chromium with chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.binary_location = chromium
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        yield session
        session.quit()


def open_page(browser, path: Path, width: int) -> tuple[list, list]:
    """What the page writes to the console, and the requests that it makes."""
    browser.get("about:blank")
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get_log("browser"), browser.get_log("performance")  # forgets what was before
    browser.get(path.as_uri())
    for _ in range(300):
        if browser.execute_script(
            "return !!window.Bokeh && Bokeh.documents.length && Bokeh.documents.every(d => d.is_idle)"
        ):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the plots did not come up")
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    return browser.get_log("browser"), urls


DATA = """
const found = {};
for (const figure of Bokeh.documents.flatMap(one => one.roots()))
  found[figure.name] = figure.renderers.filter(one => one.name !== "values").map(one => ({
    name: one.name, visible: one.visible, type: one.glyph.type,
    x: Array.from(one.data_source.get_column("x")), y: Array.from(one.data_source.get_column("y"))}));
return found;
"""

WIDER = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
TIPS = """
const found = [], walk = (node) => {
  if (/bk-Tooltip/.test(node.className)) found.push(node.shadowRoot.textContent);
  for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) walk(child);
};
walk(document.body);
return found;
"""


def test_page_in_a_browser(thorough, browser, tmp_path):
    _, found = thorough
    found = Diagnosis(**found.to_dict())
    found.about["name"] = "<script>document.title = 'run'</script>&"  # a name is text, whatever it is
    page, data = found.save(tmp_path / "report.html"), json.loads(found.save(tmp_path / "report.json").read_text())
    assert page.stat().st_size < SIZE

    for width in (1200, 360):
        console, urls = open_page(browser, page, width)
        assert not [entry for entry in console if entry["level"] in ("SEVERE", "WARNING")]
        assert [url for url in urls if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
        assert browser.execute_script(WIDER) <= 0
        boxes = browser.execute_script(
            "return Array.from(document.querySelectorAll('[data-plot]')).map(e => {const r = e.querySelector('.bk-Figure')"
            ".getBoundingClientRect(); return [e.dataset.plot, r.left, r.right, r.height]})"
        )
        assert {name for name, *_ in boxes} == {*(row[0] for row in CURVES), *(row[0] for row in POINTS)}
        for name, left, right, height in boxes:
            assert 0 <= left and right <= width and right - left > 250 and height > 60, (name, left, right, height)
    assert browser.title.startswith("<script>") and found.headline in browser.page_source.replace("&amp;", "&")

    shown = browser.execute_script(DATA)
    for name, (measure, field) in CURVE_FIELDS.items():
        expected = {
            placement: data["fidelity"][placement]["drift"]
            if measure == "fidelity"
            else data["measures"][placement][measure][field]
            for placement in data["measures"]
            if measure != "fidelity" or placement in data["fidelity"]
        }
        for kind in ("Line", "Scatter"):
            curves = {one["name"]: one["y"] for one in shown[name] if one["type"] == kind}
            assert curves == expected, name
        if name != "ramp":
            assert all(one["x"] == list(range(len(one["y"]))) for one in shown[name])
    for placement, measures in data["measures"].items():
        cost = data["measures"]["pre"]["cost"]["models"][placement]
        points = {
            "prefill": cost["prefill"]["ratio"],
            "decode": cost["decode"]["ratio"],
            "int8_weights": cost["loss_int8_weights"] - cost["loss"],
            "int8_dynamic": cost["loss_int8_dynamic"] - cost["loss"],
            "int8_output": cost["output_change_int8_dynamic"],
            "noise": measures["sensitivity"]["output_change"],
        }
        for name, value in points.items():
            assert [one["x"] for one in shown[name] if one["name"] == placement] == [[value]]
        shares = [0.0] * 3
        for branch in measures["residual_stream"]["branches"]:
            shares[branch["layer"]] += branch["final_share"]
        assert all(one["y"] == pytest.approx(shares) for one in shown["share"] if one["name"] == placement)

    box = browser.find_element("css selector", "[data-plot=rms]")
    for step in (0, 10):  # the tool needs a movement
        webdriver = pytest.importorskip("selenium.webdriver")
        webdriver.ActionChains(browser).scroll_to_element(box).move_to_element_with_offset(box, step, 0).perform()
    tips = browser.execute_script(TIPS)
    values = [data["measures"][one]["residual_stream"]["rms"] for one in data["measures"]]
    assert len(tips) == 1 and any(all(f"{rms[layer]:.4g}" in tips[0] for rms in values) for layer in range(4)), tips

    browser.find_element("css selector", "button[data-placement=post]").click()
    shown = browser.execute_script(DATA)
    assert all(one["visible"] == (one["name"] != "post") for plot in shown.values() for one in plot)


def test_a_browser_sees_what_is_loaded(browser, tmp_path):
    """The checks above can fail."""
    page = tmp_path / "loads.html"
    page.write_text(
        "<body style='width: 2000px'><script>window.Bokeh = {documents: [{is_idle: true}]}; console.error('no');"
        "fetch('http://127.0.0.1:9/x').catch(() => 0)</script>"
    )
    console, urls = open_page(browser, page, 360)
    assert browser.execute_script(WIDER) > 0
    assert any(entry["level"] == "SEVERE" for entry in console) and "http://127.0.0.1:9/x" in urls
