"""A rank that waits for anything keeps everything else moving: messages that have come are taken and collectives of
other groups go on, also where the queues hold a part of what is under way."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import backend, groups  # noqa: F401 - backend gives the collective operators their kernels
from meshwright.comm.collective_kind import SLOTS
from meshwright.comm.transport import stream
from meshwright.comm.transport.base import MESSAGE_BYTES
from meshwright.comm.transport.stream import LaneChannel
from meshwright.ops import collectives
from tests.distributed.pool import Ranks

LARGE = 5 * MESSAGE_BYTES // 8
"""Elements of a tensor of which two slots hold less than half."""


def streams(peers: set[int]) -> dict[int, LaneChannel]:
    """Streams with room for two messages; a rank that waits for 20 s fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "SLOTS", 2)
        lanes = groups.channels(peers)
    for each in lanes.values():
        assert isinstance(each, LaneChannel)
        each._lane.timeout_s = 20.0
    return lanes  # type: ignore[return-value]


def expect_and_wait_elsewhere(waits_in: str) -> bool:
    """Rank 0 expects a large message of rank 1, and waits in another operation, to which rank 1 comes only after its
    message has left."""
    me, into = dist.get_rank(), torch.zeros(LARGE, dtype=torch.int64)
    channel = streams({1 - me})[1 - me]
    world = dist.group.WORLD
    assert world is not None
    if waits_in == "butterfly":
        groups.collectives(world)
    coming = channel.receive(into) if me == 0 else None
    dist.barrier()
    if me == 1:
        channel.send(torch.arange(LARGE)).wait()
    if waits_in == "meet":
        groups.meet()
    elif waits_in == "from_every_rank":
        assert groups.from_every_rank(me) == [0, 1]
    else:
        collectives.WAIT(collectives.ALL_REDUCE(torch.ones(10), "sum", world.group_name, waits_in))
    if coming is not None:
        coming.wait()
        return torch.equal(into, torch.arange(LARGE))
    return True


@pytest.mark.parametrize("waits_in", ["native", "butterfly", "meet", "from_every_rank"])
def test_messages_are_taken_while_a_rank_waits_for_something_else(ranks: Ranks, waits_in: str) -> None:
    assert all(ranks(2, expect_and_wait_elsewhere, waits_in, timeout=60))


def start_and_wait_elsewhere(algorithm: str, waits_in: str) -> list[float]:
    """Rank 0 starts a collective with rank 1 that needs several messages each way, and waits for rank 2, which waits
    for rank 1, which comes out of the collective first."""
    me, num = dist.get_rank(), 4 * SLOTS * MESSAGE_BYTES // 4
    pair, other, last = (dist.new_group(each) for each in ([0, 1], [0, 2], [1, 2]))
    for group, members in ((pair, (0, 1)), (other, (0, 2)), (last, (1, 2))):
        if me in members:
            for lane in groups.collectives(group)._each:
                lane.timeout_s = 20.0  # type: ignore[attr-defined]
    value, note = torch.full((num,), float(1 + me)), torch.ones(3)

    def reduce(tensor: torch.Tensor, group: dist.ProcessGroup, by: str) -> torch.Tensor:
        return collectives.ALL_REDUCE(tensor, "sum", group.group_name, by)

    if me == 0:
        started = reduce(value, pair, algorithm)
        collectives.WAIT(reduce(note, other, waits_in))
        collectives.WAIT(started)
    elif me == 1:
        collectives.WAIT(reduce(value, pair, algorithm))
        collectives.WAIT(reduce(note, last, "butterfly"))
    else:
        collectives.WAIT(reduce(note, last, "butterfly"))
        collectives.WAIT(reduce(note, other, waits_in))
    return [float(value.min()), float(value.max())] if me < 2 else []


@pytest.mark.parametrize("waits_in", ["butterfly", "native"])
@pytest.mark.parametrize("algorithm", ["ring", "butterfly"])
def test_collectives_of_other_groups_go_on(ranks: Ranks, algorithm: str, waits_in: str) -> None:
    first, second, third = ranks(3, start_and_wait_elsewhere, algorithm, waits_in, timeout=60)
    assert first == second == [3.0, 3.0]
    assert third == []


def many_under_way(seed: int) -> list[bool]:
    """Collectives of two groups that are started and awaited in a random order, with messages of random sizes between
    the ranks; all ranks have the same order."""
    generator = torch.Generator().manual_seed(seed)
    me, size = dist.get_rank(), dist.get_world_size()
    first, second = dist.new_group(range(size)), dist.new_group(range(size))
    both = [groups.collectives(group) for group in (first, second)]
    following, before = (me + 1) % size, (me - 1) % size
    channels = streams({following, before})
    under_way, right = [], []
    for number in range(24):
        num = int(torch.randint(1, 3 * MESSAGE_BYTES // 4, (1,), generator=generator))
        kind = int(torch.randint(0, 3, (1,), generator=generator))
        if kind < 2:
            value = torch.full((num,), float(number + me))
            work = both[kind].all_reduce(value, algorithm=["ring", "butterfly"][number % 2])
            under_way.append((work, value, float(size * number + sum(range(size)))))
        else:
            into = torch.empty(num)
            arrival = channels[before].receive(into)
            leaves = channels[following].send(torch.full((num,), float(number + me)))
            under_way += [(arrival, into, float(number + before)), (leaves, torch.zeros(1), 0.0)]
        if float(torch.rand((), generator=generator)) < 0.4:
            index = int(torch.randint(0, len(under_way), (1,), generator=generator))
            work, value, wanted = under_way.pop(index)
            work.wait()
            right.append(math.isclose(float(value.min()), wanted) and math.isclose(float(value.max()), wanted))
    for work, value, wanted in under_way:
        work.wait()
        right.append(float(value.min()) == float(value.max()) == wanted)
    dist.barrier()
    return right


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_the_order_of_waits_all_arrives(ranks: Ranks, seed: int) -> None:
    assert all(all(each) for each in ranks(3, many_under_way, seed, timeout=100))
