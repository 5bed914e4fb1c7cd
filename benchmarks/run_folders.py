"""What benchmarks read of a run's folder, and which processes are its ranks."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path


class RowsError(Exception):
    """metrics.jsonl that does not have each step once, in order."""


def losses_in(directory: Path, *, gaps: bool = False) -> dict[int, float]:
    """The loss of each step, by metrics.jsonl. ``gaps``: steps may be missing.

    Raises:
        RowsError: a step is there twice, or missing, or steps are not in order, or a row is broken.
    """
    try:
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise RowsError(f"metrics.jsonl cannot be read: {error}") from None
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    steps = [step for step, _ in losses]
    for before, step in pairwise([0, *steps]):
        if step <= before or (step != before + 1 and not gaps):
            raise RowsError(f"metrics.jsonl has not each step once, in order: step {step} follows step {before}")
    return dict(losses)


def difference(losses: dict[int, float], expected: dict[int, float]) -> float:
    """The largest difference of a loss; infinite if there are not the same steps, or if one is not a number."""
    if losses.keys() != expected.keys():
        return float("inf")
    worst = 0.0
    for step, loss in losses.items():
        off = abs(loss - expected[step])
        worst = max(worst, off if off == off else float("inf"))
    return worst


def parents(dead: bool = False) -> dict[int, int]:
    """The parent of each process of this machine that lives; with ``dead``, also of those that nobody has waited for:
    threads and children of a process may live on for a moment after it."""
    by_process = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if dead or state != "Z":
                by_process[int(path.name)] = int(parent)
    return by_process


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started as ranks, in their order: children of its server of forks."""
    known = parents()
    return sorted(process for process, parent in known.items() if known.get(parent) == launcher)
