"""Do Hugging Face models, as they come, train in parallel as in one process, as fast as promised, as well laid out?

Run as ``make bench-models``; writes results/models-parity.md of every model under every layout against one process in
float64 (the part ``parity``), and results/models.md of the parts ``quality`` ("auto" against layouts by hand,
simulated), and on two quiet cores ``speed`` (beside eager PyTorch and DistributedDataParallel), ``compiled``,
``chosen`` ("auto" on 2 and 4 ranks beside all layouts measured) and ``memory``; each with a .json. ``--only`` runs
parts. A word before it selects cases by name: ``Llama --only speed compiled``. A file is written when all of its parts
ran, with all cases. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

import meshwright as mw
from benchmarks import model_steps, quality, report
from benchmarks.prediction import calibrated
from meshwright.ir.result import Check, Comparison, Finding, Scalar, Settings
from meshwright.runtime.launch import num_cores
from tests.distributed import hugging_face, oracle
from tests.distributed.hugging_face import LAYOUTS, Found
from tests.distributed.pool import Ranks, RanksFailedError

COMMAND = "make bench-models"
FILES = {"models-parity": ("parity",), "models": ("quality", "speed", "compiled", "chosen", "memory")}
PARTS = tuple(part for parts in FILES.values() for part in parts)
PARITY_STEPS = 2
TIMEOUT_S = 600.0


# --- parity -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelParity:
    """One model under one layout."""

    model: str
    layout: str
    result: Found | None
    failure: str = ""

    @property
    def passed(self) -> bool:
        limit = hugging_face.tolerance(self.model)
        return self.result is not None and self.result.error <= limit and self.result.moved > 1e-3

    @property
    def text(self) -> str:
        if self.result is None:
            return f"**failed**: {self.failure}"
        chosen = f" ({self.result.layout})" if self.layout.startswith("auto") else ""
        return (f"{self.result.error:.0e}" if self.passed else f"**{self.result.error:.0e}**") + chosen


def compare(model: str, layout: str) -> Found:
    return hugging_face.compare(model, layout, PARITY_STEPS)


def run(ranks: Ranks, model: str, layout: str) -> ModelParity:
    """A model under a layout, on the pool of ranks."""
    try:
        results = ranks(hugging_face.num_ranks(layout), compare, model, layout, timeout=TIMEOUT_S)
    except RanksFailedError as error:
        last = next(iter(error.failures.values())).strip().splitlines()[-1]
        return ModelParity(model, layout, None, last)
    return ModelParity(model, layout, max(results, key=lambda result: result.error))


def parity(console: Console, only: str) -> list[ModelParity]:
    """Every model under every layout that fits it."""
    cases = [
        (model, layout)
        for model in hugging_face.MODELS
        for layout in LAYOUTS
        if hugging_face.fits(model, layout) and only in f"{model}, {layout}"
    ]
    rows = []
    with Ranks() as ranks:
        for case in track(cases, "parity", console=console):
            rows.append(run(ranks, *case))
            console.print(f"{rows[-1].model}, {rows[-1].layout}: {rows[-1].text}", highlight=False, markup=False)
    return rows


def table(rows: Sequence[ModelParity]) -> str:
    """Markdown: a line for each model, a column for each layout."""
    lines = [f"| model | operators without a rule | {' | '.join(LAYOUTS)} |", "|" + " --- |" * (2 + len(LAYOUTS))]
    for model in dict.fromkeys(row.model for row in rows):
        by_layout = {row.layout: row for row in rows if row.model == model}
        unsplit = {name: None for row in by_layout.values() if row.result is not None for name in row.result.unsplit}
        cells = [by_layout[layout].text if layout in by_layout else "" for layout in LAYOUTS]
        lines.append(f"| {model} | {', '.join(unsplit) or 'none'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parity_findings(rows: Sequence[ModelParity]) -> list[Check]:
    """The models of each tolerance as a row of their own."""
    by_tolerance: dict[float, list[ModelParity]] = {}
    for row in rows:
        by_tolerance.setdefault(hugging_face.tolerance(row.model), []).append(row)
    checks = []
    for tolerance, alike in sorted(by_tolerance.items()):
        passed = sum(row.passed for row in alike)
        largest = max((row.result.error for row in alike if row.result is not None), default=float("nan"))
        names = list(dict.fromkeys(row.model for row in alike))
        which = "Hugging Face models" if tolerance == oracle.TOLERANCE else ", ".join(names)
        checks.append(
            Check(
                target=f"parity of {which} with one process: within {tolerance:.0e} in float64",
                verdict="pass" if passed == len(alike) else "fail",
                measured=f"{passed} of {len(alike)} models under layouts, largest error {largest:.0e}",
                passed=passed,
                total=len(alike),
                notes={f"{row.model}, {row.layout}": row.failure or row.text for row in alike},
            )
        )
    return checks


# --- all --------------------------------------------------------------------------------------------------------------


def others(parts: Sequence[str], only: str, rounds: int, steps: int, cluster: str) -> Iterator[Finding]:
    """The findings of the parts but parity, as they are found."""
    if "quality" in parts:
        yield from quality.findings(only)
    if "speed" in parts:
        yield from model_steps.speed(only, rounds, steps)
    if "compiled" in parts:
        yield from model_steps.compiled(only, rounds, steps)
    if "chosen" in parts:
        machine = mw.Cluster.load(cluster) if cluster else calibrated()
        yield from model_steps.chosen(machine, only, rounds, steps)
    if "memory" in parts:
        yield from model_steps.memory(only)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print what they find, and write it if all ran."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("name", nargs="?", default="", help="only cases that have this in their name; writes no file")
    parser.add_argument("--rounds", type=int, default=model_steps.ROUNDS, help="alternating rounds")
    parser.add_argument("--steps", type=int, default=model_steps.STEPS, help="steps in a round")
    parser.add_argument("--cluster", default="", help="a cluster file for `chosen`, instead of calibrating")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of the models' libraries
    start, console = time.monotonic(), Console()
    whole = {name for name, parts in FILES.items() if set(parts) <= set(options.only) and not options.name}
    failed = False
    if "parity" in options.only:
        rows = parity(console, options.name)
        console.print(table(rows), highlight=False, markup=False, soft_wrap=True)
        checks = parity_findings(rows)
        for check in checks:
            report.show(check)
        failed = any(check.verdict == "fail" for check in checks)
        if "models-parity" in whole:
            _write("models-parity", "Hugging Face models beside one process", checks, _parity_text(rows))
    results: list[Finding] = []
    for finding in others(options.only, options.name, options.rounds, options.steps, options.cluster):
        results.append(finding)
        report.show(finding)
    if "models" in whole:
        _write("models", "Hugging Face models: plans, speed and memory", results, TEXT)
    console.print(f"{time.monotonic() - start:.0f} s", highlight=False)
    return int(failed or any(finding.verdict == "fail" for finding in results))


def _write(name: str, title: str, results: Sequence[Finding], text: str) -> None:
    settings = {}
    for setting in dict.fromkeys(
        finding.series[finding.ours].settings for finding in results if isinstance(finding, Comparison)
    ):
        ranks, cores = int(setting.split(", ")[-1].split()[0]), num_cores()
        sizes: dict[str, Scalar] = {"model": setting, "width": model_steps.TIMED.width}
        if ranks > cores:
            sizes["cores that ranks share"] = cores
        settings[setting] = Settings(dtype="float32", ranks=ranks, threads=1, sizes=sizes)
    timed = "a step: zero_grad, forward, loss, backward, update; from when all ranks have met"
    report.write(name, title, COMMAND, timed, settings, results, text)
    print(f"written to benchmarks/results/{name}.md and .json")


def _parity_text(rows: Sequence[ModelParity]) -> str:
    return f"""Each cell is the largest error of {PARITY_STEPS} training steps against one process of eager
PyTorch in float64, over all ranks, of losses and of all parameters and buffers afterwards: |a - b| / max(1, max|b|) for
each tensor; bold: over {oracle.TOLERANCE:.0e} (MobileNet 2: {hugging_face.tolerance("MobileNet 2"):.0e}, for
its gradients come through fifty batch norms, and AdamW divides by their size). Small configurations (2 layers, 4 heads,
of Llama's kin 2 key and value heads), random weights, dropout off, unmodified models; casts to float32 inside a model
are widened to float64 on both
sides. Global batch {oracle.BATCH}, ragged labels, AdamW. In brackets: what "auto" chose. Empty: the layout does not fit
(only Mixtral has experts; the class token of ViT and CLIP makes an odd sequence).

{table(rows)}"""


TEXT = f"""Times: models of 2 layers, {model_steps.TIMED.width} features and {model_steps.TIMED.sequence} positions
(GPT-S as in the foundation's benchmark), batch {model_steps.TIMED.batch}, SGD with momentum, float32, one thread a
rank, gloo; medians over alternating rounds in the same processes. CLIP's loss over a part of the batch is another than
over all of it, so that DistributedDataParallel trains it otherwise. Four ranks that share cores are planned as if each
had a core of its own, and are only reported. "auto" against layouts by hand is simulated by the cost model. Memory is
VmHWM of two steps beyond what the process held before them."""


if __name__ == "__main__":
    sys.exit(main())
