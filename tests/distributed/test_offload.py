"""Optimizer state on the host: training is the same bit by bit, under every optimizer and ZeRO; checkpoints go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.program import HeldBytes, stage_held
from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.runtime import offload
from meshwright.runtime.device import CpuKind
from meshwright.runtime.offload import Offloader
from tests.distributed import oracle
from tests.distributed.pool import Ranks

OPTIMIZERS = {**oracle.OPTIMIZERS, **oracle.MORE_OPTIMIZERS}
LAYOUTS = {
    "one rank": mw.Layout(),
    "zero1": mw.Layout(dp=2, zero=1),
    "zero3, m2": mw.Layout(dp=2, zero=3, microbatches=2),
    "tp2": mw.Layout(tp=2),
    "pp2": mw.Layout(pp=2, microbatches=2),
}
SMALL_CHUNK = 1024
"""Bytes: the parameters of the model make several."""


def subject() -> oracle.Subject:
    torch.manual_seed(3)
    batches = [
        {"inputs": torch.randn(8, 16, dtype=torch.float64), "label": torch.randint(4, (8,))}
        for _ in range(oracle.STEPS)
    ]
    return oracle.Subject(MLP((16, 32, 32, 4)).double(), classification_loss, batches)


def trained(layout: mw.Layout, optimizer: Any) -> tuple[oracle.Run, mw.Trainer]:
    with mock.patch.object(offload, "CHUNK_BYTES", SMALL_CHUNK):
        return oracle.in_parallel(subject(), layout, optimizer, 0.1)


def both(layout: str, names: list[str]) -> list[tuple[str, bool, int, int]]:
    """Of each optimizer: whether losses and state are the same bit by bit, and the bytes of its state."""
    rows = []
    for name in names:
        plain, trainer = trained(LAYOUTS[layout], OPTIMIZERS[name])
        there, other = trained(mw.Layout(**{**_fields(LAYOUTS[layout]), "offload": "optimizer"}), OPTIMIZERS[name])
        same = [float(loss) for loss in plain.losses] == [float(loss) for loss in there.losses]
        same = same and all(torch.equal(value, there.state[key]) for key, value in plain.state.items())
        assert other._offloader is not None
        rows.append((name, same, _state_bytes(trainer), other._offloader.host_bytes))
    return rows


def _fields(layout: mw.Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


def _state_bytes(trainer: mw.Trainer) -> int:
    states = trainer.optimizer.state.items()
    return sum(
        value.nbytes
        for parameter, state in states
        for value in state.values()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_training_is_the_same_bit_by_bit(ranks: Ranks, layout: str) -> None:
    names = ["AdamW", "LAMB"] if layout == "zero1" else ["AdamW"]
    by_rank = ranks(2, both, layout, names)
    for results in by_rank:
        for name, same, plain_bytes, host_bytes in results:
            assert same, name
            assert plain_bytes == host_bytes, name
    assert all(max(row[3] for row in several) > 0 for several in zip(*by_rank, strict=True))


def test_it_is_whatever_an_optimizer_keeps() -> None:
    for name, same, plain_bytes, host_bytes in both("one rank", ["SGD", "plain SGD", "AdaGrad", "RMSProp", "LARC"]):
        assert same, name
        assert plain_bytes == host_bytes, name


def test_two_chunks_are_on_the_device_at_most() -> None:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(6)]
    optimizer = torch.optim.Adam(parameters)
    offloader, live = Offloader(CpuKind()), []
    step = optimizer.step

    def counted() -> None:
        step()
        here = {id(value) for value in offloader._host.values()}
        moments = (value for state in optimizer.state.values() for key, value in state.items() if key != "step")
        live.append(sum(id(value) not in here for value in moments) // 2)

    with mock.patch.object(offload, "CHUNK_BYTES", 32), mock.patch.object(optimizer, "step", counted):
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones(4)
            offloader.step(optimizer, parameters)
    assert live == [2, 2, 2, 4, 4, 2], "in the first step nothing is there to be brought"
    assert offloader.host_bytes == 6 * 2 * 16


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    parameters[1].grad = torch.ones(4)
    Offloader(CpuKind()).step(optimizer, parameters)
    assert [float(parameter.detach().sum()) for parameter in parameters] == [4.0, 0.0]


def test_checkpoints_go_on_with_and_without(tmp_path: Path) -> None:
    def fresh_trainer(layout: mw.Layout) -> mw.Trainer:
        training = subject()
        return mw.parallelize(
            training.model, training.loss_fn, training.batches[0], plan=layout, optimizer=OPTIMIZERS["AdamW"]
        )

    layouts = [mw.Layout(), mw.Layout(offload="optimizer")]
    batches = [*subject().batches, *subject().batches]
    expected = fresh_trainer(layouts[0])
    for batch in batches[:4]:
        expected.step(batch)
    for source, target in ((layouts[0], layouts[1]), (layouts[1], layouts[0]), (layouts[1], layouts[1])):
        first, second = fresh_trainer(source), fresh_trainer(target)
        for batch in batches[:2]:
            first.step(batch)
        second.step(batches[4])  # something that the checkpoint must replace
        first.save(tmp_path / "ckpt")
        second.load(tmp_path / "ckpt")
        for batch in batches[2:4]:
            second.step(batch)
        assert oracle.largest_error(second.full_state_dict(), expected.full_state_dict()) == 0.0


# --- memory and the planner ------------------------------------------------------------------------------------------


def large() -> Graph:
    with mw.auto_parallelize():
        model = GPT(GPTConfig(layers=8, width=1024, heads=8, vocabulary=512, sequence_length=64))
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def held(graph: Graph, plan: mw.Plan, cluster: mw.Cluster) -> HeldBytes:
    return stage_held(PlanLowering(graph)(plan), plan, 0, cluster, ADAMW)


def test_the_formula_leaves_two_chunks_on_the_device() -> None:
    graph, cluster = large(), mw.Cluster.load("h100-dgx")
    plain, there = (
        held(graph, mw.plan(graph, cluster, layout=layout), cluster)
        for layout in (mw.Layout(), mw.Layout(offload="optimizer"))
    )
    assert plain.optimizer_bytes == 2 * plain.parameters_bytes
    assert there.optimizer_bytes == 2 * 2 * offload.CHUNK_BYTES
    assert there.total_bytes - there.optimizer_bytes == plain.total_bytes - plain.optimizer_bytes
    cpu = mw.Cluster.load("cpu-local")
    here = held(graph, mw.plan(graph, cpu, layout=mw.Layout(offload="optimizer")), cpu)
    assert here.optimizer_bytes == plain.optimizer_bytes, "a CPU's memory is its host's"


def test_the_planner_takes_it_where_memory_demands_and_it_may() -> None:
    graph, cluster = large(), mw.Cluster.load("h100-dgx")
    roomy = mw.plan(graph, cluster, devices=1, offload=True)
    assert roomy.offload == "none"
    assert roomy.prediction is not None
    tight = 0.85 * roomy.prediction.peak_memory_bytes
    with pytest.raises(LayoutError, match="no layout fits"):
        mw.plan(graph, cluster, devices=1, memory_bytes=tight)
    planned = mw.plan(graph, cluster, devices=1, memory_bytes=tight, offload=True)
    assert planned.offload == "optimizer"
    assert planned.prediction is not None
    assert planned.prediction.peak_memory_bytes <= tight
    assert planned.prediction.step_s > roomy.prediction.step_s
