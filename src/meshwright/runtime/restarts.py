"""Restarts all ranks from the last checkpoint after a rank was lost, as long as that helps."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RankError
from meshwright.runtime import manifest

TRIES = 3
"""Failures at one place, with no checkpoint between them, after which ranks are not started again."""


class Restarts:
    """Decides, for ``run_ranks(..., again=...)``, to start again unless the run would fail for ever.

    A machine may lose a rank anywhere. A failure that lies in the model or its data happens at the same place each
    time, such as ``at step 57``. The third failure at a place is the last, unless a later checkpoint was written in
    between. The places between two checkpoints are finite in number, so restarting ends.

    Args:
        checkpoints: the directory that ``save_in`` writes to.
        say: is called with a text for each failure and its consequence.
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
