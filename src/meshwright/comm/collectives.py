"""Runs the steps of collectives among the ranks of a group: one executor for every kind of lane."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from meshwright.comm import coded
from meshwright.comm.collective_kind import UNKNOWN, Kind
from meshwright.comm.collective_run import CollectiveRun, DenseRun, Written
from meshwright.comm.exchange import CodedExchange, CodedRun
from meshwright.comm.transport.base import Lane, Work
from meshwright.comm.transport.shared_memory import ENDED, SharedMemory
from meshwright.compress.stream import Stream
from meshwright.errors import MeshwrightError, RankError
from meshwright.ir.codec import Codec
from meshwright.schedules.collectives import operations

HEAR_S = 1.0
"""A rank that gives up waits up to this many seconds for reports of other ranks, which learn of the failure only now.
"""

KINDS = 2048
"""Upper limit on the kinds of collectives that a ``Collectives`` caches."""

_Table = tuple[tuple[int, ...], ...]
_Key = tuple[str, str, int, torch.dtype, str, int, _Table | None]
"""Key of a kind of collective: operation, algorithm, length, dtype, reduction, root, counts of parts."""


class Collectives:
    """One rank's collectives in a group. All ranks of the group must start the same collectives in the same order.

    Starting a collective sends the first round's messages as far as the lanes have room. Waiting runs the remaining
    steps, so no extra thread is needed. Waiting for one collective also finishes all collectives that were started
    before it.
    """

    def __init__(self, rank: int, num_ranks: int, lanes: Mapping[int, Lane], name: str = "") -> None:
        self.rank, self.num_ranks, self._lanes, self._name = rank, num_ranks, lanes, name or f"rank {rank}"
        self._each = tuple(lanes.values())
        self._expects = any(lane.expects for lane in self._each)
        self._all_shared = all(isinstance(lane, SharedMemory) for lane in self._each)
        for lane in lanes.values():
            if isinstance(lane, SharedMemory):
                lane.look = self._look
        self._open: deque[CollectiveRun] = deque()
        self._turn = threading.Lock()  # held while a thread runs steps
        self._kinds: dict[_Key, Kind] = {}
        self._coded_kinds: dict[coded.Key, coded.CodedKind] = {}
        self._number, self._description = 0, b""
        self._failed: MeshwrightError | None = None

    # --- operations --------------------------------------------------------------------------------------------------

    def all_reduce(self, value: Tensor, op: str = "sum", algorithm: str = "butterfly", label: str = "") -> Work:
        """Reduce a contiguous tensor in place."""
        flat, length = value if value.dim() == 1 else value.view(-1), value.numel()
        if algorithm not in operations.IN_TURN:
            return self._start("all_reduce", algorithm, length, flat, op, label)
        memory = flat.new_empty(2 * length)
        memory[:length] = flat
        return self._start("all_reduce", algorithm, length, memory, op, label, lambda: flat.copy_(memory[length:]))

    def reduce_scatter(
        self, value: Tensor, into: Tensor, op: str = "sum", algorithm: str = "star", label: str = ""
    ) -> Work:
        """Reduce a contiguous tensor ``[size, ...]`` and write this rank's row to ``into``; ``value`` is unchanged."""
        flat, part = value.view(-1), into.view(-1)
        length, begin, end = flat.numel(), self.rank * part.numel(), (self.rank + 1) * part.numel()
        kind = self._kind(("reduce_scatter", algorithm, length, value.dtype, op, 0, None))
        if all(begin <= first and last <= end for first, last in kind.writes):
            # The steps write only this rank's part. It is summed directly in ``into``, so that the rest needs no copy.
            part.copy_(flat[begin:end])
            return self._start("reduce_scatter", algorithm, length, Written(flat, part, begin), op, label)
        memory = flat.clone()
        reduced = memory[begin:end]
        return self._start("reduce_scatter", algorithm, length, memory, op, label, lambda: part.copy_(reduced))

    def all_gather(self, value: Tensor, into: Tensor, algorithm: str = "star", label: str = "") -> Work:
        """Collect every rank's ``value`` in ``into``, a contiguous tensor ``[size, ...]``."""
        into[self.rank].copy_(value)
        return self._start("all_gather", algorithm, into.numel(), into.view(-1), "sum", label)

    def all_gather_parts(self, memory: Tensor, counts: Sequence[int], algorithm: str = "star", label: str = "") -> Work:
        """Collect the parts of a flat tensor in place. The part of rank r has ``counts[r]`` elements, and follows the
        parts of the ranks before it. All ranks pass the same counts."""
        return self._start("all_gather", algorithm, memory.numel(), memory, "sum", label, counts=(tuple(counts),))

    def reduce_scatter_parts(
        self, memory: Tensor, counts: Sequence[int], algorithm: str = "star", label: str = "", op: str = "sum"
    ) -> Work:
        """Reduce a flat tensor in place. Rank r gets the results of its part, which has ``counts[r]`` elements and
        follows the parts of the ranks before it. Its other elements are undefined afterwards. All ranks pass the same
        counts."""
        return self._start("reduce_scatter", algorithm, memory.numel(), memory, op, label, counts=(tuple(counts),))

    def broadcast(self, value: Tensor, root: int = 0, algorithm: str = "tree", label: str = "") -> Work:
        """Copy the contiguous tensor of rank ``root`` to every rank."""
        return self._start("broadcast", algorithm, value.numel(), value.view(-1), "sum", label, root=root)

    def reduce(self, value: Tensor, root: int = 0, op: str = "sum", algorithm: str = "tree", label: str = "") -> Work:
        """Reduce a contiguous tensor in place on ``root``. On other ranks, its elements are undefined afterwards."""
        return self._start("reduce", algorithm, value.numel(), value.view(-1), op, label, root=root)

    def gather(self, value: Tensor, into: Tensor, root: int = 0, algorithm: str = "tree", label: str = "") -> Work:
        """Collect every rank's ``value`` in ``into`` on rank ``root``, a contiguous tensor ``[size, ...]``. The other
        ranks need ``into`` as working memory."""
        into[self.rank].copy_(value)
        return self._start("gather", algorithm, into.numel(), into.view(-1), "sum", label, root=root)

    def scatter(self, value: Tensor, root: int = 0, algorithm: str = "tree", label: str = "") -> Work:
        """Copy row r of ``value`` (contiguous, ``[size, ...]``) on rank ``root`` to row r of ``value`` on each rank
        r."""
        return self._start("scatter", algorithm, value.numel(), value.view(-1), "sum", label, root=root)

    def all_to_all(
        self, value: Tensor, into: Tensor, counts: operations.Counts, algorithm: str = "partitioned", label: str = ""
    ) -> Work:
        """Send ``counts[rank][j]`` elements of a flat ``value`` to each rank j. Write the received elements to
        ``into``, ordered by sender. All ranks pass the same counts."""
        table = tuple(map(tuple, counts))
        return self._all_to_all(value, into, table, sum(map(sum, table)), algorithm, label)

    def exchange_parts(
        self, value: Tensor, into: Tensor, sent: Sequence[int], received: Sequence[int], label: str = ""
    ) -> Work:
        """An all-to-all in which each rank knows only the lengths of its own messages. ``sent[j]`` elements of the
        flat tensor ``value`` go to rank j, and ``received[j]`` elements of ``into`` come from rank j."""
        none = [0] * self.num_ranks
        rows = [list(none) for _ in range(self.num_ranks)]
        for other, count in enumerate(received):
            rows[other][self.rank] = count
        rows[self.rank] = list(sent)
        return self._all_to_all(value, into, tuple(map(tuple, rows)), UNKNOWN, "partitioned", label)

    def _all_to_all(self, value: Tensor, into: Tensor, table: _Table, length: int, algorithm: str, label: str) -> Work:
        if value.untyped_storage().data_ptr() == into.untyped_storage().data_ptr():
            value = value.clone()
        memory = Written(value, into, max(map(sum, table)))
        return self._start("all_to_all", algorithm, length, memory, "sum", label, counts=table)

    def barrier(self, algorithm: str = "dissemination", label: str = "") -> None:
        """Wait until all ranks have reached the barrier."""
        self._start("barrier", algorithm, 0, torch.empty(0, dtype=torch.uint8), "sum", label).wait()

    # --- coded operations (decision 0047) ----------------------------------------------------------------------------

    def coded_all_reduce(
        self,
        value: Tensor,
        residual: Tensor | None,
        codec: Codec,
        draw: int,
        algorithm: str = "ring",
        label: str = "",
        chosen: Stream | None = None,
        before: Tensor | None = None,
    ) -> CodedRun:
        """Sum a contiguous tensor in place, in coded form. All ranks end with the same bits.

        ``residual`` has the shape of ``value``. It is added to the value, and then receives the errors of this rank's
        encodings, so that the sum of all values and residuals does not change. None: errors are lost. ``before``: a
        tensor that is added instead of the residual. The residual is then only written. ``draw`` and the rank are the
        seed of the random numbers. With a single rank, nothing happens.

        ``chosen``: for codecs that select elements, the elements that this rank has already chosen from value and
        residual. The residual then holds the other elements, and the value is only written. Without ``chosen``, ranks
        choose before their first coded message. In a hierarchical algorithm, they choose from the sum of a box.

        Raises:
            ScheduleError: the algorithm cannot carry the codec.
            PlanError: the residual has another length or dtype.
        """
        flat = value.view(-1)
        return self._start_coded("all_reduce", algorithm, flat, residual, codec, draw, label, None, chosen, before)

    def coded_reduce_scatter(
        self,
        value: Tensor,
        into: Tensor,
        residual: Tensor | None,
        codec: Codec,
        draw: int,
        algorithm: str = "star",
        label: str = "",
        chosen: Stream | None = None,
        before: Tensor | None = None,
    ) -> CodedRun:
        """Sum a contiguous tensor ``[size, ...]`` in coded form, and write this rank's row to ``into``; ``value`` is
        unchanged. The result is not encoded. ``residual`` has the shape of ``value``. ``residual``, ``chosen`` and
        ``before`` have the same meaning as in ``coded_all_reduce``."""
        memory, part = value.view(-1).clone(), into.view(-1)
        row = memory[self.rank * part.numel() : (self.rank + 1) * part.numel()]
        finish = partial(part.copy_, row)
        return self._start_coded(
            "reduce_scatter", algorithm, memory, residual, codec, draw, label, finish, chosen, before
        )

    def coded_all_gather(
        self,
        value: Tensor,
        into: Tensor,
        residual: Tensor | None,
        codec: Codec,
        draw: int,
        algorithm: str = "star",
        label: str = "",
    ) -> CodedRun:
        """Collect every rank's ``value``, coded and decoded, in ``into``, a contiguous tensor ``[size, ...]``.

        ``value`` is unchanged. ``residual`` has the shape of ``value``, and the same meaning as in
        ``coded_all_reduce``."""
        into[self.rank].copy_(value)
        flat = into.view(-1)
        return self._start_coded("all_gather", algorithm, flat, residual, codec, draw, label)

    # --- running -----------------------------------------------------------------------------------------------------

    def _start_coded(
        self,
        operation: str,
        algorithm: str,
        memory: Tensor,
        residual: Tensor | None,
        codec: Codec,
        draw: int,
        label: str,
        finish: Callable[[], object] | None = None,
        chosen: Stream | None = None,
        before: Tensor | None = None,
    ) -> CodedRun:
        if self._failed is not None:
            raise self._failed
        own = slice(0, memory.numel())
        if operation == "all_gather":
            part = memory.numel() // self.num_ranks
            own = slice(self.rank * part, (self.rank + 1) * part)
        exchange = CodedExchange(memory, residual, draw, own, finish, chosen, before)
        key = (operation, algorithm, memory.numel(), memory.dtype, codec, chosen is not None)
        kind = self._coded_kinds.get(key)
        if kind is None:
            kind = self._coded_kinds[key] = coded.kind_of(self.rank, self.num_ranks, self._lanes, *key)
        self._number = number = self._number + 1
        run = kind.run(exchange, number, label, self._finish)
        self._begin(run)
        return run

    def _kind(self, key: _Key) -> Kind:
        """The state that all collectives with this key share; the first call makes it."""
        kind = self._kinds.get(key)
        if kind is None:
            operation, algorithm, length, dtype, op, root, counts = key
            if len(self._kinds) >= KINDS:
                self._kinds.clear()
            steps = operations.build(operation, algorithm, self.num_ranks, max(length, 0), root, counts)
            how = {"expects": self._expects, "in_arrays": self._all_shared}
            kind = self._kinds[key] = Kind(self.rank, steps, dtype, op, root, self._lanes, **how, length=length)
        return kind

    def _start(
        self,
        operation: str,
        algorithm: str,
        length: int,
        memory: Tensor | Written,
        op: str,
        label: str,
        finish: Callable[[], object] | None = None,
        counts: _Table | None = None,
        root: int = 0,
    ) -> Work:
        if self._failed is not None:
            raise self._failed
        key = (operation, algorithm, length, memory.dtype, op, root, counts)
        kind = self._kinds.get(key) or self._kind(key)
        self._number = number = self._number + 1
        return self._begin(DenseRun(self._finish, kind, memory, number, label, finish))

    def _begin(self, run: CollectiveRun) -> Work:
        """Report the collective, and send its first messages unless earlier collectives have messages to send."""
        kind, label, number = run.kind, run.label, run.number
        words = kind.descriptions.get(label) or kind.say(label)
        with self._turn:
            if words is not self._description:
                self._description = words
                for lane in self._each:
                    lane.tell(number, words)
            if not self._open or all(earlier.has_sent for earlier in self._open):
                try:
                    run.begin()
                except MeshwrightError as error:
                    self._fail(error, run)
            self._open.append(run)
        return run

    def _finish(self, run: CollectiveRun) -> None:
        with self._turn:
            if self._failed is not None and not run.done:
                raise self._failed
            while not run.done:
                first = self._open[0]
                try:
                    first.go_on()
                except MeshwrightError as error:
                    self._fail(error, first)
                self._close_first()

    def _close_first(self) -> None:
        run = self._open.popleft()
        for lane in self._each:
            lane.finished(run.number)

    @property
    def is_under_way(self) -> bool:
        """Whether collectives have been started that ``move`` can advance."""
        return self._all_shared and bool(self._open) and self._failed is None

    def move(self) -> bool:
        """Run steps of the collectives that have been started, as far as they need not wait, unless a thread runs one
        now. Returns whether any step was run."""
        if not self.is_under_way or not self._turn.acquire(blocking=False):
            return False
        try:
            moved = False
            while self._open and self._failed is None:
                run = self._open[0]
                try:
                    moved |= run.advance()
                except MeshwrightError as error:
                    self._fail(error, run)
                if not run.done:
                    break
                self._close_first()
            return moved
        finally:
            self._turn.release()

    def _fail(self, error: MeshwrightError, run: CollectiveRun) -> NoReturn:
        """Raise an error, now and for every later collective, because it is unknown which messages are still on their
        way."""
        self._failed = self._report(error, run)
        raise self._failed from error

    def _look(self) -> None:
        """Raise an error if any rank prevents the first open collective from finishing. Check all ranks of the
        group."""
        number = self._open[0].number if self._open else self._number
        troubles = [reason for lane in self._lanes.values() if (reason := lane.trouble(number))]
        for trouble in sorted(troubles, key=lambda trouble: trouble.problem != ENDED):
            raise trouble.error()

    def _report(self, error: MeshwrightError, run: CollectiveRun) -> MeshwrightError:
        """Tell the other ranks of the failure. Returns the error, extended by the current collective of every rank."""
        words = run.kind.say(run.label) + f", and has given up: {error.where}: {error.problem}".encode()
        for lane in self._each:
            lane.give_up(run.number, words, error.where)
        lines = [error.problem, f"{self._name} is in {run.text()}", *self._heard()]
        kind = type(error) if isinstance(error, RankError) else RankError
        return kind("\n     ".join(lines), where=error.where, remedy=error.remedy)

    def _heard(self) -> list[str]:
        """One line for each rank that reports. Reports by torch.distributed are awaited for up to ``HEAR_S``
        seconds."""
        deadline = time.monotonic() + (HEAR_S if self._expects else 0)
        while True:
            lines = [lane.last_report() for _, lane in sorted(self._lanes.items())]
            if all(lines) or time.monotonic() >= deadline:
                return [line for line in lines if line]
            time.sleep(HEAR_S / 50)
