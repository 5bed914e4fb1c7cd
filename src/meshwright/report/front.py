"""The front of layouts as SVG: step time against memory, with the memory of the device."""

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from meshwright.ir.units import seconds, size
from meshwright.report import svg
from meshwright.report.run_drawing import marks

_LEFT, _RIGHT, _TOP, _HEIGHT = 76, 24, 14, 250
_SLOWEST = 12.0
"""Layouts that are slower than the fastest by more than this factor are not drawn."""


class WeighedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Another layout, and the reason why it was not chosen. ``words``: the layout as ``--layout`` reads it."""

    layout: str
    step_s: float
    peak_bytes: float
    verdict: str
    usd: float | None
    why: str
    words: str = ""


def front_plot(
    points: Sequence[WeighedLayout], limit_bytes: float, chosen: str = "", beside: Sequence[WeighedLayout] = ()
) -> str:
    """Step time (logarithmic) over the memory of the fullest device. The points of the front are joined by stairs:
    each corner is the best that can be had with this much memory. ``beside`` are other layouts. ``limit_bytes`` is the
    memory of the device, a dashed line. The point whose words are ``chosen`` is marked. Empty without points."""
    shown = [point for point in (*points, *beside) if point.step_s > 0]
    if not shown:
        return ""
    fastest = min(point.step_s for point in shown)
    shown = [point for point in shown if point.step_s <= _SLOWEST * fastest]
    most_bytes = 1.06 * max(limit_bytes, *(point.peak_bytes for point in shown))
    low, high = math.log10(fastest * 0.9), math.log10(max(point.step_s for point in shown) * 1.12)
    across, up = (svg.WIDTH - _LEFT - _RIGHT) / most_bytes, _HEIGHT / (high - low)
    bottom = _TOP + _HEIGHT

    def at(point: WeighedLayout) -> tuple[float, float]:
        return _LEFT + across * point.peak_bytes, bottom - up * (math.log10(point.step_s) - low)

    parts = []
    for value in _log_marks(10**low, 10**high):
        y = bottom - up * (math.log10(value) - low)
        parts.append(svg.line("grid", _LEFT, y, svg.WIDTH - _RIGHT, y))
        parts.append(svg.text(_LEFT - 8, y + 4, seconds(value), "end"))
    for gib in marks(0.0, most_bytes / 2**30):
        parts.append(svg.text(_LEFT + across * gib * 2**30, bottom + 18, size(gib * 2**30) if gib else "0", "middle"))
    parts.append(svg.line("axis", _LEFT, bottom, svg.WIDTH - _RIGHT, bottom))
    x = _LEFT + across * limit_bytes
    parts.append(svg.line("limit", x, _TOP, x, bottom, f"the device has {size(limit_bytes)}"))
    parts.append(svg.text(x - 6, _TOP + 10, f"the device: {size(limit_bytes)}", "end"))
    corners = sorted(at(point) for point in points if point in shown)
    stairs = corners[:1]
    for before, corner in pairwise(corners):
        stairs += [(corner[0], before[1]), corner]
    if stairs:
        parts.append(svg.polyline("line front", [*stairs, (max(x, stairs[-1][0]), stairs[-1][1])]))
    on_front = {point.words for point in points}
    for point in sorted(shown, key=lambda point: (point.words == chosen, point.words in on_front)):
        style = "chosen" if point.words == chosen else "d0" if point.words in on_front else "other"
        title = f"{point.layout}: {seconds(point.step_s)}, {size(point.peak_bytes)}, {point.verdict}"
        radius = 7 if style == "chosen" else 5 if style == "d0" else 3.5
        parts.append(svg.dot(f"dot {style}", *at(point), radius, title, key=point.words))
    label = f"step time over memory of {len(shown)} layouts, {len(points)} of them on the front"
    return svg.picture(bottom + 26, label, parts)


def _log_marks(low: float, high: float) -> list[float]:
    """The values 1, 2, 5 times powers of ten from ``low`` to ``high``; finer ones if there are fewer than three."""
    tenths = tuple(1 + index / 10 for index in range(90))
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    marks: list[float] = []
    for steps in ((1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), tenths):
        marks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(marks) >= 3:
            break
    return marks[:: math.ceil(len(marks) / 8) or 1]
