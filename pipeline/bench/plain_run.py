"""The plain run that every layout is compared with: torch alone, in one process with every row.

It has the same weights and batches as a layout, and torch's own AdamW, Muon and clipping. It shares
the model, AdamW's groups and the balancing of routers with the engines, but defines Muon's groups
and the parts of fused projections a second time. torch has no normalized or cautious Muon, so for
these the plain run uses ours.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.config import optimizer as settings
from pipeline.config.parts import GQA
from pipeline.config.schema import RunConfig
from pipeline.config.shape import BLOCKS, Model
from pipeline.model.build import build_model, init_weights
from pipeline.model.head import Losses
from pipeline.objective.batch import Batch, random_batch
from pipeline.optim.groups import build_optimizer
from pipeline.parallel.engine import balance
from pipeline.parallel.fragments import Piece
from pipeline.parallel.muon_shards import bind
from pipeline.parallel.world import World
from pipeline.train.measure import cut


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The figures of each step of a run, to compare others with."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # on the host
    hashes: list[int] = field(default_factory=list)


def step_count(config: RunConfig) -> int:
    """Return the number of steps to compare. Errors of Muon grow with the steps, so it has more."""
    return 12 if isinstance(config.optim.optimizer, settings.Muon) else 3


def train_plain(config: RunConfig, device: torch.device) -> Trajectory:
    """Train in one process with every row, without an engine."""
    alone = World(0, 1, device)
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    model = build_model(
        config.model,
        z_loss=config.optim.z_loss,
        smoothing=config.objective.label_smoothing,
        loss_chunk=config.train.loss_chunk,
    )
    init_weights(model, config.model, config.seed)
    model.to(device, dtype)
    # Step in fp32 and cast the result, as every engine does: bf16 would lose small updates.
    masters = deepcopy(model).float()
    optimizer_step = plain_optimizer(masters, config)
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    run = Trajectory()
    for step in range(step_count(config)):
        batch = draw_batch(config, step, alone)
        micros = cut(batch, config, alone)
        nlls = []
        routings = []
        for micro in micros:
            losses: Losses = model(**micro.inputs)
            (losses.total / len(micros)).backward()  # type: ignore[no-untyped-call]
            nlls.append(losses.nll.item())
            routings.append(losses.routing)
        trained = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        # An explicit copy: on a CPU `to` alone would return the gradient itself.
        run.gradients.append({name: grad.to("cpu", copy=True) for name, grad in trained})
        for weight, master in pairs:
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), config.optim.clip)
        optimizer_step()
        with torch.no_grad():
            for weight, master in pairs:
                weight.copy_(master)
        balance(model, routings, alone)
        run.norms.append(norm.item())
        run.losses.append(sum(nlls) / len(nlls))
        run.hashes.append(batch.hash)
    return run


def plain_optimizer(model: nn.Module, config: RunConfig) -> Callable[[], None]:
    """Return a function that steps a model of fp32 weights by its gradients."""
    cfg = config.optim.optimizer
    if isinstance(cfg, settings.Muon) and not (cfg.normalize or cfg.cautious):
        return _plain_muon(model, cfg, config)
    # torch's AdamW or, because torch has no normalized or cautious Muon, our own.
    optimizer = build_optimizer(model, config)
    pieces = [Piece(name, p, p, 0, 0, p.numel()) for name, p in model.named_parameters()]
    bind(optimizer, pieces, World(0, 1, pieces[0].master.device))
    return lambda: optimizer.step()


def _plain_muon(model: nn.Module, cfg: settings.Muon, config: RunConfig) -> Callable[[], None]:
    """torch.optim.Muon over a copy of every matrix, and torch.optim.AdamW over the rest."""
    lr = config.optim.lr
    copies: dict[str, list[nn.Parameter]] = {}
    rest = []
    for name, p in model.named_parameters():
        gate = name.endswith(("router.weight", "gate.weight"))
        if name.startswith(BLOCKS) and p.ndim > 1 and not gate:
            parts = _split(name, p.detach(), config.model)
            copies[name] = [nn.Parameter(part.flatten(0, -2).clone()) for part in parts]
        else:
            rate = cfg.vector_rate
            if name.startswith(("embedding.", "encoder.embedding.")):
                rate = cfg.embedding_rate * config.model.embedding_scale
            elif name.startswith("value_embeddings."):
                rate = cfg.embedding_rate
            elif name.startswith("head."):
                rate = cfg.head_rate
            rest.append({"params": [p], "lr": lr * rate})
    matrices = [part for parts in copies.values() for part in parts]
    muon = torch.optim.Muon(matrices, lr=lr, momentum=cfg.momentum, weight_decay=cfg.decay)
    betas = (cfg.beta1, cfg.beta2)
    adamw = torch.optim.AdamW(rest, betas=betas, eps=cfg.eps, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step() -> None:
        weights = dict(model.named_parameters())
        for name, parts in copies.items():
            gradient = weights[name].grad
            assert gradient is not None
            for copy, part in zip(parts, _split(name, gradient, config.model), strict=True):
                copy.grad = part.flatten(0, -2).clone(memory_format=torch.contiguous_format)
        with _SumsInFp32():
            muon.step()  # type: ignore[no-untyped-call]
        adamw.step()
        for name, parts in copies.items():
            for copy, part in zip(parts, _split(name, weights[name], config.model), strict=True):
                part.copy_(copy.view_as(part))

    return step


class _SumsInFp32(TorchFunctionMode):
    """Multiply bf16 matrices on a CPU as optim/muon.py does: a hundred times faster than torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = func in (torch.addmm, torch.Tensor.matmul)
        if product and args[0].dtype == torch.bfloat16 and not args[0].is_cuda:
            return func(*(each.float() for each in args), **kwargs or {}).bfloat16()
        return func(*args, **kwargs or {})


def _split(name: str, p: Tensor, cfg: Model) -> list[Tensor]:
    """The matrices of a parameter as views, outputs first."""
    a = cfg.attention
    halves = 2 if cfg.ffn.gated and name.endswith((".up", ".up.weight")) else 1
    if ".experts." in name:
        return [half for expert in p for half in expert.T.chunk(halves)]
    if isinstance(a, GQA) and name.endswith(".qkv.weight"):
        heads = (a.heads, a.kv_heads, a.kv_heads)
        return list(torch.split(p, [count * a.head_dim for count in heads]))
    if name.endswith(".cross.kv.weight"):
        return list(p.chunk(2))
    if not isinstance(a, GQA) and name.endswith(".kv_down.weight"):
        return list(torch.split(p, [a.kv_rank, a.rope_dim]))
    if not isinstance(a, GQA) and name.endswith(".kv_up.weight"):
        return list(torch.split(p.view(a.heads, -1, a.kv_rank), [a.nope_dim, a.v_dim], dim=1))
    return list(p.chunk(halves))


def draw_batch(config: RunConfig, step: int, world: World) -> Batch:
    """Draw a rank's rows of a step from a seed. In the second step all tokens are equal and choose
    the same experts, so that the experts of some ranks get none."""
    rows = config.rows
    reader, readers = world.reader(config.parallel.sp)
    own = range(reader * rows // readers, (reader + 1) * rows // readers)
    return random_batch(config, config.seed * 1000 + step, own, same=step == 1)
