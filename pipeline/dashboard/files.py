"""The page's parts, served one by one or put together into one file that needs no network."""

import base64
import hashlib
import re
from functools import cache
from importlib import resources

PLOTLY = "plotly.js"  # the package's own copy, and the last to run: the table does not wait for it
SCRIPTS = ("figures.js", "chart.js", "law.js", "runs.js", "compare.js", "app.js", PLOTLY)
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
NAMES = ("page.css", *SCRIPTS)
# Plotly makes an empty style element and fills it by script: this is the digest of nothing.
PLOTLY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"


@cache
def part(name: str) -> str:
    """One of our own files, by a name from this file and never from a request."""
    if name == PLOTLY:
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs())
    return (resources.files("pipeline.dashboard") / "page" / name).read_text(encoding="utf-8")


def assets() -> dict[str, tuple[bytes, str]]:
    """What the served page asks for, under its name."""
    return {name: (part(name).encode(), KINDS[name[name.rindex(".") :]]) for name in NAMES}


@cache
def served_page() -> bytes:
    """Refers to its parts by digest, so that a browser may keep them for ever."""

    def address(name: str) -> str:
        return f"page/{name}?v={hashlib.sha256(part(name).encode()).hexdigest()[:12]}"

    scripts = "".join(f'<script defer src="{address(name)}"></script>\n' for name in SCRIPTS)
    return _filled(
        policy="",
        style=f'<link rel="stylesheet" href="{address("page.css")}">',
        data="",
        scripts=scripts,
    )


def static_page(data: bytes) -> bytes:
    """One self-contained file. Its policy forbids every request, so offline is not a promise but a fact."""
    style, scripts = part("page.css"), [part(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; img-src data:; base-uri 'none'; "
        f"form-action 'none'; style-src {_digest(style)} {PLOTLY_STYLE}; style-src-attr 'unsafe-inline'"
    )
    # JSON that cannot end the element it sits in
    safe = data.decode().replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return _filled(
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        style=f"<style>{style}</style>",
        data=f'<script id="data" type="application/json">{safe}</script>',
        scripts="".join(f"<script>{script}</script>\n" for script in scripts),
    )


def _filled(**parts: str) -> bytes:
    # Plotly brings a map's style sheet unless one of that id is there: its policy would refuse it, and no map is drawn.
    there = re.findall(r'getElementById\("([0-9a-f]{64})"\)', part(PLOTLY))
    parts["placeholders"] = "".join(f'<template id="{name}"></template>' for name in there)
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], part("page.html")).encode()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
