"""The rule ``gossip(..., push=on)``: push-sum (SGP, Assran et al. 2019), with weights that make up for shares that come
unequally.

Each replica has a weight w, at first 1, and a mass x = w z, where z are its parameters. After a step, it divides both
into equal shares. It keeps one share, and sends one share to each outgoing neighbour. x and w become the sums of its
own share and the received shares, and z = x / w. No share is lost: the w of all replicas and of all letters on their
way sum up to P. If every replica sends and receives the same number of shares, all w stay 1.

A replica waits for neighbours that are more than ``staleness`` steps behind. Their shares count when they arrive, late
or early. The mass of a replica that dies is lost; the z of the others remain weighted means. A replica that joins
begins with half of the mass of the replica that has lived longest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, replica_name, replica_number
from meshwright.consistency.peers import PeerExchange
from meshwright.ir.consistency import ASYNC, Gossip
from meshwright.schedules.clocks import may_proceed
from meshwright.schedules.mixing import check_topology, outgoing, push_weight

LEAST_WEIGHT = 2.0**-10
"""A replica whose weight is below this value sends nothing until it has received shares. Without this limit, repeated
divisions would make its weight vanish."""


class PushSumExchange(PeerExchange[Gossip]):
    """``gossip(..., push=on)``.

    Attributes:
        weight: w.
    """

    def __init__(
        self, rule: Gossip, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
    ) -> None:
        check_topology(rule, num_replicas, f"consistency {str(rule)!r}")
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self.waits_for_all = rule.staleness != ASYNC
        self.weight = 1.0
        self._parameters: Sequence[Tensor] = ()
        self._shares: list[tuple[int, int, tuple[Tensor, ...]]] = []
        """Shares that are not yet added: the clock and the replica that sent them, and the tensors."""
        self._begged: list[str] = []
        self._handed = 0

    def join(self) -> None:
        """See ``Exchange``."""
        super().join()
        self.weight = 0.0

    def view_changed(self) -> None:
        """See ``PeerExchange``. No replica waits for a replica that has no state yet."""
        if not self.has_joined:
            self.tell("clock", (self._handed,))

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``."""
        self._parameters = parameters

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``. A replica that has joined gets its first mass."""
        while not self.weight:
            joined = self.mailbox.view.joined
            others = [peer for peer in self.members if peer != self.replica]
            if not others:
                self.weight = 1.0
                break
            giver = replica_name(min(others, key=lambda peer: (joined[replica_name(peer)], peer)))
            self.mailbox.send(giver, "mass?")
            self._wait(lambda giver=giver: bool(self._shares) or giver not in self.mailbox.view.members, "a first mass")  # type: ignore[misc]
            self._add_shares(2**62)
        self._give()

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """See ``PeerExchange``."""
        clock, rule = self.clocks[self.replica], self.rule
        peers = outgoing(rule, self.members, self.replica, clock - 1)
        if rule.staleness != ASYNC or self.weight >= LEAST_WEIGHT:
            share = self.weight * push_weight(rule, self.members, self.replica, clock - 1)
            for peer in peers:
                self._push(replica_name(peer), share, clock)
        self._handed = clock
        if rule.staleness != ASYNC:
            self._wait(lambda: may_proceed(rule, self.living_clocks(), self.replica), "the shares of neighbours")
        return self._add_shares(clock if rule.staleness == 0 else 2**62)

    def leave(self) -> None:
        """See ``Exchange``. Shares that arrive while this replica waits for the others count."""
        super().leave()
        self._add_shares(2**62)

    def take(self, letter: Letter) -> None:
        """See ``Exchange``."""
        match letter.kind:
            case "push":
                sender, clock = replica_number(letter.sender), letter.numbers[0]
                if clock:  # otherwise it is the first mass of this replica
                    self.heard(sender, clock)
                self._shares.append((clock, sender, letter.tensors))
            case "mass?":
                self._begged.append(letter.sender)
                self._give()
            case _:
                super().take(letter)

    def state(self) -> dict[str, Tensor]:
        """See ``Exchange``. Shares on their way are not part of it: without staleness, they are sent again."""
        return super().state() | {"weight": torch.tensor(self.weight, dtype=torch.float64)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``. A replica that joins gets its own weight with its mass."""
        joins = self.has_joined
        super().load_state(state)
        if not joins:
            self.weight = float(state["weight"])
        self._handed = self.clocks[self.replica]

    def _push(self, to: str, weight: float, clock: int) -> None:
        """Send a part of the weight, and the mass that belongs to it."""
        mass = [parameter * weight for parameter in self._parameters]
        self.mailbox.send(to, "push", (clock,), [*mass, torch.tensor([weight], dtype=torch.float64)])
        self.weight -= weight

    def _give(self) -> None:
        """Give half of mass and weight to each replica that has asked for it."""
        while self._begged and self.weight and self._parameters:
            self._push(self._begged.pop(0), self.weight / 2, 0)

    def _add_shares(self, clock: int) -> bool:
        """Add the shares that were sent up to a clock. Return whether parameters have changed."""
        shares = sorted((share for share in self._shares if share[0] <= clock), key=lambda share: share[:2])
        if not shares:
            return False
        self._shares = [share for share in self._shares if share[0] > clock]
        total = self.weight + sum(float(tensors[-1]) for *_, tensors in shares)
        for index, parameter in enumerate(self._parameters):
            mass = parameter * self.weight
            for *_, tensors in shares:
                mass.add_(tensors[index])
            parameter.copy_(mass.div_(total))
        self.weight = total
        return True
