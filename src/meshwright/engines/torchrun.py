"""Starts the ranks of this host, which meet those of other hosts at an address (``runtime/rendezvous.py``)."""

import socket

from meshwright.api import Meeting, addresses_of
from meshwright.engines.job import Job, shell
from meshwright.errors import LaunchError

MEET_S = 600.0
"""Seconds in which all hosts must come."""


def described(job: Job) -> str:
    """The command for every host, and what it is the same as."""
    each, nodes = job.ranks_per_node, job.nodes
    first = _addresses(job)[0]
    torchrun = [
        "torchrun", "--nnodes", f"{nodes.count}", "--nproc-per-node", f"{each}", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{first}:{nodes.port}", "--rdzv-id", job.name, *job.command()[1:],
    ]  # fmt: skip
    launch = ["meshwright", "launch", str(job.file), "--on", "torchrun", *job.arguments]
    return "\n".join([
        f"# on each of {nodes.count} hosts ({', '.join(nodes.addresses)}), {each} ranks: this one of the commands",
        shell(launch), shell(torchrun),
    ])  # fmt: skip


def meeting(job: Job) -> Meeting:
    """Where the launchers of all hosts meet."""
    first = _addresses(job)[0]
    return Meeting(
        num_hosts=job.nodes.count, is_host=is_here(first), address=first, port=job.nodes.port, name=job.name,
        timeout_s=MEET_S, ranks_per_host=job.ranks_per_node,
    )  # fmt: skip


def is_here(address: str) -> bool:
    """Whether an address, or the address of a name, is one of this host's: a socket can be bound to it.

    Raises:
        LaunchError: the name has no address.
    """
    for family, place in addresses_of(address, "nodes.addresses"):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(place)
            except OSError:
                continue
            return True
    return False


def _addresses(job: Job) -> tuple[str, ...]:
    nodes = job.nodes
    if not nodes.addresses or len(nodes.addresses) > nodes.count:
        raise LaunchError(
            f"{len(nodes.addresses)} addresses for {nodes.count} nodes",
            where="nodes.addresses",
            remedy="give the address of every node, at least that of the first",
        )
    return nodes.addresses
