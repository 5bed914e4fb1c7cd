"""The content of a plan's report, and its HTML page."""

from typing import Literal

import msgspec

from meshwright.ir.trace import Trace
from meshwright.report import drawing
from meshwright.report.template import rendered


class StepShare(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step's time or memory, with its meaning. ``size`` is in seconds or bytes."""

    name: str
    size: float
    meaning: str = ""


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout for a number of devices; ``layout`` is empty if none fits."""

    devices: int
    step_s: float
    sequences_per_s: float
    usd_per_1000_sequences: float | None
    layout: str


class WeighedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Another layout, and the reason why it was not chosen."""

    layout: str
    step_s: float
    peak_bytes: float
    verdict: str
    usd: float | None
    why: str


class PageContent(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a plan's report: the request, the verdict with its reason (``sentence``), and the facts behind it.

    ``facts`` are pairs (name, value), and ``layout`` has triples (name, value, meaning). ``trace`` covers one rank of
    each pipeline stage; without a trace the page has no pictures over time.
    """

    model: str
    cluster: str
    devices: int
    verdict: Literal["fits", "marginal", "does not fit"]
    sentence: str
    facts: tuple[tuple[str, str], ...]
    layout: tuple[tuple[str, str, str], ...]
    time: tuple[StepShare, ...]
    memory: tuple[StepShare, ...]
    memory_limit_bytes: float
    trace: Trace | None = None
    scaling: tuple[SweepPoint, ...] = ()
    alternatives: tuple[WeighedLayout, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""


def render(report: PageContent) -> str:
    """The report as one HTML page that contains its styles and pictures. It is light or dark, like the reader's
    system."""
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


def _shares(parts: tuple[StepShare, ...]) -> list[float]:
    """Each part's percentage of the whole."""
    total = sum(part.size for part in parts) or 1.0
    return [100 * part.size / total for part in parts]
