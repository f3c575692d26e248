"""`make picture`: the pictures in README and docs, of the page that the demo drew."""

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright


def picture(page_file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(180_000)  # milliseconds, for a busy machine
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector("#chart .trace")
        page.screenshot(path=folder / "dashboard.png")
        page.set_viewport_size({"width": 1200, "height": drawn(page)})
        page.locator("#forecast").screenshot(path=folder / "forecast.png")
        page.set_viewport_size({"width": 1200, "height": 800})
        page.locator("#table tbody tr").last.get_by_role("link").first.click()
        page.wait_for_selector("#run-loss .trace")
        page.set_viewport_size({"width": 1200, "height": drawn(page)})
        page.screenshot(path=folder / "run.png")
        browser.close()


def drawn(page: Page) -> int:
    """Scroll through the page, because charts are drawn when they become visible; return its height."""
    height = int(page.evaluate("document.documentElement.scrollHeight"))
    for top in range(0, height, 400):
        page.evaluate(f"scrollTo(0, {top})")
        page.wait_for_timeout(200)
    page.evaluate("scrollTo(0, 0)")
    return height


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
