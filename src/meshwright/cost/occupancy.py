"""Memory per rank over a schedule: its peak, and whether it fits a limit, before anything is allocated."""

from typing import Literal

import msgspec

from meshwright.cost.work import StepWork
from meshwright.ir.schedule import ActionKind, Schedule

Occupancy = Literal["fits", "marginal", "does not fit"]
MARGIN = 0.06
"""The fraction of the limit that allocators lose to fragmentation. Peaks inside this margin are marginal."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank at its peak: held during the whole step, saved for the micro-batches in flight, and the
    workspace of the ``action`` at which the peak is."""

    rank: int
    held_bytes: int
    saved_bytes: int
    workspace_bytes: int
    action: str

    @property
    def peak_bytes(self) -> int:
        """The sum of the three parts."""
        return self.held_bytes + self.saved_bytes + self.workspace_bytes


def peak_memory(work: StepWork, schedule: Schedule) -> tuple[RankMemory, ...]:
    """The peak of every pipeline rank. A micro-batch is in flight on a stage from its F until its B or W has ended, as
    the schedule's validator counts (``schedules/check.py``)."""
    peaks = []
    for rank, actions in enumerate(schedule.ranks):
        held = sum(work.stages[stage].held_bytes for stage in sorted({action.stage for action in actions}))
        live = 0
        highest, at = (0, 0), ""
        for action in actions:
            stage = work.stages[action.stage]
            saved, workspace = (round(work.heap_factor * size) for size in (stage.saved_bytes, stage.workspace_bytes))
            if action.kind is ActionKind.F:
                live += saved
            if action.kind.computes and live + workspace > sum(highest):
                highest, at = (live, workspace), str(action)
            if action.kind in (ActionKind.B, ActionKind.W):
                live -= saved
        peak = RankMemory(rank=rank, held_bytes=held, saved_bytes=highest[0], workspace_bytes=highest[1], action=at)
        peaks.append(peak)
    return tuple(peaks)


def memory_verdict(peak_bytes: float, limit_bytes: float) -> Occupancy:
    """Whether a rank with this peak stays within ``limit_bytes``."""
    if peak_bytes > limit_bytes:
        return "does not fit"
    return "marginal" if peak_bytes > (1 - MARGIN) * limit_bytes else "fits"
