"""A real `mlflow server` on SQLite that can be killed, frozen and brought back, and records to feed it with."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"),
            *("--artifacts-destination", str(self.folder / "artifacts")),
        ]
        env = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        env |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
        until(self.answers, 240)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


def until(true: Callable[[], object], seconds: float = 800, fault: str = "in vain") -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{fault}: waited for {seconds} s"
        time.sleep(0.05)


def step_record(step: int, **more: object) -> dict[str, object]:
    tokens = step * 4096
    return {
        "kind": "step", "time": time.time(), "step": step, "tokens": tokens,
        "flops": tokens * 1_000_000, "loss": 10 / (1 + step) ** 0.1, "grad_norm": 0.42,
        "lr": 2.9e-4, "tokens_per_s": 412e3, "mfu": None, "hash": f"{step:016x}", **more,
    }  # fmt: skip


def event(step: int, name: str) -> dict[str, object]:
    return {"kind": "event", "time": time.time(), "step": step, "event": name}
