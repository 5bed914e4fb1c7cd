"""The rule ``easgd(..., mode=async)``: each replica exchanges with the center on its own, without waiting for other
replicas.

The center is kept by the two replicas that have lived longest, a head and a tail, so that either of them may die:

    replica --- x_i ---> head            e = alpha (x_i - c), c <- c + e
                         head --- e ---> tail       c <- c + e
    replica <------------- e ----------- tail       x_i <- x_i - e
    replica --- got it > head --- got it > tail

Each replica numbers its exchanges (the serial number), and each exchange is applied once. Head and tail remember e
until the replica has received it. If the head dies, the replica asks the next head again. That head answers with the e
that it remembers, if any. If the tail dies, the head sends the next tail the center and every e that it remembers, and
the next tail answers with them. The sum of all x_i and c, minus every e that is still on its way, is conserved. If head
and tail die before a new tail has the center, the center starts again at the new head's parameters.

No replica waits: it subtracts an answer at the end of the step in which the answer arrives. The optimizer has made
steps in the meantime; e belongs to the x_i that was sent. A replica sends its next request only after it has received
the answer.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, replica_name, replica_number
from meshwright.consistency.peers import PeerExchange
from meshwright.errors import LostRankError
from meshwright.ir.consistency import ElasticAverage

log = logging.getLogger("meshwright")


class ElasticCenterExchange(PeerExchange[ElasticAverage]):
    """``easgd(alpha, every=H, mode=async)``.

    Attributes:
        center: c, for each flat tensor; empty if this replica does not keep it.
        applied: maps replicas to the serial number of their last exchange with this replica's center.
    """

    waits_for_all = False

    def __init__(
        self, rule: ElasticAverage, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
    ) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self.center: list[Tensor] = []
        self.applied: dict[int, int] = {}
        self._parameters: Sequence[Tensor] = ()
        self._keepers = self._first_keepers = self._oldest()
        self._tail = self._life_of_tail()
        """The tail that has the center, if this replica is the head."""
        self._serial = mailbox.view.joined[mailbox.name] << 32
        self._request: list[Tensor] | None = None
        """This replica's parameters in the current exchange."""
        self._answer_come: Sequence[Tensor] | None = None
        self._unconfirmed: dict[tuple[int, int], list[Tensor]] = {}
        """On head and tail: the changes that replicas have not confirmed, by replica and serial number."""
        self._early: list[Letter] = []
        """Requests to this replica as head that arrived before the view in which it is the head."""

    # --- as a replica ------------------------------------------------------------------------------------------------

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``. The center starts at the replicas' parameters, which are equal."""
        begins, self._parameters = not self._parameters, parameters
        if begins:
            if self.replica in self._first_keepers and not self.has_joined and not self.center:
                self.center = [parameter.clone() for parameter in parameters]
            self._keep()
            if self._request is not None:  # of a run that continues from a checkpoint
                self._ask()

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``."""
        clock = self.clocks[self.replica]
        if clock and clock % self.rule.every == 0 and self._request is None:
            self._serial += 1
            self._request = [parameter.clone() for parameter in parameters]
            self._ask()

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """See ``PeerExchange``."""
        if self._answer_come is None:
            return False
        for parameter, change in zip(parameters, self._answer_come, strict=True):
            parameter.sub_(change)
        self._request = self._answer_come = None
        return True

    def leave(self) -> None:
        """See ``Exchange``. First this replica's last exchange is completed."""
        with suppress(LostRankError):
            self._wait(lambda: self._request is None or self._answer_come is not None, "the last change of the center")
        self.mix(self._parameters)
        super().leave()

    def state(self) -> dict[str, Tensor]:
        """See ``Exchange``. Replicas save their states at different moments. An exchange may be in the saved center but
        not in the replica's saved state. It is then answered again, if the head or tail still remembered it when it
        saved its state."""
        pairs = [[replica, serial] for replica, serial in self.applied.items()]
        result = {"serial": torch.tensor([self._serial]), "applied": torch.tensor(pairs).reshape(-1, 2).long()}
        lists = {"center": self.center, "request": self._request or []}
        lists |= {f"unconfirmed.{replica}.{serial}": change for (replica, serial), change in self._unconfirmed.items()}
        return result | {
            f"{name}.{index}": flat.clone() for name, flats in lists.items() for index, flat in enumerate(flats)
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``. A replica that joins does not keep the center."""
        if not self.has_joined:
            lists: dict[str, list[Tensor]] = {}
            for name in sorted(state, key=lambda name: (len(name), name)):
                if (stem := name.rpartition(".")[0]) != "":
                    lists.setdefault(stem, []).append(state[name].clone())
            self._serial, self._request = int(state["serial"]), lists.pop("request", None)
            self.center, self._tail = lists.pop("center", []), None
            self.applied = {int(replica): int(serial) for replica, serial in state["applied"]}
            self._unconfirmed = {
                (int(replica), int(serial)): change
                for (_, replica, serial), change in ((stem.split("."), change) for stem, change in lists.items())
            }
        super().load_state(state)

    def _ask(self) -> None:
        assert self._request is not None
        if self._is_head:
            self._exchange(self.replica, self._serial, self._request)
        else:
            self.mailbox.send(replica_name(self._keepers[0]), "elastic?", (self._serial,), self._request)

    # --- as head or tail ---------------------------------------------------------------------------------------------

    @property
    def _is_head(self) -> bool:
        return self._keepers[0] == self.replica

    def _oldest(self) -> list[int]:
        """The head and the tail: the two members that joined first, by number."""
        joined = self.mailbox.view.joined
        return sorted(self.members, key=lambda member: (joined[replica_name(member)], member))[:2]

    def take(self, letter: Letter) -> None:
        """See ``Exchange``."""
        match letter.kind:
            case "elastic?" if self._is_head and self.center:
                self._exchange(replica_number(letter.sender), letter.numbers[0], letter.tensors)
            case "elastic?":
                self._early.append(letter)
            case "elastic+":
                self._pass_on(letter.numbers[0], letter.numbers[1], letter.tensors)
            case "elastic.":
                self._confirm(letter.numbers[0], letter.numbers[1])
            case "elastic!":
                self._answered_with(letter.numbers[0], letter.tensors)
            case "center" if not self._is_head:  # otherwise the last head has died, and the center has started again
                self._take_center(letter)
            case _:
                super().take(letter)

    def view_changed(self) -> None:
        """See ``PeerExchange``."""
        head, self._keepers = self._keepers[0], self._oldest()
        self._keep()
        if self._request is not None and self._answer_come is None and head != self._keepers[0]:
            self._ask()

    def _life_of_tail(self) -> tuple[int, int] | None:
        """The tail and the epoch in which it joined."""
        if len(self._keepers) < 2:
            return None
        return self._keepers[1], self.mailbox.view.joined[replica_name(self._keepers[1])]

    def _keep(self) -> None:
        """As head in a new view: make sure that the tail has the center."""
        if not self._is_head or not self._parameters:
            return
        if not self.center:
            log.warning("the center of %s was lost: it begins again at the parameters of replica %d",
                        self.rule, self.replica)  # fmt: skip
            self.center = [parameter.clone() for parameter in self._parameters]
        if (tail := self._life_of_tail()) != self._tail:
            self._tail = tail
            if tail is not None:
                pairs = [*self.applied.items(), *self._unconfirmed]
                numbers = (len(self.center), *(number for pair in pairs for number in pair))
                changes = [each for change in self._unconfirmed.values() for each in change]
                self.mailbox.send(replica_name(tail[0]), "center", numbers, [*self.center, *changes])
            for (replica, serial), change in list(self._unconfirmed.items()) if tail is None else ():
                self._reply(replica, serial, change)
        early, self._early = self._early, []
        for letter in early:
            self.take(letter)

    def _take_center(self, letter: Letter) -> None:
        """As the next tail: take the center, and send the changes that replicas have not confirmed."""
        count, *numbers = letter.numbers
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        self.center, changes = list(letter.tensors[:count]), letter.tensors[count:]
        known = len(pairs) - len(changes) // count
        self.applied = dict(pairs[:known])
        parts = [list(changes[begin : begin + count]) for begin in range(0, len(changes), count)]
        self._unconfirmed = dict(zip(pairs[known:], parts, strict=True))
        for (replica, serial), change in list(self._unconfirmed.items()):
            self._reply(replica, serial, change)

    def _exchange(self, replica: int, serial: int, values: Sequence[Tensor]) -> None:
        """As head: move the center and a replica's parameters toward each other, or send the earlier answer again."""
        if (change := self._unconfirmed.get((replica, serial))) is not None:
            self._reply(replica, serial, change)
        elif self.applied.get(replica, 0) >= serial:  # it was forgotten before a checkpoint: continue without it
            self._reply(replica, serial, [torch.zeros_like(own) for own in values])
        else:
            change = [(own - center) * self.rule.alpha for own, center in zip(values, self.center, strict=True)]
            self._pass_on(replica, serial, change)

    def _pass_on(self, replica: int, serial: int, change: Sequence[Tensor]) -> None:
        """Change the center, and tell the tail; on the tail, answer the replica."""
        if self.applied.get(replica, 0) >= serial or not self.center:
            return
        self.applied[replica] = serial
        for center, each in zip(self.center, change, strict=True):
            center.add_(each)
        # A replica sends its next request only after it has received the last answer.
        self._unconfirmed = {key: value for key, value in self._unconfirmed.items() if key[0] != replica}
        self._unconfirmed[replica, serial] = list(change)
        if self._is_head and len(self._keepers) > 1:
            self.mailbox.send(replica_name(self._keepers[1]), "elastic+", (replica, serial), change)
        else:
            self._reply(replica, serial, change)

    def _reply(self, replica: int, serial: int, change: Sequence[Tensor]) -> None:
        if replica == self.replica:
            self._answered_with(serial, change)
        else:
            self.mailbox.send(replica_name(replica), "elastic!", (serial,), change)

    def _answered_with(self, serial: int, change: Sequence[Tensor]) -> None:
        """As a replica: take the answer."""
        if serial == self._serial and self._request is not None and self._answer_come is None:
            self._answer_come = change
            if self._is_head:
                self._confirm(self.replica, serial)
            else:
                self.mailbox.send(replica_name(self._keepers[0]), "elastic.", (self.replica, serial))

    def _confirm(self, replica: int, serial: int) -> None:
        """On head and tail: a replica has received its answer."""
        self._unconfirmed.pop((replica, serial), None)
        if self._is_head and len(self._keepers) > 1:
            self.mailbox.send(replica_name(self._keepers[1]), "elastic.", (replica, serial))
