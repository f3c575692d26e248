"""What the data stage hands to training: the seam between the two."""

from dataclasses import dataclass, replace

import torch

# B rows of this rank, S tokens per row


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's rows of one global step."""

    tokens_BS: torch.Tensor  # int64 inputs
    targets_BS: torch.Tensor  # int64, the next token; -100 where a packed row predicts nothing
    hash: int  # summed over ranks mod 2**64: the same number for a step on any world size
    documents_BS: torch.Tensor | None = (
        None  # int64, a token's document in its row; where asked for
    )

    def pinned(self) -> "Batch":
        """In memory that a GPU copies from while it computes."""
        documents = None if self.documents_BS is None else self.documents_BS.pin_memory()
        return replace(
            self,
            tokens_BS=self.tokens_BS.pin_memory(),
            targets_BS=self.targets_BS.pin_memory(),
            documents_BS=documents,
        )
