"""The report in a real browser, from disk, with the network off."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.scaling.register import Score
from pipeline.scaling.report import page_data, render
from pipeline.scaling.runs import read_runs
from tests.scaling.made_runs import make_ladder, make_run

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "<img src=x onerror=window.hit=1>"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_offline_and_answers(browser, tmp_path: Path, scheme: str) -> None:
    make_ladder(tmp_path / "demo")
    make_run(tmp_path / "demo", "hostile", 6e5, 2e7, size=HOSTILE, name=HOSTILE, finish=False)
    file = tmp_path / "report.html"
    foretold = Score(run=None, N=7e6, D=1.4e8, C=6e15, forecast=2.4, low=2.3, high=2.5)
    file.write_text(render(page_data(read_runs(tmp_path / "demo"), title="demo", now=1e9, forecasts=[foretold])))
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 390, "height": 844})
    page = context.new_page()
    troubles: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#chart .scatterlayer .trace")
    # 3 finished runs draw train, held-out and final, the cut one no final; the law draws its line and two edges,
    # the forecast its mark
    assert page.locator("#chart .scatterlayer .trace").count() == 3 * 3 + 2 + 3 + 1
    assert page.locator("#runs tbody tr").count() == 4
    assert "cannot determine" in page.locator("#warnings").inner_text()
    page.select_option("#axis", "tokens")
    assert page.locator("#chart .scatterlayer .trace").count() == 3 * 3 + 2
    page.select_option("#unit", "bpb")
    page.get_by_role("button", name="Held-out loss").click()
    assert page.locator("#runs tbody tr").first.locator("td").first.inner_text() == "small-20x"
    page.locator("#legend button", has_text="tiny").click()
    assert page.locator("#chart .scatterlayer .trace").count() == 3 * 2 + 2
    assert HOSTILE in page.locator("#runs").inner_text()
    assert page.evaluate("window.hit") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # a phone needs no sideways scrolling
    assert troubles == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()
