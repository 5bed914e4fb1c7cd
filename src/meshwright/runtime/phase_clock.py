"""Records when phases begin in a function that runs several phases."""

import time

from meshwright.comm.record import COMPUTE, SpanRecorder, current
from meshwright.ir.stages import PROLOGUE


class Clock:
    """Records when each phase begins in a function that runs several phases: the function calls ``begin``."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = []

    def begin(self, phase: str) -> None:
        """Record that a phase begins now."""
        self._begun.append((phase, time.perf_counter()))
        if (recorder := current()) is not None:
            recorder.mark()
            if len(self._begun) > 1:
                recorder.sample()  # the values kept for backward are at their peak

    def forget(self) -> None:
        """Forget phases that were captured and did not run."""
        self._begun.clear()

    def note(self, recorder: SpanRecorder, begun_s: float) -> bool:
        """Record one compute span per phase since ``begun_s``. Return True if one function ran all phases; if False,
        only the prologue has run."""
        done_s, phases = time.perf_counter(), self._begun or [(PROLOGUE, begun_s)]
        starts = [begun_s, *(start_s for _, start_s in phases[1:])]
        for (phase, _), start_s, end_s in zip(phases, starts, [*starts[1:], done_s], strict=True):
            recorder.span(COMPUTE, phase, start_s, end_s)
        recorder.sample()
        alone, self._begun = bool(self._begun), []
        return alone
