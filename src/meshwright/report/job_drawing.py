"""Pictures of job graphs: as text and SVG, and the predicted schedule above the measured one."""

from collections.abc import Mapping, Sequence

from meshwright.ir.job_run import JobRecord, JobRow, JobSpan
from meshwright.ir.units import seconds
from meshwright.report import svg
from meshwright.report.run_drawing import marks

_LEFT, _LANE = 150, 22
_STYLES = {"finished": "f", "failed": "b", "lost": "wait"}


def graph_text(record: JobRecord) -> str:
    """The graph as text: a line for each vertex, by levels; behind it, the channels that it reads. Vertices of the
    critical path have a star."""
    readers = {row.name: [f"{writer}.{output}" for writer, output, to in record.edges if to == row.name]
               for row in record.rows}  # fmt: skip
    rows = sorted(record.rows, key=lambda row: row.level)
    widths = [max(len(_mark(row)) for row in rows), max(len(_time(row)) for row in rows),
              max(len(row.needs) for row in rows), max(len(row.work) for row in rows)]  # fmt: skip
    lines = []
    for row in rows:
        cells = [_mark(row).ljust(widths[0]), _time(row).rjust(widths[1]), row.needs.ljust(widths[2])]
        read = f"<- {', '.join(readers[row.name])}" if readers[row.name] else ""
        lines.append("  ".join(["", *cells, row.work.ljust(widths[3]), read]).rstrip())
    return "\n".join(lines)


def _mark(row: JobRow) -> str:
    return f"{'    ' * row.level}{row.name}{' *' if row.critical else ''}"


def _time(row: JobRow) -> str:
    return seconds(row.predicted_s) if row.predicted_s is not None else "?"


def graph_picture(record: JobRecord) -> str:
    """The graph as SVG: a box for each vertex, in columns by level, and a line for each channel."""
    levels = [[row for row in record.rows if row.level == level]
              for level in range(max(row.level for row in record.rows) + 1)]  # fmt: skip
    width, gap, height, space = min(190.0, (svg.WIDTH - 20) / len(levels) * 0.72), 0.0, 34, 16
    gap = (svg.WIDTH - 20 - width * len(levels)) / max(1, len(levels) - 1) if len(levels) > 1 else 0.0
    tallest = max(map(len, levels))
    places: dict[str, tuple[float, float]] = {}
    for column, rows in enumerate(levels):
        top = 10 + (tallest - len(rows)) * (height + space) / 2
        for index, row in enumerate(rows):
            places[row.name] = 10 + column * (width + gap), top + index * (height + space)
    critical = set(zip(record.critical, record.critical[1:], strict=False))
    parts = []
    for writer, output, reader in record.edges:
        (x1, y1), (x2, y2) = places[writer], places[reader]
        style = "line s1" if (writer, reader) in critical else "axis"
        parts.append(svg.line(style, x1 + width, y1 + height / 2, x2, y2 + height / 2, f"{writer}.{output}"))
    for row in record.rows:
        x, y = places[row.name]
        title = f"{row.name}: {row.work}; {row.needs}; {_time(row)}"
        parts.append(svg.box("b" if row.critical else "f", x, y, width, height, title))
        shown = row.name if len(row.name) * 7 < width else row.name[: max(1, int(width / 7) - 1)] + "…"
        parts.append(svg.text(x + width / 2, y + height / 2 + 4, shown, "middle", "inside"))
    return svg.picture(tallest * (height + space) + 8, f"job graph {record.name}", parts)


def schedule_picture(record: JobRecord) -> str:
    """The predicted schedule above the measured one, on a common time scale: on each node, a lane for each vertex that
    runs beside others. Empty if nothing is known."""
    drawn: dict[str, Sequence[JobSpan]] = {}
    if record.predicted_s:
        drawn["predicted"] = record.predicted
    if record.measured:
        drawn["measured"] = record.measured
    until_s = max((span.end_s for spans in drawn.values() for span in spans), default=0.0)
    if not until_s:
        return ""
    scale = (svg.WIDTH - _LEFT - 12) / until_s
    parts, top = [], 4.0
    for name, spans in drawn.items():
        parts.append(svg.text(0, top + 14, name, "start", "strong"))
        for node in dict.fromkeys(span.node for span in spans):
            lanes = lanes_of([span for span in spans if span.node == node])
            parts.append(svg.text(_LEFT - 8, top + 14, node if len(node) < 14 else f"{node[:12]}…", "end"))
            for span, lane in lanes.items():
                x, width = _LEFT + scale * span.start_s, scale * (span.end_s - span.start_s)
                y = top + lane * _LANE
                title = f"{span.vertex} on {node}, {name}: {seconds(span.start_s)} to {seconds(span.end_s)}"
                title += "" if span.end == "finished" else f", {span.end}"
                parts.append(svg.box(_STYLES[span.end], x, y, width - 0.5, _LANE - 3, title))
                if width > 7 * len(span.vertex) + 4:
                    parts.append(svg.text(x + width / 2, y + 14, span.vertex, "middle", "inside"))
            top += _LANE * (max(lanes.values(), default=0) + 1)
        top += 10
    for words, end_s in (("predicted", record.predicted_s), ("measured", record.measured_s)):
        if words in drawn and end_s:
            x = _LEFT + scale * min(end_s, until_s)
            parts.append(svg.line("end", x, 0, x, top, f"{words}: {seconds(end_s)}"))
    parts.append(svg.line("axis", _LEFT, top, svg.WIDTH - 12, top))
    for at_s in marks(0.0, until_s):
        parts.append(svg.text(_LEFT + scale * at_s, top + 18, seconds(at_s) if at_s else "0", "middle"))
    return svg.picture(top + 26, f"schedule, {' above '.join(drawn)}", parts)


def lanes_of(spans: Sequence[JobSpan]) -> Mapping[JobSpan, int]:
    """A lane for each span, so that spans of one lane do not overlap; as few lanes as run at once."""
    ends: list[float] = []
    result = {}
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        lane = next((index for index, end_s in enumerate(ends) if end_s <= span.start_s + 1e-9), len(ends))
        ends[lane : lane + 1] = [span.end_s]
        result[span] = lane
    return result
