"""Serve the page over HTTP, or write it as one file that needs no network.

The server is read-only. On loopback it answers only to its own names, so that a foreign page cannot
reach it through DNS; beyond loopback every request needs a token.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from typing import Annotated
from urllib.parse import parse_qs, quote, unquote

import uvicorn
from fastapi import FastAPI, Header, Path, Query
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.dashboard.live import Watcher

# The page and its parts

PLOTLY = "plotly.js"  # the package's own copy; loaded last, because the table does not need it
SCRIPTS = (
    "figures.js", "chart.js", "tasks.js", "law.js", "runs.js", "compare.js", "app.js", PLOTLY,
)  # fmt: skip
STYLE = "page.css"
# Plotly adds an empty style element and fills it by script: this is the digest of no text.
PLOTLY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
# Plotly positions its labels by style attributes; scripts are never allowed inline.
COMMON_POLICY = "img-src data:; base-uri 'none'; form-action 'none'; style-src-attr 'unsafe-inline'"


@cache
def part(name: str) -> str:
    """Return one of the page's files. Names come from this module, never from a request."""
    if name == PLOTLY:
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs())
    return (resources.files("pipeline.dashboard") / "page" / name).read_text(encoding="utf-8")


@cache
def served_page() -> bytes:
    """Return the page with links to its parts by digest, so that a browser can keep them."""

    def address(name: str) -> str:
        return f"page/{name}?v={hashlib.sha256(part(name).encode()).hexdigest()[:12]}"

    return _fill(
        policy="",
        style=f'<link rel="stylesheet" href="{address(STYLE)}">',
        data="",
        scripts="".join(f'<script defer src="{address(name)}"></script>\n' for name in SCRIPTS),
    )


def static_page(data: bytes) -> bytes:
    """Return one self-contained file; its policy forbids every request."""
    style = part(STYLE)
    scripts = [part(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; "
        f"style-src {_digest(style)} {PLOTLY_STYLE}; {COMMON_POLICY}"
    )
    # Escape the JSON so that it cannot close the element that contains it.
    safe = data.decode().replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return _fill(
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        style=f"<style>{style}</style>",
        data=f'<script id="data" type="application/json">{safe}</script>',
        scripts="".join(f"<script>{script}</script>\n" for script in scripts),
    )


def _fill(**parts: str) -> bytes:
    # Plotly adds a style sheet for maps unless an element with its id exists. The policy would
    # refuse that sheet, and the page draws no maps, so we add empty elements with those ids.
    ids = re.findall(r'getElementById\("([0-9a-f]{64})"\)', part(PLOTLY))
    parts["placeholders"] = "".join(f'<template id="{name}"></template>' for name in ids)
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], part("page.html")).encode()


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# The application

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
COOKIE = "isoflop-token"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    f"frame-ancestors 'none'; style-src 'self' {PLOTLY_STYLE}; {COMMON_POLICY}",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # links to MLflow do not reveal this address
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
Known = Annotated[str | None, Header(alias="if-none-match")]


def application(watcher: Watcher, token: str | None = None) -> ASGIApp:
    """Build the application; a `token`, if given, is required in every request."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watcher.start()
        yield
        watcher.stop()

    schema = "/api/openapi.json"
    app = FastAPI(
        title="Isoflop", docs_url=None, redoc_url=None, openapi_url=schema, lifespan=lifespan
    )

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return Response(served_page(), media_type="text/html; charset=utf-8")

    @app.get("/page/{name}", include_in_schema=False)
    def page_part(name: str) -> Response:
        if name not in (STYLE, *SCRIPTS):
            return PlainTextResponse("no such part", 404)
        kind = "text/css" if name == STYLE else "text/javascript"
        forever = {"cache-control": "max-age=31536000, immutable"}
        return Response(part(name), media_type=f"{kind}; charset=utf-8", headers=forever)

    @app.get("/api/runs")
    def runs(
        since: Annotated[int, Query(ge=0, le=2**53, description="the last known revision")] = 0,
        known: Known = None,
    ) -> Response:
        """Return the runs that have changed since a revision, and the ids of all."""
        tag = f'"{watcher.boot}-{since}-{watcher.snapshot.revision}"'
        return _tagged(tag, known, lambda: watcher.runs(since))

    @app.get("/api/laws")
    def laws(known: Known = None) -> Response:
        """Return the law of each group of runs."""
        now = watcher.snapshot
        return _tagged(f'"{watcher.boot}-{now.laws_revision}"', known, lambda: now.laws)

    @app.get("/api/runs/{key}")
    def run(
        key: Annotated[str, Path(pattern="^[0-9a-f]{8,64}$", description="an id from /api/runs")],
    ) -> Response:
        """Return everything about one run."""
        found = watcher.page(key)
        if found is None:
            return JSONResponse({"detail": "no such run, or it is unreadable now"}, 404)
        return Response(found, media_type="application/json", headers={"cache-control": "no-cache"})

    # Beyond loopback the token keeps foreign pages out: a browser does not send it to their names.
    hosts = ["*"] if token is not None else ["localhost", "127.0.0.1", "[::1]"]
    return Guard(TrustedHostMiddleware(app, hosts, www_redirect=False), token)


def _tagged(tag: str, known: str | None, content: Callable[[], bytes]) -> Response:
    headers = {"etag": tag, "cache-control": "no-cache"}
    if known == tag:
        return Response(status_code=304, headers=headers)
    return Response(content(), media_type="application/json", headers=headers)


class Guard:
    """Check origin and token of every request, and add the security policy to every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the page uses no websockets

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refuse(scope, Headers(scope=scope))
        await (refusal or self.app)(scope, receive, guarded)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        origin = headers.get("origin")
        # Not urlsplit, which raises an error for "http://[".
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            return PlainTextResponse("403: pages of other origins have no access", 403)
        if self.token is None:
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if scope["path"] == "/" and "token" in query:
            if not self._matches(query["token"][0]):
                return PlainTextResponse("401: wrong token", 401)
            # Redirect, so that the token stays out of the address bar and the history.
            home = RedirectResponse("/", 303)
            home.set_cookie(COOKIE, quote(self.token), httponly=True, samesite="strict")
            return home
        # The page sends the cookie, and scripts send the header.
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        cookie = unquote(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""))
        if self._matches(bearer) or self._matches(cookie):
            return None
        return PlainTextResponse("401: open the address that `launch dashboard` printed", 401)

    def _matches(self, given: str) -> bool:
        # compare_digest takes the same time wherever the first difference is.
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


# Connections

MAX_CONNECTIONS = 200
REQUEST_TIMEOUT_S = 10.0  # for a whole request, from the connection or the answer before it
ANSWER_TIMEOUT_S = 60.0  # for the answer, even if the client reads slowly


class LimitedProtocol(H11Protocol):
    """Uvicorn's HTTP protocol with a deadline for requests and a limit on connections.

    Uvicorn itself only closes idle connections after an answer; a half-sent request stays open.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.began = time.monotonic()
        self.deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._expire)
        # Beyond the limit, close the oldest connection without a request, to serve new ones.
        connections = [each for each in self.connections if isinstance(each, LimitedProtocol)]
        still_open = [each for each in connections if not each.transport.is_closing()]
        idle = [each for each in still_open if not each.answering]
        if len(still_open) > MAX_CONNECTIONS and idle:
            min(idle, key=lambda each: each.began).transport.abort()

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expire(self) -> None:
        # close() would wait until a slow client has read everything.
        abort = self.transport.abort
        if self.answering:
            self.deadline = self.loop.call_later(ANSWER_TIMEOUT_S, abort)
        else:
            abort()

    def on_response_complete(self) -> None:
        self.deadline.cancel()
        self.deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._expire)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline.cancel()
        super().connection_lost(exc)


def web_server(watcher: Watcher, token: str | None = None) -> uvicorn.Server:
    """Build the server; run it with `run(sockets=[...])`."""
    app = application(watcher, token)
    # Without server_header no answer names the program and its version.
    config = uvicorn.Config(app, http=LimitedProtocol, log_level="warning", server_header=False)
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
