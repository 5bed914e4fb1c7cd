"""Letters between replicas. Replicas may be late, die and join, so a process group could not carry their messages.

A participant (a replica or a server) has one mailbox on each of its ranks. Ranks with the same index send letters to
each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from meshwright.errors import LostRankError

WAIT_S = 600.0
"""The default time, in seconds, that a participant waits for the others."""


class Letter(NamedTuple):
    """A message. ``kind`` decides how to read ``numbers``, ``text`` and ``tensors`` (one-dimensional, on the CPU). The
    receiver may keep the tensors and change them."""

    sender: str
    kind: str
    numbers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    text: str = ""


class View(NamedTuple):
    """The participants that are alive, as all participants agree. All participants see the same sequence of views.
    ``epoch`` is the number of the view. ``members`` are the names of the participants that are alive and have not left:
    ``replica 0``, ``server 0.1``. ``joined`` has, for each member, the epoch in which it joined."""

    epoch: int
    members: tuple[str, ...]
    joined: dict[str, int]


class Mailbox(ABC):
    """Sends letters to other participants, and receives letters from them.

    Letters from one sender arrive once and in the order of sending. If a participant dies, only its first letters may
    arrive. A letter to a participant that is dead or has left is discarded. Letters of a dead participant may still
    arrive after the view that announces its death, but not after the view in which it joins again. Letters of its new
    life arrive after that view, and letters to its earlier life never arrive.
    """

    name: str
    """The name of the participant to which this mailbox belongs."""
    sent_bytes: int = 0
    """The bytes of tensors that were sent so far, without discarded letters."""

    @property
    @abstractmethod
    def view(self) -> View:
        """The newest view that ``receive`` has announced."""

    @abstractmethod
    def send(
        self, to: str, kind: str, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = (), text: str = ""
    ) -> None:
        """Send a letter. The tensors are one-dimensional and on the CPU; afterwards they may be overwritten. Waits if
        too many letters to this participant are under way (back pressure), but never waits for a dead participant."""

    @abstractmethod
    def receive(self, wait_s: float = 0.0) -> Letter | None:
        """The next letter, in the order of arrival. If there is no letter, wait up to ``wait_s`` seconds. Return None
        if no letter has arrived, or as soon as the view has changed. Only this method changes ``view``, by one view at
        a time."""

    @abstractmethod
    def leave(self) -> None:
        """Leave: all later views are without this participant. Letters that were sent earlier still arrive. After
        leaving, no letters are sent or received."""

    def receive_until(
        self, done: Callable[[], bool], take: Callable[[Letter], object], what: str, wait_s: float = WAIT_S
    ) -> None:
        """Pass letters to ``take`` until ``done()`` is true. It is called after each letter and each change of the
        view.

        Raises:
            LostRankError: for ``wait_s`` seconds there was no letter and no change of the view, and ``done()`` is
                false. ``what`` describes what this rank waits for.
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
    """The name of a replica as a participant."""
    return f"replica {replica}"


def replica_number(name: str) -> int:
    """The inverse of ``replica_name``."""
    return int(name.removeprefix("replica "))


def replicas_of(members: Sequence[str]) -> list[int]:
    """The numbers of the replicas among the participants, in rising order."""
    return sorted(replica_number(name) for name in members if name.startswith("replica "))
