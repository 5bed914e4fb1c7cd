"""The rounds of ``partial(...)``, on the server: the gradients that make each step.

A replica that has applied round k - 1 computes gradients for round k. Round k closes as soon as the number of living
replicas that the rule requires have pushed gradients for it. It takes all waiting gradients, including late gradients
of earlier rounds. Its result is their sum, divided by the number of all replicas. So at any time, the sum of all
results and the pending gradients equals the sum of all pushed gradients.

    replica 0   1 ──┐   2 ──┐   3 ──┐
    replica 1   1 ──┤   2 ──┤   3 ──┤
    replica 2   1 ──│───────┤   3 ──┤        its gradient for round 1 counts in round 2; it goes on with round 3
                  round 1  round 2  round 3

One server closes the rounds of all parameters, because several servers would not agree on the contributors of a round.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshwright.consistency.range_state import OperationKind, RangeState, Reply, add_to, taken_mean
from meshwright.ir.consistency import Partial
from meshwright.schedules.clocks import may_proceed

MOST_ROUNDS = 64
"""The number of rounds that are kept for the slowest replica. The next round waits for that replica."""


class RoundState(RangeState):
    """The state of ``partial(...)``. The clock of a replica is the round of its last push.

    Attributes:
        version: the number of closed rounds.
        rounds: the results of the rounds that a replica may still have to apply, by number.
        pending: the gradients that wait for the next round, by replica.
    """

    def __init__(self, rule: Partial, num_replicas: int) -> None:
        super().__init__(rule, num_replicas)
        self.rounds: dict[int, list[Tensor]] = {}
        self.pending: dict[int, list[Tensor]] = {}

    def _add(self, replica: int, clock: int, gradients: Sequence[Tensor], text: str) -> None:
        add_to(self.pending, replica, gradients)

    def _settle(self) -> list[Reply]:
        if self._may_close():
            self.version += 1
            self.rounds[self.version] = taken_mean(self.pending, self.num_replicas)
        waits = sorted(self.waits.items())
        due = [replica for replica, (kind, number) in waits if kind == "join" or number <= self.version]
        replies = [self._reply(replica, *self.waits.pop(replica)) for replica in due]
        first = min(self.clocks.values(), default=self.version)
        self.rounds = {number: result for number, result in self.rounds.items() if number >= first}
        return replies

    def _may_close(self) -> bool:
        """Whether the next round may close, so that all replicas that have pushed for it may continue."""
        number = self.version + 1
        fresh = [replica for replica, clock in self.clocks.items() if clock == number]
        if not fresh or number - min(self.clocks.values()) >= MOST_ROUNDS:
            return False
        return may_proceed(self.rule, self.clocks, fresh[0])

    def _reply(self, replica: int, kind: OperationKind, number: int) -> Reply:
        """All results that the replica has not applied; a replica that joins applies none before it has pushed."""
        rounds = range(number, self.version + 1) if kind == "push" else ()
        results = tuple(tensor for each in rounds for tensor in self.rounds[each])
        return Reply(replica, self._numbers(replica, kind, number), results)

    def _clock_of_a_joining_replica(self) -> int:
        """Every living replica has applied the round before its clock, and may give its state to a replica that
        joins."""
        return min(self.clocks.values(), default=max(self.pushed.values())) - 1

    def state(self) -> dict[str, Any]:
        """See ``RangeState``."""
        return super().state() | {"rounds": self.rounds, "pending": self.pending}

    def load_state(self, state: dict[str, Any]) -> None:
        """See ``RangeState``."""
        super().load_state(state)
        self.rounds, self.pending = state["rounds"], state["pending"]
