"""Steps of a collective as text: the messages that each rank sends, round by round."""

from collections.abc import Sequence
from itertools import accumulate

from meshwright.schedules.collectives.steps import Steps

WIDTH = 120
"""Characters of a line. A wider picture is not wrapped. Its last line says how many ranks are left out."""


def rounds(steps: Steps) -> str:
    """A row for each round and a column for each rank. A cell shows the messages that the rank sends in the round.

    ``b>2+``: the rank sends piece b to rank 2, which adds it to its own piece; ``b>2``: rank 2 replaces its piece. A
    piece is as long as possible without being cut by a message. Pieces are named a, b, ... in the order of the vector.
    """
    messages = [move for moves in steps.rounds for move in moves]
    borders = sorted({border for move in messages for border in (move.begin, move.begin + move.length)})
    names = {begin: _name(index) for index, begin in enumerate(borders)}
    ends = dict(zip(borders[1:], borders, strict=False))
    rows = []
    for moves in steps.rounds:
        cells = [""] * steps.num_ranks
        for move in moves:
            first, last = names[move.begin], names[ends.get(move.begin + move.length, move.begin)]
            piece = (first if first == last else f"{first}-{last}") if move.length else ""
            cells[move.source] += f" {piece}>{move.target}{'+' if move.adds else ''}"
        rows.append([cell.strip() or "." for cell in cells])
    return _table([f"rank {rank}" for rank in range(steps.num_ranks)], rows)


def _name(index: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[index] if index < len(letters) else _name(index // len(letters) - 1) + letters[index % len(letters)]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(title), *(len(row[index]) for row in rows), 0) for index, title in enumerate(titles)]
    margin = len("round") + 2
    ends = accumulate((width + 2 for width in widths), initial=margin)
    shown = max(sum(end <= WIDTH for end in ends) - 1, 1)
    numbers = ["round", *map(str, range(1, len(rows) + 1))]
    lines = [
        number.rjust(len("round")).ljust(margin)
        + "  ".join(cell.ljust(width) for cell, width in zip(row[:shown], widths, strict=False))
        for number, row in zip(numbers, (titles, *rows), strict=True)
    ]
    if shown < len(titles):
        lines.append(f"and {len(titles) - shown} more ranks")
    return "\n".join(line.rstrip() for line in lines) + "\n"
