"""Builds a job graph in Python: each call adds a vertex, whose outputs are inputs of later ones."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import JobError
from meshwright.ir.job_graph import JobGraph, JobNode, Vertex
from meshwright.ir.job_run import JobRecord
from meshwright.jobs.load import make
from meshwright.jobs.run import CarrierName, plan_jobs, run_jobs


class AddedVertex:
    """A vertex of a builder: ``vertex["digits"]`` is the name of its output ``digits``, for inputs of others."""

    def __init__(self, name: str, outputs: Mapping[str, str]) -> None:
        self.name = name
        self._outputs = outputs

    def __getitem__(self, output: str) -> str:
        if output not in self._outputs:
            known = ", ".join(self._outputs) or "none"
            raise JobError(f"there is no output {output!r}", where=f"vertex {self.name}", remedy=f"it has: {known}")
        return f"{self.name}.{output}"


class JobBuilder:
    """A job graph under construction. Options of its methods are the keys of a vertex in GRAPH.toml.

        jobs = JobBuilder("digits")
        digits = jobs.function("prepare", "steps:prepare", outputs={"digits": "arrays"})
        jobs.train("train", "softmax.toml", inputs={"digits": digits["digits"]}, set={"data.path": "{digits}"})
        record = jobs.run("runs/digits")

    Args:
        folder: the folder in which commands run, and where code and files are looked up.
        nodes: the nodes to run on; default: this machine.
    """

    def __init__(
        self, name: str = "jobs", *, folder: str | os.PathLike[str] = ".", nodes: Mapping[str, JobNode] | None = None
    ) -> None:
        self._name, self._folder, self._nodes = name, Path(folder), dict(nodes or {})
        self._vertices: dict[str, Vertex] = {}

    def function(self, name: str, function: str | Callable[..., Any], **keys: Any) -> AddedVertex:
        """Add a vertex that calls a function of an importable module, or ``"package.module:function"``.

        Raises:
            JobError: the function cannot be imported by its name, or there is such a vertex already.
            FileFormatError: a key or value is wrong.
        """
        return self._add(name, {"function": function if isinstance(function, str) else _name_of(function), **keys})

    def command(self, name: str, *words: str, **keys: Any) -> AddedVertex:
        """Add a vertex that runs a command. Raises as ``function``."""
        return self._add(name, {"command": list(words), **keys})

    def train(self, name: str, run: str | os.PathLike[str], **keys: Any) -> AddedVertex:
        """Add a vertex that trains the model of a run file. Raises as ``function``."""
        return self._add(name, {"run": os.fspath(run), **keys})

    def graph(self) -> JobGraph:
        """The graph of all vertices added so far."""
        return JobGraph(name=self._name, vertices=dict(self._vertices), nodes=self._nodes)

    def plan(self, directory: str | os.PathLike[str] = "runs/jobs") -> JobRecord:
        """Check the graph, and simulate it; see ``plan_jobs``."""
        return plan_jobs(self.graph(), self._folder, Path(directory))

    def run(
        self, directory: str | os.PathLike[str] = "runs/jobs", *, on: CarrierName = "ray", address: str = ""
    ) -> JobRecord:
        """Check the graph, and run it; see ``run_jobs``."""
        return run_jobs(self.graph(), self._folder, Path(directory), on=on, address=address)

    def _add(self, name: str, table: dict[str, Any]) -> AddedVertex:
        if name in self._vertices:
            raise JobError("there are two vertices of this name", where=f"vertex {name}", remedy="rename one of them")
        vertex = make({"vertices": {name: table}}, where=self._name).vertices[name]
        self._vertices[name] = vertex
        return AddedVertex(name, vertex.outputs)


def _name_of(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module in ("__main__", "", None) or not name.isidentifier():
        remedy = "define it at the top level of a module beside the program: workers import it by its name"
        raise JobError(f"{name or function!r} is no function of a module that can be imported", remedy=remedy)
    return f"{module}:{name}"
