"""Convolutions with algorithms on ranks: training equals one process, whatever splits the convolutions."""

from __future__ import annotations

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.comm.groups import from_rank_0
from meshwright.ir.convolution import algorithms_of
from meshwright.ir.files import decode, encode_json
from meshwright.ir.operator_algorithm import CONVOLUTIONS
from meshwright.ir.plan import starred
from meshwright.lower.plans import PlanLowering
from meshwright.planner.convolutions import sizes_of
from tests.distributed import oracle
from tests.distributed.pool import Ranks
from tests.distributed.test_spatial import MODELS

LAYOUTS = {
    "one rank": mw.Layout(),
    "samples": mw.Layout(dp=2),
    "micro-batches": mw.Layout(spatial=(2,), microbatches=2, recompute="full"),
    "rows": mw.Layout(spatial=(2,)),
    "rows and columns": mw.Layout(spatial=(2, 2)),
    "channels and filters": mw.Layout(tp=2),
}


def with_algorithms(plan: mw.Plan, graph: mw.Graph, name: str) -> mw.Plan:
    """The plan, with an algorithm for every convolution that it serves; gradients are computed in pieces."""
    texts, lower = {}, PlanLowering(graph)
    for operator in graph.operators:
        sizes = sizes_of(lower.operator(operator, {}, {})) if "aten.convolution" in operator.target else None
        if sizes is not None and name in algorithms_of(sizes):
            texts[operator.name] = f"1x1 {name} + 1x3 {name}" if operator.backward else name
    stage = msgspec.structs.replace(plan.stage, operator_algorithms=texts)
    return msgspec.structs.replace(plan, stages=(stage,))


def train(model: str, layout: mw.Layout, name: str, first: bool) -> tuple[oracle.LargestErrors, int]:
    torch.manual_seed(3)
    serial = MODELS[model]()
    torch.manual_seed(3)
    parallel = MODELS[model]()
    key = ("convolution algorithms", model)
    graph = oracle.captured(key, parallel).graph

    def planned() -> tuple[bytes, int]:
        """The plan file, and the number of its calls of algorithms."""
        plan = with_algorithms(mw.plan(graph, layout=layout), graph, name)
        if first:
            convolutions = [operator for operator in graph.operators if operator.target.startswith("aten.convolution")]
            plan = msgspec.structs.replace(
                plan, interiors=tuple({starred(convolution.name): None for convolution in convolutions})
            )
        (program,) = PlanLowering(graph)(plan)
        nodes = [node for phase in program.phases for node in phase.nodes]
        return encode_json(plan), sum("meshwright.convolution" in node.target for node in nodes)

    text, calls = from_rank_0(planned)
    before = {entry: value.clone() for entry, value in serial.model.state_dict().items()}
    optimizer = oracle.OPTIMIZERS["SGD"]
    expected = oracle.reference(serial, optimizer, key=key)
    plan = decode(text, mw.Plan, where="plan of rank 0")
    run, trainer = oracle.in_parallel(parallel, plan, optimizer, parallelize=oracle.sharing_capture(key))
    return oracle.compared(before, expected, run, trainer), calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_process(ranks: Ranks, layout: str) -> None:
    model = "U-Net" if layout == "micro-batches" else "ResNet"
    for name in CONVOLUTIONS[1:] if layout in ("rows", "one rank") else ("gemm", "fft"):
        for errors, calls in ranks(LAYOUTS[layout].num_ranks, train, model, LAYOUTS[layout], name, False):
            assert errors.error <= oracle.TOLERANCE, (name, errors)
            assert errors.moved > 1e-3
            assert calls > 6, name


def test_so_it_does_where_own_rows_are_convolved_first(ranks: Ranks) -> None:
    for name in ("implicit", "winograd(2)"):
        for errors, calls in ranks(2, train, "U-Net", mw.Layout(spatial=(2,)), name, True):
            assert errors.error <= oracle.TOLERANCE, (name, errors)
            assert calls > 6, name
