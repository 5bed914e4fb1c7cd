"""Signals and requests that reach a launcher while its ranks run."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Self

from meshwright.runtime.preemption import TOGETHER_S, WARNINGS


class Signals:
    """Handles signals while ranks run. The first SIGTERM or SIGUSR1 is passed on to the ranks: they may save and
    end. A second one, SIGINT and SIGHUP kill the ranks, and the launcher then finds them ended.

    The handler itself raises no exception, because torch's agent could swallow it. Ranks start with SIGINT blocked:
    Ctrl-C reaches all processes of a terminal, and must not stop a rank in the middle of its imports. In the launcher,
    the main thread blocks SIGINT too, and another thread receives it.

    ``ask`` and ``kill``, if they are given, do the same as the first SIGUSR1 and as SIGINT, without an exception: this
    launcher goes on. ``num_ranks`` is the number of its ranks.
    """

    HANDLED = (signal.SIGINT, signal.SIGHUP, *WARNINGS)

    def __init__(self, num_ranks: int, ask: threading.Event | None, kill: threading.Event | None) -> None:
        self._num_ranks = num_ranks
        self._ask, self._kill = ask or threading.Event(), kill or threading.Event()
        self.warning = ""
        """The name of the signal that was passed on; empty if there was none."""
        self.killed_all = False
        """Whether no rank had ended when ``kill`` was set: others are to blame."""
        self._warned_s, self._stop = 0.0, 0
        self._done = threading.Event()
        self._others = set(multiprocessing.active_children())
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._in_main_thread:
            _start_resource_tracker()
            self._before = {number: signal.signal(number, self._note) for number in self.HANDLED}
            self._thread = threading.Thread(target=self._watch, name="stops ranks", daemon=True)
            self._thread.start()
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._in_main_thread:
            self._thread.join()
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def raise_received(self) -> None:
        """Raise KeyboardInterrupt if SIGINT was received, SystemExit if another signal has killed the ranks; else do
        nothing."""
        if self._stop == signal.SIGINT:
            raise KeyboardInterrupt from None
        if self._stop:
            raise SystemExit(128 + self._stop) from None

    def _note(self, number: int, frame: object) -> None:
        if number in WARNINGS and not self.warning:
            self.warning, self._warned_s = signal.Signals(number).name, time.monotonic()
        elif number not in WARNINGS or time.monotonic() - self._warned_s > TOGETHER_S:
            self._stop = self._stop or number

    def _watch(self) -> None:
        warned = set(self._others)
        while not self._done.wait(0.1):
            name = self.warning or (signal.SIGUSR1.name if self._ask.is_set() else "")
            if self._stop or self._kill.is_set():
                running = set(multiprocessing.active_children()) - self._others
                self.killed_all |= self._kill.is_set() and len(running) == self._num_ranks
                for process in running:
                    process.kill()
            elif name:
                for process in set(multiprocessing.active_children()) - warned:
                    warned.add(process)
                    if process.pid is not None:
                        with suppress(ProcessLookupError):
                            os.kill(process.pid, signal.Signals[name])


def _start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker before SIGINT is blocked, because its start unblocks SIGINT. The
    tracker's warning about resources of killed ranks is switched off: the tracker cleans up these resources anyway."""
    option = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(option)
    try:
        with blocked(WARNINGS):
            resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(option)


@contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals in this thread. A process that is started meanwhile never receives them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
