"""A participant's role in the views: it meets the others, follows the log, and detects deaths.

Two threads wait in the background, also while the replica computes:

    follower   sleeps in the store until the log has a next view, then wakes the mailbox
    watcher    sleeps until a process of this box ends, or a connection to another box breaks, then proposes a view

A replica of several ranks has a mailbox on each of them (a column). There is one log for all columns. Each rank watches
the ranks of its column in all other participants. So if any rank of a replica dies, ranks of other replicas notice it,
and propose a view without that replica. The remaining ranks of this replica read this view like all others, and give
up. Ranks of the same replica need not watch each other: if no other participant is left, no one depends on the news.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist

from meshwright.comm.transport.base import first_line
from meshwright.comm.transport.process import Process
from meshwright.comm.transport.zeromq import recv_monitor_message, zmq
from meshwright.comm.views import Member, ViewEntry, ViewLog, key
from meshwright.errors import LostRankError

LOOK_S = 0.02
"""Seconds between two checks of the store while participants meet."""
LOOK_WITHOUT_DESCRIPTOR_S = 0.5
"""Seconds between two checks of a process for which the kernel refuses a descriptor."""
QUIET_S = 20 * 86400.0
"""Seconds after which a thread that waits for the next view repeats its request."""
STOP_S = 5.0
"""The threads end within this number of seconds, if the store answers."""
REMEDY = "look at what the others do; MESHWRIGHT_TIMEOUT_S sets how long replicas wait for each other"


class Location(msgspec.Struct, frozen=True):
    """The location of one rank of a participant: its addresses for processes inside and outside of its box, its box,
    its process id, and a secret that letters to it must contain."""

    near: str
    far: str
    box: str
    process: int
    secret: str


class Membership:
    """One rank's role in the views. Call ``begin`` or ``join`` first.

    Attributes:
        joined: the epoch in which this participant joined.
        entries: the views from ``joined`` on, in order. The follower thread appends new views.
        bell: a file descriptor that is readable if there is news: a view, or trouble.
        trouble: the reason why no more views arrive; empty if views arrive.
    """

    def __init__(
        self, store: Any, place: Location, name: str, life: int, column: int, num_columns: int, wait_s: float
    ) -> None:
        self.name, self.life, self.joined, self.trouble = name, life, 0, ""
        self._own = place
        self.entries: list[ViewEntry] = []
        self.bell, self._watchers_bell = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        self._column, self._num_columns, self._wait_s = column, num_columns, wait_s
        # separate connections, because the follower's connection is blocked while it waits
        self._store, self._followed = store.clone(), store.clone()
        self._log = ViewLog(self._store)
        self._places: dict[tuple[str, int], Location] = {}
        self._processes: dict[tuple[str, int], Process] = {}
        self._new_connections: list[tuple[str, int, Any, str]] = []
        self._connections: dict[Any, tuple[str, int, str]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._threads: list[threading.Thread] = []

    # --- the meeting -------------------------------------------------------------------------------------------------

    def begin(self, names: Sequence[str]) -> None:
        """Meet the participants of the first view.

        Raises:
            LostRankError: a participant does not appear within the time limit.
        """
        self._publish()
        self._log.begin(names)
        self._start()

    def join(self) -> None:
        """Become a participant of the next view. The rank of column 0 proposes this view when all columns are ready.

        Raises:
            LostRankError: a rank of this participant, or its view, does not appear within the time limit.
        """
        self._publish()
        if self._column == 0:
            for column in range(self._num_columns):
                self._await(partial(self._has_come, self.life, column, self.name), f"{self.name}, rank {column}")
            self.joined = self._log.join(self.name, self.life)
        else:
            epochs = self._log.epochs_of(self.name, self.life)
            self._await(lambda: next(epochs) >= 0, f"{self.name}, rank 0")
            self.joined = next(epochs)
        self._start()

    def _publish(self) -> None:
        self._store.set(_place_key(self.name, self.life, self._column), msgspec.json.encode(self._own).decode())

    def _has_come(self, life: int, column: int, name: str) -> bool:
        return bool(self._store.check([_place_key(name, life, column)]))

    def _await(self, done: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + self._wait_s
        while not done():
            if time.monotonic() > deadline:
                raise LostRankError(f"it has not come within {self._wait_s:g} s", where=name, remedy=REMEDY)
            time.sleep(LOOK_S)

    def _start(self) -> None:
        """Wait until all members of the participant's first view have appeared or were removed. Then follow the log."""
        entry = self._log.read(self.joined)
        for name, member in entry.members.items():

            def known(name: str = name, member: Member = member) -> bool:
                come = self._has_come(member.life, self._column, name)
                return come or not self._log.newest()[1].has(name, member.joined)

            self._await(known, name)
        self._see(entry)
        for target in (self._follow, self._watch):
            thread = threading.Thread(target=target, name=f"{self.name}: {target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    # --- what the mailbox asks ---------------------------------------------------------------------------------------

    @property
    def newest(self) -> ViewEntry:
        """The newest view that has arrived."""
        return self.entries[-1]

    def place(self, name: str, joined: int) -> Location | None:
        """The location of the participant's rank in this column; None if the participant was removed before it
        appeared."""
        return self._places.get((name, joined))

    def watch(self, name: str, joined: int, events: Any, silence_s: float) -> None:
        """Watch the events of a connection to a participant in another box. An event means that the participant is
        dead."""
        why = f"no sign of life for {silence_s:g} s, or the connection to it has broken"
        with self._lock:
            self._new_connections.append((name, joined, events, why))
        _ring(self._watchers_bell)

    @property
    def is_member(self) -> bool:
        """Whether this participant is a member of the newest view."""
        return self.newest.has(self.name, self.joined)

    def ready_to_leave(self) -> bool:
        """Announce that this rank is ready to leave. Returns whether it is the last rank of this participant to do
        so."""
        ready = 0
        try:
            ready = self._store.add(f"ready to leave/{self.name}/{self.joined}", 1)
        except RuntimeError as error:
            self._fail(error)
            self.check()
        return ready == self._num_columns

    def leave(self, why: str) -> None:
        """Propose a view without this participant."""
        self._log.remove(self.name, self.joined, why)

    def check(self) -> None:
        """Raise a LostRankError if this participant is no longer a member, or no more views arrive."""
        if self.trouble:
            raise LostRankError(self.trouble, where=self.name, remedy="look at the process that keeps the store")
        if not self.is_member:
            removed = next(entry for entry in self.entries if not entry.has(self.name, self.joined))
            raise LostRankError(
                f"it was declared dead by other participants: {removed.change}",
                where=self.name,
                remedy="start it again: it joins as a new life, and gets the state from a peer",
            )

    def stop(self) -> None:
        """End the threads. Call this after ``leave``, or after others have removed this participant."""
        self._stopped = True
        _ring(self._watchers_bell)
        for thread in self._threads:
            thread.join(STOP_S)

    def close(self) -> None:
        """Free everything that remains after ``stop``."""
        if not any(thread.is_alive() for thread in self._threads):  # otherwise the store does not answer
            for bell in (self.bell, self._watchers_bell):
                os.close(bell)

    # --- the follower's thread ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        epoch = self.joined
        try:
            while self.is_member:
                epoch += 1
                while not self._followed.check([key(epoch)]):
                    with suppress(dist.DistStoreError):  # there was no change for a long time
                        self._followed.wait([key(epoch)], timedelta(seconds=QUIET_S))
                self._see(ViewLog(self._followed).read(epoch))
        except (RuntimeError, msgspec.MsgspecError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.trouble = f"the store in which views lie does not answer: {first_line(error)}"
        _ring(self.bell)

    def _see(self, entry: ViewEntry) -> None:
        """Add a view, and start to watch its new members."""
        members = {(name, member.joined): member.life for name, member in entry.members.items()}
        ended = []
        for (name, joined), life in members.items():
            wanted = _place_key(name, life, self._column)
            if name == self.name or (name, joined) in self._places or not self._followed.check([wanted]):
                continue
            place = msgspec.json.decode(self._followed.get(wanted), type=Location)
            self._places[name, joined] = place
            if place.box == self._own.box:
                try:
                    process = Process(place.process)
                except ProcessLookupError:
                    ended.append((name, joined))
                    continue
                with self._lock:
                    self._processes[name, joined] = process
        with self._lock:
            for member in [member for member in self._processes if member not in members]:
                del self._processes[member]
        self.entries.append(entry)
        _ring(self.bell)
        _ring(self._watchers_bell)
        for name, joined in ended:
            self._log.remove(name, joined, f"{name}: its process has ended")

    # --- the watcher's thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        connections = self._connections
        while not self._stopped:
            with self._lock:
                processes = dict(self._processes)
                for name, joined, events, why in self._new_connections:
                    connections[events] = name, joined, why
                self._new_connections.clear()
            poller = zmq.Poller()
            poller.register(self._watchers_bell, zmq.POLLIN)
            for process in processes.values():
                if process.descriptor >= 0:
                    poller.register(process.descriptor, zmq.POLLIN)
            for events in connections:
                poller.register(events, zmq.POLLIN)
            looks = any(process.descriptor < 0 for process in processes.values())
            ready = dict(poller.poll(round(1000 * LOOK_WITHOUT_DESCRIPTOR_S) if looks else None))
            if self._watchers_bell in ready:
                silence(self._watchers_bell)
            for (name, joined), process in processes.items():
                if process.has_ended():
                    self._declare_dead(name, joined, f"{name}: its process has ended")
            for events, (name, joined, why) in list(connections.items()):
                if events not in ready:
                    continue
                if recv_monitor_message(events)["event"] != zmq.EVENT_MONITOR_STOPPED:
                    self._declare_dead(name, joined, f"{name}: {why}")
                else:  # only now, because ZeroMQ's thread would wait for ever to report events to a closed socket
                    del connections[events]
                    events.close()

    def _declare_dead(self, name: str, joined: int, why: str) -> None:
        with self._lock:
            self._processes.pop((name, joined), None)
        try:
            self._log.remove(name, joined, why)
        except RuntimeError as error:
            self._fail(error)


def silence(bell: int) -> None:
    """Make a bell unreadable until it rings again."""
    with suppress(BlockingIOError):
        os.eventfd_read(bell)


def _ring(bell: int) -> None:
    os.eventfd_write(bell, 1)


def _place_key(name: str, life: int, column: int) -> str:
    return f"place/{name}/{life}/{column}"
