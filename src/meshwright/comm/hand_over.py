"""Bytes that ranks send each other beside their steps: copies of state to partners, and copies back to heirs.

Both have process groups of their own, or run where no step does, so that they do not disturb the order of messages.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.member import naming
from meshwright.comm.transport.base import timeout_of


class Partners:
    """Exchanges blocks of bytes between ranks in a background thread, while the steps go on. All ranks of the world
    must make it together."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._group = dist.new_group(backend="gloo", timeout=timeout_of(world))

    @naming("all ranks")
    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send a block to each rank in ``sent``, receive one from each rank in ``received``, and wait until all ranks
        of the world have done so. Only one thread may call this."""
        works = [dist.irecv(block, rank, self._group) for rank, block in received.items()]
        works += [dist.isend(block, rank, self._group) for rank, block in sent.items()]
        for work in works:
            if work is not None:
                work.wait()
        dist.barrier(self._group)


@naming("the ranks that have or need a copy")
def hand_over(data: Tensor, sender: int, receivers: Sequence[int]) -> None:
    """Send bytes of ``sender`` to ``receivers``, on which ``data`` is room for them. These ranks must call it in one
    order for all that is sent, so that no rank waits for a rank that waits for it."""
    if dist.get_rank() == sender:
        for receiver in receivers:
            dist.send(data, receiver)
    else:
        dist.recv(data, sender)
