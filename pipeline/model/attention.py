"""Attention: one function with a slow reference implementation, and the layers.

B batch · S sequence · W width · H query heads · G key/value heads · D head or score width
Q queries · K keys · E value width · R latent rank · A = H + 2G heads of a fused projection

Attention without a mask or with the causal one uses SDPA, which picks cuDNN or Flash. A trained
bias has its own backward kernel (bias_kernel.py). Other masks (windows, documents, padding) and
modified scores (soft-cap, sinks) use FlexAttention when a GPU trains compiled blocks, and a dense
mask otherwise. `make_mask` makes this choice.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    create_mask,
    flex_attention,
)

from pipeline.config.parts import GQA, MLA
from pipeline.config.shape import Model
from pipeline.model.context import Context, LayerCache, Mask
from pipeline.model.norm import LayerNorm, RMSNorm, make_norm, rms_norm
from pipeline.model.position import Rotary, rotate


class Scoring(NamedTuple):
    """Everything that turns q·k into a score."""

    scale: float
    softcap: float | None = None  # Gemma 2 (arXiv 2408.00118)
    mask: Mask = None
    bias_HQK: Tensor | None = None
    sinks_H: Tensor | None = None


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, scoring: Scoring) -> Tensor:
    """Softmax attention, (B, H, Q, E), with the fastest kernel that supports the mask."""
    # Without the compiler, FlexAttention is slow and prints a warning.
    if isinstance(scoring.mask, BlockMask) and torch.compiler.is_compiling():
        return _flex(q_BHQD, k_BGKD, v_BGKE, scoring, scoring.mask)
    if scoring.softcap is not None or scoring.sinks_H is not None:
        # SDPA supports neither. Training on a GPU uses FlexAttention and does not come here.
        return eager(q_BHQD, k_BGKD, v_BGKE, scoring)
    mask = _dense(scoring.mask, q_BHQD.device)
    bias_HQK = scoring.bias_HQK
    if mask == "all" and bias_HQK is not None and bias_HQK.requires_grad and q_BHQD.is_cuda:
        # Triton exists only where torch was built for a GPU.
        from pipeline.model import bias_kernel

        if bias_kernel.supports(q_BHQD, k_BGKD, v_BGKE):
            return bias_kernel.attend_with_bias(q_BHQD, k_BGKD, v_BGKE, bias_HQK, scoring.scale)
    # A single query at the end of the cache attends to every key, so it needs no mask. SDPA's
    # `is_causal` would let it attend to the first key only.
    causal = mask is None and bias_HQK is None and q_BHQD.shape[2] == k_BGKD.shape[2]
    added = mask if isinstance(mask, Tensor) else None  # SDPA accepts a boolean mask, too
    if bias_HQK is not None:
        added = cast(Tensor, _additive_mask(q_BHQD, k_BGKD, mask, bias_HQK))
    heads, queries = q_BHQD.shape[1:3]
    groups = k_BGKD.shape[1]
    if queries == 1 and bias_HQK is None:
        # Present the heads of a group as several queries of one head: kernels that accept a mask
        # would otherwise copy the keys for each head.
        q_BHQD = q_BHQD.reshape(-1, groups, heads // groups, q_BHQD.shape[3])
    y_BHQE = F.scaled_dot_product_attention(
        q_BHQD,
        k_BGKD,
        v_BGKE,
        attn_mask=added,
        is_causal=causal and queries > 1,
        scale=scoring.scale,
        enable_gqa=q_BHQD.shape[1] != groups,
    )
    return y_BHQE.reshape(-1, heads, queries, v_BGKE.shape[3])


def eager(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, scoring: Scoring) -> Tensor:
    """The definition of attention, in fp32, with every score in memory."""
    weights_BHQK = attention_weights(q_BHQD, k_BGKD, scoring)
    v_BHKE = v_BGKE.repeat_interleave(q_BHQD.shape[1] // v_BGKE.shape[1], 1)
    return (weights_BHQK @ v_BHKE.float()).type_as(q_BHQD)


def attention_weights(q_BHQD: Tensor, k_BGKD: Tensor, scoring: Scoring) -> Tensor:
    """Return how much each query attends to each key, (B, H, Q, K), in fp32."""
    k_BHKD = k_BGKD.repeat_interleave(q_BHQD.shape[1] // k_BGKD.shape[1], 1)
    scores_BHQK = (q_BHQD.float() @ k_BHKD.float().mT) * scoring.scale
    if scoring.softcap is not None:
        scores_BHQK = scoring.softcap * torch.tanh(scores_BHQK / scoring.softcap)
    mask = _dense(scoring.mask, q_BHQD.device)
    scores_BHQK = (scores_BHQK + _additive_mask(q_BHQD, k_BGKD, mask, scoring.bias_HQK)).float()
    if scoring.sinks_H is not None:
        # A sink is one more key, whose value is zero.
        sink = scoring.sinks_H.float()[:, None, None].expand(*scores_BHQK.shape[:3], 1)
        return torch.cat((scores_BHQK, sink), -1).softmax(-1)[..., :-1]
    return scores_BHQK.softmax(-1)


def _additive_mask(
    q: Tensor, k: Tensor, mask: Tensor | Literal["all"] | None, bias_HQK: Tensor | None
) -> Tensor | float:
    """Return mask and bias as one term to add to the scores."""
    bias = 0.0 if bias_HQK is None else bias_HQK[None].type_as(q)
    queries, keys = q.shape[2], k.shape[2]
    # A single query is at the end of the cache and attends to every key.
    if isinstance(mask, str) or (mask is None and queries == 1):
        return bias
    if mask is None:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        mask = ones.tril(keys - queries)[None, None]
    # A constant tensor would be copied to the device in every layer; a number is not.
    return torch.where(mask, bias, float("-inf"))


def _dense(mask: Mask, device: torch.device) -> Tensor | Literal["all"] | None:
    """Convert a BlockMask to a tensor with an entry for each query and key."""
    if not isinstance(mask, BlockMask):
        return mask
    rows, heads, queries, keys = mask.shape
    seen: Tensor = create_mask(mask.mask_mod, rows, heads, queries, keys, str(device))
    # A query without keys attends to all of them, because a softmax over none would be NaN.
    return seen | ~seen.any(-1, keepdim=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, mask: BlockMask) -> Tensor:
    cap = scoring.softcap
    bias_HQK = scoring.bias_HQK
    sinks_H = scoring.sinks_H

    def modify(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias_HQK is None else score + bias_HQK[h, i, j]

    score_mod = None if cap is None and bias_HQK is None else modify
    grouped = q.shape[1] != k.shape[1]
    # With the usual three stages, the fp32 tiles of a bias exceed a Hopper GPU's shared memory.
    options: FlexKernelOptions | None = None if bias_HQK is None else {"num_stages": 1}
    inputs = (q, k, v, score_mod, mask, scoring.scale, grouped)
    if sinks_H is None:
        return flex_attention(*inputs, kernel_options=options)
    out, aux = flex_attention(*inputs, kernel_options=options, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    # A sink adds e^sink to the denominator of the softmax.
    return out * torch.sigmoid(aux.lse - sinks_H.float()[:, None]).unsqueeze(-1).type_as(out)


class Sequence:
    """The part of each row that this process works on: here, the whole row.

    With sequence parallelism, parallel/sequence.py replaces this class. The model always gets whole
    rows and cuts them here, so positions, masks, targets and counts are those of the whole row."""

    rank = 0
    parts = 1

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's part along a dimension of tokens or heads."""
        return x.chunk(self.parts, dim)[self.rank]

    def cut_after(self, tokens_BS: Tensor) -> Tensor:
        """Return this process's part of a row, and the token before that part. `tokens_BS` has one
        extra token at the start, which is the one before the first part."""
        size = (tokens_BS.shape[1] - 1) // self.parts
        return tokens_BS[:, self.rank * size : (self.rank + 1) * size + 1]

    def counts(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the count over the tokens before this process's part, and over the whole row."""
        return count.new_zeros(()), count

    def attend(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, scoring: Scoring) -> Tensor:
        """Compute attention for this process's tokens; bias and mask are those of the whole row."""
        scale, softcap, mask, bias_HQK, sinks_H = scoring
        bias = None if bias_HQK is None else self.cut(bias_HQK, 0)
        sinks = None if sinks_H is None else self.cut(sinks_H, 0)
        q, k, v = self.to_heads(q_BHQD, k_BGKD, v_BGKE)
        return self.to_tokens(attend(q, k, v, Scoring(scale, softcap, mask, bias, sinks)))

    def to_heads(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens for this process's share of the heads."""
        return q_BHQD, k_BGKD, v_BGKE

    def to_tokens(self, y_BHQE: Tensor) -> Tensor:
        """Return all heads for this process's tokens."""
        return y_BHQE


class ReportingSequence(Sequence):
    """Replaces `Sequence` in measurements: passes the attention weights to a function."""

    def __init__(self, report: Callable[[Tensor], None]) -> None:
        self._report = report

    def attend(self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, scoring: Scoring) -> Tensor:
        self._report(attention_weights(q_BHQD, k_BGKD, scoring))
        return eager(q_BHQD, k_BGKD, v_BGKE, scoring)


class GroupedAttention(nn.Module):
    """Grouped-query attention with one fused projection: queries, then keys, then values.

    Only `placed` layers use positions and biases. Only `valued` layers add value embeddings."""

    def __init__(
        self, model: Model, cfg: GQA, *, windowed: bool, placed: bool, valued: bool
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.windowed = windowed
        self.placed = placed
        self.eps = model.norm.eps
        self.scale = model.score_scale
        self.sequence = Sequence()
        fused = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
        self.qkv = nn.Linear(model.width, fused, bias=cfg.bias)
        self.out = nn.Linear(cfg.heads * cfg.head_dim, model.width, bias=cfg.out_bias)
        self.q_norm = make_norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None
        gate = nn.Linear(model.value_gate_inputs, cfg.kv_heads, bias=False) if valued else None
        self.value_gate = gate

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        mask, bias, table = context.at(self.windowed, self.placed)
        qkv_BSAD = self.qkv(x_BSW).unflatten(-1, (-1, self.cfg.head_dim))
        q_BSHD, k_BSGD, v_BSGD = self._norm_and_rotate(qkv_BSAD, table)
        if self.value_gate is not None and context.values_BSGD is not None:
            # The gate is 0 to 3 per head, and 1.5 initially, as in nanochat.
            gate_BSG = 3 * torch.sigmoid(self.value_gate(x_BSW[..., : self.value_gate.in_features]))
            v_BSGD = v_BSGD + gate_BSG.unsqueeze(-1) * context.values_BSGD
        if cache is not None:
            k_BSGD, v_BSGD = cache.append(k_BSGD, v_BSGD)
        # Heads before tokens. These are views, which every attention kernel accepts.
        q_BHSD, k_BGSD, v_BGSD = (t.transpose(1, 2) for t in (q_BSHD, k_BSGD, v_BSGD))
        scoring = Scoring(self.scale, self.cfg.softcap, mask, bias, self.sinks)
        y_BHSD = self.sequence.attend(q_BHSD, k_BGSD, v_BGSD, scoring)
        out: Tensor = self.out(y_BHSD.transpose(1, 2).flatten(2))
        return out

    def _norm_and_rotate(
        self, qkv_BSAD: Tensor, table: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized and rotated queries and keys, and unchanged values."""
        c = self.cfg
        q_norm, k_norm = self.q_norm, self.k_norm
        # Triton's blocks have sizes that are powers of two.
        power_of_two = c.head_dim & (c.head_dim - 1) == 0
        if qkv_BSAD.is_cuda and power_of_two and not isinstance(q_norm, LayerNorm):
            # Triton exists only where torch was built for a GPU.
            from pipeline.model.rotary_kernel import norm_and_rotate

            gains = None
            if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
                gains = (q_norm.gain, k_norm.gain)
            return norm_and_rotate(qkv_BSAD, c.heads, gains, self.eps, table)
        qk_BSAD, v_BSGD = qkv_BSAD.tensor_split((c.heads + c.kv_heads,), dim=2)
        # Decoding on a CPU is mostly overhead, so it normalizes queries and keys in one call.
        generating = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        if generating and isinstance(q_norm, RMSNorm):
            qk_BSAD = rms_norm(qk_BSAD, None, self.eps)
            q_gain = q_norm.gain
            k_gain = cast(RMSNorm, k_norm).gain
            if q_gain is not None and k_gain is not None:
                qk_BSAD[:, :, : c.heads].mul_(q_gain)
                qk_BSAD[:, :, c.heads :].mul_(k_gain)
        elif not isinstance(q_norm, nn.Identity):
            q_BSHD, k_BSGD = qk_BSAD.tensor_split((c.heads,), dim=2)
            qk_BSAD = torch.cat((q_norm(q_BSHD), k_norm(k_BSGD)), dim=2)
        qk_BSAD = rotate(qk_BSAD, table)
        return qk_BSAD[:, :, : c.heads], qk_BSAD[:, :, c.heads :], v_BSGD


class LatentAttention(nn.Module):
    """MLA (arXiv 2405.04434): keys and values are projected from a latent of rank R, and all heads
    share one rotated part of the key. Decoding caches only the latent and that part. It computes no
    keys and values: it multiplies the queries and the output by their projections instead."""

    def __init__(self, model: Model, cfg: MLA, *, windowed: bool, placed: bool) -> None:
        super().__init__()
        self.cfg = cfg
        self.windowed = windowed
        self.placed = placed
        self.scale = model.score_scale
        self.sequence = Sequence()
        width = model.width
        rank = cfg.q_rank
        self.q_down = nn.Identity() if rank is None else nn.Linear(width, rank, bias=False)
        self.q_norm = nn.Identity() if rank is None else make_norm(rank, model.norm)
        self.q_up = nn.Linear(rank or width, cfg.heads * cfg.score_dim, bias=False)
        self.kv_down = nn.Linear(width, cfg.kv_rank + cfg.rope_dim, bias=False)
        self.kv_norm = make_norm(cfg.kv_rank, model.norm)
        # For each head: the key, then the value.
        self.kv_up = nn.Linear(cfg.kv_rank, cfg.heads * (cfg.nope_dim + cfg.v_dim), bias=False)
        self.out = nn.Linear(cfg.heads * cfg.v_dim, width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        c = self.cfg
        mask, bias, table = context.at(self.windowed, self.placed)
        scoring = Scoring(self.scale, c.softcap, mask, bias, self.sinks)
        q_BSHD = self.q_up(self.q_norm(self.q_down(x_BSW))).unflatten(-1, (c.heads, c.score_dim))
        q_nope, q_rope = q_BSHD.split((c.nope_dim, c.rope_dim), dim=-1)
        latent_BSR, k_rope = self.kv_down(x_BSW).split((c.kv_rank, c.rope_dim), dim=-1)
        latent_BSR = self.kv_norm(latent_BSR)
        q_rope = rotate(q_rope, table)
        k_rope = rotate(k_rope.unsqueeze(2), table)
        if cache is None:
            # Training: make the keys and values of every head, for the fast kernels.
            kv_BSHE = self.kv_up(latent_BSR).unflatten(-1, (c.heads, c.nope_dim + c.v_dim))
            k_nope, v_BSHE = kv_BSHE.split((c.nope_dim, c.v_dim), dim=-1)
            # All heads share the rotated part of the key.
            k_BSHD = torch.cat((k_nope, k_rope.expand(-1, -1, c.heads, -1)), dim=-1)
            q_BSHD = torch.cat((q_nope, q_rope), dim=-1)
            q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BSHD, v_BSHE))
            y_BHSE = self.sequence.attend(q, k, v, scoring)
        else:
            # Decoding: the cache has kv_rank + rope_dim numbers per token for all heads together.
            latent_BKR, k_rope = cache.append(latent_BSR, k_rope.squeeze(2))
            up_HER = self.kv_up.weight.view(c.heads, c.nope_dim + c.v_dim, c.kv_rank)
            key_HDR, value_HER = torch.split(up_HER, [c.nope_dim, c.v_dim], dim=1)
            # Project the queries into the latent space instead of the keys and values out of it.
            q_BHSR = torch.einsum("bshd,hdr->bhsr", q_nope, key_HDR)
            q = torch.cat((q_BHSR, q_rope.transpose(1, 2)), dim=-1)
            k = torch.cat((latent_BKR, k_rope), dim=-1).unsqueeze(1)  # one key for all heads
            y_BHSR = attend(q, k, latent_BKR.unsqueeze(1), scoring)
            y_BHSE = torch.einsum("bhsr,her->bhse", y_BHSR, value_HER)
        out: Tensor = self.out(y_BHSE.transpose(1, 2).flatten(2))
        return out


class CrossAttention(nn.Module):
    """Attention of the decoder to the encoder's output, E tokens. There are no positions, windows
    or biases, because positions of the two sequences do not correspond."""

    def __init__(self, model: Model, cfg: GQA) -> None:
        super().__init__()
        self.cfg = cfg
        self.scale = model.score_scale
        self.sequence = Sequence()
        width = cfg.heads * cfg.head_dim
        self.q = nn.Linear(model.width, width, bias=cfg.bias)
        self.kv = nn.Linear(model.width, 2 * cfg.kv_heads * cfg.head_dim, bias=cfg.bias)
        self.out = nn.Linear(width, model.width, bias=cfg.out_bias)
        self.q_norm = make_norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        q_BSHD = self.q_norm(self.q(x_BSW).unflatten(-1, (-1, self.cfg.head_dim)))
        # Keys and values depend on the source only, so decoding computes them once.
        kept = () if cache is None else cache.source
        if not kept:
            kept = self._keys_and_values(context)
            if cache is not None:
                cache.source = kept
        q_BHSD, k_BGED, v_BGED = (t.transpose(1, 2) for t in (q_BSHD, *kept))
        scoring = Scoring(self.scale, self.cfg.softcap, context.cross, None, self.sinks)
        y_BHSD = self.sequence.attend(q_BHSD, k_BGED, v_BGED, scoring)
        out: Tensor = self.out(y_BHSD.transpose(1, 2).flatten(2))
        return out

    def _keys_and_values(self, context: Context) -> tuple[Tensor, Tensor]:
        assert context.source_BEW is not None, "the forward pass of an encoder–decoder has a source"
        kv = self.kv(context.source_BEW).unflatten(-1, (2, -1, self.cfg.head_dim))
        k_BEGD, v_BEGD = kv.unbind(2)
        return self.k_norm(k_BEGD), v_BEGD
