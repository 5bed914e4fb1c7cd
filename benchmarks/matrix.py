"""Does every combination of model, layout, optimizer, clipping and labels equal one process?

Run as ``make matrix``; writes results/matrix.md. The exit code is 1 if a combination does not.
"""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from tests.distributed import oracle
from tests.distributed.oracle import Case, Comparison
from tests.distributed.pool import Ranks, RanksFailedError

RESULTS = Path(__file__).parent / "results"
COMMAND = "make matrix"
PLAIN_TOLERANCE = 1e-5
"""Of models that cast to float32 inside, when their casts are left as they are."""


@dataclass(frozen=True)
class Row:
    """One combination: its largest error over ranks, losses, metrics, parameters and buffers, or how it failed."""

    case: Case
    error: float
    tolerance: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.tolerance

    @property
    def text(self) -> str:
        if self.failure:
            return f"**failed**: {self.failure}"
        return f"{self.error:.0e}" if self.passed else f"**{self.error:.0e}**"


def compare(case: Case) -> Comparison:
    return oracle.compare(case)


def compare_with_casts_as_they_come(case: Case) -> Comparison:
    return oracle.compare(case, widen_casts=False)


def run(ranks: Ranks, cases: Iterable[Case], *, widen_casts: bool = True) -> list[Row]:
    """Every case both ways, on the pool of ranks."""
    function: Callable[[Case], Comparison] = compare if widen_casts else compare_with_casts_as_they_come
    tolerance = oracle.TOLERANCE if widen_casts else PLAIN_TOLERANCE
    rows = []
    for case in cases:
        try:
            found = ranks(case.num_ranks, function, case)
        except RanksFailedError as error:
            last = next(iter(error.failures.values())).strip().splitlines()[-1]
            rows.append(Row(case, float("inf"), tolerance, last))
            continue
        rows.append(Row(case, max(one.error for one in found), tolerance))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each model and setting, a column for each layout."""
    by_case = {row.case: row for row in rows}
    lines = [f"| model | optimizer | clipping | labels | {' | '.join(oracle.LAYOUTS)} |"]
    lines.append("|" + " --- |" * (4 + len(oracle.LAYOUTS)))
    for setting in dict.fromkeys(
        (row.case.model, row.case.optimizer, row.case.clipping, row.case.labels) for row in rows
    ):
        model, *rest = setting
        found = [by_case.get(Case(model, layout, *rest)) for layout in oracle.LAYOUTS]
        lines.append(f"| {' | '.join(setting)} | {' | '.join(row.text if row else '' for row in found)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the full product and write the table."""
    warnings.simplefilter("ignore")  # of the models' libraries
    cases = oracle.every_case()
    casting = [case for case in cases if case.model.startswith("HF")]
    start = time.monotonic()
    console = Console()
    with Ranks() as ranks:
        rows = [row for case in track(cases, "against one process", console=console) for row in run(ranks, [case])]
        plain = [
            row
            for case in track(casting, "with casts to float32", console=console)
            for row in run(ranks, [case], widen_casts=False)
        ]
    every = [*rows, *plain]
    failed = [row for row in every if not row.passed]
    summary = f"{len(every) - len(failed)} of {len(every)} combinations passed"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "matrix.md").write_text(_report(rows, plain, summary), encoding="utf-8")
    for row in failed:
        console.print(f"fail  {row.case}: {row.text} (at most {row.tolerance:.0e})", highlight=False, markup=False)
    console.print(
        f"{summary} in {time.monotonic() - start:.0f} s; written to benchmarks/results/matrix.md", highlight=False
    )
    return 1 if failed else 0


def _report(rows: Sequence[Row], plain: Sequence[Row], summary: str) -> str:
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"""# Parallel equals serial: every combination

{summary}. Made by `{COMMAND}` with {versions}.

Each cell is the largest error of {oracle.STEPS} training steps against one process of eager PyTorch in float64: over
all ranks, of losses, metrics, gradient norms, and of all parameters and buffers afterwards; |a - b| / max(1, max|b|)
for each tensor. Bold: over the tolerance. Global batch {oracle.BATCH}; *clipped*: gradients to a norm of
{oracle.MAX_GRAD_NORM}; *ragged*: labels of -100, more in one half of the batch than in the other. SGD with momentum
0.9. *HF GPT-2*: Hugging Face's, unmodified, with random weights; *mask*: with an attention mask.

## Tolerance {oracle.TOLERANCE:.0e}, casts to float32 inside a model widened to float64 on both sides

{table(rows)}

## Tolerance {PLAIN_TOLERANCE:.0e}, casts as they come

{table(plain)}
"""


if __name__ == "__main__":
    sys.exit(main())
