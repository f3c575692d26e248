"""Where a run's records go: the loop knows this protocol and nothing of consoles, files or servers."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.runs.log import Log


class Tracker(Protocol):
    def record(self, record: Mapping[str, object]) -> None: ...

    def close(self) -> None: ...


class LocalLog:
    """The run's log as a tracker; everything else (MLflow, the fit, the dashboard) reads that file."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def record(self, record: Mapping[str, object]) -> None:
        self.log.append({"time": time.time(), **record})

    def close(self) -> None:
        self.log.close()


class Fan:
    """Sends each record to all trackers in order: put the local log first."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def record(self, record: Mapping[str, object]) -> None:
        for tracker in self.trackers:
            tracker.record(record)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
