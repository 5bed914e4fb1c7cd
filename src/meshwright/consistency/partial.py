"""A replica's part of ``partial(...)``: eager collectives, whose late gradients count in a later step."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox
from meshwright.consistency.base import Exchange
from meshwright.consistency.requests import Requests
from meshwright.ir.consistency import Partial


class PartialExchange(Exchange[Partial]):
    """It pushes its gradients to the server, waits until the round of these gradients has closed, and yields the
    results of all rounds that have closed since its last step. So all replicas make the same steps, bit for bit; the
    clock of a replica is the number of rounds that it has applied.
    """

    def __init__(
        self, rule: Partial, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
    ) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self._requests = Requests(rule.copies, mailbox)

    def join(self) -> None:
        """From now on, the server keeps the rounds that living replicas may not have applied. So this replica can
        continue from the state of any of them."""
        self._requests.ask(0, "join", self.mailbox.view.joined[self.mailbox.name])
        self._wait(self._requests.are_done, "the server")
        self._requests.taken("join")

    def begin(self, parameters: Sequence[Tensor]) -> bool:
        """Act on the letters that have arrived; do not wait for any."""
        self._wait(lambda: True, "letters")
        return False

    def updates(self, gradients: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Push the gradients, wait for the round, and yield the results of all rounds that have closed."""
        clock = self.clocks[self.replica] + 1
        self._requests.ask(0, "push", clock, tuple(gradients))
        self._wait(self._requests.are_done, f"round {clock}")
        letter = self._requests.taken("push")[0]
        _, _, _, num_closed, *pairs = letter.numbers
        self.clocks |= dict(zip(pairs[::2], pairs[1::2], strict=True))
        self.staleness[num_closed - min([*pairs[1::2], num_closed])] += 1
        count = len(gradients)
        for number in range(clock, num_closed + 1):
            self.clocks[self.replica] = number
            yield letter.tensors[(number - clock) * count : (number - clock + 1) * count]

    def end(self, parameters: Sequence[Tensor]) -> bool:
        """Do nothing: ``updates`` has already increased the clock."""
        return False

    def handover(self) -> dict[str, Tensor]:
        """The number of rounds that this replica has applied."""
        return {"round": torch.tensor(self.clocks[self.replica])}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the round in the state that a living replica has handed over. After a checkpoint, rounds are
        counted from the start again, and pending gradients are lost."""
        self.clocks[self.replica] = int(state.get("round", 0))

    def take(self, letter: Letter) -> None:
        """See ``Exchange``."""
        if not self._requests.take(letter):
            super().take(letter)
