"""Verdicts of benchmarks, and the files that hold them."""

from __future__ import annotations

import argparse
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from meshwright.bench.lint import lint
from meshwright.bench.machine import this_machine, today, versions
from meshwright.bench.provenance import CHANGED, commit_of
from meshwright.ir import files
from meshwright.ir.result import Check, Comparison, Finding, Result, Scaling, ScalingPoint, Series, Settings, Verdict
from meshwright.ir.statistics import Estimate, ratio, ratio_of_medians
from meshwright.runtime.launch import num_cores
from tests.distributed.pool import Ranks

T = TypeVar("T")
BySide = Mapping[str, Sequence[float]]
RESULTS = Path(__file__).parent / "results"
RUNS = Path(__file__).parents[1] / "runs"
COMMIT = commit_of(Path(__file__).parent)
"""When the benchmark began."""


def at_most(estimate: Estimate, limit: float) -> Verdict:
    """``pass`` where the whole interval keeps the limit, ``fail`` where none of it does, else ``undecided``."""
    return "pass" if estimate.high <= limit else "fail" if estimate.low > limit else "undecided"


def judged(
    target: str,
    seconds: Mapping[str, Sequence[float]],
    ours: str,
    limit: float,
    *,
    settings: str,
    num_ranks: int,
    steps: int,
    losses: Mapping[str, Sequence[float]],
    loss_spread: float | None = None,
    busy_cores: float = 0.0,
) -> Comparison:
    """Our seconds over those of the peer with the least median, which must be at most ``limit``.

    More ranks than cores are only reported, unless they sleep and together keep only ``busy_cores`` busy. Losses that
    differ by more than ``loss_spread`` (None: by anything) fail, whatever the ratio: the sides compute different
    things.
    """
    run = new_run()
    series = {
        name: Series.of(list(values), steps=steps, settings=settings, run=run, losses=tuple(losses[name]))
        for name, values in seconds.items()
    }
    peers = [name for name in seconds if name != ours]
    fastest = min(peers, key=lambda name: series[name].value_s)
    estimate = ratio(seconds[ours], seconds[fastest])
    verdict: Verdict = "reported" if (busy_cores or num_ranks) > num_cores() else at_most(estimate, limit)
    measured = f"{estimate}: {ms(series[ours].value_s)} against {ms(series[fastest].value_s)} ({fastest})"
    if loss_spread is not None:
        spread = float(np.ptp(np.array(list(losses.values())), axis=0).max())
        if not spread <= loss_spread:
            verdict = "fail"
            measured += f"; the sides do not compute the same: their losses differ by {spread:.1e}"
    return Comparison(
        target=target,
        verdict=verdict,
        measured=measured,
        series=series,
        ours=ours,
        baseline=fastest,
        ratio=estimate.value,
        interval=estimate.interval,
        limit=limit,
        notes={"ratios": {name: ratio(seconds[ours], seconds[name]).value for name in peers}},
    )


def decided(
    judge: Callable[[BySide, BySide], Comparison], num_ranks: int, measure: Callable[..., Any], /, *args: Any
) -> Comparison:
    """``judge`` of what ``measure(*args)`` returns on rank 0: the seconds of every round and the losses, by side.

    An undecided comparison is measured again, in fresh processes, and is judged by the rounds of both measurements.
    """
    with Ranks() as ranks:
        seconds, losses = ranks(num_ranks, measure, *args, timeout=1800.0)[0]
    comparison = judge(seconds, losses)
    if comparison.verdict != "undecided":
        return comparison
    with Ranks() as ranks:
        more, others = ranks(num_ranks, measure, *args, timeout=1800.0)[0]
    return judge(
        {name: [*values, *more[name]] for name, values in seconds.items()},
        {name: [*values, *others[name]] for name, values in losses.items()},
    )


def speedup(
    target: str, on_one: Sequence[float], on_many: Sequence[float], num_ranks: int, at_least: float | None, *,
    base: str, unit: str, work: float, parameters: int, steps: int, settings: tuple[str, str],
) -> Scaling:  # fmt: skip
    """The speed-up of ``num_ranks`` ranks over one rank, which run one after the other; both have the same ``work``.

    Args:
        on_one: seconds a step on one rank, by round; ``on_many``: those on ``num_ranks`` ranks.
        at_least: the speed-up that passes; None: it is only reported.
        base: what the one rank does.
        settings: the names of the settings of both.
    """
    estimate, run = ratio_of_medians(on_one, on_many), new_run()
    points = [
        ScalingPoint(
            series=Series.of(list(seconds), steps=steps, settings=name, run=run), batch=int(work),
            parameters=parameters, work=work, speedup=speedup, efficiency=speedup / count, interval=interval,
        )
        for count, name, seconds, speedup, interval in (
            (1, settings[0], on_one, 1.0, None), (num_ranks, settings[1], on_many, estimate.value, estimate.interval),
        )
    ]  # fmt: skip
    return Scaling(
        target=target,
        verdict="reported"
        if at_least is None or num_cores() < num_ranks
        else at_most(estimate.inverse(), 1 / at_least),
        measured=f"{estimate}; not alternating: one process and {num_ranks} ranks run one after the other",
        scaling="strong",
        base=base,
        work_unit=unit,
        points=tuple(points),
        limit=at_least,
    )


def share(target: str, passed: int, total: int, measured: str, notes: Mapping[str, Any] | None = None) -> Check:
    """A check that passes if all of its cases do."""
    verdict: Verdict = "pass" if passed == total else "fail"
    return Check(target=target, verdict=verdict, measured=measured, passed=passed, total=total, notes=dict(notes or {}))


class MeasuredParts(NamedTuple):
    """The findings of a benchmark; ``whole``: of all of its parts, so that the result is written."""

    findings: list[Finding]
    rounds: int
    whole: bool


def measured(
    command: str, doc: str | None, parts: Mapping[str, Callable[[int], list[Finding]]], rounds: int,
    arguments: Sequence[str] | None,
) -> MeasuredParts:  # fmt: skip
    """Measure the parts of a benchmark that its arguments name, in ``rounds`` rounds unless they say otherwise.

    Args:
        doc: the docstring of the benchmark's module.
    """
    parser = argparse.ArgumentParser(prog=command, description=(doc or "").split("\n")[0])
    parser.add_argument("--only", choices=parts, action="append", help="measure this part only; writes no file")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each measurement, at least 5")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    findings = [finding for part in options.only or parts for finding in parts[part](options.rounds)]
    return MeasuredParts(findings, options.rounds, not options.only)


def how(rounds: int, steps: int) -> str:
    """How ``decided`` measures, for a benchmark's page."""
    return f"""Both sides of a comparison take turns in the same processes: {rounds} rounds of {steps} steps each.
Speed is the median of the rounds' ratios, with an interval that holds 95 % of the medians when rounds are drawn again.
If the interval contains the limit, the comparison is measured once more, and is judged by all rounds."""


def kept(benchmark: str, case: str, form: type[T], compute: Callable[[], T]) -> T:
    """The result of a case that is not timed. It is taken from ``runs/`` if it was computed at this commit, so a long
    benchmark goes on where it was stopped. Changed files have no commit of their own, so their results are not kept.

    Args:
        form: the type of the result, which JSON can hold.
    """
    path = RUNS / benchmark / COMMIT / f"{case}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=form)
    result = compute()
    if COMMIT and not COMMIT.endswith(CHANGED):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(result))
    return result


def new_run() -> str:
    """A name for what is measured together, in one tree of processes."""
    return uuid.uuid4().hex[:12]


def write(
    name: str,
    title: str,
    command: str,
    timed: str,
    settings: Mapping[str, Settings],
    findings: Sequence[Finding],
    text: str,
) -> None:
    """``results/NAME.json`` and ``.md``; ``text`` says on the page how it was measured.

    Args:
        timed: what lies between the start and the end of a measurement.

    Raises:
        ValueError: ``meshwright bench lint`` refuses the result, which is then kept as ``results/NAME.refused.json``.
    """
    module = name.partition("-")[0]
    script = (
        f"benchmarks/{module}/__main__.py" if Path(__file__).with_name(module).is_dir() else f"benchmarks/{module}.py"
    )
    result = Result(
        name=name, command=command, script=script, commit=COMMIT, date=today(),
        machine=this_machine(), versions=versions(), timed=timed, settings=dict(settings), findings=tuple(findings),
    )  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    if refusals := lint(result):
        kept = RESULTS / f"{name}.refused.json"
        files.save(result, kept)
        raise ValueError("\n".join([f"{kept} is refused:", *map(str, refusals)]))
    files.save(result, RESULTS / f"{name}.json")
    (RESULTS / f"{name}.md").write_text(page(result, title, text), encoding="utf-8")


def page(result: Result, title: str, text: str) -> str:
    """A result for people."""
    lines = [f"| {row.target} | {row.verdict} | {row.measured} |" for row in result.findings]
    detail = []
    for finding in result.findings:
        heading = finding.target.split(":")[0]
        if isinstance(finding, Comparison):
            for side, series in finding.series.items():
                seconds = series.seconds
                times = " | ".join(ms(value) for value in (statistics.median(seconds), min(seconds), max(seconds)))
                detail.append(f"| {heading} | {side} | {times} |")
    return f"""# {title}

Made by `{result.command}` on {result.machine.cores} cores ({result.machine.cpu}), torch {result.versions["torch"]}, \
Python {result.versions["python"]}, on {result.date} at commit {result.commit}.

| target | verdict | measured |
| --- | --- | --- |
{chr(10).join(lines)}

{text}

| comparison | side | median | least | most |
| --- | --- | ---: | ---: | ---: |
{chr(10).join(detail)}
"""


def show(finding: Finding) -> None:
    """Print a finding."""
    print(f"{finding.verdict:<8}  {finding.target}\n          {finding.measured}", flush=True)


def alone(findings: Sequence[Finding]) -> int:
    """Print findings of a part of a benchmark, which writes no file; the exit code: 1 if one failed."""
    for finding in findings:
        show(finding)
    return int(any(finding.verdict == "fail" for finding in findings))


def size(num_bytes: int) -> str:
    """A number of bytes, for people."""
    unit = next((unit for unit in (2**20, 2**10) if num_bytes >= unit), 1)
    return f"{num_bytes // unit} {({2**20: 'MiB', 2**10: 'KiB'}).get(unit, 'B')}"


def ms(seconds: float) -> str:
    """Milliseconds, or microseconds, for people."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
