"""Does every combination of model, layout, optimizer, clipping and labels equal one process?

Run as ``make matrix``; writes results/matrix and results/matrix-pipelines (``.json`` and ``.md``). The exit code is 1
if a combination does not. ``python -m benchmarks.matrix pipelines`` runs that part only.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks import report
from meshwright.ir.result import Finding
from tests.distributed import oracle, pipelines
from tests.distributed.oracle import Case, LargestErrors
from tests.distributed.pool import Ranks, RanksFailedError

COMMAND = "make matrix"
PLAIN_TOLERANCE = 1e-5
"""Of models that cast to float32 inside, when their casts are left as they are."""
TIMEOUT_S = 600.0
MAX_RANKS = 4
"""Of a pipeline: with eight ranks on two cores the product would take hours."""


@dataclass(frozen=True)
class Combination:
    """One combination: its largest error over ranks, losses, metrics, parameters and buffers, or how it failed."""

    case: Case | pipelines.Case
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


def compare(case: Case) -> LargestErrors:
    return oracle.compare(case)


def compare_with_casts_as_they_come(case: Case) -> LargestErrors:
    return oracle.compare(case, widen_casts=False)


def compare_pipeline(case: pipelines.Case) -> LargestErrors | None:
    return pipelines.compare(case)[1]


def run(ranks: Ranks, case: Any, function: Callable[[Any], LargestErrors | None], tolerance: float) -> Combination:
    """A case both ways, on the pool of ranks."""
    try:
        errors = ranks(case.num_ranks, function, case, timeout=TIMEOUT_S)
    except RanksFailedError as error:
        last = next(iter(error.failures.values())).strip().splitlines()[-1]
        return Combination(case, float("inf"), tolerance, last)
    return Combination(case, max(largest.error for largest in errors if largest is not None), tolerance)


def table(rows: Sequence[Combination]) -> str:
    """Markdown: a line for each model and setting, a column for each layout."""
    by_case = {row.case: row for row in rows}
    lines = [f"| model | optimizer | clipping | labels | {' | '.join(oracle.LAYOUTS)} |"]
    lines.append("|" + " --- |" * (4 + len(oracle.LAYOUTS)))
    for setting in dict.fromkeys(
        (row.case.model, row.case.optimizer, row.case.clipping, row.case.labels) for row in rows
    ):
        model, *rest = setting
        cells = [by_case.get(Case(model, layout, *rest)) for layout in oracle.LAYOUTS]
        lines.append(f"| {' | '.join(setting)} | {' | '.join(row.text if row else '' for row in cells)} |")
    return "\n".join(lines)


def pipeline_table(rows: Sequence[Combination]) -> str:
    """Markdown: a line for each model, schedule and mesh, a column for each micro-batch count and recomputation."""
    columns = list(itertools.product(*(pipelines.FACTORS[index] for index in (4, 5))))
    by_line: dict[tuple[str, ...], dict[tuple[str, str], Combination]] = {}
    for row in rows:
        assert isinstance(row.case, pipelines.Case)
        line = (row.case.model, row.case.schedule, row.case.pp, row.case.chunks, row.case.mesh)
        by_line.setdefault(line, {})[row.case.microbatches, row.case.recompute] = row
    titles = ("model", "schedule", "stages", "chunks", "beside", *(f"{m}, {recompute}" for m, recompute in columns))
    lines = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    for names, cells in by_line.items():
        texts = [cells[m, recompute].text if (m, recompute) in cells else "" for m, recompute in columns]
        lines.append(f"| {' | '.join((*names, *texts))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the full product and write the tables."""
    parts = list(sys.argv[1:] if arguments is None else arguments) or ["layouts", "pipelines"]
    warnings.simplefilter("ignore")  # of the models' libraries
    start = time.monotonic()
    console = Console()
    every: list[Combination] = []
    with Ranks() as ranks:

        def rows_of(
            what: str, cases: Sequence[Any], function: Callable[[Any], Any], tolerance: float
        ) -> list[Combination]:
            results = [run(ranks, case, function, tolerance) for case in track(cases, what, console=console)]
            every.extend(results)
            return results

        if "layouts" in parts:
            cases = oracle.every_case()
            casting = [case for case in cases if case.model.startswith("HF")]
            rows = rows_of("layouts", cases, compare, oracle.TOLERANCE)
            plain = rows_of("with casts to float32", casting, compare_with_casts_as_they_come, PLAIN_TOLERANCE)
            results = [*findings(rows), *findings(plain, " with casts as they come")]
            report.write(
                "matrix",
                "Parallel equals serial: every combination",
                COMMAND,
                "",
                {},
                results,
                _layouts_text(rows, plain),
            )
        if "pipelines" in parts:
            small = [case for case in pipelines.every_case() if case.num_ranks <= MAX_RANKS]
            rows = rows_of("pipelines", small, compare_pipeline, oracle.TOLERANCE)
            title = f"Pipelines equal one process: every combination of at most {MAX_RANKS} ranks"
            report.write("matrix-pipelines", title, COMMAND, "", {}, findings(rows), _pipelines_text(rows))
    for row in every:
        if not row.passed:
            text = f"fail  {row.case}: {row.text} (at most {row.tolerance:.0e})"
            console.print(text, highlight=False, markup=False)
    console.print(
        f"{_summary(every)} in {time.monotonic() - start:.0f} s; written to benchmarks/results", highlight=False
    )
    return 1 if any(not row.passed for row in every) else 0


def findings(rows: Sequence[Combination], how: str = "") -> list[Finding]:
    """A check for each model: how many of its combinations equal one process, and the error or failure of each."""
    results: list[Finding] = []
    for model in dict.fromkeys(row.case.model for row in rows):
        own = [row for row in rows if row.case.model == model]
        errors = [row.error for row in own if not row.failure]
        largest = f"; largest error {max(errors):.0e}" if errors else ""
        results.append(
            report.share(
                f"{model}{how}: every combination within {own[0].tolerance:.0e} of one process",
                sum(row.passed for row in own),
                len(own),
                f"{_summary(own)}{largest}",
                {"errors": {str(row.case): row.failure or row.error for row in own}},
            )
        )
    return results


def _summary(rows: Sequence[Combination]) -> str:
    return f"{sum(row.passed for row in rows)} of {len(rows)} combinations passed"


def _pipelines_text(rows: Sequence[Combination]) -> str:
    return f"""{_summary(rows)}. {_transformers()}

Each cell is the largest error of {oracle.STEPS} training steps against one process of eager PyTorch in float64, as in
matrix.md. Columns: micro-batches and what is recomputed. *beside*: data or tensor parallel of 2 beside the pipeline;
at most {MAX_RANKS} ranks. Empty: the schedule has no such number of micro-batches, or the model not so many places to
cut. Global batch {pipelines.SIZE}; optimizer, clipping and ragged labels take turns. Hugging Face models with random
weights, their casts to float32 widened on both sides. ResNet with batch_statistics="microbatch", against one process
that works through the same micro-batches.

{pipeline_table(rows)}"""


def _layouts_text(rows: Sequence[Combination], plain: Sequence[Combination]) -> str:
    return f"""{_summary([*rows, *plain])}. {_transformers()}

Each cell is the largest error of {oracle.STEPS} training steps against one process of eager PyTorch in float64: over
all ranks, of losses, metrics, gradient norms, and of all parameters and buffers afterwards; |a - b| / max(1, max|b|)
for each tensor. Bold: over the tolerance. Global batch {oracle.BATCH}; *clipped*: gradients to a norm of
{oracle.MAX_GRAD_NORM}; *ragged*: labels of -100, more in one half of the batch than in the other. SGD with momentum
0.9. *HF GPT-2*: Hugging Face's, unmodified, with random weights; *mask*: with an attention mask.

## Tolerance {oracle.TOLERANCE:.0e}, casts to float32 inside a model widened to float64 on both sides

{table(rows)}

## Tolerance {PLAIN_TOLERANCE:.0e}, casts as they come

{table(plain)}"""


def _transformers() -> str:
    import transformers

    return f"transformers {transformers.__version__}."


if __name__ == "__main__":
    sys.exit(main())
