"""Locks a directory, so that two runs do not write into it at the same time."""

import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError, MeshwrightError

log = logging.getLogger("meshwright")

LAUNCHER, TRAINER = ".lock", ".train.lock"
"""Names of lock files: a launcher's, and that of rank 0, which trains under whatever launcher."""
BEAT_S = 5.0
"""Seconds between two signs of life of a holder. File systems may lock a file on each host alone (NFS without a lock
manager): there, the holder on another host is told by the file's time."""


class LockHolder(msgspec.Struct, frozen=True):
    """The process that holds a lock."""

    host: str
    process: int
    since: str


@contextmanager
def locked(
    directory: Path, name: str, *, kind: type[MeshwrightError] = LaunchError, option: str = "--train.directory",
    takes_over: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Lock a directory. The lock ends with the process, however it ends. A file system without locks is warned of.

    Args:
        kind: the class of the error.
        option: chooses another directory.
        takes_over: whether a holder on another host is known to have ended.

    Raises:
        MeshwrightError: another process, here or on another host that shares the directory, holds the lock.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / name).open("a+b", buffering=0)
    except OSError as error:
        raise kind(
            f"the folder of the run cannot be used: {error.strerror}", where=str(error.filename or directory),
            remedy=f"check the disk and the folder's permissions, or choose another one ({option})",
        ) from error  # fmt: skip
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                log.warning("%s cannot be locked (%s): start no second run in it", directory, error.strerror)
            else:
                raise _at_work(directory, name, kind, option) from None
        if not takes_over and _lives_elsewhere(directory / name):
            raise _at_work(directory, name, kind, option)
        holder = LockHolder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))
        with suppress(OSError):  # of a full disk: the lock holds all the same
            file.truncate(0)
            file.write(msgspec.json.encode(holder))
        ended = threading.Event()
        beat = threading.Thread(target=_show_life, args=(directory / name, ended), name="holds a lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            with suppress(OSError):  # the disk may be gone, or have become read-only
                file.truncate(0)  # nobody needs to ask whether this holder lives


def _at_work(directory: Path, name: str, kind: type[MeshwrightError], option: str) -> MeshwrightError:
    holder = _holder(directory / name)
    known = f": process {holder.process} on {holder.host}, since {holder.since}" if holder is not None else ""
    return kind(
        f"another run is at work in this directory{known}",
        where=str(directory),
        remedy=f"wait for it, stop it, or choose another directory ({option})",
    )


def _holder(file: Path) -> LockHolder | None:
    """The holder of a lock; None if the file does not say."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=LockHolder)
    except (OSError, msgspec.DecodeError):
        return None


def _lives_elsewhere(file: Path) -> bool:
    """Whether a process on another host holds a lock that this host does not see: its file gets new times."""
    holder = _holder(file)
    if holder is None or holder.host == socket.gethostname():
        return False
    log.info("%s was held on %s: whether that process lives shows in %g s", file, holder.host, 2.5 * BEAT_S)
    before = file.stat().st_mtime_ns
    time.sleep(2.5 * BEAT_S)
    return file.stat().st_mtime_ns != before


def _show_life(file: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):
            os.utime(file)
