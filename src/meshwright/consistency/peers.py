"""The base class of rules with equal replicas: clocks from letters; replicas that die, join and leave.

A replica that leaves first sends ``bye`` with its clock, and leaves when all others have answered. By then they have
received everything that they need from it, and all replicas take part in the last steps of a run. Replicas wait for a
replica that joins as soon as they know its clock.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, replica_name, replica_number
from meshwright.consistency.base import Exchange
from meshwright.errors import LostRankError
from meshwright.ir.consistency import Consistency

R = TypeVar("R", bound=Consistency)

FAR = 2**62
"""The clock of a replica that makes no more steps: no replica waits for it."""


class PeerExchange(Exchange[R]):
    """One replica's part of a rule under which all replicas do the same. Subclasses define the exchange in ``mix``."""

    waits_for_all = True
    """Whether a replica that leaves waits until the others have made as many steps."""

    def __init__(self, rule: R, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self._seen = mailbox.view
        self.has_joined = False
        """Whether this replica joined later than others, and has no state yet."""
        self._asked: list[Letter] = []
        self._byes: dict[int, int] = {}
        self._answered: set[int] = set()
        self._done = 0

    # --- what the trainer calls --------------------------------------------------------------------------------------

    def join(self) -> None:
        """See ``Exchange``."""
        self.has_joined, self.clocks = True, {self.replica: 0}

    def begin(self, parameters: Sequence[Tensor]) -> bool:
        """See ``Exchange``. Between two steps, this replica also answers joining replicas."""
        self.meet(parameters)
        self._done = self.clocks[self.replica]
        self._wait(lambda: True, "")
        self._answer()
        self.prepare(parameters)
        return super().begin(parameters)

    def end(self, parameters: Sequence[Tensor]) -> bool:
        """See ``Exchange``."""
        super().end(parameters)
        self._wait(lambda: True, "")
        changed = self.mix(parameters)
        self._done = self.clocks[self.replica]
        self._answer_byes()
        return changed

    def leave(self) -> None:
        """See ``Exchange``."""
        if self.waits_for_all:
            self._done = FAR
            self._answer_byes()
            self.tell("bye", (self.clocks[self.replica],))
            with suppress(LostRankError):  # another replica's end must not make this replica fail
                self._wait(self._may_leave, "the last step of other replicas")
        self.mailbox.leave()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``. ``clocks`` has this replica's clock. The replicas of a checkpoint have made equal numbers
        of steps."""
        clock = self.clocks[self.replica]
        if not self.has_joined:
            self.clocks = dict.fromkeys(self.clocks, clock)
        self._done, self.has_joined = clock, False

    # --- for rules ---------------------------------------------------------------------------------------------------

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Called first in a step, before letters are read."""

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        """Called at the begin of a step: send parameters that others will mix."""

    @abstractmethod
    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """Called at the end of a step, when this replica's clock counts it: exchange. Return whether ``parameters``
        have changed."""

    def view_changed(self) -> None:
        """Called when there is a new view."""

    def living_clocks(self) -> dict[int, int]:
        """The clocks of the living replicas. No replica waits for a replica whose clock is not yet known."""
        own = self.clocks[self.replica]
        return {replica: self.clocks.get(replica, own) for replica in self.members}

    def heard(self, replica: int, clock: int) -> None:
        """Note that a replica has reached a clock, according to its letter."""
        self.clocks[replica] = max(clock, self.clocks.get(replica, 0))

    def take(self, letter: Letter) -> None:
        """See ``Exchange``."""
        match letter.kind:
            case "clock":
                self.heard(replica_number(letter.sender), letter.numbers[0])
            case "bye":
                self.heard(replica_number(letter.sender), FAR)
                self._byes[replica_number(letter.sender)] = letter.numbers[0]
                self._answer_byes()
            case "bye!":
                self._answered.add(replica_number(letter.sender))
            case "state?":
                self._asked.append(letter)
                if self.has_joined or self._done == FAR:
                    self._answer()
            case _:
                super().take(letter)

    def look(self) -> None:
        """Check whether there is a new view."""
        view = self.mailbox.view
        if view.epoch == self._seen.epoch:
            return
        for name, joined in view.joined.items():
            if name.startswith("replica ") and self._seen.joined.get(name) != joined:  # the replica has joined again
                self.clocks.pop(replica_number(name), None)
                self._answered.discard(replica_number(name))
        self._seen = view
        self.view_changed()

    def _answer(self) -> None:
        """Send this replica's state to the joining replicas that its view contains. The state is empty if this replica
        itself has none."""
        asked, self._asked = self._asked, []
        for letter in asked:
            if self.has_joined:
                self.mailbox.send(letter.sender, "state")
            elif letter.sender in self.mailbox.view.members:
                super().take(letter)
            else:
                self._asked.append(letter)

    def _answer_byes(self) -> None:
        for replica, clock in list(self._byes.items()):
            if self._done >= clock:
                del self._byes[replica]
                self.mailbox.send(replica_name(replica), "bye!")

    def _may_leave(self) -> bool:
        self._answer()
        return all(peer in self._answered for peer in self.members if peer != self.replica)
