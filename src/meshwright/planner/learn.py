"""Learn the numbers of a software profile from measured runs: times, peaks, and runs that ran out of memory."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from meshwright.cost.memory import estimate_memory, logit_bytes
from meshwright.cost.step import estimate_step
from meshwright.cost.uncertainty import estimate_deviation, reported_bytes
from meshwright.errors import FileFormatError
from meshwright.ir.cluster import Cluster
from meshwright.ir.software import Software, Spread
from meshwright.planner.cases import Case, LeftOut
from meshwright.planner.posterior import Number, Posterior, known, most_probable, scaled

TIME_NUMBERS = {
    "pace": 0.2, "matmul": 0.06, "attention": 0.3, "traffic": 0.3, "host": 0.5, "communication": 0.4, "step_s": 1.5,
}  # fmt: skip
"""The numbers that are learned from times. Each has the standard deviation of its logarithm before any run is known,
for software without a profile. These widths reflect the differences between the catalog's profiles: all software calls
the same libraries for matrix products, and differs most in the host's time."""
MEMORY_NUMBERS = {
    "activations": 0.15,
    "fragmentation": 0.06,
    "context_bytes": 0.3,
    "peer_bytes": 0.4,
    "logit_bytes": 0.4,
}
"""The numbers that are learned from peaks and failures. ``fragmentation`` is a fraction with an absolute deviation. The
others are factors, as in ``TIME_NUMBERS``."""
TIME_ERROR, MEMORY_ERROR = 0.08, 0.05
"""The error of one run that no number of a profile explains, as a standard deviation of the logarithm. Repeated runs of
one layout differ by this amount."""
VERDICT_ERROR = 0.1
"""The error of a predicted peak, as a standard deviation of the logarithm, for runs without a measured peak. For such
runs, the table says only whether they ran out of memory."""
OTHER_CAUSE = 0.05
"""The fraction of runs that fail, or succeed, for a reason that a table does not contain."""
MOST = 8.0
"""The largest factor between a measured and a predicted time that a profile can explain. A larger factor has another
cause, such as a wrong unit."""
MIXED = 0.15
"""If the learned profile has a larger error than this (standard deviation of the logarithm), the runs probably come
from different software."""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that was learned from ``runs`` runs. ``error_before`` and ``error`` are the mean errors of the runs'
    times in percent, with the initial profile and with the learned profile (None without times). ``notes`` are remarks
    about the runs for the user."""

    software: Software
    runs: int
    numbers: tuple[Number, ...]
    error_before: float | None
    error: float | None
    notes: tuple[str, ...] = ()


class LearnedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster with learned software, the learned profile, and the rows of the table that were left out."""

    cluster: Cluster
    learned: Learned
    left_out: tuple[LeftOut, ...] = ()


def learn(cases: Sequence[Case], start: Software) -> Learned:
    """Fit the numbers of ``start`` to runs of one software. Priors hold them near their values in ``start``: the result
    is the maximum of the posterior, with independent normal priors on the logarithms. A run that ran out of memory has
    a peak above the device's memory; a run that succeeded has a peak below it.

    Raises:
        FileFormatError: there is no run; the runs are of several kinds of software; or a time is impossible.
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
    return Learned(
        software=software, runs=len(cases), numbers=tuple(numbers), error_before=before, error=after, notes=tuple(notes)
    )


def _learn_times(timed: Sequence[Case], start: Software) -> tuple[Software, list[Number], float, float]:
    """The profile with the numbers that are learned from times, these numbers, and the mean errors before and after, in
    percent."""
    measured = np.log([case.measured_s or 0.0 for case in timed])
    errors = np.array([_expected_error(case, start) for case in timed])

    def residuals(profile: Software) -> np.ndarray:
        found: np.ndarray = (np.log(_times(timed, profile)) - measured) / errors
        return found

    software, fit = _fitted(start, scaled(TIME_NUMBERS, known(start.spread.step, Spread().step)), residuals)
    left = residuals(software) * errors
    spread = msgspec.structs.replace(
        start.spread,
        step=fit.spread(left, TIME_ERROR),
        communication=min(start.spread.communication, fit.deviations["communication"]),
        host=min(start.spread.host, fit.deviations["host"]),
    )
    software = msgspec.structs.replace(software, spread=spread)
    return software, list(fit.numbers), _mean_percent(residuals(start) * errors), _mean_percent(left)


def _learn_memory(cases: Sequence[Case], start: Software) -> tuple[Software, list[Number]]:
    """The profile with the numbers that are learned from peaks and failures, and these numbers."""
    if start.logit_bytes is None:
        start = msgspec.structs.replace(start, logit_bytes=_usual_logit_bytes(cases, start))

    def residuals(profile: Software) -> np.ndarray:
        return np.array([_memory_residual(case, profile) for case in cases])

    software, fit = _fitted(start, scaled(MEMORY_NUMBERS, known(start.spread.memory, Spread().memory)), residuals)
    left = np.array([_peak_error(case, software) for case in cases if case.measured_peak_bytes])
    if len(left):
        spread = msgspec.structs.replace(software.spread, memory=fit.spread(left, MEMORY_ERROR))
        software = msgspec.structs.replace(software, spread=spread)
    return software, list(fit.numbers)


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
    """The error of a run that no number of a profile explains. It is larger if communication and the host take a large
    part of the step, because these vary most between runs."""
    spread = msgspec.structs.replace(software.spread, step=TIME_ERROR)
    return estimate_deviation(estimate_step(case.setup, case.cluster), spread)


def with_profile(cases: Sequence[Case], software: Software) -> list[Case]:
    """The cases with ``software`` on their clusters."""
    clusters: dict[int, Cluster] = {}
    for case in cases:
        if id(case.cluster) not in clusters:
            clusters[id(case.cluster)] = msgspec.structs.replace(case.cluster, software=software)
    return [msgspec.structs.replace(case, cluster=clusters[id(case.cluster)]) for case in cases]


def _times(cases: Sequence[Case], software: Software) -> np.ndarray:
    return np.array([estimate_step(case.setup, case.cluster).step_s for case in with_profile(cases, software)])


def _peak_error(case: Case, software: Software) -> float:
    """The logarithm of predicted over measured peak."""
    assert case.measured_peak_bytes is not None
    cluster = msgspec.structs.replace(case.cluster, software=software)
    return math.log(reported_bytes(case.setup, cluster) / case.measured_peak_bytes)


def _memory_residual(case: Case, software: Software) -> float:
    """The residual of a run's memory. If the peak is unknown, it follows from whether the run failed (a probit)."""
    if case.measured_peak_bytes:
        return _peak_error(case, software) / MEMORY_ERROR
    cluster = msgspec.structs.replace(case.cluster, software=software)
    margin = math.log(cluster.device.memory_bytes / estimate_memory(case.setup, cluster).peak_bytes)
    room = (-margin if case.out_of_memory else margin) / VERDICT_ERROR
    return math.sqrt(-2 * math.log(OTHER_CAUSE + (1 - 2 * OTHER_CAUSE) * 0.5 * math.erfc(-room / math.sqrt(2))))


def _usual_logit_bytes(cases: Sequence[Case], software: Software) -> float:
    """The bytes per logit that the formulas use if the profile has no value: the mean over the runs."""
    return float(np.mean([logit_bytes(case.setup, software) for case in cases]))


def _fitted(
    start: Software, widths: dict[str, float], residuals: Callable[[Software], np.ndarray]
) -> tuple[Software, Posterior]:
    """The most probable profile, and its numbers."""
    numbers = {name: float(getattr(start, name)) for name in widths}
    fit = most_probable(numbers, widths, lambda values: residuals(msgspec.structs.replace(start, **values)))
    return msgspec.structs.replace(start, **fit.values), fit


def _mean_percent(errors: np.ndarray) -> float:
    """The mean error of times in percent, from the logarithms of predicted over measured times."""
    return float(100 * np.abs(np.expm1(errors)).mean())
