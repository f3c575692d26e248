"""`launch show`: the figures of a size before anything is trained. Imports no torch."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch import options
from launch.options import examples
from launch.tables import new_console, print_json, table
from pipeline.config.dump import flags
from pipeline.config.layers import load, names, refuse_idle
from pipeline.config.schema import RunConfig, RunSpec
from pipeline.config.shape import Model
from pipeline.planner.check import Resized, Search, resolve
from pipeline.planner.count import params
from pipeline.planner.memory import USABLE, DeviceMemory, Layout, checkpoint_bytes, memory
from pipeline.planner.recipe import derived
from pipeline.planner.speed import plan, recommend
from pipeline.planner.work import convention, training_flops
from pipeline.units import count

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = examples(
    "launch show --size 1b",
    "launch show --size 1b --tokens 100B                 # the recipe of a longer run",
    "launch show --size 7b --gpus 64 --cluster h100      # layouts, and the recommended one",
    "launch show --size 671b --gpus 2048 --cluster h100 --set model.seq=4096",
    "launch show --size tiny --set model.seq=256 --json",
    "launch show --sizes",
)
_GIB = 2**30
_SWITCHES = ("embedding_norm", "smear", "residual_scales", "backout")


app = typer.Typer()


@app.command(epilog=EXAMPLES)
def show(
    size: options.Size = "1b",
    arch: options.Arch = None,
    recipe: options.Recipe = None,
    steps: options.Steps = None,
    tokens: options.Tokens = None,
    flops: options.Flops = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs to plan for.", min=1)] = 8,
    cluster: options.Cluster = None,
    config: options.ConfigFile = None,
    sets: options.Settings = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="List all sizes.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Print parameters, FLOPs, recipe and memory of a size; with --cluster, times of layouts."""

    def loaded(name: str) -> RunSpec:
        length = {"steps": steps, "tokens": tokens, "flops": flops}
        over = options.given_only({"recipe": recipe, "train": length})
        return load(size=name, arch=arch, cluster=cluster, file=config, sets=sets or (), over=over)

    if sizes:
        rows = [_shape(loaded(name)) for name in names("size")]
        # configs/sizes.toml lists sizes by family; --arch changes their counts too.
        rows.sort(key=lambda row: int(row["params"]))
        print_json(rows) if as_json else _print_sizes(rows)
        return
    spec = loaded(size)
    refuse_idle(spec, sets or ())
    # Planned for GPUs (bf16, compiled), also on a laptop without any.
    resolved = resolve(spec, ranks=gpus, gpu=True)
    figures = _figures(resolved, gpus) | {"rules": derived(spec, resolved)}
    # Step times need rates, which a file in configs/cluster may lack.
    if resolved.cluster.rates is not None:
        figures |= _layouts(spec, resolved, gpus, loaded)
    print_json(figures) if as_json else _print_one(figures)


def _shape(config: RunSpec) -> dict[str, Any]:
    model = config.model
    counted = params(model)
    return {
        "size": model.size,
        "layers": model.layers,
        "width": model.width,
        "heads": model.attention.heads,
        "kv_heads": getattr(model.attention, "kv_heads", None),  # latent attention has none
        "ffn": model.ffn.hidden,
        "params": counted.total,
        "active": counted.active,
        "non_embedding": counted.non_embedding,
        "flops_per_token": training_flops(config).model,
    }


def _figures(config: RunConfig, ranks: int) -> dict[str, Any]:
    model = config.model
    train = config.train
    counted = params(model)
    # C and MFU count the model's FLOPs; recomputed ones are listed beside them.
    flops = training_flops(config, recompute=train.recompute)
    layout = Layout.of(config, ranks)
    # Weights, gradients and optimizer shrink with the stage; activations stay.
    stages = {f"zero{zero}": memory(config, replace(layout, zero=zero)) for zero in range(4)}
    tokens = train.steps * train.batch_tokens
    return {
        "size": model.size,
        "arch": model.arch,
        "shape": _shape(config),
        "seq": model.seq,
        "source_seq": model.source_seq,  # of the encoder beside a decoder; otherwise None
        "vocab": model.vocab,
        "parts": _parts(model),
        "params": {
            **asdict(counted),
            "total": counted.total,
            "non_embedding": counted.non_embedding,
        },
        "flops_per_token": {**asdict(flops), "model": flops.model, "hardware": flops.hardware},
        "convention": convention(config),
        "recipe": {
            "lr": config.optim.lr,
            "batch_tokens": train.batch_tokens,
            "micro_batch": train.micro_batch,
            "warmup_steps": config.optim.schedule.warmup_steps,
            "beta2": config.optim.optimizer.beta2,
            "steps": train.steps,
            "tokens": tokens,
            "flops": tokens * flops.model,
        },
        "ranks": ranks,
        "cluster": config.cluster.name,
        "dtype": train.dtype,
        "memory_bytes": {stage: held.figures() for stage, held in stages.items()},
        "device_memory_bytes": config.cluster.memory_bytes,  # None without --cluster
        "checkpoint_bytes": checkpoint_bytes(config),
    }


def _parts(model: Model) -> list[str]:
    """Parts of the embedding and the stream that are on, as docs/MODELS.md names them."""
    found = [key for key in _SWITCHES if getattr(model, key)]
    if model.value_embeddings is not None:
        tables = count(params(model).value_embeddings)
        found.append(f"value_embeddings every {model.value_embeddings} layers ({tables})")
    if model.logit_softcap is not None:
        found.append(f"logit_softcap {model.logit_softcap:g}")
    return found


def _layouts(spec: RunSpec, config: RunConfig, ranks: int, resized: Resized) -> dict[str, Any]:
    """Return a row per ZeRO stage and ep, and the recommended one, or None if none fits."""
    # Only settings that are "auto" in the spec vary between the layouts.
    estimates = plan(config, ranks, spec)
    chosen = recommend(spec, estimates)
    rows = [estimate.figures() for estimate in estimates]
    found: dict[str, Any] = {"layouts": rows, "recommended": None}
    if chosen is not None:
        found["recommended"] = rows[estimates.index(chosen)]  # the same object, to mark its row
    elif config.cluster.memory_bytes:
        search = Search(DeviceMemory(config.cluster.memory_bytes), keep=False, resized=resized)
        found["nearest"] = search.nearest(spec, ranks)  # as `launch pretrain` suggests
    return found


def _print_sizes(rows: list[dict[str, Any]]) -> None:
    shape = ("layers", "width", "heads", "kv_heads", "ffn")
    figures = ("params", "active", "non_embedding", "flops_per_token")
    cells = [
        [
            row["size"],
            *(str(row[key] or "–") for key in shape),
            *(count(row[key]) for key in figures),
        ]
        for row in rows
    ]
    new_console().print(table("", ("size", *shape, *figures), cells))


def _print_one(figures: dict[str, Any]) -> None:
    from rich.table import Table

    shape = figures["shape"]
    # Latent attention has no key/value heads: all heads share one latent.
    heads = f"{shape['heads']} heads ({shape['kv_heads'] or 'latent'} kv)"
    size = f"{shape['layers']} layers × {shape['width']}, {heads}, ffn {shape['ffn']}"
    counted = {key: count(value) for key, value in figures["params"].items()}
    counts = f"{counted['total']} total · {counted['active']} active"
    counts += f" · {counted['non_embedding']} non-embedding"
    flops = {key: count(value) for key, value in figures["flops_per_token"].items()}
    per_token = f"{flops['model']} = {flops['matmul']} matmul + {flops['attention']} attention"
    if figures["flops_per_token"]["recompute"]:
        per_token += f"; + {flops['recompute']} recomputed"
    settings = figures["recipe"]
    batch = f"batch {settings['batch_tokens']:,} tokens · warmup {settings['warmup_steps']}"
    about = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    about.add_column(style="bold")
    seq = " → ".join(f"{figures[key]:,}" for key in ("source_seq", "seq") if figures[key])
    about.add_row("shape", f"{size}, vocab {figures['vocab']:,}, seq {seq}")
    about.add_row("parameters", f"{counts} · {counted['scaling']} as N in scaling laws")
    if figures["parts"]:
        about.add_row("parts", " · ".join(figures["parts"]))
    about.add_row("FLOPs/token", per_token)
    about.add_row("recipe", f"lr {settings['lr']:.3g} · {batch} · β2 {settings['beta2']}")
    length = f"{settings['steps']:,} steps · {count(settings['tokens'])} tokens"
    about.add_row("run", f"{length} · {settings['flops']:.3g} FLOPs")
    about.add_row("checkpoint", f"{figures['checkpoint_bytes'] / _GIB:,.2f} GiB")
    out = new_console()
    out.print(f"[bold]{figures['size']}[/bold] × {figures['arch']}")
    out.print(about)
    rules = [[row["key"], f"{row['value']:,}", row["rule"]] for row in figures["rules"]]
    title = "settings that follow from size and length"
    out.print(table(title, ("setting", "value", "rule"), rules, ["rule"]))
    if "layouts" in figures:
        out.print(_layout_table(figures))
        out.print(_advice(figures))
    else:
        out.print(_memory_table(figures))
    # Papers count N and FLOPs in several ways, so every page states ours.
    out.print(figures["convention"], style="dim")


def _memory_table(figures: dict[str, Any]) -> "Table":
    have = figures["device_memory_bytes"]
    micro = f"micro-batch {figures['recipe']['micro_batch']}"
    where = f"one of {figures['ranks']} ranks, {figures['dtype']}, {micro}"
    title = f"GiB on {where}; total = peak, not the sum"
    rows = []
    for stage, held in figures["memory_bytes"].items():
        cells = [f"{value / _GIB:,.2f}" for value in held.values()]
        if have is not None:
            # Like `launch pretrain`, leave a share for driver and NCCL.
            cells[-1] += " ✓" if held["total"] <= have * USABLE else " ✗"
        rows.append([stage.removeprefix("zero"), *cells])
    return table(title, ("ZeRO", *figures["memory_bytes"]["zero0"]), rows)


def _layout_table(figures: dict[str, Any]) -> "Table":
    """Return the layouts that fit; if none of a ZeRO stage fits, its smallest one."""
    from rich.text import Text

    where = f"{figures['ranks']} × {figures['cluster']}, {figures['dtype']}"
    title = f"predicted on {where}; GiB needed and sent per GPU"
    numbers = ("GiB", "sent", "step", "tokens/s", "MFU", "GPU-h")
    rows = []
    for zero in range(4):
        stage = [row for row in figures["layouts"] if row["layout"]["zero"] == zero]
        smallest = min(stage, key=lambda row: int(row["memory"]["total"]))
        for row in [row for row in stage if row["fits"]] or [smallest]:
            cells = _cells(row)
            # By identity: `_layouts` returns the same object in both places.
            recommended = row is figures["recommended"]
            rows.append([Text(cell, "bold" if recommended else "") for cell in cells])
    return table(title, ("ZeRO", "ep", "micro", "recompute", *numbers), rows, ["recompute"])


def _cells(row: dict[str, Any]) -> list[str]:
    at = row["layout"]
    return [
        *(str(at[key]) for key in ("zero", "ep", "micro_batch")),
        {False: "no", True: "yes"}.get(at["recompute"], "selective"),
        f"{_digits(row['memory']['total'] / _GIB)} {'✓' if row['fits'] else '✗'}",
        _digits(row["traffic"]["total"] / _GIB),
        f"{_digits(row['step_s'])} s",
        count(row["tokens_s"]),
        f"{row['mfu']:.1%}",
        count(row["gpu_hours"]),
    ]


def _advice(figures: dict[str, Any]) -> str:
    row = figures["recommended"]
    if row is None:
        nearest = dict(figures.get("nearest") or {})
        if not nearest:
            return (
                "no layout or smaller --size of this architecture fits; use GPUs with more memory"
            )
        where = f"on {nearest.pop('nproc')} GPUs, " if "nproc" in nearest else ""
        return (
            f"none of these fits; {where}`launch pretrain` fits with [bold]{flags(nearest)}[/bold]"
        )
    # The usual error of such predictions, measured on published runs.
    low = _digits(row["step_s"] * (1 - row["error"]))
    high = _digits(row["step_s"] * (1 + row["error"]))
    chosen = flags(Layout(**row["layout"]).change())
    why = f"least memory within 1% of the fastest; expect {low} to {high} s a step (docs/SCALE.md)"
    return f"use [bold]{chosen}[/bold], as `launch pretrain` does: {why}"


def _digits(value: float) -> str:
    # Three digits: no estimate here is more precise.
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
