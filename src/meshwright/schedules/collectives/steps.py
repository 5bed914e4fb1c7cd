"""Collectives as lists of steps, as pure data: the elements that ranks send and add up in each round."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise, zip_longest

import msgspec

Span = tuple[int, int]
"""(begin, end) of a run of elements; ``end`` is not included."""


class Move(msgspec.Struct, frozen=True, gc=False):
    """A move of ``length`` elements, from position ``begin`` in ``source``'s memory to position ``into`` in
    ``target``'s memory.

    ``adds``: the target adds them to its own elements there; otherwise they replace these elements. A move from a rank
    to itself is a copy.
    """

    source: int
    target: int
    begin: int
    into: int
    length: int
    adds: bool = False


Rounds = list[list[Move]]
"""The moves of each round, which happen simultaneously. A rank sends the elements that it had before the round. Then it
takes its received elements in the order of the list. A round of copies within ranks sends nothing."""


class RequiredSum(msgspec.Struct, frozen=True):
    """The elements that a rank must hold at ``span``: the sum over ``terms``, each (rank, position of the elements)."""

    span: Span
    terms: tuple[tuple[int, int], ...]


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """A collective, step by step. Every rank has a memory of ``space`` elements.

    ``before``: the spans that each rank contributes. ``after``: the parts that each rank must hold at the end. Both
    have an entry for each rank, also for a server that contributes nothing. ``length``: elements of the whole vector.
    """

    operation: str
    algorithm: str
    length: int
    space: int
    before: tuple[tuple[Span, ...], ...]
    after: tuple[tuple[RequiredSum, ...], ...]
    rounds: tuple[tuple[Move, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks, servers included."""
        return len(self.before)


class Count(msgspec.Struct, frozen=True):
    """The counted costs of steps. ``moved``: elements in all messages. ``peak``: the largest number of elements that
    enter or leave one rank in one round. ``busiest``: this maximum in each round, summed over the rounds. ``fan_in``:
    the largest number of messages that one rank receives in one round. ``added``: the largest number of additions on
    one rank."""

    rounds: int
    messages: int
    moved: int
    busiest: int
    peak: int
    fan_in: int
    added: int


def count(steps: Steps) -> Count:
    """Count the rounds, messages, elements and additions of the steps."""
    rounds = [sent for moves in steps.rounds if (sent := [move for move in moves if move.source != move.target])]
    peaks, fans, added = [0], [0], Counter[int]()
    for sent in rounds:
        into, out_of, fan = Counter[int](), Counter[int](), Counter[int]()
        for move in sent:
            into[move.target] += move.length
            out_of[move.source] += move.length
            fan[move.target] += 1
            added[move.target] += move.length * move.adds
        peaks.append(max(*into.values(), *out_of.values()))
        fans.append(max(fan.values()))
    return Count(
        rounds=len(rounds),
        messages=sum(map(len, rounds)),
        moved=sum(move.length for sent in rounds for move in sent),
        busiest=sum(peaks),
        peak=max(peaks),
        fan_in=max(fans),
        added=max(added.values(), default=0),
    )


Program = tuple[tuple[Move, ...], ...]
"""One rank's moves, round by round: its sends, then its receives and copies. Rounds in which the rank takes no part are
left out."""


def programs(steps: Steps) -> tuple[Program, ...]:
    """The programs of all ranks, in the order of the ranks."""
    by_rank: list[list[tuple[Move, ...]]] = [[] for _ in range(steps.num_ranks)]
    for moves in steps.rounds:
        sends, takes = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
        for move in moves:
            if move.source != move.target:
                sends[move.source].append(move)
            takes[move.target].append(move)
        for rank in sends.keys() | takes.keys():
            by_rank[rank].append((*sends[rank], *takes[rank]))
    return tuple(map(tuple, by_rank))


# --- to build with ---------------------------------------------------------------------------------------------------


def cut(span: Span, parts: int) -> tuple[Span, ...]:
    """``parts`` neighbouring pieces whose lengths differ by at most one. Some are empty if there are too few
    elements."""
    begin, length = span[0], span[1] - span[0]
    return tuple(pairwise(begin + length * index // parts for index in range(parts + 1)))


def message(source: int, target: int, spans: Iterable[Span], *, adds: bool = False) -> list[Move]:
    """The moves that copy ``spans`` to the same positions on the target. Neighbouring spans are joined, and empty spans
    are left out."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if begin == end:
            continue
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return [Move(source, target, begin, begin, end - begin, adds) for begin, end in merged]


def beside(lists: Iterable[Rounds]) -> Rounds:
    """A list of rounds in which all ``lists`` run at the same time: round i joins round i of every list."""
    return [[move for moves in side for move in moves] for side in zip_longest(*lists, fillvalue=())]


def steps_from_rounds(
    operation: str,
    algorithm: str,
    length: int,
    rounds: Rounds,
    before: Iterable[tuple[Span, ...]],
    after: Iterable[tuple[RequiredSum, ...]],
    space: int | None = None,
) -> Steps:
    """The Steps of these rounds, without empty rounds; ``space`` defaults to ``length``."""
    return Steps(
        operation=operation, algorithm=algorithm, length=length, space=length if space is None else space,
        before=tuple(before), after=tuple(after), rounds=tuple(tuple(moves) for moves in rounds if moves),
    )  # fmt: skip
