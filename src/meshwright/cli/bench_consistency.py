"""``meshwright bench consistency``: consistency rules, compared for quality and time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright import config
from meshwright.cli import display
from meshwright.cli.overrides import overridden, target_of
from meshwright.cli.plan import run_of
from meshwright.cli.replicas import faults_of
from meshwright.cli.trust import TRUST
from meshwright.ir import files, units

if TYPE_CHECKING:
    from meshwright.report.consistency_page import RuleRow

EPILOG = display.examples(
    "meshwright bench consistency --step-ms 100 --slow 2x:0.25 --page rules.html",
    'meshwright bench consistency RUN.toml --rule sync --rule "server(ssp=3)" --rule "diloco(16)" --slow 1:2.0',
    note="""\
Every rule gets the same wall time, with slow replicas and without. The held-out losses are measured at the end, with
each replica's own parameters. With --step-ms, steps last as long as on an emulated device: replicas sleep, and may
share cores. Give several times the time that the cores need for the steps of all replicas.""",
)
SMALL: dict[str, Any] = {
    "model": {"name": "gpt", "layers": 2, "width": 64, "heads": 2},
    "data": {
        "kind": "text", "sequence_length": 64, "batch_size": 32, "max_bytes": 1_000_000, "held_out": 0.02,
    },
    "optimizer": {"name": "adamw", "lr": 1e-3},
}  # fmt: skip
"""The run that is measured by default: a small GPT on text of the standard library."""


def consistency(
    context: typer.Context,
    target: str = typer.Argument("", metavar="RUN.toml|MODEL", help="A run file, or a model; empty: a small GPT."),
    trust: bool = TRUST,
    rules: list[str] = typer.Option(
        [], "--rule", help="A consistency rule, such as server(ssp=3); may be repeated. Default: nine rules."
    ),
    replicas: int = typer.Option(4, help="Number of replicas; they divide the batch."),
    slow: list[str] = typer.Option(
        ["2x:0.25"], help="Slow replicas: 1:2.0 (replica 1), 2x:0.25 (a quarter of all steps), 2x:turns (one replica "
        "in each step), or none."
    ),
    jitter: float = typer.Option(0.0, help="Relative standard deviation of a step's computing time."),
    seconds: float = typer.Option(20.0, help="Wall time of each training, in seconds."),
    seeds: int = typer.Option(3, help="Number of trainings, each with other initial values and data order."),
    step_ms: float = typer.Option(
        0.0, min=0.0, help="Emulated duration of a step, in ms; 0: the real time of its computing."
    ),
    page: Path | None = typer.Option(
        None, "--page", metavar="FILE", help="Write an HTML page with curves of the losses."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result file."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the result file."),
) -> None:  # fmt: skip
    """Compare consistency rules in equal wall time: samples per second, bytes, staleness, and losses."""
    target, arguments = target_of(context, target, "")
    run = run_of(target, arguments) if target else config.make(overridden(SMALL, arguments), where="the small run")
    from meshwright.bench.consistency import RULES, SlowCase, result_of
    from meshwright.bench.consistency import consistency as measure
    from meshwright.bench.replica_runs import Pace
    from meshwright.report.consistency_page import render_consistency, rows_of

    slow = [text for text in slow if text != "none"]
    cases = [SlowCase(name="", pace=Pace(step_s=step_ms / 1e3))]
    if slow or jitter:
        words = [*slow, *([f"jitter {jitter:g}"] if jitter else [])]
        faults = faults_of(slow, jitter, 0)
        cases.append(SlowCase(name=", ".join(words), pace=Pace(step_s=step_ms / 1e3, faults=faults)))
    counts: dict[str, Any] = {"replicas": replicas, "seconds": seconds, "seeds": seeds}
    named = [argument for text in rules for argument in ("--rule", text)]
    named += [argument for text in slow or ["none"] for argument in ("--slow", text)]
    options = {**counts, "seconds": f"{seconds:g}", "step_ms": f"{step_ms:g}" if step_ms else "",
               "jitter": f"{jitter:g}" if jitter else ""}  # fmt: skip
    command = display.command("bench", "consistency", target, options=options, arguments=[*named, *arguments])
    with display.cursor_kept(), display.progress() as bars:
        runs = measure(run, rules or RULES, cases, **counts, progress=bars)
    result = result_of(run, runs, cases, **counts, command=command)
    if output is not None:
        display.write(output, files.encode_json(result))
    if page is not None:
        display.write(page, render_consistency(result, runs, run.data.batch_size).encode())
    if as_json:
        typer.echo(files.encode_json(result).decode(), nl=False)
        return
    terminal = display.console()
    terminal.print(f"{result.timed}\n")
    rows = rows_of(runs, run.data.batch_size)
    for case in cases:
        terminal.print(f"slow: {case.name}" if case.name else "no replica is slow")
        _print([row for row in rows if row.slow == case.name])
    if page is not None:
        terminal.print(f"-> {page}")


def _print(rows: "Sequence[RuleRow]") -> None:
    titles = ("rule", "samples/s", "of the first", "sent a batch", "held-out loss", "range", "staleness")
    table = display.table(titles, left=("rule", "staleness"))
    for row in rows:
        table.add_row(
            row.rule, f"{row.samples_per_s:.1f}", f"{row.samples_per_s / rows[0].samples_per_s:.2f}",
            units.size(row.bytes_per_batch), row.loss, row.spread, row.shares,
        )  # fmt: skip
    display.console().print(table)
