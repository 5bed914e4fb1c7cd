"""All plans of a small model on a small cluster, under the prices of the search: the simplest correct search.

The search estimates layouts from priced layers, cuts by dynamic programming, and leaves out what bounds exclude. Here
nothing is left out: layouts x cuts into stages x recomputation of each stage x ZeRO stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cost.closed_form import predict_step
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.optimizer import ADAMW
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Level
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout, layout_text
from meshwright.lower.plans import PlanLowering
from meshwright.models import classification_loss
from meshwright.planner.auto import Search
from meshwright.planner.candidates import axes_of, runs, shapes, variations
from meshwright.planner.inter_op.assemble import assemble
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.pipelines import RECOMPUTE
from meshwright.planner.time_limit import TimeLimit
from meshwright.schedules.pipeline import training_schedule
from meshwright.simulate.engine import play


@dataclass(frozen=True)
class Step:
    """One plan: its name, its estimated seconds and the bytes of the fullest rank."""

    name: str
    step_s: float
    peak_bytes: float


class Residual(nn.Module):
    """Two products and an addition."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def random_graph(random: np.random.Generator) -> Graph:
    """The step of a small model of one to three layers of random widths: equal blocks, unlike blocks, or products."""
    kind, layers, batch = random.integers(3), int(random.integers(1, 4)), int(random.choice([2, 4, 8, 16]))
    widths = [int(width) for width in random.choice([16, 32, 64, 128, 256], layers + 1)]
    modules: list[nn.Module] = []
    for index in range(layers):
        if kind == 0:
            modules.append(Residual(widths[0], widths[1]))
        elif kind == 1:
            modules.append(Residual(widths[0], widths[index]))
        else:
            modules += [nn.Linear(widths[index], widths[index + 1]), nn.ReLU()]
    last = widths[-1] if kind == 2 else widths[0]
    with torch.device("meta"):
        model = nn.Sequential(*modules, nn.Linear(last, 8))
        inputs = {"inputs": torch.zeros(batch, widths[0]), "label": torch.zeros(batch, dtype=torch.int64)}
    return mw.capture(model, classification_loss, inputs)


def random_cluster(random: np.random.Generator) -> Cluster:
    """2 or 4 devices on one level, or 2 x 2 on two, with links from much faster to much slower than the devices."""
    cluster = mw.Cluster.load(str(random.choice(["cpu-local", "v100-16gb-p3-eth25"])), 2)
    fan_outs = [(2,), (4,), (2, 2)][random.integers(3)]
    levels = tuple(
        Level(
            name=("box", "network")[index], fan_out=fan_out, alpha_s=10 ** random.uniform(-7, -4),
            beta_s_per_byte=10 ** random.uniform(-11, -8),
        )
        for index, fan_out in enumerate(fan_outs)
    )  # fmt: skip
    count = int(np.prod(fan_outs))
    return msgspec.structs.replace(cluster, num_devices=count, levels=levels, collectives=(), open_ended=False)


def searched(graph: Graph, cluster: Cluster, limit_bytes: float) -> Search:
    """A search that is done."""
    search = Search(
        graph, cluster.num_devices, cluster, PlanLowering, ADAMW, False, limit_bytes, "both", False,
        TimeLimit(None, lambda what: None),
    )  # fmt: skip
    search.run()
    return search


def every_step(graph: Graph, cluster: Cluster, prices: LayerPrices, most_tp: float) -> Iterator[Step]:
    """Every plan that can be made of the layers that ``prices`` knows."""
    space = graph.batch_size, cluster.num_devices, axes_of(graph), most_tp
    for shape in (*shapes(*space), *variations(*space)):
        for run in runs(shape, graph.batch_size):
            for zero in (0, 1, 2, 3) if run.dp > 1 else (0,):
                yield from _of_layout(msgspec.structs.replace(run, zero=zero), cluster, prices)


def _of_layout(layout: Layout, cluster: Cluster, prices: LayerPrices) -> Iterator[Step]:
    try:
        works = {kind: prices.of(msgspec.structs.replace(layout, recompute=kind)) for kind in RECOMPUTE}
        schedule = training_schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
    except MeshwrightError:
        return
    num_layers, num_stages = len(prices.chain.layers), layout.pp * layout.chunks
    kinds = [
        kind for number, kind in enumerate(RECOMPUTE)
        if all(works[kind].works != works[other].works for other in RECOMPUTE[:number])
    ]  # fmt: skip
    for cut in itertools.combinations(range(1, num_layers), num_stages - 1):
        borders = [0, *cut, num_layers]
        stages = prices.chain.priced([range(first, end) for first, end in itertools.pairwise(borders)])
        for chosen in itertools.product(kinds, repeat=num_stages):
            work = assemble(
                [works[kind] for kind in chosen], stages, layout.pp, prices.optimizer,
                accumulates=layout.microbatches > 1,
            )  # fmt: skip
            if layout.pp == 1:
                overlap = cluster.device.kind != "cpu"
                step_s = play(schedule, work, layout.mesh(), cluster, submeshes=[], overlap=overlap).step_s
            else:
                step_s = predict_step(work, schedule, layout.mesh(), cluster).step_s
            peak = max(memory.peak_bytes for memory in peak_memory(work, schedule))
            yield Step(f"{layout_text(layout)} cut at {cut}, recompute {chosen}", step_s, peak)


def best_of(steps: list[Step], limit_bytes: float) -> Step:
    """The fastest that fits."""
    return min((step for step in steps if step.peak_bytes <= limit_bytes), key=lambda step: step.step_s,
               default=Step("nothing fits", inf, inf))  # fmt: skip
