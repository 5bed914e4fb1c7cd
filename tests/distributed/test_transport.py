"""Lanes and channels between two ranks: every byte arrives, in any order of waiting, however little room there is; a
peer that ends or sends something else is named."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import backend, groups, member  # noqa: F401 - backend gives the collective operators their kernels
from meshwright.comm.transport import process, shared_memory, stream
from meshwright.comm.transport.arrival import wait_for_any
from meshwright.comm.transport.base import MESSAGE_BYTES, Channel, Lane, Trouble
from meshwright.comm.transport.point_to_point import PointToPoint, TorchLane
from meshwright.comm.transport.progress import RankStreams
from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.comm.transport.stream import LaneChannel
from meshwright.errors import LostRankError, RankError
from meshwright.ops import collectives
from tests.distributed.pool import Ranks, RanksFailedError

PAIR: Any = SimpleNamespace(size=lambda: 2)
"""A group, as far as its size."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _connected(slots: int = 8) -> SharedMemory:
    store = _world().get_group_store()
    lane = SharedMemory.connect(store, "test", dist.get_rank(), 1 - dist.get_rank(), 60.0, slots)
    assert lane is not None
    return lane


def _messages(kind: str, slots: int) -> int:
    """Messages of all sizes and dtypes, each of which the peer takes ``slots`` - 1 later."""
    lane: Lane = TorchLane(_world(), 1 - dist.get_rank(), RankStreams()) if kind == "wire" else _connected(slots)
    sizes = [0, 1, 7, 1000, MESSAGE_BYTES // 8]
    sent = [torch.arange(num).to(dtype) for num in sizes for dtype in DTYPES]
    for number in range(len(sent) + slots - 1):
        if number < len(sent):
            lane.put(sent[number] + dist.get_rank() if sent[number].dtype != torch.bool else sent[number], number)
            lane.expect(sent[number].numel(), sent[number])
        if (index := number - slots + 1) >= 0:
            wanted = sent[index]
            received = lane.take(wanted.numel(), wanted.dtype, index)
            assert torch.equal(received, wanted + (1 - dist.get_rank()) if wanted.dtype != torch.bool else wanted)
            lane.release()
    lane.settle(len(sent) - 1)
    return len(sent)


@pytest.mark.parametrize(("kind", "slots"), [("shared memory", 2), ("shared memory", 8), ("wire", 4)])
def test_every_byte_arrives(ranks: Ranks, kind: str, slots: int) -> None:
    assert ranks(2, _messages, kind, slots) == [25, 25]


def _counters_wrap() -> bool:
    transport = _connected()
    transport._num_put = transport._num_taken = 2**32 - 5
    own, theirs = transport._own_segment, transport._peer_segment
    for word in (own.published, own.consumed, theirs.published, theirs.consumed):
        word.value = 2**32 - 5
    dist.barrier()
    for step in range(20):
        transport.put(torch.full((10,), float(step + dist.get_rank())), step)
        assert transport.take(10, torch.float32, step).tolist() == [float(step + 1 - dist.get_rank())] * 10
        transport.release()
    return True


def test_counters_of_32_bits_may_wrap(ranks: Ranks) -> None:
    assert all(ranks(2, _counters_wrap))


def _send_otherwise(num: int, tag: int) -> str:
    transport = _connected()
    transport.put(torch.zeros(10 + num * dist.get_rank()), tag * dist.get_rank())
    try:
        transport.take(10 + num * dist.get_rank(), torch.float32, tag * dist.get_rank())
    except RankError as error:
        return str(error)
    return ""


def test_a_peer_that_sends_another_size_is_named(ranks: Ranks) -> None:
    first, second = ranks(2, _send_otherwise, 1, 0)
    assert first.startswith("rank 1: it sent 44 bytes where 40 were expected")
    assert second.startswith("rank 0: it sent 40 bytes where 44 were expected")
    assert ranks(2, _send_otherwise, 0, 1)[0].startswith("rank 1: it sent something else than what was expected")


def _lose_the_peer() -> None:
    transport = _connected()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(LostRankError, match="rank 1: it has ended, and message 1 is due"):
        transport.take(10, torch.float32, 0)
    assert time.monotonic() - start < 10 * shared_memory.SLEEP_S


def test_a_peer_that_is_killed_is_named_and_nothing_hangs(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(2, _lose_the_peer)
    assert list(error.value.failures) == [1], error.value


def _connected_from(kind: str, monkeypatch: pytest.MonkeyPatch) -> SharedMemory | None:
    """What rank 1 sees differently."""
    if dist.get_rank() == 1:
        if kind == "another machine":
            monkeypatch.setattr(shared_memory, "box", lambda: "another machine")
        else:
            monkeypatch.setattr(os, "pidfd_open", _refused)
    return SharedMemory.connect(_world().get_group_store(), kind, dist.get_rank(), 1 - dist.get_rank(), 20.0, 2)


def _refused(process: int) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _shares_memory_with_another_machine() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        return _connected_from("another machine", patch) is not None


def test_machines_share_no_memory_though_their_networks_have_one_number(ranks: Ranks) -> None:
    assert ranks(2, _shares_memory_with_another_machine, timeout=30) == [False, False]


def _lose_the_peer_without_descriptors(lost: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        transport = _connected_from("no descriptors", patch)
    assert transport is not None
    transport.put(torch.full((10,), 1.0), 0)
    assert transport.take(10, torch.float32, 0).tolist() == [1.0] * 10
    transport.release()
    if dist.get_rank() == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostRankError, match=f"rank {lost}: it has ended, and message 2 is due"):
        transport.take(10, torch.float32, 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_peer_that_is_killed_is_named_where_a_container_refuses_descriptors_of_processes(
    ranks: Ranks, lost: int
) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(2, _lose_the_peer_without_descriptors, lost, timeout=30)
    assert list(error.value.failures) == [lost], error.value


def _connect_to_the_dead(says: str) -> str:
    """Rank 1 is a process that has ended: before anything, or when it has opened this rank's memory."""
    store, message = _world().get_group_store(), ""
    if dist.get_rank() == 1:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"])
        if says == "nothing":
            child.kill()
            child.wait()
        store.set("dead/1/0", f"{child.pid} 5 00 {process.box()}")
        child.wait()
    else:
        with pytest.raises(LostRankError) as error:
            SharedMemory.connect(store, "dead", 0, 1, 20.0, 2)
        message = str(error.value)
    dist.barrier()
    return message


@pytest.mark.parametrize("says", ["nothing", "that it is there"])
def test_a_peer_that_ends_while_ranks_connect_is_named(ranks: Ranks, says: str) -> None:
    assert ranks(2, _connect_to_the_dead, says, timeout=30)[0].startswith("rank 1: it has ended, and memory was")


def _be_late() -> str:
    transport = _connected()
    transport.timeout_s = 0.1
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(LostRankError) as error:
            transport.take(10, torch.float32, 0)
        message = str(error.value)
    dist.barrier()
    return message


def test_a_peer_that_does_not_answer_is_named_after_the_timeout(ranks: Ranks) -> None:
    assert ranks(2, _be_late)[0].startswith("rank 1: it has sent nothing for 0.1 s, and message 1 is due")


def _stream(kind: str, slots: int, sizes: tuple[int, ...]) -> bool:
    """Each rank sends all before it receives anything, in the order of ``sizes``."""
    me = dist.get_rank()
    progress = RankStreams()
    channel: Channel
    channel = (
        PointToPoint(_world(), 1 - me, progress)
        if kind == "point to point"
        else LaneChannel(_connected(slots), progress, me)
    )
    into = [torch.empty(size, dtype=torch.int64) for size in sizes]
    works = [channel.receive(buffer, "early") for buffer in into[: len(into) // 2]]
    leaving = [channel.send(torch.arange(size) + index + 100 * me) for index, size in enumerate(sizes)]
    works += [channel.receive(buffer) for buffer in into[len(into) // 2 :]]
    for index, (buffer, work) in enumerate(zip(into, works, strict=True)):
        work.wait()
        assert torch.equal(buffer, torch.arange(len(buffer)) + index + 100 * (1 - me))
    for sent in leaving:
        sent.wait()
    return True


@pytest.mark.parametrize(("kind", "slots"), [("shared memory", 2), ("shared memory", 128), ("point to point", 0)])
def test_sends_need_no_receive(ranks: Ranks, kind: str, slots: int) -> None:
    """Also where all that is sent is larger than the memory that is shared."""
    assert all(ranks(2, _stream, kind, slots, (3, 0, 1_000_000, 12_000_000, 1, 500)))


def _between(kind: str, slots: int) -> list[int]:
    """Rank 1 waits for whichever neighbour sends first: rank 2, then rank 0, which sends once it has heard from 1. A
    message to rank 2 has no room in its lane, and is moved on meanwhile."""
    me, progress = dist.get_rank(), RankStreams()
    channels: dict[int, Channel] = {}
    for peer in sorted({0, 1, 2} - {me}, key=lambda peer: sorted((me, peer))):
        if kind == "point to point":
            channels[peer] = PointToPoint(_world(), peer, progress)
        else:
            lane = SharedMemory.connect(_world().get_group_store(), "between", me, peer, 60.0, slots)
            assert lane is not None
            channels[peer] = LaneChannel(lane, progress, me)
    number, large = torch.zeros(1, dtype=torch.int64), torch.arange(2 * MESSAGE_BYTES)
    if me == 1:
        heard = []
        coming = {peer: channels[peer].receive(torch.zeros_like(number)) for peer in (0, 2)}
        leaving = [channels[2].send(large)]
        while coming:
            wait_for_any([[arrival] for arrival in coming.values()])
            peer = next(peer for peer, arrival in coming.items() if arrival.has_come())
            coming.pop(peer).wait()
            heard.append(peer)
            leaving.append(channels[0].send(number))
        for work in leaving:
            work.wait()
        return heard
    if me == 0:
        channels[1].receive(number).wait()
    else:
        into = torch.zeros_like(large)
        channels[1].receive(into).wait()
        assert torch.equal(into, large)
    channels[1].send(number).wait()
    if me == 0:
        channels[1].receive(number).wait()
    return []


@pytest.mark.parametrize(("kind", "slots"), [("shared memory", 2), ("point to point", 0)])
def test_a_rank_waits_for_whichever_neighbour_sends_first(ranks: Ranks, kind: str, slots: int) -> None:
    assert ranks(3, _between, kind, slots) == [[], [2, 0], []]


def _between_the_dead() -> None:
    """Rank 1 waits for two neighbours, of which one is killed."""
    me = dist.get_rank()
    lanes = groups.channels({0, 2} if me == 1 else {1})
    if me == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if me == 1:
        arrivals = [lanes[peer].receive(torch.zeros(1), f"what rank {peer} sends") for peer in (0, 2)]
        with pytest.raises(LostRankError, match="rank 2: it has ended, and what rank 2 sends is due"):
            wait_for_any([[arrival] for arrival in arrivals])


def test_a_rank_that_waits_for_two_names_the_one_that_is_killed(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(3, _between_the_dead)
    assert list(error.value.failures) == [2], error.value


LARGE = 5 * MESSAGE_BYTES // 8
"""Elements of a tensor of which two slots hold less than half."""


def _channels(monkeypatch: pytest.MonkeyPatch, peers: list[int]) -> dict[int, LaneChannel]:
    """Streams with room for two messages; a rank that waits for 10 s fails."""
    monkeypatch.setattr(stream, "SLOTS", 2)
    lanes = groups.channels(peers)
    for lane in lanes.values():
        assert isinstance(lane, LaneChannel)
        lane._lane.timeout_s = 10.0
    return lanes  # type: ignore[return-value]


def _in_a_circle(waits: str) -> bool:
    """Every rank sends more than finds room to the next one, and waits for the one before, or until it has sent."""
    me, into = dist.get_rank(), torch.empty(LARGE, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        channels = _channels(patch, [(me + 1) % 3, (me - 1) % 3])
    coming = channels[(me - 1) % 3].receive(into)
    leaving = channels[(me + 1) % 3].send(torch.arange(LARGE) + me)
    for work in (coming, leaving) if waits == "for messages" else (leaving, coming):
        work.wait()
    return torch.equal(into, torch.arange(LARGE) + (me - 1) % 3)


@pytest.mark.parametrize("waits", ["for messages", "for room"])
def test_ranks_that_wait_in_a_circle_keep_all_streams_moving(ranks: Ranks, waits: str) -> None:
    assert all(ranks(3, _in_a_circle, waits, timeout=60))


def _while_waiting(waits_in: str) -> float:
    """Rank 0 has a message for rank 2 that finds no room, and waits for rank 1, which waits for rank 2."""
    me, into, note = dist.get_rank(), torch.empty(LARGE, dtype=torch.int64), torch.ones(1000)
    pair = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        channels = _channels(patch, [rank for rank in range(3) if rank != me])
    if waits_in == "butterfly" and me < 2:
        groups.collectives(pair)
    begun = time.monotonic()
    leaving = channels[2].send(torch.arange(LARGE)) if me == 0 else None
    if me == 1:
        channels[2].receive(note).wait()
    if me == 2:
        channels[0].receive(into).wait()
        assert torch.equal(into, torch.arange(LARGE))
        channels[1].send(note).wait()
    elif waits_in == "point to point":
        channel = PointToPoint(_world(), 1 - me, groups.member(_world()).progress)
        (channel.send(note) if me else channel.receive(note)).wait()
    else:
        note = collectives.WAIT(collectives.ALL_REDUCE(note, "sum", pair.group_name, waits_in))
        assert note.tolist() == [2.0] * 1000
    if leaving is not None:
        leaving.wait()
    return time.monotonic() - begun


@pytest.mark.parametrize("waits_in", ["butterfly", "native", "point to point"])
def test_a_rank_that_waits_for_anything_keeps_its_streams_moving(ranks: Ranks, waits_in: str) -> None:
    assert max(ranks(3, _while_waiting, waits_in, timeout=60)) < 5.0


def _connect_groups_without_descriptors() -> list[int]:
    """The levels at which this rank says that descriptors are refused."""
    levels: list[int] = []

    class Levels(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "pidfd_open" in record.getMessage():
                levels.append(record.levelno)

    handler, log = Levels(), logging.getLogger("meshwright")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pidfd_open", _refused)
        patch.setattr(log, "level", logging.DEBUG)
        log.addHandler(handler)
        for group in (_world(), dist.new_group([0, 1])):
            groups.collectives(group)
        groups.channels([1 - dist.get_rank()])
        log.removeHandler(handler)
    return levels


def test_refused_descriptors_are_told_once_per_world(ranks: Ranks) -> None:
    levels = [level for each in ranks(2, _connect_groups_without_descriptors) for level in each]
    assert sorted(levels) == [logging.DEBUG] * 5 + [logging.WARNING]


@pytest.mark.parametrize(
    ("wait", "awaited"),
    [
        (groups.meet, "all ranks (meet)"),
        (lambda: groups.from_every_rank(0), "all ranks (from_every_rank)"),
        (lambda: groups.boxes_of(PAIR), "all ranks of the group (boxes_of)"),
    ],
    ids=["meet", "from_every_rank", "boxes_of"],
)
def test_what_a_rank_waits_for_is_said(wait: Callable[[], object], awaited: str) -> None:
    def lose(*given: object) -> None:
        raise dist.DistBackendError("connection closed")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"is_initialized": True, "get_world_size": 2}.items():
            patch.setattr(dist, name, lambda value=value: value)
        patch.setattr(dist, "barrier", lose)
        patch.setattr(groups, "gather_everywhere", lose)
        patch.setattr(member, "culprit", lambda: Trouble("rank 1", "it has ended"))
        with pytest.raises(LostRankError) as error:
            wait()
    assert error.value.problem == f"it has ended, and this rank waits for {awaited}"
