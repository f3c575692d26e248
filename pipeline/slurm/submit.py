"""From a settled run to a job in the queue. Values are arguments of sbatch or exported variables; the script is a
template of the folder slurm/, the same bytes for every job."""

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

_PACKAGE = Path(__file__).resolve().parent
# a checkout reads the top-level folder, an installed wheel its copy
TEMPLATES = (
    _PACKAGE / "templates" if (_PACKAGE / "templates").is_dir() else _PACKAGE.parents[1] / "slurm"
)


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes a job may have, and what runs on each."""

    least: int
    most: int
    tasks: int  # per node
    gpus: int  # per node

    @classmethod
    def parse(cls, text: str, tasks: int, gpus: int) -> "Nodes":
        found = re.fullmatch(r"([1-9]\d{0,4})(?:-([1-9]\d{0,4}))?", text)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if least > most:
            raise ConfigError(
                f"--nodes {text!r} is not a number of nodes or LEAST-MOST; try --nodes 4 or --nodes 2-4"
            )
        return cls(least, most, tasks, gpus)

    @property
    def worlds(self) -> range:
        return range(self.least * self.tasks, self.most * self.tasks + 1, self.tasks)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class Submission:
    """What sbatch is called with."""

    template: str
    name: str
    site: Slurm
    log: str  # in which %-patterns are SLURM's
    arguments: tuple[str, ...]  # of the script
    nodes: Nodes | None = None
    after: str | None = None  # a job whose success is waited for
    array: str | None = None

    @property
    def script(self) -> Path:
        return TEMPLATES / f"{self.template}.sbatch"

    def command(self, *first: str) -> list[str]:
        site, nodes = self.site, self.nodes
        given = {
            "job-name": self.name,
            "output": self.log,
            "partition": site.partition,
            "account": site.account,
            "qos": site.qos,
            "constraint": site.constraint,
            "time": site.time,
            "cpus-per-task": site.cpus_per_task,
            "nodes": nodes,
            # with 1, SLURM takes the least of LEAST-MOST for all that is wanted
            "ntasks-per-node": nodes.tasks if nodes and nodes.tasks > 1 else None,
            "gpus-per-node": (nodes and nodes.gpus) or None,
            "array": self.array,
            "signal": nodes and f"B:USR1@{site.grace_s}",
            "dependency": self.after and f"afterok:{self.after}",
            "kill-on-invalid-dep": self.after and "yes",  # when that job has failed
            "export": "ALL",
        }
        options = [f"--{key}={value}" for key, value in given.items() if value is not None]
        return ["sbatch", *first, *options, *site.sbatch, str(self.script), *self.arguments]

    def variables(self) -> dict[str, str]:
        """What the script and the job read from the environment."""
        return {
            **self.site.environment(os.environ),
            "ISOFLOP_PYTHON": sys.executable,
            "ISOFLOP_MODULES": " ".join(self.site.modules),
            "ISOFLOP_SETUP": self.site.setup or os.devnull,
        }

    def shown(self) -> str:
        """As a person would type it, and the script it submits."""
        variables = " ".join(
            f"{key}={MASK if key in self.site.env else shlex.quote(value)}"
            for key, value in self.variables().items()
        )
        return f"{variables} \\\n  {shlex.join(self.command())}\n\n# {self.script.name}\n{self.script.read_text()}"

    def test(self) -> str:
        """What `sbatch --test-only` says; refused, one line."""
        return self._call("--test-only").stderr.strip().removeprefix("sbatch: ")

    def submit(self) -> str:
        """The new job's id."""
        return self._call("--parsable").stdout.strip().partition(";")[0]

    def _call(self, *first: str) -> "subprocess.CompletedProcess[str]":
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "--slurm needs sbatch, which is not here; submit from a login node, or see --dry-run"
            )
        # what SLURM told the job or shell we are in is not for the new one
        outer = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("SLURM_") or key == "SLURM_CONF"
        }
        env = outer | self.variables()
        done = subprocess.run(self.command(*first), capture_output=True, text=True, env=env)
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            reason = (said or [f"exit code {done.returncode}"])[-1]
            for prefix in (
                "sbatch: ",
                "error: ",
                "allocation failure: ",
                "Batch job submission failed: ",
            ):
                reason = reason.removeprefix(prefix)
            raise RunError(
                f"sbatch refuses {self._asked()}: {reason}; `sinfo` shows what there is, --cluster what is asked"
            )
        return done

    def _asked(self) -> str:
        wanted = ("partition", "account", "qos", "constraint", "time", "nodes", "gpus-per-node")
        return (
            " ".join(
                a for a in self.command() if a.startswith(tuple(f"--{key}=" for key in wanted))
            )
            or "the job"
        )


def pattern(path: Path) -> str:
    """A path in which SLURM expands nothing; write %j or %t behind it."""
    if "\\" in str(path):
        raise ConfigError(
            f"path={str(path)!r} has a backslash, at which SLURM stops reading; choose another --out"
        )
    return str(path).replace("%", "%%")


def step(run: Path, site: Slurm, nodes: int, tasks: int, cpus: int | None) -> list[str]:
    """What the batch step starts: one process per task, or one that starts all of its node, in the site's container."""
    agents = site.launcher == "torchrun"
    each, log = (1, "agent") if agents else (tasks, "rank")
    srun = [
        "srun",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--open-mode=append",
        "--relative=0",
        f"--nodes={nodes}",
    ]
    srun += [
        f"--ntasks={nodes * each}",
        f"--ntasks-per-node={each}",
        f"--output={pattern(run)}/logs/{log}-%t.log",
    ]
    if cpus is not None:  # srun does not take it over from sbatch
        srun += [f"--cpus-per-task={cpus * (tasks // each)}"]
    around, python = _container(site.container)
    return [*srun, *site.srun, *around, python, "-P", "-m", "pipeline.slurm.task", str(run)]


def _container(container: Container | None) -> tuple[list[str], str]:
    """What stands around the task's command, and the Python in it."""
    match container:
        case None:
            return [], sys.executable
        case Container(kind="pyxis"):
            mounts = (
                [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
            )
            return [f"--container-image={container.image}", *mounts], container.python
        case _:
            binds = [f"--bind={mount}" for mount in container.mounts]
            return ["apptainer", "exec", "--nv", *binds, container.image], container.python


def tidy(name: str) -> str:
    """A text as a job's name."""
    return re.sub(r"[^\w.-]", "-", name)[:64]


def remember(run: Path, job: str, nodes: Nodes) -> None:
    """Which job trains a run, for status, logs and cancel."""
    replace(
        run / "slurm.json",
        json.dumps({"job": job, "nodes": str(nodes), "tasks_per_node": nodes.tasks}).encode(),
    )


def job_of(run: Path) -> str | None:
    try:
        return str(json.loads((run / "slurm.json").read_text())["job"])
    except (OSError, ValueError, KeyError):
        return None


def train(run: Path, name: str, site: Slurm, nodes: Nodes, *, track: bool) -> Submission:
    return Submission(
        "pretrain", name, site, pattern(run / "logs" / "job.log"), _worker(run, track), nodes
    )


def array(
    members: Path, count: int, jobs: int, name: str, site: Slurm, nodes: Nodes, *, track: bool
) -> Submission:
    """One job per name in a file, `jobs` at a time."""
    log, which = f"{pattern(members)}.%a.log", f"0-{count - 1}%{jobs}"
    return Submission("sweep", name, site, log, _worker(members, track), nodes, array=which)


def command(arguments: Sequence[str], name: str, site: Slurm, log: Path, after: str) -> Submission:
    """One `launch` command on one node, when another job has succeeded; never, if it has failed."""
    return Submission("export", name, site, pattern(log), tuple(arguments), after=after)


def _worker(what: Path, track: bool) -> tuple[str, ...]:
    return (str(what),) if track else (str(what), "--no-track")
