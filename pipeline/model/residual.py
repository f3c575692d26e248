"""Where norms stand around a layer, as data: pre, post, sandwich and DeepNorm are one module and a small table."""

from typing import NamedTuple

from torch import Tensor, nn

from pipeline.config.model import Model
from pipeline.model.norm import norm, read, reading


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
