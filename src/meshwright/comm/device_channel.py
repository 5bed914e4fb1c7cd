"""Messages between two ranks' accelerators, by NCCL's send and receive, and the first meeting of each group there.

A send blocks its stream until the peer receives. Unbatched messages of two ranks in one process group share a
communicator and a stream, in the order in which each rank starts them. Under 1F1B, a rank sends an activation and then
receives a gradient, while its neighbour sends that gradient and then receives the activation. With one communicator
both sends would wait for ever:

    rank 0    send F1 | receive B0           up     send F1                up      receive F1
    rank 1    send B0 | receive F1           down   receive B0             down    send B0
              one communicator: stuck        rank 0, two communicators     rank 1: each pair meets

So each direction has a group of its own, whose communicator of these two ranks carries messages in one direction only.
Messages of a direction arrive in order; a blocked send delays only later sends to the same rank.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.member import member
from meshwright.comm.record import current
from meshwright.comm.transport.base import Arrival, Channel, timeout_of
from meshwright.ir.mesh import AxisGroup
from meshwright.torch_private import resolve_process_group


class DeviceChannel:
    """A channel to the rank ``peer``. ``up`` and ``down`` are groups of the whole world; messages to higher ranks go in
    ``up``. The two ranks meet here, in both directions: NCCL makes communicators when they are first used, and the
    host waits for the peer then."""

    def __init__(self, up: dist.ProcessGroup, down: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        rises = peer > up.rank()
        self._out, self._in = (up, down) if rises else (down, up)
        self._peer = peer
        token = torch.zeros(1, device=device)
        for begins in (rises, not rises):
            message = self.send(token) if begins else self.receive(token)
            message.wait()

    def send(self, tensor: Tensor) -> Arrival:
        """Start to send a contiguous tensor. After ``wait``, later work on the device may overwrite it. Once the
        message ``has_come``, nothing needs the tensor any more."""
        return self._message(self._out, self._out.send([tensor], self._peer, 0), tensor)

    def receive(self, into: Tensor, label: str = "") -> Arrival:
        """Start to receive into a contiguous tensor. After ``wait``, later work on the device may read it."""
        return self._message(self._in, self._in.recv([into], self._peer, 0), into)

    def _message(self, group: dist.ProcessGroup, work: dist.Work, tensor: Tensor) -> Arrival:
        if (recorder := current()) is not None:
            recorder.message(f"{group.group_name} {self._peer}", work)
        return Arrival(work.wait, tensor, come=work.is_completed, check=lambda waited_s: None)


def device_channels(world: dist.ProcessGroup, peers: set[int], device: torch.device) -> dict[int, Channel]:
    """The channels to ``peers`` between accelerators. The first call makes the two groups that carry messages to higher
    and to lower ranks; further calls connect new peers."""
    state = member(world)
    if state.directions is None:
        ranks = list(range(world.size()))
        up, down = (dist.new_group(ranks, timeout=timeout_of(world)) for _ in range(2))
        state.directions = up, down
    rank = world.rank()
    for peer in sorted(peers - state.channels.keys(), key=lambda peer: sorted((rank, peer))):
        state.channels[peer] = DeviceChannel(*state.directions, peer, device)
    return {peer: state.channels[peer] for peer in peers}


def connect(groups: Iterable[AxisGroup], device: torch.device) -> None:
    """Let the ranks of each group meet on an accelerator, in the order of ``groups``, which is the same on all ranks.
    NCCL makes a group's communicator in its first operation, in which all ranks must take part: a halo exchange or a
    shift would be made by some of them only."""
    for axis_group in groups if device.type != "cpu" else ():
        if not axis_group.firsts:
            group = resolve_process_group(axis_group.name)  # type: ignore[arg-type]
            dist.all_reduce(torch.zeros(1, device=device), group=group)
