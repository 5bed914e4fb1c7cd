"""Our own launcher: a function on several ranks of this machine, and what went wrong on the first that failed.

The ranks are processes of torch's elastic agent. Beside them, in ``DIRECTORY/ranks``, lie for rank N:

    N.status     what it is doing, for the case that it is killed      N.failure    its error, as data
    N.log        its output (of rank 0 only what C++ code prints)      N.traceback  its error, for developers
"""

import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import msgspec

from meshwright import errors
from meshwright.errors import LaunchError, LostRankError, MeshwrightError, RankError
from meshwright.ir import files
from meshwright.runtime import launch

T = TypeVar("T")

STOP_S = 5
"""How long stopped ranks may take before they are killed."""
LINGER_S = 10.0
"""How long a rank that lost another waits to be stopped, so that the other one's failure is seen first."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank failed. ``lost_peer``: because another rank did."""

    rank: int
    time_ns: int
    kind: str
    problem: str
    where: str = ""
    remedy: str = ""
    lost_peer: bool = False


class Status:
    """What this rank is doing, in a file that outlives it: ``at step 3``, ``while saving step 10``."""

    LENGTH = 80

    def __init__(self, directory: Path, rank: int) -> None:
        path = _file(directory, rank, "status")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)

    def set(self, doing: str) -> None:
        """Say what this rank does from now on. Costs microseconds."""
        os.pwrite(self._file, doing[: self.LENGTH].ljust(self.LENGTH).encode(), 0)

    @staticmethod
    def read(directory: Path, rank: int) -> str:
        """What a rank was last doing, or nothing."""
        path = _file(directory, rank, "status")
        return path.read_text().strip() if path.exists() else ""


def run_ranks(function: Callable[..., T], *args: Any, num_ranks: int, directory: Path, port: int = 0) -> T:
    """Run ``function(*args)`` on ``num_ranks`` ranks of this machine, and return rank 0's result.

    The function is a top-level one of an importable module; arguments and results can be pickled. One rank runs in
    this process. With several, the first that fails ends the others within seconds. Ctrl-C stops all of them.

    Args:
        directory: for the files named above; no other ``run_ranks`` may be at work there.
        port: through which the ranks meet on this machine; 0: a free one.

    Raises:
        MeshwrightError: that a rank raised; of several ranks, the first one's.
        RankError: a rank raised something else, was killed, or ended.
        LaunchError: the port is taken, or another run is at work in the directory.
        KeyboardInterrupt: Ctrl-C; all ranks are stopped.
    """
    if port:
        launch.check_port(port)
    with _locked(directory):
        for old in (directory / "ranks").glob("*.*"):
            old.unlink()
        if num_ranks == 1:
            return _alone(function, args, directory)
        return _together(function, args, num_ranks, directory, port)


def _alone(function: Callable[..., T], args: tuple[Any, ...], directory: Path) -> T:
    try:
        launch.share_cores(1)
        return function(*args)
    except MeshwrightError:
        raise
    except Exception as error:
        failure = _record(error, directory, 0)
        raise _as_error(failure, directory) from error


def _together(function: Callable[..., T], args: tuple[Any, ...], num_ranks: int, directory: Path, port: int) -> T:
    # Imported here because it takes half a second that one rank does not need.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch, _Signals() as signals, _quiet():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{launch.HOST}:{port}",
            rdzv_configs={"timeout": 60},
            local_addr=launch.HOST,
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGQUIT",
            shutdown_timeout=STOP_S,
        )
        try:
            results: dict[int, T] = elastic_launch(config, _rank)(function, args, num_ranks, directory)
        except ChildFailedError as error:
            signals.raise_received()
            rank, first = error.get_first_failure()
            raise _first_failure(directory, num_ranks, rank, first.exitcode) from None
        except Exception:
            signals.raise_received()
            raise
        signals.raise_received()
        return results[0]


# --- in a rank -------------------------------------------------------------------------------------------------------


def _rank(function: Callable[..., T], args: tuple[Any, ...], num_ranks: int, directory: Path) -> T | None:
    """The life of one rank."""
    # The launcher decides when a rank stops, also after Ctrl-C, which a terminal sends to every process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    rank = launch.launched_rank()
    try:
        status = Status(directory, rank)
        status.set("while starting")
        _redirect_output(_file(directory, rank, "log"), keep_python=rank == 0)
        launch.share_cores(num_ranks)
        result = function(*args)
        status.set("while ending")
        launch.finish()
        return result if rank == 0 else None
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher must be told
        _fail(_record(error, directory, rank))


def _fail(failure: Failure) -> NoReturn:
    """End this rank at once: nothing may wait for ranks that will not answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    if failure.lost_peer:
        time.sleep(LINGER_S)
    os._exit(1)


def _record(error: BaseException, directory: Path, rank: int) -> Failure:
    ours = error if isinstance(error, MeshwrightError) else None
    failure = Failure(
        rank=rank,
        time_ns=time.time_ns(),
        kind=type(error).__name__,
        problem=ours.problem if ours else _first_line(error),
        where=ours.where if ours else "",
        remedy=ours.remedy if ours else "",
        lost_peer=_lost_peer(error),
    )
    text = "".join(traceback.format_exception(error))
    files.write_atomically(_file(directory, rank, "traceback"), text.encode())
    files.write_atomically(_file(directory, rank, "failure"), msgspec.json.encode(failure))
    return failure


def _lost_peer(error: BaseException | None) -> bool:
    """Whether the error says that another rank no longer answers."""
    while error is not None:
        text = str(error)
        if isinstance(error, LostRankError):
            return True
        if "gloo/transport" in text or "NCCL" in text or type(error).__name__ in ("DistStoreError", "DistNetworkError"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _redirect_output(log: Path, *, keep_python: bool) -> None:
    """Send what this process prints to a file; ``keep_python``: only what C and C++ code prints."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    if keep_python:
        for name in ("stdout", "stderr"):
            old = getattr(sys, name)
            terminal = os.fdopen(os.dup(old.fileno()), "w", buffering=1, encoding=old.encoding, errors="replace")
            setattr(sys, name, terminal)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


# --- in the launcher -------------------------------------------------------------------------------------------------


def _first_failure(directory: Path, num_ranks: int, rank: int, exit_code: int) -> MeshwrightError:
    """The error of the rank that failed first; ``rank`` is the one that the agent saw fail."""
    paths = [_file(directory, one, "failure") for one in range(num_ranks)]
    found = [msgspec.json.decode(path.read_bytes(), type=Failure) for path in paths if path.exists()]
    own = [failure for failure in found if not failure.lost_peer]
    if own:
        return _as_error(min(own, key=lambda failure: failure.time_ns), directory)
    doing = Status.read(directory, rank)
    if exit_code < 0:
        memory = "often the machine had no memory left; " if exit_code == -signal.SIGKILL else ""
        return RankError(
            f"rank {rank} was killed by {_signal_name(-exit_code)} {doing}".rstrip(),
            remedy=f"{memory}its output is in {_file(directory, rank, 'log')}; run again to go on from a checkpoint",
        )
    if found:
        return _as_error(found[0], directory)
    return RankError(
        f"rank {rank} ended with exit code {exit_code} {doing}".rstrip(),
        remedy=f"its output is in {_file(directory, rank, 'log')}",
    )


def _as_error(failure: Failure, directory: Path) -> MeshwrightError:
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, MeshwrightError):
        return kind(failure.problem, where=failure.where, remedy=failure.remedy)
    doing = Status.read(directory, failure.rank)
    text = f"{failure.kind}: {failure.problem}" if failure.problem else failure.kind
    verb = "lost the other ranks" if failure.lost_peer else "failed"
    return RankError(
        f"rank {failure.rank} {verb}{f' {doing}' if doing else ''}: {text}",
        remedy=f"its traceback is in {_file(directory, failure.rank, 'traceback')}",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _file(directory: Path, rank: int, name: str) -> Path:
    return directory / "ranks" / f"{rank}.{name}"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two runs in one directory would overwrite each other's checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(
                "another run is at work in this directory",
                where=str(directory),
                remedy="wait for it, stop it, or choose another directory (--train.directory)",
            ) from None
        yield


class _Signals:
    """While ranks run, a signal to stop is noted and ends the ranks; the launcher then finds them ended.

    An exception out of a signal handler could get lost anywhere in the agent. Ranks are born with SIGINT blocked, so
    that Ctrl-C, which reaches all processes of a terminal, finds none half imported; a thread that does not block it
    receives it for this process.
    """

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._received: int | None = None
        self._done = threading.Event()
        self._others = set(multiprocessing.active_children())
        self._mine = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._mine:
            _start_resource_tracker()
            self._before = {number: signal.signal(number, self._note) for number in self.HANDLED}
            self._thread = threading.Thread(target=self._watch, name="stops ranks", daemon=True)
            self._thread.start()
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._mine:
            self._thread.join()
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def raise_received(self) -> None:
        """KeyboardInterrupt after Ctrl-C, SystemExit after another signal to stop, nothing after none."""
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt from None
        if self._received is not None:
            raise SystemExit(128 + self._received) from None

    def _note(self, number: int, frame: object) -> None:
        self._received = self._received or number

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            if self._received is not None:
                for process in set(multiprocessing.active_children()) - self._others:
                    process.kill()


def _start_resource_tracker() -> None:
    """Start multiprocessing's tracker: before SIGINT is blocked, which it undoes, and without its warning about what
    killed ranks have left behind, which it cleans up anyway."""
    option = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(option)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(option)


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent logs tracebacks of its own for what is told here in one line."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
