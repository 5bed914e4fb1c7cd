"""Processes of this machine: which of them may share memory, and whether another one has ended."""

import os
import platform
import select
import sys
from contextlib import suppress
from pathlib import Path


def box() -> str:
    """What is the same for all processes that may share memory: the kernel since its start, and the namespaces in which
    this process has its network (emulated boxes differ in it) and its number."""
    if sys.platform != "linux":
        return platform.node()
    spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = platform.node()
    return " ".join((machine, *spaces))


class Process:
    """Another process of this box, by its number.

    It is held by a descriptor (``pidfd``), or, where the kernel or the container refuses that, recognised in ``/proc``
    by the time of its start; ``refused`` is why.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, number: int) -> None:
        self._descriptor, self.refused = -1, ""
        self._stat = Path(f"/proc/{number}/stat")
        try:
            self._descriptor = os.pidfd_open(number)
        except ProcessLookupError:
            raise
        except (AttributeError, OSError) as error:  # an old C library, an old kernel, a container's filter
            self.refused = f"pidfd_open: {error}"
            self._state, self._began = self._look()
            if not self._state:
                raise ProcessLookupError(f"no process {number}") from None

    def has_ended(self) -> bool:
        """Whether the process is gone, be it that its parent has not heard of it yet."""
        if self._descriptor < 0:
            state, began = self._look()
            return state in ("", "Z", "X") or began != self._began
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def _look(self) -> tuple[str, str]:
        """Its state and the time of its start; nothing where it is gone."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return "", ""
        return fields[0], fields[19]

    def __del__(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
