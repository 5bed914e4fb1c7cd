"""Decides whether all ranks start again from the last checkpoint after a failure."""

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RankError
from meshwright.runtime import manifest

TRIES = 3
"""Number of failures at one place, with no new checkpoint between them, after which ranks are not started again."""
BACK_OFF_S, LONGEST_S = 1.0, 60.0
"""Seconds before the second restart without a new checkpoint between, and the limit of the doubled waits after it."""
STORM, STORM_S = 10, 600.0
"""So many failures within so many seconds, with new checkpoints or not, are too many."""
MOST = 100
"""The limit of restarts of one command."""


class Restarts:
    """Decides whether ``run_ranks(..., again=...)`` starts the ranks again: yes, unless the run would fail for ever.

    A machine may lose a rank at any place. A failure caused by the model or its data happens at the same place each
    time, such as ``at step 57``. After the third failure at one place the ranks are not started again, unless a later
    checkpoint was written in between. There are finitely many places between two checkpoints, so restarts end.

    The first restart after a checkpoint is immediate. Each further one waits twice as long. ``STORM`` failures within
    ``STORM_S`` seconds, or ``MOST`` in all, end the run.

    Args:
        checkpoints: the directory that ``save_in`` writes to.
        say: called with a text for each failure and its consequence.
        clock: the time in seconds.
        wait: waits for so many seconds.
        output: says where the output of failed ranks is; ``{kept}`` is the directory that a call names.
    """

    def __init__(
        self,
        checkpoints: Path,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        output: str = "the output of the failed ranks is in {kept}",
    ) -> None:
        self._checkpoints, self._say, self._clock, self._wait = checkpoints, say, clock, wait
        self._output = output
        self._times: deque[float] = deque(maxlen=STORM)
        self._count = 0
        self._saved = manifest.latest_step(checkpoints)
        self._failures: Counter[str] = Counter()

    def __call__(self, error: RankError, kept: Path) -> bool:
        """Return whether to start the ranks again."""
        saved = manifest.latest_step(self._checkpoints)
        if saved > self._saved:
            self._saved = saved
            self._failures.clear()
        doing = error.doing or "while starting"
        self._failures[doing] += 1
        failure = f"{error.where}: {error.problem}" if error.where else error.problem
        since = f"step {saved}" if saved >= 0 else "the beginning"
        self._count += 1
        self._times.append(self._clock())
        if enough := self._enough(doing, since):
            self._say(f"{enough}, and is not started again")
            return False
        num_since = self._failures.total()
        pause_s = 0.0 if num_since == 1 else min(LONGEST_S, BACK_OFF_S * 2.0 ** (num_since - 2))
        when = f", in {pause_s:g} s" if pause_s else ""
        self._say(f"{failure}\n  -> all ranks start again from {since}{when}; {self._output.format(kept=kept)}")
        self._wait(pause_s)
        return True

    def _enough(self, doing: str, since: str) -> str:
        """Why the ranks are not started again; empty if they are."""
        if self._failures[doing] == TRIES:
            return f"it has failed {TRIES} times {doing} after {since}"
        if len(self._times) == STORM and self._times[-1] - self._times[0] < STORM_S:
            return f"it has failed {STORM} times within {STORM_S:g} s"
        return f"it has failed {MOST} times" if self._count == MOST else ""
