"""Reads workflow files, and writes them; ``vqa`` is a workflow that comes with Meshwright."""

import os
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from meshwright import config
from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.serving.workflow import Workflow

NAMED = ("vqa",)
"""The workflows that have a name."""


def load(target: str | os.PathLike[str]) -> Workflow:
    """Read a workflow file, or the workflow of this name.

    Raises:
        FileFormatError: the file cannot be read, or a key or value is wrong; names file and key.
        WorkflowError: the workflow contradicts itself.
    """
    if str(target) in NAMED:
        text = resources.files(__name__.rpartition(".")[0]).joinpath(f"{target}.toml").read_bytes()
        return decode(text, where=str(target))
    if not Path(target).exists():
        remedy = files.did_you_mean(str(target), NAMED, f"give a file, or one of {', '.join(NAMED)}")
        raise FileFormatError("there is no such workflow file", where=str(target), remedy=remedy)
    return decode(files.read_bytes(target), where=str(target))


def decode(text: bytes, *, where: str) -> Workflow:
    """The workflow of a TOML text; ``where`` names it in errors, which are those of ``load``."""
    raw = config.tables(text, where=where)
    for model in _models(raw):
        if "factory" in model:
            model.setdefault("name", "factory")
    return files.decode(msgspec.toml.encode(raw), Workflow, where=where, toml=True)


def save(workflow: Workflow, path: Path) -> None:
    """Write the workflow as a TOML file. Comments of the file that it was read from are not in it."""
    files.write_atomically(path, msgspec.toml.encode(_given(msgspec.to_builtins(workflow))))


def _models(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables ``model`` of all variants; nothing is known yet of the tables' types."""
    tables: list[Any] = [raw]
    for key in ("operators", "variants"):
        below = [table.get(key) for table in tables if isinstance(table, dict)]
        tables = [table for value in below if isinstance(value, list) for table in value]
    models = [table.get("model") for table in tables if isinstance(table, dict)]
    return [model for model in models if isinstance(model, dict)]


def _given(value: Any) -> Any:
    """The value without keys whose value is None, which TOML cannot hold."""
    if isinstance(value, dict):
        return {key: _given(each) for key, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list | tuple) else value
