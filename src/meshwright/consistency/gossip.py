"""The rule ``gossip``: replicas average with their neighbours (``schedules/mixing.py`` has the weights).

Notation: column i of X^k has the parameters of replica i before step k. U^k has the changes that the optimizers make in
step k (plain SGD: -eta G(X^k)). W is the mixing matrix. After the optimizer's step, ``mix`` computes:

    staleness=0      X^(k+1) = (X^k + U^k) W. With W = 11'/P this is synchronous training.
    staleness=1      X^(k+1) = X^k W + U^k, D-PSGD as printed (Lian et al. 2017, algorithm 1): X^k is sent before step k
                     and needed after it, so that letters travel while gradients are computed.
    staleness=s      X^(k+1) = X^k + U^k + X^(k-d) (W - I) / (2 d + 1), d = s - 1. The division keeps the mixing stable
                     for every doubly stochastic W: a mode of eigenvalue l decays iff |1 - l| / (2 d + 1) is less than
                     2 sin(phi / (2 d + 1)), phi = pi/2 - |arg(1 - l)|, and |1 - l| <= 2 sin(phi).

In all three cases, only the mean of U changes the mean of X. A replica waits for neighbours that are more than s steps
behind.

    staleness=any a replica takes each neighbour's newest parameters that have arrived since its last step, if any.
                     Without them it takes its own. This is an average of stale parameters, and its mean drifts.

When the view changes, each replica sends its clock to all others. A replica waits for the clocks of its neighbours in
the topology over the living replicas. If a neighbour had no reason to send its parameters, the replica continues
without them. So no replica waits for a letter that was never sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, replica_name, replica_number
from meshwright.consistency.peers import PeerExchange
from meshwright.ir.consistency import ASYNC, Gossip
from meshwright.schedules.clocks import may_proceed
from meshwright.schedules.mixing import check_topology, outgoing, weights


class GossipExchange(PeerExchange[Gossip]):
    """``gossip`` without push-sum."""

    def __init__(
        self, rule: Gossip, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S
    ) -> None:
        check_topology(rule, num_replicas, f"consistency {str(rule)!r}")
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self.waits_for_all = rule.staleness != ASYNC
        self._received: dict[tuple[int, int], list[Tensor]] = {}
        """Neighbours' parameters, by clock and replica."""
        self._own: dict[int, list[Tensor]] = {}
        """This replica's parameters that are not yet mixed, by clock."""
        self._handed = 0
        """The clock of the parameters that were last handed over."""

    def view_changed(self) -> None:
        """See ``PeerExchange``. No replica waits for a replica that has no state yet."""
        if not self.has_joined:
            self.tell("clock", (self._handed,))

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        """See ``PeerExchange``. Stale rules hand over the parameters before a step. At first, all replicas have equal
        parameters."""
        clock = self.clocks[self.replica]
        if self.rule.staleness != 0 and clock > self._handed:
            self._hand_over(parameters, clock)
            if self.rule.staleness != ASYNC:
                self._own[clock] = [parameter.clone() for parameter in parameters]

    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """See ``PeerExchange``."""
        clock, rule = self.clocks[self.replica], self.rule
        if rule.staleness == ASYNC:
            return self._mix_what_has_come(parameters)
        if rule.staleness == 0:
            self._hand_over(parameters, clock)
            self._own[clock] = list(parameters)
        self._wait(lambda: may_proceed(rule, self.living_clocks(), self.replica), "the parameters of neighbours")
        version, row = clock - rule.staleness, weights(rule, self.members, self.replica, clock - 1)
        if (own := self._own.get(version)) is not None:
            damping = max(1, 2 * rule.staleness - 1)
            received = [
                (row[peer] / damping, self._received[version, peer])
                for peer in row
                if (version, peer) in self._received
            ]
            _attract(parameters, own, received)
        self._own = {key: value for key, value in self._own.items() if key > version}
        self._received = {key: value for key, value in self._received.items() if key[0] > version}
        return own is not None

    def take(self, letter: Letter) -> None:
        """See ``Exchange``."""
        if letter.kind != "gossip":
            super().take(letter)
            return
        sender, clock = replica_number(letter.sender), letter.numbers[0]
        self.heard(sender, clock)
        if self.rule.staleness == ASYNC:  # only the newest is needed
            self._received = {key: value for key, value in self._received.items() if key[1] != sender}
        self._received[clock, sender] = list(letter.tensors)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``. Parameters that other replicas had not yet mixed are lost for them."""
        super().load_state(state)
        self._handed = self.clocks[self.replica]

    def _hand_over(self, parameters: Sequence[Tensor], clock: int) -> None:
        """Send parameters to the replicas that mix them, ``staleness`` steps later."""
        step = clock + max(0, self.rule.staleness) - 1
        for peer in outgoing(self.rule, self.members, self.replica, step):
            self.mailbox.send(replica_name(peer), "gossip", (clock,), parameters)
        self._handed = clock

    def _mix_what_has_come(self, parameters: Sequence[Tensor]) -> bool:
        received, self._received = sorted(self._received.items(), key=lambda item: item[0][1]), {}
        row = weights(self.rule, self.members, self.replica, self.clocks[self.replica] - 1)
        if self.rule.topology in ("one-peer", "random"):  # the sender's step has chosen this replica
            row = {peer: 1 / (1 + len(received)) for (_, peer), _ in received}
        _attract(parameters, list(parameters), [(row.get(peer, 0.0), theirs) for (_, peer), theirs in received])
        return bool(received)


def _attract(
    parameters: Sequence[Tensor], own: Sequence[Tensor], received: Sequence[tuple[float, Sequence[Tensor]]]
) -> None:
    """Add weight * (theirs - own) to the parameters, for each of ``received``."""
    for index, parameter in enumerate(parameters):
        change = torch.zeros_like(parameter)
        for weight, theirs in received:
            change.add_(theirs[index] - own[index], alpha=weight)
        parameter.add_(change)
