"""``meshwright verify``: whether a model trained in parallel is the model trained in one process."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.table import Table

from meshwright.cli import display
from meshwright.cli.plan import DP, STRICT, TARGET, TP, run_of
from meshwright.cli.train import EXTRA
from meshwright.ir.run import Run

if TYPE_CHECKING:
    from meshwright.api import Comparison

EPILOG = """[bold]Examples[/bold]

  meshwright verify gpt --tp 2

  meshwright verify RUN.toml --dp 2 --tp 2 --steps 5

The exit code is 1 where a difference is larger than is allowed.
"""


def verify(
    context: typer.Context,
    target: str = TARGET,
    dp: int | None = DP,
    tp: int | None = TP,
    strict: bool = STRICT,
    steps: int = typer.Option(3, min=1, help="Training steps to compare."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Train in parallel and in one process, both in float64, and compare forward, backward and update."""
    run = run_of(target, dp, tp, context.args, strict=strict)
    from meshwright import api

    if api.launched():
        rows = verify_rank(run, steps)
    else:
        directory = Path(tempfile.mkdtemp(prefix="meshwright-verify-"))
        num_ranks = run.num_ranks(api.num_devices())
        try:
            rows = api.run_ranks(verify_rank, run, steps, num_ranks=num_ranks, directory=directory)
        finally:
            display.restore_cursor()
        shutil.rmtree(directory)  # after an error it stays: it holds the ranks' output
    if api.launched_rank() == 0:
        _print(rows, as_json)
    return 0 if all(row.ok for row in rows) else 1


def verify_rank(run: Run, steps: int) -> "tuple[Comparison, ...]":
    """What every rank runs."""
    from meshwright import api

    with display.shown(api.launched_rank()) as progress:
        return api.verify_run(run, steps, progress)


def _print(rows: "tuple[Comparison, ...]", as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    table = Table(box=None, pad_edge=False)
    for title in ("", "compared", "largest difference", "allowed", "at"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        result = "pass" if row.ok else "FAIL"
        table.add_row(result, row.quantity, f"{row.difference:.2e}", f"{row.allowed:.2e}", row.where)
    display.console().print(table)


def add_to(app: typer.Typer) -> None:
    """Make it a command."""
    app.command(context_settings=EXTRA, epilog=EPILOG)(verify)
