"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math
from typing import assert_never

from pipeline.config.optimizer import WSD, Cosine, InverseSqrt, Schedule, WSDSpec


def decay_start(cfg: WSDSpec, steps: int) -> int:
    """The step at which the plateau ends; before it, runs of all lengths are the same."""
    return steps - round(cfg.decay_share * steps)


def learning_rate(cfg: Schedule, peak: float, step: int, steps: int) -> float:
    """The rate of update `step`, counted from 0; the last one is still above the final share."""
    warmup = cfg.warmup_steps
    # Step 0 already learns, and step warmup - 1 reaches the peak.
    if step < warmup:
        return peak * (step + 1) / warmup
    match cfg:
        case WSD():
            start = decay_start(cfg, steps)
            done = max(0, step - start) / max(1, steps - start)
            # Over a short last share, 1 - sqrt does better than a line (arXiv 2405.18392).
            shape = 1 - (math.sqrt(done) if cfg.decay_shape == "sqrt" else done)
        case Cosine():
            done = (step - warmup) / max(1, steps - warmup)
            shape = 0.5 * (1 + math.cos(math.pi * done))
        case InverseSqrt():
            # Step warmup - 1 has the peak, and the step after it is number warmup + 1.
            return peak * math.sqrt(max(1, warmup) / (step + 1))
        case _:
            assert_never(cfg)
    return peak * (cfg.final_share + (1 - cfg.final_share) * shape)
