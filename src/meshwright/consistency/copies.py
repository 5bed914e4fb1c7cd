"""Servers, and the copies of a range, which replace each other when a copy dies (primary-backup replication).

    replica 0      server 0.0 (primary)    server 0.1 (backup)
       push ─────────▶ order 7 ──────────────▶ does it
                       waits for all copies ◀── has 7
       reply ◀──────── does it

The oldest living copy of a range is its primary. It numbers the operations and orders the backups to do them. It does
an operation itself, and replies, only when all living backups have done it. So every copy has done each operation to
which a replica has got a reply, and all copies go through the same states bit for bit. When the primary dies, the
oldest backup becomes the primary and sends its state to the other backups, which drop their own state. An order that
only some backups had was never replied to, so its replica sends the operation again. A copy that joins gets the state
in the same way.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, View, replica_name, replica_number, replicas_of
from meshwright.consistency.packing import packed, unpacked
from meshwright.consistency.range_state import KINDS, Operation, RangeState
from meshwright.errors import LostRankError


def server_name(index: int, copy: int) -> str:
    """The participant name of copy ``copy`` of range ``index``."""
    return f"server {index}.{copy}"


def range_of(server: str) -> int:
    """The number of the range that a server holds."""
    return int(server.removeprefix("server ").split(".")[0])


def host(index: int, copy: int, num_replicas: int) -> int:
    """The replica beside which a server runs. Copies of a range run beside different replicas, and the primaries of the
    ranges are spread over the replicas."""
    return (index + copy) % num_replicas


def living_copies(view: View, index: int) -> list[str]:
    """The living copies of a range, the oldest first. The oldest is the primary."""
    copies = [name for name in view.members if name.startswith(f"server {index}.")]
    return sorted(copies, key=lambda name: (view.joined[name], int(name.split(".")[1])))


class _Entry(NamedTuple):
    """An operation that this copy may do when all living backups have done the order ``number``. ``again``: the
    operation was already done, or changes nothing, so only a reply is due."""

    number: int
    operation: Operation
    again: bool


def serve(mailbox: Mailbox, state: RangeState, *, wait_s: float = WAIT_S) -> RangeState:
    """Serve the range in the mailbox's name until all replicas have died or left. Return the last state. ``state``: the
    state before the first step. A server that joins later gets the state from the other copies.

    Raises:
        LostRankError: this server has joined, and the copies that had the state have died.
    """
    copy = _Copy(mailbox, state)
    copy.look()
    while replicas_of(mailbox.view.members):
        letter = mailbox.receive(wait_s)
        if letter is None:
            copy.look()
        else:
            copy.take(letter)
    mailbox.leave()
    return state


class _Copy:
    """One copy of a range. A *term* is the time of one primary. Its number is the epoch in which it began. Orders of
    earlier terms are void."""

    def __init__(self, mailbox: Mailbox, state: RangeState) -> None:
        self._mailbox, self._state, self._index = mailbox, state, range_of(mailbox.name)
        self._term = 0 if mailbox.view.joined[mailbox.name] == 0 else -1  # -1: there is no state yet
        self._leads = False
        self._last_done = self._last_ordered = 0
        self._queue: deque[_Entry] = deque()
        self._has: dict[str, int] = {}
        self._early: list[Letter] = []
        self._asked: dict[str, bool] = {}

    # --- views -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Act on the view."""
        view, own = self._mailbox.view, self._mailbox.name
        primary, *backups = living_copies(view, self._index)
        if primary != own or self._lacks_state(backups):
            return
        begins = not self._leads
        if begins:
            self._take_over(view, backups)
        for name in set(self._has).difference(backups):
            del self._has[name]
        for name in backups:
            if name not in self._has:
                self._send_state(name)
        self._order_what_views_say()
        if begins:
            early, self._early = self._early, []
            for letter in early:
                self.take(letter)
        self._advance()

    def _lacks_state(self, backups: Sequence[str]) -> bool:
        """Whether this copy has joined and become the primary before it got the state. It then asks the other copies: a
        copy with a state has done all operations that were replied to."""
        self._asked = {name: self._asked.get(name, False) for name in backups}
        if self._term >= 0:
            return False
        for name, answered in self._asked.items():
            if not answered:
                self._mailbox.send(name, "state?")
        if not all(self._asked.values()):
            return True
        raise LostRankError(
            f"the copies of range {self._index} that had its state have died",
            where=self._mailbox.name,
            remedy="start all replicas again: they go on from their checkpoints; more copies= survive more deaths",
        )

    def _take_over(self, view: View, backups: Sequence[str]) -> None:
        """Become the primary. Copies of the first view begin with equal states; copies that joined later get this
        copy's state."""
        self._leads, self._last_ordered = True, self._last_done
        if view.epoch == 0:
            self._has = dict.fromkeys(backups, 0)
        else:
            self._term, self._has = view.epoch, {}

    def _send_state(self, to: str) -> None:
        """Send the state to another copy, and after it the following orders."""
        self._has[to] = -1
        self._mailbox.send(to, "state", (self._term, self._last_done), (packed(self._state.state()),))
        for number, operation, again in self._queue:
            if not again:
                self._send_order(to, number, operation)

    # --- letters -----------------------------------------------------------------------------------------------------

    def take(self, letter: Letter) -> None:
        """Act on a letter."""
        match letter.kind:
            case "state":
                term, number = letter.numbers
                self._asked[letter.sender] = True
                if term > self._term:
                    self._state.load_state(unpacked(letter.tensors[0]))
                    self._term = term
                    self._confirm(letter.sender, number)
                self.look()
            case "state?":
                state = (packed(self._state.state()),) if self._term >= 0 else ()
                self._mailbox.send(letter.sender, "state", (self._term, self._last_done), state)
            case "order":
                term, number, kind, replica, what = letter.numbers
                if term == self._term and not self._leads and number == self._last_done + 1:
                    self._state.apply(Operation(KINDS[kind], replica, what, letter.tensors, letter.text))
                    self._confirm(letter.sender, number)
            case "has":
                term, number, joined = letter.numbers
                known = self._mailbox.view.joined.get(letter.sender)
                if term == self._term and letter.sender in self._has and joined == known:
                    self._has[letter.sender] = number
                    self._advance()
            case "push" | "join" | "load" | "pull" | "save" as kind:
                if self._leads:
                    replica = replica_number(letter.sender)
                    self._ask(Operation(kind, replica, letter.numbers[0], letter.tensors, letter.text))
                else:  # the sender has seen the view in which this copy is the primary earlier than this copy
                    self._early.append(letter)

    def _confirm(self, primary: str, number: int) -> None:
        """Tell the primary that this copy has done the operations up to a number."""
        self._last_done = number
        view = self._mailbox.view
        self._mailbox.send(primary, "has", (self._term, number, view.joined[self._mailbox.name]))

    def _ask(self, operation: Operation) -> None:
        """Order an operation that a replica asks for, or reply again."""
        wanted = operation[:3]
        if any(entry.operation[:3] == wanted for entry in self._queue):
            return
        if self._state.is_done(operation):
            self._queue.append(_Entry(self._last_ordered, operation, again=True))
        else:
            self._order(operation)
        self._advance()

    def _order_what_views_say(self) -> None:
        """Order the removal of replicas that the view no longer contains."""
        view, going = self._mailbox.view, {entry.operation[:3] for entry in self._queue}
        for replica, joined in self._state.joined.items():
            name = replica_name(replica)
            lives = joined > view.epoch or (name in view.members and view.joined[name] <= joined)
            gone = Operation("gone", replica, joined)
            if not lives and not self._state.is_done(gone) and gone[:3] not in going:
                self._order(gone)

    def _order(self, operation: Operation) -> None:
        self._last_ordered += 1
        self._queue.append(_Entry(self._last_ordered, operation, again=False))
        for name in self._has:
            self._send_order(name, self._last_ordered, operation)

    def _send_order(self, to: str, number: int, operation: Operation) -> None:
        kind, replica, what, tensors, text = operation
        self._mailbox.send(to, "order", (self._term, number, KINDS.index(kind), replica, what), tensors, text)

    def _advance(self) -> None:
        """Do the operations that all living backups have done, and reply."""
        while self._queue and all(number >= self._queue[0].number for number in self._has.values()):
            number, operation, again = self._queue.popleft()
            replies = self._state.again(operation) if again else self._state.apply(operation)
            self._last_done = number
            if operation.kind == "join":  # the replica may have died since
                self._order_what_views_say()
            for replica, numbers, tensors in replies:
                self._mailbox.send(replica_name(replica), "reply", numbers, tensors)
