"""Do loaders that fetch ahead save waiting? ``python -m benchmarks.data [--only PART]`` prints the verdicts.

Without ``--only``, the result file is written. The exit code is 1 if a target is missed.

cache      Nothing is timed: misses of the placement beside Belady's and LRU's in random cases, and the expected uses of
           a sample beside the binomial formula.
disk       Files of samples on a throttled disk (a token bucket that all threads and processes share), four times as
           large as the memory of a rank. One rank with a cache on the local disk, one without, and four ranks that
           share their memory (in one process: they wait most of the time). Beside it a DataLoader of torch with worker
           processes that buffers two batches each and takes as much memory, with the same order. A step sleeps for its
           time. Both sides take turns in one process; a round is a whole run of several epochs, the first one with
           empty caches. Waits are simulated with the bucket's rate and the step's time, before the run.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import report
from meshwright.api.data import foretold
from meshwright.data.ahead import THREADS, PrefetchLoader
from meshwright.data.order import SeededOrder
from meshwright.data.stores import Images, Store
from meshwright.emulation.disk import SlowStore, TokenBucket
from meshwright.ir.result import Check, Finding, PredictedTime, Series, Settings
from meshwright.ir.statistics import Estimate, ratio
from meshwright.schedules.samples import (
    FILES,
    Room,
    belady_misses,
    count_uses,
    divided,
    expected_accesses,
    lru_misses,
    place,
    sources,
)
from meshwright.simulate.feed import FeedRates

COMMAND = "python -m benchmarks.data"
ROUNDS, CASES = 7, 1000
SAMPLES, SAMPLE_BYTES, BATCH, EPOCHS = 256, 2**16, 8, 6
MEMORY_BYTES = SAMPLES * SAMPLE_BYTES // 4
RATE = 12e6
"""Bytes per second of the throttled disk."""
STEP_S = 8e-3
"""Less than a fifth of the time in which the disk gives a batch."""
AMPLE_STEP_S = 1.3 * BATCH * SAMPLE_BYTES / RATE
"""A step for which the disk is fast enough."""
WORKERS, FACTOR = 4, 2
"""Worker processes of the DataLoader, and batches that each buffers: as many bytes as MEMORY_BYTES."""
HALF, NO_WAIT, ERROR = 0.5, 0.01, 0.10
OURS, PEER = "meshwright", "torch DataLoader"


# --- cache ------------------------------------------------------------------------------------------------------------


def cache_findings(rounds: int) -> list[Finding]:
    """Counts beside other caches and a formula."""
    draw, right, equal = random.Random(0), 0, 0
    for _ in range(CASES):
        num_ranks, per_rank, batches, epochs = (draw.randint(1, most) for most in (8, 4, 8, 8))
        num_samples, room = num_ranks * per_rank * batches, draw.randint(0, per_rank * batches)
        seed = draw.randrange(2**32)
        orders = [SeededOrder(num_samples, seed, True).epoch(epoch) for epoch in range(epochs)]
        pieces = [divided(order, num_ranks * per_rank, num_ranks, drop_last=True) for order in orders]
        uses = count_uses(pieces, num_samples, num_ranks)
        placement = place(uses, np.ones(num_samples, np.int64), [Room(room)] * num_ranks, orders[0].argsort())
        accesses = [np.concatenate([piece[rank] for piece in pieces]) for rank in range(num_ranks)]
        misses = sum(int((classes == FILES).sum()) for classes in sources(accesses, placement))
        best = belady_misses(np.concatenate(orders).tolist(), room * num_ranks)
        right += best <= misses <= sum(lru_misses(samples.tolist(), room) for samples in accesses)
        equal += best == misses
    expected = expected_accesses(16, 90, 1_281_167, 0.8)
    return [
        report.share(
            "misses are never below those of Belady's cache and never above those of LRU, 1 to 8 ranks", right, CASES,
            f"{right:,} of {CASES:,} random cases; equal to Belady's in {equal:,}",
        ),
        report.share(
            "samples that a rank uses more than 1.8 times as often as the mean: 31,634.7 of 1,281,167 (16 ranks, 90 "
            "epochs)", int(abs(expected - 31_634.7) < 0.05), 1, f"{expected:,.1f}",
        ),
    ]  # fmt: skip


# --- disk -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskCase:
    """Ranks that share a disk, each with ``MEMORY_BYTES``, and perhaps a cache on a disk that is not throttled."""

    name: str
    num_ranks: int
    caches: bool
    limit: float | None


CASES_OF_DISK = (
    DiskCase("one rank with a cache on its local disk", 1, True, HALF),
    DiskCase("four ranks that share their memory", 4, False, HALF),
    DiskCase("one rank with its memory alone", 1, False, None),
)


class PlainDataset(Dataset[Any]):
    """The samples of a store, for a DataLoader."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> Any:
        return self._store.decode(index, self._store.read(index))


class RankOrder:
    """A sampler that gives a rank's samples in our order, epoch by epoch."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks, self._epoch = rank, num_ranks, 0

    def __iter__(self) -> Iterator[int]:
        order = SeededOrder(SAMPLES, 0, True).epoch(self._epoch)
        self._epoch += 1
        return iter(divided(order, BATCH, self._num_ranks, drop_last=True)[self._rank].tolist())

    def __len__(self) -> int:
        return SAMPLES // self._num_ranks


@dataclass
class DiskRun:
    """A run: seconds of a step, waits included; mean seconds that a step waits; losses of the first steps; reads."""

    step_s: float
    waited_s: float
    losses: list[float]
    reads: int = 0


def play(feeds: Sequence[Iterator[Any]], num_steps: int, step_s: float) -> DiskRun:
    """Steps of ranks that begin a step together."""
    waits, losses = [], []
    begun = time.perf_counter()
    for number in range(num_steps):
        asked = time.perf_counter()
        batches = [next(feed) for feed in feeds]
        waits.append(time.perf_counter() - asked)
        if number < 3:
            losses.append(float(torch.stack([batch["image"].float().mean() for batch in batches]).mean()))
        time.sleep(max(0.0, step_s - (time.perf_counter() - asked - waits[-1])))
    return DiskRun((time.perf_counter() - begun) / num_steps, sum(waits) / num_steps, losses)


def ours(case: DiskCase, store: Store, folder: Path, epochs: int, step_s: float) -> tuple[DiskRun, float]:
    """A run with loaders that fetch ahead, and its simulated mean wait."""
    num_steps = epochs * SAMPLES // BATCH
    loaders = [
        PrefetchLoader(
            store, BATCH, MEMORY_BYTES, shard=(rank, case.num_ranks), epochs=epochs,
            cache_directory=folder / "cache" if case.caches else None, threads=THREADS // case.num_ranks,
        )
        for rank in range(case.num_ranks)
    ]  # fmt: skip
    introductions = [loader.introduce() for loader in loaders]
    for loader in loaders:
        loader.meet(introductions)
    predicted = foretold(loaders[0], step_s, num_steps, FeedRates(file_bytes_per_s=RATE))
    played = play([iter(loader) for loader in loaders], num_steps, step_s)
    for loader in loaders:
        loader.stop()
    played.reads = sum(loader.counts().reads for loader in loaders)
    for loader in loaders:
        loader.close()
    return played, sum(predicted.waits) / num_steps


def theirs(case: DiskCase, store: Store) -> DiskRun:
    """The same run with a DataLoader on each rank."""
    loaders = [
        DataLoader(
            PlainDataset(store), BATCH // case.num_ranks, sampler=RankOrder(rank, case.num_ranks),
            num_workers=WORKERS if case.num_ranks == 1 else 1, prefetch_factor=FACTOR, persistent_workers=True,
            multiprocessing_context="fork",
        )
        for rank in range(case.num_ranks)
    ]  # fmt: skip

    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # its workers sleep

    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    return play([endless(loader) for loader in loaders], EPOCHS * SAMPLES // BATCH, STEP_S)


def disk_findings(rounds: int) -> list[Finding]:
    """Runs on a throttled disk, beside a DataLoader and beside the simulation."""
    results: list[Finding] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = _files(folder / "files")
        for case in CASES_OF_DISK:
            results += _of_a_case(case, files, folder, rounds)
        results.append(_ample(files, folder, rounds))
    return results


def _of_a_case(case: DiskCase, files: Store, folder: Path, rounds: int) -> list[Finding]:
    own_runs: list[DiskRun] = []
    peer_runs: list[DiskRun] = []
    predicted_s = 0.0
    for _ in range(rounds):
        played, predicted_s = ours(case, SlowStore(files, TokenBucket(RATE)), folder, EPOCHS, STEP_S)
        own_runs.append(played)
        peer_runs.append(theirs(case, SlowStore(files, TokenBucket(RATE))))
    steps = EPOCHS * SAMPLES // BATCH
    seconds = {OURS: [played.step_s for played in own_runs], PEER: [played.step_s for played in peer_runs]}
    judged = report.judged(
        f"{case.name}: a run on data four times the memory takes at most {case.limit or HALF:g} of a DataLoader's time",
        seconds, OURS, case.limit or HALF, settings=case.name, num_ranks=1, steps=steps,
        losses={OURS: own_runs[0].losses, PEER: peer_runs[0].losses}, loss_spread=0.0,
    )  # fmt: skip
    if case.limit is None:
        least = 1 - (EPOCHS - 1) / EPOCHS * (_kept(case) / SAMPLES)
        text = f"{judged.measured}; with this memory, no cache reads less than {least:.3f} of the DataLoader's bytes"
        judged = type(judged)(**{**_fields(judged), "verdict": "reported", "measured": text})
    predicted = _predicted(case.name, predicted_s, [played.waited_s for played in own_runs], steps)
    return [judged, predicted, _misses(case, own_runs)]


def _misses(case: DiskCase, runs: Sequence[DiskRun]) -> Check:
    """Reads of the runs, those after the last step included, beside other caches of equal size."""
    orders = [SeededOrder(SAMPLES, 0, True).epoch(epoch) for epoch in range(EPOCHS)]
    pieces = [divided(order, BATCH, case.num_ranks, drop_last=True) for order in orders]
    each = SAMPLES if case.caches else _kept(case) // case.num_ranks
    best = belady_misses(np.concatenate(orders).tolist(), each * case.num_ranks)
    oldest = sum(
        lru_misses(np.concatenate([piece[rank] for piece in pieces]).tolist(), each) for rank in range(case.num_ranks)
    )
    reads = [run.reads for run in runs]
    inside = sum(best <= count <= oldest for count in reads)
    return report.share(
        f"{case.name}: reads of the disk are never below Belady's and never above LRU's", inside, len(reads),
        f"{min(reads):,} to {max(reads):,} reads, Belady {best:,}, LRU {oldest:,}, of {EPOCHS * SAMPLES:,} fetches",
    )  # fmt: skip


def _kept(case: DiskCase) -> int:
    """The samples that all ranks together keep in memory, beside staging and a batch that waits."""
    batch = BATCH // case.num_ranks * SAMPLE_BYTES
    staging = max(2 * batch, MEMORY_BYTES // 8)
    return min(SAMPLES, case.num_ranks * ((MEMORY_BYTES - staging - batch) // SAMPLE_BYTES))


def _ample(files: Store, folder: Path, rounds: int) -> Check:
    case, right, shares = CASES_OF_DISK[2], 0, []
    for _ in range(rounds):
        loader = PrefetchLoader(SlowStore(files, TokenBucket(RATE)), BATCH, MEMORY_BYTES, epochs=2)
        feed = iter(loader)
        play([feed], 2, AMPLE_STEP_S)  # the first batch is always waited for
        played = play([feed], SAMPLES // BATCH, AMPLE_STEP_S)
        loader.close()
        shares.append(played.waited_s / AMPLE_STEP_S)
        right += shares[-1] <= NO_WAIT
    return report.share(
        f"{case.name}: steps wait for less than {NO_WAIT:.0%} of their time when the disk gives 1.3 times what they "
        "need", right, rounds, f"waiting takes {min(shares):.2%} to {max(shares):.2%} of a step",
    )  # fmt: skip


def _predicted(name: str, predicted_s: float, waits: Sequence[float], steps: int) -> PredictedTime:
    off: Estimate = ratio([predicted_s] * len(waits), waits)
    inside = [abs(end - 1) <= ERROR for end in off.interval]
    outside = off.low > 1 + ERROR or off.high < 1 - ERROR
    series = Series.of(list(waits), steps=steps, settings=name, run=report.new_run())
    return PredictedTime(
        target=f"{name}: the simulated wait for data is within {ERROR:.0%} of the measured one",
        verdict="pass" if all(inside) else "fail" if outside else "undecided",
        measured=f"{off.value - 1:+.1%} (95 %: {off.low - 1:+.1%} to {off.high - 1:+.1%}): predicted "
        f"{report.ms(predicted_s)} a step, measured {report.ms(series.value_s)}",
        series=series, predicted_s=predicted_s, error=predicted_s / series.value_s - 1, limit=ERROR,
    )  # fmt: skip


def _files(folder: Path) -> Store:
    draw = np.random.default_rng(0)
    for number in range(SAMPLES):
        place_ = folder / f"class-{number % 4}"
        place_.mkdir(parents=True, exist_ok=True)
        (place_ / f"{number:04d}.bin").write_bytes(draw.bytes(SAMPLE_BYTES))
    return Images(folder, _decode, (".bin",))


def _decode(content: memoryview) -> torch.Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)


def _fields(finding: Any) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in finding.__struct_fields__}


PARTS: dict[str, Callable[[int], list[Finding]]] = {"cache": cache_findings, "disk": disk_findings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    results, _, whole = report.measured(COMMAND, __doc__, PARTS, ROUNDS, arguments)
    if whole:
        timed = "A run of several epochs, from asking for the first batch to the end of the last step, by its steps."
        sizes: dict[str, Any] = {
            "samples": SAMPLES, "sample_bytes": SAMPLE_BYTES, "batch": BATCH, "epochs": EPOCHS,
            "memory_bytes": MEMORY_BYTES, "disk_bytes_per_s": RATE, "step_s": STEP_S,
        }  # fmt: skip
        settings = {
            case.name: Settings(dtype="uint8", ranks=1, threads=1, sizes={**sizes, "emulated_ranks": case.num_ranks})
            for case in CASES_OF_DISK
        }
        text = (__doc__ or "").partition("is missed.")[2].strip()
        report.write("data", "Data fetched ahead", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
