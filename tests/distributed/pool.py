"""Long-lived worker processes on which the distributed tests run their functions, each call joined by gloo.

    test process
    ┌──────────────┐  call   ┌────────┐
    │ ranks(n, fn) ├────────▶│ rank 0 │◀┐
    │              │◀────────┤        │ │ gloo, met through
    │              │ outcome └────────┘ │ a TCPStore that the
    │              ├────────▶┌────────┐ │ test process hosts
    │              │◀────────┤ rank 1 │◀┘
    └──────────────┘         └────────┘

A rank starts when a call first needs it and serves every later one, of any number of ranks: what it has imported and
found out once it need not again. Each call has a gloo group of its own, so that what one leaves behind (subgroups,
messages under way) does not reach the next. When a rank dies or does not answer, the others may be anywhere, also
inside a collective: all are killed, and the next call starts fresh ones.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from meshwright.comm.transport import stream

MAX_RANKS = 8
HOST = "127.0.0.1"
STOP, LEAVE = b"", b"leave"
"""Messages to ranks instead of a call: the end, and that all ranks have answered the last call."""
PRELOAD = [
    "torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes", "hypothesis", "pytest", "transformers.models.gpt2.modeling_gpt2",
    "sklearn.datasets", "meshwright.api", "meshwright.comm.mail", "meshwright.models",
]  # fmt: skip
"""What ranks find imported: a server does it once, and every rank starts as a fork of it."""
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
GRACE_S = 2.0
"""How long the other ranks may still answer after one has failed: what they say is often of help."""
STACK_S, STACK_TRIES = 0.25, 20
"""Seconds between two looks at where silent ranks say that they are, and the most looks."""

T = TypeVar("T")


class RanksFailedError(Exception):
    """A call on the pool that failed on at least one rank.

    `failures` holds, by rank, its traceback, or how it died, or that it did not answer.
    """

    def __init__(self, what: str, failures: dict[int, str]) -> None:
        self.failures = failures
        parts = [f"{what} failed on rank {', '.join(map(str, sorted(failures)))}"]
        parts += [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class Call:
    """What the test process sends to each rank: ``name`` is of its group, of the first ``num_ranks`` ranks.
    ``cache`` is the cache directory of the test, so that no rank plans for what an earlier test calibrated (None: the
    user's, for a benchmark). ``collect_after`` are the caller's thresholds of garbage collections."""

    name: str
    num_ranks: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    warning_filters: list[Any]
    cache: str | None
    collect_after: tuple[int, int, int]


@dataclass(frozen=True)
class Outcome:
    """What a rank answers: `error` is a traceback."""

    value: Any = None
    error: str | None = None


class Ranks:
    """The processes, by rank. Each runs from the first call that needs it on, and again after it had to be killed.

    ``channel_slots`` is the number of slots of each channel between ranks: the memory of all slots is reserved, which
    takes 20 ms for the default."""

    def __init__(self, channel_slots: int = stream.SLOTS) -> None:
        self._channel_slots = channel_slots
        self._num_calls = 0
        self._store: dist.TCPStore | None = None
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._stacks: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Let the ranks end by themselves, as a program's would; kill those that do not."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send_bytes(STOP)
        for process in self._processes:
            process.join(STOP_TIMEOUT_S)
        self._kill()

    def __call__(self, num_ranks: int, fn: Callable[..., T], /, *args: Any, timeout: float = 120.0) -> list[T]:
        """Run `fn(*args)` on each of `num_ranks` ranks and return the results by rank.

        `fn` is a top-level function of an importable module, `args` and results can be pickled. Every call starts with
        the same seeds, float32 as default dtype and the caller's warning filters. `timeout` is in seconds.

        Raises RanksFailedError with the text of each rank that raised, died or did not answer in time.
        """
        __tracebackhide__ = True
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"num_ranks is {num_ranks}; the pool has 1 to {MAX_RANKS} ranks")
        self._num_calls += 1
        # Before the start, so that what cannot be pickled costs nothing.
        cache = os.environ.get("XDG_CACHE_HOME")
        caller = list(warnings.filters), cache, gc.get_threshold()
        message = pickle.dumps(Call(f"call{self._num_calls}", num_ranks, fn, args, *caller))
        if len(self._processes) < num_ranks:
            self._start(num_ranks)
        try:
            for pipe in self._pipes[:num_ranks]:
                with suppress(BrokenPipeError):  # it died since the last call, and collecting says so
                    pipe.send_bytes(message)
            values = self._collect(f"{fn.__module__}.{fn.__qualname__}", range(num_ranks), timeout)
            for pipe in self._pipes[:num_ranks]:  # a thread of gloo would wake up 100 times a second
                with suppress(BrokenPipeError):
                    pipe.send_bytes(LEAVE)
            return values
        except RanksFailedError:
            raise
        except BaseException:  # Ctrl-C, or the test's own time limit: the ranks are still at work
            self._kill()
            raise

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        if self._stacks is not None:
            self._stacks.cleanup()
        self._processes, self._pipes, self._stacks, self._store = [], [], None, None

    def _start(self, num_ranks: int) -> None:
        """The ranks that are missing up to so many."""
        __tracebackhide__ = True
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        if self._store is None:
            # Port 0: the system gives a free port to the process that listens on it, so nobody can take it in between.
            self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            self._stacks = tempfile.TemporaryDirectory(prefix="ranks-")
        missing = range(len(self._processes), num_ranks)
        try:
            for rank in missing:
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(
                    target=_serve,
                    args=(theirs, rank, self._store.port, self._stack_file(rank), self._channel_slots),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                self._processes.append(process)
                theirs.close()  # the rank holds the only other end, so that its death ends the pipe
            self._collect(f"starting {num_ranks} ranks", missing, START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise

    def _collect(self, what: str, ranks: range, timeout_s: float) -> list[Any]:
        """The values of these ranks in order, or RanksFailedError. When a rank does not answer, all are killed."""
        __tracebackhide__ = True
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        died = False
        waiting = {self._pipes[rank]: rank for rank in ranks}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    outcome = pickle.loads(pipe.recv_bytes())
                    assert isinstance(outcome, Outcome)
                except (EOFError, ConnectionResetError):
                    died = True
                    self._processes[rank].join()
                    outcome = Outcome(error=f"the process died with exit code {self._processes[rank].exitcode}")
                values[rank] = outcome.value
                if outcome.error is not None:
                    failures[rank] = outcome.error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting:
            reason = f"{GRACE_S:g} s after another rank failed" if failures else f"after {timeout_s:g} s"
            for rank, stack in self._ask_for_stacks(list(waiting.values())).items():
                failures[rank] = f"no answer {reason}; it is at\n{stack}"
        if waiting or died:
            self._kill()
        if failures:
            raise RanksFailedError(what, failures)
        return [values[rank] for rank in ranks]

    def _ask_for_stacks(self, silent: list[int]) -> dict[int, str]:
        """Where each of the silent ranks is: faulthandler answers a signal even inside a blocking C++ call."""
        for rank in silent:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR2)
        stacks: dict[int, str] = {}
        for _ in range(STACK_TRIES):  # a rank of a busy machine answers late
            before = stacks
            time.sleep(STACK_S)
            files = {rank: self._stack_file(rank) for rank in silent}
            stacks = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
            if all(stacks.values()) and stacks == before:
                break
        return stacks

    def _stack_file(self, rank: int) -> Path:
        assert self._stacks is not None
        return Path(self._stacks.name, f"rank{rank}.txt")


def _serve(pipe: Connection, rank: int, port: int, stack_file: Path, channel_slots: int) -> None:
    """The life of one rank: report in, then answer calls until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; the test process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    stream.SLOTS = channel_slots
    gc.freeze()  # what is imported is no garbage: collections neither walk through it nor copy its pages
    # One connection for all calls: for each, torch asks the resolver for a name, and may wait for it for seconds.
    store = dist.TCPStore(HOST, port, is_master=False)
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks)  # training itself listens to SIGUSR1
        pipe.send_bytes(pickle.dumps(Outcome()))
        while (message := pipe.recv_bytes()) != STOP:
            if message == LEAVE:
                _leave_group()
            else:
                pipe.send_bytes(_answer(message, rank, store))
        _leave_group()


def _answer(message: bytes, rank: int, store: dist.Store) -> bytes:
    """The pickled Outcome of one call."""
    try:
        _leave_group()  # of a call that failed
        call = pickle.loads(message)
        assert isinstance(call, Call)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(call.num_ranks)
        if call.cache is None:
            os.environ.pop("XDG_CACHE_HOME", None)
        else:
            os.environ["XDG_CACHE_HOME"] = call.cache
        gc.set_threshold(*call.collect_after)
        group_store = dist.PrefixStore(call.name, store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=call.num_ranks)
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        with warnings.catch_warnings():
            warnings.filters[:] = call.warning_filters  # type: ignore[index]
            return pickle.dumps(Outcome(call.fn(*call.args)))
    except BaseException:  # noqa: BLE001 - whatever it is (pytest.fail and SystemExit too), the test is told
        return pickle.dumps(Outcome(error=traceback.format_exc()))


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when the test process has ended in any way, even by a kill."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
