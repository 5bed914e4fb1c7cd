"""Two ranks, wherever they are: torch.distributed's send and receive."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import Work
from meshwright.errors import LostRankError


class PointToPoint:
    """A channel with the rank ``peer`` of a group; messages of other tags go their own way."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int = 0) -> None:
        self._group, self._peer, self._tag = group, peer, tag
        self.name = dist.get_global_rank(group, peer)

    def send(self, tensor: Tensor) -> Work:
        """Start to send."""
        return _Transfer(self._group.send([tensor], self._peer, self._tag), tensor)

    def receive(self, into: Tensor, label: str = "") -> Work:
        """Start to receive."""
        return _Transfer(self._group.recv([into], self._peer, self._tag), into, due=(self.name, label or "a message"))


class Wire:
    """A lane to the rank ``peer`` of a group. Tags are not sent along, and only its own errors tell of other sizes."""

    AHEAD = 16
    """Messages that may be on their way, each with a copy of its own."""
    expects = True

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._channel = PointToPoint(group, peer, tag=1)  # apart from other messages of the group
        self._leaving: deque[Work] = deque()
        self._coming: deque[tuple[Tensor, Work]] = deque()

    def room(self) -> bool:
        """Whether few enough are on their way."""
        return len(self._leaving) < self.AHEAD

    def put(self, part: Tensor, tag: int) -> None:
        """Send a copy."""
        if not self.room():
            self._depart()
        self._leaving.append(self._channel.send(part.clone() if part.numel() else _nothing(part)))

    def _depart(self) -> None:
        try:
            self._leaving.popleft().wait()
        except RuntimeError as error:
            raise LostRankError(
                f"it takes nothing: {str(error).strip().splitlines()[0]}",
                where=f"rank {self._channel.name}",
                remedy="look for its own error",
            ) from error

    def expect(self, num: int, like: Tensor) -> None:
        """Start to receive: a message that finds nobody waiting takes another way round."""
        into = like.new_empty(num) if num else _nothing(like)
        self._coming.append((into, self._channel.receive(into, "part of a collective")))

    def take(self, num: int, dtype: torch.dtype, tag: int) -> Tensor:
        """The next message."""
        into, work = self._coming[0]
        work.wait()
        return into[:num]

    def release(self) -> None:
        """Forget it."""
        self._coming.popleft()

    def settle(self) -> None:
        """Wait for what is on its way: a message whose sender has ended does not arrive."""
        while self._leaving:
            self._depart()

    def tell(self, words: bytes) -> None:
        """Nothing: nobody would hear of it."""

    def finished(self, number: int) -> None:
        """Nothing."""

    def give_up(self, words: bytes) -> None:
        """Nothing."""

    def trouble(self, number: int) -> str:
        """Not known."""
        return ""

    def told(self) -> str:
        """Nothing."""
        return ""


def _nothing(like: Tensor) -> Tensor:
    """What an empty message is sent as, for torch.distributed sends none."""
    return like.new_zeros(1)


class _Transfer:
    """A work under way, with the tensor that must live as long."""

    def __init__(self, work: Work, kept: Tensor, due: tuple[int, str] | None = None) -> None:
        self._work, self._kept, self._due = work, kept, due

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            if self._due is None:
                raise
            peer, what = self._due
            raise LostRankError(
                f"it has sent nothing, and {what} is due: {str(error).strip().splitlines()[0]}",
                where=f"rank {peer}",
                remedy="look at what that rank does; MESHWRIGHT_TIMEOUT_S sets how long ranks wait for others",
            ) from error
