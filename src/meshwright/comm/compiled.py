"""Turns one rank's part of a collective into a flat list of messages, each short enough to stay in cache.

In each round a rank puts (sends) and takes (receives) messages. Take n follows put n + ``LAG``, so that a rank adds up
one message while the next message is under way:

    put 0   put 1   put 2   take 0   put 3   take 1   put 4   take 2   take 3   take 4

All ranks order their messages alike: by round, then by the fraction of the lane's messages that precede the message. So
the slowest rank can always continue: the message that it waits for has already been sent, and the lane into which it
sends holds at most ``LAG`` messages that have not been taken. A lane therefore needs room for ``LAG`` + 1 messages.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.errors import ScheduleError
from meshwright.schedules.collectives.coded import CodedSteps, chunks
from meshwright.schedules.collectives.steps import Program

LAG = 2
"""The number of messages by which takes follow puts: a rank puts message n + ``LAG`` before it takes message n."""

PUT, EXPECT, ADD, KEEP, COPY, ENCODE, FORWARD, DECODE_ADD, DECODE = range(9)


class CompiledStep(NamedTuple):
    """One action on the elements from ``begin`` to ``end``. PUT sends the elements to ``peer``. EXPECT announces that
    this rank will take a message of this length from ``peer``. ADD takes a message and reduces it into the elements.
    KEEP takes a message and overwrites the elements with it. COPY copies the elements to position ``into``.

    In coded collectives, ENCODE and FORWARD send the elements in coded form. ENCODE encodes them, and FORWARD sends the
    bytes of an earlier ENCODE or DECODE. DECODE_ADD and DECODE receive such a message, and add or store the decoded
    elements. ``code`` is the encoding (``schedules/collectives/coded.py``); ``code`` and ``begin`` identify these
    bytes."""

    kind: int
    peer: int
    begin: int
    end: int
    into: int = 0
    code: int = -1


PUTS = (PUT, ENCODE, FORWARD)
"""The kinds of steps that send a message."""


class Compiled(NamedTuple):
    """One rank's ``steps``, in order. ``ahead`` lists the indices of the first round's PUT and EXPECT steps that may
    run before all other steps, while the lanes have room. ``rest_puts`` tells whether the other steps include a PUT."""

    steps: tuple[CompiledStep, ...]
    ahead: tuple[int, ...]
    rest_puts: bool
    writes: tuple[tuple[int, int], ...]
    """(begin, end) of the elements that each receive or copy writes."""


def compiled(rank: int, program: Program, num_per_message: int, most_ahead: int, *, expects: bool) -> Compiled:
    """Turn a rank's program into steps with messages of at most ``num_per_message`` elements. ``expects`` adds EXPECT
    steps. For each peer, ``ahead`` lists at most ``most_ahead`` PUT steps and at most ``most_ahead`` EXPECT steps.

    Raises:
        ScheduleError: a round would overwrite elements before it has sent them.
    """
    steps: list[CompiledStep] = []
    ahead: list[int] = []
    writes: list[tuple[int, int]] = []
    for index, moves in enumerate(program):
        puts: dict[int, list[CompiledStep]] = {}
        takes: dict[int, list[CompiledStep]] = {}
        copies: list[CompiledStep] = []
        for move in moves:
            if move.target == rank:
                writes.append((move.into, move.into + move.length))
            if move.source == move.target:
                copies.append(CompiledStep(COPY, -1, move.begin, move.begin + move.length, move.into))
                continue
            kind, side, peer, first = ADD if move.adds else KEEP, takes, move.source, move.into
            if move.source == rank:
                kind, side, peer, first = PUT, puts, move.target, move.begin
            parts = side.setdefault(peer, [])
            for begin in range(first, first + max(move.length, 1), num_per_message):
                parts.append(CompiledStep(kind, peer, begin, min(begin + num_per_message, first + move.length)))
        round_steps = in_turn(list(puts.values()), list(takes.values()), expects=expects)
        _check(round_steps)
        if not index and not copies:
            ahead = first_of_each(round_steps, most_ahead)
        steps += copies + round_steps
    return Compiled(tuple(steps), tuple(ahead), _puts_later(steps, ahead), tuple(writes))


def compiled_coded(
    rank: int, coded: CodedSteps, num_per_message: int, chunk: int, most_ahead: int, *, expects: bool
) -> Compiled:
    """Turn a rank's part of a coded collective into steps, as ``compiled`` does. Each coded message is one chunk of an
    atom, with at most ``chunk`` elements. Other messages have at most ``num_per_message`` elements.

    Raises:
        ScheduleError: a round would overwrite elements before it has sent them.
    """
    steps: list[CompiledStep] = []
    ahead: list[int] = []
    for moves in coded.rounds:
        sides: tuple[dict[int, list[CompiledStep]], ...] = ({}, {})
        for move in (move for move in moves if rank in (move.source, move.target)):
            puts = move.source == rank
            peer = move.target if puts else move.source
            parts = sides[not puts].setdefault(peer, [])
            if move.parts[0].code is None:
                span = (coded.atoms[move.parts[0].atom][0], coded.atoms[move.parts[-1].atom][1])
                kind = PUT if puts else ADD if move.adds else KEEP
                parts += [CompiledStep(kind, peer, *piece) for piece in chunks(span, num_per_message)]
                continue
            kind = ENCODE if puts else DECODE_ADD if move.adds else DECODE
            for part in move.parts:
                assert part.code is not None, "a message is coded as a whole"
                pieces = chunks(coded.atoms[part.atom], chunk)
                parts += [CompiledStep(kind, peer, *piece, 0, part.code) for piece in pieces]
        round_steps = in_turn(list(sides[0].values()), list(sides[1].values()), expects=expects)
        _check(round_steps)
        if not steps:
            ahead = first_of_each(round_steps, most_ahead)
        steps += round_steps
    known: set[tuple[int, int]] = set()
    for index, step in enumerate(steps):
        if step.kind == ENCODE and (step.code, step.begin) in known:
            steps[index] = step._replace(kind=FORWARD)
        elif step.kind in (ENCODE, DECODE):
            known.add((step.code, step.begin))
    return Compiled(tuple(steps), tuple(ahead), _puts_later(steps, ahead), ())


def _puts_later(steps: Sequence[CompiledStep], ahead: Sequence[int]) -> bool:
    rest = set(range(len(steps))) - set(ahead)
    return any(steps[index].kind in PUTS for index in rest)


def in_turn(puts: list[list[CompiledStep]], takes: list[list[CompiledStep]], *, expects: bool) -> list[CompiledStep]:
    """The steps of a round in the order in which they run. All lanes advance by equal fractions of their messages.
    Takes follow puts by ``LAG`` messages. The EXPECT step of take n is as early as put n."""
    keyed: list[tuple[float, int, CompiledStep]] = []
    for parts in puts:
        keyed += [(number / len(parts), 1, step) for number, step in enumerate(parts)]
    for parts in takes:
        keyed += [((number + LAG) / len(parts), 2, step) for number, step in enumerate(parts)]
        if expects:
            keyed += [(number / len(parts), 0, step._replace(kind=EXPECT)) for number, step in enumerate(parts)]
    return [step for _, _, step in sorted(keyed, key=lambda each: each[:2])]


def first_of_each(steps: list[CompiledStep], most: int) -> list[int]:
    """The indices of the first PUT and EXPECT steps, until a peer would have more than ``most`` steps of one kind."""
    counts: dict[tuple[bool, int], int] = {}
    indices = []
    for number, step in enumerate(steps):
        if step.kind in (EXPECT, *PUTS):
            key = (step.kind == EXPECT, step.peer)
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > most:
                break
            indices.append(number)
    return indices


def _check(steps: list[CompiledStep]) -> None:
    written: list[CompiledStep] = []
    for step in steps:
        if step.kind in (ADD, KEEP, DECODE_ADD, DECODE):
            written.append(step)
        elif step.kind in (PUT, ENCODE) and any(step.begin < other.end and other.begin < step.end for other in written):
            raise ScheduleError(
                f"elements {step.begin} to {step.end} are overwritten before they are sent",
                where="steps of a collective",
                remedy="send and receive the same elements in a round, or others",
            )
