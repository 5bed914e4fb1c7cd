"""Switches to faster algorithms if the links between boxes change during a run.

The ranks of a group that spans several boxes measure their collectives. If another algorithm has become faster, all
ranks switch to it at the same step.

Every ``EVERY`` steps the ranks of a group exchange the median time of each collective since the last exchange (a look).
The rank that starts a collective last has the shortest time, because it waits only for the links, not for other ranks.
If this time differs from the usual time by more than the factor ``FACTOR``, up or down, at two looks in a row, the
ranks measure all possible algorithms again at that size.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.exchange_notes import gather_everywhere
from meshwright.comm.transport.base import Work
from meshwright.schedules.collectives.choice import CHOSEN, LONG_BYTES, MPI, candidates, chosen, in_pieces
from meshwright.schedules.collectives.hierarchy import Boxes, named_boxes

EVERY, FACTOR = 10, 1.5
LEAST_S = 2e-3
"""Changes of a collective's time up to this many seconds are ignored."""
TRIES = 3
"""The number of runs of each algorithm that count; the fastest gives the time. A slower run before them is ignored."""
MOST_BYTES = 2**28
"""Upper limit on the bytes of a vector that is measured again; collectives of larger vectors are measured at this size.
"""

log = logging.getLogger("meshwright")

Start = Callable[[str, Tensor, str], Work | None]
"""A function that starts an operation on a flat float32 vector; its arguments are (operation, vector, algorithm)."""


class Key(NamedTuple):
    """Identifies a collective by its operation and the bytes of its whole vector."""

    operation: str
    num_bytes: int


class Switch(NamedTuple):
    """A change of algorithm from ``before`` to ``after``, which holds from ``step`` on. ``usual_s`` is the usual time
    with ``before`` in seconds, ``now_s`` its time now, and ``after_s`` the time that was measured with ``after``. If
    ``before`` is still the fastest algorithm, ``after`` is equal to ``before``."""

    step: int
    key: Key
    before: str
    after: str
    usual_s: float
    now_s: float
    after_s: float

    def __str__(self) -> str:
        operation, num_bytes = self.key
        size = f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**15 else f"{num_bytes} bytes"
        took = f"{operation} of {size} took {1e3 * self.now_s:.3g} ms instead of {1e3 * self.usual_s:.3g}"
        if self.after == self.before:
            return f"{took}; {self.before} is still the fastest"
        return (
            f"{took}; from step {self.step} on by {self.after} ({1e3 * self.after_s:.3g} ms) instead of {self.before}"
        )


class Watch:
    """The times of one group's collectives. ``boxes`` holds the group's ranks by box; a single box has no links to
    watch.

    ``amended`` maps a collective to the algorithm that the ranks have switched to, which replaces the plan's choice.
    """

    def __init__(self, group: dist.ProcessGroup, boxes: Boxes, start: Start) -> None:
        self._group, self._start, self.has_links = group, start, len(boxes) > 1
        has_boxes = any(not isinstance(box, int) and len(box) > 1 for box in boxes)
        self._boxes = named_boxes(boxes) if has_boxes and len(boxes) > 1 else ""
        self.amended: dict[Key, str] = {}
        self._names: dict[Key, str] = {}
        self._seconds: dict[Key, list[float]] = {}
        self._usual: dict[Key, float] = {}
        self._doubted: set[Key] = set()

    def algorithm(self, text: str, operation: str, num_bytes: int) -> str:
        """The amended algorithm of a collective if it has one, else the algorithm in the plan's text."""
        if operation not in CHOSEN:
            return chosen(text, operation, num_bytes)
        key = Key(operation, num_bytes)
        name = self.amended.get(key) or chosen(text, operation, num_bytes)
        self._names[key] = name
        return name

    def note(self, operation: str, num_bytes: int, seconds: float) -> None:
        """Record the seconds for which a collective kept this rank from computing."""
        key = Key(operation, num_bytes)
        if self.has_links and key in self._names:
            self._seconds.setdefault(key, []).append(seconds)

    def look(self, step: int) -> tuple[Switch, ...]:
        """Exchange and check the times since the last look. Returns the switches that hold from ``step`` on. All ranks
        of the group must call this with the same step, between collectives."""
        medians = {key: statistics.median(each) for key, each in self._seconds.items()}
        self._seconds.clear()
        times_of_ranks = gather_everywhere(medians, self._group)
        switches = []
        for key in sorted(set.intersection(*(set(times) for times in times_of_ranks))):
            now_s, usual_s = min(times[key] for times in times_of_ranks), self._usual.get(key)
            if usual_s is None:
                self._usual[key] = now_s
            elif max(now_s, usual_s) <= FACTOR * min(now_s, usual_s) or abs(now_s - usual_s) <= LEAST_S:
                self._doubted.discard(key)
            elif key not in self._doubted:
                self._doubted.add(key)  # the machine may have been busy only for a moment
            else:
                self._doubted.remove(key)
                switches.append(self._again(step, key, usual_s, now_s))
        return tuple(switches)

    def _again(self, step: int, key: Key, usual_s: float, now_s: float) -> Switch:
        before, seconds = self._names[key], self._measured(key)
        after = min(seconds, key=seconds.__getitem__)
        self.amended[key] = after
        del self._usual[key]  # it is learned again
        return Switch(step, key, before, after, usual_s, now_s, seconds[after])

    def _measured(self, key: Key) -> Mapping[str, float]:
        """Measure every algorithm that may be the fastest. Returns the slowest rank's seconds for each algorithm; all
        ranks get the same numbers."""
        names = dict.fromkeys((*candidates(key.operation, self._group.size(), self._boxes), self._names[key]))
        num_bytes = min(key.num_bytes, MOST_BYTES)
        part = -(-num_bytes // 4 // self._group.size())
        value, seconds = torch.zeros(part * self._group.size()), dict[str, float]()
        for name in names:
            if name == MPI or (in_pieces(name) and num_bytes < LONG_BYTES):
                continue
            tries = []
            for _ in range(1 + TRIES):  # the first run is slower
                gather_everywhere(None, self._group)
                begun = time.perf_counter()
                work = self._start(key.operation, value, name)
                if work is not None:
                    work.wait()
                tries.append(time.perf_counter() - begun)
            seconds[name] = min(tries[1:])
        times_of_ranks = gather_everywhere(seconds, self._group)
        return {name: max(times[name] for times in times_of_ranks) for name in seconds}
