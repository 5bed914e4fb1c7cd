"""The journal of a campaign: one line for each fault, so that a campaign that was stopped goes on after the last."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.campaign.checks import Problem
from benchmarks.campaign.kinds import KINDS


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fault that was inflicted.

    Attributes:
        number, seed: they decide kind, run and moment of the fault.
        codes: the exit codes of its commands, in their order.
        problems: the violations that the checks found.
        notes: values that were drawn or seen, such as the step.
        tries: the number of tries until the moment came.
        missed: the reason why the moment never came; empty if it came.
        seconds: the time from the first command of the first try until the verdict.
    """

    number: int
    seed: int
    kind: str
    run: str
    commit: str = ""
    codes: tuple[int, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: dict[str, str] = {}
    tries: int = 1
    missed: str = ""
    seconds: float = 0.0


def read(path: Path) -> list[Entry]:
    """The whole lines of a journal."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Entry) for line in lines[:-1]]


def append(path: Path, entry: Entry) -> None:
    """Add a line, and flush it to the disk. Half a line, which a killed campaign may have left, is removed first."""
    with path.open("a+b") as file:
        whole = path.read_bytes().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(msgspec.json.encode(entry) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def drawn(seed: int, number: int, names: tuple[str, ...]) -> tuple[str, str, random.Random]:
    """Kind and run of fault ``number``, and the generator that draws its moment. Every round inflicts each kind once,
    in an order that the seed draws."""
    turn, place = divmod(number, len(names))
    order = sorted(names)
    random.Random(f"{seed} {turn}").shuffle(order)
    name = order[place]
    draw = random.Random(f"{seed} {number} {name}")
    return name, draw.choice(KINDS[name].runs), draw


def counts(entries: list[Entry]) -> Iterator[tuple[str, int, int]]:
    """For each kind: its name, how many faults were inflicted, and how many had a problem."""
    for name in KINDS:
        own = [entry for entry in entries if entry.kind == name and not entry.missed]
        yield name, len(own), sum(bool(entry.problems) for entry in own)
