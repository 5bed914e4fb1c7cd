"""A replica's part of ``server(...)``: it pushes gradients to servers, and pulls parameters before its next step."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox
from meshwright.consistency.base import Exchange
from meshwright.consistency.range_state import OperationKind
from meshwright.consistency.ranges import ElementSpan, key_ranges, parts
from meshwright.consistency.requests import Requests
from meshwright.errors import CheckpointError
from meshwright.ir.consistency import Server


class ServerExchange(Exchange[Server]):
    """It pushes gradients in ``updates``, so the local optimizer makes no step, and waits in ``begin``.

    A push also asks for the parameters: the server replies with them as soon as the rule permits the next step. So a
    replica has at most one push to each server without a reply, and waits for the reply before its next push.

    Attributes:
        hyperparameters: returns the hyperparameters of the trainer's optimizer (``server_state.hyperparameters``), so
            that schedules of the learning rate reach the servers. The trainer sets it.
        versions: for each range, the number of steps that its optimizer had made when the parameters were pulled.
    """

    def __init__(
        self, rule: Server, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
    ) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self.hyperparameters: Callable[[], str] | None = None
        self.versions = [0] * rule.servers
        self._requests = Requests(rule.copies, mailbox)
        self._has_loaded, self._num_reads = False, 0

    def join(self) -> None:
        """See ``Exchange``. The parameters arrive in ``begin``."""
        self._ask_all("join", self.mailbox.view.joined[self.mailbox.name])

    def begin(self, parameters: Sequence[Tensor]) -> bool:
        """Wait for the parameters that the last push asked for."""
        if not self.settle(parameters):
            self.staleness[0] += not self.clocks[self.replica]  # the first step
            return False
        return True

    def settle(self, parameters: Sequence[Tensor]) -> bool:
        """Wait for the parameters without beginning a step. ``begin`` then does nothing."""
        self._wait(self._requests.are_done, "the parameters of the servers")
        if self._has_loaded:
            self._has_loaded = False
            self._ask_all("pull", self._next_read())
        replies = self._requests.taken("push") or self._requests.taken("join") or self._requests.taken("pull")
        if not replies:
            return False
        known: dict[int, int] = {}
        behind = 0
        for index, letter in replies.items():
            for own, new in zip(parts(parameters, self._ranges(parameters)[index]), letter.tensors, strict=True):
                own.copy_(new)
            _, _, clock, self.versions[index], *pairs = letter.numbers
            behind = max(behind, clock - min(pairs[1::2]))
            for replica, other in zip(pairs[::2], pairs[1::2], strict=True):
                known[replica] = min(other, known.get(replica, other))
        self.clocks |= known
        self.clocks[self.replica] = max(letter.numbers[2] for letter in replies.values())
        self.staleness[behind] += 1
        return True

    def updates(self, gradients: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Push the gradients. The local optimizer gets no gradients."""
        clock, text = self.clocks[self.replica] + 1, self.hyperparameters() if self.hyperparameters else ""
        if self.rule.copies > 1:  # it may be necessary to send them again
            gradients = [tensor.clone() for tensor in gradients]
        for index, spans in enumerate(self._ranges(gradients)):
            self._requests.ask(index, "push", clock, tuple(parts(gradients, spans)), text)
        return iter(())

    def state(self) -> dict[str, Tensor]:
        """The state of all servers, after this replica's last push."""
        self._wait(self._requests.are_done, "the parameters of the servers")
        self._ask_all("save", self._next_read())
        saved = self._requests.taken("save")
        versions = [saved[index].numbers[3] for index in sorted(saved)]
        return {f"range {index}": letter.tensors[0] for index, letter in saved.items()} | {
            "versions": torch.tensor(versions)
        }

    def handover(self) -> dict[str, Tensor]:
        """An empty state: a replica that joins gets its parameters from the servers."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Send the servers a state from a checkpoint. Before the first push, a server takes it if it is newer than its
        own state.

        Raises:
            CheckpointError: the state is of another number of servers.
        """
        if not state:
            return
        if (saved := len(state) - 1) != self.rule.servers:
            raise CheckpointError(
                f"the checkpoint has the state of {saved} servers, the plan has {self.rule.servers}",
                where="consistency",
                remedy=f"go on with servers={saved}",
            )
        for index, version in enumerate(state["versions"].tolist()):
            self._requests.ask(index, "load", version, (state[f"range {index}"],))
        self._wait(self._requests.are_done, "the servers")
        self._requests.taken("load")
        self._has_loaded = True

    def take(self, letter: Letter) -> None:
        """See ``Exchange``."""
        if not self._requests.take(letter):
            super().take(letter)

    def _ask_all(self, kind: OperationKind, number: int) -> None:
        """Ask all ranges, and wait for their replies."""
        for index in range(self.rule.servers):
            self._requests.ask(index, kind, number)
        self._wait(self._requests.are_done, "the servers")

    def _next_read(self) -> int:
        """A number that distinguishes the replies to this read from other replies."""
        self._num_reads += 1
        return self._num_reads

    def _ranges(self, flats: Sequence[Tensor]) -> list[list[ElementSpan]]:
        return key_ranges([flat.numel() for flat in flats], self.rule.servers)
