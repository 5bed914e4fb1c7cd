"""Which part of this machine's peak do tuned and naive code reach: products, and training steps?

Run as ``make bench-utilization`` on a machine that does nothing else. It is ``meshwright bench utilization`` with its
defaults, kept as a result file: the lecture's example ``utilization`` reads it. Nothing is judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import report
from meshwright.bench.utilization import utilization

COMMAND, ROUNDS = "make bench-utilization", 31
TEXT = """The product is torch.mm of two square matrices. *Rows one at a time* is a loop with a matrix-vector product
for each row, which reads the whole matrix every time. The naive step is plain eager PyTorch, one process; the step of
small operators is the same with a GPT of width 64. All take turns, as in `meshwright bench utilization`. 100 % is the
larger of the measured and the nominal peak; the measured peak is the fastest single product of any size."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each product and step")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrices")
    parser.add_argument("--only", action="store_true", help="print the findings; writes no file")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    result = utilization(size=options.size, repetitions=options.rounds, command=COMMAND)
    for finding in result.findings:
        report.show(finding)
    if not options.only:
        report.write("utilization", "Utilization", COMMAND, result.timed, result.settings, result.findings, TEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
