"""Checks the steps of a collective by running them on symbolic sums, in which every term is visible."""

from collections import Counter, deque
from collections.abc import Sequence

from meshwright.errors import ScheduleError
from meshwright.schedules.collectives.steps import Move, Program, RequiredSum, Span, Steps, programs

_Key = tuple[int, int]
"""A term of a sum: the rank that contributed it, and its offset there minus its offset here, in elements."""


def check(steps: Steps, given: Sequence[Program] | None = None) -> bool:
    """Run the steps (or the ranks' programs in ``given``) as the ranks would: each rank independently, with messages in
    the order of sending.

    Returns:
        Returns whether all ranks that end with the same sum add its terms in the same order. If so, their
        floating-point results are equal bit by bit.

    Raises:
        ScheduleError: a rank waits for ever, takes another length than was sent, or does not take a message; a rank
            reads elements without a value; a rank ends with a wrong sum (for example a missing or doubled term); or a
            rank leaves a barrier although another rank may not have entered it.
    """
    run = _Run(steps, given if given is not None else programs(steps))
    run.all()
    ordered: dict[RequiredSum, set[tuple[tuple[Span, int], ...]]] = {}
    for rank, parts in enumerate(steps.after):
        for part in parts:
            wanted = Counter((source, begin - part.span[0]) for source, begin in part.terms)
            orders = list[tuple[Span, int]]()
            for span, value in run.memories[rank].read(part.span):
                if run.sums.terms[value] != wanted:
                    raise ScheduleError(
                        f"elements {span[0]} to {span[1]} end as {_sum(run.sums.terms[value])}, not {_sum(wanted)}",
                        where=run.place(rank),
                        remedy="each contribution must arrive exactly once",
                    )
                orders.append(((span[0] - part.span[0], span[1] - part.span[0]), run.sums.moved(value, -part.span[0])))
            ordered.setdefault(part, set()).add(tuple(_joined(orders)))  # neighbouring spans of a value count as one
    if steps.operation == "barrier":
        for rank, heard in enumerate(run.heard):
            if missing := set(range(steps.num_ranks)) - heard:
                raise ScheduleError(
                    f"it ends without having heard of rank {min(missing)}",
                    where=run.place(rank),
                    remedy="everybody must be heard of",
                )
    return all(len(variants) == 1 for variants in ordered.values())


class _Sums:
    """Symbolic sums, which are numbered. Sums with equal numbers have equal terms, added in the same order. a + b
    counts as b + a, because both round to the same value."""

    def __init__(self) -> None:
        self.terms: list[Counter[_Key]] = [Counter()]
        self._numbers: dict[tuple[int, int] | _Key | tuple[str, _Key], int] = {}
        self._made_of: list[tuple[int, int] | _Key] = [(0, 0)]

    def term(self, key: _Key) -> int:
        return self._number(("term", key), Counter([key]), key)

    def add(self, left: int, right: int) -> int:
        if not left or not right:
            return left or right
        key = (min(left, right), max(left, right))
        return self._number(key, self.terms[left] + self.terms[right], key)

    def moved(self, value: int, further: int) -> int:
        """The same sum with its position shifted by ``further`` elements."""
        if not further or not value:
            return value
        terms = self.terms[value]
        if terms.total() == 1:
            ((rank, offset),) = terms
            return self.term((rank, offset - further))
        left, right = self._made_of[value]
        return self.add(self.moved(left, further), self.moved(right, further))

    def _number(self, key: tuple[str, _Key] | _Key, terms: Counter[_Key], made_of: _Key) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.terms)
            self.terms.append(terms)
            self._made_of.append(made_of)
        return self._numbers[key]


class _Memory:
    """A rank's memory: spans in order, each with the number of the sum that it holds (0: no sum)."""

    def __init__(self, space: int) -> None:
        self.spans: list[tuple[Span, int]] = [((0, space), 0)] if space else []

    def read(self, span: Span) -> list[tuple[Span, int]]:
        if span[0] == span[1]:
            return []
        return [
            ((max(begin, span[0]), min(end, span[1])), value)
            for (begin, end), value in self.spans
            if begin < span[1] and end > span[0]
        ]

    def write(self, parts: Sequence[tuple[Span, int]]) -> None:
        """Write neighbouring spans, given in order."""
        if not parts:
            return
        begin, end = parts[0][0][0], parts[-1][0][1]
        left = [((span[0], min(span[1], begin)), value) for span, value in self.spans if span[0] < begin]
        right = [((max(span[0], end), span[1]), value) for span, value in self.spans if span[1] > end]
        self.spans = _joined([*left, *parts, *right])


def _joined(parts: Sequence[tuple[Span, int]]) -> list[tuple[Span, int]]:
    merged: list[tuple[Span, int]] = []
    for span, value in parts:
        if merged and merged[-1][1] == value:
            merged[-1] = ((merged[-1][0][0], span[1]), value)
        else:
            merged.append((span, value))
    return merged


class _Run:
    def __init__(self, steps: Steps, each: Sequence[Program]) -> None:
        self.steps, self.sums = steps, _Sums()
        self.memories = [_Memory(steps.space) for _ in each]
        self.heard = [{rank} for rank in range(len(each))]
        for rank, spans in enumerate(steps.before):
            for span in spans:
                self.memories[rank].write([(span, self.sums.term((rank, 0)))] if span[0] < span[1] else [])
        self._todo = [deque(move for moves in program for move in moves) for program in each]
        self._under_way: dict[tuple[int, int], deque[tuple[list[tuple[Span, int]], int, set[int]]]] = {}

    def all(self) -> None:
        while any(self._todo):
            moved = [self._go_on(rank) for rank in range(len(self._todo))]
            if not any(moved):
                waiting = {rank: todo[0].source for rank, todo in enumerate(self._todo) if todo}
                raise ScheduleError(
                    "; ".join(f"rank {rank} waits for rank {source}" for rank, source in waiting.items()),
                    where=self.place(min(waiting)),
                    remedy="every receive needs its send, sent before the sender waits for this rank",
                )
        for (source, target), queue in self._under_way.items():
            if queue:
                raise ScheduleError(
                    f"it sends rank {target} {queue[0][1]} elements, which that rank does not take",
                    where=self.place(source),
                    remedy="every send needs its receive",
                )

    def _go_on(self, rank: int) -> bool:
        """Run moves until the rank must wait. Returns whether any move ran."""
        todo, moved = self._todo[rank], False
        while todo and self._done(rank, todo[0]):
            todo.popleft()
            moved = True
        return moved

    def _done(self, rank: int, move: Move) -> bool:
        queue = self._under_way.setdefault((move.source, move.target), deque())
        if move.source == rank:
            parts = self._read(rank, move.begin, move.length)
            if move.target == rank:
                self._take(rank, parts, move.into, move.adds)
            else:
                queue.append((parts, move.length, set(self.heard[rank])))
            return True
        if not queue:
            return False
        parts, length, heard = queue.popleft()
        if length != move.length:
            raise ScheduleError(
                f"it takes {move.length} elements of rank {move.source}, which sends {length}",
                where=self.place(rank),
                remedy="both must name the same elements",
            )
        self.heard[rank] |= heard
        self._take(rank, parts, move.into, move.adds)
        return True

    def _read(self, rank: int, begin: int, length: int) -> list[tuple[Span, int]]:
        """The sums in ``length`` elements from ``begin`` on, with spans relative to ``begin``."""
        parts = self.memories[rank].read((begin, begin + length))
        for span, value in parts:
            if not value:
                raise ScheduleError(
                    f"it reads elements {span[0]} to {span[1]}, where nothing is", where=self.place(rank),
                    remedy="they must have come from somewhere before",
                )  # fmt: skip
        return [((span[0] - begin, span[1] - begin), self.sums.moved(value, -begin)) for span, value in parts]

    def _take(self, rank: int, parts: list[tuple[Span, int]], into: int, adds: bool) -> None:
        laid = [((span[0] + into, span[1] + into), self.sums.moved(value, into)) for span, value in parts]
        if adds:
            laid = [
                (there, self.sums.add(value, held))
                for span, value in laid
                for there, held in self.memories[rank].read(span)
            ]
        self.memories[rank].write(laid)

    def place(self, rank: int) -> str:
        return f"{self.steps.operation} {self.steps.algorithm}, rank {rank}"


def _sum(terms: Counter[_Key]) -> str:
    """The sum as text. ``x0 + 2 x1 + x2[+4]``: terms of ranks 0, 1 (twice) and 2, the last from 4 elements further
    on."""
    words = []
    for (rank, offset), times in sorted(terms.items()):
        words.append(f"{f'{times} ' if times > 1 else ''}x{rank}{f'[{offset:+d}]' if offset else ''}")
    return " + ".join(words) or "nothing"
