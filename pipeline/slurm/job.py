"""The batch step of a training job: `python -P -m pipeline.slurm.job RUN_DIR [--no-track]`.

It runs on the first node of the allocation. It starts the ranks with srun and the MLflow sidecar
beside them, and passes a stop request on to them. When they have ended, it asks SLURM to start
the job again, or records why not (attempts.jsonl in the run directory).
"""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Literal

from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, RunError, UserError
from pipeline.process import SIGNALS, STOPPED, loopback, redirect_output
from pipeline.runs.directory import RunDir, fault_line, no_restart
from pipeline.runs.log import Log, Record, read
from pipeline.slurm import queue
from pipeline.slurm.queue import ATTEMPTS, past_attempts
from pipeline.slurm.submit import step
from pipeline.track.sidecar import Sidecar

# srun prints this if a node is slow to answer, for example just after it booted.
_LAUNCH_FAILED = "srun: error: Application launch failed"
# srun reports every task that ends with an error; the first one is the cause.
_TASK_ENDED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_STUCK_S = 15.0  # time for srun to end the other tasks after a rank has recorded its failure
_PORTS = range(15000, 30000)  # below the ports that the kernel assigns to clients


@dataclass(frozen=True, slots=True)
class Allocation:
    """SLURM's description of this job, read once from the environment."""

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


def usable(here: Allocation, config: RunConfig) -> Allocation:
    """Use as many of the allocated nodes as divide the global batch, which a run never changes."""
    micro = config.train.micro_batch
    ep = config.parallel.ep
    sp = config.parallel.sp
    for nodes in range(here.nodes, 0, -1):
        ranks = nodes * here.tasks
        divides = ranks % ep == 0 and ranks % sp == 0
        if divides and config.rows % (ranks // sp * micro) == 0:
            return replace(here, nodes=nodes)
    raise ConfigError(
        f"{here.tasks} processes on each of up to {here.nodes} nodes do not divide the "
        f"{config.rows} sequences of a batch in micro-batches of {micro}, or are not a multiple of "
        f"--ep {ep} and --sp {sp}; give other --nodes"
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, as the batch step saw it."""

    step: int  # the last one logged
    finished: bool
    saved: bool  # at the request of a signal
    asked: str | None  # the signal that reached the batch step
    fault: Record | None
    hopeless: str | None  # why another attempt would end like this one


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Literal["done", "requeue", "stop"]
    reason: str
    code: int = 0  # exit code of the job


def decide(end: Ending, *, restarts: int, most: int, run: Path) -> Verdict:
    """Decide whether to requeue the job: only if another attempt may succeed."""
    again = f"launch pretrain --resume --slurm --out {quote(str(run))}"
    if end.finished:
        return Verdict("done", f"finished at step {end.step}")
    if end.asked == "SIGTERM":  # from `launch cancel`, scancel or SLURM, which want the job to end
        how = "saved" if end.saved else "was"
        return Verdict("stop", f"asked to end; {how} at step {end.step}", STOPPED)
    if end.fault is not None and end.hopeless is not None:
        code = 2 if end.fault["user"] else 1
        return Verdict("stop", f"{end.hopeless}; see {run}/logs, then {again}", code)
    if end.fault is not None:
        reason = f"{fault_line(end.fault)} at step {end.step}"
    elif end.saved:
        reason = f"saved at step {end.step} as asked"
    else:  # the signal came before the ranks could handle it, which is not a fault
        reason = f"asked to stop at step {end.step}"
    if restarts >= most:
        limit = f"restarts={restarts} reach cluster.slurm.max_restarts={most}"
        return Verdict("stop", f"{reason}; {limit}; {again}", 1)
    return Verdict("requeue", reason, STOPPED)


def attribute(run: RunDir, code: int, printed: str) -> Record:
    """Record why an attempt failed: the reason that a rank left, or what srun printed."""
    known = run.fault()
    ended = _TASK_ENDED.search(printed)
    if ended is not None:
        node, task, how = ended.groups()
        # A rank that exits by itself has recorded a better reason. A rank that was killed has not,
        # and the others only report a lost connection.
        if known is None or not (how.startswith("Exited") or known["user"]):
            run.forget_fault()
            run.fail(ChildProcessError(f"rank {task} on {node}: {how}"))
    return run.note_fault(code)


class Batch:
    """One start of the job, from srun to SLURM's answer to a requeue."""

    def __init__(self, run: RunDir, here: Allocation, config: RunConfig, *, track: bool) -> None:
        self.run = run
        self.here = here
        self.track = track
        self.site = config.cluster.slurm
        self.max_restarts = config.train.max_restarts
        self.asked: str | None = None

    def attempt(self) -> int:
        """Train until the attempt ends; return the exit code of the batch step."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        here = self.here
        began = time.time()
        log = Log(self.run.path / ATTEMPTS)
        about = {"kind": "attempt", "job": here.job, "restart": here.restarts}
        where = {"nodes": here.nodelist, "world": here.nodes * here.tasks}
        log.append({**about, "event": "begin", "time": began, **where})
        start = here.restarts + 1
        logging.info("job %s, start %s, %s nodes of %s", here.job, start, here.nodes, here.nodelist)
        code = 0
        printed = ""
        most = self.site.max_restarts
        if here.restarts > most:  # SLURM itself restarts after lost nodes and preemptions
            limit = f"restarts={here.restarts} are more than cluster.slurm.max_restarts={most}"
            self.run.fail(RunError(limit))
        elif not self.run.finished:
            code, printed = self._train()
        end = self._ending(began, code, printed)
        verdict = decide(end, restarts=here.restarts, most=most, run=self.run.path)
        result = {"event": verdict.action, "step": end.step, "reason": verdict.reason}
        log.append({**about, "time": time.time(), **result})
        log.close()
        logging.info("%s: %s", verdict.action, verdict.reason)
        if verdict.action == "requeue":
            self._requeue()
        return verdict.code

    def _ending(self, began: float, code: int, printed: str) -> Ending:
        """Determine how an attempt ended, from the run's log, its faults and srun's output."""
        records = list(read(self.run.log))
        step = max((int(r["step"]) for r in records if r["kind"] == "step"), default=0)
        last = next((r for r in reversed(records) if r["kind"] == "event"), {})
        finished = last.get("event") == "finish"
        saved = last.get("event") == "interrupt" and float(last["time"]) >= began
        if finished or saved or (self.asked is not None and self.run.fault() is None):
            return Ending(step, finished, saved, self.asked, None, None)
        fault = attribute(self.run, code, printed)
        starts = [r["time"] for r in past_attempts(self.run.path) if r["job"] == self.here.job]
        of_this_job = [f for f in self.run.past_faults() if float(f["time"]) >= min(starts)]
        hopeless = no_restart(of_this_job, self.max_restarts)
        return Ending(step, finished, saved, self.asked, fault, hopeless)

    def _train(self) -> tuple[int, str]:
        """Run srun and the sidecar to their end; return srun's exit code and output."""
        here = self.here
        log = self.run.path / "logs" / "job.log"
        command = step(self.run.path, self.site, here.nodes, here.tasks, here.cpus)
        code = 0
        printed = ""
        sidecar = Sidecar(self.run.path) if self.track else None
        try:
            for pause_s in (0, 5, 30):
                time.sleep(pause_s)
                self.run.forget_fault()
                if self.asked:
                    break
                size = log.stat().st_size
                code = self._wait(subprocess.Popen(command, env=self._environment()))
                printed = log.read_bytes()[size:].decode(errors="replace")
                if _LAUNCH_FAILED not in printed:
                    break
        finally:
            if sidecar is not None:
                note = sidecar.finish()
                if note:
                    logging.info(note)
        return code, printed

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.asked != "SIGTERM":  # SIGTERM ends the job; other signals requeue it
            self.asked = signal.Signals(number).name

    def _wait(self, srun: "subprocess.Popen[bytes]") -> int:
        passed_on = False
        failed_s: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = srun.wait(timeout=0.5)
                return code if code >= 0 else 128 - code
            if self.asked and not passed_on:
                # srun forwards SIGUSR1 to the tasks; at SIGTERM it would end them itself.
                srun.send_signal(signal.SIGUSR1)
                passed_on = True
            if failed_s is None and self.run.fault() is not None:
                failed_s = time.monotonic()
            if failed_s is not None and time.monotonic() - failed_s > _STUCK_S:
                srun.kill()  # it waits for a node that is gone

    def _requeue(self) -> None:
        for pause_s in (0, 5, 30, 120):  # the controller may be restarting
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
        """Return the environment in which the ranks find each other: at the first node, or over
        loopback if it is the only one."""
        alone = self.here.nodes == 1
        env = {
            **(loopback() if alone else {}),
            **os.environ,
            "MASTER_ADDR": "127.0.0.1" if alone else queue.hosts(self.here.nodelist)[0],
            "MASTER_PORT": str(_free_port(int(self.here.job), self.here.restarts)),
            "ISOFLOP_TASKS": str(self.here.tasks),
        }
        env.setdefault("OMP_NUM_THREADS", str(self.here.cpus or 1))
        if not self.here.gpus:
            env["DS_ACCELERATOR"] = "cpu"
        return env


def _free_port(job: int, restarts: int) -> int:
    """Return a free port, derived from the job's number so that jobs on one node do not collide."""
    # Each restart uses another port, because the old one may still be closing.
    first = (job + 97 * restarts) % len(_PORTS)
    for offset in range(len(_PORTS)):
        port = _PORTS[(first + offset) % len(_PORTS)]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    ports = f"{_PORTS.start} to {_PORTS.stop}"
    raise RunError(f"no port from {ports} is free on this node; see `ss -ltn`")


def main(arguments: list[str]) -> int:
    run = RunDir(Path(arguments[0]))
    redirect_output(run.path / "logs" / "job.log")  # also for arrays, and for srun's output
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    try:
        config = reload(run.config)
        here = usable(Allocation.from_environment(os.environ), config)
        return Batch(run, here, config, track="--no-track" not in arguments).attempt()
    except UserError as error:
        logging.error("error: %s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
