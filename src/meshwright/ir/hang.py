"""Explains why ranks wait, from their flight recorders: who is missing, in what, and what the others wait for.

    rank 0 ──waits for──▶ rank 1 ──waits for──▶ rank 2, which runs and waits for nobody: it is the cause
    rank 0 ──waits for──▶ rank 1 ──waits for──▶ rank 0: a circle, which never ends

A rank waits for all ranks of a group that have not begun the operation for which it waits.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from meshwright.ir.flight import Condition, Event, Flight, Seen

Kind = Literal["mismatch", "circle", "ended", "stopped", "silent", "slow", "link"]
"""Why ranks wait. ``mismatch``: ranks run different operations as the same one. ``circle``: ranks wait for each other.
``slow``: a rank that runs has not come. ``link``: all have come, and data does not arrive. The others are conditions of
a rank that has not come."""

_LIBRARIES = ("/meshwright/", "/site-packages/", "/lib/python", "<")
"""Parts of the lines of a stack that are not of the program itself."""
STALE_S = 3.0
"""A rank whose last sign of life is older gives none."""
_BY_CONDITION: dict[Condition, Kind] = {
    "ended": "ended", "stopped": "stopped", "silent": "silent", "unknown": "silent", "runs": "slow",
}  # fmt: skip


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that waits: for which operation, how long, and which ranks have not begun it (``missing``), or have begun
    it and do something else (``busy``)."""

    rank: int
    event: Event
    waited_s: float
    missing: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Why ranks wait. ``causes``: the ranks to look at. ``problem`` says what is wrong with them. ``lines`` is the
    whole report."""

    kind: Kind
    causes: tuple[int, ...]
    problem: str
    waits: tuple[Waiting, ...]
    lines: tuple[str, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Whether waiting longer cannot help."""
        return self.kind in ("mismatch", "circle")

    @property
    def where(self) -> str:
        """The ranks to look at, in words."""
        return named(self.causes)

    @property
    def state(self) -> tuple[object, ...]:
        """What stays the same as long as nothing moves."""
        return self.kind, self.causes, self.problem


def text_of(event: Event) -> str:
    """An operation in words."""
    return f"#{event.sequence} {event.what}"


def named(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 1, 2 and 5``."""
    names = [f"{rank}" for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}" if names else "no rank"


def explain(seen: Mapping[int, Seen], least_s: float = 0.0) -> Hang | None:
    """Explain why ranks wait; None if no rank has waited for at least ``least_s`` seconds."""
    waits = tuple(_waits(seen, least_s))
    if not waits:
        return None
    living = tuple(wait for wait in waits if seen[wait.rank].condition not in ("ended", "stopped"))
    hang = _mismatch(seen, waits) or _circle(living) or _missing(seen, waits)
    return msgspec.structs.replace(hang, lines=tuple(_lines(seen, hang)))


def _waits(seen: Mapping[int, Seen], least_s: float) -> Iterator[Waiting]:
    for rank, (flight, condition) in sorted(seen.items()):
        if flight is None:
            continue
        gone = condition == "ended" or flight.ended_s > 0
        now_s = (flight.ended_s or flight.beat_s) if gone else flight.now_s
        failed = flight.events[-1:] if gone else ()  # for this it waited when it ended
        for event in [*flight.awaited, *(event for event in failed if event.done_s < 0)]:
            waited_s = max(0.0, (now_s if event.done_s >= 0 else -event.done_s) - event.waits_s)
            if waited_s >= least_s:
                missing, busy = _absent(seen, rank, flight, event)
                yield Waiting(rank=rank, event=event, waited_s=waited_s, missing=missing, busy=busy)


def _absent(
    seen: Mapping[int, Seen], rank: int, flight: Flight, event: Event
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that have not begun an operation, and those that have begun it but neither wait for it nor are done."""
    missing, busy = [], []
    group = flight.groups.get(event.group)
    for other in group.ranks if group is not None else ():
        other_flight = seen[other].flight if other in seen else None
        if other == rank:
            continue
        progress = other_flight.groups.get(event.group) if other_flight is not None else None
        if other_flight is None or progress is None or progress.begun < event.sequence:
            missing.append(other)
        elif (same := _same(other_flight, event)) is not None and not same.waits_s and not same.done_s:
            busy.append(other)
    return tuple(missing), tuple(busy)


def _same(flight: Flight, event: Event) -> Event | None:
    """Another rank's record of the same operation; None if it holds it no more."""
    return next(
        (each for each in reversed(flight.events) if (each.group, each.sequence) == (event.group, event.sequence)),
        None,
    )


# --- the kinds of hangs ----------------------------------------------------------------------------------------------


def _mismatch(seen: Mapping[int, Seen], waits: tuple[Waiting, ...]) -> Hang | None:
    """Ranks that run different operations where all must run the same one; the fewest of them are the cause."""
    for wait in waits:
        kinds: dict[int, dict[int, Event]] = {}
        flight = seen[wait.rank].flight
        group = flight.groups.get(wait.event.group) if flight is not None else None
        for rank in group.ranks if group is not None else ():
            theirs = seen[rank].flight if rank in seen else None
            same = _same(theirs, wait.event) if theirs is not None else None
            if same is not None and same.signature:
                kinds.setdefault(same.signature, {})[rank] = same
        if len(kinds) > 1:
            first, *_, last = sorted(kinds.values(), key=lambda each: (-len(each), min(each)))
            ours, theirs_ = min(first), min(last)
            problem = (
                f"it is in {text_of(last[theirs_])}, where {named(first)} {'is' if len(first) == 1 else 'are'} in "
                f"{text_of(first[ours])}"
            )
            if len(last) > 1:
                problem = "they are" + problem.removeprefix("it is")
            return Hang(kind="mismatch", causes=tuple(sorted(last)), problem=problem, waits=waits)
    return None


def _circle(waits: tuple[Waiting, ...]) -> Hang | None:
    """A circle of ranks, each of which waits for the next one to begin something. A rank that waits for whichever of
    several operations comes first is in no circle."""
    counts: dict[int, int] = {}
    for wait in waits:
        counts[wait.rank] = counts.get(wait.rank, 0) + 1
    only = {wait.rank: wait for wait in waits if counts[wait.rank] == 1}
    for start in sorted(only):
        path = _path_back(start, only)
        if path:
            steps = (
                f"rank {rank} waits for rank {other} in {text_of(only[rank].event)}"
                for rank, other in zip(path, [*path[1:], path[0]], strict=True)
            )
            problem = f"they wait for each other in a circle: {'; '.join(steps)}"
            return Hang(kind="circle", causes=tuple(sorted(path)), problem=problem, waits=waits)
    return None


def _path_back(start: int, waits: Mapping[int, Waiting]) -> list[int]:
    """The shortest way from a rank along ranks that it waits for, back to itself; empty if there is none."""
    paths, known = [[start]], {start}
    while paths:
        path = paths.pop(0)
        for other in waits[path[-1]].missing:
            if other == start:
                return path
            if other in waits and other not in known:
                known.add(other)
                paths.append([*path, other])
    return []


def _missing(seen: Mapping[int, Seen], waits: tuple[Waiting, ...]) -> Hang:
    """The ranks that others wait for, and that wait for nobody."""
    waiting = {wait.rank for wait in waits}
    late = {rank for wait in waits for rank in wait.missing or wait.busy} - waiting
    if unable := {rank for rank in _awaited(seen, waits) if _cannot_go_on(seen.get(rank))}:
        late = unable  # also if they had begun the operation, or wait themselves
    if not late:
        return Hang(kind="link", causes=tuple(sorted(waiting)), problem=_link(seen, waits), waits=waits)
    order: tuple[Kind, ...] = ("ended", "stopped", "silent", "slow")
    kinds = {rank: _BY_CONDITION[seen[rank].condition if rank in seen else "unknown"] for rank in late}
    kind = min(kinds.values(), key=order.index)
    causes = tuple(sorted(rank for rank in late if kinds[rank] == kind))
    problem = "; ".join(dict.fromkeys(doing(seen.get(rank)) for rank in causes))
    return Hang(kind=kind, causes=causes, problem=problem, waits=waits)


def _awaited(seen: Mapping[int, Seen], waits: tuple[Waiting, ...]) -> set[int]:
    """All ranks of the groups in which ranks wait."""
    ranks: set[int] = set()
    for wait in waits:
        flight = seen[wait.rank].flight
        group = flight.groups.get(wait.event.group) if flight is not None else None
        ranks.update(group.ranks if group is not None else ())
    return ranks


def _cannot_go_on(seen: Seen | None) -> bool:
    """Whether a rank is stopped, or has ended without a word."""
    flight, condition = seen if seen is not None else Seen(None, "unknown")
    return condition == "stopped" or (condition == "ended" and (flight is None or not flight.ended_s))


def _link(seen: Mapping[int, Seen], waits: tuple[Waiting, ...]) -> str:
    flights = [flight for rank in {wait.rank for wait in waits} if (flight := seen[rank].flight) is not None]
    boxes = {flight.box for flight in flights}
    between = f"between {', '.join(sorted({flight.host for flight in flights}))}" if len(boxes) > 1 else "of this host"
    return f"all ranks have come, and what they send does not arrive: look at the links {between}"


def doing(seen: Seen | None) -> str:
    """What a rank does that waits for nobody, in words."""
    flight, condition = seen if seen is not None else Seen(None, "unknown")
    if flight is None:
        return "nothing of it can be read from here" if condition != "ended" else "its process has ended"
    last = f"; the last that it did was {text_of(flight.last)}" if flight.last is not None else ""
    if condition == "ended":
        return f"its process has ended{f': {flight.ending}' if flight.ending else ''}{last}"
    if condition == "stopped":
        return f"its process is stopped by a signal (kill -CONT {flight.process} lets it go on){last}"
    if condition == "silent":
        ago = max(0.0, flight.now_s - flight.beat_s)
        return f"it has given no sign of life for {ago:.1f} s: it is cut off, or its interpreter is kept busy{last}"
    since = f" since {flight.now_s - flight.last.done_s:.1f} s" if flight.last is not None else ""
    return f"it runs, and has not communicated{since}{last}"


# --- the report ------------------------------------------------------------------------------------------------------


def _waiting_line(waits: list[Waiting]) -> str:
    """One line about ranks that wait for the same operation and the same ranks."""
    first, longest_s = waits[0], max(wait.waited_s for wait in waits)
    have, late = "has" if len(waits) == 1 else "have", ""
    if absent := first.missing or first.busy:
        did = "not begun it" if first.missing else "begun it and does something else"
        late = f"; {named(absent)} {'has' if len(absent) == 1 else 'have'} {did}"
    return f"{named(wait.rank for wait in waits)} {have} waited {longest_s:.1f} s for {text_of(first.event)}{late}"


def _lines(seen: Mapping[int, Seen], hang: Hang) -> Iterator[str]:
    yield f"{hang.where}: {hang.problem}"
    alike: dict[tuple[object, ...], list[Waiting]] = {}
    for wait in hang.waits:
        alike.setdefault((wait.event.group, text_of(wait.event), wait.missing, wait.busy), []).append(wait)
    yield from (f"  {_waiting_line(each)}" for each in alike.values())
    for rank, (flight, condition) in sorted(seen.items()):
        waits = any(wait.rank == rank for wait in hang.waits)
        if not waits and rank not in hang.causes:
            yield f"  rank {rank}: {doing(Seen(flight, condition))}"
        if flight is None or flight.notes.time_s < flight.moved_s:  # what it noted before it went on
            continue
        notes = flight.notes
        if notes.stack and rank in hang.causes:
            yield f"  rank {rank} is at" + "".join(f"\n      {line}" for line in notes.stack)
        elif callers := [line for line in notes.stack if not any(part in line for part in _LIBRARIES)]:
            yield f"  rank {rank} waits in {callers[-1]}"
        for line in (*(notes.links if hang.kind in ("link", "silent") else ()), *notes.pytorch):
            yield f"  rank {rank}: {line}"
