"""The option ``--trust``, and run files that are read without it."""

import os
from pathlib import Path
from typing import Any

import typer

from meshwright import config

VARIABLE = "MESHWRIGHT_TRUST"
"""The environment variable through which ranks and other processes of the run learn of the option."""


def _note(trust: bool) -> bool:
    if trust:
        os.environ[VARIABLE] = "1"
    return trust


TRUST: Any = typer.Option(
    False,
    "--trust",
    callback=_note,
    is_eager=True,
    help="Trust the run file: import code that it names outside of this folder, and follow its paths anywhere.",
)


def is_trusting() -> bool:
    """Whether the user has said ``--trust``, here or to the command that started this process."""
    return os.environ.get(VARIABLE) == "1"


def read_run(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a run file, not yet checked, except for its paths.

    Raises:
        FileFormatError: the file cannot be read; or a path leads out of the current folder and of the file's, without
            ``--trust``.
    """
    raw = config.read(file)
    if not is_trusting():
        config.check_paths(raw, Path.cwd(), where=str(file))
    return raw
