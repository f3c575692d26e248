"""`launch sweep plan | run`: a grid of runs, its cost before any of them is started, and then the runs."""

import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.options import examples
from launch.tables import new_console, new_table, print_json
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.sweep.execute import Member, Progress
    from pipeline.sweep.grid import Planned, Sweep

app = typer.Typer(help="Plan and run a ladder or an isoFLOP grid.", no_args_is_help=True)

FILE = typer.Argument(help="A sweep (configs/scaling).")
BUDGET = typer.Option(help="FLOPs for all runs together, instead of budgets.")
HOURS = typer.Option(help="Hours on the sweep's GPUs, instead of budgets.")
POINTS = typer.Option(help="Earlier runs (CSV): their law centres the grid.")
DATA = typer.Option(help="Shards, instead of the sweep's own `data`; their vocabulary counts.")


@app.command(
    epilog=examples(
        "launch sweep plan configs/scaling/isoflop.toml",
        "launch sweep plan configs/scaling/ladder.toml --json",
        "launch sweep plan configs/scaling/isoflop.toml --budget 1e19 --points runs.csv",
    )
)
def plan(
    file: Annotated[Path, FILE],
    budget: Annotated[float | None, BUDGET] = None,
    hours: Annotated[float | None, HOURS] = None,
    points: Annotated[Path | None, POINTS] = None,
    data: Annotated[Path | None, DATA] = None,
    mfu: Annotated[
        float | None,
        typer.Option(help="Of peak, for the time, instead of a rule.", min=0.001, max=1),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Lay out a sweep: every run's N, D, FLOPs, rate, batch, steps, time and memory, and the total."""
    from pipeline.sweep.grid import TIMING

    sweep, runs = lay_out(file, budget, hours, points, data, mfu)
    total = {
        "runs": len(runs),
        "flops": sum(run.cost for run in runs),
        "saved": sum(
            run.C - run.cost for run in runs
        ),  # by branches, which begin where a longer run has been
        "hours": sum(run.hours for run in runs if run.hours is not None) if sweep.cluster else None,
        "timing": TIMING if mfu is None else f"MFU {mfu:g}",
    }
    told = {
        "experiment": sweep.experiment,
        "kind": sweep.kind,
        "runs": list(map(vars, runs)),
        "total": total,
    }
    print_json(told) if as_json else print_plan(told)


@app.command(
    epilog=examples(
        "launch sweep run configs/scaling/synthetic.toml --data data/synthetic",
        "launch sweep run configs/scaling/ladder.toml --data data/web --jobs 2",
        "launch sweep run configs/scaling/ladder.toml --data data/web --slurm --jobs 4 --fit",
        "launch sweep run configs/scaling/ladder.toml --data data/web --slurm --after 1234",
    )
)
def run(
    file: Annotated[Path, FILE],
    jobs: Annotated[int, typer.Option(help="Runs at a time on this machine.", min=1)] = 1,
    data: Annotated[Path | None, DATA] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the runs; runs/EXPERIMENT if left out.")
    ] = None,
    budget: Annotated[float | None, BUDGET] = None,
    hours: Annotated[float | None, HOURS] = None,
    points: Annotated[Path | None, POINTS] = None,
    track: Annotated[
        bool, typer.Option("--track/--no-track", help="Feed MLflow beside the local logs.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of progress.")
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit one array; --jobs is its limit.")
    ] = False,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            help="Of an array's member.  [default: one per process, 0 without a cluster]", min=0
        ),
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="A job that must have succeeded first: the data's.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Then `launch fit` the runs, in a job of its own.")
    ] = False,
) -> None:
    """Run what is missing of a sweep. Ctrl-C saves what runs; the same command again continues."""
    from pipeline.sweep import execute as sweeping

    if not slurm and (after or fit or gpus_per_node is not None):
        raise ConfigError("--after, --fit and --gpus-per-node are for jobs; add --slurm")
    if after:
        from pipeline.sweep.grid import read

        number, log = submit_later(read(file), after)
        said = (
            f"job {number} submits the sweep when job {after} has made its data; it speaks in {log}"
        )
        print_json({"job": number, "log": str(log)}) if as_json else typer.echo(said)
        return
    sweep, runs = lay_out(file, budget, hours, points, data)
    root = out or Path("runs") / sweep.experiment
    every = sweeping.members(sweep, runs, root)
    sweeping.record(root, sweep)
    todo = [member for member in every if not member.finished]
    if slurm:
        gpus = gpus_per_node if gpus_per_node is not None else sweep.nproc if sweep.cluster else 0
        submit(sweep, todo, root, jobs, gpus, track=track, fit=fit, as_json=as_json)
        return
    with sweep_display(every, len(todo), quiet=as_json) as show:
        done = sweeping.run(todo, jobs, show, track=track)
    told = {
        "experiment": sweep.experiment, "out": str(root), "finished": [m.name for m in every if m.finished],
        "failed": done.failed, "missing": [m.name for m in every if not m.finished and m.name not in done.failed],
    }  # fmt: skip
    if told["finished"] and (note := show_all(root, track=track)):
        typer.echo(note, err=True)
    if as_json:
        print_json(told)
    else:
        typer.echo(f"{len(told['finished'])} of {len(every)} runs in {root} have finished")
    if done.stopping:
        raise KeyboardInterrupt
    if done.failed:
        raise RunError(
            f"{len(done.failed)} of {len(every)} runs failed: {', '.join(done.failed)}; mend that and run the same "
            f"command again"
        )


def submit(
    sweep: "Sweep",
    todo: "list[Member]",
    root: Path,
    jobs: int,
    gpus: int,
    *,
    track: bool,
    fit: bool,
    as_json: bool,
) -> None:
    """What is missing as one array, refused as a whole if one of its runs is; branches follow when it has succeeded."""
    from launch.pretrain import as_job
    from pipeline.slurm import queue
    from pipeline.slurm.submit import array, command, job_of, remember, tidy

    there = {job for job, entry in queue.entries().items() if entry.alive}
    todo = [member for member in todo if job_of(member.out) not in there]
    if not todo:
        raise RunError(
            f"every run of {root} has finished or is in the queue; `launch status {root}` shows them"
        )
    name, missing = sweep.experiment, {member.name for member in todo}
    branches = [member for member in todo if member.after in missing]
    todo = [member for member in todo if member not in branches]
    wanted = [as_job([*member.argv[1:], "--gpus-per-node", str(gpus)]) for member in todo]
    nodes, site = wanted[0][1], wanted[0][0].config.cluster.slurm
    root.mkdir(parents=True, exist_ok=True)
    members = root.absolute() / f"members-{secrets.token_hex(4)}.txt"
    job = array(members, len(wanted), jobs, tidy(name), site, nodes, track=track)
    job.test()
    runs = [settled.commit().run.path.absolute() for settled, _ in wanted]
    members.write_text("".join(f"{run}\0" for run in runs))
    number = job.submit()
    for index, run in enumerate(runs):
        remember(run, f"{number}_{index}", nodes)
    told = {"job": number, "runs": list(map(str, runs)), "fit": None, "later": len(branches)}
    if branches:
        submit_later(sweep, number)
    elif fit:
        arguments = ("fit", "--runs", str(root.absolute()))
        told["fit"] = command(
            arguments, tidy(f"{name}-fit"), site, root.absolute() / "fit.log", number
        ).submit()
    if as_json:
        print_json(told)
    else:
        then = f"; job {told['fit']} fits them" if told["fit"] else ""
        then += f"; then {len(branches)} branches of them" if branches else ""
        typer.echo(
            f"job {number}: {len(runs)} runs, {jobs} at a time{then}\nwatch them with: launch status {root}"
        )


def submit_later(sweep: "Sweep", after: str) -> tuple[str, Path]:
    """Shards whose vocabulary counts, or trunks, are not there yet: a job that waits for them calls this command."""
    from pipeline.config.layers import load_cluster
    from pipeline.slurm.submit import command, tidy

    site = load_cluster(sweep.cluster, sets=sweep.set).slurm
    again = sys.argv[1:]
    for at, word in enumerate(again):
        if word.partition("=")[0] == "--after":
            del again[at : at + (1 if "=" in word else 2)]
            break
    log = Path.cwd() / f"{tidy(sweep.experiment)}-sweep.log"
    return command(again, tidy(f"{sweep.experiment}-sweep"), site, log, after).submit(), log


def show_all(root: Path, *, track: bool = True) -> str | None:
    """What the sweep has shown, as files beside its runs and in MLflow; a line to print where that failed."""
    from pipeline.atomic import replace
    from pipeline.dashboard.live import Watcher
    from pipeline.dashboard.server import static_page
    from pipeline.dashboard.source import open_source
    from pipeline.sweep.execute import publish, write

    watcher = Watcher(open_source(root, None))
    watcher.refresh(strict=True)
    page = root / "dashboard.html"
    replace(page, static_page(watcher.everything()))
    files = [*write(root), page]
    return publish(root, files) if track else None


def lay_out(
    file: Path,
    budget: float | None,
    hours: float | None,
    points: Path | None,
    data: Path | None,
    mfu: float | None = None,
) -> "tuple[Sweep, list[Planned]]":
    """The sweep of a file within these limits, and its runs."""
    from pipeline.sweep import grid as planning

    sweep = planning.read(file)
    if data is not None:
        sweep = sweep.model_copy(update={"data": str(data)})
    best = known_best(points) if points else None
    if budget is not None or hours is not None:
        sweep = planning.within(sweep, budget, hours, best, mfu)
    return sweep, planning.plan(sweep, best, mfu)


def known_best(points: Path) -> Callable[[float], float]:
    """N*(C) as the law of earlier runs has it."""
    import numpy as np

    from pipeline.scaling.points import read_csv
    from pipeline.scaling.study import study

    done = study(read_csv(points))
    if done.optimum(np.array([1.0])) is None:
        raise ConfigError(
            f"points={points} do not determine N*(C); plan without them, about 20 tokens per parameter"
        )

    def best(C: float) -> float:
        found = done.optimum(np.array([C]))
        assert found is not None
        return float(found.N[0])

    return best


def print_plan(data: dict[str, Any]) -> None:
    from pipeline.units import count, power

    title = f"{data['kind']} sweep {data['experiment']}"
    console = new_console()
    table = new_table(
        title,
        "run",
        "N",
        "D",
        "D/N",
        "FLOPs",
        "lr",
        "batch",
        "steps",
        "from",
        "GiB per rank",
        "hours",
    )
    for run in data["runs"]:
        table.add_row(
            run["name"], count(run["N"]), count(run["D"]), f"{run['D'] / run['N']:.3g}", power(run["C"]),
            f"{run['lr']:.2e}", count(run["batch_tokens"]), f"{run['steps']:,}",
            f"{run['begins']:,}" if run["trunk"] else "–", f"{run['memory_bytes'] / 2**30:.2g}",
            "–" if run["hours"] is None else f"{run['hours']:.3g}",
        )  # fmt: skip
    console.print(table)
    total = data["total"]
    time = (
        ""
        if total["hours"] is None
        else f", {total['hours']:.3g} hours one after another ({total['timing']})"
    )
    console.print(f"{total['runs']} runs, {power(total['flops'])} FLOPs{time}")
    if total["saved"]:
        share = total["saved"] / (total["flops"] + total["saved"])
        console.print(
            f"Branches begin in the plateau of their size's longest run, at the step under `from`: {share:.0%} less "
            f"than {power(total['flops'] + total['saved'])} FLOPs for whole runs")  # fmt: skip


@contextmanager
def sweep_display(
    members: "Sequence[Member]", missing: int, *, quiet: bool
) -> "Iterator[Callable[[Progress], None]]":
    """On a terminal a bar for the sweep and one for each running member; elsewhere a line when one begins or ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=quiet, quiet=quiet)
    steps = {member.name: member.steps for member in members}
    told: set[tuple[str, str]] = set()
    console.print(
        f"{len(members) - missing} of {len(members)} runs are there, {missing} to go",
        highlight=False,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        overall = bars.add_task("runs", total=len(members), completed=len(members) - missing)
        tasks = {}

        def say(name: str, what: str, style: str = "") -> None:
            if (name, what) not in told:
                told.add((name, what))
                bars.console.print(
                    f"{name}: {what}", highlight=False, markup=False, style=style, soft_wrap=True
                )

        def show(at: "Progress") -> None:
            for name, member in at.running.items():
                say(name, "running")
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=steps[name])
                bars.update(tasks[name], completed=member.step)
            for name in at.finished:
                say(name, "finished")
            for name, reason in at.failed.items():
                say(name, f"failed: {reason}", "bold red")
            if at.stopping:
                say(
                    "sweep",
                    "stopping; running ones save first (again to end them at once)",
                    "bold yellow",
                )
            for name in [name for name in tasks if name not in at.running]:
                bars.remove_task(tasks.pop(name))
            bars.update(overall, completed=len(members) - missing + len(at.finished))

        yield show
