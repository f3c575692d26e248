"""`launch verify`: hold every layout against one plain process, before a big job."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.examples import examples
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.train.verify import Outcome


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "launch verify --size tiny --arch mla-moe --nproc 4",
            "launch verify --size tiny --arch dense --nproc 2 --layouts 'zero 1,zero 3'",
        )
    )(verify)


def verify(
    size: Annotated[str, typer.Option(help="A row of configs/sizes.toml.")] = "tiny",
    arch: Annotated[str, typer.Option(help="An architecture (configs/arch).")] = "mla-moe",
    nproc: Annotated[int, typer.Option(min=1, help="Processes; on GPU nodes one per GPU.")] = 2,
    chosen: Annotated[str, typer.Option("--layouts", help="all, or names as printed, by comma.")] = "all",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    sets: Annotated[list[str] | None, typer.Option("--set", help="key.subkey=value, over everything else.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Run every layout for some steps beside one plain torch process; exit 1 where they differ.

    The last row is a control with a deliberate error, which must be caught."""
    from pipeline.config.load import load
    from pipeline.recipe import resolve
    from pipeline.train.plan import Devices
    from pipeline.train.verify import layouts

    small = ["model.seq=64", "model.vocab=512", f"train.batch_tokens={nproc * 4 * 64}", "train.micro_batch=2"]
    fixed = [f"train.dtype={dtype}", "train.steps=100", "train.compile=false", "optim.lr=0.001", "optim.clip=0.3"]
    gpu = Devices.here().gpus > 0
    config = resolve(load(size=size, arch=arch, sets=[*small, *fixed, *(sets or ())]), ranks=nproc, gpu=gpu)
    every = layouts(config, nproc)
    names = [name.strip() for name in chosen.split(",")]
    asked = [layout for layout in every if chosen == "all" or layout.name in names or layout.control]
    if unknown := set(names) - {layout.name for layout in every} - {"all"}:
        known = ", ".join(layout.name for layout in every)
        raise ConfigError(f"--layouts {', '.join(sorted(unknown))} is not one of: {known}")
    passed = _run(config.model_dump(), [asdict(layout) for layout in asked], nproc, gpu=gpu, as_json=as_json)
    raise typer.Exit(0 if passed else 1)


def _run(config: dict[str, Any], layouts: list[dict[str, Any]], nproc: int, *, gpu: bool, as_json: bool) -> bool:
    """Start the processes and print each outcome as it comes; whether all are as they should be."""
    from pipeline.train.verify import Outcome

    rows, judged = list[dict[str, Any]](), list[Outcome]()
    env = {**os.environ, "OMP_NUM_THREADS": "1", **({} if gpu else {"DS_ACCELERATOR": "cpu"})}
    with tempfile.TemporaryFile("w+", errors="replace") as noise:
        request = json.dumps({"config": config, "layouts": layouts, "nproc": nproc})
        command = [sys.executable, "-m", "pipeline.train.verify", request]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=noise, text=True, errors="replace")
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                if line.startswith('{"layout":'):  # the rest is DeepSpeed's
                    rows.append(json.loads(line))
                    judged.append(Outcome(**rows[-1]))
                    if not as_json:
                        _print(judged[-1], first=len(rows) == 1)
        if len(rows) < len(layouts):
            noise.seek(0)
            last = noise.read().strip().splitlines()[-12:]
            reason = next((line for line in reversed(last) if "Error" in line), "no reason given")
            raise RunError(f"layout {len(rows) + 1} of {len(layouts)} failed: {reason.strip()[:300]}")
    if as_json:
        print(json.dumps([{**row, "passed": each.passed} for row, each in zip(rows, judged, strict=True)], indent=1))
    return all(each.passed for each in judged)


def _print(outcome: "Outcome", *, first: bool) -> None:
    from pipeline.train.verify import weight

    if first:
        print(f"{'layout':<42} {'loss':>8} {'norm':>8} {'gradients, worst group':>26} {'tokens':>7}")
    group, worst = max(outcome.gradients.items(), key=lambda pair: weight(pair[1]))
    said = "same" if outcome.tokens else "DIFFER"
    if outcome.control:
        verdict = "caught" if outcome.passed else "NOT CAUGHT"
    else:
        verdict = "pass" if outcome.passed else f"FAIL: above {outcome.bound:.0e}"
    numbers = f"{outcome.loss:>8.1e} {outcome.grad_norm:>8.1e} {f'{group} {worst:.1e}':>26}"
    print(f"{outcome.layout:<42} {numbers} {said:>7}  {verdict}", flush=True)
