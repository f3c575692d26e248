"""Size × architecture → model: the one place where ratios become widths."""

from typing import Any, assert_never

from pipeline.config.model import Arch, Design, Size
from pipeline.config.parts import (
    ArchFFN,
    ArchGQA,
    ArchMLA,
    ArchMoE,
    FFNKind,
    GQAKind,
    MoEKind,
    Scores,
)
from pipeline.errors import ConfigError


def cross(size: Size, arch: Arch) -> dict[str, Any]:
    """The model table of a run config, still without vocabulary and sequence length."""
    return {
        **arch.model_dump(include=set(Design.model_fields)),
        "width": size.width,
        "layers": size.layers,
        "attention": _attention(size, arch.attention),
        "ffn": _ffn(size, arch.ffn),
    }


def _attention(size: Size, arch: ArchGQA | ArchMLA) -> dict[str, Any]:
    if size.head_dim is None and size.width % size.heads:
        raise ConfigError(
            f"width={size.width} is not a multiple of heads={size.heads}; give head_dim in the size's row"
        )
    head_dim = size.head_dim or size.width // size.heads
    match arch:
        case ArchGQA():
            kv_heads = (
                (size.kv_heads or size.heads)
                if arch.group is None
                else max(1, size.heads // arch.group)
            )
            widths = {"kv_heads": kv_heads, "head_dim": head_dim}
            return {
                **arch.model_dump(include=set(GQAKind.model_fields)),
                "heads": size.heads,
                **widths,
            }
        case ArchMLA():
            most = size.width // 2
            return {
                **arch.model_dump(include={"kind", *Scores.model_fields}),
                "heads": size.heads,
                "q_rank": None
                if arch.q_ratio is None
                else min(round(arch.q_ratio * head_dim), most),
                "kv_rank": min(round(arch.kv_ratio * head_dim), most),
                "nope_dim": head_dim,
                "rope_dim": max(2, round(arch.rope_ratio * head_dim / 2) * 2),
                "v_dim": head_dim,
            }
        case _:
            assert_never(arch)


def _ffn(size: Size, arch: ArchFFN | ArchMoE) -> dict[str, Any]:
    hidden = size.ffn if arch.ratio is None else round(arch.ratio * size.width)
    match arch:
        case ArchFFN():
            return {**arch.model_dump(include=set(FFNKind.model_fields)), "hidden": hidden}
        case ArchMoE():
            # multiples of 16: what a GPU's grouped matmul takes
            share = (
                hidden
                if arch.expert_share == 1
                else max(16, round(arch.expert_share * hidden / 16) * 16)
            )
            widths = {"hidden": size.expert_ffn or share, "dense_hidden": hidden}
            dense = min(
                arch.dense_layers, size.layers - 1
            )  # a shallow size still routes its last layer
            return {
                **arch.model_dump(include=set(MoEKind.model_fields)),
                **widths,
                "dense_layers": dense,
            }
        case _:
            assert_never(arch)
