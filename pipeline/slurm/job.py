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

from pipeline.config.load import reload
from pipeline.config.schema import Container, RunConfig
from pipeline.errors import ConfigError, RunError, UserError
from pipeline.slurm import attempts, queue
from pipeline.slurm.submit import pattern
from pipeline.track import feed
from pipeline.track.log import Log
from pipeline.train.rundir import RunDir

_STUCK_S = 60.0  # after one rank has said why it failed, the others have so long to end
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
        try:
            return cls(
                job=env["SLURM_JOB_ID"],
                restarts=int(env.get("SLURM_RESTART_COUNT", 0)),
                nodelist=env["SLURM_JOB_NODELIST"],
                nodes=int(env["SLURM_JOB_NUM_NODES"]),
                tasks=int(env["SLURM_NTASKS_PER_NODE"]),
                gpus=int(env.get("SLURM_GPUS_ON_NODE", 0)),
                cpus=int(env["SLURM_CPUS_PER_TASK"]) if "SLURM_CPUS_PER_TASK" in env else None,
            )
        except KeyError as missing:
            raise ConfigError(
                f"{missing} is not set; this runs inside a job, `launch pretrain --slurm` makes one"
            ) from None


def whole(here: Allocation, config: RunConfig) -> Allocation:
    """As many of the allocated nodes as cut the global batch evenly: a run that shrinks or grows keeps its batch."""
    micro = config.train.micro_batch
    assert isinstance(config.train.batch_tokens, int) and isinstance(micro, int)
    rows = config.train.batch_tokens // config.model.seq
    for nodes in range(here.nodes, 0, -1):
        if rows % (nodes * here.tasks * micro) == 0:
            return replace(here, nodes=nodes)
    raise ConfigError(
        f"{here.tasks} processes per node do not divide the {rows} sequences of a batch in micro-batches of {micro}; "
        "continue the run with another --nproc"
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
        log.append({**about, "event": "begin", "time": began, "nodes": here.nodelist, "world": here.nodes * here.tasks})
        logging.info("job %s, start %s, %s nodes of %s", here.job, here.restarts + 1, here.nodes, here.nodelist)
        code, said = (0, "") if run.finished else self._train()
        end = attempts.ending(run, here.job, began, code, self.asked, said, self.max_restarts)
        verdict = attempts.decide(end, restarts=here.restarts, most=self.site.max_restarts, run=run.path)
        log.append({**about, "event": verdict.action, "time": time.time(), "step": end.step, "reason": verdict.reason})
        log.close()
        logging.info("%s: %s", verdict.action, verdict.reason)
        if verdict.action == "requeue":
            self._requeue()
        return verdict.code

    def _train(self) -> tuple[int, str]:
        """srun's exit code and words, once it and the sidecar have ended."""
        self.run.forget_fault()
        spoken = self.log.stat().st_size
        feeder = feed.start(self.run.path) if self.track else None
        try:
            code = self._wait(subprocess.Popen(self._command(), env=self._environment()))
        finally:
            if feeder is not None and (note := feed.finish(feeder)):
                logging.info(note)
        return code, self.log.read_bytes()[spoken:].decode(errors="replace")

    @property
    def log(self) -> Path:
        return self.run.path / "logs" / "job.log"

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
                srun.send_signal(signal.SIGUSR1)  # srun hands this one on; at SIGTERM it would end the tasks itself
                told = True
            if failed == float("inf") and self.run.fault() is not None:
                failed = time.monotonic()
            if time.monotonic() - failed > _STUCK_S:  # a node that is gone answers nobody
                srun.kill()

    def _requeue(self) -> None:
        now = queue.entry(self.here.job)
        if now is not None and now.state != "RUNNING":  # cancelled or evicted meanwhile
            logging.info("SLURM has decided already: %s", now.state)
            return
        try:
            queue.requeue(self.here.job)
        except RunError as error:
            logging.info("%s; continue with: launch pretrain --resume --slurm --out %s", error, self.run.path)

    def _command(self) -> list[str]:
        here, site, logs = self.here, self.site, self.run.path / "logs"
        tasks = 1 if site.launcher == "torchrun" else here.tasks
        srun = ["srun", "--kill-on-bad-exit=1", "--input=none", "--open-mode=append"]
        srun += [
            "--relative=0",
            f"--nodes={here.nodes}",
            f"--ntasks={here.nodes * tasks}",
            f"--ntasks-per-node={tasks}",
        ]
        srun += [f"--output={pattern(logs)}/rank-%t.log"]
        if here.cpus is not None:  # srun does not take it over from sbatch
            srun += [f"--cpus-per-task={here.cpus * (here.tasks // tasks)}"]
        around, python = _container(site.container)
        task = [python, "-m", "pipeline.slurm.task", str(self.run.path)]
        return [*srun, *site.srun, *around, *task]

    def _environment(self) -> dict[str, str]:
        """Where the ranks meet: on the first node, at a port that the job's number gives and that is free there."""
        first = queue.hosts(self.here.nodelist)[0]
        env = {**os.environ, "MASTER_ADDR": first, "MASTER_PORT": str(_port(int(self.here.job), self.here.restarts))}
        env.setdefault("OMP_NUM_THREADS", str(self.here.cpus or 1))
        env["ISOFLOP_TASKS"] = str(self.here.tasks)
        if not self.here.gpus:
            env["DS_ACCELERATOR"] = "cpu"
        return env


def _port(job: int, restarts: int) -> int:
    at = (job + 97 * restarts) % len(_PORTS)  # not the port of the start before, which may still be closing
    port: int
    for port in (*_PORTS[at:], *_PORTS[:at]):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise RunError(f"no port of {_PORTS.start} to {_PORTS.stop} is free on this node; see `ss -ltn`")


def _container(container: Container | None) -> tuple[list[str], str]:
    """What stands around the task's command, and the Python in it."""
    match container:
        case None:
            return [], sys.executable
        case Container(kind="pyxis"):
            mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
            return [f"--container-image={container.image}", *mounts], container.python
        case Container(kind="apptainer"):
            binds = [f"--bind={mount}" for mount in container.mounts]
            return ["apptainer", "exec", "--nv", *binds, container.image], container.python
        case _:
            raise AssertionError(container)


def main(arguments: list[str]) -> int:
    run = RunDir(Path(arguments[0]))
    log = os.open(run.path / "logs" / "job.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)  # a member of an array too speaks in its run's own log, and srun with it
    os.dup2(log, 2)
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
