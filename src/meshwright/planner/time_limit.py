"""The time limit of a search for a layout, and its progress messages."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from meshwright.errors import LayoutError
from meshwright.ir.plan import Note

log = logging.getLogger("meshwright")

Progress = Callable[[str], None]
TOLD_EVERY_S = 10.0
"""Least seconds between two progress messages in the log."""


class TimeIsOverError(Exception):
    """Raised when a search continues past its time limit; the search catches it."""


class TimeLimit:
    """Ends a search after ``seconds`` (None: never), and reports the current work to ``progress`` and, less often, to
    the log.

    Raises:
        LayoutError: ``seconds`` is not a number above 0.
    """

    def __init__(self, seconds: float | None, progress: Progress) -> None:
        check_seconds(seconds)
        self.seconds, self.progress = seconds, progress
        self._told = time.monotonic()
        self._deadline = self._told + (math.inf if seconds is None else seconds)

    @property
    def over(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() > self._deadline

    def check(self) -> None:
        """Raise TimeIsOverError if the time limit has passed."""
        if self.over:
            raise TimeIsOverError

    def say(self, what: str) -> None:
        """Report the current work."""
        self.progress(what)
        if time.monotonic() > self._told + TOLD_EVERY_S:
            self._told = time.monotonic()
            log.info("planning: %s", what)

    def stopped(self, weighed: int, layouts: int, simulated: int) -> Note:
        """Log that the search was stopped, and return the note that says so in the plan."""
        reason = f"{weighed} of {layouts} layouts were weighed, {simulated} simulated: another may be faster"
        log.warning("planning has stopped after %g s: %s", self.seconds, reason)
        return Note(module="(planner)", split=f"stopped after {self.seconds:g} s", reason=reason)


def check_seconds(seconds: Any) -> None:
    """Raise a LayoutError unless ``seconds`` is None or a number above 0."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise LayoutError(
            f"{seconds!r} is no time to plan for", where="seconds", remedy="give a number above 0, or None: no limit"
        )
