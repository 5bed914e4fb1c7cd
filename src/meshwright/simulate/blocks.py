"""Blocks: the operations of an action that need no other class of ranks, so that they run without stops.

Most actions compute, and meet only ranks of their own class. All of these arrive at the same time. So the times of such
an action follow from the time at which it begins, and from the times at which its groups become free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.cost.work import Compute
from meshwright.ir.schedule import Action
from meshwright.simulate.program import Meet, Op, Until, name_of
from meshwright.simulate.spans import COMMUNICATION, COMPUTE, WAIT, PlayedSpan

GroupKey = tuple[str, tuple[int, ...]]
"""An axis, and the classes of the ranks that meet."""


class BlockStep(NamedTuple):
    """An operation of a block: computing, or the start or the end of a collective, or both (``starts`` and ``ends``).
    ``place`` is the index of the collective's group, and ``number`` its number in the block; -1: computing."""

    op: Compute | Meet
    seconds: float
    place: int
    number: int
    starts: bool
    ends: bool


class ActionBlock(NamedTuple):
    """Operations without stops. ``groups`` are the groups of their collectives, and ``number`` is the number of these
    collectives."""

    steps: tuple[BlockStep, ...]
    groups: tuple[GroupKey, ...]
    number: int

    def run(
        self, now_s: float, free_s: list[float], spans: list[PlayedSpan] | None = None, label: str | Action = ""
    ) -> float:  # fmt: skip
        """The end of the block if it begins at ``now_s``. ``free_s`` has the times from which its groups are free, and
        gets the new times. ``spans`` gets the spans of the block."""
        ends_s = [0.0] * self.number
        for op, seconds, place, number, starts, ends in self.steps:
            if place < 0:
                end_s = now_s + seconds
                if spans is not None:
                    assert isinstance(op, Compute)
                    spans.append((COMPUTE, op.what or label, now_s, end_s, op.bytes, op.flops))
                now_s = end_s
                continue
            if starts:
                start_s = max(now_s, free_s[place])
                ends_s[number] = free_s[place] = start_s + seconds
                if spans is not None:
                    assert isinstance(op, Meet)
                    span = COMMUNICATION, name_of(op, label), start_s, free_s[place], op.piece.bytes, 0.0
                    spans.append(span)
            if ends and ends_s[number] > now_s:
                if spans is not None:
                    assert isinstance(op, Meet)
                    spans.append((WAIT, name_of(op, label), now_s, ends_s[number], 0, 0.0))
                now_s = ends_s[number]
        return now_s


@dataclass(frozen=True, slots=True)
class RanBlock:
    """A block that has run: when it began, and when its groups were free then."""

    block: ActionBlock
    label: str | Action
    began_s: float
    free_s: tuple[float, ...]

    def spans(self) -> list[PlayedSpan]:
        """The spans of the block."""
        spans: list[PlayedSpan] = []
        self.block.run(self.began_s, [*self.free_s], spans, self.label)
        return spans


def block_of(ops: Sequence[Op], group_of: Callable[[Meet], GroupKey | None]) -> ActionBlock | None:
    """The block of these operations; None if they may stop their rank. ``group_of`` returns the group of a collective,
    or None if ranks of other classes are in it."""
    steps: list[BlockStep] = []
    places: dict[GroupKey, int] = {}
    begun: dict[tuple[int, str], tuple[Meet, int, int]] = {}
    count = 0
    for op in ops:
        if isinstance(op, Compute):
            steps.append(BlockStep(op, op.seconds, -1, -1, starts=False, ends=False))
        elif isinstance(op, Meet):
            group = group_of(op)
            if group is None or op.key in begun:
                return None
            begun[op.key] = op, places.setdefault(group, len(places)), count
            steps.append(BlockStep(op, op.seconds, begun[op.key][1], count, starts=True, ends=False))
            count += 1
        elif isinstance(op, Until) and op.key in begun:
            meet, place, number = begun.pop(op.key)
            last = steps[-1]
            if last.op is meet and last.starts:
                steps[-1] = last._replace(ends=True)
            else:
                steps.append(BlockStep(meet, meet.seconds, place, number, starts=False, ends=True))
        else:
            return None
    return ActionBlock(tuple(steps), tuple(places), count) if not begun else None
