"""Placement of samples: expected uses by the binomial formula, owners by brute force, misses beside other caches."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.samples import (
    DISK,
    FILES,
    MEMORY,
    NOBODY,
    OWN_MEMORY,
    PEER,
    Indices,
    Room,
    belady_misses,
    count_uses,
    divided,
    expected_accesses,
    lru_misses,
    place,
    sources,
)

few_examples = settings(max_examples=80, deadline=None)


def epochs_of(num_samples: int, count: int, seed: int) -> list[Indices]:
    draw = np.random.default_rng(seed)
    return [draw.permutation(num_samples) for _ in range(count)]


def test_expected_accesses_of_imagenet() -> None:
    """Dryden et al. 2021, section 3.1: 31,635, and 31,863 in their simulation."""
    assert expected_accesses(16, 90, 1_281_167, 0.8) == pytest.approx(31_634.7, abs=0.05)


def test_expected_accesses_are_those_of_random_epochs() -> None:
    num_ranks, epochs, num_samples, delta = 4, 20, 20_000, 0.4
    pieces = (divided(order, 400, num_ranks, drop_last=True) for order in epochs_of(num_samples, epochs, 1))
    uses = count_uses(pieces, num_samples, num_ranks)
    average = (uses >= (1 + delta) * epochs / num_ranks).sum(axis=1).mean()
    assert average == pytest.approx(expected_accesses(num_ranks, epochs, num_samples, delta), rel=0.05)
    assert (uses.sum(axis=0) == epochs).all()


@given(count=st.integers(1, 4), per_rank=st.integers(1, 3), batches=st.integers(1, 4), interleaved=st.booleans())
@few_examples
def test_the_parts_of_ranks_make_the_batches(count: int, per_rank: int, batches: int, interleaved: bool) -> None:
    order = np.arange(count * per_rank * batches)
    pieces = divided(order, count * per_rank, count, drop_last=True, interleaved=interleaved)
    for number, batch in enumerate(order.reshape(batches, -1)):
        own = [piece[number * per_rank : (number + 1) * per_rank] for piece in pieces]
        expected = [batch[rank::count] for rank in range(count)] if interleaved else np.split(batch, count)
        assert all(np.array_equal(part, right) for part, right in zip(own, expected, strict=True))


def test_a_rank_keeps_what_it_uses_most_in_its_fastest_storage() -> None:
    uses = np.array([[5, 4, 3, 0, 2], [1, 2, 3, 6, 2]])
    placement = place(uses, np.ones(5, np.int64), [Room(1, 1), Room(1, 1)], np.arange(5))
    assert placement.owner.tolist() == [0, 0, 1, 1, NOBODY]
    assert placement.level.tolist()[:4] == [MEMORY, DISK, DISK, MEMORY]


def test_a_full_rank_leaves_its_samples_to_the_next_and_what_is_used_once_is_not_kept() -> None:
    uses = np.array([[3, 3, 1], [1, 1, 0]])
    placement = place(uses, np.ones(3, np.int64), [Room(1), Room(5)], np.arange(3))
    assert placement.owner.tolist() == [0, 1, NOBODY]


@given(
    num_samples=st.integers(1, 6), num_ranks=st.integers(1, 3), room=st.integers(0, 3), seed=st.integers(0, 1000)
)  # fmt: skip
@few_examples
def test_no_placement_has_fewer_misses(num_samples: int, num_ranks: int, room: int, seed: int) -> None:
    """Brute force over all sets of samples that some rank keeps."""
    uses = np.random.default_rng(seed).integers(0, 4, (num_ranks, num_samples))
    placement = place(uses, np.ones(num_samples, np.int64), [Room(room)] * num_ranks, np.arange(num_samples))
    total = uses.sum(axis=0)

    def misses(kept: set[int]) -> int:
        return sum(min(1, int(total[s])) if s in kept else int(total[s]) for s in range(num_samples))

    best = min(
        misses(set(kept))
        for count in range(min(num_samples, room * num_ranks) + 1)
        for kept in combinations(range(num_samples), count)
    )
    num_misses = misses(set(np.flatnonzero(placement.owner != NOBODY).tolist()))
    assert num_misses >= best
    if num_ranks == 1:
        assert num_misses == best
    for rank in range(num_ranks):
        assert ((placement.owner == rank) & (placement.level == MEMORY)).sum() <= room


@given(
    per_rank=st.integers(1, 3), batches=st.integers(1, 4), num_ranks=st.integers(1, 3), epochs=st.integers(1, 5),
    room=st.integers(0, 5), seed=st.integers(0, 10_000),
)  # fmt: skip
@few_examples
def test_misses_are_never_below_belady_and_never_above_lru(
    per_rank: int, batches: int, num_ranks: int, epochs: int, room: int, seed: int
) -> None:
    """In whole epochs, misses even equal those of the best cache: an epoch uses each sample once, so that no cache has
    more hits in an epoch than it has samples."""
    num_samples = per_rank * batches * num_ranks
    orders = epochs_of(num_samples, epochs, seed)
    pieces = [divided(order, per_rank * num_ranks, num_ranks, drop_last=True) for order in orders]
    uses = count_uses(pieces, num_samples, num_ranks)
    placement = place(uses, np.ones(num_samples, np.int64), [Room(room)] * num_ranks, orders[0].argsort())
    accesses = [np.concatenate([piece[rank] for piece in pieces]) for rank in range(num_ranks)]
    misses = sum(int((classes == FILES).sum()) for classes in sources(accesses, placement))
    belady = belady_misses(np.concatenate(orders).tolist(), room * num_ranks)
    lru = sum(lru_misses(samples.tolist(), room) for samples in accesses)
    kept = min(num_samples, room * num_ranks)
    assert belady <= misses <= lru
    assert misses == belady == num_samples + (epochs - 1) * (num_samples - kept)


@given(accesses=st.lists(st.integers(0, 5), max_size=12), capacity=st.integers(0, 4))
@few_examples
def test_belady_equals_brute_force(accesses: list[int], capacity: int) -> None:
    states = {frozenset[int](): 0}  # what is kept, and the least misses until here
    for sample in accesses:
        following: dict[frozenset[int], int] = {}
        for kept, misses in states.items():
            count = misses + (sample not in kept)
            for size in range(min(capacity, len(kept | {sample})) + 1):
                for choice in combinations(sorted(kept | {sample}), size):
                    key = frozenset(choice)
                    following[key] = min(following.get(key, count), count)
        states = following
    assert belady_misses(accesses, capacity) == min(states.values())
    assert lru_misses(accesses, capacity) >= belady_misses(accesses, capacity)


def test_the_first_use_of_a_kept_sample_is_a_read() -> None:
    uses = np.array([[2, 0, 1], [0, 2, 1]])
    placement = place(uses, np.ones(3, np.int64), [Room(1), Room(1)], np.arange(3))
    assert placement.owner.tolist() == [0, 1, NOBODY]
    classes = sources([np.array([0, 2, 0, 1]), np.array([1, 1, 2, 0])], placement)
    assert classes[0].tolist() == [FILES, FILES, OWN_MEMORY, PEER]
    assert classes[1].tolist() == [FILES, OWN_MEMORY, FILES, PEER]
