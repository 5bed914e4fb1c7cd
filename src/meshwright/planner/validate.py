"""Compare predictions with the measurements of a table, and with the predictions of a simple baseline.

The baseline assumes that all runs reach the same fraction of their devices' peak FLOP/s.
"""

import os
from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.cost.memory import estimate_memory
from meshwright.cost.occupancy import fit_chance
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.cost.uncertainty import reported_bytes, step_interval
from meshwright.ir.interval import Interval
from meshwright.planner.cases import Case, LeftOut, read_cases


class CaseDeviation(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one case. ``measured_s`` is None if there is no measured time, for example because the run was
    out of memory. ``interval_s`` holds 80 % of the times of such runs. ``fit_chance`` is the chance that the run fits
    in memory. ``fits`` says whether this chance is at least one half. ``reported_peak_bytes`` is the predicted peak as
    the run's software reports it; it is compared with ``measured_peak_bytes``."""

    case: str
    predicted_s: float
    measured_s: float | None
    predicted_peak_bytes: float
    fits: bool
    interval_s: Interval
    fit_chance: float
    reported_peak_bytes: float
    measured_peak_bytes: float | None = None


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of predicted step times in percent (12.3 is 12.3 %), over all rows with a measured time.

    ``mape`` is the mean of |predicted / measured - 1|, ``p90`` its 90th percentile, and ``bias`` the mean of the signed
    error. ``spearman`` is the rank correlation of predictions and measurements. ``baseline_mape`` is the ``mape`` of a
    prediction with the constant efficiency that fits this table best. ``coverage`` is the fraction (0 to 1) of times
    that lie in their interval of 80 %. All these errors are None if no time was measured. ``memory_mape`` is the mean
    error of peaks, or None.

    ``oom_balanced_accuracy`` (0 to 1) is the mean of two fractions: the fraction of successful runs that were predicted
    to fit, and the fraction of out-of-memory failures that were predicted not to fit. It is None if no row failed.
    ``software`` names the profiles of the rows.
    """

    cases: int
    mape: float | None = None
    p90: float | None = None
    bias: float | None = None
    spearman: float | None = None
    baseline_mape: float | None = None
    oom_balanced_accuracy: float | None
    rows: tuple[CaseDeviation, ...]
    left_out: tuple[LeftOut, ...] = ()
    coverage: float | None = None
    memory_mape: float | None = None
    software: tuple[str, ...] = ()


def validate(path: str | os.PathLike[str], software: str = "") -> Validation:
    """Predict every row of a table (see ``planner.cases.COLUMNS``), and compare it with the row's measurement.
    ``software`` is the profile of rows that name no profile.

    Raises:
        FileFormatError: the file cannot be read or lacks columns.
        ClusterError: there is no such profile.
    """
    return compare(*read_cases(path, software))


def compare(cases: Sequence[Case], left_out: Sequence[LeftOut] = ()) -> Validation:
    """The errors of the predictions for ``cases``."""
    rows = tuple(deviation(case) for case in cases)
    timed = [(case, row) for case, row in _pairs(cases, rows) if row.measured_s is not None]
    peaks = [row.reported_peak_bytes / row.measured_peak_bytes - 1 for row in rows if row.measured_peak_bytes]
    validation = Validation(
        cases=len(rows),
        oom_balanced_accuracy=balanced_accuracy([(case.out_of_memory, row.fits) for case, row in _pairs(cases, rows)]),
        rows=rows,
        left_out=tuple(left_out),
        memory_mape=float(100 * np.abs(peaks).mean()) if peaks else None,
        software=tuple(dict.fromkeys(case.cluster.software.name for case in cases)),
    )
    if not timed:
        return validation
    measured = np.array([row.measured_s for _, row in timed], dtype=float)
    predicted = np.array([row.predicted_s for _, row in timed], dtype=float)
    errors = 100 * (predicted / measured - 1)
    return msgspec.structs.replace(
        validation,
        mape=float(np.abs(errors).mean()),
        p90=float(np.percentile(np.abs(errors), 90)),
        bias=float(errors.mean()),
        spearman=_spearman(predicted, measured) if len(timed) > 1 else None,
        baseline_mape=constant_efficiency_mape(np.array([_flops_at_peak_s(case) for case, _ in timed]), measured),
        coverage=float(np.mean([row.interval_s.holds(row.measured_s or 0.0) for _, row in timed])),
    )


def constant_efficiency_mape(at_peak_s: np.ndarray, measured_s: np.ndarray) -> float:
    """The smallest mean error, in percent, of the prediction ``at_peak_s / efficiency`` with one efficiency for all
    rows. The error of each row is piecewise linear in 1 / efficiency, so the best efficiency makes the prediction of
    some row exact."""
    candidates = measured_s / at_peak_s
    return float(min(100 * np.abs(at_peak_s * candidate / measured_s - 1).mean() for candidate in candidates))


def executed_flops(setup: Setup) -> float:
    """The FLOPs of a step, including recomputation."""
    model, flops = setup.model, setup.model.step_flops(setup.global_batch)
    tokens = setup.global_batch * model.sequence
    if setup.recompute == "full":
        return flops + (flops / 3 - 2.0 * tokens * model.hidden * model.vocabulary)
    if setup.recompute == "selective":
        return flops + 4.0 * tokens * model.sequence * model.query_width * (model.layers + model.cross)
    return flops


def deviation(case: Case) -> CaseDeviation:
    """The prediction for one case beside its measurement."""
    memory, estimate = estimate_memory(case.setup, case.cluster), estimate_step(case.setup, case.cluster)
    software = case.cluster.software
    chance = fit_chance(memory.peak_bytes, case.cluster.device.memory_bytes, software.spread.memory)
    return CaseDeviation(
        case=case.name,
        predicted_s=estimate.step_s,
        measured_s=case.measured_s,
        predicted_peak_bytes=memory.peak_bytes,
        fits=chance >= 0.5,
        interval_s=step_interval(estimate, software),
        fit_chance=chance,
        reported_peak_bytes=reported_bytes(case.setup, case.cluster),
        measured_peak_bytes=case.measured_peak_bytes,
    )


def _pairs(cases: Sequence[Case], rows: Sequence[CaseDeviation]) -> list[tuple[Case, CaseDeviation]]:
    return list(zip(cases, rows, strict=True))


def _flops_at_peak_s(case: Case) -> float:
    peaks = case.cluster.device.peak_flops_per_s
    peak = peaks.get(case.setup.dtype) or max(peaks.values())
    return executed_flops(case.setup) / (case.setup.world_size * peak)


def balanced_accuracy(outcomes: Sequence[tuple[bool, bool]]) -> float | None:
    """The balanced accuracy of pairs (ran out of memory, was predicted to fit); None if no run failed."""
    failed = [not fits for out, fits in outcomes if out]
    ran = [fits for out, fits in outcomes if not out]
    if not failed:
        return None
    parts = [sum(right) / len(right) for right in (failed, ran) if right]
    return sum(parts) / len(parts)


def _spearman(left: np.ndarray, right: np.ndarray) -> float | None:
    left_ranks, right_ranks = _ranks(left), _ranks(right)
    if left_ranks.std() == 0 or right_ranks.std() == 0:
        return None
    return float(np.corrcoef(left_ranks, right_ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: np.ndarray = (ends - (counts - 1) / 2)[inverse]
    return means
