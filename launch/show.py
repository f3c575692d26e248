"""`launch show`: what a size and architecture amount to, before anything is trained. No torch."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.options import examples
from pipeline.config.dump import flags
from pipeline.config.layers import load, names
from pipeline.config.schema import RunConfig
from pipeline.planner import check, memory
from pipeline.planner import count as account
from pipeline.planner.recipe import resolve
from pipeline.planner.speed import Estimate

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = examples(
    "launch show --size 1b",
    "launch show --size 7b --gpus 64 --cluster h100                        # layouts, and the one to take",
    "launch show --size 671b --arch deepseek-v3 --gpus 2048 --cluster h100 --set model.seq=4096",
    "launch show --size tiny --set model.seq=256 --json",
    "launch show --sizes",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(show)


def show(
    size: Annotated[str, typer.Option(help="A rung of the ladder (configs/sizes.toml).")] = "1b",
    arch: Annotated[str, typer.Option(help="An architecture (configs/arch).")] = "dense",
    gpus: Annotated[int, typer.Option(help="Ranks that share the run.", min=1)] = 8,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster (configs/cluster): adds step times.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A config file of your own.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key.subkey=value, over everything else.")
    ] = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="List the whole ladder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Parameters, FLOPs, recipe and memory of a size; with a cluster, step time by layout and the one to take."""
    if sizes:
        rows = [
            _row(load(size=name, arch=arch, cluster=cluster, file=config, sets=sets or ()))
            for name in names("size")
        ]
        rows.sort(key=lambda row: int(row["params"]))
        print(json.dumps(rows, indent=1)) if as_json else _print_ladder(rows)
        return
    loaded = load(size=size, arch=arch, cluster=cluster, file=config, sets=sets or ())
    settled = resolve(loaded, ranks=gpus, gpu=True)
    figures = _figures(settled, gpus)
    if settled.cluster.rates is not None:
        figures |= _layouts(check.plan(settled, gpus, loaded.train.micro_batch))
        if figures["recommended"] is None and settled.cluster.memory_bytes:
            more = check.enough(settled, gpus, check.DeviceMemory(settled.cluster.memory_bytes))
            figures["enough_gpus"] = next((layout.ranks for layout in more), None)
    print(json.dumps(figures, indent=1)) if as_json else _print_one(figures)


def _row(config: RunConfig) -> dict[str, Any]:
    model, count = config.model, account.params(config.model)
    return {
        "size": model.size,
        "layers": model.layers,
        "width": model.width,
        "heads": model.attention.heads,
        "kv_heads": getattr(model.attention, "kv_heads", None),
        "ffn": model.ffn.hidden,
        "params": count.total,
        "active": count.active,
        "non_embedding": count.non_embedding,
        "flops_per_token": account.flops_per_token(model).model,
    }


def _figures(config: RunConfig, ranks: int) -> dict[str, Any]:
    model, train, count = config.model, config.train, account.params(config.model)
    flops = account.flops_per_token(model, recompute=train.recompute)
    assert train.batch_tokens != "auto" and train.steps
    held = {
        zero: memory.memory(config, replace(memory.Layout.of(config, ranks), zero=zero))
        for zero in range(4)
    }
    return {
        "size": model.size,
        "arch": model.arch,
        "shape": _row(config),
        "seq": model.seq,
        "vocab": model.vocab,
        "params": {**asdict(count), "total": count.total, "non_embedding": count.non_embedding},
        "flops_per_token": {**asdict(flops), "model": flops.model, "hardware": flops.hardware},
        "convention": account.CONVENTION,
        "recipe": {
            "lr": config.optim.lr,
            "batch_tokens": train.batch_tokens,
            "micro_batch": train.micro_batch,
            "warmup_steps": config.optim.schedule.warmup_steps,
            "beta2": config.optim.optimizer.beta2,
            "steps": train.steps,
            "tokens": train.steps * train.batch_tokens,
            "flops": train.steps * train.batch_tokens * flops.model,
        },
        "ranks": ranks,
        "cluster": config.cluster.name,
        "dtype": train.dtype,
        "memory_bytes": {f"zero{z}": {**asdict(m), "total": m.total} for z, m in held.items()},
        "device_memory_bytes": config.cluster.memory_bytes,
        "checkpoint_bytes": memory.checkpoint_bytes(model),
    }


def _layouts(estimates: list[Estimate]) -> dict[str, Any]:
    """One row per ZeRO stage and ep; what is recommended is one of them, or nothing."""
    rows = [
        {
            **asdict(e),
            "memory": {**asdict(e.memory), "total": e.memory.total},
            "traffic": {**asdict(e.traffic), "total": e.traffic.total},
        }
        for e in estimates
    ]
    take = check.best(estimates)
    return {"layouts": rows, "recommended": rows[estimates.index(take)] if take.fits else None}


def _print_ladder(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("size", *(k for k in rows[0] if k != "size"), box=None, header_style="bold")
    for row in rows:
        shape = (str(row[k] or "–") for k in ("layers", "width", "heads", "kv_heads", "ffn"))
        counts = (_si(row[k]) for k in ("params", "active", "non_embedding", "flops_per_token"))
        table.add_row(row["size"], *shape, *counts)
    for column in table.columns[1:]:
        column.justify = "right"
    Console().print(table)


def _print_one(f: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    out, shape, p, flops, recipe = (
        Console(),
        f["shape"],
        f["params"],
        f["flops_per_token"],
        f["recipe"],
    )
    about = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    about.add_column(style="bold")
    for name, value in {
        "shape": f"{shape['layers']} layers × {shape['width']}, {shape['heads']} heads "
        f"({shape['kv_heads'] or 'latent'} kv), ffn {shape['ffn']}, vocab {f['vocab']:,}, seq {f['seq']:,}",
        "parameters": f"{_si(p['total'])} total · {_si(p['active'])} active · {_si(p['non_embedding'])} "
        f"non-embedding · {_si(p['scaling'])} as N of a fit",
        "FLOPs/token": f"{_si(flops['model'])} = {_si(flops['matmul'])} matmul + {_si(flops['attention'])} attention"
        + (f"; + {_si(flops['recompute'])} recomputed" if flops["recompute"] else ""),
        "recipe": f"lr {recipe['lr']:.3g} · batch {recipe['batch_tokens']:,} tokens · warmup {recipe['warmup_steps']} "
        f"· β2 {recipe['beta2']}",
        "run": f"{recipe['steps']:,} steps · {_si(recipe['tokens'])} tokens · {recipe['flops']:.3g} FLOPs",
        "checkpoint": _gib(f["checkpoint_bytes"]),
    }.items():
        about.add_row(name, value)
    out.print(f"[bold]{f['size']}[/bold] × {f['arch']}", highlight=False)
    out.print(about, highlight=False)
    out.print(_layout_table(f) if "layouts" in f else _memory_table(f), highlight=False)
    if "layouts" in f:
        out.print(_advice(f), highlight=False)
    out.print(f["convention"], style="dim", highlight=False)


def _memory_table(f: dict[str, Any]) -> "Table":
    from rich.table import Table

    have = f["device_memory_bytes"]
    title = f"GiB on one of {f['ranks']} ranks, {f['dtype']}, micro-batch {f['recipe']['micro_batch']}; update is later"
    table = Table("ZeRO", *f["memory_bytes"]["zero0"], box=None, title=title)
    for stage, m in f["memory_bytes"].items():
        fits = "" if have is None else (" ✓" if m["total"] <= have else " ✗")
        *parts, total = (f"{value / 2**30:,.2f}" for value in m.values())
        table.add_row(stage.removeprefix("zero"), *parts, total + fits)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _layout_table(f: dict[str, Any]) -> "Table":
    """The layouts that fit, and of a stage where none does the smallest."""
    from rich.table import Table

    heads = ("ZeRO", "ep", "micro", "recompute", "GiB", "sent", "step", "tokens/s", "MFU", "GPU-h")
    table = Table(
        *heads,
        box=None,
        title=f"predicted on {f['ranks']} × {f['cluster']}, {f['dtype']}; GiB held and sent by one GPU",
    )
    for zero in range(4):
        rows = [row for row in f["layouts"] if row["layout"]["zero"] == zero]
        for row in [row for row in rows if row["fits"]] or [
            min(rows, key=lambda row: int(row["memory"]["total"]))
        ]:
            table.add_row(
                *(str(row["layout"][k]) for k in ("zero", "ep", "micro_batch")),
                {False: "no", True: "yes"}.get(row["layout"]["recompute"], "selective"),
                f"{_digits(row['memory']['total'] / 2**30)} {'✓' if row['fits'] else '✗'}",
                _digits(row["traffic"]["total"] / 2**30),
                f"{_digits(row['step_s'])} s",
                _si(row["tokens_s"]),
                f"{row['mfu']:.1%}",
                _si(row["gpu_hours"]),
                style="bold" if row is f["recommended"] else None,
            )
    for column in table.columns:
        column.justify = "right"
    return table


def _advice(f: dict[str, Any]) -> str:
    if (row := f["recommended"]) is None:
        return "no layout fits; take a smaller --size" + (
            f", or --gpus {n}" if (n := f["enough_gpus"]) else ""
        )
    low, high = (row["step_s"] * (1 + sign * row["error"]) for sign in (-1, 1))
    take = flags(memory.Layout(**row["layout"]).change())
    return f"take [bold]{take}[/bold]: {_digits(low)} to {_digits(high)} s a step, from published runs (docs/SCALE.md)"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _si(value: float) -> str:
    for unit, power in (("P", 15), ("T", 12), ("B", 9), ("M", 6), ("k", 3)):
        if value >= 10**power:
            return f"{value / 10**power:.2f}{unit}"
    return f"{value:.0f}"


def _gib(value: float) -> str:
    return f"{value / 2**30:,.2f} GiB"
