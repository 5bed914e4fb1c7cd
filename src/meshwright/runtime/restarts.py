"""Ranks that were lost start again from the last checkpoint, as long as that helps."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RankError
from meshwright.runtime import manifest

TRIES = 3
"""Failures at one place, with no checkpoint between them, after which the next is expected too."""


class Restarts:
    """For ``run_ranks(..., again=...)``: start again unless it would fail for ever.

    A machine may lose a rank anywhere. What lies in the model or its data fails at the same place, such as
    ``at step 57``, each time: the third failure there is the last, unless a later checkpoint was written between them.
    Between two checkpoints there are only so many places, so this ends.

    Args:
        checkpoints: the directory of ``save_in``.
        say: is told each failure, and what follows from it.
    """

    def __init__(self, checkpoints: Path, say: Callable[[str], object]) -> None:
        self._checkpoints, self._say = checkpoints, say
        self._saved = manifest.latest_step(checkpoints)
        self._failures: Counter[str] = Counter()

    def __call__(self, error: RankError, kept: Path) -> bool:
        """Whether to start again."""
        saved = manifest.latest_step(self._checkpoints)
        if saved > self._saved:
            self._saved = saved
            self._failures.clear()
        doing = error.doing or "while starting"
        self._failures[doing] += 1
        failure = f"{error.where}: {error.problem}" if error.where else error.problem
        since = f"step {saved}" if saved >= 0 else "the beginning"
        if self._failures[doing] == TRIES:
            self._say(f"it has failed {TRIES} times {doing} after {since}, and is not started again")
            return False
        self._say(f"{failure}\n  -> all ranks start again from {since}; what the failed ones said is in {kept}")
        return True
