"""The learning rate as a pure function of the step, so there is no state to save."""

import math
from typing import assert_never

from pipeline.config.optimizer import WSD, Cosine, InverseSqrt, Schedule, WSDSpec


def decay_start(cfg: WSDSpec, steps: int) -> int:
    """Return the step at which the plateau ends; until then, runs of all lengths are identical."""
    return steps - round(cfg.decay_share * steps)


def learning_rate(cfg: Schedule, peak: float, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 0. The last step is still above the final share."""
    warmup = cfg.warmup_steps
    # Step 0 already learns, and step warmup - 1 reaches the peak.
    if step < warmup:
        return peak * (step + 1) / warmup
    match cfg:
        case WSD():
            start = decay_start(cfg, steps)
            done = max(0, step - start) / max(1, steps - start)
            # For a short decay, 1 - sqrt gives a lower loss than a line (arXiv 2405.18392).
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
