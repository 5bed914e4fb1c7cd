"""What goes wrong: slow ranks, jitter, ranks that die; and what failures cost a run that restarts from checkpoints."""

import math
import random
from collections.abc import Callable, Sequence

import msgspec

from meshwright.errors import LayoutError

MOST_S, MOST_JITTER = 1e9, 100.0
"""More is a mistake: of a factor or of seconds (32 years); of a relative deviation."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one step: how many times as long a rank computes (``slow``, by rank); the relative standard deviation of every
    piece of computing (``jitter``, log-normal, mean 1, drawn from ``seed``); when a rank dies (``deaths_s``, by rank).

    Raises:
        LayoutError: a number is impossible.
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
        """A LayoutError where a rank is named that is not there."""
        for rank in (*self.slow, *self.deaths_s):
            if rank >= world_size:
                raise LayoutError(
                    f"there is no rank {rank}", where="faults", remedy=f"the mesh has ranks 0 to {world_size - 1}"
                )

    def colors(self, world_size: int) -> list[tuple[float, ...]]:
        """What tells ranks apart: nothing for most."""
        return [
            (self.slow.get(rank, 1.0), self.deaths_s.get(rank, math.inf), rank if self.jitter else -1)
            for rank in range(world_size)
        ]

    def noise(self, rank: int) -> Callable[[], float]:
        """How many times as long each piece of the rank's computing takes, one after the other. The same seed gives the
        same factors, whatever other ranks do."""
        slow, draws = self.slow.get(rank, 1.0), random.Random(f"{self.seed}/{rank}")
        sigma = math.sqrt(math.log1p(self.jitter**2))
        return lambda: slow * draws.lognormvariate(-(sigma**2) / 2, sigma) if sigma else slow


class Checkpoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run saves after every ``every_steps`` steps, for ``save_s``; after a failure it takes ``restart_s`` until it
    goes on from what was saved last (or from the beginning)."""

    every_steps: int
    save_s: float = 0.0
    restart_s: float = 0.0


class RunTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the time of a run went: steps that counted, steps (and saves) that were lost, saves, restarts."""

    useful_s: float
    lost_s: float
    saving_s: float
    restarting_s: float
    num_failures: int

    @property
    def duration_s(self) -> float:
        """From start to end."""
        return self.useful_s + self.lost_s + self.saving_s + self.restarting_s


def run_time(step_s: float, num_steps: int, checkpoints: Checkpoints, failures_s: Sequence[float] = ()) -> RunTime:
    """The time of ``num_steps`` steps when some rank dies at each of ``failures_s`` (seconds since the start, rising).

    Nothing is saved after the last step, which ends the run. A failure while the ranks restart makes them start again.
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
    """When some rank dies, where each fails after ``mean_s`` on average, at any time alike (a Poisson process)."""
    source, times, now = random.Random(seed), list[float](), 0.0
    while (now := now + source.expovariate(num_ranks / mean_s)) < until_s:
        times.append(now)
    return tuple(times)


def best_interval_s(save_s: float, mean_s: float) -> float:
    """About how much to compute between saves where some rank dies every ``mean_s`` (Young 1974): sqrt(2 save mean)."""
    return math.sqrt(2 * save_s * mean_s)
