"""Pictures of a report as SVG: the pipeline's timeline, memory over time, a curve; colours come from the page."""

import math
from collections.abc import Callable, Mapping, Sequence

from meshwright.ir.trace import Trace
from meshwright.ir.units import seconds, size
from meshwright.report import svg

MOST_SPANS = 4000
"""The largest number of spans drawn; longer timelines are cut at the end."""


def dollars(value: float | None) -> str:
    """An amount of money as text; empty if no price is known."""
    return "" if value is None else f"$ {value:,.3g}" if value < 1000 else f"$ {value:,.0f}"


def timeline(trace: Trace) -> str:
    """A timeline with a lane for each rank and a box for each action: forward, backward (or its two halves), and
    others."""
    ranks, whole_s = trace.ranks, trace.duration_s
    spans = sorted(trace.spans, key=lambda span: span.start_s)
    until_s = spans[MOST_SPANS].start_s if len(spans) > MOST_SPANS else whole_s
    left, lane, top = 58, max(10, min(28, 480 // len(ranks))), 6
    scale = (svg.WIDTH - left - 8) / (until_s or 1.0)
    bottom = top + lane * len(ranks)
    cut = f", the first {seconds(until_s)} of {seconds(whole_s)}" if until_s < whole_s else ""
    parts = []
    for row, rank in enumerate(ranks):
        if len(ranks) <= 16 or row % 4 == 0:
            parts.append(svg.text(left - 6, top + lane * (row + 0.5) + 4, f"stage {rank}", "end"))
    for span in spans:
        if span.start_s > until_s:
            break
        y = top + lane * ranks.index(span.rank)
        x, width = left + scale * span.start_s, scale * (min(span.end_s, until_s) - span.start_s)
        title = f"{span.what}, stage {span.rank}: {seconds(span.start_s)} to {seconds(span.end_s)}"
        parts.append(svg.box(svg.kind(span.what), x, y + 1, width - 0.5, lane - 2, title))
        label = svg.microbatch(span.what)
        if label and width > 7 * len(label) + 4 and lane >= 14:
            parts.append(svg.text(x + width / 2, y + lane / 2 + 4, label, "middle", "inside"))
    parts += svg.time_axis(left, bottom, until_s, scale)
    return svg.picture(bottom + 26, f"timeline of the pipeline{cut}", parts)


def memory(trace: Trace, limit_bytes: float) -> str:
    """Memory over time: a line for each rank (for some ranks, if there are many), and a line for the device's
    memory."""
    shown = svg.some_of(trace.ranks)
    most = max(limit_bytes, *(trace.peak_bytes(rank) for rank in shown)) * 1.05
    last_s = max(sample.time_s for sample in trace.memory) or 1.0
    left, top, height = 70, 10, 240
    scale, up = (svg.WIDTH - left - 60) / last_s, height / most
    bottom = top + height
    parts = []
    for step in range(5):
        value = most * step / 4
        y = bottom - up * value
        parts.append(svg.line("grid", left, y, svg.WIDTH - 60, y))
        parts.append(svg.text(left - 6, y + 4, size(value) if step else "0", "end"))
    for index, rank in enumerate(shown):
        samples = svg.thinned([(sample.time_s, sample.bytes) for sample in trace.of_rank(rank).memory])
        points = ((left + scale * time_s, bottom - up * held) for time_s, held in samples)
        title = f"stage {rank}, at most {size(trace.peak_bytes(rank))}"
        parts.append(svg.polyline(f"line s{index}", points, title))
    limit = bottom - up * limit_bytes
    parts.append(svg.line("limit", left, limit, svg.WIDTH - 60, limit))
    parts.append(svg.text(svg.WIDTH - 56, limit + 4, "device", "start"))
    parts += svg.time_axis(left, bottom, last_s, scale)
    legend = svg.legend((index, f"stage {rank}: {size(trace.peak_bytes(rank))}") for index, rank in enumerate(shown))
    return svg.picture(bottom + 26, "memory over time", parts) + legend


def curve(points: Sequence[tuple[int, float]]) -> str:
    """Sequences per second over devices, both on logarithmic scales, with the line of linear scaling from the first
    point; empty for fewer than two points."""
    if len(points) < 2:
        return ""
    left, top, height, right = 70, 10, 240, svg.WIDTH - 60
    first, last = points[0], points[-1]
    ideal = [(devices, first[1] * devices / first[0]) for devices, _ in points]
    low = math.log2(min(rate for _, rate in points)) - 0.2
    high = math.log2(max(rate for _, rate in [*points, *ideal])) + 0.2
    across = (right - left - 20) / (math.log2(last[0] / first[0]) or 1.0)

    def at(point: tuple[int, float]) -> tuple[float, float]:
        x = left + 10 + across * math.log2(point[0] / first[0])
        return x, top + height * (high - math.log2(point[1])) / (high - low)

    parts = [svg.polyline("ideal", map(at, ideal)), svg.polyline("line s0", map(at, points))]
    for devices, rate in points:
        x, y = at((devices, rate))
        part = rate / (first[1] * devices / first[0])
        title = f"{devices} devices: {rate:.4g} sequences/s, {part:.0%} of linear"
        parts.append(svg.dot("dot", x, y, 4, title))
        parts.append(svg.text(x, y + 20, f"{rate:.3g}/s", "middle"))
        parts.append(svg.text(x, top + height + 18, f"{devices}", "middle"))
    return svg.picture(top + height + 26, "scaling", parts)


_BAR_STYLES = ("f", "b", "w", "comm", "wait", "rest")


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], label: str, *, text: Callable[[float], str]) -> str:
    """A horizontal bar for each row: its name, and a box for each of its parts (at most six), one after the other.
    ``text`` gives the words of a value; the sum stands at the end of a bar."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    assert len(names) <= len(_BAR_STYLES)
    left, lane, top = 132, 26, 32
    most = max(sum(parts.values()) for _, parts in rows)
    scale = (svg.WIDTH - left - 130) / most
    drawn, x = [], float(left)
    for name, style in zip(names, _BAR_STYLES, strict=False):
        drawn += [svg.box(style, x, 6, 12, 12, name), svg.text(x + 18, 16, name, "start")]
        x += 36 + 7 * len(name)
    for row, (name, parts) in enumerate(rows):
        y, x = top + lane * row, float(left)
        drawn.append(svg.text(left - 8, y + 15, name, "end", "strong"))
        for part, value in parts.items():
            style, width = _BAR_STYLES[names.index(part)], scale * value
            if width:
                drawn.append(svg.box(style, x, y, width, lane - 6, f"{name}, {part}: {text(value)}"))
            x += width
        drawn.append(svg.text(x + 6, y + 15, text(sum(parts.values())), "start"))
    return svg.picture(top + lane * len(rows) + 6, label, drawn)
