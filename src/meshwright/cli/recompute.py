"""``meshwright recompute``: repeat the calculations of worked examples in lectures, with a verdict on each claim."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display

if TYPE_CHECKING:
    from meshwright.prediction import Worked

EPILOG = display.examples(
    "meshwright recompute",
    "meshwright recompute bubbles",
    "meshwright recompute allreduce-table --json",
    "meshwright recompute softmax-784x10",
    "meshwright recompute alpa-gpt",
    note="Verdicts: agrees; rounds (within 5 %); claim wrong; we differ (a prediction of a measured number is outside "
    "of the allowed difference); not measured (there is no result file). If an example is named, its models are "
    "captured, planned and trained now, which takes up to a minute. Without a name, their lines are read from a result "
    "file, as are all measurements. The examples alpa, alpa-gpt, alpa-moe and alpa-wresnet "
    "plan models for up to 64 devices, which takes long. They are computed only if they are named.",
)


def recompute(
    name: str = typer.Argument("", metavar="ID", help="The example to compute; default: all but the examples of Alpa."),
    results: Path = typer.Option(
        Path("benchmarks/results"), metavar="FOLDER", help="The folder of result files, for measured claims."
    ),
    as_json: bool = display.JSON,
) -> None:
    """Repeat the calculations of worked examples in lectures on parallel deep learning, and say which of their claims
    hold."""
    from meshwright import prediction

    names = [name] if name else prediction.worked_names()
    examples = []
    with display.progress("computing", len(names)) as bars:
        for key in names:
            if key in prediction.SEARCHED:
                examples.append(_planned(key, bars))
            elif name in prediction.CAPTURED:
                examples.append(_captured(key, results))
            else:
                examples.append(prediction.recompute(key, results=results))
            bars.advance()
    if as_json:
        display.print_json(examples[0] if name else examples)
        return
    for index, example in enumerate(examples):
        if index:
            typer.echo()
        _print(example)


def _captured(name: str, results: Path) -> "Worked":
    from meshwright import api, prediction

    return prediction.recompute(name, results=results, captured=api.recompute_captured)


def _planned(name: str, bars: display.Bars) -> "Worked":
    from meshwright import api

    return api.recompute_alpa(name, began=bars.say)


def _print(example: "Worked") -> None:
    terminal = display.console()
    terminal.print(f"{example.id}: {example.about}\n")
    titles = ("claim", "ours", "verdict", "why")
    table = display.table(titles, left=titles, wrapped=("claim", "ours", "why"))
    for column, width in zip(table.columns, (44, 34, 12, 60), strict=True):
        column.max_width = width
    for line in example.lines:
        table.add_row(line.claim, line.ours, line.verdict, line.why)
    terminal.print(table)
