"""What decoding keeps of the tokens it has seen."""

import torch
from torch import Tensor


class LayerCache:
    """Tensors along the sequence, (B, S, …), of one layer: keys and values, or MLA's latent."""

    def __init__(self, most: int) -> None:
        self._most, self.length, self.kept = most, 0, list[Tensor]()

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add what the new tokens bring; everything so far."""
        if not self.kept:  # room for all at once: a step copies what is new and nothing else
            self.kept = [t.new_empty(t.shape[0], self._most, *t.shape[2:]) for t in new]
        end = self.length + new[0].shape[1]
        for room, t in zip(self.kept, new, strict=True):
            room[:, self.length : end] = t
        self.length = end
        return tuple(room[:, :end] for room in self.kept)


class Cache:
    def __init__(self, layers: int, most: int, padding_B: Tensor | None = None) -> None:
        self.layers, self.padding_B = [LayerCache(most) for _ in range(layers)], padding_B

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def bytes_per_token(self) -> int:
        """Of one sequence, all layers."""
        kept = [room for layer in self.layers for room in layer.kept]
        return sum(room[0, 0].numel() * room.element_size() for room in kept)

    def reorder(self, rows: Tensor) -> None:
        """Sequence i goes on from sequence rows[i]: beam search."""
        for layer in self.layers:
            layer.kept = [torch.index_select(room, 0, rows) for room in layer.kept]
