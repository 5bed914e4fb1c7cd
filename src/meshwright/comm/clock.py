"""Offsets of the other ranks' clocks from rank 0's clock, and the traces of all ranks on rank 0's clock."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.comm.exchange_notes import gather_on_first
from meshwright.comm.transport.point_to_point import PointToPoint
from meshwright.comm.transport.progress import RankStreams
from meshwright.ir.trace import Trace, merge

ROUNDS = 16


class Offset(NamedTuple):
    """A rank's clock is ``seconds`` ahead of rank 0's clock, with an error of at most half of ``round_trip_s``."""

    seconds: float
    round_trip_s: float


def clock_offsets(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> list[Offset]:
    """Measure the offset of every rank's clock. Every rank must call this; ranks other than 0 get an empty list.

    Rank 0 asks each rank for its time, in ``ROUNDS`` rounds. The other rank reads its clock between question and
    answer. The offset assumes that question and answer take equally long, so that the reading is in the middle of the
    round trip. The round with the shortest round trip has the smallest error and is used (Mills, RFC 5905, section 10).
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return [Offset(0.0, 0.0)]
    note = torch.zeros(1, dtype=torch.float64, device=device)
    offsets = [Offset(0.0, 0.0)]
    rank = dist.get_rank()
    for peer in range(1, world.size()):
        if rank not in (0, peer):
            continue
        channel, best = PointToPoint(world, 0 if rank else peer, RankStreams()), Offset(0.0, float("inf"))
        for _ in range(ROUNDS):
            if rank:
                channel.receive(note).wait()
                channel.send(note.fill_(clock())).wait()
                continue
            asked = clock()
            channel.send(note).wait()
            channel.receive(note).wait()
            theirs = float(note)
            trip = clock() - asked
            if trip < best.round_trip_s:
                best = Offset(theirs - (asked + trip / 2), trip)
        offsets.append(best)
    return [] if rank else offsets


def on_rank_0(own_trace: Trace, device: torch.device) -> Trace:
    """Merge the traces of all ranks on rank 0's clock. Every rank must call this; ranks other than 0 get
    ``own_trace``."""
    offsets = clock_offsets(device)
    if len(offsets) == 1:  # there is only this rank
        return own_trace
    world = dist.group.WORLD
    assert world is not None
    traces = gather_on_first(own_trace, world)
    if traces is None:
        return own_trace
    return merge([trace.shifted(-offset.seconds) for trace, offset in zip(traces, offsets, strict=True)])
