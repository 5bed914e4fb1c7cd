"""Does every layout and pipeline of the parity matrix dry-run clean on GPUs that are not there?

Run as ``make bench-dry-runs`` (a part of ``make matrix``); writes results/dry_runs.json. The exit code is 1 if a target
is missed. ``--only PART`` (layouts, models, pipelines or large) runs that part only; ``--every`` runs all pipelines
in place of those in which every two values meet.

Every model of ``make matrix`` under every layout, and wider ones up to 16 ranks; Hugging Face's models under theirs;
the pipelines of 2 to 16 ranks, one rank of each stage; and a few layouts of 256 ranks, for which those ranks are run
that differ. A case is clean if no operator has tensors of host and device, the host never waits for the device within
a step, every operator has a kernel, and all messages and collectives end although sends block until they are received.
The peak memory of each rank is compared with the cost model's; models of a few KiB may differ by the scalars of a step.
Clusters: boxes of 8 H100.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks import report
from meshwright.errors import MeshwrightError
from meshwright.ir.dry_run import DryRun
from meshwright.ir.result import Finding, Settings
from tests.end_to_end import dry_run_cases
from tests.end_to_end.dry_run_cases import Case

COMMAND = "make bench-dry-runs"


class DryRunRow(NamedTuple):
    """A case: its name, and its report or the error with which it was refused."""

    name: str
    outcome: DryRun | str

    @property
    def clean(self) -> bool:
        return isinstance(self.outcome, DryRun) and self.outcome.clean and self.outcome.matched


def run(case: Case) -> DryRunRow:
    """One case."""
    try:
        return DryRunRow(case.name, dry_run_cases.run(case))
    except MeshwrightError as error:
        return DryRunRow(case.name, str(error))


def judged(part: str, rows: Sequence[DryRunRow]) -> list[Finding]:
    """The verdicts on the cases of one part."""
    clean = sum(row.clean for row in rows)
    reports = [row.outcome for row in rows if isinstance(row.outcome, DryRun)]
    waits = sum(not each.of("wait") for each in reports)
    wrong = {row.name: _problem_text(row) for row in rows if not row.clean}
    off = {
        f"{row.name}, rank {each.rank}": f"{each.peak_bytes}, predicted {each.predicted_bytes} ({each.deviation:+.1%})"
        for row in rows
        if isinstance(row.outcome, DryRun)
        for each in row.outcome.ranks
        if not dry_run_cases.as_predicted(each)
    }
    ranks = sum(len(each.ranks) for each in reports)
    apart = (
        each.deviation
        for dry_run in reports
        for each in dry_run.ranks
        if abs(each.peak_bytes - each.predicted_bytes) > dry_run_cases.SCALARS_BYTES
    )
    furthest = max(apart, key=abs, default=0.0)
    return [
        report.share(f"{part}: every case dry-runs clean", clean, len(rows), f"{clean} of {len(rows)} cases", wrong),
        report.share(f"{part}: the host never waits for the device", waits, len(rows), f"{waits} of {len(rows)} cases"),
        report.share(
            f"{part}: the predicted peak memory of every rank is within 5% or {dry_run_cases.SCALARS_BYTES} bytes",
            ranks - len(off), ranks,
            f"{ranks - len(off)} of {ranks} ranks; furthest {furthest:+.1%}", off,
        ),
    ]  # fmt: skip


def _problem_text(row: DryRunRow) -> str:
    if isinstance(row.outcome, str):
        return row.outcome
    return "; ".join(f"{each.kind}: {each.what}" for each in row.outcome.findings[:3]) or "its ranks were not compared"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; write the result if all parts were run."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parts_known = ("layouts", "models", "pipelines", "large")
    parser.add_argument("--only", choices=parts_known, action="append", help="run this part only")
    parser.add_argument("--every", action="store_true", help="run every pipeline")
    parser.add_argument("--first", type=int, default=0, help="run so many cases of each part only")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of the models' libraries
    logging.getLogger("meshwright").setLevel(logging.ERROR)
    parts: dict[str, Callable[[], Iterator[Case]]] = {
        "layouts": partial(dry_run_cases.layouts, all_ranks=True),
        "models": dry_run_cases.models,
        "pipelines": partial(dry_run_cases.pipeline_cases, options.every),
        "large": partial(dry_run_cases.large, dry_run_cases.deep_gpt),
    }
    results: list[Finding] = []
    console = Console()
    for part in options.only or parts:
        cases = list(itertools.islice(parts[part](), options.first or None))
        results += judged(part, [run(case) for case in track(cases, part, console=console)])
    for finding in results:
        console.print(f"{finding.verdict:9} {finding.target}: {finding.measured}", highlight=False, markup=False)
        for name, text in finding.notes.items():
            console.print(f"            {name}: {text}", highlight=False, markup=False)
    if not options.only and not options.first:
        settings = {"steps": Settings(dtype="float64 and float32", ranks=1, threads=1, sizes={})}
        text = (__doc__ or "").partition("in place of those in which every two values meet.")[2].strip()
        report.write("dry_runs", "Dry runs", COMMAND, "nothing", settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
