"""Data larger than memory: makes loaders that fetch ahead, and compares their waits with a simulation."""

import logging
import os
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from meshwright.comm.groups import from_every_rank
from meshwright.comm.record import DATA
from meshwright.data.ahead import THREADS, PrefetchLoader
from meshwright.data.encoded import Samples
from meshwright.data.shards import Shards
from meshwright.data.stores import Decode, Images, Store, Tokens
from meshwright.errors import DataError
from meshwright.ir.data_use import DataUse
from meshwright.ir.trace import Span, Trace
from meshwright.ir.units import seconds
from meshwright.runtime import launch, trust
from meshwright.schedules.samples import CLASSES, FILES, Room, belady_misses, lru_misses, sources
from meshwright.simulate.feed import FeedRates, Fetches, simulate_feed

log = logging.getLogger("meshwright")

MOST_REPLAYED = 200_000
"""Upper limit on the accesses of all ranks that are simulated."""
SLOW = 0.05
"""The share of a step from which predicted waits are told in the log."""
LAST = 7
"""The number of steps at the end of a run whose waits are in the predicted trace."""


def load(
    data: Any,
    batch_size: int,
    memory_bytes: int,
    *,
    cache_directory: str | os.PathLike[str] | None = None,
    seed: int = 0,
    shuffle: bool = True,
    shard: tuple[int, int] = (0, 1),
    drop_last: bool = True,
    epochs: int | None = None,
    sampler: Any = None,
    skip_bad: bool = False,
    decode: Decode | None = None,
    sequence_length: int = 0,
    threads: int = THREADS,
) -> PrefetchLoader:
    """A loader over data that need not fit in memory. It fetches samples before a step asks for them, and keeps those
    that are used most in memory, in ``cache_directory`` and in the memory of other ranks. If ranks train together,
    every rank must call it, with ``shard=trainer.data_shard``.

    Samples are kept as the dataset returns them, so ``__getitem__`` must return equal values each time, and be safe in
    threads; put random changes, such as augmentation, into the step. ``decode=`` runs for each use of a sample.

    Args:
        data: a dataset of torch.utils.data with samples by number; a folder of images (a folder for each class);
            ``.tar`` files or a glob of them; a file of tokens, with ``sequence_length``; or a ``Store``.
        batch_size: samples in a global batch.
        memory_bytes: memory of this rank for samples that are kept or fetched ahead.
        cache_directory: a folder on the local disk for samples that do not fit in memory.
        seed, shuffle, shard, drop_last, epochs: as in ``Loader``.
        sampler: a sampler of torch.utils.data in place of ``seed`` and ``shuffle``.
        skip_bad: go on without samples that cannot be read; ``loader.num_bad`` counts them and
            truncated shards, ``loader.bad`` names some.
        decode: makes a tensor of the bytes of an image.
        sequence_length: tokens in a window.
        threads: threads that fetch.

    Raises:
        DataError: the data are not there, damaged or of an unknown kind; or an argument does not fit them.
    """
    loader = PrefetchLoader(
        store_of(data, decode, sequence_length, skip_bad=skip_bad), batch_size, memory_bytes,
        cache_directory=cache_directory, seed=seed, shuffle=shuffle, shard=shard, drop_last=drop_last, epochs=epochs,
        sampler=sampler, skip_bad=skip_bad, threads=threads, pin=torch.cuda.is_available(),
    )  # fmt: skip
    meet(loader)
    return loader


def store_of(data: Any, decode: Decode | None = None, sequence_length: int = 0, *, skip_bad: bool = False) -> Store:
    """The store of some data: see ``load``.

    Raises:
        DataError: the data are not there, damaged or of an unknown kind.
    """
    if isinstance(data, Store):
        return data
    paths = data if isinstance(data, list | tuple) else [data]
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        return Samples(data)
    names = [os.fspath(path) for path in paths]
    if all(name.endswith(".tar") for name in names):
        return Shards(names, skip_bad=skip_bad)
    if len(names) == 1 and sequence_length:
        return Tokens(names[0], sequence_length)
    if len(names) == 1 and os.path.isfile(names[0]):
        problem = "is one file, of which it is not known what a sample is"
        raise DataError(problem, where=names[0], remedy="give sequence_length if it holds tokens, or a folder or .tar")
    return Images(names[0], decode)


def meet(loader: PrefetchLoader) -> None:
    """Let the loaders of all ranks share samples. Every rank must call it."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1:
        token = trust.token(world.get_group_store())
        loader.meet(from_every_rank(loader.introduce(launch.own_address(), token)))


class FeedForetold(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted waits of a run: seconds of the slowest rank in each step, and of each rank in the last steps;
    misses of the placement and of other caches; the file system's rate, and what steps without waits need of it."""

    waits: list[float]
    last_waits: list[float]
    misses: int
    belady_misses: int
    lru_misses: int
    file_bytes_per_s: float
    needed_bytes_per_s: float


def foretell_feed(loader: PrefetchLoader, step_s: float, num_steps: int) -> FeedForetold | None:
    """Measure the rate of the file system, and simulate for how long the next steps wait for data. A step takes
    ``step_s`` seconds if it does not wait. Every rank must call this function. Returns None on all ranks but rank 0,
    and if there are no steps."""
    rates = from_every_rank((loader.probe(), loader.prepare.each_s))
    num_steps = min(num_steps, MOST_REPLAYED // loader.batch_size)
    if (dist.is_initialized() and dist.get_rank() != 0) or num_steps < 1:
        return None
    forecast = foretold(
        loader, step_s, num_steps,
        FeedRates(
            file_bytes_per_s=sum(rate for rate, _ in rates),
            prepare_s=statistics.fmean(prepare_s for _, prepare_s in rates),
        ),
    )  # fmt: skip
    if step_s and (share := statistics.fmean(forecast.waits) / step_s) >= SLOW:
        use = DataUse(
            data="", num_ranks=0, num_steps=0, fetches={}, misses=0, waited_s=0.0,
            file_bytes_per_s=forecast.file_bytes_per_s, needed_bytes_per_s=forecast.needed_bytes_per_s,
        )  # fmt: skip
        log.warning("the data are slower than the steps: a step of %s will wait for %.0f %% of its time. %s",
                    seconds(step_s), 100 * share, use.explanation)  # fmt: skip
    return forecast


def foretold(loader: PrefetchLoader, step_s: float, num_steps: int, rates: FeedRates) -> FeedForetold:
    """The waits and misses of the next steps of a loader, at these rates."""
    accesses, batches = loader.accesses(num_steps), loader.batch_sizes(num_steps)
    classes = sources(accesses, loader.plan())
    sizes = loader.store.sizes
    fetches = [
        Fetches(sizes=sizes[samples].tolist(), classes=kinds.tolist(), batches=batches)
        for samples, kinds in zip(accesses, classes, strict=True)
    ]
    share = float(sizes.mean()) / loader.slot_bytes  # staging counts decoded samples
    times = simulate_feed(
        fetches, step_s, rates, threads=loader.threads, staging_bytes=max(1.0, loader.staging_bytes * share)
    )
    read_bytes = sum(int(sizes[each[kinds == FILES]].sum()) for each, kinds in zip(accesses, classes, strict=True))
    capacity = [_samples_in(room, sizes) for room in loader.rooms]
    together = np.stack([samples[: min(map(len, accesses))] for samples in accesses], axis=1).reshape(-1)
    return FeedForetold(
        waits=times.slowest_waits,
        last_waits=[statistics.fmean(waits[-LAST:]) for waits in times.waits],
        misses=sum(int((kinds == FILES).sum()) for kinds in classes),
        belady_misses=belady_misses(together.tolist(), sum(capacity)),
        lru_misses=sum(lru_misses(each.tolist(), room) for each, room in zip(accesses, capacity, strict=True)),
        file_bytes_per_s=rates.file_bytes_per_s,
        needed_bytes_per_s=read_bytes / (num_steps * step_s) if step_s else 0.0,
    )


def with_waits(trace: Trace, last_waits: Sequence[float]) -> Trace:
    """A predicted step, before which each rank waits for data."""
    begin = min((span.start_s for span in trace.spans), default=0.0)
    waits = tuple(
        Span(rank, DATA, "waiting for data", begin - wait_s, begin)
        for rank, wait_s in enumerate(last_waits)
        if wait_s > 0
    )
    return msgspec.structs.replace(trace, spans=(*waits, *trace.spans))


def data_use(loader: PrefetchLoader, waits: Sequence[float], predicted: FeedForetold | None) -> DataUse:
    """What the loaders of all ranks did in a run, beside what was predicted. ``waits``: the seconds that each step
    waited on this rank. Every rank must call it, after its last step."""
    loader.stop()
    counts = from_every_rank((loader.counts(), list(waits), loader.num_bad, loader.bad))
    steps = [max(each) for each in zip(*(waits for _, waits, *_ in counts), strict=True)]
    compared = len(predicted.waits) if predicted is not None else 0
    fetches = np.sum([each.by_class for each, *_ in counts], axis=0).tolist()
    whole = predicted is not None and compared == len(steps)
    return DataUse(
        data=loader.fingerprint, num_ranks=len(counts), num_steps=len(steps),
        fetches=dict(zip(CLASSES, fetches, strict=True)), misses=sum(each.reads for each, *_ in counts),
        predicted_misses=predicted.misses if predicted is not None and whole else None,
        belady_misses=predicted.belady_misses if predicted is not None and whole else None,
        lru_misses=predicted.lru_misses if predicted is not None and whole else None,
        waited_s=statistics.fmean(steps[: compared or None]) if steps else 0.0,
        predicted_waited_s=statistics.fmean(predicted.waits) if predicted is not None else None,
        file_bytes_per_s=predicted.file_bytes_per_s if predicted is not None else 0.0,
        needed_bytes_per_s=predicted.needed_bytes_per_s if predicted is not None else 0.0,
        staging_bytes=loader.staging_bytes, staged_bytes=max(each.staged_bytes for each, *_ in counts),
        kept_bytes=dict(
            zip(("memory", "disk"), np.sum([each.kept for each, *_ in counts], axis=0).tolist(), strict=True)
        ),
        num_bad=sum(bad for *_, bad, _ in counts) - (len(counts) - 1) * len(loader.store.truncated),  # all name these
        bad=tuple(dict.fromkeys(name for *_, names in counts for name in names))[:5],
    )  # fmt: skip


def _samples_in(room: Room, sizes: Any) -> int:
    """How many samples of mean size fit."""
    return int(room.memory_bytes // sizes.mean()) + int(room.disk_bytes // sizes.mean())
