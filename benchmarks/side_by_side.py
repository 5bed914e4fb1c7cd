"""Compares programs side by side: alternating in the same processes, medians over rounds, their ratio, its spread."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

WARMUP_STEPS = 5
RESAMPLES = 2000

Step = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Ratio of two medians, with the interval that holds 95 % of the ratios of resampled rounds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} (95 %: {self.low:.3f} to {self.high:.3f})"


def alternate(sides: Mapping[str, Step], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of every side, one figure a round: the mean over a block of ``steps``, of the slowest rank.

    In each round every side runs one block; the order turns from round to round, so that a drift of the machine falls
    on all of them. All ranks of the process group call this, with the same sides.
    """
    for step in sides.values():
        for _ in range(WARMUP_STEPS):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _meet()
            start = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            seconds[name].append(_slowest(time.perf_counter() - start) / steps)
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """Median of ``ours`` over median of ``theirs``; rounds are resampled in pairs, for they share their time."""
    draw = random.Random(seed)
    pairs = list(zip(ours, theirs, strict=True))
    resampled = sorted(_of_medians(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(_of_medians(pairs), resampled[RESAMPLES // 40], resampled[-RESAMPLES // 40])


def machine() -> dict[str, str | int]:
    """What the figures were measured on and with."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
