"""A warning that the run must end soon: all ranks agree on their last step, save it, and end with a code for "later".

    rank 0    step 7 │ step 8 │ save, end           SIGTERM reaches rank 1 in its step 7. Each rank notes the step that
    rank 1    step 7 ┘ SIGTERM│ step 8 │ save, end  it has begun (8 and 7). The largest of them is the last step of all.

A rank that was warned tells the others through the store. On every rank a thread waits there, so that a step costs
nothing, and posts the number of the step that the rank has begun. No rank begins a later step before it knows what all
others have begun: nobody waits for a rank that has stopped.
"""

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from meshwright.comm.attendance import Attendance
from meshwright.comm.groups import from_rank_0
from meshwright.comm.member import attend
from meshwright.errors import LostRankError, PreemptedError

log = logging.getLogger("meshwright")

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals with which batch systems and Kubernetes warn a process. SIGUSR1: what ``sbatch --signal`` sends by custom."""
TOGETHER_S = 1.0
"""Signals within so many seconds are the same warning, sent to a rank itself and through its launcher."""
_TOLD = "this process was told to end before"
"""A note to an error after a signal. A launcher, too, sends SIGTERM to the ranks beside one that has failed."""
LOOK_S = 0.02
"""Seconds between two looks for what another rank has begun."""
_FOREVER = timedelta(days=10000)
_END = "-"


class Preemption:
    """A context in which a rank notices warnings: signals, and what ``ask`` or other ranks say.

    In the main thread, the first SIGTERM or SIGUSR1 asks the run to end, and a second one ends this process at once,
    with 128 plus the signal's number. If the run has not left the context ``grace_s`` seconds after the warning, this
    process ends with ``PreemptedError.CODE``. In another thread, signals stay as they are.
    """

    def __init__(self, grace_s: float, end: Callable[[int], Any] = os._exit) -> None:
        self._grace_s, self._end = grace_s, end
        self._lock = threading.Lock()
        self._reason, self._begun, self._last, self._name = "", 0, -1, ""
        self._asked_s = 0.0
        self._rank, self._size = 0, 1
        self._store: Any = None
        self._attendance: Attendance | None = None
        self._timer: threading.Timer | None = None
        self._threads: list[threading.Thread] = []
        self._is_main = self._is_told = False

    def __enter__(self) -> Self:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            # The interpreter's C handler writes the number at once, even while the main thread waits in C++ code.
            self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _noted) for number in WARNINGS}
            for number in WARNINGS:
                signal.siginterrupt(number, False)
            self._start(self._listen, "hears signals")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_main:
            for number, handler in self._before.items():
                signal.signal(number, self._without_repetitions(handler) if self._reason else handler)
            signal.set_wakeup_fd(self._wakeup)
            self._sender.send(b"\0")
        if self._timer is not None:
            self._timer.cancel()
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(self._key(self._rank), _END)
        for thread in self._threads:
            thread.join(TOGETHER_S)  # the store may be gone, with a thread that waits for it
        if self._is_main:
            self._receiver.close()
            self._sender.close()
        if error is not None and self._is_told:
            error.add_note(_TOLD)

    def connect(self, step: int) -> None:
        """Listen to the other ranks of the world from now on; ``step`` steps are done. Every rank must call this."""
        world = dist.group.WORLD
        self._name = from_rank_0(lambda: secrets.token_hex(4))  # the store may outlive this run
        with self._lock:
            self._begun = step
            if world is None or world.size() == 1:
                return
            self._rank, self._size, self._attendance = world.rank(), world.size(), attend()
            # Connections of their own: a call that waits keeps others from using its connection.
            self._store, waiting = (world.get_group_store().clone() for _ in range(2))  # type: ignore[attr-defined]
            if self._reason:
                self._tell()
        self._start(lambda: self._wait_for_others(waiting), "hears other ranks")

    def ask(self, reason: str) -> None:
        """Ask all ranks to save and to end, because of ``reason``, such as ``SIGTERM``. Later calls change nothing."""
        with self._lock:
            if self._reason:
                return
            self._reason, self._asked_s = reason, time.monotonic()
            timer = threading.Timer(self._grace_s, self._give_up)
            timer.daemon = True
            try:
                timer.start()
                self._timer = timer
            except RuntimeError:  # no memory is left for a thread
                log.warning("%s: no thread can be started that would end this rank in %g s", reason, self._grace_s)
            if self._store is not None:
                self._tell()

    def due(self, step: int) -> str:
        """Return the reason to end if the last step of all ranks is done; else an empty text. ``step`` steps are done
        on this rank, which begins the next one if the text is empty."""
        with self._lock:
            if not self._reason:
                self._begun = step + 1
                return ""
        if self._last < 0:
            ranks = range(self._size)
            self._last = max(map(self._begun_by, ranks)) if self._store is not None else step
        return self._reason if step >= self._last else ""

    def _begun_by(self, rank: int) -> int:
        """Wait for the number of the step that a rank has begun.

        Raises:
            LostRankError: the rank is gone. A launcher sends SIGTERM to the ranks beside one that it has lost.
        """
        key = self._key(rank, "begun")
        while not self._store.check([key]):
            if self._attendance is not None and self._attendance.is_gone(rank) and not self._store.check([key]):
                self._attendance.check(rank)
            if time.monotonic() - self._asked_s > self._grace_s:
                raise LostRankError("it has not told which step it has begun", where=f"rank {rank}")
            time.sleep(LOOK_S)
        return int(self._store.get(key))

    def _without_repetitions(self, handler: Any) -> Callable[[int, Any], None]:
        """A handler that ignores what belongs to the warning that the run has followed, which a launcher may pass on
        after the run has ended. A later signal is handled by ``handler``, from then on."""

        def handle(number: int, frame: object) -> None:
            if time.monotonic() - self._asked_s > TOGETHER_S:
                signal.signal(number, handler)
                os.kill(os.getpid(), number)

        return handle

    def _start(self, function: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _listen(self) -> None:
        """Wait for signals. Each comes as a byte, its number; 0 ends the thread."""
        warned_s = 0.0
        while True:
            for number in self._receiver.recv(64):
                if number == 0:
                    return
                if number not in WARNINGS:
                    continue
                if not warned_s:
                    warned_s, self._is_told = time.monotonic(), True
                    self.ask(signal.Signals(number).name)
                elif time.monotonic() - warned_s > TOGETHER_S:
                    self._end(128 + number)

    def _wait_for_others(self, store: Any) -> None:
        """Wait until a rank of the world was warned, and post the step that this rank has begun."""
        with suppress(RuntimeError):  # the rank that kept the store is gone: the steps notice this too
            store.wait([self._key(self._rank)], _FOREVER)
            reason = store.get(self._key(self._rank)).decode()
            if reason != _END:
                self.ask(reason)
                with self._lock:
                    begun = self._begun
                store.set(self._key(self._rank, "begun"), f"{begun}")

    def _tell(self) -> None:
        with suppress(RuntimeError):
            for rank in range(self._size):
                self._store.set(self._key(rank), self._reason)

    def _key(self, rank: int, what: str = "reason") -> str:
        return f"preemption/{self._name}/{what}/{rank}"

    def _give_up(self) -> None:
        log.warning("not saved within %g s after %s: the run goes on from its last checkpoint", self._grace_s,
                    self._reason)  # fmt: skip
        self._end(PreemptedError.CODE)


def is_told_to_end(error: BaseException) -> bool:
    """Whether an error that left the context of a ``Preemption`` came after a signal."""
    return _TOLD in getattr(error, "__notes__", ())


def _noted(number: int, frame: object) -> None:
    """A handler that does nothing, so that the C handler tells ``_listen``."""
