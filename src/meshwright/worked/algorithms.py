"""Worked numbers of all-reduce algorithms, computed from their step lists: rounds, times, and a sum over seven
workers."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from meshwright.schedules.collectives.check import check
from meshwright.schedules.collectives.operations import all_reduce
from meshwright.schedules.collectives.steps import Count, Steps, count
from meshwright.simulate.collectives import alone_s
from meshwright.worked.line import Line, held

RANKS = range(2, 17)
"""The numbers of ranks for which a claim about growth is tried."""
POWERS = (2, 4, 8, 16, 32)
"""The numbers of ranks for which a formula with lg p is tried."""
ALPHA_S, BETA, GAMMA = 5e-6, 1 / 12.5e9, 3 / 900e9
"""A link of 100 Gbit/s with 5 us of latency, and additions at the memory bandwidth of a V100 (seconds per byte)."""
SIZES = (1024, 2**20)
"""Bytes of the vectors for which a formula is tried; the numbers of ``POWERS`` divide them."""
SAME = 1e-9
"""The largest relative difference of two times that count as equal."""


class _Stage(NamedTuple):
    """An all-reduce with its claim, its number of rounds for p ranks, and the largest part of a vector that enters or
    leaves one of 8 ranks in a round."""

    name: str
    claim: str
    rounds: Callable[[int], int]
    peak: float


STAGES = (
    _Stage("star", "a server: O(1) rounds, in which it takes O(P) vectors", lambda p: 2, 8.0),
    _Stage("one-by-one", "no server, one rank after the other: O(P^2) rounds", lambda p: p * (p - 1), 1.0),
    _Stage("contention-free", "all ranks send, each to another one: O(P) rounds", lambda p: p - 1, 1.0),
    _Stage("partitioned", "each rank sums a part: O(P) rounds of 1/P of a vector", lambda p: 2 * (p - 1), 1 / 8),
    _Stage("ring", "a ring: the same, and each rank sends to one neighbour only", lambda p: 2 * (p - 1), 1 / 8),
)


def staged() -> Iterator[Line]:
    """From a server to a ring: the rounds of an all-reduce, and what one rank receives in a round."""
    for name, claim, rounds, peak in STAGES:
        counts = {ranks: _checked(name, ranks) for ranks in RANKS}
        eight, elements = counts[8], _length(8)
        targets = {(move.source, move.target) for moves in _steps(name, 8).rounds for move in moves}
        others = Counter(source for source, target in targets if source != target)[1]
        yield held(
            claim,
            f"P = 8: {eight.rounds} rounds; in each, one rank takes at most {eight.fan_in} x {peak / eight.fan_in:g} "
            "vectors",
            all(each.rounds == rounds(ranks) for ranks, each in counts.items())
            and eight.peak == peak * elements
            and (others == 1) == (name in ("star", "ring")),
            f"counted in the step lists of 2 to 16 ranks, after a check that they sum every term once; rank 1 sends to "
            f"{others} of the others",
        )


def _length(ranks: int) -> int:
    return 10 * ranks


def _steps(name: str, ranks: int) -> Steps:
    return all_reduce(name, ranks, _length(ranks), server=True)


def _checked(name: str, ranks: int) -> Count:
    """The counts of an all-reduce, after a check that its steps sum every term exactly once."""
    steps = _steps(name, ranks)
    check(steps)
    return count(steps)


Formula = Callable[[int, float], float]
"""Maps a number of ranks and the bytes of a vector to seconds."""
_A, _B, _C = ALPHA_S, BETA, GAMMA
FORMULAS: tuple[tuple[str, str, Formula], ...] = (
    ("star", "2 p a + 2 p n b + p n c", lambda p, n: 2 * p * _A + 2 * p * n * _B + p * n * _C),
    ("tree", "(2 a + 2 n b + n c) lg p", lambda p, n: (2 * _A + 2 * n * _B + n * _C) * math.log2(p)),
    ("butterfly", "(a + n b + n c) lg p", lambda p, n: (_A + n * _B + n * _C) * math.log2(p)),
    (
        "rabenseifner",
        "2 a lg p + (p - 1)/p n (2 b + c)",
        lambda p, n: 2 * _A * math.log2(p) + (p - 1) / p * n * (2 * _B + _C),
    ),
    ("ring", "2 (p - 1) a + (p - 1)/p n (2 b + c)", lambda p, n: 2 * (p - 1) * _A + (p - 1) / p * n * (2 * _B + _C)),
)
"""The all-reduces of Thakur, Rabenseifner and Gropp 2005, with the lecture's formulas: a is the latency of a message, b
the seconds per byte, c the seconds to add a byte, n the bytes of a vector."""


def alpha_beta() -> Iterator[Line]:
    """Times of all-reduces: the lecture's formulas beside simulations of the step lists without other traffic."""
    for name, text, formula in FORMULAS:
        pairs = {(ranks, size): (formula(ranks, size), _simulated_s(name, ranks, size))
                 for ranks in POWERS for size in SIZES}  # fmt: skip
        off = max(abs(simulated / expected - 1) for expected, simulated in pairs.values())
        expected_s, simulated_s = pairs[8, 2**20]
        why = "p = 2 to 32, vectors of 1 KiB and 1 MiB: all equal"
        if name == "star":
            why += "; the server is not one of the workers (if it is, p - 1 takes the place of p)"
        if name == "butterfly":
            why = why.replace("all equal", "all equal; the lecture calls it doubling")
        yield held(
            f"{name}: {text}",
            f"p = 8, 1 MiB: {1e6 * simulated_s:.1f} us simulated, {1e6 * expected_s:.1f} us by the formula",
            off <= SAME,
            why if off <= SAME else f"they differ by up to {off:.1%}",
        )


def _simulated_s(name: str, ranks: int, num_bytes: int) -> float:
    steps = all_reduce(name, ranks, num_bytes, server=True)
    return alone_s(steps, lambda source, target: ("network", ALPHA_S, BETA), GAMMA)


SEVEN = (10, 4, 7, 2, 5, 1, 6)
"""The numbers that the seven workers hold: the root, the two workers below it, and their four leaves."""


def tree_of_seven() -> Iterator[Line]:
    """Seven workers in a binary tree sum their numbers: the leaves hold 2, 5, 1 and 6, the workers above them 4 and 7,
    the root 10."""
    steps = all_reduce("binary-tree", 7, 1)
    check(steps)
    after = executed(steps, SEVEN)
    yield held(
        "the two inner workers hold 11 and 14",
        " and ".join(f"{value:g}" for value in after[0][1:3]),
        after[0][1:3] == [11, 14],
        "4 + 2 + 5 and 7 + 1 + 6, after the first round of the step list, which was run on these numbers",
    )
    yield held(
        "in the end, every worker holds 35",
        ", ".join(f"{value:g}" for value in after[-1]),
        after[-1] == [35] * 7,
        f"after {len(after)} rounds: two up to the root, two down",
    )


def executed(steps: Steps, values: Sequence[float]) -> list[list[float]]:
    """The values of all ranks after each round, if each rank contributes a single number."""
    held_now, after = list(values), []
    for moves in steps.rounds:
        sent = list(held_now)
        for move in moves:
            held_now[move.target] = sent[move.source] + (held_now[move.target] if move.adds else 0)
        after.append(list(held_now))
    return after
