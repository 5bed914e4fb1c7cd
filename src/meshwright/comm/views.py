"""The log of views: which participants are alive, in a sequence that is the same for all participants. The log is kept
in a store of torch.distributed.

    view/0   replica 0, replica 1, replica 2
    view/1   replica 0, replica 2              replica 1: its process has ended
    view/2   replica 0, replica 1, replica 2   replica 1 has joined (its life 1)

A view is written once, by ``compare_set``. If several participants propose a next view, one of them succeeds, and the
others read its view before they propose another. So there is a single sequence of views, whichever participants die.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from meshwright.comm.mailbox import View


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A participant in a view: the epoch in which it joined, and its life (the number of restarts)."""

    joined: int
    life: int


class ViewEntry(msgspec.Struct, frozen=True):
    """A view in the log. ``change`` says how the view differs from the previous view, and why."""

    members: dict[str, Member]
    change: str = ""

    def view(self, epoch: int) -> View:
        """The view in the form in which participants see it."""
        return View(epoch, tuple(sorted(self.members)), {name: member.joined for name, member in self.members.items()})

    def has(self, name: str, joined: int) -> bool:
        """Whether the participant that joined in this epoch is a member."""
        return name in self.members and self.members[name].joined == joined


class ViewLog:
    """Reads and continues the log in ``store``. Several threads may use it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._known: tuple[int, ViewEntry] = (-1, ViewEntry({}))

    def begin(self, names: Sequence[str]) -> None:
        """Write the first view, unless another participant has done so."""
        self._propose(0, ViewEntry(dict.fromkeys(sorted(names), Member(0, 0))))

    def newest(self) -> tuple[int, ViewEntry]:
        """The epoch and entry of the newest view; epoch -1 if there is no view yet."""
        epoch, entry = self._known
        while self._store.check([key(epoch + 1)]):
            epoch, entry = epoch + 1, self.read(epoch + 1)
        self._known = (epoch, entry)
        return epoch, entry

    def read(self, epoch: int) -> ViewEntry:
        """The entry of a view that is in the log."""
        return msgspec.json.decode(self._store.get(key(epoch)), type=ViewEntry)

    def epochs_of(self, name: str, life: int) -> Iterator[int]:
        """Yield the epoch in which a life joined, each time that it is asked; -1 as long as the life has not joined."""
        epoch = 0
        while True:
            if not self._store.check([key(epoch)]):
                yield -1
            elif (member := self.read(epoch).members.get(name)) is not None and member.life == life:
                yield member.joined
            else:
                epoch += 1

    def remove(self, name: str, joined: int, why: str) -> None:
        """Append a view without the participant that joined in epoch ``joined``, unless it was removed already."""
        while True:
            epoch, entry = self.newest()
            if not entry.has(name, joined):
                return
            others = {other: member for other, member in entry.members.items() if other != name}
            if self._propose(epoch + 1, ViewEntry(others, why)):
                return

    def join(self, name: str, life: int) -> int:
        """Append a view with a new participant, and return its epoch. If an earlier life is still a member, it is
        removed first, in a separate view."""
        while True:
            epoch, entry = self.newest()
            if name in entry.members:
                self.remove(name, entry.members[name].joined, f"life {life} of {name} wants to join")
                continue
            members = entry.members | {name: Member(epoch + 1, life)}
            if self._propose(epoch + 1, ViewEntry(members, f"{name} has joined (its life {life})")):
                return epoch + 1

    def _propose(self, epoch: int, entry: ViewEntry) -> bool:
        """Write an entry, unless this epoch already has an entry. Return whether the log now has this entry."""
        text = msgspec.json.encode(entry)
        return bool(self._store.compare_set(key(epoch), "", text.decode()) == text)


def key(epoch: int) -> str:
    """The key of a view in the store."""
    return f"view/{epoch}"
