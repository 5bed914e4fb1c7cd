"""The tensors of a coded collective, and the part of its execution that all executors share."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.collective_run import CollectiveRun, Wait
from meshwright.compress.stream import Stream
from meshwright.errors import PlanError
from meshwright.schedules.collectives.steps import Span


class CodedExchange:
    """The tensors of one coded collective.

    ``memory``: the elements, which are summed in place. ``residual``: the errors of this rank's encodings, for the
    elements from ``offset`` on. None: errors are lost. ``before``: the residual of the previous step, which is added to
    the elements and does not change. None: it is in ``residual``. ``draw`` is the seed of the random numbers.
    ``finish`` is called at the end. ``chosen``: the elements that this rank has already chosen. The residual then holds
    the other elements.

    Raises:
        PlanError: the residual does not have the length or dtype of the elements that this rank contributes.
    """

    def __init__(
        self,
        memory: Tensor,
        residual: Tensor | None,
        draw: int,
        own: slice,
        finish: Callable[[], object] | None = None,
        chosen: Stream | None = None,
        before: Tensor | None = None,
    ) -> None:
        self.chosen = chosen
        self.memory, self.draw, self.finish, self.offset = memory, draw, finish, own.start
        self.own, self._own = (own.start, own.stop), memory[own]
        self.residual = None if residual is None else residual.view(-1)
        self._before = self.residual if before is None else before.view(-1)
        if self.residual is not None and _described(self.residual) != _described(self._own):
            raise PlanError(
                f"a residual of {_described(self.residual)} for {_described(self._own)}",
                where="coded collective",
                remedy="a residual belongs to one bucket of one model; begin with zeros for another",
            )

    def begin(self) -> None:
        """Add the residual to the elements. After that, the residual collects errors, beginning with 0."""
        if self.residual is not None and self._before is not None:
            self._own.add_(self._before)
            self._before = self.residual.zero_()

    def keep(self) -> None:
        """Leave the residual unchanged since the previous step."""
        if self.residual is not None and self._before is not None and self.chosen is None:
            self.residual.copy_(self._before)

    def before_of(self, span: Span) -> Tensor | None:
        """The residual of these elements, if it has not been added to them yet."""
        return None if self._before is None else self._before[span[0] - self.offset : span[1] - self.offset]

    def add_error(self, begin: int, error: Tensor) -> None:
        """Add the error of elements from ``begin`` on to the residual. Infinities and NaN are left out: they have
        already reached the result, and would otherwise stay in the residual for ever. ``error`` is overwritten."""
        residual = self.residual_of((begin, begin + error.numel()))
        if residual is not None:
            residual.add_(torch.nan_to_num_(error, 0, 0, 0))

    def add_errors(self, begin: int, errors: Stream) -> None:
        """Add the errors of a stream, whose elements begin at ``begin``, to the residual, as ``add_error`` does."""
        residual = self.residual_of((begin, begin + errors.length))
        if residual is not None:
            finite = Stream(errors.length, errors.indices, torch.nan_to_num_(errors.values, 0, 0, 0))
            finite.add_to(residual)

    def residual_of(self, span: Span) -> Tensor | None:
        """The residual of these elements, if there is one."""
        return None if self.residual is None else self.residual[span[0] - self.offset : span[1] - self.offset]


def _described(tensor: Tensor) -> str:
    """The length and dtype of a flat tensor as text."""
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"


class CodedRun(CollectiveRun):
    """A coded collective that has been started. ``sent_bytes`` counts the bytes of its messages. ``coding_s`` is the
    time, in seconds, in which this rank chose, encoded and decoded elements."""

    __slots__ = ("_begun", "_exchange", "coding_s", "sent_bytes")

    def __init__(self, kind: Any, exchange: CodedExchange, number: int, label: str, wait: Wait) -> None:
        super().__init__(kind, number, label, wait)
        self._exchange: CodedExchange | None = exchange
        self._begun = False
        self.sent_bytes, self.coding_s = 0, 0.0

    def _is_idle(self, num_steps: int) -> bool:
        """Whether no message is sent, so that elements and residual stay unchanged: there is only one rank, or no
        elements."""
        return not num_steps and (self._exchange is None or self._exchange.chosen is None)

    def _prepared(self) -> CodedExchange:
        """The exchange; the first call prepares it."""
        exchange = self._exchange
        assert exchange is not None, "a run ends once"
        if not self._begun:
            self._begun = True
            self._prepare(exchange)
        return exchange

    @abstractmethod
    def _prepare(self, exchange: CodedExchange) -> None:
        """Add the residual to the elements, and allocate memory for the run."""

    def _end(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            if not self._begun:
                exchange.keep()
            if exchange.finish is not None:
                exchange.finish()
        self.done = True
        self._exchange = None
