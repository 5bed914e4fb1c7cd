"""Process groups of replicas: starts torch.distributed separately for the ranks of each replica, and finds the other
replicas.

There are two ways of launching. A launcher may start the ranks of all replicas together, as torchrun does: the ranks
are then divided into groups of equal size, and the last ranks may be servers. Or it starts each replica as a separate
job, with the usual environment variables of its ranks and two more: ``MESHWRIGHT_REPLICA`` (its number) and
``MESHWRIGHT_MEET`` (host:port of the store at which replicas meet). In the second case, the launcher of a replica does
not notice the death of another replica.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.capture.batch import take_apart
from meshwright.errors import DataError, LaunchError
from meshwright.ir.layout import Layout
from meshwright.runtime import launch
from meshwright.schedules.replicas import of_replica, server_ranks


class World(NamedTuple):
    """The place of this rank among replicas and servers. ``replica``: the number of its replica; -1 on a server.
    ``server``: the number of its server; -1 on a rank of a replica. ``num_launched``: the number of ranks of all
    replicas and servers. ``store``: the store at which all replicas meet; None if there is only one replica."""

    replica: int = 0
    num_replicas: int = 1
    server: int = -1
    num_launched: int = 1
    store: dist.Store | None = None

    def part(self, batch: Any) -> Any:
        """This replica's part of the batch of all replicas.

        Raises:
            DataError: the number of replicas does not divide the batch.
        """
        if self.num_replicas == 1:
            return batch
        leaves = take_apart(batch)
        size, count = leaves.size, self.num_replicas
        if size % count:
            raise DataError(
                f"{size} samples do not divide into {count} replicas",
                where="batch",
                remedy="each replica takes equally many samples: give a multiple",
            )
        begin, length = max(0, self.replica) * (size // count), size // count
        parts = [
            value[begin : begin + length] if value.dim() and len(value) == size else value
            for value in leaves.tensors.values()
        ]
        return leaves.with_tensors(parts)


def place(layout: Layout) -> tuple[int, int]:
    """The number of this rank's replica (0 if there is one replica; -1 on a server), and its rank in the replica,
    according to the launcher's settings. Nothing is started.

    Raises:
        LayoutError: the number of replicas does not divide the ranks.
    """
    launched = launch.what_is_launched()
    if launched.meet:
        return launched.replica, launched.rank
    one, each = of_replica(layout, launched.size)
    if one.replicas == 1:
        return 0, launched.rank
    replica, column = divmod(launched.rank, each)
    return (replica, column) if replica < one.replicas else (-1, 0)


def start(layout: Layout, device: torch.device | str | None) -> tuple[torch.device, World]:
    """Start torch.distributed for the ranks of this replica, if a launcher has set its environment variables.

    Raises:
        LaunchError: torch.distributed was started over the ranks of all replicas.
        LayoutError: the number of replicas does not divide the ranks.
    """
    launched, (replica, column) = launch.what_is_launched(), place(layout)
    total = launched.size * layout.replicas if launched.meet else launched.size
    one, each = of_replica(layout, total)
    if one.replicas == 1:
        return launch.start(device), World(num_launched=total)
    if launched.meet:  # each replica is a separate job
        store = launch.store_at(launched.meet)
        return launch.start(device), World(replica, layout.replicas, -1, total, store)
    if dist.is_initialized():
        raise LaunchError(
            "torch.distributed was started over the ranks of all replicas, which are worlds of their own",
            where="replicas",
            remedy="leave init_process_group to parallelize, which starts it for this replica",
        )
    store = launch.store_of_all()
    if replica < 0:
        server = launched.rank - (launched.size - server_ranks(layout))
        return launch.start(device, launch.Within(store, 0, 1)), World(-1, layout.replicas, server, total, store)
    within = launch.Within(dist.PrefixStore(f"replica {replica}", store), column, each)
    return launch.start(device, within), World(replica, layout.replicas, -1, total, store)
