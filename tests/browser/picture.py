"""`make picture`: the README's picture of the page that the demo drew."""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def picture(page_file: Path, image: Path) -> None:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector(".plotly .trace")
        image.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=image)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
