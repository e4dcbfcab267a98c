"""The report: what is measured side by side, as data, and as a page in a real browser."""

import json
import math
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model
from typer.testing import CliRunner

import hf_normswap.report
from hf_normswap import NormSwapError, advise, diagnose
from hf_normswap.cli import app
from hf_normswap.report import CURVES, MEASURES, POINTS, QUICK, Diagnosis

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
    assert "gated comes nearest" in found.headline and f"{cosine:.3f}" in found.headline and cosine > 0.999
    assert found.headline.endswith(".") and str(found).startswith(found.headline)


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
    found = diagnose(broken(), rows(), compare=["post"], warm_start="none", measures=QUICK[:3])
    json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert found.measures["pre"]["residual_stream"]["rms"][-1] is None and found.save(tmp_path / "x.html").is_file()


REFUSED = {
    "placement": ({"compare": ["pots"]}, "pots"),
    "measure": ({"measures": ["collaps"]}, "collaps"),
    "warm start": ({"warm_start": "warm"}, "warm"),
    "task": ({"task": "chess"}, "chess"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_measured(case, monkeypatch):
    monkeypatch.setattr(hf_normswap.report, "token_batches", None)
    options, name = REFUSED[case]
    with pytest.raises(NormSwapError, match=name):
        diagnose(tiny_model("llama"), rows(), **options)


@pytest.mark.parametrize("name", ["report.txt", "nowhere/report.html", "report"])
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
    for name in ("report.json", "report.html"):
        result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / name), "--json"])
        assert result.exit_code == 0, result.output
        assert set(json.loads(result.stdout)["measures"]) == {"pre", "post"}
        assert (tmp_path / name).stat().st_size < SIZE
    assert json.loads((tmp_path / "report.json").read_text())["measures"] == json.loads(result.stdout)["measures"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "model",
        "report.json",
        "report.html",
    }  # nothing half-written


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
