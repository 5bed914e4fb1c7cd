"""Faults: slow ranks and replicas, jitter, deaths, and the time that failures cost a run with checkpoints."""

import math
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from meshwright.errors import LayoutError

MOST_S, MOST_JITTER = 1e9, 100.0
"""Upper limits that catch mistakes: ``MOST_S`` for factors and seconds (32 years), ``MOST_JITTER`` for the jitter."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The faults of one step. ``slow`` maps a rank to the factor on its computing time. ``deaths_s`` maps a rank to the
    second at which it dies. ``jitter`` is the relative standard deviation of the time of every piece of computing
    (log-normal, mean 1, drawn from ``seed``).

    Raises:
        LayoutError: a number is out of range.
    """

    slow: dict[int, float] = {}
    jitter: float = 0.0
    seed: int = 0
    deaths_s: dict[int, float] = {}

    def __post_init__(self) -> None:
        numbers = [("slow", rank, value) for rank, value in self.slow.items()]
        numbers += [("deaths_s", rank, value) for rank, value in self.deaths_s.items()]
        for key, rank, value in numbers:
            if rank < 0 or not 0 <= value <= MOST_S:
                remedy = f"give ranks from 0 on, and factors or times from 0 to {MOST_S:g}"
                raise LayoutError(f"rank {rank} has {value}", where=f"faults: {key}", remedy=remedy)
        if not 0 <= self.jitter <= MOST_JITTER:
            remedy = f"give 0 to {MOST_JITTER:g}, such as 0.05"
            raise LayoutError(f"jitter is {self.jitter}", where="faults: jitter", remedy=remedy)

    def check(self, world_size: int) -> None:
        """Raise a LayoutError if a fault names a rank outside the world."""
        for rank in (*self.slow, *self.deaths_s):
            if rank >= world_size:
                raise LayoutError(
                    f"there is no rank {rank}", where="faults", remedy=f"the mesh has ranks 0 to {world_size - 1}"
                )

    def colors(self, world_size: int) -> list[tuple[float, ...]]:
        """The faults of each rank as a tuple. Ranks with equal tuples have equal faults."""
        return [
            (self.slow.get(rank, 1.0), self.deaths_s.get(rank, math.inf), rank if self.jitter else -1)
            for rank in range(world_size)
        ]

    def noise(self, rank: int) -> Callable[[], float]:
        """A function that returns, call by call, the time factors of the rank's pieces of computing. Equal seeds give
        equal factors, whatever other ranks do."""
        slow, draws = self.slow.get(rank, 1.0), random.Random(f"{self.seed}/{rank}")
        sigma = math.sqrt(math.log1p(self.jitter**2))
        return lambda: slow * draws.lognormvariate(-(sigma**2) / 2, sigma) if sigma else slow


class ReplicaFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The faults of replicas over many steps.

    ``each``: slow replicas, dying replicas, and the jitter of a replica's step; ranks in these faults mean replicas.
    ``sometimes``: pairs (factor, probability). With this probability, a step of a replica is slower by the factor.
    ``in_turn``: factors by which one random replica is slower in each step. ``joins_s`` maps a replica to the second at
    which it joins. Before that, it is not alive.

    Raises:
        LayoutError: a number is out of range.
    """

    each: Faults = Faults()
    sometimes: tuple[tuple[float, float], ...] = ()
    in_turn: tuple[float, ...] = ()
    joins_s: dict[int, float] = {}

    def __post_init__(self) -> None:
        for factor in (*(factor for factor, _ in self.sometimes), *self.in_turn):
            if not 0 < factor <= MOST_S:
                raise LayoutError(f"a factor is {factor:g}", where="faults: slow", remedy="give one above 0, such as 2")
        for _, probability in self.sometimes:
            if not 0 <= probability <= 1:
                problem = f"a probability is {probability:g}"
                raise LayoutError(problem, where="faults: slow", remedy="give 0 to 1, such as 0.25")
        for replica, time_s in self.joins_s.items():
            if not 0 <= time_s <= MOST_S:
                remedy = f"give seconds from 0 to {MOST_S:g}"
                raise LayoutError(f"replica {replica} joins at {time_s}", where="faults: joins_s", remedy=remedy)

    def check(self, num_replicas: int) -> None:
        """Raise a LayoutError if a fault names a replica that does not exist."""
        for replica in (*self.each.slow, *self.each.deaths_s, *self.joins_s):
            if not 0 <= replica < num_replicas:
                remedy = f"the replicas are 0 to {num_replicas - 1}"
                raise LayoutError(f"there is no replica {replica}", where="faults", remedy=remedy)

    def factors(self, replica: int, num_replicas: int) -> Iterator[float]:
        """The factors on the time of a replica's steps, step by step. Equal seeds give equal factors under every
        rule."""
        noise, seed = self.each.noise(replica), self.each.seed
        chances = [random.Random(f"{seed}/{replica}/sometimes {index}") for index in range(len(self.sometimes))]
        turns = [random.Random(f"{seed}/in turn {index}") for index in range(len(self.in_turn))]
        while True:
            factor = noise()
            for (slower, probability), draws in zip(self.sometimes, chances, strict=True):
                factor *= slower if draws.random() < probability else 1.0
            for slower, draws in zip(self.in_turn, turns, strict=True):
                factor *= slower if draws.randrange(num_replicas) == replica else 1.0
            yield factor


class Checkpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a run saves a checkpoint. A save follows every ``every_steps`` steps and takes ``save_s`` seconds. After a
    failure, the restart takes ``restart_s`` seconds. The run then continues from the last save, or from the beginning
    if nothing was saved."""

    every_steps: int
    save_s: float = 0.0
    restart_s: float = 0.0


class RunTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parts of a run's time, and the number of failures. ``useful_s`` is the time of steps that were kept.
    ``lost_s`` is the time of steps and saves that failures undid."""

    useful_s: float
    lost_s: float
    saving_s: float
    restarting_s: float
    num_failures: int

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.useful_s + self.lost_s + self.saving_s + self.restarting_s


def run_time(step_s: float, num_steps: int, checkpoints: Checkpoints, failures_s: Sequence[float] = ()) -> RunTime:
    """The time of ``num_steps`` steps if a rank dies at each of ``failures_s`` (seconds since the start, in rising
    order).

    The run ends with its last step, without a save. A failure while the ranks restart makes them restart again.
    """
    coming = iter([*failures_s, math.inf])
    failure, now = next(coming), 0.0
    useful = lost = saving = restarting = 0.0
    done = failures = 0
    while done < num_steps:
        count = min(checkpoints.every_steps, num_steps - done)
        save_s = checkpoints.save_s if done + count < num_steps else 0.0
        end = now + count * step_s + save_s
        if end <= failure:
            done, now = done + count, end
            useful, saving = useful + count * step_s, saving + save_s
            continue
        lost, now = lost + failure - now, failure
        while failure <= now:
            failures, failure = failures + 1, next(coming)
            restarted = min(now + checkpoints.restart_s, failure)
            restarting, now = restarting + restarted - now, restarted
    return RunTime(useful_s=useful, lost_s=lost, saving_s=saving, restarting_s=restarting, num_failures=failures)


def draw_failures(num_ranks: int, mean_s: float, until_s: float, seed: int) -> tuple[float, ...]:
    """Random times at which some rank dies, in seconds since the start, all below ``until_s``. The deaths of each rank
    are a Poisson process with ``mean_s`` seconds between them on average."""
    source, times, now = random.Random(seed), list[float](), 0.0
    while (now := now + source.expovariate(num_ranks / mean_s)) < until_s:
        times.append(now)
    return tuple(times)


def best_interval_s(save_s: float, mean_s: float) -> float:
    """About the best seconds between saves, sqrt(2 save_s mean_s) (Young 1974). ``mean_s`` is the mean time between
    failures of the whole run, not of one rank."""
    return math.sqrt(2 * save_s * mean_s)
