"""The folders of runs below a folder: found by name and time alone, and read only where they are shown."""

import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.errors import FileFormatError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.ledger import Ledger
from meshwright.ir.units import seconds, size
from meshwright.report.run_files import LEDGER, METRICS, PLAN, RUN
from meshwright.report.run_page import Closeness, verdict

SHOWN = 50
"""Number of runs on one page of the list."""
MOST_BYTES = 8 * 2**20
"""Ledgers that are larger are not read for the list."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list. Texts that are unknown are empty; ``problem`` says why a ledger cannot be shown. ``link``
    is the folder's name; ``named``: it is text, so that a form can send it."""

    name: str
    link: str
    changed: str
    layout: str = ""
    predicted: str = ""
    measured: str = ""
    ratio: str = ""
    verdict: Closeness | None = None
    peak: str = ""
    has_plan: bool = False
    named: bool = True
    problem: str = ""


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the list: its rows, newest first; ``total`` runs match; ``page`` counts from 1."""

    rows: tuple[RunRow, ...]
    total: int
    page: int
    pages: int


class _RunEntry(NamedTuple):
    changed_s: float
    name: str


class RunFolders:
    """The runs in ``folder``: its subfolders with a run.toml or metrics.jsonl, and the folder itself if it is a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def page(self, words: str = "", number: int = 1) -> RunPage:
        """A page of the list, of the runs whose names contain ``words``. Only these rows' ledgers are read."""
        entries = sorted((each for each in self._scan() if words.lower() in each.name.lower()), reverse=True)
        pages = max(1, -(-len(entries) // SHOWN))
        number = min(max(1, number), pages)
        shown = entries[(number - 1) * SHOWN : number * SHOWN]
        return RunPage(rows=tuple(self._row(each) for each in shown), total=len(entries), page=number, pages=pages)

    def names(self, most: int) -> list[str]:
        """The names of the newest runs that have a plan, at most so many."""
        newest = sorted(self._scan(), reverse=True)
        return [each.name for each in newest[: 2 * most] if (self.path(each.name) / PLAN).is_file()][:most]

    def path(self, name: str) -> Path:
        """The folder of a run in the list.

        Raises:
            FileFormatError: there is no run of that name.
        """
        if name == "." and _changed_s(self.folder) is not None:
            return self.folder
        place = self.folder / name
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        if not plain or _changed_s(place) is None:
            raise FileFormatError("there is no such run", where=name, remedy="choose one of the list")
        return place

    def _scan(self) -> list[_RunEntry]:
        listed = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    changed_s = _changed_s(Path(entry.path)) if entry.is_dir() else None
                    if changed_s is not None:
                        listed.append(_RunEntry(changed_s, entry.name))
        except OSError:
            return []
        own_s = _changed_s(self.folder)
        return [*listed, *([_RunEntry(own_s, ".")] if own_s is not None else [])]

    def _row(self, entry: _RunEntry) -> RunRow:
        place = self.path(entry.name)
        shown = place.resolve().name if entry.name == "." else entry.name
        row = RunRow(
            name=os.fsencode(shown).decode(errors="replace"), link=entry.name,
            changed=time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.changed_s)),
            has_plan=(place / PLAN).is_file(), named=entry.name.isprintable() or entry.name.isascii(),
        )  # fmt: skip
        try:
            if (place / LEDGER).stat().st_size > MOST_BYTES:
                return msgspec.structs.replace(row, problem="its ledger is too large for the list")
            ledger = files.load(place / LEDGER, Ledger)
            predicted_bytes, peak_bytes = ledger.highest_bytes
            return msgspec.structs.replace(
                row, layout=ledger.layout, predicted=seconds(ledger.predicted_step_s),
                measured=seconds(ledger.measured_step_s), ratio=f"{ledger.step_ratio:.2f}",
                verdict=verdict(ledger.step_ratio), peak=size(peak_bytes or predicted_bytes),
            )  # fmt: skip
        except FileNotFoundError:
            return row
        except OSError as error:
            return msgspec.structs.replace(row, problem=f"its ledger cannot be read: {error.strerror}")
        except MeshwrightError as error:
            return msgspec.structs.replace(row, problem=error.problem)


def _changed_s(place: Path) -> float | None:
    """The time of the last change of a run, in seconds since 1970; None if the folder is no run."""
    for name in (METRICS, RUN):
        try:
            return os.stat(os.path.join(place, name)).st_mtime
        except (OSError, ValueError):
            continue
    return None
