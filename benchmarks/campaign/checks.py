"""The conditions that must hold after a fault. Each function checks files or texts, and yields the problems."""

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
"""The size of a screen, which a message must not exceed."""
STOPPED = 130
"""The exit code after Ctrl-C; 128 + N after another signal."""
_PLACE = re.compile(r"meshwright(, rank \d+)?: (.+?: |.*\b(rank|step) \d)")
"""The form of a message that names a place: ``PLACE: PROBLEM``, or a problem of a rank or step."""
_GOES_ON = re.compile(r"^(?:going on|this run is complete) at step (\d+) of \d+$", re.MULTILINE)
_FROM_THE_BEGINNING = "all ranks start again from the beginning"


class Problem(NamedTuple):
    """A violated condition."""

    category: Category
    text: str


# --- checkpoints -----------------------------------------------------------------------------------------------------


def lost_checkpoints(checkpoints: Path, promised: int, damaged: Collection[int] = ()) -> Iterator[Problem]:
    """Check that the checkpoint of step ``promised`` or a later one is complete, and that all complete checkpoints have
    the bytes that were written.

    ``promised``: the step of the latest checkpoint that was complete before the fault and that the fault did not touch;
    -1: there is none. ``damaged``: the steps whose checkpoints the fault itself has damaged."""
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
    """Check that the run went on from step ``promised`` or a later one, whenever it was started again."""
    for match in _GOES_ON.finditer(output):
        if int(match[1]) < promised:
            yield Problem("lost", f"step {promised} was saved, and the run went on from step {match[1]}")
    if promised > 0 and _FROM_THE_BEGINNING in output:
        yield Problem("lost", f"step {promised} was saved, and the run began again")


# --- losses ----------------------------------------------------------------------------------------------------------


def wrong_losses(directory: Path, expected: Mapping[int, float], tolerance: float) -> Iterator[Problem]:
    """Compare the losses of a run with those of the uninterrupted run.

    ``tolerance``: the largest difference; 0: losses must be equal bit for bit. If it is infinite, losses need only be
    finite, and steps may be missing that a lost replica did not make; it may have joined after the last one."""
    free = math.isinf(tolerance)
    try:
        losses = losses_in(directory, gaps=free)
    except RowsError as error:
        yield Problem("wrong", f"{error}")
        return
    if not losses or (not free and losses.keys() != expected.keys()):
        yield Problem("wrong", f"metrics.jsonl has {len(losses)} steps instead of {len(expected)}")
    for step in sorted(losses.keys() & expected.keys()):
        if not math.isfinite(losses[step]) or abs(losses[step] - expected[step]) > tolerance:
            yield Problem("wrong", f"step {step}: the loss is {losses[step]!r} instead of {expected[step]!r}")
            return


# --- ends ------------------------------------------------------------------------------------------------------------


def unexplained(output: str, code: int, allowed: Collection[int], words: str = "") -> Iterator[Problem]:
    """Check the end of a command: its code must be allowed, and its output must have no traceback. If the run is not
    complete, a message of at most one screen must name value, place and remedy. ``words``: a pattern that must occur in
    the output."""
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
    """The last error message in the output of a command; empty if there is none."""
    starts = list(re.finditer(r"^meshwright(?:, rank \d+)?: ", output, re.MULTILINE))
    return output[starts[-1].start() :].strip() if starts else ""


# --- leftovers -------------------------------------------------------------------------------------------------------


def left_processes(living: Sequence[int]) -> Iterator[Problem]:
    """``living``: the processes that descend from commands that have ended. There must be none."""
    for process in living:
        try:
            state = Path(f"/proc/{process}/status").read_text().splitlines()[2].split(maxsplit=1)[1]
            command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        except OSError:
            continue
        yield Problem("left", f"process {process} ({command.strip()}; {state})")


def left_files(folders: Mapping[str, Path]) -> Iterator[Problem]:
    """``folders`` maps a kind of files to its folder, which must be empty."""
    for kind, folder in folders.items():
        for path in sorted(folder.iterdir()):
            yield Problem("left", f"{kind}: {path.name}")


def left_in_run(directory: Path) -> Iterator[Problem]:
    """Check that the folder of a complete run has no temporary files and no data of failed saves."""
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
    """Check that no port listens or is connected. ``table``: the text of /proc/.../net/tcp in a box of commands."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        state = {"01": "is connected", "0A": "listens"}.get(fields[3])
        if state:
            yield Problem("left", f"port {int(fields[1].rpartition(':')[2], 16)} {state}")


def left_mounts(folder: Path, mounts: str) -> Iterator[Problem]:
    """Check that nothing is mounted below ``folder``. ``mounts``: the text of /proc/self/mountinfo."""
    for line in mounts.splitlines():
        place = line.split()[4]
        if place.startswith(f"{folder}{os.sep}"):
            yield Problem("left", f"a file system is mounted at {place}")
