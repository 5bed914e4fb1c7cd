"""How much faster does a GPT train on several ranks of this machine: the same step, a larger batch, a larger model?

Run as ``make bench-scaling`` on a machine that does nothing else. It is ``meshwright bench scaling`` with each of its
kinds, kept as one result file. Nothing is judged. Rows with more ranks than cores say so: such ranks share cores, and
their times are decided by the operating system. ``--only KIND`` measures one kind and writes no file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks import report
from meshwright import config
from meshwright.bench.scaling import KINDS, scaling
from meshwright.ir.result import Comparison, Finding, Result, Scaling, ScalingPoint, Series, Settings
from meshwright.ir.run import Run
from meshwright.runtime.launch import num_cores

COMMAND = "make bench-scaling"
RANKS = (1, 2, 4)
TURNS, REPETITIONS, STEPS = 5, 7, 5
TEXT = """`strong`: model and batch stay the same, and the batch is divided. `batch`: the batch grows with the ranks.
`model`: the number of layers grows with the ranks, and every layer is divided by tensor parallelism. A speed-up is work
per second over that of one rank: tokens for strong and batch, FLOPs for model. Every number of ranks has one thread a
rank, and is started {turns} times, by turns; each start is measured {repetitions} times over {steps} steps.

{curve}"""


def run_of_gpt() -> Run:
    """The run of the reference GPT (GPT-S)."""
    return config.make(config.REFERENCES["gpt"], where="gpt")


def kept(results: Mapping[str, Result], cores: int) -> tuple[dict[str, Settings], list[Finding]]:
    """The settings and findings of the results of several kinds of scaling, for one file.

    Each number of ranks above the first has a finding. ``cores``: more ranks than these share cores, and are marked.
    Only ``strong`` keeps the comparison of one rank with eager PyTorch, because all kinds start from the same run.
    """
    settings: dict[str, Settings] = {}
    findings: list[Finding] = []
    for kind, result in results.items():
        settings |= {f"{kind}, {name}": each for name, each in result.settings.items()}
        for finding in result.findings:
            if isinstance(finding, Scaling):
                findings += _by_ranks(kind, finding, result, cores)
            elif isinstance(finding, Comparison) and kind == "strong":
                series = {name: _named(kind, each) for name, each in finding.series.items()}
                findings.append(msgspec.structs.replace(finding, series=series))
    return settings, findings


def _by_ranks(kind: str, scaling: Scaling, result: Result, cores: int) -> list[Scaling]:
    first, *others = (msgspec.structs.replace(point, series=_named(kind, point.series)) for point in scaling.points)
    what = "the same step" if kind == "strong" else f"{KINDS[kind]} grows with the ranks"
    results = []
    for point, plain in zip(others, scaling.points[1:], strict=True):
        ranks = result.settings_of(plain.series).ranks
        shared = f" ({ranks} ranks share {cores} cores)" if ranks > cores else ""
        results.append(
            msgspec.structs.replace(
                scaling, target=f"{kind} scaling to {ranks} ranks: {what}{shared}", measured=speed(point),
                points=(first, point),
            )
        )  # fmt: skip
    return results


def _named(kind: str, series: Series) -> Series:
    return msgspec.structs.replace(series, settings=f"{kind}, {series.settings}")


def speed(point: ScalingPoint) -> str:
    """The speed-up and efficiency of a point, for people."""
    low, high = point.interval or (point.speedup, point.speedup)
    return f"speed-up {point.speedup:.2f} (95 %: {low:.2f} to {high:.2f}), efficiency {point.efficiency:.0%}"


def curve(results: Mapping[str, Result], cores: int) -> str:
    """The table of all points: kind, ranks, sizes, median time of a step, speed-up, efficiency."""
    lines = [
        "| kind | ranks | batch | parameters | step | speed-up (95 %) | efficiency |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, result in results.items():
        for point in (point for each in result.findings if isinstance(each, Scaling) for point in each.points):
            ranks = result.settings_of(point.series).ranks
            interval = f" ({point.interval[0]:.2f} to {point.interval[1]:.2f})" if point.interval else ""
            marked = f"{ranks}, sharing {cores} cores" if ranks > cores else f"{ranks}"
            lines.append(
                f"| {kind} | {marked} | {point.batch} | {point.parameters:,} | {report.ms(point.series.value_s)} "
                f"| {point.speedup:.2f}{interval} | {point.efficiency:.0%} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=KINDS, action="append", help="measure this kind only; writes no file")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks, ascending from 1")
    parser.add_argument("--turns", type=int, default=TURNS, help="starts of each number of ranks")
    parser.add_argument(
        "--repetitions", type=int, default=REPETITIONS, help="measurements after each start, at least 5"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a measurement")
    options = parser.parse_args(arguments)
    if options.repetitions < 5:
        parser.error("a median needs at least 5 repetitions")
    numbers = {"turns": options.turns, "repetitions": options.repetitions, "steps": options.steps}
    results = {
        kind: scaling(run_of_gpt(), kind, options.ranks, command=COMMAND, **numbers) for kind in options.only or KINDS
    }
    settings, findings = kept(results, num_cores())
    if options.only:
        return report.alone(findings)
    for finding in findings:
        report.show(finding)
    timed = next(iter(results.values())).timed
    text = TEXT.format(curve=curve(results, num_cores()), **numbers)
    report.write("scaling", "Scaling over ranks of one machine", COMMAND, timed, settings, findings, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
