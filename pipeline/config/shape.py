"""Size × architecture → model: the one place where ratios become widths."""

from typing import Any

from pipeline.config.schema import Arch, ArchFFN, ArchGQA, Size
from pipeline.errors import ConfigError


def cross(size: Size, arch: Arch) -> dict[str, Any]:
    """The model table of a run config, still without vocabulary and sequence length."""
    return {
        **arch.model_dump(include={"norm", "position", "tied", "init_std"}),
        "width": size.width,
        "layers": size.layers,
        "attention": _attention(size, arch.attention),
        "ffn": {"activation": arch.ffn.activation, "hidden": _hidden(size, arch.ffn)},
    }


def _attention(size: Size, arch: ArchGQA) -> dict[str, Any]:
    if size.head_dim is None and size.width % size.heads:
        raise ConfigError(
            f"width={size.width} is not a multiple of heads={size.heads}; give head_dim in the size's row"
        )
    kv_heads = size.kv_heads or size.heads
    if arch.group is not None:
        kv_heads = max(1, size.heads // arch.group)
    return {
        "kind": "gqa",
        "heads": size.heads,
        "kv_heads": kv_heads,
        "head_dim": size.head_dim or size.width // size.heads,
        "qk_norm": arch.qk_norm,
    }


def _hidden(size: Size, arch: ArchFFN) -> int:
    return size.ffn if arch.ratio is None else round(arch.ratio * size.width)
