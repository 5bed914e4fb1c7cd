"""A barrier in which rank 0 finds out which ranks do not come. It uses the group's store, not the executor."""

import time

from meshwright.comm.process_group.links import GroupConnections
from meshwright.comm.process_group.work import LostInGroupError

LOOK_S = 0.002
"""Seconds between two looks at the store."""
HERE, OVER = "here", "over"


def monitored_barrier(links: GroupConnections, number: int, timeout_s: float, wait_all_ranks: bool) -> None:
    """Wait until all ranks have called this with the same ``number``. Rank 0 stops at the first rank that has not come
    within ``timeout_s``, or, with ``wait_all_ranks``, after it has waited for all. The texts begin as gloo's do.

    Raises:
        LostInGroupError: ranks have not come, or rank 0 has given up or not come.
    """
    store, me, key = links.store, links.rank, f"monitored/{number}"
    deadline, where = time.monotonic() + timeout_s, f"rank {links.ranks[me]}"

    def comes(name: str) -> bool:
        while not store.check([name]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        return True

    if me:
        store.set(f"{key}/{me}", HERE)
        if not comes(key) or store.get(key).decode() == OVER:
            raise LostInGroupError(
                f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                "from rank 0",
                where=where,
                remedy="look at the error of rank 0",
            )
        return
    missing = []
    for rank in range(1, links.size):
        if timeout_s <= 0:
            raise LostInGroupError(f"Rank {me} timed out in monitoredBarrier after {timeout_s * 1e3:g} ms", where=where)
        if not comes(f"{key}/{rank}"):
            missing.append(rank)
            if not wait_all_ranks:
                break
    store.set(key, OVER if missing else HERE)
    if missing:
        ranks = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, missing))
        raise LostInGroupError(
            f"{ranks} failed to pass monitoredBarrier in {timeout_s * 1e3:g} ms", where=where, remedy="look at them"
        )
