"""Which of a row's tokens a process works on: the seam for sequence parallelism.

The decoder is handed whole rows and cuts them here, so positions, masks, targets and counts are those of the whole.
"""

from torch import Tensor

from pipeline.model.attend import Mask, Scoring, attend


class Sequence:
    """All of them. parallel/sequence.py swaps in a run of them, whose other parts lie with other processes."""

    rank, parts = 0, 1

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """This process's part of what counts tokens, or of what counts heads."""
        return x.chunk(self.parts, dim)[self.rank]

    def counts(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """A count over this process's tokens, over those before them and over all of the row's."""
        return count.new_zeros(()), count

    def attend(
        self,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        scoring: Scoring,
        mask: Mask,
        bias_HQK: Tensor | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Queries, keys and values of this process's tokens; bias and mask are those of the whole row."""
        bias, sinks = (None if t is None else self.cut(t, 0) for t in (bias_HQK, sinks_H))
        q, k, v = self.to_heads(q_BHQD, k_BGKD, v_BGKE)
        return self.to_tokens(attend(q, k, v, scoring, mask, bias, sinks))

    def to_heads(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this process's share of the heads."""
        return q_BHQD, k_BGKD, v_BGKE

    def to_tokens(self, y_BHQE: Tensor) -> Tensor:
        """And back: all heads of its tokens."""
        return y_BHQE
