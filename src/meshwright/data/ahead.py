"""A loader over data larger than memory: it fetches samples before a step asks for them (NoPFS)."""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from torch import Tensor

from meshwright.data.keeper import Keeper, free_bytes
from meshwright.data.peers import Address, Begin, SamplePeer, SampleServer
from meshwright.data.prefetch import Ahead, Prefetcher, num_bytes, pinned
from meshwright.data.rates import Rate
from meshwright.data.stored import StoreLoader
from meshwright.data.stores import Raw, Store
from meshwright.errors import DataError
from meshwright.schedules.samples import (
    CLASSES,
    FILES,
    NOBODY,
    PEER,
    Indices,
    Room,
    SamplePlacement,
    count_uses,
    divided,
    place,
)

THREADS = 8
"""Threads that fetch: most of them wait for storage."""
HORIZON = 16
"""Epochs whose uses decide the placement, if the loader has no end."""
STAGING_SHARE = 8
"""Staging gets this part of the memory, and room for two batches at least."""
PROBED = 32
"""Samples that are read to measure the file system."""
MEET_S = 30.0
"""Seconds for which a request of another rank waits until this rank has met the others. The other rank then reads the
sample itself."""


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: its shard, its room, and where it answers."""

    shard: int
    memory_bytes: int
    disk_bytes: int
    address: Address


class FetchCounts(NamedTuple):
    """What a rank fetched. ``by_class``: samples of the batches that it yielded, by ``CLASSES``; ``reads``: reads of
    the file system, also ahead and for peers; ``kept``: bytes in memory and on disk; ``staged_bytes``: the largest
    number of bytes that were staged."""

    by_class: tuple[int, ...]
    reads: int
    kept: tuple[int, int]
    staged_bytes: int


class PrefetchLoader(StoreLoader):
    """Batches of the samples of a store that does not fit in memory, fetched before they are asked for.

    The order follows from the seed, or from a sampler of torch.utils.data, so each rank knows its next samples. Threads
    fetch them in this order into staging memory, and a batch is assembled ahead. A rank keeps the samples that it uses
    most often in its memory, the next ones in a file on its local disk, and gives them to other ranks. A sample is read
    from the file system only if nobody keeps it. Batches and order equal those of ``StoreLoader`` bit for bit.

    Ranks share samples once they have met: give all their ``introduce()`` to each one's ``meet`` before the first batch
    (``meshwright.load`` does so). Ranks with the same shard, such as those of a pipeline, share samples too. All ranks
    must begin at the same position.

    Args:
        store: the samples.
        batch_size, seed, shuffle, shard, drop_last, epochs, sampler, skip_bad: as in ``StoreLoader``.
        memory_bytes: upper limit on the memory for samples that are kept and staged, and for the batch that waits, on
            this rank.
        cache_directory: a folder on the local disk for samples that do not fit in memory; None: none are kept there.
        cache_bytes: upper limit on the bytes in that folder; None: what is free there.
        threads: the number of threads that fetch.
        pin: whether batches are copied to pinned memory, from which a GPU reads without waiting.

    Raises:
        DataError: as ``StoreLoader``; or the memory does not hold three batches, or the folder cannot be written or is
            full.
    """

    def __init__(
        self,
        store: Store,
        batch_size: int,
        memory_bytes: int,
        *,
        cache_directory: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shard: tuple[int, int] = (0, 1),
        drop_last: bool = True,
        epochs: int | None = None,
        sampler: Any = None,
        skip_bad: bool = False,
        threads: int = THREADS,
        pin: bool = False,
    ) -> None:
        super().__init__(
            store, batch_size, seed, shuffle, shard, drop_last, epochs=epochs, sampler=sampler, skip_bad=skip_bad
        )
        self._directory = Path(cache_directory) if cache_directory is not None else None
        self.threads, self._pin = threads, pin
        self.slot_bytes = self._first_bytes()
        batch_bytes = -(-batch_size // shard[1]) * self.slot_bytes
        if memory_bytes < 3 * batch_bytes:
            problem = f"memory_bytes is {memory_bytes:,}, but three batches on a rank take {3 * batch_bytes:,}"
            raise self._error(problem, "give more memory, a smaller batch_size, or more ranks")
        self.staging_bytes = max(2 * batch_bytes, memory_bytes // STAGING_SHARE)
        disk_bytes = self._disk_bytes(cache_bytes, shard[1])
        self.room = Room(memory_bytes - self.staging_bytes - batch_bytes, disk_bytes)
        self.shards, self.rooms, self.number = [shard[0]], [self.room], 0
        """The shard and the room of each rank that keeps samples, and the number of this rank among them."""
        self._peers: dict[int, SamplePeer] = {}
        self._server: SampleServer | None = None
        self._keeper: Keeper | None = None
        self.placement: SamplePlacement | None = None
        self._begin: Begin | None = None
        self._met, self._closed = threading.Event(), False
        self._lock = threading.Lock()
        self._by_class = [0] * len(CLASSES)
        self._stream: Prefetcher | None = None
        self._most_staged = 0
        self.files, self.prepare = Rate(), Rate()
        """How fast the file system was read, and samples were decoded."""

    # --- other ranks -------------------------------------------------------------------------------------------------

    def introduce(self, host: str = "127.0.0.1", token: str = "") -> Introduction:
        """Start to answer other ranks at ``host``, an address of this machine, and return what they need to know. They
        connect with ``token``, the job's; empty: a random one."""
        if self._server is None:
            self._server = SampleServer(host, self._for_peer, self.threads, token)
        return Introduction(self.shard[0], *self.room, self._server.address)

    def meet(self, everybody: Sequence[Introduction]) -> None:
        """Learn who else keeps samples, in the same order on all ranks. Several ranks may have the same shard."""
        self.number = list(everybody).index(self.introduce())
        self.shards = [other.shard for other in everybody]
        self.rooms = [Room(other.memory_bytes, other.disk_bytes) for other in everybody]
        self._peers = {
            rank: SamplePeer(rank, other.address) for rank, other in enumerate(everybody) if rank != self.number
        }
        self._met.set()

    def _for_peer(self, sample: int, begin: Begin) -> tuple[Raw, int] | None:
        """A sample for another rank, whose plan begins at ``begin``. The other rank may be ahead: then this one has not
        met yet, and a plan would know nobody; or it has not begun or not resumed, and its own position means
        nothing."""
        if not self._met.wait(MEET_S) or self._closed:
            return None
        keeper = self._ready(begin)
        if not 0 <= sample < len(self.store):
            raise IndexError(f"sample {sample} of {len(self.store)}")
        return keeper.get(sample) if keeper.owns(sample) else (keeper.read(sample), FILES)

    # --- what is ahead -----------------------------------------------------------------------------------------------

    def accesses(self, num_steps: int) -> list[Indices]:
        """The next samples of every rank that keeps samples, in the order of use, for this number of steps."""
        by_rank: list[list[Indices]] = [[] for _ in range(self.shard[1])]
        epoch, position, steps = self._epoch, self._position, 0
        while steps < num_steps:
            end = position + (num_steps - steps) * self.batch_size
            order = self._order.epoch(epoch)[position:end]
            pieces = divided(
                order, self.batch_size, self.shard[1], drop_last=self._drop_last, interleaved=self._order.interleaved
            )
            for rank, samples in enumerate(pieces):
                by_rank[rank].append(samples)
            whole, remainder = divmod(len(order), self.batch_size)
            steps += whole + (remainder > 0 and not self._drop_last)
            epoch, position = epoch + 1, 0
        return [np.concatenate(by_rank[shard]) for shard in self.shards]

    def batch_sizes(self, num_steps: int) -> list[int]:
        """The samples of a rank in each of the next batches."""
        sizes: list[int] = []
        position = self._position
        while len(sizes) < num_steps:
            size = self._size_at(position)
            position = position + size if size else 0
            sizes += [size // self.shard[1]] if size else []
        return sizes

    def _batches(self, epoch: int, position: int) -> Iterator[Indices]:
        """This rank's part of each batch from a position on, until a batch that the shards do not divide."""
        while True:
            order = self._order.epoch(epoch)
            while size := self._size_at(position):
                if size % self.shard[1]:
                    return
                yield self._own_part(order[position : position + size]).numpy()
                position += size
            epoch, position = epoch + 1, 0

    def plan(self, begin: Begin | None = None) -> SamplePlacement:
        """Decide who keeps what, by the uses in the epochs from ``begin`` on (default: the present epoch). Equal on all
        ranks that have met."""
        epoch, batch_size = begin or Begin(self._epoch, self.batch_size)
        orders = [self._order.epoch(each) for each in range(epoch, epoch + (self._epochs or HORIZON))]
        pieces = (
            divided(order, batch_size, self.shard[1], drop_last=self._drop_last, interleaved=self._order.interleaved)
            for order in orders
        )
        uses = count_uses(pieces, len(self.store), self.shard[1])[self.shards]
        first = np.full(len(self.store), len(orders[0]))
        first[orders[0][::-1]] = np.arange(len(orders[0]))[::-1]
        return place(uses, self.store.sizes, self.rooms, first)

    def _ready(self, begin: Begin | None = None) -> Keeper:
        """The keeper. The first use makes the plan, from ``begin`` on (default: the present epoch)."""
        with self._lock:
            if self._keeper is None:
                self._begin = begin or Begin(self._epoch, self.batch_size)
                self.placement = self.plan(self._begin)
                self._keeper = Keeper(self.store, self.placement, self.number, self.room, self._directory, self.files)
            return self._keeper

    # --- fetching ----------------------------------------------------------------------------------------------------

    def _gather(self, index: Tensor) -> Any:
        wanted = index.numpy()
        head = self._stream.peek() if self._stream is not None else None
        if head is None or not np.array_equal(head.samples, wanted):
            head = self._restarted(wanted)
        assert self._stream is not None
        self._stream.pop()
        if head.error is not None:
            self.stop()
            raise head.error
        batch, bad, kinds = head.batch
        self._note(bad)
        for kind in kinds:
            self._by_class[kind] += 1
        return batch

    def _restarted(self, wanted: Indices) -> Ahead:
        """Fetch from the present position on: the loop has gone elsewhere, or has just begun."""
        self.stop()
        self._ready()
        begin = self._position - len(wanted) * self.shard[1]
        self._stream = Prefetcher(
            self._batches(self._epoch, begin), self._fetch, self._assemble, self.threads, self.staging_bytes,
            self.slot_bytes,
        )  # fmt: skip
        head = self._stream.peek()
        assert head is not None
        return head

    def _fetch(self, sample: int) -> tuple[Any, int]:
        raw, kind = self._raw(sample)
        with self.prepare.running():
            value = self.store.decode(sample, raw)
        return (value, kind), max(len(raw), num_bytes(value))

    def _raw(self, sample: int) -> tuple[Raw, int]:
        """A sample's bytes, and the class that they came from."""
        keeper = self._ready()
        assert self.placement is not None
        assert self._begin is not None
        owner = int(self.placement.owner[sample])
        if owner == self.number:
            return keeper.get(sample)
        if owner != NOBODY and (answer := self._peers[owner].get(sample, self._begin)) is not None:
            return answer[0], FILES if answer[1] == FILES else PEER
        return keeper.read(sample), FILES

    def _assemble(self, index: Indices, values: list[Any]) -> Any:
        """The batch of samples with their classes, or errors in place of samples."""
        samples = [value if isinstance(value, Exception) else value[0] for value in values]
        batch, bad = self._stacked(index.tolist(), samples)
        kinds = [value[1] for value in values if not isinstance(value, Exception)]
        return pinned(batch) if self._pin else batch, bad, kinds

    def _first_bytes(self) -> int:
        """The bytes of the first good sample, decoded."""
        error: DataError | None = None
        for sample in range(len(self.store)):
            try:
                raw = self.store.read(sample)
                return max(len(raw), num_bytes(self.store.decode(sample, raw)))
            except DataError as problem:
                if not self.skip_bad:
                    raise
                error = problem
        assert error is not None
        raise error

    def _disk_bytes(self, cache_bytes: int | None, num_ranks: int) -> int:
        if self._directory is None:
            return 0
        free = free_bytes(self._directory, num_ranks)
        if cache_bytes is not None and cache_bytes > free:
            raise DataError(
                f"cache_bytes is {cache_bytes:,}, but a rank may take {free:,} bytes there",
                where=f"cache_directory {self._directory}",
                remedy="give fewer, or a folder on another disk",
            )
        return free if cache_bytes is None else cache_bytes

    # --- measuring, and the end --------------------------------------------------------------------------------------

    def probe(self) -> float:
        """Read some of the next samples from the file system with all threads, and return the bytes per second that
        came. These reads are not counted."""
        rate = Rate()

        def read(sample: int) -> None:
            try:
                with rate.running():
                    raw = self.store.read(sample)
                    rate.count(len(raw))
                with self.prepare.running():
                    self.store.decode(sample, raw)
            except DataError:
                if not self.skip_bad:
                    raise

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(read, self.accesses(1)[self.number][:PROBED].tolist()))
        return rate.per_s

    def counts(self) -> FetchCounts:
        """What this rank has fetched so far."""
        keeper = self._ready()
        stream = self._stream
        staged = max(self._most_staged, stream.most_held if stream is not None else 0)
        return FetchCounts(tuple(self._by_class), keeper.reads, (keeper.memory_bytes, keeper.disk_bytes), staged)

    def stop(self) -> None:
        """Stop fetching ahead. What is kept stays, also for other ranks; the next batch begins anew."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            self._most_staged = max(self._most_staged, stream.most_held)

    def close(self) -> None:
        """Stop fetching and answering, and drop what is kept."""
        self.stop()
        self._closed = True
        self._met.set()  # requests that wait for it end
        if self._server is not None:
            self._server.close()
        for peer in self._peers.values():
            peer.close()
        with self._lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
