"""The result of a benchmark: what was measured, under which settings, and what it is said to show."""

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
    """What a result should say may be missing here: `meshwright bench lint` then refuses it by rule and key."""


class Machine(_Part, frozen=True, kw_only=True):
    """What it was measured on."""

    cpu: str = ""
    """The processor's name."""
    cores: Count = 0
    """Cores that the processes could use."""
    accelerators: tuple[str, ...] = ()
    """The names of the GPUs that ranks ran on; none: they ran on the cores."""
    system: str = ""
    """The operating system."""

    @property
    def num_devices(self) -> int:
        return len(self.accelerators) or self.cores


class Settings(_Part, frozen=True, kw_only=True):
    """What decides speed and accuracy, beside the program itself."""

    dtype: str = ""
    """The precision of what is computed."""
    ranks: Count = 0
    """Processes that work together."""
    threads: Count = 0
    """Threads of each rank."""
    sizes: dict[str, Scalar] = {}
    """Sizes of model, batch and problem, by name."""


class Series(_Part, frozen=True, omit_defaults=True, kw_only=True):
    """Repeated measurements of one program."""

    seconds: tuple[Seconds, ...] = ()
    """Of each repetition (where ranks work together, of the slowest), for one step."""
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Steps in a repetition, of which its figure is the mean."""
    statistic: str = "median"
    """How ``value_s`` follows from ``seconds``."""
    value_s: float = 0.0
    """What stands for the series, in seconds."""
    settings: str = ""
    """A name in ``settings`` of the file."""
    run: str = ""
    """Which run of the benchmark it is from: one tree of processes, on one machine, in one stretch of time."""
    machine: str = ""
    """The machine, where it is not that of the file."""
    losses: tuple[float, ...] = ()
    """The first losses, from which one sees that programs compute the same."""

    @classmethod
    def of(cls, seconds: "tuple[float, ...] | list[float]", **others: Any) -> "Series":
        """The series whose value is the median of ``seconds``."""
        return cls(seconds=tuple(seconds), value_s=statistics.median(seconds), **others)


class _Finding(_Part, frozen=True, kw_only=True, tag_field="kind"):
    target: str
    """What is asked or shown, in words."""
    verdict: Verdict
    """``pass`` or ``fail``; ``undecided`` where the limit lies within the interval; or ``reported``: not judged."""
    measured: str
    """What was found, in words."""
    notes: dict[str, Any] = {}
    """Figures beside."""


class Comparison(_Finding, frozen=True, kw_only=True, tag="comparison"):
    """The time of one program over that of another which does the same."""

    series: dict[str, Series] = {}
    """By program."""
    ours: str = ""
    """Whose time is above the line."""
    baseline: str = ""
    """Whose is below it: of several peers, the fastest."""
    ratio: float = 0.0
    """``value_s`` of ours over that of the baseline."""
    interval: Interval | None = None
    """Where 95 % of the ratios of resampled repetitions lie."""
    limit: float | None = None
    """The most that passes."""


class Point(_Part, frozen=True, kw_only=True):
    """One number of ranks."""

    series: Series
    """Seconds a step; how many ranks there are, its settings say."""
    batch: Count = 0
    """Samples in the global batch."""
    parameters: Count = 0
    """Of the model."""
    work: float = 0.0
    """What a step works through, in ``work_unit``."""
    speedup: float = 0.0
    """Work a second, over that of the first point."""
    interval: Interval | None = None
    """Where 95 % of the speed-ups of resampled repetitions lie."""
    efficiency: float = 0.0
    """Speed-up over the growth of ranks since the first point."""


class Scaling(_Finding, frozen=True, kw_only=True, tag="scaling"):
    """How the rate grows with the ranks."""

    scaling: str = ""
    """``strong`` (model and batch stay), ``batch`` (the batch grows with the ranks), ``model`` (the model grows)."""
    base: str = ""
    """What the first point is: one rank of the same program, or the best serial program."""
    work_unit: str = ""
    """``tok``, ``samples`` or ``FLOP``."""
    points: tuple[Point, ...] = ()
    """By rising number of ranks."""
    limit: float | None = None
    """The least speed-up of the last point that passes."""


class Peak(_Part, frozen=True, kw_only=True):
    """The most that the machine computes, and how one knows."""

    flops_per_s: float = 0.0
    """Of all devices that the work could use."""
    dtype: str = ""
    """In this precision."""
    found: str = ""
    """How: measured by what, or from which data sheet or clock and width."""


class Utilization(_Finding, frozen=True, kw_only=True, tag="utilization"):
    """What part of a peak is reached."""

    series: Series
    """Seconds a step."""
    flops: float = 0.0
    """Of a step."""
    peak: Peak = Peak()
    """What is 100 %."""
    fraction: float = 0.0
    """FLOP a second over the peak."""
    interval: Interval | None = None
    """Where 95 % of the fractions of resampled repetitions lie."""


class Accuracy(_Finding, frozen=True, kw_only=True, tag="accuracy"):
    """How good a trained model is."""

    metric: str
    """``held-out loss``, ``top-1``, ..."""
    value: float
    """Of the metric."""
    settings: str = ""
    """A name in ``settings`` of the file."""


class Check(_Finding, frozen=True, kw_only=True, tag="check"):
    """Something that is right or wrong however often it is tried: counts, errors, bytes; no times."""

    passed: Count = 0
    """Cases that were right."""
    total: Count = 0
    """Cases that were tried; 0: it was not run."""


class Duration(_Finding, frozen=True, kw_only=True, tag="duration"):
    """How long something takes that is compared with nothing."""

    series: Series
    """Seconds."""
    limit_s: float | None = None
    """The most that passes."""


class Prediction(_Finding, frozen=True, kw_only=True, tag="prediction"):
    """How long something takes, beside what was foretold before it ran."""

    series: Series
    """Seconds, measured."""
    predicted_s: float = 0.0
    """Foretold."""
    error: float = 0.0
    """``predicted_s`` over ``value_s`` of the series, less one: below zero, it took longer than foretold."""
    limit: float | None = None
    """The largest error either way that passes."""


class BatchPoint(_Part, frozen=True, kw_only=True):
    """One batch size under one rule for the learning rate."""

    series: Series
    """Seconds a step."""
    batch: Count = 0
    """Samples in the global batch."""
    rule: str = ""
    """How the learning rate follows the batch: ``none``, ``linear`` or ``sqrt``."""
    lr: float = 0.0
    """The highest learning rate."""
    steps: tuple[Count, ...] = ()
    """Until the goal was reached, of each seed; 0: it was not."""
    losses: tuple[float, ...] = ()
    """Of each seed, the last that was evaluated (0: it ended before the first)."""
    steps_to_target: Count = 0
    """The median of ``steps``; 0 where a seed did not reach the goal."""
    samples_to_target: Count = 0
    """``steps_to_target`` times ``batch``."""
    target_s: float = 0.0
    """``steps_to_target`` times ``value_s`` of the series."""


class BatchSizes(_Finding, frozen=True, kw_only=True, tag="batch-size"):
    """Steps and time to a goal by batch size."""

    metric: str = ""
    """What is to become low: ``held-out loss``."""
    goal: float = 0.0
    """It is reached where the metric is at most this."""
    points: tuple[BatchPoint, ...] = ()
    """By rising batch size."""
    knees: dict[str, float] = {}
    """By rule, the batch at which the fit S_min + E_min / batch to the steps has twice the least steps: E_min / S_min
    (McCandlish et al. 2018, arXiv:1812.06162); a rule is missing where that is not between 0 and infinity."""


Finding = BatchSizes | Comparison | Scaling | Utilization | Accuracy | Check | Duration | Prediction


class Result(_Part, frozen=True, kw_only=True):
    """A result file: all that a benchmark found."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    """Of this format."""
    name: str
    """The benchmark's."""
    command: str = ""
    """What makes the file again."""
    machine: Machine = Machine()
    """What it was measured on."""
    versions: dict[str, str] = {}
    """Of Python and of the libraries that decide the figures."""
    timed: str = ""
    """What lies between the start and the end of a measurement, and how it is repeated."""
    settings: dict[str, Settings] = {}
    """By the name that series and accuracies call them."""
    findings: tuple[Finding, ...] = ()
    """What was found."""

    def keyed(self) -> Iterator[tuple[str, Finding]]:
        """All findings with their keys, as in ``findings[0]``."""
        return ((f"findings[{index}]", finding) for index, finding in enumerate(self.findings))

    def every_series(self) -> Iterator[tuple[str, Series]]:
        """All series with their keys, as in ``findings[0].series.eager``."""
        for key, finding in self.keyed():
            yield from series_of(finding, key)

    def settings_of(self, series: Series) -> Settings:
        """Empty ones where the file does not have them."""
        return self.settings.get(series.settings, Settings())


def series_of(finding: Finding, key: str) -> Iterator[tuple[str, Series]]:
    """The series of a finding, with their keys below ``key``."""
    if isinstance(finding, Comparison):
        yield from ((f"{key}.series.{name}", one) for name, one in finding.series.items())
    elif isinstance(finding, Scaling | BatchSizes):
        points: tuple[Point | BatchPoint, ...] = finding.points
        yield from ((f"{key}.points[{k}].series", point.series) for k, point in enumerate(points))
    elif isinstance(finding, Utilization | Duration | Prediction):
        yield f"{key}.series", finding.series
