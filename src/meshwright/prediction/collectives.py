"""Compare the algorithms of a collective: the bytes that each moves, its time, and the sizes at which it is fastest."""

from collections.abc import Mapping
from itertools import pairwise

import msgspec

from meshwright.catalog import load_cluster
from meshwright.cost.alpha_beta import gamma_s_per_byte
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.schedules.collectives.check import check
from meshwright.schedules.collectives.hierarchy import ACROSS_BY_OPERATION, INSIDE, equal_boxes, written
from meshwright.schedules.collectives.operations import ALGORITHMS, build
from meshwright.schedules.collectives.steps import Count, count
from meshwright.simulate.collectives import alone_s, links_of, shared_s

SIZES = (4, *(16**power for power in range(2, 8)), 2**30)
"""Vector sizes in bytes; crossovers are searched between neighbours."""
ITEM_BYTES = 4
MAX_RANKS, MAX_SHARING = 64, 16
"""The most ranks of a comparison, without and with shared links. Some algorithms send a message for every pair of
ranks."""


class AllReduceTime(msgspec.Struct, frozen=True):
    """An algorithm: the bytes it moves, its seconds without contention (``alone_s``) and on the cluster's shared links
    (None: too many ranks to simulate). ``same``: whether all ranks end with the same bits in floating point."""

    algorithm: str
    count: Count
    alone_s: float
    shared_s: float | None
    same: bool


class Best(msgspec.Struct, frozen=True):
    """The fastest ``algorithm`` with equal bits on all ranks, from ``from_bytes`` up to the next entry."""

    from_bytes: int
    algorithm: str


class AllReduceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison: its rows, fastest first, and the fastest algorithms by size, alone and on shared links."""

    operation: str
    cluster: str
    num_ranks: int
    num_bytes: int
    rows: tuple[AllReduceTime, ...]
    best_alone: tuple[Best, ...]
    best_shared: tuple[Best, ...]


def compare(operation: str, cluster: Cluster | str, num_ranks: int, num_bytes: int) -> AllReduceTimes:
    """Compare all algorithms of an operation over ``num_ranks`` neighbouring ranks of a cluster, in float32.

    Raises:
        ScheduleError, ClusterError, LayoutError: no such operation; the cluster has too few devices, or unlike units;
            more than 64 ranks.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise LayoutError(f"{num_ranks} ranks", where="--ranks", remedy=f"compare 1 to {MAX_RANKS}")
    resized = load_cluster(cluster) if isinstance(cluster, str) else cluster
    resized = resized.resized(num_ranks)
    names = [*ALGORITHMS.get(operation, ("",)), *_along_levels(operation, resized)]
    link, gamma, sharing = links_of(resized), gamma_s_per_byte(resized.device), num_ranks <= MAX_SHARING

    rows: list[AllReduceTime] = []
    times_alone: dict[str, list[float]] = {}
    times_shared: dict[str, list[float]] = {}
    for name in names:
        steps = build(operation, name, num_ranks, -(-num_bytes // ITEM_BYTES))
        same = check(steps)
        alone = alone_s(steps, link, gamma, ITEM_BYTES)
        shared = shared_s(steps, resized, ITEM_BYTES) if sharing else None
        rows.append(AllReduceTime(name, _in_bytes(count(steps)), alone, shared, same))
        if same and num_ranks > 1 and operation != "barrier":
            sized = [build(operation, name, num_ranks, size // ITEM_BYTES) for size in SIZES]
            times_alone[name] = [alone_s(step_list, link, gamma, ITEM_BYTES) for step_list in sized]
            if sharing:
                times_shared[name] = [shared_s(step_list, resized, ITEM_BYTES) for step_list in sized]
    return AllReduceTimes(
        operation=operation,
        cluster=resized.name,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        rows=tuple(sorted(rows, key=lambda row: row.alone_s if row.shared_s is None else row.shared_s)),
        best_alone=_crossovers(times_alone),
        best_shared=_crossovers(times_shared),
    )


def _along_levels(operation: str, cluster: Cluster) -> list[str]:
    """The names of the algorithms that follow the cluster's levels; none unless it has several levels."""
    fan_outs = [level.fan_out for level in cluster.levels if level.fan_out > 1]
    if len(fan_outs) < 2:
        return []
    boxes = equal_boxes(fan_outs)
    return [written(inside, across, boxes) for inside in INSIDE for across in ACROSS_BY_OPERATION.get(operation, ())]


def _in_bytes(counts: Count) -> Count:
    parts = {key: getattr(counts, key) * ITEM_BYTES for key in ("moved", "busiest", "peak", "added")}
    return msgspec.structs.replace(counts, **parts)


def _crossovers(seconds: Mapping[str, list[float]]) -> tuple[Best, ...]:
    """The fastest algorithm from each crossover on, given each algorithm's seconds at all ``SIZES``; seconds in between
    are interpolated."""
    best: list[Best] = []
    if not seconds:
        return ()
    for index, (low, high) in enumerate(pairwise(SIZES)):
        at = {name: (times[index], times[index + 1]) for name, times in seconds.items()}
        part = 0.0
        while part < 1:
            now = min(at, key=lambda name: (_at(at[name], part), at[name][1]))
            if not best or best[-1].algorithm != now:
                best.append(Best(round(low + part * (high - low)) if best else 0, now))
            # The next crossover: another algorithm becomes faster than the current one.
            meets = {name: _meeting(at[now], times) for name, times in at.items() if name != now}
            part = min((meet for meet in meets.values() if meet > part + 1e-9), default=1.0)
    return tuple(best)


def _at(times: tuple[float, float], part: float) -> float:
    return times[0] + part * (times[1] - times[0])


def _meeting(first: tuple[float, float], second: tuple[float, float]) -> float:
    """The point between 0 and 1 at which line ``second`` falls below line ``first``; 1 if it does not."""
    start, end = second[0] - first[0], second[1] - first[1]
    return start / (start - end) if start > 0 > end else 1.0
