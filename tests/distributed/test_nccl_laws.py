"""Pipelines on CPUs under NCCL's laws: blocking sends, one operation at a time, batches. They end, and are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.comm import device_channel
from meshwright.comm.groups import from_rank_0
from meshwright.comm.member import member
from meshwright.comm.transport.native import Native
from meshwright.ir.files import decode, encode_json
from meshwright.ir.pipeline import SCHEDULES
from meshwright.ir.schedule import ActionKind
from meshwright.models import MLP, classification_loss
from tests.distributed import oracle
from tests.distributed.nccl_laws import LawfulGroup, nccl_laws
from tests.distributed.pool import Ranks

STUCK_S = 2.0
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}


def subject(pp: int) -> oracle.Subject:
    """A model with enough places to cut, and a batch of four samples in each of 2 pp micro-batches."""
    torch.manual_seed(7)
    batches: list[oracle.Batch] = [
        {"inputs": torch.randn(8 * pp, 6, dtype=torch.float64), "label": torch.randint(4, (8 * pp,))}
        for _ in range(oracle.STEPS)
    ]
    return oracle.Subject(MLP((6, *[8] * 17, 4)).double(), classification_loss, batches)


def train(schedule: str, pp: int, receivers: tuple[int, ...] = (), **more: int) -> float:
    """Train in a pipeline under NCCL's laws; the largest error on rank 0. The plan is of a cluster of GPUs, whose
    collectives are all NCCL's. ``receivers`` are the ranks of each stage that receive together."""
    chunks, key = CHUNKS.get(schedule, 1), ("laws", pp)
    layout = mw.Layout(pp=pp, chunks=chunks, schedule=schedule, microbatches=2 * pp, **more)  # type: ignore[arg-type]
    settings = oracle.OPTIMIZERS["SGD"], oracle.MAX_GRAD_NORM
    parallel = subject(pp)
    before = {name: value.clone() for name, value in parallel.model.state_dict().items()}
    graph = oracle.captured(key, parallel).graph

    def planned() -> bytes:
        return encode_json(mw.plan(graph, "h100-dgx", devices=layout.num_ranks, layout=layout))

    plan = decode(from_rank_0(planned), mw.Plan, where="plan of rank 0")
    if receivers:
        both = {ActionKind.RECV_F: receivers, ActionKind.RECV_B: receivers}
        stages = tuple(msgspec.structs.replace(stage, receivers=both) for stage in plan.stages)
        plan = msgspec.structs.replace(plan, stages=stages)
    with nccl_laws():
        run, trainer = oracle.in_parallel(parallel, plan, *settings, oracle.sharing_capture(key))
    assert dist.group.WORLD is not None
    assert all(isinstance(group, LawfulGroup) for group in member(dist.group.WORLD).directions or (None,))
    serial = oracle.reference(subject(pp), *settings, key=key)
    return oracle.compared(before, serial, run, trainer).error if trainer.rank == 0 else 0.0


def cases() -> Iterator[object]:
    """Every schedule on 2 ranks, and on one more number of ranks up to 8; ``make matrix`` runs them all."""
    schedules = [name for name in SCHEDULES if name not in ("none", "message-driven")]
    for number, schedule in enumerate(schedules):
        for pp in range(2, 9):
            marks = () if pp in (2, 3 + number % 6) else (pytest.mark.product,)
            yield pytest.param(schedule, pp, marks=marks)


@pytest.mark.parametrize(("schedule", "pp"), list(cases()))
def test_every_schedule_ends_and_equals_one_process(ranks: Ranks, schedule: str, pp: int) -> None:
    errors = ranks(pp, train, schedule, pp, timeout=240)
    assert max(errors) <= oracle.TOLERANCE


def train_with(axis: str) -> float:
    return train("1f1b", 2, (), **{axis: 2})


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_collectives_of_other_axes_keep_the_laws_too(ranks: Ranks, axis: str) -> None:
    assert max(ranks(4, train_with, axis, timeout=240)) <= oracle.TOLERANCE


def train_with_receivers() -> float:
    return train("zb-h1", 2, (2,), tp=2)


def test_ranks_that_receive_together_keep_the_laws_too(ranks: Ranks) -> None:
    assert max(ranks(4, train_with_receivers, timeout=240)) <= oracle.TOLERANCE


OTHERS: dict[str, tuple[str, mw.Layout]] = {
    "ZeRO 3": ("GPT", mw.Layout(dp=2, tp=2, zero=3, microbatches=2)),
    "ring": ("GPT", mw.Layout(dp=2, cp=2, context="ring")),
    "sequence parallel": ("GPT", mw.Layout(dp=2, tp=2, sequence_parallel=True)),
    "halo": ("LeNet", mw.Layout(dp=2, spatial=(2, 1))),
}
"""Layouts without a pipeline, each with a model."""


def subject_of(model: str) -> oracle.Subject:
    torch.manual_seed(7)
    return oracle.MODELS[model](False)


def train_other(name: str) -> float:
    model, layout = OTHERS[name]
    parallel, settings, key = subject_of(model), (oracle.OPTIMIZERS["SGD"], None), ("laws", model)
    before = {each: value.clone() for each, value in parallel.model.state_dict().items()}
    graph = oracle.captured(key, parallel).graph

    def planned() -> bytes:
        return encode_json(mw.plan(graph, "h100-dgx", devices=4, layout=layout))

    plan = decode(from_rank_0(planned), mw.Plan, where="plan of rank 0")
    with nccl_laws():
        run, trainer = oracle.in_parallel(parallel, plan, *settings, oracle.sharing_capture(key))
    serial = oracle.reference(subject_of(model), *settings, key=key)
    return oracle.compared(before, serial, run, trainer).error if trainer.rank == 0 else 0.0


@pytest.mark.parametrize("name", OTHERS)
def test_layouts_without_a_pipeline_keep_the_laws_too(ranks: Ranks, name: str) -> None:
    assert max(ranks(4, train_other, name, timeout=240)) <= oracle.TOLERANCE


def coalesced() -> tuple[list[float], list[float]]:
    """Parts of two tensors gathered, and rows of two tensors summed, each as one operation."""
    native, rank = Native(group_of_all()), float(dist.get_rank())
    wholes = [torch.empty(2, 3), torch.empty(2, 2)]
    native.all_gather_each([torch.full((3,), rank), torch.full((2,), 10 + rank)], wholes).wait()
    sums = [torch.empty(3), torch.empty(1)]
    native.reduce_scatter_each([torch.full((2, 3), rank), torch.tensor([[1.0], [2.0]]) * (1 + rank)], sums).wait()
    return [float(value) for whole in wholes for value in whole[:, 0]], [float(value[0]) for value in sums]


def test_coalesced_collectives_are_right(ranks: Ranks) -> None:
    assert ranks(2, coalesced) == [([0.0, 1.0, 10.0, 11.0], [1.0, 3.0]), ([0.0, 1.0, 10.0, 11.0], [1.0, 6.0])]


def train_both_ways_in_one_communicator() -> str:
    class OneWay(device_channel.DeviceChannel):
        def __init__(self, up: Any, down: Any, peer: int, device: torch.device) -> None:
            super().__init__(up, up, peer, device)

    layout = mw.Layout(pp=2, microbatches=4)
    with nccl_laws(STUCK_S), mock.patch.object(device_channel, "DeviceChannel", OneWay):
        try:
            oracle.in_parallel(subject(2), layout, oracle.OPTIMIZERS["SGD"], None, oracle.sharing_capture(("laws", 2)))
        except Exception as error:  # noqa: BLE001 - which of the two ranks fails how is left open
            return type(error).__name__
    return "it ended"


def test_with_one_communicator_for_both_directions_1f1b_is_stuck(ranks: Ranks) -> None:
    """As ``schedules/rendezvous.py`` says of the recorded messages."""
    assert "it ended" not in ranks(2, train_both_ways_in_one_communicator, timeout=120)


# --- the laws --------------------------------------------------------------------------------------------------------


def group_of_all(timeout_s: float | None = None) -> Any:
    with nccl_laws(timeout_s):
        return dist.new_group(list(range(dist.get_world_size())))


def first_sends() -> tuple[bool, bool]:
    """Both ranks send, then receive; with a communicator for each direction, and with one."""
    up, down, other = group_of_all(), group_of_all(), 1 - dist.get_rank()
    out, back = (up, down) if other else (down, up)
    received = torch.empty(2)
    works = [out.send([torch.full((2,), float(other))], other), back.recv([received], other)]
    for work in works:
        work.wait()
    dist.barrier()
    shared_group = group_of_all(STUCK_S)
    stuck = [shared_group.send([torch.ones(2)], other), shared_group.recv([received.clone()], other)]
    try:
        stuck[0].wait()
    except TimeoutError:
        return bool((received == float(1 - other)).all()), True
    return bool((received == float(1 - other)).all()), False


def test_two_sends_in_one_communicator_wait_for_ever(ranks: Ranks) -> None:
    assert ranks(2, first_sends) == [(True, True), (True, True)]


def batched() -> list[float]:
    """A ring of messages, in one batch: a send and a receive of each rank progress together."""
    group, rank, size = group_of_all(), dist.get_rank(), dist.get_world_size()
    received = torch.empty(3)
    with nccl_laws():
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((3,), float(rank)), group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
            ]
        )
    for work in works:
        work.wait()
    return received.tolist()


def test_a_batch_goes_around_a_ring(ranks: Ranks) -> None:
    assert ranks(3, batched) == [[2.0] * 3, [0.0] * 3, [1.0] * 3]


def sent_before_it_is_received() -> bool:
    """Whether a send has ended although the peer has not received."""
    group, rank = group_of_all(), dist.get_rank()
    value: Tensor = torch.ones(1)
    work = group.send([value], 1) if rank == 0 else None
    dist.barrier()
    early = work is not None and work.is_completed()
    dist.barrier()
    if rank == 1:
        work = group.recv([value], 0)
    assert work is not None
    work.wait()
    return early


def test_a_send_ends_when_it_is_received_not_before(ranks: Ranks) -> None:
    assert ranks(2, sent_before_it_is_received) == [False, False]
