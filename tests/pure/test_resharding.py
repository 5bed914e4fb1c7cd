"""Moves between placements: they arrive, no other sequence is cheaper, and equals come in one order."""

from itertools import product
from math import ceil, inf, log2, prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.ir.mesh import members
from meshwright.ir.placement import REPLICATE, Flat, Partial, Placement, Placements, Replicate, Shard
from meshwright.ir.resharding import AxisLink, Kind, Mover, ReshardingMove
from tests.tries import tries

SIZES = {"dp": 2, "tp": 2}
SHAPE = (48, 48)
SUM = Partial("sum")
ALIKE = {"dp": AxisLink(1e-6, 1e-9), "tp": AxisLink(1e-6, 1e-9)}
JOINED = ALIKE | {"dp+tp": AxisLink(1e-6, 1e-9)}
SLOW_DP = {"dp": AxisLink(1e-6, 1e-6), "tp": AxisLink(1e-6, 1e-9), "dp+tp": AxisLink(1e-6, 1e-6)}


def moves(
    have: Placements, want: Placements, links: dict[str, AxisLink], shape: tuple[int, ...]
) -> tuple[ReshardingMove, ...]:
    return Mover(SIZES, links).moves(have, want, shape, 4)


def text(have: Placements, want: Placements, links: dict[str, AxisLink], shape: tuple[int, ...] = SHAPE) -> str:
    return " ".join(f"{move.axis}:{move.kind}" for move in moves(have, want, links, shape))


@pytest.mark.parametrize(
    ("have", "want", "expected"),
    [
        ({}, {}, ""),
        ({"tp": Shard(0)}, {"tp": Shard(0)}, ""),
        ({"tp": REPLICATE}, {}, ""),
        ({"tp": SUM}, {"tp": SUM}, ""),
        ({"tp": SUM}, {}, "tp:all_reduce"),
        ({"tp": SUM}, {"tp": Shard(1)}, "tp:reduce_scatter"),
        ({"tp": Partial("max")}, {"tp": Shard(1)}, "tp:all_reduce tp:slice"),
        ({"tp": Shard(0)}, {}, "tp:all_gather"),
        ({"tp": Shard(0)}, {"tp": Shard(1)}, "tp:all_to_all"),
        ({"tp": Shard(0)}, {"tp": Shard(0, 2)}, "tp:all_gather tp:slice"),
        ({}, {"tp": Shard(1)}, "tp:slice"),
        # what is only wanted in part is only reduced in part
        ({"tp": SUM}, {"dp": Shard(0)}, "dp:slice tp:all_reduce"),
        ({"dp": SUM, "tp": Shard(0)}, {}, "dp:all_reduce tp:all_gather"),
        # one dim over both axes: the inner axis is gathered first, for the outer parts lie around it
        ({"dp": Shard(0), "tp": Shard(0)}, {}, "tp:all_gather dp:all_gather"),
        ({"dp": Shard(0), "tp": Shard(0)}, {"tp": Shard(0)}, "tp:all_gather dp:all_gather tp:slice"),
        # flat: gathered before all else, and cut last, or first where nothing else changes
        ({"dp": Flat()}, {}, "dp:all_gather"),
        ({"dp": SUM}, {"dp": Flat()}, "dp:reduce_scatter"),
        ({}, {"dp": Flat()}, "dp:slice"),
        ({"dp": Partial("max")}, {"dp": Flat()}, "dp:all_reduce dp:slice"),
        ({"dp": Flat(), "tp": Shard(0)}, {"tp": Shard(0)}, "dp:all_gather"),
        ({"dp": Flat(), "tp": Shard(0)}, {"dp": Flat()}, "dp:all_gather tp:all_gather dp:slice"),
        ({"dp": SUM, "tp": Shard(0)}, {"dp": Flat(), "tp": Shard(0)}, "dp:reduce_scatter"),
        ({"dp": SUM, "tp": SUM}, {"dp": Flat()}, "dp:reduce_scatter tp:all_reduce"),
        ({"dp": Shard(0)}, {"dp": Flat()}, "dp:all_gather dp:slice"),
    ],
)
def test_moves_of_single_axes(have: Placements, want: Placements, expected: str) -> None:
    assert text(have, want, ALIKE) == expected


@pytest.mark.parametrize(
    ("have", "want", "expected"),
    [
        ({"dp": SUM, "tp": SUM}, {}, "dp+tp:all_reduce"),
        ({"dp": Shard(1), "tp": Shard(1)}, {}, "dp+tp:all_gather"),
        ({"dp": SUM, "tp": SUM}, {"dp": Shard(1), "tp": Shard(1)}, "dp+tp:reduce_scatter"),
        ({"dp": Shard(1), "tp": Shard(1)}, {"dp": Shard(0), "tp": Shard(0)}, "dp+tp:all_to_all"),
        ({"dp": SUM, "tp": Shard(0)}, {}, "dp:all_reduce tp:all_gather"),
    ],
)
def test_axes_that_lie_alike_move_as_one(have: Placements, want: Placements, expected: str) -> None:
    assert text(have, want, JOINED) == expected


def test_over_a_slow_axis_goes_a_part_of_the_sum() -> None:
    both: Placements = {"dp": SUM, "tp": SUM}
    assert text(both, {}, SLOW_DP) == "tp:reduce_scatter dp:all_reduce tp:all_gather"
    assert text(both, {}, SLOW_DP, shape=()) == "dp:all_reduce tp:all_reduce"  # of a scalar there are no parts


def test_many_small_messages_are_dearer_than_a_large_one_where_latency_counts() -> None:
    slow = dict.fromkeys(JOINED, AxisLink(latency_s=1.0, byte_s=1e-9))
    assert text({"dp": SUM}, {"tp": Shard(0)}, slow) == "tp:slice dp:all_reduce"
    assert text({"dp": Shard(1), "tp": SUM}, {"dp": Shard(0)}, slow) == "tp:all_reduce dp:all_to_all"


PLACEMENTS: st.SearchStrategy[Placement] = st.one_of(
    st.just(REPLICATE),
    st.builds(Partial, st.sampled_from(["sum", "max", "min"])),
    st.builds(Shard, st.integers(0, 1), st.sampled_from([1, 2, 4])),
    st.just(Flat()),
)
LINKS = st.fixed_dictionaries(
    {
        axis: st.builds(AxisLink, st.sampled_from([1e-6, 1e-4]), st.sampled_from([1e-10, 1e-7]))
        for axis in ("dp", "tp", "dp+tp")
    }
)


def legal(placements: Placements) -> bool:
    """At most one axis is flat; two axes cut one dim alike, or one within the parts of the other."""
    shards = [placement for placement in placements.values() if isinstance(placement, Shard)]
    return list(placements.values()).count(Flat()) < 2 and (
        len(shards) < 2
        or shards[0].dim != shards[1].dim
        or shards[0] == shards[1]
        or max(shard.outer for shard in shards) % (2 * min(shard.outer for shard in shards)) == 0
    )


BY_AXIS = st.dictionaries(st.sampled_from(sorted(SIZES)), PLACEMENTS).filter(legal)
WHOLE = BY_AXIS.map(
    lambda placements: {axis: placement for axis, placement in placements.items() if not isinstance(placement, Partial)}
)


def explicit(placements: Placements) -> Placements:
    return {axis: placement for axis, placement in placements.items() if not isinstance(placement, Replicate)}


def seconds(path: tuple[ReshardingMove, ...], links: dict[str, AxisLink]) -> float:
    """By the formulas of the module's text, from the bytes that each move leaves or finds."""
    total = 0.0
    for move in path:
        p = prod(SIZES[axis] for axis in members(move.axis))
        held = [4 * prod(SHAPE) for _ in range(2)]
        for index, placements in enumerate((move.before, move.after)):
            for axis, placement in placements.items():
                if isinstance(placement, Shard | Flat):
                    held[index] //= SIZES[axis]
        link = links[move.axis]
        if move.kind != "slice":
            rounds = {"all_reduce": 2 * ceil(log2(p)), "all_to_all": p - 1}.get(move.kind, ceil(log2(p)))
            passes = 2 if move.kind == "all_reduce" else 1
            total += rounds * link.latency_s + passes * (p - 1) / p * max(held) * link.byte_s
    return total


@given(BY_AXIS, WHOLE, LINKS)
def test_each_move_begins_where_the_one_before_ends_and_the_last_arrives(
    have: Placements, want: Placements, links: dict[str, AxisLink]
) -> None:
    now = explicit(have)
    for move in moves(have, want, links, SHAPE):
        assert move.before == now
        now = move.after
    assert explicit(now) == explicit(want)


def parts(placements: Placements) -> list[frozenset[int]]:
    """The elements of the whole that each rank has, rank by rank."""
    whole = np.arange(prod(SHAPE)).reshape(SHAPE)
    elements = []
    for place in product(*map(range, SIZES.values())):
        value, now = whole, list[Shard]()
        for (axis, size), index in zip(SIZES.items(), place, strict=True):
            if not isinstance(placement := placements.get(axis), Shard):
                continue
            blocks = placement.outer // prod(
                2 for other in now if other.dim == placement.dim and other.outer < placement.outer
            )
            value = np.moveaxis(value, placement.dim, 0)
            rest = value.shape[1:]
            value = value.reshape(blocks, size, -1, *rest)[:, index].reshape(-1, *rest)
            value = np.moveaxis(value, 0, placement.dim)
            now.append(placement)
        elements.append(frozenset(value.reshape(-1).tolist()))
    return elements


GROUPS: dict[str, list[tuple[int, ...]]] = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)], "dp+tp": [(0, 1, 2, 3)]}


def allowed(kind: Kind, axis: str, before: Placements, after: Placements) -> bool:
    """Whether a collective can do it: only its axes change, sums are sums, and in every group somebody has what each
    rank is to have. An all-gather leaves all ranks of a group the same, an all-to-all and a scatter do not."""
    names = members(axis)
    source, target = before.get(names[0]), after.get(names[0])
    if any(before.get(name) != source or after.get(name) != target for name in names):
        return False
    if any(before.get(size) != after.get(size) for size in SIZES if size not in names):
        return False
    match kind:
        case "all_reduce":
            return isinstance(source, Partial) and target is None
        case "reduce_scatter":
            fits = source == SUM and isinstance(target, Shard)
        case "all_gather":
            fits = isinstance(source, Shard) and target is None
        case "all_to_all":
            fits = isinstance(source, Shard) and isinstance(target, Shard) and source.dim != target.dim
        case _:
            fits = source is None and isinstance(target, Shard) and len(names) == 1
    if not fits:
        return False
    have, want = parts(before), parts(after)
    if kind == "slice":
        return all(part <= own for own, part in zip(have, want, strict=True))
    held = {group: {part for rank in group for part in have[rank]} for group in GROUPS[axis]}
    return all(want[rank] <= union for group, union in held.items() for rank in group)


def cheapest(have: Placements, want: Placements, links: dict[str, AxisLink]) -> float:
    """By relaxing every pair of placements until nothing gets cheaper (Bellman, Ford)."""
    sums = [axis for axis, placement in have.items() if isinstance(placement, Partial)]
    part = [Shard(0)] if len(sums) > 1 else []
    choices = [
        list({REPLICATE, have.get(axis, REPLICATE), want.get(axis, REPLICATE), *(part if axis in sums else [])})
        for axis in SIZES
    ]
    states = [explicit(dict(zip(SIZES, pair, strict=True))) for pair in product(*choices)]
    states = [state for state in states if legal(state)]
    cost = [0.0 if state == explicit(have) else inf for state in states]
    kinds: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice")
    edges = [
        (first, second, seconds((ReshardingMove(kind, axis, SUM, states[first], states[second]),), links))
        for first, second in product(range(len(states)), repeat=2)
        if first != second
        for kind in kinds
        for axis in GROUPS
        if allowed(kind, axis, states[first], states[second])
    ]
    for _ in states:
        for first, second, took in edges:
            cost[second] = min(cost[second], cost[first] + took)
    return min(took for took, state in zip(cost, states, strict=True) if state == explicit(want))


def test_what_lies_right_does_not_keep_a_sum_from_going_along_levels() -> None:
    """The parts that are summed apart are of a dim that is not cut."""
    links = {"pod": AxisLink(5e-5, 8e-9), "dp": AxisLink(1e-5, 5e-10), "tp": AxisLink(1e-5, 2e-10)}
    mover = Mover({"pod": 2, "dp": 8, "tp": 2}, links)
    for dim in (0, 1):
        cut: Placements = {"tp": Shard(dim)}
        steps = mover.moves({"pod": SUM, "dp": SUM, **cut}, cut, (4096, 4096), 4)
        assert [(move.axis, move.kind) for move in steps] == [
            ("dp", "reduce_scatter"),
            ("pod", "all_reduce"),
            ("dp", "all_gather"),
        ]


SOLID = st.dictionaries(
    st.sampled_from(sorted(SIZES)), PLACEMENTS.filter(lambda placement: not isinstance(placement, Flat))
).filter(legal)


@tries(50)
@given(
    SOLID, SOLID.filter(lambda placements: not any(isinstance(each, Partial) for each in placements.values())), LINKS
)
# to gather both axes as one takes less than to gather the one that changes
@example(
    {"dp": Shard(0, 2), "tp": Shard(0, 2)},
    {"dp": Shard(0, 2)},
    {"dp": AxisLink(1e-6, 1e-10), "tp": AxisLink(1e-6, 1e-7), "dp+tp": AxisLink(1e-6, 1e-10)},
)
def test_the_search_is_equal_to_brute_force(have: Placements, want: Placements, links: dict[str, AxisLink]) -> None:
    assert seconds(moves(have, want, links, SHAPE), links) == pytest.approx(cheapest(have, want, links))


@given(BY_AXIS)
def test_what_lies_right_does_not_move(placements: Placements) -> None:
    assert moves(placements, placements, JOINED, SHAPE) == ()
