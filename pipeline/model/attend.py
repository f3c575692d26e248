"""Softmax attention behind one function, and its eager twin.

B batch · H query heads · G key/value heads · Q queries · K keys · D score width · E value width

Plain causal attention goes to SDPA, which takes cuDNN's or Flash's kernel. What has a mask of its own (windows,
documents, padding) or shapes the scores (soft-cap, sinks) goes to FlexAttention where a GPU trains, and
to a dense mask elsewhere. Which of them is chosen once, when the mask is made.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

Mask = (
    Tensor | BlockMask | None
)  # True where a query sees a key, (B or 1, 1, Q, K); None is plain causal


class Scoring(NamedTuple):
    """How q·k becomes a score, beside the mask."""

    scale: float
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None


def make_mask(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    window: int | None = None,
    documents_BK: Tensor | None = None,
    padding_B: Tensor | None = None,
    flex: bool = False,
) -> Mask:
    """Who sees whom, when the last query is the last key. A query always sees itself, also one that is padding."""
    if window is not None and window >= keys:
        window = None
    if (
        not flex
        and window is None
        and documents_BK is None
        and padding_B is None
        and queries in (keys, 1)
    ):
        return None
    past = keys - queries

    def sees(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = k <= q + past
        if window is not None:
            seen = seen & (q + past - k < window)
        if documents_BK is not None:
            seen = seen & (documents_BK[b, q + past] == documents_BK[b, k])
        if padding_B is not None:
            seen = seen & ((k >= padding_B[b]) | (k == q + past))
        return seen

    rows = next((len(t) for t in (documents_BK, padding_B) if t is not None), 1)
    if flex:
        return create_block_mask(
            sees, rows if rows > 1 else None, None, queries, keys, device=str(device)
        )
    b, q, k = (torch.arange(n, device=device) for n in (rows, queries, keys))
    zero = torch.zeros((), dtype=torch.long, device=device)
    return sees(b[:, None, None, None], zero, q[:, None], k).expand(rows, 1, queries, keys)


def attend(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    scoring: Scoring,
    mask: Mask = None,
    bias_HQK: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    if isinstance(mask, BlockMask):
        return _flex(q_BHQD, k_BGKD, v_BGKE, scoring, mask, bias_HQK, sinks_H)
    if scoring.plain and sinks_H is None:
        grouped = q_BHQD.shape[1] != k_BGKD.shape[1]
        if mask is None and bias_HQK is None:
            causal = q_BHQD.shape[2] == k_BGKD.shape[2]
            return F.scaled_dot_product_attention(
                q_BHQD, k_BGKD, v_BGKE, is_causal=causal, scale=scoring.scale, enable_gqa=grouped
            )
        added = _added(q_BHQD, k_BGKD, mask, bias_HQK)
        return F.scaled_dot_product_attention(
            q_BHQD, k_BGKD, v_BGKE, attn_mask=added, scale=scoring.scale, enable_gqa=grouped
        )
    return eager(q_BHQD, k_BGKD, v_BGKE, scoring, mask, bias_HQK, sinks_H)


def eager(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    scoring: Scoring,
    mask: Tensor | None = None,
    bias_HQK: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The definition, in fp32: every score exists."""
    group = q_BHQD.shape[1] // k_BGKD.shape[1]
    k, v = k_BGKD.repeat_interleave(group, 1), v_BGKE.repeat_interleave(group, 1)
    scores = (q_BHQD.float() @ k.float().mT) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores + _added(q_BHQD, k_BGKD, mask, bias_HQK).float()
    if sinks_H is not None:
        sink = sinks_H.float()[:, None, None].expand(*scores.shape[:3], 1)
        return (torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v.float()).type_as(q_BHQD)
    return (scores.softmax(-1) @ v.float()).type_as(q_BHQD)


def _added(q: Tensor, k: Tensor, mask: Tensor | None, bias_HQK: Tensor | None) -> Tensor:
    """Mask and bias as one term of the scores."""
    if mask is None:
        queries, keys = q.shape[2], k.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)[
            None, None
        ]
    bias = (
        torch.zeros((), dtype=q.dtype, device=q.device)
        if bias_HQK is None
        else bias_HQK[None].type_as(q)
    )
    return torch.where(mask, bias, torch.tensor(float("-inf"), dtype=q.dtype, device=q.device))


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    mask: BlockMask,
    bias_HQK: Tensor | None,
    sinks_H: Tensor | None,
) -> Tensor:
    cap = scoring.softcap

    def shape(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias_HQK is None else score + bias_HQK[h, i, j]

    shaped = None if cap is None and bias_HQK is None else shape
    grouped = q.shape[1] != k.shape[1]
    if sinks_H is None:
        return flex_attention(q, k, v, shaped, mask, scoring.scale, grouped)
    out, aux = flex_attention(
        q, k, v, shaped, mask, scoring.scale, grouped, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None
    # a sink adds e^sink to the softmax's denominator
    return out * torch.sigmoid(aux.lse - sinks_H.float()[:, None]).unsqueeze(-1).type_as(out)
