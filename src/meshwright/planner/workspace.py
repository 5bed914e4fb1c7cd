"""Workspace: the memory that an operator's kernel needs while it runs. Computing few samples at a time needs less of
it.

An operator on b samples may run in pieces. Each piece has its own kernel, and the pieces use the same workspace one
after the other. These are the two algorithms of µ-cuDNN (Oyama, Ben-Nun, Hoefler, Matsuoka 2018, sections 3.2 and 3.3):

    one operator   T(b) = min(T_µ(b), min over b' of T(b') + T(b - b')); the workspace is that of its largest piece
    a network      one division for each operator: least sum of seconds, if the sum of their bytes is within a budget
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from meshwright.errors import LayoutError, Problem, refuse
from meshwright.planner.integer_program import TIME_LIMIT_S, Rows, minimize


class KernelChoice(msgspec.Struct, frozen=True):
    """A kernel for a number of samples: it takes ``seconds``, and ``workspace_bytes`` while it runs.

    Raises:
        LayoutError: ``samples`` is below 1; seconds or bytes are negative, infinite or not a number.
    """

    name: str
    samples: int
    seconds: float
    workspace_bytes: int

    def __post_init__(self) -> None:
        where = f"kernel {self.name}"
        if self.samples < 1:
            raise LayoutError(f"samples is {self.samples}", where=where, remedy="give 1 or more")
        if not 0 <= self.seconds < math.inf or self.workspace_bytes < 0:
            problem = f"{self.samples} samples take {self.seconds} s and {self.workspace_bytes} bytes of workspace"
            raise LayoutError(problem, where=where, remedy="measure it again: both are finite, and not negative")


class Division(NamedTuple):
    """The pieces in which an operator runs (the largest first), their seconds, and the largest workspace of any
    piece."""

    pieces: tuple[KernelChoice, ...]
    seconds: float
    workspace_bytes: int


def divided(choices: Sequence[KernelChoice], samples: int, limit_bytes: int) -> Division:
    """The fastest division of ``samples`` within the limit. If several are equally fast, one with the least workspace.
    Pieces have the sizes that occur in ``choices``; each may be used several times.

    Raises:
        LayoutError: a number is below 1; ``choices`` are empty; no sum of their sizes is ``samples``; or nothing fits
            within the limit (the error names the smallest workspace with which a division exists).
    """
    refuse(LayoutError, _problems(choices, samples, limit_bytes))
    division = _fastest(choices, samples, limit_bytes)
    if division is None:
        levels = sorted({choice.workspace_bytes for choice in choices})
        least = next((level for level in levels if _fastest(choices, samples, level) is not None), None)
        sizes = ", ".join(map(str, sorted({choice.samples for choice in choices})))
        if least is None:
            problem = f"{samples} samples are not a sum of the sizes with a kernel: {sizes}"
            raise LayoutError(problem, where="workspace", remedy=f"measure a kernel of 1 or of {samples} samples")
        problem = f"nothing runs {samples} samples within {limit_bytes:,} bytes of workspace"
        raise LayoutError(problem, where="workspace", remedy=f"give at least {least:,} bytes")
    return division


def pareto(choices: Sequence[KernelChoice], samples: int, limit_bytes: int) -> tuple[Division, ...]:
    """All divisions within the limit that no other division beats in both seconds and bytes, the fastest first. If
    several divisions have equal seconds and bytes, one is returned.

    The workspace of a division is the workspace of its largest piece. So it is enough to find the fastest division for
    each workspace size of a piece.

    Raises:
        LayoutError: as ``divided``.
    """
    divisions = [divided(choices, samples, limit_bytes)]
    while divisions[-1].workspace_bytes > 0:
        slower = _fastest(choices, samples, divisions[-1].workspace_bytes - 1)
        if slower is None:
            break
        divisions.append(slower)
    return tuple(divisions)


def share(sets: Mapping[str, Sequence[Division]], total_bytes: int) -> dict[str, Division]:
    """One division for each operator, with the smallest sum of seconds for which the sum of workspaces is within the
    total.

    x[i, d] = 1: operator i runs in division d.

        minimize    sum of seconds[i, d] x[i, d]
        such that   for each operator i:  sum over d of x[i, d] = 1
                    sum of bytes[i, d] x[i, d] <= total

    The result is optimal within the gap of ``integer_program``, as proven by the solver.

    Raises:
        LayoutError: the total is below 1; an operator has no divisions; nothing fits within the total (the error names
            the smallest total that fits); or the solver has proven nothing within its time limit.
    """
    refuse(LayoutError, _problems_of_sets(sets, total_bytes))
    if not sets:
        return {}
    columns = [(name, division) for name, divisions in sets.items() for division in divisions]
    rows = Rows()
    for name in sets:
        rows.add([(column, 1.0) for column, (owner, _) in enumerate(columns) if owner == name], 1.0, 1.0)
    rows.add([(column, each.workspace_bytes / total_bytes) for column, (_, each) in enumerate(columns)], -math.inf, 1.0)
    while True:
        values, _, proven = minimize([each.seconds for _, each in columns], [1.0] * len(columns), rows, len(columns))
        if values is None or not proven:
            problem = f"no best division of {total_bytes:,} bytes was proven within {TIME_LIMIT_S:g} s"
            raise LayoutError(problem, where="workspace", remedy="give fewer kernels, or a limit for each operator")
        taken = [column for column in range(len(columns)) if values[column] > 0.5]
        if sum(columns[column][1].workspace_bytes for column in taken) <= total_bytes:
            return {columns[column][0]: columns[column][1] for column in taken}
        # The solver rounds sums, so its solution may exceed the total by some bytes. Exclude these divisions, and solve
        # again.
        rows.add([(column, 1.0) for column in taken], -math.inf, len(taken) - 1.0)


def _fastest(choices: Iterable[KernelChoice], samples: int, limit_bytes: int) -> Division | None:
    """The fastest division within the limit; None if there is none. A division consists of a last piece and the rest.
    So divisions are built by adding a piece to a division of fewer samples."""
    best: dict[int, KernelChoice] = {}
    for choice in choices:
        known = best.get(choice.samples)
        if choice.workspace_bytes <= limit_bytes and (known is None or _cost(choice) < _cost(known)):
            best[choice.samples] = choice
    costs: list[tuple[float, int]] = [(0.0, 0)]
    last: list[KernelChoice | None] = [None]
    for count in range(1, samples + 1):
        cost, piece = (math.inf, 0), None
        for size, choice in best.items():
            if size <= count and (rest := costs[count - size])[0] < math.inf:
                total = rest[0] + choice.seconds, max(rest[1], choice.workspace_bytes)
                if total < cost:
                    cost, piece = total, choice
        costs.append(cost)
        last.append(piece)
    if last[samples] is None:
        return None
    pieces, left = list[KernelChoice](), samples
    while (piece := last[left]) is not None:
        pieces.append(piece)
        left -= piece.samples
    pieces.sort(key=lambda piece: (-piece.samples, piece.name))
    return Division(tuple(pieces), *costs[samples])


def _cost(choice: KernelChoice) -> tuple[float, int]:
    return choice.seconds, choice.workspace_bytes


def _problems(choices: Sequence[KernelChoice], samples: int, limit_bytes: int) -> Iterator[Problem]:
    if not choices:
        yield "workspace", "there are no kernels to choose from", "measure at least one"
    if samples < 1:
        yield "workspace", f"samples is {samples}", "give 1 or more"
    yield from _problems_of_limit(limit_bytes)


def _problems_of_limit(limit_bytes: int) -> Iterator[Problem]:
    if limit_bytes < 1:
        remedy = "give 1 byte or more: kernels without workspace fit in any"
        yield "workspace", f"a limit is {limit_bytes} bytes", remedy


def _problems_of_sets(sets: Mapping[str, Sequence[Division]], total_bytes: int) -> Iterator[Problem]:
    yield from _problems_of_limit(total_bytes)
    for name, divisions in sets.items():
        if not divisions:
            yield f"workspace of {name}", "it has no divisions to choose from", "give it those of `pareto`"
    least = sum(min(division.workspace_bytes for division in divisions) for divisions in sets.values())
    if least > total_bytes:
        problem = f"{len(sets)} operators do not fit within {total_bytes:,} bytes of workspace"
        yield "workspace", problem, f"give at least {least:,} bytes"
