"""Two ranks of one process group, wherever they are: torch.distributed's send and receive."""

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import Finish, Work


class PointToPoint:
    """An exchange over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, mine: Tensor, finish: Finish) -> Work:
        """Start both directions at once."""
        return _Transfer(mine, finish, self._group)


class _Transfer:
    def __init__(self, mine: Tensor, finish: Finish, group: dist.ProcessGroup) -> None:
        peer = 1 - group.rank()
        self._mine, self._theirs = mine, mine.new_empty(mine.numel())
        self._works = (group.recv([self._theirs], peer, 0), group.send([mine], peer, 0))
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._finish(self._theirs, 0)
