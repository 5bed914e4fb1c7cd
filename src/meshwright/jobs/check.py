"""Refuses job graphs that cannot run: cycles, missing inputs, two writers, unknown functions, resources nobody has."""

import re
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from meshwright import config
from meshwright.errors import FileFormatError, JobError, MeshwrightError, Problem, refuse
from meshwright.ir.files import did_you_mean
from meshwright.ir.job_graph import (
    WEIGHTS,
    CommandVertex,
    FunctionVertex,
    JobGraph,
    JobNode,
    TrainVertex,
    Vertex,
    kind_of,
    needs,
)  # fmt: skip
from meshwright.ir.units import size
from meshwright.jobs.code import code_files
from meshwright.jobs.order import find_cycle, grouped, units
from meshwright.jobs.placement import could_run, has_labels
from meshwright.jobs.training import run_of

_VERTEX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RUN_OUTPUTS = {"weights": WEIGHTS, "losses": ("json",), "run": ("run/",)}
RESERVED = "python"
"""The placeholder that stands for the running Python."""


def check(graph: JobGraph, folder: Path, nodes: Mapping[str, JobNode], where: str) -> None:
    """Refuse a graph that cannot run on these nodes; ``where`` names it in errors, ``folder`` holds its code. No code
    is imported.

    Raises:
        JobError, FileFormatError: the first problem, by vertex and key.
    """
    refuse(JobError, _named_problems(graph), where)
    refuse(JobError, _input_problems(graph, folder), where)
    refuse(JobError, _writer_problems(graph, folder), where)
    refuse(JobError, _cycle_problems(graph), where)
    for name, vertex in graph.vertices.items():
        try:
            _check_code(vertex, folder)
        except MeshwrightError as error:
            raise error.within(f"{where}: vertices.{name}") from None
    refuse(JobError, _resource_problems(graph, nodes), where)


# --- names, inputs and outputs ---------------------------------------------------------------------------------------


def _named_problems(graph: JobGraph) -> Iterator[Problem]:
    for name, vertex in graph.vertices.items():
        at = f"vertices.{name}"
        if not _VERTEX.fullmatch(name):
            yield at, f"{name!r} is no name of a vertex", "use letters, digits, - and _"
        for key, names in (("inputs", vertex.inputs), ("outputs", vertex.outputs)):
            for argument in names:
                if not argument.isidentifier() or argument == RESERVED:
                    yield (
                        f"{at}.{key}",
                        f"{argument!r} is no name of an argument",
                        "use a Python name that is not python",
                    )
        if both := [argument for argument in vertex.inputs if argument in vertex.outputs]:
            yield f"{at}.outputs.{both[0]}", "is the name of an input too", "rename one of them"
        for output, form in vertex.outputs.items():
            try:
                kind = kind_of(form)
            except FileFormatError as error:
                yield f"{at}.outputs.{output}", error.problem, error.remedy
                continue
            if isinstance(vertex, CommandVertex) and kind in ("json", "arrays", "bytes"):
                remedy = f"name a file, such as {output}.json: only functions return objects"
                yield f"{at}.outputs.{output}", f"a command writes files, not {form}", remedy
        if isinstance(vertex, TrainVertex):
            yield from _training_problems(at, vertex)
        for output in vertex.publish:
            if output not in vertex.outputs or vertex.outputs[output] == "stream":
                remedy = did_you_mean(output, vertex.outputs, f"it has: {', '.join(vertex.outputs) or 'none'}")
                yield f"{at}.publish.{output}", "is no output that is kept", remedy


def _training_problems(at: str, vertex: TrainVertex) -> Iterator[Problem]:
    for output, form in vertex.outputs.items():
        if output not in _RUN_OUTPUTS:
            known = ", ".join(_RUN_OUTPUTS)
            yield f"{at}.outputs.{output}", "a training has no such output", did_you_mean(output, _RUN_OUTPUTS, known)
        elif form not in _RUN_OUTPUTS[output]:
            yield f"{at}.outputs.{output}", f"cannot be {form!r}", f"write {' or '.join(_RUN_OUTPUTS[output])}"


def _input_problems(graph: JobGraph, folder: Path) -> Iterator[Problem]:
    readers: dict[tuple[str, str], str] = {}
    for name, vertex in graph.vertices.items():
        for input_name, source in vertex.sources().items():
            at = f"vertices.{name}.inputs.{input_name}"
            if source.path:
                if not (folder / source.path).exists():
                    yield at, f"there is no file {folder / source.path}", "make it, or correct the path"
                continue
            writer = graph.vertices.get(source.vertex)
            if writer is None:
                remedy = did_you_mean(source.vertex, graph.vertices, "a file is written ./NAME")
                yield at, f"there is no vertex {source.vertex!r}", remedy
                continue
            if source.output not in writer.outputs:
                remedy = did_you_mean(source.output, writer.outputs, f"it has: {', '.join(writer.outputs) or 'none'}")
                yield at, f"vertex {source.vertex!r} has no output {source.output!r}", remedy
                continue
            if writer.outputs[source.output] != "stream":
                continue
            if isinstance(vertex, TrainVertex):
                yield at, "a training reads no stream", "let a vertex write it to a file first"
            if other := readers.get((source.vertex, source.output)):
                remedy = "a stream has one reader: make it a file, or two streams"
                yield at, f"the stream {vertex.inputs[input_name]} is read by {other} too", remedy
            readers[source.vertex, source.output] = name
    for name, vertex in graph.vertices.items():
        for output, form in vertex.outputs.items():
            if form == "stream" and (name, output) not in readers:
                yield f"vertices.{name}.outputs.{output}", "nobody reads this stream", "make it a file, or leave it out"


def _writer_problems(graph: JobGraph, folder: Path) -> Iterator[Problem]:
    writers: dict[Path, str] = {}
    own = folder.resolve()
    for name, vertex in graph.vertices.items():
        for output, path in vertex.publish.items():
            at, place = f"vertices.{name}.publish.{output}", (folder / path).resolve()
            if other := writers.get(place):
                yield at, f"{path} is written by {other} too", "publish them under two names"
            if place in (own, *own.parents):
                yield at, f"{path} would replace the graph's folder", "name a file or a folder in it"
            elif kind_of(vertex.outputs[output]) != "directory" and place.is_dir():
                yield at, f"{path} is a folder", f"name a file in it, such as {Path(path) / output}"
            writers[place] = f"vertices.{name}.publish.{output}"
    for name, vertex in graph.vertices.items():
        for input_name, source in vertex.sources().items():
            if source.path and (writer := writers.get((folder / source.path).resolve())):
                problem = f"{source.path} is written by {writer}, before or after it is read"
                yield f"vertices.{name}.inputs.{input_name}", problem, "read the vertex's output: VERTEX.OUTPUT"


def _cycle_problems(graph: JobGraph) -> Iterator[Problem]:
    if cycle := find_cycle(graph.before()):
        yield "vertices", f"{' -> '.join(cycle)} is a cycle: each waits for the one before it", "remove an input"
    elif cycle := find_cycle(grouped(graph)):
        problem = f"{' -> '.join(cycle)} wait for each other, because vertices that a stream joins run together"
        yield "vertices", problem, "make the stream a file"


# --- code ------------------------------------------------------------------------------------------------------------


def _check_code(vertex: Vertex, folder: Path) -> None:
    names = {*vertex.inputs, *vertex.outputs, RESERVED}
    if isinstance(vertex, CommandVertex):
        for word in vertex.command:
            _check_placeholders(word, names, "command")
    if isinstance(vertex, TrainVertex):
        for key, value in vertex.set.items():
            if isinstance(value, str):
                _check_placeholders(value, set(vertex.inputs), f"set.{key}")
        config.make(run_of(vertex, folder, dict.fromkeys(vertex.inputs, "input.npz")), where=vertex.run)
    key = "function" if isinstance(vertex, FunctionVertex) else "code"
    try:
        missing = [file for file in code_files(vertex, folder) if not file.is_file()]
    except MeshwrightError as error:
        raise error.within(key) from None
    if missing:
        raise JobError(f"there is no file {missing[0]}", where="code", remedy="correct the path")


def _check_placeholders(text: str, names: Iterable[str], where: str) -> None:
    try:
        asked = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise JobError(f"{text!r}: {error}", where=where, remedy="write {{ and }} for braces") from None
    names = set(names)
    for field in asked:
        if field not in names:
            remedy = did_you_mean(field, names, f"known: {', '.join(sorted(names))}; write {{{{ for a brace")
            raise JobError(f"{{{field}}} in {text!r} is no input or output", where=where, remedy=remedy)


# --- resources -------------------------------------------------------------------------------------------------------


def _resource_problems(graph: JobGraph, nodes: Mapping[str, JobNode]) -> Iterator[Problem]:
    for unit in units(graph).values():
        if could_run(unit, nodes):
            continue
        asked = needs(unit.cpus, unit.gpus, unit.memory_bytes, dict(unit.labels))
        there = "; ".join(f"{name}: {node_text(node)}" for name, node in nodes.items()) or "no nodes"
        together = " together (streams join them)" if len(unit.members) > 1 else ""
        fitting = [name for name, node in nodes.items() if has_labels(node, unit)]
        remedy = "ask for less, or give [nodes] that have it" if fitting else "correct the labels"
        yield f"vertices.{unit.members[0]}", f"{asked}{together}: no node has that ({there})", remedy


def node_text(node: JobNode) -> str:
    """A node's resources as text."""
    parts = [f"{node.cpus:g} cores", *([f"{node.gpus} GPUs"] if node.gpus else [])]
    if node.memory_bytes is not None:
        parts.append(size(node.memory_bytes))
    return ", ".join([*parts, *(f"{name} = {value}" for name, value in node.labels.items())])
