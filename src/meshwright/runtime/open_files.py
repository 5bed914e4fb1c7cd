"""The limit of open files. Connections are files, too: many ranks need more than systems allow at first."""

import sys

from meshwright.errors import LaunchError

BASE, A_RANK = 40, 12
"""Files that a launcher with two ranks opens beside their connections, and those of each rank: measured 50 for two
ranks, with room for what a rank connects to later."""


def allow_files(num_ranks: int) -> None:
    """Let this process and its children open the files that ``num_ranks`` ranks need, if the system permits.

    Raises:
        LaunchError: it does not. Without room for another connection, ranks would wait for it until the timeout.
    """
    if sys.platform == "win32":
        return
    import resource

    needed = BASE + A_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{num_ranks} ranks need about {needed} open files, and a process may have {hard} here",
            where="limit of open files (ulimit -n)",
            remedy="raise it, or start fewer ranks here",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
