"""`launch evaluate`: the held-out loss of a checkpoint."""

import json
from pathlib import Path
from typing import Annotated

import typer

from launch.options import AsJson, RunPath, examples

EXAMPLES = examples(
    "launch evaluate --run runs/1b",
    "launch evaluate --run runs/1b/checkpoints/step-00002000 --data data/other --batches 64 --json",
    "sbatch --gpus-per-node=1 slurm/export.sbatch evaluate --run runs/1b",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(evaluate)


def evaluate(
    run: RunPath,
    data: Annotated[
        Path | None, typer.Option(help="Prepared data; by default the data of the run.")
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out batches; by default as many as in training."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print nats per token and bits per byte on held-out text, computed on one device."""
    import torch

    from pipeline.checkpoint.restore import load_model
    from pipeline.data.corpus import Corpus
    from pipeline.errors import ConfigError
    from pipeline.parallel.world import World
    from pipeline.runs.directory import same_tokenizer
    from pipeline.train.evaluation import Evaluator

    # An empty environment: one process, even if a job with many ranks calls this command.
    world = World.from_environment({})
    # The usual precision of training on each kind of device.
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    model, config = load_model(run, dtype=dtype, device=world.device)
    where = data or config.data.dir
    if where is None:
        raise ConfigError(f"{run} names no data; give --data DIR")
    corpus = Corpus.open(Path(where))
    remedy = "give data made with its tokenizer"
    # Two tokenizers of the same size fit the same model, and the loss would mean nothing.
    same_tokenizer(run, corpus.manifest.tokenizer.fingerprint, f"--data {where}", remedy)
    # An imported run has no recorded fingerprint, so the size is checked as well.
    if corpus.padded_vocab != config.model.vocab:
        raise ConfigError(
            f"--data {where} has {corpus.padded_vocab:,} pieces, but the run was trained on "
            f"{config.model.vocab:,}; {remedy}"
        )
    # By default the batches that training evaluates on, so that the run's log is comparable.
    evaluator = Evaluator(config, corpus, world, batches=batches)
    with torch.no_grad():
        figures = evaluator(lambda micro: model(*micro).nll)  # nats, without auxiliary losses
    if as_json:
        print(json.dumps({"run": str(run), "data": str(where), **figures}))
        return
    print(
        f"{run}: {figures['loss']:.4f} nats per token, {figures['bpb']:.4f} bits per byte "
        f"on {where}"
    )
