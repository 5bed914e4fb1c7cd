"""The memory of a device that is not there: the bytes of its storages, and of the pools of its graphs."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class GraphPool:
    """Memory of graphs: the bytes that live now, and those that graphs keep, because they use them whenever they are
    launched."""

    def __init__(self) -> None:
        self.live, self.kept = 0, 0

    def add(self, num_bytes: int, workspace: int = 0) -> None:
        """Count new bytes, or freed ones, and those that a kernel needs while it runs."""
        self.live += num_bytes
        self.kept = max(self.kept, self.live + workspace)


@dataclass
class DeviceMemory:
    """The bytes of the storages on the device that live now, and the most since ``restart``. ``taken``: the pool that
    new storages come from; None: they come from the device's usual memory. ``shared``: the bytes that other devices
    reach, by group."""

    usual: int = 0
    peak: int = 0
    known: dict[int, Any] = field(default_factory=dict)
    taken: GraphPool | None = None
    shared: dict[str, int] = field(default_factory=dict)
    pools: "weakref.WeakSet[GraphPool]" = field(default_factory=weakref.WeakSet)

    @property
    def held(self) -> int:
        """The bytes that are allocated now: of tensors, of pools of graphs, and of memory that GPUs share."""
        return self.usual + sum(pool.kept for pool in self.pools) + sum(self.shared.values())

    def pool(self) -> GraphPool:
        """A new pool."""
        pool = GraphPool()
        self.pools.add(pool)
        return pool

    def need(self, workspace: int) -> None:
        """Note memory that a kernel needs while it runs."""
        if self.taken is not None:
            self.taken.add(0, workspace)
            workspace = 0
        self.peak = max(self.peak, self.held + workspace)

    def hold(self, value: Tensor) -> None:
        """Count the storage of a tensor for as long as it lives."""
        storage, pool = value.untyped_storage(), self.taken
        key = storage._cdata
        if key in self.known:
            return
        num_bytes = storage.nbytes()

        def add(more: int) -> None:
            if pool is None:
                self.usual += more
            else:
                pool.add(more)

        def free(_: object) -> None:
            add(-num_bytes)
            del self.known[key]

        self.known[key] = weakref.ref(storage, free)
        add(num_bytes)
        self.peak = max(self.peak, self.held)
