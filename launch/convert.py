"""`launch export`, `launch import`: to and from Hugging Face's files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from launch.options import AsJson, RunPath, TokenizerFile, examples


def register(app: typer.Typer) -> None:
    app.command(
        "export",
        epilog=examples(
            "launch export --run runs/1b --to hub/1b",
            "launch export --run runs/1b --to hub/1b --dtype bf16 --json",
        ),
    )(export_)
    app.command(
        "import",
        epilog=examples(
            "launch import --from hub/llama --out runs/llama",
            "launch pretrain --init runs/llama --data data/web --out runs/more",
        ),
    )(import_)


# Trailing underscores: `import` is a Python keyword, and `export` the function that is called.
def export_(
    run: RunPath,
    to: Annotated[Path, typer.Option(help="Directory to write, for transformers' Auto classes.")],
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> None:
    """Export a run as a Hugging Face directory, after checking that transformers' logits match."""
    import torch

    from pipeline.checkpoint.restore import load_model
    from pipeline.errors import ConfigError
    from pipeline.hub.exporting import export
    from pipeline.hub.families import choose_family
    from pipeline.runs.directory import tokenizer_of

    # Both sides are rounded to this dtype before their logits are compared.
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in dtypes:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(dtypes)}")
    # In fp32 on the CPU, where the logits of the two implementations can be compared closely.
    model, config = load_model(run)
    choose_family(config.model)  # refuse before the slow part
    # An imported model may come without a tokenizer and has no data to take one from.
    known = tokenizer or config.data.dir or (run / "tokenizer.model").exists()
    found = tokenizer_of(run, config.data.dir, tokenizer) if known else None
    # The directory appears under its name only after the logits match.
    done = export(model, to, found, dtypes[dtype])
    if as_json:
        row = {"to": str(to), "tokenizer": found is not None, **done._asdict()}
        print(json.dumps(row))
        return
    print(
        f"{done.architecture} in {to}: {done.tensors} tensors, {done.bytes / 2**20:,.1f} MiB; "
        f"logits differ from transformers' by {done.difference:.1e} of the largest"
    )
    if found is None:
        print(
            "no tokenizer files: the run has none and names no data; add them yourself, or export "
            "again with --tokenizer FILE"
        )


def import_(
    source: Annotated[
        Path, typer.Option("--from", help="A directory that save_pretrained of transformers wrote.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to create, with a checkpoint at step 0.")],
    as_json: AsJson = False,
) -> None:
    """Import a Hugging Face model; `launch pretrain --init OUT` continues its training."""
    from pipeline.hub.importing import import_model

    # The same check as in an export, in the other direction: a mismatch leaves no directory.
    done = import_model(source, out)
    if as_json:
        print(json.dumps({"out": str(out), **done._asdict()}))
        return
    print(
        f"{done.family} in {out}: {done.parameters:,} parameters; logits differ from "
        f"transformers' by {done.difference:.1e} of the largest"
    )
    print(f"continue training with: launch pretrain --init {out} --data DATA --out RUN")
