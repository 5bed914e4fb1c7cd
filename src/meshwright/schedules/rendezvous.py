"""Checks that the messages and collectives of all ranks end, under the laws of NCCL.

A rank starts operations, and later waits for them. Each communicator of a rank runs its operations one after the other,
in the order in which the rank started them:

- A send ends when its peer receives, not before; until then it blocks its communicator. A collective ends when all its
  ranks have begun it.
- An operation may be a batch: sends and receives that NCCL runs as one group. They progress independently; the batch
  ends with the last of them. Messages from one rank to another keep their order.
- A wait blocks the rank's later kernels, and with them the operations that the rank starts later.

So ranks may wait for each other in a circle, although each message has its receive:

    rank 0    send A to 1 | receive B from 1          one communicator: both sends wait for ever
    rank 1    send B to 0 | receive A from 0          one for each direction: both end
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec


class Message(msgspec.Struct, frozen=True):
    """One message of a rank to or from the rank ``peer``: so many elements of a dtype."""

    sends: bool
    peer: int
    dtype: str = ""
    elements: int = 0


class StartedOperation(msgspec.Struct, frozen=True):
    """An operation that a rank starts. ``number`` is its number on this rank. ``communicator`` names the communicator,
    equal on all its ranks. It has ``messages``; or it is a collective of ``ranks``, equal on all of them in ``kind``,
    ``dtype`` and ``elements``. ``label`` names it in findings."""

    number: int
    communicator: str
    label: str = ""
    messages: tuple[Message, ...] = ()
    ranks: tuple[int, ...] = ()
    kind: str = ""
    dtype: str = ""
    elements: int = 0

    @property
    def alike(self) -> tuple[str, str, int]:
        """What must be equal on all ranks of a collective."""
        return self.kind, self.dtype, self.elements


class Awaited(msgspec.Struct, frozen=True):
    """A wait for the rank's operation of this number. ``kernels``: how many kernels the rank has launched since it
    started the operation, which may run meanwhile."""

    number: int
    kernels: int = 0


Stream = Sequence[StartedOperation | Awaited]
"""The operations and waits of one rank, in order."""


class Unmatched(msgspec.Struct, frozen=True):
    """An operation that does not end: on a rank, in words. ``mismatch``: its partners do something else; otherwise
    they never come, or wait for this rank in a circle."""

    rank: int
    what: str
    why: str
    mismatch: bool = False


@dataclass
class _Rank:
    stream: Stream
    at: int = 0
    running: dict[str, deque[StartedOperation]] = field(default_factory=dict)
    open: dict[int, list[Message]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def head(self, communicator: str) -> StartedOperation | None:
        queue = self.running.get(communicator)
        return queue[0] if queue else None

    def advance(self) -> bool:
        """Start operations up to the next wait for an operation that has not ended."""
        before = self.at
        while self.at < len(self.stream):
            entry = self.stream[self.at]
            if isinstance(entry, StartedOperation):
                self.running.setdefault(entry.communicator, deque()).append(entry)
                self.open[entry.number] = list(entry.messages)
            elif entry.number not in self.done:
                break
            self.at += 1
        return self.at > before

    def end(self, operation: StartedOperation) -> None:
        self.running[operation.communicator].popleft()
        self.done.add(operation.number)


def unmatched(streams: Mapping[int, Stream]) -> tuple[Unmatched, ...]:
    """Run the streams of all ranks. Return the operations that do not end; none if all end. After a mismatch, only the
    mismatch is returned: what follows from it says nothing."""
    ranks = {rank: _Rank(stream) for rank, stream in streams.items()}
    moved = True
    while moved:
        moved = sum(rank.advance() for rank in ranks.values()) > 0  # all of them
        for number, rank in ranks.items():
            for name in list(rank.running):
                ended = True
                while ended and (operation := rank.head(name)) is not None:
                    ended, problems = _try(ranks, number, operation)
                    if problems:
                        return tuple(problems)
                    moved |= ended
    return tuple(_stuck(ranks))


def _try(ranks: Mapping[int, _Rank], number: int, operation: StartedOperation) -> tuple[bool, list[Unmatched]]:
    """Try to end an operation at the head of its communicator."""
    if operation.ranks:
        return _meet(ranks, operation)
    rank = ranks[number]
    problems: list[Unmatched] = []
    left = rank.open[operation.number]
    for message in list(left):
        peer = ranks.get(message.peer)
        other = peer.head(operation.communicator) if peer is not None else None
        if peer is None or other is None or other.ranks:
            continue
        theirs = next((each for each in peer.open[other.number] if _fits(each, message, number)), None)
        if theirs is None:
            continue
        if (theirs.dtype, theirs.elements) != (message.dtype, message.elements):
            why = f"rank {message.peer} {_verb(theirs)} {_size(theirs.dtype, theirs.elements)} ({other.label})"
            what = f"{operation.label}: {_verb(message)} {_size(message.dtype, message.elements)}"
            problems.append(Unmatched(number, what, why, mismatch=True))
        left.remove(message)
        peer.open[other.number].remove(theirs)
        if not peer.open[other.number]:
            peer.end(other)
    if not left:
        rank.end(operation)
    return not left, problems


def _meet(ranks: Mapping[int, _Rank], operation: StartedOperation) -> tuple[bool, list[Unmatched]]:
    """Try to end a collective: all its ranks must be at it."""
    heads = {member: ranks[member].head(operation.communicator) for member in operation.ranks if member in ranks}
    present = {member: head for member, head in heads.items() if head is not None}
    for member, head in present.items():
        if not head.ranks or head.alike != operation.alike:
            first = operation.ranks[0]
            what = f"{operation.label}: {operation.kind} of {_size(operation.dtype, operation.elements)}"
            kind = head.kind or "messages"
            why = f"rank {member} is at {head.label}: {kind} of {_size(head.dtype, head.elements)}"
            return False, [Unmatched(first, what, why, mismatch=True)]
    if len(present) < len(operation.ranks):
        return False, []
    for member, head in present.items():
        ranks[member].end(head)
    return True, []


def _fits(theirs: Message, own: Message, number: int) -> bool:
    return theirs.sends != own.sends and theirs.peer == number


def _stuck(ranks: Mapping[int, _Rank]) -> Iterable[Unmatched]:
    """The operations at the heads of communicators that never end."""
    for number, rank in ranks.items():
        for name in rank.running:
            operation = rank.head(name)
            if operation is None:
                continue
            if operation.ranks:
                at = {member: ranks[member].head(name) for member in operation.ranks if member in ranks}
                missing = [member for member in operation.ranks if at.get(member) is None]
                why = f"rank {' '.join(map(str, missing))} does not come: {_where(ranks, missing)}"
            else:
                peers = sorted({message.peer for message in rank.open[operation.number]})
                verb = "receives" if any(message.sends for message in rank.open[operation.number]) else "sends"
                why = f"rank {' '.join(map(str, peers))} never {verb}: {_where(ranks, peers)}"
            yield Unmatched(number, operation.label, why)


def _where(ranks: Mapping[int, _Rank], numbers: Iterable[int]) -> str:
    """Where ranks are, in words."""
    places = []
    for number in numbers:
        rank = ranks.get(number)
        if rank is None:
            places.append(f"rank {number} was not run")
        elif rank.at == len(rank.stream):
            places.append(f"rank {number} has ended its step")
        else:
            entry = rank.stream[rank.at]
            labels = (
                each.label for each in rank.stream if isinstance(each, StartedOperation) and each.number == entry.number
            )
            places.append(f"rank {number} waits for {next(labels, 'an operation')}")
    return "; ".join(places)


def _verb(message: Message) -> str:
    return "sends" if message.sends else "receives"


def _size(dtype: str, elements: int) -> str:
    return f"{elements} x {dtype}"


def communicator(ranks: Sequence[int], name: str = "") -> str:
    """The name of a communicator of these ranks. Communicators of equal ranks have different names."""
    return f"{' '.join(map(str, ranks))} {name}".rstrip()


def as_of(stream: Stream, image: Callable[[int], int]) -> list[StartedOperation | Awaited]:
    """The stream of another rank that does the same as the rank of ``stream``, with other ranks. ``image`` maps each
    rank to the rank that takes its place; it is a permutation of all ranks."""
    result: list[StartedOperation | Awaited] = []
    moved: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]] = {}
    for entry in stream:
        if isinstance(entry, Awaited):
            result.append(entry)
            continue
        key = entry.communicator, entry.ranks
        if key not in moved:
            numbers, name = entry.communicator.split(), ""
            if not numbers[-1].isdecimal():
                name = numbers.pop()
            where = communicator(sorted(image(int(rank)) for rank in numbers), name)
            moved[key] = where, tuple(sorted(image(rank) for rank in entry.ranks))
        where, ranks = moved[key]
        messages = tuple(msgspec.structs.replace(each, peer=image(each.peer)) for each in entry.messages)
        result.append(msgspec.structs.replace(entry, communicator=where, ranks=ranks, messages=messages))
    return result
