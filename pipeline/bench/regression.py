"""Linear regression in context (Garg et al., arXiv 2208.01066), compared with the best predictor.

A row is x1, y1, x2, y2, …, with y = w·x + noise and a different w in every row. Our decoder,
trained from scratch, predicts each y from everything before it. With normal w, x and noise, the
mean of y given the examples so far is ridge regression with the noise's variance as its penalty
(Akyürek et al., arXiv 2211.15661): no predictor has a lower squared error.

B rows · K examples · S = 2K positions · D dimensions
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from pipeline.config.layers import load
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, RunError
from pipeline.model.build import build_model, init_weights
from pipeline.model.stack import Decoder
from pipeline.optim.groups import build_optimizer, set_learning_rate
from pipeline.optim.schedule import learning_rate
from pipeline.parallel.fragments import Piece
from pipeline.parallel.muon_shards import bind
from pipeline.parallel.world import World
from pipeline.planner.check import resolve

RATE = 3e-3  # for AdamW, found with d = 2; at 1e-2 the error falls more slowly
TEST_SEED = 2**40  # far above the seeds of training, which count up from the run's seed
TEST_ROWS = 1024  # rows of one pass
USED = ("model.", "optim.", "seed")  # settings that have an effect here
FIXED = ("model.vocab", "model.seq", "model.tied", "model.mtp")  # settings that the problem fixes


@dataclass(frozen=True, slots=True)
class Problem:
    dimensions: int
    examples: int
    noise: float  # standard deviation

    def draw(self, rows: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw inputs (B, K, D) and outputs (B, K)."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (rows, self.examples, self.dimensions)
        x_BKD = torch.randn(shape, generator=generator, device=device)
        w_BD = torch.randn(rows, self.dimensions, generator=generator, device=device)
        noise_BK = torch.randn(shape[:2], generator=generator, device=device)
        return x_BKD, torch.einsum("bkd,bd->bk", x_BKD, w_BD) + self.noise * noise_BK


class Errors(NamedTuple):
    """Mean squared errors of the next y after k examples, by k."""

    model: list[float]
    ridge: list[float]

    @property
    def excess(self) -> list[float]:
        """The relative excess of the model's error over the optimum."""
        return [ours / best - 1 for ours, best in zip(self.model, self.ridge, strict=True)]


def configure(
    problem: Problem, size: str, arch: str | None, steps: int, rows: int, sets: Sequence[str]
) -> RunConfig:
    """Return the settings of a run of this size, with two positions per example and one output."""
    seq = 2 * problem.examples
    model = {"vocab": 1, "seq": seq, "tied": False}
    train = {"steps": steps, "batch_tokens": rows * seq}
    for given in sets:
        key = given.partition("=")[0].strip()
        if not key.startswith(USED) or key in FIXED:
            raise ConfigError(f"--set {given}: this study does not use {key}; remove it")
    # The rules for learning rates are for language models.
    sets = ["recipe=adamw", f"optim.lr={RATE}", *sets]
    spec = load(size=size, arch=arch, sets=sets, over={"model": model, "train": train})
    shape = spec.model
    for key in ("value_embeddings", "smear"):
        if getattr(shape, key):
            raise ConfigError(f"model.{key} of arch {shape.arch} needs tokens; use another --arch")
    if shape.stack != "decoder":
        raise ConfigError(f'--arch {shape.arch} has stack="{shape.stack}"; use a decoder')
    return resolve(spec, ranks=1, gpu=False)


def ridge(x_BKD: Tensor, y_BK: Tensor, noise: float) -> Tensor:
    """Return the mean of each y given the examples before it, (B, K), in closed form."""
    x_BKD = x_BKD.double()
    # Sums over all earlier examples; there are none before the first.
    squares_BKDD = x_BKD.unsqueeze(-1) * x_BKD.unsqueeze(-2)
    squares_BKDD = squares_BKDD.cumsum(1) - squares_BKDD
    products_BKD = x_BKD * y_BK.double().unsqueeze(-1)
    products_BKD = products_BKD.cumsum(1) - products_BKD
    penalty_DD = noise**2 * torch.eye(x_BKD.shape[-1], dtype=x_BKD.dtype, device=x_BKD.device)
    w_BKD: Tensor = torch.linalg.solve(squares_BKDD + penalty_DD, products_BKD)
    return (w_BKD * x_BKD).sum(-1).float()


def build(config: RunConfig, problem: Problem, device: torch.device) -> Decoder:
    """Build our decoder with a linear layer as its embedding; its one logit is the prediction."""
    model = build_model(config.model)
    # Channels for x, for y, and for which of the two it is.
    read_in = nn.Linear(problem.dimensions + 3, config.model.input_width, bias=False)
    model.embedding = cast(nn.Embedding, read_in)
    init_weights(model, config.model, config.seed)
    return model.to(device)


def predict(model: Decoder, x_BKD: Tensor, y_BK: Tensor) -> Tensor:
    """Return the model's prediction of y at every x, (B, K), from the examples before it."""
    dimensions = x_BKD.shape[-1]
    row_BK2E = x_BKD.new_zeros(*y_BK.shape, 2, dimensions + 3)
    row_BK2E[:, :, 0, :dimensions] = x_BKD
    row_BK2E[:, :, 1, dimensions] = y_BK
    # A norm removes the length of a vector. A constant channel keeps the length visible.
    row_BK2E[:, :, 0, -2] = 1
    row_BK2E[:, :, 1, -1] = 1
    row_BSE = row_BK2E.flatten(1, 2)
    predicted_BS1: Tensor = model(row_BSE)
    return predicted_BS1[:, ::2, 0]


def train(
    config: RunConfig, problem: Problem, device: torch.device, report: Callable[[int, float], None]
) -> Decoder:
    """Train with the run's optimizer and schedule, on new rows in every step."""
    model = build(config, problem, device)
    optimizer = build_optimizer(model, config)
    pieces = (Piece(name, p, p, 0, 0, p.numel()) for name, p in model.named_parameters())
    bind(optimizer, pieces, World(0, 1, device))
    steps = config.train.steps
    for step in range(steps):
        x_BKD, y_BK = problem.draw(config.rows, config.seed + step, device)
        loss = (predict(model, x_BKD, y_BK) - y_BK).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        schedule = config.optim.schedule
        set_learning_rate(optimizer, learning_rate(schedule, config.optim.lr, step, steps))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, steps // 20) == 0:
            report(step + 1, loss.item())
    return model


@torch.no_grad()
def measure(model: Decoder, problem: Problem, rows: int, device: torch.device) -> Errors:
    """Return the errors of the model and of the optimum on the same rows, which are new to both."""
    model.eval()
    sums_2K = torch.zeros(2, problem.examples, dtype=torch.double, device=device)
    passes = -(-rows // TEST_ROWS)
    for number in range(passes):
        x_BKD, y_BK = problem.draw(TEST_ROWS, TEST_SEED + number, device)
        both = (predict(model, x_BKD, y_BK), ridge(x_BKD, y_BK, problem.noise))
        for sums_K, predicted_BK in zip(sums_2K, both, strict=True):
            sums_K += (predicted_BK - y_BK).double().square().sum(0)
    if not sums_2K.isfinite().all():
        raise RunError("the model's squared error is not finite; lower --set optim.lr=…")
    ours, best = (sums_2K / (passes * TEST_ROWS)).tolist()
    return Errors(ours, best)
