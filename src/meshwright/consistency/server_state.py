"""The parameters and the optimizer of one range, on a server.

Gradients are used as late as possible: they wait until a reply to a replica is due. Then the optimizer makes one step
with the sum of all waiting gradients, added in the order of replicas. Under ``server(sync)``, the replies to all
replicas are due at the same time, so a step equals the step of synchronous training bit for bit. Under
``server(async)``, every push makes its own step.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.consistency.packing import packed, unpacked
from meshwright.consistency.range_state import Operation, OperationKind, RangeState, Reply, add_to, taken_mean
from meshwright.errors import OptimizerError
from meshwright.ir.consistency import Server
from meshwright.schedules.clocks import may_proceed

Make = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
"""A function that makes the optimizer over named one-dimensional pieces of parameters. The optimizer must update every
element independently of the others."""


class ServerState(RangeState):
    """The state of one range under ``server(...)``.

    Attributes:
        parameters: the elements of the range.
        optimizer: the optimizer of these elements, cut into pieces of parameters.
    """

    def __init__(
        self,
        rule: Server,
        num_replicas: int,
        parameters: Sequence[Tensor],
        pieces: Iterable[tuple[str, Tensor]],
        make: Make,
    ) -> None:
        """``parameters``: the elements of the range, which this state changes. ``pieces``: names, and views of these
        elements."""
        super().__init__(rule, num_replicas)
        self.parameters = list(parameters)
        named = [(name, nn.Parameter(piece.detach())) for name, piece in pieces]
        # torch.optim refuses an empty list
        self.optimizer = make(list(named) or [("nothing", nn.Parameter(torch.empty(0)))])
        self._pieces = [parameter for _, parameter in named]
        self._waiting: dict[int, list[Tensor]] = {}
        self._newest = (0, "")

    def apply(self, operation: Operation) -> list[Reply]:
        """See ``RangeState``."""
        if operation.kind != "load":
            return super().apply(operation)
        if not self.is_done(operation):
            self._take(unpacked(operation.tensors[0]))
        return self.again(operation)

    def is_done(self, operation: Operation) -> bool:
        """See ``RangeState``. A state from a checkpoint is loaded before the first push, if it is newer than this
        state."""
        if operation.kind == "load":
            return any(self.pushed.values()) or operation.number <= self.version
        return super().is_done(operation)

    def again(self, operation: Operation) -> list[Reply]:
        """See ``RangeState``."""
        replies = super().again(operation)
        if operation.kind == "save":
            return [reply._replace(tensors=(packed(self._saved()),)) for reply in replies]
        return replies

    def _add(self, replica: int, clock: int, gradients: Sequence[Tensor], text: str) -> None:
        add_to(self._waiting, replica, gradients)
        if clock > self._newest[0]:
            self._newest = (clock, text)

    def _settle(self) -> list[Reply]:
        due = [replica for replica in sorted(self.waits) if may_proceed(self.rule, self.clocks, replica)]
        if self._waiting and any(self.waits[replica][0] == "push" for replica in due):
            self._step()
        return [self._reply(replica, *self.waits.pop(replica)) for replica in due]

    def _step(self) -> None:
        if self._newest[1]:
            set_hyperparameters(self.optimizer, self._newest[1])
        mean = taken_mean(self._waiting, self.num_replicas)
        pieces = iter(self._pieces)
        for tensor in mean:
            begin = 0
            while begin < tensor.numel():
                piece = next(pieces)
                piece.grad = tensor[begin : begin + piece.numel()]
                begin += piece.numel()
        self.optimizer.step()
        for piece in self._pieces:
            piece.grad = None
        self.version += 1

    def _reply(self, replica: int, kind: OperationKind, number: int) -> Reply:
        return Reply(replica, self._numbers(replica, kind, number), tuple(self.parameters))

    def state(self) -> dict[str, Any]:
        """See ``RangeState``."""
        return super().state() | self._saved() | {"waiting": self._waiting, "newest": self._newest}

    def load_state(self, state: dict[str, Any]) -> None:
        """See ``RangeState``."""
        super().load_state(state)
        self._take(state)
        self._newest = state["newest"]
        self._waiting = {replica: list(gradients) for replica, gradients in state["waiting"].items()}

    def _saved(self) -> dict[str, Any]:
        """The part of the state that a checkpoint contains. Waiting gradients are left out: they belong to a step that
        their replica has not yet saved."""
        return {"parameters": self.parameters, "optimizer": self.optimizer.state_dict(), "version": self.version}

    def _take(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for mine, other in zip(self.parameters, saved["parameters"], strict=True):
                mine.copy_(other)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.version = saved["version"]


def hyperparameters(optimizer: Optimizer) -> str:
    """The numbers in an optimizer's parameter groups (learning rate, momentum, ...), as a text."""
    return json.dumps([{key: _numbers(value) for key, value in group.items() if _is_number(value)}
                       for group in optimizer.param_groups])  # fmt: skip


def set_hyperparameters(optimizer: Optimizer, text: str) -> None:
    """Give an optimizer the numbers that ``hyperparameters`` took from another one.

    Raises:
        OptimizerError: the optimizer has other parameter groups.
    """
    groups = json.loads(text)
    if len(groups) != len(optimizer.param_groups):
        raise OptimizerError(
            f"the optimizer of a server has {len(optimizer.param_groups)} parameter groups, that of replicas "
            f"{len(groups)}",
            where="optimizer",
            remedy="let its function make all groups for every list of parameters; a group may be empty",
        )
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_numbers(each) for each in value]
    return value.item() if isinstance(value, Tensor) else value
