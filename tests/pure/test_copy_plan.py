"""Copies in memory: whoever is lost, each part of the state is somewhere else, and is found there."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.copy_plan import Copy, KeptCopies, TensorPiece, newest_complete, plan_copies
from meshwright.runtime.shards import common_block

NAMES = st.sampled_from(["a", "b", "c", "d"])
PIECES = st.builds(
    lambda name, begin, size: TensorPiece(name, "float32", (begin,), (size,)),
    NAMES,
    st.integers(0, 3),
    st.integers(1, 40),
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[TensorPiece]], list[int]]:
    """What each rank holds, and the host of each rank; some pieces are held by several ranks."""
    hosts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    numbers = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    offers = [draw(st.lists(PIECES, max_size=5, unique=True)) for _ in hosts]
    for rank, offer in enumerate(offers):
        offer.append(TensorPiece(f"plain state of rank {rank}", "bytes", (0,), (100,)))
    return offers, [numbers[host] for host in hosts]


def copies(plans: list[KeptCopies], hosts: list[int], total: int, step: int = 7, without: int = -1) -> list[Copy]:
    return [
        Copy("g", total, step, plan.entries, host=host, rank=rank)
        for rank, (plan, host) in enumerate(zip(plans, hosts, strict=True))
        if host != without
    ]


@given(worlds())
def test_each_piece_is_kept_once_on_one_host_and_twice_on_several(
    world: tuple[list[list[TensorPiece]], list[int]],
) -> None:
    offers, hosts = world
    every = {piece for offer in offers for piece in offer}
    plans = plan_copies(offers, hosts)
    places: dict[TensorPiece, list[int]] = {piece: [] for piece in every}
    for plan, host in zip(plans, hosts, strict=True):
        for entry in plan.entries:
            places[entry.piece].append(host)
    wanted = min(2, len(set(hosts)))
    assert all(len(place) == len(set(place)) == wanted for place in places.values())
    for rank, plan in enumerate(plans):
        assert all(entry.piece in offers[rank] for entry in plan.entries[: plan.num_own])


@given(worlds())
def test_the_loss_of_any_one_host_loses_nothing(world: tuple[list[list[TensorPiece]], list[int]]) -> None:
    offers, hosts = world
    every = {piece for offer in offers for piece in offer}
    plans = plan_copies(offers, hosts)
    for lost in set(hosts) if len(set(hosts)) > 1 else ():
        newest = newest_complete(copies(plans, hosts, len(every), without=lost))
        assert newest is not None
        assert newest[0] == 7
        assert newest[1].keys() == every
        assert all(place.host != lost for places in newest[1].values() for place in places)


@given(worlds())
def test_what_is_sent_lies_as_where_it_is_received(world: tuple[list[list[TensorPiece]], list[int]]) -> None:
    offers, hosts = world
    plans = plan_copies(offers, hosts)
    sent = {rank: plan.sent for rank, plan in enumerate(plans) if plan.sent is not None}
    received = {block.rank: (rank, block) for rank, plan in enumerate(plans) for block in plan.received}
    assert sent.keys() == received.keys()
    for rank, block in sent.items():
        partner, other = received[rank]
        assert block.rank == partner
        assert hosts[partner] != hosts[rank]
        sent_pieces, received_pieces = (
            [(entry.piece, entry.begin - each.begin) for entry in plan.entries if each.begin <= entry.begin < each.end]
            for plan, each in ((plans[rank], block), (plans[partner], other))
        )
        assert sent_pieces == received_pieces
    for plan in plans:
        ends = [entry.begin + entry.piece.num_bytes for entry in plan.entries]
        begins = [*(entry.begin for entry in plan.entries[1:]), plan.num_bytes]
        assert all(end <= begin for end, begin in zip(ends, begins, strict=True))


def test_replicas_on_one_host_share_the_work() -> None:
    pieces = [TensorPiece(f"{number}", "float64", (0,), (100,)) for number in range(8)]
    plans = plan_copies([pieces] * 4, [0] * 4)
    assert [len(plan.entries) for plan in plans] == [2, 2, 2, 2]
    assert all(plan.sent is None and not plan.received for plan in plans)


def test_the_latest_step_that_is_complete() -> None:
    """A rank was killed in the middle of its copy of step 9: the slot of step 7 is still there."""
    pieces = [[TensorPiece("a", "float32", (0,), (4,))], [TensorPiece("b", "float32", (0,), (4,))]]
    plans = plan_copies(pieces, [0, 0])
    old, new = copies(plans, [0, 0], 2, step=7), copies(plans, [0, 0], 2, step=9)
    assert newest_complete([*old, *new]) is not None
    assert newest_complete([*old, *new])[0] == 9  # type: ignore[index]
    assert newest_complete([*old, new[0]])[0] == 7  # type: ignore[index]
    assert newest_complete([old[0], new[1]]) is None
    assert newest_complete([]) is None


@given(st.data(), st.integers(0, 3))
def test_overlaps_of_blocks_are_those_of_their_elements(data: st.DataObject, dims: int) -> None:
    block = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=dims, max_size=dims)
    first, second = data.draw(block), data.draw(block)

    def elements(box: list[tuple[int, int]]) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(begin, begin + size) for begin, size in box)))

    (offsets, sizes), (others, lengths) = ([[pair[at] for pair in box] for at in (0, 1)] for box in (first, second))
    overlap = common_block(offsets, sizes, others, lengths)
    common = elements(first) & elements(second)
    if overlap is None:
        assert not common
        return
    in_first, in_second, of_common = overlap
    assert math.prod(of_common) == len(common)
    at = tuple(begin + offset for begin, (offset, _) in zip(in_first, first, strict=True))
    assert at == tuple(begin + offset for begin, (offset, _) in zip(in_second, second, strict=True))
    assert elements(list(zip(at, of_common, strict=True))) == common
