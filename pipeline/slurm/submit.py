"""Submit a job. Every value is an argument of sbatch or an exported variable.

The scripts are the templates in slurm/, unchanged for every job: no value is ever written into
one.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.atomic import replace
from pipeline.config.schema import MASK, Container, Slurm
from pipeline.errors import ConfigError, RunError
from pipeline.runs.history import read_json

NO_NODES = "node configuration is not available"  # in sbatch's words
NO_CONTROLLER = "configuration (source|file)|Unable to contact slurm controller|Connection refused"
_PACKAGED = Path(__file__).resolve().parent / "templates"  # in an installed wheel
_CHECKOUT = Path(__file__).resolve().parents[2] / "slurm"
TEMPLATES = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT


@dataclass(frozen=True, slots=True)
class Nodes:
    """The number of nodes of a job, and the tasks and GPUs of each node."""

    least: int
    most: int
    tasks: int  # per node
    gpus: int  # per node

    @classmethod
    def parse(cls, text: str, tasks: int, gpus: int) -> "Nodes":
        found = re.fullmatch(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?", text)
        if found:
            least = int(found[1])
            most = int(found[2] or least)
            if least <= most:
                return cls(least, most, tasks, gpus)
        raise ConfigError(
            f"--nodes {text!r} is not a number of nodes or LEAST-MOST; try --nodes 4 or --nodes 2-4"
        )

    @property
    def worlds(self) -> range:
        """The numbers of ranks that the job may start with."""
        return range(self.least * self.tasks, self.most * self.tasks + 1, self.tasks)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Submission:
    """One call of sbatch."""

    template: str
    name: str
    site: Slurm
    log: str  # a pattern in which SLURM expands %j, %a and the like
    arguments: tuple[str, ...]  # of the script
    nodes: Nodes | None = None
    after: str | None = None  # start when this job has succeeded
    array: str | None = None

    @property
    def script(self) -> Path:
        return TEMPLATES / f"{self.template}.sbatch"

    def command(self, *first: str) -> list[str]:
        site = self.site
        nodes = self.nodes
        options = {
            "job-name": self.name,
            "output": self.log,
            "partition": site.partition,
            "account": site.account,
            "qos": site.qos,
            "constraint": site.constraint,
            "time": site.time,
            "cpus-per-task": site.cpus_per_task,
            "nodes": nodes,
            # With 1, SLURM would never allocate more than LEAST nodes of LEAST-MOST.
            "ntasks-per-node": nodes.tasks if nodes and nodes.tasks > 1 else None,
            "gpus-per-node": (nodes and nodes.gpus) or None,
            "array": self.array,
            "signal": nodes and f"B:USR1@{site.grace_s}",
            "dependency": self.after and f"afterok:{self.after}",
            "kill-on-invalid-dep": self.after and "yes",  # do not wait for a job that has failed
            "export": "ALL",
        }
        given = [f"--{key}={value}" for key, value in options.items() if value is not None]
        return ["sbatch", *first, *given, *site.sbatch, str(self.script), *self.arguments]

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the script and the job read."""
        return {
            **self.site.environment(os.environ),
            "ISOFLOP_PYTHON": sys.executable,
            "ISOFLOP_MODULES": " ".join(self.site.modules),
            "ISOFLOP_SETUP": self.site.setup or os.devnull,
        }

    def shown(self) -> str:
        """Return the command as a person would type it, and the script that it submits."""
        variables = " ".join(
            f"{key}={MASK if key in self.site.env else shlex.quote(value)}"
            for key, value in self.variables().items()
        )
        script = f"# {self.script.name}\n{self.script.read_text()}"
        if self.site.env:
            why = "a value of [cluster.slurm.env], hidden because it may be a secret"
            script = f"# {MASK}: {why}\n\n{script}"
        return f"{variables} \\\n  {shlex.join(self.command())}\n\n{script}"

    def test(self) -> str:
        """Ask `sbatch --test-only` when the job would start; raise if it refuses the job."""
        try:
            return self._call("--test-only").stderr.strip().removeprefix("sbatch: ")
        except RunError as refusal:
            # It gives the same reason for nodes that are down and for nodes that do not exist.
            # A job may wait for the former, as it does when sbatch itself submits it.
            if NO_NODES not in str(refusal) or not (down := self._nodes_down()):
                raise
            return f"no start time: the job waits for {down} nodes that are down; see `sinfo`"

    def _nodes_down(self) -> int:
        """Count the nodes of the job's partition, or of all, that currently accept no jobs."""
        partition = [f"--partition={self.site.partition}"] if self.site.partition else []
        ask = ["sinfo", "--noheader", "--Node", "--format=%N", "--states=down,drain,fail"]
        done = subprocess.run([*ask, *partition], capture_output=True, text=True)
        return len(set(done.stdout.split()))

    def submit(self) -> str:
        """Submit the job; return its id."""
        return self._call("--parsable").stdout.strip().partition(";")[0]

    def _call(self, *first: str) -> "subprocess.CompletedProcess[str]":
        if shutil.which("sbatch") is None:
            raise ConfigError("--slurm needs sbatch, which is not installed here; use a login node")
        # If we run inside a job ourselves, its variables must not reach the new job.
        env = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or k[:6] != "SLURM_"}
        command = self.command(*first)
        done = subprocess.run(command, capture_output=True, text=True, env=env | self.variables())
        if done.returncode == 0:
            return done
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        noise = r"(sbatch|error|allocation failure|Batch job submission failed): "
        reason = re.sub(noise, "", lines[-1]) if lines else f"exit code {done.returncode}"
        if re.search(NO_CONTROLLER, reason):
            text = f"sbatch is installed, but cannot reach a SLURM controller ({reason})"
            raise ConfigError(f"{text}; use a login node, or check SLURM_CONF and slurmctld")
        wanted = re.compile(r"--(partition|account|qos|constraint|time|nodes|gpus-per-node)=")
        asked = " ".join(word for word in command if wanted.match(word)) or "the job"
        text = f"sbatch refuses {asked}: {reason}; `sinfo` lists the site's nodes and partitions"
        raise RunError(f"{text}; change the cluster file (--cluster) or the options")


def pattern(path: Path) -> str:
    """Escape a path so that SLURM expands nothing in it; the caller may append %j or %t."""
    if "\\" in str(path):
        raise ConfigError(
            f"path={str(path)!r} has a backslash, at which SLURM stops reading; use another --out"
        )
    return str(path).replace("%", "%%")


def step(run: Path, site: Slurm, nodes: int, tasks: int, cpus: int | None) -> list[str]:
    """Return the srun command: a task per rank, or one task per node that starts its ranks."""
    per_node = site.launcher == "torchrun"
    each = 1 if per_node else tasks
    log = "agent" if per_node else "rank"
    srun = [
        "srun",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--open-mode=append",
        "--relative=0",
        f"--nodes={nodes}",
        f"--ntasks={nodes * each}",
        f"--ntasks-per-node={each}",
        f"--output={pattern(run)}/logs/{log}-%t.log",
    ]
    if cpus is not None:  # srun does not inherit it from sbatch
        srun.append(f"--cpus-per-task={cpus * (tasks // each)}")
    around, python = _container(site.container)
    return [*srun, *site.srun, *around, python, "-P", "-m", "pipeline.slurm.task", str(run)]


def _container(container: Container | None) -> tuple[list[str], str]:
    """Return the words that run a command in the container, and the Python inside it."""
    if container is None:
        return [], sys.executable
    mounts = container.mounts
    if container.kind == "pyxis":
        options = [f"--container-mounts={','.join(mounts)}"] if mounts else []
        return [f"--container-image={container.image}", *options], container.python
    binds = [f"--bind={mount}" for mount in mounts]
    return ["apptainer", "exec", "--nv", *binds, container.image], container.python


def tidy(name: str) -> str:
    """Turn a text into a valid name of a job."""
    return re.sub(r"[^\w.-]", "-", name)[:64]


def remember(run: Path, job: str, nodes: Nodes) -> None:
    """Record which job trains a run, for status, logs and cancel."""
    record = {"job": job, "nodes": str(nodes), "tasks_per_node": nodes.tasks}
    replace(run / "slurm.json", json.dumps(record).encode())


def job_of(run: Path) -> str | None:
    try:
        return str(read_json(run / "slurm.json")["job"])
    except (RunError, KeyError):
        return None


def train(run: Path, name: str, site: Slurm, nodes: Nodes, *, track: bool) -> Submission:
    """Return the job of one run."""
    log = pattern(run / "logs" / "job.log")
    return Submission("pretrain", name, site, log, _arguments(run, track), nodes)


def array(
    members: Path, count: int, jobs: int, name: str, site: Slurm, nodes: Nodes, *, track: bool
) -> Submission:
    """Return an array with a job for each run directory listed in a file, `jobs` at a time."""
    log = f"{pattern(members)}.%a.log"
    which = f"0-{count - 1}%{jobs}"
    return Submission("sweep", name, site, log, _arguments(members, track), nodes, array=which)


def command(arguments: Sequence[str], name: str, site: Slurm, log: Path, after: str) -> Submission:
    """Return a job for one `launch` command on one node, after another job has succeeded."""
    return Submission("export", name, site, pattern(log), tuple(arguments), after=after)


def _arguments(path: Path, track: bool) -> tuple[str, ...]:
    return (str(path),) if track else (str(path), "--no-track")
