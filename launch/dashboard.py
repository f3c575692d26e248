"""`launch dashboard`: the page, live in a browser or as one file."""

import json
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.law import EXPERIMENT, JSON, LAW, RUNS
from launch.options import examples
from launch.tables import print_json
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.dashboard.watch import Watcher

TOKEN = "ISOFLOP_DASHBOARD_TOKEN"


def dashboard(
    runs: Annotated[Path | None, RUNS] = None,
    experiment: Annotated[str | None, EXPERIMENT] = None,
    static: Annotated[
        Path | None, typer.Option(help="Write the page as one HTML file instead.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Where to serve; 0 for any free port.", min=0, max=65535)
    ] = 8080,
    host: Annotated[
        str, typer.Option(help="The address; beyond loopback it asks for a token.")
    ] = "127.0.0.1",
    law: Annotated[str, LAW] = "auto",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Serve the page: loss against compute, the law, forecasts, every run, live. Or write it as one file."""
    from pipeline.dashboard.source import open_source
    from pipeline.dashboard.watch import Watcher
    from pipeline.scaling.study import NAMES

    if law not in NAMES:
        raise ConfigError(f"law={law!r} is unknown; choose one of {', '.join(NAMES)}")
    watcher = Watcher(open_source(runs, experiment), law)
    if static is not None:
        write(watcher, static, as_json)
    else:
        serve(watcher, host, port, as_json)


def write(watcher: "Watcher", target: Path, as_json: bool) -> None:
    from pipeline.dashboard.files import static_page

    watcher.refresh(strict=True)
    page = static_page(watcher.everything())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(page)
    except OSError as error:
        raise ConfigError(
            f"static={target} cannot be written ({error.strerror}); choose another place"
        ) from None
    count = len(watcher.snapshot.runs)
    if as_json:
        print_json({"path": str(target), "runs": count, "bytes": len(page)})
    else:
        typer.echo(f"Wrote {target} ({count} runs). Open it in any browser; it needs no network.")


def serve(watcher: "Watcher", host: str, port: int, as_json: bool) -> None:
    import uvicorn

    from pipeline.dashboard.server import LOCAL, application

    token = None if host in LOCAL else os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"port={port} on {host} cannot be opened ({error.strerror}); try --port 0"
        ) from None
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    shown = address if token is None else f"{address}?token={token}"
    if as_json:
        print(json.dumps({"url": shown, "source": watcher.source.title}), flush=True)
    else:
        typer.echo(f"{watcher.source.title} │ {shown} │ Ctrl-C ends it")
    config = uvicorn.Config(
        application(watcher, host, token), log_level="warning", server_header=False
    )
    uvicorn.Server(config).run(sockets=[listening])


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "launch dashboard",
            "launch dashboard --runs runs/demo --port 8080",
            "launch dashboard --runs runs/demo --static dashboard.html",
        )
    )(dashboard)
