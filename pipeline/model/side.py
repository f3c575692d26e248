"""What every stack of blocks has: inputs, positions and masks. An encoder–decoder has two stacks.

B batch · S sequence · W width · H heads · Q queries · K keys
R width of the embedding: W, unless model.embedding_rank is set · N segments
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipeline.config.parts import FFN, ALiBi, Learned, RelativeBias, RoPE, Sinusoidal
from pipeline.config.shape import Model
from pipeline.model.attention import Sequence
from pipeline.model.block import Stream, recomputed
from pipeline.model.context import Cache, Context, Mask, make_mask
from pipeline.model.head import Head, Losses, Transform
from pipeline.model.moe import Routing
from pipeline.model.norm import PLACEMENTS, add_and_norm, make_norm, make_stream_norm
from pipeline.model.position import (
    DistanceBias,
    Rotary,
    alibi,
    distances,
    places_in,
    rotary,
    sinusoidal,
    spread,
)
from pipeline.model.stream import settle


class Seen(NamedTuple):
    """Limits and extensions of the tokens that a token attends to, besides the causal order."""

    documents_BS: Tensor | None = None  # attend only within the token's own document
    prefix_B: Tensor | None = None  # attend also to every token of the prefix


class Inputs(NamedTuple):
    """The input tensors of a model: those of a batch without its targets."""

    tokens_BS: Tensor
    documents_BS: Tensor | None = None
    source_BE: Tensor | None = None
    source_documents_BE: Tensor | None = None
    segments_BS: Tensor | None = None
    prefix_B: Tensor | None = None


class Helper(Protocol):
    """A second whole model that the main model calls: ELECTRA's generator or a teacher."""

    head: Head
    transform: Transform | None
    most_targets: int | None
    loss_chunk: int

    def hidden(self, inputs: Inputs) -> Tensor: ...

    def predict(self, h_BSW: Tensor, targets_BS: Tensor | None) -> Tensor | Losses: ...


class Side(nn.Module):
    """A stack without its head. Subclasses add the parts in the order of their use."""

    blocks: nn.ModuleList

    def __init__(self, cfg: Model, *, causal: bool, recompute: bool) -> None:
        super().__init__()
        self.cfg = cfg
        self.causal = causal
        self.recompute = recompute
        self.sequence = Sequence()

    def add_inputs(self) -> None:
        """Add the parts between the embedding and the first block."""
        cfg = self.cfg
        self.position = _position(cfg, causal=self.causal)
        self.segments = nn.Embedding(cfg.segments, cfg.input_width) if cfg.segments else None
        summed = cfg.embedding_norm == "sum"
        self.embedding_norm = make_norm(cfg.input_width, cfg.norm) if summed else None
        bias = isinstance(cfg.ffn, FFN) and cfg.ffn.bias
        rank = cfg.embedding_rank
        self.embedding_projection = None if rank is None else nn.Linear(rank, cfg.width, bias=bias)

    def add_norm(self) -> None:
        """Add the norm after the last block. Blocks that normalize the stream itself need none."""
        before = PLACEMENTS[self.cfg.placement].before
        self.norm = make_stream_norm(self.cfg.width, self.cfg.norm) if before else nn.Identity()

    def embed(self, x_BSR: Tensor, places: Tensor, segments_BS: Tensor | None = None) -> Tensor:
        """Return the input of the first block from the tokens' embeddings."""
        position = self.cfg.position
        if isinstance(position, Learned) and self.position is not None:
            x_BSR = x_BSR + self.position(places + position.offset)
        elif isinstance(position, Sinusoidal):
            table = sinusoidal(places, self.cfg.input_width, halves=position.halves)
            x_BSR = x_BSR + table.type_as(x_BSR)
        if self.segments is not None:
            x_BSR = x_BSR + self._segments_of(segments_BS, self.segments, x_BSR.device)
        if self.embedding_norm is not None:
            x_BSR = self.embedding_norm(x_BSR)
        return x_BSR if self.embedding_projection is None else self.embedding_projection(x_BSR)

    def _segments_of(
        self, segments_BS: Tensor | None, table: nn.Module, device: torch.device
    ) -> Tensor:
        """Return the embedding of each token's segment; without segments, that of the first."""
        # In the backward pass of a lookup, a GPU adds the gradients of a segment's tokens one by
        # one. Here each segment is looked up once, and a matrix product adds the gradients.
        all_N = torch.arange(self.cfg.segments, device=device)
        rows_NR: Tensor = table(all_N)
        if segments_BS is None:
            return rows_NR[0]
        chosen_BSN = self.sequence.cut(segments_BS, 1).unsqueeze(-1) == all_N
        return chosen_BSN.type_as(rows_NR) @ rows_NR

    def step(
        self,
        layer: int,
        x_BSW: Tensor,
        pending: Tensor | None,
        context: Context,
        cache: Cache | None = None,
    ) -> Stream:
        """Run one layer; with full recomputation, it runs again in the backward pass."""
        on = self.recompute and self.training
        if on:
            x_BSW = settle(x_BSW, pending)  # so that one tensor is kept instead of two
            pending = None
        layer_cache = None if cache is None else cache.layers[layer]
        block = self.blocks[layer % len(self.blocks)]  # with shared layers there is one block
        out: Stream = recomputed(block, x_BSW, pending, context, layer_cache, on=on)
        return out

    def context(
        self, tokens_BS: Tensor, seen: Seen, cache: Cache | None = None
    ) -> tuple[Tensor, Context]:
        """Return the tokens' positions, (S) or (B, S), and the inputs that all layers share."""
        a = self.cfg.attention
        documents_BS, prefix_B = seen
        device = tokens_BS.device
        queries = tokens_BS.shape[1]
        # With a fixed cache, the position is a tensor, and every key may be seen.
        fixed = None if cache is None else cache.place
        past = 0 if cache is None else cache.length
        keys = past + queries if cache is None or fixed is None else cache.capacity
        padding_B = None if cache is None else cache.padding_B
        places = torch.arange(past, past + queries, device=device) if fixed is None else fixed
        if padding_B is not None:
            # The first token after the padding has position 0, as in training.
            places = (places - padding_B[:, None]).clamp(min=0)
        if documents_BS is not None:
            places = places_in(documents_BS)
        # Cut last, so that positions count from the start of the whole row.
        places = self.sequence.cut(places, -1)

        def mask(window: int | None) -> Mask:
            # Unlike a dense mask, FlexAttention skips blocks that are completely hidden.
            hides = documents_BS is not None or (window is not None and window < queries)
            special = hides or prefix_B is not None or a.softcap is not None or a.sinks
            return make_mask(
                queries,
                keys,
                device,
                past=fixed,
                causal=self.causal,
                window=window,
                documents_BK=documents_BS,
                padding_B=padding_B,
                prefix_B=prefix_B,
                flex=device.type == "cuda" and cache is None and special,
            )

        if cache is None or fixed is not None:
            tables = self._tables(places)
        else:
            if not cache.tables:
                cache.tables = self._tables(torch.arange(cache.capacity, device=device))
            tables = [(cos[places], sin[places]) for cos, sin in cache.tables]
        bias_HQK = self._bias(queries, keys, device, fixed)
        far = mask(None)
        near = far if a.window is None else mask(a.window)
        far_table = tables[0] if tables else None
        near_table = tables[-1] if tables else None
        return places, Context(far_table, bias_HQK, near, far, near_table)

    def _tables(self, places: Tensor) -> list[Rotary]:
        """Return the rotary table and, if windowed layers have their own, that one as well."""
        position = self.cfg.position
        if not isinstance(position, RoPE):
            return []
        kinds = (False, True) if position.window_theta is not None else (False,)
        dim = self.cfg.attention.rotary_dim
        tables = [rotary(places, dim, position, windowed=windowed) for windowed in kinds]
        return [spread(table) for table in tables] if places.device.type == "cpu" else tables

    def _bias(
        self, queries: int, keys: int, device: torch.device, past: Tensor | None
    ) -> Tensor | None:
        """Return the term that positions add to the scores."""
        position = self.cfg.position
        if not isinstance(position, ALiBi | RelativeBias):
            return None
        distance_QK = distances(queries, keys, device, past)
        if isinstance(position, ALiBi):
            # The penalty is symmetric: the mask may allow later keys.
            return alibi(distance_QK.abs(), self.cfg.attention.heads)
        assert self.position is not None
        bias_HQK: Tensor = self.position(distance_QK)
        return bias_HQK


class Encoder(Side):
    """The encoder of an encoder–decoder."""

    def __init__(self, cfg: Model, blocks: nn.ModuleList, *, recompute: bool) -> None:
        super().__init__(cfg, causal=False, recompute=recompute)
        own = cfg.own_encoder_embedding
        self.embedding = nn.Embedding(cfg.vocab, cfg.input_width) if own else None
        self.add_inputs()
        self.blocks = blocks
        self.add_norm()

    def forward(
        self, tokens_BE: Tensor, embedded_BER: Tensor, documents_BE: Tensor | None
    ) -> tuple[Tensor, list[Routing | None]]:
        """Return the normalized stream of the last layer, and the routing of every layer."""
        places, context = self.context(tokens_BE, Seen(documents_BE))
        x_BEW = self.embed(embedded_BER, places)
        pending: Tensor | None = None
        routings: list[Routing | None] = []
        for layer in range(self.cfg.source_layers):
            x_BEW, pending, routing = self.step(layer, x_BEW, pending, context)
            routings.append(routing)
        _, h_BEW = add_and_norm(self.norm, x_BEW, pending)
        return h_BEW, routings


def _position(cfg: Model, *, causal: bool) -> nn.Module | None:
    """Build the learned part of the position, if there is one."""
    match cfg.position:
        case Learned(offset=offset):
            return nn.Embedding(cfg.learned_positions + offset, cfg.input_width)
        case RelativeBias():
            return DistanceBias(cfg.attention.heads, cfg.position, causal=causal)
        case _:
            return None
