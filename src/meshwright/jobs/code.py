"""Finds the code that vertices name, without importing or running it, and makes digests of it."""

import ast
import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib import invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from meshwright import __version__
from meshwright.errors import JobError
from meshwright.ir import files
from meshwright.ir.job_graph import CommandVertex, FunctionVertex, TrainVertex, Vertex

_AFFECTING = ("function", "arguments", "command", "run", "ranks", "plan", "set", "outputs")
"""The keys of a vertex that change its outputs."""


def function_file(name: str, folder: Path) -> Path:
    """The file that defines ``package.module:function``, looked up in ``folder`` first. Nothing is imported: the file
    is found by Python's own search, and parsed.

    Raises:
        JobError: there is no such module, or it defines no such function.
    """
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise JobError(f"{name!r} does not name a function", remedy="write package.module:function")
    invalidate_caches()  # the file may be new
    file = _module_file(module, [str(folder.absolute()), *sys.path])
    if file is None:
        raise JobError(
            f"there is no module {module!r}", remedy=f"put {module}.py into {folder}, or install the package"
        )
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise JobError(f"{file} is not Python: {error}", remedy="correct that line") from None
    known = list(_names(tree))
    if function not in known:
        raise JobError(
            f"{file} defines no {function!r}", remedy=files.did_you_mean(function, known, "define it at the top level")
        )
    return file


def _module_file(module: str, path: Sequence[str]) -> Path | None:
    """The source file of a module; None if it is not found."""
    names, spec = module.split("."), None
    for depth in range(len(names)):
        spec = PathFinder.find_spec(".".join(names[: depth + 1]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _names(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines at its top level, or imports."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def code_files(vertex: Vertex, folder: Path) -> list[Path]:
    """The files whose contents count as the code of the vertex."""
    paths = [folder / name for name in vertex.code]
    if isinstance(vertex, FunctionVertex):
        paths.append(function_file(vertex.function, folder))
    elif isinstance(vertex, CommandVertex):
        paths += [folder / word for word in vertex.command if _is_file(folder / word)]
    else:
        paths += [folder / name for name in (vertex.run, vertex.plan) if name]
    return paths


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a word that is no path
        return False


def vertex_digest(vertex: Vertex, folder: Path) -> str:
    """A digest of all that decides the vertex's outputs, besides its inputs: its definition, and its code."""
    definition = {key: value for key, value in msgspec.to_builtins(vertex).items() if key in _AFFECTING}
    digest = hashlib.sha256(msgspec.json.encode(definition, order="deterministic"))
    if isinstance(vertex, TrainVertex):
        digest.update(__version__.encode())
    for file in code_files(vertex, folder):
        digest.update(hashlib.sha256(files.read_bytes(file)).digest())
    return digest.hexdigest()
