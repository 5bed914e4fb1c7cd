"""Rules under which replicas make several independent steps and then average: ``local`` and ``diloco``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox
from meshwright.consistency.mean import Mean
from meshwright.consistency.peers import PeerExchange, R
from meshwright.consistency.rounds import RoundMean, segment
from meshwright.ir.consistency import DiLoCo, Local
from meshwright.schedules.clocks import fragment_due


class MeanExchange(PeerExchange[R]):
    """A rule that takes means over replicas."""

    def __init__(
        self, rule: R, mailbox: Mailbox, replica: int, num_replicas: int, *, codec: str = "", wait_s: float = WAIT_S
    ) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self.mean = Mean(mailbox, replica, codec)

    def join(self) -> None:
        """See ``Exchange``."""
        super().join()
        self.mean.join()

    def finish(self, number: int, clock: int) -> RoundMean:
        """Wait for the mean that replicas begin at a clock."""
        self._wait(lambda: self.mean.is_finished(number), f"mean {number} over the replicas")
        result = self.mean.claim(number)
        for member in result.members:
            self.heard(member, clock)
        return result

    def take(self, letter: Letter) -> None:
        """See ``Exchange``."""
        if not self.mean.take(letter):
            super().take(letter)

    def view_changed(self) -> None:
        """See ``PeerExchange``."""
        self.mean.look()

    def state(self) -> dict[str, Tensor]:
        """See ``Exchange``."""
        return super().state() | {f"mean:{name}": tensor for name, tensor in self.mean.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``."""
        super().load_state(state)
        own = {name.removeprefix("mean:"): tensor for name, tensor in state.items() if name.startswith("mean:")}
        self.mean.load_state(own)


class LocalExchange(MeanExchange[Local]):
    """``local(H)``: the mean of all parameters after every H steps."""

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """See ``PeerExchange``."""
        clock = self.clocks[self.replica]
        if clock % self.rule.every:
            return False
        result = self.finish(self.mean.start(parameters), clock)
        for parameter, mean in zip(parameters, result.tensors, strict=True):
            parameter.copy_(mean)
        return True


class DiLoCoExchange(MeanExchange[DiLoCo]):
    """``diloco(H)``: an outer optimizer makes a step with the mean change of the replicas' parameters.

    When it is a fragment's turn, a replica sends d_i = old - own, where old are the outer optimizer's parameters.
    ``delay`` steps later, all replicas make the step of ``torch.optim.SGD(lr, momentum, nesterov=True)`` with the mean
    d: b <- m b + d, old <- old - lr (d + m b). The replica's own parameters become merge * own + (1 - merge) * old. All
    replicas have the same bits of old and b.

    Fragment f of F consists of part f of F equal parts of each flat tensor.

    Attributes:
        old: the outer optimizer's parameters.
        momentum: the outer optimizer's b; empty without momentum.
    """

    def __init__(
        self, rule: DiLoCo, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
    ) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, codec=rule.codec, wait_s=wait_s)
        self.old: list[Tensor] = []
        self.momentum: list[Tensor] = []
        self._sent: list[tuple[int, int]] = []
        """The clocks and the numbers of the rounds that are not yet applied."""

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``. The outer optimizer's parameters start at the replicas' parameters, which are equal."""
        if not self.old:
            self.old = [parameter.clone() for parameter in parameters]
            self.momentum = [torch.zeros_like(parameter) for parameter in parameters if self.rule.momentum]

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """See ``PeerExchange``."""
        clock = self.clocks[self.replica]
        changed = self._apply_due(parameters)
        if (fragment := fragment_due(self.rule, clock)) is not None:
            pairs = zip(self._fragment(self.old, fragment), self._fragment(parameters, fragment), strict=True)
            number = self.mean.start([old - own for old, own in pairs], fragment)
            self._sent.append((clock, number))
        return self._apply_due(parameters) or changed

    def _apply_due(self, parameters: Sequence[Tensor]) -> bool:
        """Make the outer steps that are due."""
        changed = False
        while self._sent and self._sent[0][0] + self.rule.delay <= self.clocks[self.replica]:
            clock, number = self._sent.pop(0)
            fragment = fragment_due(self.rule, clock)
            assert fragment is not None
            self._outer_step(parameters, fragment, self.finish(number, clock).tensors)
            changed = True
        return changed

    def _outer_step(self, parameters: Sequence[Tensor], fragment: int, means: Sequence[Tensor]) -> None:
        rule, olds = self.rule, self._fragment(self.old, fragment)
        momenta = self._fragment(self.momentum, fragment) if rule.momentum else [None] * len(olds)
        for own, old, momentum, mean in zip(self._fragment(parameters, fragment), olds, momenta, means, strict=True):
            step = mean.to(old.dtype)
            if momentum is not None:
                momentum.mul_(rule.momentum).add_(step)
                step = step + rule.momentum * momentum
            old.sub_(step, alpha=rule.lr)
            if rule.merge:
                own.mul_(rule.merge).add_(old, alpha=1 - rule.merge)
            else:
                own.copy_(old)

    def _fragment(self, flats: Sequence[Tensor], fragment: int) -> list[Tensor]:
        """A fragment's part of each flat tensor."""
        bounds = [segment(len(flat), fragment, self.rule.fragments) for flat in flats]
        return [flat[begin:end] for flat, (begin, end) in zip(flats, bounds, strict=True)]

    def state(self) -> dict[str, Tensor]:
        """See ``Exchange``."""
        lists = {"old": self.old, "momentum": self.momentum}
        result = {f"{name}.{index}": flat for name, flats in lists.items() for index, flat in enumerate(flats)}
        return super().state() | result | {"sent": torch.tensor(self._sent, dtype=torch.int64).reshape(-1, 2)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``."""
        super().load_state(state)
        count = sum(name.startswith("old.") for name in state)
        self.old = [state[f"old.{index}"].clone() for index in range(count)]
        self.momentum = [state[f"momentum.{index}"].clone() for index in range(count if self.rule.momentum else 0)]
        self._sent = [(int(clock), int(number)) for clock, number in state["sent"]]
