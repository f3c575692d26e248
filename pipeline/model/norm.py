"""Norms, and where they stand around a layer. The reduction runs in fp32 whatever the input."""

from typing import NamedTuple, assert_never

import torch.nn.functional as F
from torch import Tensor, nn, ones, zeros

from pipeline.config.parts import Norm
from pipeline.config.shape import Model


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


class StreamNorm(nn.Module):
    """RMSNorm of the residual stream, to which it adds what is given beside it: in one pass where there is a GPU."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(ones(width)), eps

    def forward(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            from pipeline.model.kernels import (
                add_norm,  # Triton comes with torch where there is a GPU
            )

            return add_norm(x, given, self.gain, self.eps)
        x = x if given is None else x + given
        return x, F.rms_norm(x, self.gain.shape, self.gain, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(ones(width)), eps
        self.bias = nn.Parameter(zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.gain.shape, self.gain, self.bias, self.eps)


def norm(width: int, cfg: Norm) -> nn.Module:
    match cfg.kind:
        case "rmsnorm":
            return RMSNorm(width, cfg.eps)
        case "layernorm":
            return LayerNorm(width, cfg.eps, cfg.bias)
        case _:
            assert_never(cfg.kind)


def reading(width: int, cfg: Norm) -> nn.Module:
    """A norm that the residual stream is read through, by `read`."""
    return StreamNorm(width, cfg.eps) if cfg.kind == "rmsnorm" else norm(width, cfg)


def read(through: nn.Module, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stream with what was given added to it, and its norm."""
    if isinstance(through, StreamNorm):
        total, normed = through(x, given)
        return total, normed
    x = x if given is None else x + given
    return x, through(x)


class Placement(NamedTuple):
    before: bool = False  # the layer's input is normed
    inside: bool = False  # its output is
    after: bool = False  # the stream is, once the output is added


PLACEMENTS = {
    "pre": Placement(before=True),
    "post": Placement(after=True),
    "sandwich": Placement(before=True, inside=True),
    "deepnorm": Placement(after=True),
}


class Residual(nn.Module):
    """One layer's way out of the residual stream and back into it. What a layer gives travels beside the stream, and is
    added by the next that reads it, in one pass with the norm."""

    def __init__(self, cfg: Model) -> None:
        super().__init__()
        place = PLACEMENTS[cfg.placement]
        self.before = reading(cfg.width, cfg.norm) if place.before else nn.Identity()
        self.inside, self.after = (
            norm(cfg.width, cfg.norm) if on else nn.Identity() for on in place[1:]
        )
        self.add = cfg.multipliers.residual
        self.keep = deepnorm_alpha(cfg.layers) if cfg.placement == "deepnorm" else 1.0

    def leave(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream, and what the layer reads of it."""
        return read(self.before, x, given)

    def join(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream, and what is still to be added to it."""
        y = self.inside(y)
        y = y if self.add == 1 else self.add * y
        if isinstance(self.after, nn.Identity):
            return x, y
        return self.after((x if self.keep == 1 else self.keep * x) + y), None


def deepnorm_alpha(layers: int) -> float:
    """Of a decoder (arXiv 2203.00555, table 1)."""
    return float((2 * layers) ** 0.25)


def deepnorm_beta(layers: int) -> float:
    return float((8 * layers) ** -0.25)
