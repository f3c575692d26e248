"""The real application behind a real web server, in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.dashboard.live import Watcher
from pipeline.dashboard.server import listen, web_server
from pipeline.dashboard.source import Source
from tests.track.mlflow_server import until


@contextmanager
def serving(source: Source, token: str | None = None) -> Iterator[tuple[int, Watcher]]:
    """Serve a source and yield the port once its runs have been read and fitted."""
    watcher = Watcher(source)
    listening = listen("127.0.0.1", 0)
    server = web_server(watcher, token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()

    def ready() -> bool:
        now = watcher.snapshot
        return server.started and now.reading is None and now.laws_revision > 0

    try:
        until(ready, 240)
        yield listening.getsockname()[1], watcher
    finally:
        server.should_exit = True
        thread.join(20)
