"""Findings that cross from the process of a part to the process that writes the results, one a line as soon as each is
known, so that a part that is stopped loses only what it was at."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.ir.result import Check, Finding, Machine, Settings


class Line(msgspec.Struct, omit_defaults=True):
    """A line of a part's file. ``kept`` are figures that later parts read."""

    finding: Finding | None = None
    settings: dict[str, Settings] = {}
    machine: Machine | None = None
    versions: dict[str, str] = {}
    kept: dict[str, Any] = {}


class Notebook:
    """Writes the lines of a part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, line: Line) -> None:
        """Write a line, and print its finding."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        if line.finding is not None:
            print(f"{line.finding.verdict:<9}  {line.finding.target}\n           {line.finding.measured}", flush=True)

    def add_finding(self, finding: Finding, settings: Mapping[str, Settings] | None = None) -> None:
        """Note a finding, and the settings that its series name."""
        self.add(Line(finding=finding, settings=dict(settings or {})))

    def failed(self, target: str, error: BaseException) -> None:
        """Note that something could not be measured; the whole traceback is printed."""
        traceback.print_exception(error)
        self.add_finding(
            broken(target, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        )

    def tried(self, target: str, measure: Callable[[], Any]) -> Any:
        """The result of ``measure``; None if it failed, which is noted."""
        try:
            return measure()
        except Exception as error:  # noqa: BLE001 - the next measurement is not to be lost with this one
            self.failed(target, error)
            return None


def broken(target: str, why: str) -> Check:
    """The finding of something that was not measured."""
    return Check(target=target, verdict="fail", measured=why.replace("\n", " ")[:400], passed=0, total=1)


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of a part's file; a line that was cut off by the part's end is left out."""
    if not path.exists():
        return
    for text in path.read_bytes().split(b"\n"):
        if text:
            try:
                yield msgspec.json.decode(text, type=Line)
            except msgspec.DecodeError:
                return
