"""The real application behind a real uvicorn, in a thread."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from pipeline.dashboard.server import application
from pipeline.dashboard.source import Source
from pipeline.dashboard.watch import Watcher
from tests.track.mlflow_server import until


@contextmanager
def serving(
    source: Source, host: str = "127.0.0.1", token: str | None = None
) -> Iterator[tuple[int, Watcher]]:
    watcher = Watcher(source)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(watcher, host, token), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(
            lambda: (
                server.started
                and watcher.snapshot.reading is None
                and watcher.snapshot.laws_revision > 0
            ),
            240,
        )
        yield listening.getsockname()[1], watcher
    finally:
        server.should_exit = True
        thread.join(20)
