"""The backend "meshwright": every call of torch.distributed gives what gloo gives, and failures have names."""

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import conformance
from meshwright.comm.process_group import links
from meshwright.comm.process_group.group import MeshwrightGroup
from meshwright.comm.process_group.identity import NAME
from meshwright.comm.process_group.in_order import CollectiveWork, InOrder
from meshwright.comm.process_group.other_devices import OtherDevices
from meshwright.comm.process_group.registration import register
from meshwright.comm.process_group.tensors import shares_elements
from meshwright.comm.process_group.work import GroupError, LostInGroupError
from meshwright.comm.transport.base import MESSAGE_BYTES
from tests.distributed.backend_stress import stress
from tests.distributed.pool import Ranks, RanksFailedError

ROOT = Path(__file__).parents[2]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
ORDERED = [dist.ReduceOp.MIN, dist.ReduceOp.MAX]
SUMS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT]
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def ours(timeout_s: float = 60.0, ranks: list[int] | None = None) -> Any:
    """A group of the backend."""
    register()
    return dist.new_group(ranks, backend=NAME, timeout=timedelta(seconds=timeout_s))


def drawn(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers, other ones on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    values = torch.randint(0, 2 if dtype == torch.bool else 7, (count,), generator=generator)
    return values.to(dtype) if not dtype.is_complex else torch.complex(values.float(), values.flip(0).float()).to(dtype)


# --- every call gives what gloo gives ------------------------------------------------------------------------------


def reductions_equal_gloo() -> int:
    group, done = ours(), 0
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128):
        ops = SUMS if dtype.is_complex or dtype == torch.bool else SUMS + ORDERED + (BITS if dtype in INTEGERS else [])
        if dtype.is_complex:
            ops = [dist.ReduceOp.SUM]
        for op in ops:
            for count in (1, 5, 3000):
                value, theirs = drawn(count, dtype, count), drawn(count, dtype, count)
                dist.all_reduce(value, op, group)
                dist.all_reduce(theirs, op)
                if dtype == torch.bool:  # gloo adds bytes: its true may be 2
                    theirs = theirs.view(torch.uint8) != 0
                assert torch.equal(value, theirs), (dtype, op, count)
                done += 1
    mean = drawn(5, torch.float64, 0)
    total = mean.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG, group)
    dist.all_reduce(total)
    assert torch.equal(mean, total / group.size())
    scaled = drawn(5, torch.float64, 0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.0), group)
    assert torch.equal(scaled, 2 * total)
    return done


def test_reductions_of_all_dtypes_equal_gloos(ranks: Ranks) -> None:
    assert ranks(2, reductions_equal_gloo) == [144] * 2


def calls(group: Any, dtype: torch.dtype, count: int) -> dict[str, list[Tensor]]:
    """The results of every collective in a group."""
    size, me, results = dist.get_world_size(), dist.get_rank(), {}
    value, rows = drawn(count, dtype, 1), drawn(count * size, dtype, 2)

    def new(num: int = count) -> Tensor:
        return torch.zeros(num, dtype=dtype)

    results["all_gather"] = [new() for _ in range(size)]
    dist.all_gather(results["all_gather"], value, group)
    results["all_gather_single"] = [new(count * size)]
    dist.all_gather_single(results["all_gather_single"][0], value, group)
    results["reduce_scatter"] = [new()]
    dist.reduce_scatter(results["reduce_scatter"][0], list(rows.split(count)), group=group)
    results["reduce_scatter_single"] = [new()]
    dist.reduce_scatter_single(results["reduce_scatter_single"][0], rows, group=group)
    for root in range(size):
        results[f"broadcast {root}"] = [value.clone()]
        dist.broadcast(results[f"broadcast {root}"][0], root, group)
        total = value.clone()
        dist.reduce(total, root, group=group)
        results[f"reduce {root}"] = [total] if me == root else []
        gathered = [new() for _ in range(size)] if me == root else None
        dist.gather(value, gathered, root, group)
        results[f"gather {root}"] = gathered or []
        results[f"scatter {root}"] = [new()]
        dist.scatter(results[f"scatter {root}"][0], list(rows.split(count)) if me == root else None, root, group)
    results["all_to_all"] = [new(count * size)]
    dist.all_to_all_single(results["all_to_all"][0], rows, group=group)
    # rows from source to target
    splits = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]
    received = [splits[other][me] for other in range(size)]
    results["all_to_all uneven"] = [torch.zeros(sum(received), count, dtype=dtype)]
    sent = drawn(count * sum(splits[me]), dtype, 3).view(-1, count)
    dist.all_to_all_single(results["all_to_all uneven"][0], sent, received, splits[me], group)
    results["coalesced"] = [value.clone(), rows.clone()]
    with dist._coalescing_manager(group):
        for tensor in results["coalesced"]:
            dist.all_reduce(tensor, group=group)
    dist.barrier(group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": me, "text": "x" * me}, group)
    assert objects == [{"rank": rank, "text": "x" * rank} for rank in range(size)]
    kept = [me, "a"]
    dist.broadcast_object_list(kept, size - 1, group)
    assert kept == [size - 1, "a"]
    return results


def calls_equal_gloo() -> int:
    group, done = ours(), 0
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for count in (1, 1000, 300_000 if dtype == torch.float32 else 30):
            results, theirs = calls(group, dtype, count), calls(dist.group.WORLD, dtype, count)
            assert results.keys() == theirs.keys()
            for name, tensors in theirs.items():
                assert len(results[name]) == len(tensors)
                assert all(map(torch.equal, results[name], tensors)), (name, dtype, count)
                done += 1
    return done


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_equal_gloos(ranks: Ranks, num_ranks: int) -> None:
    assert ranks(num_ranks, calls_equal_gloo) == [9 * (7 + 4 * num_ranks)] * num_ranks


def lists_of_any_size() -> None:
    """Calls that gloo has not: lists of tensors that differ in size, and all-to-all of lists."""
    group, size, me = ours(), dist.get_world_size(), dist.get_rank()
    outputs = [torch.empty(rank + 1) for rank in range(size)]
    dist.all_gather(outputs, torch.full((me + 1,), float(me)), group)
    assert [output.tolist() for output in outputs] == [[float(rank)] * (rank + 1) for rank in range(size)]
    into = torch.empty(me + 1)
    dist.reduce_scatter(into, [torch.full((rank + 1,), float(rank + me)) for rank in range(size)], group=group)
    assert into.tolist() == [float(size * me + sum(range(size)))] * (me + 1)
    received = [torch.empty(rank + 1) for rank in range(size)]
    dist.all_to_all(received, [torch.full((me + 1,), float(10 * me + rank)) for rank in range(size)], group)
    assert [tensor.tolist() for tensor in received] == [[float(10 * rank + me)] * (rank + 1) for rank in range(size)]
    sparse = torch.eye(4).to_sparse() * (me + 1)
    dist.all_reduce(sparse, group=group)
    assert torch.equal(sparse.to_dense(), torch.eye(4) * sum(range(1, size + 1)))


def test_lists_may_differ_in_size(ranks: Ranks) -> None:
    ranks(3, lists_of_any_size)


def strided() -> None:
    """Tensors that are not contiguous are read and written at their own places."""
    group, me = ours(), dist.get_rank()
    grid = torch.zeros(4, 6)
    grid[:, ::2] = me + 1.0
    dist.all_reduce(grid[:, ::2], group=group)
    assert torch.equal(grid[:, ::2], torch.full((4, 3), 3.0))
    assert not grid[:, 1::2].any()
    whole = torch.zeros(3, 4).t()
    dist.all_gather_single(whole, torch.full((2, 3), float(me)), group)
    assert torch.equal(whole, torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2))
    own = torch.arange(4.0) + 4 * me
    memory = torch.empty(8)
    memory[4 * me : 4 * me + 4] = own
    dist.all_gather_single(memory, memory[4 * me : 4 * me + 4], group)  # in place, as FSDP does
    assert torch.equal(memory, torch.arange(8.0))
    dist.reduce_scatter_single(memory[4 : 4 + 4], memory, group=group)  # the output lies in the input
    assert torch.equal(memory[4:], 2 * (torch.arange(4.0) + 4 * me))
    with torch.inference_mode():
        inside = torch.ones(3)
        work = dist.all_reduce(inside, group=group, async_op=True)
        assert work.wait()
    assert inside.tolist() == [2.0] * 3
    leaf = torch.ones(3, requires_grad=True)
    loss = (leaf * leaf).sum()
    dist.all_reduce(leaf, group=group)
    loss.backward()  # no change that autograd would count, as with gloo


def test_tensors_may_lie_anywhere(ranks: Ranks) -> None:
    ranks(2, strided)


# --- works ---------------------------------------------------------------------------------------------------------


def works() -> None:
    group, me = ours(), dist.get_rank()
    tensors = [torch.full((1000,), float(me)) for _ in range(4)]
    started = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(lambda done: done.value()[0].sum().item()) for work in started]
    assert [future.wait() for future in futures] == [1000.0] * 4  # nobody has waited for the works
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in started)
    nested = torch.ones(2)

    def again(done: Any) -> Tensor:
        dist.all_reduce(done.value()[0], group=group)  # a collective in a callback, as hooks of DDP have
        return done.value()[0]

    future = dist.all_reduce(nested, group=group, async_op=True).get_future().then(again)
    assert future.wait().tolist() == [4.0, 4.0]
    late = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    late.wait(timedelta(seconds=30))
    late.get_future().wait()  # after the end, too
    if me == 0:
        time.sleep(0.3)
    waited = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    if me == 1:
        with pytest.raises(LostInGroupError, match=r"not complete after 0\.01 s"):
            waited.wait(timedelta(seconds=0.01))
    waited.wait()


def test_works_complete_with_and_without_a_wait(ranks: Ranks) -> None:
    ranks(2, works)


def test_a_collective_that_is_interrupted_wakes_those_who_wait_for_it() -> None:
    connections: Any = SimpleNamespace(set_timeout=lambda seconds: None)
    in_order = InOrder(connections, "group test")

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    work = CollectiveWork("test", interrupt, None, in_order, 1.0)
    in_order.start(work, handed_over=False)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work._event_of().is_set()
    with pytest.raises(GroupError, match="it was interrupted"):
        work.wait()


def test_random_collectives_from_threads_are_right(ranks: Ranks) -> None:
    register()
    assert ranks(3, stress_here) == [80, 80, 80]


def stress_here() -> int:
    register()
    return stress(100, 5, seed=1)


# --- messages --------------------------------------------------------------------------------------------------------


def messages() -> None:
    group, size, me = ours(), dist.get_world_size(), dist.get_rank()
    long = MESSAGE_BYTES  # elements: 8 messages, more than a lane holds
    if me == 0:
        for tag in (1, 2, 3):
            dist.send(torch.full((tag * 1000,), float(tag)), 1, group, tag)
    elif me == 1:
        for tag in (3, 1, 2):  # another order than they were sent in
            message = torch.empty(tag * 1000)
            dist.recv(message, 0, group, tag)
            assert bool((message == tag).all())
    others = [rank for rank in range(size) if rank != me]
    into = {rank: torch.empty(long) for rank in others}
    ops = [dist.P2POp(dist.isend, torch.full((long,), float(me)), rank, group) for rank in others]
    ops += [dist.P2POp(dist.irecv, into[rank], rank, group) for rank in others]
    for work in dist.batch_isend_irecv(ops):  # all ranks send before they receive
        work.wait()
    assert all(bool((tensor == rank).all()) for rank, tensor in into.items())
    if me == 0:
        senders = set()
        for _ in others:
            message = torch.empty(5)
            sender = dist.recv(message, None, group, 9)
            assert message.tolist() == [float(sender)] * 5
            senders.add(sender)
        assert senders == set(others)
        received = torch.empty(3)
        begun: Any = dist.irecv(received, 1, group)
        while not begun.is_completed():
            time.sleep(0.001)
        assert received.tolist() == [7.0] * 3
        future = group.recv([received], 1, 5).get_future()
        assert future.wait()[0].tolist() == [8.0] * 3
    else:
        dist.send(torch.full((5,), float(me)), 0, group, 9)
        if me == 1:
            dist.send(torch.full((3,), 7.0), 0, group)
            dist.send(torch.full((3,), 8.0), 0, group, 5)
    # a receive that nobody waits for makes progress while its rank is elsewhere
    store = group.get_group_store()
    if me == 0:
        big = torch.empty(long)
        begun = dist.irecv(big, 1, group)
        store.get("sent")
        begun.wait()
        assert bool((big == 1).all())
    elif me == 1:
        dist.send(torch.ones(long), 0, group)
        store.set("sent", "yes")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_arrive_whatever_their_order(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks, messages)


# --- boxes -----------------------------------------------------------------------------------------------------------


def in_boxes(boxes: list[int]) -> tuple[str, ...]:
    """Ranks of a box share memory, others send and receive by gloo."""
    me = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "box", lambda: f"box {boxes[me]}")
        group = ours()
    results, theirs = calls(group, torch.float32, 1000), calls(dist.group.WORLD, torch.float32, 1000)
    for name, tensors in theirs.items():
        assert all(map(torch.allclose, results[name], tensors)), name
    if me == 0:
        dist.send(torch.ones(3), 1, group, 4)
    elif me == 1:
        message = torch.empty(3)
        dist.recv(message, None, group, 4)
        assert message.tolist() == [1.0] * 3
    group_links: Any = group._links
    return tuple(type(lane).__name__ for lane in group_links.collectives._lanes.values())


def test_ranks_of_two_boxes_use_levels(ranks: Ranks) -> None:
    results = ranks(3, in_boxes, [0, 0, 1])
    assert results == [("SharedMemory", "TorchLane"), ("SharedMemory", "TorchLane"), ("TorchLane", "TorchLane")]


# --- failures ---------------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    """What a rank is told about its own mistakes; no other rank takes part."""
    group, meta = ours(), torch.empty(4, device="meta")
    four = torch.ones(4)
    mistakes: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(meta, group=group),
        lambda: dist.all_reduce(torch.ones(1).expand(4), group=group),
        lambda: dist.all_gather([four, four], torch.ones(4), group),
        lambda: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(5), group),
        lambda: dist.all_gather_single(torch.ones(8), torch.ones(3), group),
        lambda: group._allgather_base(torch.ones(8), torch.ones(4, dtype=torch.int32)),
        lambda: dist.all_reduce(four, dist.ReduceOp.BAND, group),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [2, 2], group=group),
        lambda: group.send([four], 2, 0),
    ]
    texts = []
    for mistake in mistakes:
        with pytest.raises(GroupError) as caught:
            mistake()
        assert isinstance(caught.value, RuntimeError)
        texts.append(str(caught.value).replace("\n  -> ", " -> "))
    dist.all_reduce(four, group=group)  # the group is as good as before
    pid = os.fork()
    if not pid:
        try:
            dist.all_reduce(four, group=group)
        except GroupError as error:
            os._exit(0 if "a fork of process" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    kept: MeshwrightGroup = group
    dist.destroy_process_group(group)
    with pytest.raises(GroupError, match="after the group was destroyed"):
        kept.allreduce([four])
    return texts


def test_mistakes_are_named_before_anything_is_sent(ranks: Ranks) -> None:
    texts, again = ranks(2, refusals)
    assert texts == again
    assert [text.partition(" -> ")[0] for text in texts[:9]] == [
        "all_reduce: a tensor is on meta, and the backend meshwright carries tensors of CPUs",
        "all_reduce: a tensor of shape (4,) and strides (0,) has elements that share memory",
        "all_gather: two tensors to be written overlap",
        "all_gather: this rank's tensor has 5 elements, not 4",
        "all_gather_into_tensor: the output has 8 elements, not 6",
        "all_gather_into_tensor: tensors of torch.int32 and torch.float32",
        "all_reduce: cannot reduce torch.float32 by bitwise and",
        "all_to_all: 3 rows cannot be divided equally",
        "all_to_all: the sum of splits has 4 elements, not 3",
    ]
    assert "rank 2 of 2 is this rank or no rank" in texts[9]


@pytest.mark.parametrize(
    ("shape", "strides", "shares"), [((2, 3), (3, 1), False), ((2, 3), (1, 2), False), ((2, 3), (1, 1), True),
    ((4,), (0,), True), ((1, 4), (0, 1), False), ((3, 2), (2, 2), True)],
)  # fmt: skip
def test_elements_that_share_memory_are_found(shape: tuple[int, ...], strides: tuple[int, ...], shares: bool) -> None:
    tensor = torch.empty(20).as_strided(shape, strides)
    assert shares_elements(tensor) is shares
    places = [tensor.storage_offset() + sum(map(int.__mul__, at, strides)) for at in _every(shape)]
    assert (len(set(places)) < len(places)) is shares


def _every(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tuple(at) for at in torch.cartesian_prod(*map(torch.arange, shape)).view(-1, len(shape)).tolist()]


def differ() -> str:
    group, me = ours(), dist.get_rank()
    with pytest.raises(GroupError) as caught:
        dist.all_reduce(torch.ones(3 + me), group=group)
    return str(caught.value)


def test_ranks_that_differ_are_named(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks(2, differ)):
        assert f"rank {1 - rank}" in text
        assert "all_reduce of 3 x float32" in text
        assert "all_reduce of 4 x float32" in text


def timeouts() -> None:
    group = ours(0.6)
    if dist.get_rank() == 0:
        begun = time.monotonic()
        with pytest.raises(LostInGroupError, match=r"rank 1: it has sent nothing for 0\.6 s"):
            dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(LostInGroupError, match=r"rank 1: it has not come for 0\.6 s"):
            dist.recv(torch.ones(1), 1, group)
        with pytest.raises(LostInGroupError, match="Rank 1 failed to pass monitoredBarrier"):
            group.monitored_barrier(timedelta(seconds=0.1))
        assert time.monotonic() - begun > 1.0
    dist.barrier()


def test_a_rank_that_does_not_come_is_named_after_the_timeout(ranks: Ranks) -> None:
    ranks(2, timeouts)


def aborted() -> None:
    group = ours()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        time.sleep(0.05)
        message = group.recv([torch.ones(1)], 1, 0)
        group.abort()
        for left in (work, message):
            with pytest.raises(GroupError, match="the group was aborted"):
                left.wait()
    dist.barrier()


def test_a_group_can_be_aborted(ranks: Ranks) -> None:
    ranks(2, aborted)


def aborted_between_boxes() -> float:
    me = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "box", lambda: f"box {me}")
        group = ours()
    begun = time.monotonic()
    if me == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        time.sleep(0.05)
        group.abort()
        with pytest.raises(RuntimeError):
            work.wait()
    dist.barrier()
    return time.monotonic() - begun


def test_a_group_of_two_boxes_can_be_aborted(ranks: Ranks) -> None:
    assert max(ranks(2, aborted_between_boxes)) < 30


def test_backends_of_other_devices_end_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    others, actions = OtherDevices(dist.HashStore(), 0, 1, 1.0), []
    backend = SimpleNamespace(shutdown=lambda: actions.append("shutdown"), abort=lambda: actions.append("abort"))
    others.shutdown()  # makes none
    monkeypatch.setattr(others, "_named", lambda group: {"cuda": "nccl"})
    monkeypatch.setattr(others, "_make", lambda device, name: backend)
    group: Any = None
    assert others.backend(group, "cuda") is backend
    others.shutdown()
    others.abort()
    assert actions == ["shutdown", "abort"]


def made_again() -> list[float]:
    """A group of the same name, in the same store, after the first was destroyed."""
    values, store = [], dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    for _ in range(2):
        group: Any = MeshwrightGroup(store, dist.get_rank(), (0, 1), 30.0, "again")
        value = torch.ones(2)
        group.allreduce([value]).wait()
        group.barrier().wait()
        values.append(value[0].item())
        group.shutdown()
    return values


def test_a_group_can_be_made_again(ranks: Ranks) -> None:
    assert ranks(2, made_again) == [[2.0, 2.0]] * 2


def dies_in_backward() -> None:
    """A rank dies inside DDP's backward."""
    group, me = ours(), dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    value = torch.ones(2, 4, requires_grad=True)

    def die(gradient: Tensor) -> Tensor:
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient

    value.register_hook(die)
    hidden = model(value * 1.0)
    hidden.register_hook(die)
    with pytest.raises(RuntimeError, match="it has ended"):
        hidden.sum().backward()


def test_a_rank_that_dies_in_the_backward_of_ddp_is_named(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks(2, dies_in_backward)
    assert list(caught.value.failures) == [1]


def files_and_threads() -> tuple[int, int, int]:
    """What is left of groups that have been destroyed."""
    register()

    def use() -> None:
        group = ours()
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        other = 1 - dist.get_rank()
        works: list[Any] = [dist.isend(torch.ones(1), other, group), dist.irecv(torch.ones(1), other, group)]
        assert all(work.wait() for work in works)
        dist.barrier()
        dist.destroy_process_group(group)

    use()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))
    for _ in range(3):
        use()
    deadline = time.monotonic() + 10
    ours_left = 1
    while ours_left and time.monotonic() < deadline:
        ours_left = sum("of group" in thread.name for thread in threading.enumerate())
        time.sleep(0.01)
    return len(os.listdir("/proc/self/fd")) - before[0], len(os.listdir("/dev/shm")) - before[1], ours_left


def test_nothing_is_left_of_a_destroyed_group(ranks: Ranks) -> None:
    for files, shared, alive in ranks(2, files_and_threads):
        assert files <= 1
        assert shared <= 0
        assert alive == 0


# --- programs --------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch
import torch.distributed as dist
assert "meshwright.comm.collectives" not in sys.modules
dist.init_process_group("cpu:meshwright,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
value = torch.ones(2)
dist.all_reduce(value)
group = dist.group.WORLD
print(type(group).__name__, value.tolist(), [str(device) for device in group._device_types], group.group_name)
dist.destroy_process_group()
"""


def test_a_program_needs_no_import(tmp_path: Path) -> None:
    """PyTorch finds the backend by the package's entry point; nothing else of Meshwright is imported for it."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    information = tmp_path / "meshwright-0.dist-info"  # as an installation writes it
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: meshwright\nVersion: 0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    (information / "entry_points.txt").write_text(f"[torch.backends]\n{lines}\n")
    paths = os.pathsep.join(map(str, (tmp_path, ROOT / "src")))
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.split("\n")[0] == "MeshwrightGroup [1.0, 1.0] ['cpu', 'cuda'] 0"


CONFORMANCE = (
    "test_all_reduce_coalesced_sum", "test_gather", "test_accumulate_gradients_no_sync",
    "test_barrier_timeout_full_group", "test_batch_isend_irecv_gloo_tags", "test_monitored_barrier_gloo",
    "test_send_recv_any_source", "test_sparse_all_reduce_sum",
)  # fmt: skip


def test_a_few_of_pytorchs_own_tests_pass() -> None:
    """The whole suite is ``make conformance``."""
    pytest.importorskip("expecttest", reason="PyTorch's own tests import it")
    outcomes = conformance.run(conformance.IN_PLACE, 2, CONFORMANCE)
    assert {name: outcome["outcome"] for name, outcome in outcomes.items()} == dict.fromkeys(CONFORMANCE, "passed")
