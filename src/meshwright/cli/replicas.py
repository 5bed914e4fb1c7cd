"""``meshwright simulate --replicas``: replicas of a plan under consistency rules, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from meshwright.cli import display
from meshwright.errors import FileFormatError, LayoutError
from meshwright.ir import files
from meshwright.ir.run import Run
from meshwright.ir.trace import Trace
from meshwright.report.trace_event import trace_events
from meshwright.simulate.faults import Faults, ReplicaFaults

if TYPE_CHECKING:
    from meshwright.planner.replicas import RuleComparison, RuleTimes

SLOW_REMEDY = "write 1:2.0 (replica 1), 2x:0.25 (a quarter of all steps) or 2x:turns (one replica in each step)"


def show_rules(
    run: Run, rules: Sequence[str], ranks: int, faults: ReplicaFaults, steps: int, trace: Path | None, as_json: bool
) -> None:
    """Print times, staleness and bytes under each rule. ``trace``: the file for the trace, if there is only one rule.

    Raises:
        LayoutError: a trace is asked for, and there are several rules.
    """
    if trace is not None and len(rules) > 1:
        raise LayoutError(f"a trace of {len(rules)} rules", where="--trace", remedy="name one --consistency")
    from meshwright import api

    with display.progress("capturing, planning and simulating") as bars:
        comparison = api.compare_rules_of_run(run, rules, ranks, faults=faults, steps=steps, progress=bars.say)
    if trace is not None:
        display.write(trace, trace_events(comparison.rows[-1].times.trace))
    if as_json:
        nothing = Trace(source="simulated")
        rows = tuple(
            msgspec.structs.replace(row, times=msgspec.structs.replace(row.times, trace=nothing))
            for row in comparison.rows
        )
        typer.echo(files.encode_json(msgspec.structs.replace(comparison, rows=rows)).decode(), nl=False)
        return
    _print(comparison)
    if trace is not None:
        display.console().print(f"\n{trace}: open it at ui.perfetto.dev")


def faults_of(slow: Sequence[str], jitter: float, seed: int) -> ReplicaFaults:
    """The faults that ``--slow``, ``--jitter`` and ``--seed`` describe.

    Raises:
        FileFormatError: a text cannot be read.
        LayoutError: a number is out of range.
    """
    steady: dict[int, float] = {}
    sometimes: list[tuple[float, float]] = []
    in_turn: list[float] = []
    for text in slow:
        replica_text, _, value = text.partition(":")
        try:
            if replica_text.endswith("x"):
                if value == "turns":
                    in_turn.append(float(replica_text[:-1]))
                else:
                    sometimes.append((float(replica_text[:-1]), float(value)))
            else:
                steady[int(replica_text)] = float(value)
        except ValueError:
            raise FileFormatError(f"{text!r} cannot be read as a slow replica", where="--slow", remedy=SLOW_REMEDY) \
                from None  # fmt: skip
    each = Faults(slow=steady, jitter=jitter, seed=seed)
    return ReplicaFaults(each=each, sometimes=tuple(sometimes), in_turn=tuple(in_turn))


def _print(comparison: "RuleComparison") -> None:
    terminal = display.console()
    alone, size = f"{comparison.alone_s * 1e3:.4g} ms", _size(comparison.num_bytes)
    terminal.print(
        f"{comparison.num_replicas} replicas of {comparison.layout or 'one rank'}: the step of one takes {alone} "
        f"alone; each has {size} of parameters to exchange, and all {comparison.batch_size} samples a step"
    )
    titles = ("rule", "a step", "a sample", "faster", "waiting", "staleness", "most", "sent", "by a server")
    table = display.table(titles, left=("rule",))
    for row in comparison.rows:
        table.add_row(*_cells(row))
    terminal.print(table)
    terminal.print("A step: as many steps as there are replicas. Sent: by a replica in a step. Of the loss, it says "
                   "nothing.")  # fmt: skip


def _cells(row: "RuleTimes") -> tuple[str, ...]:
    times = row.times
    served = sum(times.server_bytes) / max(1, len(times.server_bytes)) / times.num_steps * times.num_replicas
    return (
        times.rule, f"{times.step_s * 1e3:.4g} ms", f"{row.sample_s * 1e3:.4g} ms", f"{row.speedup:.2f} x",
        f"{times.waited_share:.0%}", f"{times.mean_staleness:.2f}", f"{max(times.staleness, default=0)}",
        _size(times.bytes_per_step), _size(served) if times.server_bytes else "",
    )  # fmt: skip


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.4g} MiB" if num_bytes else "0"
