"""``meshwright report RUN_DIR``: write a run as an HTML page, and its traces as a file for Perfetto."""

from pathlib import Path

import typer

from meshwright.cli import display
from meshwright.errors import TraceError
from meshwright.ir import units

EPILOG = display.examples(
    "meshwright report runs/gpt",
    "meshwright report runs/gpt -o gpt.html --trace gpt.trace.json",
    "meshwright report runs/gpt --picture gpt.svg",
    "meshwright report runs/gpt --json",
    note="""\
The page shows the loss, the plan, timelines and memory of every rank (predicted above measured), and the ledger. It
needs no network.
The trace file opens at https://ui.perfetto.dev, predicted ranks above measured ones.""",
)


def report(
    directory: Path = typer.Argument(
        ..., metavar="RUN_DIR", help="The directory of the run, with run.toml, metrics.jsonl, ..."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="The page; default: report.html in RUN_DIR."
    ),
    trace: Path | None = typer.Option(None, "--trace", metavar="FILE", help="Also write the traces, for Perfetto."),
    picture: Path | None = typer.Option(None, "--picture", metavar="FILE", help="Also write the timelines, as SVG."),
    as_json: bool = display.JSON,
) -> None:
    """Write a page about a run: its loss, its plan, and its prediction beside its measurement. With --json, print the
    ledger and its rows. Rows of steps and peaks have their intervals."""
    from meshwright import report as room

    run = room.read_run(directory)
    page = output or directory / "report.html"
    command = f"meshwright report {directory}"
    display.write(page, room.render_run(run, command=command).encode())
    lines = [f"missing: {missing}" for missing in run.missing]
    if (ledger := run.ledger) is not None:
        lines.append(f"pred/meas {ledger.step_ratio:.2f}, {ledger.worst}")
        if (about := ledger.interval_bytes) is not None and (peak_bytes := ledger.highest_bytes[1]):
            ends = f"{units.size(about.low)} to {units.size(about.high)} in 80 % of runs"
            lines.append(f"highest peak: {units.size(peak_bytes)} measured, {ends}")
        lines.append(f"to predict better, learn from this run: {room.learning_command(ledger, str(directory))}")
    lines.append(f"-> {page}")
    traces = room.named_traces(run)
    for option, path in (("--trace", trace), ("--picture", picture)):
        if path is not None and not traces:
            remedy = f"leave {option} out, or run it again with traces"
            raise TraceError("this run has no traces", where=str(directory), remedy=remedy)
    if trace is not None:
        display.write(trace, room.trace_events(*traces.values()))
        lines.append(f"-> {trace}")
    if picture is not None:
        display.write(picture, room.timeline_picture(traces).encode())
        lines.append(f"-> {picture}")
    if as_json:
        rows = ledger.rows() if ledger is not None else ()
        display.print_json({"page": str(page), "missing": run.missing, "ledger": ledger, "rows": rows})
        return
    terminal = display.console()
    for line in lines:
        terminal.print(line)
