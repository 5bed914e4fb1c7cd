"""Runs an assignment in a worker: places inputs, calls the function or starts the commands, stores outputs.

Every vertex has a directory of its own:

    inputs/     links to stored outputs      log      what it printed
    outputs/    what it writes               pid      the process that runs it
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import JobError
from meshwright.ir import files
from meshwright.ir.job_graph import OBJECTS, file_of, kind_of
from meshwright.jobs import values
from meshwright.jobs.assignment import Outcome, Task, UnitAssignment
from meshwright.jobs.store import DamagedError, OutputStore, Stored
from meshwright.jobs.training import MAIN

TAIL = 12
"""The number of last lines of a failed vertex that are shown."""
LOOK_S = 0.01
"""Seconds between two looks at several processes."""
_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""A program that becomes the command in its arguments, and is killed when the process that started it dies (Linux)."""
_CALL = "import sys; from meshwright.jobs.execute import call_alone; sys.exit(call_alone(sys.argv[1]))"


class _Failed(NamedTuple):
    vertex: str
    problem: str


def execute(data: bytes) -> bytes:
    """Run an assignment (JSON), and return its outcome (JSON). Raises nothing: errors are in the outcome."""
    assignment = msgspec.json.decode(data, type=UnitAssignment)
    start_s = time.time()
    store = OutputStore(Path(assignment.store))
    outputs: dict[str, dict[str, Stored]] = {}
    failed: _Failed | None = None
    damaged: Stored | None = None
    task = assignment.tasks[0]
    try:
        for task in assignment.tasks:
            _prepare(task, store, alone=assignment.in_worker)
        failed = _run(assignment)
        for task in assignment.tasks if failed is None else ():
            outputs[task.vertex] = _stored(task, store)
    except DamagedError as error:
        failed, damaged = _Failed(task.vertex, f"its input {error}"), error.stored
    except JobError as error:
        failed = _Failed(task.vertex, " ".join(filter(None, (error.where, error.problem))))
    except OSError as error:
        failed = _Failed(task.vertex, f"{error.strerror or error}: {error.filename or ''}")
    outcome = Outcome(
        unit=assignment.unit, attempt=assignment.attempt, start_s=start_s, end_s=time.time(), outputs=outputs,
        damaged=damaged,
    )  # fmt: skip
    if failed is not None:
        directory = next(Path(task.directory) for task in assignment.tasks if task.vertex == failed.vertex)
        outcome = msgspec.structs.replace(
            outcome, vertex=failed.vertex, problem=failed.problem, tail=tail(directory / "log"), outputs={}
        )
    return msgspec.json.encode(outcome)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL."""
    return {known.value: known.name for known in signal.Signals}.get(number, f"signal {number}")


def tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log; none if there is no log."""
    try:
        text = log.read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return ()
    return tuple(line for line in text.splitlines() if line.strip())[-TAIL:]


# --- before and after ------------------------------------------------------------------------------------------------


def _prepare(task: Task, store: OutputStore, *, alone: bool) -> None:
    """Make the vertex's directories, and place its inputs. Raise a DamagedError if one is missing or changed, except
    objects of a function that runs ``alone``, in this process: it checks them when it reads them."""
    directory = Path(task.directory)
    (directory / "inputs").mkdir(parents=True)
    (directory / "outputs").mkdir()
    (directory / "pid").write_text(str(os.getpid()))
    for name, given in task.inputs.items():
        if given.stored is None:
            continue
        if not (task.function and given.form in OBJECTS):
            store.place(given.stored, directory / "inputs" / name / given.file)
        elif not alone and not store.whole(given.stored):
            raise DamagedError(given.stored)


def _paths(task: Task) -> dict[str, str]:
    """The path of every input and output that is not a stream."""
    directory = Path(task.directory)
    paths = {
        name: given.path or str(directory / "inputs" / name / given.file)
        for name, given in task.inputs.items()
        if given.form != "stream"
    }
    kept = {name: form for name, form in task.outputs.items() if form != "stream"}
    return paths | {name: str(directory / "outputs" / file_of(name, form)) for name, form in kept.items()}


def _stored(task: Task, store: OutputStore) -> dict[str, Stored]:
    """Store what the vertex has written. Raise a JobError if an output is missing."""
    paths, result = _paths(task), {}
    for name, form in task.outputs.items():
        if form == "stream":
            continue
        path = Path(paths[name])
        if not (path.is_dir() if kind_of(form) == "directory" else path.is_file()):
            raise JobError(f"ended well, but did not write its output {name!r} ({path.name})")
        result[name] = store.put(path)
    return result


# --- running ---------------------------------------------------------------------------------------------------------


def _run(assignment: UnitAssignment) -> _Failed | None:
    """Run all vertices; None if they ended well. A single function runs in this process, which has started with its
    variables, and everything else in processes of its own."""
    os.chdir(assignment.folder)
    task = assignment.tasks[0]
    if assignment.in_worker:
        with _output_to(Path(task.directory) / "log"):
            return _call(task, assignment, {})
    return _run_processes(assignment)


def _call(task: Task, assignment: UnitAssignment, streams: dict[str, str]) -> _Failed | None:
    """Call the vertex's function, and write the objects that it returns."""
    if assignment.folder not in sys.path:
        sys.path.insert(0, assignment.folder)
    paths, store = _paths(task), OutputStore(Path(assignment.store))
    arguments: dict[str, Any] = {**task.arguments, **{name: Path(path) for name, path in streams.items()}}
    for name, given in task.inputs.items():
        if given.stored is not None and given.form in OBJECTS:
            arguments[name] = values.decode(store.read(given.stored), given.form)
        elif given.form != "stream":
            arguments[name] = Path(paths[name])
    objects = [name for name, form in task.outputs.items() if form in OBJECTS]
    for name, form in task.outputs.items():
        if kind_of(form) == "directory":
            Path(paths[name]).mkdir()
        if name not in objects and form != "stream":
            arguments[name] = Path(paths[name])
    module, _, function = task.function.partition(":")
    try:
        invalidate_caches()  # another vertex may have written it
        returned = getattr(import_module(module), function)(**arguments)
    except DamagedError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's function raises is its failure
        traceback.print_exc()
        text = str(error).strip().splitlines()
        return _Failed(task.vertex, f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)
    if len(objects) == 1:
        returned = {objects[0]: returned}
    elif objects and (not isinstance(returned, dict) or set(returned) != set(objects)):
        return _Failed(task.vertex, f"returned {type(returned).__name__}, not a dict with {', '.join(objects)}")
    for name in objects:
        try:
            Path(paths[name]).write_bytes(values.encode(returned[name], task.outputs[name]))
        except JobError as error:
            return _Failed(task.vertex, f"its output {name!r} {error.problem}: {error.remedy}")
    return None


def call_alone(path: str) -> int:
    """Call the function of a vertex in a process of its own. ``path`` is a file with the assignment, of this vertex
    alone, and the paths of its streams. The exit code: 0, or 1 after an error, which is printed."""
    assignment, streams = msgspec.json.decode(Path(path).read_bytes(), type=tuple[UnitAssignment, dict[str, str]])
    failed = _call(assignment.tasks[0], assignment, streams)
    if failed is not None:
        sys.stderr.write(f"{failed.problem}\n")
    return int(failed is not None)


def _run_processes(assignment: UnitAssignment) -> _Failed | None:
    """Run every vertex as a process, joined by pipes. If one fails, the others are killed."""
    ends: dict[tuple[str, str], int] = {}
    for pipe in assignment.pipes:
        ends[pipe.reader, pipe.input], ends[pipe.writer, pipe.output] = os.pipe()
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        try:
            for task in assignment.tasks:
                own_ends = {name: end for (vertex, name), end in ends.items() if vertex == task.vertex}
                running[task.vertex] = _started(task, assignment, own_ends)
        finally:
            for end in ends.values():
                os.close(end)
        single = next(iter(running.values())) if len(running) == 1 else None
        while running:
            if single is not None:
                single.wait()
            for vertex, process in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                del running[vertex]
                if code:
                    return _Failed(vertex, f"was killed by {signal_name(-code)}" if code < 0 else f"exit code {code}")
            if running:
                time.sleep(LOOK_S)
        return None
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _started(task: Task, assignment: UnitAssignment, ends: dict[str, int]) -> subprocess.Popen[bytes]:
    directory = Path(task.directory)
    streams = {name: f"/dev/fd/{end}" for name, end in ends.items()}
    if task.function:
        alone = msgspec.structs.replace(assignment, tasks=(task,), pipes=())
        (directory / "call.json").write_bytes(msgspec.json.encode((alone, streams)))
        words = [sys.executable, "-c", _CALL, str(directory / "call.json")]
    elif task.training is not None:
        outputs = {name: _paths(task)[name] for name in task.outputs}
        files.save(msgspec.structs.replace(task.training, outputs=outputs), directory / "training.json")
        words = [sys.executable, "-c", MAIN, str(directory / "training.json")]
    else:
        places = _paths(task) | streams | {"python": sys.executable}
        words = [word.format(**places) for word in task.command]
        for name, form in task.outputs.items():
            if kind_of(form) == "directory":
                Path(places[name]).mkdir()
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=tuple(ends.values()),
            env={**os.environ, **assignment.variables(task)},
        )  # fmt: skip
    (directory / "pid").write_text(str(process.pid))
    return process


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Write what this process prints to a file, also what C code prints."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        for number, end in enumerate(kept, 1):
            os.dup2(end, number)
            os.close(end)
