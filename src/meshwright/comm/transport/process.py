"""Processes of this machine: whether they may share memory, and whether a process has ended."""

import os
import platform
import select
import sys
from contextlib import suppress
from pathlib import Path


def box() -> str:
    """A text that is equal for all processes that may share memory. It consists of the kernel's boot id, and the
    network namespace and process-id namespace of this process. Emulated boxes differ in their network namespace."""
    if sys.platform != "linux":
        return platform.node()
    spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = platform.node()
    return " ".join((machine, *spaces))


class Process:
    """Another process of this box. ``number`` is its process id.

    A descriptor (``pidfd``) identifies the process. If the kernel or the container refuses a descriptor, the start time
    in ``/proc`` identifies the process, and ``refused`` holds the reason. So it does without ``by_descriptor``.
    ``descriptor`` becomes readable when the process ends; it is -1 if there is none.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, number: int, *, by_descriptor: bool = True) -> None:
        self.number, self.descriptor, self.refused = number, -1, ""
        self._stat = Path(f"/proc/{number}/stat")
        try:
            if by_descriptor:
                self.descriptor = os.pidfd_open(number)
        except ProcessLookupError:
            raise
        except (AttributeError, OSError) as error:  # reasons: an old C library, an old kernel, a container's filter
            self.refused = f"pidfd_open: {error}"
        if self.descriptor < 0:
            self._state, self._began = self._look()
            if not self._state:
                raise ProcessLookupError(f"no process {number}") from None

    def has_ended(self) -> bool:
        """Whether the process has ended, even if its parent has not collected it yet."""
        if self.descriptor < 0:
            state, began = self._look()
            return state in ("", "Z", "X") or began != self._began
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped the process."""
        return self._look()[0] in ("T", "t")

    def _look(self) -> tuple[str, str]:
        """The process's state and start time; two empty texts if it is gone."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return "", ""
        return fields[0], fields[19]

    def __del__(self) -> None:
        if self.descriptor >= 0:
            with suppress(OSError):
                os.close(self.descriptor)
