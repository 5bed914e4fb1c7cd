"""``meshwright verify``: check that training in parallel gives the same model as training in one process."""

from typing import TYPE_CHECKING

import typer

from meshwright.cli import display
from meshwright.cli.plan import DP, STRICT, TARGET, TP, run_of
from meshwright.cli.trust import TRUST

if TYPE_CHECKING:
    from meshwright.api import Verification

EPILOG = display.examples(
    "meshwright verify gpt --tp 2",
    "meshwright verify RUN.toml --dp 2 --tp 2 --steps 5",
    note="The exit code is 1 where a difference is larger than is allowed.",
)


def verify(
    context: typer.Context,
    target: str = TARGET,
    dp: int | None = DP,
    tp: str | None = TP,
    strict: bool = STRICT,
    trust: bool = TRUST,
    steps: int = typer.Option(3, min=1, help="Training steps to compare."),
    device: str = typer.Option("cpu", help="Where both sides run: cpu, or cuda (each rank's own GPU)."),
    as_json: bool = display.JSON,
) -> int:
    """Train in parallel and in one process, both in float64, and compare forward, backward and update."""
    run = run_of(target, context.args, dp, tp, strict=strict)
    from meshwright import api

    if api.launched():
        rows = display.on_rank(api.verify_run, run, steps, device)
    else:
        num_ranks = run.num_ranks(api.num_devices())
        with display.cursor_kept():
            rows = api.run_ranks(display.on_rank, api.verify_run, run, steps, device, num_ranks=num_ranks)
    if api.launched_rank() == 0:
        _print(rows, as_json)
    return 0 if all(row.ok for row in rows) else 1


def _print(rows: "tuple[Verification, ...]", as_json: bool) -> None:
    if as_json:
        display.print_json(rows)
        return
    titles = ("", "compared", "largest difference", "allowed", "at")
    table = display.table(titles, left=titles)
    for row in rows:
        result = "pass" if row.ok else "FAIL"
        table.add_row(result, row.quantity, f"{row.difference:.2e}", f"{row.allowed:.2e}", row.where)
    display.console().print(table)
