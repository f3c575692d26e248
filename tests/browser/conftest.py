"""A Chromium for each file of tests, and a page that records every error in it."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.dashboard.live import Watcher
from tests.dashboard.served import serving

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def served() -> Iterator[Callable[..., tuple[int, Watcher]]]:
    """Serve a source until the test is over and its pages are closed."""
    with ExitStack() as stack:
        yield lambda source, **options: stack.enter_context(serving(source, **options))


@pytest.fixture
def opened(browser: Any, served: Any) -> Iterator[Callable[..., Any]]:
    """Open an address; at the end there must be no error, no foreign script and no request to another host."""
    contexts: list[Any] = []
    troubles: list[str] = []
    asked: list[str] = []

    def open_page(url: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(90_000)  # milliseconds, for a busy machine
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: troubles.append(message.text) if message.type != "log" else None,
        )
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            assert page.evaluate("window.hit") is None
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                "something is cut off"
            )
        context.close()
    assert troubles == []
    assert [
        url for url in asked if not url.startswith(("file:", "data:", "http://127.0.0.1:"))
    ] == []


@pytest.fixture
def forecast_json(inside: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """`launch forecast … --json`."""
    return lambda *arguments: json.loads(inside("forecast", *arguments, "--json"))
