"""The planner beside brute force, on random small models, clusters and stage prices.

Run as part of ``make bench-planning``. The search estimates layouts from priced layers, cuts by dynamic programming,
and leaves out what bounds exclude. Here nothing is left out: layouts x cuts into stages x recomputation of each stage x
ZeRO stages, under the same prices. ``tests/end_to_end/test_exhaustive.py`` asserts the same of a few.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
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
from meshwright.ir.layout import RECOMPUTE, ZERO_STAGES, Layout
from meshwright.ir.layout_text import layout_text
from meshwright.lower.plans import PlanLowering
from meshwright.models import classification_loss
from meshwright.planner.candidates import axes_of, runs, shapes, variations
from meshwright.planner.inter_op.assemble import assemble
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.planner.inter_op.stage_prices import StagePrices, Submesh
from meshwright.planner.inter_op.stages import assign_stages
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit
from meshwright.schedules.pipeline import training_schedule
from meshwright.simulate.engine import play
from tests.pure.test_stages_search import ANY, brute_force

COMMAND = "python -m benchmarks.exhaustive"
CASES = 200
MUCH = 1e15
"""Bytes of memory that are always enough."""


@dataclass(frozen=True)
class Step:
    """One plan: where it is cut, what each stage recomputes, its estimated seconds, the bytes of the fullest rank."""

    layout: Layout
    cut: tuple[int, ...]
    recompute: tuple[str, ...]
    step_s: float
    peak_bytes: float

    @property
    def name(self) -> str:
        """The plan as text."""
        return f"{layout_text(self.layout)}, cut at {self.cut}, recompute {' '.join(self.recompute)}"


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
            for zero in ZERO_STAGES if run.dp > 1 else (0,):
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
                [works[kind] for kind in chosen], stages, layout.pipeline, prices.optimizer,
                accumulates=layout.microbatches > 1,
            )  # fmt: skip
            overlap = cluster.device.kind != "cpu"
            if layout.pp == 1:
                step_s = play(schedule, work, layout.mesh(), cluster, overlap=overlap).step_s
            else:
                step_s = predict_step(work, schedule, layout.mesh(), cluster, overlap=overlap).step_s
            peak = max(memory.peak_bytes for memory in peak_memory(work, schedule))
            yield Step(layout, cut, chosen, step_s, peak)


@dataclass(frozen=True)
class Gap:
    """How much longer the fastest layout of a search takes than the best of all plans. ``plans`` is their number."""

    over: float
    plans: int
    ours: str
    best: str


def gap(seed: int, most_layers: int = 5) -> list[Gap]:
    """The gaps of a random model on a random cluster, with much memory and with little; empty if the model has more
    than ``most_layers`` layers."""
    random = np.random.default_rng(seed)
    graph, cluster = random_graph(random), random_cluster(random)
    search = searched(graph, cluster, MUCH)
    if len(search.prices.chain.layers) > most_layers:
        return []
    steps = list(every_step(graph, cluster, search.prices, search.most_tp))
    peaks = sorted({step.peak_bytes for step in steps})
    limit = peaks[int(random.uniform(0, 1) * (len(peaks) - 1))]
    gaps = []
    for limit_bytes in (MUCH, limit):
        search = searched(graph, cluster, limit_bytes) if limit_bytes < MUCH else search
        ours = min(search.found, key=lambda option: option.step_s, default=None)
        best = min((step for step in steps if step.peak_bytes <= limit_bytes), key=lambda step: step.step_s)
        over = (ours.step_s if ours else inf) / best.step_s - 1
        gaps.append(Gap(over, len(steps), ours.name if ours else "nothing", best.name))
    return gaps


def stage_prices(random: np.random.Generator) -> tuple[StagePrices, tuple[int, ...], int]:
    """Random prices of stages, the pools of devices, and the number of micro-batches. Half of the cases have two pools
    of unlike devices."""
    pools = tuple(int(size) for size in random.integers(1, 5, random.integers(1, 3)))
    submeshes = [
        Submesh((0,) * pool + (devices,)) for pool, size in enumerate(pools) for devices in (1, 2, 4) if devices <= size
    ]
    submeshes += [Submesh((1, 1))] if len(pools) > 1 else []
    layers = int(random.integers(1, 6))
    work, seconds = 0.1 + random.random(layers), np.full((layers, layers, len(submeshes), 1), inf)
    speeds = random.uniform(0.2, 1.0, len(submeshes))
    for first, last in itertools.combinations_with_replacement(range(layers), 2):
        for number, submesh in enumerate(submeshes):
            seconds[first, last, number] = work[first : last + 1].sum() / submesh.devices ** speeds[number]
    after = np.where(random.random(seconds.shape) < 0.2, random.integers(-1, layers, seconds.shape), ANY)
    prices = StagePrices(tuple(submeshes), seconds, after, 0.3 * random.random(seconds.shape))
    return prices, pools, int(random.choice([1, 4, 16, 64]))


def stages_agree(count: int) -> tuple[int, float]:
    """How many of ``count`` random cases of the dynamic program agree with brute force, pruned and unpruned; and the
    part of the work that pruning leaves in cases with stages."""
    right, pruned, whole = 0, 0, 0
    for seed in range(count):
        prices, pools, microbatches = stage_prices(np.random.default_rng(seed))
        expected = brute_force(prices, pools, microbatches, 1.0)
        found = [assign_stages(prices, pools, microbatches, prunes=prunes) for prunes in (True, False)]
        steps = [inf if one is None else one.step_s for one in found]
        right += all(step == expected or abs(step - expected) <= 1e-9 * expected for step in steps)
        pruned, whole = (total + (one.entries if one else 0) for total, one in zip((pruned, whole), found, strict=True))
    return right, pruned / whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many cases agree. The exit code is 1 if stages differ from brute force."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES, help=f"cases of each kind (default {CASES})")
    count: int = parser.parse_args(arguments).cases
    right, part = stages_agree(count)
    print(f"stages: {right} of {count} as brute force, pruned and unpruned; pruning leaves {part:.0%} of the work")
    gaps: list[Gap] = []
    seed = 0
    while len(gaps) < 2 * count:  # each with much memory and with little
        gaps += gap(seed)
        seed += 1
    finite = [gap.over for gap in gaps if gap.over < inf]
    near = sum(over <= ALIKE for over in finite)
    print(
        f"searches: {near} of {len(gaps)} within {ALIKE:.0%} of the best of all plans; at most {max(finite):.1%}; "
        f"none fits by the search, although one does: {len(gaps) - len(finite)}"
    )
    return int(right < count)


if __name__ == "__main__":
    sys.exit(main())
