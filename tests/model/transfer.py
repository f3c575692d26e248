"""Does a learning rate tuned at a small width hold at a large one? Loss over rate and width, with and without muP.

python -m tests.model.transfer [STEPS] [SEEDS]

Not a test: it takes a core for ten minutes. Its table is in docs/LOG.md.
"""

import sys
from itertools import count

import torch

from pipeline.config.layers import load
from pipeline.config.shape import Model
from pipeline.data.synthetic import LANGUAGES, documents
from pipeline.model.build import build_model, init_weights
from pipeline.optim.groups import parameter_groups, set_learning_rate

RUNS = (
    (32, True),
    (256, True),
    (256, False),
)  # 32 is the base: both parametrizations are the same there
EXPONENTS = range(-11, -5)
ROWS, SEQ, LAST = 16, 16, 30


def model_of(width: int, mup: bool, *more: str) -> Model:
    """Two layers, with as many heads of 16 as fit."""
    heads = width // 16
    sets = ["recipe=adamw", f"model.width={width}", f"model.attention.heads={heads}", f"model.attention.kv_heads={heads}",
            "model.attention.head_dim=16", f"model.ffn.hidden={width}", "model.layers=2", f"model.seq={SEQ}",
            "model.mup_base={base_width=32, base_head_dim=16}", *more]  # fmt: skip
    return load(size="tiny", sets=[*sets, *(["model.parametrization=mup"] if mup else [])]).model


def corpus() -> torch.Tensor:
    """synthetic:small, word by word: what a context predicts is a table to be learned."""
    known = count()
    ids: dict[str, int] = {}
    words = (
        word
        for text in documents(1, 0, LANGUAGES["synthetic:small"])
        for word in (*text.split(), "\n")
    )
    return torch.tensor([ids[w] if w in ids else ids.setdefault(w, next(known)) for w in words])


def trained(width: int, mup: bool, lr: float, seed: int, steps: int, tokens: torch.Tensor) -> float:
    """Return the mean loss of the last steps. The rate is constant after a warmup, so a rate that is too high shows."""
    cfg = model_of(width, mup, f"model.vocab={int(tokens.max()) + 1}")
    model = build_model(cfg)
    init_weights(model, cfg, seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, 0.1, cfg), lr=lr, betas=(0.9, 0.95), fused=True
    )
    g = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        set_learning_rate(optimizer, lr * min(1.0, (step + 1) / (steps / 10)))
        at = torch.randint(len(tokens) - SEQ - 1, (ROWS, 1), generator=g) + torch.arange(SEQ + 1)
        out = model(tokens[at[:, :-1]], tokens[at[:, 1:]])
        out.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out.nll.detach()))
    return sum(losses[-LAST:]) / LAST


def main(steps: int = 150, seeds: int = 2) -> None:
    torch.set_num_threads(1)
    tokens = corpus()
    print("| seed | width | " + " | ".join(f"2^{n}" for n in EXPONENTS) + " | best |")
    print("|---" * (len(EXPONENTS) + 3) + "|", flush=True)
    for seed in range(seeds):
        for width, mup in RUNS:
            losses = {n: trained(width, mup, 2.0**n, seed, steps, tokens) for n in EXPONENTS}
            cells = " | ".join(f"{loss:.3f}" for loss in losses.values())
            best = min(losses, key=lambda n: losses[n])
            print(
                f"| {seed} | {width}, {'muP' if mup else 'standard'} | {cells} | 2^{best} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
