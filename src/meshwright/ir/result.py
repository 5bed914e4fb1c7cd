"""The result of a benchmark: the measurements, their settings, and the findings that follow from them."""

import statistics
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

Verdict = Literal["pass", "fail", "undecided", "reported"]
Interval = tuple[float, float]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Scalar = str | int | float | bool


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a result file. The part may lack a required value; `meshwright bench lint` reports it then."""


class Machine(_Part, frozen=True, kw_only=True):
    """The machine on which the benchmark ran."""

    cpu: str = ""
    """The processor's name."""
    cores: Count = 0
    """The number of cores that the processes could use."""
    accelerators: tuple[str, ...] = ()
    """The names of the GPUs on which ranks ran; empty: ranks ran on the cores."""
    system: str = ""
    """The name and version of the operating system."""

    @property
    def num_devices(self) -> int:
        """The number of GPUs, or of cores if the ranks ran on cores."""
        return len(self.accelerators) or self.cores


class Settings(_Part, frozen=True, kw_only=True):
    """The settings of a measurement that change its speed or accuracy."""

    dtype: str = ""
    """The precision of the computation."""
    ranks: Count = 0
    """The number of processes that work together."""
    threads: Count = 0
    """The number of threads of each rank."""
    busy_cores: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The number of cores that all ranks together kept busy, as measured, if ranks sleep after they compute; 0: every
    rank can keep a core busy."""
    sizes: dict[str, Scalar] = {}
    """Maps the names of sizes (of the model, batch or problem) to their values."""


class Series(_Part, frozen=True, omit_defaults=True, kw_only=True):
    """Repeated measurements of one program."""

    seconds: tuple[Seconds, ...] = ()
    """Seconds per step, for each repetition. If ranks work together, these are the seconds of the slowest rank."""
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of steps in a repetition. Each entry of ``seconds`` is the mean time of these steps."""
    statistic: str = "median"
    """The statistic that gives ``value_s`` from ``seconds``, such as the median."""
    value_s: float = 0.0
    """The value of the series, in seconds."""
    settings: str = ""
    """The name of the settings of the series, in ``settings`` of the file."""
    run: str = ""
    """The run that measured the series: a process and its child processes, on one machine, without a break."""
    machine: str = ""
    """The machine of the series, if it is not the machine of the file."""
    losses: tuple[float, ...] = ()
    """The losses of the first steps. They show that two programs compute the same."""

    @classmethod
    def of(cls, seconds: "tuple[float, ...] | list[float]", **others: Any) -> "Series":
        """The series whose value is the median of ``seconds``."""
        return cls(seconds=tuple(seconds), value_s=statistics.median(seconds), **others)


class _Finding(_Part, frozen=True, kw_only=True, tag_field="kind"):
    target: str
    """The question or claim, in words."""
    verdict: Verdict
    """``pass``, ``fail``, ``undecided`` (the limit lies within the interval) or ``reported`` (nothing is judged)."""
    measured: str
    """The measured answer, in words."""
    notes: dict[str, Any] = {}
    """Further measured values, by name."""


class Comparison(_Finding, frozen=True, kw_only=True, tag="comparison"):
    """The time of one program divided by the time of another program that computes the same."""

    series: dict[str, Series] = {}
    """Maps each program to its measurements."""
    ours: str = ""
    """The program whose time is the numerator."""
    baseline: str = ""
    """The program whose time is the denominator. It is the fastest program if ours is compared with several."""
    ratio: float = 0.0
    """The median, over the rounds, of the seconds of ``ours`` divided by those of ``baseline``. If the programs did not
    run in rounds, it is ``value_s`` of ``ours`` divided by ``value_s`` of ``baseline``."""
    interval: Interval | None = None
    """The interval that holds 95 % of the ratios when repetitions are resampled."""
    limit: float | None = None
    """The largest ratio that passes."""


class ScalingPoint(_Part, frozen=True, kw_only=True):
    """The measurement at one number of ranks."""

    series: Series
    """The measured seconds per step. The settings of the series have the number of ranks."""
    batch: Count = 0
    """Samples in the global batch."""
    parameters: Count = 0
    """The number of parameters of the model."""
    work: float = 0.0
    """The work of a step, in ``work_unit``."""
    speedup: float = 0.0
    """The work per second, divided by the work per second of the first point."""
    interval: Interval | None = None
    """The interval that holds 95 % of the speed-ups when repetitions are resampled."""
    efficiency: float = 0.0
    """The speed-up, divided by the factor by which the number of ranks has grown since the first point."""


class Scaling(_Finding, frozen=True, kw_only=True, tag="scaling"):
    """The speed-up of a program as the number of ranks grows."""

    scaling: str = ""
    """The size that grows with the number of ranks: ``batch`` or ``model``; ``strong``: neither of them grows."""
    base: str = ""
    """The program of the first point: the same program on one rank, or the best serial program."""
    work_unit: str = ""
    """The unit of work: ``tok``, ``samples`` or ``FLOP``."""
    points: tuple[ScalingPoint, ...] = ()
    """The measurements, in order of rising numbers of ranks."""
    limit: float | None = None
    """The smallest speed-up of the last point that passes."""


class Peak(_Part, frozen=True, kw_only=True):
    """The peak speed of the machine, and its source."""

    flops_per_s: float = 0.0
    """The peak FLOP/s of all devices that the work could use."""
    dtype: str = ""
    """The precision of the peak."""
    found: str = ""
    """The source of the peak: the program that measured it, a data sheet, or the clock rate times the vector width."""


class Utilization(_Finding, frozen=True, kw_only=True, tag="utilization"):
    """The fraction of the peak speed that a program reaches."""

    series: Series
    """Seconds per step."""
    flops: float = 0.0
    """The FLOPs of a step."""
    peak: Peak = Peak()
    """The peak that counts as 100 %."""
    fraction: float = 0.0
    """The reached FLOP/s, divided by the peak."""
    interval: Interval | None = None
    """The interval that holds 95 % of the fractions when repetitions are resampled."""
    limit: float | None = None
    """The smallest fraction that passes."""


class Accuracy(_Finding, frozen=True, kw_only=True, tag="accuracy"):
    """The quality of a trained model."""

    metric: str
    """The metric: ``held-out loss``, ``top-1``, ..."""
    value: float
    """The value of the metric."""
    settings: str = ""
    """The name of the settings of the training, in ``settings`` of the file."""
    least: float | None = None
    """The smallest value that passes."""
    most: float | None = None
    """The largest value that passes."""


class Check(_Finding, frozen=True, kw_only=True, tag="check"):
    """A check that has the same outcome in every run, because it does not depend on times."""

    passed: Count = 0
    """The number of cases that were right."""
    total: Count = 0
    """The number of cases that were tried; 0: the check was not run."""
    least: float = 1.0
    """The smallest share of the cases that passes."""


class Duration(_Finding, frozen=True, kw_only=True, tag="duration"):
    """A measured time that is compared only with a limit."""

    series: Series
    """The measured seconds."""
    limit_s: float | None = None
    """The longest time that passes."""


class PredictedTime(_Finding, frozen=True, kw_only=True, tag="prediction"):
    """A measured time, and the time that was predicted for it before the run."""

    series: Series
    """The measured seconds."""
    predicted_s: float = 0.0
    """The predicted seconds."""
    error: float = 0.0
    """``predicted_s`` divided by ``value_s`` of the series, minus 1; negative: the run took longer than predicted."""
    limit: float | None = None
    """The largest error, positive or negative, that passes."""


class BatchPoint(_Part, frozen=True, kw_only=True):
    """The measurement at one batch size, under one rule for the learning rate."""

    series: Series
    """Seconds per step."""
    batch: Count = 0
    """Samples in the global batch."""
    rule: str = ""
    """The rule that scales the learning rate with the batch size: ``none``, ``linear`` or ``sqrt``."""
    lr: float = 0.0
    """The highest learning rate."""
    steps: tuple[Count, ...] = ()
    """The number of steps until the goal was reached, for each seed; 0: the goal was not reached."""
    losses: tuple[float, ...] = ()
    """The last evaluated loss of each seed; 0: the run ended before the first evaluation."""
    steps_to_target: Count = 0
    """The median of ``steps``; 0 if a seed did not reach the goal."""
    samples_to_target: Count = 0
    """``steps_to_target`` times ``batch``."""
    target_s: float = 0.0
    """``steps_to_target`` times ``value_s`` of the series."""


class BatchSizes(_Finding, frozen=True, kw_only=True, tag="batch-size"):
    """The steps and time until training reaches a goal, at several batch sizes."""

    metric: str = ""
    """The metric that should become low: ``held-out loss``."""
    goal: float = 0.0
    """The goal is reached when the metric is at most this value."""
    points: tuple[BatchPoint, ...] = ()
    """The measurements, in order of rising batch sizes."""
    knees: dict[str, float] = {}
    """Maps a rule to its critical batch size: E_min / S_min, at which the fitted steps S_min + E_min / batch are twice
    their minimum (McCandlish et al. 2018, arXiv:1812.06162). A rule is missing if this value is not finite and
    positive."""


Finding = BatchSizes | Comparison | Scaling | Utilization | Accuracy | Check | Duration | PredictedTime


class Result(_Part, frozen=True, kw_only=True):
    """A result file: all findings of a benchmark, with the machine and the settings."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    """The version of this format."""
    name: str
    """The name of the benchmark."""
    command: str = ""
    """The command that makes the file again."""
    script: str = ""
    """The Python file that measures, as a path in the repository; empty: the command line of Meshwright measures."""
    commit: str = ""
    """The commit that was measured, with ``+`` appended if files differed from the commit."""
    date: str = ""
    """The day of the measurements, such as 2026-01-31."""
    machine: Machine = Machine()
    """The machine of the measurements."""
    versions: dict[str, str] = {}
    """The versions of Python and of the libraries on which the measured values depend."""
    timed: str = ""
    """A description of the work that is timed, and of how the measurement is repeated."""
    settings: dict[str, Settings] = {}
    """Maps a name to the settings that series and accuracies refer to by this name."""
    findings: tuple[Finding, ...] = ()
    """The findings of the benchmark."""

    def keyed(self) -> Iterator[tuple[str, Finding]]:
        """All findings with their keys, such as ``findings[0]``."""
        return ((f"findings[{index}]", finding) for index, finding in enumerate(self.findings))

    def every_series(self) -> Iterator[tuple[str, Series]]:
        """All series with their keys, such as ``findings[0].series.eager``."""
        for key, finding in self.keyed():
            yield from series_of(finding, key)

    def settings_of(self, series: Series) -> Settings:
        """The settings of a series; default settings if the file does not contain them."""
        return self.settings.get(series.settings, Settings())


def series_of(finding: Finding, key: str) -> Iterator[tuple[str, Series]]:
    """The series of a finding, each with its key in the file. ``key`` is the key of the finding."""
    if isinstance(finding, Comparison):
        yield from ((f"{key}.series.{name}", series) for name, series in finding.series.items())
    elif isinstance(finding, Scaling | BatchSizes):
        points: tuple[ScalingPoint | BatchPoint, ...] = finding.points
        yield from ((f"{key}.points[{k}].series", point.series) for k, point in enumerate(points))
    elif isinstance(finding, Utilization | Duration | PredictedTime):
        yield f"{key}.series", finding.series
