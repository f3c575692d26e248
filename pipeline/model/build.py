"""Config → module: the one place where variants are chosen and weights are initialized."""

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
    """The model with uninitialized weights; under torch.device("meta") it needs no memory.

    `experts` are those of every routed layer that this process holds: all of them by default."""

    def block(layer: int) -> Block:
        ffn = _ffn(cfg, layer, experts)
        return Block(cfg, _attention(cfg, layer), ffn, recompute=recompute == "selective")

    with _SkipInit():
        return Decoder(
            cfg, block, z_loss=z_loss, loss_chunk=loss_chunk, recompute=recompute is True
        )


class _SkipInit(TorchFunctionMode):
    """Skips torch's own initialization, which takes a third as long as ours."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            # These functions return the tensor that they fill. Here it stays as it is.
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _attention(cfg: Model, layer: int) -> nn.Module:
    windowed = cfg.windowed(layer)
    placed = cfg.placed(layer)
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
    """Set gains to 1, biases and sinks to 0, and draw everything else from N(0, std).

    Every matrix and every expert has its own generator, seeded by its name. So the weights do not
    depend on layout or order, and threads can draw them in parallel."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        drawn = []
        for name, parameter in model.named_parameters():
            std = _std(name, cfg)
            key = f"{seed}/{name}"
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith(".gain") else 0.0)
            # By global expert number, so that ranks which share experts draw the same ones.
            elif hasattr(parameter, "expert"):
                stacked = enumerate(parameter, start=parameter.expert[0])
                drawn += [
                    pool.submit(_normal, one, std, f"{key}.{index}") for index, one in stacked
                ]
            else:
                drawn.append(pool.submit(_normal, parameter, std, key))
        for each in drawn:
            each.result()  # raises what its thread raised
    if cfg.placement == "deepnorm":
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.qkv.weight", "attention.kv_up.weight")):
                # DeepNorm shrinks values, as it does outputs and FFN, but not queries and keys
                _value_rows(parameter, cfg.attention).mul_(deepnorm_beta(cfg.layers))


def _std(name: str, cfg: Model) -> float:
    """Outputs into the residual stream are divided by √(2·layers) (Megatron-LM), or scaled by
    DeepNorm's factor. Under muP std ∝ 1/√fan-in; of a router, which has few outputs, ∝ 1/fan-in."""
    leaf = name.removesuffix(".weight")
    if leaf == "embedding":
        return cfg.init_std * cfg.embedding_scale
    scale = cfg.narrower(name)
    std = cfg.init_std * (scale if leaf.endswith("router") else math.sqrt(scale))
    if cfg.placement == "deepnorm":
        # arXiv 2203.00555, figure 2.
        shrunk = leaf.endswith((".out", "ffn.up", "experts.up", "shared.up"))
        return std * deepnorm_beta(cfg.layers) if shrunk else std
    return std / math.sqrt(2 * cfg.layers) if leaf.endswith(".out") else std


def _value_rows(fused: Tensor, cfg: GQA | MLA) -> Tensor:
    match cfg:
        case GQA():
            # The fused projection has queries, keys and values in this order.
            return fused[-cfg.kv_heads * cfg.head_dim :]
        case MLA():
            return fused.view(cfg.heads, cfg.nope_dim + cfg.v_dim, -1)[:, cfg.nope_dim :]
        case _:
            assert_never(cfg)


def _normal(out: Tensor, std: float, key: str) -> None:
    # Python's own hash differs between processes. The seed must be positive: 63 bits.
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with torch.no_grad():  # the switch is per thread
        out.normal_(0.0, std, generator=generator)
