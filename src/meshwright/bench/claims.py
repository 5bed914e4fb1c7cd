"""The rules for the claims of a result. Each yields (key, problem, remedy) for every place that breaks the rule."""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import truediv

from meshwright.ir.result import (
    Accuracy,
    BatchSizes,
    Check,
    Comparison,
    Duration,
    Interval,
    PredictedTime,
    Result,
    Scaling,
    ScalingPoint,
    Series,
    Utilization,
    series_of,
)
from meshwright.ir.statistics import median as estimated_median

LEAST_REPETITIONS = 5
TOLERANCE = 1e-3
"""The relative difference allowed between a figure and its value computed from the file: files hold rounded numbers."""
KINDS = ("strong", "batch", "model")
OF_TIMES = ("_s", "_ms", "seconds", "_per_s", "speedup")
"""Endings of the names of figures that are times or rates."""
IN_WORDS = re.compile(r"\b(faster|slower|speed-?up|throughput)\b|\d\s?(s|ms|µs|us|tok/s|samples/s|[GT]?FLOP/s)(?!\w)")
"""Words and units that state a speed in text."""

Found = Iterator[tuple[str, str, str]]


# --- series ----------------------------------------------------------------------------------------------------------


def repetitions(result: Result) -> Found:
    """Every series has at least ``LEAST_REPETITIONS`` values; only a duration without the verdict "pass" may have
    fewer."""
    for index, finding in result.keyed():
        if isinstance(finding, Duration) and finding.verdict != "pass":
            continue
        for key, series in series_of(finding, index):
            count = len(series.seconds)
            if count < LEAST_REPETITIONS:
                times = "once" if count == 1 else f"{count} times"
                yield f"{key}.seconds", f"measured {times}", f"repeat it at least {LEAST_REPETITIONS} times"


def median(result: Result) -> Found:
    """Every series shows its median, because users do not see the best repetition, and one outlier changes a mean."""
    for key, series in result.every_series():
        if series.statistic != "median":
            remedy = "show the median; the best may stand in notes"
            yield f"{key}.statistic", f"{series.statistic!r} stands for the series", remedy


def hidden_times(result: Result) -> Found:
    """A check has no times in its notes or text, because no rule examines them there."""
    remedy = 'make it a finding of kind "duration" or "comparison", with all repetitions'
    for key, finding in result.keyed():
        if isinstance(finding, Check):
            for name in finding.notes:
                if name.endswith(OF_TIMES):
                    yield f"{key}.notes.{name}", "a time or rate stands in a check, where no rule sees it", remedy
            for name in ("target", "measured"):
                if match := IN_WORDS.search(getattr(finding, name)):
                    yield f"{key}.{name}", f"{match[0]!r} stands in a check, where no rule sees it", remedy


# --- comparisons -----------------------------------------------------------------------------------------------------


def baseline(result: Result) -> Found:
    """A ratio names both of its sides, and both have measured times; a scaling names its base."""
    for key, finding in result.keyed():
        if isinstance(finding, Comparison):
            for name in ("ours", "baseline"):
                side = getattr(finding, name)
                if side not in finding.series:
                    problem = f"there is no series {side!r}" if side else "is not given"
                    yield f"{key}.{name}", problem, "name one of series, with its measured seconds"
            if finding.baseline and finding.baseline == finding.ours:
                yield f"{key}.baseline", "is compared with itself", "name another series"
        elif isinstance(finding, Scaling):
            if not finding.base.strip():
                remedy = "say whether it is one rank of the same program or the best serial program"
                yield f"{key}.base", "nothing says what speed-ups are relative to", remedy
            if len(finding.points) < 2 or finding.points[0].speedup != 1.0:
                yield f"{key}.points[0]", "is not what another is compared with", "begin with a point of speedup 1"


def best_peer(result: Result) -> Found:
    """The baseline of a comparison is the fastest of its peers."""
    for key, finding in result.keyed():
        if isinstance(finding, Comparison) and finding.baseline in finding.series:
            peers = {name: series.value_s for name, series in finding.series.items() if name != finding.ours}
            best = min(peers, key=peers.__getitem__, default="")
            if best and peers[best] < peers.get(finding.baseline, 0.0):
                yield f"{key}.baseline", f"{best!r} is faster", f"compare with {best!r}, the best of the peers"


def same_run(result: Result) -> Found:
    """Compared series come from one run on one machine, because the speed of a machine changes from day to day."""
    for index, finding in result.keyed():
        all_series = list(series_of(finding, index)) if isinstance(finding, BatchSizes | Comparison | Scaling) else []
        for key, series in all_series:
            first = all_series[0][1]
            if not series.run:
                yield f"{key}.run", "does not say which run it is from", "measure both sides in one run, and name it"
            elif series.run != first.run:
                problem = f"is from run {series.run!r}, the first from {first.run!r}"
                yield f"{key}.run", problem, "measure both sides in one run, by turns"
            if series.machine != first.machine:
                machine, other = (name or result.machine.cpu for name in (series.machine, first.machine))
                yield f"{key}.machine", f"is from {machine!r}, the first from {other!r}", "measure both on one machine"


def alike(result: Result) -> Found:
    """Compared series have equal settings. Only a Scaling may differ in ranks; only a Scaling or BatchSizes may differ
    in sizes."""
    for index, finding in result.keyed():
        if not isinstance(finding, BatchSizes | Comparison | Scaling):
            continue
        names = ["dtype", "threads"]
        names += ["ranks"] if not isinstance(finding, Scaling) else []
        names += ["sizes"] if isinstance(finding, Comparison) else []
        all_series = [(key, series) for key, series in series_of(finding, index) if series.settings in result.settings]
        for key, series in all_series:
            settings, first = result.settings_of(series), result.settings_of(all_series[0][1])
            for name in names:
                if not getattr(settings, name) and name != "sizes":
                    yield f"settings.{series.settings}.{name}", "is not given", f"give the {name} that it ran with"
                elif getattr(settings, name) != getattr(first, name):
                    problem = f"{name} {getattr(settings, name)!r} beside {getattr(first, name)!r}"
                    yield f"{key}.settings", problem, f"measure all sides with the same {name}"


# --- figures ---------------------------------------------------------------------------------------------------------


def ratio(result: Result) -> Found:
    """Medians, ratios, speed-ups and fractions follow from the numbers in the file."""
    for key, series in result.every_series():
        if series.seconds and series.statistic == "median":
            yield from _follows(f"{key}.value_s", series.value_s, statistics.median(series.seconds), "as the median")
    for key, finding in result.keyed():
        if isinstance(finding, Comparison):
            ours, theirs = finding.series.get(finding.ours), finding.series.get(finding.baseline)
            if ours and theirs and theirs.value_s:
                yield from _follows(f"{key}.ratio", finding.ratio, *_ratio_of(ours, theirs))
        elif isinstance(finding, Utilization) and finding.series.value_s and finding.peak.flops_per_s:
            right = finding.flops / finding.series.value_s / finding.peak.flops_per_s
            yield from _follows(f"{key}.fraction", finding.fraction, right, "as flops / value_s / peak")
        elif isinstance(finding, PredictedTime) and finding.series.value_s:
            right = finding.predicted_s / finding.series.value_s
            yield from _follows(f"{key}.error", 1 + finding.error, right, "one more is predicted_s / value_s, and")
        elif isinstance(finding, Scaling):
            yield from _speedups(result, key, finding)
        elif isinstance(finding, BatchSizes):
            yield from _to_goal(key, finding)


def _ratio_of(ours: Series, theirs: Series) -> tuple[float, str]:
    """The ratio that a comparison should have, and how it is computed."""
    paired = len(ours.seconds) == len(theirs.seconds) and ours.statistic == theirs.statistic == "median"
    if ours.seconds and paired and all(theirs.seconds):
        return statistics.median(map(truediv, ours.seconds, theirs.seconds)), "as the median of the rounds' ratios"
    return ours.value_s / theirs.value_s, "by value_s"


def _speedups(result: Result, key: str, finding: Scaling) -> Found:
    for k, point in enumerate(finding.points):
        first = finding.points[0]
        if not first.work or not point.series.value_s:
            yield f"{key}.points[{k}].work", "is not given", "give the work of a step and its seconds"
            continue
        speedup = point.work / first.work * first.series.value_s / point.series.value_s
        yield from _follows(f"{key}.points[{k}].speedup", point.speedup, speedup, "by work / value_s")
        efficiency = point.speedup * _ranks(result, first) / max(1, _ranks(result, point))
        yield from _follows(f"{key}.points[{k}].efficiency", point.efficiency, efficiency, "as speedup over ranks")


def _to_goal(key: str, finding: BatchSizes) -> Found:
    for k, p in enumerate(finding.points):
        at, count = f"{key}.points[{k}]", p.steps_to_target
        median = statistics.median(p.steps) if p.steps and all(p.steps) else 0.0
        if round(median) != count:
            problem = f"{count}, but the median of {list(p.steps)} (0: not reached) is {median:g}"
            yield f"{at}.steps_to_target", problem, "give the median, or 0 where a seed did not reach the goal"
        yield from _follows(f"{at}.samples_to_target", p.samples_to_target, count * p.batch, "by steps and batch")
        yield from _follows(f"{at}.target_s", p.target_s, count * p.series.value_s, "by steps and value_s")


def _follows(key: str, stated: float, right: float, how: str) -> Found:
    if not math.isclose(stated, right, rel_tol=TOLERANCE):
        yield key, f"{stated:.6g} does not follow: {how} it is {right:.6g}", "compute it from the numbers of the file"


def spread(result: Result) -> Found:
    """Every figure of speed has an interval, and lies in it."""
    shown: list[tuple[str, float, Interval | None]] = []
    for key, finding in result.keyed():
        if isinstance(finding, Comparison):
            shown.append((key, finding.ratio, finding.interval))
        elif isinstance(finding, Utilization):
            shown.append((key, finding.fraction, finding.interval))
        elif isinstance(finding, Scaling):
            points = enumerate(finding.points[1:], 1)
            shown += ((f"{key}.points[{k}]", point.speedup, point.interval) for k, point in points)
    for key, value, interval in shown:
        remedy = "give [low, high] that hold 95 % of resampled repetitions"
        if interval is None:
            yield f"{key}.interval", "nothing says how sure the figure is", remedy
        elif not interval[0] * (1 - TOLERANCE) <= value <= interval[1] * (1 + TOLERANCE):
            yield f"{key}.interval", f"{value:.6g} is not in {list(interval)}", remedy


def verdict(result: Result) -> Found:
    """A finding that passes has a limit, and its whole interval keeps the limit. Findings that fail are not checked,
    because they may fail for another reason."""
    for key, finding in result.keyed():
        if finding.verdict != "pass":
            continue
        limit: float | None
        if isinstance(finding, Comparison):
            limit = finding.limit
            kept = _all_kept((finding.ratio, *(finding.interval or ())), most=limit)
        elif isinstance(finding, Scaling):
            limit, last = finding.limit, finding.points[-1:]
            kept = bool(last) and all(_all_kept((p.speedup, *(p.interval or ())), least=limit) for p in last)
        elif isinstance(finding, Duration):
            limit = finding.limit_s
            kept = _all_kept((finding.series.value_s, *_interval(finding.series)), most=limit)
        elif isinstance(finding, PredictedTime):
            limit = finding.limit
            errors = (finding.predicted_s / bound_s - 1 for bound_s in _interval(finding.series))
            kept = _all_kept((abs(finding.error), *map(abs, errors)), most=limit)
        elif isinstance(finding, Check):
            limit = finding.least * finding.total
            kept = finding.passed >= limit > 0
        elif isinstance(finding, Accuracy):
            limit = finding.least if finding.least is not None else finding.most
            kept = _all_kept((finding.value,), least=finding.least, most=finding.most)
        elif isinstance(finding, Utilization):
            limit = finding.limit
            kept = _all_kept((finding.fraction, *(finding.interval or ())), least=limit)
        else:
            limit, kept = None, True
        if limit is None:
            yield f"{key}.verdict", "passes, but nothing says what would fail", 'give the limit, or say "reported"'
        elif not kept:
            remedy = 'say "fail", or "undecided" where the limit lies within the interval'
            yield f"{key}.verdict", f"passes, but its limit of {limit:g} is not kept", remedy


def _all_kept(values: Sequence[float], *, most: float | None = None, least: float | None = None) -> bool:
    high, low = math.inf if most is None else most, -math.inf if least is None else least
    return all(low * (1 - TOLERANCE) <= value <= high * (1 + TOLERANCE) for value in values)


def _interval(series: Series) -> Interval | tuple[()]:
    return estimated_median(series.seconds).interval if series.seconds else ()


def cores(result: Result) -> Found:
    """A judged finding has at most one rank per core or GPU, or ranks that sleep, and together keep at most the cores
    busy. If ranks share a core, the operating system decides their times. A duration may pass all the same: sharing
    makes it longer, and it is compared with no other."""
    known = result.machine.num_devices
    for key, finding in result.keyed():
        of_series = [result.settings_of(series) for _, series in series_of(finding, key)]
        most = max((settings.busy_cores or settings.ranks for settings in of_series), default=0)
        passes_alone = isinstance(finding, Duration) and finding.verdict == "pass"
        if finding.verdict != "reported" and not passes_alone and known and most > known:
            problem = f"is judged, but {most:g} ranks shared {known} cores (or GPUs)"
            yield f"{key}.verdict", problem, 'say "reported", or use fewer ranks'


# --- scaling, peaks, accuracy ----------------------------------------------------------------------------------------


def scaling_kind(result: Result) -> Found:
    """A scaling names its kind, because "weak" does not say what grew, and a growing batch changes training too."""
    for key, finding in result.keyed():
        if isinstance(finding, Scaling) and finding.scaling not in KINDS:
            problem = f"{finding.scaling!r} does not say what grows" if finding.scaling else "the kind is not named"
            yield f"{key}.scaling", problem, "say strong (nothing grows), batch or model"


def scaling_as_named(result: Result) -> Found:
    """The points match the kind: the batch grows in ``batch`` scaling only, the model in ``model`` scaling only."""
    for key, finding in result.keyed():
        if not isinstance(finding, Scaling) or finding.scaling not in KINDS:
            continue
        kind = finding.scaling
        for k, (before, point) in enumerate(pairwise(finding.points), 1):
            first, at = finding.points[0], f"{key}.points[{k}]"
            if not _ranks(result, before) < _ranks(result, point):
                yield at, "does not have more ranks than the point before", "order points by their ranks"
                continue
            growth = _ranks(result, point) / max(1, _ranks(result, first))
            batch = first.batch * (growth if kind == "batch" else 1)
            remedy = "name the kind that was measured: strong, batch or model"
            if point.batch != batch:
                yield f"{at}.batch", f"{point.batch}, but in {kind} scaling it would be {batch:g}", remedy
            if (point.parameters > first.parameters) != (kind == "model") or point.parameters < first.parameters:
                problem = f"{point.parameters} after {first.parameters}: that is not {kind} scaling"
                yield f"{at}.parameters", problem, remedy
            if kind == "strong" and not math.isclose(point.work, first.work, rel_tol=TOLERANCE):
                yield f"{at}.work", f"{point.work:g} after {first.work:g}: that is not strong scaling", remedy


def peak(result: Result) -> Found:
    """A percentage of a peak names the peak. The peak has the dtype of the measured work, and is not exceeded."""
    for key, finding in result.keyed():
        if not isinstance(finding, Utilization):
            continue
        dtype = result.settings_of(finding.series).dtype
        if not finding.peak.found.strip() or not finding.peak.flops_per_s:
            yield f"{key}.peak", "a percentage of an unnamed peak", "give peak.flops_per_s, and in peak.found how found"
        elif not dtype or finding.peak.dtype != dtype:
            problem = f"is of {finding.peak.dtype or 'no dtype'!r}, the work of {dtype or 'no dtype'!r}"
            yield f"{key}.peak.dtype", problem, "take the peak of the precision that the work is in"
        elif finding.fraction > 1 + TOLERANCE:
            yield f"{key}.fraction", f"{finding.fraction:.1%} of a peak", "that is no peak: find the right one"


def one_setting(result: Result) -> Found:
    """Accuracy and speed come from the same settings."""
    timed = [result.settings_of(series) for _, series in result.every_series()]
    for key, finding in result.keyed():
        if not isinstance(finding, Accuracy):
            continue
        if finding.settings not in result.settings:
            yield f"{key}.settings", f"{finding.settings!r} is not in settings", "name settings that the file describes"
        elif timed and result.settings[finding.settings] not in timed:
            problem = f"accuracy is from {finding.settings!r}, with which nothing is timed"
            yield f"{key}.settings", problem, "take speed and accuracy from the same settings"


def _ranks(result: Result, point: ScalingPoint) -> int:
    return result.settings_of(point.series).ranks
