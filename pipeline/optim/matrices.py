"""The matrices that Muon steps, and the parts of each that it orthogonalizes.

A fused projection, such as that of queries, keys and values, has several parts.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config.parts import GQA
from pipeline.config.shape import BLOCKS, GATES, Model
from pipeline.planner.count import orthogonalization_flops


class Part(NamedTuple):
    """Rows `start` to `stop` of every `period` rows."""

    period: int
    start: int
    stop: int

    def of(self, rows: Tensor) -> Tensor:
        """A view: (rows / period, stop - start, ...)."""
        return torch.unflatten(rows, 0, (-1, self.period))[:, self.start : self.stop]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """How one parameter stores its matrices: a single one, or one for each expert on this rank."""

    shape: tuple[int, int]  # as stored
    parts: tuple[Part, ...]  # they cover all rows
    keys: tuple[str, ...]  # global names; that of an expert ends with its number
    transposed: bool = False  # stored as (inputs, outputs); rows are outputs everywhere else

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return self.shape[1 if self.transposed else 0]

    @property
    def columns(self) -> int:
        return self.shape[0 if self.transposed else 1]

    @property
    def flops(self) -> int:
        """FLOPs of orthogonalizing one matrix, part by part."""
        return sum(orthogonalization_flops(self._rows(part), self.columns) for part in self.parts)

    def oriented(self, elements: Tensor) -> Tensor:
        """A view of one matrix's elements as (outputs, inputs)."""
        matrix = elements.view(self.shape)
        return matrix.T if self.transposed else matrix

    def ratios(self) -> list[tuple[int, float]]:
        """Return the lengths of one matrix's segments, as stored, and the factors of their rates.
        A part with more rows than columns has a higher rate, by the root of their ratio."""
        factors = [math.sqrt(max(1, self._rows(part) / self.columns)) for part in self.parts]
        if len(set(factors)) == 1:
            return [(self.numel, factors[0])]
        assert not self.transposed, "parts of a transposed matrix have the same shape"
        sizes = [(part.stop - part.start) * self.columns for part in self.parts]
        return list(zip(sizes, factors, strict=True)) * (self.rows // self.parts[0].period)

    def _rows(self, part: Part) -> int:
        return self.rows // part.period * (part.stop - part.start)


def matrices_of(module: nn.Module, cfg: Model) -> dict[str, MatrixLayout]:
    """Return the blocks' matrices by name, without routers and gates, which have few outputs."""
    found = {}
    for name, parameter in module.named_parameters():
        vector = parameter.ndim < 2 or name.endswith((*GATES, "router.weight"))
        if vector or not name.startswith(BLOCKS):
            continue
        if parameter.ndim == 2:
            rows, columns = parameter.shape
            found[name] = MatrixLayout((rows, columns), _parts(name, rows, cfg), (name,))
        else:
            count, inputs, outputs = parameter.shape
            # A plain model, such as the reference of `launch verify`, has all experts.
            first = getattr(parameter, "expert", (0,))[0]
            keys = tuple(f"{name}.{first + local}" for local in range(count))
            found[name] = MatrixLayout((inputs, outputs), _parts(name, outputs, cfg), keys, True)
    return found


def _parts(name: str, rows: int, cfg: Model) -> tuple[Part, ...]:
    """Return the parts of a projection, which model/attention.py, ffn.py or moe.py fuses."""
    a = cfg.attention
    sizes = [rows]
    if name.endswith("attention.qkv.weight") and isinstance(a, GQA):
        sizes = [heads * a.head_dim for heads in (a.heads, a.kv_heads, a.kv_heads)]
    elif name.endswith("cross.kv.weight"):
        sizes = [rows // 2] * 2
    elif name.endswith("attention.kv_down.weight") and not isinstance(a, GQA):
        sizes = [a.kv_rank, a.rope_dim]
    elif name.endswith("attention.kv_up.weight") and not isinstance(a, GQA):
        sizes = [a.nope_dim, a.v_dim]  # of each head in turn
    elif name.endswith((".up.weight", ".experts.up")) and cfg.ffn.gated:
        sizes = [rows // 2, rows // 2]
    period = sum(sizes)
    assert rows % period == 0, f"{name} has {rows} rows, not a multiple of {period}"
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(Part(period, stop - size, stop) for size, stop in zip(sizes, stops, strict=True))
