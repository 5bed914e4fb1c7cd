"""A replica's requests to servers. Each request waits for one reply."""

from typing import NamedTuple

from torch import Tensor

from meshwright.comm.mailbox import Letter, Mailbox
from meshwright.consistency.copies import living_copies, range_of
from meshwright.consistency.range_state import KINDS, OperationKind
from meshwright.errors import LostRankError


class _Request(NamedTuple):
    """A letter to the primary of a range. ``to``: the primary, and the epoch in which it joined."""

    to: tuple[str, int]
    number: int
    tensors: tuple[Tensor, ...]
    text: str


class Requests:
    """The requests of one replica, at most one of each kind to each range. If the primary of a range dies before it has
    replied, the request is sent to the next copy; servers do it once.

    Attributes:
        replies: the replies so far, by range and kind.
    """

    def __init__(self, copies: int, mailbox: Mailbox) -> None:
        self._copies, self._mailbox = copies, mailbox
        self._open: dict[tuple[int, OperationKind], _Request] = {}
        self.replies: dict[tuple[int, OperationKind], Letter] = {}

    def ask(
        self, index: int, kind: OperationKind, number: int = 0, tensors: tuple[Tensor, ...] = (), text: str = ""
    ) -> None:
        """Ask a range to do an operation. The tensors must not change until the reply has arrived."""
        to = self._primary(index)
        self._open[index, kind] = _Request(to, number, tensors, text)
        self._mailbox.send(to[0], kind, (number,), tensors, text)

    def take(self, letter: Letter) -> bool:
        """Take a reply. Return False if the letter is something else."""
        if letter.kind != "reply":
            return False
        kind, number, *_ = letter.numbers
        key = range_of(letter.sender), KINDS[kind]
        if key in self._open and self._open[key].number == number:
            del self._open[key]
            self.replies[key] = letter
        return True

    def are_done(self) -> bool:
        """Whether all replies have arrived. Send requests again if a range has a new primary.

        Raises:
            LostRankError: all copies of a range have died.
        """
        for (index, kind), (to, number, tensors, text) in list(self._open.items()):
            if self._primary(index) != to:
                self.ask(index, kind, number, tensors, text)
        return not self._open

    def taken(self, kind: OperationKind) -> dict[int, Letter]:
        """Take the replies of a kind, by range."""
        letters = {index: letter for (index, of), letter in self.replies.items() if of == kind}
        for index in letters:
            del self.replies[index, kind]
        return letters

    def _primary(self, index: int) -> tuple[str, int]:
        view = self._mailbox.view
        living = living_copies(view, index)
        if not living:
            copies = "its only copy has" if self._copies == 1 else f"all its {self._copies} copies have"
            raise LostRankError(
                f"range {index} of the parameters is lost: {copies} died",
                where=f"server {index}.0",
                remedy=f"start again from the last checkpoint; copies={self._copies + 1} would have survived this",
            )
        return living[0], view.joined[living[0]]
