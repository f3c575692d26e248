"""The page in a real Chromium: over run directories, as one file, with hostile names, empty, and large."""

import json
import math
import os
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.dashboard.live import Watcher
from pipeline.dashboard.server import static_page
from pipeline.dashboard.source import Directories
from pipeline.runs.history import read_runs
from pipeline.runs.log import Log
from pipeline.scaling.points import points_of
from pipeline.scaling.predict import at_sizes, forecast
from pipeline.scaling.record import register
from pipeline.scaling.study import study
from pipeline.track.console import Tracker
from pipeline.units import finite
from tests.browser.payloads import PAYLOADS
from tests.scaling.made_runs import make_ladder, make_run
from tests.track.mlflow_server import until

PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True}
BUDGETS = (3e13, 1e14, 3e14, 1e15)
# the position of a point of the law's line on the screen
UNDER_THE_LAW = """() => {
  const chart = document.getElementById("chart"), line = chart.data.find((t) => t.name === "law"), i = 112;
  const { xaxis, yaxis } = chart._fullLayout, box = chart.getBoundingClientRect();
  const at = (axis, value) => axis._offset + axis.l2p(Math.log10(value));
  return [line.x[i], box.x + at(xaxis, line.x[i]), box.y + at(yaxis, line.y[i])];
}"""
# C, N and D at a stop of the two sliders
STOP = "([i, j]) => { const g = iso.law().grid, k = g.sizes; return [g.C[i], g.N[i] * k[j], g.tokens[i * k.length + j]]; }"
PAIRS = "tiles => tiles.map(t => [t.children[0].textContent, t.children[1].textContent])"
HOVER_EACH_RUN = """async () => {
  const chart = document.getElementById("chart"), labels = [];
  for (const [curveNumber, t] of chart.data.entries())
    for (const [pointNumber, data] of (t.name === "final" ? t.customdata : []).entries()) {
      if (!data) continue;
      Plotly.Fx.hover(chart, [{ curveNumber, pointNumber }]);
      await new Promise((resolve) => setTimeout(resolve, 60)); // Plotly takes one hover in 50 ms
      labels.push(chart.querySelector(".hoverlayer").textContent);
    }
  return labels;
}"""
HOVER = """async (id) => {
  const chart = document.getElementById("chart"), mine = (c) => c?.row.id === id;
  const curveNumber = chart.data.findIndex((t) => t.name === "final" && t.customdata.some(mine));
  await new Promise((resolve) => setTimeout(resolve, 60)); // one hover in 50 ms
  Plotly.Fx.hover(chart, [{ curveNumber, pointNumber: chart.data[curveNumber].customdata.findIndex(mine) }]);
  return chart.querySelector(".hoverlayer").textContent;
}"""
FORECASTS = "document.getElementById('chart').data.filter(t => t.name === 'forecast').map(t => t.marker.symbol)"
POINT = "(({ x, y, error_y }) => [x[0], y[0], error_y.array[0], error_y.arrayminus[0]])"
LOADS = "document.getElementById('moe').data[0].z.map(row => row.at(-1))"
LAW_LINES = """() => document.getElementById("chart").data.filter((t) => t.name.startsWith("law"))
  .map((t) => [t.name, t.y])"""
SUMS = "document.getElementById('chart').data.map(t => [t.name, t.y.reduce((a, b) => a + b, 0)])"
FOLLOW = "document.querySelectorAll('a').forEach(a => { if (a.href.startsWith('javascript')) a.click(); })"


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """IsoFLOP runs of two architectures, with a registered forecast."""
    root = tmp_path_factory.mktemp("grid") / "iso"
    for arch in ("dense", "moe"):
        for b, C in enumerate(BUDGETS):
            for m in (0.25, 0.5, 1, 2, 4):
                N = m * (C / 6.4 / 20) ** 0.5
                make_run(root / arch, f"{arch}-{b}-{m}", N, C / 6.4 / N, size=f"x{m}", arch=arch, experiment="iso",
                         steps=100, seed=b)  # fmt: skip
    done = study(points_of(read_runs(root / "dense")))
    (made,) = forecast(done, at_sizes(done, 2e7, 8e7))
    register(root / "dense" / "forecasts", [made], finite(done.to_json()), now=0.0)
    return root


@pytest.fixture(scope="module")
def file(grid: Path) -> str:
    return static(grid, grid.parent / "page.html")


def static(root: Path, target: Path) -> str:
    watcher = Watcher(Directories(root))
    watcher.refresh(strict=True)
    target.write_bytes(static_page(watcher.everything()))
    return target.as_uri()


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def wait_for_text(page: Any, selector: str, words: str) -> None:
    until(lambda: words in text(page, selector), 90)


def slide(page: Any, selector: str, value: int) -> None:
    page.locator(selector).evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )


def axe(page: Any) -> list[Any]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(v["id"], [node["html"][:200] for node in v["nodes"]][:3]) for v in found]


def forecast_numbers(page: Any) -> dict[str, str]:
    """Return the figures of the forecast's tiles by their labels."""
    return dict(page.eval_on_selector_all("#forecast-tiles .tile", PAIRS))


def the_command_agrees(page: Any, runs: Path, forecast_json: Any) -> None:
    """The hover label and the sliders show the figures of `launch forecast --json`."""
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    C, x, y = page.evaluate(UNDER_THE_LAW)
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.wait_for_selector("#chart .hoverlayer .hovertext")
    loss = forecast_json("--runs", runs, "--flops", C)["loss"]
    assert page.locator("#chart .hoverlayer").text_content().split()[-1] == f"{loss:.4f}"

    # the sliders show the command's figures, at the optimum and away from it
    page.select_option("#cluster", "h200")
    for compute, split, gpus in ((70, 16, 8), (95, 27, 64)):
        page.select_option("#gpus", str(gpus))
        slide(page, "#compute", compute)
        slide(page, "#split", split)
        C, N, D = page.evaluate(STOP, [compute, split])
        target = ("--flops", C) if split == 16 else ("--params", N, "--tokens", D)
        made = forecast_json("--runs", runs, *target, "--cluster", "h200", "--gpus", gpus)
        shown = forecast_numbers(page)
        cost = made["cost"]
        assert cost["usd"] == pytest.approx(5.99 * cost["gpu_hours"])
        hours = cost["gpu_hours"]
        assert cost["mfu_from"] == "planner"
        assert shown["held-out loss"] == f"{made['loss']:.4f}"
        assert f"{made['low']:.4f} … {made['high']:.4f}" in text(page, "#forecast-tiles")
        for label, expected in (("parameters N", made["N"]), ("tokens D", made["D"]),
                                (f"GPU-hours at {cost['mfu']:.1%} MFU, planned", hours)):  # fmt: skip
            unit = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
            figure = float(shown[label].rstrip("kMBT")) * unit.get(shown[label][-1], 1)
            assert figure == pytest.approx(expected, rel=1e-2)
        assert shown["cost at $5.99 per GPU-hour"] == f"${5.99 * hours:.2f}"
    page.fill("#price", "10")
    assert forecast_numbers(page)["cost at $10 per GPU-hour"] == f"${10 * hours:.2f}"


def hovers(page: Any, run: str, wanted: list[str]) -> bool:
    label = page.evaluate(HOVER, run)
    return all(words in label for words in wanted)


def the_axes_switch(page: Any, run: dict[str, Any]) -> None:
    """Every axis and unit draws the numbers of the log; smoothing moves the training curve and no other."""
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    for axis, unit in (("tokens", "nats"), ("step", "bpb"), ("hours", "bpb"), ("flops", "nats")):
        page.select_option("#axis", axis)
        page.select_option("#unit", unit)
        loss, curve = run["row"]["loss"], run["curves"]["held_out"]
        places = {"flops": "1.00×10¹⁵ FLOPs", "tokens": "55.9M tokens", "step": "100 steps",
                  "hours": f"{curve['hours'][-1]:.3g} GPU-hours"}  # fmt: skip
        wanted = [run["row"]["name"], "N 2.8M", "D 55.9M", "20 tokens per parameter", places[axis]]
        wanted.append(f"{loss if unit == 'nats' else loss / math.log(2) / 3.4:.4f}")
        until(partial(hovers, page, run["row"]["id"], wanted), 30)
    the_law_of_each_size_is_smooth(page)
    rough = page.evaluate(SUMS)
    slide(page, "#smooth", 0)
    both = zip(rough, page.evaluate(SUMS), strict=True)
    assert {name for (name, before), (_, after) in both if before != after} == {"train"}


def the_law_of_each_size_is_smooth(page: Any) -> None:
    """There is one line per N, which falls everywhere and is hidden with its size. The law falls too."""
    for axis in ("tokens", "flops"):
        page.select_option("#axis", axis)
        drawn = page.evaluate(LAW_LINES)
        assert sum(name == "law of a size" for name, _ in drawn) == 20  # one per run of this grid
        for _, losses in drawn:
            assert all(after < before for before, after in pairwise(losses))
    assert drawn[0][0] == "law"
    chip = page.locator("#legend button").first  # a size of four runs
    chip.click()
    assert len(page.evaluate(LAW_LINES)) == len(drawn) - 4
    chip.click()


def the_keyboard_is_enough(page: Any) -> None:
    page.locator("#compute").focus()
    compute = text(page, "#compute-out")
    loss = forecast_numbers(page)["held-out loss"]
    page.keyboard.press("ArrowLeft")
    assert compute != text(page, "#compute-out") and loss != forecast_numbers(page)["held-out loss"]
    chip = page.locator("#legend button").first
    chip.focus()
    page.keyboard.press("Space")
    assert chip.get_attribute("aria-pressed") == "false"
    page.keyboard.press("Space")
    page.get_by_role("button", name="Held-out").focus()
    page.keyboard.press("Enter")
    assert page.locator("#table tbody tr").first.locator("th").inner_text().endswith("-3-2")
    assert page.locator("#table thead th[aria-sort=ascending]").inner_text().startswith("Held-out")


def the_parts_are_there(page: Any, rows: int) -> None:
    """IsoFLOP minima, the law's three charts, the registered forecast, both architectures at equal compute."""
    assert page.locator("#table tbody tr").count() == rows
    page.select_option("#group", label="iso · dense (20 runs)")
    assert page.locator("#minima tbody tr").count() == len(BUDGETS)
    law = page.evaluate("iso.law().law")  # the backtests of this grid are close
    assert page.locator("#parameters tbody tr").count() == {"chinchilla": 5, "gamma": 6}[law]
    assert "10 times" not in text(page, "#plain")
    for chart in ("valleys", "path", "residuals", "backtest", "profile", "forecast-chart"):
        page.locator(f"#{chart}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{chart} .trace", state="attached")
    assert page.evaluate(FORECASTS) == ["diamond-open"]
    page.select_option("#sides", "arch")
    assert text(page, "#compare-table tbody tr:nth-child(2) td:nth-child(3)").endswith("%")


@pytest.mark.parametrize("options", [{}, PHONE], ids=["light", "phone, dark"])
def test_one_file_opens_from_disk_with_the_network_off(opened, file, grid, forecast_json, options):
    page = opened(file, offline=True, **options)
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert axe(page) == []
    the_parts_are_there(page, 20 if options else 40)
    if not options:
        page.emulate_media(color_scheme="dark")
        assert axe(page) == []
        page.emulate_media(color_scheme="light")
        the_command_agrees(page, grid / "dense", forecast_json)
        run = "[...iso.runs.values()].find(r => r.row.name === 'dense-3-1')"
        the_axes_switch(page, page.evaluate(run))
        the_keyboard_is_enough(page)
    page.fill("#filter", "moe 3 x2")
    assert page.locator("#table tbody tr").count() == 1
    page.fill("#filter", "")

    # a run's own page, and back
    page.locator("#table tbody a.name").first.press("Enter")
    page.wait_for_selector("#run-loss .trace")
    assert page.evaluate("document.activeElement.id") == "run-title"
    page.select_option("#other", index=1)
    assert "The same tokens at all 100 steps" in text(page, "#agreement")
    assert axe(page) == []
    page.get_by_role("link", name="all runs").click()
    page.wait_for_selector("#overview:not([hidden])")


def test_a_run_that_is_gone_shows_nothing_of_another(opened, tmp_path: Path) -> None:
    watcher = Watcher(Directories(make_ladder(tmp_path / "demo", 2)))
    watcher.refresh()
    (tmp_path / "page.html").write_bytes(static_page(watcher.everything()))
    page = opened((tmp_path / "page.html").as_uri())
    page.locator("#table tbody a.name").first.click()
    page.wait_for_selector("#run-loss .trace")
    page.evaluate("location.hash = '#run/ffffffffffff'")
    until(lambda: "does not exist" in text(page, "#run-title"), 90)
    for part in ("#run-words", "#run-tiles", "#run-charts", "#agreement"):
        assert not page.is_visible(part), part
    page.go_back()
    page.wait_for_selector("#run-tiles", state="visible")


def test_fifty_hostile_names_stay_text(opened, served, tmp_path: Path) -> None:
    root = tmp_path / "iso"
    for i, payload in enumerate(PAYLOADS):
        run = make_run(root, f"r{i}", 1e5 * (1 + i % 5), 2e6 * (1 + i // 5), name=payload, size=PAYLOADS[-i % 5],
                       steps=20, seed=i, convention=PAYLOADS[3], experiment=PAYLOADS[7])  # fmt: skip
    (root / "r0" / "log.jsonl").open("a").write(
        json.dumps({"kind": "event", "time": 1.0, "step": 5, "event": PAYLOADS[0]}) + "\n"
    )
    (run / "mlflow.json").write_text(json.dumps({"uri": "javascript:window.hit=1", "run_id": "x"}))
    port, _ = served(Directories(root))
    for url in (f"http://127.0.0.1:{port}/", static(root, tmp_path / "page.html")):
        page = opened(url)
        page.wait_for_selector("#chart .scatterlayer .trace")
        shown = page.eval_on_selector_all("#table .name", "ns => ns.map(n => n.textContent)")
        assert sorted(shown) == sorted(PAYLOADS)
        # The chart interprets some markup, but names must stay plain text.
        hovered = "".join(page.evaluate(HOVER_EACH_RUN))
        assert [name for name in PAYLOADS if name.isprintable() and name not in hovered] == []
        for box in page.locator("#table input").all()[:5]:
            box.check()
        page.goto(f"{url}#run/{page.evaluate('[...iso.runs.values()][0].row.id')}")
        page.wait_for_selector("#run-loss .trace")
        page.evaluate(FOLLOW)
        active = "main :is(img, iframe, object, embed, video, audio, form, base, meta)"
        assert page.locator(active).count() == 0
        assert page.evaluate("window.hit") is None


def test_a_run_that_logs_is_followed_and_a_forecast_fills_in(
    opened, served, forecast_json, tmp_path
):
    """Records go through the real tracker while the page is open; nothing reloads it."""
    root = make_ladder(tmp_path / "live", 5)
    forecast_json("--runs", root, "--params", 5e7, "--tokens", 1e9, "--register")
    run = make_run(root, "growing", 3e5, 6e6, steps=400, arch="moe", finish=False)
    tracker = Tracker(Log(run / "log.jsonl"))
    last = 266

    def train(to: int) -> None:
        nonlocal last
        for step in range(last + 1, to + 1):
            at = {"kind": "step", "step": step, "tokens": step * 15000, "flops": step * 3e10}
            at |= {"lr": 1e-3, "grad_norm": 0.4, "tokens_per_s": 2e4, "hash": f"{step:016x}"}
            tracker.record({**at, "loss": 3.0 + 5 * (step == 300)})
            if step % 10 == 0:
                shares = [[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
                tracker.record({"kind": "moe", "step": step, "tokens": 0, "load": shares})
        last = to

    train(290)
    port, _ = served(Directories(root))
    page = opened(f"http://127.0.0.1:{port}/")
    cell = page.locator("#table tbody tr", has_text="growing").locator("td[data-label=Step]")
    wait_for_text(page, "#table", "290 / 400")
    assert "running" in text(page, "#table") and text(page, "#tiles").count("1 running") == 1
    page.evaluate("window.mark = 1")
    page.wait_for_selector("#chart .trace")
    assert page.evaluate(FORECASTS) == ["diamond-open"]
    make_run(root, "landed", 5e7, 1e9, size="huge", experiment="isoflop")  # the default name
    until(lambda: page.evaluate(FORECASTS) == ["diamond"], 90)  # the run has finished
    page.locator("#table tbody tr", has_text="growing").locator("a.name").focus()
    tracker.record({"kind": "event", "step": 290, "event": "resume", "world": 1})
    train(320)
    wait_for_text(page, "#table", "320 / 400")
    assert cell.inner_text() == "320 / 400"
    # The page was not reloaded, and the link kept its focus.
    assert page.evaluate("window.mark === 1 && document.activeElement.textContent === 'growing'")
    page.keyboard.press("Enter")
    page.wait_for_selector("#moe .heatmaplayer image", state="attached")
    assert page.evaluate(LOADS) == [1.6, 1]
    events = text(page, "#run-events")
    assert "resume at step 290" in events and "1 loss spike" in events
    page.select_option("#layer", "0")
    assert page.evaluate(LOADS) == [0.4, 0.8, 1.2, 1.6]
    train(330)  # the page of the run is updated too
    wait_for_text(page, "#run-words", "330 / 400")
    tracker.close()
    assert axe(page) == []


def test_an_empty_store_one_run_and_a_token(opened, served, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    page = opened(static(root, tmp_path / "empty.html"), offline=True)
    assert "No runs yet" in text(page, "#empty") and axe(page) == []
    make_run(root, "only", 1e5, 2e6)
    port, _ = served(Directories(root), token="s3cret")
    page = opened(f"http://127.0.0.1:{port}/?token=s3cret")
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert page.url == f"http://127.0.0.1:{port}/"  # the token is not left in the address
    assert "two finished runs" in text(page, "#warnings")
    assert "needs a law" in text(page, "#forecast-words") and axe(page) == []


@pytest.mark.timeout(400)
def test_two_hundred_runs_of_two_thousand_points(opened, served, tmp_path: Path) -> None:
    root = tmp_path / "many"
    for i in range(8):
        made = make_run(root, f"size{i}-0", 1e5 * 2**i, 2e6 * 2**i, size=f"size{i}", steps=2000)
        record = json.loads((made / "run.json").read_text())
        for k in range(1, 25):
            (root / f"size{i}-{k}").mkdir()
            (root / f"size{i}-{k}" / "run.json").write_text(
                json.dumps(record | {"name": f"size{i}-{k}"})
            )
            os.link(made / "log.jsonl", root / f"size{i}-{k}" / "log.jsonl")
    port, watcher = served(Directories(root))
    assert len(watcher.runs()) < 8_000_000  # the bytes that a browser has to read
    page = opened(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert "of 200 runs finished" in text(page, "#tiles")
    assert page.locator("#table tbody tr").count() == 100
    began = time.monotonic()
    page.select_option("#axis", "tokens")
    slide(page, "#smooth", 0)
    page.fill("#filter", "size7")
    assert page.locator("#table tbody tr").count() == 25
    assert time.monotonic() - began < 30  # on a busy machine; docs/DASHBOARD.md has the figures


def test_only_held_out_losses_are_compared(opened, tmp_path):
    """Runs with a single evaluation are points of the curve of their size and have no other curve."""
    runs = [("a1", "tiny", 1e6), ("a2", "tiny", 4e6), ("b1", "mini", 2e6), ("b2", "mini", 8e6)]
    runs.append(("c", "small", 4e6))
    held_out = {}
    for name, size, tokens in runs:
        log = make_run(tmp_path / "once", name, 1e5, tokens, size=size) / "log.jsonl"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        kept = [r for r in records if r["kind"] != "eval" or r["step"] == 400]
        log.write_text("".join(json.dumps(record) + "\n" for record in kept))
        held_out[name] = next(r["loss"] for r in kept if r["kind"] == "eval")
    page = opened(static(tmp_path / "once", tmp_path / "page.html"))
    page.locator("#compare").scroll_into_view_if_needed()
    page.wait_for_selector("#compare-chart .trace")
    drawn = page.evaluate("document.getElementById('compare-chart').data.map((t) => t.y)")
    for curve, names in zip(drawn, (("a1", "a2"), ("b1", "b2")), strict=True):
        assert curve == pytest.approx([held_out[name] for name in names], rel=1e-5)
    assert text(page, "#compare-words").startswith("small: evaluated once and not compared.")
    page.locator("#table tbody input").first.check()
    page.locator("#table tbody input").nth(1).check()
    page.select_option("#sides", "runs")
    assert "train.eval_every" in text(page, "#compare-words")
    assert page.locator("#compare-body").is_hidden()


def test_a_forecast_of_a_task_stands_beside_its_curves(opened, served, forecast_json, tmp_path):
    root = make_ladder(tmp_path / "tasks", 4, questions=2000)
    target = ("--params", 5e7, "--tokens", 1e9, "--task", "pairs", "--chance", 0.5)
    made = forecast_json("--runs", root, *target, "--register")
    port, _ = served(Directories(root))
    page = opened(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("#task-chart .trace")
    page.select_option("#task", "pairs/accuracy")
    drawn = "document.getElementById('task-chart').data"
    assert page.evaluate(f"{drawn}.length") == 5  # four runs and the forecast
    first = page.evaluate(f"{POINT}({drawn}[0])")
    up, down = made["high"] - made["accuracy"], made["accuracy"] - made["low"]
    assert first == pytest.approx([made["C"], made["accuracy"], up, down])
    assert page.evaluate(FORECASTS) == []  # it is no forecast of the loss
    page.select_option("#task", "pairs/bpb")
    assert page.evaluate(f"{drawn}.length") == 4


def test_the_induction_phase_change_is_visible(opened, served, tmp_path):
    """Both scores of a run are drawn against tokens, prefix matching from 0 to 1."""
    log = make_run(tmp_path, "run", 1e5, 2e6) / "log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    evals = [record for record in records if record["kind"] == "eval"]
    for number, record in enumerate(evals):
        late = number >= len(evals) / 2
        record |= {"in_context/score": -0.5 * late, "in_context/prefix_matching": 0.9 * late}
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    port, _ = served(Directories(tmp_path))
    page = opened(f"http://127.0.0.1:{port}/")
    for chart, last in (("in-context-score", -0.5), ("prefix-matching", 0.9)):
        page.wait_for_selector(f"#{chart} .trace")
        drawn = page.evaluate(
            f"(({{ x, y }}) => [x, y])(document.getElementById('{chart}').data[0])"
        )
        assert drawn[0] == [record["tokens"] for record in evals]
        assert (drawn[1][0], drawn[1][-1]) == (0, last)
    scale = "document.getElementById('prefix-matching').layout.yaxis.range"
    assert page.evaluate(scale) == [0, 1]
