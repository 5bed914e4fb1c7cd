"""Pictures of a run as SVG: predicted and measured timelines of every rank, and lines over time or steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from meshwright.ir.trace import COPY, MemorySample, Span, Trace
from meshwright.ir.units import seconds, size
from meshwright.report import svg

MOST_SPANS = 6000
"""The largest number of spans drawn; longer timelines are cut at the end."""
_LEFT, _RIGHT = 132, 10
LANES = (("compute", 20, "compute"), ("wait", 6, "wait"), ("communication", 6, "comm"))
"""Streams of a rank from top to bottom: name, height of the lane, and CSS class."""
_GROUP = sum(height + 2 for _, height, _ in LANES) + 4
_CHARACTER = 6.4


class PlotLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a plot: points (x, y) with ascending x, its colour (0 to 7), its style, and its text in the legend
    (empty: the line is not in the legend). ``only_dots``: the points are not joined."""

    name: str
    legend: str
    points: list[tuple[float, float]]
    color: int
    style: Literal["solid", "dashed"] = "solid"
    stairs: bool = False
    dots: bool = False
    only_dots: bool = False


def lane_of(stream: str) -> str:
    """The lane of a stream; waiting for data is drawn where other waits are, and copies where communication is."""
    return {"data": "wait", COPY: "communication"}.get(stream, stream)


def begun_at_zero(trace: Trace) -> Trace:
    """The trace, shifted so that its step starts at time 0, without the copies that were done before it."""
    shifted = trace.shifted(-trace.start_s)
    spans = (
        msgspec.structs.replace(span, start_s=max(0.0, span.start_s)) if span.start_s < 0.0 else span
        for span in shifted.spans if span.end_s >= 0.0
    )  # fmt: skip
    return msgspec.structs.replace(shifted, spans=tuple(spans))


def timelines(traces: Mapping[str, Trace]) -> str:
    """The timelines of every rank on a common time scale. ``traces`` maps a name, such as predicted or measured, to a
    trace. The traces of a rank are drawn one below the other. Each has a lane for compute, for waits and for
    communication."""
    drawn = {name: begun_at_zero(trace) for name, trace in traces.items()}
    ranks = sorted({rank for trace in drawn.values() for rank in trace.ranks})
    whole_s = max(trace.duration_s for trace in drawn.values())
    starts = sorted(span.start_s for trace in drawn.values() for span in trace.spans)
    until_s = starts[MOST_SPANS] if len(starts) > MOST_SPANS else whole_s
    scale = (svg.WIDTH - _LEFT - _RIGHT) / (until_s or 1.0)
    each = _GROUP * len(drawn) + 10
    bottom = each * len(ranks) + 4
    cut = f", the first {seconds(until_s)} of {seconds(whole_s)}" if until_s < whole_s else ""
    label = f"timeline of {len(ranks)} ranks, {' over '.join(drawn)}{cut}"
    parts = []
    for row, rank in enumerate(ranks):
        top = each * row + 4
        parts.append(svg.text(0, top + 15, f"rank {rank}", "start", "strong"))
        if row:
            parts.append(svg.line("grid", 0, top - 5, svg.WIDTH, top - 5))
        for index, (name, trace) in enumerate(drawn.items()):
            above = top + _GROUP * index
            parts.append(svg.text(_LEFT - 8, above + 15, name, "end"))
            spans = [span for span in trace.spans if span.rank == rank and span.start_s <= until_s]
            parts += _lanes(spans, name, above, scale, until_s)
    for name, trace in drawn.items():
        x = _LEFT + scale * min(trace.duration_s, until_s)
        title = f"the {name} step ends after {seconds(trace.duration_s)}"
        parts.append(svg.line("end", x, 0, x, bottom, title))
    parts.append(svg.line("axis", _LEFT, bottom, svg.WIDTH - _RIGHT, bottom))
    for at_s in marks(0.0, until_s):
        anchor = "end" if scale * at_s > svg.WIDTH - _LEFT - 40 else "middle"
        parts.append(svg.text(_LEFT + scale * at_s, bottom + 18, seconds(at_s) if at_s else "0", anchor))
    return svg.picture(bottom + 26, label, parts)


def memory_lines(traces: Mapping[str, Trace]) -> str:
    """The memory of every rank over a step, or of some ranks if there are many. A rank has one line per trace; the
    lines of the last trace are solid. Empty if no trace has samples."""
    drawn = {name: begun_at_zero(trace) for name, trace in traces.items() if trace.memory}
    if not drawn:
        return ""
    ranks = svg.some_of(sorted({sample.rank for trace in drawn.values() for sample in trace.memory}))
    lines = []
    for name, trace in drawn.items():
        last = name == list(drawn)[-1]
        for color, rank in enumerate(ranks):
            samples = [sample for sample in trace.memory if sample.rank == rank]
            peaks = " and ".join(f"{size(drawn_trace.peak_bytes(rank))} {name}" for name, drawn_trace in drawn.items())
            if samples:
                lines.append(
                    PlotLine(
                        name=f"rank {rank}, {name}: at most {size(trace.peak_bytes(rank))}",
                        legend=f"rank {rank}: at most {peaks}" if last else "",
                        points=_held(samples, trace.duration_s),
                        color=color,
                        style="solid" if last else "dashed",
                        stairs=trace.source == "simulated",
                    )
                )
    most = max(trace.peak_bytes(rank) for trace in drawn.values() for rank in ranks)
    unit = 2.0**30 if most > 2**31 else 2.0**20
    return plot(lines, "memory over time", x_text=seconds, y_text=size, y_unit=unit, from_zero=True)


def plot(
    lines: Sequence[PlotLine], label: str, *, x_text: Callable[[float], str], y_text: Callable[[float], str],
    y_unit: float = 1.0, from_zero: bool = False,
) -> str:  # fmt: skip
    """A plot of lines with axes and a legend. The vertical axis is marked at round multiples of ``y_unit``; with
    ``from_zero`` it begins at 0. The result is empty if there are no points."""
    if not any(line.points for line in lines):
        return ""
    parts = _plot_parts(lines, x_text, y_text, y_unit, from_zero)
    legend = svg.legend((line.color, line.legend) for line in lines if line.legend)
    return svg.picture(_TOP + _HEIGHT + 26, label, parts) + legend


def plot_with_names(
    lines: Sequence[PlotLine], label: str, *, x_name: str, y_name: str, x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format, from_zero: bool = False,
) -> str:  # fmt: skip
    """A plot for a file of its own (``svg.file``): the legend and the names of the axes are parts of the picture."""
    legend = [line for line in lines if line.legend]
    top, bottom = 20 * len(legend) + 24, 20 * len(legend) + 24 + _TOP + _HEIGHT
    parts = [svg.text(0, top - 8, y_name, "start", "strong")]
    for row, line in enumerate(legend):
        y = 20 * row + 12
        style = f"line s{line.color}" + (" foretold" if line.style == "dashed" else "")
        parts += [svg.line(style, _PLOT_LEFT, y, _PLOT_LEFT + 28, y)]
        parts += [svg.text(_PLOT_LEFT + 36, y + 4, line.legend, "start")]
    moved = "".join(_plot_parts(lines, x_text, y_text, 1.0, from_zero, (x_text(0.0), y_text(0.0))))
    parts += [f'<g transform="translate(0 {top})">{moved}</g>']
    parts += [svg.text(svg.WIDTH - 16, bottom + 38, x_name, "end", "strong")]
    return svg.picture(bottom + 58, label, parts)


_PLOT_LEFT, _TOP, _HEIGHT = 76, 10, 240


def _plot_parts(
    lines: Sequence[PlotLine], x_text: Callable[[float], str], y_text: Callable[[float], str], y_unit: float,
    from_zero: bool,
    zeros: tuple[str, str] = ("0", "0"),
) -> list[str]:  # fmt: skip
    """The axes and lines of a plot. ``zeros``: the texts at 0 of the axes x and y."""
    points = [point for line in lines for point in line.points]
    left, right, top, height = _PLOT_LEFT, svg.WIDTH - 16, _TOP, _HEIGHT
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = (0.0 if from_zero else low - room), high + room
    across, up = (right - left) / ((last - first) or 1.0), height / (high - low)
    bottom = top + height

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + across * (point[0] - first), bottom - up * (point[1] - low)

    parts = []
    for value in marks(low / y_unit, high / y_unit):
        y = bottom - up * (value * y_unit - low)
        parts.append(svg.line("grid", left, y, right, y))
        parts.append(svg.text(left - 6, y + 4, y_text(value * y_unit) if value else zeros[1], "end"))
    parts.append(svg.line("axis", left, bottom, right, bottom))
    for value in marks(first, last):
        x = left + across * (value - first)
        parts.append(svg.text(min(x, right - 8), bottom + 18, x_text(value) if value else zeros[0], "middle"))
    for line in lines:
        shown = _stairs(line.points) if line.stairs else line.points
        style = f"line s{line.color}" + (" foretold" if line.style == "dashed" else "")
        if not line.only_dots:
            parts.append(svg.polyline(style, map(at, shown), line.name))
        for point in line.points if line.dots or line.only_dots else ():
            title = f"{line.name}: {y_text(point[1])} at {x_text(point[0])}"
            parts.append(svg.dot(f"dot d{line.color}", *at(point), 3.5, title))
    return parts


def _lanes(spans: Sequence[Span], name: str, top: float, scale: float, until_s: float) -> list[str]:
    """The lanes of one rank of one trace, one per stream."""
    parts = []
    for stream, height, style in LANES:
        for span in spans:
            if lane_of(span.stream) != stream:
                continue
            x, width = _LEFT + scale * span.start_s, scale * (min(span.end_s, until_s) - span.start_s)
            moved = f", {size(span.bytes)}" if span.bytes else ""
            spoken = (
                f"{span.what} on rank {span.rank}, {name} {span.stream}: {seconds(span.duration_s)}, from "
                f"{seconds(span.start_s)} to {seconds(span.end_s)}{moved}"
            )
            box = svg.kind(span.what) if stream == "compute" else style
            parts.append(svg.box(box, x, top, width - 0.4, height, spoken))
            label = _label(span.what, width) if stream == "compute" else ""
            if label:
                parts.append(svg.text(x + width / 2, top + height / 2 + 4, label, "middle", "inside"))
        top += height + 2
    return parts


def _label(what: str, width: float) -> str:
    """The label of a box: an action's micro-batch, or the span's name; empty if it does not fit."""
    words = svg.microbatch(what) or what
    return words if _CHARACTER * len(words) + 4 < width else ""


def _held(samples: Sequence[MemorySample], until_s: float) -> list[tuple[float, float]]:
    """The points (seconds, bytes) of one rank's samples. Samples from before the trace's first span are moved to time
    0, and the last value is extended to ``until_s``."""
    points = [(max(0.0, usage.time_s), float(usage.bytes)) for usage in sorted(samples, key=lambda usage: usage.time_s)]
    return svg.thinned([*points, (max(until_s, points[-1][0]), points[-1][1])])


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points as stairs: each value holds until the next point."""
    corners = [[(x, before), (x, y)] for (_, before), (x, y) in pairwise(points)]
    return [*points[:1], *(point for pair in corners for point in pair)]


def marks(low: float, high: float) -> list[float]:
    """Three to seven round values from ``low`` to ``high``; their distance is 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 6
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points with finite coordinates."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
