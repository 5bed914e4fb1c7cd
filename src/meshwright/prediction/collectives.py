"""Compare the algorithms of a collective: the bytes that each sends, its time, and the sizes at which it is fastest."""

from collections.abc import Mapping
from itertools import pairwise

import msgspec

from meshwright.catalog import load_cluster
from meshwright.cost.alpha_beta import gamma_s_per_byte
from meshwright.errors import LayoutError, PlanError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import Codec, codec_of
from meshwright.schedules.collectives.check import check
from meshwright.schedules.collectives.choice import CHOSEN
from meshwright.schedules.collectives.coded import coded
from meshwright.schedules.collectives.coded_bytes import chunk_of, in_bytes
from meshwright.schedules.collectives.hierarchy import ACROSS_BY_OPERATION, INSIDE, equal_boxes, written
from meshwright.schedules.collectives.operations import ALGORITHMS, FOR_SELECTIONS, build
from meshwright.schedules.collectives.steps import Count, Steps, count
from meshwright.simulate.collectives import alone_s, links_of, shared_s

SIZES = (4, *(16**power for power in range(2, 8)), 2**30)
"""Vector sizes in bytes; crossovers are searched between neighbours."""
ITEM_BYTES = 4
MAX_RANKS, MAX_SHARING = 64, 16
"""The largest numbers of ranks in a comparison, without and with shared links. Some algorithms send a message for every
pair of ranks."""


class AllReduceTime(msgspec.Struct, frozen=True):
    """An algorithm: the bytes that it sends, its seconds without contention (``alone_s``) and on the cluster's shared
    links (None: there are too many ranks to simulate). ``same``: whether all ranks end with the same bits in floating
    point."""

    algorithm: str
    count: Count
    alone_s: float
    shared_s: float | None
    same: bool


class Best(msgspec.Struct, frozen=True):
    """The fastest ``algorithm`` with equal bits on all ranks, from ``from_bytes`` up to the next entry."""

    from_bytes: int
    algorithm: str


class Refused(msgspec.Struct, frozen=True):
    """An algorithm that cannot carry the codec, and the reason."""

    algorithm: str
    reason: str


class AllReduceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison: its rows, fastest first, and the fastest algorithms by size, alone and on shared links."""

    operation: str
    cluster: str
    num_ranks: int
    num_bytes: int
    rows: tuple[AllReduceTime, ...]
    best_alone: tuple[Best, ...]
    best_shared: tuple[Best, ...]
    codec: str = ""
    refused: tuple[Refused, ...] = ()


def compare(operation: str, cluster: Cluster | str, num_ranks: int, num_bytes: int, codec: str = "") -> AllReduceTimes:
    """Compare all algorithms of an operation over ``num_ranks`` neighbouring ranks of a cluster, in float32.

    ``codec``: messages are encoded with this codec. Times do not include encoding and decoding.

    Raises:
        ScheduleError, ClusterError, LayoutError: there is no such operation, the cluster has too few devices or unequal
            units, or there are more than 64 ranks.
        PlanError: there is no such codec, or it has no collective of its own.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise LayoutError(f"{num_ranks} ranks", where="--ranks", remedy=f"compare 1 to {MAX_RANKS}")
    resized = load_cluster(cluster) if isinstance(cluster, str) else cluster
    resized = resized.resized(num_ranks)
    form = _coded(operation, codec_of(codec)) if codec else None
    names = [*ALGORITHMS.get(operation, ("",)), *_along_levels(operation, resized)]
    if form is not None and form.exchange == "merges" and operation == "all_reduce":
        names += FOR_SELECTIONS
    link, gamma, sharing = links_of(resized), gamma_s_per_byte(resized.device), num_ranks <= MAX_SHARING

    rows: list[AllReduceTime] = []
    refused: list[Refused] = []
    times_alone: dict[str, list[float]] = {}
    times_shared: dict[str, list[float]] = {}
    for name in names:
        steps = build(operation, name, num_ranks, -(-num_bytes // ITEM_BYTES))
        same = check(steps)
        try:
            sent = _messages(steps, form)
        except ScheduleError as error:
            refused.append(Refused(name, error.problem))
            continue
        alone = alone_s(sent, link, gamma)
        shared = shared_s(sent, resized) if sharing else None
        rows.append(AllReduceTime(name, count(sent), alone, shared, same))
        if same and num_ranks > 1 and operation != "barrier":
            sized = [_messages(build(operation, name, num_ranks, size // ITEM_BYTES), form) for size in SIZES]
            times_alone[name] = [alone_s(step_list, link, gamma) for step_list in sized]
            if sharing:
                times_shared[name] = [shared_s(step_list, resized) for step_list in sized]
    return AllReduceTimes(
        operation=operation,
        cluster=resized.name,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        rows=tuple(sorted(rows, key=lambda row: row.alone_s if row.shared_s is None else row.shared_s)),
        best_alone=_crossovers(times_alone),
        best_shared=_crossovers(times_shared),
        codec=str(form) if form is not None else "",
        refused=tuple(refused),
    )


def _along_levels(operation: str, cluster: Cluster) -> list[str]:
    """The names of the hierarchical algorithms along the cluster's levels; none if it has only one level."""
    fan_outs = [level.fan_out for level in cluster.levels if level.fan_out > 1]
    if len(fan_outs) < 2:
        return []
    boxes = equal_boxes(fan_outs)
    return [written(inside, across, boxes) for inside in INSIDE for across in ACROSS_BY_OPERATION.get(operation, ())]


def _coded(operation: str, codec: Codec) -> Codec:
    """The codec, if the operation has collectives for it."""
    if operation not in CHOSEN or codec.exchange not in ("hops", "merges"):
        remedies = {"sums": "its coded vectors ride every algorithm: give their size as --bytes", "factors": ""}
        raise PlanError(
            f"codec {codec} changes no message of {operation}",
            where="--codec",
            remedy=remedies.get(codec.exchange)
            or f"compare {', '.join(CHOSEN)} with a codec such as qsgd(4) or topk(1%)",
        )
    return codec


def _messages(steps: Steps, codec: Codec | None) -> Steps:
    """The steps, with the lengths of their messages in bytes."""
    if codec is not None:
        return in_bytes(coded(steps, codec), codec, ITEM_BYTES, chunk_of(codec, ITEM_BYTES))
    rounds = tuple(
        tuple(msgspec.structs.replace(move, length=move.length * ITEM_BYTES) for move in moves)
        for moves in steps.rounds
    )
    return msgspec.structs.replace(steps, rounds=rounds)


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
