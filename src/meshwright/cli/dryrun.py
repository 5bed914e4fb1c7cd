"""``meshwright dryrun``: run a plan's step on fake tensors of GPUs that are not there."""

from typing import TYPE_CHECKING

import typer

from meshwright.cli import display
from meshwright.cli.plan import DP, TARGET, TP, run_of
from meshwright.cli.trust import TRUST
from meshwright.ir import files

if TYPE_CHECKING:
    from meshwright.ir.dry_run import DryRun

EPILOG = display.examples(
    "meshwright dryrun gpt --cluster h100-dgx --ranks 8 --dp 4 --tp 2",
    "meshwright dryrun RUN.toml --cluster a100-80gb-dgx-hdr200x8 --ranks 256 --rank 0 --rank 255",
    note="The exit code is 1 where something would break, wait or not fit.",
)


def dryrun(
    context: typer.Context,
    target: str = TARGET,
    dp: int | None = DP,
    tp: str | None = TP,
    trust: bool = TRUST,
    ranks: int = typer.Option(0, help="Number of ranks of the job; 0: what the layout asks for, or the cluster has."),
    rank: list[int] = typer.Option(
        [],
        "--rank",
        min=0,
        help="A rank to run. Several are possible; default: all of up to 16, else those that differ.",
    ),
    cluster: str = typer.Option("h100-dgx", help="A name of `meshwright clusters` with GPUs, or a .toml file."),
    as_json: bool = display.JSON,
) -> int:
    """Run two steps of each rank on fake tensors of a cluster's GPUs, without having them: what would break, wait for
    the device, never end, or not fit."""
    run = run_of(target, context.args, dp, tp, cluster)
    from meshwright import api

    with display.progress("capturing and planning") as bars:
        report = api.dry_run_of(run, ranks, rank, bars.say)
    if as_json:
        typer.echo(files.encode_json(report).decode(), nl=False)
    else:
        _print(report)
    return 0 if report.clean else 1


def _print(report: "DryRun") -> None:
    terminal = display.console()
    terminal.print(f"{report.model} on {report.world_size} x {report.device} ({report.cluster}): {report.layout}")
    titles = ("rank", "messages", "collectives", "peak memory", "predicted", "deviation")
    table = display.table(titles)
    for each in report.ranks:
        sizes = (f"{size / 2**20:,.1f} MiB" for size in (each.peak_bytes, each.predicted_bytes))
        table.add_row(str(each.rank), str(each.messages), str(each.collectives), *sizes, f"{each.deviation:+.1%}")
    terminal.print(table)
    if not report.matched:
        terminal.print("not all ranks were run: their messages and collectives were not compared")
    for finding in report.findings:
        at = ", ".join(filter(None, (finding.where, finding.moment, f"rank {' '.join(map(str, finding.ranks))}")))
        times = f" ({finding.times} times)" if finding.times > 1 else ""
        terminal.print(f"{finding.kind}: {finding.what}{times}\n  at {at}")
    for region in report.unchecked:
        terminal.print(f"not checked: what is inside of opaque region {region}")
    if report.clean:
        terminal.print("clean: nothing breaks, waits for the device, or does not fit")
