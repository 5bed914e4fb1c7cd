"""The interface of sinks, and what several of them share."""

import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.errors import LaunchError
from meshwright.ir import files

log = logging.getLogger("meshwright")

Row = dict[str, Any]
"""The metrics of a step: ``step``, and numbers by name. Or its evaluation: ``step``, and a dict ``held_out``."""
_ID = re.compile(r"[A-Za-z0-9_-]{4,64}")


class Sink(ABC):
    """Takes the metrics of a run on rank 0. Steps are in order.

    A sink stops no training: after an error of its library or its disk it warns, and goes on with the next rows.
    """

    name = ""
    """The name in ``train.metrics``."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Take rows of finished steps."""

    def rewind(self, step: int) -> list[Row]:
        """The run goes on after ``step``: later steps will come again. Return the rows up to it, if this sink can read
        what it has written."""
        return []

    def flush(self) -> None:  # noqa: B027 - most sinks send rows elsewhere
        """Flush the rows that were taken to the disk. The thread that saves calls it: rows of steps that are saved must
        outlive a power cut, because these steps are not made again."""

    def close(self) -> None:  # noqa: B027 - files that are whole after each write need no end
        """Finish: the run has ended."""


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row by name, without the step. Those of an evaluation begin with ``held_out/``."""
    named: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            named |= {f"{name}/{key}": number for key, number in numbers(value).items()}
        elif name != "step" and isinstance(value, int | float):
            named[name] = float(value)
    return named


def package(module: str, what: str, extra: str) -> Any:
    """A module of an optional package. Raise a LaunchError that names the extra if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise LaunchError(
            f"{what} cannot be loaded: {error}",
            where="train.metrics",
            remedy=f"pip install 'meshwright[{extra}]', or leave {extra!r} out",
        ) from None


@contextmanager
def warned(sink: Sink) -> Iterator[None]:
    """Turn an error of a sink's library into a warning. A run is worth more than its curves."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        text = next(iter(str(error).strip().splitlines()), "")
        log.warning("%s has not taken the last metrics: %s: %s", sink.name, type(error).__name__, text)


def kept_id(path: Path) -> str:
    """The id in a file, under which another program knows this run; a new one, written there, if there is none."""
    if path.is_file():
        text = path.read_text(errors="replace").strip()
        if _ID.fullmatch(text):
            return text
    new_id = secrets.token_hex(4)
    files.write_atomically(path, new_id.encode())
    return new_id
