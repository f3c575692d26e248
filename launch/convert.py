"""`launch export`, `launch import`: to and from Hugging Face's files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from launch.options import examples


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


def export_(
    run: Annotated[Path, typer.Option(help="A run directory, or one checkpoint of it.")],
    to: Annotated[
        Path,
        typer.Option(help="The directory to write, for AutoModelForCausalLM and AutoTokenizer."),
    ],
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A SentencePiece model, if the run's data is gone.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Write a run as a Hugging Face directory; it only appears if transformers gives the same logits from it."""
    import torch

    from pipeline.checkpoint.restore import load_model
    from pipeline.errors import ConfigError
    from pipeline.hub.exporting import export
    from pipeline.hub.families import choose_family
    from pipeline.runs.directory import tokenizer_of

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in dtypes:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(dtypes)}")
    model, config = load_model(run)
    choose_family(config.model)  # first: the rest takes long
    done = export(model, to, tokenizer_of(run, config.data.dir, tokenizer), dtypes[dtype])
    if as_json:
        print(json.dumps({"to": str(to), **done._asdict()}))
    else:
        print(
            f"{done.architecture} in {to}: {done.tensors} tensors, {done.bytes / 2**20:,.1f} MiB; transformers' logits "
            f"differ by {done.difference:.1e} of the largest"
        )


def import_(
    source: Annotated[
        Path, typer.Option("--from", help="A directory that transformers' save_pretrained wrote.")
    ],
    out: Annotated[Path, typer.Option(help="The directory to make: a checkpoint at step 0.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Take a Hugging Face model as a start: `launch pretrain --init OUT` trains it further."""

    from pipeline.hub.importing import import_model

    done = import_model(source, out)
    if as_json:
        print(json.dumps({"out": str(out), **done._asdict()}))
    else:
        print(
            f"{done.family} in {out}: {done.parameters:,} parameters; our logits differ from transformers' by "
            f"{done.difference:.1e} of the largest"
        )
        print(f"train it further: launch pretrain --init {out} --data DATA --out RUN")
