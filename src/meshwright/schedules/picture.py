"""Schedules as text: the timeline of a checked schedule, and the grid of a faulty schedule with the fault marked."""

import math
from collections.abc import Mapping

from meshwright.ir.schedule import Schedule
from meshwright.schedules.timing import Times

WIDTH = 120
"""Columns of a picture, in characters."""
MOST_RANKS, MOST_SLOTS = 64, 500
"""The largest numbers of ranks and time slots in a picture that is not drawn whole."""


def timeline(schedule: Schedule, times: tuple[Times, ...], *, whole: bool = True) -> str:
    """A row for each rank and a cell for each time slot, wrapped to 120 columns. A time slot is as long as the shortest
    action. Unless ``whole``, only ``MOST_RANKS`` ranks and ``MOST_SLOTS`` slots are drawn, and the last line says so.

    ``F0 F1 B0--- .``: two forwards, a backward that takes two slots, an idle slot. If ranks hold several stages, the
    stage comes first, as in ``4F0``. Communication is not drawn.
    """
    computing = [
        [(action, start, end) for action, (start, end) in zip(actions, each, strict=True) if action.kind.computes]
        for actions, each in zip(schedule.ranks, times, strict=True)
    ]
    slot = min(end - start for row in computing for _, start, end in row)
    num_slots = max(_round(end / slot) for row in computing for _, _, end in row)
    cropped = not whole and (len(computing) > MOST_RANKS or num_slots > MOST_SLOTS)
    rest = ""
    if cropped:
        rest = f"\ndrawn: {min(MOST_RANKS, len(computing))} of {len(computing)} ranks, "
        rest += f"{min(MOST_SLOTS, num_slots):,} of {num_slots:,} slots\n"
        num_slots = min(MOST_SLOTS, num_slots)
        last = num_slots * slot
        computing = [
            [(action, start, min(end, last)) for action, start, end in row if start < last]
            for row in computing[:MOST_RANKS]
        ]
    names_stages = any(len({action.stage for action, _, _ in row}) > 1 for row in computing)
    texts = {
        action: str(action) if names_stages else f"{action.kind.value}{action.microbatch}"
        for row in computing
        for action, _, _ in row
    }
    width = max(map(len, texts.values())) + 1
    rows = []
    for row in computing:
        line, drawn = "", 0
        for action, start, end in row:
            first, last = _round(start / slot), _round(end / slot)
            line += ".".ljust(width) * (first - drawn)
            line += texts[action].ljust((last - first) * width - 1, "-") + " "
            drawn = last
        rows.append(line + ".".ljust(width) * (num_slots - drawn))
    names = [f"rank {rank}" for rank in range(len(rows))]
    margin = max(map(len, names)) + 2
    num_lines = math.ceil(num_slots / ((WIDTH - margin) // width))
    per_line = math.ceil(num_slots / num_lines)
    blocks = []
    for first in range(0, num_slots, per_line):
        slots = range(first, min(first + per_line, num_slots))
        head = "".join((str(slot) if slot % 5 == 0 else "").ljust(width) for slot in slots)
        part = [row[first * width : slots.stop * width] for row in rows]
        lines = [f"{name:<{margin}}{text}" for name, text in zip(["slot", *names], [head, *part], strict=True)]
        blocks.append("".join(f"{line.rstrip()}\n" for line in lines))
    return "\n".join(blocks) + rest


def grid(schedule: Schedule, marks: Mapping[int, int]) -> str:
    """A row of at most 120 columns for each rank, with a cell for each action. ``marks`` maps a rank to the position of
    an action that is drawn as ``>1B0<``.

    A mark after the last action is drawn as ``>?<``. A row that is too long is cut, and says at which position it
    begins. It shows its own mark or, without a mark, the position of the first mark.
    """
    width = max((len(str(action)) for actions in schedule.ranks for action in actions), default=1) + 2
    longest = max(map(len, schedule.ranks)) + 1
    margin = len(f"rank {len(schedule.ranks) - 1}: ")
    if 2 + margin + longest * width > WIDTH:
        margin += len(f", from {longest}")
    columns = (WIDTH - 2 - margin) // width
    shown = next(iter(marks.values()))
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        mark = marks.get(rank)
        cells = [f" {action} " for action in actions]
        if mark is not None:
            cells[mark : mark + 1] = [f">{cells[mark].strip() if mark < len(cells) else '?'}<"]
        middle = shown if mark is None else mark
        first = max(0, min(middle - columns // 2, len(cells) - columns))
        name = f"rank {rank}, from {first}:" if first else f"rank {rank}:"
        line = "".join(cell.ljust(width) for cell in cells[first : first + columns])
        lines.append(f"  {name:<{margin}}{line}".rstrip())
    return "\n".join(lines)


def _round(number: float) -> int:
    """Round to the nearest whole number, halves up, so that consecutive slots stay apart."""
    return math.floor(number + 0.5)
