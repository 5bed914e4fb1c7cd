"""The page of a workflow's plan: what it costs by operator, what is beside it, and its run beside the prediction."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from meshwright.ir.units import seconds
from meshwright.report.run_drawing import PlotLine, plot
from meshwright.report.svg import thinned
from meshwright.report.template import rendered

POINTS = 400
"""The most points of a curve."""


class ServeOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator with its variant and workers, and its costs in an hour."""

    name: str
    variant: str
    workers: str
    tiers: str
    workers_usd: float
    links_usd: float


class ServeWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in use, with its planned, simulated and measured utilisation (None: not measured)."""

    name: str
    operator: str
    tier: str
    rate_per_s: float
    planned: float
    simulated: float
    measured: float | None = None


class ServeFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the whole workflow as text: predicted, measured, and measured over predicted."""

    name: str
    predicted: str
    measured: str = ""
    ratio: float | None = None


class ServePage(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the page. ``latencies_s`` maps ``predicted`` and ``measured`` to the latencies of all items."""

    workflow: str
    verdict: Literal["fits", "close"]
    sentence: str
    facts: tuple[tuple[str, str], ...]
    operators: tuple[ServeOperator, ...]
    workers: tuple[ServeWorker, ...]
    beside: tuple[tuple[str, str], ...]
    figures: tuple[ServeFigure, ...]
    latencies_s: Mapping[str, Sequence[float]]
    notes: tuple[str, ...] = ()
    command: str = ""


def render_serve(page: ServePage) -> str:
    """The page as HTML with styles and pictures inside; light or dark, like the reader's system."""
    total = sum(operator.workers_usd + operator.links_usd for operator in page.operators) or 1.0
    return rendered(
        "serve.html.j2", {"latencies": _latencies(page.latencies_s)}, page=page,
        shares=[100 * (operator.workers_usd + operator.links_usd) / total for operator in page.operators],
        measured=any(figure.measured for figure in page.figures),
    )  # fmt: skip


def _latencies(latencies_s: Mapping[str, Sequence[float]]) -> str:
    """For each kind, the part of the items that is done within a latency."""
    lines = []
    for color, (kind, values) in enumerate(latencies_s.items()):
        ordered = sorted(values)
        points = [(value, (index + 1) / len(ordered)) for index, value in enumerate(ordered)]
        style: Literal["solid", "dashed"] = "dashed" if kind == "predicted" else "solid"
        lines.append(PlotLine(name=kind, legend=kind, points=thinned(points, POINTS), color=color, style=style))
    return plot(lines, "items done within a latency", x_text=seconds, y_text="{:.0%}".format, from_zero=True)
