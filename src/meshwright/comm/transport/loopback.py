"""Ranks that are threads of one process, for tests: messages lie in queues."""

import queue

import torch
from torch import Tensor

from meshwright.comm.transport.base import Lane
from meshwright.errors import LostRankError, RankError


class Loopback(Lane):
    """One end of a lane between two threads, which see each other's errors; ``pair`` makes both."""

    def __init__(
        self, out: "queue.Queue[tuple[Tensor, int]]", into: "queue.Queue[tuple[Tensor, int]]", peer: int
    ) -> None:
        self._out, self._into, self.peer = out, into, peer
        self.timeout_s = 10.0

    @staticmethod
    def pair(one: int, other: int, slots: int = 3) -> tuple["Loopback", "Loopback"]:
        """The end of rank ``one`` and that of rank ``other``; ``slots`` messages find room each way."""
        there, back = queue.Queue[tuple[Tensor, int]](slots), queue.Queue[tuple[Tensor, int]](slots)
        return Loopback(there, back, other), Loopback(back, there, one)

    def put(self, part: Tensor, tag: int) -> None:
        """Lay a copy into the queue."""
        try:
            self._out.put((part.clone(), tag), timeout=self.timeout_s)
        except queue.Full:
            raise LostRankError("it takes nothing", where=f"rank {self.peer}") from None

    def put_at_once(self, part: Tensor, tag: int) -> bool:
        if self._out.full():
            return False
        self.put(part, tag)
        return True

    def take(self, num: int, dtype: torch.dtype, tag: int) -> Tensor:
        try:
            part, their_tag = self._into.get(timeout=self.timeout_s)
        except queue.Empty:
            raise LostRankError("it has sent nothing", where=f"rank {self.peer}") from None
        if (part.numel(), part.dtype, their_tag) != (num, dtype, tag):
            raise RankError(f"it sent {part.numel()} elements where {num} were expected", where=f"rank {self.peer}")
        return part
