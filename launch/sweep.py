"""`launch sweep plan | run`: plan a grid of runs with its cost, and train the runs."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from launch.options import AsJson, examples, output_option
from launch.plan import Budget, Data, Earlier, File, Hours, plan, read_plan
from launch.tables import print_json
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.sweep.execute import Member, Progress
    from pipeline.sweep.grid import Planned, Sweep

app = typer.Typer(help="Plan and run a ladder or an isoFLOP grid.", no_args_is_help=True)
app.command(
    epilog=examples(
        "launch sweep plan isoflop",
        "launch sweep plan configs/scaling/ladder.toml --json",
        "launch sweep plan isoflop --budget 1e19 --points runs.csv",
        "launch sweep plan gpu --target-size 30m --target-tokens 4e8",
        "launch sweep plan --target-size 1b --width 3% --save ladder-1b.toml",
    )
)(plan)

Jobs = Annotated[int, Option(help="Runs to train at the same time.", min=1)]
_OUT = "Directory of the runs (default: runs/EXPERIMENT)."
Out = Annotated[Path | None, output_option(text=_OUT)]
Track = Annotated[bool, Option("--track/--no-track", help="Send runs to MLflow too.")]
Slurm = Annotated[bool, Option("--slurm", help="Submit a job array of --jobs runs at a time.")]
_GPUS_PER_NODE = "GPUs per run (default: one per process; 0 if the sweep has no cluster)."
GpusPerNode = Annotated[int | None, Option(help=_GPUS_PER_NODE, min=0)]
After = Annotated[str | None, Option(help="Submit after this SLURM job has succeeded.")]
ThenFit = Annotated[bool, Option("--fit", help="Submit another job that fits the law afterwards.")]
Cpu = Annotated[bool, Option("--cpu", help="Train a sweep for GPUs even if this machine has none.")]
CORE_FLOPS_S = 7e10  # FLOP/s of one core: two train the sweep `cpu` in three minutes


@app.command(
    epilog=examples(
        "launch sweep run cpu --data data/demo --jobs 2",
        "launch sweep run gpu --data data/web --jobs 4",
        "launch sweep run ladder --data data/web --slurm --jobs 4 --fit",
        "launch sweep run configs/scaling/ladder.toml --data data/web --slurm --after 1234",
    )
)
def run(
    file: File,
    jobs: Jobs = 1,
    data: Data = None,
    out: Out = None,
    budget: Budget = None,
    hours: Hours = None,
    points: Earlier = None,
    track: Track = True,
    as_json: AsJson = False,
    slurm: Slurm = False,
    gpus_per_node: GpusPerNode = None,
    after: After = None,
    fit: ThenFit = False,
    cpu: Cpu = False,
) -> None:
    """Train the missing runs of a sweep. After Ctrl-C, the same command continues them."""
    from pipeline.sweep import execute, grid

    if not slurm and (after or fit or gpus_per_node is not None):
        raise ConfigError("--after, --fit and --gpus-per-node are for jobs; add --slurm")
    if after:
        # The data of that job may not exist yet, so its vocabulary and the plan are unknown.
        number, log = _submit_later(grid.read(file), after)
        text = f"job {number} submits the sweep once job {after} has succeeded; its log is {log}"
        print_json({"job": number, "log": str(log)}) if as_json else typer.echo(text)
        return
    sweep, runs = read_plan(file, budget, hours, points, data)
    root = out or Path("runs") / sweep.experiment
    every = execute.members(sweep, runs, root)
    missing = [run for run, member in zip(runs, every, strict=True) if not member.finished]
    if missing and not slurm and not cpu:
        _refuse_without_gpus(file, sweep, missing)
    # The lock covers the list of missing runs too: two sweeps would start the same ones.
    with execute.claimed(root, sweep):
        todo = [member for member in every if not member.finished]
        if slurm:
            _submit(sweep, todo, root, jobs, gpus_per_node, track=track, fit=fit, as_json=as_json)
            return
        with _display(every, len(todo), quiet=as_json) as show:
            done = execute.run(todo, jobs, show, track=track)
        _report(every, done, sweep, root, track=track, as_json=as_json)


def _refuse_without_gpus(name: str, sweep: "Sweep", missing: "list[Planned]") -> None:
    """Refuse to train a sweep for a cluster's GPUs on CPUs, which would take months."""
    from pipeline.train.request import Devices

    cores = os.cpu_count() or 1
    hours = sum(run.cost for run in missing) / (cores * CORE_FLOPS_S) / 3600
    if sweep.cluster and not Devices.here().gpus:
        raise ConfigError(
            f"sweep={name} is for {sweep.nproc} × {sweep.cluster}, and this machine has no GPU: "
            f"about {float(f'{hours:.1g}'):,g} hours on {cores} cores; run the sweep `cpu` here, "
            f"submit this one with --slurm, or add --cpu to train it on CPUs"
        )


def _report(
    every: "list[Member]",
    done: "Progress",
    sweep: "Sweep",
    root: Path,
    *,
    track: bool,
    as_json: bool,
) -> None:
    """Publish and print the result; the exit code shows whether every run finished."""
    finished = [member.name for member in every if member.finished]
    figures = {
        "experiment": sweep.experiment,
        "out": str(root),
        "finished": finished,
        "failed": done.failed,
        "missing": [m.name for m in every if m.name not in {*finished, *done.failed}],
    }
    # Also after a failure or Ctrl-C, because the page shows the runs that exist.
    note = show_all(root, track=track) if finished else None
    if note:
        typer.echo(note, err=True)
    if as_json:
        print_json(figures)
    else:
        typer.echo(f"{len(finished)} of {len(every)} runs in {root} have finished")
    if done.stopping:
        # Raised only now, with the results written; main() turns it into exit code 130.
        raise KeyboardInterrupt
    if done.failed:
        text = f"{len(done.failed)} of {len(every)} runs failed: {', '.join(done.failed)}"
        raise RunError(f"{text}; fix that and run the same command again")


def _submit(
    sweep: "Sweep",
    todo: "list[Member]",
    root: Path,
    jobs: int,
    gpus: int | None,
    *,
    track: bool,
    fit: bool,
    as_json: bool,
) -> None:
    """Submit the missing runs as one array, all or none; branches follow when it has succeeded."""
    from launch.pretrain import as_job
    from pipeline.slurm import queue
    from pipeline.slurm.submit import array, command, job_of, remember, tidy

    # Repeating the command is safe: it skips runs that are finished or in the queue.
    queued = {job for job, entry in queue.entries().items() if entry.alive}
    todo = [member for member in todo if job_of(member.out) not in queued]
    if not todo:
        raise RunError(
            f"every run of {root} has finished or is in the queue; see `launch status {root}`"
        )
    missing = {member.name for member in todo}
    # A branch starts from a checkpoint of its trunk, so it is submitted after the trunk's job.
    branches = [member for member in todo if member.after in missing]
    first = [member for member in todo if member.after not in missing]
    if gpus is None:
        gpus = sweep.nproc if sweep.cluster else 0  # one GPU per process
    # Plan every run before the first directory is created: all or none.
    wanted = [as_job([*member.argv[1:], "--gpus-per-node", str(gpus)]) for member in first]
    # The members of an array share one request for nodes.
    nodes = wanted[0][1]
    site = wanted[0][0].config.cluster.slurm
    # A new file for each submission: an earlier array may still be reading its own.
    members = root.absolute() / f"members-{secrets.token_hex(4)}.txt"
    job = array(members, len(wanted), jobs, tidy(sweep.experiment), site, nodes, track=track)
    starts = job.test()  # before any run directory is created
    runs = [planned.commit().run.path.absolute() for planned, _ in wanted]
    members.write_text("".join(f"{run}\0" for run in runs))  # a path may contain a newline
    number = job.submit()
    for index, run in enumerate(runs):
        remember(run, f"{number}_{index}", nodes)
    fit_job = None
    if branches:
        _submit_later(sweep, number)  # with --fit, if given, for the last of them
    elif fit:
        log = root.absolute() / "fit.log"
        arguments = ("fit", "--runs", str(root.absolute()))
        fit_job = command(arguments, tidy(f"{sweep.experiment}-fit"), site, log, number).submit()
    if as_json:
        names = [str(run) for run in runs]
        print_json({"job": number, "runs": names, "fit": fit_job, "later": len(branches)})
        return
    then = f"; job {fit_job} fits them" if fit_job else ""
    then += f"; then {len(branches)} branches of them" if branches else ""
    typer.echo(f"job {number}: {len(runs)} runs, {jobs} at a time{then}")
    typer.echo(f"{starts}\nwatch them with: launch status {root}")


def _submit_later(sweep: "Sweep", after: str) -> tuple[str, Path]:
    """Submit this command again, as a job that starts after the job with its data or trunks."""
    from pipeline.config.layers import load_cluster
    from pipeline.slurm.submit import command, tidy

    site = load_cluster(sweep.cluster, sets=sweep.set).slurm
    # That job plans again, because the data and its vocabulary may not exist yet.
    again = sys.argv[1:]
    # Remove `--after JOB` or `--after=JOB`, which has been satisfied by then.
    for at, word in enumerate(again):
        if word.partition("=")[0] == "--after":
            del again[at : at + (1 if "=" in word else 2)]
            break
    # Not in the sweep's directory, which may not exist yet.
    log = Path.cwd() / f"{tidy(sweep.experiment)}-sweep.log"
    return command(again, tidy(f"{sweep.experiment}-sweep"), site, log, after).submit(), log


def show_all(root: Path, *, track: bool = True) -> str | None:
    """Write a sweep's results beside its runs and to MLflow; return why that failed, if it did."""
    from pipeline.atomic import replace
    from pipeline.dashboard.live import Watcher
    from pipeline.dashboard.server import static_page
    from pipeline.dashboard.source import open_source
    from pipeline.sweep.execute import publish, write

    watcher = Watcher(open_source(root, None))
    watcher.refresh(strict=True)  # a run that cannot be read is an error here
    page = root / "dashboard.html"
    replace(page, static_page(watcher.everything()))
    files = [*write(root), page]
    return publish(root, files) if track else None


@contextmanager
def _display(
    members: "Sequence[Member]", missing: int, *, quiet: bool
) -> "Iterator[Callable[[Progress], None]]":
    """Print a line per change, and on a terminal one more that follows the running members."""
    from rich.console import Console

    console = Console(quiet=quiet, highlight=False)
    before = len(members) - missing
    printed: set[str] = set()
    console.print(f"{before} of {len(members)} runs have finished, {missing} to go")

    # `show` is called several times a second, but each line is printed once.
    def once(text: str, style: str = "") -> None:
        if text not in printed:
            printed.add(text)
            console.print(text, markup=False, style=style, soft_wrap=True)

    with console.status("starting") as line:

        def show(state: "Progress") -> None:
            for name in state.running:
                once(f"{name}: running")
            for name in state.finished:
                once(f"{name}: finished")
            for name, reason in state.failed.items():
                once(f"{name}: failed: {reason}", "bold red")
            if state.stopping:
                once("stopping: runs save first (Ctrl-C again ends them at once)", "bold yellow")
            # Read from each run's own log: the processes print nothing.
            steps = [f"{name} {m.step}/{m.steps}" for name, m in state.running.items()]
            finished = before + len(state.finished)
            line.update(f"{finished} of {len(members)} runs · {' · '.join(steps)}")

        yield show
