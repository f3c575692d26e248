"""The decoder: embedding, blocks, final norm, head with its loss, and multi-token prediction.

B batch · S sequence · W width · V vocabulary · T = B·S tokens
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from pipeline.config.parts import GQA, ALiBi, Learned, RelativeBias, RoPE, Sinusoidal
from pipeline.config.shape import Model
from pipeline.model.attention import Sequence
from pipeline.model.context import Cache, Context, LayerCache, Mask, make_mask
from pipeline.model.moe import MixtureOfExperts, Router, Routing
from pipeline.model.norm import PLACEMENTS, Residual, add_and_norm, make_norm, make_stream_norm
from pipeline.model.position import DistanceBias, alibi, distances, rotary, sinusoidal
from pipeline.model.stream import Backout, Scales, Smear, settle
from pipeline.objective.loss import cap, next_token_loss

T = TypeVar("T")
# The residual stream, what is pending beside it (see norm.py), and the block's routing.
Stream = tuple[Tensor, Tensor | None, Routing | None]
IGNORED = -100  # a target that predicts nothing


class Losses(NamedTuple):
    total: Tensor  # the backward pass starts here
    nll: Tensor  # nats per token: the loss of every curve and fit
    routing: Routing | None = None  # of the routed layers, stacked


def recomputed(part: Callable[..., T], *inputs: object, on: bool) -> T:
    """Call part of the model; if `on`, keep only its inputs and run it again in the backward."""
    if not on:
        return part(*inputs)
    # The reentrant form would need an input that has a gradient.
    out: T = torch.utils.checkpoint.checkpoint(part, *inputs, use_reentrant=False)
    return out


class Block(nn.Module):
    """x = x + attention(norm(x)), then x = x + ffn(norm(x)).

    The last sum stays pending for the next block. `recompute` applies to the feed-forward layer."""

    def __init__(
        self,
        cfg: Model,
        attention: nn.Module,
        ffn: nn.Module,
        scales: Scales | None = None,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.scales = scales
        self.attention = attention
        self.ffn = ffn
        self.recompute = recompute
        self.at_attention = Residual(cfg)
        self.at_ffn = None if cfg.parallel_block else Residual(cfg)  # GPT-J, PaLM

    def forward(
        self,
        x_BSW: Tensor,
        pending: Tensor | None,
        context: Context,
        cache: LayerCache | None = None,
    ) -> Stream:
        # The attention is never recomputed here: its kernels keep little and cost much to repeat.
        on = self.recompute and self.training
        if self.scales is not None and context.first_BSW is not None:
            x_BSW = self.scales(x_BSW, pending, context.first_BSW)
            pending = None
        x_BSW, normed_BSW = self.at_attention.read(x_BSW, pending)
        y_BSW = self.attention(normed_BSW, context, cache)
        if self.at_ffn is None:  # a parallel block: both layers read the same input
            fed_BSW, routing = recomputed(self._feed, normed_BSW, on=on)
            x_BSW, pending = self.at_attention.add(x_BSW, y_BSW + fed_BSW)
            return x_BSW, pending, routing
        x_BSW, pending = self.at_attention.add(x_BSW, y_BSW)
        x_BSW, y_BSW, routing = recomputed(self._read_and_feed, self.at_ffn, x_BSW, pending, on=on)
        x_BSW, pending = self.at_ffn.add(x_BSW, y_BSW)
        return x_BSW, pending, routing

    def _read_and_feed(
        self, at: Residual, x_BSW: Tensor, pending: Tensor | None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        x_BSW, normed_BSW = at.read(x_BSW, pending)
        return x_BSW, *self._feed(normed_BSW)

    def _feed(self, x_BSW: Tensor) -> tuple[Tensor, Routing | None]:
        if isinstance(self.ffn, MixtureOfExperts):
            out: tuple[Tensor, Routing] = self.ffn(x_BSW)
            return out
        return self.ffn(x_BSW), None


class Head(nn.Module):
    """The output matrix. The loss is computed here, where ZeRO-3 has gathered the whole matrix."""

    def __init__(self, weight_VW: nn.Parameter, scale: float, softcap: float | None) -> None:
        super().__init__()
        self.weight = weight_VW
        self.scale = scale
        self.softcap = softcap
        self.sequence = Sequence()

    def forward(
        self, h_BSW: Tensor, targets_BS: Tensor | None, z_loss: float, chunk: int
    ) -> Tensor | Losses:
        # Scaling the hidden state is cheaper than scaling the logits, V/W times as many numbers.
        h_BSW = h_BSW if self.scale == 1 else h_BSW * self.scale
        if targets_BS is None:
            return cap(h_BSW @ self.weight.T, self.softcap)
        # of the whole row: the mean over the ranks that share it is then the mean over its tokens
        count = (targets_BS >= 0).sum().clamp(min=1) / self.sequence.parts
        h_TW = h_BSW.flatten(0, 1)
        targets_T = self.sequence.cut(targets_BS, 1).flatten()
        total, nll = next_token_loss(
            h_TW,
            self.weight,
            targets_T,
            count,
            z_loss=z_loss,
            chunk=chunk,
            softcap=self.softcap,
        )
        return Losses(total, nll)


class Ahead(nn.Module):
    """Predicts one token further, from hidden state and next token (arXiv 2412.19437, §2.2)."""

    def __init__(self, cfg: Model, block: Block) -> None:
        super().__init__()
        self.h_norm = make_norm(cfg.width, cfg.norm)
        self.e_norm = make_norm(cfg.width, cfg.norm)
        self.norm = make_stream_norm(cfg.width, cfg.norm)
        self.join = nn.Linear(2 * cfg.width, cfg.width, bias=False)
        self.block = block

    def forward(self, h_BSW: Tensor, embedded_BSW: Tensor, context: Context) -> Stream:
        joined = torch.cat((self.h_norm(h_BSW), self.e_norm(embedded_BSW)), dim=-1)
        out: Stream = self.block(self.join(joined), None, context)
        return out


class Decoder(nn.Module):
    def __init__(
        self,
        cfg: Model,
        block: Callable[[int, bool], Block],  # of a layer; whether for multi-token prediction
        *,
        z_loss: float = 0.0,
        loss_chunk: int = 2048,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.z_loss = z_loss
        self.loss_chunk = loss_chunk
        self.recompute = recompute
        self.sequence = Sequence()
        self.embedding = nn.Embedding(cfg.vocab, cfg.width)
        self.position = _position(cfg)
        self.smear = Smear(cfg) if cfg.smear else None
        # Looked up here and not in the blocks: the compiler's backward of a lookup adds rows in no
        # fixed order.
        self.value_embeddings = nn.ModuleDict(_value_embeddings(cfg))
        self.blocks = nn.ModuleList(block(layer, False) for layer in range(cfg.layers))
        self.backout = Backout() if cfg.backout else None
        # Only blocks that norm their input leave a stream that still has to be normed.
        before = PLACEMENTS[cfg.placement].before
        self.norm = make_stream_norm(cfg.width, cfg.norm) if before else nn.Identity()
        last = cfg.layers - 1
        self.ahead = nn.ModuleList(Ahead(cfg, block(last, True)) for _ in range(cfg.mtp))
        # Always a separate parameter first; `tie` replaces it, also after others replaced them.
        weight_VW = nn.Parameter(torch.empty_like(self.embedding.weight))
        self.head = Head(weight_VW, cfg.logit_scale, cfg.logit_softcap)
        self.tie()

    def tie(self) -> None:
        """Make the head the embedding, if configured; call it again after replacing parameters."""
        if self.cfg.tied:
            self.head.weight = cast(nn.Parameter, self.embedding.weight)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        cache: Cache | None = None,
        *,
        prefix_B: Tensor | None = None,
    ) -> Tensor | Losses:
        """Logits or, with targets, the losses; the logits then never exist as a whole.

        With documents, a token attends within its own and positions restart in each. With a cache,
        the tokens follow those in it, and only the logits of the last token are returned. A prefix
        is the number of a row's first tokens that every token sees."""
        # Positions, masks and biases are computed once and shared by all layers.
        places, context = self._context(tokens_BS, documents_BS, cache, prefix_B)
        x_BSW = self._smeared(tokens_BS, places, cache)
        if self.cfg.residual_scales:
            context = context._replace(first_BSW=x_BSW)
        middle_BSW: Tensor | None = None
        pending: Tensor | None = None
        routings: list[Routing | None] = []
        on = self.recompute and self.training
        for layer, block in enumerate(self.blocks):
            if on:
                x_BSW = settle(x_BSW, pending)  # one tensor to keep instead of two
                pending = None
            layer_cache = None if cache is None else cache.layers[layer]
            at = context._replace(values_BSGD=self._values(tokens_BS, layer))
            x_BSW, pending, routing = recomputed(block, x_BSW, pending, at, layer_cache, on=on)
            routings.append(routing)
            if self.backout is not None and layer == self.cfg.middle_layer:
                x_BSW = middle_BSW = settle(x_BSW, pending)
                pending = None
        if self.backout is not None and middle_BSW is not None:
            x_BSW = self.backout(x_BSW, pending, middle_BSW)
            pending = None
        # Only the next token is asked for: a prompt's other logits would fill the memory.
        if cache is not None:
            x_BSW = x_BSW[:, -1:]
            pending = None if pending is None else pending[:, -1:]
        x_BSW, h_BSW = add_and_norm(self.norm, x_BSW, pending)
        out: Tensor | Losses = self.head(h_BSW, targets_BS, self.z_loss, self.loss_chunk)
        if targets_BS is None or isinstance(out, Tensor):
            return out
        # Training adds the losses of further tokens and of the routers. `nll` stays the plain loss.
        total = out.total
        if self.training and self.cfg.mtp:
            total = self._predict_ahead(total, x_BSW, targets_BS, places, context, routings)
        routed = [routing for routing in routings if routing is not None]
        if not routed:
            return Losses(total, out.nll)
        stacked = Routing(*(torch.stack(part) for part in zip(*routed, strict=True)))
        return Losses(total + stacked.loss.sum(), out.nll, stacked)

    def _predict_ahead(
        self,
        total: Tensor,
        x_BSW: Tensor,
        targets_BS: Tensor,
        places: Tensor,
        context: Context,
        routings: list[Routing | None],
    ) -> Tensor:
        """The loss with that of further tokens added; their routings are appended."""
        for ahead in self.ahead:
            # The next token is known and the one after it is predicted: targets move by one. The
            # last position of a row or a document has none.
            next_BS = self.sequence.cut(targets_BS.clamp(min=0), 1)
            embedded_BSW = self._add_position(self._embed(next_BS), places)
            x_BSW, pending, routing = recomputed(
                ahead, x_BSW, embedded_BSW, context, on=self.recompute
            )
            last = torch.full_like(targets_BS[:, :1], IGNORED)
            further_BS = torch.cat((targets_BS[:, 1:], last), dim=1)
            targets_BS = torch.where(targets_BS < 0, IGNORED, further_BS)
            x_BSW, h_BSW = add_and_norm(cast(nn.Module, ahead.norm), x_BSW, pending)
            losses = self.head(h_BSW, targets_BS, self.z_loss, self.loss_chunk)
            # The mean over the extra tokens; DeepSeek-V3 weights it by 0.3, and later by 0.1.
            total = total + self.cfg.mtp_weight / self.cfg.mtp * losses.total
            routings.append(routing)
        return total

    def routers(self) -> list[Router]:
        """In the order of `Losses.routing`."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def _smeared(self, tokens_BS: Tensor, places: Tensor, cache: Cache | None) -> Tensor:
        """The input of the first layer. The previous token is looked up with the row's own, before
        the row is cut, because it may belong to another process or be in the cache."""
        if self.smear is None:
            return self._add_position(self._embed(self.sequence.cut(tokens_BS, 1)), places)
        before_B1 = tokens_BS[:, :1]  # any token: a row's first follows none
        if cache is not None:
            before_B1 = before_B1 if cache.last_B1 is None else cache.last_B1
            cache.last_B1 = tokens_BS[:, -1:]
        row_BS = self.sequence.cut_after(torch.cat((before_B1, tokens_BS), dim=1))
        # Positions restart with each document, so 0 is a token that follows none.
        return self._add_position(self.smear(self._embed(row_BS), places > 0), places)

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        x_BSW: Tensor = self.embedding(tokens_BS)
        if self.cfg.embedding_norm:
            x_BSW = F.rms_norm(x_BSW, x_BSW.shape[-1:], eps=self.cfg.norm.eps)
        if self.cfg.multipliers.embedding != 1:
            x_BSW = x_BSW * self.cfg.multipliers.embedding
        return x_BSW

    def _values(self, tokens_BS: Tensor, layer: int) -> Tensor | None:
        if not self.cfg.value_layer(layer):
            return None
        values_BSE: Tensor = self.value_embeddings[str(layer)](self.sequence.cut(tokens_BS, 1))
        return values_BSE.view(*values_BSE.shape[:2], -1, self.cfg.attention.head_dim)

    def _add_position(self, x_BSW: Tensor, places: Tensor) -> Tensor:
        if isinstance(self.cfg.position, Learned):
            x_BSW = x_BSW + cast(nn.Module, self.position)(places)
        elif isinstance(self.cfg.position, Sinusoidal):
            x_BSW = x_BSW + sinusoidal(places, self.cfg.width).type_as(x_BSW)
        return x_BSW

    def _context(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor | None,
        cache: Cache | None,
        prefix_B: Tensor | None,
    ) -> tuple[Tensor, Context]:
        """The tokens' positions, (S) or (B, S), and what all layers share."""
        a = self.cfg.attention
        device = tokens_BS.device
        queries = tokens_BS.shape[1]
        past = 0 if cache is None else cache.length
        padding_B = None if cache is None else cache.padding_B
        places = torch.arange(past, past + queries, device=device)
        if padding_B is not None:
            # The first real token of a row has position 0, as in training.
            places = (places - padding_B[:, None]).clamp(min=0)
        if documents_BS is not None:
            # A position counts from the last start of a document at or before it.
            starts = torch.ones_like(documents_BS, dtype=torch.bool)
            starts[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
            places = places - torch.where(starts, places, 0).cummax(dim=1).values
        # Cut last, so that positions are those in the whole row.
        places = self.sequence.cut(places, -1)

        def mask(window: int | None) -> Mask:
            # FlexAttention skips blocks that are hidden as a whole, which a dense mask cannot.
            hides = documents_BS is not None or (window is not None and window < queries)
            special = hides or prefix_B is not None or a.softcap is not None or a.sinks
            return make_mask(
                queries,
                past + queries,
                device,
                causal=self.cfg.causal,
                window=window,
                documents_BK=documents_BS,
                padding_B=padding_B,
                prefix_B=prefix_B,
                flex=device.type == "cuda" and cache is None and special,
            )

        position = self.cfg.position
        table = rotary(places, a.rotary_dim, position) if isinstance(position, RoPE) else None
        bias_HQK = self._bias(queries, past + queries, device)
        far = mask(None)
        near = far if a.window is None else mask(a.window)
        return places, Context(table, bias_HQK, near, far)

    def _bias(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """What the position adds to the scores."""
        position = self.cfg.position
        if not isinstance(position, ALiBi | RelativeBias):
            return None
        distance_QK = distances(queries, keys, device)
        if isinstance(position, ALiBi):
            # Of keys after the query too, where a mask shows them: the distance alone counts.
            return alibi(distance_QK.abs(), self.cfg.attention.heads)
        bias_HQK: Tensor = cast(nn.Module, self.position)(distance_QK)
        return bias_HQK


def _value_embeddings(cfg: Model) -> dict[str, nn.Module]:
    """By layer. Values have the width of the key/value heads."""
    a = cfg.attention
    if not isinstance(a, GQA):
        return {}
    layers = filter(cfg.value_layer, range(cfg.layers))
    return {str(layer): nn.Embedding(cfg.vocab, a.kv_heads * a.head_dim) for layer in layers}


def _position(cfg: Model) -> nn.Module | None:
    """The learned part of the position, if there is one."""
    match cfg.position:
        case Learned():
            return nn.Embedding(cfg.seq, cfg.width)
        case RelativeBias():
            return DistanceBias(cfg.attention.heads, cfg.position, causal=cfg.causal)
        case _:
            return None
