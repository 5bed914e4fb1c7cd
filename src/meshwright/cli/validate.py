"""``meshwright validate``: compare predictions with a table of measured steps."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display

if TYPE_CHECKING:
    from meshwright.prediction import Validation

EPILOG = display.examples(
    "meshwright validate CASES.csv",
    "meshwright validate CASES.csv --json",
    "meshwright validate --columns",
    note="Rows that cannot be read are left out and listed. The columns are explained in docs/reference/cases.md.",
)


def validate(
    cases: Path | None = typer.Argument(None, metavar="CASES.csv", help="A table: one measured run a row."),
    as_json: bool = display.JSON,
    worst: int = typer.Option(10, min=0, help="How many rows to show, those with the largest errors first."),
    columns: bool = typer.Option(False, "--columns", help="Say what each column of a table means, and stop."),
) -> None:
    """Predict the runs of a table, and compare the predictions with the measurements."""
    from meshwright import prediction

    if columns:
        terminal = display.console()
        table = display.table()
        for name, meaning in {**prediction.COLUMNS, **prediction.OPTIONAL}.items():
            table.add_row(name, meaning + (" (may be left out)" if name in prediction.OPTIONAL else ""))
        terminal.print(table)
        return
    if cases is None:
        raise typer.BadParameter("give a table: meshwright validate CASES.csv")
    summary = prediction.validate(cases)
    for row in summary.left_out:
        typer.echo(f"left out: {row.case} (line {row.line}): {row.reason}", err=True)
    if as_json:
        display.print_json(summary)
        return
    _print(summary, worst)


def _print(summary: "Validation", worst: int) -> None:
    terminal = display.console()
    timed = [(row, 100 * (row.predicted_s / row.measured_s - 1)) for row in summary.rows if row.measured_s]
    timed.sort(key=lambda pair: -abs(pair[1]))
    if timed and worst:
        table = display.table(("case", "predicted", "measured", "error", "memory"), left=("case",))
        for row, error in timed[:worst]:
            memory = f"{row.predicted_peak_bytes / 2**30:.1f} GiB{'' if row.fits else ', does not fit'}"
            table.add_row(row.case, f"{row.predicted_s:.4g} s", f"{row.measured_s:.4g} s", f"{error:+.1f} %", memory)
        terminal.print(table)
        terminal.print()
    if summary.mape is not None:
        terminal.print(
            f"{len(timed)} runs: mean error {summary.mape:.2f} % (90th percentile {summary.p90:.2f} %, bias "
            f"{summary.bias:+.2f} %{'' if summary.spearman is None else f', rank correlation {summary.spearman:.3f}'})"
        )
        terminal.print(f"one constant efficiency, fitted to these very runs: {summary.baseline_mape:.2f} %")
    if summary.oom_balanced_accuracy is not None:
        terminal.print(f"out of memory or not: balanced accuracy {summary.oom_balanced_accuracy:.3f}")
    if summary.left_out:
        terminal.print(f"{len(summary.left_out)} rows were left out")
