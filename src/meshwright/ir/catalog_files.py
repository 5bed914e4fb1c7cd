"""The TOML files of the catalog, which the package holds in the folder ``catalog``."""

from importlib import resources
from importlib.resources.abc import Traversable
from typing import TypeVar

import msgspec

from meshwright.ir import files

_T = TypeVar("_T", bound=msgspec.Struct)


def read(name: str, kind: type[_T]) -> _T:
    """The content of a file of the catalog, such as ``devices/h100.toml``.

    Raises:
        FileFormatError: the file has a wrong key or value.
    """
    return files.decode(_root().joinpath(*name.split("/")).read_bytes(), kind, where=f"catalog/{name}", toml=True)


def names(folder: str) -> list[str]:
    """The names of the files in a folder of the catalog, without ``.toml``, sorted."""
    entries = (entry.name for entry in _root().joinpath(folder).iterdir())
    return sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml"))


def _root() -> Traversable:
    return resources.files("meshwright").joinpath("catalog")
