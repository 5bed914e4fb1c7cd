"""A layout with its stages and their costs: what a search compares."""

import msgspec

from meshwright.cost.closed_form import Predicted
from meshwright.cost.occupancy import RankMemory
from meshwright.cost.work import StepWork
from meshwright.errors import LayoutError, PlanError, ScheduleError
from meshwright.ir.layout import Layout, Recompute
from meshwright.ir.layout_text import layout_text

REFUSALS = (LayoutError, PlanError, ScheduleError)
"""Errors that mean that a layout is impossible for a model."""


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
    def peak_bytes(self) -> int:
        """Peak memory of the rank that needs the most memory."""
        return self.memory.peak_bytes
