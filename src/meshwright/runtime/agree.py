"""Ranks that save or load together: all go on, or all raise the same error."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshwright.comm.groups import from_every_rank
from meshwright.errors import CheckpointError, DiskError, MeshwrightError

T = TypeVar("T")


def same_path(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """The path, and what to call it in errors; a CheckpointError if ranks have given different ones."""
    where = os.fspath(path)
    check_same("checkpoint", "the path", where)
    return Path(path), where


def check_same(where: str, what: str, mine: str) -> None:
    """A CheckpointError, on every rank, if ``mine`` is not the same on each."""
    every = from_every_rank(mine)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise CheckpointError(
                f"{what} is {other} on rank {rank}, {every[0]} on rank 0",
                where=where,
                remedy="call save and load with the same on every rank",
            )


def everywhere(where: str, action: Callable[[], T]) -> T:
    """Do it on every rank; if it fails on one, every rank raises the first one's error."""
    result, mine = None, None
    try:
        result = told(where, action)
    except MeshwrightError as error:
        mine = error
    for first in from_every_rank(mine):
        if first is not None:
            raise first
    return result  # type: ignore[return-value]


def told(where: str, action: Callable[[], T]) -> T:
    """Do it, and raise every error as one that can be sent to other ranks: an OSError, also one that torch's writer has
    replaced by its own, as a DiskError; any other that is not a MeshwrightError as a CheckpointError."""
    try:
        return action()
    except MeshwrightError:
        raise
    except Exception as error:
        from_disk = _os_error(error)
        if from_disk is None:
            raise CheckpointError(f"{type(error).__name__}: {error}", where=where) from error
        raise DiskError(
            from_disk.strerror or f"{from_disk}",
            where=str(from_disk.filename or where),
            remedy="check the disk's space and permissions",
        ) from error


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
