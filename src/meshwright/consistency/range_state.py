"""The state of a range on a server, as a state machine: equal operations in equal order give equal states.

Operations come from replicas (``push``, ``join``, ``load``) and from views (``gone``); replies go to replicas. A
replica that has pushed waits for its reply; the rule decides when the reply is due. ``pull`` and ``save`` only read.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from meshwright.ir.consistency import Consistency

OperationKind = Literal["push", "join", "gone", "load", "pull", "save"]
KINDS: tuple[OperationKind, ...] = get_args(OperationKind)


_MAPS = ("clocks", "pushed", "joined", "waits")


class Operation(NamedTuple):
    """An operation on a range. ``number``: the clock of a ``push``; the epoch in which the replica joined, of ``join``
    and ``gone``; the version that is loaded. ``tensors``, ``text``: the gradients of a push and the hyperparameters for
    them; the state to load."""

    kind: OperationKind
    replica: int
    number: int
    tensors: tuple[Tensor, ...] = ()
    text: str = ""


class Reply(NamedTuple):
    """The reply that a replica gets. ``numbers``: the kind (its index in ``KINDS``) and the number of the operation,
    the replica's clock, the version of the state, and then pairs of a living replica and its clock."""

    replica: int
    numbers: tuple[int, ...]
    tensors: tuple[Tensor, ...]


class RangeState(ABC):
    """The clocks of the replicas, and the replicas that wait for a reply.

    Attributes:
        clocks: maps the living replicas to their clocks.
        pushed: the clock of the last push of each replica, alive or dead. A repeated push counts once.
        joined: the epoch in which each replica joined.
        waits: maps the replicas that wait for a reply to the kind and the number of their operation.
        version: the number of steps that the optimizer has made.
    """

    version = 0

    def __init__(self, rule: Consistency, num_replicas: int) -> None:
        self.rule, self.num_replicas = rule, num_replicas
        self.clocks = dict.fromkeys(range(num_replicas), 0)
        self.pushed = dict.fromkeys(range(num_replicas), 0)
        self.joined = dict.fromkeys(range(num_replicas), 0)
        self.waits: dict[int, tuple[OperationKind, int]] = {}

    # --- operations --------------------------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> list[Reply]:
        """Do an operation, and return the replies that are due."""
        kind, replica, number, tensors, text = operation
        if self.is_done(operation):
            return []
        if kind == "push":
            self.pushed[replica] = number
            self._add(replica, number, tensors, text)
            if replica in self.clocks:  # the last push of a replica that has died counts, but needs no reply
                self.clocks[replica], self.waits[replica] = number, (kind, number)
        elif kind == "join":
            self.joined[replica] = number
            self.clocks[replica] = self.pushed[replica] = self._clock_of_a_joining_replica()
            self.waits[replica] = (kind, number)
        elif kind == "gone":
            self.clocks.pop(replica, None)
            self.waits.pop(replica, None)
        return self._settle()

    def is_done(self, operation: Operation) -> bool:
        """Whether this operation was already done, or changes nothing."""
        kind, replica, number, *_ = operation
        match kind:
            case "push":
                return number <= self.pushed.get(replica, 0)
            case "join":
                return number <= self.joined.get(replica, -1)
            case "gone":
                return replica not in self.clocks or number != self.joined[replica]
            case _:
                return True

    def again(self, operation: Operation) -> list[Reply]:
        """The reply, if it is due, to an operation that changes nothing, or that was already done for a replica that
        did not receive the reply."""
        kind, replica, number, *_ = operation
        if replica not in self.clocks or self.waits.get(replica) == (kind, number):
            return []
        return [self._reply(replica, kind, number)] if kind != "push" or self.pushed[replica] == number else []

    # --- copies ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The complete state, for another copy."""
        return {"version": self.version} | {name: dict(getattr(self, name)) for name in _MAPS}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.version = state["version"]
        for name in _MAPS:
            setattr(self, name, dict(state[name]))

    # --- for rules ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _add(self, replica: int, clock: int, gradients: Sequence[Tensor], text: str) -> None:
        """Keep the gradients of a push until they are used."""

    @abstractmethod
    def _settle(self) -> list[Reply]:
        """Do what the rule permits now, and return the replies that are due."""

    @abstractmethod
    def _reply(self, replica: int, kind: OperationKind, number: int) -> Reply:
        """The reply to a replica's operation."""

    def _clock_of_a_joining_replica(self) -> int:
        return min(self.clocks.values(), default=max(self.pushed.values()))

    def _numbers(self, replica: int, kind: OperationKind, number: int) -> tuple[int, ...]:
        pairs = [value for pair in sorted(self.clocks.items()) for value in pair]
        return (KINDS.index(kind), number, self.clocks[replica], self.version, *pairs)


def add_to(waiting: dict[int, list[Tensor]], replica: int, gradients: Sequence[Tensor]) -> None:
    """Add gradients to the waiting gradients of this replica."""
    if replica in waiting:
        for mine, new in zip(waiting[replica], gradients, strict=True):
            mine += new
    else:
        waiting[replica] = list(gradients)


def taken_mean(waiting: dict[int, list[Tensor]], num_replicas: int) -> list[Tensor]:
    """Take all waiting gradients: their sum in the order of replicas, divided by the number of all replicas. So every
    gradient has the same weight, whichever replicas live."""
    first, *others = sorted(waiting)
    total = waiting.pop(first)
    for replica in others:
        for mine, new in zip(total, waiting.pop(replica), strict=True):
            mine += new
    for tensor in total:
        tensor /= num_replicas
    return total
