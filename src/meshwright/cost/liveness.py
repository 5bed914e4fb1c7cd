"""Liveness: how much memory is there at once while nodes run, each storage from its making to its last read."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from meshwright.cost.node import Node


def last_reads(order: Sequence[Node]) -> dict[str, int]:
    """By storage, the position of the last node that makes it, or reads it or a view of it."""
    last: dict[str, int] = {}
    for index, node in enumerate(order):
        for source in (*node.inputs, node):
            for storage in (*source.storages, *source.views):
                last[storage] = index
    return last


def highest(order: Sequence[Node], given: Mapping[str, int], kept: AbstractSet[str], last: Mapping[str, int]) -> int:
    """The most bytes at once: beginning with ``given`` (freed after their last read), ``kept`` never freed.

    An operator that works in place takes the memory of an input of its size that dies there.
    """
    live = dict(given)
    total = peak = sum(live.values())
    renamed: dict[str, str] = {}

    def root(storage: str) -> str:
        while storage in renamed:
            storage = renamed[storage]
        return storage

    due: dict[int, list[str]] = {}
    for storage, index in last.items():
        due.setdefault(index, []).append(storage)
    ends = dict(last)
    for index, node in enumerate(order):
        for storage, size in node.storages.items():
            if storage in live:
                continue
            reused = None
            if node.in_place:
                reads = {root(one) for source in node.inputs for one in (*source.storages, *source.views)}
                dying = (one for one in reads if live.get(one) == size and ends.get(one) == index)
                reused = next((one for one in dying if one not in given and one not in kept), None)
            if reused is not None:
                renamed[storage] = reused
                ends[reused] = ends.get(storage, index)
                due.setdefault(ends[reused], []).append(reused)
                continue
            live[storage] = size
            total += size
        peak = max(peak, total + node.scratch_bytes)
        for storage in due.get(index, ()):
            if storage in live and ends.get(storage) == index and storage not in kept:
                kept_as = any(root(one) == storage for one in kept & renamed.keys())
                if not kept_as:
                    total -= live.pop(storage)
    return peak
