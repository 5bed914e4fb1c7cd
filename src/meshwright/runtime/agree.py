"""Agreement between ranks that save or load together: all continue, or all raise the same error."""

import os
from collections.abc import Callable
from typing import TypeVar

from meshwright.comm.groups import from_every_rank
from meshwright.errors import CheckpointError, DiskError, MeshwrightError
from meshwright.runtime.object_path import AnyPath, place_of

T = TypeVar("T")


def same_path(path: str | os.PathLike[str]) -> tuple[AnyPath, str]:
    """Return the path and its name in error messages. Raise a CheckpointError if ranks give different paths."""
    where = os.fspath(path)
    problem = differing("the path", from_every_rank(where), "checkpoint")
    if problem is not None:
        raise problem
    return place_of(path), where


def differing(what: str, by_rank: list[str], where: str) -> CheckpointError | None:
    """The error to raise if the values of ranks differ; None if they are equal."""
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            return CheckpointError(
                f"{what} is {other} on rank {rank}, {by_rank[0]} on rank 0",
                where=where,
                remedy="call save and load with the same on every rank",
            )
    return None


def everywhere(where: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank, and return its result. If a rank fails, all ranks raise the error of the first
    failed rank."""
    result, failure = None, None
    try:
        result = convert_errors(where, action)
    except MeshwrightError as error:
        failure = error
    for first in from_every_rank(failure):
        if first is not None:
            raise first
    return result  # type: ignore[return-value]


def convert_errors(where: str, action: Callable[[], T]) -> T:
    """Run ``action``, and convert its errors to errors that can be sent to other ranks. An OSError becomes a DiskError,
    even if another error wraps it. Any other error that is not a MeshwrightError becomes a CheckpointError."""
    try:
        return action()
    except MeshwrightError:
        raise
    except Exception as error:
        from_disk = _os_error(error)
        if from_disk is None:
            raise CheckpointError(
                f"{type(error).__name__}: {error}", where=where,
                remedy="the ranks' tracebacks, in the folder ranks of the run, say where it comes from",
            ) from error  # fmt: skip
        raise DiskError(
            from_disk.strerror or f"{from_disk}",
            where=str(from_disk.filename or where),
            remedy="check the disk's space and permissions",
        ) from error


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
