"""Pieces of pictures as SVG; colours and fonts come from the page."""

import math
from collections.abc import Sequence
from html import escape

from meshwright.ir.units import seconds

WIDTH = 960


def opened(height: float, label: str) -> str:
    """The start of a picture ``WIDTH`` wide; ``label`` says what it shows."""
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'


def text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    """Words at a place; ``anchor`` is start, middle or end."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def time_axis(left: float, bottom: float, until_s: float, scale: float) -> list[str]:
    """A line at ``bottom`` with five steps of time; ``scale`` is in units a second."""
    found = [f'<line class="axis" x1="{left}" y1="{bottom}" x2="{left + scale * until_s:.1f}" y2="{bottom}"/>']
    for step in range(6):
        at_s = until_s * step / 5
        anchor = "start" if step == 0 else "end" if step == 5 else "middle"
        found.append(text(left + scale * at_s, bottom + 18, seconds(at_s) if step else "0", anchor))
    return found


def thinned(samples: Sequence[tuple[float, float]], most: int = 1500) -> list[tuple[float, float]]:
    """At most so many samples, the highest of each stretch."""
    if len(samples) <= most:
        return list(samples)
    each = math.ceil(len(samples) / most)
    return [max(samples[first : first + each], key=lambda one: one[1]) for first in range(0, len(samples), each)]


def kind(what: str) -> str:
    """The class of an action's box: f, b, i, w, or rest."""
    if what in ("forward", "backward"):
        return what[0]
    letters = what.lstrip("0123456789")[:1].lower()
    return letters if what[:1].isdigit() and letters in ("f", "b", "i", "w") else "rest"
