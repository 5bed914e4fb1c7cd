"""The ledger of a run: predicted and measured times side by side, the largest deviation, and its likely cause."""

import statistics
from collections.abc import Collection
from itertools import chain
from typing import Annotated, ClassVar, Literal

import msgspec

from meshwright.ir.codec_use import CodecUse, codec_lines
from meshwright.ir.copies import MemoryPart
from meshwright.ir.data_use import DataUse
from meshwright.ir.interval import Interval, interval
from meshwright.ir.replica_use import ReplicaUse
from meshwright.ir.summary import RankTimes
from meshwright.ir.trace import TraceSource
from meshwright.ir.units import seconds, size

PartName = Literal["computing", "exposed communication", "waiting for data", "bubble"]
PARTS: dict[PartName, str] = {
    "computing": "compute_s",
    "exposed communication": "exposed_s",
    "waiting for data": "data_s",
    "bubble": "bubble_s",
}
"""Maps each part of a step's time to the field of ``RankTimes`` that holds it. The parts add up to the time of the
step."""
AGREE = 0.05
"""If the largest difference is less than this fraction of the step, the ledger says that all parts agree."""
TOLD = 0.01
"""Times below this fraction of the step are too short to estimate a constant from."""
IN_MEMORY = "The data lie in memory, and nothing is predicted for them: a batch is made when a step asks for it."
MEMORY_AGREES = 0.1
"""If predicted and measured peaks differ by less than this fraction, the ledger says that they agree."""


_ROWS: tuple[tuple[str, str, Literal["s", "bytes"]], ...] = (
    *((part, field, "s") for part, field in PARTS.items()),
    ("step", "step_s", "s"),
    ("peak memory", "peak_bytes", "bytes"),
)


class RankEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The predicted and the measured step of one rank. ``stage`` is its pipeline rank (0 without a pipeline).
    ``held_bytes`` is the predicted memory that stays allocated for the whole step. On a GPU, ``reserved_bytes`` is the
    most memory that the allocator took from the device, and ``device_bytes`` is all memory in use on the device after
    the run. 0: unknown. ``parts`` names the parts of both peaks that are no tensors of the step."""

    rank: int
    stage: int
    predicted: RankTimes
    measured: RankTimes
    held_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int = 0
    parts: tuple[MemoryPart, ...] = ()

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


class LedgerRow(msgspec.Struct, frozen=True):
    """A line of the table: the seconds of a part of a rank's step or of the whole step, or the rank's peak memory.
    ``interval`` holds 80 % of the values of such runs. Only steps and peaks have an interval; else it is None."""

    rank: int
    what: str
    predicted: float
    measured: float
    unit: Literal["s", "bytes"]
    interval: Interval | None = None

    @property
    def ratio(self) -> float | None:
        """The predicted value divided by the measured value; None if the measured value is 0."""
        return self.predicted / self.measured if self.measured else None

    @property
    def between(self) -> str:
        """The ends of the interval as text; empty if it is not known."""
        shown = seconds if self.unit == "s" else size
        return f"{shown(self.interval.low)} to {shown(self.interval.high)}" if self.interval is not None else ""

    def texts(self) -> tuple[str, str, str]:
        """The predicted value, the measured value and their ratio as text, with units."""
        shown = seconds if self.unit == "s" else size
        return shown(self.predicted), shown(self.measured), "-" if self.ratio is None else f"{self.ratio:.2f}"


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predicted and measured steps of every rank of a run, side by side.

    ``plan`` is the ``Plan.digest`` of the plan that ran. ``levels`` names the levels of the cluster over which the
    ranks communicate, innermost first. ``constants`` says where the cluster's constants come from, and ``software``
    names the software profile. ``deviation`` is the standard deviation of the logarithm of the step's time, as the
    profile expects it (0: unknown). ``memory_deviation`` is the same for a peak. ``pace``, ``heap`` and
    ``beta_s_per_byte`` (for each of the ``levels``) are the numbers with which the step was predicted (0 or empty:
    unknown; on a GPU there is no heap). ``peers`` is the number of neighbours for which a rank on a GPU keeps
    communication buffers. Measured times are medians over ``num_steps`` steps, for each rank and part."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    model: str
    layout: str
    cluster: str
    constants: str = ""
    software: str = ""
    deviation: float = 0.0
    memory_deviation: float = 0.0
    pace: float = 0.0
    heap: float = 0.0
    peers: int = 0
    beta_s_per_byte: tuple[float, ...] = ()
    plan: str
    levels: tuple[str, ...]
    predicted_by: TraceSource
    measured_by: TraceSource
    num_steps: int
    ranks: Annotated[tuple[RankEntry, ...], msgspec.Meta(min_length=1)]
    codecs: tuple[CodecUse, ...] = ()
    replicas: ReplicaUse | None = None
    data: DataUse | None = None

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
    def highest_bytes(self) -> tuple[int, int]:
        """The highest predicted and the highest measured peak of a rank; 0 without samples."""
        return (
            max(entry.predicted.peak_bytes for entry in self.ranks),
            max(entry.measured.peak_bytes for entry in self.ranks),
        )

    @property
    def interval_bytes(self) -> Interval | None:
        """The interval that holds 80 % of the highest peaks of such runs; None if it is not known."""
        predicted = self.highest_bytes[0]
        return interval(predicted, self.memory_deviation) if self.memory_deviation and predicted else None

    @property
    def worst(self) -> Deviation:
        """The part and rank with the largest difference in seconds. If differences are equal, computing comes first."""
        differences = ((abs(entry.difference_s(part)), part, entry) for part in PARTS for entry in self.ranks)
        _, part, entry = max(differences, key=lambda candidate: candidate[0])
        return Deviation(
            part=part,
            rank=entry.rank,
            predicted_s=getattr(entry.predicted, PARTS[part]),
            measured_s=getattr(entry.measured, PARTS[part]),
            share=entry.difference_s(part) / self.measured_step_s,
        )

    @property
    def tells_computing(self) -> bool:
        """Whether computing takes enough of the step to estimate a factor from it."""
        predicted_s, measured_s = (sum(times.compute_s for times in each) for each in self._sides())
        return not self._too_little(predicted_s / len(self.ranks), measured_s / len(self.ranks))

    @property
    def compute_factor(self) -> float:
        """The measured divided by the predicted computing time of all ranks; 1 if one of the two is too short."""
        predicted_s, measured_s = (sum(times.compute_s for times in each) for each in self._sides())
        return measured_s / predicted_s if self.tells_computing else 1.0

    @property
    def tells_communication(self) -> bool:
        """Whether exposed communication takes enough of the step to estimate a factor from it."""
        exposed_s, measured_s, _ = self._waited()
        return not self._too_little(exposed_s, measured_s)

    @property
    def communication_factor(self) -> float:
        """The measured divided by the predicted communication time; 1 if one of the two times is too short.

        The exposed and hidden times of a stage are the smallest of its ranks. The rank that waited least was the last
        to arrive at its collectives. So it waited for communication only, not for other ranks. Hidden communication is
        not measured. The formula assumes that it took ``compute_factor`` times its predicted time, like the computing
        that hid it: ``factor * (exposed + hidden) = measured exposed + compute_factor * hidden``.
        """
        exposed_s, measured_s, hidden_s = self._waited()
        if not self.tells_communication:
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
        elif worst.part == "waiting for data":
            sentences = self.data.explanation if self.data is not None else IN_MEMORY
        elif worst.part == "bubble":
            sentences = self._about_bubble(worst)
        else:
            sentences = self._about_communication(worst)
        return f"{sentences} {self._about_memory()}"

    def rows(self) -> tuple[LedgerRow, ...]:
        """The rows of the table: for every rank, the parts of its step, the step, and its peak memory. Waiting for data
        is left out if no rank waits for ``TOLD`` of a step."""
        deviations = {"step_s": self.deviation, "peak_bytes": self.memory_deviation}
        waited = any(
            times.data_s >= TOLD * times.step_s for entry in self.ranks for times in (entry.predicted, entry.measured)
        )
        rows = []
        for entry in self.ranks:
            for what, field, unit in _ROWS:
                if field == "data_s" and not waited:
                    continue
                predicted, measured = (getattr(times, field) for times in (entry.predicted, entry.measured))
                deviation = deviations.get(field) if predicted else None
                between = interval(predicted, deviation) if deviation else None
                rows.append(LedgerRow(entry.rank, what, predicted, measured, unit, between))
            rows += [
                LedgerRow(entry.rank, f"of it {part.what}", part.predicted_bytes, part.measured_bytes, "bytes")
                for part in entry.parts
            ]
        return tuple(rows)

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
        if (about := self.interval_bytes) is not None and (peak_bytes := self.highest_bytes[1]):
            where = "inside" if about.holds(peak_bytes) else "outside"
            lines.append(f"and the highest peak is {size(about.low)} to {size(about.high)}: this run is {where}")
        uses = [use.lines() for use in (self.replicas, self.data) if use is not None]
        more = [*self.codec_lines(), *chain.from_iterable(uses)]
        return "\n".join([*lines, *more, f"{self.worst}", self.explanation])

    def codec_lines(self) -> list[str]:
        """The codecs as text: for each bucket, predicted and measured bytes and seconds."""
        return codec_lines(self.codecs)

    def _sides(self) -> tuple[list[RankTimes], list[RankTimes]]:
        return [entry.predicted for entry in self.ranks], [entry.measured for entry in self.ranks]

    def _waited(self) -> tuple[float, float, float]:
        """Predicted exposed, measured exposed and predicted hidden communication. For each stage, the smallest time of
        its ranks counts; the times of the stages are summed."""
        stages = self._by_stage().values()
        return (
            sum(min(entry.predicted.exposed_s for entry in entries) for entries in stages),
            sum(min(entry.measured.exposed_s for entry in entries) for entries in stages),
            sum(min(entry.predicted.hidden_s for entry in entries) for entries in stages),
        )

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


def _computing(entries: Collection[RankEntry]) -> float:
    """The measured divided by the predicted computing time of these ranks; 0 if the predicted time is 0."""
    predicted_s = sum(entry.predicted.compute_s for entry in entries)
    return sum(entry.measured.compute_s for entry in entries) / predicted_s if predicted_s else 0.0
