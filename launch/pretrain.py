"""`launch pretrain`: one dial, one run."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from launch.examples import examples

EXAMPLES = examples(
    "launch pretrain --size tiny --data data/python --nproc 2 --steps 200",
    "launch pretrain --size 1b --data data/web --zero 1 --dtype bf16 --out runs/1b",
    "launch pretrain --resume --out runs/1b",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(pretrain)


def pretrain(
    size: Annotated[str | None, typer.Option(help="A rung of the ladder; `launch show --sizes` lists them.")] = None,
    arch: Annotated[str, typer.Option(help="An architecture (configs/arch).")] = "dense",
    data: Annotated[Path | None, typer.Option(help="Shards made by `launch data prepare`.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; runs/EXPERIMENT/SIZE if left out.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes on this node; if left out one per GPU, on --resume as before.", min=1)
    ] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage 0 to 3.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share the experts of a routed model.")] = None,
    engine: Annotated[str | None, typer.Option(help="deepspeed, or accelerate as its referee.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length in optimizer steps.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Length in tokens (1e9 works).")] = None,
    flops: Annotated[float | None, typer.Option(help="Length in training FLOPs.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out bit for bit.")] = False,
    experiment: Annotated[str | None, typer.Option(help="MLflow experiment that the run belongs to.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster (configs/cluster).")] = None,
    config: Annotated[Path | None, typer.Option(help="A config file of your own.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="key.subkey=value, over everything else.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data order.", min=0)] = None,
    track: Annotated[bool, typer.Option("--track/--no-track", help="Feed MLflow beside the local log.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last held-out figures as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No step lines.")] = False,
) -> None:
    """Train a size on prepared shards. Length: --steps, --tokens or --flops, else 20 tokens per parameter."""
    from pipeline.train.plan import Devices, Request, settle
    from pipeline.train.rundir import RunDir
    from pipeline.train.start import start

    devices = Devices.here()
    before = RunDir(out).world if resume and out is not None else None
    ranks = nproc or before or max(1, devices.gpus)
    given: list[tuple[tuple[str, ...], Any]] = [
        (("experiment",), experiment),
        (("seed",), seed),
        (("parallel", "zero"), zero),
        (("parallel", "ep"), ep),
        (("parallel", "engine"), engine),
        (("train", "steps"), steps),
        (("train", "tokens"), tokens),
        (("train", "flops"), flops),
        (("train", "dtype"), dtype),
    ]
    run, settled = settle(
        Request(size, arch, data, out, ranks, cluster, config, sets or (), _nest(given), resume), devices
    )
    if not run.finished:
        note = start(
            run,
            nproc=ranks,
            gpu=devices.gpus > 0,
            max_restarts=settled.train.max_restarts,
            quiet=quiet or as_json,
            track=track,
        )
        if note:
            typer.echo(note, err=True)
    _conclude(run.path, settled.train.steps or 0, as_json=as_json, quiet=quiet)


def _nest(given: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for path, value in given:
        if value is not None:
            at = table
            for part in path[:-1]:
                at = at.setdefault(part, {})
            at[path[-1]] = value
    return table


def _conclude(path: Path, steps: int, *, as_json: bool, quiet: bool) -> None:
    """The last held-out figures, and how to go on."""
    import json

    from pipeline.track.log import read

    last: dict[str, Any] = {}
    step = 0
    log = path / "log.jsonl"
    for record in read(log) if log.exists() else ():
        step = max(step, int(record.get("step", 0)))
        if record.get("kind") == "eval":
            last = record
    status: Literal["finished", "stopped"] = "finished" if step >= steps else "stopped"
    if as_json:
        print(json.dumps({"run": str(path), "status": status, "step": step, "steps": steps, "eval": last or None}))
    elif not quiet:
        figures = f"held-out loss {last['loss']:.4f} nats/token, {last['bpb']:.4f} bits/byte" if last else ""
        print(f"{status} at step {step}/{steps} in {path}  {figures}".rstrip())
        if status == "stopped":
            print(f"continue with: launch pretrain --resume --out {path}")
