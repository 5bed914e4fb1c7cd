"""A lane for tests: each rank is a thread of one process, and messages wait in queues."""

import queue

import torch
from torch import Tensor

from meshwright.comm.transport.base import Lane
from meshwright.errors import LostRankError, RankError


class Loopback(Lane):
    """One end of a lane between two threads; ``pair`` makes both ends."""

    def __init__(
        self, out: "queue.Queue[tuple[Tensor, int]]", into: "queue.Queue[tuple[Tensor, int]]", peer: int
    ) -> None:
        self._out, self._into, self.peer = out, into, peer
        self.timeout_s = 10.0

    @staticmethod
    def pair(first: int, second: int, slots: int = 3) -> tuple["Loopback", "Loopback"]:
        """The ends of ranks ``first`` and ``second``, with room for ``slots`` messages each way."""
        there, back = queue.Queue[tuple[Tensor, int]](slots), queue.Queue[tuple[Tensor, int]](slots)
        return Loopback(there, back, second), Loopback(back, there, first)

    def put(self, part: Tensor, tag: int) -> None:
        """Add a copy to the queue."""
        try:
            self._out.put((part.clone(), tag), timeout=self.timeout_s)
        except queue.Full:
            raise LostRankError("it takes nothing", where=f"rank {self.peer}") from None

    def put_at_once(self, part: Tensor, tag: int) -> bool:
        """Add a copy to the queue, unless the queue is full."""
        if self._out.full():
            return False
        self.put(part, tag)
        return True

    def take(self, num: int, dtype: torch.dtype, tag: int) -> Tensor:
        """Wait for the next message in the queue, and check its size, dtype and tag."""
        try:
            part, their_tag = self._into.get(timeout=self.timeout_s)
        except queue.Empty:
            raise LostRankError("it has sent nothing", where=f"rank {self.peer}") from None
        if (part.numel(), part.dtype, their_tag) != (num, dtype, tag):
            raise RankError(f"it sent {part.numel()} elements where {num} were expected", where=f"rank {self.peer}")
        return part
