"""Interfaces for carrying bytes between two ranks: works, lanes and channels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import LostRankError, RankError

MESSAGE_BYTES = 512 * 1024
"""Bytes of the largest message of a lane: small enough that the peer finds it in the cache that both ranks share."""

OWN_ERROR = "look for its own error"
"""The remedy in errors about another rank's failure."""


class Work(Protocol):
    """An operation that has been started."""

    def wait(self) -> Any:
        """Wait until the operation is complete."""
        ...


def moves_streams(work: Work) -> bool:
    """Whether waiting for a work keeps all streams of the rank moving, as lanes of shared memory do."""
    return bool(getattr(work, "moves_streams", False))


def operations_of(work: "Work | None") -> "Iterator[dist.Work]":
    """The operations of torch.distributed for which a work waits."""
    if isinstance(work, dist.Work):
        yield work
    elif isinstance(work, UnderWay):
        for each in work.works:
            yield from operations_of(each)


class UnderWay:
    """A Work that waits for other works, then calls ``finish``. It keeps the tensors ``kept`` alive.

    Whoever makes it names in ``kept`` every input and temporary tensor of the works, also those that ``finish`` uses.
    NCCL itself keeps them only until the first wait on any stream, which may be that of a trace for the end of the
    operation; the kernels wait later, and the memory must not be reused before.

    ``num_bytes`` is the number of received bytes, if it differs from the size of the result.
    """

    __slots__ = ("_finish", "_kept", "num_bytes", "works")

    def __init__(
        self,
        finish: Callable[[], object] | None,
        *kept: Tensor,
        works: Iterable[Work | None] = (),
        num_bytes: int | None = None,
    ) -> None:
        self._finish, self._kept, self.works, self.num_bytes = finish, kept, tuple(works), num_bytes

    @property
    def moves_streams(self) -> bool:
        """Whether ``wait`` keeps all streams of the rank moving: it waits only for works that do."""
        works = [work for work in self.works if work is not None]
        return bool(works) and all(moves_streams(work) for work in works)

    def wait(self) -> None:
        """Wait for the works, one after the other, then call ``finish``."""
        for work in self.works:
            if work is not None:
                work.wait()
        if self._finish is not None:
            self._finish()


class Arrival(UnderWay):
    """A message under way. ``come`` says, without waiting, whether the message has arrived. ``check`` receives the
    number of seconds for which this rank has waited. It raises an error if the message will not arrive. ``awaited``
    records that this rank waits for the message (True), or goes on without it (False)."""

    __slots__ = ("_come", "awaited", "check")

    def __init__(
        self,
        finish: Callable[[], object] | None,
        *kept: Tensor,
        come: Callable[[], bool],
        check: Callable[[float], None],
        works: Iterable[Work | None] = (),
        awaited: Callable[[bool], object] = lambda waits: None,
    ) -> None:
        super().__init__(finish, *kept, works=works)
        self._come, self.check, self.awaited = come, check, awaited

    def has_come(self) -> bool:
        """Whether ``wait`` would return immediately."""
        return self._come()

    def then(self, finish: Callable[[], object], *kept: Tensor) -> "Arrival":
        """The same message. ``finish`` is called after its arrival."""
        return Arrival(finish, *kept, come=self._come, check=self.check, works=(self,), awaited=self.awaited)


class Trouble(NamedTuple):
    """Why a collective cannot be finished. ``where`` names the rank to blame. ``problem`` says what that rank did, or
    which other rank has given up because of it."""

    where: str
    problem: str

    def error(self, waiting: str = "this rank waits") -> LostRankError:
        """The error of a rank that waits in vain. ``waiting`` says what the rank waits for."""
        return LostRankError(f"{self.problem}, and {waiting}", where=self.where, remedy=OWN_ERROR)


def late(rank: int, problem: str) -> LostRankError:
    """The error of a rank that has waited too long for ``rank``. ``rank`` may still run, but too slowly."""
    remedy = "look at what that rank does; MESHWRIGHT_TIMEOUT_S sets how long ranks wait for others"
    return LostRankError(problem, where=f"rank {rank}", remedy=remedy)


class Lane(ABC):
    """Carries messages of up to ``MESSAGE_BYTES`` between two ranks. In each direction, messages keep the order in
    which they are put.

    Each message has a tag, and the receiver must expect the same tag. If the tags differ, the two ranks run different
    collectives, and ``take`` raises an error.
    """

    expects = False
    """Whether the receiver must call ``expect`` before ``take``."""

    @abstractmethod
    def put(self, part: Tensor, tag: int) -> None:
        """Send a flat, contiguous tensor; wait for room first. Afterwards the tensor may be overwritten."""

    @abstractmethod
    def put_at_once(self, part: Tensor, tag: int) -> bool:
        """Send like ``put``, but without waiting: return False and send nothing if the lane has no room."""

    def expect(self, num: int, like: Tensor) -> None:
        """Announce the next message that this rank will take: ``num`` elements of the dtype of ``like``. Announce
        messages in the order in which they are taken. Needed only if ``expects`` is true."""

    @abstractmethod
    def take(self, num: int, dtype: Any, tag: int) -> Any:
        """Wait for the next message and return it. It is valid until ``release``. If ``expects`` is true, call
        ``expect`` first.

        Raises:
            LostRankError: the peer has ended, or has put nothing within the timeout.
            RankError: the message has another size or tag.
        """

    def release(self) -> None:
        """Free the memory of the message that was taken last."""

    def settle(self, tag: int) -> None:
        """Wait until the messages of the collective with this tag, and all messages before them, have left. Messages of
        later collectives need not have left: the peer may expect them only after this collective. Lanes whose messages
        leave without the help of this rank do nothing."""

    # --- what ranks report of themselves -----------------------------------------------------------------------------

    def tell(self, number: int, words: bytes) -> None:
        """Report the collective that this rank begins, for the peer's errors."""

    def finished(self, number: int) -> None:
        """Report that this rank no longer needs the peer for the collectives up to ``number``."""

    def give_up(self, number: int, words: bytes, because_of: str) -> None:
        """Report to the peer in which collective this rank failed, and because of which rank; the peer stops
        waiting."""

    def trouble(self, number: int) -> Trouble | None:
        """Why the peer prevents collective ``number`` from finishing: it ended before, or has given up. None if the
        collective may still finish."""
        return None

    def last_report(self) -> str:
        """A line with the peer's last report and whether the peer has ended; empty if unknown."""
        return ""


class Channel(Protocol):
    """Carries tensors to and from one other rank, in the order in which they are sent."""

    def send(self, tensor: Tensor) -> Work:
        """Send a contiguous tensor without waiting for the peer. After ``wait`` the tensor may be overwritten."""

    def receive(self, into: Tensor, label: str = "") -> Arrival:
        """Receive into a contiguous tensor, which is complete after ``wait``. Errors call the message ``label``."""


def check_message(peer: int, received: tuple[int, int], wanted: tuple[int, int], what: str) -> None:
    """Check a received message. ``received`` and ``wanted`` are pairs of (bytes, tag).

    Raises:
        RankError: ``received`` and ``wanted`` differ.
    """
    if received != wanted:
        raise RankError(
            f"it sent {received[0]} bytes where {wanted[0]} were expected, in {what}"
            if received[0] != wanted[0]
            else f"it sent something else than what was expected, in {what}",
            where=f"rank {peer}",
            remedy="all ranks must run the same model with batches of the same shape",
        )


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the ranks of a group wait for each other."""
    timeout: timedelta = group.get_group_store().timeout  # type: ignore[attr-defined]
    return timeout


def first_line(error: Exception) -> str:
    """The first line of a torch.distributed error, without its C++ traceback."""
    return str(error).strip().splitlines()[0]
