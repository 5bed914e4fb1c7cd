"""Two ranks, wherever they are: torch.distributed's send and receive."""

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import Finish, Work


class PointToPoint:
    """A channel, and exchanges, with the rank ``peer`` of a group."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer

    def start(self, mine: Tensor, finish: Finish) -> Work:
        """Exchange: start both directions at once."""
        theirs = mine.new_empty(mine.numel())
        return _Transfer((self.receive(theirs), self.send(mine)), (mine, theirs), lambda: finish(theirs, 0))

    def send(self, tensor: Tensor) -> Work:
        """Start to send."""
        return _Transfer((self._group.send([tensor], self._peer, 0),), (tensor,))

    def receive(self, into: Tensor, label: str = "") -> Work:
        """Start to receive."""
        return _Transfer((self._group.recv([into], self._peer, 0),), (into,))


class _Transfer:
    """Works that are under way, with the tensors that must live as long."""

    def __init__(self, works: tuple[Work, ...], kept: tuple[Tensor, ...], finish: object = None) -> None:
        self._works, self._kept, self._finish = works, kept, finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if callable(self._finish):
            self._finish()
