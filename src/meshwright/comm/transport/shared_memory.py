"""Two ranks of one machine: memory that both see, and futexes to sleep on.

Each rank owns an anonymous file in memory, which vanishes with the last process that holds it, however that ends:

    page 0   published: how many messages its owner has put in   (a futex, on which the peer sleeps)
             consumed:  how many of the peer's it has done with  (another)
    pages    per message: where it lies, and its bytes
    arena    a ring of messages

A message is at most ``MESSAGE_BYTES``, so that what one rank writes the other finds in the cache that they share. What
finds no room waits in a queue, and goes when there is some, whenever the rank uses the memory or sleeps; so sending
never blocks, and there is no deadlock while each rank receives in the order in which the other sends.
"""

import ctypes
import logging
import mmap
import os
import platform
import secrets
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import Finish, Work
from meshwright.errors import LostRankError, RankError

MESSAGE_BYTES = 2**20
ARENA_BYTES = 64 * 2**20
SLOTS = 1024
"""Messages that may lie in the arena."""
SLEEP_S = 0.5
"""After so long without news a sleeper looks whether its peer still lives."""
FLUSH_S = 0.0005
"""After so long it looks for room, while something waits in its queue."""
SPINS = 64
"""Looks before it sleeps: a few microseconds, less than a sleep costs."""

_PUBLISHED, _CONSUMED, _TOKEN, _SLOTS_AT = 0, 64, 128, 4096
_SLOT = struct.Struct("=QQ")
_ARENA_AT = _SLOTS_AT + SLOTS * _SLOT.size
_LINE = 64
_WORD = 2**32
_FUTEX = 202  # the system call's number on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1

_log = logging.getLogger(__name__)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Segment:
    """The memory of one rank, seen from either side."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, _ARENA_AT + ARENA_BYTES)
        self.published = ctypes.c_uint32.from_buffer(self.memory, _PUBLISHED)
        self.consumed = ctypes.c_uint32.from_buffer(self.memory, _CONSUMED)
        self.arena = torch.frombuffer(self.memory, dtype=torch.uint8, offset=_ARENA_AT)


class _Message(NamedTuple):
    """A message to come: how many bytes of what dtype, what to do with them, where in their whole they begin, how many
    messages of ours must have gone before (``finish`` may overwrite them), and what it is called in errors."""

    dtype: torch.dtype
    num_bytes: int
    finish: Finish
    begin: int
    after: int
    label: str


class SharedMemory:
    """A channel, and exchanges, through memory that two ranks share. ``connect`` makes it."""

    def __init__(self, mine: _Segment, theirs: _Segment, peer: int, peer_process: int, timeout_s: float) -> None:
        self._mine, self._theirs = mine, theirs
        self._peer, self._peer_process, self._timeout_s = peer, peer_process, timeout_s
        self._futex = ctypes.CDLL(None).syscall
        self._long, self._short = _timespec(SLEEP_S), _timespec(FLUSH_S)
        self._queue: deque[Tensor] = deque()
        self._num_sent = 0  # published, or in the queue
        self._num_published = 0
        self._num_done = 0
        self._expected: deque[_Message] = deque()
        self._live: deque[tuple[int, int]] = deque()  # what the peer may still read: message number, where it begins
        self._head = 0

    @classmethod
    def connect(cls, store: dist.Store, name: str, rank: int, peer: int, timeout_s: float) -> Self | None:
        """Share memory with another rank that calls this with the same name; None (for both) where they cannot."""
        token = secrets.token_bytes(16)
        descriptor = mine = None
        if sys.platform == "linux" and platform.machine() == "x86_64":
            descriptor = os.memfd_create("meshwright")
            os.ftruncate(descriptor, _ARENA_AT + ARENA_BYTES)
            mine = _Segment(descriptor)
            mine.memory[_TOKEN : _TOKEN + len(token)] = token
        here, there = (f"{name}/{one}/{other}" for one, other in ((rank, peer), (peer, rank)))
        store.set(here, f"{os.getpid()} {-1 if descriptor is None else descriptor} {token.hex()}")
        process, number, wanted = store.get(there).decode().split()
        theirs = None
        if mine is not None and int(number) >= 0:
            theirs = cls._open(int(process), int(number), bytes.fromhex(wanted))
        store.set(f"{here}/opened", str(theirs is not None))
        both = store.get(f"{there}/opened") == b"True"
        if descriptor is not None:
            os.close(descriptor)
        if mine is None or theirs is None or not both:
            _log.info("ranks %d and %d share no memory: they send and receive", *sorted((rank, peer)))
            return None
        return cls(mine, theirs, peer, os.pidfd_open(int(process)), timeout_s)

    @staticmethod
    def _open(process: int, number: int, token: bytes) -> _Segment | None:
        """The peer's memory, if it is on this machine and lets us; the token says that it is the right one."""
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError:
            return None
        try:
            segment = _Segment(descriptor)
        except (OSError, ValueError):  # another file, of another size
            return None
        finally:
            os.close(descriptor)
        return segment if segment.memory[_TOKEN : _TOKEN + len(token)] == token else None

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._peer_process)

    # --- sending ---------------------------------------------------------------------------------------------------

    def start(self, mine: Tensor, finish: Finish) -> Work:
        """Exchange: lay ``mine`` where the peer finds it, and expect as much of it."""
        self.send(mine)
        return self._expect(mine, finish, "", self._num_sent)

    def send(self, tensor: Tensor) -> Work:
        """Lay a tensor where the peer finds it, as far as there is room."""
        flat = tensor.view(-1)
        step = MESSAGE_BYTES // tensor.element_size()
        for begin in range(0, flat.numel(), step):
            self._queue.append(flat[begin : begin + step].view(torch.uint8))
            self._num_sent += 1
        self._flush()
        return _Until(self.depart, self._num_sent)

    def depart(self, number: int) -> None:
        """Wait until so many messages are where the peer finds them."""
        self._flush()
        while self._num_published < number:
            self._await(self._theirs.consumed, self._live[0][0], "room for a message")
            self._flush()

    def _flush(self) -> None:
        """Publish what waits, while there is room."""
        while self._queue:
            part = self._queue[0]
            num_bytes = part.numel()
            at = self._place(num_bytes)
            if at is None:
                return
            self._mine.arena[at : at + num_bytes].copy_(part)
            _SLOT.pack_into(self._mine.memory, _SLOTS_AT + self._num_published % SLOTS * _SLOT.size, at, num_bytes)
            self._queue.popleft()
            self._num_published += 1
            self._live.append((self._num_published, at))
            self._tell(self._mine.published, self._num_published)

    def _place(self, num_bytes: int) -> int | None:
        """Where in the ring there is room, or None."""
        live = self._live
        consumed = self._theirs.consumed.value
        while live and _reached(consumed, live[0][0]):
            live.popleft()
        if not live:
            self._head = 0  # where the caches know it
        elif len(live) == SLOTS:
            return None
        size = -(-num_bytes // _LINE) * _LINE
        tail = live[0][1] if live else ARENA_BYTES
        at = self._head
        if live and tail >= at:  # the ring has turned: the room is between head and tail
            if at + size >= tail:
                return None
        elif at + size > ARENA_BYTES:
            if size >= tail:
                return None
            at = 0
        self._head = at + size
        return at

    # --- receiving -------------------------------------------------------------------------------------------------

    def receive(self, into: Tensor, label: str = "") -> Work:
        """Expect as much as ``into`` holds."""
        flat = into.view(-1)

        def keep(theirs: Tensor, begin: int) -> None:
            flat[begin : begin + theirs.numel()].copy_(theirs)

        return self._expect(into, keep, label, 0)

    def _expect(self, like: Tensor, finish: Finish, label: str, num_sent: int) -> Work:
        step = MESSAGE_BYTES // like.element_size()
        begins = range(0, like.numel(), step)
        for place, begin in enumerate(begins, 1):
            count = min(step, like.numel() - begin)
            after = max(0, num_sent - len(begins) + place)
            self._expected.append(_Message(like.dtype, count * like.element_size(), finish, begin, after, label))
        return _Until(self.complete, self._num_done + len(self._expected))

    def complete(self, number: int) -> None:
        """Wait for the peer's messages up to that one, and finish them in their order."""
        self._flush()
        while self._num_done < number:
            self._complete_next()

    def _complete_next(self) -> None:
        number = self._num_done + 1
        message = self._expected[0]
        self.depart(message.after)
        self._await(self._theirs.published, number, message.label or f"message {number}")
        at, num_bytes = _SLOT.unpack_from(self._theirs.memory, _SLOTS_AT + self._num_done % SLOTS * _SLOT.size)
        self._expected.popleft()
        if num_bytes != message.num_bytes:
            what = message.label or f"message {number}"
            raise RankError(
                f"it sent {num_bytes} bytes where {message.num_bytes} were expected, in {what}",
                where=f"rank {self._peer}",
                remedy="all ranks must run the same model with batches of the same shape",
            )
        message.finish(self._theirs.arena[at : at + num_bytes].view(message.dtype), message.begin)
        self._num_done = number
        self._tell(self._mine.consumed, number)

    # --- futexes ---------------------------------------------------------------------------------------------------

    def _tell(self, word: ctypes.c_uint32, number: int) -> None:
        word.value = number % _WORD
        self._futex(_FUTEX, ctypes.byref(word), _FUTEX_WAKE, 1)

    def _await(self, word: ctypes.c_uint32, number: int, what: str) -> None:
        """Sleep until the peer's word has reached ``number``; what waits in the queue goes meanwhile."""
        for _ in range(SPINS):
            if _reached(word.value, number):
                return
        deadline = time.monotonic() + self._timeout_s
        look = time.monotonic() + SLEEP_S
        while not _reached(seen := word.value, number):
            queued = word is not self._theirs.consumed and bool(self._queue)
            if queued:
                self._flush()
            sleep = self._short if queued and self._queue else self._long
            self._futex(_FUTEX, ctypes.byref(word), _FUTEX_WAIT, seen, ctypes.byref(sleep))
            if word.value == seen and time.monotonic() >= look:
                self._check_peer(word, number, deadline, what)
                look = time.monotonic() + SLEEP_S

    def _check_peer(self, word: ctypes.c_uint32, number: int, deadline: float, what: str) -> None:
        poll = select.poll()
        poll.register(self._peer_process, select.POLLIN)
        if poll.poll(0) and not _reached(word.value, number):
            raise LostRankError(
                f"it has ended, and {what} is due", where=f"rank {self._peer}", remedy="look for its own error"
            )
        if time.monotonic() > deadline:
            raise LostRankError(
                f"it has sent nothing for {self._timeout_s:g} s, and {what} is due",
                where=f"rank {self._peer}",
                remedy="look at what that rank does; MESHWRIGHT_TIMEOUT_S sets how long ranks wait for others",
            )


def _timespec(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


class _Until:
    def __init__(self, reach: Callable[[int], None], number: int) -> None:
        self._reach, self._number = reach, number

    def wait(self) -> None:
        self._reach(self._number)


def _reached(word: int, number: int) -> bool:
    """Whether a counter of 32 bits has come to ``number`` (which has more)."""
    return (word - number) % _WORD < _WORD // 2
