"""Two ranks, wherever they are: torch.distributed's send and receive."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import Finish, Work
from meshwright.errors import LostRankError


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
        return _Transfer((self._group.recv([into], self._peer, 0),), (into,), due=(self._peer, label or "a message"))


class _Transfer:
    """Works that are under way, with the tensors that must live as long."""

    def __init__(
        self,
        works: tuple[Work, ...],
        kept: tuple[Tensor, ...],
        finish: Callable[[], object] | None = None,
        due: tuple[int, str] | None = None,
    ) -> None:
        self._works, self._kept, self._finish, self._due = works, kept, finish, due

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                if self._due is None:
                    raise
                peer, what = self._due
                raise LostRankError(
                    f"it has sent nothing, and {what} is due: {str(error).strip().splitlines()[0]}",
                    where=f"rank {peer}",
                    remedy="look at what that rank does; MESHWRIGHT_TIMEOUT_S sets how long ranks wait for others",
                ) from error
        if self._finish is not None:
            self._finish()
