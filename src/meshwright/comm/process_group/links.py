"""How a rank of a group reaches the others: shared memory in a box, gloo between boxes."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.comm.collective_kind import SLOTS
from meshwright.comm.collectives import Collectives
from meshwright.comm.member import check_verdict
from meshwright.comm.process_group.work import GroupError
from meshwright.comm.transport.base import Lane
from meshwright.comm.transport.connection import shared_lanes
from meshwright.comm.transport.point_to_point import TorchLane, close
from meshwright.comm.transport.process import box
from meshwright.comm.transport.progress import RankStreams
from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.schedules.collectives import hierarchy
from meshwright.schedules.collectives.choice import LONG_BYTES, PIECES

SHORT_BYTES = 2**16
"""In a box of more than two ranks, all-reduces up to this size take the fewest rounds; longer ones move the fewest
bytes."""
PAIR_BYTES = 2**19
"""Two ranks swap whole vectors up to this size; longer vectors are reduced by halves."""
FLAT = {
    "all_gather": "star", "reduce_scatter": "star", "broadcast": "tree", "reduce": "tree", "gather": "star",
    "scatter": "star",
}  # fmt: skip
"""The algorithm of each operation whose algorithm does not depend on the size."""


class GroupConnections:
    """The connections of rank ``rank`` of a group. All ranks of the group must make theirs together.

    ``ranks`` holds the numbers of the group's ranks in the world. ``boxes``: the ranks of each box, numbered within the
    group. ``gloo`` carries messages between boxes; it is None if all ranks share memory.

    Raises:
        RankError: this machine has no memory left to share.
        LostRankError: a rank does not come within the timeout.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: tuple[int, ...], timeout_s: float) -> None:
        number = store.add(f"made/{rank}", 1)  # a group of the same name may have been destroyed
        self.store = store = dist.PrefixStore(str(number), store)
        self.rank, self.ranks, self.timeout_s, self._process = rank, ranks, timeout_s, os.getpid()
        places = self._gather_values("box", box())
        self.boxes = tuple(
            tuple(r for r, place in enumerate(places) if place == each) for each in dict.fromkeys(places)
        )
        near = {
            ranks[peer]: peer for box_ranks in self.boxes if rank in box_ranks for peer in box_ranks if peer != rank
        }
        lanes_by_name = shared_lanes(store, "lane", ranks[rank], near, SLOTS, timeout_s)
        self.shared = {near[name]: lane for name, lane in lanes_by_name.items() if lane is not None}
        all_shared = len(self.shared) == len(ranks) - 1
        self.gloo: Any = None
        if "False" in self._gather_values("shared", str(all_shared)):
            inner = dist.PrefixStore("gloo", store)
            self.gloo = dist.ProcessGroupGloo(inner, rank, len(ranks), timedelta(seconds=timeout_s))
        lanes: dict[int, Lane] = {peer: self._lane(peer) for peer in range(len(ranks)) if peer != rank}
        for lane in self.shared.values():
            lane.while_waiting = check_verdict
        self.collectives = Collectives(rank, len(ranks), lanes, f"rank {ranks[rank]}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def algorithm(self, operation: str, num_bytes: int) -> str:
        """The algorithm of an operation over a vector of ``num_bytes``, the same on all ranks."""
        if 1 < len(self.boxes) < self.size:
            if operation == "all_reduce":
                across, pieces = ("butterfly", 1) if num_bytes < LONG_BYTES else ("ring", PIECES)
                return hierarchy.written("star", across, hierarchy.named_boxes(self.boxes), pieces)
            if operation in hierarchy.ACROSS_BY_OPERATION and len({len(each) for each in self.boxes}) == 1:
                return hierarchy.written("star", "ring", hierarchy.named_boxes(self.boxes))
        if operation != "all_reduce":
            return FLAT[operation]
        if self.size == 2:
            return "butterfly" if num_bytes <= PAIR_BYTES else "ring"
        return "butterfly" if num_bytes <= SHORT_BYTES else "shares"

    def set_timeout(self, timeout_s: float) -> None:
        """Let the next collective wait this many seconds for other ranks."""
        for lane in self.shared.values():
            lane.timeout_s = timeout_s

    def leave(self) -> None:
        """Tell the other ranks that this rank uses the group no more; a fork of this rank's process says nothing."""
        if os.getpid() == self._process:
            for lane in self.shared.values():
                lane.leave()
                lane.look = None  # else a circle of references would keep the memory for a while

    def abort(self) -> None:
        """Leave the group, and let a thread that waits in a collective fail."""
        self.leave()
        for lane in self.shared.values():
            lane.look = self._fail
        if self.gloo is not None:
            close(self.gloo)  # its own abort would let receives wait on
            self.gloo.abort()

    def _fail(self) -> None:
        raise GroupError("the group was aborted", where=f"rank {self.ranks[self.rank]}", remedy="make a new group")

    def _lane(self, peer: int) -> Lane:
        lane: SharedMemory | None = self.shared.get(peer)
        return lane or TorchLane(self.gloo, peer, RankStreams(), self.ranks[peer], self.store)

    def _gather_values(self, key: str, value: str) -> list[str]:
        """Every rank's value, by rank."""
        self.store.set(f"{key}/{self.rank}", value)
        return [self.store.get(f"{key}/{rank}").decode() for rank in range(len(self.ranks))]
