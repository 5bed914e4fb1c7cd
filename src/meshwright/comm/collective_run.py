"""Collectives that have been started, and the methods that begin them and run their remaining steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.comm.collective_kind import Kind, LaneStep, Named
from meshwright.comm.compiled import ADD, EXPECT, KEEP, PUT

Wait = Callable[[Any], None]
"""A function that finishes a started collective, after the collectives that were started before it."""


class CollectiveRun(ABC):
    """A collective that has been started. ``wait`` finishes it, after those that were started before it."""

    moves_streams = True
    """The lanes on which it waits keep all streams of the rank moving."""
    __slots__ = ("_wait", "done", "kind", "label", "number", "tag")

    def __init__(self, kind: Any, number: int, label: str, wait: Wait) -> None:
        self.kind: Named = kind
        self.number, self.label, self._wait = number, label, wait
        self.tag = (number << 32) | kind.code
        self.done = False

    @property
    @abstractmethod
    def has_sent(self) -> bool:
        """Whether all messages of this collective are sent, so that the next collective may send messages."""

    @abstractmethod
    def begin(self) -> None:
        """Send the first messages, as far as the lanes have room."""

    @abstractmethod
    def go_on(self) -> None:
        """Run all remaining steps."""

    def advance(self) -> bool:
        """Run the next steps that need not wait, if this kind of collective can. Returns whether any was run."""
        return False

    def text(self) -> str:
        """The collective in words, for errors."""
        return f"#{self.number} {self.kind.say(self.label).decode()}"

    def wait(self) -> None:
        """Wait until the collective is complete."""
        if not self.done:
            self._wait(self)


class DenseRun(CollectiveRun):
    """A collective of plain elements that has been started."""

    __slots__ = ("_early", "_finish", "_kept", "_left", "_means", "_memory")
    kind: Kind

    def __init__(
        self,
        wait: Wait,
        kind: Kind,
        memory: "Tensor | Written",
        number: int,
        label: str,
        finish: Callable[[], object] | None,
    ) -> None:
        super().__init__(kind, number, label, wait)
        self._means, self._kept = kind.tensors, memory  # an array over the memory would not keep it alive
        self._memory: Any = memory
        if kind.arrays is not None and isinstance(memory, Tensor) and memory.is_cpu and memory.is_contiguous():
            self._means, self._memory = kind.arrays, kind.array(memory)
        self._finish = finish
        self._early = 0
        self._left: tuple[LaneStep, ...] | None = None  # once ``advance`` was called: the steps that are left

    @property
    def has_sent(self) -> bool:
        """Whether all messages of this collective are sent, so that the next collective may send messages."""
        if self._left is not None:
            return not any(step[0] == PUT for step in self._left)
        return self.done or (self._early == len(self.kind.first) and not self.kind.rest_puts)

    def begin(self) -> None:
        """Send the first messages, as far as the lanes have room."""
        kind, tag, memory = self.kind, self.tag, self._memory
        for step in kind.first:
            what, lane, begin, end, _ = step
            if what != PUT:
                self._do((step,))
            elif not lane.put_at_once(memory if kind.whole else memory[begin:end], tag):
                return
            self._early += 1

    def go_on(self) -> None:
        """Run all remaining steps."""
        self._do(self._remaining() if self._left is None else self._left)
        for lane in self.kind.lanes:
            lane.settle(self.tag)
        self._end()

    def advance(self) -> bool:
        """Run the next steps that need not wait for room or for a message. All lanes must be of shared memory."""
        left = self._remaining() if self._left is None else self._left
        num = 0
        while num < len(left) and _needs_no_wait(left[num]):
            self._do(left[num : num + 1])
            num += 1
        self._left = left[num:]
        if not self._left:
            self._end()
        return num > 0 or self.done

    def _remaining(self) -> tuple[LaneStep, ...]:
        """The steps that ``begin`` has not run."""
        kind = self.kind
        if self._early == kind.num_first:
            return kind.rest
        early = set(kind.ahead[: self._early])
        return tuple(step for index, step in enumerate(kind.steps) if index not in early)

    def _end(self) -> None:
        if self._finish is not None:
            self._finish()
        self.done = True
        self._memory = self._kept = self._finish = None  # type: ignore[assignment]

    def _do(self, steps: tuple[LaneStep, ...]) -> None:
        memory, tag, whole = self._memory, self.tag, self.kind.whole
        dtype, reduce, keep = self._means  # no view: making one takes longer than sending a short message
        for what, lane, begin, end, into in steps:
            if what == ADD:
                target = memory if whole else self._into(begin, end)
                reduce(target, lane.take(end - begin, dtype, tag))
                lane.release()
            elif what == PUT:
                lane.put(memory if whole else memory[begin:end], tag)
            elif what == KEEP:
                target = memory if whole else self._into(begin, end)
                keep(target, lane.take(end - begin, dtype, tag))
                lane.release()
            elif what == EXPECT:
                lane.expect(end - begin, memory.like if isinstance(memory, Written) else memory)
            else:
                keep(self._into(into, into + end - begin), memory[begin:end])

    def _into(self, begin: int, end: int) -> Any:
        memory = self._memory
        return memory.into(begin, end) if isinstance(memory, Written) else memory[begin:end]


def _needs_no_wait(step: LaneStep) -> bool:
    """Whether a step finds room for its message, or its message has come."""
    what, lane = step[:2]
    if what == PUT:
        return bool(lane.has_room())
    return what not in (ADD, KEEP) or bool(lane.has_come())


class Written:
    """Working memory that is read from one tensor and written to another. The written tensor holds only the elements
    from ``begin`` on."""

    def __init__(self, read: Tensor, written: Tensor, begin: int) -> None:
        self._read, self._written, self._begin = read, written, begin
        self.dtype, self.like = read.dtype, written

    def __getitem__(self, part: slice) -> Tensor:
        return self._read[part]

    def into(self, begin: int, end: int) -> Tensor:
        """The elements to write."""
        return self._written[begin - self._begin : end - self._begin]
