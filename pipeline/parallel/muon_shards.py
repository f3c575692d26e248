"""Plan and run Muon's exchange of updates in any layout. One rank, the owner of a matrix,
orthogonalizes it.

At ZeRO-1 and 2 most matrices are complete on one rank, which owns them, and only the few that are
cut are sent. At ZeRO-3 every rank has a part of each matrix, and without ZeRO a copy of it; in both
cases owners are chosen to balance FLOPs. The owner of an expert is one of the ranks that have it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.optim.matrices import MatrixLayout
from pipeline.optim.muon import MAX_ELEMENTS, Bucket, Muon, Owned, Segment, pack
from pipeline.parallel.fragments import Piece
from pipeline.parallel.world import World

Places = list[tuple[int, int]]  # where segments of updates begin, and their lengths


class _Held(NamedTuple):
    """Consecutive elements of one matrix that a rank has."""

    key: str
    offset: int  # of the first element in the matrix
    numel: int
    place: int  # of the first element's update among the rank's updates
    whole: int  # number of elements of the matrix
    flops: int  # to orthogonalize the matrix


def bind(optimizer: torch.optim.Optimizer, pieces: Iterable[Piece], world: World) -> None:
    """Give Muon its masters; other optimizers have them already. Every rank must call this."""
    if not isinstance(optimizer, Muon):
        return
    mine = [piece for piece in pieces if piece.name in optimizer.matrices]
    stepped = [
        master
        for group in optimizer.param_groups
        if group.get("matrices")
        for master in group["params"]
    ]
    # A flat master is stepped alone; those with a parameter's shape are stepped together. A rank
    # takes part in the exchange of a master even if its whole part is padding.
    masters: dict[int, dict[int, Tensor]] = {}
    for master in [*stepped, *(piece.master for piece in mine)]:
        masters.setdefault(_bucket(master), {})[id(master)] = master
    buckets = []
    for number, group in masters.items():
        inside = [piece for piece in mine if _bucket(piece.master) == number]
        buckets.append(_plan(optimizer.matrices, list(group.values()), inside, world))
    optimizer.bind(buckets)


def _bucket(master: Tensor) -> int:
    """Return the number of a master's bucket: its own if it is flat."""
    return id(master) if master.ndim == 1 else 0


def _plan(
    matrices: dict[str, MatrixLayout], masters: list[Tensor], pieces: list[Piece], world: World
) -> Bucket:
    """Plan the step of some masters: their segments, and the matrices that this rank owns."""
    starts = {}
    numel = 0
    for master in masters:
        starts[id(master)] = numel
        numel += master.numel()
    segments: list[Segment] = []
    held: list[_Held] = []
    for piece in sorted(pieces, key=lambda piece: starts[id(piece.master)] + piece.start):
        if piece.numel:
            _add_segments(segments, piece, matrices[piece.name], starts[id(piece.master)])
            held += _split(piece, matrices[piece.name], starts[id(piece.master)])
    by_rank = world.gather(held)
    exchange = _Exchange(world, numel)
    exchange.plan(by_rank, _choose_owners(by_rank))
    by_key = {key: each for each in matrices.values() for key in each.keys}
    owned = [Owned(key, by_key[key], places) for key, places in exchange.owned().items()]
    return Bucket(
        masters, pack(segments), owned, exchange.numel, exchange.to_owners, exchange.to_holders
    )


def _add_segments(
    segments: list[Segment], piece: Piece, matrices: MatrixLayout, start: int
) -> None:
    """Cut a piece where the learning rate changes; extend the last segment if it continues it."""
    lengths = matrices.ratios() * len(matrices.keys)
    end = 0
    for length, ratio in lengths:
        begin = end
        end += length
        low = max(begin, piece.offset)
        high = min(end, piece.offset + piece.numel)
        while low < high:
            at = piece.start + low - piece.offset
            last = segments[-1] if segments else None
            if (
                last is None
                or (last.master is not piece.master or last.stop != at or last.ratio != ratio)
                or last.stop - last.start == MAX_ELEMENTS
            ):
                last = Segment(piece.master, at, at, start + at, ratio)
                segments.append(last)
            cut = min(high, low + MAX_ELEMENTS - (last.stop - last.start))
            segments[-1] = last._replace(stop=at + cut - low)
            low = cut


def _split(piece: Piece, matrices: MatrixLayout, start: int) -> list[_Held]:
    """Cut a piece where one matrix ends and the next expert's begins."""
    size = matrices.numel
    end = piece.offset + piece.numel
    held = []
    for index in range(piece.offset // size, -(-end // size)):
        low = max(piece.offset, index * size)
        numel = min(end, (index + 1) * size) - low
        place = start + piece.start + low - piece.offset
        key = matrices.keys[index]
        held.append(_Held(key, low - index * size, numel, place, size, matrices.flops))
    return held


def _choose_owners(by_rank: Sequence[Sequence[_Held]]) -> dict[str, int]:
    """Return the owner of every matrix: the rank with the least work so far among those that have
    at least half as much of the matrix as any other rank. Every rank gets the same result."""
    holders: dict[str, list[tuple[int, _Held]]] = {}
    for rank, held in enumerate(by_rank):
        for each in held:
            holders.setdefault(each.key, []).append((rank, each))
    possible = {}
    flops = {}
    for key, having in holders.items():
        most = max(each.numel for _, each in having)
        possible[key] = [rank for rank, each in having if 2 * each.numel >= most]
        flops[key] = having[0][1].flops
    work = [0] * len(by_rank)
    owners = {}
    # Matrices without a choice come first, so that the others can even out the work.
    for key in sorted(possible, key=lambda key: (len(possible[key]), -flops[key], key)):
        owner = min(possible[key], key=lambda rank: (work[rank], rank))
        work[owner] += flops[key]
        owners[key] = owner
    return owners


class _Exchange:
    """The two collectives of a step, and where this rank keeps the updates that arrive."""

    def __init__(self, world: World, numel: int) -> None:
        self._rank = world.rank
        self.numel = numel  # number of this rank's updates; `plan` adds those that arrive
        self.to_owners = _Collective(world.size)
        self.to_holders = _Collective(world.size)
        self._found: dict[str, list[tuple[int, int, int]]] = {}  # offset, place, numel by matrix

    def plan(self, by_rank: Sequence[Sequence[_Held]], owners: dict[str, int]) -> None:
        """Plan all transfers, given the segments of every rank and the owners of matrices."""
        at_owner = {
            each.key: each
            for rank, theirs in enumerate(by_rank)
            for each in theirs
            if owners[each.key] == rank
        }
        # By rank and then by key, on every rank, so that sender and receiver use the same order.
        for rank, theirs in enumerate(by_rank):
            for each in sorted(theirs):
                owner = owners[each.key]
                own = at_owner[each.key]
                if rank != owner:
                    self._send(each, rank, owner, own)
                elif owner == self._rank:
                    self._keep(each, each.place)

    def _send(self, each: _Held, rank: int, owner: int, own: _Held) -> None:
        """Plan the transfer of one segment to its owner, and of the result to its holder."""
        copied = own.numel == own.whole  # the owner has these elements, too
        self.to_owners.used |= not copied
        self.to_holders.used = True
        if owner == self._rank:
            place = own.place + each.offset if copied else self.numel
            self.to_holders.outgoing[rank].append((place, each.numel))
            if not copied:
                self.to_owners.incoming[rank].append((place, each.numel))
                self._keep(each, place)
                self.numel += each.numel
        elif rank == self._rank:
            self.to_holders.incoming[owner].append((each.place, each.numel))
            if not copied:
                self.to_owners.outgoing[owner].append((each.place, each.numel))

    def _keep(self, each: _Held, place: int) -> None:
        """Note where this rank finds a segment of a matrix that it owns."""
        self._found.setdefault(each.key, []).append((each.offset, place, each.numel))

    def owned(self) -> dict[str, list[slice]]:
        """Return where this rank finds the elements of each of its matrices, in order."""
        return {
            key: [slice(place, place + numel) for _, place, numel in sorted(segments)]
            for key, segments in sorted(self._found.items())
        }


class _Collective:
    """Segments of updates that this rank sends to every rank, and places for those that arrive."""

    def __init__(self, ranks: int) -> None:
        self.outgoing: list[Places] = [[] for _ in range(ranks)]
        self.incoming: list[Places] = [[] for _ in range(ranks)]
        self.used = False  # whether any rank sends: then every rank has to take part

    def __call__(self, updates: Tensor) -> None:
        if not self.used:
            return
        sent_views = [updates[place:][:numel] for place, numel in _join(self.outgoing)]
        arrived_views = [updates[place:][:numel] for place, numel in _join(self.incoming)]
        sent = sent_views[0] if len(sent_views) == 1 else torch.cat([updates[:0], *sent_views])
        in_place = len(arrived_views) == 1
        sizes = [sum(numel for _, numel in places) for places in self.incoming]
        arrived = arrived_views[0] if in_place else updates.new_empty(sum(sizes))
        given = [sum(numel for _, numel in places) for places in self.outgoing]
        # With sizes as Python integers nothing waits for the device.
        dist.all_to_all_single(arrived, sent, sizes, given)
        if arrived_views and not in_place:
            parts = torch.split(arrived, [len(view) for view in arrived_views])
            torch._foreach_copy_(arrived_views, parts)


def _join(ranks: list[Places]) -> Places:
    """Join segments that follow each other."""
    joined: Places = []
    for place, numel in (segment for places in ranks for segment in places):
        if joined and sum(joined[-1]) == place:
            joined[-1] = (joined[-1][0], joined[-1][1] + numel)
        else:
            joined.append((place, numel))
    return joined
