"""Two plans or two layouts, line by line."""

from meshwright.ir.units import seconds, size
from meshwright.report import PageContent
from meshwright.report.plan_difference import Difference


def layout_lines(old: PageContent, new: PageContent) -> tuple[Difference, ...]:
    """The lines in which two reports differ: facts, layout, and the parts of time and of memory."""
    before, after = _lines(old), _lines(new)
    names = dict.fromkeys((*before, *after))
    pairs = [(name, before.get(name, "-"), after.get(name, "-")) for name in names]
    return tuple(Difference(what=name, old=left, new=right) for name, left, right in pairs if left != right)


def _lines(report: PageContent) -> dict[str, str]:
    lines = {"model": report.model, "cluster": report.cluster, "devices": f"{report.devices:,}"}
    lines |= {"verdict": report.verdict} | dict(report.facts)
    lines |= {name: value for name, value, _ in report.layout}
    lines |= {f"time: {part.name}": seconds(part.size) for part in report.time if part.size}
    lines |= {f"memory: {part.name}": size(part.size) for part in report.memory if part.size}
    return lines
