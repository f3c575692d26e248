"""The real application behind a real uvicorn, in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.dashboard.live import Source, Watcher
from pipeline.dashboard.server import listen, web_server
from tests.track.mlflow_server import until


@contextmanager
def serving(source: Source, token: str | None = None) -> Iterator[tuple[int, Watcher]]:
    watcher = Watcher(source)
    listening = listen("127.0.0.1", 0)
    server = web_server(watcher, token)
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
