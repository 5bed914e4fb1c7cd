"""What do checkpoints cost? ``python -m benchmarks.checkpoints [--only PART]`` prints the verdicts.

Without ``--only``, the result file is written. The exit code is 1 if a target is missed.

pause     The demo's GPT on two ranks saves beside its steps, every few steps. A save stops training while ``save_in``
          runs, and while an update waits for the copies; both are timed on every rank, and the slowest counts.
disk      2 GiB of state are written and flushed to the disk: as a checkpoint, with indices and checksums; by
          torch.distributed.checkpoint, which computes no checksums; and as plain bytes, through the system's cache and
          around it, where the room is reserved before. The faster of the two is the disk's speed. All take turns, and
          write to fresh files.
reshard   A checkpoint of 2 GiB is saved by four ranks, and loaded by two ranks. Memory is VmHWM during the load beyond
          what is resident before it, added to the rank's parameters, which are resident then.
stream    A folder of Hugging Face is loaded by two ranks into a model on the meta device. All reads are counted: their
          bytes, beside those that the rank holds, and the largest one, which is all that a rank needs besides its
          parameters. The counts are those of a model of any size: 70 billion parameters in bfloat16 on 8 ranks are
          17.5 GB a rank, and one more read.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import meshwright as mw
from benchmarks import report
from meshwright.ir.result import Check, Comparison, Finding, Settings
from meshwright.models import MLP, classification_loss, demo_gpt, language_model_loss
from meshwright.runtime.chunk_index import joined, small_files
from meshwright.runtime.safetensors_files import SafetensorsSource
from meshwright.runtime.shards import CHUNK_BYTES, StoredPart, chunks_of
from meshwright.runtime.share import Share
from tests.distributed.pool import Ranks

COMMAND = "python -m benchmarks.checkpoints"
ROUNDS = 7
PAUSE, DISK, MEMORY = 0.01, 1 / 0.8, 1.2
STATE_BYTES = 2 * 2**30
STEPS_BETWEEN = 6
"""Steps from one save to the next; the first of them is the one whose update waits for the copies."""
PIECE_BYTES, PAGE_BYTES = 16 * 2**20, 4096


def scratch() -> Path:
    """A new directory on the disk of the working directory: /tmp may lie in memory."""
    return Path(tempfile.mkdtemp(prefix=".checkpoints-", dir=Path.cwd()))


# --- pause -----------------------------------------------------------------------------------------------------------


def pauses(directory: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds for which each save stops this rank, and seconds of a step without a save."""
    model = demo_gpt()
    ids = torch.randint(256, (8, 257), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    trainer = mw.parallelize(
        model, language_model_loss, batch, plan=mw.Layout(dp=2), max_grad_norm=1.0,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    )  # fmt: skip
    hold, waited = trainer.saver.hold_update, [0.0]

    def timed_hold() -> None:
        begun = time.perf_counter()
        hold()
        waited[0] += time.perf_counter() - begun

    trainer.saver.hold_update = timed_hold  # type: ignore[method-assign]
    saves, steps = [], []
    for number in range(rounds + 2):
        begun, waited[0] = time.perf_counter(), 0.0
        trainer.save_in(directory, keep=1, blocking=False)
        stopped = time.perf_counter() - begun
        trainer.step(batch)
        stopped += waited[0]
        trainer.wait_for_save()
        trainer.step(batch)
        begun = time.perf_counter()
        for _ in range(STEPS_BETWEEN - 2):
            trainer.step(batch)
        step_s = (time.perf_counter() - begun) / (STEPS_BETWEEN - 2)
        if number >= 2:  # the first saves plan, and there is no optimizer state before the first step
            saves.append(stopped)
            steps.append(step_s)
    return saves, steps


def pause(rounds: int) -> list[Finding]:
    """How long a save stops the steps."""
    directory = scratch()
    try:
        with Ranks() as ranks:
            every = ranks(2, pauses, str(directory), rounds, timeout=1800.0)
    finally:
        shutil.rmtree(directory)
    saves, steps = ([max(values) for values in zip(*(rank[side] for rank in every), strict=True)] for side in (0, 1))
    sides = {"a save stops training": saves, "a step": steps}
    return [judged("pause: a save stops training for at most 1 % of a step of the demo", sides, PAUSE, "demo", 2)]


def judged(target: str, seconds: dict[str, list[float]], limit: float, settings: str, num_ranks: int) -> Comparison:
    """Our seconds, the first side, over those of the last side."""
    losses = dict.fromkeys(seconds, (0.0,))
    ours, *_, other = seconds
    sides = {ours: seconds[ours], other: seconds[other]}
    return report.judged(
        target, sides, ours, limit, settings=settings, num_ranks=num_ranks, steps=1,
        losses={side: losses[side] for side in sides},
    )  # fmt: skip


# --- disk ------------------------------------------------------------------------------------------------------------


def state() -> dict[str, Tensor]:
    """2 GiB in tensors as those of a model: most of 64 MiB, some small."""
    count = STATE_BYTES // (64 * 2**20)
    tensors: dict[str, Tensor] = {f"model.{number}.weight": torch.rand(4096, 4096) for number in range(count)}
    return tensors | {f"model.{number}.bias": torch.rand(4096) for number in range(count)}


def write_ours(tensors: dict[str, Tensor], directory: Path) -> None:
    """As a checkpoint, with both indices."""
    parts = {
        name: StoredPart(value, tuple(value.shape), chunks_of(tuple(value.shape), {}, {}))
        for name, value in tensors.items()
    }
    index = joined([Share(parts, finite=parts).write(directory)])
    for name, data in small_files(index).items():
        (directory / name).write_bytes(data)


def write_torch(tensors: dict[str, Tensor], directory: Path) -> None:
    """By torch.distributed.checkpoint, which flushes its files too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(directory), no_dist=True)


def write_plain(tensors: dict[str, Tensor], directory: Path) -> None:
    """As bytes."""
    directory.mkdir()
    with (directory / "plain").open("wb") as file:
        for value in tensors.values():
            data: Any = value.view(-1).view(torch.uint8).numpy()
            view = memoryview(data)
            for start in range(0, len(view), PIECE_BYTES):
                file.write(view[start : start + PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())


def write_direct(tensors: dict[str, Tensor], directory: Path) -> None:
    """As bytes that go around the system's cache, into room that is reserved before. The last page is filled up."""
    directory.mkdir()
    size = sum(value.nbytes for value in tensors.values())
    number = os.open(directory / "plain", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    buffer, filled, at = memoryview(mmap.mmap(-1, PIECE_BYTES)), 0, 0
    try:
        os.posix_fallocate(number, 0, size)
        for value in tensors.values():
            data: Any = value.view(-1).view(torch.uint8).numpy()
            view = memoryview(data)
            while len(view):
                if not filled and len(view) >= PIECE_BYTES and data.ctypes.data % PAGE_BYTES == 0:
                    count = os.pwrite(number, view[:PIECE_BYTES], at)  # from its own memory
                    view, at = view[count:], at + count
                    continue
                count = min(len(view), PIECE_BYTES - filled)
                buffer[filled : filled + count] = view[:count]
                view, filled = view[count:], filled + count
                if filled == PIECE_BYTES:
                    at, filled = at + os.pwrite(number, buffer, at), 0
        os.pwrite(number, buffer[: -(-filled // PAGE_BYTES) * PAGE_BYTES], at)
        os.ftruncate(number, size)
        os.fsync(number)
    finally:
        os.close(number)


PLAIN = ("plain bytes", "plain bytes around the cache")
WRITERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "a checkpoint": write_ours, "torch.distributed.checkpoint": write_torch, PLAIN[0]: write_plain,
    PLAIN[1]: write_direct,
}  # fmt: skip


def disk(rounds: int) -> list[Finding]:
    """How fast 2 GiB reach the disk."""
    tensors = state()
    seconds: dict[str, list[float]] = {name: [] for name in WRITERS}
    for number in range(rounds):
        turn = number % len(WRITERS)
        for name in [*WRITERS][turn:] + [*WRITERS][:turn]:
            directory = scratch()
            try:
                os.sync()
                begun = time.perf_counter()
                WRITERS[name](tensors, directory / "data")
                seconds[name].append(time.perf_counter() - begun)
            finally:
                shutil.rmtree(directory)
    target = "disk: 2 GiB of state are written at 80 % of the disk's speed or more (a ratio of at most 1.25)"
    beside = {name: seconds[name] for name in ("a checkpoint", "torch.distributed.checkpoint")}
    fastest = min(PLAIN, key=lambda name: statistics.median(seconds[name]))
    return [
        judged(target, {name: seconds[name] for name in ("a checkpoint", fastest)}, DISK, "disk", 1),
        judged("disk: beside torch.distributed.checkpoint, without checksums there", beside, 1.0, "disk", 1),
    ]


# --- reshard ---------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 8192, 8
"""Eight matrices of 256 MiB."""


def large(layout: mw.Layout) -> mw.Trainer:
    """A trainer of 2 GiB of parameters, which no rank holds whole."""
    with mw.auto_parallelize():
        model = MLP((WIDTH,) * (LAYERS + 1))
    batch = {"inputs": torch.zeros(4, WIDTH), "label": torch.zeros(4, dtype=torch.int64)}
    return mw.parallelize(model, classification_loss, batch, plan=layout)


def save_large(path: str) -> int:
    """Save under four ranks; the bytes of this rank's parameters."""
    trainer = large(mw.Layout(tp=4))
    trainer.save(path)
    return sum(value.nbytes for value in trainer.parameters.own.values())


def load_large(path: str) -> tuple[int, int]:
    """Load under two ranks: the bytes of this rank's parameters, and the most memory beyond them."""
    trainer = large(mw.Layout(tp=2))
    dist.barrier()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the initialisation has freed does not hide what the load takes
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    trainer.load(path)
    return sum(value.nbytes for value in trainer.parameters.own.values()), _status("VmHWM") - before


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def reshard(rounds: int) -> list[Finding]:
    """How much memory a load under another number of ranks needs."""
    directory = scratch()
    try:
        with Ranks() as ranks:
            ranks(4, save_large, str(directory / "ckpt"), timeout=1800.0)
        with Ranks() as ranks:
            memories = ranks(2, load_large, str(directory / "ckpt"), timeout=1800.0)
    finally:
        shutil.rmtree(directory)
    needs = [(shard + more) / shard for shard, more in memories]
    measured = "; ".join(
        f"rank {rank}: {report.size(shard)} of parameters, {report.size(more)} more, {need:.2f}x"
        for rank, ((shard, more), need) in enumerate(zip(memories, needs, strict=True))
    )
    target = "reshard: a checkpoint of 2 GiB of 4 ranks is loaded by 2 ranks in at most 1.2x a shard's memory"
    return [report.share(target, sum(need <= MEMORY for need in needs), len(needs), measured)]


# --- stream ----------------------------------------------------------------------------------------------------------


def llama(layers: int = 6) -> Any:
    """A Llama of 0.9 GB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=64,
    ))  # fmt: skip


def stream_in(folder: str) -> tuple[int, int, int]:
    """Bytes that are read, bytes that are held, and the largest read."""
    sizes: list[int] = []
    read = SafetensorsSource.read

    def counted(source: SafetensorsSource, *place: Any) -> Tensor:
        value = read(source, *place)
        sizes.append(value.nbytes)
        return value

    SafetensorsSource.read = counted  # type: ignore[method-assign, assignment]
    with mw.auto_parallelize():
        model = llama()
    trainer = mw.parallelize(
        model, lambda module, batch: module(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss,
        {"ids": torch.zeros(2, 32, dtype=torch.int64)}, plan=mw.Layout(tp=2), weights=folder,
    )  # fmt: skip
    SafetensorsSource.read = read  # type: ignore[method-assign]
    return sum(sizes), sum(value.nbytes for value in trainer.parameters.own.values()), max(sizes)


def stream(rounds: int) -> list[Finding]:
    """What ranks read of a folder of Hugging Face."""
    directory = scratch()
    try:
        model = llama()
        model.save_pretrained(directory, max_shard_size="200MB")
        whole = sum(value.nbytes for value in model.parameters())
        del model
        with Ranks() as ranks:
            reads = ranks(2, stream_in, str(directory), timeout=1800.0)
    finally:
        shutil.rmtree(directory)
    right = [read == held < whole and most <= CHUNK_BYTES for read, held, most in reads]
    measured = "; ".join(
        f"rank {rank}: {report.size(read)} read, {report.size(held)} held of {report.size(whole)}, the largest read "
        f"{report.size(most)}"
        for rank, (read, held, most) in enumerate(reads)
    )
    target = "stream: each rank reads the bytes that it holds and no others, in pieces of at most 16 MiB"
    checked: Check = report.share(target, sum(right), len(right), measured)
    return [checked]


# --- the command ------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[int], list[Finding]]] = {
    "pause": pause, "disk": disk, "reshard": reshard, "stream": stream,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    results, _, whole = report.measured(COMMAND, __doc__, PARTS, ROUNDS, arguments)
    if whole:
        timed = (
            "pause: the call of save_in, and the wait of the next update. disk: from the first byte until all are "
            "flushed to the disk."
        )
        settings = {
            "demo": Settings(
                dtype="float32", ranks=2, threads=1,
                sizes={"layers": 4, "width": 256, "vocabulary": 256, "batch": 8, "sequence": 256},
            ),
            "disk": Settings(dtype="float32", ranks=1, threads=1, sizes={"bytes": STATE_BYTES}),
        }  # fmt: skip
        text = (__doc__ or "").partition("is missed.")[2].strip()
        report.write("checkpoints", "Checkpoints", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
