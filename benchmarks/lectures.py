"""Worked examples of lectures that need captured models: computed, and kept for docs/reference/worked-numbers.md.

Run as ``make bench-lectures``. Nothing is timed: models are captured, planned and trained, two of them on two ranks. A
claim that does not hold is reported, not judged; the reason is in the notes. The exit code is 1 if an example breaks.
``--only NAME`` computes one example and writes no file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import report
from meshwright import api, prediction
from meshwright.ir.result import Check

COMMAND = "make bench-lectures"


def findings(name: str) -> list[Check]:
    """The lines of an example."""
    return [
        Check(
            target=f"{name}: {line.claim}", verdict="pass" if line.verdict == "agrees" else "reported",
            measured=line.ours, passed=int(line.verdict == "agrees"), total=1,
            notes={"verdict": line.verdict, "why": line.why},
        )
        for line in api.recompute_captured(name)
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=prediction.CAPTURED, help="compute this example only; writes no file")
    only = parser.parse_args(arguments).only
    results = []
    for name in [only] if only else prediction.CAPTURED:
        for finding in findings(name):
            report.show(finding)
            results.append(finding)
    if only is None:
        report.write(
            prediction.LECTURES, "Worked examples with captured models", COMMAND, "nothing", {}, results,
            "Each row is a claim of a lecture. docs/reference/worked-numbers.md has the reasons.",
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
