"""The inputs of a layer besides the stream: masks, the shared context, the cache of past tokens.

B batch · S sequence · W width · H query heads · G key/value heads · D head width
Q queries · K keys
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from pipeline.model.position import Rotary

# True where a query attends to a key, (B or 1, 1, Q, K); None is plain causal, "all" has no mask.
Mask = Tensor | BlockMask | Literal["all"] | None


def make_mask(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    past: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    documents_BK: Tensor | None = None,
    padding_B: Tensor | None = None,
    prefix_B: Tensor | None = None,
    flex: bool = False,
) -> Mask:
    """Return the mask of which query attends to which key. The last query is at the position of the
    last key, unless `past` gives the number of keys before the first query.

    A query always attends to itself, and to every key of the prefix, even to later ones."""
    # A window as long as the sequence hides nothing, and plain causal attention is faster.
    if window is not None and window >= keys:
        window = None
    per_row = [row for row in (documents_BK, padding_B, prefix_B) if row is not None]
    # SDPA has its own causal mask, and a single query at the end attends to every key.
    if not flex and window is None and not per_row and past is None and queries in (keys, 1):
        return None if causal else "all"
    before = keys - queries if past is None else past  # keys before the first query

    # FlexAttention traces this function; it must not branch on the values of tensors.
    def sees(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = k <= q + before if causal else k >= 0
        if prefix_B is not None:
            seen = seen | (k < prefix_B[b])
        if window is not None:
            seen = seen & (q + before - k < window)
            if not causal:
                seen = seen & (k - q - before < window)
        if documents_BK is not None:
            seen = seen & (documents_BK[b, q + before] == documents_BK[b, k])
        if padding_B is not None:
            # Padding attends to itself, because a softmax over no keys would be NaN.
            seen = seen & ((k >= padding_B[b]) | (k == q + before))
        return seen

    rows = len(per_row[0]) if per_row else 1
    if flex:
        batch = rows if rows > 1 else None
        return create_block_mask(sees, batch, None, queries, keys, device=str(device))
    # The same function over all indices at once gives the dense mask.
    b, q, k = (torch.arange(count, device=device) for count in (rows, queries, keys))
    head = torch.zeros((), dtype=torch.long, device=device)
    return sees(b[:, None, None, None], head, q[:, None], k).expand(rows, 1, queries, keys)


def make_cross_mask(
    queries: int, documents_BQ: Tensor | None, documents_BK: Tensor | None, *, flex: bool = False
) -> Mask:
    """Return which decoder token attends to which encoder token: those of the same document.

    Without documents, the decoder's whole row belongs to the source's first document."""
    if documents_BK is None:
        return "all"
    if documents_BQ is None:
        documents_BQ = documents_BK[:, :1].expand(-1, queries)
    if flex:

        def sees(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return documents_BQ[b, q] == documents_BK[b, k]

        rows, keys = documents_BK.shape
        device = str(documents_BK.device)
        return create_block_mask(sees, rows, None, queries, keys, device=device)
    mask = documents_BQ[:, None, :, None] == documents_BK[:, None, None, :]
    # Padding of the decoder attends to everything, because a softmax over no keys would be NaN.
    return mask | ~mask.any(-1, keepdim=True)


class Context(NamedTuple):
    """Inputs that all layers share in one forward pass, and the value embeddings of one layer."""

    rotary: Rotary | None = None
    bias_HQK: Tensor | None = None
    near: Mask = None  # for windowed layers
    far: Mask = None  # for all other layers
    near_rotary: Rotary | None = None  # for windowed layers
    first_BSW: Tensor | None = None  # input of the first layer, if later layers add it again
    values_BSGD: Tensor | None = None  # value embeddings of the layer
    source_BEW: Tensor | None = None  # output of the encoder
    cross: Mask = "all"  # for cross-attention

    def at(self, windowed: bool, placed: bool) -> tuple[Mask, Tensor | None, Rotary | None]:
        """Return the mask, the bias and the rotary table of a layer."""
        mask = self.near if windowed else self.far
        table = self.near_rotary if windowed else self.rotary
        return (mask, self.bias_HQK, table) if placed else (mask, None, None)


class LayerCache:
    """Tensors of past tokens that one layer keeps, (B, S, …): keys and values, or MLA's latent."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.place: Tensor | None = None  # position of the next token, if `Cache.fix` was called
        self.kept: list[Tensor] = []
        self.source: tuple[Tensor, ...] = ()  # keys and values of cross-attention

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add the new tokens' tensors and return those of all tokens so far."""
        if not self.kept:
            # Memory for all tokens. Zeros, because a NaN would spoil a sum even with the weight 0.
            self.kept = [t.new_zeros(t.shape[0], self.capacity, *t.shape[2:]) for t in new]
        if self.place is not None:
            for kept, tensor in zip(self.kept, new, strict=True):
                kept.index_copy_(1, self.place, tensor)
            return tuple(self.kept)
        end = self.length + new[0].shape[1]
        for kept, tensor in zip(self.kept, new, strict=True):
            kept[:, self.length : end] = tensor
        self.length = end
        return tuple(kept[:, :end] for kept in self.kept)


class Cache:
    """The state of decoding: the cache of every layer, and what layers share."""

    def __init__(self, layers: int, capacity: int, padding_B: Tensor | None = None) -> None:
        self.capacity = capacity
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self.padding_B = padding_B  # tokens to ignore on the left of each row
        self.source_documents_BE: Tensor | None = None  # for the mask of cross-attention
        self.tables: list[Rotary] = []  # rotary tables of all positions, computed once
        self.last_B1: Tensor | None = None  # the last token, which `smear` mixes into the next

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def place(self) -> Tensor | None:
        return self.layers[0].place

    def fix(self, place: Tensor) -> None:
        """Read the next token's position from a tensor, so that a CUDA graph can repeat a pass.

        From now on, each pass is for one token per row and attends to the whole capacity, where a
        mask hides the tokens that are not yet written. The caller increments the position."""
        for layer in self.layers:
            layer.place = place
        if self.last_B1 is not None:
            self.last_B1 = self.last_B1.clone()

    def remember(self, last_B1: Tensor) -> None:
        """Keep the last token for the next pass."""
        if self.place is not None and self.last_B1 is not None:
            self.last_B1.copy_(last_B1)  # a CUDA graph always reads the same memory
        else:
            self.last_B1 = last_B1

    def reorder(self, rows: Tensor) -> None:
        """Let sequence i continue from sequence rows[i], for beam search."""
        for layer in self.layers:
            layer.kept = [torch.index_select(tensor, 0, rows) for tensor in layer.kept]
            layer.source = tuple(torch.index_select(each, 0, rows) for each in layer.source)
        if self.source_documents_BE is not None:
            self.source_documents_BE = torch.index_select(self.source_documents_BE, 0, rows)
        if self.last_B1 is not None:
            self.last_B1 = torch.index_select(self.last_B1, 0, rows)
