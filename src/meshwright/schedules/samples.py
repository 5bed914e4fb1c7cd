"""Samples of a data set: their division over ranks, who keeps which, and the misses of caches that see the future.

    order of an epoch ──batches──▶ [k, B] ──parts──▶ the samples of each rank in each batch
    uses of each sample by each rank ──place──▶ an owner for each sample, and the owner's memory or disk

The idea is that of NoPFS (Dryden et al. 2021, arXiv:2101.08734): the seed fixes the order, so every rank knows how
often each rank will use each sample, and all ranks agree on the placement without a message.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

NOBODY = -1
"""The owner of samples that no rank keeps."""
MEMORY, DISK = 0, 1
"""Where an owner keeps a sample."""
OWN_MEMORY, OWN_DISK, PEER, FILES = range(4)
CHUNK = 2**16
"""The number of samples that are sorted together, which bounds memory."""
CLASSES = ("own memory", "own disk", "memory or disk of another rank", "file system")
"""The classes of storage that a sample is fetched from, fastest first."""


class Room(NamedTuple):
    """The bytes that a rank has for samples in its memory and on its local disk."""

    memory_bytes: int
    disk_bytes: int = 0


@dataclass(frozen=True, eq=False)
class SamplePlacement:
    """The rank that keeps each sample (``NOBODY``: none), and where it keeps it (``MEMORY`` or ``DISK``)."""

    owner: NDArray[np.int16]
    level: NDArray[np.int8]


def expected_accesses(num_ranks: int, epochs: int, num_samples: int, delta: float) -> float:
    """The expected number of samples that a rank uses more than ``(1 + delta)`` times as often as the mean.

    In each epoch, a sample goes to a random rank. So a rank's uses of it are Binomial(epochs, 1 / num_ranks)
    (Dryden et al. 2021, section 3.1).
    """
    share = 1 / num_ranks
    least = math.ceil((1 + delta) * epochs * share - 1e-12)
    terms = (math.comb(epochs, k) * share**k * (1 - share) ** (epochs - k) for k in range(least, epochs + 1))
    return num_samples * math.fsum(terms)


# --- who uses what ---------------------------------------------------------------------------------------------------


def parts(batches: Indices, num_ranks: int, *, interleaved: bool = False) -> Indices:
    """The samples of each rank in each batch: ``batches`` [k, B] becomes [num_ranks, k, B / num_ranks].

    A rank takes a contiguous part of a batch, or every ``num_ranks``-th sample if ``interleaved`` (as torch's
    DistributedSampler deals them).
    """
    count, size = batches.shape
    if interleaved:
        return batches.reshape(count, size // num_ranks, num_ranks).transpose(2, 0, 1)
    return batches.reshape(count, num_ranks, size // num_ranks).transpose(1, 0, 2)


def cut(order: Indices, batch_size: int, *, drop_last: bool) -> Iterator[Indices]:
    """The batches of an order as arrays [k, B]: all whole batches together, then a smaller last one unless
    ``drop_last``."""
    whole = len(order) // batch_size * batch_size
    if whole:
        yield order[:whole].reshape(-1, batch_size)
    if whole < len(order) and not drop_last:
        yield order[whole:].reshape(1, -1)


def divided(
    order: Indices, batch_size: int, num_ranks: int, *, drop_last: bool, interleaved: bool = False
) -> list[Indices]:
    """The samples of each rank in an epoch, in the order of use."""
    pieces = [
        parts(batches, num_ranks, interleaved=interleaved).reshape(num_ranks, -1)
        for batches in cut(order, batch_size, drop_last=drop_last)
    ]
    return list(np.concatenate(pieces, axis=1)) if pieces else [order[:0]] * num_ranks


def count_uses(epochs: Iterable[Sequence[Indices]], num_samples: int, num_ranks: int) -> NDArray[np.uint16]:
    """How often each rank uses each sample [num_ranks, num_samples]; ``epochs`` has the samples of each rank, for each
    epoch."""
    uses = np.zeros((num_ranks, num_samples), np.uint16)
    for by_rank in epochs:
        for rank, samples in enumerate(by_rank):
            uses[rank] += np.bincount(samples, minlength=num_samples).astype(np.uint16)
    return uses


# --- who keeps what --------------------------------------------------------------------------------------------------


def place(uses: NDArray[Any], sizes: Indices, rooms: Sequence[Room], first: Indices) -> SamplePlacement:
    """Place samples in the memory, then on the disks of the ranks. No sample is kept twice: a sample that nobody keeps
    costs all its uses, a second copy saves only the way to a peer.

    A sample goes to the rank that uses it most; if that rank is full, to the next one that has room. A rank takes the
    samples that it uses most first. Of samples with equal uses it takes those that come first.

    Args:
        uses: how often each rank uses each sample [ranks, samples].
        sizes: bytes of each sample.
        rooms: the room of each rank.
        first: where each sample stands in the first epoch.
    """
    num_ranks, num_samples = uses.shape
    owner, level = np.full(num_samples, NOBODY, np.int16), np.zeros(num_samples, np.int8)
    wanted = uses.sum(axis=0) > 1  # a sample that is used once is never fetched again
    preferred = _by_use(uses)
    for where in (MEMORY, DISK):
        left = [room[where] for room in rooms]
        for choice in range(num_ranks):
            for rank in range(num_ranks):
                candidates = np.flatnonzero(wanted & (owner == NOBODY) & (preferred[choice] == rank))
                candidates = candidates[np.lexsort((first[candidates], -uses[rank, candidates].astype(np.int64)))]
                fits = np.cumsum(sizes[candidates]) <= left[rank]
                taken = candidates[fits]
                owner[taken], level[taken] = rank, where
                left[rank] -= int(sizes[taken].sum())
    return SamplePlacement(owner, level)


def _by_use(uses: NDArray[Any]) -> NDArray[np.uint16]:
    """For each sample, the ranks in order of falling uses [ranks, samples]."""
    preferred = np.empty(uses.shape, np.uint16)
    for begin in range(0, uses.shape[1], CHUNK):
        part = -uses[:, begin : begin + CHUNK].astype(np.int32)
        preferred[:, begin : begin + CHUNK] = np.argsort(part, axis=0, kind="stable")
    return preferred


def sources(accesses: Sequence[Indices], placement: SamplePlacement) -> list[NDArray[np.int8]]:
    """The class that each access of each rank is fetched from. ``accesses`` has the samples of each rank in the order
    of use, all ranks at the same pace.

    The first use of a kept sample reads it from the file system: its owner reads it once, keeps it, and hands it on.
    """
    classes = []
    for rank, samples in enumerate(accesses):
        owner, level = placement.owner[samples], placement.level[samples]
        own = np.where(level == MEMORY, OWN_MEMORY, OWN_DISK)
        classes.append(np.where(owner == NOBODY, FILES, np.where(owner == rank, own, PEER)).astype(np.int8))
    length = max(map(len, accesses), default=0)
    times = np.concatenate([np.arange(len(samples)) for samples in accesses])
    all_samples = np.concatenate(list(accesses))
    ranks = np.repeat(np.arange(len(accesses)), [len(samples) for samples in accesses])
    order = np.argsort(times * len(accesses) + ranks, kind="stable") if length else times
    _, firsts = np.unique(all_samples[order], return_index=True)
    for place_ in order[firsts]:
        classes[ranks[place_]][times[place_]] = FILES
    return classes


# --- caches, to compare with -----------------------------------------------------------------------------------------


def belady_misses(accesses: Sequence[int], capacity: int) -> int:
    """The least misses of any cache of ``capacity`` samples of equal size: it knows all accesses, keeps the samples
    that are used soonest, and may leave a sample out (Belady 1966)."""
    future = _next_uses(accesses)
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    misses = 0
    for sample, following in zip(accesses, future, strict=True):
        misses += sample not in kept
        if following == len(accesses):
            kept.pop(sample, None)
            continue
        kept[sample] = following
        heapq.heappush(farthest, (-following, sample))
        while len(kept) > capacity:
            when, other = heapq.heappop(farthest)
            if kept.get(other) == -when:
                del kept[other]
    return misses


def _next_uses(accesses: Sequence[int]) -> list[int]:
    """Where each sample is used next; the number of accesses if never."""
    future, seen = [0] * len(accesses), dict[int, int]()
    for place_ in range(len(accesses) - 1, -1, -1):
        future[place_] = seen.get(accesses[place_], len(accesses))
        seen[accesses[place_]] = place_
    return future


def lru_misses(accesses: Iterable[int], capacity: int) -> int:
    """The misses of a cache of ``capacity`` samples that drops the sample that was not used for longest."""
    kept: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for sample in accesses:
        if sample in kept:
            kept.move_to_end(sample)
            continue
        misses += 1
        kept[sample] = None
        if len(kept) > capacity:
            kept.popitem(last=False)
    return misses
