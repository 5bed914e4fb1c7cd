"""Mailboxes in one process under a scheduler that decides who goes on, what arrives and who dies: it explores orders
of events that real processes seldom show. A run depends on nothing but the choices of ``choose``."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshwright.comm.mailbox import Letter, Mailbox, View

Body = Callable[[Mailbox], Any]
Choose = Callable[[int], int]
"""``choose(n)`` returns a number from 0 to n - 1; hypothesis or a random generator draws it."""


class KilledError(BaseException):
    """Ends a participant that the test kills; nothing in the code under test catches it."""


class DeadlockError(AssertionError):
    """All participants wait, and nothing is under way."""


def _closed() -> threading.Lock:
    """A gate through which a thread passes once it is released: a lock, which is much faster than a semaphore."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class VirtualNetwork:
    """Runs participants as threads, one at a time. ``kills`` maps the number of a scheduler's turn to the name of the
    participant that dies then; ``starts`` to the name and the body of one that joins then, if it does not live."""

    def __init__(
        self,
        choose: Choose,
        kills: Mapping[int, str] | None = None,
        most_turns: int = 100_000,
        starts: Mapping[int, tuple[str, Body]] | None = None,
    ) -> None:
        self.choose, self.kills, self.most_turns = choose, dict(kills or {}), most_turns
        self.starts = dict(starts or {})
        self.views: list[View] = []
        self.boxes: dict[str, VirtualMailbox] = {}
        self.turn = 0
        self.wires: dict[tuple[str, str], deque[Letter]] = defaultdict(deque)
        self._failure: BaseException | None = None

    def run(self, bodies: Mapping[str, Body], later: Mapping[int, tuple[str, Body]] | None = None) -> dict[str, Any]:
        """Call each body with its mailbox; return the results of those that were not killed. ``later``: more
        ``starts``."""
        self.starts |= later or {}
        self.views = [View(0, tuple(sorted(bodies)), dict.fromkeys(bodies, 0))]
        self.last_joined = dict.fromkeys(bodies, 0)
        self.results: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        for name, body in bodies.items():
            self._start(name, body)
        while not all(box.over for box in self.boxes.values()):
            self._one_turn()
            if self._failure is not None:
                for name in self.boxes:
                    self._end(name)
                raise self._failure
        for thread in self._threads:
            thread.join()
        return self.results

    def _start(self, name: str, body: Body) -> None:
        """Let a participant live from the newest view on."""
        box = self.boxes[name] = VirtualMailbox(self, name, self.views[-1].epoch)

        def live() -> None:
            box.go.acquire()
            try:
                if box.killed:
                    return
                self.results[name] = body(box)
            except KilledError:
                pass
            except BaseException as error:  # noqa: BLE001 - the test's thread raises it
                self._failure = self._failure or error
            finally:
                box.over = True
                box.back.release()

        self._threads.append(threading.Thread(target=live, daemon=True))
        self._threads[-1].start()

    def _one_turn(self) -> None:
        self.turn += 1
        if self.turn > self.most_turns:
            self._failure = DeadlockError(f"not done after {self.most_turns} turns")
            return
        if (victim := self.kills.pop(self.turn, None)) is not None and not self.boxes[victim].over:
            self.change(lambda members: [name for name in members if name != victim], victim)
            for (sender, _), wire in self.wires.items():
                if sender == victim and wire:  # a first part arrives
                    for _ in range(self.choose(len(wire) + 1)):
                        wire.pop()
            self._end(victim)
            return
        if (start := self.starts.pop(self.turn, None)) is not None and start[0] not in self.views[-1].members:
            self._join(*start)
            return
        ready = [box for box in self.boxes.values() if not box.over and box.is_ready()]
        if not ready:
            waiting = {name: box.what() for name, box in self.boxes.items() if not box.over}
            self._failure = DeadlockError(f"all wait: {waiting}")
            return
        box = ready[self.choose(len(ready))]
        box.go.release()
        box.back.acquire()

    def _end(self, name: str) -> None:
        box = self.boxes[name]
        if not box.over:
            box.killed = True
            box.go.release()
            box.back.acquire()

    def _join(self, name: str, body: Body) -> None:
        """The next view, with a participant that has died before. Letters of its former life arrive no more."""
        last = self.views[-1]
        members, epoch = tuple(sorted([*last.members, name])), last.epoch + 1
        self.views.append(View(epoch, members, last.joined | {name: epoch}))
        self.last_joined[name] = epoch
        for (sender, _), wire in self.wires.items():
            if sender == name:
                wire.clear()
        self._start(name, body)

    def change(self, members_of: Callable[[list[str]], list[str]], gone: str) -> None:
        """The next view, without ``gone``; what is under way to it is lost."""
        last = self.views[-1]
        members = tuple(sorted(members_of(list(last.members))))
        self.views.append(View(last.epoch + 1, members, {name: last.joined[name] for name in members}))
        for (_, to), wire in self.wires.items():
            if to == gone:
                wire.clear()


class VirtualMailbox(Mailbox):
    """A participant's mailbox in a ``VirtualNetwork``. Its view may be older than others'."""

    def __init__(self, network: VirtualNetwork, name: str, epoch: int) -> None:
        self.name, self.sent_bytes = name, 0
        self._network, self._epoch = network, epoch
        self.go, self.back = _closed(), _closed()
        self.over = self.killed = False
        self._waits = self._left = False

    def is_ready(self) -> bool:
        """Whether this participant can go on."""
        return not self._waits or self._epoch < self._network.views[-1].epoch or bool(self._coming())

    def what(self) -> str:
        """For the error of a deadlock."""
        return f"epoch {self._epoch}"

    def _coming(self) -> list[str]:
        last = self._network.last_joined
        return [
            sender
            for (sender, to), wire in self._network.wires.items()
            if to == self.name and wire and last[sender] <= self._epoch
        ]

    def _pause(self, waits: bool = False) -> None:
        """Let the scheduler decide who goes on."""
        self._waits = waits
        self.back.release()
        self.go.acquire()
        self._waits = False
        if self.killed:
            raise KilledError

    @property
    def view(self) -> View:
        return self._network.views[self._epoch]

    def send(
        self, to: str, kind: str, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = (), text: str = ""
    ) -> None:
        self._pause()
        own, newest = self.view.joined.get(to), self._network.views[-1].joined.get(to)
        if own == newest is not None and not self._left:  # else it has died, or lives anew
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
            copies = tuple(tensor.detach().clone() for tensor in tensors)
            assert all(tensor.dim() == 1 for tensor in copies)
            self._network.wires[self.name, to].append(Letter(self.name, kind, tuple(numbers), copies, text))

    def receive(self, wait_s: float = 0.0) -> Letter | None:
        if self._left:
            return None
        self._pause(waits=wait_s > 0)
        coming, behind = self._coming(), self._epoch < self._network.views[-1].epoch
        options = len(coming) + behind
        if not options:
            return None
        picked = self._network.choose(options)
        if picked == len(coming):
            self._epoch += 1
            return None
        return self._network.wires[coming[picked], self.name].popleft()

    def leave(self) -> None:
        self._pause()
        if self._left:
            return
        self._left = True
        self._network.change(lambda members: [name for name in members if name != self.name], self.name)
