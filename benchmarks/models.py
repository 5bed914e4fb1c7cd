"""Do Hugging Face models, as they come, train in parallel as they train in one process?

Run as ``make bench-models``; writes results/models.md. The exit code is 1 if a model under a layout does not. ``python
-m benchmarks.models Llama Mixtral`` runs these models only, and writes nothing.
"""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from tests.distributed import hugging_face, oracle
from tests.distributed.hugging_face import LAYOUTS, Found
from tests.distributed.pool import Ranks, RanksFailedError

RESULTS = Path(__file__).parent / "results"
COMMAND = "make bench-models"
STEPS = 2
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    """One model under one layout."""

    model: str
    layout: str
    found: Found | None
    failure: str = ""

    @property
    def passed(self) -> bool:
        return self.found is not None and self.found.error <= oracle.TOLERANCE and self.found.moved > 1e-3

    @property
    def text(self) -> str:
        if self.found is None:
            return f"**failed**: {self.failure}"
        chosen = f" ({self.found.layout})" if self.layout.startswith("auto") else ""
        return (f"{self.found.error:.0e}" if self.passed else f"**{self.found.error:.0e}**") + chosen


def compare(model: str, layout: str) -> Found:
    return hugging_face.compare(model, layout, STEPS)


def run(ranks: Ranks, model: str, layout: str) -> Row:
    """A model under a layout, on the pool of ranks."""
    try:
        found = ranks(hugging_face.num_ranks(layout), compare, model, layout, timeout=TIMEOUT_S)
    except RanksFailedError as error:
        last = next(iter(error.failures.values())).strip().splitlines()[-1]
        return Row(model, layout, None, last)
    return Row(model, layout, max(found, key=lambda one: one.error))


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each model, a column for each layout."""
    lines = [f"| model | operators without a rule | {' | '.join(LAYOUTS)} |", "|" + " --- |" * (2 + len(LAYOUTS))]
    for model in dict.fromkeys(row.model for row in rows):
        mine = {row.layout: row for row in rows if row.model == model}
        unsplit = {name: None for row in mine.values() if row.found is not None for name in row.found.unsplit}
        cells = [mine[layout].text if layout in mine else "" for layout in LAYOUTS]
        lines.append(f"| {model} | {', '.join(unsplit) or 'none'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every model under every layout, and write the table."""
    models = list(sys.argv[1:] if arguments is None else arguments) or list(hugging_face.MODELS)
    warnings.simplefilter("ignore")  # of the models' libraries
    start, console = time.monotonic(), Console()
    cases = [(model, layout) for model in models for layout in LAYOUTS if hugging_face.fits(model, layout)]
    rows = []
    with Ranks() as ranks:
        for case in track(cases, "models", console=console):
            rows.append(run(ranks, *case))
            console.print(f"{rows[-1].model}, {rows[-1].layout}: {rows[-1].text}", highlight=False, markup=False)
    passed = f"{sum(row.passed for row in rows)} of {len(rows)} passed"
    if models == list(hugging_face.MODELS):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "models.md").write_text(_report(rows, passed), encoding="utf-8")
    console.print(table(rows), highlight=False, markup=False, soft_wrap=True)
    console.print(f"{passed} in {time.monotonic() - start:.0f} s", highlight=False)
    return 1 if any(not row.passed for row in rows) else 0


def _report(rows: Sequence[Row], passed: str) -> str:
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"""# Hugging Face models in parallel equal one process

{passed}. Made by `{COMMAND}` with {versions}.

Each cell is the largest error of {STEPS} training steps against one process of eager PyTorch in float64, over all
ranks, of losses and of all parameters and buffers afterwards: |a - b| / max(1, max|b|) for each tensor; bold: over
{oracle.TOLERANCE:.0e}. Small configurations (2 layers, 4 heads, of Llama's kin 2 key and value heads), random weights,
dropout off, unmodified models; casts to float32 inside a model are widened to float64 on both sides. Global batch
{oracle.BATCH}, ragged labels, AdamW. In brackets: what "auto" chose. Empty: the layout does not fit (only Mixtral has
experts; the class token of ViT and CLIP makes an odd sequence).

{table(rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
