"""Plans and runs a job graph: the nodes, the expected times, the carrier, and the record of both schedules."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.errors import JobError
from meshwright.ir import files
from meshwright.ir.job_graph import JobGraph, JobNode, needs
from meshwright.ir.job_run import JobRecord, JobRow, JobSpan
from meshwright.ir.units import seconds as seconds_text
from meshwright.jobs.carrier import Carrier, Processes
from meshwright.jobs.check import check, node_text
from meshwright.jobs.journal import Event, Failed, Finished, Opened, Reused, Started, read_events
from meshwright.jobs.on_ray import OnRay
from meshwright.jobs.order import Unit, before_units, chains, critical_path, is_chain, levels, units, worker_threads
from meshwright.jobs.scheduler import Scheduler, Told
from meshwright.jobs.simulate import lower_bound, makespan, simulate
from meshwright.jobs.store import OutputStore
from meshwright.runtime.lock import LAUNCHER, locked

CarrierName = Literal["ray", "here"]
RECORD = "jobs.json"
"""The file in which the record of the last run is kept."""


def plan_jobs(
    graph: JobGraph, folder: Path, directory: Path, *, nodes: Mapping[str, JobNode] | None = None, where: str = "graph"
) -> JobRecord:
    """Check the graph, and simulate it. Nothing is run or imported.

    Args:
        folder: the folder of the graph's file, where its code and files are looked up.
        directory: the directory of its runs; the times of the last one there count where the graph names no seconds.
        nodes: default: those of the graph, or this machine.
        where: names the graph in errors.

    Raises:
        JobError, FileFormatError: the graph cannot run.
    """
    machines = dict(nodes or graph.nodes or {"this machine": this_machine()})
    check(graph, folder, machines, where)
    return _record(graph, machines, _events(directory))


def run_jobs(
    graph: JobGraph, folder: Path, directory: Path, *, on: CarrierName = "ray", address: str = "",
    tell: Told = lambda event, name: None, planned: Callable[[JobRecord], None] = lambda record: None,
    where: str = "graph",
) -> JobRecord:  # fmt: skip
    """Check and run the graph. Vertices that have finished in this directory, with equal code and inputs, are not run
    again.

    Args:
        on: ``ray``, or ``here``: processes of this machine.
        address: a Ray cluster; empty: a local cluster starts, and ends with this process.
        tell: is told of every start and end of a vertex.
        planned: is called with the predicted schedule before anything runs.

    Raises:
        JobError: the graph cannot run, Ray is missing, another run is at work in the directory, or a vertex failed too
            often.
        FileFormatError: a file cannot be read.
    """
    if address and on != "ray":
        raise JobError("only Ray has clusters", where=f"--address {address}", remedy="leave the address out")
    machines = graph.nodes or ({} if address else {"this machine": this_machine()})
    if machines:
        check(graph, folder, machines, where)
    directory = directory.absolute()
    lock = locked(directory, LAUNCHER, kind=JobError, option="--directory")
    with lock, _carrier(on, machines, address, graph) as carrier:
        there = dict(carrier.nodes())
        check(graph, folder, there, where)
        files.save(graph, directory / "graph.json")
        before = _events(directory)
        predicted = _record(graph, there, before)
        planned(predicted)
        seconds = _unit_seconds(units(graph), expected_seconds(graph, before))
        scheduler = Scheduler(graph, folder.absolute(), directory, carrier, seconds, tell)
        try:
            scheduler.run()
        except JobError as error:
            raise error.within(where) from None
        finally:
            record = measured_record(graph, predicted, _events(directory), scheduler.reused)
            files.save(record, directory / RECORD)
    return record


def outputs_of(directory: str | os.PathLike[str]) -> dict[str, dict[str, Path]]:
    """The file of every output of every vertex that has finished in the directory, by vertex and output, as in the last
    run that ran or reused the vertex. Of a directory it is the list of its files."""
    directory = Path(directory).absolute()
    store = OutputStore(directory / "objects")
    by_key: dict[tuple[str, str], Finished] = {}
    last: dict[str, Finished] = {}
    for event in _events(directory):
        if isinstance(event, Finished):
            last[event.vertex] = by_key[event.vertex, event.key] = event
        elif isinstance(event, Reused):
            last[event.vertex] = by_key[event.vertex, event.key]
    return {vertex: {name: store.path(stored) for name, stored in end.outputs.items()} for vertex, end in last.items()}


def value_of(directory: str | os.PathLike[str], source: str) -> Any:
    """The object of ``VERTEX.OUTPUT`` in a directory, or the bytes of a file.

    Raises:
        JobError: there is no such output.
    """
    from meshwright.jobs.values import decode

    vertex, _, output = source.partition(".")
    path = outputs_of(directory).get(vertex, {}).get(output)
    if path is None:
        raise JobError(f"there is no output {source!r}", where=str(directory), remedy="run the graph there first")
    graph = files.load(Path(directory) / "graph.json", JobGraph)
    return decode(files.read_bytes(path), graph.vertices[vertex].outputs[output])


def this_machine() -> JobNode:
    """This machine as a node."""
    import torch

    from meshwright.runtime.launch import num_cores
    from meshwright.runtime.memory import memory_bytes

    return JobNode(cpus=num_cores(), gpus=torch.cuda.device_count(), memory_bytes=memory_bytes())


@contextmanager
def _carrier(on: CarrierName, nodes: Mapping[str, JobNode], address: str, graph: JobGraph) -> Iterator[Carrier]:
    carrier: Carrier = OnRay(nodes, address, worker_threads(graph)) if on == "ray" else Processes(nodes)
    try:
        yield carrier
    finally:
        carrier.stop()


def _events(directory: Path) -> tuple[Event, ...]:
    path = directory / "journal.jsonl"
    data = path.read_bytes() if path.exists() else b""
    return read_events(data[: data.rfind(b"\n") + 1], str(path))


# --- the record ------------------------------------------------------------------------------------------------------


def expected_seconds(graph: JobGraph, events: Sequence[Event]) -> dict[str, float]:
    """The expected seconds of each vertex for which they are known: those of the graph, or of the last run."""
    measured = {event.vertex: event.end_s - event.start_s for event in events if isinstance(event, Finished)}
    stated = {name: vertex.seconds for name, vertex in graph.vertices.items()}
    known = {name: measured.get(name) if seconds is None else seconds for name, seconds in stated.items()}
    return {name: seconds for name, seconds in known.items() if seconds is not None}


def _unit_seconds(of: Mapping[str, Unit], seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: max(seconds.get(vertex, 0.0) for vertex in unit.members) for name, unit in of.items()}


def _record(graph: JobGraph, nodes: Mapping[str, JobNode], events: Sequence[Event]) -> JobRecord:
    """The graph with its simulated schedule."""
    of, known = units(graph), expected_seconds(graph, events)
    before, seconds = before_units(of), _unit_seconds(of, known)
    critical_s, path = critical_path(before, seconds)
    critical = tuple(vertex for name in path for vertex in of[name].members)
    times = simulate(of, nodes, seconds)
    level = levels(before)
    unit_of = {vertex: name for name, unit in of.items() for vertex in unit.members}
    rows = tuple(
        JobRow(
            name=name, work=vertex.work, level=level[unit_of[name]], predicted_s=known.get(name),
            needs=needs(vertex.cores, vertex.gpus, vertex.memory_bytes, vertex.labels), critical=name in critical,
        )
        for name, vertex in graph.vertices.items()
    )  # fmt: skip
    predicted_s, bound_s = makespan(times), lower_bound(of, nodes, seconds)
    return JobRecord(
        name=graph.name, rows=rows, edges=tuple(graph.edges()), critical_s=critical_s, bound_s=bound_s,
        critical=critical, nodes={name: node_text(node) for name, node in nodes.items()},
        predicted=tuple(
            JobSpan(vertex=vertex, node=time.node, start_s=time.start_s, end_s=time.end_s)
            for time in times
            for vertex in of[time.unit].members
        ),
        predicted_s=predicted_s if known else None,
        notes=tuple(_notes(of, [name for name in graph.vertices if name not in known], predicted_s, bound_s)),
    )  # fmt: skip


def _notes(of: Mapping[str, Unit], unknown: Sequence[str], predicted_s: float, bound_s: float) -> Iterator[str]:
    before = before_units(of)
    if len(of) > 1 and is_chain(before):
        yield f"all {len(of)} vertices are a chain: no two can run at once, so more nodes do not help"
    else:
        for chain in chains(before):
            yield f"{' -> '.join(chain)} is a chain: it cannot be split"
    if unknown:
        yield f"seconds are not known of {', '.join(unknown)}: they count as 0 until they have run once"
    if predicted_s > bound_s * 1.005:
        yield f"no schedule on these nodes takes less than {seconds_text(bound_s)}"


def measured_record(graph: JobGraph, predicted: JobRecord, events: Sequence[Event], reused: set[str]) -> JobRecord:
    """The record with the measured schedule of the last run in the journal."""
    opened = max((index for index, event in enumerate(events) if isinstance(event, Opened)), default=0)
    last = events[opened:]
    ended = [(event.vertex, event) for event in last if isinstance(event, Finished | Failed)]
    first_s = min((event.time_s for event in last if isinstance(event, Started)), default=0.0)
    spans = tuple(
        JobSpan(
            vertex=vertex, node=event.node, start_s=max(0.0, event.start_s - first_s),
            end_s=max(0.0, event.end_s - first_s),
            end="finished" if isinstance(event, Finished) else "lost" if event.lost else "failed",
        )
        for vertex, event in ended
    )  # fmt: skip
    measured = {span.vertex: span.end_s - span.start_s for span in spans if span.end == "finished"}
    runs = {name: sum(vertex == name for vertex, _ in ended) for name in graph.vertices}
    failed = {vertex for vertex, event in ended if isinstance(event, Failed)}

    def row(predicted_row: JobRow) -> JobRow:
        name = predicted_row.name
        state: Any = (
            "reused" if name in reused else "finished" if name in measured
            else "failed" if name in failed else "waiting"
        )  # fmt: skip
        return msgspec.structs.replace(predicted_row, measured_s=measured.get(name), runs=runs[name], state=state)

    makespan_s = max((event.time_s for _, event in ended), default=first_s) - first_s
    notes = predicted.notes
    if len(reused) and predicted.predicted_s is not None:
        notes = (*notes, f"{len(reused)} of {len(graph.vertices)} vertices had finished before, and were not run")
    return msgspec.structs.replace(
        predicted, rows=tuple(map(row, predicted.rows)), measured=spans, notes=notes,
        measured_s=makespan_s if ended else None,
    )  # fmt: skip
