"""The terminal output of commands: lines, tables, and progress bars that disappear when they are done."""

import logging
import re
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from meshwright.errors import FileFormatError
from meshwright.ir.files import write_atomically

T = TypeVar("T")

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
JSON: Any = typer.Option(False, "--json", help="Print JSON.")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]i?)?B?")
UNITS: dict[str, float] = {
    "": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def examples(*calls: str, note: str = "") -> str:
    """The end of a command's help: example calls, then a note."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {call}" for call in calls), *filter(None, [note])]) + "\n"


def command(*words: str, options: Mapping[str, object], arguments: Iterable[str] = ()) -> str:
    """The command line that repeats a call. Words and options that are 0 or empty are left out."""
    words_of_options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value]
    return shlex.join(["meshwright", *filter(None, words), *chain.from_iterable(words_of_options), *arguments])


def console() -> Console:
    """The terminal. It breaks no long lines, so that a log line stays a line."""
    width = None if sys.stdout.isatty() else 160
    return Console(width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def table(titles: Sequence[str] = (), left: Collection[str] = (), wrapped: Collection[str] = ()) -> Table:
    """An empty table without ruled lines, with ``titles`` as its header, if any.

    Columns in ``left`` are left-aligned, all others right-aligned. Only columns in ``wrapped`` may wrap their text.
    """
    grid = Table(box=None, pad_edge=False, show_header=bool(titles))
    for title in titles:
        grid.add_column(title, justify="left" if title in left else "right", no_wrap=title not in wrapped)
    return grid


class Bars:
    """Progress bars on a terminal; without a terminal, nothing is drawn."""

    def __init__(self, terminal: Console) -> None:
        self._console = terminal
        self._shown: Progress | None = None

    def begin(self, what: str, total: int = 0) -> None:
        """Draw a bar for ``total`` parts, or only a spinner if their number is unknown (0)."""
        self.end()
        if not self._console.is_terminal:
            return
        counted = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) if total else ()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted)
        self._shown = Progress(*columns, console=self._console, transient=True)
        self._shown.add_task(what, total=total or None)
        self._shown.start()

    def advance(self) -> None:
        """Count one more finished part."""
        if self._shown is not None:
            self._shown.advance(self._shown.task_ids[0])

    def say(self, what: str) -> None:
        """Show ``what`` as the current work."""
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], description=what)

    def end(self) -> None:
        """Remove the bar."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


class _Lines(logging.Handler):
    """Prints log records as lines above the progress bar."""

    def __init__(self, terminal: Console) -> None:
        super().__init__(logging.INFO)
        self._console = terminal

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._console.print(f"{prefix}{record.getMessage()}")


@contextmanager
def shown(rank: int = 0) -> Iterator[Bars]:
    """Show the library's log and progress: rank 0 on the terminal; other ranks only log, to standard error."""
    terminal = console() if rank == 0 else _errors()
    bars = Bars(terminal)
    with _logged(terminal):
        try:
            yield bars
        finally:
            bars.end()


@contextmanager
def progress(what: str = "", total: int = 0) -> Iterator[Bars]:
    """Show progress on the terminal, and the library's log. If ``what`` is given, its bar starts at once (see
    ``Bars.begin``). If the output is not a terminal, it may be data for another program. The log then goes to standard
    error."""
    terminal = console()
    bars = Bars(terminal)
    with _logged(terminal if terminal.is_terminal else _errors()):
        try:
            if what:
                bars.begin(what, total)
            yield bars
        finally:
            bars.end()


@contextmanager
def _logged(terminal: Console) -> Iterator[None]:
    """Print the library's log on ``terminal``."""
    logger = logging.getLogger("meshwright")
    handler, level = _Lines(terminal), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _errors() -> Console:
    return Console(file=sys.stderr, soft_wrap=True, force_terminal=False, highlight=False, markup=False, emoji=False)


class Interrupt:
    """Turns Ctrl-C into a question: after the first press, ``asked()`` is true. A second press raises
    KeyboardInterrupt, and so does a press before the first call of ``asked``."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.pressed = self._listening = False
        self._notify = notify

    def asked(self) -> bool:
        """Whether Ctrl-C was pressed."""
        self._listening = True
        return self.pressed

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        if self.pressed or not self._listening:
            raise KeyboardInterrupt
        self.pressed = True
        self._notify("stopping: the best so far is planned (Ctrl-C again: at once)")


@contextmanager
def cursor_kept() -> Iterator[None]:
    """Show the terminal's cursor again at the end, because a stopped rank may have left it hidden."""
    try:
        yield
    finally:
        console().show_cursor(True)


def on_rank(function: Callable[..., T], *arguments: Any) -> T:
    """Run ``function(*arguments, progress)`` on this rank, with its log and progress shown."""
    from meshwright import api

    with shown(api.launched_rank()) as bars:
        return function(*arguments, bars)


def write(path: Path, data: bytes) -> None:
    """Write a command's output file; raise a FileFormatError if that is impossible."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise FileFormatError(
            f"cannot write the file: {error.strerror}", where=str(path), remedy="check the path"
        ) from None


def num_bytes(text: str, where: str) -> int:
    """The bytes of a size with its unit, such as 16MiB; raise a FileFormatError at ``where`` if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise FileFormatError(f"{text!r} is not a size", where=where, remedy="write a number and a unit, as in 16MiB")
    return round(float(match[1]) * UNITS[match[2] or ""])


def seconds(text: str, where: str) -> list[float]:
    """The numbers in a list such as ``1.52,1.49``; raises a FileFormatError if it is not such a list."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise FileFormatError(f"{text!r} are no seconds", where=where, remedy="write 1.52,1.49,1.50") from None


def toml_path(path: Path, where: str) -> Path:
    """The path of a cluster file to write; raises a FileFormatError if its name does not end in .toml."""
    if path.suffix != ".toml":
        raise FileFormatError(f"a cluster file ends in .toml, {path} does not", where=where, remedy="name it mine.toml")
    return path


def numbers(text: str, where: str, remedy: str) -> list[int]:
    """The numbers of a text such as ``8,16``; raise a FileFormatError at ``where`` if it is not such a text."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise FileFormatError(f"{text!r} are no numbers", where=where, remedy=remedy) from None
