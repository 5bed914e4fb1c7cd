"""Is communication hidden as far as it can be? Steps of GPT-S in two emulated boxes. `python -m benchmarks.overlap`.

The boxes (one rank each) are network namespaces joined at 1 Gbit/s (``emulation/network.py``; root, else nothing
is judged). This machine's device is calibrated first, the link in the boxes; the plan is made for both, and simulated
with its transfers sharing the link. What computing stands still for, of the rank that comes last to its collectives
(the others wait for it, too), is compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

import meshwright as mw
from benchmarks.boxes import GBIT, LINK_SIZES, known
from benchmarks.prediction import MODELS, calibrated
from benchmarks.report import alone, at_most, ms, new_run
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout_text import layout_text
from meshwright.ir.result import Check, Duration, Finding, Series
from meshwright.ir.statistics import median
from meshwright.ir.summary import summarize
from meshwright.ir.trace import Trace
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import foretell
from meshwright.runtime import launch
from meshwright.runtime.between import MeasuredSizes, between, boxes_of_world

STEPS, WARMUP_STEPS = 21, 3
LIMIT = 1.10
SETTINGS = "GPT-S in two boxes"
MODEL = MODELS["GPT-S"]
LAYOUTS = [mw.Layout(dp=2), mw.Layout(dp=2, zero=1), mw.Layout(dp=2, zero=3)]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
TABLE = msgspec.structs.replace(LINK_SIZES, repeats=5, most_s=2.0, operations=OPERATIONS)


class Exposed(msgspec.Struct, frozen=True):
    """Seconds for which computing stands still for communication: simulated, and measured by step; whole steps."""

    simulated_s: float
    measured_s: tuple[float, ...]
    simulated_step_s: float
    step_s: tuple[float, ...]


def exposed_s(trace: Trace) -> float:
    """Of the rank that waits least: it is the last to come."""
    return min(summary.exposed_s for summary in summarize(trace))


def measure(device: Cluster, layouts: Sequence[mw.Layout], table: MeasuredSizes) -> list[Exposed]:
    """Plan, simulate and run every layout; on every rank."""
    torch.set_num_threads(1)
    launch.start("cpu")
    places = boxes_of_world()
    with torch.inference_mode():
        rows = between(table, places, lambda what: None)
    cluster = known(rows, places.num_boxes, places.each, device)
    return [_of_layout(layout, cluster) for layout in layouts]


def _of_layout(layout: mw.Layout, cluster: Cluster) -> Exposed:
    torch.manual_seed(0)
    model, batch = MODEL.make(), MODEL.batch()
    graph = mw.capture(model, MODEL.loss, batch)
    plan = mw.plan(graph, cluster, layout=layout)
    simulated = foretell(PlanLowering(graph), plan, cluster, optimizer=MODEL.states, contention=True).trace()
    trainer = mw.parallelize(model, MODEL.loss, batch, plan=plan, optimizer=MODEL.optimizer)
    traces = []
    for _ in range(WARMUP_STEPS + STEPS):
        trainer.step(batch)
        traces.append(trainer.trace(all_ranks=True))
    measured = traces[WARMUP_STEPS:]
    return Exposed(
        simulated_s=exposed_s(simulated),
        measured_s=tuple(exposed_s(trace) for trace in measured),
        simulated_step_s=simulated.duration_s,
        step_s=tuple(trace.duration_s for trace in measured),
    )


def findings() -> list[Finding]:
    """Every layout."""
    if missing := why_not():
        return [Check(target="exposed communication", verdict="reported", measured=f"not measured: {missing}")]
    with tempfile.TemporaryDirectory() as name:
        exposed = run_in_boxes(
            measure, calibrated(), LAYOUTS, TABLE, boxes=(0, 1), rates_bits_per_s=(GBIT, GBIT), directory=Path(name)
        )
    return [_judged(layout, times) for layout, times in zip(LAYOUTS, exposed, strict=True)]


def _judged(layout: mw.Layout, exposed: Exposed) -> Duration:
    series = Series.of(exposed.measured_s, steps=1, settings=SETTINGS, run=new_run())
    times = series.value_s / exposed.simulated_s
    return Duration(
        target=f"GPT-S, {layout_text(layout)}, 2 boxes, emulated 1 Gbit/s: exposed communication at most {LIMIT:g} x "
        "what the simulator says is unavoidable",
        verdict=at_most(median(exposed.measured_s).times(1 / exposed.simulated_s), LIMIT),
        measured=f"{times:.3f}: {ms(series.value_s)} against {ms(exposed.simulated_s)}; of steps of "
        f"{ms(statistics.median(exposed.step_s))}, simulated {ms(exposed.simulated_step_s)}",
        series=series,
        limit_s=LIMIT * exposed.simulated_s,
    )


if __name__ == "__main__":
    sys.exit(alone(findings()))
