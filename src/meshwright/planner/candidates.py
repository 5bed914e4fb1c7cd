"""Candidate layouts: all ways to divide a number of ranks over axes that the batch and the model allow."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE, ZERO_STAGES, Layout, Recompute, ZeroStage
from meshwright.ir.pipeline import V_SHAPED, ScheduleName
from meshwright.planner.factors import FactorChoices
from meshwright.schedules.pipeline import least_microbatches

MOST_MICROBATCHES = 32
"""The largest number of micro-batches per step that is considered at first, for up to 4 stages. With p stages, the
limit is 8 p if that is more. If a layout with this number does not fit in memory, larger numbers are considered."""
MOST_CHUNKS = 3
LEAST_GRID = 8
"""The smallest number of tensor-parallel ranks for which a search tries a grid instead of a single axis. From 8 ranks
on, the products of a transformer block sum fewer words (elements) on a grid of 2 x p/2 ranks (``cost.grid``)."""
Only = Literal["both", "intra", "inter"]
"""The decisions of a search. ``intra``: operators are divided. ``inter``: the model is divided into stages of one rank
each. ``both``: both."""
ZERO_BUBBLE: tuple[ScheduleName, ...] = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""Schedules that split backwards."""


def _all(shape: Layout) -> bool:
    return True


@dataclass(frozen=True)
class Space:
    """The layouts that a search may choose (default: all layouts).

    ``schedules``: the schedules of layouts with stages. ``recompute``: the kinds of recomputation of stages, in the
    order of falling memory. ``zero``: the ZeRO stages that may save memory or time. ``unlike``: whether stages may
    differ in their ranks. ``fewest`` is the smallest number of micro-batches. ``batch_statistics``: as in ``Layout``.
    ``holds`` decides whether a division of the ranks, given with one micro-batch, belongs to the space. If stages
    differ, it is asked for each stage, as if all stages were like this stage.
    """

    schedules: tuple[ScheduleName, ...] = ("1f1b", *ZERO_BUBBLE, "interleaved", "gpipe")
    recompute: tuple[Recompute, ...] = RECOMPUTE
    zero: tuple[ZeroStage, ...] = ZERO_STAGES
    unlike: bool = True
    fewest: int = 1
    batch_statistics: Literal["global", "microbatch"] = "global"
    holds: Callable[[Layout], bool] = _all

    def least(self, shape: Layout) -> Layout:
        """The division of the ranks with the least recomputation that the space allows."""
        return msgspec.structs.replace(shape, recompute=self.recompute[0], batch_statistics=self.batch_statistics)

    def holds_stages(self, shape: Layout) -> bool:
        """Whether a division of the ranks belongs to the space, whose stages may differ."""
        return all(self.holds(shape.of_stage(number)) for number in range(shape.pp))

    def has(self, shape: Layout, only: Only) -> bool:
        """Whether a division of the ranks belongs to the space, and to a search with ``only``."""
        alone = {"inter": shape.pp == shape.num_ranks, "intra": shape.pp == 1}
        return alone.get(only, True) and self.holds(shape)

    def within(self, shapes: Iterable[Layout], only: Only) -> list[Layout]:
        """The divisions of the ranks that belong to the space, with the least recomputation that the space allows."""
        return [self.least(shape) for shape in shapes if self.has(shape, only)]

    def runs(self, shape: Layout, batch_size: int) -> list[Layout]:
        """The layouts with this division of the ranks that belong to the space."""
        candidates = runs(shape, batch_size, self.fewest)
        return [run for run in candidates if run.pp == 1 or run.schedule in self.schedules]


EVERYTHING = Space()


@dataclass(frozen=True)
class Axes:
    """The parts of a model that a layout can divide, in addition to batch and features.

    ``sequences``: whether the model has sequences. ``attention``: whether it has attention over sequences. ``images``:
    whether it has convolutions. ``experts`` is the number of experts. If mixture-of-experts operators have different
    numbers of experts, ``experts`` is the greatest common divisor of these numbers.
    """

    sequences: bool = False
    attention: bool = False
    experts: int = 1
    images: bool = False


def axes_of(graph: Graph) -> Axes:
    """Find the parts of a graph's model that a layout can divide, in addition to batch and features."""
    mixtures = [operator for operator in graph.operators if operator.target.startswith("meshwright.experts.")]
    experts = math.gcd(*(graph.tensors[mixture.inputs[-1]].shape[0] for mixture in mixtures)) if mixtures else 1
    sequences = FactorChoices(graph, {}, {}).sequences()
    attention = any(operator.target.startswith("meshwright.attention.") for operator in graph.operators)
    images = any(operator.target.startswith("aten.convolution.") for operator in graph.operators)
    return Axes(bool(sequences), attention and bool(sequences), experts, images)


def shapes(batch_size: int, world_size: int, axes: Axes, most_tp: float = math.inf) -> Iterator[Layout]:
    """Yield all divisions of ranks over pp, dp and tp, with one micro-batch. ``most_tp`` is the largest tp.

    For models with convolutions, layouts with one mixed axis are also yielded. A mixed axis may split any factor of an
    operator. If the batch has fewer samples than there are ranks, layouts with two mixed axes are yielded too, because
    two axes can cut images in two dims.
    """
    for pp in divisors(world_size):
        for tp in divisors(world_size // pp):
            dp = world_size // pp // tp
            if dp <= batch_size and tp <= most_tp:
                yield Layout(dp=dp, tp=tp, pp=pp)
    for size in divisors(world_size)[1:] if axes.images else ():
        dp = world_size // size
        if batch_size % dp == 0:
            yield Layout(dp=dp, mixed=(size,))
            smaller = max(divisor for divisor in divisors(size) if divisor * divisor <= size)
            if smaller > 1 and batch_size < world_size:
                yield Layout(dp=dp, mixed=(size // smaller, smaller))


def variations(batch_size: int, world_size: int, axes: Axes, most_tp: float = math.inf) -> Iterator[Layout]:
    """Yield all divisions of ranks with context, expert or sequence parallelism, with one micro-batch."""
    for pp in divisors(world_size):
        for cp in divisors(world_size // pp) if axes.attention else (1,):
            for tp in divisors(world_size // pp // cp):
                dp = world_size // pp // cp // tp
                if batch_size % dp or tp > most_tp:
                    continue
                for ep in divisors(math.gcd(dp, axes.experts)):
                    sequence = (False, True) if tp > 1 and axes.sequences and ep == 1 else (False,)
                    contexts: tuple[Literal["gather", "ring"], ...] = ("gather", "ring") if cp > 1 else ("gather",)
                    for between, context in itertools.product(sequence, contexts):
                        if cp > 1 or ep > 1 or between:
                            yield Layout(dp=dp, cp=cp, ep=ep, tp=tp, pp=pp, sequence_parallel=between, context=context)


def grids_of(layout: Layout, most_tp: float) -> list[Layout]:
    """The grids to try in place of the tp ranks of a fast layout, with one micro-batch. They use the same ranks along
    two axes, if there are at least ``LEAST_GRID`` ranks. If tp fills a box, a grid of twice as many ranks is tried too:
    a box along one axis, two boxes along the other. Depth is left out, because its ranks divide samples and state in
    the same way as dp with ZeRO."""
    if isinstance(layout.tp, tuple) or not layout.is_plain or layout.stage_sizes:
        return []
    dp, tp, grids = layout.dp, layout.tp, []
    if tp >= LEAST_GRID and tp % 2 == 0:
        grids.append(Layout(dp=dp, tp=(2, tp // 2, 1), pp=layout.pp))
    if tp == most_tp and dp % 2 == 0:
        grids.append(Layout(dp=dp // 2, tp=(tp, 2, 1), pp=layout.pp))
    return grids


def has_one_more(shape: Layout, layout: Layout) -> bool:
    """Whether a variation has the stages and tp of ``layout``, and either twice its cp or a larger ep. Sequence
    parallelism is not tried here, because the integer program already splits the sequence over tp where that is
    faster."""
    if (shape.pp, shape.tp) != (layout.pp, layout.tp) or shape.sequence_parallel:
        return False
    return (shape.cp == 2 * layout.cp and shape.ep == layout.ep) or (shape.cp == layout.cp and shape.ep > layout.ep)


def runs(shape: Layout, batch_size: int, fewest: int = 1) -> Iterator[Layout]:
    """Yield ``shape`` with all numbers of micro-batches from ``fewest`` on, and for each number all schedules and
    numbers of chunks.

    The schedule ``gpipe`` is left out, because ``1f1b`` takes the same time with less memory. Each other schedule can
    be the best. ``zb-v`` waits least if the passes of a stage take equal times. ``dualpipe-v`` waits least if they do
    not, with slightly more memory. ``zb-h2`` waits least if the model has too few layers for two chunks, with twice the
    memory of ``zb-h1``.
    """
    dp, pp = shape.dp, shape.pp
    for m in divisors(batch_size // dp) if batch_size % dp == 0 else (1,):
        if m > _most_microbatches(pp) or (m > 1 and shape.mixed):
            break
        if m < fewest:
            continue
        run = msgspec.structs.replace(shape, microbatches=m)
        yield run
        if pp > 1:
            for name in ZERO_BUBBLE:
                if m >= least_microbatches(name, pp):
                    yield msgspec.structs.replace(run, schedule=name, chunks=2 if name in V_SHAPED else 1)
            for chunks in range(2, MOST_CHUNKS + 1) if m % pp == 0 else ():
                yield msgspec.structs.replace(run, schedule="interleaved", chunks=chunks)


def more_microbatches(layout: Layout, batch_size: int) -> Layout | None:
    """The layout with the next larger number of micro-batches, which serves only if ``layout`` does not fit in memory.
    None if there is no larger number, or if ``runs`` already yields it: with stages, all numbers up to a limit are
    compared by time."""
    if layout.mixed or batch_size % layout.dp:
        return None
    step = layout.pp if layout.schedule == "interleaved" else 1
    larger = (m for m in divisors(batch_size // layout.dp) if m > layout.microbatches and m % step == 0)
    number = next(larger, None)
    if number is None or (layout.pp > 1 and number <= _most_microbatches(layout.pp)):
        return None
    return msgspec.structs.replace(layout, microbatches=number)


def _most_microbatches(pp: int) -> int:
    return max(MOST_MICROBATCHES, 8 * pp)


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, in rising order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]
