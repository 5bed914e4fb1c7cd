"""A lane between two ranks of one machine: memory that both map (``segment.py``), and futexes on which they sleep.

Each message fits in a slot, and a lane has few slots. So a rank finds the peer's messages in the cache that both ranks
share. No deadlock occurs if each rank takes messages in the order in which the peer puts them.
"""

import ctypes
import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import OWN_ERROR, Lane, Trouble, check_message, late
from meshwright.comm.transport.process import Process, box
from meshwright.comm.transport.segment import BECAUSE, TOKEN_AT, TOLD, Segment, allocate
from meshwright.errors import LostRankError, RankError

SLEEP_S = 0.5
"""Seconds without a message after which a sleeping rank checks that its peer still lives."""
NAP_S = 0.001
"""Length of the first sleep in seconds. It is short, because the peer may not have noticed that it must wake this
rank."""
SPINS, YIELDS = 100, 16
"""The number of checks for a change before a rank sleeps: ``SPINS`` without a pause, then ``YIELDS`` after yielding its
core. All these checks together take less time than a sleep."""
ENDED = "it has ended"
_REFUSED = "refused: "
_BEHIND = 2**31
"""This bit of ``word - number`` is set until the 32-bit counter ``word`` reaches ``number``, which may have more bits.
"""
_FUTEX = 202  # the system call's number on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1

_log = logging.getLogger(__name__)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory(Lane):
    """A lane through memory that two ranks share. ``connect`` makes the lane.

    While this rank waits, it calls ``while_waiting`` (if set), which returns the seconds after which to call it again.
    Every ``SLEEP_S`` seconds it calls ``look`` (if set), which raises an error if waiting is in vain. ``blame`` returns
    why a peer has ended.
    """

    def __init__(
        self, own_segment: Segment, peer_segment: Segment, slots: int, peer: int, process: Process, timeout_s: float
    ) -> None:
        self.while_waiting: Callable[[], float] | None = None
        self.look: Callable[[], None] | None = None
        self.blame: Callable[[int], Trouble] = lambda rank: Trouble(f"rank {rank}", ENDED)
        self.peer, self.timeout_s = peer, timeout_s
        self._own_segment, self._peer_segment, self._slots, self.process = own_segment, peer_segment, slots, process
        self._futex = ctypes.CDLL(None).syscall
        self._num_put = 0
        self._num_taken = 0

    @classmethod
    def connect(
        cls,
        store: dist.Store,
        name: str,
        rank: int,
        peer: int,
        timeout_s: float,
        slots: int,
        check: Callable[[int], None] = lambda peer: None,
    ) -> Self | None:
        """Share memory with the rank ``peer``, which must call this with the same name. Both ranks get None if they
        cannot share memory. ``check`` is called every ``SLEEP_S`` seconds and raises an error if the peer is gone.

        Only ranks of one box try to share memory. Each rank opens the other rank's memory, and checks that it holds the
        token that the other rank has put into the store.

        Raises:
            RankError: this machine has no memory left to share, or the peer called ``refuse``.
            LostRankError: the peer has ended, or does not call ``connect`` within the timeout.
        """
        token = secrets.token_bytes(16)
        descriptor = own_segment = None
        if sys.platform == "linux" and platform.machine() == "x86_64":
            descriptor = allocate(slots, rank)
            own_segment = Segment(descriptor, slots)
            own_segment.memory[TOKEN_AT : TOKEN_AT + len(token)] = token
        here, there = (f"{name}/{sender}/{receiver}" for sender, receiver in ((rank, peer), (peer, rank)))
        at = box()
        store.set(here, f"{os.getpid()} {-1 if descriptor is None else descriptor} {token.hex()} {at}")
        number, file, wanted, their_box = _answer(store, there, peer, timeout_s, check).split(" ", 3)
        process = theirs = None
        if own_segment is not None and int(file) >= 0 and their_box == at:
            try:
                process = Process(int(number))
            except ProcessLookupError:
                raise _ended(peer) from None
            theirs = cls._open(int(number), int(file), bytes.fromhex(wanted), slots)
        store.set(f"{here}/opened", str(theirs is not None))
        both = _answer(store, f"{there}/opened", peer, timeout_s, check, process) == "True"
        if descriptor is not None:
            os.close(descriptor)
        if own_segment is None or theirs is None or process is None or not both:
            _log.info("ranks %d and %d share no memory: they send and receive", *sorted((rank, peer)))
            return None
        return cls(own_segment, theirs, slots, peer, process, timeout_s)

    @staticmethod
    def refuse(store: dist.Store, name: str, rank: int, peer: int, error: RankError) -> None:
        """Make the peer raise ``error`` in its ``connect``, now or later."""
        for key in (f"{name}/{rank}/{peer}", f"{name}/{rank}/{peer}/opened"):
            store.set(key, _REFUSED + "\n".join((error.problem, error.where, error.remedy)))

    @staticmethod
    def _open(process: int, number: int, token: bytes, slots: int) -> Segment | None:
        """The peer's memory; None if it cannot be opened, or if a wrong token shows that it is another file."""
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError:
            return None
        try:
            segment = Segment(descriptor, slots)
        except (OSError, ValueError):  # another file, with another size
            return None
        finally:
            os.close(descriptor)
        return segment if segment.memory[TOKEN_AT : TOKEN_AT + len(token)] == token else None

    # --- messages --------------------------------------------------------------------------------------------------

    def wait_for_room(self) -> None:
        """Wait until a slot is free."""
        self._await(self._peer_segment.consumed, self._num_put - self._slots + 1, "room for a message")

    def wait_for_message(self, what: str) -> None:
        """Wait until the next message has arrived. Errors call the message ``what``."""
        self._await(self._peer_segment.published, self._num_taken + 1, what)

    def check_message(self, what: str, waited_s: float) -> None:
        """Raise an error if the next message, for which this rank has waited ``waited_s`` seconds, will not come."""
        if self.look is not None:
            self.look()
        deadline = time.monotonic() + self.timeout_s - waited_s
        self._check_peer(self._peer_segment.published, self._num_taken + 1, deadline, what)

    def has_room(self) -> bool:
        """Whether a slot is free."""
        return not (self._peer_segment.consumed.value - self._num_put + self._slots - 1) & _BEHIND

    def has_come(self) -> bool:
        """Whether the next message has arrived."""
        return not (self._peer_segment.published.value - self._num_taken - 1) & _BEHIND

    def put(self, part: "Tensor | np.ndarray[Any, Any]", tag: int) -> None:
        """Copy a message into its slot and wake the peer; wait for a free slot first."""
        while not self.put_at_once(part, tag):
            self.wait_for_room()

    # These lines take most of a short message's time, so they look up each attribute only once.

    def put_at_once(self, part: "Tensor | np.ndarray[Any, Any]", tag: int) -> bool:
        """Copy a message into its slot and wake the peer, unless no slot is free."""
        number, slots, own_segment, peer_segment = self._num_put, self._slots, self._own_segment, self._peer_segment
        if (peer_segment.consumed.value - number + slots - 1) & _BEHIND:
            return False
        slot, num_bytes, dtype = number % slots, part.nbytes, part.dtype
        into = own_segment.views.get((slot, num_bytes, dtype))
        if into is None:
            into = own_segment.view(slot, num_bytes, dtype)
        if isinstance(part, np.ndarray):
            into[...] = part
        else:
            into.copy_(part)
        heads, at = own_segment.heads, 2 * slot
        heads[at], heads[at + 1] = num_bytes, tag
        self._num_put = number = number + 1
        own_segment.published.value = number  # the word keeps its lower 32 bits
        if peer_segment.sleeping.value:
            self._wake(own_segment.published)
        return True

    def take(self, num: int, dtype: Any, tag: int, label: str = "") -> Any:
        """Wait for the next message, and return it without a copy: as a tensor, or an array if the dtype is numpy's."""
        number, theirs = self._num_taken, self._peer_segment
        if (theirs.published.value - number - 1) & _BEHIND:
            self._await(theirs.published, number + 1, label)
        slot, heads, num_bytes = number % self._slots, theirs.heads, num * dtype.itemsize
        found_bytes, found_tag = heads[2 * slot], heads[2 * slot + 1]
        if found_tag != tag or found_bytes != num_bytes:
            check_message(self.peer, (found_bytes, found_tag), (num_bytes, tag), label or f"message {number + 1}")
        view = theirs.views.get((slot, num_bytes, dtype))
        return theirs.view(slot, num_bytes, dtype) if view is None else view

    def head(self) -> tuple[int, int]:
        """The number of bytes and the tag of the next message, which has arrived."""
        at = 2 * (self._num_taken % self._slots)
        return self._peer_segment.heads[at], self._peer_segment.heads[at + 1]

    def release(self) -> None:
        """Free the slot of the message that was taken, and wake the peer."""
        self._num_taken = number = self._num_taken + 1
        self._own_segment.consumed.value = number
        if self._peer_segment.sleeping.value:
            self._wake(self._own_segment.consumed)

    # --- what ranks report of themselves -----------------------------------------------------------------------------

    def tell(self, number: int, words: bytes) -> None:
        """Write the report where the peer can read it, even after this rank has ended."""
        self._own_segment.begun.value = number
        self._own_segment.write(TOLD, words)

    def finished(self, number: int) -> None:
        """Write the number of the collective where the peer can read it, even after this rank has ended."""
        self._own_segment.finished.value = number

    def give_up(self, number: int, words: bytes, because_of: str) -> None:
        """Write the report and the rank to blame where the peer can read them, then mark this rank as failed."""
        self.tell(number, words)
        self._own_segment.write(BECAUSE, because_of.encode())
        self._own_segment.failed.value = 1

    def trouble(self, number: int) -> Trouble | None:
        """The trouble if the peer has given up, or ended before it finished collective ``number``; else None."""
        if self._peer_segment.failed.value:
            return Trouble(self._peer_segment.read(BECAUSE), f"rank {self.peer} has given up because of it")
        if self._peer_segment.finished.value < number and self.has_ended():
            return self.blame(self.peer)
        return None

    def last_report(self) -> str:
        """The peer's last report, and the collective in which the peer last sent a message.

        The peer reports only the first of several equal collectives in a row. The numbers of its last sent and its last
        finished collective show the peer's current collective.
        """
        words = self._peer_segment.read(TOLD)
        ended = ", and has ended" if self.has_ended() else ""
        if not words:
            return f"rank {self.peer} has begun none{ended}"
        number, put, sent = self._peer_segment.begun.value, self._peer_segment.published.value, ""
        if put:
            tag = self._peer_segment.heads[(put - 1) % self._slots * 2 + 1]
            sent = f", has last sent to this rank in #{tag >> 32}"
            if not self._peer_segment.failed.value:
                number = max(number, tag >> 32, self._peer_segment.finished.value)
        return f"rank {self.peer} was in #{number} {words}{sent}{ended}"

    def has_ended(self) -> bool:
        """Whether the peer has left, or its process is gone."""
        return bool(self._peer_segment.left.value) or self.process.has_ended()

    def leave(self) -> None:
        """Report that this rank puts and takes no more messages."""
        self._own_segment.left.value = 1

    # --- futexes ---------------------------------------------------------------------------------------------------

    def _wake(self, word: ctypes.c_uint32) -> None:
        """Wake the peer if it sleeps on this word."""
        self._futex(_FUTEX, ctypes.byref(word), _FUTEX_WAKE, 1)

    def _await(self, word: ctypes.c_uint32, number: int, what: str) -> None:
        """Wait until the peer's counter ``word`` reaches ``number``. Errors say that ``what`` (or message ``number``)
        is due."""
        for _ in range(SPINS):
            if not (word.value - number) & _BEHIND:
                return
        for _ in range(YIELDS):
            os.sched_yield()
            if not (word.value - number) & _BEHIND:
                return
        now = time.monotonic()
        deadline, look, sleep_s = now + self.timeout_s, now + SLEEP_S, NAP_S
        sleeping = self._own_segment.sleeping
        try:
            sleeping.value = 1
            while ((seen := word.value) - number) & _BEHIND:
                if self.while_waiting is not None:
                    sleep_s = min(sleep_s, self.while_waiting())
                sleep = _Timespec(int(sleep_s), int(sleep_s % 1 * 1e9))
                self._futex(_FUTEX, ctypes.byref(word), _FUTEX_WAIT, seen, ctypes.byref(sleep))
                sleep_s = SLEEP_S
                if word.value == seen and time.monotonic() >= look:
                    if self.look is not None:
                        self.look()
                    self._check_peer(word, number, deadline, what)
                    look = time.monotonic() + SLEEP_S
        finally:
            sleeping.value = 0

    def _check_peer(self, word: ctypes.c_uint32, number: int, deadline: float, what: str) -> None:
        what = what or f"message {number}"
        if self.has_ended() and (word.value - number) & _BEHIND:
            raise self.blame(self.peer).error(f"{what} is due")
        if time.monotonic() > deadline:
            raise late(self.peer, f"it has sent nothing for {self.timeout_s:g} s, and {what} is due")


def _answer(
    store: dist.Store,
    key: str,
    peer: int,
    timeout_s: float,
    check: Callable[[int], None],
    process: Process | None = None,
) -> str:
    """Wait for the peer's value of ``key`` in the store. Raise an error if ``process``, the peer's process, ends."""
    deadline, look = time.monotonic() + timeout_s, time.monotonic() + SLEEP_S
    while not store.check([key]):
        if time.monotonic() > look:
            check(peer)
            look = time.monotonic() + SLEEP_S
        if process is not None and process.has_ended() and not store.check([key]):
            raise _ended(peer)
        if time.monotonic() > deadline:
            raise LostRankError(f"it has not come for {timeout_s:g} s", where=f"rank {peer}", remedy=OWN_ERROR)
        time.sleep(NAP_S)
    answer = store.get(key).decode()
    if answer.startswith(_REFUSED):
        problem, where, remedy = answer.removeprefix(_REFUSED).split("\n")
        raise RankError(problem, where=where, remedy=remedy)
    return answer


def _ended(peer: int) -> LostRankError:
    return Trouble(f"rank {peer}", ENDED).error("memory was to be shared with it")
