"""Measured trainings of replicas, for benchmarks: losses over wall time and over samples."""

from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec


class StepEnd(NamedTuple):
    """The end of a replica's step. ``time_s``: seconds since all replicas began; ``samples``: the number of samples of
    the step."""

    time_s: float
    samples: int
    loss: float


class ReplicaRun(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one replica (under ``sync``, of all replicas together).

    ``samples``: the number of samples per step. ``times_s``: the ends of steps. ``begun_s`` and ``computed_s``: the
    start and end of the computing in each step. All are seconds since all replicas began. ``losses``: the training loss
    of each step. ``held_out``: the loss on all held-out data at the end, with this replica's parameters; None if the
    training diverged. ``sent_bytes``: bytes of tensors that this replica, and a server in its process, sent to other
    participants.
    """

    replica: int
    samples: int
    times_s: tuple[float, ...]
    begun_s: tuple[float, ...] = ()
    computed_s: tuple[float, ...] = ()
    losses: tuple[float, ...]
    held_out: float | None = None
    sent_bytes: int = 0

    @property
    def ends(self) -> list[StepEnd]:
        """The ends of all steps."""
        return [StepEnd(time_s, self.samples, loss) for time_s, loss in zip(self.times_s, self.losses, strict=True)]


class RuleRun(msgspec.Struct, frozen=True, kw_only=True):
    """A training under one consistency rule. ``slow``: the text that describes slow replicas (empty: none). ``seed``:
    the seed of initial values and data. ``seconds``: the limit on wall time."""

    rule: str
    slow: str
    seed: int
    seconds: float
    replicas: tuple[ReplicaRun, ...]

    @property
    def ends(self) -> list[StepEnd]:
        """The ends of the steps of all replicas, ordered by time."""
        return sorted(end for replica in self.replicas for end in replica.ends)

    @property
    def last_s(self) -> float:
        """The end of the last step."""
        return max((end.time_s for end in self.ends), default=0.0)

    @property
    def num_samples(self) -> int:
        """The number of samples in all steps of all replicas."""
        return sum(replica.samples * len(replica.losses) for replica in self.replicas)

    @property
    def sent_bytes(self) -> int:
        """The bytes that all replicas and servers sent."""
        return sum(replica.sent_bytes for replica in self.replicas)

    @property
    def held_out(self) -> list[float]:
        """The held-out losses of the replicas whose training did not diverge."""
        return [replica.held_out for replica in self.replicas if replica.held_out is not None]

    @property
    def diverged(self) -> bool:
        """Whether a replica's loss became infinite or NaN."""
        return any(replica.held_out is None for replica in self.replicas)

    @property
    def staleness(self) -> Counter[int]:
        """A histogram of staleness. It maps a number k to the number of steps that began while the slowest replica had
        computed k steps less than the replica of this step. It is empty under ``sync``, where replicas are not
        separate."""
        total: Counter[int] = Counter()
        for replica in self.replicas:
            others = [other.computed_s for other in self.replicas if other is not replica]
            for step, begun_s in enumerate(replica.begun_s):
                total[max(0, step - min(bisect(other, begun_s) for other in others))] += 1
        return total

    def seconds_a_batch(self, parts: int, batch: int) -> list[float]:
        """Divide the training into ``parts`` parts with equal numbers of steps; return the seconds per ``batch``
        samples of each part. Empty if there are fewer steps than parts."""
        ends = self.ends
        if len(ends) < parts:
            return []
        borders = [len(ends) * part // parts for part in range(parts + 1)]
        times = [0.0, *(ends[border - 1].time_s for border in borders[1:])]
        counts = [sum(end.samples for end in ends[first:last]) for first, last in pairwise(borders)]
        return [
            (after - before) * batch / count for (before, after), count in zip(pairwise(times), counts, strict=True)
        ]


class LossPoint(NamedTuple):
    """The mean loss of the last samples: ``time_s`` seconds and ``samples`` samples after the beginning."""

    time_s: float
    samples: int
    loss: float


def smoothed(ends: list[StepEnd], window: int) -> Iterator[LossPoint]:
    """After each step, the mean loss of the last ``window`` samples. The first points are left out, until there are
    ``window`` samples."""
    last: deque[StepEnd] = deque()
    held, total, seen = 0, 0.0, 0
    for end in ends:
        last.append(end)
        held, total, seen = held + end.samples, total + end.samples * end.loss, seen + end.samples
        while held - last[0].samples >= window:
            first = last.popleft()
            held, total = held - first.samples, total - first.samples * first.loss
        if held >= window:
            yield LossPoint(end.time_s, seen, total / held)


def time_to(run: RuleRun, loss: float, window: int) -> float | None:
    """The seconds until the mean loss of the last ``window`` samples is at most ``loss``; None if this never
    happens."""
    return next((point.time_s for point in smoothed(run.ends, window) if point.loss <= loss), None)


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]], num_points: int = 80) -> list[tuple[float, float]]:
    """The mean of several curves of points (x, y) with rising x, at ``num_points`` values of x that all curves cover.
    Curves are linear between points. Empty if the curves have no common range of x."""
    if not curves or not all(curves):
        return []
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if first > last:
        return []
    places = [first + (last - first) * index / (num_points - 1) for index in range(num_points)]
    values = [list(_interpolated(curve, places)) for curve in curves]
    return [(x, sum(each) / len(each)) for x, each in zip(places, zip(*values, strict=True), strict=True)]


def _interpolated(curve: Sequence[tuple[float, float]], places: Sequence[float]) -> Iterator[float]:
    """The y of the curve at rising values of x in its range."""
    index = 0
    for x in places:
        while index < len(curve) - 1 and curve[index + 1][0] < x:
            index += 1
        (left, low), (right, high) = curve[index], curve[min(index + 1, len(curve) - 1)]
        yield low + (high - low) * min(1.0, (x - left) / (right - left)) if right > left else low
