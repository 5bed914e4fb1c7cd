"""Learn from ledgers of runs: the pace of computing, the time of communication, and memory beyond the tensors."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.cost.recalibrate import factors, with_slower_levels
from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster
from meshwright.ir.ledger import Ledger
from meshwright.ir.software import Software, Spread
from meshwright.planner.learn import MEMORY_ERROR, MEMORY_NUMBERS, TIME_ERROR, TIME_NUMBERS, Learned, LearnedCluster
from meshwright.planner.posterior import Posterior, known, most_probable

COMMUNICATION = "communication over "
"""The name of a number that begins with these words ends with the name of a level. The number is the factor of alpha,
beta and the measured collectives of this level."""
COMMUNICATION_ERROR = 0.2
"""The error of a run's communication factor that no constant explains, as a standard deviation of the logarithm. It
exists because the rank that is late to collectives differs from run to run."""
HEAP_WIDTH = 0.08
"""The standard deviation of the logarithm of ``Software.heap`` before a run is known. Measured cases had 1.06 to
1.3."""
ASSUMED = 1.0
"""The standard deviation of the logarithm of pace, or of communication over a level, if the rates of the device or
level are assumptions without a source (``origin`` default). Such rates may be wrong by a factor of 3."""
_SAYS = "; corrected by "


class Lesson(NamedTuple):
    """The information in a run about some numbers. Predicted over measured is (``more`` + the sum of each number times
    its factor in ``times``) / ``measured``. ``deviation`` is the standard deviation of its logarithm that no number
    explains."""

    times: dict[str, float]
    measured: float
    deviation: float
    more: float = 0.0

    def error(self, values: Mapping[str, float]) -> float:
        """The logarithm of predicted over measured, with these values of the numbers."""
        predicted = self.more + sum(factor * values[name] for name, factor in self.times.items())
        return math.log(predicted / self.measured)


def learn_ledgers(ledgers: Sequence[Ledger], cluster: Cluster) -> LearnedCluster:
    """The cluster with the numbers that are most probable after the runs of ``ledgers`` (``planner.posterior``). Their
    priors lie around the numbers of the cluster, as for tables (``planner.learn``).

    A ledger has sums over all kernels, so it teaches one pace for all of them. Its communication teaches a factor for
    alpha, beta and the measured collectives of each level that its ranks use. Its peaks teach ``heap`` on a CPU, and
    ``fragmentation``, ``context_bytes`` and ``peer_bytes`` on other devices. All other numbers stay unchanged. A ledger
    contains the numbers with which its run was predicted. So the result does not depend on what was learned since then.
    A ledger that was already learned (``Software.taught``) is not used again.

    Raises:
        ClusterError: a ledger is of another cluster; a factor is out of bounds (``cost.recalibrate.factors``).
    """
    for ledger in ledgers:
        if ledger.cluster != cluster.name:
            raise ClusterError(
                f"the ledger is of a run on {ledger.cluster!r}", where=f"cluster {cluster.name}",
                remedy="correct the cluster that the run was predicted for",
            )  # fmt: skip
    software = cluster.software
    by_digest = {digest(ledger): ledger for ledger in ledgers}
    fresh = {key: ledger for key, ledger in by_digest.items() if key not in software.taught}
    notes = []
    if len(fresh) < len(by_digest):
        notes.append(f"{len(by_digest) - len(fresh)} of {len(by_digest)} runs have taught this cluster before")
    runs = list(fresh.values())
    if not runs:
        return LearnedCluster(
            cluster=cluster,
            learned=Learned(software=software, runs=0, numbers=(), error_before=None, error=None, notes=tuple(notes)),
        )
    before = {name: float(getattr(software, name)) for name in ("pace", "heap", *MEMORY_NUMBERS) if name in _OF_PROFILE}
    before |= {COMMUNICATION + level: 1.0 for ledger in runs for level in ledger.levels}
    computing = _fitted(_computing(runs, software), before, cluster)
    waiting = _fitted(_communication(runs, cluster), before, cluster)
    memory = _fitted(_memory(runs, cluster.device.kind == "cpu"), before, cluster)
    numbers = [number for fit, _ in (computing, waiting, memory) if fit is not None for number in fit.numbers]
    values = before | {number.name: number.value for number in numbers}
    errors = [[_step_error(ledger, cluster, each) for ledger in runs] for each in (before, values)]
    learned = msgspec.structs.replace(
        software,
        **{number.name: number.value for number in numbers if number.name in _OF_PROFILE},
        runs=software.runs + len(runs),
        taught=(*software.taught, *fresh),
        spread=_spread(software.spread, computing, waiting, memory),
    )
    slower = {name.removeprefix(COMMUNICATION): value for name, value in values.items() if name not in _OF_PROFILE}
    changed = msgspec.structs.replace(with_slower_levels(cluster, slower), software=learned)
    names = ", ".join(dict.fromkeys(f"{ledger.model} as {ledger.layout}" for ledger in runs))
    of = "a run" if len(runs) == 1 else f"{len(runs)} runs"
    source = f"{cluster.source.partition(_SAYS)[0]}{_SAYS}{of} of {names}"
    return LearnedCluster(
        cluster=msgspec.structs.replace(changed, source=source),
        learned=Learned(
            software=learned, runs=len(runs), numbers=tuple(numbers), error_before=_mean_percent(errors[0]),
            error=_mean_percent(errors[1]), notes=tuple(notes),
        ),
    )  # fmt: skip


_OF_PROFILE = {
    "pace": TIME_NUMBERS["pace"], "heap": HEAP_WIDTH, "fragmentation": MEMORY_NUMBERS["fragmentation"],
    "context_bytes": MEMORY_NUMBERS["context_bytes"], "peer_bytes": MEMORY_NUMBERS["peer_bytes"],
}  # fmt: skip
"""The numbers of a profile that are learned from ledgers, with the widths of their priors for software without a
profile."""


def digest(ledger: Ledger) -> str:
    """A digest that identifies a ledger by its content."""
    return hashlib.sha256(msgspec.json.encode(ledger)).hexdigest()[:12]


# --- what ledgers say ------------------------------------------------------------------------------------------------


def _computing(ledgers: Sequence[Ledger], software: Software) -> Iterator[Lesson]:
    for ledger in ledgers:
        factor = factors(ledger).compute
        if factor is not None:
            yield Lesson({"pace": 1.0}, (ledger.pace or software.pace) * factor, TIME_ERROR)


def _communication(ledgers: Sequence[Ledger], cluster: Cluster) -> Iterator[Lesson]:
    for ledger in ledgers:
        factor = factors(ledger).communication
        if factor is None:
            continue
        for level in ledger.levels:
            yield Lesson({COMMUNICATION + level: 1.0}, factor * _then(ledger, level, cluster), COMMUNICATION_ERROR)


def _memory(ledgers: Sequence[Ledger], on_cpu: bool) -> Iterator[Lesson]:
    """Yield the lessons of the rank with the highest peak."""
    for ledger in ledgers:
        entry = max(ledger.ranks, key=lambda each: max(each.measured.peak_bytes, each.reserved_bytes))
        predicted, measured = entry.predicted.peak_bytes, entry.measured.peak_bytes
        if on_cpu:
            varies = (predicted - entry.held_bytes) / ledger.heap if ledger.heap and entry.held_bytes else 0.0
            if varies > 0 and measured:
                yield Lesson({"heap": varies}, measured, MEMORY_ERROR, entry.held_bytes)
            continue
        if measured and entry.reserved_bytes:
            yield Lesson({"fragmentation": measured}, entry.reserved_bytes, MEMORY_ERROR, measured)
        if entry.device_bytes > entry.reserved_bytes > 0:
            beside = {"context_bytes": 1.0} | ({"peer_bytes": float(ledger.peers)} if ledger.peers else {})
            yield Lesson(beside, entry.device_bytes - entry.reserved_bytes, MEMORY_ERROR)


def _then(ledger: Ledger, level: str, cluster: Cluster) -> float:
    """The seconds per byte of a level at the time of the prediction, divided by the present value; 1 if the ledger does
    not contain it."""
    now, then = cluster.betas[level], dict(zip(ledger.levels, ledger.beta_s_per_byte, strict=False))
    return then[level] / now if level in then and now else 1.0


# --- the fit ---------------------------------------------------------------------------------------------------------

Fit = tuple[Posterior | None, np.ndarray]
"""The most probable numbers, and the remaining errors; None without lessons."""


def _fitted(lessons: Iterator[Lesson], before: Mapping[str, float], cluster: Cluster) -> Fit:
    """The most probable values of all numbers that the lessons concern."""
    all_lessons = list(lessons)
    if not all_lessons:
        return None, np.zeros(0)
    widths = {name: _width(name, cluster) for lesson in all_lessons for name in lesson.times}

    def errors(values: Mapping[str, float]) -> np.ndarray:
        return np.array([lesson.error(values) for lesson in all_lessons])

    deviations = np.array([lesson.deviation for lesson in all_lessons])
    fit = most_probable(before, widths, lambda values: errors(values) / deviations)
    return fit, errors(fit.values)


def _width(name: str, cluster: Cluster) -> float:
    """The width of a number's prior. A number that was learned from runs is no longer an assumption."""
    spread, software = cluster.software.spread, cluster.software
    if name == "pace":
        assumed = cluster.device.origin == "default" and not software.taught
        return ASSUMED if assumed else TIME_NUMBERS["pace"] * known(spread.step, Spread().step)
    if name in _OF_PROFILE:
        return _OF_PROFILE[name] * known(spread.memory, Spread().memory)
    if cluster.origins[name.removeprefix(COMMUNICATION)] == "default":
        return ASSUMED
    return TIME_NUMBERS["communication"] * known(spread.communication, Spread().communication)


def _spread(before: Spread, computing: Fit, waiting: Fit, memory: Fit) -> Spread:
    """The uncertainty of predictions after the lessons."""
    changes = {}
    if (fit := computing[0]) is not None:
        changes["step"] = fit.spread(computing[1], TIME_ERROR)
    if (fit := waiting[0]) is not None:
        changes["communication"] = min(before.communication, max(fit.deviations.values()))
    if (fit := memory[0]) is not None:
        changes["memory"] = fit.spread(memory[1], MEMORY_ERROR)
    return msgspec.structs.replace(before, **changes)


def _step_error(ledger: Ledger, cluster: Cluster, values: Mapping[str, float]) -> float:
    """Predicted over measured step time, minus 1, if the run had been predicted with these numbers. Hidden
    communication becomes exposed to the extent that computing no longer hides it (``Ledger.communication_factor``)."""
    slower = values["pace"] / (ledger.pace or cluster.software.pace)
    levels = [values[COMMUNICATION + level] / _then(ledger, level, cluster) for level in ledger.levels]
    later = geometric_mean(levels) if levels else 1.0
    steps = []
    for entry in ledger.ranks:
        times = entry.predicted
        shown_s = max(0.0, later * (times.exposed_s + times.hidden_s) - slower * times.hidden_s)
        steps.append(slower * (times.compute_s + times.bubble_s) + shown_s)
    return max(steps) / ledger.measured_step_s - 1


def _mean_percent(errors: Sequence[float]) -> float:
    return 100 * fmean(map(abs, errors))
