"""``meshwright bench batch-size``: steps and time to a target loss at each batch size."""

from typing import Any

from rich.table import Table

from meshwright import config
from meshwright.cli import display
from meshwright.cli.overrides import overridden
from meshwright.cli.plan import run_of
from meshwright.ir.result import BatchSizes
from meshwright.ir.run import Run

EPILOG = display.examples(
    "meshwright bench batch-size --sizes 8,16,32 --target 2.7",
    "meshwright bench batch-size --sizes 8,32,128 --target 2.6 --rules none,sqrt --seeds 3 --optimizer.name lamb",
    "meshwright bench batch-size RUN.toml --sizes 16,64,256 --target 1.9 --ranks 2 --schedule.warmup_steps 100",
    note="""\
The learning rate and schedule.warmup_steps are those of the smallest size; every size makes at most train.steps steps.
The knee is the critical batch size: beyond it, a larger batch takes many more samples for few steps less.""",
)
SMALL: dict[str, Any] = {
    "model": {"name": "gpt", "layers": 2, "width": 64, "heads": 2},
    "data": {"kind": "text", "sequence_length": 64, "max_bytes": 1_000_000, "held_out": 0.02},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 400},
}
"""The run that is meant where none is given: a small GPT on text of the standard library."""


def small_or(target: str, arguments: list[str]) -> Run:
    """The run of ``target``, or the small one, with the options of the command line."""
    if target:
        return run_of(target, arguments)
    return config.make(overridden(SMALL, arguments), where="the small run")


def table(found: BatchSizes) -> Table:
    """The points, by rule."""
    titles = ("rule", "batch", "lr", "steps", "samples", "ms/step", "time to target")
    shown = display.table(titles, left=("rule",))
    for rule in dict.fromkeys(one.rule for one in found.points):
        for one in (point for point in found.points if point.rule == rule):
            reached = one.steps_to_target > 0
            shown.add_row(
                rule, f"{one.batch}", f"{one.lr:.3g}", f"{one.steps_to_target:,}" if reached else "not reached",
                f"{one.samples_to_target:,}" if reached else "", f"{one.series.value_s * 1e3:.4g}",
                f"{one.target_s:.3g} s" if reached else "",
            )  # fmt: skip
    return shown
