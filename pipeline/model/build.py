"""Config → module: the one place where variants are chosen and weights are initialized."""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.config.parts import FFN, GQA, MLA, MoE, Recompute
from pipeline.config.shape import GATES, TABLES, Model
from pipeline.model.attention import CrossAttention, GroupedAttention, LatentAttention
from pipeline.model.block import Block
from pipeline.model.ffn import FeedForward
from pipeline.model.moe import MixtureOfExperts
from pipeline.model.norm import deepnorm_beta
from pipeline.model.side import Encoder
from pipeline.model.stack import Decoder
from pipeline.model.stream import Scales, initial_scale

_QUERIES = ("attention.qkv.weight", "attention.q_up.weight", "cross.q.weight")


def build_model(
    cfg: Model,
    *,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    loss_chunk: int = 2048,
    recompute: Recompute = False,
    experts: range | None = None,
    token_weight: float | None = None,
    most_targets: int | None = None,
) -> Decoder:
    """Build the model with uninitialized weights; under torch.device("meta") it needs no memory.

    `experts` are the experts of each routed layer that this process holds, by default all. With
    `most_targets`, the head reads only so many tokens of a row: no row may have more targets."""

    def block(layer: int, ahead: bool, source: bool = False) -> Block:
        # A block for multi-token prediction (`ahead`) is like the last one, but reads neither value
        # embeddings nor the first block's input. `source`: a block of an encoder–decoder's encoder.
        attention = _attention(cfg, layer, valued=cfg.value_layer(layer) and not ahead)
        scales = Scales() if cfg.residual_scales and not ahead else None
        crosses = cfg.stack == "encoder-decoder" and not source
        return Block(
            cfg,
            attention,
            _ffn(cfg, layer, experts),
            scales,
            CrossAttention(cfg, cast(GQA, cfg.attention)) if crosses else None,
            first=layer == 0 and not ahead,
            recompute=recompute == "selective",
        )

    with _SkipInit():
        encoder = None
        if cfg.stack == "encoder-decoder":
            layers = 1 if cfg.shares("encoder") else cfg.source_layers
            blocks = nn.ModuleList(block(layer, False, source=True) for layer in range(layers))
            encoder = Encoder(cfg, blocks, recompute=recompute is True)
        generator = None
        if cfg.generator_model is not None:
            generator = build_model(
                cfg.generator_model,
                loss_chunk=loss_chunk,
                recompute=recompute,
                most_targets=most_targets,
            )
        return Decoder(
            cfg,
            block,
            encoder,
            generator,
            z_loss=z_loss,
            smoothing=smoothing,
            loss_chunk=loss_chunk,
            recompute=recompute is True,
            token_weight=token_weight,
            most_targets=None if generator else most_targets,
        )


class _SkipInit(TorchFunctionMode):
    """Skips torch's own initialization, which would take a third as long as ours."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            # These functions fill a tensor and return it. Here it is returned unchanged.
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _attention(cfg: Model, layer: int, *, valued: bool) -> nn.Module:
    windowed = cfg.windowed(layer)
    placed = cfg.placed(layer)
    match cfg.attention:
        case GQA():
            a = cfg.attention
            return GroupedAttention(cfg, a, windowed=windowed, placed=placed, valued=valued)
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
    """Set gains to 1, biases, sinks and gates to 0, and draw the other matrices from N(0, std²).

    Every matrix and every expert has its own generator, seeded by its name. So the weights do not
    depend on layout or order, and threads can draw them in parallel."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        drawn = []
        for name, parameter in model.named_parameters():
            std = _std(name, parameter, cfg)
            key = f"{seed}/{name}"
            if parameter.ndim < 2:
                scale = initial_scale(name, cfg)
                vector = 1.0 if name.endswith(".gain") else 0.0
                parameter.fill_(vector if scale is None else scale)
            elif std == 0:
                parameter.zero_()
            elif hasattr(parameter, "expert"):
                # Global expert numbers make the weights independent of the ranks' experts.
                for number, expert in enumerate(parameter, start=parameter.expert[0]):
                    drawn.append(pool.submit(draw_normal, expert, std, f"{key}.{number}"))
            else:
                drawn.append(pool.submit(draw_normal, parameter, std, key))
        for each in drawn:
            each.result()  # raises the thread's error, if there is one
    if not cfg.attention.scaled:
        # Scores start as if they were divided by √head_dim.
        a = cfg.attention
        for name, parameter in model.named_parameters():
            if name.endswith(_QUERIES):  # queries are the first rows of a fused projection
                parameter[: a.heads * a.score_dim].mul_(a.score_dim**-0.5)
    if cfg.placement == "deepnorm":
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.qkv.weight", "attention.kv_up.weight")):
                # DeepNorm scales values like outputs and FFN, but not queries and keys.
                _value_rows(parameter, cfg.attention).mul_(deepnorm_beta(cfg.layers))


def _std(name: str, parameter: Tensor, cfg: Model) -> float:
    """Return the std of a matrix. A matrix that writes to the residual stream has a std divided by
    √(2·layers) (Megatron-LM), multiplied by DeepNorm's factor, or zero. Under muP the std is
    proportional to 1/√fan-in, and to 1/fan-in for a router, which has few outputs."""
    leaf = name.removesuffix(".weight")
    if name.endswith(GATES) or (leaf.endswith(".out") and cfg.init_out == "zero"):
        return 0.0
    std = cfg.init_std
    if cfg.init == "fan_in":
        # Experts are (in, out), linear layers (out, in). A table's fan-in counts as the width.
        inputs = parameter.shape[-2 if hasattr(parameter, "expert") else -1]
        std /= math.sqrt(cfg.width if name.startswith(TABLES) else inputs)
    if leaf in ("embedding", "encoder.embedding"):
        # A tied embedding has the std of the head, unless the logits are scaled down.
        tied = cfg.tied and cfg.multipliers.logits != "root_width"
        own = None if tied else cfg.embedding_std
        return own or std * cfg.embedding_scale
    if leaf == "head" and cfg.head_std:
        return cfg.head_std
    scale = cfg.narrower(name)
    std *= scale if leaf.endswith("router") else math.sqrt(scale)
    if leaf.endswith(("ffn.up", "experts.up", "shared.up")):
        std *= cfg.ffn.init_scale
    if cfg.placement == "deepnorm":
        # arXiv 2203.00555, figure 2.
        shrunk = leaf.endswith((".out", "ffn.up", "experts.up", "shared.up"))
        return std * deepnorm_beta(cfg.layers) if shrunk else std
    scaled = leaf.endswith(".out") and cfg.init_out == "scaled"
    return std / math.sqrt(2 * cfg.layers) if scaled else std


def _value_rows(fused: Tensor, cfg: GQA | MLA) -> Tensor:
    """Return the rows of a fused projection that make values."""
    match cfg:
        case GQA():
            # The fused projection has queries, keys and values in this order.
            return fused[-cfg.kv_heads * cfg.head_dim :]
        case MLA():
            return fused.view(cfg.heads, cfg.nope_dim + cfg.v_dim, -1)[:, cfg.nope_dim :]
        case _:
            assert_never(cfg)


def draw_normal(out: Tensor, std: float, key: str) -> None:
    """Fill a tensor with normal numbers that depend only on the key."""
    # Python's own hash differs between processes. The seed must be positive: 63 bits.
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with torch.no_grad():  # applies to one thread, and `init_weights` draws in several
        out.normal_(0.0, std, generator=generator)
