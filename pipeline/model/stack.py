"""The decoder: embedding, blocks, norm, head with its loss, and the blocks that predict further tokens.

B batch · S sequence · W width · V vocabulary
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from pipeline.config.parts import ALiBi, Learned, RelativeBias, RoPE, Sinusoidal
from pipeline.config.shape import Model
from pipeline.model.attention import Cache, Context, LayerCache, Mask, Sequence, make_mask
from pipeline.model.moe import MixtureOfExperts, Router, Routing
from pipeline.model.norm import PLACEMENTS, Residual, norm, read, reading
from pipeline.model.position import DistanceBias, alibi, distances, rotary, sinusoidal
from pipeline.objective.loss import next_token_loss


class Losses(NamedTuple):
    total: Tensor  # what the backward pass starts from
    nll: Tensor  # nats per token: the loss of every curve and fit
    routing: Routing | None = None  # of the routed layers, stacked


T = TypeVar("T")
Fed = tuple[
    Tensor, Tensor | None, Routing | None
]  # the stream, and what is still to be added to it


class Block(nn.Module):
    def __init__(
        self, cfg: Model, attention: nn.Module, ffn: nn.Module, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.attention, self.ffn, self.recompute = (
            attention,
            ffn,
            recompute,
        )  # of the feed-forward alone
        self.at_attention = Residual(cfg)
        self.at_ffn = None if cfg.parallel_block else Residual(cfg)

    def forward(
        self, x_BSW: Tensor, given: Tensor | None, context: Context, cache: LayerCache | None = None
    ) -> Fed:
        x_BSW, normed = self.at_attention.leave(x_BSW, given)
        seen = self.attention(normed, context, cache)
        on = self.recompute and self.training
        if self.at_ffn is None:  # both read the same input
            fed, routing = again(self._feed, normed, on=on)
            return *self.at_attention.join(x_BSW, seen + fed), routing
        x_BSW, fed, routing = again(
            self._read, self.at_ffn, *self.at_attention.join(x_BSW, seen), on=on
        )
        return *self.at_ffn.join(x_BSW, fed), routing

    def _read(
        self, at: Residual, x: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        x, normed = at.leave(x, given)
        return x, *self._feed(normed)

    def _feed(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        return self.ffn(x) if isinstance(self.ffn, MixtureOfExperts) else (self.ffn(x), None)


def again(part: Callable[..., T], *inputs: object, on: bool) -> T:
    """What a part of the model gives; if `on`, keeping its inputs alone, it runs once more in the backward pass."""
    out: T = (
        torch.utils.checkpoint.checkpoint(part, *inputs, use_reentrant=False)
        if on
        else part(*inputs)
    )
    return out


class Head(nn.Module):
    """The output matrix. The loss is taken here, where ZeRO-3 has the whole matrix gathered."""

    def __init__(self, weight_VW: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.weight, self.scale, self.sequence = weight_VW, scale, Sequence()

    def forward(
        self, h_BSW: Tensor, targets_BS: Tensor | None, z_loss: float, chunk: int
    ) -> Tensor | Losses:
        h_BSW = h_BSW if self.scale == 1 else h_BSW * self.scale
        if targets_BS is None:
            return h_BSW @ self.weight.T
        count = (targets_BS >= 0).sum().clamp(
            min=1
        ) / self.sequence.parts  # the mean over the parts is that of all
        h_TW, targets_T = h_BSW.flatten(0, 1), self.sequence.cut(targets_BS, 1).flatten()
        scored = next_token_loss(h_TW, self.weight, targets_T, count, z_loss=z_loss, chunk=chunk)
        return Losses(*scored)


class Ahead(nn.Module):
    """Joins what is known of a place with the token after it, to predict one further (arXiv 2412.19437, §2.2)."""

    def __init__(self, cfg: Model, block: Block) -> None:
        super().__init__()
        self.h_norm, self.e_norm = (norm(cfg.width, cfg.norm) for _ in range(2))
        self.norm = reading(cfg.width, cfg.norm)
        self.join = nn.Linear(2 * cfg.width, cfg.width, bias=False)
        self.block = block

    def forward(self, h_BSW: Tensor, embedded_BSW: Tensor, context: Context) -> Fed:
        joined = self.join(torch.cat((self.h_norm(h_BSW), self.e_norm(embedded_BSW)), dim=-1))
        out: Fed = self.block(joined, None, context)
        return out


class Decoder(nn.Module):
    def __init__(
        self,
        cfg: Model,
        block: Callable[[int], Block],
        *,
        z_loss: float = 0.0,
        loss_chunk: int = 2048,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.cfg, self.z_loss, self.loss_chunk, self.recompute = cfg, z_loss, loss_chunk, recompute
        self.sequence = Sequence()
        self.embedding = nn.Embedding(cfg.vocab, cfg.width)
        self.position = _position(cfg)
        self.blocks = nn.ModuleList(block(layer) for layer in range(cfg.layers))
        self.norm = (
            reading(cfg.width, cfg.norm) if PLACEMENTS[cfg.placement].before else nn.Identity()
        )
        self.ahead = nn.ModuleList(Ahead(cfg, block(cfg.layers - 1)) for _ in range(cfg.mtp))
        self.head = Head(nn.Parameter(torch.empty_like(self.embedding.weight)), cfg.logit_scale)
        self.tie()

    def tie(self) -> None:
        """Where the head is the embedding, make it so: when built, and when parameters were replaced."""
        if self.cfg.tied:
            self.head.weight = cast(nn.Parameter, self.embedding.weight)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | Losses:
        """Logits, or with targets the losses, without the logits ever being whole. With documents, a token sees its own
        alone and positions begin anew in each; with a cache, the tokens follow those it has seen and the logits are
        those of the last alone."""
        places, context = self._context(tokens_BS, documents_BS, cache)
        x_BSW, given = self._embed(tokens_BS, places), None
        routings, recompute = [], self.recompute and self.training
        for layer, block in enumerate(self.blocks):
            if recompute and given is not None:
                x_BSW, given = x_BSW + given, None  # half as much to keep
            x_BSW, given, routing = again(
                block,
                x_BSW,
                given,
                context,
                None if cache is None else cache.layers[layer],
                on=recompute,
            )
            routings.append(routing)
        if cache is not None:  # what follows is asked for, and none of the logits before it
            x_BSW, given = x_BSW[:, -1:], None if given is None else given[:, -1:]
        x_BSW, h_BSW = read(self.norm, x_BSW, given)
        out: Tensor | Losses = self.head(h_BSW, targets_BS, self.z_loss, self.loss_chunk)
        if targets_BS is None or isinstance(out, Tensor):
            return out
        total = out.total
        if self.training:
            for ahead in self.ahead:
                # the next token is known and the one after it is asked for; the last place, and a document's, has none
                embedded = self._embed(targets_BS.clamp(min=0), places)
                x_BSW, given, routing = again(ahead, x_BSW, embedded, context, on=recompute)
                further = torch.cat(
                    (targets_BS[:, 1:], torch.full_like(targets_BS[:, :1], -100)), dim=1
                )
                targets_BS = torch.where(targets_BS < 0, -100, further)
                x_BSW, h_BSW = read(cast(nn.Module, ahead.norm), x_BSW, given)
                losses = self.head(h_BSW, targets_BS, self.z_loss, self.loss_chunk)
                total = total + self.cfg.mtp_weight / self.cfg.mtp * losses.total
                routings.append(routing)
        routed = [routing for routing in routings if routing is not None]
        if not routed:
            return Losses(total, out.nll)
        stacked = Routing(*(torch.stack(part) for part in zip(*routed, strict=True)))
        return Losses(total + stacked.loss.sum(), out.nll, stacked)

    def routers(self) -> list[Router]:
        """In the order of `Losses.routing`."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def _embed(self, tokens_BS: Tensor, places: Tensor) -> Tensor:
        x_BSW: Tensor = self.embedding(self.sequence.cut(tokens_BS, 1))
        if self.cfg.multipliers.embedding != 1:
            x_BSW = x_BSW * self.cfg.multipliers.embedding
        match self.cfg.position:
            case Learned():
                x_BSW = x_BSW + cast(nn.Module, self.position)(places)
            case Sinusoidal():
                x_BSW = x_BSW + sinusoidal(places, self.cfg.width).type_as(x_BSW)
            case _:
                pass
        return x_BSW

    def _context(
        self, tokens_BS: Tensor, documents_BS: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Context]:
        """The tokens' places, (S) or (B, S), and what the layers share."""
        cfg, device, queries = self.cfg, tokens_BS.device, tokens_BS.shape[1]
        past = 0 if cache is None else cache.length
        padding_B = None if cache is None else cache.padding_B
        places = torch.arange(past, past + queries, device=device)
        if padding_B is not None:
            places = (places - padding_B[:, None]).clamp(min=0)
        if documents_BS is not None:
            begins = torch.ones_like(documents_BS, dtype=torch.bool)
            begins[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
            places = places - torch.where(begins, places, 0).cummax(dim=1).values
        places = self.sequence.cut(places, -1)
        position, a = cfg.position, cfg.attention
        table = rotary(places, a.rotary_dim, position) if isinstance(position, RoPE) else None
        bias = None
        if isinstance(position, ALiBi | RelativeBias):
            distance_QK = distances(queries, past + queries, device)
            bias = (
                alibi(distance_QK, a.heads)
                if isinstance(position, ALiBi)
                else cast(nn.Module, self.position)(distance_QK)
            )

        def mask(window: int | None) -> Mask:
            hides = documents_BS is not None or (window is not None and window < queries)
            flex = (
                device.type == "cuda"
                and cache is None
                and (hides or a.softcap is not None or a.sinks)
            )
            return make_mask(
                queries,
                past + queries,
                device,
                window=window,
                documents_BK=documents_BS,
                padding_B=padding_B,
                flex=flex,
            )

        far = mask(None)
        return places, Context(table, bias, far if a.window is None else mask(a.window), far)


def _position(cfg: Model) -> nn.Module | None:
    match cfg.position:
        case Learned():
            return nn.Embedding(cfg.seq, cfg.width)
        case RelativeBias():
            return DistanceBias(cfg.attention.heads, cfg.position)
        case _:
            return None
