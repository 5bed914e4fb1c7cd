"""Seconds, bytes and tables as text for people."""

from collections.abc import Sequence


def seconds(value: float) -> str:
    """A duration as text: ``1.23 s``, ``45.6 ms``."""
    return _text(value, {"s": 1.0, "ms": 1e3, "us": 1e6})


def size(value: float) -> str:
    """A number of bytes as text: ``12.3 GiB``."""
    return _text(value, {"TiB": 2.0**-40, "GiB": 2.0**-30, "MiB": 2.0**-20})


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _text(value: float, units: dict[str, float]) -> str:
    """The value as text, in the first unit in which it is 1 or more; if there is none, in the last unit."""
    numbers = {unit: value * factor for unit, factor in units.items()}
    unit = next((unit for unit, number in numbers.items() if abs(number) >= 1), [*units][-1])
    number = numbers[unit]
    return f"{number:.3g} {unit}" if abs(number) < 1000 else f"{number:,.0f} {unit}"
