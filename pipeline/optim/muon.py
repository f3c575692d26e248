"""The optimizers: torch's fused AdamW, and Muon, which orthogonalizes the momentum of matrices.

Muon (torch.optim.Muon, arXiv 2502.16982) steps the matrices of the blocks, and AdamW all other
parameters. The masters of a rank may be any segments of the matrices' elements, so a step is:

1. update the momentum of the segments that this rank has;
2. send each matrix's update to the one rank that owns the matrix (parallel/muon_shards.py);
3. the owner splits fused projections and orthogonalizes every part, equal shapes in one batch;
4. send the results back;
5. decay and update the weights of this rank.

Updates travel in bf16. That loses nothing, because orthogonalization starts with a cast to bf16.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.config import optimizer as settings
from pipeline.optim.matrices import MatrixLayout

MOMENTUM = "momentum_buffer"  # as in torch.optim.Muon
VARIANCE = "row_variance"
# As in torch.optim.Muon, from Keller Jordan's post: https://kellerjordan.github.io/posts/muon/
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_VARIANCE_BETA = 0.95
# Temporary tensors have at most this many elements: matrices in one batch, weights in one update.
MAX_ELEMENTS = 2**26
# Segments shorter than this are concatenated up to this length. A small model has many of them, and
# a GPU would finish the kernels for each one faster than the host can launch them.
_PACKED = 2**24

# At the first call of these methods, torch imports its compiler only to mark them as not to be
# compiled. The import takes a tenth of a process's start. Setting the mark here avoids it.
for _method in (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
):
    _method.__wrapped__.__dynamo_disable = _method.__wrapped__  # type: ignore[union-attr]


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrapper around its step, which imports the compiler."""

    step = torch.no_grad()(torch.optim.AdamW.step.__wrapped__)  # type: ignore[attr-defined]


# --- the parts of matrices on a rank


class Segment(NamedTuple):
    """Consecutive elements of a master that have one rate."""

    master: Tensor
    start: int  # in the flattened master, as `stop`
    stop: int
    place: int  # of the first element's update among the bucket's updates
    ratio: float  # factor of the rate

    def of(self, tensor: Tensor) -> Tensor:
        """Return the segment's elements of a tensor with the master's shape."""
        return tensor.view(-1)[self.start : self.stop]

    def among(self, updates: Tensor) -> Tensor:
        """Return the segment's updates."""
        return updates[self.place :][: self.stop - self.start]


@dataclass(slots=True)
class Owned:
    """A matrix that this rank orthogonalizes, whichever ranks have its elements."""

    key: str
    layout: MatrixLayout
    places: list[slice]  # of the matrix's elements among the updates, in order
    variance: Tensor | None = None  # running mean square of each row

    def among(self, updates: Tensor) -> list[Tensor]:
        """Return the pieces of the matrix's update."""
        return [updates[place] for place in self.places]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Masters that are stepped together: all masters, or the flat master of one ZeRO group."""

    masters: list[Tensor]
    packs: list[list[Segment]]
    owned: list[Owned]
    numel: int  # number of updates: those of the masters, then those that other ranks sent
    to_owners: Callable[[Tensor], None]  # sends updates to their owners
    to_holders: Callable[[Tensor], None]  # sends results to the ranks that have the weights


def pack(segments: list[Segment]) -> list[list[Segment]]:
    """Group segments that have the same rate and are short enough to be concatenated."""
    packs: list[list[Segment]] = []
    left = 0
    rate = math.nan
    for segment in sorted(segments, key=lambda segment: segment.ratio):
        if segment.ratio != rate or segment.stop - segment.start > left:
            packs.append([])
            left = _PACKED
        packs[-1].append(segment)
        left -= segment.stop - segment.start
        rate = segment.ratio
    return packs


class Muon(AdamW):
    """Muon for the groups marked `matrices`, AdamW for all others."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: dict[str, MatrixLayout],
        cfg: settings.Muon,
        lr: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
        self.matrices = matrices
        self.cfg = cfg
        self.buckets: list[Bucket] = []

    def bind(self, buckets: list[Bucket]) -> None:
        """Set the masters that this rank steps. Before this call, steps change no matrix."""
        self.buckets = buckets
        self._bucket_of = {id(master): b for b in buckets for master in b.masters}
        for owned in self.owned():
            if self.cfg.normalize and owned.variance is None:
                device = buckets[0].masters[0].device
                owned.variance = torch.zeros(owned.layout.rows, device=device)

    def owned(self) -> Iterator[Owned]:
        for bucket in self.buckets:
            yield from bucket.owned

    def create_state(self, master: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state[MOMENTUM] = torch.zeros_like(master, requires_grad=False)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("matrices")]
        _step_adamw(self)
        self.param_groups = groups
        # A ZeRO engine calls `step` once per group or flat master; other engines call it once.
        due: dict[int, tuple[Bucket, dict[str, Any]]] = {}
        for group in groups:
            for master in group["params"] if group.get("matrices") else ():
                if master.grad is not None and self.buckets:
                    bucket = self._bucket_of[id(master)]
                    due.setdefault(id(bucket), (bucket, group))
        for bucket, group in due.values():
            self._step_bucket(bucket, group["lr"], group["weight_decay"])

    def _step_bucket(self, bucket: Bucket, lr: float, decay: float) -> None:
        skip: Tensor | None = getattr(self, "found_inf", None)
        apply = None if skip is None else skip == 0
        device = bucket.masters[0].device
        updates = torch.empty(bucket.numel, dtype=torch.bfloat16, device=device)
        steps = [self.create_state(master)["step"] for master in bucket.masters]
        # A list of tensors, because torch would wait for the device to read a single tensor.
        applied = torch.ones_like(steps[0]) if apply is None else apply.to(steps[0])
        torch._foreach_add_(steps, [applied] * len(steps))
        for segments in bucket.packs:
            momenta = [segment.of(self.state[segment.master][MOMENTUM]) for segment in segments]
            momentum = _concatenate(momenta)
            gradient = _concatenate([segment.of(_gradient(segment.master)) for segment in segments])
            if apply is not None:
                # In a skipped step, gradients may be NaN. This replacement keeps the momentum.
                gradient = torch.where(apply, gradient, momentum)
            momentum.lerp_(gradient, 1 - self.cfg.momentum)
            _distribute(momentum, momenta)
            # Nesterov's momentum.
            update = gradient.lerp(momentum, self.cfg.momentum).to(updates.dtype)
            _distribute(update, [segment.among(updates) for segment in segments])
        bucket.to_owners(updates)
        self._orthogonalize(bucket.owned, updates, apply)
        bucket.to_holders(updates)
        for segments in bucket.packs:
            masters = [segment.of(segment.master) for segment in segments]
            weights = _concatenate(masters)
            update = _concatenate([segment.among(updates) for segment in segments])
            # Cautious Muon decays only the weights that the update shrinks, too.
            decays = weights * update >= 0 if self.cfg.cautious else 1
            changed = weights * (1 - lr * decay * decays)
            changed.add_(update, alpha=-lr * segments[0].ratio)
            if apply is not None:
                torch.where(apply, changed, weights, out=changed)
            _distribute(changed, masters)

    def _orthogonalize(self, owned: list[Owned], updates: Tensor, apply: Tensor | None) -> None:
        """Orthogonalize the owned matrices among the updates, parts of equal shape in one batch."""
        collected = [(matrix, _concatenate(matrix.among(updates))) for matrix in owned]
        batches: dict[tuple[int, int], list[tuple[Tensor, Tensor | None]]] = {}
        for matrix, elements in collected:
            oriented = matrix.layout.oriented(elements)
            for part in matrix.layout.parts:
                view = part.of(oriented)
                variance = None if matrix.variance is None else part.of(matrix.variance)
                shape = (view.shape[0] * view.shape[1], view.shape[2])
                batches.setdefault(shape, []).append((view, variance))
        for (rows, columns), views in batches.items():
            count = max(1, MAX_ELEMENTS // (rows * columns))
            for first in range(0, len(views), count):
                _orthogonalize_batch(views[first : first + count], apply)
        for matrix, elements in collected:
            _distribute(elements, matrix.among(updates))


# Bound here, before torch adds hooks to AdamW.step. Muon.step calls the hooks itself.
_step_adamw: Callable[[AdamW], None] = AdamW.step


def _gradient(master: Tensor) -> Tensor:
    assert master.grad is not None, "a matrix has no gradient"
    return master.grad


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors; return a single one itself."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _distribute(elements: Tensor, parts: list[Tensor]) -> None:
    """Copy concatenated elements to their parts, unless they are the single part itself."""
    if elements.data_ptr() != parts[0].data_ptr():
        torch._foreach_copy_(parts, torch.split(elements, [len(part) for part in parts]))


def _orthogonalize_batch(views: list[tuple[Tensor, Tensor | None]], apply: Tensor | None) -> None:
    """Replace matrices of one shape by their orthogonalization, and update their row variances."""
    results = newton_schulz(torch.stack([view.flatten(0, 1) for view, _ in views]))
    variances = [variance for _, variance in views if variance is not None]
    if variances:
        old = torch.stack([variance.flatten() for variance in variances])
        results, new = normalize_rows(results, old)
        if apply is not None:
            new = torch.where(apply, new, old)
        shaped = [now.view_as(variance) for now, variance in zip(new, variances, strict=True)]
        torch._foreach_copy_(variances, shaped)
    targets = [view for view, _ in views]
    torch._foreach_copy_(
        targets, [done.view_as(view) for done, view in zip(results, targets, strict=True)]
    )


def newton_schulz(batch_BRC: Tensor) -> Tensor:
    """Orthogonalize matrices as torch.optim.Muon does, in bf16; the input may be overwritten."""
    if batch_BRC.is_cuda:
        return iterate(batch_BRC)
    # One by one on a CPU, results equal torch.optim.Muon with sums in fp32, bit for bit.
    return torch.stack([iterate(matrix) for matrix in batch_BRC])


def iterate(x: Tensor) -> Tensor:
    """Newton–Schulz iterations of one matrix or of a batch."""
    a, b, c = _COEFFICIENTS
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    # A CPU without bf16 units multiplies bf16 a hundred times slower than fp32. So it multiplies in
    # fp32, and each result is rounded to bf16: a GPU sums in fp32 and rounds, too.
    wide = x.dtype if x.is_cuda else torch.float32
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    # The spectral norm is now at most 1.
    x = x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)).to(wide)
    for _ in range(_ITERATIONS):
        gram = _rounded(x @ x.mT)
        polynomial = _rounded(add_product(gram, gram, gram, beta=b, alpha=c))
        x = _rounded(add_product(x, polynomial, x, beta=a))
    x = x.bfloat16()
    return x.mT if tall else x


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def normalize_rows(updates_BRC: Tensor, variance_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by their running RMS and keep each matrix's norm; return the new variance too.

    NorMuon (arXiv 2510.05491): orthogonalized updates still have rows of very different norms. A
    bias correction of the running mean would cancel out, since the norm is kept."""
    columns = updates_BRC.shape[2]
    square_BR = updates_BRC.float().square().mean(2)
    variance_BR = variance_BR.lerp(square_BR, 1 - _VARIANCE_BETA)
    factor_BR = variance_BR.clamp(min=1e-10).rsqrt()
    before_B1 = square_BR.sum(1, keepdim=True) * columns
    after_B1 = (square_BR * factor_BR.square()).sum(1, keepdim=True) * columns
    factor_BR = factor_BR * (before_B1 / after_B1.clamp(min=1e-20)).sqrt()
    return updates_BRC * factor_BR.unsqueeze(2).to(updates_BRC.dtype), variance_BR
