"""Job graphs for tests and benchmarks: random ones, their steps, and a serial run of them without any scheduler."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec

import meshwright as mw
from meshwright.ir.job_graph import FunctionVertex, JobGraph, JobNode
from meshwright.jobs.journal import Event, Failed, Finished, Opened, Started, read_events
from meshwright.jobs.order import topological
from meshwright.jobs.values import encode

STEPS = """\
import hashlib, time
def mix(name, seconds=0.0, **inputs):
    time.sleep(seconds)
    text = name + "".join(f"{key}={inputs[key]}" for key in sorted(inputs))
    return [name, hashlib.sha256(text.encode()).hexdigest()]
"""


def random_graph(seed: int, folder: Path, *, size: int, cores: float, most_s: float, least_s: float = 0.0) -> JobGraph:
    """A random graph of ``size`` vertices that sleep; each reads up to three earlier ones, and takes 1 or 2 cores."""
    draw = random.Random(seed)
    (folder / "steps.py").write_text(STEPS)
    jobs = mw.JobBuilder(f"random-{seed}", folder=folder, nodes={"box": JobNode(cpus=cores)})
    for index in range(size):
        seconds = round(draw.uniform(least_s, most_s), 3)
        before = draw.sample(range(index), min(index, draw.randint(0, 3)))
        jobs.function(
            f"v{index}", "steps:mix", inputs={f"i{other}": f"v{other}.out" for other in before},
            outputs={"out": "json"}, arguments={"name": f"v{index}", "seconds": seconds}, seconds=seconds,
            cpus=draw.choice([1, 1, 2]) if cores > 1 else 1, retries=1000,
        )  # fmt: skip
    return jobs.graph()


def serial_hashes(graph: JobGraph) -> dict[str, str]:
    """The hash of the output of every vertex of a random graph, computed one after the other in this process."""
    names: dict[str, object] = {}
    exec(STEPS, names)
    mix = names["mix"]
    assert callable(mix)
    values: dict[str, object] = {}
    for name in topological(graph.before()):
        vertex = graph.vertices[name]
        assert isinstance(vertex, FunctionVertex)
        inputs = {given: values[source.vertex] for given, source in vertex.sources().items()}
        values[name] = mix(**vertex.arguments | {"seconds": 0.0}, **inputs)
    return {name: hashlib.sha256(encode(value, "json")).hexdigest() for name, value in values.items()}


def events_in(directory: Path) -> tuple[Event, ...]:
    """The whole lines of the journal in a directory."""
    path = directory / "journal.jsonl"
    data = path.read_bytes() if path.exists() else b""
    return read_events(data[: data.rfind(b"\n") + 1], str(path))


def hashes_in(directory: Path) -> dict[str, str]:
    """The hash of the output ``out`` of every vertex that has finished."""
    return {e.vertex: e.outputs["out"].sha256 for e in events_in(directory) if isinstance(e, Finished)}


def starts_in(directory: Path) -> dict[str, int]:
    """How often each unit was started."""
    counts: dict[str, int] = {}
    for event in events_in(directory):
        if isinstance(event, Started):
            counts[event.unit] = counts.get(event.unit, 0) + 1
    return counts


def running_in(directory: Path) -> dict[str, int]:
    """The attempt of each vertex that has started and not ended, under the last scheduler."""
    running: dict[str, int] = {}
    for event in events_in(directory):
        if isinstance(event, Opened):
            running = {}
        elif isinstance(event, Started):
            running[event.unit] = event.attempt
        elif isinstance(event, Finished):
            running.pop(event.vertex, None)
        elif isinstance(event, Failed):
            running.pop(event.unit, None)
    return running


def kill_vertex(directory: Path, vertex: str, attempt: int, patience_s: float = 30.0) -> bool:
    """Kill the process that runs a vertex; False if it has ended before."""
    path = directory / "work" / vertex / f"{attempt}" / "pid"
    end_s = time.monotonic() + patience_s
    while not path.exists() or not path.read_text():
        if time.monotonic() > end_s or running_in(directory).get(vertex) != attempt:
            return False
        time.sleep(0.005)
    pid = int(path.read_text())
    if running_in(directory).get(vertex) != attempt or not lives(pid):
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def lives(pid: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def save(graph: JobGraph, path: Path) -> None:
    """Write a graph as a GRAPH.toml."""
    tables = msgspec.to_builtins(graph)
    for vertex in tables["vertices"].values():
        del vertex["kind"]
        for key in [key for key, value in vertex.items() if value is None]:
            del vertex[key]
    for node in tables["nodes"].values():
        node.pop("memory_bytes")
    path.write_bytes(msgspec.toml.encode(tables))
