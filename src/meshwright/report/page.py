"""The content of a plan's report, and its HTML page."""

from typing import Literal

import msgspec

from meshwright.ir.trace import Trace
from meshwright.report import drawing
from meshwright.report.front import WeighedLayout, front_plot
from meshwright.report.template import embedded, rendered
from meshwright.report.timeline import stages_timeline


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


class PageContent(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a plan's report: the request, the verdict with its reason (``sentence``), and the facts behind it.

    ``facts`` are pairs (name, value), and ``layout`` has triples (name, value, meaning). ``trace`` covers one rank of
    each pipeline stage; without a trace the page has no pictures over time. ``front`` has the layouts that no other
    layout beats in time, memory and price together. ``words``: the layout as ``--layout`` reads it.
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
    front: tuple[WeighedLayout, ...] = ()
    words: str = ""
    notes: tuple[str, ...] = ()
    command: str = ""


def render(report: PageContent) -> str:
    """The report as one HTML page that contains its styles, pictures and script. It is light or dark, like the reader's
    system."""
    return rendered("plan.html.j2", pictures(report), report=report, shares=shares(report))


def pictures(report: PageContent, chosen: str = "") -> dict[str, str]:
    """The pictures of a report by name, as HTML; those that there is nothing for are empty. ``chosen``: the words of
    the layout that is marked on the front."""
    trace = report.trace
    return {
        "front": front_plot(report.front, report.memory_limit_bytes, chosen or report.words),
        "timeline": drawing.timeline(trace) if trace else "",
        "timeline_data": embedded(stages_timeline(trace)) if trace else "",
        "over_time": drawing.memory(trace, report.memory_limit_bytes) if trace else "",
        "curve": drawing.curve([(point.devices, point.sequences_per_s) for point in report.scaling if point.layout]),
    }


def shares(report: PageContent) -> dict[str, list[float]]:
    """The percentages of the parts of time and of memory."""
    return {name: _shares(parts) for name, parts in (("time", report.time), ("memory", report.memory))}


def _shares(parts: tuple[StepShare, ...]) -> list[float]:
    """Each part's percentage of the whole."""
    total = sum(part.size for part in parts) or 1.0
    return [100 * part.size / total for part in parts]
