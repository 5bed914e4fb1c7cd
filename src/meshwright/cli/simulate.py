"""``meshwright simulate``: simulate a step of a plan, rank by rank, without running it."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display
from meshwright.cli.plan import CLUSTER, DP, RANKS, TARGET, TP, refuse, run_of
from meshwright.cli.replicas import faults_of, show_rules
from meshwright.cli.trust import TRUST
from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.pipeline import CHUNKED
from meshwright.ir.summary import RankTimes, summarize
from meshwright.ir.trace import Trace
from meshwright.report.trace_event import trace_events

if TYPE_CHECKING:
    from meshwright.api import ComparedSchedules

EPILOG = display.examples(
    "meshwright simulate gpt --dp 2",
    "meshwright simulate RUN.toml --layout.pp 4 --layout.microbatches 8 --ranks 4 --slow 2=1.3",
    "meshwright simulate gpt --tp 2 --trace step.json     for ui.perfetto.dev",
    "meshwright simulate gpt --layout.pp 2 --layout.microbatches 8 --schedule 1f1b --schedule zb-h1 --jitter 0.3",
    'meshwright simulate gpt --replicas 4 --consistency "server(ssp=3)" --consistency "local(16)" --slow 2x:0.25',
)


def simulate(
    context: typer.Context,
    target: str = TARGET,
    dp: int | None = DP,
    tp: str | None = TP,
    trust: bool = TRUST,
    ranks: int = RANKS,
    cluster: str = CLUSTER,
    contention: bool = typer.Option(False, "--contention", help="Let transfers that share a link share its rate."),
    replicas: int = typer.Option(0, min=0, help="Number of replicas, for --consistency; 0: the run file's number."),
    consistency: list[str] = typer.Option(
        [],
        "--consistency",
        help="A consistency rule that joins replicas, such as server(ssp=3). May be repeated to compare rules.",
    ),
    steps: int = typer.Option(200, min=1, help="Steps of each replica, with --consistency."),
    slow: list[str] = typer.Option(
        [],
        "--slow",
        help="A slow rank, as RANK=FACTOR: 2=1.3. With replicas: a slow replica (1:2.0), a quarter of all steps slow "
        "(2x:0.25), or one slow replica in each step (2x:turns). May be repeated.",
    ),
    jitter: float = typer.Option(
        0.0, help="Relative standard deviation of every piece of computing (with replicas: of every step)."
    ),
    seed: int = typer.Option(0, help="Seed of jitter and of random slow steps."),
    schedule: list[str] = typer.Option(
        [],
        "--schedule",
        help="A pipeline schedule, such as message-driven. Repeat it to compare schedules under --jitter.",
    ),
    seeds: int = typer.Option(20, min=1, help="Number of steps to simulate per schedule, with --schedule."),
    trace: Path | None = typer.Option(None, "--trace", help="Write a trace file for Perfetto."),
    as_json: bool = typer.Option(False, "--json", help="Print the trace as JSON."),
) -> None:
    """Simulate one training step of a model under its plan: computing, communication, waiting and memory of every
    rank. With --schedule: several steps under each of several pipeline schedules. With --replicas or --consistency:
    many steps of replicas that a consistency rule joins."""
    asked = [f"--layout.replicas={replicas}"] * (replicas > 0)
    asked += [f"--layout.consistency={consistency[0]}"] if consistency else []
    run = run_of(target, [*asked, *context.args], dp, tp, cluster)
    if replicas or consistency:
        refuse(context, ("schedule", "seeds"), "schedules are compared without replicas")
        refuse(context, ("contention",), "letters between replicas always share links")
        rules = consistency or [run.layout.consistency]
        show_rules(run, rules, ranks, faults_of(slow, jitter, seed), steps, trace, as_json)
        return
    refuse(context, ("steps",), "one step is simulated, without replicas")
    factors = dict(map(_factor, slow))
    from meshwright import api

    if schedule:
        refuse(context, ("trace",), "a trace is that of one schedule")
        runs = [run_of(target, [*context.args, *_of_schedule(name)], dp, tp, cluster) for name in schedule]
        numbers = range(seed, seed + seeds)
        with display.progress("capturing, planning and simulating"):
            compared = api.compare_schedules_of_run(
                runs, ranks, contention=contention, slow=factors, jitter=jitter, seeds=numbers
            )
        if as_json:
            typer.echo(files.encode_json(compared).decode(), nl=False)
        else:
            _print_schedules(compared, seeds)
        return
    refuse(context, ("seeds",), "one step is simulated, without --schedule")
    with display.progress("capturing, planning and simulating"):
        simulated = api.simulate_run(run, ranks, contention=contention, slow=factors, jitter=jitter, seed=seed)
    if trace is not None:
        display.write(trace, trace_events(simulated))
    if as_json:
        typer.echo(files.encode_json(simulated).decode(), nl=False)
        return
    _print(simulated, summarize(simulated))
    if trace is not None:
        display.console().print(f"\n{trace}: open it at ui.perfetto.dev")


def _of_schedule(name: str) -> list[str]:
    """The options that select a schedule. Chunks and the limit of micro-batches in flight are reset if the schedule
    does not use them."""
    chunks = [] if name in CHUNKED else ["--layout.chunks=1"]
    in_flight = [] if name == "message-driven" else ["--layout.in_flight=0"]
    return [f"--layout.schedule={name}", *chunks, *in_flight]


def _factor(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise FileFormatError(f"{text!r} is not RANK=FACTOR", where="--slow", remedy="write 2=1.3") from None


def _print_schedules(compared: "ComparedSchedules", seeds: int) -> None:
    titles = ("schedule", "without faults", "mean step", f"slowest of {seeds}", "peak memory")
    table = display.table(titles, left=("schedule",))
    for times in compared.schedules:
        cells = [f"{seconds * 1e3:.4g} ms" for seconds in (times.quiet_s, times.mean_s, times.worst_s)]
        table.add_row(times.schedule, *cells, f"{times.peak_bytes / 2**30:.3g} GiB")
    display.console().print(table)


def _print(trace: Trace, times: tuple[RankTimes, ...]) -> None:
    terminal = display.console()
    terminal.print(f"a step takes {trace.duration_s * 1e3:.4g} ms")
    table = display.table(("rank", "computing", "exposed communication", "hidden", "bubble", "peak memory"))
    for rank_times in times:
        parts = (rank_times.compute_s, rank_times.exposed_s, rank_times.hidden_s, rank_times.bubble_s)
        cells = [f"{part * 1e3:.4g} ms" for part in parts]
        table.add_row(str(rank_times.rank), *cells, f"{rank_times.peak_bytes / 2**30:.3g} GiB")
    terminal.print(table)
