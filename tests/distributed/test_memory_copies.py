"""Copies of the state in memory: other ranks, under another layout or fewer, go on as if nobody had been lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright import api, config
from meshwright.comm.groups import from_every_rank
from meshwright.cost.copies import copies_of
from meshwright.cost.optimizer import ADAMW
from meshwright.data.loaders import TensorLoader
from meshwright.ir.copies import KEPT, SLOTS, STAGED, StateCopies
from meshwright.ir.ledger import Ledger
from meshwright.runtime import memory_copies
from meshwright.runtime.kept_memory import VARIABLE, MemorySlot, kept_memory, slots_of
from meshwright.runtime.memory_copies import MemoryCopies
from tests.distributed.pool import Ranks, RanksFailedError
from tests.end_to_end.checkpoint_cases import a_batch, a_trainer, adamw

SIZES = (6, 16, 8, 4)


def loader(trainer: mw.Trainer) -> TensorLoader:
    whole = a_batch(SIZES[0], SIZES[-1])
    data = {name: torch.cat([value, value.flip(0)]) for name, value in whole.items()}
    return TensorLoader(data, batch_size=8, seed=3, shard=trainer.data_shard)


def trainer_with_copies(memories: list[str], layout: dict[str, Any]) -> tuple[mw.Trainer, TensorLoader, MemoryCopies]:
    """This rank's trainer; the ranks are divided over the launchers with these memories."""
    trainer = a_trainer(adamw, SIZES, plan=mw.Layout(**layout), max_grad_norm=1.0)
    each = -(-trainer.plan.mesh.world_size // len(memories))
    host, local_rank = divmod(trainer.rank, each)
    own = loader(trainer)
    return trainer, own, MemoryCopies(trainer, own, memories[host], local_rank)


def steps(trainer: mw.Trainer, own: TensorLoader, count: int) -> list[float]:
    batches = iter(own)
    return [float(trainer.step(next(batches), local=True)) for _ in range(count)]


def begin(memories: list[str], layout: dict[str, Any]) -> list[float]:
    """Three steps, with copies after the second and the third; the losses of two steps more."""
    trainer, own, copies = trainer_with_copies(memories, layout)
    steps(trainer, own, 2)
    copies.make(2)
    steps(trainer, own, 1)
    copies.make(3)
    copies.finish()
    return steps(trainer, own, 2)


def go_on(memories: list[str], layout: dict[str, Any], saved: int = -1) -> tuple[int, list[float]]:
    trainer, own, copies = trainer_with_copies(memories, layout)
    copies.resume(lambda: saved)
    step = trainer.step_number
    return step, steps(trainer, own, 2)


@pytest.fixture
def memories() -> Iterator[list[str]]:
    """The memory of two launchers of up to four ranks."""
    with ExitStack() as stack:
        yield [stack.enter_context(kept_memory(4))[VARIABLE] for _ in range(2)]


ON_ONE_HOST = {
    "as before": (4, {"dp": 2, "tp": 2}, 4, {"dp": 2, "tp": 2}),
    "fewer ranks": (4, {"dp": 4, "zero": 1}, 2, {"dp": 2}),
    "more ranks": (2, {"tp": 2}, 4, {"dp": 4, "zero": 3}),
    "a pipeline": (2, {"pp": 2, "microbatches": 2}, 2, {"dp": 2}),
    "a single rank": (3, {"dp": 1, "tp": 1, "pp": 3, "microbatches": 2}, 1, {}),
}


@pytest.mark.parametrize("case", ON_ONE_HOST)
def test_other_ranks_go_on_from_memory(ranks: Ranks, memories: list[str], case: str) -> None:
    before, layout, after, other = ON_ONE_HOST[case]
    expected = ranks(before, begin, memories[:1], layout)[0]
    for step, losses in ranks(after, go_on, memories[:1], other):
        assert step == 3
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)
        if layout == other:
            assert losses == expected


def test_a_lost_host_is_replaced_by_the_copies_on_the_other(ranks: Ranks, memories: list[str]) -> None:
    """Stages 0 and 1 are on the one host, 2 and 3 on the other: what is lost, its neighbour has."""
    expected = ranks(4, begin, memories, {"pp": 4, "microbatches": 2})[0]
    for left in memories:
        for step, losses in ranks(2, go_on, [left], {"dp": 2}):
            assert step == 3
            assert losses == pytest.approx(expected, rel=0, abs=1e-9)


def test_what_only_another_host_has_is_sent(ranks: Ranks, memories: list[str]) -> None:
    """The copies of both hosts are needed by ranks of both: each stage goes to the other host."""
    expected = ranks(4, begin, memories, {"dp": 2, "tp": 2})[0]
    for step, losses in ranks(4, go_on, [memories[1], memories[0]], {"tp": 4}):
        assert step == 3
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)


def test_the_later_of_disk_and_memory_counts(ranks: Ranks, memories: list[str]) -> None:
    ranks(2, begin, memories[:1], {"dp": 2})
    assert [step for step, _ in ranks(2, go_on, memories[:1], {"dp": 2}, 3)] == [3, 3]
    assert [step for step, _ in ranks(2, go_on, memories[:1], {"dp": 2}, 4)] == [0, 0]


def begin_and_die(memories: list[str], layout: dict[str, Any]) -> None:
    """A copy after the second step; rank 1 is killed in the middle of the next."""
    trainer, own, copies = trainer_with_copies(memories, layout)
    steps(trainer, own, 2)
    copies.make(2)
    steps(trainer, own, 1)
    if trainer.rank == 1:
        MemorySlot.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    copies.make(3)
    from_every_rank(0)


def test_a_copy_that_was_not_finished_does_not_count(ranks: Ranks, memories: list[str]) -> None:
    with pytest.raises(RanksFailedError):
        ranks(2, begin_and_die, memories[:1], {"dp": 2, "zero": 1})
    assert [step for step, _ in ranks(2, go_on, memories[:1], {"dp": 2})] == [2, 2]


def copies_made(memories: list[str], share: float, num_steps: int) -> list[int]:
    """The steps after which a run copies its state."""
    memory_copies.SHARE = share
    trainer, own, copies = trainer_with_copies(memories, {"dp": 2})
    copied_steps = []
    for step in range(1, num_steps + 1):
        steps(trainer, own, 1)
        if copies.is_due(step):
            copies.make(step)
            copied_steps.append(step)
    return copied_steps


def test_copies_are_as_frequent_as_they_are_cheap(ranks: Ranks, memories: list[str]) -> None:
    before = memory_copies.SHARE
    assert ranks(2, copies_made, memories[:1], 1e9, 9) == [[2, 4, 6, 7, 8, 9]] * 2
    assert ranks(2, copies_made, memories[:1], 1e-9, 9) == [[2, 4, 6]] * 2
    ranks(2, copies_made, memories[:1], before, 1)


def without_memory(memories: list[str]) -> bool:
    before, memory_copies.available_bytes = memory_copies.available_bytes, lambda: 1000
    try:
        trainer, own, copies = trainer_with_copies(memories, {"dp": 2})
        steps(trainer, own, 2)
        copies.make(2)
        return copies.is_due(1) or copies.is_due(4)
    finally:
        memory_copies.available_bytes = before


def test_without_memory_there_are_no_copies(ranks: Ranks, memories: list[str]) -> None:
    assert ranks(2, without_memory, memories[:1]) == [False, False]
    assert all(slot.read() is None for slots in slots_of(memories[0]) for slot in slots)


# --- their bytes are foretold ----------------------------------------------------------------------------------------


def bytes_held(memories: list[str], layout: dict[str, Any], path: str) -> tuple[StateCopies, StateCopies]:
    """The bytes of this rank's copies, and those that are predicted for it."""
    trainer, own, copies = trainer_with_copies(memories, layout)
    steps(trainer, own, 1)
    copies.make(1)
    copies.finish()
    trainer.save(path, blocking=False)
    steps(trainer, own, 1)
    trainer.wait_for_save()
    assert copies._plan is not None
    tensors = sum(entry.piece.num_bytes for entry in copies._plan.entries if entry.piece.dtype != "bytes")
    assert SLOTS * tensors <= copies.num_bytes, "the file has a head, too"
    held = StateCopies(kept_bytes=SLOTS * tensors, staged_bytes=trainer.saver.num_staged_bytes)
    stage = trainer.plan.mesh.coordinates(trainer.rank).get("pp", 0)
    return held, copies_of(trainer.graph, trainer.plan, ADAMW, copies.num_hosts)[stage]


@pytest.mark.parametrize(
    ("num_hosts", "layout"),
    [
        (1, {"dp": 2}), (1, {"dp": 2, "zero": 1}), (1, {"pp": 2, "microbatches": 2}), (2, {"dp": 2}),
        (2, {"pp": 2, "microbatches": 2}),
    ],
)  # fmt: skip
def test_the_bytes_of_all_copies_are_those_that_are_predicted(
    ranks: Ranks, memories: list[str], tmp_path: Path, num_hosts: int, layout: dict[str, Any]
) -> None:
    results = ranks(2, bytes_held, memories[:num_hosts], layout, str(tmp_path / "saved"))
    held, foretold = zip(*results, strict=True)
    for name in ("kept_bytes", "staged_bytes"):
        assert sum(getattr(each, name) for each in held) == sum(getattr(each, name) for each in foretold) > 0


def train_wide(memory: str, directory: str) -> Ledger | None:
    """The ledger of a run that holds little but its state."""
    os.environ |= {VARIABLE: memory, "LOCAL_RANK": f"{dist.get_rank()}"}
    raw = {
        "model": {"name": "mlp", "sizes": [8, 1024, 1024, 1024, 4]},
        "data": {"kind": "random", "shape": [8], "classes": 4, "samples": 64, "batch_size": 8, "held_out": 0.0},
        "layout": {"dp": 2}, "optimizer": {"name": "adamw"},
        "train": {"directory": directory, "steps": 14, "checkpoint_every": 5},
    }  # fmt: skip
    try:
        return api.train(config.make(raw, where="test")).ledger
    finally:
        del os.environ[VARIABLE], os.environ["LOCAL_RANK"]


def test_a_peak_has_its_copies_in_prediction_and_measurement(ranks: Ranks, memories: list[str], tmp_path: Path) -> None:
    state = 3 * 4 * (8 * 1024 + 1024 + 2 * (1024 * 1024 + 1024) + 1024 * 4 + 4)
    ledger = ranks(2, train_wide, memories[0], str(tmp_path))[0]
    assert ledger is not None
    for entry in ledger.ranks:
        kept, staged = entry.parts
        assert (kept.what, staged.what) == (KEPT, STAGED)
        assert (kept.predicted_bytes, staged.predicted_bytes) == (state, state / 2)
        assert kept.measured_bytes == pytest.approx(state, rel=0.1)
        assert staged.measured_bytes == pytest.approx(state / 2, rel=0.1)
        assert entry.predicted.peak_bytes > 2.5 * state, "parameters, gradients, moments, and copies"
        ratio = entry.measured.peak_bytes / entry.predicted.peak_bytes
        assert 0.45 < ratio < 1.3, "a rank of the pool may have memory that earlier tests have freed"


def write_and_die(memory: str) -> None:
    ((slot, _),) = slots_of(memory)
    slot.begin(3, b"head").copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
    slot.commit(12)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_launchers_memory_outlives_its_writers_and_ends_with_it(ranks: Ranks) -> None:
    with kept_memory(1) as environment:
        memory = environment[VARIABLE]
        with pytest.raises(RanksFailedError):
            ranks(1, write_and_die, memory)
        ((slot, other),) = slots_of(memory)
        record = slot.read()
        assert record is not None
        step, head, data = record
        assert (step, head, data.tolist()) == (12, b"head", [1, 2, 3])
        assert other.read() is None
        slot.begin(5, b"longer")
        assert slot.read() is None, "it is begun, and not complete"
    assert slots_of(memory)[0][0].read() is None
    assert slots_of("") == []
