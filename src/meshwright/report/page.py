"""What a report of a plan says, and the HTML page that says it."""

from typing import Literal

import msgspec

from meshwright.ir.trace import Trace
from meshwright.report import drawing
from meshwright.report.template import rendered


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a whole, with what it means; ``size`` in seconds or bytes."""

    name: str
    size: float
    meaning: str = ""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The best that a number of devices can do; ``layout`` is empty where nothing fits."""

    devices: int
    step_s: float
    sequences_per_s: float
    usd_per_1000_sequences: float | None
    layout: str


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another layout, and what speaks against it."""

    layout: str
    step_s: float
    peak_bytes: float
    verdict: str
    usd: float | None
    why: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it is told: what was asked, the verdict with its reason, and what it rests on.

    ``facts`` are names and values, ``layout`` names, values and meanings. ``trace`` is of one rank of each pipeline
    stage; without one nothing is drawn over time.
    """

    model: str
    cluster: str
    devices: int
    verdict: Literal["fits", "marginal", "does not fit"]
    sentence: str
    facts: tuple[tuple[str, str], ...]
    layout: tuple[tuple[str, str, str], ...]
    time: tuple[Part, ...]
    memory: tuple[Part, ...]
    memory_limit_bytes: float
    trace: Trace | None = None
    scaling: tuple[Point, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""


def render(report: Report) -> str:
    """The report as one HTML page: styles and pictures are in it, light or dark as the reader's system is."""
    trace = report.trace
    return rendered(
        "plan.html.j2",
        {
            "timeline": drawing.timeline(trace) if trace else "",
            "over_time": drawing.memory(trace, report.memory_limit_bytes) if trace else "",
            "curve": drawing.curve(
                [(point.devices, point.sequences_per_s) for point in report.scaling if point.layout]
            ),
        },
        report=report,
        shares={name: _shares(parts) for name, parts in (("time", report.time), ("memory", report.memory))},
    )


def _shares(parts: tuple[Part, ...]) -> list[float]:
    """By part, its percentage of the whole."""
    total = sum(part.size for part in parts) or 1.0
    return [100 * part.size / total for part in parts]
