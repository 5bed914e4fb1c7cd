"""``meshwright validate``: compare predictions with a table of measured steps."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from meshwright.cli import display

if TYPE_CHECKING:
    from meshwright.prediction import Choices, Trials, Validation

EPILOG = display.examples(
    "meshwright validate CASES.csv",
    "meshwright validate CASES.csv --software torchtitan",
    "meshwright validate CASES.csv --choose",
    "meshwright validate CASES.csv --learn 3 --repeats 20",
    "meshwright validate CASES.csv --json",
    "meshwright validate --columns",
    note="Rows that cannot be read are left out and listed. The columns are explained in docs/reference/cases.md.",
)


def validate(
    cases: Path | None = typer.Argument(None, metavar="CASES.csv", help="A table with one measured run per row."),
    software: str = typer.Option("", help="Software profile of rows without a profile: a name, or a .toml file."),
    choose: bool = typer.Option(
        False, "--choose", help="Choose a layout from each measured sweep, and judge the choice."
    ),
    learn: int = typer.Option(0, min=0, help="Learn from this number of random runs, and judge the other runs."),
    repeats: int = typer.Option(20, min=1, help="With --learn, how often new runs are drawn."),
    as_json: bool = display.JSON,
    worst: int = typer.Option(10, min=0, help="Number of rows to show, beginning with the largest errors."),
    columns: bool = typer.Option(False, "--columns", help="Explain each column of a table and stop."),
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
    usable, left_out = prediction.read_cases(cases, software)
    summary = prediction.compare(usable, left_out)
    for row in summary.left_out:
        typer.echo(f"left out: {row.case} (line {row.line}): {row.reason}", err=True)
    choices = prediction.choose(usable) if choose else None
    trials = prediction.learning_trials(usable, learn, repeats) if learn else None
    if as_json:
        asked = {"choices": choices, "learning": trials}
        extra = {name: value for name, value in asked.items() if value is not None}
        display.print_json(msgspec.structs.asdict(summary) | extra)
        return
    _print(summary, worst)
    if choices is not None:
        _print_choices(choices)
    if trials is not None:
        _print_trials(trials)


def _print(summary: "Validation", worst: int) -> None:
    terminal = display.console()
    timed = [(row, 100 * (row.predicted_s / row.measured_s - 1)) for row in summary.rows if row.measured_s]
    timed.sort(key=lambda pair: -abs(pair[1]))
    if timed and worst:
        table = display.table(("case", "predicted", "80 %", "measured", "error", "memory"), left=("case",))
        for row, error in timed[:worst]:
            memory = f"{row.predicted_peak_bytes / 2**30:.1f} GiB{'' if row.fits else ', does not fit'}"
            between = f"{row.interval_s.low:.3g}-{row.interval_s.high:.3g}"
            table.add_row(
                row.case, f"{row.predicted_s:.4g} s", between, f"{row.measured_s:.4g} s", f"{error:+.1f} %", memory
            )
        terminal.print(table)
        terminal.print()
    if summary.mape is not None:
        terminal.print(
            f"{len(timed)} runs: mean error {summary.mape:.2f} % (90th percentile {summary.p90:.2f} %, bias "
            f"{summary.bias:+.2f} %{'' if summary.spearman is None else f', rank correlation {summary.spearman:.3f}'})"
        )
        terminal.print(f"one constant efficiency, fitted to these very runs: {summary.baseline_mape:.2f} %")
    if summary.coverage is not None:
        terminal.print(f"inside their interval of 80 %: {summary.coverage:.0%} of the times")
    if summary.memory_mape is not None:
        peaks = sum(row.measured_peak_bytes is not None for row in summary.rows)
        terminal.print(f"memory of {peaks} runs: mean error {summary.memory_mape:.2f} %")
    if summary.oom_balanced_accuracy is not None:
        terminal.print(f"out of memory or not: balanced accuracy {summary.oom_balanced_accuracy:.3f}")
    terminal.print(f"software: {', '.join(summary.software) or 'none'}")
    if summary.left_out:
        terminal.print(f"{len(summary.left_out)} rows were left out")


def _print_choices(choices: "Choices") -> None:
    terminal = display.console()
    if not choices.choices:
        terminal.print("\nno choice: the table has no two setups of one model, batch and number of devices")
        return
    table = display.table(("sweep", "setups", "chosen", "slower than the best"), left=("sweep", "chosen"))
    for choice in sorted(choices.choices, key=lambda each: -(each.slower or 0.0))[:10]:
        slower = "" if choice.slower is None else f"{choice.slower:.1%}"
        table.add_row(
            choice.sweep, f"{choice.layouts}", choice.case, "out of memory" if choice.out_of_memory else slower
        )
    terminal.print()
    terminal.print(table)
    median = "" if choices.median is None else f"; {choices.median:.2f} % slower than the best in the median"
    p90 = "" if choices.p90 is None else f", {choices.p90:.2f} % at the 90th percentile"
    terminal.print(
        f"\n{len(choices.choices)} sweeps: {choices.failed} choices ran out of memory in a measured run{median}{p90}"
    )


def _print_trials(trials: "Trials") -> None:
    def percent(value: float | None) -> str:
        return "none" if value is None else f"{value:.2f} %"

    terminal = display.console()
    if len(trials.software) + len(trials.too_few) > 1:
        terminal.print(f"\nruns of several stacks; each learned by itself: {', '.join(trials.software)}", end="")
        few = f"; with too few runs: {', '.join(trials.too_few)}" if trials.too_few else ""
        terminal.print(few)
    terminal.print(
        f"\nlearned from {trials.learned} random runs, judged on the others, {trials.repeats} draws: mean error "
        f"{percent(trials.mape)} (before learning {percent(trials.zero_shot_mape)})"
    )
    if trials.coverage is not None:
        terminal.print(f"inside their interval of 80 %: {trials.coverage:.0%} of the times")
    if trials.memory_mape is not None:
        terminal.print(f"memory: mean error {trials.memory_mape:.2f} %")
    if trials.oom_balanced_accuracy is not None:
        terminal.print(f"out of memory or not: balanced accuracy {trials.oom_balanced_accuracy:.3f}")
