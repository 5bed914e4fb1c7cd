"""Read the directory of a run: its settings, losses and plan, and its traces and ledger if they exist."""

import json
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import FileFormatError, TraceError
from meshwright.ir import files
from meshwright.ir.ledger import Ledger
from meshwright.ir.make_ledger import check_belongs
from meshwright.ir.plan import Plan
from meshwright.ir.trace import Trace

Losses = list[tuple[float, float]]
"""Pairs (step, loss), by step."""

RUN, PLAN, METRICS = "run.toml", "plan.json", "metrics.jsonl"
MEASURED, PREDICTED, LEDGER = "trace.json", "predicted.json", "ledger.json"
_LACKS = {
    MEASURED: "no step was noted, so that there is no measured timeline",
    PREDICTED: "the plan was not simulated, so that there is no predicted timeline",
    LEDGER: "prediction and measurement were not compared",
}


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The content of metrics.jsonl: losses in training and on held-out data, and the seconds of every step."""

    losses: Losses
    held_out: Losses
    step_s: list[float]


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a run's directory; ``missing`` names each absent file, and what is unknown without it."""

    directory: str
    text: str
    plan: Plan
    metrics: Metrics
    measured: Trace | None
    predicted: Trace | None
    ledger: Ledger | None
    missing: tuple[str, ...]


def read_run(directory: Path) -> RunFiles:
    """The run in ``directory``.

    Raises:
        FileFormatError: it is not a run's directory, or a file in it cannot be read; the error names the file, key or
            line.
        TraceError: a trace or the ledger belongs to another plan than plan.json.
    """
    lacking = [name for name in (RUN, PLAN, METRICS) if not (directory / name).is_file()]
    if lacking:
        problem = f"there is no {' and no '.join(lacking)}" if directory.is_dir() else "there is no such directory"
        raise FileFormatError(
            problem,
            where=str(directory),
            remedy="give the directory of a run, as `meshwright train` names it at its end",
        )
    plan = files.load(directory / PLAN, Plan)
    measured, predicted = (_trace(directory / name, plan) for name in (MEASURED, PREDICTED))
    return RunFiles(
        directory=str(directory),
        text=_text(directory / RUN),
        plan=plan,
        metrics=_metrics(directory / METRICS),
        measured=measured,
        predicted=predicted,
        ledger=_ledger(directory / LEDGER, plan),
        missing=tuple(f"{name}: {why}" for name, why in _LACKS.items() if not (directory / name).is_file()),
    )


def _trace(path: Path, plan: Plan) -> Trace | None:
    if not path.is_file():
        return None
    trace = files.load(path, Trace)
    check_belongs(trace, plan.digest, str(path))
    if trace.source not in ("emulated", "simulated" if path.name == PREDICTED else "measured"):
        raise TraceError(
            f"the trace is {trace.source}", where=str(path), remedy=f"{MEASURED} is measured, {PREDICTED} is simulated"
        )
    if not trace.spans:
        raise TraceError("the trace has no spans", where=str(path), remedy="remove the file, or write it again")
    return trace


def _ledger(path: Path, plan: Plan) -> Ledger | None:
    if not path.is_file():
        return None
    ledger = files.load(path, Ledger)
    if ledger.plan != plan.digest:
        raise TraceError(
            f"the ledger is of plan {ledger.plan}, the run's plan is {plan.digest}",
            where=str(path),
            remedy="take the ledger of this run",
        )
    return ledger


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"cannot read the file: {error}", where=str(path), remedy="check the file") from None


def _metrics(path: Path) -> Metrics:
    metrics = Metrics(losses=[], held_out=[], step_s=[])
    lines = _text(path).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row: Any = json.loads(line)  # also accepts NaN and Infinity
            step = float(row["step"])
            if "loss" in row:
                metrics.losses.append((step, float(row["loss"])))
            if "step_s" in row:
                metrics.step_s.append(float(row["step_s"]))
            if "held_out" in row:
                metrics.held_out.append((step, float(row["held_out"]["loss"])))
        except (ValueError, TypeError, KeyError):
            if number == len(lines):  # the run was stopped while it wrote this row
                break
            raise FileFormatError(
                f"not a row of metrics: {line[:60]!r}", where=f"{path}: line {number}",
                remedy="a row is JSON with `step` and `loss`, or `held_out`; remove the line",
            ) from None  # fmt: skip
    return metrics
