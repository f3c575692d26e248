"""`launch verify`: compare every layout with one plain process, before a big job."""

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from launch.options import AsJson, Settings, Size, examples
from launch.tables import print_json
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.bench.equivalence import Layout, Outcome

Processes = Annotated[int, Option("--nproc", min=1, help="Processes; on GPUs, one per GPU.")]
_LAYOUTS = "Layouts to compare: all, or names from the printed table, separated by commas."
Layouts = Annotated[str, Option("--layouts", help=_LAYOUTS)]
Dtype = Annotated[str, Option(help="Precision: fp32 or bf16.")]


app = typer.Typer()

# Muon orthogonalizes in bf16, so the last bit of a gradient may change an update by 0.4%. At a high
# learning rate such differences would let tokens choose other experts. At this low rate they stay
# far below the bound, while an update that is wrong by 10% exceeds it. The embedding, the head and
# the vectors, which AdamW trains, learn as fast as in the AdamW run. The decay is given, because by
# rule it would remove 5% of a weight in each step, or nothing, depending on that last bit.
_RATES = {
    "adamw": ["optim.lr=0.001"],
    "muon": [
        *("optim.lr=0.000002", "optim.optimizer.decay=1"),
        *(f"optim.optimizer.{part}_rate=500" for part in ("embedding", "head", "vector")),
    ],
}


@app.command(
    epilog=examples(
        "launch verify --size tiny --arch mla-moe --nproc 4",
        "launch verify --size tiny --arch dense --nproc 2 --layouts 'zero 1,zero 3'",
    )
)
def verify(
    size: Size = "tiny",
    arch: Annotated[str, Option(help="Architecture, a name in configs/arch.")] = "mla-moe",
    nproc: Processes = 2,
    chosen: Layouts = "all",
    dtype: Dtype = "fp32",
    sets: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train every layout for some steps; exit 1 if one differs from plain torch or from Accelerate.

    The last row is a control with a deliberate error, which must be caught."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    from torch.multiprocessing.spawn import ProcessException

    from pipeline.bench.equivalence import REFERENCE, compare_layouts, list_layouts
    from pipeline.config.layers import load
    from pipeline.planner.check import resolve
    from pipeline.train.request import Devices

    given = sets or []
    asked = load(size=size, arch=arch, sets=["model.seq=64", *given])
    kind = asked.optim.optimizer.kind
    settings = [
        f"optim.optimizer.kind={kind}",
        *("model.seq=64", "model.vocab=512"),
        f"train.batch_tokens={nproc * 4 * asked.model.seq}",  # 4 rows per rank
        "train.micro_batch=2",  # two per step, so that gradients accumulate
        f"train.dtype={dtype}",
        "train.steps=100",  # the schedule's length; fewer steps are trained
        "train.compile=false",  # so few steps do not pay for it
        *_RATES[kind],
        "optim.clip=0.3",  # low, so that clipping is tested too
        # With a smaller epsilon, or outputs that start at zero, updates amplify rounding errors.
        *("optim.optimizer.eps=0.001", "model.init_out=scaled"),
    ]
    gpu = Devices.here().gpus > 0
    if not gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    loaded = load(size=size, arch=arch, sets=[*settings, *given])
    config = resolve(loaded, ranks=nproc, gpu=gpu)
    known = list_layouts(config, nproc)
    layouts = _choose(known, chosen, REFERENCE)
    if REFERENCE not in known and not as_json:
        print("no referee column: Accelerate runs only plain fp32 DDP without offloading")
    outcomes: list[Outcome] = []
    with tempfile.NamedTemporaryFile() as output:  # gets the output of the ranks
        try:
            for outcome in compare_layouts(config, layouts, nproc, Path(output.name)):
                outcomes.append(outcome)
                if not as_json:
                    _print(outcome, first=len(outcomes) == 1)
        except ProcessException as error:
            lines = str(error).splitlines()  # the traceback of the rank that failed
            reason = next((line for line in reversed(lines) if "Error" in line), str(error))
            name = layouts[len(outcomes)].name
            raise RunError(f"layout {name!r} failed: {reason.strip()[:300]}") from None
    if as_json:
        print_json([{**asdict(each), "passed": each.passed} for each in outcomes])
    raise typer.Exit(0 if all(each.passed for each in outcomes) else 1)


def _choose(known: list["Layout"], chosen: str, reference: "Layout") -> list["Layout"]:
    """Return the layouts to run; the reference and the control always run."""
    names = [name.strip() for name in chosen.split(",")]
    # Refused before any rank starts.
    unknown = set(names) - {layout.name for layout in known} - {"all"}
    if unknown:
        valid = ", ".join(layout.name for layout in known)
        raise ConfigError(f"--layouts {', '.join(sorted(unknown))} is not one of: {valid}")
    return [
        layout
        for layout in known
        if chosen == "all" or layout.name in names or layout.control or layout == reference
    ]


def _print(outcome: "Outcome", *, first: bool) -> None:
    if first:
        groups = " ".join(f"{group:>9}" for group in outcome.gradients)
        print(f"{'layout':<27} {'loss':>7} {'norm':>7} {groups}  referee  tokens")
    # The control passes if its deliberate error was found.
    if outcome.control:
        verdict = "caught" if outcome.passed else "NOT CAUGHT"
    else:
        verdict = "pass" if outcome.passed else f"FAIL: above {outcome.bound:.0e}"
    losses = f"{outcome.loss:>7.1e} {outcome.grad_norm:>7.1e}"
    groups = " ".join(f"{difference:>9.1e}" for difference in outcome.gradients.values())
    # Difference to Accelerate's run, which exists in fp32 only.
    referee = "" if outcome.referee is None else f"{outcome.referee:.1e}"
    tokens = "same" if outcome.tokens else "DIFFER"
    row = f"{outcome.layout:<27} {losses} {groups}  {referee:>7}  {tokens:<6}  {verdict}"
    print(row, flush=True)
