"""What all rules of equal replicas have in common: clocks learnt from letters; replicas that die, join and leave.

A replica that leaves first says ``bye`` with its clock, and goes when all others have answered: then they have taken
what they need of its last letters, and the last steps of a run are made by all. A replica that joins is waited for as
soon as its clock is known.
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
"""The clock of a replica that makes no more steps: nobody waits for it."""


class PeerExchange(Exchange[R]):
    """One replica's part of a rule under which all replicas do the same. A rule says how it mixes in ``mix``."""

    waits_for_all = True
    """Whether a replica that leaves waits until the others have made as many steps."""

    def __init__(self, rule: R, mailbox: Mailbox, replica: int, num_replicas: int, *, wait_s: float = WAIT_S) -> None:
        super().__init__(rule, mailbox, replica, num_replicas, wait_s=wait_s)
        self._seen = mailbox.view
        self.has_joined = False
        """Whether this replica came later than others, and has no state yet."""
        self._asked: list[Letter] = []
        self._byes: dict[int, int] = {}
        self._answered: set[int] = set()
        self._done = 0

    # --- what the trainer calls --------------------------------------------------------------------------------------

    def join(self) -> None:
        """See ``Exchange``."""
        self.has_joined, self.clocks = True, {self.replica: 0}

    def begin(self, parameters: Sequence[Tensor]) -> bool:
        """See ``Exchange``. Between two steps, this replica also answers those that join."""
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
            with suppress(LostRankError):  # another replica's last step is no reason to fail after this one's
                self._wait(self._may_leave, "the last step of other replicas")
        self.mailbox.leave()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See ``Exchange``. ``clocks`` has this replica's clock. The replicas of a checkpoint have made equally many
        steps."""
        clock = self.clocks[self.replica]
        if not self.has_joined:
            self.clocks = dict.fromkeys(self.clocks, clock)
        self._done, self.has_joined = clock, False

    # --- for rules ---------------------------------------------------------------------------------------------------

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Called first in a step, before letters are read."""

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        """A step begins: send parameters that others will mix."""

    @abstractmethod
    def mix(self, parameters: Sequence[Tensor]) -> bool:
        """A step is done, and this replica's clock counts it: exchange. Return whether ``parameters`` have changed."""

    def view_changed(self) -> None:
        """There is a new view."""

    def living_clocks(self) -> dict[int, int]:
        """The clocks of the replicas that live. Nobody waits for a replica whose clock is not known yet."""
        own = self.clocks[self.replica]
        return {replica: self.clocks.get(replica, own) for replica in self.members}

    def heard(self, replica: int, clock: int) -> None:
        """A letter says that a replica has reached a clock."""
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
        """See whether there is a new view."""
        view = self.mailbox.view
        if view.epoch == self._seen.epoch:
            return
        for name, joined in view.joined.items():
            if name.startswith("replica ") and self._seen.joined.get(name) != joined:  # a new life
                self.clocks.pop(replica_number(name), None)
                self._answered.discard(replica_number(name))
        self._seen = view
        self.view_changed()

    def _answer(self) -> None:
        """Give those that join this replica's state, if its view has them; an empty one, if it has none itself."""
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
