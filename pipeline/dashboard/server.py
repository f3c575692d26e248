"""The page over HTTP: read-only, on loopback unless a token guards it, and deaf to foreign hosts and origins."""

import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from fastapi import FastAPI, Header, Path, Query
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.dashboard.files import PLOTLY_STYLE, assets, served_page
from pipeline.dashboard.watch import Watcher

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    # Plotly places its labels by style attributes; scripts have no such leave.
    f"frame-ancestors 'none'; style-src 'self' {PLOTLY_STYLE}; style-src-attr 'unsafe-inline'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
COOKIE = "isoflop-token"
Answers = dict[int | str, dict[str, Any]]
REFUSALS: Answers = {
    401: {"description": "no token"},
    403: {"description": "a foreign host or origin"},
}
UNCHANGED: Answers = {304: {"description": "nothing has changed"}}


def application(watcher: Watcher, host: str = "127.0.0.1", token: str | None = None) -> ASGIApp:
    """Everything the page asks for; `token`, where given, is required of every request."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watcher.start()
        yield
        watcher.stop()

    app = FastAPI(
        title="Isoflop",
        version="1",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    parts = assets()

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return Response(served_page(), media_type="text/html; charset=utf-8")

    @app.get("/page/{name}", include_in_schema=False)
    def part(name: str) -> Response:
        if name not in parts:
            return PlainTextResponse("no such part", 404)
        content, kind = parts[name]
        return Response(
            content, media_type=kind, headers={"cache-control": "max-age=31536000, immutable"}
        )

    @app.get(
        "/api/runs",
        responses={**answer("the runs that have changed", "object"), **UNCHANGED, **REFUSALS},
    )
    def runs(
        since: Annotated[
            int, Query(ge=0, le=2**53, description="the revision that is already known")
        ] = 0,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Response:
        tag = f'"{watcher.boot}-{since}-{watcher.snapshot.revision}"'
        return tagged(tag, if_none_match, lambda: watcher.runs(since))

    @app.get(
        "/api/laws",
        responses={**answer("the law of each group of runs", "array"), **UNCHANGED, **REFUSALS},
    )
    def laws(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        now = watcher.snapshot
        return tagged(f'"{watcher.boot}-{now.laws_revision}"', if_none_match, lambda: now.laws)

    @app.get(
        "/api/runs/{key}",
        responses={
            **answer("everything about one run", "object"),
            404: {"description": "no such run"},
            **REFUSALS,
        },
    )
    def run(
        key: Annotated[str, Path(pattern="^[0-9a-f]{8,64}$", description="an id from /api/runs")],
    ) -> Response:
        found = watcher.page(key)
        if found is None:
            return JSONResponse({"detail": "no such run, or it cannot be read now"}, 404)
        return Response(found, media_type="application/json", headers={"cache-control": "no-cache"})

    return Guard(app, host, token)


def answer(description: str, kind: str) -> Answers:
    return {
        200: {
            "description": description,
            "content": {"application/json": {"schema": {"type": kind}}},
        }
    }


def tagged(tag: str, known: str | None, content: Callable[[], bytes]) -> Response:
    headers = {"etag": tag, "cache-control": "no-cache"}
    if known == tag:
        return Response(status_code=304, headers=headers)
    return Response(content(), media_type="application/json", headers=headers)


class Guard:
    """Stands before every request: who is asked, who asks, and with which token."""

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        self.app, self.token = app, token
        self.elsewhere = host not in LOCAL
        own = {host, socket.gethostname(), socket.getfqdn()} if self.elsewhere else set()
        self.names = LOCAL | {name.lower() for name in own}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websocket is spoken here

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refuse(scope, Headers(scope=scope))
        await (refused or self.app)(scope, receive, guarded)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        hosts, origin = headers.getlist("host"), headers.get("origin")
        if len(hosts) != 1 or not self._known(hosts[0]):
            return PlainTextResponse("403: this server is not called that", 403)
        if origin is not None and urlsplit(origin).netloc != hosts[0]:
            return PlainTextResponse("403: another page may not read this one", 403)
        if self.token is None:
            return None
        if scope["path"] == "/" and (
            given := parse_qs(scope["query_string"].decode("latin-1")).get("token")
        ):
            if not self._matches(given[0]):
                return PlainTextResponse("401: that is not the token", 401)
            home = RedirectResponse("/", 303)  # the address bar and the history need not know it
            home.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return home
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._matches(bearer) or self._matches(
            cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        ):
            return None
        return PlainTextResponse(
            "401: open the address that `launch dashboard` printed, token included", 401
        )

    def _known(self, host: str) -> bool:
        """Names that a browser can only have from us: a foreign name that resolves to us is an attack."""
        name = urlsplit(f"//{host}").hostname if _plain(host) else None
        if name is None:
            return False
        return name in self.names or (self.elsewhere and _is_address(name))

    def _matches(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _plain(host: str) -> bool:
    return (
        all(c.isalnum() or c in ".-_:[]" for c in host) and host.count("[") == host.count("]") <= 1
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
