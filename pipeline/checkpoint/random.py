"""The random state of a rank as fragments. Batches and initial weights are functions of the seed and need none of it;
it is kept for whatever else may draw, and means something only in a world of the same size."""

import torch

from pipeline.parallel.fragments import Fragment
from pipeline.parallel.world import World


def random_state(world: World) -> list[Fragment]:
    states = {f"rng/cpu/{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rng/cuda/{world.rank}"] = torch.cuda.get_rng_state()
    return [Fragment(key, tuple(state.shape), 0, state) for key, state in states.items()]


def set_random_state(held: list[Fragment]) -> None:
    for fragment in held:
        if fragment.key.startswith("rng/cpu/"):
            torch.set_rng_state(fragment.data)
        else:
            torch.cuda.set_rng_state(fragment.data)
