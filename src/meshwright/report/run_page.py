"""The page of a run: its loss, its plan, predicted and measured timelines and memory, and the ledger."""

import statistics
from typing import Any, Literal

from meshwright.ir.ledger import TOLD, Ledger, LedgerRow
from meshwright.ir.plan import Plan
from meshwright.ir.trace import Trace
from meshwright.ir.units import seconds, size
from meshwright.report import run_drawing, svg
from meshwright.report.run_files import RunFiles
from meshwright.report.template import embedded, packaged, rendered
from meshwright.report.timeline import ranks_timeline

GOOD, CLOSE = 0.10, 0.25
"""Largest errors, relative to the measured value, of predictions that are shown as good and as close."""

Closeness = Literal["good", "close", "bad"]


def render_run(run: RunFiles, command: str = "") -> str:
    """The run as one HTML page that contains its styles and pictures. It is light or dark, like the reader's system.
    The page lists the files that the run lacks, and shows ``command`` as the command that made the page."""
    traces = named_traces(run)
    more = {
        "timelines": run_drawing.timelines(traces) if traces else "",
        "timeline_data": embedded(ranks_timeline(traces)) if traces else "",
    }
    return rendered("run.html.j2", run_pictures(run) | more, **run_values(run), command=command)


def run_pictures(run: RunFiles) -> dict[str, str]:
    """The pictures of a run by name, as HTML: its losses, and its memory over a step. The timeline is empty: it is a
    picture and data in a page, or an address from which the page fetches data."""
    losses = [
        run_drawing.PlotLine(
            name=name, legend=name, points=points, color=color, dots=color == 1,
        )
        for color, (name, points) in enumerate((
            ("training", svg.thinned(run_drawing.finite(run.metrics.losses))),
            ("held out", run_drawing.finite(run.metrics.held_out)),
        ))
        if points
    ]  # fmt: skip
    return {
        "timelines": "",
        "timeline_data": "",
        "timeline_source": "",
        "losses": run_drawing.plot(losses, "loss over steps", x_text=_step, y_text="{:.3g}".format),
        "over_time": run_drawing.memory_lines(named_traces(run)),
    }


def run_values(run: RunFiles) -> dict[str, Any]:
    """The values of ``run_body.html.j2``."""
    return {
        "run": run,
        "plan": run.plan,
        "ledger": run.ledger,
        "verdict": verdict(run.ledger.step_ratio) if run.ledger else "",
        "facts": _facts(run),
        "layout": _layout(run.plan),
        "verdicts": _verdicts(run.ledger) if run.ledger else {},
        "names": list(named_traces(run)),
    }


def _step(number: float) -> str:
    """The number of a step; empty between two steps."""
    return f"{number:,.0f}" if number == round(number) else ""


def named_traces(run: RunFiles) -> dict[str, Trace]:
    """The run's traces by name (``predicted``, ``measured``), in this order."""
    traces = {"predicted": run.predicted, "measured": run.measured}
    return {name: trace for name, trace in traces.items() if trace is not None}


def timeline_picture(traces: dict[str, Trace]) -> str:
    """The timelines of the page as a separate SVG file, with the page's colours."""
    return svg.file(run_drawing.timelines(traces), packaged("style.css"))


def learning_command(ledger: Ledger, directory: str) -> str:
    """The command that learns from a run: it corrects this machine's calibration, or the named cluster in a new
    file."""
    target = "" if ledger.cluster == "this-machine" else f" --cluster {ledger.cluster} --output mine.toml"
    return f"meshwright calibrate --from {directory}{target}"


def verdict(ratio: float) -> Closeness:
    """The verdict on a ratio of predicted to measured."""
    off = abs(ratio - 1)
    return "good" if off <= GOOD else "close" if off <= CLOSE else "bad"


def _verdicts(ledger: Ledger) -> dict[LedgerRow, Closeness]:
    """The verdicts of the rows whose error matters. A time whose error is small relative to the step gets no
    verdict."""
    least_s = TOLD * ledger.measured_step_s
    return {
        row: verdict(row.ratio)
        for row in ledger.rows()
        if row.ratio is not None and (row.unit == "bytes" or abs(row.predicted - row.measured) >= least_s)
    }


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    metrics, ledger = run.metrics, run.ledger
    facts = [
        ("ranks", f"{run.plan.mesh.world_size}"),
        ("layout", ledger.layout if ledger is not None else str(run.plan.mesh)),
    ]
    if metrics.losses:
        facts += [("steps", f"{metrics.losses[-1][0]:,.0f}"), ("last loss", f"{metrics.losses[-1][1]:.4f}")]
    if metrics.held_out:
        facts.append(("held-out loss", f"{metrics.held_out[0][1]:.4f} to {metrics.held_out[-1][1]:.4f}"))
    if metrics.step_s:
        facts.append(("median step, data included", seconds(statistics.median(metrics.step_s))))
    if ledger is not None:
        facts.append(("predicted step", seconds(ledger.predicted_step_s)))
        if (between := ledger.interval_s) is not None:
            facts.append(("step in 80 % of runs", f"{seconds(between.low)} to {seconds(between.high)}"))
        facts.append(("learn from it", learning_command(ledger, run.directory)))
        facts.append(("measured step", seconds(ledger.measured_step_s)))
        predicted_bytes, peak_bytes = ledger.highest_bytes
        if predicted_bytes:
            facts.append(("predicted peak memory", size(predicted_bytes)))
        if (about := ledger.interval_bytes) is not None:
            facts.append(("peak in 80 % of runs", f"{size(about.low)} to {size(about.high)}"))
        if peak_bytes:
            facts.append(("measured peak memory", size(peak_bytes)))
    elif run.plan.prediction is not None:
        facts.append(("predicted step", seconds(run.plan.prediction.step_s)))
    return facts


def _layout(plan: Plan) -> list[tuple[str, str, str]]:
    """The plan's decisions as triples (name, value, meaning)."""
    rows = [(axis.name, f"{axis.size}", _AXES.get(axis.name, "")) for axis in plan.mesh.axes]
    for index, submesh in enumerate(plan.mesh.stages):
        ranks = plan.mesh.stage_ranks(index)
        rows.append((f"pp {index}", f"{submesh}", f"ranks {ranks.start} to {ranks.stop - 1}"))
    rows.append(("global batch", f"{plan.batch_size}", "samples of all ranks in a step"))
    if plan.microbatches > 1:
        rows.append(("micro-batches", f"{plan.microbatches}", "parts of the batch, one after the other"))
    if len(plan.stages) > 1:
        rows.append(("schedule", plan.schedule, "the order of forwards and backwards"))
    if again := list(dict.fromkeys(name for stage in plan.stages for name in stage.recompute)):
        rows.append(("computed again", ", ".join(again), "in backward, instead of being kept"))
    for axis in dict.fromkeys(bucket.axis for bucket in plan.buckets):
        each = [bucket for bucket in plan.buckets if bucket.axis == axis]
        total = size(sum(bucket.num_bytes for bucket in each))
        rows.append((f"buckets over {axis}", f"{len(each)}", f"{total} of gradients that are reduced together"))
    return rows


_AXES = {
    "dp": "replicas, which share the batch",
    "tp": "ranks that share every layer",
    "tx": "ranks that split the input features of layers",
    "ty": "ranks that split the output features of layers",
    "tz": "ranks with samples of their own, which share one copy of the parameters",
    "pp": "stages, one behind the other",
}
