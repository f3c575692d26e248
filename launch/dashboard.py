"""`launch dashboard`: the page, live in a browser or as one file."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from launch.options import AsJson, Curves, Experiment, Law, RunsDir, examples
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.dashboard.live import Watcher

# Not an option: other users of the machine can read the arguments of a process.
TOKEN = "ISOFLOP_DASHBOARD_TOKEN"


app = typer.Typer()


@app.command(
    epilog=examples(
        "launch dashboard",
        "launch dashboard --runs runs/demo --port 8080",
        "launch dashboard --runs runs/demo --static dashboard.html",
        "launch dashboard --runs runs/demo --curves",
    )
)
def dashboard(
    runs: RunsDir = None,
    experiment: Experiment = None,
    static: Annotated[
        Path | None, typer.Option(help="Write the page to this HTML file instead of serving it.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port to serve on; 0 for any free port.", min=0, max=65535)
    ] = 8080,
    host: Annotated[
        str, typer.Option(help="Address to serve on; beyond loopback a token is required.")
    ] = "127.0.0.1",
    law: Law = "auto",
    curves: Curves = False,
    as_json: AsJson = False,
) -> None:
    """Serve the dashboard: loss against compute, the law, forecasts and every run, live."""
    # Imported here: scipy and the web server take seconds, and --help needs none of them.
    from pipeline.dashboard.live import Watcher
    from pipeline.dashboard.source import open_source
    from pipeline.scaling.study import NAMES

    # Checked here, because the watcher fits later in a thread, where an error becomes a note.
    if law not in NAMES:
        raise ConfigError(f"law={law!r} is unknown; choose one of {', '.join(NAMES)}")
    if curves and law == "envelope":
        text = "--curves corrects losses before the decay, and --law envelope uses them as they are"
        raise ConfigError(f"{text}; choose one of the two")
    watcher = Watcher(open_source(runs, experiment), law, curves=curves)
    if static is not None:
        write(watcher, static, as_json)
    else:
        serve(watcher, host, port, as_json)


def write(watcher: "Watcher", target: Path, as_json: bool) -> None:
    """Write the page as one file."""
    from pipeline.atomic import replace
    from pipeline.dashboard.live import encode
    from pipeline.dashboard.server import static_page

    # Unlike a live page, a file cannot recover, so an unreadable source is an error here.
    watcher.refresh(strict=True)
    # Report runs that were left out on stderr, because stdout may be JSON.
    for note in watcher.snapshot.notes:
        typer.echo(note, err=True)
    count = len(watcher.snapshot.runs)
    if not count:
        raise RunError(f"{watcher.source.title} contains no run; check --runs and --experiment")
    page = static_page(watcher.everything())
    try:
        if target.is_file() and not _is_page(target):
            raise ConfigError(f"static={target} exists and is not a page; choose another file")
        target.parent.mkdir(parents=True, exist_ok=True)
        replace(target, page)  # a browser may have the old page open
    except OSError as error:
        raise ConfigError(
            f"static={target} cannot be written ({error.strerror}); choose another file"
        ) from None
    if as_json:
        typer.echo(encode({"path": str(target), "runs": count, "bytes": len(page)}))
    else:
        runs = "1 run" if count == 1 else f"{count} runs"
        typer.echo(f"Wrote {target} ({runs}). Open it in a browser; it needs no network.")


def _is_page(path: Path) -> bool:
    begin = b"<!doctype html>"
    with path.open("rb") as file:
        return file.read(len(begin)).lower() in (begin, b"")  # `mktemp` makes an empty file


def serve(watcher: "Watcher", host: str, port: int, as_json: bool) -> None:
    """Serve the page until Ctrl-C."""
    from pipeline.dashboard.live import encode
    from pipeline.dashboard.server import LOOPBACK, listen, web_server

    token = None
    if host not in LOOPBACK:
        # A fixed token survives a restart; a random one needs no setup.
        token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    try:
        # Open the port before printing the address, so that the address works at once.
        listening = listen(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host={host} port={port} cannot be opened ({error}); try --port 0 or another --host"
        ) from None
    name = f"[{host}]" if ":" in host else host  # IPv6
    url = f"http://{name}:{listening.getsockname()[1]}/"
    if token is not None:
        # The first request exchanges the token for a cookie, so it disappears from the address.
        url += f"?token={quote(token, safe='')}"
    if as_json:
        typer.echo(encode({"url": url, "source": watcher.source.title}))
    else:
        typer.echo(f"{watcher.source.title} │ {url} │ Ctrl-C stops the server")
    # The server starts the watcher's thread and stops it at Ctrl-C.
    web_server(watcher, token).run(sockets=[listening])
