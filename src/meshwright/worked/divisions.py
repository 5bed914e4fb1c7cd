"""Worked numbers of operators that run in pieces of their samples: both algorithms of µ-cuDNN beside brute force."""

import itertools
import random
from collections.abc import Iterator, Sequence

from meshwright.errors import LayoutError
from meshwright.planner.workspace import KernelChoice, divided, pareto, share
from meshwright.worked.line import Line, held

CASES = 200
"""The number of random cases for each algorithm."""
SAMPLES, MOST_SECONDS, MOST_BYTES = 8, 20, 9
"""Random cases have up to so many samples, and whole seconds and bytes up to these limits, so that sums are exact."""
OPERATORS = 3
"""The number of operators that share a workspace in a random case."""


def mu_cudnn() -> Iterator[Line]:
    """Convolutions in pieces of their samples (Oyama, Ben-Nun, Hoefler and Matsuoka, "Accelerating Deep Learning
    Frameworks with Micro-batches", CLUSTER 2018)."""
    right, total = _alone(random.Random(1))
    yield held(
        "T(b) = min(T_u(b), min over b' of T(b') + T(b - b')) is the fastest division",
        f"{right} of {total} random tables equal brute force",
        right == total,
        f"up to {SAMPLES} samples, several kernels, a limit on the workspace; brute force tries all sets of pieces",
    )
    right, total = _together(random.Random(2))
    yield held(
        "an integer program divides a workspace between operators with the least total time",
        f"{right} of {total} random networks equal brute force",
        right == total,
        f"{OPERATORS} operators; brute force tries every combination of their divisions",
    )
    slower, total = _never_slower(random.Random(3))
    yield held(
        "a division is never slower than no division",
        f"{slower} of {total} are slower",
        slower == 0,
        "the undivided kernel is one of the candidates, if it fits",
    )


def _table(draw: random.Random) -> list[KernelChoice]:
    """Some kernels for several numbers of samples; one of them always runs a single sample without workspace."""
    kernels = [
        KernelChoice(name, draw.randint(1, SAMPLES), float(draw.randint(1, MOST_SECONDS)), draw.randint(0, MOST_BYTES))
        for name in "abcdef"[: draw.randint(2, 6)]
    ]
    return [KernelChoice("slow", 1, float(MOST_SECONDS), 0), *kernels]


def _alone(draw: random.Random) -> tuple[int, int]:
    """The number of random operators whose division is as fast as the best of all divisions, and their total."""
    right = 0
    for _ in range(CASES):
        table, samples, limit = _table(draw), draw.randint(1, SAMPLES), draw.randint(1, MOST_BYTES)
        best = min(
            sum(piece.seconds for piece in pieces)
            for pieces in every_division(table, samples)
            if max(piece.workspace_bytes for piece in pieces) <= limit
        )
        right += divided(table, samples, limit).seconds == best
    return right, CASES


def _together(draw: random.Random) -> tuple[int, int]:
    """The number of random networks whose shares of a workspace are as fast as the best combination, and their
    total."""
    right = 0
    for _ in range(CASES // 4):  # a case solves an integer program
        sets = {f"operator{number}": pareto(_table(draw), draw.randint(1, SAMPLES), MOST_BYTES)
                for number in range(OPERATORS)}  # fmt: skip
        total = draw.randint(1, OPERATORS * MOST_BYTES)
        fitting = [
            sum(each.seconds for each in combination)
            for combination in itertools.product(*sets.values())
            if sum(each.workspace_bytes for each in combination) <= total
        ]
        try:
            shared: float | None = sum(each.seconds for each in share(sets, total).values())
        except LayoutError:  # nothing fits
            shared = None
        right += shared == min(fitting, default=None)
    return right, CASES // 4


def _never_slower(draw: random.Random) -> tuple[int, int]:
    """The number of random operators whose division takes longer than their fastest undivided kernel within the limit,
    and their total."""
    slower = total = 0
    while total < CASES:
        table, samples, limit = _table(draw), draw.randint(1, SAMPLES), draw.randint(1, MOST_BYTES)
        whole = [each for each in table if each.samples == samples and each.workspace_bytes <= limit]
        if whole:
            total += 1
            slower += divided(table, samples, limit).seconds > min(each.seconds for each in whole)
    return slower, total


def every_division(choices: Sequence[KernelChoice], samples: int) -> Iterator[tuple[KernelChoice, ...]]:
    """Every multiset of pieces with this number of samples in total."""
    if samples == 0:
        yield ()
    for number, choice in enumerate(choices):
        if choice.samples <= samples:
            for rest in every_division(choices[number:], samples - choice.samples):
                yield (choice, *rest)
