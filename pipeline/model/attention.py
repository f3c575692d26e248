"""Attention: the attend function with its eager twin, the cache, and the layers.

B batch · S sequence · W width · H query heads · G key/value heads · R latent rank
Q queries · K keys · D score width (of a head) · E value width
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from pipeline.config.parts import GQA, MLA
from pipeline.config.shape import Model
from pipeline.model.norm import LayerNorm, RMSNorm, norm
from pipeline.model.position import Rotary, rotate

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


class LayerCache:
    """Tensors along the sequence, (B, S, …), of one layer: keys and values, or MLA's latent."""

    def __init__(self, most: int) -> None:
        self._most, self.length, self.kept = most, 0, list[Tensor]()

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add what the new tokens bring; everything so far."""
        if not self.kept:  # room for all at once: a step copies what is new and nothing else
            self.kept = [t.new_empty(t.shape[0], self._most, *t.shape[2:]) for t in new]
        end = self.length + new[0].shape[1]
        for room, t in zip(self.kept, new, strict=True):
            room[:, self.length : end] = t
        self.length = end
        return tuple(room[:, :end] for room in self.kept)


class Cache:
    def __init__(self, layers: int, most: int, padding_B: Tensor | None = None) -> None:
        self.layers, self.padding_B = [LayerCache(most) for _ in range(layers)], padding_B

    @property
    def length(self) -> int:
        return self.layers[0].length

    @property
    def bytes_per_token(self) -> int:
        """Of one sequence, all layers."""
        kept = [room for layer in self.layers for room in layer.kept]
        return sum(room[0, 0].numel() * room.element_size() for room in kept)

    def reorder(self, rows: Tensor) -> None:
        """Sequence i goes on from sequence rows[i]: beam search."""
        for layer in self.layers:
            layer.kept = [torch.index_select(room, 0, rows) for room in layer.kept]


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


class Context(NamedTuple):
    """What a layer knows beside the hidden states, made once per forward pass."""

    rotary: Rotary | None = None
    bias_HQK: Tensor | None = None
    near: Mask = None  # of windowed layers
    far: Mask = None

    def at(self, windowed: bool, placed: bool) -> tuple[Mask, Tensor | None, Rotary | None]:
        return (
            self.near if windowed else self.far,
            self.bias_HQK if placed else None,
            self.rotary if placed else None,
        )


class GroupedAttention(nn.Module):
    """Over one fused projection: queries, then keys, then values."""

    def __init__(self, model: Model, cfg: GQA, *, windowed: bool, placed: bool) -> None:
        super().__init__()
        self.cfg, self.windowed, self.placed, self.eps = cfg, windowed, placed, model.norm.eps
        self.scoring, self.sequence = Scoring(model.score_scale, cfg.softcap), Sequence()
        self.qkv = nn.Linear(
            model.width, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim, bias=cfg.bias
        )
        self.out = nn.Linear(cfg.heads * cfg.head_dim, model.width, bias=cfg.out_bias)
        self.q_norm = norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.k_norm = norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        mask, bias, table = context.at(self.windowed, self.placed)
        qkv_BSHD = self.qkv(x_BSW).unflatten(-1, (-1, self.cfg.head_dim))
        q_BSHD, k_BSGD, v_BSGD = self._place(qkv_BSHD, table)
        if cache is not None:
            k_BSGD, v_BSGD = cache.append(k_BSGD, v_BSGD)
        q_BHSD, k_BGSD, v_BGSD = (t.transpose(1, 2) for t in (q_BSHD, k_BSGD, v_BSGD))
        y_BHSD = self.sequence.attend(q_BHSD, k_BGSD, v_BGSD, self.scoring, mask, bias, self.sinks)
        out: Tensor = self.out(y_BHSD.transpose(1, 2).flatten(2))
        return out

    def _place(self, qkv_BSHD: Tensor, table: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys normed and turned, and the values."""
        c, q_norm, k_norm = self.cfg, self.q_norm, self.k_norm
        if (
            qkv_BSHD.is_cuda
            and c.head_dim & (c.head_dim - 1) == 0
            and not isinstance(q_norm, LayerNorm)
        ):
            from pipeline.model.kernels import turn  # Triton comes with torch where there is a GPU

            gains = (
                (q_norm.gain, k_norm.gain)
                if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm)
                else None
            )
            return turn(qkv_BSHD, c.heads, gains, self.eps, table)
        q_BSHD, k_BSGD, v_BSGD = torch.split(qkv_BSHD, [c.heads, c.kv_heads, c.kv_heads], dim=2)
        return rotate(q_norm(q_BSHD), table), rotate(k_norm(k_BSGD), table), v_BSGD


class LatentAttention(nn.Module):
    """MLA (arXiv 2405.04434): keys and values are made from a latent of rank R, positions travel in a part of their own
    that all heads share. Decoding keeps the latent and that part alone, and absorbs the projections that would have
    made keys and values into the queries and the output."""

    def __init__(self, model: Model, cfg: MLA, *, windowed: bool, placed: bool) -> None:
        super().__init__()
        self.cfg, self.windowed, self.placed = cfg, windowed, placed
        self.scoring, self.sequence = Scoring(model.score_scale, cfg.softcap), Sequence()
        width, q = model.width, cfg.heads * cfg.score_dim
        straight = cfg.q_rank is None
        self.q_down = nn.Identity() if straight else nn.Linear(width, cfg.q_rank or 0, bias=False)
        self.q_norm = nn.Identity() if straight else norm(cfg.q_rank or 0, model.norm)
        self.q_up = nn.Linear(cfg.q_rank or width, q, bias=False)
        self.kv_down = nn.Linear(width, cfg.kv_rank + cfg.rope_dim, bias=False)
        self.kv_norm = norm(cfg.kv_rank, model.norm)
        self.kv_up = nn.Linear(
            cfg.kv_rank, cfg.heads * (cfg.nope_dim + cfg.v_dim), bias=False
        )  # per head: key, value
        self.out = nn.Linear(cfg.heads * cfg.v_dim, width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        c = self.cfg
        mask, bias, table = context.at(self.windowed, self.placed)
        q_BSHD = self.q_up(self.q_norm(self.q_down(x_BSW))).unflatten(-1, (c.heads, c.score_dim))
        q_nope, q_rope = q_BSHD.split((c.nope_dim, c.rope_dim), dim=-1)
        latent_BSR, k_rope = self.kv_down(x_BSW).split((c.kv_rank, c.rope_dim), dim=-1)
        latent_BSR, q_rope = self.kv_norm(latent_BSR), rotate(q_rope, table)
        k_rope = rotate(k_rope.unsqueeze(2), table)
        if cache is None:
            kv_BSHE = self.kv_up(latent_BSR).unflatten(-1, (c.heads, c.nope_dim + c.v_dim))
            k_nope, v_BSHE = kv_BSHE.split((c.nope_dim, c.v_dim), dim=-1)
            k_BSHD = torch.cat((k_nope, k_rope.expand(-1, -1, c.heads, -1)), dim=-1)
            q_BSHD = torch.cat((q_nope, q_rope), dim=-1)
            q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BSHD, v_BSHE))
            y_BHSE = self.sequence.attend(q, k, v, self.scoring, mask, bias, self.sinks)
        else:
            latent_BKR, k_rope = cache.append(latent_BSR, k_rope.squeeze(2))
            up_HER = self.kv_up.weight.view(c.heads, c.nope_dim + c.v_dim, c.kv_rank)
            key_HDR, value_HER = torch.split(up_HER, [c.nope_dim, c.v_dim], dim=1)
            q_BHSR = torch.einsum("bshd,hdr->bhsr", q_nope, key_HDR)
            q = torch.cat((q_BHSR, q_rope.transpose(1, 2)), dim=-1)
            k = torch.cat((latent_BKR, k_rope), dim=-1).unsqueeze(1)  # one key for all heads
            seen_BHSR = attend(q, k, latent_BKR.unsqueeze(1), self.scoring, mask, bias, self.sinks)
            y_BHSE = torch.einsum("bhsr,her->bhse", seen_BHSR, value_HER)
        out: Tensor = self.out(y_BHSE.transpose(1, 2).flatten(2))
        return out
