"""Connects a rank with several others over shared memory."""

from collections.abc import Callable, Iterable

import torch.distributed as dist

from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.errors import RankError


def shared_lanes(
    store: dist.Store,
    name: str,
    rank: int,
    peers: Iterable[int],
    slots: int,
    timeout_s: float,
    check: Callable[[int], None] = lambda peer: None,
) -> dict[int, SharedMemory | None]:
    """The memory shared with each peer, or None if memory cannot be shared. All peers must call this with the same
    name. If this rank has no memory left, its peers raise an error too."""
    lanes: dict[int, SharedMemory | None] = {}
    ordered = sorted(peers, key=lambda peer: sorted((rank, peer)))  # else ranks could wait for each other in a circle
    for peer in ordered:
        try:
            lanes[peer] = SharedMemory.connect(store, name, rank, peer, timeout_s, slots, check)
        except RankError as error:
            for other in ordered:
                SharedMemory.refuse(store, name, rank, other, error)
            raise
    return lanes
