"""Loaders that fetch ahead: batches of the plain loader, samples read as seldom as planned, bounds that are kept."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from meshwright.data import ahead, keeper
from meshwright.data.ahead import PrefetchLoader
from meshwright.data.encoded import Samples
from meshwright.data.loaders import TensorLoader
from meshwright.data.prefetch import Prefetcher, started_alone
from meshwright.data.stored import StoreLoader
from meshwright.errors import DataError, LostRankError
from meshwright.schedules.samples import FILES, NOBODY, OWN_DISK, OWN_MEMORY, PEER
from tests.end_to_end.data_cases import Counted, in_one_process

MANY = 10**6


def lists(loader: Any, count: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader, count)]


def flat(lists: Iterable[Any]) -> list[Any]:
    return list(chain.from_iterable(lists))


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


# ------------------------------------------------------------------------------------------------------------- order


@given(
    parts=st.integers(1, 3), per_rank=st.integers(1, 3), batches=st.integers(1, 4), rest=st.integers(0, 2),
    seed=st.integers(0, 2**40), shuffle=st.booleans(), drop_last=st.booleans(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_batches_equal_those_of_the_plain_loader(
    parts: int, per_rank: int, batches: int, rest: int, seed: int, shuffle: bool, drop_last: bool
) -> None:
    size = parts * per_rank
    samples = size * batches + parts * (rest % per_rank)
    plain = TensorLoader({"x": torch.arange(samples)}, size, seed, shuffle, drop_last=drop_last, epochs=2)
    expected = [batch["x"].tolist() for batch in plain]
    options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "epochs": 2}
    store = Counted(samples)
    loaders = in_one_process(parts, lambda shard: PrefetchLoader(store, size, MANY, shard=shard, threads=2, **options))
    by_rank = [lists(loader) for loader in loaders]
    for loader in loaders:
        loader.close()
    assert [flat(pieces) for pieces in zip(*by_rank, strict=True)] == expected
    again = [StoreLoader(store, size, shard=(index, parts), **options) for index in range(parts)]
    assert [lists(loader) for loader in again] == by_rank


@pytest.mark.parametrize(
    "make",
    [
        lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(3)),
        lambda data: RandomSampler(data, num_samples=25, generator=torch.Generator().manual_seed(3)),
        lambda data: WeightedRandomSampler([1.0, 5.0] * 5, 20, generator=torch.Generator().manual_seed(4)),
        lambda data: SubsetRandomSampler(range(2, 9), generator=torch.Generator().manual_seed(5)),
        SequentialSampler,
        lambda data: [3, 1, 2, 0],
    ],
)
def test_the_order_of_a_sampler_is_bit_equal(make: Callable[[Any], Any]) -> None:
    data = Numbers(10)
    torch.manual_seed(0)
    theirs = DataLoader(data, 2, sampler=make(data), drop_last=True)
    expected = [batch.tolist() for _ in range(3) for batch in theirs]
    with PrefetchLoader(Samples(data), 2, MANY, sampler=make(data), epochs=3) as loader:
        assert lists(loader) == expected


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("samples", [24, 25])
def test_the_order_of_a_distributed_sampler_is_bit_equal_on_each_rank(samples: int, drop_last: bool) -> None:
    data = Numbers(samples)

    def sampler(rank: int, count: int) -> Any:
        return DistributedSampler(data, count, rank, seed=7, drop_last=drop_last)

    for rank in range(3):
        own = sampler(rank, 3)
        expected = []
        for epoch in range(2):
            own.set_epoch(epoch)
            expected += [batch.tolist() for batch in DataLoader(data, 2, sampler=own, drop_last=True)]
        with PrefetchLoader(
            Samples(data), 6, MANY, sampler=sampler(rank, 3), shard=(rank, 3), epochs=2, threads=1
        ) as loader:
            assert lists(loader) == expected


def test_samplers_whose_order_is_not_known_ahead_are_refused() -> None:
    data = Numbers(6)

    class Shuffled:
        def __iter__(self) -> Any:
            return iter(torch.randperm(1000).tolist())

    for sampler, problem in (
        (RandomSampler(data), "RandomSampler cannot be known ahead"),
        (Shuffled(), "Shuffled cannot be known ahead"),
        (DistributedSampler(data, 2, 1), r"of rank 1 of 2, the loader of shard \(0, 1\)"),
        (BatchSampler(SequentialSampler(data), 2, False), "does not yield numbers"),
        ([0, 6], "names sample 6 of 6"),
    ):
        with pytest.raises(DataError, match=problem):
            StoreLoader(Samples(data), 2, sampler=sampler)


# ------------------------------------------------------------------------------------------------------------ resume


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("dealt", [False, True])
def test_another_number_of_ranks_reads_each_remaining_sample_once(before: int, after: int, dealt: bool) -> None:
    samples, size = 36, 6
    data = Numbers(samples)

    def ranks(count: int) -> list[PrefetchLoader]:
        def make(shard: tuple[int, int]) -> PrefetchLoader:
            sampler: Any = DistributedSampler(data, shard[1], shard[0], seed=5) if dealt else None
            return PrefetchLoader(Samples(data), size, 2000, shard=shard, epochs=1, sampler=sampler, threads=2)

        return in_one_process(count, make)

    first = ranks(before)
    head = [lists(loader, 2) for loader in first]
    states = [loader.state_dict() for loader in first]
    for loader in first:
        loader.close()
    assert all(state == states[0] for state in states)
    second = ranks(after)
    for loader in second:
        loader.load_state_dict(states[0])
    tail = [lists(loader) for loader in second]
    for loader in second:
        loader.close()
    seen = sorted(flat(flat(head + tail)))
    assert seen == list(range(samples))
    (whole,) = ranks(1)
    expected = lists(whole)
    whole.close()
    assert [sorted(flat(pieces)) for pieces in zip(*tail, strict=True)] == [sorted(each) for each in expected[2:]]


def test_leaving_a_loop_rewinding_and_resizing_keep_the_order() -> None:
    with PrefetchLoader(Counted(12), 2, MANY, epochs=1) as ours:
        plain = StoreLoader(Counted(12), 2, epochs=1)
        for loader in (ours, plain):
            loader.rewind(3)
        assert lists(ours, 2) == lists(plain, 2)
        for loader in (ours, plain):
            loader.resize(3)
        assert lists(ours) == lists(plain)
        assert lists(ours) == lists(plain)  # the next epoch


# --------------------------------------------------------------------------------------------------- where from, once


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_somebody_keeps_is_read_once_and_the_rest_once_an_epoch(tmp_path: Path, count: int) -> None:
    samples, size, epochs, sample_bytes = 48, 8, 3, 8
    store = Counted(samples)
    staging = 3 * size // count * sample_bytes
    room = 5 * sample_bytes

    def make(shard: tuple[int, int]) -> PrefetchLoader:
        return PrefetchLoader(
            store, size, staging + room, shard=shard, epochs=epochs, threads=2, cache_directory=tmp_path,
            cache_bytes=3 * sample_bytes,
        )  # fmt: skip

    loaders = in_one_process(count, make)
    store.reads = [0] * samples  # each loader has looked at a sample
    batches = [iter(loader) for loader in loaders]
    for _ in range(epochs * samples // size):
        for each in batches:
            next(each)
    for loader in loaders:
        loader.stop()
    counts = [loader.counts() for loader in loaders]
    placement = loaders[0].placement
    for loader in loaders:
        assert loader.placement is not None
        assert placement is not None
        assert np.array_equal(loader.placement.owner, placement.owner)
        loader.close()
    assert placement is not None
    kept = placement.owner != NOBODY
    assert kept.sum() == 8 * count
    assert all(reads == 1 for reads, keeps in zip(store.reads, kept, strict=True) if keeps)
    assert all(reads >= epochs for reads, keeps in zip(store.reads, kept, strict=True) if not keeps)
    by_class = np.sum([each.by_class for each in counts], axis=0)
    assert by_class.sum() == epochs * samples
    assert by_class[FILES] == sum(1 if each else epochs for each in kept)
    assert by_class[OWN_MEMORY] > 0
    assert by_class[OWN_DISK] > 0
    assert (by_class[PEER] > 0) == (count > 1)
    assert all(each.kept == (5 * sample_bytes, 3 * sample_bytes) for each in counts)
    assert not list(tmp_path.iterdir())


def test_a_program_may_end_in_the_middle_of_an_epoch() -> None:
    """Its threads run operators; Python must not end under them."""
    program = (
        "import itertools, torch\n"
        "from meshwright.data.ahead import PrefetchLoader\n"
        "from tests.end_to_end.data_cases import Counted\n"
        "class Slow(Counted):\n"
        "    def decode(self, index, raw):\n"
        "        return (torch.randn(300, 300) @ torch.randn(300, 300)).sum()\n"
        "loader = PrefetchLoader(Slow(10_000), 4, 4000, epochs=2, threads=3)\n"
        "assert len(list(itertools.islice(loader, 3))) == 3"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_rank_that_is_gone_costs_reads_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    store = Counted(24)
    first, second = in_one_process(2, lambda shard: PrefetchLoader(store, 4, 400, shard=shard, epochs=6, threads=2))
    expected = lists(StoreLoader(store, 4, shard=(0, 2), epochs=6))
    begin = lists(first, 2)
    second.close()  # while staging has room for two of the other 16 batches
    assert begin + lists(first) == expected
    first.close()
    assert "rank 1 gives no samples any more" in caplog.text


def test_ranks_with_the_same_samples_read_them_once() -> None:
    """As the ranks of a pipeline, or of tensor parallelism."""
    store = Counted(24)
    loaders = [PrefetchLoader(store, 4, 400, epochs=2, threads=2) for _ in range(3)]
    introductions = [loader.introduce() for loader in loaders]
    for loader in loaders:
        loader.meet(introductions)
    store.reads = [0] * 24
    expected = lists(StoreLoader(Counted(24), 4, epochs=2))
    assert [lists(loader) for loader in loaders] == [expected] * 3
    assert store.reads == [1] * 24
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("resumed", [True, False])
def test_a_rank_that_is_asked_before_it_has_met_or_resumed_makes_the_plan_of_the_others(resumed: bool) -> None:
    store = Counted(24)
    first, second = (PrefetchLoader(store, 4, 160, shard=(rank, 2), epochs=2, threads=2) for rank in range(2))
    whole = StoreLoader(Counted(24), 4, shard=(0, 2), epochs=4)
    head = lists(whole, 13)  # two epochs and a batch
    assert len(head) == 13
    introductions = [first.introduce(), second.introduce()]
    state = whole.state_dict()
    first.meet(introductions)
    first.load_state_dict(state)
    batches: list[list[int]] = []
    thread = threading.Thread(target=lambda: batches.extend(lists(first)))
    thread.start()
    time.sleep(0.1)
    assert second.placement is None
    if resumed:
        second.load_state_dict(state)
    second.meet(introductions)
    thread.join()
    assert batches == lists(whole)
    assert first.placement is not None
    assert second.placement is not None
    assert np.array_equal(first.placement.owner, second.placement.owner)
    for loader in (first, second):
        loader.close()


def test_a_rank_that_never_meets_costs_reads_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MEET_S", 0.01)
    store = Counted(24)
    first, second = (PrefetchLoader(store, 4, 400, shard=(rank, 2), epochs=2, threads=2) for rank in range(2))
    first.meet([first.introduce(), second.introduce()])
    assert lists(first) == lists(StoreLoader(Counted(24), 4, shard=(0, 2), epochs=2))
    assert second.placement is None
    for loader in (first, second):
        loader.close()


def test_a_stranger_gets_no_samples() -> None:
    from meshwright.data.peers import Address, Begin, SamplePeer, SampleServer

    server = SampleServer("127.0.0.1", lambda sample, begin: (bytearray(b"secret"), 0), 2)
    address = server.address
    honest, stranger = SamplePeer(1, address), SamplePeer(1, Address(address.host, address.port, "wrong"))
    assert honest.get(5, Begin(0, 4)) == (bytearray(b"secret"), 0)
    with pytest.raises(
        LostRankError, match=rf"^{address.host}:{address.port}: it refuses the connection: its job has an"
    ):
        stranger.get(5, Begin(0, 4))
    honest.close()
    server.close()


# ----------------------------------------------------------------------------------------------------------- staging


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_staging_is_bounded_and_in_order(threads: int) -> None:
    held, most, lock = 0, 0, threading.Lock()

    def fetch(sample: int) -> tuple[int, int]:
        nonlocal held, most
        with lock:
            held += 10
            most = max(most, held)
        time.sleep(0.0005 * (sample % 3))
        return sample, 10

    def assemble(samples: Any, values: list[Any]) -> list[Any]:
        nonlocal held
        with lock:
            held -= 10 * len(values)
        return values

    batches = [np.arange(begin, begin + 4) for begin in range(0, 80, 4)]
    prefetcher = Prefetcher(iter(batches), fetch, assemble, threads, 100, 10)
    staged_batches = []
    while (head := prefetcher.peek()) is not None:
        staged_batches.append(head.batch)
        prefetcher.pop()
    prefetcher.close()
    assert staged_batches == [batch.tolist() for batch in batches]
    assert most <= 100
    assert prefetcher.most_held <= 100


def test_memory_that_does_not_hold_three_batches_is_refused() -> None:
    with pytest.raises(DataError, match="memory_bytes is 100, but three batches on a rank take 192") as error:
        PrefetchLoader(Counted(32), 8, 100)
    assert "smaller batch_size" in error.value.remedy


def test_a_loader_that_is_closed_leaves_no_thread() -> None:
    before = threading.active_count()
    loaders = in_one_process(2, lambda shard: PrefetchLoader(Counted(24), 4, 400, shard=shard))
    for loader in loaders:
        lists(loader, 3)
    for loader in loaders:
        loader.close()
    gc.collect()
    assert threading.active_count() == before


def test_threads_that_fetch_use_one_core_each_and_others_keep_theirs() -> None:
    before, num_threads = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        threads = started_alone([lambda: num_threads.append(torch.get_num_threads())] * 2)
        other = threading.Thread(target=lambda: num_threads.append(torch.get_num_threads()))
        for thread in threads:
            thread.join()
        other.start()
        other.join()
        assert num_threads == [1, 1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------------- bad input


def test_a_bad_sample_is_named() -> None:
    with (
        PrefetchLoader(Counted(8, bad=frozenset({5})), 2, MANY, epochs=1) as loader,
        pytest.raises(DataError, match="counted/5: cannot be read: Input/output error"),
    ):
        lists(loader)


def test_bad_samples_are_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    store = Counted(8, bad=frozenset({0, 5}))
    with PrefetchLoader(store, 4, MANY, epochs=2, skip_bad=True) as loader:
        batches = lists(loader)
        plain = StoreLoader(Counted(8, bad=frozenset({0, 5})), 4, epochs=2, skip_bad=True)
        assert batches == lists(plain)
        assert loader.num_bad == plain.num_bad == 4
        assert sorted(loader.bad) == ["counted/0", "counted/5"]
    assert set(flat(batches)) == {1, 2, 3, 4, 6, 7}
    assert [len(batch) for batch in batches] == [4] * 4
    assert caplog.text.count("skipped: counted/5: cannot be read") == 2  # once by each loader


def test_a_batch_of_bad_samples_alone_is_refused() -> None:
    store = Counted(4, bad=frozenset({0, 1}))
    loader = StoreLoader(store, 2, shuffle=False, skip_bad=True)
    with pytest.raises(DataError, match="all 2 samples of a part of a batch are bad, such as counted/0"):
        lists(loader, 1)


def test_a_cache_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"cache_directory .*/file/cache: samples cannot be kept there: Not a directory"
    ):
        PrefetchLoader(Counted(8), 2, MANY, cache_directory=tmp_path / "file" / "cache")

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(keeper.tempfile, "TemporaryFile", read_only)
    with pytest.raises(DataError, match="samples cannot be kept there: Read-only file system"):
        PrefetchLoader(Counted(8), 2, MANY, cache_directory=tmp_path)


def test_what_the_cache_on_disk_has_lost_counts_as_read_from_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with PrefetchLoader(Counted(8), 2, 48, cache_directory=tmp_path, cache_bytes=64, threads=1, epochs=2) as loader:
        lists(loader)
        loader.stop()
        before = loader.counts()
        assert before.kept == (0, 64)
        assert before.by_class[OWN_DISK] == before.by_class[FILES] == before.reads == 8

        def broken(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(keeper, "fill", broken)
        monkeypatch.setattr(keeper, "write_whole", broken)
        assert lists(loader) == lists(StoreLoader(Counted(8), 2, epochs=4))[8:]
        after = loader.counts()
    assert after.by_class[OWN_DISK] == before.by_class[OWN_DISK]
    assert after.by_class[FILES] == 24 <= after.reads
    assert after.kept[1] == 0
    assert "the cache on disk cannot be read (Input/output error)" in caplog.text


def test_a_full_disk_is_refused_at_once_and_noticed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr(keeper.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(DataError, match="the disk is full"):
            PrefetchLoader(Counted(8), 2, MANY, cache_directory=tmp_path)
    with pytest.raises(DataError, match=r"cache_bytes is 1[,0]+, but a rank may take"):
        PrefetchLoader(Counted(8), 2, MANY, cache_directory=tmp_path, cache_bytes=10**30)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keeper.os, "pwrite", full)
    with PrefetchLoader(Counted(16), 2, 48, cache_directory=tmp_path, epochs=2) as loader:
        assert lists(loader) == lists(StoreLoader(Counted(16), 2, epochs=2))
        assert loader.counts().kept == (0, 0)
    assert caplog.text.count("the cache on disk takes no more than 0 bytes (No space left on device)") == 1
