"""Transfers of a tensor between stages: the boxes (ranges of dims) that each source rank sends to each target rank."""

import itertools
import math

import msgspec

from meshwright.errors import PlanError
from meshwright.ir.placement import Partial, Placements, Shard, local_shape

Box = tuple[tuple[int, int], ...]
"""(start, stop) on every dim of a local tensor."""

_Runs = tuple[tuple[int, int], ...]
"""The ranges (start, stop) of a dim that a rank holds, ascending; its local tensor joins them."""

_Region = tuple[_Runs, ...]
"""The part of a tensor that a rank holds: the runs of every dim, in all combinations."""


class TransferBox(msgspec.Struct, frozen=True):
    """One box of a transfer: ``source_box`` of rank ``source`` of the source mesh becomes ``target_box`` of rank
    ``target`` of the target mesh. Both boxes have the same shape."""

    source: int
    target: int
    source_box: Box
    target_box: Box


class Gather(msgspec.Struct, frozen=True):
    """A gather in which target ranks that need the same part complete it, after each has received its pieces.

    ``boxes`` holds, for each of ``ranks``, the box of the part that the rank received, or None. The boxes are equal
    chunks of a dim, in the order of the ranks. If the number of ranks divides no dim, the first rank receives the whole
    part, and the boxes of the other ranks are None.
    """

    ranks: tuple[int, ...]
    boxes: tuple[Box | None, ...]


class TransferPlan(msgspec.Struct, frozen=True):
    """All pieces of one tensor's transfer, and the gathers that the target ranks then run.

    Pieces are ordered by target, source and place in the target's part. So the two ranks of a pair have their messages
    in the same order.
    """

    pieces: tuple[TransferBox, ...]
    gathers: tuple[Gather, ...]


def transfer(
    shape: tuple[int, ...],
    source: Placements,
    source_sizes: dict[str, int],
    target: Placements,
    target_sizes: dict[str, int],
    receivers: tuple[int, ...] = (),
) -> TransferPlan:
    """The transfer of a tensor of global ``shape`` between two submeshes, from placements ``source`` to ``target``.

    ``source_sizes`` and ``target_sizes`` map the axes of the submeshes to their sizes, outermost first. Neighbouring
    ranks differ on the last axis. A placement on an axis of size 1, or on an axis without a size, is ignored.

    Target ranks that need the same part, and receive together, each receive a chunk of the part and complete it by a
    Gather. ``receivers`` are the sizes of the groups of neighbouring target ranks that receive together; empty: all of
    them do. Rank 0 sends an element that ranks 0 to 3 of the target need:

        receivers ()            once, and 4 ranks gather
                  (2, 2)        twice, and 2 ranks gather: once per box of 2 ranks
                  (1, 1, 1, 1)  4 times, without a gather

    The second form is the local all-gather of Zhuang et al. 2023, On Optimizing the Communication of Model Parallelism.
    If several source ranks hold a part, the rank that has the fewest elements to send so far sends it; among equal
    ranks, the lowest.

    Raises:
        PlanError: a placement is Partial, names a dim that the tensor does not have, or does not cut evenly; or
            ``receivers`` are not all target ranks.
    """
    source = _cutting(shape, source, source_sizes, "source")
    target = _cutting(shape, target, target_sizes, "target")
    senders = _holders(_regions(shape, source, source_sizes, "source"))
    wanted = _regions(shape, target, target_sizes, "target")
    group_of = _groups(receivers or (len(wanted),), len(wanted))
    if not math.prod(shape):
        return TransferPlan((), ())

    part = local_shape(shape, target, target_sizes)
    arriving: dict[int, Box | None] = dict.fromkeys(range(len(wanted)), tuple((0, size) for size in part))
    together = [
        [rank for rank in ranks if group_of[rank] == group]
        for _, ranks in _holders(wanted)
        for group in dict.fromkeys(group_of[rank] for rank in ranks)
    ]
    gathers = [_gather(ranks, part) for ranks in together if len(ranks) > 1]
    for gather in gathers:
        arriving.update(zip(gather.ranks, gather.boxes, strict=True))

    pieces: list[TransferBox] = []
    sent = [0] * math.prod(source_sizes.values())
    for rank, box in arriving.items():
        if box is None:
            continue
        incoming: list[TransferBox] = []
        for region, ranks in senders:
            common = _common(region, wanted[rank], box)
            if not common:
                continue
            sender = min(ranks, key=lambda rank: (sent[rank], rank))
            for source_box, target_box in common:
                incoming.append(TransferBox(sender, rank, source_box, target_box))
                sent[sender] += math.prod(stop - start for start, stop in source_box)
        pieces += sorted(incoming, key=lambda piece: (piece.source, piece.target_box))
    return TransferPlan(tuple(pieces), tuple(gathers))


def _cutting(shape: tuple[int, ...], placements: Placements, sizes: dict[str, int], side: str) -> Placements:
    """The placements that cut the tensor, in the order of the axes."""
    result: Placements = {}
    for axis, size in sizes.items():
        placement = placements.get(axis)
        if size == 1 or placement is None:
            continue
        if isinstance(placement, Partial):
            raise PlanError(
                f"a tensor that is {placement} on axis {axis!r} cannot cross to another stage",
                where=f"{side} placement",
                remedy="reduce it first: place it as Shard or Replicate",
            )
        if isinstance(placement, Shard):
            if not 0 <= placement.dim < len(shape):
                raise PlanError(
                    f"{placement} on axis {axis!r} names a dim that a tensor of shape {shape} does not have",
                    where=f"{side} placement",
                    remedy=f"shard one of its {len(shape)} dims, counted from 0",
                )
            result[axis] = placement
    return result


def _regions(shape: tuple[int, ...], placements: Placements, sizes: dict[str, int], side: str) -> list[_Region]:
    """The regions that the ranks hold, in the order of the ranks."""
    result = []
    for coordinates in itertools.product(*(range(size) for size in sizes.values())):
        at = dict(zip(sizes, coordinates, strict=True))
        region: list[_Runs] = []
        for dim, size in enumerate(shape):
            runs: _Runs = ((0, size),)
            done: list[tuple[Shard, int]] = []
            for axis, placement in placements.items():
                if not isinstance(placement, Shard) or placement.dim != dim:
                    continue
                local, blocks = sum(stop - start for start, stop in runs), placement.outer
                even = True
                for other, parts in done:
                    # An earlier axis that cuts larger blocks has left this rank fewer of this axis's blocks.
                    if other.outer < placement.outer:
                        even = even and blocks % parts == 0
                        blocks //= parts
                if not even or local % (blocks * sizes[axis]):
                    raise PlanError(
                        f"{placement} does not cut dim {dim} of shape {shape} evenly in {sizes[axis]} on axis {axis!r}",
                        where=f"{side} placement",
                        remedy="choose sizes that divide the dim and its blocks",
                    )
                runs = _cut(runs, local // blocks, local // blocks // sizes[axis], at[axis])
                done.append((placement, sizes[axis]))
            region.append(runs)
        result.append(tuple(region))
    return result


def _groups(receivers: tuple[int, ...], num_ranks: int) -> list[int]:
    """The number of the group in which each target rank receives."""
    if min(receivers) < 1 or sum(receivers) != num_ranks:
        raise PlanError(
            f"groups of {' + '.join(map(str, receivers))} ranks receive, the stage has {num_ranks}",
            where="receivers",
            remedy="give sizes of 1 or more that sum up to the ranks of the stage",
        )
    return [group for group, size in enumerate(receivers) for _ in range(size)]


def _holders(regions: list[_Region]) -> list[tuple[_Region, list[int]]]:
    """The distinct regions, each with the ranks that hold it, ordered by first rank."""
    holders: dict[_Region, list[int]] = {}
    for rank, region in enumerate(regions):
        holders.setdefault(region, []).append(rank)
    return list(holders.items())


def _gather(ranks: list[int], shape: tuple[int, ...]) -> Gather:
    """The Gather of a part with this ``shape``. Its chunks divide the first dim that the number of ranks divides."""
    whole = tuple((0, size) for size in shape)
    for dim, size in enumerate(shape):
        if size % len(ranks) == 0:
            step = size // len(ranks)
            chunks = [(index * step, (index + 1) * step) for index in range(len(ranks))]
            return Gather(tuple(ranks), tuple((*whole[:dim], chunk, *whole[dim + 1 :]) for chunk in chunks))
    return Gather(tuple(ranks), (whole, *(None for _ in ranks[1:])))


def _cut(runs: _Runs, block: int, part: int, index: int) -> _Runs:
    """The runs of part ``index`` of every block, if blocks of ``block`` local positions are cut into parts of
    ``part``."""
    result: list[tuple[int, int]] = []
    at = 0
    for first, last in runs:
        stop = at + last - first
        for begin in range(at // block * block + index * part, stop, block) if part else ():
            low, high = max(begin, at), min(begin + part, stop)
            if low < high:
                result.append((first + low - at, first + high - at))
        at = stop
    return tuple(result)


def _common(source: _Region, target: _Region, box: Box) -> list[tuple[Box, Box]]:
    """The overlap of a source part and a box of a target part, as the fewest pairs of boxes, in row-major order."""
    dims = [_overlaps(*dim) for dim in zip(source, target, box, strict=True)]
    return [
        (
            tuple((start, start + length) for start, _, length in combination),
            tuple((start, start + length) for _, start, length in combination),
        )
        for combination in itertools.product(*dims)
    ]


def _overlaps(source: _Runs, target: _Runs, window: tuple[int, int]) -> list[tuple[int, int, int]]:
    """The runs that both parts hold of a dim, in a window of target positions: (source position, target position,
    length)."""
    result: list[tuple[int, int, int]] = []
    source_run = target_run = here = there = 0  # indices of the current runs, and the local positions where they start
    while source_run < len(source) and target_run < len(target):
        (first, last), (begin, end) = source[source_run], target[target_run]
        low = max(first, begin, begin + window[0] - there)
        high = min(last, end, begin + window[1] - there)
        if low < high:
            position, place, length = here + low - first, there + low - begin, high - low
            if result and result[-1][0] + result[-1][2] == position and result[-1][1] + result[-1][2] == place:
                position, place, length = result[-1][0], result[-1][1], result[-1][2] + length
                result.pop()
            result.append((position, place, length))
        if last <= end:
            here, source_run = here + last - first, source_run + 1
        if end <= last:
            there, target_run = there + end - begin, target_run + 1
    return result
