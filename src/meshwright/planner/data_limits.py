"""Find what limits the data parallelism of a captured model on some ranks: the batch, the memory of one sample, or
time."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from meshwright.cost.occupancy import room_of
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE, ZERO_STAGES, Layout
from meshwright.ir.part import part_of
from meshwright.ir.plan import Plan
from meshwright.ir.program import Lower
from meshwright.planner.candidates import divisors
from meshwright.planner.inter_op.chain import chain_of
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.option import REFUSALS, Option
from meshwright.planner.inter_op.pipelines import ALIKE, Pipelines

LimitKind = Literal["batch", "memory", "communication", "computing", "none"]


class DataLimit(msgspec.Struct, frozen=True):
    """A limit of data parallelism, and its reason. ``batch``: the batch does not divide over the ranks. ``memory``: the
    model and one sample at a time need more memory than a rank has. ``communication``: sums of gradients and ZeRO's
    gathers make a step slower than that of another layout. ``computing``: with few samples per rank, or with
    recomputation, kernels take longer than in another layout. ``none``: dp alone is as fast as the plan."""

    kind: LimitKind
    text: str


def data_limits(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    lowering: Callable[[Graph], Lower],
    *,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
) -> tuple[DataLimit, ...]:
    """The reasons why the ranks of ``plan``, which a search found, are not all data-parallel. Empty if they are all
    data-parallel. The reasons follow from the search's prices of layers, for layouts with dp only and with as much ZeRO
    and recomputation as memory requires. The statistical limit (the batch size beyond which a sample improves the model
    less) does not follow from a graph, and is not considered."""
    ranks, batch = plan.mesh.world_size, graph.batch_size
    if plan.layout.dp == ranks and not plan.layout.stage_sizes:
        return ()
    most = max(size for size in divisors(ranks) if batch % size == 0)
    part = part_of(cluster, range(most))
    limit = memory_bytes or room_of(cluster, range(ranks))
    chain = chain_of(graph, part, most)
    prices = LayerPrices(
        chain,
        part,
        lowering(chain.graph),
        optimizer,
        clips,
        most,
        codec=plan.layout.codec,
        float8=plan.layout.float8,
    )
    alone = _DataParallel(Pipelines(prices, limit), most, batch)
    limits = []
    if most < ranks:
        samples = "1 sample does" if batch == 1 else f"{batch} samples do"
        limits.append(DataLimit("batch", f"dp ends at {most}: {samples} not divide over {ranks} ranks"))
    least = alone.smallest()
    if least is not None and least.peak_bytes > limit:
        needed, held = (f"{size / 2**30:.3g}" for size in (least.peak_bytes, limit))
        with_zero = " with ZeRO and recomputation" if most > 1 else " with recomputation"
        text = f"one sample at a time needs about {needed} of {held} GiB{with_zero}"
        return (*limits, DataLimit("memory", text))
    fastest = alone.fastest() if most == ranks else None
    if fastest is None or plan.prediction is None:
        return tuple(limits)
    step_s = plan.prediction.step_s
    longer, shared = fastest.step_s - step_s, fastest.predicted.communication_s
    kind: LimitKind = "communication" if shared >= longer else "computing"
    if longer <= ALIKE * step_s:
        kind = "none"
    text = f"{fastest.name} takes {fastest.step_s * 1e3:.4g} ms a step, {shared * 1e3:.3g} of them to communicate"
    return (*limits, DataLimit(kind, text))


@dataclass
class _DataParallel:
    """The layouts with ``dp`` alone, for a global batch of ``batch`` samples."""

    pipelines: Pipelines
    dp: int
    batch: int

    def smallest(self) -> Option | None:
        """The option that needs the least memory: micro-batches of one sample where the model allows it, with full
        recomputation and ZeRO. None if the model allows no such layout."""
        for microbatches in dict.fromkeys((self.batch // self.dp, 1)):
            with suppress(*REFUSALS):
                layout = Layout(dp=self.dp, microbatches=microbatches, zero=3 if self.dp > 1 else 0)
                return self.pipelines.option(layout, RECOMPUTE[-1:])
        return None

    def fastest(self) -> Option | None:
        """The fastest option that fits in memory; None if none fits."""
        return min(self._fitting(), key=lambda option: option.step_s, default=None)

    def _fitting(self) -> Iterator[Option]:
        """For each ZeRO stage, yield the option with the fewest micro-batches that fits. Options that would not fit
        even with ideal ZeRO are skipped."""
        for zero in ZERO_STAGES if self.dp > 1 else ZERO_STAGES[:1]:
            for microbatches in divisors(self.batch // self.dp):
                with suppress(*REFUSALS):
                    layout = Layout(dp=self.dp, microbatches=microbatches, zero=zero)
                    if not self._fits(self.pipelines.ideal(layout)):
                        continue
                    option = self.pipelines.option(layout, RECOMPUTE)
                    if self._fits(option):
                        yield option
                        break

    def _fits(self, option: Option) -> bool:
        return option.peak_bytes <= self.pipelines.limit_bytes
