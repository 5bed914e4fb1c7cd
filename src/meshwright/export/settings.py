"""Reads the settings of a decoded configuration: tables, whole numbers and words; and names misspelled settings."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from meshwright.errors import FileFormatError
from meshwright.ir.files import did_you_mean


def table(config: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """The table ``key``; empty if it is missing. Raises a FileFormatError if the value is not a table."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FileFormatError(
            f"{value!r} is not a table", where=f"{where}: {key}", remedy=f"write the settings of {key} as key and value"
        )
    return value


def whole_number(
    config: Mapping[str, Any], key: str, default: int, where: str, least: int = 1, other: Collection[int] = ()
) -> int:
    """The whole number ``key``, which is at least ``least`` or in ``other``; ``default`` if it is missing. Raises a
    FileFormatError if it is another value."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or (value < least and value not in other):
        words = " or ".join([f"a whole number from {least} on", *map(str, other)])
        raise FileFormatError(
            f"{value!r} is not {words}", where=f"{where}: {key}", remedy=f"correct it, or leave {key} out"
        )
    return value


def word(config: Mapping[str, Any], key: str, default: str, where: str, known: Collection[str]) -> str:
    """The word ``key``, which is in ``known``; ``default`` if it is missing. Raises a FileFormatError if it is another
    value."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or value not in known:
        remedy = did_you_mean(str(value), known, f"one of {', '.join(known)}")
        raise FileFormatError(f"{value!r} is not known", where=f"{where}: {key}", remedy=remedy)
    return value


def misspelled(keys: Iterable[Any], known: Collection[str], prefix: str = "") -> list[str]:
    """Names the unknown keys that look like a misspelled known key. ``prefix`` is put before the names."""
    named = []
    for key in map(str, keys):
        near = [] if key in known else difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.88)
        named += [f"{prefix}{key}, which looks like {prefix}{each}" for each in near]
    return named
