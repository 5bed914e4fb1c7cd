"""Collectives as lists of steps: who sends which elements to whom in each round, and who adds them up. Pure data."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise, zip_longest

import msgspec

Span = tuple[int, int]
"""(begin, end) of elements."""


class Move(msgspec.Struct, frozen=True, gc=False):
    """``length`` elements at ``begin`` of ``source``'s memory go to ``into`` of ``target``'s.

    ``adds``: the target adds them to what it has there, else they replace it. A move to oneself is a copy.
    """

    source: int
    target: int
    begin: int
    into: int
    length: int
    adds: bool = False


Rounds = list[list[Move]]
"""What is sent at the same time, round by round: a rank sends what it had before the round, then takes what comes to
it, in the order of the list. A round that copies within ranks sends nothing."""


class Part(msgspec.Struct, frozen=True):
    """What a rank shall have at ``span``: the sum over ``terms``: for each, the rank that had it and where."""

    span: Span
    terms: tuple[tuple[int, int], ...]


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """A collective, step by step. Every rank has a memory of ``space`` elements.

    ``before`` is what each rank brings, where it lies; ``after`` what each shall have. Both name all ranks that take
    part, so also a server that brings nothing. ``length`` is the whole vector, in elements.
    """

    operation: str
    algorithm: str
    length: int
    space: int
    before: tuple[tuple[Span, ...], ...]
    after: tuple[tuple[Part, ...], ...]
    rounds: tuple[tuple[Move, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.before)


class Count(msgspec.Struct, frozen=True):
    """What steps cost, in elements: ``moved`` over all messages; ``busiest``, what goes into (or, if more, out of) the
    busiest rank of each round, added up; ``peak``, the most that goes into or out of one rank in one round; ``fan_in``,
    the most messages that one rank takes in one round; ``added``, the most additions that one rank makes."""

    rounds: int
    messages: int
    moved: int
    busiest: int
    peak: int
    fan_in: int
    added: int


def count(steps: Steps) -> Count:
    """What the steps cost, by counting."""
    rounds = [sent for moves in steps.rounds if (sent := [one for one in moves if one.source != one.target])]
    peaks, fans, added = [0], [0], Counter[int]()
    for sent in rounds:
        into, out_of, fan = Counter[int](), Counter[int](), Counter[int]()
        for one in sent:
            into[one.target] += one.length
            out_of[one.source] += one.length
            fan[one.target] += 1
            added[one.target] += one.length * one.adds
        peaks.append(max(*into.values(), *out_of.values()))
        fans.append(max(fan.values()))
    return Count(
        rounds=len(rounds),
        messages=sum(map(len, rounds)),
        moved=sum(one.length for sent in rounds for one in sent),
        busiest=sum(peaks),
        peak=max(peaks),
        fan_in=max(fans),
        added=max(added.values(), default=0),
    )


Program = tuple[tuple[Move, ...], ...]
"""What one rank does, round by round: all its sends, then what it takes and copies; rounds without it are left out."""


def programs(steps: Steps) -> tuple[Program, ...]:
    """The rounds, as each rank sees them."""
    found: list[list[tuple[Move, ...]]] = [[] for _ in range(steps.num_ranks)]
    for moves in steps.rounds:
        sends, takes = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
        for one in moves:
            if one.source != one.target:
                sends[one.source].append(one)
            takes[one.target].append(one)
        for rank in sends.keys() | takes.keys():
            found[rank].append((*sends[rank], *takes[rank]))
    return tuple(map(tuple, found))


# --- to build with ---------------------------------------------------------------------------------------------------


def cut(span: Span, parts: int) -> tuple[Span, ...]:
    """``parts`` neighbouring pieces whose lengths differ by one at most; some are empty where there is too little."""
    begin, length = span[0], span[1] - span[0]
    return tuple(pairwise(begin + length * index // parts for index in range(parts + 1)))


def message(source: int, target: int, spans: Iterable[Span], *, adds: bool = False) -> list[Move]:
    """The moves of these elements to the same place at the target; none for what is empty."""
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
    """Lists of rounds of which the first ones happen at the same time, and so on."""
    return [[one for moves in side for one in moves] for side in zip_longest(*lists, fillvalue=())]


def made(
    operation: str,
    algorithm: str,
    length: int,
    rounds: Rounds,
    before: Iterable[tuple[Span, ...]],
    after: Iterable[tuple[Part, ...]],
    space: int | None = None,
) -> Steps:
    """Steps of these rounds, without those in which nothing is left to do; ``space`` is ``length`` where not given."""
    return Steps(
        operation=operation, algorithm=algorithm, length=length, space=length if space is None else space,
        before=tuple(before), after=tuple(after), rounds=tuple(tuple(moves) for moves in rounds if moves),
    )  # fmt: skip
