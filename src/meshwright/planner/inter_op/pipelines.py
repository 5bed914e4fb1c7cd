"""Make the stages of a layout from the work of layers: the cut, the recomputation of each stage, the time and the
memory."""

from collections.abc import Mapping, Sequence
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.cost.closed_form import Predicted, pieces_s, predict_steps
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.work import Compute, StepWork
from meshwright.errors import LayoutError, PlanError
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import RECOMPUTE, Layout, Recompute, ZeroStage
from meshwright.ir.pipeline import Pipeline
from meshwright.ir.schedule import ActionKind
from meshwright.planner.buckets import BUCKET_BYTES
from meshwright.planner.inter_op.assemble import Known, assemble, is_sum
from meshwright.planner.inter_op.balance import balanced
from meshwright.planner.inter_op.known_cuts import KnownCuts
from meshwright.planner.inter_op.layer_work import LayerPrices
from meshwright.planner.inter_op.most_after import most_after
from meshwright.planner.inter_op.option import Option, StageKind, stage_layout, with_zeros
from meshwright.planner.inter_op.rounds import fill_of, filled_s, passes, periods, simulated_s, spans
from meshwright.planner.inter_op.stage_prices import AssignedStage, StagePrices, Submesh
from meshwright.planner.inter_op.stages import assign_stages
from meshwright.planner.inter_op.works import LayerWorks, divided_state

LEAST = 0.7
"""If gradients are not accumulated, a micro-batch takes at least this fraction of its time. This is an assumption:
adding up gradients moves three times their bytes, while other kernels move the same number of bytes of weights at least
twice."""
MANY = 10**6
"""A number of micro-batches that is so large that the time to fill a pipeline is negligible."""
ALIKE = 0.02
"""Relative accuracy of predicted step times. If several layouts are slower than the fastest by at most this fraction,
the planner takes the simplest of them."""


class Pipelines:
    """Makes the best stages of a layout, within a memory limit of ``limit_bytes`` per rank. ``kinds`` are the kinds of
    recomputation that stages may have."""

    def __init__(self, prices: LayerPrices, limit_bytes: float, kinds: tuple[Recompute, ...] = RECOMPUTE) -> None:
        self.prices, self.limit_bytes, self.kinds = prices, limit_bytes, kinds
        self.chain, self.cluster = prices.chain, prices.cluster
        self._slowest: dict[object, float] = {}
        self._once: dict[LayerWorks, tuple[float, float]] = {}
        self._least_sums: dict[LayerWorks, float] = {}
        self._parts: dict[tuple[LayerWorks, int, int, bool], LayerWorks] = {}
        self._joined: Known = {}
        self._cuts = KnownCuts()
        self._times: dict[object, tuple[Predicted, float]] = {}

    def bound_s(self, layout: Layout) -> float:
        """A lower bound on the seconds of a step of ``layout``, by closed forms, for any recomputation.

        It is the largest of three times: the mean work of a rank; the slowest stage in the best cut; and a pipeline
        whose stages start only when their first micro-batch arrives (``filled_s``). If the layout is not priced yet,
        its work is estimated from larger micro-batches, as if smaller micro-batches had the same efficiency.

        Raises:
            LayoutError: the model has too few layers, or the layout does not fit the model.
            PlanError: the layout cannot be lowered.
        """
        self._check(layout)
        works, factor = self._bounding(layout)
        total = float(self._least_seconds(layout, works).sum()) * factor
        sums_s, update_s = self.once_s(works)
        if self.prices.codecs is not None:  # sums over another number of ranks allow no conclusion
            sums_s = self._least_sums_s(works) if self.prices.knows(layout) else 0.0
        once_s = update_s / layout.dp + (0.0 if self.overlaps or layout.dp == 1 else sums_s)
        busy_s = (layout.microbatches * total + once_s * LEAST) / layout.pp
        slowest_s = layout.microbatches * self._slowest_s(layout, works) * factor
        return max(busy_s, slowest_s, filled_s(layout, total))

    def _least_seconds(self, layout: Layout, works: LayerWorks) -> NDArray[np.float64]:
        """[i]: a lower bound on the seconds of layer i for one micro-batch. If sums of gradients may have codecs, the
        sums are left out (see ``_least_sums_s``), because a joint bucket of several layers takes less time than
        separate buckets."""
        sums = self.prices.codecs is None
        seconds = self.prices.seconds(works, passes(layout), hidden=not self.overlaps, sums=sums)
        return np.array(seconds)[self.chain.numbers]

    def _least_sums_s(self, works: LayerWorks) -> float:
        """A lower bound on the seconds of the sums of gradients with codecs."""
        if works not in self._least_sums:
            assert self.prices.codecs is not None
            every = [works.works[number] for number in self.chain.numbers]
            self._least_sums[works] = self.prices.codecs.least_s(every, works.mesh)
        return self._least_sums[works]

    def _bounding(self, layout: Layout) -> tuple[LayerWorks, float]:
        """The works from which a bound is computed, and a factor for them."""
        if self.prices.knows(layout):
            return self.prices.of(layout), 1.0
        try:
            works, part = self.prices.larger(layout)
        except (LayoutError, PlanError):  # the model would change with several micro-batches
            return self.prices.of(layout), 1.0
        return works, part if layout.microbatches > 1 or part == 1.0 else part * LEAST

    def once_s(self, works: LayerWorks) -> tuple[float, float]:
        """The seconds of all layers for work that is done once per step: the sums of gradients, and the update of
        parameters."""
        if works not in self._once:
            every = self.chain.priced([range(len(self.chain.layers))])
            (stage,) = assemble(
                [works], every, Pipeline(), self.prices.optimizer, accumulates=True, codecs=self.prices.codecs
            ).stages
            sums = (*stage.pieces[ActionKind.REDUCE_GRAD.value], *filter(is_sum, stage.after))
            update_s = sum(piece.seconds for piece in stage.after if isinstance(piece, Compute))
            self._once[works] = pieces_s(sums, works.mesh, self.prices.network), update_s
        return self._once[works]

    @property
    def overlaps(self) -> bool:
        """Whether collectives overlap with kernels."""
        return self.cluster.device.kind != "cpu"

    def option(self, layout: Layout, kinds: Sequence[Recompute], smaller: Sequence[ZeroStage] = ()) -> Option:
        """The option of ``layout`` with the fastest stages that fit in memory. Each stage has the kind of recomputation
        that is fastest for it, and the ZeRO stage of the layout, or one of the ``smaller`` ZeRO stages if their prices
        are known. If no stages fit, the result has the last kind of recomputation and the layout's ZeRO stage, with the
        stages that would be fastest.

        Raises:
            LayoutError: the model has too few layers, or the layout does not fit the model.
            PlanError: the layout cannot be lowered.
            ScheduleError: the schedule is not defined for the number of micro-batches.
        """
        self._check(layout)
        variants = dict[StageKind, LayerWorks]()
        for zero in smaller:
            known = [msgspec.structs.replace(layout, zero=zero, recompute=kind) for kind in kinds]
            if all(map(self.prices.knows, known)):
                variants |= self._of_kinds(known[0], kinds)
        return self._best(layout, variants | self._of_kinds(layout, kinds))

    @property
    def may_keep(self) -> bool:
        """Whether stages that recompute may keep some blocks."""
        return "none" in self.kinds

    def without_recomputation(self, option: Option) -> Option:
        """The option with the same stages, of which none recomputes, whether it fits in memory or not."""
        stages = self.chain.stages_of(option.firsts)
        layouts = [stage_layout(option.layout, stage, "none") for stage in range(len(stages))]
        chosen = [(StageKind("none", each.zero), self.prices.of(each)) for each in layouts]
        return self._option(msgspec.structs.replace(option.layout, recompute="none"), stages, chosen)

    def _of_kinds(self, layout: Layout, kinds: Sequence[Recompute]) -> dict[StageKind, LayerWorks]:
        works = self.prices.each([msgspec.structs.replace(layout, recompute=kind) for kind in kinds])
        return {StageKind(kind, layout.zero): each for kind, each in zip(kinds, works, strict=True)}

    def ideal(self, layout: Layout) -> Option:
        """The option of ``layout`` under ideal ZeRO, which divides the state of ranks without taking time. No real
        option needs less memory or recomputes less. This needs no prices of layouts with ZeRO.

        Raises: the errors of ``option``.
        """
        self._check(layout)
        plain = msgspec.structs.replace(layout, zero=0, zero_ranks=0)

        def best(kinds: Sequence[Recompute]) -> Option:
            variants = self._of_kinds(plain, kinds).items()
            divided = {StageKind(kind.recompute, layout.zero): self.divided(works, layout) for kind, works in variants}
            return self._best(layout, divided)

        option = best(self.kinds[:1])  # no other kind is faster than the least recomputation
        return option if option.peak_bytes <= self.limit_bytes else best(self.kinds)

    def divided(self, works: LayerWorks, layout: Layout) -> LayerWorks:
        """The works of a layout without ZeRO, in which ranks hold only the parts of the state that ZeRO leaves them."""
        once = layout.microbatches == 1  # each gradient is reduced immediately, and a rank keeps only its part
        key = works, layout.zero, layout.dp, once
        if layout.zero and key not in self._parts:
            self._parts[key] = divided_state(works, layout.dp, layout.zero, once=once)
        return self._parts[key] if layout.zero else works

    def _best(self, layout: Layout, variants: Mapping[StageKind, LayerWorks]) -> Option:
        """The option with the fastest stages. Each stage uses one of the variants."""
        kinds, num_stages = tuple(variants), layout.pp * layout.chunks
        if num_stages == 1:
            stages = [range(len(self.chain.layers))]
            options = [self._option(layout, stages, [(kind, variants[kind])]) for kind in kinds]
            fitting = [option for option in options if option.peak_bytes <= self.limit_bytes]
            return min(fitting, key=lambda option: option.step_s) if fitting else options[-1]
        assigned = self._assigned(layout, list(variants.values()), self.limit_bytes)
        if assigned is None:
            last = kinds[-1]
            fastest = self._assigned(layout, [variants[last]], inf)
            assert fastest is not None, "layers can always be cut where memory does not matter"
            return self._option(layout, _ranges(fastest), [(last, variants[last])] * num_stages)
        chosen = [(kinds[stage.variant], variants[kinds[stage.variant]]) for stage in assigned]
        if layout.chunks > 1:  # the dynamic program minimizes the slowest stage, not the rank with the most work
            ranks = [layout.pipeline.rank_of(stage) for stage in range(num_stages)]
            busy_of = {works: self.busy_s(layout, works) for works in {works for _, works in chosen}}
            busy = [busy_of[works] for _, works in chosen]
            option = self._option(layout, balanced([stage.first for stage in assigned], ranks, busy), chosen)
            if option.peak_bytes <= self.limit_bytes:
                return option
        return self._option(layout, _ranges(assigned), chosen)

    def uneven(self, option: Option, others: Mapping[tuple[int, int], LayerWorks]) -> Option | None:
        """The option in which each stage has its fastest sizes of dp and tp. ``others`` maps sizes of dp and tp to the
        layer works. None if all stages have equal sizes. Also None if the result is not faster than ``option`` by more
        than ``ALIKE``, because moving values between unequal stages takes time too."""
        sizes, layout = list(others), msgspec.structs.replace(option.layout, recompute=self.kinds[0])
        assigned = self._assigned(layout, list(others.values()), self.limit_bytes)
        if assigned is None or len({stage.variant for stage in assigned}) == 1:
            return None
        chosen = [sizes[stage.variant] for stage in assigned]
        own = msgspec.structs.replace(layout, stage_sizes=tuple({"dp": dp, "tp": tp} for dp, tp in chosen))
        kind = StageKind(self.kinds[0])
        better = self._option(own, _ranges(assigned), [(kind, others[each]) for each in chosen])
        return better if better.step_s * (1 + ALIKE) < self._simulated_s(option.layout, option.work) else None

    def _simulated_s(self, layout: Layout, work: StepWork) -> float:
        """Simulated seconds of a step."""
        return simulated_s(layout, work, self.cluster)

    def predicted(self, layout: Layout, work: StepWork, cluster: Cluster) -> Predicted:
        """The closed form of a step on ``cluster``."""
        few, more, steps = periods(layout)
        schedules = [few, more] if steps else [few]
        first, *others = predict_steps(work, schedules, layout.mesh(), cluster, overlap=self.overlaps)
        if not steps:
            return first
        (second,) = others
        fields = Predicted.__struct_fields__
        return Predicted(**{
            name: getattr(first, name) + steps * (getattr(second, name) - getattr(first, name)) for name in fields
        })  # fmt: skip

    def assembled(
        self, layout: Layout, stages: Sequence[Sequence[int]], works: Sequence[LayerWorks],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> StepWork:  # fmt: skip
        """The work of a step whose stages have these layers. ``works`` has the layer works of each stage. Buckets have
        at most ``bucket_bytes``."""
        return assemble(
            works, self.chain.priced(stages), layout.pipeline, self.prices.optimizer,
            accumulates=layout.microbatches > 1, known=self._joined, codecs=self.prices.codecs,
            bucket_bytes=bucket_bytes,
        )  # fmt: skip

    def _check(self, layout: Layout) -> None:
        num_stages, most = layout.pp * layout.chunks, len(self.chain.layers)
        if num_stages > most:
            raise LayoutError(
                f"{num_stages} stages are asked for, but the search cuts the model into {most} layers",
                where="layout: pp",
                remedy=f"use pp x chunks of at most {most}",
            )

    def _slowest_s(self, layout: Layout, works: LayerWorks) -> float:
        """The smallest possible time of the slowest stage for one micro-batch, in seconds, if memory is unlimited and
        messages take no time."""
        if layout.pp == 1:
            return 0.0
        key = (works, layout.pp, layout.chunks, passes(layout))
        if key not in self._slowest:
            seconds = spans(self._least_seconds(layout, works))[:, :, None, None]
            prices = StagePrices((Submesh.of(0, 1),), seconds, np.full(seconds.shape, MANY, dtype=np.int64))
            assignment = assign_stages(prices, (layout.pp * layout.chunks,), MANY)
            self._slowest[key] = max(stage.seconds for stage in assignment.stages) if assignment else 0.0
        return self._slowest[key]

    def _assigned(
        self, layout: Layout, variants: Sequence[LayerWorks], limit_bytes: float
    ) -> tuple[AssignedStage, ...] | None:
        """The stages of the shortest pipeline within the limit. ``variants`` are the possible works of a stage, which
        differ in recomputation."""
        return self._cuts.cut(layout, variants, limit_bytes, lambda: self._cut(layout, variants, limit_bytes))

    def _cut(
        self, layout: Layout, variants: Sequence[LayerWorks], limit_bytes: float
    ) -> tuple[AssignedStage, ...] | None:  # fmt: skip
        num_stages, count = layout.pp * layout.chunks, len(self.chain.layers)
        shape = (count, count, 1, len(variants))
        seconds, most_after = np.full(shape, inf), np.full(shape, -1, dtype=np.int64)
        once = np.zeros(shape)
        for number, works in enumerate(variants):
            seconds[:, :, 0, number] = self._stage_seconds(layout, works)
            once[:, :, 0, number] = self.stage_once_s(works)
            most_after[:, :, 0, number] = self.most_after(layout, works, limit_bytes)
        prices = StagePrices((Submesh.of(0, 1),), seconds, most_after, once)
        fill = min(fill_of(layout), layout.microbatches)
        assignment = assign_stages(prices, (num_stages,), layout.microbatches, fill=fill)
        return assignment.stages if assignment is not None else None

    def busy_s(self, layout: Layout, works: LayerWorks) -> NDArray[np.float64]:
        """[i, j]: the busy time per step, in seconds, of a stage with layers i to j."""
        return layout.microbatches * self._stage_seconds(layout, works) + self.stage_once_s(works)

    def _stage_seconds(self, layout: Layout, works: LayerWorks) -> NDArray[np.float64]:
        """[i, j]: the seconds of layers i to j for one micro-batch, including messages to neighbouring stages."""
        stages = [works.works[number] for number in self.chain.numbers]
        sent = [stage.sent_up_bytes for stage in stages], [stage.sent_down_bytes for stage in stages]
        return self.stage_seconds(works, passes(layout), *sent, layout.num_ranks // layout.pp)

    def stage_seconds(
        self, works: LayerWorks, kinds: Sequence[str], up_bytes: Sequence[float], down_bytes: Sequence[float],
        num_ranks: int,
    ) -> NDArray[np.float64]:  # fmt: skip
        """[i, j]: the seconds of layers i to j in actions of ``kinds``, including messages. ``up_bytes`` has, for each
        layer, the bytes that a rank sends to the next stage if the stage ends with this layer. ``down_bytes`` has the
        bytes for the previous stage if the stage begins with this layer. A stage has ``num_ranks`` ranks."""
        network = self.prices.network  # without bytes, there is no message
        known = {size: network.send_s(size, num_ranks) if size else 0.0 for size in {*up_bytes, *down_bytes}}
        up, down = (np.array([known[size] for size in sizes]) for sizes in (up_bytes, down_bytes))
        up[-1] = down[0] = 0.0
        each = np.array(self.prices.seconds(works, kinds))[self.chain.numbers]
        seconds: NDArray[np.float64] = spans(each) + up[None, :] + down[:, None]
        return seconds

    def stage_once_s(self, works: LayerWorks) -> NDArray[np.float64]:
        """[i, j]: the seconds per step of layers i to j for summing gradients and updating parameters. Where
        collectives overlap with kernels, only the update counts."""
        each = []
        for stage in works.works:
            updates = [piece for piece in stage.after if isinstance(piece, Compute)]
            sums = (*stage.pieces.get(ActionKind.REDUCE_GRAD.value, ()), *filter(is_sum, stage.after))
            pieces = updates if self.overlaps else (*updates, *sums)
            each.append(pieces_s(pieces, works.mesh, self.prices.network))
        return spans(np.array(each)[self.chain.numbers])

    def most_after(self, layout: Layout, works: LayerWorks, limit_bytes: float) -> NDArray[np.int64]:
        """[i, j]: the largest number of stages that may follow a stage of layers i to j within the memory limit; -1:
        the stage itself does not fit."""
        return most_after(self.chain.numbers, layout, works, limit_bytes)

    def _option(
        self, layout: Layout, stages: Sequence[Sequence[int]], chosen: Sequence[tuple[StageKind, LayerWorks]]
    ) -> Option:
        kinds = tuple(kind.recompute for kind, _ in chosen)
        strongest = max(kinds, key=RECOMPUTE.index)
        work = self.assembled(layout, stages, [works for _, works in chosen])
        named = with_zeros(msgspec.structs.replace(layout, recompute=strongest), [kind.zero for kind, _ in chosen])
        # Variants with equal work differ only in memory (see ``ideal``).
        same = msgspec.structs.replace(layout, zero=0, stage_zero=(), recompute="none", offload="none")
        key = msgspec.json.encode(same), tuple(map(tuple, stages)), tuple(id(works.works) for _, works in chosen)
        if key not in self._times:
            self._times[key] = self._timed(layout, work)
        predicted, step_s = self._times[key]
        return Option(
            layout=named,
            firsts=self.chain.firsts_of(stages),
            recompute=kinds,
            work=work,
            predicted=predicted,
            step_s=step_s,
            memory=max(peak_memory(work, periods(layout)[0]), key=lambda memory: memory.peak_bytes),
        )

    def _timed(self, layout: Layout, work: StepWork) -> tuple[Predicted, float]:
        """The closed form of a step, and the estimate that compares options."""
        predicted = self.predicted(layout, work, self.cluster)
        # A single stage has few actions. Ranks of unequal stages wait for each other in ways that the closed form
        # ignores.
        simulates = layout.pp == 1 or bool(layout.stage_sizes)
        return predicted, self._simulated_s(layout, work) if simulates else predicted.step_s


def _ranges(stages: Sequence[AssignedStage]) -> list[range]:
    return [range(stage.first, stage.last + 1) for stage in stages]
