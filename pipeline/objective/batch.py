"""The batches that the data stage passes to training.

B rows of this rank · S tokens per row · E tokens per row of an encoder–decoder's encoder
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import xxhash
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.objective.draws import F32, I64, Draws
from pipeline.objective.example import Example, Text, Vocabulary
from pipeline.objective.noise import make_noise


@dataclass(frozen=True, slots=True)
class Micro:
    """The input of one forward pass on one rank: rows of text, and the objective's tensors."""

    tokens_BS: Tensor  # int64 inputs
    targets_BS: Tensor  # int64, the token to predict at each position; -100 for none
    documents_BS: Tensor | None = None  # int64, each token's document, if documents are kept apart
    # Tensors of some objectives; int64 unless noted.
    source_BE: Tensor | None = None  # inputs of the encoder
    source_documents_BE: Tensor | None = None  # cross-attention stays within each document
    segments_BS: Tensor | None = None  # 0 for tokens of the first text, 1 for those of the second
    prefix_B: Tensor | None = None  # length of the prefix, to which all tokens of a row attend
    # The class of the row, -100 without a label; or its number as a float, NaN without a label.
    labels_B: Tensor | None = None
    last_B: Tensor | None = None  # position of the last token before the padding
    # Mean number of targets per row in the batch of all ranks (float), if the numbers differ.
    counts_B: Tensor | None = None
    draws_BS: Tensor | None = None  # random numbers below 2^32, by which a generator samples tokens

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments of the model's forward pass."""
        every = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in every.items() if tensor is not None}


TENSORS = tuple(each.name for each in fields(Micro))


@dataclass(frozen=True, slots=True)
class Batch(Micro):
    """One rank's rows of one step, before they are cut into micro-batches."""

    # Summed over ranks mod 2**64: the same number for a step on any world size.
    hash: int = field(kw_only=True)

    @classmethod
    def stack(
        cls, rows: Sequence[Example], numbers: Iterable[int], counts: F32 | None = None
    ) -> "Batch":
        """Join rows. `numbers` are the rows' places in the batch of all ranks, for the hash;
        `counts` is the mean number of targets per row of that batch."""
        numbered = zip(rows, numbers, strict=True)
        digest = sum(xxhash.xxh3_64_intdigest(row.raw, number) for row, number in numbered)
        rows = [row._replace(counts=counts) for row in rows]
        tensors = {}
        for name, column in zip(TENSORS, zip(*rows, strict=True), strict=True):
            if column[0] is not None:
                stacked_BS = torch.from_numpy(np.stack(column))
                # One number per row is a vector, not a matrix of one column.
                tensors[name] = stacked_BS.squeeze(1) if name.endswith("_B") else stacked_BS
        return cls(hash=digest % 2**64, **tensors)

    def pinned(self) -> "Batch":
        """Return a copy in pinned memory, which a GPU reads while it computes."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return Batch(hash=self.hash, **pinned)


def random_batch(config: RunConfig, seed: int, rows: range, *, same: bool = False) -> Batch:
    """Return these rows of a global batch of random text, for checks and benchmarks without data.
    The rows are made and hashed like the loader's. With `same`, all tokens are equal."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = Vocabulary(config.model.vocab - config.objective.special_ids, eod=0)
    noise = make_noise(config.objective, vocabulary, config.model.source_seq)
    # Without noise, a text has the inputs and one more token, the last target.
    length = config.text_length
    shape = (config.rows, length + (noise is None))
    texts = torch.randint(vocabulary.pieces, shape, generator=generator)
    if same:
        texts = texts[:1, :1].repeat(shape)
    if noise is None:
        digest = sum(xxhash.xxh3_64_intdigest(texts[row].numpy().data, row) for row in rows)
        texts = texts[rows.start : rows.stop]
        return Batch(texts[:, :-1].contiguous(), texts[:, 1:].contiguous(), hash=digest % 2**64)

    def another(draws: Draws) -> I64:
        found: I64 = texts[int(draws.below(len(texts), 1)[0])].numpy()
        return found

    whole = [Text(texts[row].numpy(), None, texts.shape[1], another) for row in rows]
    examples = noise(whole, [Draws(seed, row) for row in rows])
    counts = [config.objective.row_targets(row, length) for row in range(config.rows)]
    uneven = [count for count in counts if count is not None]
    mean = np.array([sum(uneven) / len(uneven)], np.float32) if uneven else None
    return Batch.stack(examples, rows, mean)
