"""What carries bytes between two ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import LostRankError, RankError

MESSAGE_BYTES = 512 * 1024
"""The most that one message of a lane holds: what one rank writes, the other finds in the cache that they share."""

OWN_ERROR = "look for its own error"
"""The remedy where another rank has failed."""


class Work(Protocol):
    """Something under way."""

    def wait(self) -> Any: ...


class UnderWay:
    """A Work: other works, which are waited for first, then ``finish``; and tensors that must live until then.

    ``num_bytes``: how much is received, where that is not the size of the result.
    """

    __slots__ = ("_finish", "_kept", "_works", "num_bytes")

    def __init__(
        self,
        finish: Callable[[], object] | None,
        *kept: Tensor,
        works: Iterable[Work | None] = (),
        num_bytes: int | None = None,
    ) -> None:
        self._finish, self._kept, self._works, self.num_bytes = finish, kept, works, num_bytes

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        if self._finish is not None:
            self._finish()


class Trouble(NamedTuple):
    """Why a collective cannot be finished: which rank is to blame, and what it has to do with the one at the other end
    of a lane."""

    where: str
    problem: str

    def error(self, waiting: str = "this rank waits") -> LostRankError:
        """The error of a rank that waits in vain; ``waiting`` says for what."""
        return LostRankError(f"{self.problem}, and {waiting}", where=self.where, remedy=OWN_ERROR)


def late(rank: int, problem: str) -> LostRankError:
    """The error of a rank that has waited for another one, which may only be slow."""
    remedy = "look at what that rank does; MESHWRIGHT_TIMEOUT_S sets how long ranks wait for others"
    return LostRankError(problem, where=f"rank {rank}", remedy=remedy)


class Lane(ABC):
    """Messages of up to ``MESSAGE_BYTES`` between two ranks, both ways, each way in the order in which they were put.

    A message has a tag, and both sides must name the same one: so ranks that do different things find out.
    """

    expects = False
    """Whether messages must be expected before they are taken."""

    @abstractmethod
    def put(self, part: Tensor, tag: int) -> None:
        """Lay a flat, contiguous tensor where the peer finds it; then it may be overwritten. Waits for room."""

    @abstractmethod
    def put_at_once(self, part: Tensor, tag: int) -> bool:
        """The same without waiting: false, and nothing done, where there is no room."""

    def expect(self, num: int, like: Tensor) -> None:
        """Say that a message of ``num`` elements, as those of ``like``, will be taken, after those that were expected
        before. Only where the lane ``expects``."""

    @abstractmethod
    def take(self, num: int, dtype: Any, tag: int) -> Any:
        """Wait for the next message, if it must be, expected; it is valid until ``release``.

        Raises:
            LostRankError: the peer has ended, or has put nothing within the timeout.
            RankError: the message has another size or tag.
        """

    def release(self) -> None:
        """Give back the room of the message that was taken."""

    def settle(self) -> None:
        """Wait until all that was put has left, where it needs this rank for that."""

    # --- what ranks say of themselves --------------------------------------------------------------------------------

    def tell(self, number: int, words: bytes) -> None:
        """Say which collective this rank begins, for the errors of the other."""

    def finished(self, number: int) -> None:
        """Say that this rank needs the other no more for the collectives up to that number."""

    def give_up(self, number: int, words: bytes, because_of: str) -> None:
        """Say that this rank has failed, in which collective, and because of which one; the other need not wait any
        longer."""

    def trouble(self, number: int) -> Trouble | None:
        """Why collective ``number`` cannot be finished because of the other rank: it has ended before, or has given up;
        None where it may be."""
        return None

    def told(self) -> str:
        """A line on what the other said of itself, and whether it has ended; nothing where that is not known."""
        return ""


class Channel(Protocol):
    """Messages to and from one other rank, in the order in which they were sent."""

    def send(self, tensor: Tensor) -> Work:
        """Send a contiguous tensor, without waiting for the peer; after ``wait`` it may be overwritten."""

    def receive(self, into: Tensor, label: str = "") -> Work:
        """Receive into a contiguous tensor, which ``wait`` waits for; ``label`` names it in errors."""


def check_message(peer: int, found: tuple[int, int], wanted: tuple[int, int], what: str) -> None:
    """Compare what has come with what was expected: (bytes, tag).

    Raises:
        RankError: they differ.
    """
    if found != wanted:
        raise RankError(
            f"it sent {found[0]} bytes where {wanted[0]} were expected, in {what}"
            if found[0] != wanted[0]
            else f"it sent something else than what was expected, in {what}",
            where=f"rank {peer}",
            remedy="all ranks must run the same model with batches of the same shape",
        )


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the ranks of a group wait for each other."""
    timeout: timedelta = group.get_group_store().timeout  # type: ignore[attr-defined]
    return timeout


def first_line(error: Exception) -> str:
    """What an error of torch.distributed says, without its traceback in C++."""
    return str(error).strip().splitlines()[0]
