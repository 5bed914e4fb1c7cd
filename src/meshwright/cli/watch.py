"""``meshwright watch RUN``: show how a run is doing, here or on another host, while it trains."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.cli import display
from meshwright.errors import FileFormatError
from meshwright.report.health import RankHealth, RunHealth, read_health
from meshwright.report.health_server import HealthServer, ask_health

EPILOG = display.examples(
    "meshwright watch runs/gpt",
    "meshwright watch runs/gpt --once --json",
    "meshwright watch runs/gpt --serve 127.0.0.1:9464",
    "ssh -L 9464:127.0.0.1:9464 node7     then: meshwright watch 127.0.0.1:9464",
    note="The folder of a run tells all, also on another host that shares it. Without a shared folder, --serve tells "
    "it over HTTP to who has the token: /health, and /metrics for Prometheus. The exit code is 1 where the run has "
    "failed.",
)
TOKEN = "MESHWRIGHT_TOKEN"
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32
SHOWN = ("loss", "grad_norm", "lr", "step_s", "data_s", "mfu")
"""Metrics that are shown first, in this order."""
_COLORS = {"ok": "green", "behind": "yellow", "quiet": "yellow", "failed": "red", "ended": "default"}


def watch(
    run: str = typer.Argument(..., metavar="RUN", help="The directory of a run, or HOST:PORT of --serve."),
    once: bool = typer.Option(False, "--once", help="Show the state once and stop."),
    every: float = typer.Option(1.0, min=0.05, help="Seconds between two looks."),
    serve: str = typer.Option("", metavar="HOST:PORT", help="Tell others over HTTP, in place of showing it here."),
    token: str = typer.Option("", help=f"The token of --serve; default: {TOKEN}, or a new random one."),
    as_json: bool = display.JSON,
) -> int:
    """Show the progress of a run, its newest metrics, and what each rank is doing and since when."""
    token = token or os.environ.get(TOKEN, "")
    look = _looker(run, token)
    if serve:
        _serve(serve, run, token or secrets.token_hex(16), look, shows_token=not token)
        return 0
    health = look()
    if as_json:
        display.print_json(health)
    elif once or not display.console().is_terminal:
        display.console().print(rendered(health))
    else:
        health = _followed(look, health, every)
    return 1 if health.state == "failed" else 0


def _looker(run: str, token: str) -> Callable[[], RunHealth]:
    """The function that looks at the run: in its folder, or at an address."""
    host, _, port = run.rpartition(":")
    if host and port.isdecimal() and not Path(run).exists():
        return lambda: ask_health(run, token)
    return lambda: read_health(Path(run))


def _serve(address: str, run: str, token: str, look: Callable[[], RunHealth], *, shows_token: bool) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        remedy = "write 127.0.0.1:9464, or another address of this machine"
        raise FileFormatError(f"{address!r} is no address and port", where="--serve", remedy=remedy)
    look()  # a wrong directory is an error now
    server = HealthServer(host.strip("[]"), int(port), token, look)
    terminal = display.console()
    terminal.print(f"{run} is told at http://{server.address}/health and /metrics, until Ctrl-C")
    if shows_token:
        terminal.print(f"its token, for {TOKEN} where you watch: {token}")
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        terminal.print("warning: others on the network can read what is sent; ssh -L needs only 127.0.0.1")
    try:
        server.run()
    finally:
        server.close()


def _followed(look: Callable[[], RunHealth], health: RunHealth, every: float) -> RunHealth:
    """Show the run until it ends."""
    with Live(rendered(health), console=display.console(), auto_refresh=False) as live:
        while health.state in ("starting", "running"):
            time.sleep(every)
            health = look()
            live.update(rendered(health), refresh=True)
    return health


def rendered(health: RunHealth) -> RenderableType:
    """The state of a run for a terminal."""
    head = f"{health.name}: {health.state}"
    if health.steps:
        head += f", step {health.step:,} of {health.steps:,}"
    if health.left_s is not None:
        head += f", {_time(health.left_s)} left"
    parts: list[RenderableType] = [Text(f"{head}{f'  ({health.where})' if health.where else ''}")]
    if health.steps and display.console().is_terminal:
        parts.append(ProgressBar(total=health.steps, completed=min(health.step, health.steps), width=60))
    parts += [Text(line) for line in _metric_lines(health)]
    if health.ranks:
        parts.append(_rank_table(health.ranks))
    return Group(*parts)


def _metric_lines(health: RunHealth) -> list[str]:
    names = [*(name for name in SHOWN if name in health.metrics), *(n for n in health.metrics if n not in SHOWN)]
    lines = ["  ".join(f"{name} {health.metrics[name]:.4g}" for name in names)] if names else []
    if health.held_out:
        lines.append("held out: " + "  ".join(f"{name} {value:.4g}" for name, value in health.held_out.items()))
    if len(health.losses) > 1:
        lines.append(f"loss {_curve(health.losses)} of the last {len(health.losses)} steps")
    return lines


def _rank_table(ranks: tuple[RankHealth, ...]) -> Table:
    replicas = any(rank.replica for rank in ranks)
    titles = (*(("replica",) if replicas else ()), "rank", "state", "does", "no news for", "problem")
    table = display.table(titles, left=("state", "does", "problem"), wrapped=("problem",))
    for each in ranks:
        state = Text(each.state, style=_COLORS[each.state])
        cells = (*((str(each.replica),) if replicas else ()), str(each.rank), state, each.doing, _time(each.quiet_s))
        table.add_row(*cells, Text(each.problem))
    return table


def _curve(values: tuple[float, ...]) -> str:
    """The values as a line of small bars. Values that are not finite are blank."""
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    step = max(1, -(-len(values) // WIDTH))
    return "".join(BARS[round((value - low) * scale)] if abs(value) < float("inf") else " " for value in values[::step])


def _time(seconds: float) -> str:
    """A time as text: ``4 s``, ``3 min``, ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
