"""The sources unpickle nothing, run no text as code, and import by name only where docs/security.md says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "meshwright"
REFUSED = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "jsonpickle", "yaml", "eval", "exec",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "bcast",
}  # fmt: skip
"""Modules and functions that run code from bytes or texts, and collectives that pickle."""
ALLOWED = {
    "runtime/chunk_index.py: pickle": "torch's index, read by an unpickler that knows plain classes only",
    "runtime/checkpoint.py: pickle": "the name of an error",
}
IMPORTS = {
    "__init__.py", "build.py", "comm/notes.py", "jobs/execute.py", "runtime/corpus.py", "runtime/sinks/base.py",
    "runtime/trust.py",
}  # fmt: skip
"""Modules that import by a name in a variable: our own names, the standard library's, optional packages, code that the
user trusts, and vertices of job graphs."""


def uses(text: str) -> Iterator[str]:
    """The names of modules and functions that a source uses."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            function = node.func
            is_method_of_object = isinstance(function, ast.Attribute) and function.attr == "eval"  # of a Module
            if isinstance(function, ast.Name):
                yield function.id
            elif isinstance(function, ast.Attribute) and not is_method_of_object:
                yield function.attr


def unsafe_loads(text: str) -> Iterator[int]:
    """The lines of calls of ``torch.load`` without ``weights_only=True``, and of numpy's with pickles."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load"):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        weights_only, allowed = given.get("weights_only"), given.get("allow_pickle")
        if owner == "torch" and not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
            yield node.lineno
        if owner in ("np", "numpy") and isinstance(allowed, ast.Constant) and allowed.value:
            yield node.lineno


def sources() -> list[Path]:
    return sorted(SOURCES.rglob("*.py"))


def test_nothing_is_unpickled_or_run_as_code() -> None:
    refused_uses = {
        f"{path.relative_to(SOURCES)}: {name}"
        for path in sources()
        for name in uses(path.read_text())
        if name in REFUSED
    }
    assert refused_uses == set(ALLOWED)


def test_tensors_and_arrays_are_loaded_as_data() -> None:
    assert [f"{path}:{line}" for path in sources() for line in unsafe_loads(path.read_text())] == []


def test_only_these_modules_import_by_name() -> None:
    importers = {
        str(path.relative_to(SOURCES))
        for path in sources()
        if {"import_module", "__import__"} & set(uses(path.read_text()))
    }
    assert importers == IMPORTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import pickle", {"pickle"}), ("from pickle import loads", {"pickle", "loads"}), ("eval('1')", {"eval"}),
        ("dist.all_gather_object(a, b)", {"all_gather_object"}), ("model.eval()", set()),
    ],
)  # fmt: skip
def test_uses_are_found(text: str, expected: set[str]) -> None:
    assert set(uses(text)) == expected


def test_loads_are_found() -> None:
    assert list(unsafe_loads("torch.load(a)\ntorch.load(a, weights_only=True)\nnp.load(a, allow_pickle=True)")) == [
        1,
        3,
    ]
