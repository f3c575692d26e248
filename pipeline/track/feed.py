"""The sidecar: `python -m pipeline.track.feed RUN_DIR` feeds MLflow from a run's log, in a process of its own.

Training never imports MLflow and never waits for it. Whatever happens here ends in exit status 0 and, if MLflow has
not got everything, in one line on standard output; the rest goes to standard error (`mlflow.log` in the run directory).
"""

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from pipeline.errors import RunError
from pipeline.runs.lock import hold
from pipeline.track import environment
from pipeline.track.feeder import Feeder
from pipeline.track.store import UnusableError, public, quicken, reason

WAIT_S = 20.0  # for a server that is away when training has ended
POLL_S = 1.0
LONGEST_PAUSE_S = 30.0
MODULE = "pipeline.track.feed"  # __name__ is __main__ in the sidecar itself


def start(run_dir: Path) -> "subprocess.Popen[str]":
    """Start the sidecar beside training; it ends by itself when this process has ended, however it did."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "mlflow.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(run_dir)],
            stdin=subprocess.PIPE,  # the kernel closes it with us: no pid to poll, none to be reused
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for training; this one still has to deliver
        )


def finish(process: "subprocess.Popen[str]", wait_s: float = WAIT_S) -> str:
    """Let it deliver the rest; the line to show if MLflow has not got everything, or nothing."""
    try:
        said, _ = process.communicate(timeout=wait_s + 10)  # its own give-up comes first
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return _replay(Path(process.args[3]), "MLflow is slow")  # type: ignore[index,arg-type]  # the list above
    return said.strip()


def sync(run_dir: Path, wait_s: float = WAIT_S) -> Feeder:
    """Replay what MLflow has not got, here and now."""
    if not (run_dir / "log.jsonl").is_file():
        raise RunError(f"run={run_dir} has no log.jsonl; name a run directory, such as runs/NAME")
    _settle_mlflow()
    with hold(run_dir / "mlflow.lock", wait_s=0) as alone, contextlib.redirect_stdout(sys.stderr):
        if not alone:
            raise RunError(f"run={run_dir} is being fed to MLflow right now; nothing to do")
        feeder = Feeder(run_dir)
        fault = follow(feeder, lambda: True, wait_s, _never)
    if fault:
        raise RunError(
            f"MLflow at {public(feeder.uri)} has not got all of {run_dir} ({fault}); mend that and sync again"
        )
    return feeder


def follow(
    feeder: Feeder, ended: Callable[[], bool], wait_s: float, told_to_stop: Callable[[], bool]
) -> str:
    """Feed until training has ended and all is sent, or the wait after its end for MLflow is over: then the reason."""
    deadline, pause_s, fault = float("inf"), POLL_S, ""
    while True:
        over = ended()  # asked before pumping: what was written before the end is then surely seen
        if (over or told_to_stop()) and deadline == float("inf"):
            deadline, pause_s = time.monotonic() + wait_s, POLL_S
        try:
            done = feeder.pump(over)
            if fault:
                logging.info("MLflow is back")
            pause_s, fault = POLL_S, ""
            if done and (over or (told_to_stop() and feeder.settled)):
                return ""
            if not done and over:
                deadline = (
                    time.monotonic() + wait_s
                )  # the wait is for a server that is away, not for one at work
            if not done and time.monotonic() < deadline:
                continue
        except UnusableError as error:
            return str(error)
        except Exception as error:  # MLflow raises many kinds, and none of them may end the feeding
            again, fault = bool(fault), reason(error)
            if not again:
                logging.warning("%s; records wait in log.jsonl", fault)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        if time.monotonic() >= deadline:
            return fault or "time ran out"
        _pause(pause_s, deadline, ended if deadline == float("inf") else _never)


def _never() -> bool:
    return False


def _pause(pause_s: float, deadline: float, wake: Callable[[], bool]) -> None:
    until = min(time.monotonic() + pause_s, deadline)
    while (left_s := until - time.monotonic()) > 0 and not wake():
        time.sleep(min(0.1, left_s))


def _settle_mlflow() -> None:
    quicken()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    for chatty in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _replay(run_dir: Path, fault: str) -> str:
    return f"MLflow has not got all of {run_dir} ({fault}); launch sync {run_dir} replays it"


def _closed_stdin() -> bool:
    """Training has ended, however it did."""
    return bool(select.select([0], [], [], 0)[0]) and os.read(0, 1 << 16) == b""


def main(arguments: Sequence[str] | None = None) -> int:
    what = "Feed MLflow from a run's log until standard input closes."
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=what)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, help="seconds to wait then for a server that is away"
    )
    options = parser.parse_args(arguments)

    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True  # a preempted job: training still saves and says so; then, or after the wait, we go

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(OSError):
        os.nice(10)  # training has the processors first

    _settle_mlflow()
    with contextlib.redirect_stdout(sys.stderr):  # MLflow prints where the run can be viewed
        fault = _attend(options.run_dir, _closed_stdin, options.wait, lambda: stopping)
    if fault:
        logging.warning(fault)
        with contextlib.suppress(OSError):
            sys.stdout.write(_replay(options.run_dir, fault) + "\n")
            sys.stdout.flush()
    return 0


def _attend(
    run_dir: Path, ended: Callable[[], bool], wait_s: float, told_to_stop: Callable[[], bool]
) -> str:
    try:
        while True:
            # The sidecar of the interrupted run may still be delivering, or somebody runs `launch sync`.
            with hold(run_dir / "mlflow.lock", wait_s=WAIT_S) as alone:
                if alone:
                    environment.write(run_dir)
                    return follow(Feeder(run_dir), ended, wait_s, told_to_stop)
            if ended() or told_to_stop():
                return "another process is feeding it"
    except OSError as error:  # a full disk, a vanished folder: training will say so itself
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
