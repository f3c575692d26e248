"""`launch pretrain`: train one size, here or as a SLURM job."""

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from shlex import join, quote
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from launch import options
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.runs.directory import RunDir
    from pipeline.slurm.submit import Nodes
    from pipeline.train.request import Devices, PlannedRun, Request

EXAMPLES = options.examples(
    "launch pretrain --size tiny --data data/python --nproc 2 --steps 200",
    "launch pretrain --size 1b --data data/web --zero 1 --dtype bf16 --out runs/1b",
    "launch pretrain --size 1b --data data/web --auto-batch",
    "launch pretrain --resume --out runs/1b",
    "launch pretrain --init runs/llama --data data/web --out runs/more",
    "launch pretrain --size 1b --data data/web --cluster h100 --slurm --nodes 4 --time 24:00:00",
    "launch pretrain --size 1b --data data/web --slurm --nodes 4 --dry-run",
)

_PRINT_S = 5.0  # for the last lines of a command that was asked to stop

# The options of this command; those that others share are in launch/options.py.
Size = Annotated[str | None, Option(help="Model size; `launch show --sizes` lists all of them.")]
Data = Annotated[Path | None, options.path_option(text="Directory made by `launch data prepare`.")]
_OUT = "Run directory (default: SIZE in runs/EXPERIMENT)."
Out = Annotated[Path | None, options.output_option(text=_OUT)]
_NPROC = "Processes per node (default: one per GPU, or 1; with --resume, as before)."
Nproc = Annotated[int | None, Option(help=_NPROC, min=1, max=100_000)]
# With the rates of a cluster, the planner chooses the layout (pipeline/planner/check.py).
_LAYOUT = "(default: that of the fastest layout if --cluster has rates, else {})"
Zero = Annotated[int | None, Option(help=f"ZeRO stage 0 to 3 {_LAYOUT.format(1)}.")]
_EP = f"Ranks over which the experts are distributed {_LAYOUT.format(1)}."
Ep = Annotated[int | None, Option(help=_EP)]
Sp = Annotated[int | None, Option(help="Ranks that share each sequence (default: 1).")]
_ENGINE = "Engine: deepspeed, or accelerate for comparisons (default: deepspeed)."
Engine = Annotated[str | None, Option(help=_ENGINE)]
_DTYPE = "Precision: fp32 or bf16 (default: bf16 on GPUs, fp32 on CPUs)."
DtypeName = Annotated[str | None, Option("--dtype", help=_DTYPE)]
_BATCH = "Use the largest micro-batch that fits, found by trial."
AutoBatch = Annotated[bool, Option("--auto-batch", help=_BATCH)]
Init = Annotated[Path | None, Option(help="Run or import whose weights to start from.")]
Resume = Annotated[bool, Option("--resume", help="Continue the run in --out, bit for bit.")]
Branch = Annotated[Path | None, Option(help="Longer run to branch off before its WSD decay.")]
_EXPERIMENT = "Name of the experiment, also in MLflow (default: isoflop; fine-tuning: finetune)."
Experiment = Annotated[str | None, Option(help=_EXPERIMENT)]
Seed = Annotated[int | None, Option(help="Seed for weights and data (default: 1234).", min=0)]
Track = Annotated[bool, Option("--track/--no-track", help="Also send the log to MLflow.")]
Slurm = Annotated[bool, Option("--slurm", help="Submit a SLURM job that requeues itself.")]
_NODES = "Nodes of the job, such as 4, or 2-4 for as many as are free (default: 1)."
NodeCount = Annotated[str | None, Option(help=_NODES)]
_GPUS = "GPUs per node of the job; 0 trains on CPUs (default: --nproc, or the cluster's)."
Gpus = Annotated[int | None, Option(help=_GPUS, min=0, max=100_000)]
_TIME = "Time limit of the job: 24:00:00, or 2-12 for 2 days 12 hours (default: the cluster's)."
Time = Annotated[str | None, Option(help=_TIME)]
DryRun = Annotated[bool, Option("--dry-run", help="Print the job instead of submitting it.")]


app = typer.Typer(pretty_exceptions_enable=False)
_PLAN_ONLY = "plan only"  # the object of typer's context if `as_job` calls the command


@app.command(epilog=EXAMPLES)
def pretrain(
    context: typer.Context,
    size: Size = None,
    arch: options.Arch = None,
    recipe: options.Recipe = None,
    data: Data = None,
    out: Out = None,
    nproc: Nproc = None,
    zero: Zero = None,
    ep: Ep = None,
    sp: Sp = None,
    engine: Engine = None,
    steps: options.Steps = None,
    tokens: options.Tokens = None,
    flops: options.Flops = None,
    dtype: DtypeName = None,
    auto_batch: AutoBatch = False,
    init: Init = None,
    resume: Resume = False,
    branch: Branch = None,
    experiment: Experiment = None,
    cluster: options.Cluster = None,
    config: options.ConfigFile = None,
    sets: options.Settings = None,
    seed: Seed = None,
    track: Track = True,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    slurm: Slurm = False,
    nodes: NodeCount = None,
    gpus_per_node: Gpus = None,
    time: Time = None,
    dry_run: DryRun = False,
) -> tuple[Any, Any]:  # PlannedRun and Nodes | None; typer evaluates annotations, so no names here
    """Train a model of one size on prepared shards, by default on 20 tokens per parameter."""
    from pipeline.train.request import Request, plan_run

    refuse_job_options(slurm, nodes, gpus_per_node, time, dry_run)
    length = {"steps": steps, "tokens": tokens, "flops": flops}  # at most one
    train = {**length, "dtype": dtype, "auto_batch": auto_batch or None}
    layout = {"zero": zero, "ep": ep, "sp": sp, "engine": engine}
    over: dict[str, Any] = {"experiment": experiment, "seed": seed, "train": train}
    over |= {"recipe": recipe, "parallel": layout, "cluster": {"slurm": {"time": time}}}
    over = options.given_only(over)
    request = Request(
        size=size, arch=arch, data=data, out=out, cluster=cluster, file=config, sets=sets or (),
        over=over, resume=resume, fresh=slurm and not resume, branch=branch, init=init,
    )  # fmt: skip
    request, devices, job = place(request, slurm, nodes, nproc, gpus_per_node)
    planned = plan_run(request, devices)
    if context.obj != _PLAN_ONLY:
        Start(
            request, devices, job, track=track, dry_run=dry_run, as_json=as_json, quiet=quiet
        ).begin(planned)
    return planned, job  # for `as_job`; typer ignores it


def refuse_job_options(slurm: bool, *values: Any) -> None:
    """Refuse options of a SLURM job without one; `values` in the order of `names`."""
    names = ("--nodes", "--gpus-per-node", "--time", "--dry-run")
    for option, value in zip(names, values, strict=True):
        given = value is not None and value is not False  # 0 is a value: no GPUs
        if given and not slurm:
            raise ConfigError(f"{option} is for a SLURM job; add --slurm, or remove {option}")


@dataclass(frozen=True, slots=True)
class Start:
    """The place where a planned run trains, and the output that the user wants."""

    request: "Request"
    devices: "Devices"
    job: "Nodes | None"  # None: on this machine
    _: KW_ONLY
    track: bool
    dry_run: bool
    as_json: bool
    quiet: bool

    def begin(self, planned: "PlannedRun") -> None:
        """Train the run here, or submit it as a job."""
        if planned.note and not self.quiet:  # such as how the layout was chosen
            typer.echo(planned.note, err=True)
        if self.job is None:
            self._train_here(planned)
            return
        self._submit(planned, self.job)
        if not self.quiet:
            self._announce(planned.config, header=False)

    def _announce(self, config: "RunConfig", *, header: bool) -> None:
        """Print a summary of the run before it starts, and warn if it has too little data."""
        from pipeline.data.corpus import Corpus
        from pipeline.data.pairs import PairRows, PairStream
        from pipeline.track import console, mlflow_store

        corpus = Corpus.open(Path(config.data.dir or "."))
        tokens = corpus.split("train").tokens
        notes = []
        rows = PairRows.of(config)
        if rows is not None:
            stream = PairStream(corpus, corpus.split("train").shards, rows)
            tokens = stream.windows * rows.seq  # of the decoder, as all counts of tokens
            notes.append(f"pairs   {stream}")
        if header:
            place = mlflow_store.public(mlflow_store.resolve(""))  # without a password
            tracked = (
                f"MLflow at {place}" if self.track else "in the run directory only (--no-track)"
            )
            lines = console.header(
                config,
                self.request.nproc,
                train_tokens=tokens,
                device=self.devices.name,
                tracked=tracked,
            )
            for line in lines:
                print(line, flush=True)
        # A few thousand labelled examples are enough, and several passes are usual.
        if not config.objective.examples:
            notes += console.run_warnings(config, tokens, corpus.split("valid").tokens)
        # Without a header stdout may be JSON, so the notes go to stderr.
        for line in notes:
            typer.echo(line, err=not header)

    def _train_here(self, planned: "PlannedRun") -> None:
        """Train to the end or to a stop request."""
        from pipeline.process import STOPPED
        from pipeline.runs.directory import list_checkpoints
        from pipeline.train.supervisor import start

        # From here on the directory exists and is locked: a second launcher is refused.
        run = planned.commit().run
        config = planned.config.train
        signalled = None
        note = ""
        if not run.finished:
            if not self.quiet:
                self._announce(planned.config, header=not self.as_json)
            note, signalled = start(
                run,
                nproc=self.request.nproc,
                gpu=self.devices.gpus > 0,
                max_restarts=config.max_restarts,
                quiet=self.quiet or self.as_json,
                track=self.track,
            )
        elif not list_checkpoints(run.checkpoints):  # finished, but its checkpoints were deleted
            note = f"{run.checkpoints} is empty: restore it from a copy, or choose another --out"
        finished = run.finished
        # A script must not continue with half a model. The exit code after Ctrl-C is 130, as in a
        # shell, and after any other stop 75 (EX_TEMPFAIL): run the same command again.
        code = 0 if finished else 128 + SIGINT if signalled == SIGINT else STOPPED
        # After a stop request the command ends, even if nobody reads its output (Ctrl-S).
        timer = threading.Timer(_PRINT_S, os._exit, (code,))
        if signalled:
            timer.start()
        try:
            if note:
                typer.echo(note, err=True)
            self._print_result(run, planned.config, finished)
            sys.stdout.flush()
        finally:
            timer.cancel()
        if code:
            sys.exit(code)  # typer.Exit(130) would print "interrupted" below the result

    def _submit(self, planned: "PlannedRun", job: "Nodes") -> None:
        """Submit a job. Refuse it before the run directory is created, where possible."""
        from pipeline.slurm import queue
        from pipeline.slurm.submit import job_of, remember, step, train

        # Absolute, because a job may start in another directory.
        run = planned.run.path.absolute()
        site = planned.config.cluster.slurm
        batch = train(run, planned.config.name, site, job, track=self.track)
        if self.dry_run:
            # The script is a fixed template; its srun command depends on the nodes of the job.
            inner = step(run, site, job.most, job.tasks, site.cpus_per_task)
            print(f"{batch.shown()}\n# what it starts, on nodes: {job}\n{join(inner)}\n")
            try:
                print(f"# {batch.test()}")
            except ConfigError as error:
                print(f"# not validated: {error}")
            return
        # The facts of a planned run are None if the run exists. It may have a job.
        old = job_of(run) if planned.facts is None else None
        entry = queue.entry(old) if old else None
        if entry is not None and entry.alive:
            queued = f"is in the queue as job {old} ({entry.state})"
            raise RunError(f"run {run} {queued}; `launch cancel {quote(str(run))}` ends it")
        if planned.run.finished:
            raise RunError(f"run {run} has finished; there is nothing to submit")
        starts = batch.test()  # sbatch may refuse it; nothing is written yet
        planned = planned.commit()  # perhaps in a new directory beside the existing one
        run = planned.run.path.absolute()
        # Built again, because `commit` may have chosen another directory.
        number = train(run, planned.config.name, site, job, track=self.track).submit()
        remember(run, number, job)  # for `launch status`, `logs` and `cancel`
        if self.as_json:  # one line, for scripts
            print(json.dumps({"job": number, "run": str(run)}))
        else:
            print(f"job {number} │ {job} nodes × {job.tasks} processes │ {run}")
            print(f"{starts}\nwatch it with: launch status {quote(str(run))}")

    def _print_result(self, run: "RunDir", config: "RunConfig", finished: bool) -> None:
        """Print the last held-out figures and how to continue."""
        from pipeline.runs.log import read

        last: dict[str, Any] = {}
        steps = config.train.steps
        step = 0
        goodput = None
        # The log has every attempt of the run. The last evaluation counts.
        for record in read(run.log):
            step = max(step, int(record["step"]))
            if record["kind"] == "eval":
                last = record
            goodput = record.get("goodput", goodput)
        status = "finished" if finished else "stopped"
        if self.as_json:
            about = {"run": str(run.path), "status": status, "step": step, "steps": steps}
            print(json.dumps({**about, "goodput": goodput, "eval": last or None}))
        elif not self.quiet:
            figures = ""
            if last:
                scores = {k.partition("/")[2]: last[k] for k in last if k.startswith("labels/")}
                unit = "per row" if scores else "nats/token"
                figures = f"held-out loss {last['loss']:.4f} {unit}"
                figures += f", {last['bpb']:.4f} bits/byte" if last.get("bpb") is not None else ""
                figures += "".join(f", {name} {score:.4f}" for name, score in scores.items())
            print(f"{status} at step {step}/{steps} in {run.path}  {figures}".rstrip())
            if not finished:
                command = "finetune" if config.objective.examples else "pretrain"
                print(f"continue with: launch {command} --resume --out {quote(str(run.path))}")


def as_job(arguments: Sequence[str]) -> "tuple[PlannedRun, Nodes]":
    """Return the run and the nodes that `launch pretrain` would submit with these arguments."""
    # Through the parser, so that a sweep's runs are checked like commands typed by hand.
    words = [*arguments, "--slurm", "--quiet"]
    # Not standalone: typer returns our value and lets our errors pass.
    command = typer.main.get_command(app)
    planned, nodes = command.main(words, standalone_mode=False, obj=_PLAN_ONLY)
    return planned, nodes


def place(
    request: "Request", slurm: bool, nodes: str | None, nproc: int | None, gpus: int | None
) -> "tuple[Request, Devices, Nodes | None]":
    """Decide where a run trains. Return its request with the number of processes, the devices of
    one node, and the nodes of the job if it is one."""
    from pipeline.config.layers import load_cluster
    from pipeline.runs.directory import RunDir
    from pipeline.slurm.submit import Nodes
    from pipeline.train.request import Devices

    before = RunDir(request.out) if request.resume and request.out is not None else None
    if not slurm:
        here = Devices.here()
        # A resumed run keeps its number of processes unless the user gives another.
        world = before.world if before is not None else None
        return replace(request, nproc=nproc or world or max(1, here.gpus)), here, None
    # A resumed run continues on its own cluster, unless --cluster names another.
    own = before.config if before is not None and before.exists else None
    cluster = load_cluster(request.cluster, run=own, file=request.file, sets=request.sets)
    # One process per GPU, unless the two options say otherwise. 0 GPUs train on CPUs.
    gpus = gpus if gpus is not None else nproc or cluster.gpus_per_node
    job = Nodes.parse(nodes or "1", nproc or max(1, gpus), gpus)
    request = replace(request, nproc=job.worlds[-1], fewest=job.worlds[0])
    return request, Devices.of(cluster, gpus), job
