"""The base class of all consistency rules: a replica's part of a rule. The trainer calls it in every step."""

from abc import ABC
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, replica_name, replicas_of
from meshwright.ir.consistency import Consistency
from meshwright.schedules.clocks import may_proceed, staleness

R = TypeVar("R", bound=Consistency)

Snapshot = Callable[[], tuple[list[Tensor], str]]
"""A function that returns the state for a joining replica: flat tensors, and a text that describes them."""


class Exchange(ABC, Generic[R]):
    """One replica's part of a consistency rule.

    In every step the trainer calls ``begin``, computes gradients, makes one optimizer step for each list of gradients
    that ``updates`` yields, and calls ``end``. Parameters and gradients are lists of flat tensors on the CPU, the same
    list in all replicas. Methods change them in place.

    Attributes:
        rule: the rule.
        replica: the number of this replica.
        clocks: maps the living replicas to their clocks, as far as this replica knows. The clock of a replica is the
            number of steps that it has made.
        staleness: maps each staleness to the number of steps that began with it. The staleness is the number of steps
            by which the slowest replica was behind.
        snapshot: returns the state for a joining replica; set by the trainer.
    """

    def __init__(self, rule: R, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S) -> None:
        self.rule, self.mailbox, self.replica, self.wait_s = rule, mailbox, replica, wait_s
        self.clocks: dict[int, int] = dict.fromkeys(range(num_replicas), 0)
        self.staleness: Counter[int] = Counter()
        self.snapshot: Snapshot | None = None

    # --- what the trainer calls --------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take part as a replica that joins later than others. Call this first, and then ask a living replica for its
        state."""

    def begin(self, parameters: Sequence[Tensor]) -> bool:
        """Wait until this replica may begin its next step. Return whether ``parameters`` have changed."""
        self._wait(lambda: may_proceed(self.rule, self.living_clocks(), self.replica), "the clocks of other replicas")
        self.staleness[staleness(self.living_clocks(), self.replica)] += 1
        return False

    def updates(self, gradients: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """The gradients with which the trainer's optimizer makes steps: one list for each step."""
        yield gradients

    def end(self, parameters: Sequence[Tensor]) -> bool:
        """End a step, and hand over its result. Return whether ``parameters`` have changed."""
        self.clocks[self.replica] += 1
        return False

    def settle(self, parameters: Sequence[Tensor]) -> bool:
        """Wait for the answer to this replica's last step, before its parameters are saved or evaluated. Return whether
        ``parameters`` have changed."""
        return False

    def leave(self) -> None:
        """End this replica's part: it makes no more steps, and the others go on without it."""
        self.mailbox.leave()

    def state(self) -> dict[str, Tensor]:
        """The state that the rule keeps between steps, by name, for checkpoints."""
        return {}

    def handover(self) -> dict[str, Tensor]:
        """The state for a replica that joins, by name. It is made without messages, because this replica may be waiting
        for others."""
        return self.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``state`` and of ``handover``."""

    # --- for rules ---------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        """The living replicas, including this replica."""
        return replicas_of(self.mailbox.view.members)

    def living_clocks(self) -> dict[int, int]:
        """The clocks of the living replicas."""
        return {replica: self.clocks.get(replica, 0) for replica in self.members}

    def take(self, letter: Letter) -> None:
        """Act on a letter. Rules override this method, and call it for the kinds of letters that they do not know."""
        if letter.kind == "state?":  # a replica that joins has no state yet, so another replica must be asked
            tensors, text = self.snapshot() if self.snapshot is not None else ([], "")
            self.mailbox.send(letter.sender, "state", (self.clocks[self.replica],), tensors, text)

    def look(self) -> None:
        """Check whether there is a new view. Code that waits calls this whenever the view may have changed."""

    def tell(self, kind: str, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = ()) -> None:
        """Send a letter to all other living replicas."""
        for peer in self.members:
            if peer != self.replica:
                self.mailbox.send(replica_name(peer), kind, numbers, tensors)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Act on letters until ``done()`` is true. First act on all letters that have arrived."""

        def is_done() -> bool:
            self.look()
            return done()

        while (letter := self.mailbox.receive()) is not None:
            self.take(letter)
        self.mailbox.receive_until(is_done, self.take, what, self.wait_s)
