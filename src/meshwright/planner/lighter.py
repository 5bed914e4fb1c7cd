"""Find variants of a layout that does not fit in memory: with ZeRO, recomputation, other strategies, or offload. If a
layout fits but its update is long, find its variant with ZeRO."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from meshwright.cost.closed_form import pieces_s
from meshwright.cost.collective import Network
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.work import Compute, StageWork
from meshwright.errors import LayoutError, PlanError
from meshwright.ir.layout import RECOMPUTE, ZERO_STAGES, Layout, Recompute, ZeroStage
from meshwright.ir.schedule import ActionKind
from meshwright.planner.finalists import WholeModel
from meshwright.planner.inter_op.assemble import is_sum
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.piece_codecs import is_reduction
from meshwright.planner.inter_op.pipelines import ALIKE, Pipelines
from meshwright.planner.inter_op.rounds import periods
from meshwright.planner.reasons import complexity


@dataclass(frozen=True)
class Sketch:
    """A variant of a layout (``plain``) with ZeRO stage ``zero``, before it is priced. Variants are needed if the
    layout does not fit, or its update is long.

    ``ideal`` is its option under ideal ZeRO, which takes no time (``Pipelines.ideal``); None: not computed yet.
    ``bound_s`` is a lower bound on its seconds.
    """

    plain: Option
    zero: int
    bound_s: float
    ideal: Option | None = None

    @property
    def layout(self) -> Layout:
        """The layout with the ZeRO stage."""
        return msgspec.structs.replace(self.plain.layout, zero=self.zero)

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """The kinds of recomputation with which the layout can fit, if ``ideal`` is known."""
        return tuple(dict.fromkeys(self.ideal.recompute)) if self.ideal is not None else ()


@dataclass
class Lighter:
    """Finds the fastest variant of a layout that fits within the limit of ``pipelines``.

    ``whole``: all layers of the model are priced separately. ``offloads``: optimizer state may be kept on the host if
    nothing else fits. ``zeros`` are the allowed ZeRO stages.
    """

    pipelines: Pipelines
    model: WholeModel
    whole: bool
    offloads: bool
    zeros: tuple[ZeroStage, ...]

    def best(self, options: list[Option]) -> Option:
        """The fastest option that fits. If none fits, the option that needs the least memory."""
        fitting = list(filter(self.fits, options))
        if not fitting:
            return min(options, key=lambda option: option.peak_bytes)
        fitting = [msgspec.structs.replace(option, gain=self.gain(option)) for option in fitting]
        return min(fitting, key=lambda option: (option.likely_s, complexity(option.layout)))

    def gain(self, option: Option) -> float:
        """The fraction of its time that an option is likely to save if it keeps the activations of as many blocks as
        fit (``kept_blocks``): with each block, memory and time change by equal amounts. The rank with the least room
        decides for all ranks."""
        if not self.pipelines.may_keep or set(option.recompute) == {"none"}:
            return 0.0
        plain = self.pipelines.without_recomputation(option)
        schedule, parts = periods(option.layout)[0], [1.0]
        for least, most in zip(*(peak_memory(each.work, schedule) for each in (option, plain)), strict=True):
            if most.peak_bytes > self.pipelines.limit_bytes:
                room = self.pipelines.limit_bytes - least.peak_bytes
                parts.append(max(0.0, room / (most.peak_bytes - least.peak_bytes)))
        return min(parts) * max(0.0, 1 - plain.step_s / option.step_s)

    def is_free(self, option: Option) -> bool:
        """Whether no other variant of the same layout can be faster: it fits without recomputation, and ZeRO moves no
        more bytes than sums of gradients do (stages 1 and 2)."""
        return self.fits(option) and option.layout.zero < 3 and set(option.recompute) == {self.pipelines.kinds[0]}

    def first_sketches(self, plain: Option) -> list[Sketch]:
        """The first variants of a layout that does not fit: without ZeRO, and with the first ZeRO stage. All others
        follow from them (``next_sketch``)."""
        more = [zero for zero in self._stages(plain.layout) if zero]
        return [Sketch(plain, zero, self._bound_s(plain, zero)) for zero in (0, *more[:1])]

    def faster_by_zero(self, plain: Option) -> list[Sketch]:
        """For a layout that fits: the variant with the first ZeRO stage, if it may save more than ``ALIKE`` of a step;
        otherwise an empty list. This stage moves as many bytes as the sums of gradients do."""
        saved = self._saved_s(plain)
        worthwhile = saved > ALIKE * plain.step_s and self.pipelines.prices.optimizer.divides
        stages = [zero for zero in self._stages(plain.layout) if zero] if worthwhile else []
        return [Sketch(plain, zero, plain.step_s - saved, ideal=plain) for zero in stages[:1]]

    def last_zero(self, layout: Layout) -> int:
        """The ZeRO stage that needs the least memory."""
        return max(self._stages(layout))

    def _stages(self, layout: Layout) -> tuple[int, ...]:
        return self.zeros if layout.dp > 1 else (0,)

    def next_sketch(self, sketch: Sketch) -> Sketch | None:
        """The variant with the next ZeRO stage. It needs less memory, but ZeRO takes more time. There is no next stage
        for the variant without ZeRO, or for the first stage of a layout that fits."""
        if self.fits(sketch.plain):
            return None
        zero = next((zero for zero in self._stages(sketch.layout) if zero > sketch.zero > 0), None)
        return Sketch(sketch.plain, zero, self._bound_s(sketch.plain, zero)) if zero is not None else None

    def idealized(self, sketch: Sketch) -> Sketch:
        """The sketch with its ideal option and the resulting bound."""
        ideal = self.pipelines.ideal(sketch.layout)
        bound_s = self._bound_s(ideal, sketch.zero) if self.fits(ideal) else sketch.bound_s
        return replace(sketch, ideal=ideal, bound_s=bound_s)

    def holds_too_much(self, sketch: Sketch) -> bool:
        """Whether parameters, gradients and optimizer state alone exceed the memory of a variant's ranks, even if ZeRO
        divides them evenly. Parameters that several layers share are not counted."""
        if self.offloads or self._may_be_careful(sketch.layout):
            return False
        pipelines, layout = self.pipelines, sketch.layout
        works = pipelines.divided(pipelines.prices.of(msgspec.structs.replace(layout, zero=0, zero_ranks=0)), layout)
        held = [fact.held for fact in works.facts]
        each = [state.parameters_bytes + state.gradients_bytes + state.optimizer_bytes for state in held]
        for shared in works.shared.values():
            for layer in shared.layers:
                each[layer] -= shared.held_bytes(pipelines.prices.optimizer.states, True)
        return sum(each[number] for number in pipelines.chain.numbers) > layout.pp * pipelines.limit_bytes

    def may_fit(self, sketch: Sketch) -> bool:
        """Whether a variant whose ideal option is known can fit."""
        assert sketch.ideal is not None
        return self.fits(sketch.ideal) or self._may_be_careful(sketch.layout) or self.offloads

    def fits_plainly(self, sketch: Sketch) -> bool:
        """Whether a variant whose ideal option is known fits without recomputation, if ZeRO divides the state evenly.
        The next ZeRO stages cannot be faster then, unless the real option needs more memory."""
        return sketch.recompute == self.pipelines.kinds[:1] and sketch.ideal is not None and self.fits(sketch.ideal)

    def _bound_s(self, option: Option, zero: int) -> float:
        """A lower bound on the seconds of an option's variants with recomputation and a ZeRO stage."""
        return lighter_bound_s(option, self.pipelines.prices.network, self._divided(option)) if zero else option.step_s

    def _saved_s(self, option: Option) -> float:
        """The largest number of seconds that a step can save with ZeRO stage 1: ranks divide the update of parameters,
        and half of the bytes of the sums of gradients move as gathers, which kernels of the next forward may hide."""
        layout, saved = option.layout, 0.0
        for stage, divided in zip(option.work.stages, self._divided(option), strict=True):
            hidden_s = sums_s(stage, layout, self.pipelines.prices.network) / 2 if self.pipelines.overlaps else 0.0
            saved = max(saved, layout.chunks * (_divided_s(stage, divided) + hidden_s))
        return saved

    def _divided(self, option: Option) -> list[float]:
        """For each stage, the fraction of its update that a rank saves if the ranks with equal parameters divide it.
        All dp ranks have equal parameters, except experts, which are equal on dp / ep ranks only."""
        layout, chain = option.layout, self.pipelines.chain
        if layout.ep == 1:
            return [1 - 1 / layout.dp] * len(option.work.stages)
        plain = msgspec.structs.replace(layout, zero=0, recompute=self.pipelines.kinds[0])
        facts, shares = self.pipelines.prices.of(plain).facts, []
        for layers in chain.priced(chain.stages_of(option.firsts)):
            trained = sum(facts[layer].trained_bytes for layer in layers)
            experts = sum(facts[layer].experts_bytes for layer in layers) / trained if trained else 0.0
            shares.append(1 - (1 - experts + experts * layout.ep) / layout.dp)
        return shares

    def priced(self, sketch: Sketch) -> Option:
        """The fastest variant of a sketch that fits, with the least recomputation that fits. If none fits, the variant
        that needs the least memory."""
        kinds, smaller = [kind for kind in RECOMPUTE if kind in sketch.recompute], self._smaller(sketch)
        options = [self.pipelines.option(sketch.layout, kinds, smaller)]
        if not self.fits(options[0]):
            options += self._recomputed(options[0], smaller)
        if self.offloads and not any(map(self.fits, options)):
            moved = msgspec.structs.replace(sketch.layout, offload="optimizer")
            options.append(self.pipelines.option(moved, self.pipelines.kinds[:1]))
            options += self._recomputed(options[-1])
        return self.best(options)

    def fits(self, option: Option) -> bool:
        """Whether an option needs at most the memory of a rank."""
        return option.peak_bytes <= self.pipelines.limit_bytes

    def _smaller(self, sketch: Sketch) -> tuple[ZeroStage, ...]:
        """The smaller ZeRO stages that stages of a variant may have if they fit. There are none with several chunks,
        whose memory the dynamic program does not know, and none if ZeRO is there to divide updates."""
        if sketch.layout.chunks > 1 or self.fits(sketch.plain):
            return ()
        return tuple(zero for zero in ZERO_STAGES if zero < sketch.zero and zero in self._stages(sketch.layout))

    def _recomputed(self, option: Option, smaller: Sequence[ZeroStage] = ()) -> Iterator[Option]:
        """Yield an option that does not fit with more and more recomputation until it fits, then the option with
        strategies that need less memory (see ``_careful``). For an option that fits, nothing is yielded."""
        if self.fits(option):
            return
        layout = msgspec.structs.replace(option.layout, recompute="none", stage_zero=())
        if (careful := self._careful(option)) is not None:
            yield careful
        for number in range(1, len(self.pipelines.kinds) + 1):
            again = self.pipelines.option(layout, self.pipelines.kinds[:number], smaller)
            yield again
            if self.fits(again):
                return

    def _may_be_careful(self, layout: Layout) -> bool:
        """Whether the integer program can choose strategies of ``layout`` that need less memory."""
        chosen = not layout.sequence_parallel and (layout.feature_ranks > 1 or bool(layout.mixed))
        return self.whole and self.pipelines.kinds[0] == "none" and chosen

    def _careful(self, option: Option) -> Option | None:
        """The option with strategies that the integer program chooses under the memory limit.

        None if no strategies fit, if the integer program does not choose the strategies of the layout, or if equal
        blocks of the model are priced once.
        """
        if not self._may_be_careful(option.layout):
            return None
        layout = msgspec.structs.replace(option.layout, recompute="none")
        light = msgspec.structs.replace(
            option, layout=layout, recompute=("none",) * len(option.recompute),
            memory_bytes=self.pipelines.limit_bytes,
        )  # fmt: skip
        try:
            _, foretold = self.model.planned(light, explains=False)
        except (LayoutError, PlanError):
            return None
        careful = msgspec.structs.replace(
            light, work=foretold.work, memory=foretold.peak, step_s=foretold.played.step_s
        )
        return careful if self.fits(careful) else None


def lighter_bound_s(option: Option, network: Network, divided: Sequence[float]) -> float:
    """A lower bound on the seconds of an option's variants with recomputation and ZeRO. ZeRO divides the update, but it
    sums gradients in other ways, which take time. No rank can save more than the rank with the longest update and
    sums. ``divided`` has, for each stage, the fraction of the update that a rank saves."""
    layout, saved = option.layout, 0.0
    for stage, part in zip(option.work.stages, divided, strict=True):
        saved = max(saved, layout.chunks * (_divided_s(stage, part) + sums_s(stage, layout, network)))
    return option.step_s - saved


def sums_s(stage: StageWork, layout: Layout, network: Network) -> float:
    """The seconds of a stage's sums of gradients."""
    pieces = [*stage.pieces[ActionKind.REDUCE_GRAD.value], *stage.pieces[ActionKind.B.value]]
    return pieces_s([*filter(is_reduction, pieces), *filter(is_sum, stage.after)], layout.mesh(), network)


def _divided_s(stage: StageWork, divided: float) -> float:
    """The seconds by which the update of a stage becomes shorter if a rank saves the fraction ``divided`` of it."""
    return divided * sum(piece.seconds for piece in stage.after if isinstance(piece, Compute))
