"""Decides whether all ranks start again from the last checkpoint after a failure."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RankError
from meshwright.runtime import manifest

TRIES = 3
"""Number of failures at one place, with no new checkpoint between them, after which ranks are not started again."""


class Restarts:
    """Decides whether ``run_ranks(..., again=...)`` starts the ranks again: yes, unless the run would fail for ever.

    A machine may lose a rank at any place. A failure caused by the model or its data happens at the same place each
    time, such as ``at step 57``. After the third failure at one place the ranks are not started again, unless a later
    checkpoint was written in between. There are finitely many places between two checkpoints, so restarts end.

    Args:
        checkpoints: the directory that ``save_in`` writes to.
        say: called with a text for each failure and its consequence.
    """

    def __init__(self, checkpoints: Path, say: Callable[[str], object]) -> None:
        self._checkpoints, self._say = checkpoints, say
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
        if self._failures[doing] == TRIES:
            self._say(f"it has failed {TRIES} times {doing} after {since}, and is not started again")
            return False
        self._say(f"{failure}\n  -> all ranks start again from {since}; the output of the failed ranks is in {kept}")
        return True
