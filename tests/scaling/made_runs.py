"""Run directories as training writes them, drawn from a known law: warmup, plateau, decay, and noise."""

import json
import math
from pathlib import Path

import numpy as np

LAW = {"E": 1.7, "A": 60.0, "alpha": 0.31, "B": 120.0, "beta": 0.33}
CONVENTION = (
    "6·matmul parameters incl. head + causal attention; N without input embedding, with head"
)


def true_loss(N: float, D: float) -> float:
    return LAW["E"] + LAW["A"] * N ** -LAW["alpha"] + LAW["B"] * D ** -LAW["beta"]


# The true accuracy on the task `pairs`, whose bits per byte are half of the loss.
PAIRS = {"chance": 0.5, "ceiling": 0.95, "middle": 1.4, "slope": 4.0}


def true_accuracy(bits: float) -> float:
    chance, ceiling, middle, slope = PAIRS.values()
    return chance + (ceiling - chance) / (1 + math.exp(slope * (bits - middle)))


def make_run(
    root: Path, folder: str, N: float, tokens: float, *, size: str = "tiny", steps: int = 400, finish: bool = True,
    seed: int = 0, questions: int = 0, **record: object,
) -> Path:  # fmt: skip
    path = root / folder
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    flops_per_token = 6.4 * N
    meta = {
        "version": 1, "name": folder, "experiment": root.name, "size": size, "arch": "dense",
        "params": {"total": int(N * 1.3), "active": int(N * 1.3), "non_embedding": int(N * 0.8), "scaling": int(N)},
        "flops_per_token": flops_per_token, "convention": CONVENTION, "vocab": 4096, "tokenizer": "f00d",
        "data": "cafe",
        "bytes_per_token": 3.4, "batch_tokens": int(tokens / steps), "steps": steps, "seq": 256, "peak_flops": None,
    } | record  # fmt: skip
    (path / "run.json").write_text(json.dumps(meta))
    lines: list[dict[str, object]] = [{"kind": "event", "time": 1.0, "step": 0, "event": "start"}]
    stop = steps if finish else steps * 2 // 3
    for step in range(1, stop + 1):
        D = tokens * step / steps
        plateau = 0.06 * min(
            1.0, (steps - step) / (0.15 * steps)
        )  # WSD: what annealing takes off at the end
        loss = min(math.log(4096), true_loss(N, D) + plateau)
        at = {"time": 1.0 + step, "step": step, "tokens": int(D), "flops": D * flops_per_token}
        lines.append({"kind": "step", **at, "loss": loss + rng.normal(0, 0.03), "grad_norm": 0.5, "lr": 1e-3,
                      "tokens_per_s": 40000 / (N / 2e5) ** 0.7, "mfu": None, "hash": "0" * 16})  # fmt: skip
        if step % (steps // 20) == 0:
            held = loss * math.exp(rng.normal(0, 0.001))
            lines.append({"kind": "eval", **at, "loss": held, "bpb": held / math.log(2) / 3.4})
            if questions:
                right = rng.binomial(questions, true_accuracy(loss / 2))
                lines[-1] |= {"pairs/accuracy": right / questions, "pairs/bpb": held / 2}
    if finish:
        lines.append({"kind": "event", "time": 2.0 + steps, "step": steps, "event": "finish"})
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_ladder(root: Path, count: int = 3, questions: int = 0) -> Path:
    sizes = [("tiny", 2.1e5), ("mini", 6.4e5), ("small", 2.2e6), ("base", 7e6), ("big", 2e7)]
    for i, (size, N) in enumerate(sizes[:count]):
        make_run(root, f"{size}-20x", N, 20 * N, size=size, seed=i, questions=questions)
    return root
