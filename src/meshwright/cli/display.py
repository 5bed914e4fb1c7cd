"""What a person sees: lines, tables, and progress bars that disappear when they are done."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from meshwright.errors import FileFormatError
from meshwright.ir.files import write_atomically

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]i?)?B?")
UNITS: dict[str, float] = {
    "": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def console() -> Console:
    """The terminal, where lines are as long as they are: a log line is one line."""
    width = None if sys.stdout.isatty() else 160
    return Console(width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)


class Bars:
    """Progress on a terminal; elsewhere nothing is drawn."""

    def __init__(self, terminal: Console) -> None:
        self._console = terminal
        self._shown: Progress | None = None

    def begin(self, what: str, total: int = 0) -> None:
        """Draw a bar for ``total`` parts, or a sign of life where their number is not known."""
        self.end()
        if not self._console.is_terminal:
            return
        counted = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) if total else ()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted)
        self._shown = Progress(*columns, console=self._console, transient=True)
        self._shown.add_task(what, total=total or None)
        self._shown.start()

    def advance(self) -> None:
        """One part more is done."""
        if self._shown is not None:
            self._shown.advance(self._shown.task_ids[0])

    def say(self, what: str) -> None:
        """What is done now."""
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], description=what)

    def end(self) -> None:
        """Take the bar away."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


class _Lines(logging.Handler):
    """Log records as lines above the progress bar."""

    def __init__(self, terminal: Console) -> None:
        super().__init__(logging.INFO)
        self._console = terminal

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._console.print(f"{prefix}{record.getMessage()}")


@contextmanager
def shown(rank: int = 0) -> Iterator[Bars]:
    """Show the library's log and progress: rank 0 on the terminal; others only log, to where their output goes."""
    logger = logging.getLogger("meshwright")
    terminal = console() if rank == 0 else Console(file=sys.stderr, soft_wrap=True, force_terminal=False)
    handler, level = _Lines(terminal), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    bars = Bars(terminal)
    try:
        yield bars
    finally:
        bars.end()
        logger.removeHandler(handler)
        logger.setLevel(level)


def restore_cursor() -> None:
    """A rank that was stopped may have left the terminal without one."""
    terminal = console()
    if terminal.is_terminal:
        terminal.show_cursor(True)


def write(path: Path, data: bytes) -> None:
    """Write what a command was asked to write; a FileFormatError where that is impossible."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise FileFormatError(
            f"cannot write the file: {error.strerror}", where=str(path), remedy="check the path"
        ) from None


def num_bytes(text: str, where: str) -> int:
    """A size with its unit, in bytes; a FileFormatError at ``where`` if it is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise FileFormatError(f"{text!r} is not a size", where=where, remedy="write a number and a unit, as in 16MiB")
    return round(float(found[1]) * UNITS[found[2] or ""])
