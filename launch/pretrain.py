"""`launch pretrain`: one dial, one run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.options import examples
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.slurm.submit import Nodes
    from pipeline.train.request import Devices, PlannedRun

EXAMPLES = examples(
    "launch pretrain --size tiny --data data/python --nproc 2 --steps 200",
    "launch pretrain --size 1b --data data/web --zero 1 --dtype bf16 --out runs/1b",
    "launch pretrain --size 1b --data data/web --auto-batch",
    "launch pretrain --resume --out runs/1b",
    "launch pretrain --init runs/llama --data data/web --out runs/more",
    "launch pretrain --size 1b --data data/web --cluster h100 --slurm --nodes 4 --time 24:00:00",
    "launch pretrain --size 1b --data data/web --slurm --nodes 4 --dry-run",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(pretrain)


def pretrain(
    size: Annotated[
        str | None, typer.Option(help="A rung of the ladder; `launch show --sizes` lists them.")
    ] = None,
    arch: Annotated[str, typer.Option(help="An architecture (configs/arch).")] = "dense",
    data: Annotated[Path | None, typer.Option(help="Shards made by `launch data prepare`.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; runs/EXPERIMENT/SIZE if left out.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Processes per node; if left out one per GPU, on --resume as before.", min=1
        ),
    ] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage 0 to 3.")] = None,
    ep: Annotated[
        int | None, typer.Option(help="Ranks that share the experts of a routed model.")
    ] = None,
    sp: Annotated[
        int | None, typer.Option(help="Ranks that share each sequence, for long ones.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="deepspeed, or accelerate as its referee.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Length in optimizer steps.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Length in tokens (1e9 works).")] = None,
    flops: Annotated[float | None, typer.Option(help="Length in training FLOPs.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    auto_batch: Annotated[
        bool, typer.Option("--auto-batch", help="The largest micro-batch that fits, by trial.")
    ] = False,
    init: Annotated[
        Path | None,
        typer.Option(help="Begin with the weights of a run or an import, instead of --size."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out bit for bit.")
    ] = False,
    branch: Annotated[
        Path | None,
        typer.Option(
            help="Begin in this run's plateau, where the decay of the new one begins (WSD)."
        ),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="MLflow experiment that the run belongs to.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster (configs/cluster), or a TOML file of yours.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A config file of your own.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key.subkey=value, over everything else.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data order.", min=0)] = None,
    track: Annotated[
        bool, typer.Option("--track/--no-track", help="Feed MLflow beside the local log.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the last held-out figures as JSON.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No step lines.")] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit it as a SLURM job that requeues itself.")
    ] = False,
    nodes: Annotated[
        str | None, typer.Option(help="Of the job: 4, or 2-4 for what is free.  [default: 1]")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            help="Of the job; 0 trains on CPUs.  [default: --nproc, or the cluster's]", min=0
        ),
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Of the job, as sbatch takes it: 24:00:00, 2-12.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job instead of submitting it.")
    ] = False,
) -> tuple[Any, Any]:  # PlannedRun, and a job's Nodes or None: typer evaluates what stands here
    """Train a size on prepared shards. Length: --steps, --tokens or --flops, else 20 tokens per parameter."""
    from pipeline.process import STOPPED
    from pipeline.runs.directory import RunDir, list_checkpoints
    from pipeline.train.request import Devices, Request, plan_run
    from pipeline.train.supervisor import start

    for option, value in {
        "--nodes": nodes,
        "--gpus-per-node": gpus_per_node,
        "--time": time,
    }.items():
        if value is not None and not slurm:
            raise ConfigError(f"{option} {value} is for a job; add --slurm")
    if dry_run and not slurm:
        raise ConfigError("--dry-run is for a job; add --slurm, or see `launch show`")
    asked: Nodes | None = None
    if slurm:
        asked, devices = _cluster(
            nodes or "1", nproc, gpus_per_node, cluster, config, sets or (), out if resume else None
        )
    else:
        devices = Devices.here()
    before = RunDir(out).world if resume and out is not None else None
    ranks = asked.worlds[-1] if asked else nproc or before or max(1, devices.gpus)
    over = {
        "experiment": experiment,
        "seed": seed,
        "parallel": {"zero": zero, "ep": ep, "sp": sp, "engine": engine},
        "train": {
            "steps": steps,
            "tokens": tokens,
            "flops": flops,
            "dtype": dtype,
            "auto_batch": auto_batch or None,
        },
        "cluster": {"slurm": {"time": time}},
    }
    wish = Request(
        size,
        arch,
        data,
        out,
        ranks,
        cluster,
        config,
        sets or (),
        _given(over),
        resume,
        branch=branch,
        init=init,
    )
    if asked:
        wish = replace(wish, fresh=not resume, fewest=asked.worlds[0])
    settled = plan_run(wish, devices)
    if settled.note and not quiet:
        typer.echo(settled.note, err=True)
    if not quiet:
        show = not (asked or as_json or settled.run.finished)
        _announce(settled.config, ranks, devices.name, track=track, header=show)
    if asked:
        if not (dry_run and quiet):
            submit(settled, asked, track=track, dry_run=dry_run, as_json=as_json)
        return settled, asked
    run, signalled = settled.commit().run, None
    if not run.finished:
        note, signalled = start(
            run,
            nproc=ranks,
            gpu=devices.gpus > 0,
            max_restarts=settled.config.train.max_restarts,
            quiet=quiet or as_json,
            track=track,
        )
        if note:
            typer.echo(note, err=True)
    elif not list_checkpoints(run.checkpoints):
        typer.echo(
            f"{run.checkpoints} is empty: restore it, or train anew with another --out", err=True
        )
    _conclude(run.path, settled.config.train.steps or 0, as_json=as_json, quiet=quiet)
    if not run.finished:  # what follows in a script is not to go on with half a model
        raise typer.Exit(128 + signalled if signalled == SIGINT else STOPPED)
    return settled, None


def _announce(config: "RunConfig", ranks: int, device: str, *, track: bool, header: bool) -> None:
    """Print what the run is about to do, and warn of data that is too small for it."""
    from pipeline.data.corpus import Corpus
    from pipeline.track import console, mlflow_store

    corpus = Corpus.open(Path(config.data.dir or "."))
    tokens = corpus.split("train").tokens
    if header:
        place = mlflow_store.public(mlflow_store.resolve(""))
        tracked = f"MLflow at {place}" if track else "in the run directory only (--no-track)"
        lines = console.header(config, ranks, train_tokens=tokens, device=device, tracked=tracked)
        for line in lines:
            print(line, flush=True)
    for line in console.data_warnings(config, tokens, corpus.split("valid").tokens):
        typer.echo(line, err=True)


def as_job(arguments: Sequence[str]) -> "tuple[PlannedRun, Nodes]":
    """What `launch pretrain` with these arguments would submit; refused like there."""
    alone = typer.Typer(pretty_exceptions_enable=False)
    register(alone)
    command = typer.main.get_command(alone)
    settled, nodes = command.main(
        [*arguments, "--slurm", "--dry-run", "--quiet"], standalone_mode=False
    )
    return settled, nodes


def _cluster(
    nodes: str,
    nproc: int | None,
    gpus: int | None,
    name: str | None,
    file: Path | None,
    sets: Sequence[str],
    run: Path | None,
) -> "tuple[Nodes, Devices]":
    """The nodes that the job asks for, and what one of them trains on."""
    from pipeline.config.layers import load_cluster
    from pipeline.runs.directory import RunDir
    from pipeline.slurm.submit import Nodes
    from pipeline.train.request import Devices

    before = RunDir(run).config if run is not None and RunDir(run).exists else None
    machine = load_cluster(name, run=before, file=file, sets=sets)
    gpus = gpus if gpus is not None else nproc or machine.gpus_per_node
    return Nodes.parse(nodes, nproc or max(1, gpus), gpus), Devices.of(machine, gpus)


def submit(
    settled: "PlannedRun", nodes: "Nodes", *, track: bool, dry_run: bool, as_json: bool
) -> None:
    """Refused before the run directory exists, or in the queue."""
    import json
    import shlex
    import shutil

    from pipeline.slurm import queue
    from pipeline.slurm.submit import job_of, remember, step, train

    run, site = settled.run.path.absolute(), settled.config.cluster.slurm
    job = train(run, settled.config.name, site, nodes, track=track)
    if dry_run:
        print(job.shown())
        inner = step(run, site, nodes.most, nodes.tasks, site.cpus_per_task)
        print(f"# what it starts, on {nodes} nodes\n{shlex.join(inner)}\n")
        print(f"# {job.test() if shutil.which('sbatch') else 'no SLURM here: not validated'}")
        return
    if (
        (old := job_of(run))
        and settled.facts is None
        and (there := queue.entry(old))
        and there.alive
    ):
        raise RunError(
            f"run {run} is in the queue as job {old} ({there.state}); `launch cancel {run}` ends it"
        )
    if settled.run.finished:
        raise RunError(f"run {run} has finished; there is nothing to submit")
    job.test()
    settled = settled.commit()  # perhaps beside the one that was asked for
    run = settled.run.path.absolute()
    number = train(run, settled.config.name, site, nodes, track=track).submit()
    remember(run, number, nodes)
    if as_json:
        print(json.dumps({"job": number, "run": str(run)}))
    else:
        print(
            f"job {number} │ {nodes} nodes × {nodes.tasks} processes │ {run}\nwatch it with: launch status {run}"
        )


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """Without what was left out."""
    inner = {
        key: _given(value) if isinstance(value, dict) else value for key, value in table.items()
    }
    return {key: value for key, value in inner.items() if value not in (None, {})}


def _conclude(path: Path, steps: int, *, as_json: bool, quiet: bool) -> None:
    """The last held-out figures, and how to go on."""
    import json

    from pipeline.runs.directory import RunDir
    from pipeline.runs.log import read

    last: dict[str, Any] = {}
    step, goodput = 0, None
    for record in read(RunDir(path).log):
        step = max(step, int(record.get("step", 0)))
        if record.get("kind") == "eval":
            last = record
        goodput = record.get("goodput", goodput)
    status = "finished" if step >= steps else "stopped"
    if as_json:
        about = {
            "run": str(path),
            "status": status,
            "step": step,
            "steps": steps,
            "goodput": goodput,
        }
        print(json.dumps({**about, "eval": last or None}))
    elif not quiet:
        figures = (
            f"held-out loss {last['loss']:.4f} nats/token, {last['bpb']:.4f} bits/byte"
            if last
            else ""
        )
        print(f"{status} at step {step}/{steps} in {path}  {figures}".rstrip())
        if status == "stopped":
            print(f"continue with: launch pretrain --resume --out {path}")
