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
from meshwright.schedules.reshard import Box, Gather, Piece, TransferPlan, transfer

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


def run(crossing: Crossing) -> TransferPlan:
    """Executes a plan on every rank, checks all that it promises, and returns it."""
    shape, source, source_sizes, target, target_sizes = crossing
    plan = transfer(shape, source, source_sizes, target, target_sizes)
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    held, wanted = cut(whole, source, source_sizes), cut(whole, target, target_sizes)
    (part,) = {part.shape for part in wanted}

    got = [np.full(part, -1, np.int64) for _ in wanted]
    writes = [np.zeros(part, np.int64) for _ in wanted]
    crossed = np.zeros(shape, np.int64).reshape(-1)
    for piece in plan.pieces:
        value = held[piece.source][at(piece.source_box)]
        assert value.size > 0
        assert got[piece.target][at(piece.target_box)].shape == value.shape
        got[piece.target][at(piece.target_box)] = value
        writes[piece.target][at(piece.target_box)] += 1
        crossed[value.reshape(-1)] += 1
    assert (crossed == 1).all()

    awaited = [np.ones(part, np.int64) for _ in wanted]
    for gather in plan.gathers:
        for rank, box in zip(gather.ranks, gather.boxes, strict=True):
            awaited[rank][...] = 0
            if box is not None:
                awaited[rank][at(box)] = 1
    for count, expected in zip(writes, awaited, strict=True):
        assert (count == expected).all()

    for gather in plan.gathers:
        complete(gather, got, part)
    for mine, expected in zip(got, wanted, strict=True):
        assert (mine == expected).all()

    order = [(piece.target, piece.source, piece.target_box) for piece in plan.pieces]
    assert order == sorted(order)
    assert plan == transfer(shape, source, source_sizes, target, target_sizes)
    return plan


def complete(gather: Gather, got: list[Array], shape: tuple[int, ...]) -> None:
    """An all-gather or a broadcast, as a target mesh would run it."""
    part = np.full(shape, -1, np.int64)
    boxes = [box for box in gather.boxes if box is not None]
    for rank, box in zip(gather.ranks, boxes, strict=False):
        part[at(box)] = got[rank][at(box)]
    if len(boxes) == len(gather.ranks):
        assert len({part[at(box)].shape for box in boxes}) == 1
        assert boxes == sorted(boxes)
    else:
        assert gather.boxes == (tuple((0, size) for size in shape), *[None] * (len(gather.ranks) - 1))
    for rank in gather.ranks:
        got[rank][...] = part


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
            Piece(0, 0, ((0, 2), (0, 3)), ((0, 2), (0, 3))),
            Piece(1, 0, ((0, 2), (0, 3)), ((2, 4), (0, 3))),
            Piece(0, 1, ((0, 2), (3, 6)), ((0, 2), (0, 3))),
            Piece(1, 1, ((0, 2), (3, 6)), ((2, 4), (0, 3))),
        ),
        (),
    )


def test_replicas_each_receive_a_chunk_from_another_replica() -> None:
    plan = run(((4, 3), {}, {"tp": 2}, {}, {"tp": 2}))
    assert plan.pieces == (
        Piece(0, 0, ((0, 2), (0, 3)), ((0, 2), (0, 3))),
        Piece(1, 1, ((2, 4), (0, 3)), ((2, 4), (0, 3))),
    )
    assert plan.gathers == (Gather((0, 1), (((0, 2), (0, 3)), ((2, 4), (0, 3)))),)


def test_chunks_are_of_the_first_dim_that_divides() -> None:
    (gather,) = run(((3, 4), {}, {}, {}, {"tp": 2})).gathers
    assert gather == Gather((0, 1), (((0, 3), (0, 2)), ((0, 3), (2, 4))))


def test_what_does_not_divide_is_broadcast() -> None:
    plan = run(((3, 5), {}, {"tp": 2}, {}, {"tp": 2}))
    assert plan.pieces == (Piece(0, 0, ((0, 3), (0, 5)), ((0, 3), (0, 5))),)
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
    assert plan.pieces == (Piece(0, 0, ((0, 12),), ((0, 12),)), Piece(1, 1, ((0, 12),), ((0, 12),)))
    plan = run(((24,), placements, {"tp": 2}, {}, {}))
    assert [piece.target_box for piece in plan.pieces] == [
        ((0, 4),), ((8, 12),), ((16, 20),), ((4, 8),), ((12, 16),), ((20, 24),)
    ]  # fmt: skip


def test_axes_of_size_one_or_without_a_size_say_nothing() -> None:
    plan = transfer((3,), {"dp": Partial(), "cp": Shard(5)}, {"dp": 1}, {"pp": Partial()}, {})
    assert plan == TransferPlan((Piece(0, 0, ((0, 3),), ((0, 3),)),), ())


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
