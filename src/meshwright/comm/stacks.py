"""Where the threads of a rank are: said by itself, or, if it cannot run Python code, by a signal handler in C."""

import faulthandler
import linecache
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR2
"""The signal that makes a rank write its stacks. (Training itself listens to SIGUSR1.)"""
FRAMES = 12
"""The most frames of a stack that are shown: the innermost."""


class SignalledStacks:
    """Lets ``SIGNAL`` write the stacks of all threads of this process to a file, even while C code keeps Python from
    running. If the process already handles the signal, nothing is changed, and ``descriptor`` is -1."""

    def __init__(self, path: Path | None) -> None:
        self.descriptor = -1
        try:
            if SIGNAL in _signals("self", "SigCgt") | _signals("self", "SigIgn"):
                return
        except OSError:  # no /proc here
            return
        if path is None:
            self.descriptor = os.memfd_create("meshwright-stacks", os.MFD_CLOEXEC)
        else:
            flags = os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
            self.descriptor = os.open(path, flags, 0o644)
        faulthandler.register(SIGNAL, file=self.descriptor)

    def close(self) -> None:
        """Handle the signal no more."""
        if self.descriptor >= 0:
            faulthandler.unregister(SIGNAL)
            os.close(self.descriptor)
            self.descriptor = -1


def main_stack() -> tuple[str, ...]:
    """The stack of this process's main thread, the innermost frame last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < FRAMES:
        code, number = frame.f_code, frame.f_lineno
        text = linecache.getline(code.co_filename, number).strip()
        lines.append(f"{code.co_filename}:{number} in {code.co_name}" + (f": {text}" if text else ""))
        frame = frame.f_back
    return tuple(reversed(lines))


def demand(process: int) -> bool:
    """Let a process write its stacks. Returns False if it does not handle the signal, which would end it."""
    with suppress(OSError):
        if SIGNAL in _signals(process, "SigCgt"):
            os.kill(process, SIGNAL)
            return True
    return False


def last_stack(path: Path) -> tuple[str, ...]:
    """The stack of the interrupted thread that was written last to a file of ``SignalledStacks``, the innermost frame
    last; empty if there is none."""
    with suppress(OSError):
        threads = path.read_text(errors="replace").strip().split("\n\n")
        current = next((part for part in reversed(threads) if part.startswith("Current thread")), "")
        return tuple(line.strip() for line in reversed(current.splitlines()[1 : 1 + FRAMES]))
    return ()


def _signals(process: int | str, name: str) -> set[int]:
    """The signals that a process catches (``SigCgt``) or ignores (``SigIgn``); Python knows of no handlers in C."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            mask = int(line.partition(":")[2], 16)
            return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return set()
