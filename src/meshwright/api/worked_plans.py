"""Worked numbers of lectures that need plans of captured models: a chain of operators, and searches that only make
stages or only divide operators."""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from meshwright.api.plans import capture, plan
from meshwright.catalog import load_cluster
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import Layout
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.planner.compare import SearchCosts, search_costs
from meshwright.planner.foretell import foretell
from meshwright.worked.line import Line, held

CLUSTER, DEVICES = "a100-80gb-dgx-hdr200x8", 8

# --- chain ------------------------------------------------------------------------------------------------------------

LAYERS, WIDTH, ROWS = 8, 4096, 8192
"""The dense layers of the chain, their width, and the rows of the batch."""
SPLIT: Mapping[str, Layout] = {
    "micro-batches": Layout(pp=DEVICES, microbatches=4 * DEVICES),
    "batch": Layout(dp=DEVICES),
    "features": Layout(tp=DEVICES),
}
"""Ways to split the graph."""
LITTLE = 1.1
"""A speed-up up to this factor counts as none."""


def chain() -> Iterator[Line]:
    """Eight equal dense layers, each of which needs the result of the layer before, on eight devices."""
    graph, cluster = _dense_layers(), load_cluster(CLUSTER, DEVICES)
    forward = [each for each in graph.operators if not each.backward]
    path = longest_path(forward)
    products = [each.module.rpartition(".")[2] for each in path if each.flops and _is_product(each)]
    on_path = sum(each.flops for each in path) / sum(each.flops for each in forward)
    yield held(
        "without a split of the graph, its operators form a chain",
        f"forward: {on_path:.1%} of the FLOPs are on one path",
        on_path > 0.999,
        f"{len(path)} of {len(forward)} operators; products of the layers {' -> '.join(products)}",
    )
    whole = longest_path(graph.operators)
    share = sum(each.flops for each in whole) / graph.flops()
    alone_s = _step_s(graph, Layout(), cluster)
    stages_s = _step_s(graph, Layout(pp=DEVICES), cluster)
    yield held(
        "so there is no parallelism",
        f"{DEVICES} devices with a layer each: {alone_s / stages_s:.2f} x as fast as one",
        alone_s / stages_s <= LITTLE,
        f"{1e3 * stages_s:.1f} ms instead of {1e3 * alone_s:.1f}: one device works while {DEVICES - 1} wait; at best "
        f"{1 / share:.2f} x, because gradients of weights ({1 - share:.0%} of the FLOPs) lie beside the path",
    )
    times = {what: alone_s / _step_s(graph, layout, cluster) for what, layout in SPLIT.items()}
    yield held(
        "a split of the graph brings it back",
        ", ".join(f"{what} {gain:.1f} x" for what, gain in times.items()),
        min(times.values()) > 2,
        f"the same {DEVICES} devices; micro-batches keep the layers whole, the others divide every operator",
    )


def longest_path(operators: list[Operator] | tuple[Operator, ...]) -> list[Operator]:
    """Operators of which each reads a result of the one before, with the largest sum of FLOPs (and, among equals, of
    operators)."""
    best: dict[str, tuple[float, int]] = {}
    previous: dict[str, Operator | None] = {}
    made_by: dict[str, Operator] = {}
    for operator in operators:  # in the order of execution
        before = [made_by[name] for name in operator.inputs if name in made_by]
        last = max(before, key=lambda each: best[each.name], default=None)
        flops, count = best[last.name] if last is not None else (0.0, 0)
        best[operator.name], previous[operator.name] = (flops + operator.flops, count + 1), last
        made_by |= dict.fromkeys(operator.outputs, operator)
    step: Operator | None = max(operators, key=lambda each: best[each.name])
    path = []
    while step is not None:
        path.append(step)
        step = previous[step.name]
    return path[::-1]


def _is_product(operator: Operator) -> bool:
    return operator.target.split(".")[1] in ("mm", "addmm")


def _dense_layers() -> Graph:
    with torch.device("meta"):
        batch = {"inputs": torch.zeros(ROWS, WIDTH), "label": torch.zeros(ROWS, dtype=torch.int64)}
        return capture(MLP((WIDTH,) * (LAYERS + 1)), classification_loss, batch)


def _step_s(graph: Graph, layout: Layout, cluster: Cluster) -> float:
    """The simulated seconds of a step."""
    planned = plan(graph, cluster, layout=layout)
    return foretell(PlanLowering(graph), planned, cluster).played.step_s


# --- inter-intra ------------------------------------------------------------------------------------------------------

SIZES = GPTConfig(layers=8, width=1024, heads=16, vocabulary=8192, sequence_length=512)
SEQUENCES = 64
"""The GPT that is planned, and the sequences of a step."""


def inter_and_intra() -> Iterator[Line]:
    """A GPT of eight layers on eight devices, planned with stages of one device each, and with divided operators."""
    inter, intra = _searched("inter"), _searched("intra")
    idle = {each.only: each.waiting_s / each.step_s for each in (inter, intra)}
    names = f"inter {inter.layout}; intra {intra.layout}"
    yield held(
        "inter-operator: less communication",
        f"{inter.communicated_bytes / 2**20:,.0f} MiB a step, intra {intra.communicated_bytes / 2**20:,.0f}",
        inter.communicated_bytes < intra.communicated_bytes,
        f"on the busiest rank; {names}",
    )
    yield held(
        "and more idle devices",
        f"{idle['inter']:.1%} of the step, intra {idle['intra']:.1%}",
        idle["inter"] > idle["intra"],
        f"time in which the busiest rank neither computes nor communicates, if nothing overlaps; steps of "
        f"{1e3 * inter.step_s:.1f} and {1e3 * intra.step_s:.1f} ms",
    )


def _searched(only: Literal["inter", "intra"]) -> SearchCosts:
    """The costs of the plan that a restricted search finds."""
    with torch.device("meta"):
        tokens = torch.zeros(SEQUENCES, SIZES.sequence_length, dtype=torch.int64)
        graph = capture(GPT(SIZES), language_model_loss, {"tokens": tokens, "targets": tokens})
    cluster = load_cluster(CLUSTER, DEVICES)
    searched = plan(graph, cluster, devices=DEVICES, only=only)
    return search_costs(only, searched, cluster, PlanLowering(graph), ADAMW, clips=False)
