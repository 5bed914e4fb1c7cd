"""The ledger of a run: predicted and measured times side by side, the largest deviation, and its likely cause."""

import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from meshwright.errors import Problem, TraceError, refuse
from meshwright.ir.interval import Interval, interval, step_deviation
from meshwright.ir.layout import layout_text
from meshwright.ir.plan import Plan
from meshwright.ir.summary import RankTimes, summarize
from meshwright.ir.trace import Trace, TraceSource
from meshwright.ir.units import seconds, size

if TYPE_CHECKING:  # reports import this module, but must not import the catalog, which ir.cluster imports
    from meshwright.ir.cluster import Cluster

PartName = Literal["computing", "exposed communication", "bubble"]
PARTS: dict[PartName, str] = {
    "computing": "compute_s",
    "exposed communication": "exposed_s",
    "bubble": "bubble_s",
}
"""Maps each part of a step's time to its field in ``RankTimes``. The parts add up to the time of the step."""
AGREE = 0.05
"""If the largest difference is less than this fraction of the step, the ledger says that all parts agree."""
TOLD = 0.01
"""Times below this fraction of the step are too short to estimate a constant from."""
MEMORY_AGREES = 0.1
"""If predicted and measured peaks differ by less than this fraction, the ledger says that they agree."""


_ROWS: tuple[tuple[str, str, Literal["s", "bytes"]], ...] = (
    *((part, field, "s") for part, field in PARTS.items()),
    ("step", "step_s", "s"),
    ("peak memory", "peak_bytes", "bytes"),
)


class RankEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The predicted and the measured step of one rank. ``stage`` is its pipeline rank (0 without a pipeline)."""

    rank: int
    stage: int
    predicted: RankTimes
    measured: RankTimes

    def difference_s(self, part: PartName) -> float:
        """The measured minus the predicted time of a part, in seconds."""
        return float(getattr(self.measured, PARTS[part]) - getattr(self.predicted, PARTS[part]))


class Deviation(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a rank's step that deviates from its prediction.

    ``share`` is the measured minus the predicted time of the part, as a fraction of the measured step time."""

    part: PartName
    rank: int
    predicted_s: float
    measured_s: float
    share: float

    def __str__(self) -> str:
        return (
            f"off most: {self.part} on rank {self.rank}, {seconds(self.predicted_s)} predicted and "
            f"{seconds(self.measured_s)} measured: {self.share:+.1%} of the step"
        )


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table: the seconds of a part of a rank's step or of the whole step, or the rank's peak memory."""

    rank: int
    what: str
    predicted: float
    measured: float
    unit: Literal["s", "bytes"]

    @property
    def ratio(self) -> float | None:
        """The predicted value divided by the measured value; None if the measured value is 0."""
        return self.predicted / self.measured if self.measured else None

    def texts(self) -> tuple[str, str, str]:
        """The predicted value, the measured value and their ratio as text, with units."""
        shown = seconds if self.unit == "s" else size
        return shown(self.predicted), shown(self.measured), "-" if self.ratio is None else f"{self.ratio:.2f}"


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predicted and measured steps of every rank of a run, side by side.

    ``plan`` is the ``Plan.digest`` of the plan that ran. ``levels`` names the levels of the cluster over which the
    ranks communicate, innermost first. ``constants`` says where the cluster's constants come from, ``software`` names
    its profile. ``deviation`` is the standard deviation of the logarithm of the step's time that the profile expects
    (0: unknown). Measured times are medians over ``num_steps`` steps, for each rank and part."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    model: str
    layout: str
    cluster: str
    constants: str = ""
    software: str = ""
    deviation: float = 0.0
    plan: str
    levels: tuple[str, ...]
    predicted_by: TraceSource
    measured_by: TraceSource
    num_steps: int
    ranks: Annotated[tuple[RankEntry, ...], msgspec.Meta(min_length=1)]

    @property
    def predicted_step_s(self) -> float:
        """The predicted step time: the largest over all ranks."""
        return max(entry.predicted.step_s for entry in self.ranks)

    @property
    def measured_step_s(self) -> float:
        """The measured step time: the largest over all ranks."""
        return max(entry.measured.step_s for entry in self.ranks)

    @property
    def step_ratio(self) -> float:
        """The predicted step time divided by the measured step time, as ``pred/meas`` in the log."""
        return self.predicted_step_s / self.measured_step_s

    @property
    def interval_s(self) -> Interval | None:
        """The interval that holds 80 % of the times of such steps; None if the ledger has no deviation."""
        return interval(self.predicted_step_s, self.deviation) if self.deviation else None

    @property
    def worst(self) -> Deviation:
        """The part and rank with the largest difference in seconds. If differences are equal, computing comes first."""
        every = ((abs(entry.difference_s(part)), part, entry) for part in PARTS for entry in self.ranks)
        _, part, entry = max(every, key=lambda candidate: candidate[0])
        return Deviation(
            part=part,
            rank=entry.rank,
            predicted_s=getattr(entry.predicted, PARTS[part]),
            measured_s=getattr(entry.measured, PARTS[part]),
            share=entry.difference_s(part) / self.measured_step_s,
        )

    @property
    def compute_factor(self) -> float:
        """The measured divided by the predicted computing time of all ranks; 1 if one of the two times is too short."""
        predicted_s = sum(entry.predicted.compute_s for entry in self.ranks)
        measured_s = sum(entry.measured.compute_s for entry in self.ranks)
        if self._too_little(predicted_s / len(self.ranks), measured_s / len(self.ranks)):
            return 1.0
        return measured_s / predicted_s

    @property
    def communication_factor(self) -> float:
        """The measured divided by the predicted communication time; 1 if one of the two times is too short.

        The exposed and hidden times of a stage are the smallest of its ranks. The rank that waited least came last to
        its collectives, so it waited for communication only, not for other ranks. Hidden communication is not
        measured. The formula assumes that it took ``compute_factor`` times its predicted time, like the computing that
        hid it: ``factor * (exposed + hidden) = measured exposed + compute_factor * hidden``.
        """
        exposed_s = measured_s = hidden_s = 0.0
        for entries in self._by_stage().values():
            exposed_s += min(entry.predicted.exposed_s for entry in entries)
            measured_s += min(entry.measured.exposed_s for entry in entries)
            hidden_s += min(entry.predicted.hidden_s for entry in entries)
        if self._too_little(exposed_s, measured_s):
            return 1.0
        return (measured_s + self.compute_factor * hidden_s) / (exposed_s + hidden_s)

    @property
    def explanation(self) -> str:
        """Sentences that name the constant that would explain the largest deviation, and compare peak memory."""
        worst = self.worst
        if abs(worst.share) < AGREE:
            sentences = f"Prediction and measurement agree: no part is off by more than {AGREE:.0%} of the step."
        elif worst.part == "computing":
            sentences = self._about_computing(worst)
        elif worst.part == "bubble":
            sentences = self._about_bubble(worst)
        else:
            sentences = self._about_communication(worst)
        return f"{sentences} {self._about_memory()}"

    def rows(self) -> tuple[LedgerRow, ...]:
        """The rows of the table: for every rank, the parts of its step, the step, and its peak memory."""
        return tuple(
            LedgerRow(
                rank=entry.rank, what=what, unit=unit,
                predicted=getattr(entry.predicted, field), measured=getattr(entry.measured, field),
            )
            for entry in self.ranks
            for what, field, unit in _ROWS
        )  # fmt: skip

    def table(self) -> str:
        """The ledger as text for a terminal, with the largest deviation and its explanation."""
        steps = "1 step" if self.num_steps == 1 else f"the median of {self.num_steps} steps"
        head = f"{self.model} as {self.layout} on {self.cluster}{f' ({self.constants})' * bool(self.constants)}"
        lines = [
            f"{head}: predicted ({self.predicted_by}) beside {steps} ({self.measured_by})",
            f"  {'rank':<5} {'part':<22} {'predicted':>10} {'measured':>10} {'pred/meas':>9}",
        ]
        before = None
        for row in self.rows():
            rank = "" if row.rank == before else str(row.rank)
            predicted, measured, ratio = row.texts()
            lines.append(f"  {rank:<5} {row.what:<22} {predicted:>10} {measured:>10} {ratio:>9}")
            before = row.rank
        if (between := self.interval_s) is not None:
            where = "inside" if between.holds(self.measured_step_s) else "outside"
            ends = f"{seconds(between.low)} to {seconds(between.high)}"
            lines.append(f"in 80 % of runs a step takes {ends} (software {self.software}): this run is {where}")
        return "\n".join([*lines, f"{self.worst}", self.explanation])

    def _too_little(self, predicted_s: float, measured_s: float) -> bool:
        """Whether the predicted or the measured time is too small a part of its step to estimate a constant from it."""
        return predicted_s < TOLD * self.predicted_step_s or measured_s < TOLD * self.measured_step_s

    def _by_stage(self) -> dict[int, list[RankEntry]]:
        stages: dict[int, list[RankEntry]] = {}
        for entry in self.ranks:
            stages.setdefault(entry.stage, []).append(entry)
        return stages

    def _entry(self, rank: int) -> RankEntry:
        return next(entry for entry in self.ranks if entry.rank == rank)

    def _about_computing(self, worst: Deviation) -> str:
        own, factor = worst.measured_s / worst.predicted_s if worst.predicted_s else 0.0, self.compute_factor
        peers = [entry for entry in self.ranks if entry.rank != worst.rank]
        others = _computing(peers)
        if others and own and abs(own / others - 1) > 2 * AGREE:
            return (
                f"Rank {worst.rank} computes for {own:.2f} times as long as predicted, the others for {others:.2f}: no "
                "constant explains both; its device is slower or busy, or its part of the model is larger than counted."
            )
        return (
            f"The device's efficiency would explain it: computing takes {factor:.2f} times as long as its curves say, "
            "over all ranks."
        )

    def _about_communication(self, worst: Deviation) -> str:
        entry = self._entry(worst.rank)
        stage = self._by_stage()[entry.stage]
        last = min(stage, key=lambda peer: peer.measured.exposed_s)
        late_s = entry.measured.exposed_s - last.measured.exposed_s
        if late_s > 0.5 * abs(entry.difference_s(worst.part)):
            return (
                f"Of this, {seconds(late_s)} are waiting for rank {last.rank}, which came later to collectives and "
                f"computed for {_computing([last]):.2f} times as long as predicted: no constant of the network "
                "explains that."
            )
        factor = self.communication_factor
        if factor == 1.0:
            return "Too little communication was predicted there, or measured, to tell a constant from."
        plural = "s" if len(self.levels) != 1 else ""
        return (
            f"alpha and beta of the level{plural} {' and '.join(self.levels)} would explain it: communication takes "
            f"{factor:.2f} times as long as they say."
        )

    def _about_bubble(self, worst: Deviation) -> str:
        off_s = worst.measured_s - worst.predicted_s
        stages = self._by_stage()
        if len(stages) == 1:
            return (
                "Nothing is noted of that time: it is between the parts of the step (input, dispatch), for which there "
                "is no constant."
            )
        means = {
            stage: statistics.fmean(entry.difference_s("computing") for entry in entries)
            for stage, entries in stages.items()
        }
        slow = max(means, key=lambda stage: abs(means[stage]))
        if abs(means[slow]) >= 0.5 * abs(off_s):
            factor = _computing(stages[slow])
            return (
                f"It follows from the computing of stage {slow}, which takes {factor:.2f} times as long as predicted: "
                "the device's efficiency would explain it, if other stages are off alike; else where the model is cut."
            )
        return (
            "It follows from waiting: computing of no stage is off as much. What would explain it is alpha and beta of "
            f"the messages between stages ({' and '.join(self.levels)}), or time between actions, for which there is "
            "no constant."
        )

    def _about_memory(self) -> str:
        known = [entry for entry in self.ranks if entry.measured.peak_bytes and entry.predicted.peak_bytes]
        if not known:
            return "Memory was not sampled."
        entry = max(known, key=lambda entry: abs(entry.measured.peak_bytes / entry.predicted.peak_bytes - 1))
        measured, predicted = entry.measured.peak_bytes, entry.predicted.peak_bytes
        if abs(measured / predicted - 1) < MEMORY_AGREES:
            return f"Memory agrees within {MEMORY_AGREES:.0%}."
        why = (
            "workspace of its operators, or saved activations that live longer"
            if measured > predicted
            else "saved activations that are counted but are freed earlier, or less workspace"
        )
        return (
            f"Memory: rank {entry.rank} holds {size(measured)} at its peak, {measured / predicted:.2f} times the "
            f"{size(predicted)} predicted; {why} would explain it."
        )


def make_ledger(plan: Plan, predicted: Trace, measured: Sequence[Trace], cluster: "Cluster") -> Ledger:
    """The ledger of a run of ``plan`` on ``cluster``, from a trace of the predicted step and of each measured step.

    Every trace holds all ranks of the plan's mesh. Measured traces must contain only the memory of the model, as
    predicted traces do (see ``Trace.above``).

    Raises:
        TraceError: no step was measured, or a trace belongs to another plan, has a wrong source or lacks ranks.
    """
    if not measured:
        raise TraceError("no step was measured", where="ledger", remedy="let the run make a step with a recorder")
    traces = [("predicted", predicted), *((f"measured step {index}", traced) for index, traced in enumerate(measured))]
    for name, trace in traces:
        check_belongs(trace, plan.digest, name)
        refuse(TraceError, _problems(trace, name, plan.mesh.world_size))
    every = [{times.rank: times for times in summarize(trace)} for trace in measured]
    foretold = sorted(summarize(predicted), key=lambda times: times.rank)
    exposed = max(times.exposed_s / times.step_s for times in foretold)
    stages = {rank: plan.mesh.coordinates(rank).get("pp", 0) for rank in range(plan.mesh.world_size)}
    return Ledger(
        model=plan.model,
        layout=layout_text(plan.layout),
        cluster=cluster.name,
        constants=cluster.constants,
        software=cluster.software.name,
        deviation=step_deviation(cluster.software.spread, exposed),
        plan=plan.digest,
        levels=_levels(cluster, plan.mesh.world_size),
        predicted_by=predicted.source,
        measured_by=measured[0].source,
        num_steps=len(measured),
        ranks=tuple(
            RankEntry(
                rank=times.rank,
                stage=stages[times.rank],
                predicted=times,
                measured=_median([step[times.rank] for step in every]),
            )
            for times in foretold
        ),
    )


def check_belongs(trace: Trace, digest: str, where: str) -> None:
    """Check that a trace belongs to the plan with this digest. ``where`` is the trace's name or file.

    Raises:
        TraceError: the trace names no plan, or another plan.
    """
    if trace.plan != digest:
        said = f"of plan {trace.plan}" if trace.plan else "of no plan"
        raise TraceError(
            f"the trace is {said}, the run's plan is {digest}", where=where, remedy="take the traces of this run"
        )


def _problems(trace: Trace, name: str, world_size: int) -> Iterator[Problem]:
    sources = ("simulated", "emulated") if name == "predicted" else ("measured", "emulated")
    if trace.source not in sources:
        yield name, f"the trace is {trace.source}", f"one that is {' or '.join(sources)} belongs there"
    seen = sorted({span.rank for span in trace.spans})
    if seen != list(range(world_size)):
        shown = ", ".join(map(str, seen[:8])) or "none"
        problem = f"the trace has {len(seen)} ranks ({shown}), the plan {world_size}"
        yield name, problem, "take a trace of all ranks"
    if not trace.duration_s:
        yield name, "the step takes no time", "take the trace of a step that was made"


def _levels(cluster: "Cluster", world_size: int) -> tuple[str, ...]:
    """The names of the levels that join ranks 0 to ``world_size`` - 1, innermost first."""
    if world_size == 1 or cluster.num_devices == 1:
        return ()
    last = min(world_size, cluster.num_devices) - 1
    crossed = {cluster.level_of(0, rank).name for rank in range(1, last + 1)}
    return tuple(name for name in reversed(cluster.level_names) if name in crossed)


def _median(steps: Sequence[RankTimes]) -> RankTimes:
    """The median over the steps of one rank, taken separately for each field."""
    fields = [field for field in RankTimes.__struct_fields__ if field not in ("rank", "peak_bytes")]
    medians = {field: statistics.median(getattr(step, field) for step in steps) for field in fields}
    peak_bytes = round(statistics.median(step.peak_bytes for step in steps))
    return RankTimes(rank=steps[0].rank, peak_bytes=peak_bytes, **medians)


def _computing(entries: Collection[RankEntry]) -> float:
    """The measured divided by the predicted computing time of these ranks; 0 if the predicted time is 0."""
    predicted_s = sum(entry.predicted.compute_s for entry in entries)
    return sum(entry.measured.compute_s for entry in entries) / predicted_s if predicted_s else 0.0
