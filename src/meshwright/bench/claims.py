"""The rules of what a result claims. Each yields (key, problem, remedy) of everything in the result that breaks it."""

import math
import re
import statistics
from collections.abc import Iterator
from itertools import pairwise

from meshwright.ir.result import (
    Accuracy,
    BatchSizes,
    Check,
    Comparison,
    Duration,
    Interval,
    Point,
    Prediction,
    Result,
    Scaling,
    Utilization,
    series_of,
)

LEAST_REPETITIONS = 5
TOLERANCE = 1e-3
"""How far a figure may be, relatively, from what it should follow from: files hold rounded numbers."""
KINDS = ("strong", "batch", "model")
OF_TIMES = ("_s", "_ms", "seconds", "_per_s", "speedup")
"""How the names of figures end that are times or rates."""
IN_WORDS = re.compile(r"\b(faster|slower|speed-?up|throughput)\b|\d\s?(s|ms|µs|us|tok/s|samples/s|[GT]?FLOP/s)(?!\w)")
"""Speed in words."""

Found = Iterator[tuple[str, str, str]]


# --- series ----------------------------------------------------------------------------------------------------------


def repetitions(result: Result) -> Found:
    """One run says nothing, but for a duration that is not said to pass."""
    for index, finding in result.keyed():
        if isinstance(finding, Duration) and finding.verdict != "pass":
            continue
        for key, series in series_of(finding, index):
            count = len(series.seconds)
            if count < LEAST_REPETITIONS:
                times = "once" if count == 1 else f"{count} times"
                yield f"{key}.seconds", f"measured {times}", f"repeat it at least {LEAST_REPETITIONS} times"


def median(result: Result) -> Found:
    """The best repetition is not what a user sees, and a mean is moved by one bad one."""
    for key, series in result.every_series():
        if series.statistic != "median":
            remedy = "show the median; the best may stand in notes"
            yield f"{key}.statistic", f"{series.statistic!r} stands for the series", remedy


def hidden_times(result: Result) -> Found:
    """Times in the notes or the words of a check escape the rules."""
    remedy = 'make it a finding of kind "duration" or "comparison", with all repetitions'
    for key, finding in result.keyed():
        if isinstance(finding, Check):
            for name in finding.notes:
                if name.endswith(OF_TIMES):
                    yield f"{key}.notes.{name}", "a time or rate stands in a check, where no rule sees it", remedy
            for name in ("target", "measured"):
                if found := IN_WORDS.search(getattr(finding, name)):
                    yield f"{key}.{name}", f"{found[0]!r} stands in a check, where no rule sees it", remedy


# --- what is compared ------------------------------------------------------------------------------------------------


def baseline(result: Result) -> Found:
    """A ratio names both sides, and both have times."""
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
    """The state of the art is not the slowest of the peers."""
    for key, finding in result.keyed():
        if isinstance(finding, Comparison) and finding.baseline in finding.series:
            peers = {name: one.value_s for name, one in finding.series.items() if name != finding.ours}
            best = min(peers, key=peers.__getitem__, default="")
            if best and peers[best] < peers.get(finding.baseline, 0.0):
                yield f"{key}.baseline", f"{best!r} is faster", f"compare with {best!r}, the best of the peers"


def same_run(result: Result) -> Found:
    """A machine is not the same on another day, and another machine is not it at all."""
    for index, finding in result.keyed():
        several = list(series_of(finding, index)) if isinstance(finding, BatchSizes | Comparison | Scaling) else []
        for key, series in several:
            first = several[0][1]
            if not series.run:
                yield f"{key}.run", "does not say which run it is from", "measure both sides in one run, and name it"
            elif series.run != first.run:
                problem = f"is from run {series.run!r}, the first from {first.run!r}"
                yield f"{key}.run", problem, "measure both sides in one run, by turns"
            if series.machine != first.machine:
                one, other = (name or result.machine.cpu for name in (series.machine, first.machine))
                yield f"{key}.machine", f"is from {one!r}, the first from {other!r}", "measure both on one machine"


def alike(result: Result) -> Found:
    """What is compared differs in one thing only; points of a scaling may also differ in ranks and sizes, those of
    batch sizes in sizes."""
    for index, finding in result.keyed():
        if not isinstance(finding, BatchSizes | Comparison | Scaling):
            continue
        names = ["dtype", "threads"]
        names += ["ranks"] if not isinstance(finding, Scaling) else []
        names += ["sizes"] if isinstance(finding, Comparison) else []
        several = [(key, one) for key, one in series_of(finding, index) if one.settings in result.settings]
        for key, series in several:
            mine, first = result.settings_of(series), result.settings_of(several[0][1])
            for name in names:
                if not getattr(mine, name) and name != "sizes":
                    yield f"settings.{series.settings}.{name}", "is not given", f"give the {name} that it ran with"
                elif getattr(mine, name) != getattr(first, name):
                    problem = f"{name} {getattr(mine, name)!r} beside {getattr(first, name)!r}"
                    yield f"{key}.settings", problem, f"measure all sides with the same {name}"


# --- figures ---------------------------------------------------------------------------------------------------------


def ratio(result: Result) -> Found:
    """Medians, ratios, speed-ups and fractions are those of the numbers given."""
    for key, series in result.every_series():
        if series.seconds and series.statistic == "median":
            yield from _follows(f"{key}.value_s", series.value_s, statistics.median(series.seconds), "as the median")
    for key, finding in result.keyed():
        if isinstance(finding, Comparison):
            ours, theirs = finding.series.get(finding.ours), finding.series.get(finding.baseline)
            if ours and theirs and theirs.value_s:
                yield from _follows(f"{key}.ratio", finding.ratio, ours.value_s / theirs.value_s, "by value_s")
        elif isinstance(finding, Utilization) and finding.series.value_s and finding.peak.flops_per_s:
            right = finding.flops / finding.series.value_s / finding.peak.flops_per_s
            yield from _follows(f"{key}.fraction", finding.fraction, right, "as flops / value_s / peak")
        elif isinstance(finding, Prediction) and finding.series.value_s:
            right = finding.predicted_s / finding.series.value_s
            yield from _follows(f"{key}.error", 1 + finding.error, right, "one more is predicted_s / value_s, and")
        elif isinstance(finding, Scaling):
            yield from _speedups(result, key, finding)
        elif isinstance(finding, BatchSizes):
            yield from _to_goal(key, finding)


def _speedups(result: Result, key: str, finding: Scaling) -> Found:
    for k, one in enumerate(finding.points):
        first = finding.points[0]
        if not first.work or not one.series.value_s:
            yield f"{key}.points[{k}].work", "is not given", "give the work of a step and its seconds"
            continue
        speedup = one.work / first.work * first.series.value_s / one.series.value_s
        yield from _follows(f"{key}.points[{k}].speedup", one.speedup, speedup, "by work / value_s")
        efficiency = one.speedup * _ranks(result, first) / max(1, _ranks(result, one))
        yield from _follows(f"{key}.points[{k}].efficiency", one.efficiency, efficiency, "as speedup over ranks")


def _to_goal(key: str, finding: BatchSizes) -> Found:
    for k, one in enumerate(finding.points):
        at, count = f"{key}.points[{k}]", one.steps_to_target
        median = statistics.median(one.steps) if one.steps and all(one.steps) else 0.0
        if round(median) != count:
            problem = f"{count}, but the median of {list(one.steps)} (0: not reached) is {median:g}"
            yield f"{at}.steps_to_target", problem, "give the median, or 0 where a seed did not reach the goal"
        yield from _follows(f"{at}.samples_to_target", one.samples_to_target, count * one.batch, "by steps and batch")
        yield from _follows(f"{at}.target_s", one.target_s, count * one.series.value_s, "by steps and value_s")


def _follows(key: str, given: float, right: float, how: str) -> Found:
    if not math.isclose(given, right, rel_tol=TOLERANCE):
        yield key, f"{given:.6g} does not follow: {how} it is {right:.6g}", "compute it from the numbers of the file"


def spread(result: Result) -> Found:
    """Every figure of speed has its interval, and lies in it."""
    shown: list[tuple[str, float, Interval | None]] = []
    for key, finding in result.keyed():
        if isinstance(finding, Comparison):
            shown.append((key, finding.ratio, finding.interval))
        elif isinstance(finding, Utilization):
            shown.append((key, finding.fraction, finding.interval))
        elif isinstance(finding, Scaling):
            points = enumerate(finding.points[1:], 1)
            shown += ((f"{key}.points[{k}]", one.speedup, one.interval) for k, one in points)
    for key, value, interval in shown:
        remedy = "give [low, high] that hold 95 % of resampled repetitions"
        if interval is None:
            yield f"{key}.interval", "nothing says how sure the figure is", remedy
        elif not interval[0] * (1 - TOLERANCE) <= value <= interval[1] * (1 + TOLERANCE):
            yield f"{key}.interval", f"{value:.6g} is not in {list(interval)}", remedy


def verdict(result: Result) -> Found:
    """What passes has a limit, and keeps it. What fails may have failed for another reason."""
    for key, finding in result.keyed():
        if finding.verdict != "pass":
            continue
        limit: float | None
        if isinstance(finding, Comparison):
            limit, broken = finding.limit, finding.ratio > (finding.limit or 0.0)
        elif isinstance(finding, Scaling):
            limit, broken = finding.limit, not finding.points or finding.points[-1].speedup < (finding.limit or 0.0)
        elif isinstance(finding, Duration):
            limit, broken = finding.limit_s, finding.series.value_s > (finding.limit_s or 0.0)
        elif isinstance(finding, Prediction):
            limit, broken = finding.limit, abs(finding.error) > (finding.limit or 0.0)
        elif isinstance(finding, Check):
            limit, broken = finding.total, not finding.passed == finding.total > 0
        else:
            limit, broken = None, False
        if limit is None:
            yield f"{key}.verdict", "passes, but nothing says what would fail", 'give the limit, or say "reported"'
        elif broken:
            yield f"{key}.verdict", f"passes, but its limit of {limit:g} is not kept", 'say "fail"'


def cores(result: Result) -> Found:
    """Ranks that share a core measure the operating system."""
    known = result.machine.num_devices
    for key, finding in result.keyed():
        most = max((result.settings_of(one).ranks for _, one in series_of(finding, key)), default=0)
        if finding.verdict != "reported" and known and most > known:
            problem = f"is judged, but {most} ranks shared {known} cores (or GPUs)"
            yield f"{key}.verdict", problem, 'say "reported", or use fewer ranks'


# --- scaling, peaks, accuracy ----------------------------------------------------------------------------------------


def scaling_kind(result: Result) -> Found:
    """Weak scaling alone does not say what grew: with a batch, training changes too."""
    for key, finding in result.keyed():
        if isinstance(finding, Scaling) and finding.scaling not in KINDS:
            problem = f"{finding.scaling!r} does not say what grows" if finding.scaling else "the kind is not named"
            yield f"{key}.scaling", problem, "say strong (nothing grows), batch or model"


def scaling_as_named(result: Result) -> Found:
    """Nothing grows in strong scaling, the batch in one weak kind, the model in the other."""
    for key, finding in result.keyed():
        if not isinstance(finding, Scaling) or finding.scaling not in KINDS:
            continue
        kind = finding.scaling
        for k, (before, one) in enumerate(pairwise(finding.points), 1):
            first, at = finding.points[0], f"{key}.points[{k}]"
            if not _ranks(result, before) < _ranks(result, one):
                yield at, "does not have more ranks than the point before", "order points by their ranks"
                continue
            growth = _ranks(result, one) / max(1, _ranks(result, first))
            batch = first.batch * (growth if kind == "batch" else 1)
            remedy = "name the kind that was measured: strong, batch or model"
            if one.batch != batch:
                yield f"{at}.batch", f"{one.batch}, but in {kind} scaling it would be {batch:g}", remedy
            if (one.parameters > first.parameters) != (kind == "model") or one.parameters < first.parameters:
                problem = f"{one.parameters} after {first.parameters}: that is not {kind} scaling"
                yield f"{at}.parameters", problem, remedy
            if kind == "strong" and not math.isclose(one.work, first.work, rel_tol=TOLERANCE):
                yield f"{at}.work", f"{one.work:g} after {first.work:g}: that is not strong scaling", remedy


def peak(result: Result) -> Found:
    """A percentage says of what."""
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
    """Fast with these options and accurate with those is neither."""
    timed = [result.settings_of(series) for _, series in result.every_series()]
    for key, finding in result.keyed():
        if not isinstance(finding, Accuracy):
            continue
        if finding.settings not in result.settings:
            yield f"{key}.settings", f"{finding.settings!r} is not in settings", "name settings that the file describes"
        elif timed and result.settings[finding.settings] not in timed:
            problem = f"accuracy is from {finding.settings!r}, with which nothing is timed"
            yield f"{key}.settings", problem, "take speed and accuracy from the same settings"


def _ranks(result: Result, point: Point) -> int:
    return result.settings_of(point.series).ranks
