"""Learn the numbers of a software profile from measured runs: times, peaks, and runs that were out of memory."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.cost.memory import estimate_memory, logit_bytes
from meshwright.cost.step import estimate_step
from meshwright.cost.uncertainty import estimate_deviation, reported_bytes
from meshwright.errors import FileFormatError
from meshwright.ir.cluster import Cluster
from meshwright.ir.software import Software, Spread
from meshwright.planner.cases import Case

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

TIME_NUMBERS = {
    "pace": 0.2, "matmul": 0.06, "attention": 0.3, "traffic": 0.3, "host": 0.5, "communication": 0.4, "step_s": 1.5,
}  # fmt: skip
"""The numbers that times teach, with the standard deviation of their logarithm before any run is seen, for software
without a profile. The widths are those between the catalog's profiles: stacks call the same libraries for matrix
products, and differ most in their host's time."""
MEMORY_NUMBERS = {"activations": 0.15, "fragmentation": 0.06, "context_bytes": 0.3, "logit_bytes": 0.4}
"""The numbers that peaks and failures teach. ``fragmentation`` is a fraction, and its deviation absolute; the others
are factors, as in ``TIME_NUMBERS``."""
LEAST_STEP_S = 0.005
"""The scale in seconds of ``step_s`` in a profile that has none: the number is then this times ``exp(x) - 1``, where x
has the deviation of ``TIME_NUMBERS``."""
TIME_ERROR, MEMORY_ERROR = 0.08, 0.05
"""The error of one run that no number of a profile explains, as a standard deviation of the logarithm: runs of one
layout differ by that much."""
VERDICT_ERROR = 0.1
"""The error of a predicted peak, as a standard deviation of the logarithm, for runs without a measured peak: the table
only says whether they ran out of memory."""
OTHER_CAUSE = 0.05
"""The fraction of runs that fail, or fit, for a reason that a table does not say."""
PRIOR_RUNS = 4.0
"""The number of runs that the expected error counts as, when the error of runs is estimated from a few runs."""
MOST = 8.0
"""The largest factor between a measured and a predicted time that a profile explains; a larger factor has another
cause, for example a wrong unit."""
MOST_STEPS = 40
"""The largest number of steps of a fit; the last steps change a profile by less than its uncertainty."""
LEAST_KNOWN = 0.25
"""The smallest factor of the widths: no profile is so sure that runs teach it nothing."""
TOLD = 0.7
"""Runs tell a number if they reduce its standard deviation to this fraction."""
MIXED = 0.15
"""If the learned profile still errs by more than this (standard deviation of the logarithm), the runs are probably of
different stacks."""


class Number(msgspec.Struct, frozen=True, kw_only=True):
    """A learned number of a profile: its value before and after, and its standard deviation before and after (of its
    logarithm; of the number itself for ``fragmentation``). ``told``: the runs say something about it."""

    name: str
    before: float
    value: float
    deviation_before: float
    deviation: float

    @property
    def told(self) -> bool:
        """Whether the runs reduced the number's uncertainty noticeably."""
        return self.deviation <= TOLD * self.deviation_before


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that was learned from runs. ``error_before`` and ``error`` are the mean errors of the runs' times in
    percent, with the profile from which learning started and with the learned profile; None without times. ``notes``
    are sentences about the runs that a reader should know."""

    software: Software
    numbers: tuple[Number, ...]
    error_before: float | None
    error: float | None
    notes: tuple[str, ...] = ()


def learn(cases: Sequence[Case], start: Software) -> Learned:
    """Fit the numbers of ``start`` to runs of one stack, held near their values in ``start`` (the maximum of the
    posterior, with independent normal priors on their logarithms). Runs that failed say that the peak is above the
    device's memory; runs that did not fail say that it is below.

    Raises:
        FileFormatError: there is no run; the runs are of several stacks; a time is impossible.
    """
    _refuse(cases)
    timed = [case for case in cases if case.measured_s]
    software, numbers, notes = start, [], []
    before = after = None
    if timed:
        software, found, before, after = _learn_times(timed, start)
        numbers += found
        if software.spread.step > MIXED:
            notes.append(
                f"the learned profile still errs by {software.spread.step:.0%} (standard deviation): the runs may be "
                "of different software, or something that the table does not say differs between them"
            )
    if any(case.measured_peak_bytes or case.out_of_memory for case in cases):
        software, found = _learn_memory(cases, software)
        numbers += found
    if len(cases) == 1:
        notes.append("one run cannot tell the numbers apart: most of its error went where the profile is least certain")
    source = f"learned from {len(cases)} run{'s' * (len(cases) > 1)}, starting from {start.name}"
    software = msgspec.structs.replace(software, source=source, runs=len(cases))
    return Learned(software=software, numbers=tuple(numbers), error_before=before, error=after, notes=tuple(notes))


def _learn_times(timed: Sequence[Case], start: Software) -> tuple[Software, list[Number], float, float]:
    """The profile with the numbers that times teach, these numbers, and the mean errors before and after in percent."""
    measured = np.log([case.measured_s or 0.0 for case in timed])
    errors = np.array([_expected_error(case, start) for case in timed])

    def residuals(profile: Software) -> np.ndarray:
        found: np.ndarray = (np.log(_times(timed, profile)) - measured) / errors
        return found

    software, numbers, fit = _fitted(start, TIME_NUMBERS, _known(start.spread.step, Spread().step), residuals)
    left = residuals(software) * errors
    deviations = {number.name: number.deviation for number in numbers}
    spread = msgspec.structs.replace(
        start.spread,
        step=_spread(left, fit, len(timed), TIME_ERROR),
        communication=min(start.spread.communication, deviations["communication"]),
        host=min(start.spread.host, deviations["host"]),
    )
    software = msgspec.structs.replace(software, spread=spread)
    return software, numbers, _mean_percent(residuals(start) * errors), _mean_percent(left)


def _learn_memory(cases: Sequence[Case], start: Software) -> tuple[Software, list[Number]]:
    """The profile with the numbers that peaks and failures teach, and these numbers."""
    if start.logit_bytes is None:
        start = msgspec.structs.replace(start, logit_bytes=_usual_logit_bytes(cases, start))

    def residuals(profile: Software) -> np.ndarray:
        return np.array([_memory_residual(case, profile) for case in cases])

    software, numbers, fit = _fitted(start, MEMORY_NUMBERS, _known(start.spread.memory, Spread().memory), residuals)
    left = np.array([_peak_error(case, software) for case in cases if case.measured_peak_bytes])
    if len(left):
        spread = msgspec.structs.replace(software.spread, memory=_spread(left, fit, len(left), MEMORY_ERROR))
        software = msgspec.structs.replace(software, spread=spread)
    return software, numbers


def _refuse(cases: Sequence[Case]) -> None:
    if not cases:
        raise FileFormatError("there is no run to learn from", where="runs", remedy="add a row with step_time_s")
    stacks = Counter(case.cluster.software.name for case in cases)
    if len(stacks) > 1:
        held = ", ".join(f"{name} ({count})" for name, count in stacks.items())
        raise FileFormatError(
            f"the runs are of {len(stacks)} stacks: {held}", where="software",
            remedy="learn each stack from a table of its own",
        )  # fmt: skip
    for case in cases:
        if case.measured_s:
            factor = case.measured_s / estimate_step(case.setup, case.cluster).step_s
            if not 1 / MOST <= factor <= MOST:
                raise FileFormatError(
                    f"{case.measured_s:g} s are {factor:.3g} times the predicted time, which no software explains",
                    where=f"{case.name}: step_time_s", remedy="give seconds of one step, or leave the row out",
                )  # fmt: skip


def _expected_error(case: Case, software: Software) -> float:
    """The error of a run that no number of a profile explains: larger where communication and the host take a large
    share of the step, because runs vary most in these."""
    spread = msgspec.structs.replace(software.spread, step=TIME_ERROR)
    return estimate_deviation(estimate_step(case.setup, case.cluster), spread)


def with_profile(cases: Sequence[Case], software: Software) -> list[Case]:
    """The cases with ``software`` on their clusters."""
    known: dict[int, Cluster] = {}
    for case in cases:
        if id(case.cluster) not in known:
            known[id(case.cluster)] = msgspec.structs.replace(case.cluster, software=software)
    return [msgspec.structs.replace(case, cluster=known[id(case.cluster)]) for case in cases]


def _times(cases: Sequence[Case], software: Software) -> np.ndarray:
    return np.array([estimate_step(case.setup, case.cluster).step_s for case in with_profile(cases, software)])


def _peak_error(case: Case, software: Software) -> float:
    """The logarithm of predicted over measured peak."""
    assert case.measured_peak_bytes is not None
    cluster = msgspec.structs.replace(case.cluster, software=software)
    return math.log(reported_bytes(case.setup, cluster) / case.measured_peak_bytes)


def _memory_residual(case: Case, software: Software) -> float:
    """The residual of a run's memory: of its peak if it is known, else of whether it failed (a probit)."""
    if case.measured_peak_bytes:
        return _peak_error(case, software) / MEMORY_ERROR
    cluster = msgspec.structs.replace(case.cluster, software=software)
    margin = math.log(cluster.device.memory_bytes / estimate_memory(case.setup, cluster).peak_bytes)
    room = (-margin if case.out_of_memory else margin) / VERDICT_ERROR
    return math.sqrt(-2 * math.log(OTHER_CAUSE + (1 - 2 * OTHER_CAUSE) * 0.5 * math.erfc(-room / math.sqrt(2))))


def _usual_logit_bytes(cases: Sequence[Case], software: Software) -> float:
    """The bytes per logit that the formulas take if the profile has no number: the mean over the runs."""
    return float(np.mean([logit_bytes(case.setup, software) for case in cases]))


def _known(deviation: float, of_unknown: float) -> float:
    """The factor of the widths of numbers for a profile that expects this deviation: the numbers of a profile that is
    surer than the unknown one are surer, too, but never certain."""
    return min(1.0, max(LEAST_KNOWN, deviation / of_unknown))


def _fitted(
    start: Software, widths: dict[str, float], known: float, residuals: Callable[[Software], np.ndarray]
) -> tuple[Software, list[Number], "OptimizeResult"]:
    """The profile with the least squared residuals, held near ``start``; its numbers; and the fit. Large residuals
    count less (``soft_l1``): a run that was disturbed does not move the others."""
    from scipy.optimize import least_squares

    names, deviations = list(widths), known * np.array(list(widths.values()))

    def profile(steps: np.ndarray) -> Software:
        changes = {}
        for name, step in zip(names, steps, strict=True):
            before = float(getattr(start, name))
            if name == "fragmentation":
                changes[name] = min(1.0, max(0.0, before + float(step)))
            elif name == "step_s" and not before:
                changes[name] = max(0.0, LEAST_STEP_S * math.expm1(step))
            else:
                changes[name] = before * math.exp(step)
        return msgspec.structs.replace(start, **changes)

    def objective(steps: np.ndarray) -> np.ndarray:
        found = residuals(profile(steps))
        robust = np.sign(found) * np.sqrt(2 * (np.sqrt(1 + found**2) - 1))
        return np.concatenate([robust, steps / deviations])

    fit = least_squares(objective, np.zeros(len(names)), x_scale=deviations, diff_step=1e-3, max_nfev=MOST_STEPS)
    covariance = np.linalg.inv(fit.jac.T @ fit.jac)
    found = profile(fit.x)
    numbers = [
        Number(
            name=name,
            before=float(getattr(start, name)),
            value=float(getattr(found, name)),
            deviation_before=float(deviations[index]),
            deviation=float(math.sqrt(covariance[index, index])),
        )
        for index, name in enumerate(names)
    ]
    return found, numbers, fit


def _spread(errors: np.ndarray, fit: "OptimizeResult", runs: int, expected: float) -> float:
    """The error to expect of a new run, as a standard deviation of the logarithm. It has two parts: how far the learned
    runs lie from the fit (``expected`` counts as ``PRIOR_RUNS`` runs), and how uncertain the fit itself is."""
    of_runs = fit.jac[: -len(fit.x)]
    leverage = float(np.trace(of_runs @ np.linalg.inv(fit.jac.T @ fit.jac) @ of_runs.T))
    left = max(1.0, runs - leverage)
    around = (PRIOR_RUNS * expected**2 + float(errors @ errors)) / (PRIOR_RUNS + left)
    return math.sqrt(around * (1 + leverage / runs))


def _mean_percent(errors: np.ndarray) -> float:
    """The mean error in percent of times, from the logarithms of predicted over measured."""
    return float(100 * np.abs(np.expm1(errors)).mean())
