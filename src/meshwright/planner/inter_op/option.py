"""A layout with its stages and their costs: what a search compares."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from meshwright.cost.closed_form import Predicted
from meshwright.cost.occupancy import RankMemory
from meshwright.cost.work import StepWork
from meshwright.errors import LayoutError, PlanError, ScheduleError
from meshwright.ir.layout import ZERO_STAGES, Layout, Recompute
from meshwright.ir.layout_text import layout_text

REFUSALS = (LayoutError, PlanError, ScheduleError)
"""Errors that mean that a layout is impossible for a model."""


class StageKind(NamedTuple):
    """How a stage saves memory: its kind of recomputation, and its ZeRO stage."""

    recompute: Recompute
    zero: int = 0


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with its stages, its costs, and the memory of the rank that needs the most memory.

    ``firsts`` are the first operators of all stages except the first stage. ``recompute`` has the kind of recomputation
    of each stage. ``step_s`` is the estimated time of a step. ``gain`` is the fraction of it that the plan is likely to
    save by keeping the activations of some blocks (``planner/kept_blocks.py``).
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
    gain: float = 0.0

    @property
    def likely_s(self) -> float:
        """The estimate by which options are compared."""
        return (1 - self.gain) * self.step_s

    @property
    def name(self) -> str:
        """The layout as text."""
        return layout_text(self.layout)

    @property
    def stage_layouts(self) -> list[Layout]:
        """For each stage, the layout in which all stages are like this stage."""
        return [stage_layout(self.layout, stage, kind) for stage, kind in enumerate(self.recompute)]

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the rank that needs the most memory."""
        return self.memory.peak_bytes


def stage_layout(layout: Layout, stage: int, recompute: Recompute) -> Layout:
    """The layout in which all stages have the sizes and the ZeRO stage of ``stage``. A single data-parallel rank has no
    ZeRO."""
    own = layout.of_stage(layout.pipeline.rank_of(stage))
    zero = layout.zero_of(stage) if own.data_ranks > 1 else 0
    return msgspec.structs.replace(own, recompute=recompute, zero=zero, stage_zero=())


def with_zeros(layout: Layout, zeros: Sequence[int]) -> Layout:
    """The layout with a ZeRO stage for each pipeline stage. Stages with a single data-parallel rank do not count."""
    shared = [layout.of_stage(layout.pipeline.rank_of(stage)).data_ranks > 1 for stage in range(len(zeros))]
    own = tuple(ZERO_STAGES[zero] if shares else 0 for zero, shares in zip(zeros, shared, strict=True))
    differ = len({zero for zero, shares in zip(own, shared, strict=True) if shares}) > 1
    return msgspec.structs.replace(layout, zero=max(own), stage_zero=own if differ else ())
