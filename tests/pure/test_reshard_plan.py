"""Transfers between submeshes: every element crosses as often as it must, and arrives where the placement says."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.ir.placement import Partial, Placements, Replicate, Shard
from meshwright.schedules.reshard import Box, Gather, TransferBox, TransferPlan, transfer

Sizes = dict[str, int]
Crossing = tuple[tuple[int, ...], Placements, Sizes, Placements, Sizes]
Array = np.ndarray[Any, np.dtype[np.int64]]


def cut(whole: Array, placements: Placements, sizes: Sizes) -> list[Array]:
    """Every rank's part, cut as lower/reshard.py cuts: by reshaping, axis after axis."""
    parts = []
    for coordinates in itertools.product(*map(range, sizes.values())):
        value, done = whole, list[tuple[Shard, int]]()
        for (axis, size), index in zip(sizes.items(), coordinates, strict=True):
            placement = placements.get(axis)
            if size == 1 or not isinstance(placement, Shard):
                continue
            blocks = placement.outer
            for other, parts_of in done:
                if other.dim == placement.dim and other.outer < placement.outer:
                    blocks //= parts_of
            dim, lead, tail = placement.dim, value.shape[: placement.dim], value.shape[placement.dim + 1 :]
            length = value.shape[dim] // size
            split = value.reshape(*lead, blocks, size, length // blocks, *tail)
            value = split.take(index, axis=dim + 1).reshape(*lead, length, *tail)
            done.append((placement, size))
        parts.append(value)
    return parts


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def run(crossing: Crossing, receivers: tuple[int, ...] = ()) -> TransferPlan:
    """Executes a plan on every rank, checks all that it promises, and returns it."""
    shape, source, source_sizes, target, target_sizes = crossing
    plan = transfer(shape, source, source_sizes, target, target_sizes, receivers)
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    held, wanted = cut(whole, source, source_sizes), cut(whole, target, target_sizes)
    (part,) = {part.shape for part in wanted}

    results = [np.full(part, -1, np.int64) for _ in wanted]
    writes = [np.zeros(part, np.int64) for _ in wanted]
    crossed = np.zeros(shape, np.int64).reshape(-1)
    for piece in plan.pieces:
        value = held[piece.source][at(piece.source_box)]
        assert value.size > 0
        assert results[piece.target][at(piece.target_box)].shape == value.shape
        results[piece.target][at(piece.target_box)] = value
        writes[piece.target][at(piece.target_box)] += 1
        crossed[value.reshape(-1)] += 1
    assert (crossed == groups_that_want(wanted, receivers or (len(wanted),), shape)).all()

    awaited = [np.ones(part, np.int64) for _ in wanted]
    for gather in plan.gathers:
        for rank, box in zip(gather.ranks, gather.boxes, strict=True):
            awaited[rank][...] = 0
            if box is not None:
                awaited[rank][at(box)] = 1
    for count, expected in zip(writes, awaited, strict=True):
        assert (count == expected).all()

    for gather in plan.gathers:
        complete(gather, results, part)
    for result, expected in zip(results, wanted, strict=True):
        assert (result == expected).all()

    order = [(piece.target, piece.source, piece.target_box) for piece in plan.pieces]
    assert order == sorted(order)
    assert plan == transfer(shape, source, source_sizes, target, target_sizes, receivers)
    return plan


def groups_that_want(wanted: list[Array], receivers: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The number of groups of receivers with a rank that needs the element, for every element."""
    count, first = np.zeros(math.prod(shape), np.int64), 0
    for size in receivers:
        needed = np.zeros_like(count)
        for part in wanted[first : first + size]:
            needed[part.reshape(-1)] = 1
        count, first = count + needed, first + size
    return count


def complete(gather: Gather, results: list[Array], shape: tuple[int, ...]) -> None:
    """An all-gather or a broadcast, as a target mesh would run it."""
    part = np.full(shape, -1, np.int64)
    boxes = [box for box in gather.boxes if box is not None]
    for rank, box in zip(gather.ranks, boxes, strict=False):
        part[at(box)] = results[rank][at(box)]
    if len(boxes) == len(gather.ranks):
        assert len({part[at(box)].shape for box in boxes}) == 1
        assert boxes == sorted(boxes)
    else:
        assert gather.boxes == (tuple((0, size) for size in shape), *[None] * (len(gather.ranks) - 1))
    for rank in gather.ranks:
        results[rank][...] = part


@st.composite
def sides(draw: st.DrawFn, dims: int) -> tuple[Placements, Sizes, list[int]]:
    """Placements, sizes, and what each dim must be a multiple of."""
    sizes = {axis: draw(st.integers(1, 4)) for axis in ("dp", "cp", "tp")[: draw(st.integers(0, 3))]}
    assume(math.prod(sizes.values()) <= 16)
    placements: Placements = {}
    multiples = [1] * dims
    for axis, size in sizes.items():
        dim = draw(st.integers(-1, dims - 1))
        if dim < 0:
            if draw(st.booleans()):
                placements[axis] = Replicate()
            continue
        before = [(p.outer, sizes[a]) for a, p in placements.items() if isinstance(p, Shard) and p.dim == dim]
        cuts = math.prod(parts for _, parts in before)
        nested = [outer for outer, _ in before]
        around = {
            outer: math.prod(parts for other, parts in before if other < outer)
            for outer in (1, *nested, cuts, 2 * cuts, 3 * cuts)
        }
        outer = draw(st.sampled_from([outer for outer, parts in around.items() if outer % parts == 0]))
        blocks = outer // around[outer]
        placements[axis] = Shard(dim, outer)
        multiples[dim] = math.lcm(multiples[dim], cuts * blocks * size)
    placements["absent"] = Shard(0)
    return placements, sizes, multiples


@st.composite
def crossings(draw: st.DrawFn) -> Crossing:
    dims = draw(st.integers(1, 3))
    source, source_sizes, first = draw(sides(dims))
    target, target_sizes, second = draw(sides(dims))
    shape = tuple(math.lcm(a, b) * draw(st.integers(1, 3)) for a, b in zip(first, second, strict=True))
    assume(math.prod(shape) <= 20_000)
    return shape, source, source_sizes, target, target_sizes


@given(crossings())
def test_every_element_arrives(crossing: Crossing) -> None:
    run(crossing)


@given(crossings(), st.data())
def test_every_element_arrives_once_in_every_group_that_needs_it(crossing: Crossing, data: st.DataObject) -> None:
    receivers, left = list[int](), math.prod(crossing[4].values())
    while left:
        receivers.append(data.draw(st.integers(1, left)))
        left -= receivers[-1]
    plan = run(crossing, tuple(receivers))
    group_of = [group for group, size in enumerate(receivers) for _ in range(size)]
    for gather in plan.gathers:
        assert len({group_of[rank] for rank in gather.ranks}) == 1, "ranks of other groups take no part"


# Two ranks of one box send 48 elements to eight ranks of two other boxes, which all need all of them.
BOXES = [range(2), range(2, 6), range(6, 10)]


@pytest.mark.parametrize(
    ("receivers", "between", "inside"),
    [
        ((8,), 48 + 8 * 4 * 6, 8 * 3 * 6),  # every chunk of 6 elements is sent to 4 ranks of the other box
        ((4, 4), 2 * 48, 8 * 3 * 12),  # once per box; every chunk of 12 elements stays inside
        ((1,) * 8, 8 * 48, 0),
    ],
    ids=str,
)
def test_elements_that_cross_between_boxes(receivers: tuple[int, ...], between: int, inside: int) -> None:
    plan = run(((48,), {}, {"tp": 2}, {}, {"tp": 8}), receivers)
    box_of = {rank: number for number, ranks in enumerate(BOXES) for rank in ranks}
    messages = [(piece.source, 2 + piece.target, piece.source_box) for piece in plan.pieces]
    for gather in plan.gathers:
        for rank, box in zip(gather.ranks, gather.boxes, strict=True):
            assert box is not None
            messages += [(2 + rank, 2 + other, box) for other in gather.ranks if other != rank]
    counted = {True: 0, False: 0}
    for sender, receiver, box in messages:
        counted[box_of[sender] != box_of[receiver]] += math.prod(stop - start for start, stop in box)
    assert (counted[True], counted[False]) == (between, inside)


@pytest.mark.parametrize("receivers", [(3,), (2, 3), (4, 0), (5, -1)], ids=str)
def test_receivers_that_are_not_the_ranks_of_the_stage_are_refused(receivers: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=f"{receivers[0]}.* ranks receive, the stage has 4") as error:
        transfer((8,), {}, {}, {}, {"tp": 4}, receivers)
    assert error.value.where == "receivers"


@given(crossings())
def test_parts_that_are_boxes_cross_as_boxes(crossing: Crossing) -> None:
    shape, source, source_sizes, target, target_sizes = crossing
    source, target = ({a: Shard(p.dim) if isinstance(p, Shard) else p for a, p in s.items()} for s in (source, target))
    plan = run((shape, source, source_sizes, target, target_sizes))
    # A sender may hold one part only, and two boxes have one box in common.
    pairs = [(piece.source, piece.target) for piece in plan.pieces]
    assert len(pairs) == len(set(pairs))


EXAMPLES: list[Crossing] = [
    ((4, 6), {"dp": Shard(0)}, {"dp": 2, "tp": 1}, {"tp": Shard(1)}, {"dp": 1, "tp": 2}),
    ((8, 6), {"dp": Shard(0), "tp": Shard(1)}, {"dp": 2, "tp": 2}, {"dp": Shard(0)}, {"dp": 4}),
    ((8, 6), {"dp": Shard(0)}, {"dp": 2, "tp": 2}, {"dp": Shard(0)}, {"dp": 4}),
    ((8, 3), {}, {}, {"dp": Shard(0)}, {"dp": 4}),
    ((8, 3), {}, {}, {}, {"dp": 4}),
    ((8, 3), {"dp": Shard(0)}, {"dp": 4}, {"dp": Shard(0)}, {"dp": 2}),
    ((6, 3), {"dp": Shard(0)}, {"dp": 3}, {"dp": Shard(0)}, {"dp": 2}),
    ((8, 8, 4), {"dp": Shard(0), "cp": Shard(1)}, {"dp": 2, "cp": 2, "tp": 2}, {"tp": Shard(2)}, {"dp": 2, "tp": 2}),
    ((8,), {"dp": Shard(0), "tp": Shard(0)}, {"dp": 2, "tp": 2}, {"tp": Shard(0), "dp": Shard(0)}, {"tp": 2, "dp": 4}),
    ((24,), {"tp": Shard(0, 3)}, {"tp": 2}, {"tp": Shard(0, 3)}, {"tp": 4}),
    ((24,), {"dp": Shard(0), "tp": Shard(0, 6)}, {"dp": 2, "tp": 2}, {"tp": Shard(0)}, {"dp": 3, "tp": 2}),
    ((), {}, {"dp": 2}, {}, {"dp": 2, "tp": 2}),
    ((5, 7), {}, {"dp": 2}, {"tp": Replicate()}, {"tp": 3}),
]


@pytest.mark.parametrize("crossing", EXAMPLES)
def test_examples_arrive(crossing: Crossing) -> None:
    run(crossing)


def test_rows_become_columns() -> None:
    plan = run(((4, 6), {"dp": Shard(0)}, {"dp": 2, "tp": 1}, {"tp": Shard(1)}, {"dp": 1, "tp": 2}))
    assert plan == TransferPlan(
        (
            TransferBox(0, 0, ((0, 2), (0, 3)), ((0, 2), (0, 3))),
            TransferBox(1, 0, ((0, 2), (0, 3)), ((2, 4), (0, 3))),
            TransferBox(0, 1, ((0, 2), (3, 6)), ((0, 2), (0, 3))),
            TransferBox(1, 1, ((0, 2), (3, 6)), ((2, 4), (0, 3))),
        ),
        (),
    )


def test_replicas_each_receive_a_chunk_from_another_replica() -> None:
    plan = run(((4, 3), {}, {"tp": 2}, {}, {"tp": 2}))
    assert plan.pieces == (
        TransferBox(0, 0, ((0, 2), (0, 3)), ((0, 2), (0, 3))),
        TransferBox(1, 1, ((2, 4), (0, 3)), ((2, 4), (0, 3))),
    )
    assert plan.gathers == (Gather((0, 1), (((0, 2), (0, 3)), ((2, 4), (0, 3)))),)


def test_chunks_are_of_the_first_dim_that_divides() -> None:
    (gather,) = run(((3, 4), {}, {}, {}, {"tp": 2})).gathers
    assert gather == Gather((0, 1), (((0, 3), (0, 2)), ((0, 3), (2, 4))))


def test_what_does_not_divide_is_broadcast() -> None:
    plan = run(((3, 5), {}, {"tp": 2}, {}, {"tp": 2}))
    assert plan.pieces == (TransferBox(0, 0, ((0, 3), (0, 5)), ((0, 3), (0, 5))),)
    assert plan.gathers == (Gather((0, 1), (((0, 3), (0, 5)), None)),)


def test_replicas_of_different_parts_gather_apart() -> None:
    plan = run(((8, 4), {"tp": Shard(1)}, {"dp": 2, "tp": 2}, {"tp": Shard(1)}, {"dp": 2, "tp": 2}))
    assert [gather.ranks for gather in plan.gathers] == [(0, 2), (1, 3)]
    assert [(piece.source, piece.target) for piece in plan.pieces] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_source_replicas_share_the_load() -> None:
    plan = run(((12, 4), {"tp": Shard(1)}, {"dp": 3, "tp": 2}, {}, {"dp": 6}))
    load = [0] * 6
    for piece in plan.pieces:
        load[piece.source] += math.prod(stop - start for start, stop in piece.source_box)
    assert load == [8] * 6


def test_blocks_that_both_sides_hold_alike_cross_as_one_piece() -> None:
    placements: Placements = {"tp": Shard(0, 3)}
    plan = run(((24,), placements, {"tp": 2}, placements, {"tp": 2}))
    assert plan.pieces == (TransferBox(0, 0, ((0, 12),), ((0, 12),)), TransferBox(1, 1, ((0, 12),), ((0, 12),)))
    plan = run(((24,), placements, {"tp": 2}, {}, {}))
    assert [piece.target_box for piece in plan.pieces] == [
        ((0, 4),), ((8, 12),), ((16, 20),), ((4, 8),), ((12, 16),), ((20, 24),)
    ]  # fmt: skip


def test_axes_of_size_one_or_without_a_size_say_nothing() -> None:
    plan = transfer((3,), {"dp": Partial(), "cp": Shard(5)}, {"dp": 1}, {"pp": Partial()}, {})
    assert plan == TransferPlan((TransferBox(0, 0, ((0, 3),), ((0, 3),)),), ())


def test_nothing_crosses_of_an_empty_tensor() -> None:
    assert transfer((0, 4), {"dp": Shard(0)}, {"dp": 2}, {}, {"dp": 2}) == TransferPlan((), ())


@pytest.mark.parametrize(
    ("placements", "sizes", "what"),
    [
        ({"tp": Partial()}, {"tp": 2}, "cannot cross"),
        ({"tp": Shard(2)}, {"tp": 2}, "does not have"),
        ({"tp": Shard(0)}, {"tp": 3}, "evenly"),
        ({"tp": Shard(0, 3)}, {"tp": 2}, "evenly"),
        ({"dp": Shard(0), "tp": Shard(0, 2)}, {"dp": 4, "tp": 2}, "evenly"),
    ],
)
def test_what_cannot_cross_is_refused(placements: Placements, sizes: Sizes, what: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        transfer((8, 4), placements, sizes, {}, {})
    assert error.value.where == "source placement"
    with pytest.raises(PlanError, match=what) as error:
        transfer((8, 4), {}, {}, placements, sizes)
    assert error.value.where == "target placement"
