"""Reads GRAPH.toml: its tables become a ``JobGraph``; errors name the file, the vertex and the key."""

import os
from typing import Any, TypeVar

import msgspec

from meshwright import config
from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.job_graph import KINDS, JobGraph, JobNode, Vertex

T = TypeVar("T", bound=msgspec.Struct)


def load(path: str | os.PathLike[str]) -> JobGraph:
    """Read a GRAPH.toml.

    Raises:
        FileFormatError: the file cannot be read, or a key or value is wrong; names file, vertex and key.
    """
    return make(config.read(path), where=str(path))


def make(raw: dict[str, Any], *, where: str) -> JobGraph:
    """The graph that these tables describe; ``where`` names them in errors.

    Raises:
        FileFormatError: a key or value is wrong.
    """
    vertices = {name: _vertex(table, f"{where}: vertices.{name}") for name, table in _tables(raw, "vertices", where)}
    nodes = {name: _decoded(table, JobNode, f"{where}: nodes.{name}") for name, table in _tables(raw, "nodes", where)}
    if not vertices:
        raise FileFormatError("there are no vertices", where=where, remedy="add a table [vertices.NAME]")
    outer = _decoded({**raw, "vertices": {}, "nodes": {}}, JobGraph, where)
    return msgspec.structs.replace(outer, vertices=vertices, nodes=nodes)


def _tables(raw: dict[str, Any], key: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    outer = raw.get(key, {})
    if not isinstance(outer, dict) or not all(isinstance(table, dict) for table in outer.values()):
        raise FileFormatError("is not a table of tables", where=f"{where}: {key}", remedy=f"write [{key}.NAME]")
    return list(outer.items())


def _vertex(table: dict[str, Any], where: str) -> Vertex:
    kinds_named = [key for key in KINDS if key in table]
    if len(kinds_named) != 1:
        problem = f"has {' and '.join(kinds_named)}" if kinds_named else f"has no {', '.join(KINDS)}"
        near = next((hint for key in table if not kinds_named and (hint := files.did_you_mean(key, KINDS))), "")
        remedy = near or f"give one of {', '.join(KINDS)}: it says what the vertex runs"
        raise FileFormatError(problem, where=where, remedy=remedy)
    kind = KINDS[kinds_named[0]]
    vertex: Vertex = _decoded({"kind": kind.__struct_config__.tag, **table}, kind, where)
    return vertex


def _decoded(table: dict[str, Any], kind: type[T], where: str) -> T:
    values = {key: value for key, value in table.items() if value is not None}  # TOML has no None, the builder may
    return files.decode(msgspec.toml.encode(values), kind, where=where, toml=True)
