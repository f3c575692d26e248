"""The model: a decoder, an encoder or both. It maps tokens to logits or losses.

B batch · S sequence · E encoder sequence · W width · V vocabulary · T = B·S tokens
R width of the embedding: W, unless model.embedding_rank is set
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.parts import GQA
from pipeline.config.shape import Model
from pipeline.model.block import Ahead, Block, recomputed
from pipeline.model.context import Cache, Context, make_cross_mask
from pipeline.model.generator import fill_masks
from pipeline.model.head import IGNORED, Head, Losses, RowHead, Transform, at_targets
from pipeline.model.moe import Router, Routing
from pipeline.model.norm import add_and_norm
from pipeline.model.side import Encoder, Inputs, Seen, Side
from pipeline.model.stream import Backout, Smear, settle
from pipeline.model.teacher import Taught, Teacher


class States(NamedTuple):
    """The result of all layers, and the inputs of multi-token prediction."""

    x_BSW: Tensor  # the stream after the last layer
    h_BSW: Tensor  # the stream, normalized
    places: Tensor  # position of each token
    context: Context
    routings: list[Routing | None]


class Decoder(Side):
    """The whole model, named after the most common stack. It is an encoder if `cfg.stack` is
    "encoder"; `encoder` is the second stack of an encoder–decoder."""

    def __init__(
        self,
        cfg: Model,
        block: Callable[[int, bool], Block],  # builds a layer's block; True: one for mtp
        encoder: Encoder | None = None,
        generator: "Decoder | None" = None,
        *,
        z_loss: float = 0.0,
        smoothing: float = 0.0,
        loss_chunk: int = 2048,
        recompute: bool = False,
        token_weight: float | None = None,  # weight of the tokens' loss in fine-tuning on labels
        most_targets: int | None = None,  # tokens of a row that the head reads; None: all
    ) -> None:
        super().__init__(cfg, causal=cfg.causal, recompute=recompute)
        self.z_loss = z_loss
        self.smoothing = smoothing
        self.token_weight = token_weight
        self.most_targets = most_targets
        self.loss_chunk = loss_chunk
        self.embedding = nn.Embedding(cfg.vocab, cfg.input_width)
        self.add_inputs()
        self.smear = Smear(cfg) if cfg.smear else None
        # Outside of the compiled blocks: a compiled lookup's backward adds rows in no fixed order.
        self.value_embeddings = nn.ModuleDict(_value_embeddings(cfg))
        self.encoder = encoder
        layers = 1 if cfg.shares("decoder") else cfg.layers
        self.blocks = nn.ModuleList(block(layer, False) for layer in range(layers))
        self.backout = Backout() if cfg.backout else None
        self.add_norm()
        last = cfg.layers - 1
        self.ahead = nn.ModuleList(Ahead(cfg, block(last, True)) for _ in range(cfg.mtp))
        projected = cfg.head_transform or cfg.head_width != cfg.width
        self.transform = Transform(cfg) if projected else None
        # The head gets a separate weight. If the head is tied, `tie` replaces that weight.
        rows = 1 if cfg.head == "replaced" else cfg.vocab
        self.head = Head(cfg, nn.Parameter(torch.empty(rows, cfg.head_width)))
        self.row_head = RowHead(cfg) if cfg.row_classes else None
        self.generator = generator
        self.teacher: Teacher | None = None  # set for a distilled run
        self.whole_prompts = False  # set for a prefix LM, which attends to prompts in full
        self.tie()

    def tie(self) -> None:
        """Share weights with the head and the generator; call again after replacing parameters."""
        if self.cfg.tied:
            self.head.weight = cast(nn.Parameter, self.embedding.weight)
        if self.generator is not None:
            for part in ("embedding", "position", "segments", "embedding_norm"):
                shared = getattr(self, part)
                for name, parameter in shared.named_parameters() if shared is not None else ():
                    setattr(getattr(self.generator, part), name, parameter)
            self.generator.tie()

    def drop_generator(self) -> None:
        """Remove the generator, which only pretraining uses."""
        self.generator = None
        self.cfg = self.cfg.model_copy(update={"generator": None})

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        cache: Cache | None = None,
        *,
        source_BE: Tensor | None = None,
        source_documents_BE: Tensor | None = None,
        segments_BS: Tensor | None = None,
        prefix_B: Tensor | None = None,
        labels_B: Tensor | None = None,
        last_B: Tensor | None = None,
        counts_B: Tensor | None = None,
        draws_BS: Tensor | None = None,
    ) -> Tensor | Losses:
        """Return logits or, with targets, losses, without all logits in memory at once.

        With documents, a token attends within its own document, and positions restart in each.
        With a cache, the tokens continue the cached ones, and only the logits of the last token are
        returned. A prefix is the number of first tokens of a row to which every token attends. The
        source is the input of an encoder–decoder's encoder; with a cache, it is given once.
        Labels belong to whole rows. The row head reads the first token, or `last_B`, the last token
        before the padding. With `counts_B`, the targets per row in the whole batch, every token
        counts the same, however the batch is divided."""
        inputs = Inputs(
            tokens_BS, documents_BS, source_BE, source_documents_BE, segments_BS, prefix_B
        )
        filled = None
        if self.generator is not None and targets_BS is not None and draws_BS is not None:
            filled = fill_masks(self.generator, inputs, targets_BS, draws_BS)
            inputs = inputs._replace(tokens_BS=filled.tokens_BS)
            targets_BS = filled.replaced_BS
        x_BSW, h_BSW, places, context, routings = self.states(inputs, cache)
        taught = None
        if self.teacher is not None and self.training and targets_BS is not None:
            taught = self.teacher(inputs)
        out = self._losses(h_BSW, targets_BS, labels_B, last_B, taught)
        if targets_BS is None or isinstance(out, Tensor):
            return out
        # From here on, `total` gets further terms, and `nll` has none of them.
        total = out.total
        if filled is not None:
            total = filled.loss + self.cfg.replaced_weight * total
        if self.training and self.cfg.mtp:
            total = self._predict_ahead(
                total, x_BSW, tokens_BS, targets_BS, places, context, routings
            )
        if counts_B is not None:
            # Without this share, rows with few targets would weigh as much as rows with many.
            share = (targets_BS >= 0).sum() / counts_B.sum()
            total = total * share
            out = out._replace(nll=out.nll * share)
        routed = [routing for routing in routings if routing is not None]
        if not routed:
            return out._replace(total=total)
        stacked = Routing(*(torch.stack(part) for part in zip(*routed, strict=True)))
        return out._replace(total=total + stacked.loss.sum(), routing=stacked)

    def states(self, inputs: Inputs, cache: Cache | None = None) -> States:
        """Run all layers."""
        tokens_BS = inputs.tokens_BS
        seen = Seen(inputs.documents_BS, inputs.prefix_B)
        if self.whole_prompts and cache is not None and not cache.length:
            rows, prompt = tokens_BS.shape
            seen = seen._replace(prefix_B=tokens_BS.new_full((rows,), prompt))
        places, context = self.context(tokens_BS, seen, cache)
        routings: list[Routing | None] = []
        if self.encoder is not None:
            context = self._encode(context, routings, inputs, cache)
        x_BSW = self.embed(self._smeared(tokens_BS, places, cache), places, inputs.segments_BS)
        if self.training and not x_BSW.requires_grad:
            # A frozen embedding. For the backward pass, ZeRO-3 gathers a block only if the block's
            # input has a gradient.
            x_BSW.requires_grad_()
        x_BSW, pending = self._decode(x_BSW, tokens_BS, context, routings, cache)
        # Decoding needs only the next token, and the logits of a long prompt would fill the memory.
        if cache is not None:
            x_BSW = x_BSW[:, -1:]
            pending = None if pending is None else pending[:, -1:]
        x_BSW, h_BSW = add_and_norm(self.norm, x_BSW, pending)
        return States(x_BSW, h_BSW, places, context, routings)

    def hidden(self, inputs: Inputs) -> Tensor:
        """Return the normalized stream after the last layer."""
        return self.states(inputs).h_BSW

    def _encode(
        self, context: Context, routings: list[Routing | None], inputs: Inputs, cache: Cache | None
    ) -> Context:
        """Return the context with the encoder's output; append the encoder's routings."""
        assert self.encoder is not None
        source_BE = inputs.source_BE
        source_documents_BE = inputs.source_documents_BE
        source_BEW = None
        if source_BE is not None:
            look_up = self.encoder.embedding or self.embedding
            embedded_BER = self._look_up(self.sequence.cut(source_BE, 1), look_up)
            source_BEW, routed = self.encoder(source_BE, embedded_BER, source_documents_BE)
            routings += routed
            if cache is not None:
                cache.source_documents_BE = source_documents_BE
        elif cache is not None:  # each layer has cached its keys and values of the source
            source_documents_BE = cache.source_documents_BE
        a = self.cfg.attention
        # FlexAttention for the same reasons as in `Side.context`.
        special = source_documents_BE is not None or a.softcap is not None or a.sinks
        mask = make_cross_mask(
            inputs.tokens_BS.shape[1],
            inputs.documents_BS,
            source_documents_BE,
            flex=inputs.tokens_BS.is_cuda and cache is None and special,
        )
        return context._replace(source_BEW=source_BEW, cross=mask)

    def _decode(
        self,
        x_BSW: Tensor,
        tokens_BS: Tensor,
        context: Context,
        routings: list[Routing | None],
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream after the last layer and its pending term; append the routings."""
        if self.cfg.residual_scales:
            context = context._replace(first_BSW=x_BSW)
        middle_BSW: Tensor | None = None
        pending: Tensor | None = None
        for layer in range(self.cfg.layers):
            at = context._replace(values_BSGD=self._values(tokens_BS, layer))
            x_BSW, pending, routing = self.step(layer, x_BSW, pending, at, cache)
            routings.append(routing)
            if self.backout is not None and layer == self.cfg.middle_layer:
                x_BSW = middle_BSW = settle(x_BSW, pending)
                pending = None
        if self.backout is not None and middle_BSW is not None:
            x_BSW = self.backout(x_BSW, pending, middle_BSW)
            pending = None
        return x_BSW, pending

    def _losses(
        self,
        h_BSW: Tensor,
        targets_BS: Tensor | None,
        labels_B: Tensor | None,
        last_B: Tensor | None,
        taught: Taught | None,
    ) -> Tensor | Losses:
        """Return the logits, or the losses of tokens and rows. The logged loss is that of the
        tokens (BERT) or, if there is a `token_weight`, that of the rows (GPT's fine-tuning)."""
        if targets_BS is None or self.row_head is None or labels_B is None:
            return self.predict(h_BSW, targets_BS, taught)
        row_loss, rows_BC = self.row_head(h_BSW, labels_B, last_B)
        if self.token_weight is None:
            out = cast(Losses, self.predict(h_BSW, targets_BS, taught))
            return Losses(out.total + row_loss, out.nll, rows_BC=rows_BC)
        if self.token_weight == 0:
            # Engines expect a gradient for the head, too: one token without a target gives zeros.
            h_BSW = h_BSW[:1, :1]
            targets_BS = torch.full_like(targets_BS[:1, :1], IGNORED)
        tokens = cast(Losses, self.predict(h_BSW, targets_BS))
        total = row_loss + self.token_weight * tokens.total
        return Losses(total, row_loss.detach(), rows_BC=rows_BC)

    def predict(
        self, h_BSW: Tensor, targets_BS: Tensor | None, taught: Taught | None = None
    ) -> Tensor | Losses:
        """Return the logits or, with targets, the losses of tokens."""
        whole_BSW = h_BSW
        places_BK = None
        # With sequence parallelism, the ranks that share a row have different numbers of targets.
        if targets_BS is not None and self.most_targets and self.sequence.parts == 1:
            h_BSW, targets_BS, places_BK = at_targets(h_BSW, targets_BS, self.most_targets)
        read_BSW = h_BSW if self.transform is None else self.transform(h_BSW)
        soft = None if taught is None else taught.soft(places_BK)
        out: Tensor | Losses = self.head(
            read_BSW, targets_BS, self.z_loss, self.loss_chunk, self.smoothing, soft
        )
        if taught is None or isinstance(out, Tensor) or not taught.teacher.settings.hidden:
            return out
        return out._replace(total=out.total + taught.angle(whole_BSW))

    def _predict_ahead(
        self,
        total: Tensor,
        x_BSW: Tensor,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        places: Tensor,
        context: Context,
        routings: list[Routing | None],
    ) -> Tensor:
        """Add the losses of further tokens to the total; append their routings."""
        for ahead in self.ahead:
            # Inputs and targets move by one. The last token of a row or document has no target.
            tokens_BS = torch.where(targets_BS < 0, tokens_BS.roll(-1, 1), targets_BS)
            next_BS = self.sequence.cut(tokens_BS, 1)
            embedded_BSW = self.embed(self._look_up(next_BS), places)
            x_BSW, pending, routing = recomputed(
                ahead, x_BSW, embedded_BSW, context, on=self.recompute
            )
            last = torch.full_like(targets_BS[:, :1], IGNORED)
            further_BS = torch.cat((targets_BS[:, 1:], last), dim=1)
            targets_BS = torch.where(targets_BS < 0, IGNORED, further_BS)
            x_BSW, h_BSW = add_and_norm(cast(nn.Module, ahead.norm), x_BSW, pending)
            losses = cast(Losses, self.predict(h_BSW, targets_BS))
            # The mean over the extra tokens; DeepSeek-V3 weights it by 0.3, and later by 0.1.
            total = total + self.cfg.mtp_weight / self.cfg.mtp * losses.total
            routings.append(routing)
        return total

    def routers(self) -> list[Router]:
        """Return the routers in the order of `Losses.routing`."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def _smeared(self, tokens_BS: Tensor, places: Tensor, cache: Cache | None) -> Tensor:
        """Embed the tokens and, with `smear`, add a part of the token before to each."""
        if self.smear is None:
            return self._look_up(self.sequence.cut(tokens_BS, 1))
        before_B1 = tokens_BS[:, :1]  # any token: nothing is added to the first one of a row
        if cache is not None:
            before_B1 = before_B1 if cache.last_B1 is None else cache.last_B1
        row_BS = self.sequence.cut_after(torch.cat((before_B1, tokens_BS), dim=1))
        if cache is not None:
            cache.remember(tokens_BS[:, -1:])
        # Positions restart with each document, so the token at position 0 follows no other.
        smeared_BSR: Tensor = self.smear(self._look_up(row_BS), places > 0)
        return smeared_BSR

    def _look_up(self, tokens_BS: Tensor, table: nn.Module | None = None) -> Tensor:
        """Return the tokens' embeddings, normalized and multiplied as configured."""
        x_BSR: Tensor = (table or self.embedding)(tokens_BS)
        if self.cfg.embedding_norm is True:
            x_BSR = F.rms_norm(x_BSR, x_BSR.shape[-1:], eps=self.cfg.norm.eps)
        if self.cfg.embedding_multiplier != 1:
            x_BSR = x_BSR * self.cfg.embedding_multiplier
        return x_BSR

    def _values(self, tokens_BS: Tensor, layer: int) -> Tensor | None:
        """Return the tokens' value embeddings in a layer, if the layer has them."""
        if not self.cfg.value_layer(layer):
            return None
        values_BSE: Tensor = self.value_embeddings[str(layer)](self.sequence.cut(tokens_BS, 1))
        return values_BSE.view(*values_BSE.shape[:2], -1, self.cfg.attention.head_dim)


def _value_embeddings(cfg: Model) -> dict[str, nn.Module]:
    """Return the tables by layer. Values have the width of the key/value heads."""
    a = cfg.attention
    if not isinstance(a, GQA):
        return {}
    layers = filter(cfg.value_layer, range(cfg.layers))
    return {str(layer): nn.Embedding(cfg.vocab, a.kv_heads * a.head_dim) for layer in layers}
