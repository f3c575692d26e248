"""Config → module: the one place where variants are chosen and weights are drawn."""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.config.parts import FFN, GQA, MLA, MoE, Recompute
from pipeline.config.shape import Model
from pipeline.model.attention import GroupedAttention, LatentAttention
from pipeline.model.ffn import FeedForward
from pipeline.model.moe import MixtureOfExperts
from pipeline.model.norm import deepnorm_beta
from pipeline.model.stack import Block, Decoder


def build_model(
    cfg: Model,
    *,
    z_loss: float = 0.0,
    loss_chunk: int = 2048,
    recompute: Recompute = False,
    experts: range | None = None,
) -> Decoder:
    """The model with its weights not yet drawn, not as torch would either; under torch.device("meta") it takes no
    memory. `experts` are those that this process holds of every routed layer: all of them, unless it shares them with
    others."""

    def block(layer: int) -> Block:
        return Block(
            cfg,
            _attention(cfg, layer),
            _ffn(cfg, layer, experts),
            recompute=recompute == "selective",
        )

    with _Undrawn():
        return Decoder(
            cfg, block, z_loss=z_loss, loss_chunk=loss_chunk, recompute=recompute is True
        )


class _Undrawn(TorchFunctionMode):
    """torch's own first weights, a third of the time of ours, are left out."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _attention(cfg: Model, layer: int) -> nn.Module:
    windowed, placed = cfg.windowed(layer), cfg.placed(layer)
    match cfg.attention:
        case GQA():
            return GroupedAttention(cfg, cfg.attention, windowed=windowed, placed=placed)
        case MLA():
            return LatentAttention(cfg, cfg.attention, windowed=windowed, placed=placed)
        case _:
            assert_never(cfg.attention)


def _ffn(cfg: Model, layer: int, experts: range | None) -> nn.Module:
    match cfg.ffn:
        case FFN(hidden=hidden, activation=activation, bias=bias):
            return FeedForward(cfg.width, hidden, activation, bias=bias)
        case MoE():
            if cfg.routed(layer):
                return MixtureOfExperts(cfg.width, cfg.ffn, experts or range(cfg.ffn.experts))
            return FeedForward(cfg.width, cfg.ffn.dense_hidden, cfg.ffn.activation)
        case _:
            assert_never(cfg.ffn)


@torch.no_grad()
def init_weights(model: nn.Module, cfg: Model, seed: int) -> None:
    """Gains 1, biases and sinks 0, all else ~ N(0, std).

    Every matrix has a generator of its own, seeded by its name, and every expert too: the start is the same in every
    layout and order, and each thread draws another one."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        drawn = []
        for name, parameter in model.named_parameters():
            std, key = _std(name, cfg), f"{seed}/{name}"
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith(".gain") else 0.0)
            elif hasattr(parameter, "expert"):
                ones = enumerate(parameter, start=parameter.expert[0])
                drawn += [pool.submit(_normal, one, std, f"{key}.{index}") for index, one in ones]
            else:
                drawn.append(pool.submit(_normal, parameter, std, key))
        for each in drawn:
            each.result()
    for name, parameter in model.named_parameters():
        if cfg.placement == "deepnorm" and name.endswith(
            ("attention.qkv.weight", "attention.kv_up.weight")
        ):
            _values(parameter, cfg.attention).mul_(
                deepnorm_beta(cfg.layers)
            )  # as outputs and FFN are, not q and k


def _std(name: str, cfg: Model) -> float:
    """The table. Outputs into the residual stream / √(2·layers) (Megatron-LM), DeepNorm's by a factor of its own. Under
    muP ∝ 1/√fan-in, but a router, which has few outputs as the head has, ∝ 1/fan-in."""
    leaf, scale = name.removesuffix(".weight"), cfg.narrower(name)
    if leaf == "embedding":
        return cfg.init_std * cfg.embedding_scale
    std = cfg.init_std * (scale if leaf.endswith("router") else math.sqrt(scale))
    if cfg.placement == "deepnorm":
        return (
            std * deepnorm_beta(cfg.layers)
            if leaf.endswith((".out", "ffn.up", "experts.up", "shared.up"))
            else std
        )
    return std / math.sqrt(2 * cfg.layers) if leaf.endswith(".out") else std


def _values(fused: Tensor, cfg: GQA | MLA) -> Tensor:
    """The rows that make values."""
    match cfg:
        case GQA():
            return fused[-cfg.kv_heads * cfg.head_dim :]
        case MLA():
            return fused.view(cfg.heads, cfg.nope_dim + cfg.v_dim, -1)[:, cfg.nope_dim :]
        case _:
            assert_never(cfg)


def _normal(out: Tensor, std: float, key: str) -> None:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with torch.no_grad():  # each thread has this switch of its own
        out.normal_(0.0, std, generator=generator)
