"""Decides whether all ranks start again from the last checkpoint after a failure."""

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RankError
from meshwright.runtime import manifest
from meshwright.runtime.memory import num_killed

TRIES = 3
"""Number of failures at one place, with no new checkpoint between them, after which ranks are not started again."""
BACK_OFF_S, LONGEST_S = 1.0, 60.0
"""Seconds before the second restart without a new checkpoint between, and the limit of the doubled waits after it."""
STORM, STORM_S = 10, 600.0
"""So many failures within so many seconds, with new checkpoints or not, are too many."""
MOST = 100
"""The limit of restarts of one command."""
STARTING = ("while starting", "while reading the data", "while capturing and planning")
"""What ranks do before their first step. The kernel kills those that take too much memory there each time."""


class Restarts:
    """Decides whether ``run_ranks(..., again=...)`` starts the ranks again: yes, unless the run would fail for ever.

    A machine may lose a rank at any place. A failure caused by the model or its data happens at the same place each
    time, such as ``at step 57``. After the third failure at one place the ranks are not started again, unless a later
    checkpoint, or a later copy in memory, was made in between. There are finitely many places between two of them, so
    restarts end.

    A rank that the kernel kills for want of memory before its first step would be killed again: the run ends, and
    ``out_of_memory`` is true. If the kernel does not say why a rank was killed, the second time counts as this.

    The first restart after a checkpoint is immediate. Each further one waits twice as long. ``STORM`` failures within
    ``STORM_S`` seconds, or ``MOST`` in all, end the run.

    Args:
        checkpoints: the directory that ``save_in`` writes to.
        say: called with a text for each failure and its consequence.
        clock: the time in seconds.
        wait: waits for so many seconds.
        output: says where the output of failed ranks is; ``{kept}`` is the directory that a call names.
        killed: the number of processes that the kernel has killed for want of memory; -1 if it does not say.
    """

    def __init__(
        self,
        checkpoints: Path,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        output: str = "the output of the failed ranks is in {kept}",
        killed: Callable[[], int] = num_killed,
    ) -> None:
        self._checkpoints, self._say, self._clock, self._wait = checkpoints, say, clock, wait
        self._output, self._killed = output, killed
        self._num_killed, self.out_of_memory = killed(), False
        self._times: deque[float] = deque(maxlen=STORM)
        self._count = 0
        self._saved = manifest.latest_step(checkpoints)
        self._failures: Counter[str] = Counter()

    def __call__(self, error: RankError, kept: Path) -> bool:
        """Return whether to start the ranks again."""
        saved = manifest.latest_step(self._checkpoints)
        if max(saved, error.in_memory) > self._saved:
            self._saved = max(saved, error.in_memory)
            self._failures.clear()
        doing = error.doing or "while starting"
        self._failures[doing] += 1
        failure = f"{error.where}: {error.problem}" if error.where else error.problem
        since = f"step {saved}" if saved >= 0 else "the beginning"
        start = f"step {error.in_memory}, which is in memory" if error.in_memory > saved else since
        self._count += 1
        self._times.append(self._clock())
        if self._lacks_memory(error, doing):
            self.out_of_memory = True
            self._say(f"{failure}: it takes too much memory, and is not started again")
            return False
        if enough := self._enough(doing, since):
            self._say(f"{enough}, and is not started again")
            return False
        num_since = self._failures.total()
        pause_s = 0.0 if num_since == 1 else min(LONGEST_S, BACK_OFF_S * 2.0 ** (num_since - 2))
        when = f", in {pause_s:g} s" if pause_s else ""
        self._say(f"{failure}\n  -> all ranks start again from {start}{when}; {self._output.format(kept=kept)}")
        self._wait(pause_s)
        return True

    def _lacks_memory(self, error: RankError, doing: str) -> bool:
        """Whether the kernel has killed a rank for want of memory before its first step."""
        before, self._num_killed = self._num_killed, self._killed()
        by_kernel = "killed by SIGKILL" in error.problem and doing in STARTING
        return by_kernel and (self._num_killed > before or (self._num_killed < 0 and self._failures[doing] > 1))

    def _enough(self, doing: str, since: str) -> str:
        """Why the ranks are not started again; empty if they are."""
        if self._failures[doing] == TRIES:
            return f"it has failed {TRIES} times {doing} after {since}"
        if len(self._times) == STORM and self._times[-1] - self._times[0] < STORM_S:
            return f"it has failed {STORM} times within {STORM_S:g} s"
        return f"it has failed {MOST} times" if self._count == MOST else ""
