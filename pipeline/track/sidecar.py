"""The sidecar: a process beside training that feeds MLflow from the run's log.

`python -m pipeline.track.sidecar RUN_DIR` runs it. Training never imports MLflow and never waits
for it. If MLflow did not get everything, the sidecar prints one line on standard output. All other
output goes to standard error, which is `mlflow.log` in the run directory.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

from pipeline.atomic import locked
from pipeline.process import python_module
from pipeline.runs.history import write_environment
from pipeline.track.mlflow_store import configure
from pipeline.track.mlflow_sync import LOCK_FILE, WAIT_S, Feeder, follow

MODULE = "pipeline.track.sidecar"  # __name__ is __main__ in the sidecar itself
RESTART_PAUSES_S = (1.0, 5.0, 30.0, 30.0, 30.0)  # before a killed sidecar is started again


class Sidecar:
    """The sidecar as its launcher sees it. A thread starts it again if it is killed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._ending = threading.Event()
        self._lock = threading.Lock()  # held while `process` is replaced
        self.process = self._start()
        threading.Thread(target=self._restart_if_killed, daemon=True).start()

    def _start(self) -> "subprocess.Popen[str]":
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with (self._run_dir / "mlflow.log").open("a") as log:
            return subprocess.Popen(
                python_module(MODULE, self._run_dir),
                stdin=subprocess.PIPE,  # the kernel closes it when this process dies
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for training; the sidecar sends what is left
            )

    def _restart_if_killed(self) -> None:
        for pause_s in RESTART_PAUSES_S:
            code = self.process.wait()
            if code == 0 or self._ending.wait(pause_s):
                return
            with self._lock:
                if self._ending.is_set():
                    return
                try:
                    self.process = self._start()
                except OSError:
                    return  # a full disk or a deleted directory: training reports it

    def finish(self, wait_s: float = WAIT_S) -> str:
        """Let the sidecar send the rest; return a line to show if MLflow did not get everything."""
        with self._lock:
            self._ending.set()
        try:
            for attempt in range(2):
                if attempt == 1:  # the sidecar was killed: a new one sends the rest
                    self.process = self._start()
                # The sidecar gives up by itself before this time-out.
                printed, _ = self.process.communicate(timeout=wait_s + 10)
                if self.process.returncode == 0:
                    return printed.strip()
            fault = "the sidecar was killed"
        except subprocess.TimeoutExpired:
            fault = "MLflow is slow"
        except OSError as error:
            fault = str(error)
        self.process.kill()
        self.process.communicate()
        return _behind(self._run_dir, fault)


def _behind(run_dir: Path, fault: str) -> str:
    sync = f"launch sync {quote(str(run_dir))}"
    return f"MLflow does not have all of {run_dir} ({fault}); {sync} sends the rest"


def _stdin_closed() -> bool:
    """Return whether the launcher has ended, in any way."""
    return bool(select.select([0], [], [], 0)[0]) and os.read(0, 1 << 16) == b""


def main(arguments: Sequence[str]) -> int:
    """Feed MLflow until standard input closes. Exit status 1 asks to be started again."""
    run_dir = Path(arguments[0])
    # A preempted job gets SIGTERM. Training still saves and logs the save, which has to be sent.
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with contextlib.suppress(OSError):
        os.nice(10)  # training comes first
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    configure()
    with contextlib.redirect_stdout(sys.stderr):  # MLflow prints where to view the run
        fault = _feed(run_dir, stopping.is_set)
    if fault:
        logging.warning(fault)
        with contextlib.suppress(OSError):
            sys.stdout.write(_behind(run_dir, fault) + "\n")
            sys.stdout.flush()
    return int(bool(fault) and stopping.is_set() and not _stdin_closed())


def _feed(run_dir: Path, stopping: Callable[[], bool]) -> str:
    try:
        while True:
            # `launch sync` or the sidecar of an interrupted run may still hold the lock.
            with locked(run_dir / LOCK_FILE, wait_s=WAIT_S) as alone:
                if alone:
                    write_environment(run_dir)
                    return follow(Feeder(run_dir), _stdin_closed, WAIT_S, stopping)
            if _stdin_closed() or stopping():
                return "another process is feeding it"
    except OSError as error:  # a full disk, a deleted directory: training reports it
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
