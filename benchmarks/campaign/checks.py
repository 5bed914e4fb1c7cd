"""What must hold after a fault, as functions of files and texts. Each returns problems: none if all is right."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.run_folders import RowsError, losses_in
from meshwright import api
from meshwright.errors import CheckpointError, PreemptedError
from meshwright.runtime import manifest

Category = Literal["lost", "wrong", "hung", "unexplained", "left"]
CATEGORIES: dict[Category, str] = {
    "lost": "lost checkpoints", "wrong": "wrong losses", "hung": "hangs", "unexplained": "unexplained ends",
    "left": "leftovers",
}  # fmt: skip
ROWS, COLUMNS = 24, 100
"""One screen."""
STOPPED = 130
"""The exit code after Ctrl-C; 128 + N after another signal."""
_PLACE = re.compile(r"meshwright(, rank \d+)?: ([^:\n]+: |.*\b(rank|step) \d)")
"""The form of a message that names a place: ``PLACE: PROBLEM``, or a problem of a rank or step."""
_GOES_ON = re.compile(r"^(?:going on|this run is complete) at step (\d+) of \d+$", re.MULTILINE)
_FROM_THE_BEGINNING = "all ranks start again from the beginning"


class Problem(NamedTuple):
    """Something that must not be."""

    category: Category
    text: str


# --- checkpoints -----------------------------------------------------------------------------------------------------


def lost_checkpoints(checkpoints: Path, promised: int, damaged: Collection[int] = ()) -> Iterator[Problem]:
    """``promised``: the step whose checkpoint was complete before the fault, and which the fault did not touch (-1:
    none). It, or a later one, must be complete, and all that are complete must have the bytes that were written.
    ``damaged``: the steps whose checkpoints the fault itself has damaged."""
    latest = -1
    for name in manifest.steps_in(checkpoints):
        step = int(name.removeprefix("step-"))
        if step in damaged or not (checkpoints / name / manifest.MANIFEST).exists():  # or a save was stopped
            continue
        try:
            api.verify_checkpoint(str(checkpoints / name))
            latest = max(latest, step)
        except CheckpointError as error:
            yield Problem("lost", f"{error.where}: {error.problem}")
    if latest < promised:
        yield Problem("lost", f"step {promised} was saved, and the latest whole checkpoint is of step {latest}")


def lost_steps(output: str, promised: int) -> Iterator[Problem]:
    """The run must go on from the promised checkpoint, or from later, whenever it was started again."""
    for found in _GOES_ON.finditer(output):
        if int(found[1]) < promised:
            yield Problem("lost", f"step {promised} was saved, and the run went on from step {found[1]}")
    if promised > 0 and _FROM_THE_BEGINNING in output:
        yield Problem("lost", f"step {promised} was saved, and the run began again")


# --- losses ----------------------------------------------------------------------------------------------------------


def wrong_losses(directory: Path, expected: Mapping[int, float], tolerance: float) -> Iterator[Problem]:
    """``tolerance``: 0 means bit for bit. Infinite: losses need only be finite, and the steps that a replica did not
    make, because it was lost meanwhile, may be missing."""
    free = math.isinf(tolerance)
    try:
        found = losses_in(directory, gaps=free)
    except RowsError as error:
        yield Problem("wrong", f"{error}")
        return
    if max(found, default=0) != max(expected) or (not free and found.keys() != expected.keys()):
        yield Problem("wrong", f"metrics.jsonl has {len(found)} steps, and {len(expected)} were to be made")
    for step in sorted(found.keys() & expected.keys()):
        if not math.isfinite(found[step]) or abs(found[step] - expected[step]) > tolerance:
            yield Problem("wrong", f"step {step}: the loss is {found[step]!r} instead of {expected[step]!r}")
            return


# --- ends ------------------------------------------------------------------------------------------------------------


def unexplained(output: str, code: int, allowed: Collection[int], words: str = "") -> Iterator[Problem]:
    """The end of a command: with an allowed code; without a traceback; and, if it is not complete, with a message of at
    most one screen that names value, place and remedy. ``words``: a pattern that the message must have."""
    if code not in allowed:
        yield Problem("unexplained", f"exit code {code} instead of {', '.join(map(str, sorted(allowed)))}")
    if "Traceback (most recent call last)" in output:
        yield Problem("unexplained", "a traceback is shown")
    if "this is a defect" in output:
        yield Problem("unexplained", "the command calls its own end a defect")
    message = message_of(output)
    if words and not re.search(words, output):
        yield Problem("unexplained", f"nothing says {words!r}")
    if code <= 0:  # complete, or killed from outside
        return
    if code == PreemptedError.CODE:
        if not re.search(r"stopped by SIG\w+; .*goes on from|without saving|asked to end", output):
            yield Problem("unexplained", "nothing says why it ends, and that it can go on")
        return
    if not message:
        yield Problem("unexplained", f"exit code {code} without a message")
        return
    rows = sum(max(1, math.ceil(len(line) / COLUMNS)) for line in message.splitlines())
    if rows > ROWS:
        yield Problem("unexplained", f"the message has {rows} rows of {COLUMNS} columns, and a screen has {ROWS}")
    if code >= 128:  # stopped by a signal
        return
    if "\n  -> " not in message:
        yield Problem("unexplained", "the message has no remedy")
    if not _PLACE.match(message):
        yield Problem("unexplained", "the message names no place")


def message_of(output: str) -> str:
    """The message with which a command has ended; empty if there is none."""
    found = list(re.finditer(r"^meshwright(?:, rank \d+)?: ", output, re.MULTILINE))
    return output[found[-1].start() :].strip() if found else ""


# --- leftovers -------------------------------------------------------------------------------------------------------


def left_processes(living: Sequence[int]) -> Iterator[Problem]:
    """``living``: what descends from commands that have ended."""
    for process in living:
        try:
            state = Path(f"/proc/{process}/status").read_text().splitlines()[2].split(maxsplit=1)[1]
            command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        except OSError:
            continue
        yield Problem("left", f"process {process} ({command.strip()}; {state})")


def left_files(folders: Mapping[str, Path]) -> Iterator[Problem]:
    """``folders``: by what they are for, folders that must be empty: of temporary files, of shared memory."""
    for what, folder in folders.items():
        for path in sorted(folder.iterdir()):
            yield Problem("left", f"{what}: {path.name}")


def left_in_run(directory: Path) -> Iterator[Problem]:
    """A run's folder after its good end: no temporary files, no data of saves that were given up, and no locks that are
    held."""
    known = {".lock", ".train.lock"}
    for path in sorted(directory.rglob("*")):
        if path.name.startswith(".") and path.name not in known and path.parent.name[:5] != "data-":
            yield Problem("left", f"in the run's folder: {path.relative_to(directory)}")
    checkpoints = directory / "checkpoints"
    for step in sorted(checkpoints.glob("step-*")):
        try:
            named = manifest.read(step).data
        except CheckpointError:
            named = ""
        for data in step.glob("data-*"):
            if named and data.name != named:
                yield Problem("left", f"in the run's folder: {data.relative_to(directory)}, which no manifest names")


def left_ports(table: str) -> Iterator[Problem]:
    """``table``: /proc/.../net/tcp of the box in which the commands ran. Port by port, what still listens or is
    connected there."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        state = {"01": "is connected", "0A": "listens"}.get(fields[3])
        if state:
            yield Problem("left", f"port {int(fields[1].rpartition(':')[2], 16)} {state}")


def left_mounts(folder: Path, mounts: str) -> Iterator[Problem]:
    """``mounts``: /proc/self/mountinfo."""
    for line in mounts.splitlines():
        place = line.split()[4]
        if place.startswith(f"{folder}{os.sep}"):
            yield Problem("left", f"a file system is mounted at {place}")
