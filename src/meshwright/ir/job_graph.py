"""A job graph as data: vertices that run functions, commands or trainings, and the channels between them."""

import math
import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from meshwright.errors import FileFormatError
from meshwright.ir.files import did_you_mean
from meshwright.ir.run_model import Count, Positive, Section

Cores = Annotated[float, Meta(ge=0.0)]
Seconds = Annotated[float, Meta(ge=0.0)]
ChannelKind = Literal["file", "directory", "json", "arrays", "bytes", "stream"]

OBJECTS: dict[str, str] = {"json": ".json", "arrays": ".npz", "bytes": ".bin"}
"""Maps each form of an object to the suffix of its file."""
WEIGHTS = ("weights.npz", "weights.safetensors")
"""The forms of a training's weights."""
_FILE = re.compile(r"[\w-][\w.-]*\.[\w-]+")
_DIRECTORY = re.compile(r"[\w-][\w.-]*/")
_OUTSIDE = ("./", "../", "/")


class InputSource(NamedTuple):
    """The source of an input: an output of a vertex, or (``path``) a file or directory that was there before."""

    vertex: str
    output: str
    path: str = ""


def source_of(text: str) -> InputSource:
    """The source that ``VERTEX.OUTPUT`` or a path that starts with ``./``, ``../`` or ``/`` names."""
    if text.startswith(_OUTSIDE):
        return InputSource("", "", text)
    vertex, _, output = text.partition(".")
    return InputSource(vertex, output)


def kind_of(form: str) -> ChannelKind:
    """The kind of channel that a form describes: ``json``, ``arrays``, ``bytes``, ``stream``, a file name such as
    ``page.html``, or the name of a directory with a slash at its end.

    Raises:
        FileFormatError: the text is no form.
    """
    if form in ("json", "arrays", "bytes", "stream"):
        return form  # type: ignore[return-value]
    if _FILE.fullmatch(form):
        return "file"
    if _DIRECTORY.fullmatch(form):
        return "directory"
    known = "json, arrays, bytes, stream, a file name with a suffix (table.csv), or a directory (pages/)"
    raise FileFormatError(f"{form!r} is no form of an output", remedy=did_you_mean(form, OBJECTS, f"write {known}"))


def file_of(name: str, form: str) -> str:
    """The file name under which an output of this form is stored and read."""
    return f"{name}{OBJECTS[form]}" if form in OBJECTS else form.rstrip("/")


class _Vertex(Section, frozen=True, kw_only=True, tag_field="kind"):
    inputs: dict[str, str] = msgspec.field(default_factory=dict)
    """Maps the name of each input to its source: ``VERTEX.OUTPUT``, or a path that starts with ``./``, ``../`` or
    ``/``."""
    outputs: dict[str, str] = msgspec.field(default_factory=dict)
    """Maps the name of each output to its form: ``json``, ``arrays`` or ``bytes`` (objects), ``stream``, a file name
    such as ``table.csv``, or a directory such as ``pages/``."""
    publish: dict[str, str] = msgspec.field(default_factory=dict)
    """Maps outputs to paths, beside the graph's file, to which they are copied when the vertex has finished."""
    cpus: Cores | None = None
    """The cores that the vertex takes while it runs; by default one, or one for each rank."""
    gpus: Count = 0
    """The GPUs that the vertex takes."""
    memory_bytes: Count = 0
    """The bytes of memory that the vertex takes; 0: they are not counted."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Labels that the node must have."""
    seconds: Seconds | None = None
    """The expected seconds. Without them, those of the last run in the same directory count."""
    retries: Count = 2
    """How often the vertex is run again after it has died or failed."""
    code: tuple[str, ...] = ()
    """Files, beside the graph's file, whose contents count as code: if they change, the vertex runs again."""

    @property
    def cores(self) -> float:
        """The cores that the vertex takes."""
        return self.cpus if self.cpus is not None else float(self.num_ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks: 1 unless the vertex trains."""
        return 1

    @property
    def work(self) -> str:
        """The work of the vertex, in words."""
        raise NotImplementedError

    def sources(self) -> dict[str, InputSource]:
        """The source of each input."""
        return {name: source_of(text) for name, text in self.inputs.items()}


class FunctionVertex(_Vertex, frozen=True, kw_only=True, tag="function"):
    """Calls a Python function. It gets inputs and ``arguments`` by name: objects as values, files and streams as paths.
    It gets the path of each output that is a file, directory or stream, and returns the objects: the only one, or a
    dict by name."""

    function: str
    """The function, as ``package.module:function``. It is imported when the vertex runs; the graph's folder is looked
    up first."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments."""

    @property
    def work(self) -> str:
        """The work of the vertex, in words."""
        return self.function


class CommandVertex(_Vertex, frozen=True, kw_only=True, tag="command"):
    """Runs a command in the graph's folder."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The words of the command. ``{NAME}`` stands for the path of an input or output, ``{python}`` for this Python, and
    ``{{`` for a brace. Words that name files of the graph's folder count as code."""

    @property
    def work(self) -> str:
        """The work of the vertex, in words."""
        return " ".join(self.command)


class TrainVertex(_Vertex, frozen=True, kw_only=True, tag="train"):
    """Trains the model of a run file, as ``meshwright train`` does. A training that died goes on from its last
    checkpoint. Its outputs are ``weights``, ``losses`` and ``run`` (the directory of the run)."""

    run: str
    """The run file."""
    ranks: Positive = 1
    """The number of ranks, all on one node."""
    plan: str = ""
    """A plan file; empty: the layout of the run file."""
    set: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keys of the run file with other values, such as ``{ "layout.tp" = 2, "data.path" = "{digits}" }``. ``{NAME}``
    stands for the path of an input."""
    outputs: dict[str, str] = msgspec.field(default_factory=lambda: {"weights": "weights.npz", "losses": "json"})
    """``weights`` (``weights.npz`` or ``weights.safetensors``), ``losses`` (``json``), ``run`` (``run/``)."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.ranks

    @property
    def work(self) -> str:
        """The work of the vertex, in words."""
        return f"train {self.run} on {self.ranks} rank{'s' if self.ranks > 1 else ''}"


Vertex = FunctionVertex | CommandVertex | TrainVertex
KINDS: dict[str, type[FunctionVertex] | type[CommandVertex] | type[TrainVertex]] = {
    "function": FunctionVertex, "command": CommandVertex, "run": TrainVertex,
}  # fmt: skip
"""Maps the key that a vertex must have to the kind of vertex that it makes."""


class JobNode(Section, frozen=True, kw_only=True):
    """A machine on which vertices run."""

    cpus: Cores = 1.0
    """The cores that vertices may take."""
    gpus: Count = 0
    """The GPUs."""
    memory_bytes: Positive | None = None
    """The bytes of memory that vertices may take; by default, they are not counted."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Labels, such as ``{ tier = "edge" }``."""


class JobGraph(Section, frozen=True, kw_only=True):
    """The contents of a GRAPH.toml: vertices, and the nodes to plan for (by default this machine)."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    """The version of the file's format."""
    name: str = "jobs"
    """The name of the graph, for pictures and pages."""
    vertices: dict[str, Vertex]
    """The vertices by name."""
    nodes: dict[str, JobNode] = msgspec.field(default_factory=dict)
    """The nodes by name. On a Ray cluster with an address, its own nodes count when the graph runs."""

    def before(self) -> dict[str, tuple[str, ...]]:
        """The vertices whose outputs each vertex reads, in the order of its inputs."""
        return {
            name: tuple(dict.fromkeys(source.vertex for source in vertex.sources().values() if source.vertex))
            for name, vertex in self.vertices.items()
        }

    def edges(self) -> list[tuple[str, str, str]]:
        """The channels between vertices: (writer, output, reader)."""
        return [
            (source.vertex, source.output, name)
            for name, vertex in self.vertices.items()
            for source in vertex.sources().values()
            if source.vertex
        ]

    def streams(self) -> list[tuple[str, str, str, str]]:
        """The streams: (writer, output, reader, input)."""
        return [
            (source.vertex, source.output, name, given)
            for name, vertex in self.vertices.items()
            for given, source in vertex.sources().items()
            if source.vertex and self.vertices[source.vertex].outputs.get(source.output) == "stream"
        ]


def needs(cores: float, gpus: int, memory_bytes: int, labels: dict[str, str]) -> str:
    """Resources as text, such as ``2 cores, 1 GPU, tier = edge``."""
    parts = [f"{cores:g} core{'' if math.isclose(cores, 1) else 's'}"]
    if gpus:
        parts.append(f"{gpus} GPU{'' if gpus == 1 else 's'}")
    if memory_bytes:
        parts.append(f"{memory_bytes / 2**30:.3g} GiB")
    return ", ".join([*parts, *(f"{name} = {value}" for name, value in labels.items())])
