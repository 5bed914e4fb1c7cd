"""Saves that are written beside the steps: what they hold, who waits for them, what ranks know of their failures."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm.board import PIECE_BYTES, Board
from meshwright.errors import CheckpointError, DiskError, LostRankError
from meshwright.runtime import manifest, saving
from meshwright.runtime.chunk_writer import ChunkFile
from meshwright.runtime.share import Share
from tests.distributed.pool import Ranks
from tests.end_to_end.checkpoint_cases import a_batch, a_trainer, log_messages, same, weights


class Gate:
    """Holds back what writes tensors until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        write = Share.write

        def held(share: Share, directory: Path) -> Any:
            assert self.open.wait(60)
            return write(share, directory)

        monkeypatch.setattr(Share, "write", held)


def test_steps_go_on_while_what_was_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, trainer = Gate(monkeypatch), a_trainer()
    trainer.step(a_batch())
    before = weights(trainer)
    trainer.save(tmp_path / "ckpt", blocking=False)
    later = [trainer.step(a_batch()).item() for _ in range(3)]
    assert manifest.latest_step(tmp_path) == -1
    assert not (tmp_path / "ckpt" / "manifest.json").exists()
    gate.open.set()
    trainer.wait_for_save()
    other = a_trainer()
    other.load(tmp_path / "ckpt")
    assert other.step_number == 1
    assert same(weights(other), before)
    assert [other.step(a_batch()).item() for _ in range(3)] == later


def test_the_next_save_and_a_load_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, trainer = Gate(monkeypatch), a_trainer()
    trainer.save_in(tmp_path, blocking=False)
    trainer.step(a_batch())
    threading.Timer(0.2, gate.open.set).start()
    trainer.save_in(tmp_path, blocking=False)
    assert manifest.latest_step(tmp_path) >= 0
    trainer.load(tmp_path / "step-00000001")
    assert trainer.step_number == 1


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.end_to_end.checkpoint_cases import a_trainer\n"
        "a_trainer().save(sys.argv[1], blocking=False)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "ckpt")], check=True, timeout=120)
    a_trainer().load(tmp_path / "ckpt")


def full(*args: object) -> Any:
    raise OSError(28, "No space left on device")


def test_what_the_disk_refuses_is_told_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer()
    first = trainer.save_in(tmp_path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "meshwright"):
        patch.setattr(ChunkFile, "add", full)
        trainer.step(a_batch())
        second = trainer.save_in(tmp_path, keep=1, blocking=False)
        trainer.step(a_batch())
        third = trainer.save_in(tmp_path, keep=1, blocking=False)
        with pytest.raises(DiskError) as caught:
            trainer.wait_for_save()
    problem = "tensors could not be written (rank 0: No space left on device)"
    assert log_messages(caplog) == [
        f"{path}: {problem}; training goes on, and the next save tries again" for path in (second, third)
    ]
    assert str(caught.value) == f"{third}: {problem}\n  -> check the disk's space and permissions"
    assert list(tmp_path.iterdir()) == [first], "the last good one stays, and nothing half-written"
    trainer.wait_for_save()  # it was told
    assert trainer.save_in(tmp_path, keep=1, blocking=False) == third
    trainer.wait_for_save()
    assert list(tmp_path.iterdir()) == [third]


def test_what_no_later_save_mends_is_raised_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> Any:
        raise ZeroDivisionError("out of order")

    trainer = a_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(saving, "joined", broken)
        trainer.save(tmp_path / "ckpt", blocking=False)
        with pytest.raises(CheckpointError, match="ZeroDivisionError: out of order"):
            trainer.save(tmp_path / "ckpt", blocking=False)
    trainer.save(tmp_path / "ckpt", blocking=False)
    trainer.wait_for_save()


def save_while_rank_1_fails(directory: str) -> tuple[str, str, int, list[str]]:
    trainer = a_trainer(plan=mw.Layout(dp=2))
    trainer.save_in(directory)
    trainer.step(a_batch())
    with pytest.MonkeyPatch.context() as patch:
        if trainer.rank == 1:
            patch.setattr(ChunkFile, "add", full)
        trainer.save_in(directory, blocking=False)
        trainer.step(a_batch())
        with pytest.raises(DiskError) as caught:
            trainer.wait_for_save()
    kept = sorted(path.name for path in Path(directory).iterdir()) if trainer.rank == 0 else []
    trainer.save_in(directory, blocking=False)
    trainer.wait_for_save()
    taken = trainer.load_latest(directory)
    return str(caught.value), taken.name if taken else "", trainer.step_number, kept


def test_ranks_agree_on_a_save_that_failed_on_one(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, save_while_rank_1_fails, str(tmp_path))
    assert first[:3] == second[:3]
    assert first == (
        (
            f"{tmp_path}/step-00000001: tensors could not be written (rank 1: No space left on device)\n"
            "  -> check the disk's space and permissions"
        ),
        "step-00000002",
        2,
        ["step-00000000"],
    )


def exchange_notes() -> tuple[int, str]:
    board, rank = Board(), torch.distributed.get_rank()
    board.post(f"{rank}", bytes([rank]) * (2 * PIECE_BYTES + 5))
    notes = board.read(f"{1 - rank}", 1 - rank)
    assert set(notes) == {1 - rank}
    torch.distributed.barrier()
    board.remove(f"{rank}")
    torch.distributed.barrier()
    board._timeout_s = 0.1
    try:
        board.read(f"{1 - rank}", 1 - rank)
    except LostRankError as error:
        return len(notes), f"{error.where}: {error.problem}"
    return len(notes), "no error"


def test_notes_of_any_size_are_read_until_they_are_removed(ranks: Ranks) -> None:
    size = 2 * PIECE_BYTES + 5
    assert ranks(2, exchange_notes) == [
        (size, "rank 1: it has left no note '1' for 0.1 s"),
        (size, "rank 0: it has left no note '0' for 0.1 s"),
    ]
