"""Seconds and bytes as people read them."""


def seconds(value: float) -> str:
    """A duration as one reads it: ``1.23 s``, ``45.6 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(value) * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}" if abs(value) * factor < 1000 else f"{value * factor:,.0f} {unit}"
    return ""


def size(value: float) -> str:
    """Bytes as one reads them: ``12.3 GiB``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if value >= factor or unit == "MiB":
            return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"
    return ""
