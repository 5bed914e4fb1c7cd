"""Pieces of pictures as SVG; colours and fonts come from the page."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from meshwright.ir.units import seconds

WIDTH = 960
MOST_LINES = 8
"""The largest number of ranks whose memory is drawn."""


def picture(height: float, label: str, parts: Iterable[str]) -> str:
    """A picture that is ``WIDTH`` wide; ``label`` describes it."""
    opened = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return "".join([opened, *parts, "</svg>"])


def file(drawn: str, style: str) -> str:
    """A ``picture`` as a stand-alone file, with ``style`` inside and a background."""
    opened = drawn.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" ', 1)
    start = opened.index(">") + 1
    ground = '<rect width="100%" height="100%" style="fill: var(--card)"/>'
    return f"{opened[:start]}<style>{style}</style>{ground}{opened[start:]}\n"


def text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    """Words at a place; ``anchor`` is start, middle or end."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(style: str, x1: float, y1: float, x2: float, y2: float, title: str = "") -> str:
    """A straight line. Its title is shown when the pointer is on it."""
    start, end = (_number(x1), _number(y1)), (_number(x2), _number(y2))
    return _titled("line", f'class="{style}" x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"', title)


def polyline(style: str, points: Iterable[tuple[float, float]], title: str = "") -> str:
    """A line through points."""
    return _titled("polyline", f'class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"', title)


def box(style: str, x: float, y: float, width: float, height: float, title: str) -> str:
    """A filled rectangle."""
    sides = f'y="{y}" width="{max(width, 0.3):.2f}" height="{height}"'
    return _titled("rect", f'class="{style}" x="{x:.2f}" {sides}', title)


def dot(style: str, x: float, y: float, radius: float, title: str, key: str = "") -> str:
    """A filled circle. ``key``: the name by which a script finds it."""
    named = f' data-key="{escape(key)}"' if key else ""
    return _titled("circle", f'class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"{named}', title)


def bar(percent: float) -> str:
    """A bar whose length is a percentage of its room."""
    return (
        '<svg class="bar" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="f" width="{max(percent, 0.5):.2f}" height="12" rx="0.5"/></svg>'
    )


def legend(entries: Iterable[tuple[int, str]]) -> str:
    """A legend that explains the lines of each colour."""
    words = (f'<span><i class="key s{color}"></i>{escape(meaning)}</span>' for color, meaning in entries)
    return f'<p class="legend">{"".join(words)}</p>'


def time_axis(left: float, bottom: float, until_s: float, scale: float) -> list[str]:
    """A time axis at ``bottom`` with five steps; ``scale`` is the width of one second in the picture's units."""
    parts = [line("axis", left, bottom, left + scale * until_s, bottom)]
    for step in range(6):
        at_s = until_s * step / 5
        anchor = "start" if step == 0 else "end" if step == 5 else "middle"
        parts.append(text(left + scale * at_s, bottom + 18, seconds(at_s) if step else "0", anchor))
    return parts


def some_of(ranks: Sequence[int]) -> Sequence[int]:
    """At most ``MOST_LINES`` of the ranks, evenly spaced from the first to the last."""
    if len(ranks) <= MOST_LINES:
        return ranks
    return [ranks[index * (len(ranks) - 1) // (MOST_LINES - 1)] for index in range(MOST_LINES)]


def thinned(samples: Sequence[tuple[float, float]], most: int = 1500) -> list[tuple[float, float]]:
    """At most ``most`` samples: the highest sample of each group of neighbours."""
    if len(samples) <= most:
        return list(samples)
    each = math.ceil(len(samples) / most)
    return [max(samples[first : first + each], key=lambda sample: sample[1]) for first in range(0, len(samples), each)]


def kind(what: str) -> str:
    """The CSS class of an action's box: f, b, i, w, or rest."""
    if what in ("forward", "backward"):
        return what[0]
    letters = what.lstrip("0123456789")[:1].lower()
    return letters if what[:1].isdigit() and letters in ("f", "b", "i", "w") else "rest"


def microbatch(what: str) -> str:
    """The number of an action's micro-batch; empty for anything else."""
    style = kind(what)
    return "".join(filter(str.isdigit, what.partition(style.upper())[2])) if len(style) == 1 else ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _titled(tag: str, attributes: str, title: str) -> str:
    inside = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
    return f"<{tag} {attributes}{inside}"
