"""Learn from ledgers of runs: the pace of computing, the time of communication, and what memory takes besides."""

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
"""A number of this name and of a level is the factor of alpha, beta and the measured collectives of the level."""
COMMUNICATION_ERROR = 0.2
"""The error of a run's factor of communication that no constant explains, as a standard deviation of the logarithm: who
comes late to collectives differs from run to run."""
HEAP_WIDTH = 0.08
"""The standard deviation of the logarithm of ``Software.heap`` before a run is seen: cases measured 1.06 to 1.3."""
ASSUMED = 1.0
"""The standard deviation of the logarithm of pace, and of communication over a level, where the rates of the device, or
of the level, are an assumption without a source (``origin`` default): they may be off by a factor of 3."""
_SAYS = "; corrected by "


class Lesson(NamedTuple):
    """What a run says of some numbers: predicted over measured is ``more`` plus each number times its factor in
    ``times``, over ``measured``. ``deviation`` is the standard deviation of its logarithm, which no number explains."""

    times: dict[str, float]
    measured: float
    deviation: float
    more: float = 0.0

    def error(self, values: Mapping[str, float]) -> float:
        """The logarithm of predicted over measured with these numbers."""
        predicted = self.more + sum(factor * values[name] for name, factor in self.times.items())
        return math.log(predicted / self.measured)


def learn_ledgers(ledgers: Sequence[Ledger], cluster: Cluster) -> LearnedCluster:
    """The cluster as the runs of ``ledgers`` show it: the most probable numbers (``planner.posterior``) with priors
    around those of the cluster, as for tables (``planner.learn``).

    A ledger has sums over kernels, so it teaches the pace of all of them. Its communication teaches a factor of alpha,
    beta and measured collectives of each level that its ranks cross; its peaks teach ``heap`` on a CPU, elsewhere
    ``fragmentation``, ``context_bytes`` and ``peer_bytes``. All other numbers stay. A ledger says with which numbers
    its run was predicted, so what it teaches does not depend on what was learned in between. A ledger that has taught
    the cluster (``Software.taught``) teaches it nothing again.

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
    every = {digest(ledger): ledger for ledger in ledgers}
    fresh = {key: ledger for key, ledger in every.items() if key not in software.taught}
    notes = []
    if len(fresh) < len(every):
        notes.append(f"{len(every) - len(fresh)} of {len(every)} runs have taught this cluster before")
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
"""The numbers of a profile that ledgers teach, with the widths of their priors for software without a profile."""


def digest(ledger: Ledger) -> str:
    """Identifies a ledger by its content."""
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
    """What the rank with the highest peak says."""
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
    """The seconds per byte of a level when the run was predicted, relative to now; 1 if the ledger does not say."""
    now, then = cluster.betas[level], dict(zip(ledger.levels, ledger.beta_s_per_byte, strict=False))
    return then[level] / now if level in then and now else 1.0


# --- the fit ---------------------------------------------------------------------------------------------------------

Fit = tuple[Posterior | None, np.ndarray]
"""The most probable numbers, and the errors that are left; None without lessons."""


def _fitted(lessons: Iterator[Lesson], before: Mapping[str, float], cluster: Cluster) -> Fit:
    """The most probable values of the numbers of which the lessons say something."""
    told = list(lessons)
    if not told:
        return None, np.zeros(0)
    widths = {name: _width(name, cluster) for lesson in told for name in lesson.times}

    def errors(values: Mapping[str, float]) -> np.ndarray:
        return np.array([lesson.error(values) for lesson in told])

    deviations = np.array([lesson.deviation for lesson in told])
    fit = most_probable(before, widths, lambda values: errors(values) / deviations)
    return fit, errors(fit.values)


def _width(name: str, cluster: Cluster) -> float:
    """The width of a number's prior. What was learned from runs is no assumption any more."""
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
    """How uncertain predictions are after the lessons."""
    changes = {}
    if (fit := computing[0]) is not None:
        changes["step"] = fit.spread(computing[1], TIME_ERROR)
    if (fit := waiting[0]) is not None:
        changes["communication"] = min(before.communication, max(fit.deviations.values()))
    if (fit := memory[0]) is not None:
        changes["memory"] = fit.spread(memory[1], MEMORY_ERROR)
    return msgspec.structs.replace(before, **changes)


def _step_error(ledger: Ledger, cluster: Cluster, values: Mapping[str, float]) -> float:
    """Predicted over measured step, minus 1, if the run had been predicted with these numbers. Communication that was
    hidden shows as far as computing no longer hides it (``Ledger.communication_factor``)."""
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
