"""All-reduces as lists of steps: who sends which piece to whom in each round, and what that costs, by counting."""

import math
from collections import Counter
from collections.abc import Iterator

import msgspec


class Send(msgspec.Struct, frozen=True):
    """A message: piece ``piece`` of the ``pieces`` that a vector is cut into. ``adds``: the receiver adds it to its own
    terms, else it takes it in their place."""

    source: int
    target: int
    piece: int = 0
    adds: bool = True


Rounds = list[list[Send]]


class Count(msgspec.Struct, frozen=True):
    """``moved`` in vectors, over all messages; ``rounds``; ``fan_in``, the most messages that one node takes in one
    round; ``busiest``, the vectors that go into (or, if more, out of) the busiest node, added up over rounds."""

    moved: float
    rounds: int
    fan_in: int
    busiest: float


def star(workers: int) -> Rounds:
    """A parameter server, node ``workers``: all send to it, and it sends to all."""
    return [
        [Send(rank, workers) for rank in range(workers)],
        [Send(workers, rank, adds=False) for rank in range(workers)],
    ]


def everyone(workers: int) -> Rounds:
    """Everyone sends its vector to everyone at once."""
    return [[Send(one, other) for one in range(workers) for other in range(workers) if one != other]]


def ring(workers: int) -> Rounds:
    """Pieces go around twice: added up the first time, whole the second."""
    return [
        [Send(rank, (rank + 1) % workers, (rank - turn) % workers, turn < workers - 1) for rank in range(workers)]
        for turn in range(2 * (workers - 1))
    ]


def tree(workers: int) -> Rounds:
    """Up a binomial tree to rank 0, and down again; for powers of two."""
    up = [[Send(rank + distance, rank) for rank in range(0, workers, 2 * distance)] for distance in _distances(workers)]
    return up + [[Send(one.target, one.source, adds=False) for one in sends] for sends in reversed(up)]


def butterfly(workers: int) -> Rounds:
    """Recursive doubling: in each round everyone exchanges its sum with the rank across; for powers of two."""
    return [[Send(rank, rank ^ distance) for rank in range(workers)] for distance in _distances(workers)]


def count(rounds: Rounds, pieces: int = 1) -> Count:
    """What the steps cost."""
    into = [Counter(one.target for one in sends) for sends in rounds]
    out_of = [Counter(one.source for one in sends) for sends in rounds]
    busiest = sum(max(*a.values(), *b.values()) for a, b in zip(into, out_of, strict=True))
    return Count(
        moved=sum(len(sends) for sends in rounds) / pieces,
        rounds=len(rounds),
        fan_in=max(max(one.values()) for one in into),
        busiest=busiest / pieces,
    )


def is_all_reduce(rounds: Rounds, workers: int, pieces: int = 1) -> bool:
    """Whether every worker ends with every worker's term of every piece exactly once."""
    nodes = 1 + max(max(one.source, one.target) for sends in rounds for one in sends)
    terms = [[Counter([node] if node < workers else []) for _ in range(pieces)] for node in range(nodes)]
    for sends in rounds:
        sent = [(one, terms[one.source][one.piece].copy()) for one in sends]
        for one, what in sent:
            held = terms[one.target][one.piece]
            terms[one.target][one.piece] = held + what if one.adds else what
    whole = Counter(range(workers))
    return all(terms[rank][piece] == whole for rank in range(workers) for piece in range(pieces))


def _distances(workers: int) -> Iterator[int]:
    return (2**step for step in range(int(math.log2(workers))))
