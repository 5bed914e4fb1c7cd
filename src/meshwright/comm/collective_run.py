"""Collectives that have been started, and the methods that begin them and run their remaining steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.comm.collective_kind import Kind, LaneStep, Named
from meshwright.comm.compiled import ADD, EXPECT, KEEP, PUT

Wait = Callable[[Any], None]
"""A function that finishes a started collective, after the collectives that were started before it."""


class Run(ABC):
    """A collective that has been started. ``wait`` finishes it, after those that were started before it."""

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

    def text(self) -> str:
        """The collective in words, for errors."""
        return f"#{self.number} {self.kind.say(self.label).decode()}"

    def wait(self) -> None:
        """Wait until the collective is complete."""
        if not self.done:
            self._wait(self)


class DenseRun(Run):
    """A collective of plain elements that has been started."""

    __slots__ = ("_early", "_finish", "_kept", "_means", "_memory")
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

    @property
    def has_sent(self) -> bool:
        """Whether all messages of this collective are sent, so that the next collective may send messages."""
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
        kind, left = self.kind, self.kind.rest
        if self._early < kind.num_first:
            early = set(kind.ahead[: self._early])
            left = tuple(step for index, step in enumerate(kind.steps) if index not in early)
        self._do(left)
        for lane in kind.lanes:
            lane.settle(self.tag)
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
                keep(memory[into : into + end - begin], memory[begin:end])

    def _into(self, begin: int, end: int) -> Any:
        memory = self._memory
        return memory.into(begin, end) if isinstance(memory, Written) else memory[begin:end]


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
