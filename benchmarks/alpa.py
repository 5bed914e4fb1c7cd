"""Alpa's evaluation in predictions: 21 pairs of a model and up to 64 V100, four planners each, beside the published.

The computation is that of ``meshwright recompute alpa``. Run as ``make bench-alpa``: it takes about three hours of one
core; nothing is timed. Finished pairs are kept below ``runs/``, and a run at the same commit goes on after them. The
exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence

from benchmarks import report
from meshwright.api.alpa import planned_pair
from meshwright.ir.result import Check
from meshwright.planner.inter_op.pipelines import ALIKE
from meshwright.worked.alpa import (
    EQUAL,
    MEDIAN,
    PAIRS,
    WINNERS,
    AlpaPair,
    Compared,
    Kind,
    PlannerResult,
    lines_of,
    summary_of,
)

COMMAND = "make bench-alpa"


def compared(pair: AlpaPair) -> Compared:
    """The plans of a pair."""
    results = report.kept("alpa", pair.title, dict[Kind, PlannerResult], lambda: dict(planned_pair(pair).results))
    return Compared(pair, results)


def findings(results: Sequence[Compared]) -> Iterator[Check]:
    """The targets, and then the line of each pair, which is not judged by itself."""
    summary, count = summary_of(results), len(results)
    close = summary.median <= MEDIAN
    yield report.share(
        f"Alpa's runs: the median error of predictions is at most {MEDIAN:.0%}", int(close), 1,
        f"{summary.median:.1%} over the runs that fit in both; with one factor for each family, fitted in one box, "
        f"{summary.scaled:.1%} on several boxes; {summary.memory} of {summary.runs} runs fit or not as predicted",
    )  # fmt: skip
    yield Check(
        target="Alpa's runs: the winner among manual, intra, inter and both is right in at least 18 of 21",
        verdict="pass" if summary.winners >= WINNERS * count else "fail",
        measured=f"{summary.winners} of {count}; of pairs of planners that differ by more than {EQUAL:.0%}, "
        f"{summary.ordered} of {summary.orders} are in the published order",
        passed=summary.winners,
        total=count,
        least=WINNERS,
    )
    above = [result.joint_ratio >= 1 - ALIKE for result in results]
    yield report.share(
        f"Alpa's runs: the joint plan is never below intra or inter (within {ALIKE:.0%}, which count as equal)",
        sum(above), count, f"{sum(above)} of {count}; at least {summary.joint_ratio:.3f} of the better",
    )  # fmt: skip
    for line in itertools.islice(lines_of(results), count):
        yield Check(
            target=line.claim, verdict="reported", measured=line.ours, passed=int(line.verdict == "agrees"), total=1,
            notes={"verdict": line.verdict, "why": line.why},
        )  # fmt: skip


TEXT = """Nothing is timed. Numbers of a pair are predicted (published) TFLOP/s of each V100, of the planners manual,
intra, inter and both. Each planner is a restriction of the search to what the published system could choose (decision
0045 in docs/decisions); docs/predictor.md discusses the errors. Nothing was fitted to V100 or to these runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all pairs, print the comparison, and write it."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="only pairs that have this in their name; writes no file")
    name: str = parser.parse_args(arguments).name
    results = []
    for pair in PAIRS:
        if name in pair.title:
            results.append(compared(pair))
            print(f"{pair.title}: {results[-1].results}", flush=True)
    if not results:
        parser.error(f"no pair has {name!r} in its name, such as {PAIRS[0].title!r}")
    checks = list(findings(results))
    if not name:
        write(checks)
    return report.alone(checks)


def write(checks: Sequence[Check]) -> None:
    """Write the result file."""
    report.write("alpa", "Alpa's evaluation in predictions", COMMAND, "nothing", {}, checks, TEXT)


if __name__ == "__main__":
    sys.exit(main())
