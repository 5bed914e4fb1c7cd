"""The time limit of a search for a layout, and its progress messages."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from meshwright.errors import LayoutError
from meshwright.ir.plan import Note, Plan

log = logging.getLogger("meshwright")

Progress = Callable[[str], None]
TOLD_EVERY_S = 10.0
"""Least seconds between two progress messages in the log."""
FIRST_TOLD_S = 2.0
"""Seconds after which the log has the first layout that fits, without waiting for ``TOLD_EVERY_S``."""
PLANNER = "(planner)"
"""The module of the note which says that a search was stopped."""


class TimeIsOverError(Exception):
    """Raised when a search continues past its time limit; the search catches it."""


class TimeLimit:
    """Ends a search after ``seconds`` (None: never), or as soon as ``stop`` returns true. Reports the current work and
    the best layout so far to ``progress`` and, less often, to the log.

    Raises:
        LayoutError: ``seconds`` is not a number above 0.
    """

    def __init__(
        self,
        seconds: float | None = None,
        progress: Progress = lambda what: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        check_seconds(seconds)
        self.seconds, self.progress, self.stop = seconds, progress, stop
        self._begun = self._reported_s = time.monotonic()
        self._deadline = self._begun + (math.inf if seconds is None else seconds)
        self._best_s, self._best, self._reported_best = math.inf, "", False

    @property
    def over(self) -> bool:
        """Whether the time limit has passed, or the search was interrupted."""
        return time.monotonic() > self._deadline or self.stop()

    def check(self) -> None:
        """Raise TimeIsOverError if the search has to end."""
        if self.over:
            raise TimeIsOverError

    def say(self, what: str) -> None:
        """Report the current work."""
        what += self._best
        self.progress(what)
        now, first = time.monotonic(), bool(self._best) and not self._reported_best
        if now > self._reported_s + TOLD_EVERY_S or (first and now > self._begun + FIRST_TOLD_S):
            self._reported_s, self._reported_best = now, bool(self._best)
            log.info("planning: %s", what)

    def note_layout(self, layout: str, step_s: float, peak_bytes: float) -> None:
        """Note a layout that fits, with its estimated seconds of a step and the bytes of the tensors of a rank at its
        peak. The fastest becomes part of all reports."""
        if step_s < self._best_s:
            costs = f"{step_s * 1e3:.4g} ms a step, {peak_bytes / 2**30:.3g} GiB a rank"
            self._best_s, self._best = step_s, f"; best so far: {layout}, {costs}"

    def stopped(self, weighed: int, layouts: int, simulated: int) -> Note:
        """Log that the search was stopped, and return the note that says so in the plan."""
        reason = f"{weighed} of {layouts} layouts were considered, {simulated} simulated: another may be faster"
        log.warning("planning has stopped after %s: %s", self.spent, reason)
        return Note(module=PLANNER, split=f"stopped after {self.spent}", reason=reason)

    @property
    def spent(self) -> str:
        """The time after which the search was stopped, as text: the time limit, if it has passed."""
        elapsed = time.monotonic() - self._begun
        return f"{elapsed:.3g} s" if self.seconds is None or self.stop() else f"{self.seconds:g} s"


def was_stopped(plan: Plan) -> bool:
    """Whether the search for ``plan`` was stopped before its end."""
    return any(note.module == PLANNER for note in plan.notes)


def check_seconds(seconds: Any) -> None:
    """Raise a LayoutError unless ``seconds`` is None or a number above 0."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise LayoutError(
            f"{seconds!r} is not a time limit", where="seconds", remedy="give a number above 0, or None: no limit"
        )
