"""Lowered graphs call the kernels of collectives, not PyTorch's dispatcher; what they are made of stays as it was."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.lower.function import boxed_function
from meshwright.ops import collectives
from meshwright.runtime.kernels import KERNELS
from tests.distributed.pool import Ranks


class Seen(TorchDispatchMode):
    """The operators that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def run(algorithm: str) -> tuple[list[float], bool, list[object]]:
    """The result, whether a collective was dispatched, and the targets of the graph afterwards."""
    assert dist.group.WORLD is not None
    graph = fx.Graph()
    value = graph.placeholder("value")
    twice = graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
    name = dist.group.WORLD.group_name
    started = graph.call_function(collectives.ALL_REDUCE, (twice, "sum", name, algorithm), {"label": "twice"})
    graph.output([graph.call_function(collectives.WAIT, (started,))])
    function = boxed_function(graph, {}, KERNELS)
    with Seen() as seen:
        (result,) = function([torch.arange(3.0) + dist.get_rank()])
    assert "aten.mul.Tensor" in seen.names
    dispatched = any(collectives.NAMESPACE in name for name in seen.names)
    return result.tolist(), dispatched, [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("algorithm", ["native", "exchange"])
def test_collectives_of_a_lowered_graph_are_not_dispatched(ranks: Ranks, algorithm: str) -> None:
    for result, dispatched, targets in ranks(2, run, algorithm):
        assert result == [2.0, 6.0, 10.0]
        assert not dispatched
        assert targets == ["aten.mul.Tensor", str(collectives.ALL_REDUCE), str(collectives.WAIT)]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def dispatched_in_a_step(microbatches: int) -> list[str]:
    """The collectives that a step of a trainer sends through the dispatcher, and "mm" if its products go there."""
    layout = mw.Layout(dp=2, microbatches=microbatches)
    trainer = mw.parallelize(torch.nn.Linear(3, 2), loss_of, torch.rand(8, 3), plan=layout, optimizer=torch.optim.SGD)
    with Seen() as seen:
        trainer.step(torch.rand(8, 3))
    assert any("mm" in name for name in seen.names)
    return [name for name in seen.names if collectives.NAMESPACE in name]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_does_not_dispatch_its_collectives(ranks: Ranks, microbatches: int) -> None:
    assert ranks(2, dispatched_in_a_step, microbatches) == [[], []]


def summed_parts() -> list[float]:
    """This rank's parts of the sums of a column, of one number that stands for all, and of a row."""
    assert dist.group.WORLD is not None
    values = [torch.arange(12.0).view(6, 2)[:, 1], torch.full((1,), 3.0).expand(4), torch.arange(2.0)]
    group = dist.group.WORLD.group_name
    started = collectives.OPERATORS.reduce_to_parts_start(values, group, 2, "star")
    return collectives.OPERATORS.wait(started).tolist()


def test_gradients_that_are_not_in_one_piece_are_summed_to_parts(ranks: Ranks) -> None:
    assert ranks(2, summed_parts) == [[2.0, 6.0, 10.0, 6.0, 6.0, 0.0], [14.0, 18.0, 22.0, 6.0, 6.0, 2.0]]
