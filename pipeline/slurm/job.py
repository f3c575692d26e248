"""The batch step of a training job: `python -m pipeline.slurm.job RUN_DIR`, on the allocation's first node.

It starts one process per GPU with srun and the MLflow sidecar beside them, hands a wish to stop on to all of them, and
when they have ended it asks SLURM for another start, or says why not.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, RunError, UserError
from pipeline.process import loopback, redirect_output
from pipeline.runs.directory import RunDir
from pipeline.runs.log import Log
from pipeline.slurm import attempts, queue
from pipeline.slurm.submit import step
from pipeline.track import mlflow_sync

_UNLAUNCHED = (
    "srun: error: Application launch failed"  # a node was slow to answer, or back but a moment ago
)
_STUCK_S = 15.0  # after one rank has said why it failed, and srun ends the others
_PORTS = range(15000, 30000)  # below those that the kernel hands out


@dataclass(frozen=True, slots=True)
class Allocation:
    """What SLURM says of this job; read once, here."""

    job: str
    restarts: int
    nodelist: str
    nodes: int
    tasks: int  # per node
    gpus: int  # per node
    cpus: int | None  # per task

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Allocation":
        return cls(
            job=env["SLURM_JOB_ID"],
            restarts=int(env.get("SLURM_RESTART_COUNT", 0)),
            nodelist=env["SLURM_JOB_NODELIST"],
            nodes=int(env["SLURM_JOB_NUM_NODES"]),
            tasks=int(env.get("SLURM_NTASKS_PER_NODE", 1)),
            gpus=int(env.get("SLURM_GPUS_ON_NODE", 0)),
            cpus=int(env["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in env else None,
        )


def whole(here: Allocation, config: RunConfig) -> Allocation:
    """As many of the allocated nodes as cut the global batch evenly: a run that shrinks or grows keeps its batch."""
    micro, share, rows = config.train.micro_batch, config.parallel, config.rows
    assert isinstance(micro, int)
    for nodes in range(here.nodes, 0, -1):
        ranks = nodes * here.tasks
        if ranks % share.ep == ranks % share.sp == 0 == rows % (ranks // share.sp * micro):
            return replace(here, nodes=nodes)
    raise ConfigError(
        f"{here.tasks} processes on each of up to {here.nodes} nodes do not divide the {rows} sequences of a batch in "
        f"micro-batches of {micro}, or are no multiple of --ep {share.ep} and --sp {share.sp}; give other --nodes"
    )


class Batch:
    def __init__(self, run: RunDir, here: Allocation, config: RunConfig, *, track: bool) -> None:
        self.run, self.here, self.track = run, here, track
        self.site, self.max_restarts = config.cluster.slurm, config.train.max_restarts
        self.asked: str | None = None

    def attempt(self) -> int:
        """One start of the job, to its end; the code to end the batch step with."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        run, here, began = self.run, self.here, time.time()
        log = Log(run.path / attempts.FILE)
        about = {"kind": "attempt", "job": here.job, "restart": here.restarts}
        log.append(
            {
                **about,
                "event": "begin",
                "time": began,
                "nodes": here.nodelist,
                "world": here.nodes * here.tasks,
            }
        )
        logging.info(
            "job %s, start %s, %s nodes of %s",
            here.job,
            here.restarts + 1,
            here.nodes,
            here.nodelist,
        )
        code, said, most = 0, "", self.site.max_restarts
        if here.restarts > most:  # by SLURM itself, after lost nodes or preemptions
            run.fail(
                RunError(
                    f"restarts={here.restarts} are more than cluster.slurm.max_restarts={most}"
                )
            )
        elif not run.finished:
            code, said = self._train()
        end = attempts.ending(run, here.job, began, code, self.asked, said, self.max_restarts)
        verdict = attempts.decide(end, restarts=here.restarts, most=most, run=run.path)
        log.append(
            {
                **about,
                "event": verdict.action,
                "time": time.time(),
                "step": end.step,
                "reason": verdict.reason,
            }
        )
        log.close()
        logging.info("%s: %s", verdict.action, verdict.reason)
        if verdict.action == "requeue":
            self._requeue()
        return verdict.code

    def _train(self) -> tuple[int, str]:
        """srun's exit code and words, once it and the sidecar have ended."""
        here, log = self.here, self.run.path / "logs" / "job.log"
        code, said = 0, ""
        feeder = mlflow_sync.start(self.run.path) if self.track else None
        try:
            command = step(self.run.path, self.site, here.nodes, here.tasks, here.cpus)
            for pause_s in (0, 5, 30):
                time.sleep(pause_s)
                self.run.forget_fault()
                if self.asked:
                    break
                spoken = log.stat().st_size
                code = self._wait(subprocess.Popen(command, env=self._environment()))
                said = log.read_bytes()[spoken:].decode(errors="replace")
                if _UNLAUNCHED not in said:
                    break
        finally:
            if feeder is not None and (note := mlflow_sync.finish(feeder)):
                logging.info(note)
        return code, said

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.asked != "SIGTERM":  # the graver wish stays
            self.asked = signal.Signals(number).name

    def _wait(self, srun: "subprocess.Popen[bytes]") -> int:
        told, failed = False, float("inf")
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = srun.wait(timeout=0.5)
                return code if code >= 0 else 128 - code
            if self.asked and not told:
                srun.send_signal(
                    signal.SIGUSR1
                )  # srun hands this one on; at SIGTERM it would end the tasks itself
                told = True
            if failed == float("inf") and self.run.fault() is not None:
                failed = time.monotonic()
            if time.monotonic() - failed > _STUCK_S:  # a node that is gone answers nobody
                srun.kill()

    def _requeue(self) -> None:
        for pause_s in (0, 5, 30, 120):  # a controller may be restarting
            time.sleep(pause_s)
            try:
                now = queue.entry(self.here.job)
                if now is None or now.state == "RUNNING":
                    queue.requeue(self.here.job)
                else:  # cancelled or evicted meanwhile
                    logging.info("SLURM has decided already: %s", now.state)
                return
            except RunError as error:
                logging.info("not requeued: %s", error)

    def _environment(self) -> dict[str, str]:
        """Where the ranks meet: on the first node, at a port that the job's number gives and that is free there."""
        alone = self.here.nodes == 1
        first = "127.0.0.1" if alone else queue.hosts(self.here.nodelist)[0]
        env = {
            **(loopback() if alone else {}),
            **os.environ,
            "MASTER_ADDR": first,
            "MASTER_PORT": str(_port(int(self.here.job), self.here.restarts)),
        }
        env.setdefault("OMP_NUM_THREADS", str(self.here.cpus or 1))
        env["ISOFLOP_TASKS"] = str(self.here.tasks)
        if not self.here.gpus:
            env["DS_ACCELERATOR"] = "cpu"
        return env


def _port(job: int, restarts: int) -> int:
    at = (job + 97 * restarts) % len(
        _PORTS
    )  # not the port of the start before, which may still be closing
    port: int
    for port in (*_PORTS[at:], *_PORTS[:at]):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise RunError(
        f"no port of {_PORTS.start} to {_PORTS.stop} is free on this node; see `ss -ltn`"
    )


def main(arguments: list[str]) -> int:
    run = RunDir(Path(arguments[0]))
    redirect_output(run.path / "logs" / "job.log")  # a member of an array too, and srun with it
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    try:
        config = reload(run.config)
        here = whole(Allocation.from_environment(os.environ), config)
        return Batch(run, here, config, track="--no-track" not in arguments).attempt()
    except UserError as error:
        logging.error("error: %s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
