"""Our collectives give what one process computes, in float64, for every algorithm, 2 to 4 ranks, any length and dtype,
over shared memory, over send and receive, and between threads; ranks that differ, are lost or are late are named."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm import collectives as running
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import collectives
from meshwright.comm.transport import base, shared_memory
from meshwright.comm.transport.base import Lane
from meshwright.comm.transport.loopback import Loopback
from meshwright.comm.transport.point_to_point import Wire
from meshwright.errors import LostRankError, RankError
from meshwright.schedules.collectives import ALGORITHMS
from tests.distributed.pool import Ranks, RanksFailedError

SIZES = (0, 5, 200)


# --- every operation -------------------------------------------------------------------------------------------------


def run_all(ours: Collectives, seed: int = 0) -> int:
    """Every algorithm of every operation, once for each size; how many were compared."""
    rank, size, draw = ours.rank, ours.num_ranks, random.Random(seed)
    done = 0
    for num in SIZES:
        values = [_values(num, one, seed) for one in range(size)]
        parts = [torch.stack([_values(num, one + size * other, seed) for other in range(size)]) for one in range(size)]
        for name in ALGORITHMS["all_reduce"]:
            mine = values[rank].clone()
            ours.all_reduce(mine, "sum", name).wait()
            _close(mine, sum(values))
            done += 1
        for op, reduce in (("max", torch.maximum), ("min", torch.minimum)):
            mine, expected = values[rank].clone(), values[0]
            for other in values[1:]:
                expected = reduce(expected, other)
            ours.all_reduce(mine, op, "ring").wait()
            assert torch.equal(mine, expected)
        for name in ALGORITHMS["reduce_scatter"]:
            mine, into = parts[rank].clone(), torch.empty(num, dtype=torch.float64)
            ours.reduce_scatter(mine, into, "sum", name).wait()
            _close(into, sum(one[rank] for one in parts))
            assert torch.equal(mine, parts[rank]), "the input stays"
            whole = torch.empty(size, num, dtype=torch.float64)
            ours.all_gather(values[rank], whole, name).wait()
            assert torch.equal(whole, torch.stack(values))
        for name in ALGORITHMS["reduce"]:
            root = draw.randrange(size)
            mine = values[rank].clone()
            ours.broadcast(mine, root, name).wait()
            assert torch.equal(mine, values[root])
            mine = values[rank].clone()
            ours.reduce(mine, root, "sum", name).wait()
            if rank == root:
                _close(mine, sum(values))
        for name in ALGORITHMS["gather"]:
            root = draw.randrange(size)
            whole = torch.empty(size, num, dtype=torch.float64)
            ours.gather(values[rank], whole, root, name).wait()
            if rank == root:
                assert torch.equal(whole, torch.stack(values))
            mine = parts[rank].clone()
            ours.scatter(mine, root, name).wait()
            assert torch.equal(mine[rank], parts[root][rank])
        counts = [[draw.randrange(num + 1) for _ in range(size)] for _ in range(size)]
        for name in ALGORITHMS["all_to_all"]:
            sent = [torch.cat([_values(n, 7 * i + j, seed) for j, n in enumerate(row)]) for i, row in enumerate(counts)]
            came = [sent[i].split(row)[rank] for i, row in enumerate(counts)]
            into = torch.empty(sum(map(len, came)), dtype=torch.float64)
            ours.all_to_all(sent[rank], into, counts, name).wait()
            assert torch.equal(into, torch.cat(came))
    for name in ALGORITHMS["barrier"]:
        ours.barrier(name)
    return done


def _values(num: int, rank: int, seed: int) -> Tensor:
    return torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def _close(found: Tensor, expected: Tensor | int) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


def over_shared_memory(message_bytes: int) -> int:
    with small_messages(message_bytes):
        return run_all(_ours())


def over_send_and_receive(message_bytes: int) -> int:
    with small_messages(message_bytes):
        lanes: dict[int, Lane] = {
            peer: Wire(_world(), peer) for peer in range(_world().size()) if peer != _world().rank()
        }
        return run_all(Collectives(_world().rank(), _world().size(), lanes))


class small_messages:  # noqa: N801 - used like a function
    """Messages of so many bytes, so that even short vectors take several."""

    def __init__(self, num_bytes: int) -> None:
        self._patch, self._num_bytes = pytest.MonkeyPatch(), num_bytes

    def __enter__(self) -> None:
        for module in (running, shared_memory, base):
            self._patch.setattr(module, "MESSAGE_BYTES", self._num_bytes)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _ours() -> Collectives:
    return collectives(_world())


@pytest.mark.parametrize(("num_ranks", "message_bytes"), [(2, 256), (3, 512), (4, 1024)])
def test_every_algorithm_over_shared_memory(ranks: Ranks, num_ranks: int, message_bytes: int) -> None:
    assert ranks(num_ranks, over_shared_memory, message_bytes)[0] == len(SIZES) * len(ALGORITHMS["all_reduce"])


@pytest.mark.parametrize(("num_ranks", "message_bytes"), [(2, 2**19), (3, 1024)])
def test_every_algorithm_over_send_and_receive(ranks: Ranks, num_ranks: int, message_bytes: int) -> None:
    assert ranks(num_ranks, over_send_and_receive, message_bytes)[0] > 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_algorithm_between_threads(num_ranks: int) -> None:
    """Lanes that hold three messages, of 64 bytes each."""
    each = threads(num_ranks, slots=3)
    with small_messages(64):
        found = together([lambda one=one: run_all(one) for one in each])  # type: ignore[misc]
    assert found == [len(SIZES) * len(ALGORITHMS["all_reduce"])] * num_ranks


def threads(num_ranks: int, slots: int) -> list[Collectives]:
    lanes: list[dict[int, Lane]] = [{} for _ in range(num_ranks)]
    for one in range(num_ranks):
        for other in range(one):
            lanes[one][other], lanes[other][one] = Loopback.pair(one, other, slots)
    return [Collectives(rank, num_ranks, each) for rank, each in enumerate(lanes)]


def together(calls: list[Callable[[], object]]) -> list[object]:
    """What calls return that are made at the same time, each in a thread of its own."""
    found: list[object] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            found[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - told by the comparison with what was expected
            found[index] = error

    started = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for one in started:
        one.start()
    for one in started:
        one.join(60)
    return found


# --- many at once ----------------------------------------------------------------------------------------------------


def overlapping(seed: int) -> bool:
    """Collectives of all sizes are started, and waited for in another order, some after all have been started."""
    ours, draw = _ours(), random.Random(seed)
    size, rank = _world().size(), _world().rank()
    waiting = []
    for index in range(60):
        num = draw.choice([0, 1, 7, 1000, 300_000, draw.randrange(20_000)])
        dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.int64])
        name = draw.choice([one for one in ALGORITHMS["all_reduce"] if one != "one-by-one"])
        whole = [torch.full((num,), index % 5 + one, dtype=dtype) for one in range(size)]
        mine = whole[rank].clone()
        expected = torch.stack(whole).sum(0, dtype=dtype)
        waiting.append((ours.all_reduce(mine, "sum", name, f"{index}"), mine, expected))
        if draw.random() < 0.05:
            time.sleep(0.002 * rank)
        while waiting and draw.random() < 0.4:
            work, value, expected = waiting.pop(draw.randrange(len(waiting)))
            work.wait()
            assert torch.equal(value, expected)
    for work, value, expected in waiting:
        work.wait()
        assert torch.equal(value, expected)
    return True


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_several_may_be_under_way(ranks: Ranks, num_ranks: int, seed: int) -> None:
    assert all(ranks(num_ranks, overlapping, seed))


# --- what goes wrong -------------------------------------------------------------------------------------------------


def differing(kind: str) -> str:
    ours, rank = _ours(), _world().rank()
    ours.all_reduce(torch.zeros(3), label="first").wait()
    last = rank == _world().size() - 1
    value = torch.zeros(
        10 + (kind == "size" and last), dtype=torch.int32 if kind == "dtype" and last else torch.float32
    )
    try:
        if kind == "order" and last:
            ours.all_gather(value, torch.zeros(_world().size(), 10), label="axis tp").wait()
        else:
            ours.all_reduce(value, "max" if kind == "op" and last else "sum", label="axis dp").wait()
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["size", "dtype", "op", "order"])
def test_ranks_that_differ_are_named_with_what_each_was_in(ranks: Ranks, kind: str) -> None:
    first, second = ranks(2, differing, kind)
    assert first.startswith("rank 1: it sent ")
    assert second.startswith("rank 0: it sent ")
    assert "rank 0 is in #2 all_reduce of 10 x float32, sum, butterfly (axis dp)" in first
    there = {
        "size": "all_reduce of 11 x float32, sum, butterfly (axis dp)",
        "dtype": "all_reduce of 10 x int32, sum, butterfly (axis dp)",
        "op": "all_reduce of 10 x float32, max, butterfly (axis dp)",
        "order": "all_gather of 20 x float32, sum, star (axis tp)",
    }[kind]
    assert f"rank 1 was in #2 {there}" in first
    assert f"rank 1 is in #2 {there}" in second


def lost() -> None:
    ours, rank = _ours(), _world().rank()
    ours.all_reduce(torch.zeros(3), label="first").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        LostRankError, match=r"^rank 1: it has ended.*\n(.*\n)* +rank 1 was in #1 all_reduce.*has ended"
    ):
        ours.all_reduce(torch.zeros(500_000), algorithm="ring").wait()
    assert time.monotonic() - start < 10 * shared_memory.SLEEP_S


def test_a_rank_that_is_killed_is_named_by_all_others(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(3, lost)
    assert list(error.value.failures) == [1], error.value
    assert not [name for name in os.listdir("/dev/shm") if "meshwright" in name]


def late() -> str:
    ours = _ours()
    ours.all_reduce(torch.zeros(3), label="first").wait()
    message = ""
    if _world().rank() == 0:
        for lane in ours._lanes.values():
            lane.timeout_s = 0.1  # type: ignore[attr-defined]
        with pytest.raises(LostRankError) as error:
            ours.all_reduce(torch.zeros(10), label="second").wait()
        with pytest.raises(LostRankError):  # for good: nobody knows what is still on its way
            ours.all_reduce(torch.zeros(10))
        message = str(error.value)
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_named_after_the_timeout(ranks: Ranks) -> None:
    told = ranks(2, late)[0]
    assert told.startswith("rank 1: it has sent nothing for 0.1 s")
    assert "rank 0 is in #2 all_reduce of 10 x float32, sum, butterfly (second)" in told
    assert (
        "rank 1 was in #1 all_reduce of 3 x float32, sum, butterfly (first), has last sent to this rank in #1" in told
    )


def without_memory() -> str:
    def refuse(descriptor: int, begin: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        try:
            _ours()
        except RankError as error:
            return str(error)
    return ""


def test_memory_that_cannot_be_had_is_an_error(ranks: Ranks) -> None:
    told = ranks(2, without_memory)
    assert told[1].startswith("rank 1: no 4 MiB of memory to share with another rank: No space left on device")


def nothing_is_left() -> list[str]:
    before = set(os.listdir("/dev/shm"))
    _ours().all_reduce(torch.zeros(10)).wait()
    dist.barrier()
    return sorted(set(os.listdir("/dev/shm")) - before)


def test_no_file_is_made(ranks: Ranks) -> None:
    assert ranks(3, nothing_is_left) == [[], [], []]
