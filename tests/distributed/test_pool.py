"""The pool of ranks: results by rank, failures told by rank, and nothing carried from one call to the next."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Ranks, RanksFailedError


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def sum_of_ranks_plus(value: torch.Tensor) -> torch.Tensor:
    total = value + dist.get_rank()
    dist.all_reduce(total)
    return total


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not want to")


def raise_on_while_others_wait(rank: int) -> None:
    raise_on(rank)
    dist.barrier()


def kill(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600.0)


def process_id() -> int:
    return os.getpid()


def leave_a_mess() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank() + 17)
    dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.isend(torch.ones(3), 1)  # nobody receives it


def random_numbers_after_an_exchange() -> torch.Tensor:
    received = torch.zeros(3)
    if dist.get_rank() == 0:
        dist.send(torch.full((3,), 2.0), 1)
    else:
        dist.recv(received, 0)
        assert received.tolist() == [2.0, 2.0, 2.0]
    return torch.rand(4)


def warn() -> None:
    warnings.warn("this is deprecated", DeprecationWarning, stacklevel=1)


def something_that_cannot_be_pickled() -> object:
    return lambda: None


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_by_rank(ranks: Ranks, num_ranks: int) -> None:
    assert ranks(num_ranks, rank_and_size) == [(rank, num_ranks) for rank in range(num_ranks)]


def test_tensors_travel_both_ways_and_all_reduce_adds_over_ranks(ranks: Ranks) -> None:
    results = ranks(2, sum_of_ranks_plus, torch.tensor([1.0, 10.0], dtype=torch.float64))
    for total in results:
        torch.testing.assert_close(total, torch.tensor([3.0, 21.0], dtype=torch.float64), rtol=0, atol=0)


def test_calls_share_their_processes(ranks: Ranks) -> None:
    assert ranks(2, process_id) == ranks(2, process_id)


def test_nothing_is_carried_from_one_call_to_the_next(ranks: Ranks) -> None:
    expected = ranks(2, random_numbers_after_an_exchange)
    assert torch.equal(expected[0], expected[1])
    ranks(2, leave_a_mess)
    results = ranks(2, random_numbers_after_an_exchange)
    assert results[0].dtype == torch.float32
    assert torch.equal(torch.stack(results), torch.stack(expected))


def test_exception_is_reported_with_its_rank_and_traceback(ranks: Ranks) -> None:
    before = ranks(2, process_id)
    with pytest.raises(RanksFailedError, match=r"test_pool.raise_on failed on rank 1\n---- rank 1 ----\n") as caught:
        ranks(2, raise_on, 1)
    assert list(caught.value.failures) == [1]
    assert "in raise_on" in caught.value.failures[1]
    assert "ValueError: rank 1 does not want to" in caught.value.failures[1]
    assert ranks(2, process_id) == before, "ranks that answer, if only with an exception, live on"


def test_exception_is_reported_while_the_other_rank_waits_for_it(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks(2, raise_on_while_others_wait, 0)
    assert sorted(caught.value.failures) == [0, 1]
    assert "ValueError: rank 0 does not want to" in caught.value.failures[0]
    assert "raise_on_while_others_wait" in caught.value.failures[1]


def test_killed_rank_is_reported_and_the_next_call_works(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks(2, kill, 1)
    assert caught.value.failures[1] == "the process died with exit code -9"
    assert ranks(2, rank_and_size) == [(0, 2), (1, 2)]


def test_rank_killed_between_calls_is_reported(ranks: Ranks) -> None:
    os.kill(ranks(2, process_id)[0], signal.SIGKILL)
    with pytest.raises(RanksFailedError, match="exit code -9"):
        ranks(2, rank_and_size)
    assert ranks(2, rank_and_size) == [(0, 2), (1, 2)]


def test_silent_rank_is_reported_with_its_stack(ranks: Ranks) -> None:
    ranks(2, rank_and_size)  # so that the time is not spent on starting
    with pytest.raises(RanksFailedError) as caught:
        ranks(2, wait_for_ever_on, 1, timeout=1.0)
    assert list(caught.value.failures) == [1]
    assert re.search(r"no answer after 1 s.*in wait_for_ever_on", caught.value.failures[1], re.DOTALL)


def test_warnings_are_errors_in_ranks_as_in_tests(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError, match="DeprecationWarning: this is deprecated"):
        ranks(2, warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert ranks(2, warn) == [None, None]


def test_result_that_cannot_be_pickled_is_reported(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError, match="failed on rank 0, 1"):
        ranks(2, something_that_cannot_be_pickled)


def test_impossible_numbers_of_ranks_are_refused(ranks: Ranks) -> None:
    for num_ranks in (0, 9):
        with pytest.raises(ValueError, match=f"num_ranks is {num_ranks}; the pool has 1 to 8 ranks"):
            ranks(num_ranks, rank_and_size)


def test_the_end_leaves_no_process_behind() -> None:
    before = set(multiprocessing.active_children())
    with Ranks() as own:
        own(2, rank_and_size)
        started = set(multiprocessing.active_children()) - before
        assert len(started) == 2
    assert set(multiprocessing.active_children()) <= before
