"""`launch verify`: hold every layout against one plain process, before a big job."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.options import examples
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.bench.equivalence import Outcome


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
    chosen: Annotated[
        str, typer.Option("--layouts", help="all, or names as printed, by comma.")
    ] = "all",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key.subkey=value, over everything else.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Run every layout for some steps beside one plain torch process and beside Accelerate's run, the referee; exit 1
    where they differ.

    The last row is a control with a deliberate error, which must be caught."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    from torch.multiprocessing.spawn import ProcessException

    from pipeline.bench.equivalence import REFEREE, held, layouts
    from pipeline.config.layers import load
    from pipeline.planner.recipe import resolve
    from pipeline.train.request import Devices

    small = [
        "model.seq=64",
        "model.vocab=512",
        f"train.batch_tokens={nproc * 4 * 64}",
        "train.micro_batch=2",
    ]
    fixed = [
        f"train.dtype={dtype}",
        "train.steps=100",
        "train.compile=false",
        "optim.lr=0.001",
        "optim.clip=0.3",
    ]
    even = [
        "optim.optimizer.eps=0.001"
    ]  # a smaller one makes whole steps of gradients that are nothing but rounding
    if not (gpu := Devices.here().gpus > 0):
        os.environ["DS_ACCELERATOR"] = "cpu"
    config = resolve(
        load(size=size, arch=arch, sets=[*small, *fixed, *even, *(sets or ())]),
        ranks=nproc,
        gpu=gpu,
    )
    every = layouts(config, nproc)
    names = [name.strip() for name in chosen.split(",")]
    asked = [
        each
        for each in every
        if chosen == "all" or each.name in names or each.control or each == REFEREE
    ]
    if unknown := set(names) - {layout.name for layout in every} - {"all"}:
        known = ", ".join(layout.name for layout in every)
        raise ConfigError(f"--layouts {', '.join(sorted(unknown))} is not one of: {known}")
    if REFEREE not in every and not as_json:
        print("no referee: Accelerate's run is plain fp32 DDP, with nothing offloaded")
    judged: list[Outcome] = []
    with tempfile.NamedTemporaryFile() as noise:
        try:
            for outcome in held(config, asked, nproc, Path(noise.name)):
                judged.append(outcome)
                if not as_json:
                    _print(outcome, first=len(judged) == 1)
        except ProcessException as error:
            reason = next(
                (line for line in reversed(str(error).splitlines()) if "Error" in line), str(error)
            )
            layout = asked[len(judged)].name
            raise RunError(f"layout {layout!r} failed: {reason.strip()[:300]}") from None
    if as_json:
        print(json.dumps([{**asdict(each), "passed": each.passed} for each in judged], indent=1))
    raise typer.Exit(0 if all(each.passed for each in judged) else 1)


def _print(outcome: "Outcome", *, first: bool) -> None:
    if first:
        groups = " ".join(f"{group:>9}" for group in outcome.gradients)
        print(f"{'layout':<27} {'loss':>7} {'norm':>7} {groups}  referee  tokens")
    if outcome.control:
        verdict = "caught" if outcome.passed else "NOT CAUGHT"
    else:
        verdict = "pass" if outcome.passed else f"FAIL: above {outcome.bound:.0e}"
    by_group = " ".join(f"{difference:>9.1e}" for difference in outcome.gradients.values())
    referee = "" if outcome.referee is None else f"{outcome.referee:.1e}"
    said = f"{referee:>7}  {'same' if outcome.tokens else 'DIFFER':<6}  {verdict}"
    print(
        f"{outcome.layout:<27} {outcome.loss:>7.1e} {outcome.grad_norm:>7.1e} {by_group}  {said}",
        flush=True,
    )
