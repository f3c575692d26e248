"""A real MLflow server on SQLite that can be killed, frozen and brought back, and records to feed it with."""

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.forks import Launched


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: Launched | None = None

    def start(self) -> None:
        """Start what `mlflow server` starts, in a fork that has imported most of MLflow."""
        from mlflow.server import constants

        env = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        env |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        env[constants.BACKEND_STORE_URI_ENV_VAR] = f"sqlite:///{self.folder / 'server.db'}"
        env[constants.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
        env[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
        env[constants.ARTIFACTS_DESTINATION_ENV_VAR] = str(self.folder / "artifacts")
        command = ["--host", "127.0.0.1", "--port", self.port, "mlflow.server.fastapi_app:app"]
        with (self.folder / "server.log").open("a") as log:
            self.process = Launched("uvicorn", command, env, self.folder, log, log)
        until(self.answers, 240)

    def answers(self) -> bool:
        """Ask for an experiment, so that the database is complete before a test kills the server."""
        first = f"{self.uri}/api/2.0/mlflow/experiments/get?experiment_id=0"
        try:
            with urllib.request.urlopen(first, timeout=100) as answer:
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
