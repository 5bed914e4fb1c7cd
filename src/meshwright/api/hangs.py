"""Explains why the ranks of a run wait, or waited when they ended, from what their flight recorders hold."""

import mmap
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.comm.flights import condition_of
from meshwright.comm.stacks import demand, last_stack
from meshwright.comm.transport.flight_recorder import ask
from meshwright.comm.transport.process import Process, box
from meshwright.comm.watchdog import REPORT
from meshwright.errors import FileFormatError
from meshwright.ir import flight
from meshwright.ir.flight import Condition, Flight, Seen
from meshwright.ir.hang import STALE_S, Hang, doing, explain

NOTES_S, LOOK_S = 1.0, 0.05
"""Seconds that living ranks have to say where they are, and those between two looks."""
LEAST_S = 1.0
"""Waits of living ranks that are shorter are the usual ones."""
_FILE = re.compile(r"(\d+)\.flight")


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a run: the condition of its process, what it does in words, and its recorder."""

    condition: Condition
    doing: str
    flight: Flight


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """Why ranks wait (``hang``; None if none does), what was reported while they ran, and the record of each rank.
    ``folder`` holds the records."""

    folder: str
    hang: Hang | None
    reported: str
    ranks: dict[int, RankRecord]


def explain_run(directory: Path) -> Explained:
    """Explain why the ranks of the run in ``directory`` have waited for at least ``LEAST_S`` seconds; if it has ended,
    for what they waited at their end. Living ranks of this machine are asked where they are.

    Raises:
        FileFormatError: the directory has no records, or a damaged one.
    """
    folder = _folder(directory)
    files = {int(match[1]): path for path in sorted(folder.glob("*.flight")) if (match := _FILE.fullmatch(path.name))}
    living = {rank: process for rank, path in files.items() if (process := _process(path)) is not None}
    stacks = _stacks(folder, {rank: (files[rank], process) for rank, process in living.items()})
    seen = {rank: _seen(path, living.get(rank), stacks.get(rank, ())) for rank, path in files.items()}
    records = {
        rank: RankRecord(condition=each.condition, doing=doing(each), flight=each.flight)
        for rank, each in seen.items()
        if each.flight is not None
    }
    report = folder / REPORT
    reported = report.read_text().rstrip() if report.exists() else ""
    hang = explain(seen, LEAST_S if living else 0.0)
    return Explained(folder=str(folder), hang=hang, reported=reported, ranks=records)


def _folder(directory: Path) -> Path:
    """The folder with the records of a run: those of its last attempt."""
    attempts = sorted((directory / "ranks").glob("failed-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in (directory / "ranks", directory, *attempts):
        if any(folder.glob("*.flight")):
            return folder
    raise FileFormatError(
        "no rank has left a flight recorder here",
        where=str(directory),
        remedy="name the directory of a run of several ranks, or the one that MESHWRIGHT_FLIGHTS named",
    )


def _read(path: Path) -> Flight:
    try:
        return flight.read(path.read_bytes())
    except OSError as error:
        raise FileFormatError(
            f"cannot read the file: {error.strerror}", where=str(path), remedy="check its owner"
        ) from None
    except FileFormatError as error:
        raise error.within(str(path)) from None


def _process(path: Path) -> Process | None:
    """The process that writes a record, if it is one of this machine and lives: its number may be another's by now."""
    record = _read(path)
    if record.box != box() or record.ended_s:
        return None
    with suppress(OSError):
        process = Process(record.process)
        maps = Path(f"/proc/{record.process}/maps").read_text()
        return process if str(path.resolve()) in maps else None
    return None


def _stacks(folder: Path, living: Mapping[int, tuple[Path, Process]]) -> dict[int, tuple[str, ...]]:
    """Let living ranks note where they are. Returns the stacks of those that cannot run Python code now, and write them
    by a signal."""
    asked_s = time.monotonic()
    for path, _ in living.values():
        with suppress(OSError), path.open("r+b") as file, mmap.mmap(file.fileno(), flight.SIZE) as memory:
            ask(memory)
    left = {rank: path for rank, (path, process) in living.items() if not process.is_stopped()}
    _until(lambda: all(_read(path).notes.time_s >= asked_s for path in left.values()))
    silent = [rank for rank, path in left.items() if _read(path).notes.time_s < asked_s]
    files = {rank: folder / f"{rank}.stacks" for rank in silent}
    files = {rank: path for rank, path in files.items() if path.exists() and demand(living[rank][1].number)}
    _until(lambda: all(last_stack(path) for path in files.values()))
    return {rank: last_stack(path) for rank, path in files.items()}


def _until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + NOTES_S
    while not is_done() and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _seen(path: Path, process: Process | None, stack: tuple[str, ...]) -> Seen:
    record = _read(path)
    if stack:
        record = msgspec.structs.replace(record, notes=msgspec.structs.replace(record.notes, stack=stack))
    if process is not None or record.box == box() or record.ended_s:
        return Seen(record, condition_of(record, process))
    # Another host has its own monotonic clock: only times of day can be compared.
    is_fresh = time.time() - (record.day_s + record.beat_s) < 10 * STALE_S
    return Seen(record, "runs" if is_fresh else "silent")
