"""What a worker is told to run, and what it answers: plain data, sent as JSON."""

from typing import Any

import msgspec

from meshwright.jobs.store import Stored
from meshwright.jobs.training import Training


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """An input: a stored output that is to appear under the file name ``file``, or the path of a file outside."""

    form: str = ""
    file: str = ""
    stored: Stored | None = None
    path: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One vertex of an assignment. It has a function, the words of a command, or a training. ``directory`` is its own
    working directory, and ``threads`` the number of threads of each of its processes."""

    vertex: str
    directory: str
    inputs: dict[str, Given] = {}
    outputs: dict[str, str] = {}
    function: str = ""
    arguments: dict[str, Any] = {}
    command: tuple[str, ...] = ()
    training: Training | None = None
    threads: int = 1


class Pipe(msgspec.Struct, frozen=True, kw_only=True):
    """A stream from an output of one vertex to an input of another."""

    writer: str
    output: str
    reader: str
    input: str


def of_threads(threads: int) -> dict[str, str]:
    """The environment variables of a process with so many threads."""
    return {"OMP_NUM_THREADS": str(threads)}


class UnitAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A unit to run: its vertices and the streams between them. ``folder`` is the graph's folder, ``environment`` has
    environment variables."""

    unit: str
    attempt: int
    folder: str
    store: str
    tasks: tuple[Task, ...]
    pipes: tuple[Pipe, ...] = ()
    environment: dict[str, str] = {}

    @property
    def in_worker(self) -> bool:
        """Whether the worker's own process runs it: a single function. Everything else runs in processes below it."""
        return len(self.tasks) == 1 and bool(self.tasks[0].function)

    def variables(self, task: Task) -> dict[str, str]:
        """The environment variables of a vertex: as many threads as it has cores, so that its results do not depend on
        the node."""
        return of_threads(task.threads) | self.environment

    @property
    def worker_variables(self) -> dict[str, str]:
        """The environment variables with which the worker's process must have started: libraries read them once."""
        return self.variables(self.tasks[0]) if self.in_worker else of_threads(1)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an assignment. Without a ``problem``, ``outputs`` has the stored outputs of each vertex. ``lost`` says
    that the worker died. ``damaged`` is an input that was missing or changed. ``tail`` has the last lines that the
    vertex wrote. Times are seconds since 1970."""

    unit: str
    attempt: int
    start_s: float
    end_s: float
    outputs: dict[str, dict[str, Stored]] = {}
    vertex: str = ""
    problem: str = ""
    tail: tuple[str, ...] = ()
    lost: bool = False
    damaged: Stored | None = None
