"""Make the stages of a layout from the work of layers: the cut, the recomputation of each stage, time and memory."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost.closed_form import Predicted, predict_step
from meshwright.cost.occupancy import RankMemory, peak_memory
from meshwright.cost.work import StepWork
from meshwright.errors import LayoutError
from meshwright.ir.layout import Layout, layout_text
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.planner.inter_op.layer_work import LayerPrices, LayerWorks, assemble
from meshwright.planner.inter_op.stages import AssignedStage, StagePrices, Submesh, assign_stages
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from meshwright.simulate.engine import play

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""Kinds of recomputation, in the order of falling memory and rising time."""


LEAST = 0.7
"""Smallest fraction of its time that a micro-batch takes if gradients are not accumulated."""
MANY = 10**6
"""A number of micro-batches with which filling a pipeline takes no time."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with its stages, its costs, and the memory of the rank that needs the most memory.

    ``firsts`` are the first operators of all stages except the first stage. ``recompute`` has the kind of recomputation
    of each stage. ``step_s`` is the estimate by which options are compared.
    """

    layout: Layout
    firsts: tuple[str, ...]
    recompute: tuple[Recompute, ...]
    work: StepWork
    predicted: Predicted
    step_s: float
    memory: RankMemory
    memory_bytes: float | None = None
    """The memory limit that the integer program had to respect while it chose the strategies; None: it had none."""

    @property
    def name(self) -> str:
        """The layout as text."""
        return layout_text(self.layout)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the rank that needs the most memory."""
        return self.memory.peak_bytes


def fill_of(layout: Layout) -> float:
    """The time to fill and drain a pipeline, as a fraction of that of ``1f1b``: (p - 1) x the time of a micro-batch."""
    return {"interleaved": 1 / layout.chunks, "zb-h1": 1 / 3}.get(layout.schedule, 1.0)


@lru_cache(maxsize=512)
def schedule_for(name: str, num_ranks: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule of a training step with its communication."""
    return add_reduction(add_communication(build(name if num_ranks > 1 else "none", num_ranks, microbatches, chunks)))


class Pipelines:
    """Makes the best stages of a layout, within a memory limit of ``limit_bytes`` per rank."""

    def __init__(self, prices: LayerPrices, limit_bytes: float) -> None:
        self.prices, self.limit_bytes = prices, limit_bytes
        self.chain, self.cluster = prices.chain, prices.cluster
        self._slowest: dict[object, float] = {}

    def bound_s(self, layout: Layout) -> float:
        """A lower bound on the seconds of a step of ``layout``, whatever its recomputation and ZeRO stage.

        It follows from the work of layers: the time of the pipeline with the best cut, or the mean work of a rank. For
        stages with one micro-batch, which are rarely worth while, it follows from ``LEAST`` x the work with several
        micro-batches of equal size.

        Raises:
            LayoutError: the model has too few layers, or the layout does not fit the model.
            PlanError: the layout cannot be lowered.
        """
        self._check(layout)
        priced, factor = layout, 1.0
        if layout.microbatches == 1 and layout.pp > 1 and layout.dp % 2 == 0:
            priced, factor = msgspec.structs.replace(layout, dp=layout.dp // 2, microbatches=2), LEAST
        works = self.prices.of(priced)
        hides = layout.pp == 1 and self.cluster.device.kind != "cpu"
        each = np.array(self.prices.seconds(works, self._passes(layout), hidden=not hides))[self._numbers] * factor
        sums_s, update_s = self.prices.once_s(works)
        once_s = update_s / layout.dp + (0.0 if hides and layout.microbatches == 1 else sums_s * factor)
        steady = max(each.sum() / layout.pp, self._slowest_s(layout, works) * factor)
        fill = min(fill_of(layout), layout.microbatches)
        pipeline_s = (layout.microbatches - fill) * steady + fill * each.sum()
        return float(max(pipeline_s, (layout.microbatches * each.sum() + once_s) / layout.pp))

    def lighter_bound_s(self, option: Option) -> float:
        """A lower bound on the seconds of the variants of an option with recomputation and ZeRO. ZeRO divides the
        update, and instead of summing all gradients on every rank, each rank sums a part."""
        layout = msgspec.structs.replace(option.layout, recompute="none")
        sums_s, update_s = self.prices.once_s(self.prices.of(layout))
        return option.step_s - (update_s * (1 - 1 / layout.dp) + sums_s / 2) / layout.pp

    def option(self, layout: Layout, kinds: Sequence[Recompute]) -> Option:
        """The option of ``layout`` with the fastest stages that fit in memory; every stage has the kind of
        recomputation that is fastest for it. If no stages fit, those of the last kind that would be fastest.

        Raises:
            LayoutError: the model has too few layers, or the layout does not fit the model.
            PlanError: the layout cannot be lowered.
            ScheduleError: the schedule is not defined for the number of micro-batches.
        """
        self._check(layout)
        variants = {kind: self.prices.of(msgspec.structs.replace(layout, recompute=kind)) for kind in kinds}
        num_stages = layout.pp * layout.chunks
        if num_stages == 1:
            stages = [range(len(self.chain.layers))]
            options = [self._made(layout, stages, [(kind, variants[kind])]) for kind in kinds]
            fitting = [option for option in options if option.peak_bytes <= self.limit_bytes]
            return min(fitting, key=lambda option: option.step_s) if fitting else options[-1]
        assigned = self._assigned(layout, list(variants.values()), self.limit_bytes)
        if assigned is None:
            last = kinds[-1]
            fastest = self._assigned(layout, [variants[last]], inf)
            assert fastest is not None, "layers can always be cut where memory does not matter"
            return self._made(layout, _ranges(fastest), [(last, variants[last])] * num_stages)
        chosen = [kinds[stage.variant] for stage in assigned]
        return self._made(layout, _ranges(assigned), [(kind, variants[kind]) for kind in chosen])

    def mixed(self, layout: Layout, others: Mapping[tuple[int, int], LayerWorks]) -> Option | None:
        """The option in which each stage has the sizes of dp and tp that are fastest for it. ``others`` maps sizes of
        dp and tp to the layer works; None if the stages of ``layout`` are no slower."""
        sizes = list(others)
        assigned = self._assigned(layout, list(others.values()), self.limit_bytes)
        if assigned is None or len({stage.variant for stage in assigned}) == 1:
            return None
        chosen = [sizes[stage.variant] for stage in assigned]
        own = msgspec.structs.replace(layout, stage_sizes=tuple({"dp": dp, "tp": tp} for dp, tp in chosen))
        return self._made(own, _ranges(assigned), [("none", others[each]) for each in chosen])

    def _check(self, layout: Layout) -> None:
        num_stages, most = layout.pp * layout.chunks, len(self.chain.layers)
        if num_stages > most:
            raise LayoutError(
                f"{num_stages} stages are asked for, but the model has {most} layers",
                where="layout: pp",
                remedy=f"use pp x chunks of at most {most}",
            )

    def _slowest_s(self, layout: Layout, works: LayerWorks) -> float:
        """The least seconds of the slowest stage for one micro-batch, if memory does not matter."""
        if layout.pp == 1:
            return 0.0
        key = (id(works), layout.pp, layout.chunks, self._passes(layout))
        if key not in self._slowest:
            steady = msgspec.structs.replace(layout, microbatches=MANY)
            stages = self._assigned(steady, [works], inf)
            self._slowest[key] = max(stage.seconds for stage in stages) if stages else 0.0
        return self._slowest[key]

    @property
    def _numbers(self) -> list[int]:
        return [layer.priced for layer in self.chain.layers]

    def _passes(self, layout: Layout) -> tuple[str, ...]:
        split = layout.schedule == "zb-h1"
        return (ActionKind.F.value, *((ActionKind.I.value, ActionKind.W.value) if split else (ActionKind.B.value,)))

    def _assigned(
        self, layout: Layout, variants: Sequence[LayerWorks], limit_bytes: float
    ) -> tuple[AssignedStage, ...] | None:
        """The stages of the shortest pipeline within the limit; ``variants`` are the ways in which a stage may run."""
        num_stages, count = layout.pp * layout.chunks, len(self.chain.layers)
        shape = (count, count, 1, len(variants))
        seconds, most_after = np.full(shape, inf), np.full(shape, -1, dtype=np.int64)
        for number, works in enumerate(variants):
            seconds[:, :, 0, number] = self._stage_seconds(layout, works)
            most_after[:, :, 0, number] = self._most_after(layout, works, limit_bytes)
        prices = StagePrices((Submesh(0, 1),), seconds, most_after)
        fill = min(fill_of(layout), layout.microbatches)
        found = assign_stages(prices, (num_stages,), layout.microbatches, fill=fill)
        return found.stages if found is not None else None

    def _stage_seconds(self, layout: Layout, works: LayerWorks) -> NDArray[np.float64]:
        """[i, j]: the seconds of layers i to j for one micro-batch, with the messages to their neighbours."""
        numbers, network = self._numbers, self.prices.network
        each = np.array(self.prices.seconds(works, self._passes(layout)))[numbers]
        before = np.concatenate([[0.0], np.cumsum(each)])
        ranks = layout.num_ranks // layout.pp
        up = [network.send_s(works.works[number].sent_up_bytes, ranks) for number in numbers]
        down = [network.send_s(works.works[number].sent_down_bytes, ranks) for number in numbers]
        up[-1] = down[0] = 0.0
        seconds = before[None, 1:] - before[:-1, None] + np.array(up)[None, :] + np.array(down)[:, None]
        triangle: NDArray[np.float64] = np.where(np.tri(len(numbers), k=-1, dtype=bool), inf, seconds)
        return triangle

    def _most_after(self, layout: Layout, works: LayerWorks, limit_bytes: float) -> NDArray[np.int64]:
        """[i, j]: the largest number of stages that may follow a stage of layers i to j within the limit; -1: the stage
        does not fit."""
        numbers, num_stages = self._numbers, layout.pp * layout.chunks
        count = len(numbers)
        if limit_bytes == inf or layout.chunks > 1:  # ``peak_memory`` checks the memory of several chunks
            return np.full((count, count), num_stages, dtype=np.int64)
        heap = works.heap_factor
        once = [each.prologue_bytes + each.inputs_bytes for each in works.held]
        held = np.array([works.held[number].total_bytes - once[number] for number in numbers], dtype=float)
        saved = np.array([works.works[number].saved_bytes for number in numbers], dtype=float) * heap
        workspace = np.array([works.works[number].workspace_bytes for number in numbers], dtype=float) * heap
        most = np.zeros((count, count), dtype=np.int64)
        for first in range(count):
            room = limit_bytes - max(once) - np.cumsum(held[first:]) - np.maximum.accumulate(workspace[first:])
            alive = np.floor(room / np.maximum(np.cumsum(saved[first:]), 1.0))
            if layout.schedule == "zb-h1":  # all ranks keep as many micro-batches as there are stages
                after = np.where(alive >= min(num_stages, layout.microbatches), num_stages, -1)
            else:
                after = np.where(alive >= layout.microbatches, num_stages, alive - 1)
            most[first, first:] = np.where(room < 0, -1, after)
        return most

    def _made(
        self, layout: Layout, stages: Sequence[Sequence[int]], chosen: Sequence[tuple[Recompute, LayerWorks]]
    ) -> Option:
        kinds = tuple(kind for kind, _ in chosen)
        strongest = max(kinds, key=RECOMPUTE.index)
        work = assemble(
            [works for _, works in chosen], self.chain.priced(stages), layout.pp, self.prices.optimizer,
            accumulates=layout.microbatches > 1,
        )  # fmt: skip
        named = msgspec.structs.replace(layout, recompute=strongest)
        schedule = schedule_for(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
        predicted = predict_step(work, schedule, layout.mesh(), self.cluster)
        step_s = predicted.step_s
        if layout.pp == 1 or layout.stage_sizes:  # few actions
            submeshes = [Mesh.of(**own) for own in layout.stage_sizes]
            overlap = self.cluster.device.kind != "cpu"
            step_s = play(
                schedule, work, layout.mesh(), self.cluster, submeshes=submeshes, overlap=overlap
            ).step_s  # fmt: skip
        return Option(
            layout=named,
            firsts=self.chain.firsts_of(stages),
            recompute=kinds,
            work=work,
            predicted=predicted,
            step_s=step_s,
            memory=max(peak_memory(work, schedule), key=lambda memory: memory.peak_bytes),
        )


def _ranges(stages: Sequence[AssignedStage]) -> list[range]:
    return [range(stage.first, stage.last + 1) for stage in stages]
