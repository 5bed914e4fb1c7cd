"""Locks a directory, so that two runs do not write into it at the same time."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError, MeshwrightError

log = logging.getLogger("meshwright")

LAUNCHER, TRAINER = ".lock", ".train.lock"
"""Names of lock files: a launcher's, and that of rank 0, which trains under whatever launcher."""


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lock."""

    host: str
    process: int
    since: str


@contextmanager
def locked(
    directory: Path, name: str, *, kind: type[MeshwrightError] = LaunchError, option: str = "--train.directory"
) -> Iterator[None]:
    """Lock a directory. The lock ends with the process, however it ends. A file system without locks is warned of.

    Args:
        kind: the class of the error.
        option: chooses another directory.

    Raises:
        MeshwrightError: another process, here or on another host that shares the directory, holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                log.warning("%s cannot be locked (%s): start no second run in it", directory, error.strerror)
            else:
                raise kind(
                    f"another run is at work in this directory{_holder(directory / name)}",
                    where=str(directory),
                    remedy=f"wait for it, stop it, or choose another directory ({option})",
                ) from None
        file.truncate(0)
        holder = Holder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))
        file.write(msgspec.json.encode(holder))
        yield


def _holder(file: Path) -> str:
    """The holder of a lock in words; empty if the file does not say."""
    try:
        holder = msgspec.json.decode(file.read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return ""
    return f": process {holder.process} on {holder.host}, since {holder.since}"
