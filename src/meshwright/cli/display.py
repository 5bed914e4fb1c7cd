"""What a person sees: lines, tables, and progress bars that disappear when they are done."""

import logging
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from meshwright.errors import FileFormatError
from meshwright.ir.files import write_atomically

T = TypeVar("T")

JSON: Any = typer.Option(False, "--json", help="Print JSON.")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]i?)?B?")
UNITS: dict[str, float] = {
    "": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def examples(*calls: str, note: str = "") -> str:
    """The end of a command's help: how it is called, then a note."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {call}" for call in calls), *filter(None, [note])]) + "\n"


def command(*words: str, options: Mapping[str, object], arguments: Iterable[str] = ()) -> str:
    """The command line that does the same again, without the words and options that are 0 or empty."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value]
    return shlex.join(["meshwright", *filter(None, words), *chain.from_iterable(given), *arguments])


def console() -> Console:
    """The terminal, where lines are as long as they are: a log line is one line."""
    width = None if sys.stdout.isatty() else 160
    return Console(width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print a value for a program to read."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def table(titles: Sequence[str] = (), left: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """An empty table without lines, headed by ``titles``, if any.

    Columns are aligned to the right, those of ``left`` to the left; only those of ``wrapped`` may break into lines.
    """
    made = Table(box=None, pad_edge=False, show_header=bool(titles))
    for title in titles:
        made.add_column(title, justify="left" if title in left else "right", no_wrap=title not in wrapped)
    return made


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


@contextmanager
def progress(what: str = "", total: int = 0) -> Iterator[Bars]:
    """Show progress on the terminal: at once a bar for ``what``, if it is given (see ``Bars.begin``)."""
    bars = Bars(console())
    try:
        if what:
            bars.begin(what, total)
        yield bars
    finally:
        bars.end()


@contextmanager
def cursor_kept() -> Iterator[None]:
    """Give the terminal its cursor back: a rank that was stopped may have left it without one."""
    try:
        yield
    finally:
        console().show_cursor(True)


def on_rank(function: Callable[..., T], *arguments: Any) -> T:
    """What every rank runs: ``function(*arguments, progress)``, with its log and progress shown."""
    from meshwright import api

    with shown(api.launched_rank()) as bars:
        return function(*arguments, bars)


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


def numbers(text: str, where: str, remedy: str) -> list[int]:
    """``8,16`` as numbers; a FileFormatError at ``where`` if it is none."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise FileFormatError(f"{text!r} are no numbers", where=where, remedy=remedy) from None
