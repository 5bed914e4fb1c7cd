"""The order in which a search visits layouts: the smallest bound or estimate first."""

import heapq
import itertools
from collections.abc import Iterator

from meshwright.ir.layout import Layout
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.recut import MOST_GAIN, may_recut
from meshwright.planner.lighter import Sketch
from meshwright.planner.reasons import complexity

Entry = Layout | Option | Sketch
"""An entry of the queue: a layout with the lower bound of its seconds, an option that fits with its estimate, or a
variant of a layout with ZeRO or recomputation with its lower bound."""


class Queue:
    """The entries of a search, ordered by seconds and then by complexity.

    With ``recuts``, the search improves the cuts of options when their turn comes (``inter_op.recut``). Until then, the
    seconds of options and variants whose cuts may be improved count as divided by ``MOST_GAIN``.
    """

    def __init__(self, *, recuts: bool) -> None:
        self._recuts = recuts
        # Seconds, complexity, a number that orders equal entries, and the entry.
        self._heap: list[tuple[float, tuple[int, ...], int, Entry]] = []
        self._numbers = itertools.count()
        self._cut = set[str]()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def least_s(self) -> float:
        """The seconds of the first entry."""
        return self._heap[0][0]

    def put(self, seconds: float, entry: Entry) -> None:
        """Add an entry."""
        layout = entry if isinstance(entry, Layout) else entry.layout
        if not isinstance(entry, Layout) and self.may_recut(entry):
            seconds /= MOST_GAIN
        heapq.heappush(self._heap, (seconds, complexity(layout), next(self._numbers), entry))

    def put_cut(self, option: Option) -> None:
        """Add an option whose cut was improved."""
        self._cut.add(option.name)
        self.put(option.likely_s, option)

    def may_recut(self, entry: Option | Sketch) -> bool:
        """Whether the cut of an option or variant may still be improved."""
        if isinstance(entry, Sketch):
            return self._recuts and may_recut(entry.layout)
        return self._recuts and entry.name not in self._cut and may_recut(entry.layout, entry.memory_bytes)

    def pop(self) -> Entry:
        """Remove the first entry."""
        return heapq.heappop(self._heap)[-1]

    def pop_sketch(self) -> Sketch | None:
        """Remove a variant of a layout before its turn. None if there is no variant."""
        for place, (*_, entry) in enumerate(self._heap):
            if isinstance(entry, Sketch):
                del self._heap[place]
                heapq.heapify(self._heap)
                return entry
        return None

    def first(self, number: int) -> Iterator[Entry]:
        """The first entries, in order."""
        return (entry for *_, entry in heapq.nsmallest(number, self._heap))
