"""The steps of collectives by operation and algorithm, for any number of ranks and elements."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from meshwright.errors import Problem, ScheduleError, refuse
from meshwright.schedules.collectives import group
from meshwright.schedules.collectives.group import Half, Owned, Whole
from meshwright.schedules.collectives.hierarchy import (
    ACROSS_BY_OPERATION,
    all_reduce_in_levels,
    leaves,
    read,
    reduce_scatter_in_levels,
)
from meshwright.schedules.collectives.steps import Move, RequiredSum, Rounds, Span, Steps, cut, steps_from_rounds

ALL_REDUCE: dict[str, Whole] = {
    "star": group.up_and_down(group.reduce_star),
    "naive": group.all_reduce_naive,
    "partitioned": group.in_halves(group.scatter_partitioned, group.gather_partitioned),
    "shares": group.in_halves(group.scatter_star, group.gather_star),
    "ring": group.in_halves(group.scatter_ring, group.gather_ring),
    "tree": group.up_and_down(group.reduce_tree),
    "binary-tree": group.up_and_down(group.reduce_binary_tree),
    "double-tree": group.all_reduce_double_tree,
    "butterfly": group.all_reduce_butterfly,
    "rabenseifner": group.all_reduce_rabenseifner,
}
"""All-reduces in place, by name. ``shares`` runs a star for each rank's share of the vector, all at the same time."""

DENSE_GATHER, BALANCED = "dense-gather", "balanced"
FOR_SELECTIONS: dict[str, Whole] = {
    DENSE_GATHER: group.in_halves(group.scatter_partitioned, group.gather_ring),
    BALANCED: group.in_halves(group.scatter_partitioned, group.gather_partitioned),
}
"""All-reduces that differ from other all-reduces only if a codec selects elements (topk, threshold).

``dense-gather``: each rank adds up the chosen elements of its part, and sends all elements of the sum (SparCML's DSAR,
Renggli et al. 2019). ``balanced``: parts hold about equal numbers of chosen elements. Each rank sends the largest
elements of its sum, so that all ranks together send about as many elements as one rank has chosen (Ok-Topk, Li and
Hoefler 2022)."""

HALVES: Mapping[str, tuple[Half, Half]] = {
    "star": (group.scatter_star, group.gather_star),
    "partitioned": (group.scatter_partitioned, group.gather_partitioned),
    "ring": (group.scatter_ring, group.gather_ring),
    "halving": (group.scatter_halving, group.gather_doubling),
}
"""Reduce-scatters, each with the all-gather that is its reverse."""

TO_ONE: Mapping[str, Whole] = {
    "star": group.reduce_star,
    "tree": group.reduce_tree,
    "halving": lambda ranks, span: (
        group.scatter_halving(ranks, group.owns(span, len(ranks)))
        + group.gather_tree(ranks, group.owns(span, len(ranks)))
    ),
}
"""Reduces to the first rank. In reverse, they are broadcasts."""

GATHERS: Mapping[str, Callable[[Sequence[int], Owned], Rounds]] = {
    "star": group.gather_to_first,
    "tree": group.gather_tree,
}
"""Gathers at the first rank. In reverse, they are scatters."""

IN_TURN = ("one-by-one", "contention-free")
"""All-reduces in which ranks send their original vectors while they add up received vectors. They need memory for two
vectors."""

Counts = Sequence[Sequence[int]]
"""``counts[i][j]``: the elements that rank i sends to rank j."""

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (*ALL_REDUCE, *IN_TURN),
    "reduce_scatter": tuple(HALVES),
    "all_gather": tuple(HALVES),
    "reduce": tuple(TO_ONE),
    "broadcast": tuple(TO_ONE),
    "gather": tuple(GATHERS),
    "scatter": tuple(GATHERS),
    "all_to_all": ("naive", "partitioned"),
    "barrier": ("central", "dissemination"),
}


def all_reduce(algorithm: str, num_ranks: int, length: int, *, server: bool = False) -> Steps:
    """The steps after which every rank holds the sum of all vectors of ``length`` elements.

    ``algorithm`` is a name in ``ALGORITHMS``, or the name of a hierarchical algorithm (``ring+rabenseifner@2x4``, see
    ``hierarchy.py``). ``server``: the star's centre is an extra rank, which contributes nothing.

    Raises:
        ScheduleError: the algorithm is unknown or made for another number of ranks, or a number is too small.
    """
    _check("all_reduce", algorithm, num_ranks, length)
    ranks, whole, served = range(num_ranks), (0, length), server and algorithm == "star"
    if (leveled := read(algorithm)) is not None:
        rounds = all_reduce_in_levels(leveled, length)
    elif algorithm in IN_TURN:
        return _in_turn(algorithm, num_ranks, length)
    else:
        rounds = (ALL_REDUCE | FOR_SELECTIONS)[algorithm]([num_ranks, *ranks] if served else ranks, whole)
    before, after = ((whole,),) * num_ranks, ((_sum_of(num_ranks, whole),),) * num_ranks
    return steps_from_rounds("all_reduce", algorithm, length, rounds, before + ((),) * served, after + ((),) * served)


def _in_turn(algorithm: str, size: int, length: int) -> Steps:
    """Every rank sends its vector to every other rank. In a round, one rank sends one message (``one-by-one``), or
    every rank sends one message (``contention-free``)."""
    whole, out = (0, length), (length, 2 * length)
    start = [Move(rank, rank, 0, length, length) for rank in range(size) if length]
    turns = range(1, size) if length else ()
    sent = [[Move(i, (i + turn) % size, 0, length, length, True) for i in range(size)] for turn in turns]
    if algorithm == "one-by-one":
        rounds = [start, *([moves[i]] for i in range(size) for moves in sent)]
    else:
        rounds = [start, *sent]
    sums = RequiredSum(out, tuple((rank, 0) for rank in range(size)))
    return steps_from_rounds("all_reduce", algorithm, length, rounds, ((whole,),) * size, ((sums,),) * size, 2 * length)


def reduce_scatter(algorithm: str, counts: Sequence[int]) -> Steps:
    """The steps after which rank i holds part i of the sum: ``counts[i]`` elements, at their position in the vector."""
    spans = _parts("reduce_scatter", algorithm, counts)
    size, length = len(counts), sum(counts)
    after = ((_sum_of(size, span),) for span in spans)
    return steps_from_rounds(
        "reduce_scatter", algorithm, length, _scatter(algorithm, spans), (((0, length),),) * size, after
    )


def _scatter(algorithm: str, spans: Sequence[Span]) -> Rounds:
    owned = [[span] for span in spans]
    if (leveled := read(algorithm)) is not None:
        return reduce_scatter_in_levels(leveled, owned)
    return HALVES[algorithm][0](range(len(spans)), owned)


def all_gather(algorithm: str, counts: Sequence[int]) -> Steps:
    """The steps after which every rank holds all parts, each at its position. Rank i contributes ``counts[i]``
    elements."""
    spans = _parts("all_gather", algorithm, counts)
    if read(algorithm) is not None:
        rounds = group.backwards(_scatter(algorithm, spans))
    else:
        rounds = HALVES[algorithm][1](range(len(counts)), [[span] for span in spans])
    after = (_each_own(spans),) * len(counts)
    return steps_from_rounds("all_gather", algorithm, sum(counts), rounds, ((span,) for span in spans), after)


def reduce(algorithm: str, num_ranks: int, length: int, root: int = 0) -> Steps:
    """The steps after which ``root`` holds the sum of all vectors; the other ranks' values are undefined."""
    ranks = _from(root, "reduce", algorithm, num_ranks, length)
    whole = (0, length)
    after = ((_sum_of(num_ranks, whole),) if rank == root else () for rank in range(num_ranks))
    return steps_from_rounds(
        "reduce", algorithm, length, TO_ONE[algorithm](ranks, whole), ((whole,),) * num_ranks, after
    )


def broadcast(algorithm: str, num_ranks: int, length: int, root: int = 0) -> Steps:
    """The steps after which all ranks hold ``root``'s vector."""
    ranks = _from(root, "broadcast", algorithm, num_ranks, length)
    whole = (0, length)
    if algorithm == "halving":  # van de Geijn: scatter down a tree, then all-gather
        owned = group.owns(whole, num_ranks)
        rounds = group.backwards(group.gather_tree(ranks, owned)) + group.gather_doubling(ranks, owned)
    else:
        rounds = group.backwards(TO_ONE[algorithm](ranks, whole))
    before = ((whole,) if rank == root else () for rank in range(num_ranks))
    return steps_from_rounds(
        "broadcast", algorithm, length, rounds, before, ((RequiredSum(whole, ((root, 0),)),),) * num_ranks
    )


def gather(algorithm: str, counts: Sequence[int], root: int = 0) -> Steps:
    """The steps after which ``root`` holds all parts, each at its position. Rank i contributes ``counts[i]``
    elements."""
    spans = _parts("gather", algorithm, counts)
    ranks = _from(root, "gather", algorithm, len(counts), sum(counts))
    rounds = GATHERS[algorithm](ranks, [[spans[rank]] for rank in ranks])
    after = (_each_own(spans) if rank == root else () for rank in range(len(counts)))
    return steps_from_rounds("gather", algorithm, sum(counts), rounds, ((span,) for span in spans), after)


def scatter(algorithm: str, counts: Sequence[int], root: int = 0) -> Steps:
    """The steps after which rank i holds its ``counts[i]`` elements of ``root``'s vector, at their position in it."""
    spans = _parts("scatter", algorithm, counts)
    ranks = _from(root, "scatter", algorithm, len(counts), sum(counts))
    rounds = group.backwards(GATHERS[algorithm](ranks, [[spans[rank]] for rank in ranks]))
    before = (((0, sum(counts)),) if rank == root else () for rank in range(len(counts)))
    after = ((RequiredSum(span, ((root, span[0]),)),) for span in spans)
    return steps_from_rounds("scatter", algorithm, sum(counts), rounds, before, after)


def all_to_all(algorithm: str, counts: Counts) -> Steps:
    """The steps in which rank i sends ``counts[i][j]`` elements to rank j.

    The elements that a rank sends lie at the start of its memory, in the order of the receivers. The elements that it
    receives lie in the order of the senders. They begin at the same position on all ranks: behind the sent elements
    of the rank that sends most.
    """
    size = len(counts)
    _check("all_to_all", algorithm, size, min((value for row in counts for value in row), default=0))
    if any(len(row) != size for row in counts):
        raise ScheduleError("a row has another length", where="counts", remedy="give as many counts as ranks, each")
    sent = [list(accumulate(row, initial=0)) for row in counts]
    base = max((row[-1] for row in sent), default=0)
    received = [list(accumulate((counts[i][j] for i in range(size)), initial=base)) for j in range(size)]

    def of(i: int, j: int) -> list[Move]:
        return [Move(i, j, sent[i][j], received[j][i], counts[i][j])] if counts[i][j] else []

    rounds: Rounds = [[move for i in range(size) for move in of(i, (i + turn) % size)] for turn in range(size)]
    if algorithm == "naive":
        rounds = [*rounds[:1], [move for moves in rounds[1:] for move in moves]]
    after = (
        tuple(
            RequiredSum((received[j][i], received[j][i + 1]), ((i, sent[i][j]),)) for i in range(size) if counts[i][j]
        )
        for j in range(size)
    )
    space = max((row[-1] for row in received), default=0)
    return steps_from_rounds(
        "all_to_all", algorithm, sum(map(sum, counts)), rounds, (((0, row[-1]),) for row in sent), after, space
    )


def barrier(algorithm: str, num_ranks: int) -> Steps:
    """The steps of a barrier: no rank finishes them before every rank has begun them. Messages are empty."""
    _check("barrier", algorithm, num_ranks, 0)
    if algorithm == "central":
        others = range(1, num_ranks)
        rounds = [[Move(rank, 0, 0, 0, 0) for rank in others], [Move(0, rank, 0, 0, 0) for rank in others]]
    else:  # after round k, every rank has news of the 2^(k+1) - 1 ranks before it (Hensgen, Finkel, Manber 1988)
        rounds = [
            [Move(rank, (rank + distance) % num_ranks, 0, 0, 0) for rank in range(num_ranks)]
            for distance in group.distances(num_ranks)
        ]
    return steps_from_rounds("barrier", algorithm, 0, rounds, ((),) * num_ranks, ((),) * num_ranks)


def build(
    operation: str, algorithm: str, num_ranks: int, length: int, root: int = 0, counts: Counts | None = None
) -> Steps:
    """The steps of any operation over a vector of ``length`` elements, which is cut into nearly equal parts. In an
    all-to-all each rank sends ``length`` elements, unless ``counts`` is given, as for :func:`all_to_all`. For an
    all-gather or a reduce-scatter, ``counts`` has a single row with the numbers of elements of the parts."""
    _check(operation, algorithm, num_ranks, length)
    parts = [end - begin for begin, end in cut((0, length), num_ranks)]
    makers: dict[str, Callable[[], Steps]] = {
        "all_reduce": lambda: all_reduce(algorithm, num_ranks, length),
        "reduce_scatter": lambda: reduce_scatter(algorithm, counts[0] if counts else parts),
        "all_gather": lambda: all_gather(algorithm, counts[0] if counts else parts),
        "reduce": lambda: reduce(algorithm, num_ranks, length, root),
        "broadcast": lambda: broadcast(algorithm, num_ranks, length, root),
        "gather": lambda: gather(algorithm, parts, root),
        "scatter": lambda: scatter(algorithm, parts, root),
        "all_to_all": lambda: all_to_all(algorithm, counts or [parts] * num_ranks),
        "barrier": lambda: barrier(algorithm, num_ranks),
    }
    return makers[operation]()


def is_there(operation: str, algorithm: str) -> bool:
    """Whether an operation has an algorithm of this name for at least one number of ranks."""
    parsed = read(algorithm)
    if parsed is None:
        return algorithm in ALGORITHMS.get(operation, ()) or (operation == "all_reduce" and algorithm in FOR_SELECTIONS)
    return parsed.across in ACROSS_BY_OPERATION.get(operation, ()) and (parsed.pieces == 1 or operation == "all_reduce")


def _sum_of(num_ranks: int, span: Span) -> RequiredSum:
    """The part with the sum of all ranks' elements at ``span``."""
    return RequiredSum(span, tuple((rank, span[0]) for rank in range(num_ranks)))


def _each_own(spans: Sequence[Span]) -> tuple[RequiredSum, ...]:
    """The parts of all ranks, each at its position."""
    return tuple(RequiredSum(span, ((rank, span[0]),)) for rank, span in enumerate(spans))


def _parts(operation: str, algorithm: str, counts: Sequence[int]) -> tuple[Span, ...]:
    _check(operation, algorithm, len(counts), min(counts, default=0))
    return tuple(pairwise(accumulate(counts, initial=0)))


def _from(root: int, operation: str, algorithm: str, num_ranks: int, length: int) -> list[int]:
    """The ranks in order, starting with the root."""
    _check(operation, algorithm, num_ranks, length)
    if not 0 <= root < num_ranks:
        raise ScheduleError(f"there is no rank {root}", where="root", remedy=f"the ranks are 0 to {num_ranks - 1}")
    return [(root + i) % num_ranks for i in range(num_ranks)]


def _check(operation: str, algorithm: str, num_ranks: int, length: int) -> None:
    refuse(ScheduleError, _problems(operation, algorithm, num_ranks, length))


def _problems(operation: str, algorithm: str, num_ranks: int, length: int) -> Iterator[Problem]:
    if operation not in ALGORITHMS:
        yield "operation", f"there is no collective {operation!r}", f"one of {', '.join(ALGORITHMS)}"
    if not is_there(operation, algorithm):
        along = ", or one along levels: star+ring@2x4" if operation in ACROSS_BY_OPERATION else ""
        yield operation, f"there is no algorithm {algorithm!r}", f"one of {', '.join(ALGORITHMS[operation])}{along}"
    if (leveled := read(algorithm)) is not None:
        held = leaves(leveled.boxes)
        if len(held) != num_ranks:
            yield algorithm, f"{num_ranks} ranks, of which the boxes hold {len(held)}", "name every rank once"
        if sorted(held) != list(range(num_ranks)):
            yield "boxes", f"the boxes hold the ranks {', '.join(map(str, held))}", "name 0, 1, ... once each"
    for what, value, least in (("ranks", num_ranks, 1), ("elements", length, 0)):
        if value < least:
            yield operation, f"{value} {what}", f"give {least} or more"
