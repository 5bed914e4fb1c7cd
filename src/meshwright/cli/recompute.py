"""``meshwright recompute``: worked numbers of lectures, done again, with a verdict on each claim."""

from typing import TYPE_CHECKING

import msgspec
import typer
from rich.table import Table

from meshwright.cli import display

if TYPE_CHECKING:
    from meshwright.prediction import Worked

EPILOG = """[bold]Examples[/bold]

  meshwright recompute

  meshwright recompute bubbles

  meshwright recompute allreduce-table --json

Verdicts: agrees, rounds (within 5 %), claim wrong, and of what was measured: we differ.
"""


def recompute(
    name: str = typer.Argument("", metavar="ID", help="One example; default: all of them."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compute the worked numbers that this field is taught with, and say which claims hold."""
    from meshwright import prediction

    names = [name] if name else prediction.worked_names()
    found = []
    bars = display.Bars(display.console())
    bars.begin("computing", len(names))
    try:
        for one in names:
            found.append(prediction.recompute(one))
            bars.advance()
    finally:
        bars.end()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found[0] if name else found)).decode())
        return
    for index, example in enumerate(found):
        if index:
            typer.echo()
        _print(example)


def _print(example: "Worked") -> None:
    terminal = display.console()
    terminal.print(f"{example.id}: {example.about}\n")
    table = Table(box=None, pad_edge=False)
    for title, width in (("claim", 44), ("ours", 34), ("verdict", 11), ("why", 60)):
        table.add_column(title, max_width=width, no_wrap=title == "verdict")
    for line in example.lines:
        table.add_row(line.claim, line.ours, line.verdict, line.why)
    terminal.print(table)


def add_to(app: typer.Typer) -> None:
    """Make it a command."""
    app.command(epilog=EPILOG)(recompute)
