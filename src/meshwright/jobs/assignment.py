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


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A unit to run: its vertices and the streams between them. ``folder`` is the graph's folder, ``environment`` has
    environment variables."""

    unit: str
    attempt: int
    folder: str
    store: str
    tasks: tuple[Task, ...]
    pipes: tuple[Pipe, ...] = ()
    environment: dict[str, str] = {}


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
