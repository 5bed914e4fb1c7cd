"""Our collectives give what one process computes, in float64, for every algorithm, 2 to 4 ranks, any length and dtype,
over shared memory, over send and receive, and between threads; ranks that differ, are lost or are late are named."""

import functools
import gc
import itertools
import math
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm import collective_kind
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import collectives
from meshwright.comm.transport import base, segment, shared_memory
from meshwright.comm.transport.base import Lane
from meshwright.comm.transport.loopback import Loopback
from meshwright.comm.transport.point_to_point import TorchLane
from meshwright.comm.transport.progress import RankStreams
from meshwright.errors import LostRankError, RankError
from meshwright.schedules.collectives.hierarchy import ACROSS_BY_OPERATION, leaves, read, written
from meshwright.schedules.collectives.operations import ALGORITHMS
from tests.distributed.pool import Ranks, RanksFailedError
from tests.tries import tries

SIZES = (0, 5, 200)


# --- every operation -------------------------------------------------------------------------------------------------


def run_all(ours: Collectives, seed: int = 0) -> int:
    """Every algorithm of every operation, once for each size; how many were compared."""
    rank, size, draw = ours.rank, ours.num_ranks, random.Random(seed)
    done = 0
    for num in SIZES:
        values = [_values(num, peer, seed) for peer in range(size)]
        parts = [
            torch.stack([_values(num, peer + size * other, seed) for other in range(size)]) for peer in range(size)
        ]
        for name in ALGORITHMS["all_reduce"]:
            value = values[rank].clone()
            ours.all_reduce(value, "sum", name).wait()
            _close(value, sum(values))
            done += 1
        for op, reduce in (("max", torch.maximum), ("min", torch.minimum)):
            value, expected = values[rank].clone(), values[0]
            for other in values[1:]:
                expected = reduce(expected, other)
            ours.all_reduce(value, op, "ring").wait()
            assert torch.equal(value, expected)
        for name in ALGORITHMS["reduce_scatter"]:
            value, into = parts[rank].clone(), torch.empty(num, dtype=torch.float64)
            ours.reduce_scatter(value, into, "sum", name).wait()
            _close(into, sum(part[rank] for part in parts))
            assert torch.equal(value, parts[rank]), "the input stays"
            whole = torch.empty(size, num, dtype=torch.float64)
            ours.all_gather(values[rank], whole, name).wait()
            assert torch.equal(whole, torch.stack(values))
        for name in ALGORITHMS["reduce"]:
            root = draw.randrange(size)
            value = values[rank].clone()
            ours.broadcast(value, root, name).wait()
            assert torch.equal(value, values[root])
            value = values[rank].clone()
            ours.reduce(value, root, "sum", name).wait()
            if rank == root:
                _close(value, sum(values))
        for name in ALGORITHMS["gather"]:
            root = draw.randrange(size)
            whole = torch.empty(size, num, dtype=torch.float64)
            ours.gather(values[rank], whole, root, name).wait()
            if rank == root:
                assert torch.equal(whole, torch.stack(values))
            value = parts[rank].clone()
            ours.scatter(value, root, name).wait()
            assert torch.equal(value[rank], parts[root][rank])
        some = [[draw.randrange(num + 1) for _ in range(size)] for _ in range(size)]
        alone = [[num * (i == 0 and j == size - 1) for j in range(size)] for i in range(size)]
        for name, counts in itertools.product(ALGORITHMS["all_to_all"], (some, alone)):
            sent = [torch.cat([_values(n, 7 * i + j, seed) for j, n in enumerate(row)]) for i, row in enumerate(counts)]
            received = [sent[i].split(row)[rank] for i, row in enumerate(counts)]
            into = torch.empty(sum(map(len, received)), dtype=torch.float64)
            ours.all_to_all(sent[rank], into, counts, name).wait()
            assert torch.equal(into, torch.cat(received))
    for name in ALGORITHMS["barrier"]:
        ours.barrier(name)
    return done


def _values(num: int, rank: int, seed: int) -> Tensor:
    return torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def _close(actual: Tensor, expected: Tensor | int) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


def over_shared_memory(message_bytes: int, short_bytes: int) -> int:
    ours = _ours()
    ours._kinds.clear()  # of which other tests made some
    with small_messages(message_bytes), pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_kind, "SHORT_BYTES", short_bytes)
        done = run_all(ours)
    ours._kinds.clear()
    return done


def over_send_and_receive(message_bytes: int) -> int:
    with small_messages(message_bytes):
        return run_all(_over_wires())


class small_messages:  # noqa: N801 - used like a function
    """Messages of so many bytes, so that even short vectors take several."""

    def __init__(self, num_bytes: int) -> None:
        self._patch, self._num_bytes = pytest.MonkeyPatch(), num_bytes

    def __enter__(self) -> None:
        for module in (collective_kind, segment, base):
            self._patch.setattr(module, "MESSAGE_BYTES", self._num_bytes)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _ours() -> Collectives:
    return collectives(_world())


def _over_wires() -> Collectives:
    rank, size = _world().rank(), _world().size()
    lanes: dict[int, Lane] = {peer: TorchLane(_world(), peer, RankStreams()) for peer in range(size) if peer != rank}
    return Collectives(rank, size, lanes, f"rank {rank}")


@pytest.mark.parametrize(
    ("num_ranks", "message_bytes", "short_bytes"), [(2, 256, 0), (3, 512, 2**14), (3, 512, 0), (4, 1024, 2**14)]
)
def test_every_algorithm_over_shared_memory(ranks: Ranks, num_ranks: int, message_bytes: int, short_bytes: int) -> None:
    done = ranks(num_ranks, over_shared_memory, message_bytes, short_bytes)
    assert done[0] == len(SIZES) * len(ALGORITHMS["all_reduce"])


@pytest.mark.parametrize(("num_ranks", "message_bytes"), [(2, 2**19), (3, 1024)])
def test_every_algorithm_over_send_and_receive(ranks: Ranks, num_ranks: int, message_bytes: int) -> None:
    assert ranks(num_ranks, over_send_and_receive, message_bytes)[0] > 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_algorithm_between_threads(num_ranks: int) -> None:
    """Lanes that hold three messages, of 64 bytes each."""
    each = threads(num_ranks, slots=3)
    with small_messages(64):
        counts = together([lambda ours=ours: run_all(ours) for ours in each])  # type: ignore[misc]
    assert counts == [len(SIZES) * len(ALGORITHMS["all_reduce"])] * num_ranks


def threads(num_ranks: int, slots: int) -> list[Collectives]:
    lanes: list[dict[int, Lane]] = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for other in range(rank):
            lanes[rank][other], lanes[other][rank] = Loopback.pair(rank, other, slots)
    return [Collectives(rank, num_ranks, each) for rank, each in enumerate(lanes)]


def together(calls: list[Callable[[], object]]) -> list[object]:
    """What calls return that are made at the same time, each in a thread of its own."""
    results: list[object] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - told by the comparison with what was expected
            results[index] = error

    started = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
    return results


def test_seven_workers_add_up_along_a_binary_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published example (tree-7), executed: 11 and 14 at the inner workers, 35 everywhere."""
    sums: list[float] = []

    def add(total: Tensor, theirs: Tensor) -> Tensor:
        total.add_(theirs)
        sums.append(float(total))
        return total

    monkeypatch.setitem(collective_kind.REDUCE, "sum", add)
    values = [torch.tensor([float(value)]) for value in (10, 4, 7, 2, 5, 1, 6)]
    each = threads(7, slots=3)

    def call(rank: int) -> float:
        each[rank].all_reduce(values[rank], "sum", "binary-tree").wait()
        return float(values[rank])

    assert together([functools.partial(call, rank) for rank in range(7)]) == [35.0] * 7
    assert {11.0, 14.0, 35.0} <= set(sums)


# --- along levels ----------------------------------------------------------------------------------------------------


def run_along(ours: Collectives, boxes: str) -> int:
    """Every algorithm along these levels; how many were compared."""
    rank, size, done = ours.rank, ours.num_ranks, 0
    for num in (0, 7, 400):
        values = [_values(num, peer, 1) for peer in range(size)]
        parts = [torch.stack([_values(num, peer + size * other, 1) for other in range(size)]) for peer in range(size)]
        for across in ACROSS_BY_OPERATION["all_reduce"]:
            for name in (written("star", across, boxes), written("ring", across, boxes, 3)):
                value = values[rank].clone()
                ours.all_reduce(value, "sum", name).wait()
                _close(value, sum(values))
                done += 1
        for across in ACROSS_BY_OPERATION["reduce_scatter"] if "." not in boxes or boxes == "0.2|1.3" else ():
            name, into = written("star", across, boxes), torch.empty(num, dtype=torch.float64)
            ours.reduce_scatter(parts[rank], into, "sum", name).wait()
            _close(into, sum(part[rank] for part in parts))
            whole = torch.empty(size, num, dtype=torch.float64)
            ours.all_gather(values[rank], whole, name).wait()
            assert torch.equal(whole, torch.stack(values))
            done += 1
    return done


def in_boxes(boxes: str) -> tuple[int, str]:
    """Ranks of a box share memory, others send and receive; how many were compared, and over which lanes."""
    rank, size = _world().rank(), _world().size()
    algorithm = read(f"star+ring@{boxes}")
    assert algorithm is not None
    (box,) = [leaves(box) for box in algorithm.boxes if rank in leaves(box)]
    lanes: dict[int, Lane] = {}
    for peer in range(size):
        if peer in box and peer != rank:
            lane = shared_memory.SharedMemory.connect(
                _world().get_group_store(), "levels", rank, peer, 30.0, collective_kind.SLOTS
            )
            assert lane is not None
            lanes[peer] = lane
        elif peer != rank:
            lanes[peer] = TorchLane(_world(), peer, RankStreams())
    with small_messages(1024):
        done = run_along(Collectives(rank, size, lanes), boxes)
    return done, " ".join(type(lanes[peer]).__name__ if peer in lanes else "." for peer in range(size))


@pytest.mark.parametrize("boxes", ["2x2", "0.2|1.3", "0.1.2|3"])
def test_every_algorithm_along_levels_over_memory_and_links(ranks: Ranks, boxes: str) -> None:
    results = ranks(4, in_boxes, boxes)
    assert [done for done, _ in results] == [24 if boxes == "0.1.2|3" else 33] * 4
    if boxes == "2x2":
        assert results[0][1] == ". SharedMemory TorchLane TorchLane"


@pytest.mark.parametrize("boxes", ["2x2", "2x3", "2x2x2", "0.1|2||3.4"])
def test_every_algorithm_along_levels_between_threads(boxes: str) -> None:
    algorithm = read(f"star+ring@{boxes}")
    assert algorithm is not None
    with small_messages(64):
        each = threads(len(leaves(algorithm.boxes)), slots=3)
        done = together([lambda ours=ours: run_along(ours, boxes) for ours in each])  # type: ignore[misc]
    assert set(done) == {24 if "|" in boxes else 33}


# --- many at once ----------------------------------------------------------------------------------------------------


def overlapping(seed: int) -> bool:
    """Collectives of all sizes are started, and waited for in another order, some after all have been started."""
    ours, draw = _ours(), random.Random(seed)
    size, rank = _world().size(), _world().rank()
    waiting = []
    for index in range(60):
        num = draw.choice([0, 1, 7, 1000, 300_000, draw.randrange(20_000)])
        dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.int64])
        name = draw.choice([algorithm for algorithm in ALGORITHMS["all_reduce"] if algorithm != "one-by-one"])
        whole = [torch.full((num,), index % 5 + peer, dtype=dtype) for peer in range(size)]
        result = whole[rank].clone()
        expected = torch.stack(whole).sum(0, dtype=dtype)
        waiting.append((ours.all_reduce(result, "sum", name, f"{index}"), result, expected))
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


def in_inference_mode_first() -> list[float]:
    """Through every slot of a lane in either mode. Vectors are long enough for tensors: numpy copies short vectors."""
    ours, value = _ours(), torch.ones(10**5)
    for mode in (True, False):
        with torch.inference_mode(mode):
            for _ in range(8):
                value = torch.ones(10**5)
                ours.all_reduce(value, "sum", "ring").wait()
    return value.unique().tolist()


def test_memory_first_used_in_inference_mode_serves_outside_of_it(ranks: Ranks) -> None:
    assert ranks(2, in_inference_mode_first) == [[2.0], [2.0]]


# --- short ones ------------------------------------------------------------------------------------------------------

Short = tuple[int, torch.dtype, str, str]
"""Elements, dtype, operation, label."""


def short(cases: list[Short]) -> list[bytes]:
    """All-reduces of one message a round, one after the other; the bits of their results."""
    ours, size, bits = _ours(), _world().size(), []
    for number, (num, dtype, op, label) in enumerate(cases):
        values = [100 * _values(num, peer, number) for peer in range(size)]
        values = [value > 0 if dtype == torch.bool else value.to(dtype) for value in values]
        result = values[ours.rank].clone()
        ours.all_reduce(result, op, "butterfly", label).wait()
        while len(values) > 1:  # a butterfly adds up neighbours, then pairs of them
            values = [
                collective_kind.REDUCE[op](value, other) for value, other in zip(values[::2], values[1::2], strict=True)
            ]
        assert torch.equal(result, values[0])
        bits.append(result.view(torch.uint8).numpy().tobytes() if num else b"")
    return bits


CASES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 63, 64, 1000]) | st.integers(0, 3000),
        st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]),
        st.sampled_from(["sum", "max", "min"]),
        st.sampled_from(["", "gradient of a", "gradient of b"]),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("num_ranks", [2, 4])
@settings(tries(3), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=CASES)
def test_short_all_reduces_of_any_kind_have_the_same_bits_everywhere(
    ranks: Ranks, num_ranks: int, cases: list[Short]
) -> None:
    first, *others = ranks(num_ranks, short, cases)
    assert all(other == first for other in others)


def elsewhere() -> list[list[float]]:
    """All-reduces of short tensors that are not simply in memory of their own: strided, of a parameter, at an address
    at which there was another."""
    ours, results = _ours(), []
    spread = torch.arange(8.0)[::2]
    ours.all_reduce(spread).wait()
    results.append(spread.tolist())
    parameter = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        ours.all_reduce(parameter).wait()
    results.append(parameter.tolist())
    kept = []
    for number in range(2 * collective_kind.ARRAYS):  # half of them stay, so that addresses both return and do not
        tensor = torch.full((4,), float(number))
        ours.all_reduce(tensor).wait()
        results.append(tensor.tolist())
        kept += [tensor] * (number % 2)
    return results


def test_short_tensors_may_lie_anywhere(ranks: Ranks) -> None:
    expected = [[0.0, 4.0, 8.0, 12.0], [2.0] * 4, *([2.0 * number] * 4 for number in range(2 * collective_kind.ARRAYS))]
    assert ranks(2, elsewhere) == [expected, expected]


def infinite(num: int) -> list[float]:
    """Sums without a value, where numpy is told to raise."""
    value = torch.full((num,), torch.inf if _ours().rank else -torch.inf)
    with np.errstate(all="raise"):
        _ours().all_reduce(value).wait()
    return value[:2].tolist()


@pytest.mark.parametrize("num", [2, 10_000])
def test_infinities_are_added_without_a_word(ranks: Ranks, num: int) -> None:
    assert all(math.isnan(value) for each in ranks(2, infinite, num) for value in each)


def alike(repeats: int) -> str:
    """Rank 0 waits in vain for one more all-reduce that is like those before."""
    ours = _ours()
    for _ in range(repeats):
        ours.all_reduce(torch.zeros(3), label="loss").wait()
    message = ""
    if ours.rank == 0:
        ours._lanes[1].timeout_s = 0.1  # type: ignore[attr-defined]
        with pytest.raises(LostRankError) as error:
            ours.all_reduce(torch.zeros(3), label="loss").wait()
        message = str(error.value)
    dist.barrier()
    return message


def test_of_collectives_that_are_alike_the_last_is_named(ranks: Ranks) -> None:
    text = ranks(2, alike, 20)[0]
    assert "rank 0 is in #21 all_reduce of 3 x float32, sum, butterfly (loss)" in text
    assert (
        "rank 1 was in #20 all_reduce of 3 x float32, sum, butterfly (loss), has last sent to this rank in #20" in text
    )


# --- what goes wrong -------------------------------------------------------------------------------------------------


def ours_over(kind: str) -> Collectives:
    return _ours() if kind == "shared memory" else _over_wires()


def differing(kind: str, lanes: str) -> str:
    ours, rank = ours_over(lanes), _world().rank()
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


USUAL = "all_reduce of 10 x float32, sum, butterfly (axis dp)"
THEIRS = {
    "size": "all_reduce of 11 x float32, sum, butterfly (axis dp)",
    "dtype": "all_reduce of 10 x int32, sum, butterfly (axis dp)",
    "op": "all_reduce of 10 x float32, max, butterfly (axis dp)",
    "order": "all_gather of {} x float32, sum, star (axis tp)",
}


@pytest.mark.parametrize("kind", THEIRS)
def test_ranks_that_differ_are_named_with_what_each_was_in(ranks: Ranks, kind: str) -> None:
    first, second = ranks(2, differing, kind, "shared memory")
    assert first.startswith("rank 1: it sent ")
    assert second.startswith("rank 0: it sent ")
    assert f"rank 0 is in #2 {USUAL}" in first
    theirs = THEIRS[kind].format(20)
    assert f"rank 1 was in #2 {theirs}" in first
    assert f"rank 1 is in #2 {theirs}" in second


@pytest.mark.parametrize("lanes", ["shared memory", "send and receive"])
@pytest.mark.parametrize("kind", THEIRS)
def test_all_of_three_report_that_one_differs(ranks: Ranks, kind: str, lanes: str) -> None:
    """Also one that waits for a rank that does as it does."""
    reports = ranks(3, differing, kind, lanes)
    theirs = THEIRS[kind].format(30)
    for rank, report in enumerate(reports):
        assert "it sent " in report, report
        assert f"rank {rank} is in #2 {theirs if rank == 2 else USUAL}" in report
    assert any(f"rank 2 was in #2 {theirs}" in report for report in reports[:2]), reports


def lost(lanes: str, after: int, num: int, algorithm: str) -> None:
    """Rank 1 is killed after so many calls of its lanes in an all-reduce."""
    ours, rank = ours_over(lanes), _world().rank()
    ours.all_reduce(torch.zeros(3), label="first").wait()
    done = 0

    def step(usual: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            nonlocal done
            if rank == 1 and done == after:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return usual(*given)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(lane) for lane in ours._lanes.values()}:
            for name in ("put", "put_at_once", "take"):
                patch.setattr(kind, name, step(getattr(kind, name)))
        with pytest.raises(LostRankError) as caught:
            ours.all_reduce(torch.zeros(num), algorithm=algorithm, label="second").wait()
    assert caught.value.where == "rank 1", caught.value
    assert f"rank {rank} is in #2 all_reduce of {num} x float32, sum, {algorithm} (second)" in str(caught.value)
    if lanes == "shared memory":
        assert re.search(r"rank 1 was in #2 all_reduce.*has ended", str(caught.value)), caught.value


@pytest.mark.parametrize("after", [0, 3, 9])
@pytest.mark.parametrize("lanes", ["shared memory", "send and receive"])
def test_a_rank_that_is_killed_in_the_middle_is_named_by_all_others(ranks: Ranks, lanes: str, after: int) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(3, lost, lanes, after, 500_000, "ring")
    assert list(error.value.failures) == [1], error.value


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_is_killed_before_a_short_message_is_named_by_all_others(ranks: Ranks, num_ranks: int) -> None:
    """Also by ranks that wait for one that waits for it."""
    with pytest.raises(RanksFailedError) as error:
        ranks(num_ranks, lost, "shared memory", 0, 10, "butterfly")
    assert list(error.value.failures) == [1], error.value


def share_and_forget() -> tuple[int, int, list[str]]:
    """How much more of this process's memory is shared with another rank: while there are collectives, and after they
    failed and were dropped; and the files that it maps (others of this machine may make theirs meanwhile)."""
    before, usual = _mapped_files(), _shared_parts()
    me, others = _world().rank(), [peer for peer in range(_world().size()) if peer != _world().rank()]
    store = _world().get_group_store()
    lanes = {peer: shared_memory.SharedMemory.connect(store, "forgotten", me, peer, 60.0, 8) for peer in others}
    for lane in lanes.values():
        assert lane is not None
        lane.timeout_s = 0.2
    ours = Collectives(me, _world().size(), {peer: lane for peer, lane in lanes.items() if lane is not None})
    held = _shared_parts() - usual
    if me == 0:
        with pytest.raises(LostRankError):
            ours.all_reduce(torch.zeros(500_000), algorithm="ring").wait()
    files = sorted(_mapped_files() - before)
    del ours, lanes, lane
    return held, _shared_parts() - usual, files


def _shared_parts() -> int:
    gc.collect()
    return sum("meshwright" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}


def test_no_file_is_made_and_no_memory_is_kept(ranks: Ranks) -> None:
    assert ranks(2, share_and_forget) == [(2, 0, []), (2, 0, [])]


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
    text = ranks(2, late)[0]
    assert text.startswith("rank 1: it has sent nothing for 0.1 s")
    assert "rank 0 is in #2 all_reduce of 10 x float32, sum, butterfly (second)" in text
    assert (
        "rank 1 was in #1 all_reduce of 3 x float32, sum, butterfly (first), has last sent to this rank in #1" in text
    )


def without_memory() -> str:
    """Rank 1 may make no file as large as that, also not in memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if _world().rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        _ours()
    except RankError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


def test_memory_that_one_rank_cannot_have_is_an_error_on_all(ranks: Ranks) -> None:
    message, *others = ranks(3, without_memory)
    assert message.startswith("rank 1: no 2 MiB of memory to share with another rank: File too large\n  -> free memory")
    assert others == [message, message]
