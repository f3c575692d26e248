"""Finding the newest checkpoint whose every byte is as written, and loading it into an engine of any layout."""

from pathlib import Path

from pipeline.checkpoint import manifest, store
from pipeline.checkpoint.manifest import Checkpoint
from pipeline.checkpoint.random import random_state, set_random_state
from pipeline.errors import RunError
from pipeline.parallel import fragments
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.runs.directory import list_checkpoints


def find(root: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for each newer one that is damaged. Every rank calls it, at the start or
    while it trains (with no save under way); the ranks share the reading and agree on the answer."""
    if world.first:
        manifest.sweep(root)
    world.barrier()
    damaged: list[str] = []
    for path in reversed(list_checkpoints(root).values()):
        checkpoint, mine = None, ""
        try:
            checkpoint = manifest.read(path)
            mine = manifest.fault(
                checkpoint, sorted(checkpoint.manifest.files)[world.rank :: world.size]
            )
        except ValueError as error:
            mine = str(error)
        fault = next((str(fault) for fault in world.gather(mine) if fault), None)
        if fault is None:
            return checkpoint, damaged
        damaged.append(f"checkpoint {path.name} is damaged ({fault})")
    if damaged:
        raise RunError(
            f"{damaged[0]} and no older one in {root} is whole; restore it or take a new --out"
        )
    return None, []


def load(engine: Engine, checkpoint: Checkpoint, world: World) -> None:
    """Into an engine that has just been built or has trained on; every rank calls it."""
    about = checkpoint.manifest
    store.read(checkpoint.path, about.tensors, engine.state())
    fragments.set_steps(engine.optimizer, about.adam_steps)
    engine.adopt()
    held = random_state(world)
    if about.world == world.size and all(f.key in about.tensors for f in held):
        store.read(checkpoint.path, about.tensors, held)
        set_random_state(held)


def begin(engine: Engine, path: Path) -> None:
    """The weights alone of another run's newest checkpoint, or of a given one; every rank calls it."""
    checkpoint = manifest.newest(path)
    held = [f for f in engine.state() if f.key.startswith(f"{fragments.WEIGHTS}/")]
    store.read(checkpoint.path, checkpoint.manifest.tensors, held)
    engine.adopt()
