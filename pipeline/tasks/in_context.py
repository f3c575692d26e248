"""Measure how a model uses its context while it trains, as Olsson et al. do (arXiv 2209.11895).

The in-context score is the loss late in a held-out row minus the loss early in it. The prefix
matching of an attention head is its attention, in repeated random tokens, from a token to the one
after its previous occurrence. Heads that do this appear suddenly, together with a drop of the
in-context score: the induction phase change.

B rows · S tokens · L layers · H heads · Q queries · K keys · T pairs of a query and a key
P pieces of the tokenizer
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pipeline.config.schema import RunConfig
from pipeline.config.shape import Model
from pipeline.data.corpus import Corpus
from pipeline.model.attention import ReportingSequence, Sequence
from pipeline.model.head import IGNORED
from pipeline.model.position import places_in
from pipeline.model.stack import Decoder
from pipeline.objective.batch import Micro
from pipeline.parallel.engine import Engine, uncompiled
from pipeline.parallel.world import World

PERIODS = 16  # number of different periods: a head with a fixed distance matches only one
LONGEST = 64  # tokens until the random tokens repeat
SAMPLE = 1_000_000  # tokens of each held-out shard that are searched for pieces in use


class Repeats(NamedTuple):
    """Random tokens that repeat with a different period in every row, and the pairs of query and
    key that an induction head attends to."""

    tokens_BS: Tensor
    rows_T: Tensor
    queries_T: Tensor
    keys_T: Tensor
    shares_T: Tensor  # weight of a pair in the mean, in which all rows count the same


class InContext:
    """Measures the model of an engine: all ranks share the held-out rows, and each has the same
    random tokens."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        world: World,
        held_out: Callable[[], Iterable[Micro]],  # this rank's rows
    ) -> None:
        self._world = world
        self._held_out = held_out
        self._compiled = config.train.compile
        self._tokens = config.in_context_tokens
        self._repeats: Repeats | None = None
        if self._tokens is not None:
            made = make_repeats(config.model, used_pieces(corpus), corpus.manifest.tokenizer.eod)
            self._repeats = Repeats(*(part.to(world.device) for part in made))

    def __call__(self, engine: Engine) -> dict[str, Any]:
        """Return the score and the best head as figures of an evaluation, and every head."""
        if self._tokens is None or self._repeats is None:
            return {}
        early, late = (self._loss(engine, token) for token in self._tokens)
        with uncompiled(self._compiled):
            heads_LH = prefix_matching(engine.evaluate, engine.module, self._repeats)
        best = heads_LH.max().item()
        figures: dict[str, Any] = {
            "in_context/score": late - early,
            "in_context/prefix_matching": best,
            "in_context_tokens": list(self._tokens),
        }
        if best == best:  # a list in the log has no NaN
            rounded = [[round(head, 4) for head in heads] for heads in heads_LH.tolist()]
            figures["prefix_matching_heads"] = rounded
        return figures

    def _loss(self, engine: Engine, token: int) -> float:
        """Return the mean held-out loss at one token of the context, over the rows of all ranks."""
        # Sum and number of the losses. They stay on the device, so that the host need not wait.
        total = torch.zeros(2, dtype=torch.double, device=self._world.device)
        for micro in self._held_out():
            one = only(micro, token)
            count = (one.targets_BS >= 0).sum()
            # Rows that were cut have a new shape, which would be compiled.
            cut = one.tokens_BS.shape != micro.tokens_BS.shape
            with uncompiled(self._compiled and cut):
                nll = engine.evaluate(one).nll
            total += torch.stack((nll.double() * count, count.double()))
        summed, number = self._world.reduce(total).tolist()
        # If documents are kept apart, all of them may be too short.
        return summed / number if number else math.nan


def only(micro: Micro, token: int) -> Micro:
    """Return the rows with a single target: the prediction of the token-th token.

    If attention stays within documents, every document that is long enough has one target."""
    if micro.documents_BS is None:
        # A causal model does not attend to later tokens, so the rows may end here.
        targets_BS = torch.full_like(micro.targets_BS[:, :token], IGNORED)
        targets_BS[:, -1] = micro.targets_BS[:, token - 1]
        return Micro(micro.tokens_BS[:, :token], targets_BS)
    asked_BS = places_in(micro.documents_BS) == token - 1
    return replace(micro, targets_BS=torch.where(asked_BS, micro.targets_BS, IGNORED))


def used_pieces(corpus: Corpus) -> Tensor:
    """Return the ids that held-out text uses, except for the end of a document.

    All other ids hardly occur in training, and a head cannot match tokens that the model does not
    know. For the same reason, Olsson et al. leave out rare tokens."""
    counts = torch.zeros(corpus.manifest.tokenizer.vocab, dtype=torch.long)
    for shard in corpus.split("valid").shards:
        read = torch.from_numpy(corpus.tokens(shard)[:SAMPLE].astype("int64"))
        counts += torch.bincount(read, minlength=len(counts))
    counts[corpus.manifest.tokenizer.eod] = 0
    return counts.nonzero().squeeze(1)


def make_repeats(model: Model, pieces_P: Tensor, eod: int) -> Repeats:
    """Make repeated tokens, the same for every run with these pieces. A row begins with the end of
    a document, as in training, and has no repetition except by its period."""
    # A windowed head must reach the previous occurrence; within 4 tokens there is little to see.
    reach = max(4, model.attention.window or LONGEST)
    longest = min(LONGEST, reach, (model.seq - 1) // 2, len(pieces_P))
    periods = range(longest // 2 + 1, longest + 1)[-PERIODS:]
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.full((len(periods), 2 * longest + 1), eod)
    pairs = []
    for row, period in enumerate(periods):
        drawn = pieces_P[torch.randperm(len(pieces_P), generator=generator)[:period]]
        tokens_BS[row, 1:] = drawn[torch.arange(2 * longest) % period]
        # Only the second copy counts: in a third one, two earlier tokens would match.
        for query in range(period + 1, 2 * period + 1):
            pairs.append((row, query, query - period + 1, 1 / (period * len(periods))))
    rows_T, queries_T, keys_T, shares_T = map(torch.tensor, zip(*pairs, strict=True))
    return Repeats(tokens_BS, rows_T, queries_T, keys_T, shares_T)


@torch.no_grad()
def prefix_matching(
    evaluate: Callable[[Micro], object], model: nn.Module, repeats: Repeats
) -> Tensor:
    """Return the prefix matching of every head, (L, H), from 0 to 1."""
    layers: list[Tensor] = []

    def report(weights_BHQK: Tensor) -> None:
        chosen_TH = weights_BHQK[repeats.rows_T, :, repeats.queries_T, repeats.keys_T]
        layers.append(repeats.shares_T @ chosen_TH)

    with _watched(cast(Decoder, model), report):
        # With targets, although the loss is not used: otherwise all logits would be computed.
        evaluate(Micro(repeats.tokens_BS, repeats.tokens_BS))
    return torch.stack(layers)


@contextmanager
def _watched(model: Decoder, report: Callable[[Tensor], None]) -> Iterator[None]:
    """Report the attention weights of every layer, in order; shared layers report several times."""
    layers = [cast(nn.Module, block.attention) for block in model.blocks]
    before = [cast(Sequence, layer.sequence) for layer in layers]
    for layer in layers:
        layer.sequence = ReportingSequence(report)  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, sequence in zip(layers, before, strict=True):
            layer.sequence = sequence  # type: ignore[assignment]
