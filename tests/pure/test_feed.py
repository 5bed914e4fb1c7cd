"""The simulation of fetches beside closed forms."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.samples import FILES, OWN_MEMORY, PEER
from meshwright.simulate.feed import FeedRates, Fetches, simulate_feed

few_examples = settings(max_examples=80, deadline=None)
sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def files(sizes: list[int], batch: int = 1) -> Fetches:
    batches = [batch] * (len(sizes) // batch) + ([len(sizes) % batch] if len(sizes) % batch else [])
    return Fetches(sizes=sizes, classes=[FILES] * len(sizes), batches=batches)


def start_times(reads_s: Sequence[float], computes_s: Sequence[float], threads: int) -> list[float]:
    """When each sample is used, if threads share the reads evenly and staging has no limit (Dryden et al. 2021, section
    3.2): ``t_f = max(avail(f), t_{f-1} + compute_{f-1})`` with ``avail(f) = (read_1 + ... + read_f) / threads``."""
    times: list[float] = []
    ready = 0.0
    for place, read_s in enumerate(reads_s):
        ready += read_s / threads
        times.append(max(ready, times[-1] + computes_s[place - 1]) if times else ready)
    return times


@given(sizes=sizes, step_s=st.floats(0.01, 3), threads=st.integers(1, 4))
@few_examples
def test_reads_of_one_file_system_follow_the_formula_of_nopfs(sizes: list[int], step_s: float, threads: int) -> None:
    """t_f = max(avail(f), t_{f-1} + compute_{f-1}): threads do not make the disk faster."""
    feed = simulate_feed([files(sizes)], step_s, FeedRates(file_bytes_per_s=10.0), threads=threads)
    begins = start_times([size / 10 for size in sizes], [step_s] * len(sizes), 1)
    waits = [begins[0], *(b - a - step_s for a, b in pairwise(begins))]
    assert feed.waits[0] == pytest.approx(waits, abs=1e-9)
    assert feed.end_s == pytest.approx(begins[-1] + step_s)


def test_threads_share_what_is_not_the_disk() -> None:
    eight = Fetches(sizes=[10] * 8, classes=[PEER] * 8, batches=[8])
    for threads in (1, 2, 4, 8):
        feed = simulate_feed([eight], 1.0, FeedRates(file_bytes_per_s=1.0, peer_bytes_per_s=10.0), threads=threads)
        assert feed.waits == [[pytest.approx(8 / threads)]]
        assert start_times([1.0] * 8, [0.0] * 8, threads)[-1] == pytest.approx(8 / threads)


@given(sizes=sizes, batch=st.integers(1, 4), limit=st.integers(200, 400), step_s=st.floats(0.01, 9))
@few_examples
def test_staging_is_bounded_and_costs_at_most_waiting(sizes: list[int], batch: int, limit: int, step_s: float) -> None:
    rates = FeedRates(file_bytes_per_s=10.0, prepare_s=0.1)
    bounded = simulate_feed([files(sizes, batch)], step_s, rates, threads=2, staging_bytes=limit)
    free = simulate_feed([files(sizes, batch)], step_s, rates, threads=2)
    assert bounded.staged_bytes <= limit
    assert bounded.end_s >= free.end_s - 1e-9
    assert bounded.end_s <= sum(sizes) / 10 + 0.1 * len(sizes) + step_s * len(bounded.waits[0]) + 1e-9


@given(sizes=sizes, batch=st.integers(1, 4))
@few_examples
def test_waits_are_zero_once_bandwidth_suffices(sizes: list[int], batch: int) -> None:
    slowest = max(sum(sizes[begin : begin + batch]) for begin in range(0, len(sizes), batch))
    feed = simulate_feed([files(sizes, batch)], slowest / 10 + 1e-6, FeedRates(file_bytes_per_s=10.0), threads=1)
    assert max(feed.waits[0][1:], default=0.0) == 0.0


def test_ranks_share_the_file_system_and_wait_for_each_other() -> None:
    kept = Fetches(sizes=[10, 10], classes=[OWN_MEMORY] * 2, batches=[1, 1])
    alone = simulate_feed([files([10, 10])], 0.0, FeedRates(file_bytes_per_s=10.0), threads=1)
    two = simulate_feed([files([10, 10])] * 2, 0.0, FeedRates(file_bytes_per_s=10.0), threads=1)
    mixed = simulate_feed([files([10, 10]), kept], 0.0, FeedRates(file_bytes_per_s=10.0), threads=1)
    assert (alone.end_s, two.end_s, mixed.end_s) == (2.0, 4.0, 2.0)
    assert mixed.waits[1] == [0.0, 0.0]
    assert mixed.slowest_waits == mixed.waits[0] == [1.0, 1.0]
    assert math.isclose(mixed.waited_s, 1.0)


def test_ranks_with_other_numbers_of_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="equal numbers of batches"):
        simulate_feed([files([1]), files([1, 1])], 1.0, FeedRates(file_bytes_per_s=1.0), threads=1)
