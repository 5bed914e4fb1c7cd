"""Files that outlive a rank, and say what the rank was doing and how it failed.

``DIRECTORY/ranks`` holds for rank N:

    N.status     what the rank is doing, in case it is killed          N.failure    its error, as data
    N.log        its output (of rank 0 only what C++ code prints)      N.traceback  its error, for developers
    failed-K     the same files of the K-th attempt, if the ranks were started again after it
"""

import os
import re
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright import errors
from meshwright.errors import (
    DeviceError,
    DeviceMemoryError,
    FailedRankError,
    LostRankError,
    MeshwrightError,
    PreemptedError,
    RankError,
)
from meshwright.ir import files


def file_of(directory: Path, rank: int, name: str) -> Path:
    """The path of a rank's file ``name``: ``status``, ``log``, ``failure`` or ``traceback``."""
    return directory / "ranks" / f"{rank}.{name}"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank failed. ``ours``: the error is a MeshwrightError. ``lost_peer``: it failed because it lost a rank."""

    rank: int
    time_ns: int
    kind: str
    problem: str
    where: str = ""
    remedy: str = ""
    ours: bool = False
    lost_peer: bool = False


class Status:
    """A file that says what this rank is doing, such as ``at step 3``. The file outlives the rank."""

    LENGTH = 80

    def __init__(self, directory: Path, rank: int) -> None:
        path = file_of(directory, rank, "status")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)

    def set(self, doing: str) -> None:
        """Write what this rank does from now on. This takes microseconds; disk errors are ignored."""
        with suppress(OSError):
            os.pwrite(self._file, doing[: self.LENGTH].ljust(self.LENGTH).encode(), 0)

    @staticmethod
    def read(directory: Path, rank: int) -> str:
        """Return what a rank was last doing; an empty text if it wrote nothing."""
        path = file_of(directory, rank, "status")
        return path.read_text().strip() if path.exists() else ""

    @staticmethod
    def clear(directory: Path) -> None:
        """Remove what the ranks of an earlier attempt wrote."""
        for path in (directory / "ranks").glob("*.status"):
            path.unlink(missing_ok=True)


def record(error: BaseException, directory: Path, rank: int) -> Failure:
    """Write this rank's error to its files ``traceback`` and ``failure``, and return it as data."""
    ours = error if isinstance(error, MeshwrightError) else None
    # The nearest class that the launcher knows too.
    kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
    failure = Failure(
        rank=rank,
        time_ns=time.time_ns(),
        kind=kinds[0] if ours else type(error).__name__,
        problem=ours.problem if ours else next(iter(str(error).strip().splitlines()), ""),
        where=ours.where if ours else "",
        remedy=ours.remedy if ours else "",
        ours=ours is not None,
        lost_peer=lost_peer(error),
    )
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # on a full disk the launcher has only the exit code
        files.write_atomically(file_of(directory, rank, "traceback"), text.encode())
        files.write_atomically(file_of(directory, rank, "failure"), msgspec.json.encode(failure))
    return failure


def lost_peer(error: BaseException | None) -> bool:
    """Whether the error says that another rank no longer answers. Errors of this rank's own device do not, although
    NCCL may have been the first to meet them."""
    while error is not None:
        if isinstance(error, DeviceError | DeviceMemoryError):
            return False
        text = str(error)
        if isinstance(error, LostRankError):
            return True
        if "gloo/transport" in text or "NCCL" in text or type(error).__name__ in ("DistStoreError", "DistNetworkError"):
            return True
        error = error.__cause__ or error.__context__
    return False


GUARD = 'often a script must have what it does under `if __name__ == "__main__":`; what the import said stands above'


def first_failure(directory: Path, num_ranks: int, rank: int, exit_code: int, warning: str = "") -> MeshwrightError:
    """Return the error of the rank that failed first; ``rank`` is the rank that torch's agent saw fail first.
    ``warning``: the signal that asked all ranks to end, if there was one."""
    paths = [file_of(directory, index, "failure") for index in range(num_ranks)]
    failures = [msgspec.json.decode(path.read_bytes(), type=Failure) for path in paths if path.exists()]
    own = [failure for failure in failures if not failure.lost_peer]
    if own or (exit_code >= 0 and exit_code != PreemptedError.CODE and failures and not warning):
        return as_error(min(own, key=lambda failure: failure.time_ns) if own else failures[0], directory)
    doing, log = Status.read(directory, rank), file_of(directory, rank, "log")
    if warning or exit_code == PreemptedError.CODE:
        after = f" after {warning}" if warning else ", as another rank or host was asked to"
        return PreemptedError(
            f"ended{after}, {doing or 'while starting'}, without saving",
            where=f"rank {rank}",
            remedy="give the same command again: it goes on from the last checkpoint",
        )
    if exit_code >= 0 and not log.exists():
        return _failed(f"rank {rank} ended before it began: its function could not be imported", GUARD, doing)
    if waited := nccl_timeout(log):
        remedy = (
            f"the ends of {log.parent}/*.log and *.status tell which; MESHWRIGHT_TIMEOUT_S sets how long ranks wait"
        )
        return _failed(f"rank {rank} {waited} {doing}".rstrip(), remedy, doing)
    if lost := lost_device(log):
        return _failed(f"rank {rank} lost its GPU {doing}".rstrip() + f": {lost}", LOOK_AT_DEVICE, doing)
    signals = {known.value: known.name for known in signal.Signals}
    killer = signals.get(-exit_code, f"signal {-exit_code}")
    end = f"was killed by {killer}" if exit_code < 0 else f"ended with exit code {exit_code}"
    memory = "often the machine had no memory left; " if exit_code == -signal.SIGKILL else ""
    remedy = f"{memory}its output is in {log}; run again to continue from a checkpoint"
    return _failed(f"rank {rank} {end} {doing}".rstrip(), remedy, doing)


_NCCL_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+),[^)]*Timeout\(ms\)=(\d+)\)"
)


def nccl_timeout(log: Path) -> str:
    """What a rank says in its log before NCCL's watchdog ends it, because another rank did not come; otherwise empty.
    The watchdog ends the process, so that the rank writes no error of its own."""
    if not log.exists() or not (match := _NCCL_TIMEOUT.search(log.read_text(errors="replace"))):
        return ""
    number, kind, waited_ms = match.groups()
    return (
        f"waited {int(waited_ms) / 1000:.0f} s in NCCL's {kind.lower()} number {number}, to which a rank did not come,"
    )


_LOST_DEVICE = re.compile(r"watchdog thread terminated with exception: CUDA error: ([^\n]+)")
LOOK_AT_DEVICE = (
    "run again, which goes on from the last checkpoint; `nvidia-smi` and `dmesg | grep Xid` tell whether the GPU is "
    "lost: leave it out with CUDA_VISIBLE_DEVICES then"
)


def lost_device(log: Path) -> str:
    """The error of CUDA that a rank's log has if NCCL's watchdog met it first and ended the rank; otherwise empty."""
    match = _LOST_DEVICE.search(log.read_text(errors="replace")) if log.exists() else None
    return match[1].strip() if match else ""


def as_error(failure: Failure, directory: Path) -> MeshwrightError:
    """Return the error that the launcher raises for a rank's failure. A MeshwrightError keeps its class and text."""
    doing = Status.read(directory, failure.rank)
    if failure.ours:
        kind: type[MeshwrightError] = getattr(errors, failure.kind)
        error = kind(failure.problem, where=failure.where, remedy=failure.remedy)
        if isinstance(error, RankError):
            error.doing = doing
        return error
    text = f"{failure.kind}: {failure.problem}" if failure.problem else failure.kind
    verb = "lost the other ranks" if failure.lost_peer else "failed"
    return _failed(
        f"rank {failure.rank} {verb}{f' {doing}' if doing else ''}: {text}",
        f"its traceback is in {file_of(directory, failure.rank, 'traceback')}",
        doing,
    )


def _failed(problem: str, remedy: str, doing: str) -> FailedRankError:
    error = FailedRankError(problem, remedy=remedy)
    error.doing = doing
    return error
