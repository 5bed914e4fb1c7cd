"""Refuses benchmark results that mislead. A refusal names the broken rule, the key in the file, and a remedy.

Most rules come from two papers, which are called *tell* and *fool* here:

- tell: T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems: Twelve Ways to Tell the Masses
  when Reporting Performance Results", SC'15, doi:10.1145/2807591.2807644;
- fool: T. Hoefler, "Twelve ways to fool the masses when reporting performance of deep learning workloads", 2018,
  https://htor.inf.ethz.ch/blog/index.php/2018/11/.

A lint reads only the file. It finds missing and inconsistent statements, but not false ones.
"""

import re
from collections.abc import Callable
from datetime import date
from pathlib import Path

import msgspec

from meshwright.bench import claims, provenance
from meshwright.bench.claims import LEAST_REPETITIONS, Found
from meshwright.ir.result import Result

STALE = "stale"
"""The name of the rule that the measured code must not have changed since the file's commit."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A violation of a rule: a statement that the result must not make, or that is missing."""

    rule: str
    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}  [{self.rule}]\n  -> {self.remedy}"


class LintRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule for results: what it asks for, its source, and the function that finds violations."""

    name: str
    asks: str
    source: str
    find: Callable[[Result], Found]


def lint(result: Result, folder: Path | None = None) -> tuple[Refusal, ...]:
    """The refusals of a result, in the order of ``RULES``; empty if the result breaks no rule.

    If ``folder`` (the folder of the result file) is given, the result is also refused if the measured code has changed
    since (``provenance.stale``).
    """
    refusals = [
        Refusal(rule=rule.name, key=key, problem=problem, remedy=remedy)
        for rule in RULES
        for key, problem, remedy in rule.find(result)
    ]
    if folder is not None:
        older = provenance.stale(result, folder)
        refusals += (Refusal(rule=STALE, key=key, problem=problem, remedy=remedy) for key, problem, remedy in older)
    return tuple(dict.fromkeys(refusals))


def _command(result: Result) -> Found:
    if not result.command.strip():
        yield "command", "nothing says how the file is made again", "give the command that makes it"


def _day(result: Result) -> Found:
    try:
        date.fromisoformat(result.date)
    except ValueError:
        yield "date", f"{result.date!r} is no day", "give the day on which it was measured, as 2026-01-31"


def _commit(result: Result) -> Found:
    if result.script and not re.fullmatch(r"[0-9a-f]{7,40}\+?", result.commit):
        yield "commit", f"{result.commit!r} does not say which code of {result.script} was measured", "give the commit"


def _versions(result: Result) -> Found:
    if "python" not in result.versions or len(result.versions) < 2:
        known = ", ".join(result.versions) or "nothing"
        yield "versions", f"names the version of {known}", "give those of python and of every library that is measured"


def _machine(result: Result) -> Found:
    if not result.machine.cpu or not result.machine.cores:
        yield "machine", "the machine is not named", "give machine.cpu and machine.cores"


def _timed(result: Result) -> Found:
    if not result.timed.strip() and next(result.every_series(), None) is not None:
        yield "timed", "nothing says what is timed", "say what lies between start and end, and how often it is repeated"


def _sizes(result: Result) -> Found:
    for key, series in result.every_series():
        if series.settings not in result.settings:
            named = repr(series.settings) if series.settings else "nothing"
            yield f"{key}.settings", f"{named} is not in settings", "name settings that the file describes"
        elif not result.settings_of(series).sizes:
            yield f"settings.{series.settings}.sizes", "no size is given", "give the sizes of model, batch or problem"


RULES = tuple(
    LintRule(name=name, asks=asks, source=source, find=find)
    for name, asks, source, find in (
        ("command", "the command that makes the file again", "tell 9", _command),
        ("date", "the day on which it was measured", "ours", _day),
        ("commit", "the commit that was measured, where a script of a repository measures", "ours", _commit),
        ("versions", "the versions of Python and of what is measured", "tell 9", _versions),
        ("machine", "the machine, with its cores", "tell 9", _machine),
        ("timed", "what lies between start and end of a measurement, and how ranks meet", "tell 10", _timed),
        ("sizes", "the sizes of model, batch or problem for every series", "tell 9, fool 9", _sizes),
        ("repetitions", f"at least {LEAST_REPETITIONS} repetitions", "tell 5", claims.repetitions),
        ("median", "the median, not the best of several", "tell 8", claims.median),
        ("hidden-times", "times where the rules see them", "tell 5", claims.hidden_times),
        ("baseline", "what a ratio or a speed-up is relative to, with its own times", "tell 1", claims.baseline),
        ("best-peer", "of several peers, the fastest as baseline", "fool 12", claims.best_peer),
        ("same-run", "both sides from one run on one machine", "tell 9, fool 4", claims.same_run),
        ("alike", "both sides at the same precision, sizes, ranks and threads", "fool 7, fool 12", claims.alike),
        ("ratio", "figures that follow from the numbers given", "tell 4", claims.ratio),
        ("spread", "the interval in which a figure lies", "tell 5, tell 7", claims.spread),
        ("verdict", "a verdict that follows from figure and limit", "ours", claims.verdict),
        ("cores", "more ranks than cores (or GPUs) reported, not judged", "ours", claims.cores),
        ("scaling-kind", "the kind of scaling by name", "fool 11", claims.scaling_kind),
        ("scaling-as-named", "points that scale as the kind says", "fool 11", claims.scaling_as_named),
        ("peak", "the peak of a percentage: how much, in which precision, how found", "tell 11, fool 7", claims.peak),
        ("one-setting", "speed and accuracy from the same settings", "fool 8", claims.one_setting),
    )
)
