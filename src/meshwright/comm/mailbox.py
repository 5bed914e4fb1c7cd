"""Letters between replicas, which may be late, die and join: no process group could carry them.

A participant (a replica, or a server) has one mailbox on each rank; ranks of the same index write to each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from meshwright.errors import LostRankError

WAIT_S = 600.0
"""Seconds that a participant waits for the others, unless it is given another time."""


class Letter(NamedTuple):
    """A message. ``kind`` says how to read ``numbers``, ``text`` and ``tensors`` (one-dimensional, on the CPU). The
    receiver may keep and change the tensors."""

    sender: str
    kind: str
    numbers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    text: str = ""


class View(NamedTuple):
    """Who lives, as all participants see it: views follow each other, and everybody sees the same ones. ``epoch`` is
    the number of the view. ``members`` are the names of those that live and have not left: ``replica 0``,
    ``server 0.1``. ``joined`` has the epoch in which each member joined."""

    epoch: int
    members: tuple[str, ...]
    joined: dict[str, int]


class Mailbox(ABC):
    """Sends letters to other participants, and receives theirs.

    Letters of one sender arrive in the order in which they were sent, once, or, if a participant dies, a first part of
    them. A letter to a participant that is dead or has left is dropped. Letters of a participant that has died may
    still arrive after the view that says so, but not after the view in which it joins again; its letters of the new
    life arrive after that view, and none that were sent to its former life.
    """

    name: str
    """The name of the participant to which this mailbox belongs."""
    sent_bytes: int = 0
    """The bytes of tensors that were sent so far, without letters that were dropped."""

    @property
    @abstractmethod
    def view(self) -> View:
        """The newest view that ``receive`` has announced."""

    @abstractmethod
    def send(
        self, to: str, kind: str, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = (), text: str = ""
    ) -> None:
        """Send a letter. The tensors are one-dimensional and on the CPU; afterwards they may be overwritten. Waits if
        too many letters to this participant are under way (back pressure), but never for one that has died."""

    @abstractmethod
    def receive(self, wait_s: float = 0.0) -> Letter | None:
        """The next letter, in the order of arrival. Without a letter, wait up to ``wait_s`` seconds; return None if
        none has come, or as soon as the view has changed. ``view`` changes here alone, by one view at a time."""

    @abstractmethod
    def leave(self) -> None:
        """Leave: all later views are without this participant. What was sent before still arrives. Afterwards, letters
        are neither sent nor received."""

    def receive_until(
        self, done: Callable[[], bool], take: Callable[[Letter], object], what: str, wait_s: float = WAIT_S
    ) -> None:
        """Give letters to ``take`` until ``done()``, which is asked after each letter and each change of the view.

        Raises:
            LostRankError: not done, and no letter and no change for ``wait_s`` seconds. ``what`` says what was awaited.
        """
        while not done():
            epoch = self.view.epoch
            letter = self.receive(wait_s)
            if letter is not None:
                take(letter)
            elif self.view.epoch == epoch:
                remedy = "look at what the others do; MESHWRIGHT_TIMEOUT_S sets how long replicas wait for each other"
                raise LostRankError(f"{what} has not come within {wait_s:g} s", where=self.name, remedy=remedy)


def replica_name(replica: int) -> str:
    """The name of a replica, as a participant."""
    return f"replica {replica}"


def replica_number(name: str) -> int:
    """The inverse of ``replica_name``."""
    return int(name.removeprefix("replica "))


def replicas_of(members: Sequence[str]) -> list[int]:
    """The numbers of the replicas among participants, in rising order."""
    return sorted(replica_number(name) for name in members if name.startswith("replica "))
