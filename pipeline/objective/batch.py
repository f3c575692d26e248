"""What the data stage hands to training.

B rows of this rank · S tokens per row
"""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's rows of one global step."""

    tokens_BS: Tensor  # int64 inputs
    targets_BS: Tensor  # int64, the next token; -100 where a packed row predicts nothing
    hash: int  # summed over ranks mod 2**64: the same number for a step on any world size
    documents_BS: Tensor | None = None  # int64, a token's document in its row, if asked for

    def pinned(self) -> "Batch":
        """A copy in pinned memory, which a GPU reads while it computes."""
        documents_BS = None if self.documents_BS is None else self.documents_BS.pin_memory()
        tokens_BS = self.tokens_BS.pin_memory()
        targets_BS = self.targets_BS.pin_memory()
        return replace(self, tokens_BS=tokens_BS, targets_BS=targets_BS, documents_BS=documents_BS)
