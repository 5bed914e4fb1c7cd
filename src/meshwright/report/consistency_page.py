"""The page of a comparison of consistency rules: losses over wall time and over samples, and a table."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from meshwright.ir.replica_runs import LossPoint, RuleRun, mean_curve, smoothed
from meshwright.ir.result import Result
from meshwright.ir.units import seconds
from meshwright.report import run_drawing, svg
from meshwright.report.template import rendered

COLORS = 8
BATCHES = 10
"""The number of batches over which losses are averaged."""


class RuleRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a rule in a case: samples per second, bytes sent per batch, the held-out loss at the end (mean and
    range over seeds and replicas), and the fractions of steps by staleness."""

    rule: str
    slow: str
    samples_per_s: float
    bytes_per_batch: float
    held_out: tuple[float, ...]
    diverged: int
    staleness: tuple[tuple[int, float], ...]

    @property
    def loss(self) -> str:
        """The mean held-out loss."""
        return f"{statistics.fmean(self.held_out):.4f}" if self.held_out else ""

    @property
    def spread(self) -> str:
        """The range of the held-out losses, and the number of trainings that diverged."""
        spread = f"{min(self.held_out):.4f} to {max(self.held_out):.4f}" if self.held_out else ""
        return spread + (f"; {self.diverged} diverged" if self.diverged else "")

    @property
    def shares(self) -> str:
        """The fractions of steps by staleness, as text."""
        return ", ".join(f"{steps}: {share:.0%}" for steps, share in self.staleness)


MOST_STALE = 4
"""All steps with at least this staleness are counted together."""


def rows_of(runs: Sequence[RuleRun], batch: int) -> list[RuleRow]:
    """A row for each case and rule, in the order of the runs. ``batch``: the number of samples in a batch."""
    rows = []
    for slow, rule in dict.fromkeys((run.slow, run.rule) for run in runs):
        same = [run for run in runs if (run.slow, run.rule) == (slow, rule)]
        counts = dict.fromkeys(range(MOST_STALE + 1), 0)
        for run in same:
            for steps, count in run.staleness.items():
                counts[min(steps, MOST_STALE)] += count
        total = sum(counts.values())
        rows.append(RuleRow(
            rule=rule, slow=slow,
            samples_per_s=statistics.fmean(run.num_samples / max(run.seconds, run.last_s) for run in same),
            bytes_per_batch=statistics.fmean(run.sent_bytes * batch / max(1, run.num_samples) for run in same),
            held_out=tuple(loss for run in same for loss in run.held_out), diverged=sum(run.diverged for run in same),
            staleness=tuple((steps, count / total) for steps, count in counts.items() if count),
        ))  # fmt: skip
    return rows


def render_consistency(result: Result, runs: Sequence[RuleRun], batch: int) -> str:
    """The comparison as one HTML page that contains its styles and pictures. It is light or dark, like the reader's
    system. ``result``: the result file of ``runs``. ``batch``: the number of samples in a batch."""
    cases, rules = list(dict.fromkeys(run.slow for run in runs)), list(dict.fromkeys(run.rule for run in runs))
    by_case = [[run for run in runs if run.slow == slow] for slow in cases]
    pictures = {
        "over_time": [_curves(same, rules, batch, "time") for same in by_case],
        "over_samples": [_curves(same, rules, batch, "samples") for same in by_case],
        "of_replicas": [[_replicas([run for run in same if run.rule == rule]) for rule in rules] for same in by_case],
    }
    return rendered(
        "consistency.html.j2", {}, **pictures, cases=cases, rules=rules, rows=rows_of(runs, batch), result=result,
        batches=BATCHES, num_seeds=len({run.seed for run in runs}), most_stale=MOST_STALE,
    )  # fmt: skip


def _axis(axis: str) -> tuple[Callable[[LossPoint], float], Callable[[float], str]]:
    if axis == "time":
        return (lambda point: point.time_s), seconds
    return (lambda point: float(point.samples)), "{:,.0f}".format


def _curves(runs: Sequence[RuleRun], rules: Sequence[str], batch: int, axis: str) -> str:
    """The mean curve of each rule over its seeds."""
    place, text = _axis(axis)
    lines = []
    for index, rule in enumerate(rules):
        points = mean_curve([
            [(place(point), point.loss) for point in smoothed(run.ends, BATCHES * batch)]
            for run in runs if run.rule == rule
        ])  # fmt: skip
        style: Any = "dashed" if index >= COLORS else "solid"
        lines.append(run_drawing.PlotLine(name=rule, legend=rule, points=run_drawing.finite(points),
                                          color=index % COLORS, style=style))  # fmt: skip
    return run_drawing.plot(lines, f"loss over {axis}", x_text=text, y_text="{:.3g}".format)


def _replicas(runs: Sequence[RuleRun]) -> str:
    """The losses of each replica over time, with the first seed."""
    run = min(runs, key=lambda run: run.seed)
    place, text = _axis("time")
    alone = len(run.replicas) == 1
    names = {each.replica: "all replicas" if alone else f"replica {each.replica}" for each in run.replicas}
    lines = [
        run_drawing.PlotLine(
            name=names[replica.replica], legend=names[replica.replica], color=replica.replica % COLORS,
            points=svg.thinned(run_drawing.finite([
                (place(point), point.loss) for point in smoothed(replica.ends, BATCHES * replica.samples)
            ])),
        )
        for replica in run.replicas
    ]  # fmt: skip
    return run_drawing.plot(lines, f"loss of every replica under {run.rule}", x_text=text, y_text="{:.3g}".format)
