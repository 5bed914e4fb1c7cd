"""How a run is doing, from the files in its folder: progress, newest metrics, and the health of each rank.

Nothing of the run is asked or delayed. Another host that sees the folder reads the same.
"""

import json
import os
import re
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.errors import FileFormatError
from meshwright.ir import prometheus

TAIL_BYTES = 256 * 1024
"""Bytes at the end of metrics.jsonl that are read."""
RECENT = 50
"""Number of last steps whose time tells how fast the run is."""
QUIET_S, QUIET_STEPS = 30.0, 10.0
"""A rank is called quiet if it has written nothing for this time, and for so many steps."""
ELSEWHERE_S = 120.0
"""Seconds without news after which a run on another host counts as ended, because its process cannot be seen."""
_RANK_FILE = re.compile(r"(\d+)\.status")
_AT_STEP = re.compile(r"step (\d+)")

RunState = Literal["starting", "running", "finished", "failed", "stopped"]
RankState = Literal["ok", "behind", "quiet", "failed", "ended"]


class RankHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A rank: what it was last doing, the step it was in (-1: none), and for how many seconds it has written nothing.
    ``replica``: the number of its replica, 0 for the first."""

    rank: int
    replica: int = 0
    doing: str
    step: int = -1
    quiet_s: float
    state: RankState
    problem: str = ""


class RunHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Numbers that are not known yet are None. ``losses``: of the last steps, oldest first."""

    name: str
    state: RunState
    step: int = 0
    steps: int | None = None
    step_s: float | None = None
    left_s: float | None = None
    metrics: dict[str, float] = {}
    held_out: dict[str, float] = {}
    losses: tuple[float, ...] = ()
    where: str = ""
    ranks: tuple[RankHealth, ...] = ()

    def prometheus(self) -> str:
        """The numbers in Prometheus's text format. ``meshwright_rank_quiet_seconds`` has a label for each rank."""
        values = {"step": float(self.step), **self.metrics}
        values |= {f"held_out/{name}": value for name, value in self.held_out.items()}
        values |= {"steps": float(self.steps)} if self.steps is not None else {}
        values["running"] = float(self.state in ("starting", "running"))
        text = prometheus.text(values, {"run": self.name})
        for each in self.ranks:
            labels = {"run": self.name, "replica": f"{each.replica}", "rank": f"{each.rank}"}
            own = prometheus.text({"rank_quiet_seconds": each.quiet_s}, labels)
            text += own if "rank_quiet_seconds gauge" not in text else own.partition("\n")[2]
        return text


def read_health(directory: Path, now_s: float | None = None) -> RunHealth:
    """The state of the run in a folder. ``now_s``: the present time, of ``time.time``.

    Raises:
        FileFormatError: no run has written there.
    """
    now_s = time.time() if now_s is None else now_s
    folders = [directory, *sorted(directory.glob("replica-*"), key=lambda folder: _number(folder.name))]
    if not any((directory / name).exists() for name in ("run.toml", "ranks", ".train.lock", ".lock")):
        raise FileFormatError(
            "no run has written here" if directory.is_dir() else "there is no such directory", where=str(directory),
            remedy="give the directory of a run, as `meshwright train` names it, or HOST:PORT",
        )  # fmt: skip
    rows = list(_rows(directory / "metrics.jsonl"))
    steps_made = [row for row in rows if "step_s" in row]
    step_s = statistics.median(float(row["step_s"]) for row in steps_made[-RECENT:]) if steps_made else None
    ranks = [rank for number, folder in enumerate(folders) for rank in _ranks(folder, number, now_s)]
    step = max((int(row["step"]) for row in rows), default=0)
    steps, (where, alive) = _steps(directory / "run.toml"), _process(directory, ranks)
    state = _state(ranks, rows, step, steps, alive)
    left_s = step_s * (steps - step) if steps is not None and step_s is not None and state == "running" else None
    evaluated = [row["held_out"] for row in rows if isinstance(row.get("held_out"), dict)]
    return RunHealth(
        name=directory.resolve().name, state=state, step=step, steps=steps, step_s=step_s, left_s=left_s,
        metrics=_numbers(steps_made[-1]) if steps_made else {}, held_out=_numbers(evaluated[-1]) if evaluated else {},
        losses=tuple(float(row["loss"]) for row in steps_made[-RECENT:] if _is_number(row.get("loss"))), where=where,
        ranks=tuple(_judged(rank, ranks, step_s, state) for rank in ranks),
    )  # fmt: skip


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows at the end of metrics.jsonl. The run may be writing the last one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines[1 if size > TAIL_BYTES else 0 : -1]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "step" and _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _steps(path: Path) -> int | None:
    """The number of steps that the run is to make, by its run.toml; None if it is not there yet."""
    try:
        steps = msgspec.toml.decode(path.read_bytes())["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError):
        return None
    return steps if isinstance(steps, int) else None


def _ranks(folder: Path, replica: int, now_s: float) -> Iterator[RankHealth]:
    """The ranks that have written into a folder, with the state ``ok`` or ``failed``."""
    files = folder / "ranks"
    entries = [(match, path) for path in files.glob("*.status") if (match := _RANK_FILE.fullmatch(path.name))]
    for match, path in sorted(entries, key=lambda entry: int(entry[0][1])):
        try:
            doing, quiet_s = _plain(path.read_text(errors="replace")), max(0.0, now_s - path.stat().st_mtime)
        except OSError:
            continue  # removed by a new attempt
        problem, at = _problem(files / f"{match[1]}.failure"), _AT_STEP.search(doing)
        yield RankHealth(
            rank=int(match[1]), replica=replica, doing=doing, step=int(at[1]) if at else -1, quiet_s=quiet_s,
            state="failed" if problem else "ok", problem=problem,
        )  # fmt: skip


def _problem(path: Path) -> str:
    """The problem in a rank's failure file; empty if the rank has not failed."""
    try:
        failure = json.loads(path.read_bytes())
        return _plain(f"{failure['kind']}: {failure['problem']}")
    except OSError:
        return ""
    except (ValueError, KeyError, TypeError):
        return "it has failed"


def _plain(text: str) -> str:
    """The text on one line, without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()


def _process(directory: Path, ranks: list[RankHealth]) -> tuple[str, bool]:
    """Where the run's rank 0 is, in words, and whether it lives, as far as can be seen from here."""
    for name in (".train.lock", ".lock"):
        try:
            holder = json.loads((directory / name).read_bytes())
            host, process = str(holder["host"]), int(holder["process"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        is_here = host == socket.gethostname()
        newest = min((rank.quiet_s for rank in ranks), default=ELSEWHERE_S)
        return f"process {process} on {host}", _runs(process) if is_here else newest < ELSEWHERE_S
    return "", False


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _state(ranks: list[RankHealth], rows: list[dict[str, Any]], step: int, steps: int | None, alive: bool) -> RunState:
    if alive:
        return "running" if rows else "starting"
    if steps is not None and step >= steps:
        return "finished"
    return "failed" if any(rank.state == "failed" for rank in ranks) else "stopped"


def _judged(rank: RankHealth, ranks: list[RankHealth], step_s: float | None, state: RunState) -> RankHealth:
    """The rank with its state, as others and the speed of the run tell."""
    if rank.state == "failed":
        return rank
    if state not in ("starting", "running"):
        return msgspec.structs.replace(rank, state="ended")
    furthest = max((other.step for other in ranks if other.replica == rank.replica), default=-1)
    judged: RankState = "ok"
    if rank.quiet_s > max(QUIET_S, QUIET_STEPS * (step_s or 0.0)):
        judged = "quiet"
    elif 0 <= rank.step < furthest - 1:
        judged = "behind"
    return msgspec.structs.replace(rank, state=judged)


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
