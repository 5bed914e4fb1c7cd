"""Meshwright's launcher: runs a function on ranks of this machine, and raises the error of the first rank that fails.

Torch's elastic agent starts the ranks as processes. ``runtime/failures.py`` describes the files that they leave behind.
"""

import atexit
import gc
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from multiprocessing import forkserver
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch.distributed as dist

from meshwright.errors import FailedRankError, LaunchError, LostRankError, MeshwrightError, RankError
from meshwright.runtime import launch, meeting_point, trust
from meshwright.runtime.failures import Failure, Status, as_error, file_of, first_failure, record
from meshwright.runtime.kept_memory import kept_memory, latest_step
from meshwright.runtime.launchers import ATTEMPT, KEEPS_STORE, Meeting
from meshwright.runtime.lock import LAUNCHER, locked
from meshwright.runtime.open_files import allow_files
from meshwright.runtime.preemption import WARNINGS, is_told_to_end
from meshwright.runtime.roll_call import Fits, RollCall
from meshwright.runtime.signals import Signals, blocked

T = TypeVar("T")
Again = Callable[[RankError, Path], bool]
"""A function that returns whether to start all ranks again after an error. Before they start, the files of the failed
attempt are moved to the directory that is its second argument."""

STOP_S = 5
"""Seconds that ranks may take to end after they were told to stop. After that they are killed."""
MOST_RANKS = 256
"""Maximum number of ranks (processes) on one machine."""
PRELOADED = [
    "meshwright.api", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch.distributed.checkpoint",
]  # fmt: skip
"""Modules that every rank needs. A fork server imports them once, and ranks are forks of this server."""
LINGER_S = 10.0
"""Seconds that a rank waits before it ends if it has lost another rank, so that the other rank's failure is seen
first."""


def run_ranks(
    function: Callable[..., T],
    *args: Any,
    num_ranks: int,
    directory: Path | None = None,
    port: int = 0,
    again: Again | None = None,
    environment: dict[str, str] | None = None,
    meeting: Meeting | None = None,
    fits: Fits | None = None,
) -> T:
    """Run ``function(*args)`` on ``num_ranks`` ranks of this machine, and return rank 0's result.

    The function must be a top-level function of an importable module; arguments and results must be picklable. A single
    rank runs in this process. If one of several ranks fails, the others end within seconds. Ctrl-C stops all ranks.
    The first SIGTERM or SIGUSR1 is passed on to the ranks, which may end in their own time; a second one stops them.

    Args:
        directory: directory for the files that ranks leave behind; no other ``run_ranks`` may use it at the same time.
            None: a temporary directory, which is kept if a rank fails, because the error names it.
        port: port of this machine through which the ranks find each other; 0: any free port.
        environment: additional environment variables for the ranks. With them, even a single rank runs in a separate
            process.
        meeting: where the launchers of several hosts meet, each of which starts ``num_ranks`` ranks. Each returns the
            result of its first rank. If a host is lost, the others go on without it; a host that comes later joins.
        fits: whether the function can use a number of ranks; None: any number. With several hosts, those that are too
            many wait until others are lost.
        again: called if one of several ranks was killed, lost the others, or raised an error that is not a
            MeshwrightError. If it returns True, all ranks are started again.

    Raises:
        MeshwrightError: the error that a rank raised; if several ranks raised errors, the first of them.
        FailedRankError: a rank raised an error that is not a MeshwrightError, was killed, or exited.
        LaunchError: more ranks than ``MOST_RANKS``, or than open files suffice for; the port is taken; another run uses
            the directory, or it cannot be written; or the calling script is not guarded by ``if __name__ ==
            "__main__"``: every rank imports the script and would start ranks again; or the hosts of ``meeting`` did not
            meet.
        PreemptedError: SIGTERM or SIGUSR1, and not all ranks have returned.
        KeyboardInterrupt: Ctrl-C; all ranks are stopped.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing makes this test too
        raise LaunchError(
            "a rank that was started has imported the script that starts it, which starts ranks again",
            where="main module",
            remedy='put what the script does under `if __name__ == "__main__":`',
        )
    if num_ranks > MOST_RANKS:
        raise LaunchError(
            f"{num_ranks} ranks on one machine are more than {MOST_RANKS}",
            where="ranks",
            remedy="start fewer: each is a process; `meshwright plan` and `simulate` accept more ranks, and start none",
        )
    if port:
        launch.check_port(port)
    if directory is None:
        with _scratch() as scratch:
            return run_ranks(
                function, *args, num_ranks=num_ranks, directory=scratch, port=port, again=again,
                environment=environment, meeting=meeting, fits=fits,
            )  # fmt: skip
    first = meeting is None or meeting.is_host
    with locked(directory, LAUNCHER) if first else nullcontext():
        if first:
            shutil.rmtree(directory / "ranks", ignore_errors=True)
        if num_ranks == 1 and environment is None and meeting is None:
            return _alone(function, args, directory)
        allow_files(num_ranks)
        with kept_memory(num_ranks) as memory:
            given = function, args, num_ranks, directory
            variables = (environment or {}) | memory
            if meeting is not None and meeting.num_hosts > 1:
                return _on_hosts(given, variables, meeting, again, fits)
            for attempt in itertools.count(1):
                met = meeting or Meeting(1, True, launch.HOST, port, uuid.uuid4().hex)
                try:
                    return _together(*given, met.again(attempt), variables | {ATTEMPT: f"{attempt}"})
                except (FailedRankError, LostRankError) as error:
                    error.in_memory = latest_step(memory)
                    if again is None or not again(error, _kept(directory, attempt)):
                        raise
                _keep_files(directory, attempt)
    raise AssertionError("count has no end")


def _on_hosts(
    given: tuple[Callable[..., T], tuple[Any, ...], int, Path], variables: dict[str, str], meeting: Meeting,
    again: Again | None, fits: Fits | None,
) -> T:  # fmt: skip
    """Run the ranks of this host beside those of others, in as many attempts as it takes."""
    _, _, num_ranks, directory = given
    with closing(RollCall(meeting, num_ranks, fits)) as hosts:
        while True:
            met, error, results = hosts.begin(), None, list[T]()
            number = hosts.attempt
            try:
                results.append(_together(*given, met, variables | {ATTEMPT: f"{number}"}, hosts.ask, hosts.kill))
            except MeshwrightError as own:
                error = own
            if hosts.end(
                error,
                partial(_goes_on, again, _kept(directory, number), variables),
                partial(_keep_files, directory, number),
            ):
                return results[0]


def _goes_on(again: Again | None, kept: Path, memory: dict[str, str], error: RankError) -> bool:
    error.in_memory = latest_step(memory)
    return again is not None and again(error, kept)


def _kept(directory: Path, attempt: int) -> Path:
    """Where the files of the ranks of a failed attempt are kept."""
    return directory / "ranks" / f"failed-{attempt}"


def _keep_files(directory: Path, attempt: int) -> None:
    kept = _kept(directory, attempt)
    try:
        kept.mkdir(parents=True)
        for file in (directory / "ranks").glob("*.*"):
            file.rename(kept / file.name)
    except OSError as error:
        raise LaunchError(
            f"the files of ranks that failed cannot be kept: {error.strerror}", where=str(kept),
            remedy="check the disk; then the same command goes on from the last checkpoint",
        ) from error  # fmt: skip


def _alone(function: Callable[..., T], args: tuple[Any, ...], directory: Path) -> T:
    try:
        launch.share_cores(1)
        return function(*args)
    except MeshwrightError:
        raise
    except Exception as error:
        failure = record(error, directory, 0)
        raise as_error(failure, directory) from error


def _together(
    function: Callable[..., T], args: tuple[Any, ...], num_ranks: int, directory: Path, meeting: Meeting,
    environment: dict[str, str], ask: threading.Event | None = None, kill: threading.Event | None = None,
) -> T:  # fmt: skip
    # Imported here because it takes half a second that one rank does not need.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from meshwright.runtime import rendezvous

    rendezvous.register()
    with (
        tempfile.TemporaryDirectory(prefix="meshwright-") as scratch,
        Signals(num_ranks, ask, kill) as signals,
        _quiet(),
    ):
        config = LaunchConfig(
            min_nodes=meeting.num_hosts,
            max_nodes=meeting.num_hosts,
            nproc_per_node=num_ranks,
            run_id=meeting.name,
            rdzv_backend=rendezvous.NAME,
            rdzv_endpoint=f"{meeting.address}:{meeting.port}",
            rdzv_configs={
                "timeout": meeting.timeout_s,
                "is_host": meeting.is_host,
                "is_kept": meeting.is_kept,
            },
            local_addr=launch.HOST if meeting.num_hosts == 1 else meeting_point.address_towards(meeting.address),
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGQUIT",
            shutdown_timeout=STOP_S,
        )
        _start_server()
        try:
            variables = launch.environment() | environment
            variables.pop(KEEPS_STORE, None)
            if meeting.num_hosts == 1 and "MESHWRIGHT_MEET" not in variables:  # others agree on a token in a store
                variables = trust.with_token(variables)
            temporary = scratch, multiprocessing_util.get_temp_dir()
            given = function, args, num_ranks, directory, variables, temporary
            results: dict[int, T] = elastic_launch(config, _rank)(*given)
        except ChildFailedError as error:
            signals.raise_received()
            if signals.killed_all:
                raise LostRankError("ranks of another host are lost, and those of this one were stopped") from None
            rank, first = error.get_first_failure()
            num_all = num_ranks * meeting.num_hosts
            raise first_failure(directory, num_all, rank, first.exitcode, signals.warning) from None
        except RendezvousClosedError:
            raise LostRankError("ranks of another host have failed before those of this one began") from None
        except (RendezvousError, dist.DistError) as error:
            signals.raise_received()
            raise meeting_point.not_met(meeting, error) from error
        except Exception:
            signals.raise_received()
            raise
        signals.raise_received()
        return results[min(results)]


# --- in a rank -------------------------------------------------------------------------------------------------------


def _rank(
    function: Callable[..., T], args: tuple[Any, ...], num_ranks: int, directory: Path, environment: dict[str, str],
    temporary: tuple[str, ...],
) -> T | None:  # fmt: skip
    """Run ``function`` as one rank, and record its error if it fails. ``environment`` holds the environment variables
    of the launcher, and ``temporary`` its temporary folders."""
    gc.freeze()  # what the server has imported: a collection would visit it all, and copy its pages to this process
    threading.Thread(target=_end_with_launcher, args=(temporary,), name="ends with the launcher", daemon=True).start()
    # The launcher decides when a rank stops, also after Ctrl-C, which a terminal sends to every process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *WARNINGS})
    launch.take_environment({launch.FLIGHTS: f"{directory / 'ranks'}", **environment})
    np.random.seed()  # every fork has a copy of the server's generator; Python reseeds its own
    rank = launch.launched_rank()
    try:
        status = Status(directory, rank)
        status.set("while starting")
        _redirect_output(file_of(directory, rank, "log"), keep_python=rank == 0 and launch.launched_replica() <= 0)
        launch.share_cores(num_ranks)
        result = _result(function, args)
        for number in WARNINGS:  # nothing is left to save
            signal.signal(number, signal.SIG_IGN)
        status.set("while ending")
        launch.finish()
        atexit._run_exitfuncs()  # before Python 3.13, a fork does not run these functions
        return result if launch.is_first_here() else None
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher must be told
        _fail(record(error, directory, rank), is_told=is_told_to_end(error))


def _result(function: Callable[..., T], args: tuple[Any, ...]) -> T | None:
    """The function's result. None if the function ended the program with success, as servers do."""
    try:
        return function(*args)
    except SystemExit as ended:
        if ended.code:
            raise
        return None


def _end_with_launcher(temporary: tuple[str, ...]) -> None:
    """End this rank as soon as the launcher has ended, even if the launcher was killed. Remove its temporary folders,
    which it then could not do itself."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        for folder in temporary:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _fail(failure: Failure, *, is_told: bool) -> NoReturn:
    """End this rank without cleanup, which could wait for ranks that will not answer. A rank that has lost another rank
    first waits ``LINGER_S`` seconds, unless the launcher has seen the loss and told this rank to end: SIGTERM ends it
    while it waits, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    if failure.lost_peer and not is_told:
        time.sleep(LINGER_S)
    os._exit(1)


def _redirect_output(log: Path, *, keep_python: bool) -> None:
    """Redirect this process's output to a file. With ``keep_python``, redirect only the output of C and C++ code."""
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


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a temporary directory, and remove it at the end unless a MeshwrightError was raised."""
    path = Path(tempfile.mkdtemp(prefix="meshwright-ranks-"))
    try:
        yield path
    except MeshwrightError:
        raise
    except BaseException:
        shutil.rmtree(path)
        raise
    shutil.rmtree(path)


def _start_server() -> None:
    """Start multiprocessing's fork server, which forks the ranks, unless this process has already started it. A warning
    that is sent to all processes of a group must not end it."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    try:
        with blocked(WARNINGS):
            forkserver.ensure_running()
    except OSError as error:
        raise LaunchError(
            f"the server that forks ranks cannot be started: {error}",
            where="ranks",
            remedy="set TMPDIR to a directory with a short path; do not start ranks in a fork of a process that did",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's elastic agent, which would log tracebacks of errors that the launcher reports in one line."""
    with ExitStack() as restored:
        for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
            logger = logging.getLogger(name)
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        yield
