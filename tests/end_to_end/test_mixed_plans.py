"""What the integer program makes of networks of unlike layers: convolutions by sample, dense layers by features, rows
where there are too few samples; halos are paid once; no pure plan is cheaper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks.convolution import ETHERNET, ONE_BOX, captured, costs, ways
from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import Mesh
from meshwright.lower.plans import PlanLowering
from meshwright.models import AlexNet, WideResNet
from meshwright.planner.intra_op.assign import assign
from meshwright.planner.intra_op.eliminate import simplify
from meshwright.planner.intra_op.integer import solve_core


class Branches(nn.Module):
    """Two 3x3 convolutions that read one image, with a stride of 2."""

    def __init__(self, other: int = 3) -> None:
        super().__init__()
        self.left = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.right = nn.Conv2d(4, 4, other, stride=2, padding=other // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def branches(other: int = 3) -> Graph:
    with torch.device("meta"):
        image = {"image": torch.zeros(1, 4, 512, 512)}
        return mw.capture(nn.Sequential(nn.Conv2d(4, 4, 1), Branches(other)), lambda m, b: m(b["image"]).sum(), image)


@pytest.mark.parametrize("where", [ONE_BOX, ETHERNET])
def test_alexnet_is_divided_as_krizhevsky_did(where: str) -> None:
    graph, cluster = captured(AlexNet, 1024), mw.Cluster.load(where).resized(8)
    plan = mw.plan(graph, cluster, layout=mw.Layout(mixed=(8,)))
    convolutions, products = ways(graph, plan)
    assert convolutions == {"batch"}
    assert products
    assert not products & {"batch", "none"}
    mixed, _ = costs(graph, plan, cluster)
    for pure in (mw.Layout(dp=8), mw.Layout(tp=8)):
        assert mixed < costs(graph, mw.plan(graph, cluster, layout=pure), cluster)[0]


def test_slow_links_mix_ways() -> None:
    """``make bench-convolution`` plans GoogLeNet, too."""
    graph, cluster = captured(WideResNet, 16), mw.Cluster.load(ETHERNET).resized(8)
    plan = mw.plan(graph, cluster, layout=mw.Layout(mixed=(8,)))
    convolutions, products = ways(graph, plan)
    assert len((convolutions | products) - {"none"}) > 1
    alone, _ = costs(graph, mw.plan(graph, cluster, layout=mw.Layout(dp=8)), cluster)
    assert costs(graph, plan, cluster)[0] < alone


def test_a_picture_alone_is_cut_by_rows_as_the_explicit_rule_cuts_it() -> None:
    graph, cluster = branches(), mw.Cluster.load(ONE_BOX).resized(2)
    mixed = mw.plan(graph, cluster, layout=mw.Layout(mixed=(2,), pin={"1.*": "height@m1"}))
    explicit = mw.plan(graph, cluster, layout=mw.Layout(spatial=(2,)))
    for name in ("1.left:convolution#0", "1.left:convolution_backward#0", "1.left:convolution_backward#1"):
        assert mixed.stage.strategy(name).get("m1") == explicit.stage.strategy(name)["sy"] == "yy"
    assert "data parallelism ends at dp=1: 1 sample does not divide over 2 ranks" in mixed.explain()


def test_rows_that_several_operators_read_are_paid_once() -> None:
    cluster = mw.Cluster.load(ETHERNET).resized(2)

    def halos(other: int) -> list[int]:
        graph = branches(other)
        assigned = assign(graph, Mesh.of(m1=2), cluster, PlanLowering(graph))
        tensors = [
            tensor
            for tensor in assigned.formulated.problem.tensors
            if tensor.prices.shape[0] == 1 and not tensor.prices[0, 0]
        ]
        return [tensor.prices.shape[1] - 1 for tensor in tensors if tensor.prices.shape[1] > 1 and tensor.maker >= 0]

    assert max(halos(3)) == 2, "rows and columns, whoever reads them: forward twice, and for both weights"
    assert max(halos(5)) == 4, "other windows are other rows"


def test_elimination_and_the_integer_program_agree() -> None:
    graph = branches()
    assigned = assign(graph, Mesh.of(m1=2), mw.Cluster.load(ETHERNET).resized(2), PlanLowering(graph))
    core = simplify(assigned.formulated.problem, widest=1)
    assert len(core.nodes) > 1
    other = solve_core(core)
    assert other.chosen is not None
    seconds = assigned.formulated.problem.seconds(core.complete(other.chosen))
    assert assigned.solution.seconds == pytest.approx(seconds, rel=1e-6)


def norms(plan: mw.Plan, graph: Graph) -> set[str]:
    """What batch norms split over the mixed axis, forward and backward."""
    return {
        plan.stage.strategy(operator.name).get("m1", "")
        for operator in graph.operators
        if "batch_norm" in operator.target
    }


def small() -> nn.Module:
    return WideResNet((1, 1, 1), 32)


def test_statistics_of_each_rank_are_another_computation_that_only_the_layout_chooses() -> None:
    graph, cluster = captured(small, 64), mw.Cluster.load(ONE_BOX).resized(8)
    whole = mw.plan(graph, cluster, layout=mw.Layout(mixed=(8,)))
    own = mw.plan(graph, cluster, layout=mw.Layout(mixed=(8,), batch_statistics="rank"))
    assert "own" not in norms(whole, graph)
    assert "own" in norms(own, graph)
    assert "b" not in norms(own, graph)
    parts = [costs(graph, plan, cluster)[1] for plan in (own, whole)]
    assert parts[0].communication_s < parts[1].communication_s


def test_statistics_of_each_rank_cannot_be_pinned() -> None:
    graph = captured(WideResNet, 64)
    with pytest.raises(LayoutError, match="no operator there can split 'own'"):
        mw.plan(graph, devices=8, layout=mw.Layout(mixed=(8,), pin={"stem_norm": "own@m1"}))
