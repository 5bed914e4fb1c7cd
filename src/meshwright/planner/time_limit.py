"""The time that a search for a layout may take, and what it says meanwhile."""

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
"""How often the log says what is weighed."""


class TimeIsOverError(Exception):
    """Raised where a search goes on though its time is over; caught by the search."""


class TimeLimit:
    """Ends a search after ``seconds`` (None: never), and tells ``progress``, and the log now and then, what it does.

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
        """Whether the time is over."""
        return time.monotonic() > self._deadline

    def check(self) -> None:
        """Raises TimeIsOverError if the time is over."""
        if self.over:
            raise TimeIsOverError

    def say(self, what: str) -> None:
        """What is done now."""
        self.progress(what)
        if time.monotonic() > self._told + TOLD_EVERY_S:
            self._told = time.monotonic()
            log.info("planning: %s", what)

    def stopped(self, weighed: int, layouts: int, simulated: int) -> Note:
        """The note of a plan whose search was stopped, which the log says too."""
        reason = f"{weighed} of {layouts} layouts were weighed, {simulated} simulated: another may be faster"
        log.warning("planning has stopped after %g s: %s", self.seconds, reason)
        return Note(module="(planner)", split=f"stopped after {self.seconds:g} s", reason=reason)


def check_seconds(seconds: Any) -> None:
    """A LayoutError if it is no time for which a search may run: not None, nor a number above 0."""
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise LayoutError(
            f"{seconds!r} is no time to plan for", where="seconds", remedy="give a number above 0, or None: no limit"
        )
