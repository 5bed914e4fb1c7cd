"""Runs a job graph: starts units as soon as their inputs and a place are there, and again if they died."""

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from meshwright.errors import JobError
from meshwright.ir.job_graph import CommandVertex, FunctionVertex, JobGraph, TrainVertex, Vertex, file_of
from meshwright.jobs.assignment import Given, Outcome, Pipe, Task, UnitAssignment
from meshwright.jobs.carrier import Carrier
from meshwright.jobs.code import vertex_digest
from meshwright.jobs.journal import Failed, Finished, Journal, Opened, Published, Reused, Started
from meshwright.jobs.order import Unit, before_units, remaining_s, topological, units
from meshwright.jobs.placement import Free, NodeSlot, could_run, next_starts
from meshwright.jobs.store import DamagedError, OutputStore, Stored, outside
from meshwright.jobs.training import Training, run_of

log = logging.getLogger("meshwright")

SPOILED = 3
"""How often a unit may find a damaged input without counting as failed: the fault is not its own."""
Told = Callable[[str, str], None]
"""Called with (event, vertex or unit): ``started``, ``finished``, ``reused``, ``again`` and ``failed``."""


class Scheduler:
    """One run of a checked graph in a directory.

    Args:
        folder: the folder of the graph's file, in which commands run.
        seconds: expected seconds of each unit; they only decide which of several ready units starts first.
        tell: is told of every start and end.
    """

    def __init__(
        self, graph: JobGraph, folder: Path, directory: Path, carrier: Carrier, seconds: Mapping[str, float], tell: Told
    ) -> None:
        self._graph, self._folder, self._directory, self._carrier = graph, folder, directory, carrier
        self._tell = tell
        self._units = units(graph)
        self._left_s = remaining_s(before_units(self._units), seconds)
        self._store = OutputStore(directory / "objects")
        self._journal = Journal(directory)
        self._known = {(e.vertex, e.key): e for e in self._journal.events if isinstance(e, Finished)}
        self._attempts: dict[str, int] = {}
        for event in self._journal.events:
            if isinstance(event, Started):
                self._attempts[event.unit] = event.attempt
        self._digests = {name: vertex_digest(vertex, folder) for name, vertex in graph.vertices.items()}
        self._free = Free(carrier.nodes())
        self._running: dict[str, tuple[NodeSlot, dict[str, str]]] = {}
        self._died: dict[str, int] = {}
        self._spoiled: dict[str, int] = {}
        self._looked_up: set[str] = set()
        self._published = {event.path for event in self._journal.events if isinstance(event, Published)}
        self._failure: JobError | None = None
        self.finished: dict[str, Finished] = {}
        self.reused: set[str] = set()

    def run(self) -> dict[str, Finished]:
        """Run until all vertices have finished. Return the end of each, in this run or in an earlier one.

        Raises:
            JobError: a vertex failed more often than it may, or an output cannot be published. What was running beside
                it has ended, and is kept.
            KeyboardInterrupt: Ctrl-C. Finished vertices are kept.
        """
        self._journal.write(Opened(time_s=time.time(), carrier=type(self._carrier).__name__))
        try:
            while True:
                if self._failure is None:
                    self._start_ready()
                if not self._running:
                    break
                for outcome in self._carrier.wait():
                    self._end(outcome)
        finally:
            self._journal.close()
        if self._failure is not None:
            raise self._failure
        return self.finished

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_ready(self) -> None:
        while True:
            ready = [unit for unit in self._units.values() if self._is_ready(unit)]
            again = [unit for unit in ready if self._reuse(unit)]
            if not again:
                break
        for unit, slot in next_starts(ready, self._left_s, self._free):
            self._start(unit, slot)

    def _is_ready(self, unit: Unit) -> bool:
        waits = unit.name in self._running or self._is_finished(unit)
        return not waits and all(self._is_finished(self._units[name]) for name in unit.before)

    def _is_finished(self, unit: Unit) -> bool:
        return all(name in self.finished for name in unit.members)

    def _reuse(self, unit: Unit) -> bool:
        """Whether the unit finished earlier with the same definition, code and inputs, and its outputs are whole. It is
        looked up once."""
        if unit.name in self._looked_up:
            return False
        self._looked_up.add(unit.name)
        earlier = [self._known.get((name, key)) for name, key in self._keys(unit).items()]
        ends = [end for end in earlier if end is not None and all(map(self._store.whole, end.outputs.values()))]
        if len(ends) < len(unit.members):
            return False
        self._journal.write(*(Reused(time_s=time.time(), vertex=end.vertex, key=end.key) for end in ends))
        for end in ends:
            self._finish(end)
            self.reused.add(end.vertex)
            self._tell("reused", end.vertex)
        return True

    def _keys(self, unit: Unit) -> dict[str, str]:
        """The key of each vertex of a unit whose inputs are there: a digest of definition, code and inputs."""
        keys: dict[str, str] = {}
        before = self._graph.before()
        inside = {name: [other for other in before[name] if other in unit.members] for name in unit.members}
        for name in topological(inside):
            inputs = {}
            for input_name, source in self._graph.vertices[name].sources().items():
                if source.path:
                    inputs[input_name] = outside(self._folder / source.path)
                elif source.vertex in unit.members:
                    inputs[input_name] = keys[source.vertex]
                else:
                    inputs[input_name] = self.finished[source.vertex].outputs[source.output].sha256
            parts = msgspec.json.encode([self._digests[name], sorted(inputs.items())])
            keys[name] = hashlib.sha256(parts).hexdigest()
        return keys

    def _start(self, unit: Unit, slot: NodeSlot) -> None:
        attempt = self._attempts[unit.name] = self._attempts.get(unit.name, 0) + 1
        keys = self._keys(unit)
        self._journal.write(Started(time_s=time.time(), unit=unit.name, attempt=attempt, node=slot.node))
        self._running[unit.name] = slot, keys
        pipes = tuple(
            Pipe(writer=writer, output=output, reader=reader, input=input_name)
            for writer, output, reader, input_name in self._graph.streams()
            if writer in unit.members
        )
        self._carrier.start(
            UnitAssignment(
                unit=unit.name, attempt=attempt, folder=str(self._folder), store=str(self._store.root), pipes=pipes,
                tasks=tuple(self._task(name, attempt, keys[name]) for name in unit.members),
            ),
            slot,
        )  # fmt: skip
        self._tell("started", unit.name)

    def _task(self, name: str, attempt: int, key: str) -> Task:
        vertex = self._graph.vertices[name]
        directory = self._directory / "work" / name / f"{attempt}"
        inputs = {input_name: self._given(vertex, input_name) for input_name in vertex.inputs}
        threads = max(1, int(vertex.cores) // vertex.num_ranks)
        task = Task(vertex=name, directory=str(directory), inputs=inputs, outputs=vertex.outputs, threads=threads)
        replace = msgspec.structs.replace
        if isinstance(vertex, FunctionVertex):
            return replace(task, function=vertex.function, arguments=vertex.arguments)
        if isinstance(vertex, CommandVertex):
            return replace(task, command=vertex.command)
        return replace(task, training=self._training(name, vertex, directory, inputs, key))

    def _training(
        self, name: str, vertex: TrainVertex, directory: Path, inputs: Mapping[str, Given], key: str
    ) -> Training:
        """The training of a vertex. Its directory is that of its key, so that another attempt goes on from the last
        checkpoint, and another training starts anew."""
        paths = {
            input_name: value.path or str(directory / "inputs" / input_name / value.file)
            for input_name, value in inputs.items()
        }
        return Training(
            run=run_of(vertex, self._folder, paths), where=str(self._folder / vertex.run), ranks=vertex.ranks,
            directory=str(self._directory / "work" / name / f"run-{key[:12]}"), outputs={},
        )  # fmt: skip

    def _given(self, vertex: Vertex, name: str) -> Given:
        source = vertex.sources()[name]
        if source.path:
            return Given(path=str((self._folder / source.path).absolute()))
        form = self._graph.vertices[source.vertex].outputs[source.output]
        if form == "stream":
            return Given(form=form)
        stored = self.finished[source.vertex].outputs[source.output]
        return Given(form=form, file=file_of(source.output, form), stored=stored)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _end(self, outcome: Outcome) -> None:
        unit = self._units[outcome.unit]
        slot, keys = self._running.pop(unit.name)
        self._free.give(slot)
        if not outcome.problem:
            ends = [
                Finished(
                    time_s=time.time(), vertex=name, attempt=outcome.attempt, key=keys[name], start_s=outcome.start_s,
                    end_s=outcome.end_s, node=slot.node, outputs=outcome.outputs[name],
                )
                for name in unit.members
            ]  # fmt: skip
            self._journal.write(*ends)
            for end in ends:
                self._finish(end)
                self._tell("finished", end.vertex)
            return
        self._journal.write(Failed(
            time_s=time.time(), unit=unit.name, attempt=outcome.attempt, vertex=outcome.vertex, lost=outcome.lost,
            problem=outcome.problem, start_s=outcome.start_s, end_s=outcome.end_s, node=slot.node,
        ))  # fmt: skip
        self._forget_nodes(slot.node)
        if outcome.damaged is not None:
            self._forget(outcome)
            self._spoiled[unit.name] = self._spoiled.get(unit.name, 0) + 1
            if self._spoiled[unit.name] <= SPOILED:
                log.warning("%s: %s; it runs again once that is made again", outcome.vertex, outcome.problem)
                self._tell("again", unit.name)
                return
        self._died[unit.name] = self._died.get(unit.name, 0) + 1
        allowed = max(self._graph.vertices[name].retries for name in unit.members)
        if self._died[unit.name] > allowed:
            self._failure = self._failure or self._error(outcome)
            self._tell("failed", outcome.vertex)
            return
        times = f"{allowed - self._died[unit.name] + 1} more of {allowed + 1} runs"
        log.warning("%s: %s; it runs again (%s)", outcome.vertex, outcome.problem, times)
        self._tell("again", unit.name)

    def _finish(self, end: Finished) -> None:
        self.finished[end.vertex] = self._known[end.vertex, end.key] = end
        for output, path in self._graph.vertices[end.vertex].publish.items():
            try:
                self._publish(end, output, self._folder / path)
            except JobError as error:
                self._failure = self._failure or error

    def _publish(self, end: Finished, output: str, path: Path) -> None:
        """Copy an output to a path outside, unless it is there already. Raise a JobError if that fails, or if it would
        replace a folder that no run in this directory has published."""
        where, stored, place = f"vertices.{end.vertex}.publish.{output}", end.outputs[output], str(path.resolve())
        try:
            if self._store.is_at(stored, path):
                return
            if is_folder(path) and place not in self._published:
                raise JobError(
                    f"would replace the folder {path}, which no run in {self._directory} has published", where=where,
                    remedy="move it away, or publish under another name; then give the same command again",
                )  # fmt: skip
            if stored.directory and place not in self._published:
                self._journal.write(Published(time_s=time.time(), vertex=end.vertex, output=output, path=place))
                self._published.add(place)
            publish(self._store, stored, path)
        except DamagedError as error:
            problem = f"cannot be published: {error}"
            raise JobError(problem, where=where, remedy="give the same command again: it is made again") from None
        except OSError as error:
            raise JobError(
                f"cannot be published as {path}: {error.strerror or error}", where=where,
                remedy="make room, or correct the path or its rights; then give the same command again",
            ) from None  # fmt: skip

    def _forget(self, outcome: Outcome) -> None:
        """Let the vertices that wrote a damaged output run again."""
        assert outcome.damaged is not None
        for vertex, end in list(self.finished.items()):
            if outcome.damaged in end.outputs.values():
                log.warning("%s: an output is damaged; it runs again", vertex)
                del self.finished[vertex]
                self._known.pop((vertex, end.key), None)
                self._store.path(outcome.damaged).unlink(missing_ok=True)

    def _forget_nodes(self, node: str) -> None:
        """Use a node no more that the carrier has lost. Raise a JobError if a unit can then run nowhere."""
        there = self._carrier.nodes()
        if node in there:
            return
        self._free.drop(node)
        log.warning("node %s is lost", node)
        for unit in self._units.values():
            if not self._is_finished(unit) and not could_run(unit, there):
                raise JobError(
                    f"no node is left that can run {unit.name}", where=node, remedy="give the same command again"
                )

    def _error(self, outcome: Outcome) -> JobError:
        runs = self._died[outcome.unit]
        tail = "".join(f"\n  | {line}" for line in outcome.tail)
        output = self._directory / "work" / outcome.vertex / f"{outcome.attempt}" / "log"
        shown = f"; its last lines:{tail}" if tail else ""
        return JobError(
            f"failed {runs} time{'' if runs == 1 else 's'}: {outcome.problem}{shown}",
            where=f"vertices.{outcome.vertex}",
            remedy=f"its output is in {output}; correct it and give the same command again: what has finished stays",
        )


def publish(store: OutputStore, stored: Stored, path: Path) -> None:
    """Copy an output to a path outside, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    remove(fresh)
    store.place(stored, fresh, copy=True)
    remove(path)
    fresh.rename(path)


def is_folder(path: Path) -> bool:
    """Whether a folder is there, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
