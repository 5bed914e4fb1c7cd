"""The algorithms of collectives as a text in a plan: one name for all operations, or names by operation and size.

native                                                        torch.distributed's own: gloo, or NCCL between GPUs
mpi                                                           MPI's own, if MPI started the ranks
exchange                                                      two ranks swap their vectors, in one round
dense-gather, balanced                                        for codecs that select elements (``FOR_SELECTIONS``)
star+ring@2x4                                                 along the levels of a cluster (``hierarchy.py``)
all_reduce butterfly, 262144 rabenseifner; all_gather star    from 0 and from 262,144 bytes on; the rest native
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from meshwright.errors import PlanError
from meshwright.ir.cluster import Operation
from meshwright.schedules.collectives import hierarchy
from meshwright.schedules.collectives.operations import ALGORITHMS, is_there

NATIVE, MPI = "native", "mpi"
"""The names of torch.distributed's own collectives, and of the collectives of the MPI that started the ranks."""
CHOSEN: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations whose algorithm a plan chooses by size. A calibration measures their ``candidates``, and MPI's."""
EXCHANGE = {"all_reduce": "butterfly", "all_gather": "star", "reduce_scatter": "star", "all_to_all": "partitioned"}
"""Maps an operation to its algorithm with a single round in a group of two ranks."""

PIECES = 8
"""The number of pieces into which hierarchical algorithms cut a long vector."""
LONG_BYTES = 2**20
"""Bytes of the smallest vector for which algorithms that use pieces are measured."""

Ranges = Sequence[tuple[int, str]]
"""Pairs (smallest number of bytes, algorithm), ascending."""


@lru_cache(maxsize=4096)
def chosen(text: str, operation: str, num_bytes: int) -> str:
    """The algorithm that ``text`` gives for an operation over a vector of ``num_bytes``.

    Raises:
        PlanError: the text is malformed, or names an unknown operation or algorithm.
    """
    if " " in text:
        steps = parsed(text).get(operation, ())
        algorithm = next((name for least, name in reversed(steps) if num_bytes >= least), NATIVE)
    else:
        algorithm = _known(operation, text, text)
    return EXCHANGE[operation] if algorithm == "exchange" else algorithm


def runs(operation: str, name: str) -> bool:
    """Whether the algorithm called ``name`` supports the operation."""
    if name == MPI:
        return operation in CHOSEN
    return name == NATIVE or is_there(operation, name) or (name == "exchange" and operation in EXCHANGE)


def candidates(operation: str, num_ranks: int, boxes: str = "") -> tuple[str, ...]:
    """The algorithms to measure: torch.distributed's own, and all of Meshwright's that could be the fastest.

    ``boxes``: the ranks of each box (machine), in the text form of ``schedules/collectives/hierarchy.py``; empty if all
    ranks are in one box, or each rank is in a box of its own.
    """
    whole = operation == "all_reduce"
    if num_ranks == 2:  # with two ranks, each other algorithm equals one of these
        return (NATIVE, "butterfly", "ring") if whole else (NATIVE, "star")
    flat = ("butterfly", "shares", "ring", "rabenseifner") if whole else ("star", "ring", "halving")
    return (NATIVE, *flat, *(_along(operation, boxes) if boxes else ()))


def in_pieces(name: str) -> bool:
    """Whether an algorithm cuts the vector into pieces, which saves time only for long vectors."""
    leveled = hierarchy.read(name)
    return leveled is not None and leveled.pieces > 1


def _along(operation: str, boxes: str) -> Iterator[str]:
    leveled = hierarchy.read(hierarchy.written("star", "ring", boxes))
    assert leveled is not None
    same = ("rabenseifner", "halving", "star") if len(leveled.boxes) == 2 else ()  # with two boxes, these equal a ring
    for across in hierarchy.ACROSS_BY_OPERATION.get(operation, ()):
        if across != "tree" and across not in same:  # a butterfly takes half as long as a tree
            for pieces in (1, PIECES) if operation == "all_reduce" else (1,):
                yield hierarchy.written("star", across, boxes, pieces)


@lru_cache(maxsize=256)
def parsed(text: str) -> Mapping[str, Ranges]:
    """Parse a text into the ranges of each operation.

    Raises:
        PlanError: the text is malformed, or names an unknown operation or algorithm.
    """
    result: dict[str, list[tuple[int, str]]] = {}
    for part in text.split(";"):
        operation, _, rest = part.strip().partition(" ")
        for index, entry in enumerate(rest.split(",")):
            words = entry.split()
            if len(words) != 1 + (index > 0) or (index and not words[0].isdigit()):
                raise PlanError(
                    f"{entry.strip()!r} is not a size and an algorithm",
                    where=f"algorithms, {text!r}",
                    remedy="write OPERATION NAME, BYTES NAME, ...; the first name needs no size",
                )
            result.setdefault(operation, []).append((int(words[0]) if index else 0, _known(operation, words[-1], text)))
    return result


def names(text: str) -> frozenset[str]:
    """All algorithms that a text names."""
    if " " not in text:
        return frozenset((text,))
    return frozenset(name for ranges in parsed(text).values() for _, name in ranges)


def written(ranges: Mapping[str, Ranges]) -> str:
    """The text of ranges, in which each operation begins at 0 bytes; just ``native`` if every algorithm is native."""
    if all(name == NATIVE for each in ranges.values() for _, name in each):
        return NATIVE
    parts = []
    for operation, each in ranges.items():
        parts.append(f"{operation} " + ", ".join(f"{least} {name}" if least else name for least, name in each))
    return "; ".join(parts)


def _known(operation: str, name: str, text: str) -> str:
    if operation not in ALGORITHMS or not runs(operation, name):
        there = ", ".join((NATIVE, MPI, *ALGORITHMS[operation])) if operation in ALGORITHMS else ", ".join(ALGORITHMS)
        what = f"algorithm {name!r} of {operation}" if operation in ALGORITHMS else f"operation {operation!r}"
        raise PlanError(f"there is no {what}", where=f"algorithms, {text!r}", remedy=f"one of {there}")
    return name
