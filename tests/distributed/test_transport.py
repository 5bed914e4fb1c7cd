"""Two ranks swap what they have, through shared memory and by send and receive: every byte arrives, in any order of
waiting, however little room there is; a peer that ends or sends another size is named."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport import shared_memory
from meshwright.comm.transport.base import Channel, Exchange, Finish, Work
from meshwright.comm.transport.point_to_point import PointToPoint
from meshwright.comm.transport.shared_memory import SharedMemory
from meshwright.errors import LostRankError, RankError
from tests.distributed.pool import Ranks, RanksFailedError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _connected() -> SharedMemory:
    found = SharedMemory.connect(_world().get_group_store(), "test", dist.get_rank(), 1 - dist.get_rank(), 60.0)
    assert found is not None
    return found


def _swap_at_random(kind: str, seed: int) -> int:
    """Tensors of all sizes and dtypes are started, and waited for in another order; the peer's must have arrived."""
    transport: Exchange = PointToPoint(_world(), 1 - dist.get_rank()) if kind == "point to point" else _connected()
    me, draw = dist.get_rank(), random.Random(seed)
    waiting = []
    num_elements = 0
    for index in range(120):
        size = draw.choice([0, 1, 7, 64, 1000, draw.randrange(20_000)])
        dtype = draw.choice(DTYPES)
        mine, theirs = (_content(index, rank, size, dtype) for rank in (me, 1 - me))
        got = torch.empty_like(theirs)
        work = transport.start(mine, _into(got))
        waiting.append((work, mine, got, theirs))
        num_elements += size
        if draw.random() < 0.05:
            time.sleep(0.002 * me)
        while waiting and draw.random() < 0.5:
            _check(*waiting.pop(draw.randrange(len(waiting))))
    for one in waiting:
        _check(*one)
    return num_elements


def _into(got: Tensor) -> Finish:
    def finish(part: Tensor, begin: int) -> None:
        got[begin : begin + len(part)].copy_(part)

    return finish


def _check(work: Work, mine: Tensor, got: Tensor, theirs: Tensor) -> None:
    work.wait()
    assert torch.equal(got, theirs)


def _content(index: int, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2 * index + rank)
    return torch.randint(0, 100, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("kind", "arena_bytes", "message_bytes", "slots"),
    [
        ("shared memory", 64 * 2**20, 2**20, 1024),
        ("shared memory, little room", 64 * 1024, 4096, 1024),
        ("shared memory, few slots", 2**20, 4096, 3),
        ("point to point", 2**20, 2**20, 1024),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_byte_arrives(
    ranks: Ranks, kind: str, arena_bytes: int, message_bytes: int, slots: int, seed: int
) -> None:
    assert ranks(2, _swap_with_room, kind, seed, arena_bytes, message_bytes, slots)[0] > 0


def _swap_with_room(kind: str, seed: int, *sizes: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("ARENA_BYTES", "MESSAGE_BYTES", "SLOTS"), sizes, strict=True):
            patch.setattr(shared_memory, name, size)
        return _swap_at_random(kind, seed)


def _counters_wrap() -> bool:
    transport = _connected()
    transport._num_sent = transport._num_published = transport._num_done = 2**32 - 5
    mine, theirs = transport._mine, transport._theirs
    for word in (mine.published, mine.consumed, theirs.published, theirs.consumed):
        word.value = 2**32 - 5
    dist.barrier()
    for step in range(20):
        got = torch.empty(10)
        value = torch.full((10,), float(step + dist.get_rank()))
        transport.start(value, _into(got)).wait()
        assert got.tolist() == [float(step + 1 - dist.get_rank())] * 10
    return True


def test_counters_of_32_bits_may_wrap(ranks: Ranks) -> None:
    assert all(ranks(2, _counters_wrap))


def _send_other_sizes() -> str:
    transport = _connected()
    work = transport.start(torch.zeros(10 + dist.get_rank()), lambda part, begin: None)
    try:
        work.wait()
    except RankError as error:
        return str(error)
    return ""


def test_a_peer_that_sends_another_size_is_named(ranks: Ranks) -> None:
    first, second = ranks(2, _send_other_sizes)
    assert first.startswith("rank 1: it sent 44 bytes where 40 were expected")
    assert second.startswith("rank 0: it sent 40 bytes where 44 were expected")


def _lose_the_peer() -> None:
    transport = _connected()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = transport.start(torch.zeros(10), lambda part, begin: None)
    start = time.monotonic()
    with pytest.raises(LostRankError, match="rank 1: it has ended, and message 1 is due"):
        work.wait()
    assert time.monotonic() - start < 10 * shared_memory.SLEEP_S


def test_a_peer_that_is_killed_is_named_and_nothing_hangs(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(2, _lose_the_peer)
    assert list(error.value.failures) == [1], error.value


def _be_late() -> str:
    transport = _connected()
    transport._timeout_s = 0.1
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(LostRankError) as error:
            transport.start(torch.zeros(10), lambda part, begin: None).wait()
        message = str(error.value)
    dist.barrier()
    return message


def test_a_peer_that_does_not_answer_is_named_after_the_timeout(ranks: Ranks) -> None:
    assert ranks(2, _be_late)[0].startswith("rank 1: it has sent nothing for 0.1 s, and message 1 is due")


def _nothing_is_left() -> list[str]:
    before = set(os.listdir("/dev/shm"))
    transport = _connected()
    transport.start(torch.zeros(10), lambda part, begin: None).wait()
    dist.barrier()
    return sorted(set(os.listdir("/dev/shm")) - before)


def test_no_file_is_made(ranks: Ranks) -> None:
    assert ranks(2, _nothing_is_left) == [[], []]


def _stream(kind: str, sizes: tuple[int, ...]) -> bool:
    """Each rank sends all before it receives anything, in the order of ``sizes``."""
    me = dist.get_rank()
    channel: Channel = PointToPoint(_world(), 1 - me) if kind == "point to point" else _connected()
    into = [torch.empty(size, dtype=torch.int64) for size in sizes]
    works = [channel.receive(one, "early") for one in into[: len(into) // 2]]
    leaving = [channel.send(torch.arange(size) + index + 100 * me) for index, size in enumerate(sizes)]
    works += [channel.receive(one) for one in into[len(into) // 2 :]]
    for index, (one, work) in enumerate(zip(into, works, strict=True)):
        work.wait()
        assert torch.equal(one, torch.arange(len(one)) + index + 100 * (1 - me))
    for work in leaving:
        work.wait()
    return True


@pytest.mark.parametrize("kind", ["shared memory", "point to point"])
def test_sends_need_no_receive(ranks: Ranks, kind: str) -> None:
    """Also where all that is sent is larger than the memory that is shared."""
    assert all(ranks(2, _stream, kind, (3, 0, 1_000_000, 12_000_000, 1, 500)))
