"""The result of a benchmark: the measurements, their settings, and the claims that they support."""

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
    """A part of a result. A required value may be missing: `meshwright bench lint` then refuses it by rule and key."""


class Machine(_Part, frozen=True, kw_only=True):
    """The machine of the measurements."""

    cpu: str = ""
    """The processor's name."""
    cores: Count = 0
    """The number of cores that the processes could use."""
    accelerators: tuple[str, ...] = ()
    """The names of the GPUs that ranks ran on; empty: ranks ran on the cores."""
    system: str = ""
    """The operating system."""

    @property
    def num_devices(self) -> int:
        """The number of GPUs, or of cores if the ranks ran on cores."""
        return len(self.accelerators) or self.cores


class Settings(_Part, frozen=True, kw_only=True):
    """The settings that decide speed and accuracy, apart from the program itself."""

    dtype: str = ""
    """The precision of the computation."""
    ranks: Count = 0
    """The number of processes that work together."""
    threads: Count = 0
    """The number of threads of each rank."""
    sizes: dict[str, Scalar] = {}
    """Sizes of model, batch and problem, by name."""


class Series(_Part, frozen=True, omit_defaults=True, kw_only=True):
    """Repeated measurements of one program."""

    seconds: tuple[Seconds, ...] = ()
    """Seconds per step of each repetition; if ranks work together, those of the slowest rank."""
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of steps in a repetition; ``seconds`` has their mean."""
    statistic: str = "median"
    """How ``value_s`` follows from ``seconds``."""
    value_s: float = 0.0
    """The one value of the series, in seconds."""
    settings: str = ""
    """The name of its settings in ``settings`` of the file."""
    run: str = ""
    """The run that measured it: one tree of processes, on one machine, in one stretch of time."""
    machine: str = ""
    """The machine, if it differs from that of the file."""
    losses: tuple[float, ...] = ()
    """The first losses, which show that two programs compute the same."""

    @classmethod
    def of(cls, seconds: "tuple[float, ...] | list[float]", **others: Any) -> "Series":
        """The series whose value is the median of ``seconds``."""
        return cls(seconds=tuple(seconds), value_s=statistics.median(seconds), **others)


class _Finding(_Part, frozen=True, kw_only=True, tag_field="kind"):
    target: str
    """The question or claim, in words."""
    verdict: Verdict
    """``pass`` or ``fail``; ``undecided`` if the limit lies within the interval; ``reported`` if nothing is judged."""
    measured: str
    """The answer that was measured, in words."""
    notes: dict[str, Any] = {}
    """Further figures."""


class Comparison(_Finding, frozen=True, kw_only=True, tag="comparison"):
    """The time of one program over the time of another program that does the same."""

    series: dict[str, Series] = {}
    """The measurements, by program."""
    ours: str = ""
    """The program whose time is the numerator."""
    baseline: str = ""
    """The program whose time is the denominator: the fastest, if there are several peers."""
    ratio: float = 0.0
    """``value_s`` of ours over that of the baseline."""
    interval: Interval | None = None
    """The interval with 95 % of the ratios of resampled repetitions."""
    limit: float | None = None
    """The largest ratio that passes."""


class ScalingPoint(_Part, frozen=True, kw_only=True):
    """The measurement at one number of ranks."""

    series: Series
    """Seconds per step; its settings say the number of ranks."""
    batch: Count = 0
    """Samples in the global batch."""
    parameters: Count = 0
    """The number of parameters of the model."""
    work: float = 0.0
    """The work of a step, in ``work_unit``."""
    speedup: float = 0.0
    """Work per second, over that of the first point."""
    interval: Interval | None = None
    """The interval with 95 % of the speed-ups of resampled repetitions."""
    efficiency: float = 0.0
    """The speed-up over the growth of the number of ranks since the first point."""


class Scaling(_Finding, frozen=True, kw_only=True, tag="scaling"):
    """The growth of speed with the number of ranks."""

    scaling: str = ""
    """``strong`` (model and batch stay), ``batch`` (the batch grows with the ranks), ``model`` (the model grows)."""
    base: str = ""
    """The program of the first point: the same program on one rank, or the best serial program."""
    work_unit: str = ""
    """The unit of work: ``tok``, ``samples`` or ``FLOP``."""
    points: tuple[ScalingPoint, ...] = ()
    """The measurements, by rising number of ranks."""
    limit: float | None = None
    """The smallest speed-up of the last point that passes."""


class Peak(_Part, frozen=True, kw_only=True):
    """The peak speed of the machine, and its source."""

    flops_per_s: float = 0.0
    """The peak FLOP/s of all devices that the work could use."""
    dtype: str = ""
    """The precision of the peak."""
    found: str = ""
    """The source of the peak: the program that measured it, or the data sheet, or the clock and width."""


class Utilization(_Finding, frozen=True, kw_only=True, tag="utilization"):
    """The fraction of a peak that is reached."""

    series: Series
    """Seconds per step."""
    flops: float = 0.0
    """The FLOPs of a step."""
    peak: Peak = Peak()
    """The peak that counts as 100 %."""
    fraction: float = 0.0
    """FLOP/s over the peak."""
    interval: Interval | None = None
    """The interval with 95 % of the fractions of resampled repetitions."""


class Accuracy(_Finding, frozen=True, kw_only=True, tag="accuracy"):
    """The quality of a trained model."""

    metric: str
    """The metric: ``held-out loss``, ``top-1``, ..."""
    value: float
    """The value of the metric."""
    settings: str = ""
    """The name of its settings in ``settings`` of the file."""


class Check(_Finding, frozen=True, kw_only=True, tag="check"):
    """A check with the same outcome in every run: counts, errors, bytes; no times."""

    passed: Count = 0
    """The number of cases that were right."""
    total: Count = 0
    """The number of cases that were tried; 0: the check was not run."""


class Duration(_Finding, frozen=True, kw_only=True, tag="duration"):
    """A time that is not compared with the time of another program."""

    series: Series
    """The measured seconds."""
    limit_s: float | None = None
    """The longest time that passes."""


class PredictedTime(_Finding, frozen=True, kw_only=True, tag="prediction"):
    """A measured time, and the time that was predicted before the run."""

    series: Series
    """The measured seconds."""
    predicted_s: float = 0.0
    """The predicted seconds."""
    error: float = 0.0
    """``predicted_s`` over ``value_s`` of the series, minus one; negative: the run took longer than predicted."""
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
    """The steps until the goal was reached, for each seed; 0: the goal was not reached."""
    losses: tuple[float, ...] = ()
    """The last evaluated loss of each seed; 0: the run ended before the first evaluation."""
    steps_to_target: Count = 0
    """The median of ``steps``; 0 if a seed did not reach the goal."""
    samples_to_target: Count = 0
    """``steps_to_target`` times ``batch``."""
    target_s: float = 0.0
    """``steps_to_target`` times ``value_s`` of the series."""


class BatchSizes(_Finding, frozen=True, kw_only=True, tag="batch-size"):
    """The steps and time until a goal is reached, by batch size."""

    metric: str = ""
    """The metric that should become low: ``held-out loss``."""
    goal: float = 0.0
    """The goal is reached when the metric is at most this value."""
    points: tuple[BatchPoint, ...] = ()
    """The measurements, by rising batch size."""
    knees: dict[str, float] = {}
    """The batch size, by rule, at which the fitted steps S_min + E_min / batch are twice their minimum: E_min / S_min
    (McCandlish et al. 2018, arXiv:1812.06162). A rule is missing if its value is not between 0 and infinity."""


Finding = BatchSizes | Comparison | Scaling | Utilization | Accuracy | Check | Duration | PredictedTime


class Result(_Part, frozen=True, kw_only=True):
    """A result file: all findings of a benchmark, with its machine and settings."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    """The version of this format."""
    name: str
    """The name of the benchmark."""
    command: str = ""
    """The command that makes the file again."""
    script: str = ""
    """The Python file that measures, from the root of the repository; empty: Meshwright's own command line does."""
    commit: str = ""
    """The commit that was measured; with a ``+`` if files differed from it."""
    date: str = ""
    """The day of the measurements, such as 2026-01-31."""
    machine: Machine = Machine()
    """The machine of the measurements."""
    versions: dict[str, str] = {}
    """The versions of Python and of the libraries that decide the figures."""
    timed: str = ""
    """What lies between the start and the end of a measurement, and how it is repeated."""
    settings: dict[str, Settings] = {}
    """The settings of series and accuracies, by name."""
    findings: tuple[Finding, ...] = ()
    """The findings of the benchmark."""

    def keyed(self) -> Iterator[tuple[str, Finding]]:
        """All findings with their keys, as in ``findings[0]``."""
        return ((f"findings[{index}]", finding) for index, finding in enumerate(self.findings))

    def every_series(self) -> Iterator[tuple[str, Series]]:
        """All series with their keys, as in ``findings[0].series.eager``."""
        for key, finding in self.keyed():
            yield from series_of(finding, key)

    def settings_of(self, series: Series) -> Settings:
        """The settings of a series; empty settings if the file does not have them."""
        return self.settings.get(series.settings, Settings())


def series_of(finding: Finding, key: str) -> Iterator[tuple[str, Series]]:
    """The series of a finding, with their keys below ``key``."""
    if isinstance(finding, Comparison):
        yield from ((f"{key}.series.{name}", series) for name, series in finding.series.items())
    elif isinstance(finding, Scaling | BatchSizes):
        points: tuple[ScalingPoint | BatchPoint, ...] = finding.points
        yield from ((f"{key}.points[{k}].series", point.series) for k, point in enumerate(points))
    elif isinstance(finding, Utilization | Duration | PredictedTime):
        yield f"{key}.series", finding.series
