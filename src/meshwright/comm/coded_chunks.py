"""Runs the steps of a coded collective on lanes, for codecs whose message sizes follow from the number of elements
alone.

A chunk is encoded immediately before it is put into a lane, and decoded directly from the lane's memory. The error of
each encoding is added to the residual of the rank that encodes. So errors are not lost: the received sums plus all new
residuals equal the contributions plus all old residuals.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.collective_kind import AHEAD, SLOTS, Named
from meshwright.comm.collective_run import Wait
from meshwright.comm.compiled import ADD, DECODE, DECODE_ADD, ENCODE, EXPECT, FORWARD, KEEP, PUT, compiled_coded
from meshwright.comm.exchange import CodedExchange, CodedRun
from meshwright.comm.transport.base import MESSAGE_BYTES, Lane
from meshwright.compress.coder import Coder, draw_of
from meshwright.schedules.collectives.coded import CodedSteps


class CodedStep(NamedTuple):
    """A :class:`~meshwright.comm.compiled.CompiledStep` with its lane. ``stored``: the position of its bytes in the
    store, if they are sent again. ``in_use``: the elements must be replaced by the decoded elements."""

    kind: int
    lane: Any
    begin: int
    end: int
    code: int
    stored: slice | None
    in_use: bool


class ChunksKind(Named):
    """The state that coded collectives of one kind share: this rank's steps, and working memory for one chunk."""

    def __init__(
        self, rank: int, coded: CodedSteps, coder: Coder, dtype: torch.dtype, lanes: Mapping[int, Lane], text: str
    ) -> None:
        super().__init__(text)
        self.rank, self.coder, self.dtype = rank, coder, dtype
        expects = any(lane.expects for lane in lanes.values())
        program = compiled_coded(
            rank, coded, MESSAGE_BYTES // dtype.itemsize, coder.chunk, AHEAD if expects else SLOTS - 1, expects=expects
        )
        again = {(step.code, step.begin) for step in program.steps if step.kind == FORWARD}
        places: dict[tuple[int, int], slice] = {}
        self.stored_bytes = 0
        for step in program.steps:
            key = (step.code, step.begin)
            if key in again and key not in places:
                end = self.stored_bytes + coder.num_bytes(step.end - step.begin)
                places[key], self.stored_bytes = slice(self.stored_bytes, end), end
        self.steps = tuple(
            CodedStep(
                step.kind, lanes.get(step.peer), step.begin, step.end, step.code, places.get((step.code, step.begin)),
                step.kind == ENCODE and coded.encodings[step.code].in_use,
            )
            for step in program.steps
        )  # fmt: skip
        self.ahead, self.rest_puts = program.ahead, program.rest_puts
        self.settles = tuple(lanes.values()) if expects else ()
        longest = max((step.end - step.begin for step in program.steps if step.code >= 0), default=0)
        with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
            self.message = torch.empty(coder.num_bytes(longest) if longest else 0, dtype=torch.uint8)
            self.decoded = torch.empty(longest, dtype=dtype)

    def run(self, exchange: CodedExchange, number: int, label: str, wait: Wait) -> "ChunksRun":
        """Start a collective of this kind. ``wait`` finishes it, after all collectives that were started earlier."""
        return ChunksRun(self, exchange, number, label, wait)


class ChunksRun(CodedRun):
    """A collective of this kind that has been started."""

    __slots__ = ("_early", "_stored", "_unsent")
    kind: "ChunksKind"

    def __init__(self, kind: "ChunksKind", exchange: CodedExchange, number: int, label: str, wait: Wait) -> None:
        super().__init__(kind, exchange, number, label, wait)
        self._early = 0
        self._unsent: Tensor | None = None
        self._stored: Tensor | None = None

    @property
    def has_sent(self) -> bool:
        """Whether all messages of this collective are sent, so that the next collective may send messages."""
        return self.done or (self._early == len(self.kind.ahead) and not self.kind.rest_puts)

    def begin(self) -> None:
        """Send the first messages, as far as the lanes have room."""
        if self._is_idle(len(self.kind.steps)):
            return
        exchange = self._prepared()
        for index in self.kind.ahead:
            step = self.kind.steps[index]
            if step.kind == EXPECT:
                self._expect(step, exchange)
            else:
                message = self._coded(step, exchange)
                if not step.lane.put_at_once(message, self.tag):
                    self._unsent = message.clone() if step.kind == ENCODE else None  # encoded only once
                    return
                self.sent_bytes += message.nbytes
            self._early += 1

    def go_on(self) -> None:
        """Run all remaining steps."""
        if self._is_idle(len(self.kind.steps)):
            return self._end()
        exchange, kind = self._prepared(), self.kind
        early = set(kind.ahead[: self._early])
        for index, step in enumerate(kind.steps):
            if index not in early:
                self._do(step, exchange)
        for lane in kind.settles:
            lane.settle(self.tag)
        self._end()
        self._stored = None

    def _prepare(self, exchange: CodedExchange) -> None:
        exchange.begin()
        if self.kind.stored_bytes:
            self._stored = torch.empty(self.kind.stored_bytes, dtype=torch.uint8)

    def _do(self, step: CodedStep, exchange: CodedExchange) -> None:
        what, lane, begin, end, _, stored, _ = step
        if what in (ENCODE, FORWARD, PUT):
            message = self._coded(step, exchange)
            lane.put(message, self.tag)
            self.sent_bytes += message.nbytes
        elif what == EXPECT:
            self._expect(step, exchange)
        else:
            elements = exchange.memory[begin:end]
            if what == ADD:
                elements.add_(lane.take(end - begin, elements.dtype, self.tag))
            elif what == KEEP:
                elements.copy_(lane.take(end - begin, elements.dtype, self.tag))
            else:
                message = lane.take(self.kind.coder.num_bytes(end - begin), torch.uint8, self.tag)
                begun = time.perf_counter()
                self.kind.coder.decode(message, elements, add=what == DECODE_ADD)
                self.coding_s += time.perf_counter() - begun
                if what == DECODE and stored is not None:
                    assert self._stored is not None
                    self._stored[stored].copy_(message)
            lane.release()

    def _expect(self, step: CodedStep, exchange: CodedExchange) -> None:
        """Announce a message to its lane. The lane only needs the largest size and dtype, to reserve room."""
        step.lane.expect(step.end - step.begin, exchange.memory)

    def _coded(self, step: CodedStep, exchange: CodedExchange) -> Tensor:
        """The message of a step that sends. Encoding adds the error to the residual."""
        what, _, begin, end, code, stored, in_use = step
        elements = exchange.memory[begin:end]
        if what == PUT:
            return elements
        if what == FORWARD:
            assert self._stored is not None
            assert stored is not None
            return self._stored[stored]
        if self._unsent is not None:
            message, self._unsent = self._unsent, None
            return message
        coder, residual, begun = self.kind.coder, exchange.residual, time.perf_counter()
        message = self.kind.message[: coder.num_bytes(end - begin)]
        coder.encode(elements, message, draw_of(exchange.draw, self.kind.rank, code, begin))
        if stored is not None:
            assert self._stored is not None
            self._stored[stored].copy_(message)
        if residual is not None or in_use:
            decoded = self.kind.decoded[: end - begin]
            coder.decode(message, decoded, add=False)
            if residual is not None:
                exchange.add_error(begin, elements.sub_(decoded))
            if in_use:
                elements.copy_(decoded)
        self.coding_s += time.perf_counter() - begun
        return message
