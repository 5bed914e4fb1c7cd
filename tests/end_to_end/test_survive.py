"""Runs that survive: kills anywhere, full disks, damaged checkpoints, and another layout that takes over."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from meshwright import api, config
from meshwright.errors import DiskError, FailedRankError, LostRankError, RankError
from meshwright.ir import files
from meshwright.ir.amendment import Amendment
from meshwright.ir.plan import Plan
from meshwright.ir.run import Run
from meshwright.ir.trace import Trace
from meshwright.runtime import manifest, share, stepwise
from meshwright.runtime.loop import Silent
from meshwright.runtime.metrics import Meter
from meshwright.runtime.restarts import Restarts
from meshwright.runtime.sinks import Jsonl
from tests.distributed.pool import Ranks
from tests.end_to_end.checkpoint_cases import a_trainer, log_messages

Losses = list[tuple[int, float]]
STEPS, EVERY = 9, 2


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine, the threads of a small model mostly wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_run(
    directory: Path, *, dp: int = -1, tp: int = 1, pp: int = 1, microbatches: int = 1, batch: int = 8, **train: Any
) -> Run:
    raw = {
        "model": {"name": "mlp", "sizes": [8, 16, 4]},
        "data": {"kind": "random", "shape": [8], "classes": 4, "samples": 64, "batch_size": batch, "held_out": 0.25},
        "layout": {"dp": dp, "tp": tp, "pp": pp, "microbatches": microbatches},
        "schedule": {"warmup_steps": 2},
        "train": {
            "directory": str(directory), "steps": STEPS, "checkpoint_every": EVERY, "log_every": 1, "dtype": "float64",
            "evaluate_every": 4, "max_grad_norm": 1.0, **train,
        },
    }  # fmt: skip
    return config.make(raw, where="test")


def train(run: Run) -> tuple[int, int]:
    done = api.train(run)
    return done.resumed_from, done.steps


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> Losses:
    return [(row["step"], row["loss"]) for row in rows(directory) if "loss" in row]


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def cut(path: Path) -> None:
    """As a disk that lost power may leave a file."""
    os.truncate(path, path.stat().st_size // 2)


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("only root may make a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # the files of ranks' statuses are open


class Steps(Silent):
    """Progress that calls ``after(steps)`` after each training step of this process."""

    def __init__(self, after: Callable[[int], object]) -> None:
        self.after, self.steps, self.counts = after, 0, False

    def begin(self, what: str, total: int = 0) -> None:
        self.counts = what == "training"

    def advance(self) -> None:
        if self.counts:
            self.steps += 1
            self.after(self.steps)


def await_checkpoint(directory: Path, step: int) -> None:
    """It is being written while steps go on."""
    deadline = time.monotonic() + 60
    while manifest.latest_step(directory / "checkpoints") < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fill(disk: Path) -> None:
    with (disk / "filling").open("ab", buffering=0) as file:
        size = shutil.disk_usage(disk).free
        while size and file.write(b"x" * size):
            size = shutil.disk_usage(disk).free


def test_a_run_goes_on_while_the_disk_is_full(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.train(small_run(tmp_path / "whole"))
    directory, filling = small_disk / "run", small_disk / "filling"

    def after(step: int) -> None:
        if step == 3:
            await_checkpoint(directory, 2)
            fill(small_disk)
        elif step == 7:
            deadline = time.monotonic() + 60
            while len(log_messages(caplog)) < 2:  # the thread that saves step 6 has found the disk full
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert checkpoints(directory) == ["step-00000002"], "the last good checkpoint stays"
            filling.unlink()

    with caplog.at_level(logging.WARNING, "meshwright"):
        assert api.train(small_run(directory), Steps(after)).steps == STEPS
    missing = r"no space left on the disk: a checkpoint takes \d+ KiB, \d+ KiB are free, \d+ KiB are missing"
    goes_on = "; training goes on, and the next save tries again"
    for line, step in zip(log_messages(caplog), (4, 6), strict=True):
        assert re.fullmatch(rf"{directory}/checkpoints/step-0000000{step}: {missing}{goes_on}", line)
    assert losses(directory) == losses(tmp_path / "whole")
    assert checkpoints(directory) == ["step-00000008", "step-00000009"]


def test_rows_wait_until_there_is_room(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter([Jsonl(small_disk / "metrics.jsonl")], 9, 1, "samples", 1.0, 0.0, torch.device("cpu"))
    meter.write({"step": 1})
    fill(small_disk)
    large = {"text": "x" * 3000}
    with caplog.at_level(logging.WARNING, "meshwright"):
        for step in (2, 3, 4):
            meter.write({"step": step} | large)
        meter.finish()
    assert [row["step"] for row in rows(small_disk)] == [1, 2], "a page was left, and no half row is there"
    path = small_disk / "metrics.jsonl"
    assert log_messages(caplog) == [
        f"{path}: No space left on device; its rows wait until there is room",
        f"{path}: there was no room for the rows from step 3 on",
    ]
    (small_disk / "filling").unlink()
    meter.write({"step": 5})
    assert [row["step"] for row in rows(small_disk)] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in meter.rewind(3)] == [1, 2, 3] == [row["step"] for row in rows(small_disk)]


def test_rows_of_saved_steps_are_on_the_disk_before_their_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, these steps are not made again."""
    order: list[tuple[str, int]] = []
    commit = manifest.commit

    def committed(path: Path, written: manifest.Manifest) -> None:
        order.append(("checkpoint", written.step))
        commit(path, written)

    monkeypatch.setattr(manifest, "commit", committed)
    monkeypatch.setattr(Jsonl, "flush", lambda self: order.append(("rows", losses(self.path.parent)[-1][0])))
    api.train(small_run(tmp_path, steps=5))
    assert [what for what, _ in order] == ["rows", "checkpoint"] * 3
    assert [step for what, step in order if what == "checkpoint"] == [2, 4, 5]
    assert all(rows >= step for (_, rows), (_, step) in zip(order[::2], order[1::2], strict=True))


def test_a_last_step_that_cannot_be_saved_is_an_error(small_disk: Path, tmp_path: Path) -> None:
    directory, filling = small_disk / "run", small_disk / "filling"

    def after(step: int) -> None:
        if step == 7:
            await_checkpoint(directory, 6)
            fill(small_disk)

    with pytest.raises(DiskError, match=r"step-00000009: no space left on the disk: .* are missing\n  -> make room"):
        api.train(small_run(directory), Steps(after))
    assert checkpoints(directory) == ["step-00000004", "step-00000006"]
    filling.unlink()
    assert api.train(small_run(directory)).resumed_from == 6
    api.train(small_run(tmp_path / "whole"))
    assert losses(directory) == losses(tmp_path / "whole")


def test_a_disk_that_fills_up_while_tensors_are_written(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = a_trainer(sizes=(6, 4000, 4))
    fill(small_disk)
    os.truncate(small_disk / "filling", 2**20 - 2**17)
    # As if others took the room between the look at it and the writing.
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "no_room", lambda *args: None)
        with pytest.raises(DiskError, match=r"tensors could not be written \(rank 0: No space left on device\)"):
            trainer.save(small_disk / "ckpt")
    with pytest.raises(DiskError, match="a checkpoint takes"):
        trainer.save(small_disk / "ckpt")
    assert [path.name for path in small_disk.iterdir()] == ["filling"]
    (small_disk / "filling").unlink()
    trainer.save(small_disk / "ckpt")


# --- damage, and another layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "trainer.pt", "__0_0.distcp"])
def test_a_run_whose_last_checkpoint_is_cut_off_goes_on_from_the_one_before(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.train(small_run(tmp_path / "whole"))
    directory = tmp_path / "run"
    api.train(small_run(directory, steps=8))
    assert checkpoints(directory) == ["step-00000006", "step-00000008"]
    latest = directory / "checkpoints" / "step-00000008"
    cut(next(latest.rglob(name)))
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert train(small_run(directory)) == (6, STEPS)
    assert re.fullmatch(rf"{latest}\S*: damaged: .*; the one before it is tried", log_messages(caplog)[0])
    assert losses(directory) == losses(tmp_path / "whole"), "steps 7 and 8 were made again"
    assert checkpoints(directory) == ["step-00000008", "step-00000009"]


def test_another_layout_takes_over(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train, small_run(tmp_path / "whole", dp=2))
    directory = tmp_path / "run"
    ranks(2, train, small_run(directory, dp=2, steps=3))
    assert ranks(2, train, small_run(directory, dp=1, tp=2, steps=6)) == [(3, 6), (3, 6)]
    assert train(small_run(directory)) == (6, STEPS)
    run_losses, expected = losses(directory), losses(tmp_path / "whole")
    assert [step for step, _ in run_losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in run_losses] == pytest.approx([loss for _, loss in expected], rel=0, abs=1e-9)
    assert train(small_run(directory)) == (STEPS, STEPS), "a complete run has nothing to do"


# --- a plan that is amended ------------------------------------------------------------------------------------------


def test_a_run_files_its_amended_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the traces of the last steps, the ledger has those of the plan as it is at the end."""
    change = Amendment(step=6, axis="dp", ranks=(0, 1), operation="all_reduce", num_bytes=8, algorithm="ring")
    monkeypatch.setattr(stepwise, "look_at_links", lambda step, groups: (change,) if step == 5 else ())
    directory = tmp_path / "run"
    ledger = api.train(small_run(directory)).ledger
    plan = files.load(directory / "plan.json", Plan)
    assert plan.amendments == (change,)
    assert ledger is not None
    assert ledger.plan == plan.digest == files.load(directory / "trace.json", Trace).plan
    saved = [manifest.read(path).plan["amendments"] for path in sorted((directory / "checkpoints").iterdir())]
    assert saved == [[msgspec.to_builtins(change) | {"ranks": [0, 1]}]] * 2
    again = api.train(small_run(directory, steps=STEPS + 1))
    assert again.resumed_from == STEPS
    assert files.load(directory / "plan.json", Plan) == plan


# --- kills -----------------------------------------------------------------------------------------------------------


class Killed(Steps):
    """Progress that kills a rank after its third step: in each attempt in another way, until there are no more."""

    def __init__(self, directory: Path, kills: list[tuple[int, str]]) -> None:
        super().__init__(self.kill)
        attempt = len(list((directory / "ranks").glob("failed-*")))
        self.directory = directory
        self.rank, self.how = kills[attempt] if attempt < len(kills) else (-1, "")

    def kill(self, steps: int) -> None:
        if steps != 3 or api.launched_rank() != self.rank:
            return
        await_checkpoint(self.directory, 2)
        if self.how == "at once":
            die()
        if self.how == "at the rename":  # of the next save: everything is written, but the manifest
            os.replace = die  # type: ignore[assignment]
        if self.how == "at the tensors":
            share.Share.write = die  # type: ignore[method-assign, assignment]


def die(*args: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(run: Run, kills: list[tuple[int, str]]) -> tuple[int, int]:
    done = api.train(run, Killed(Path(run.train.directory), kills))
    return done.resumed_from, done.steps


def test_a_run_survives_kills_anywhere(ranks: Ranks, tmp_path: Path) -> None:
    messages: list[str] = []
    directory = tmp_path / "run"
    kills = [(1, "at once"), (0, "at the rename"), (1, "at the tensors")]
    done = api.run_ranks(
        train_and_be_killed, small_run(directory, dp=2, evaluate_every=0), kills, num_ranks=2, directory=directory,
        again=Restarts(directory / "checkpoints", messages.append),
    )  # fmt: skip
    assert done[1] == STEPS
    ranks(2, train, small_run(tmp_path / "whole", dp=2, evaluate_every=0))
    assert losses(directory) == losses(tmp_path / "whole")
    for line, (rank, _) in zip(messages, kills, strict=True):
        assert re.match(rf"rank {rank} was killed by SIGKILL", line)
    failed = directory / "ranks" / "failed-1"
    assert messages[0] == (
        "rank 1 was killed by SIGKILL at step 3\n"
        f"  -> all ranks start again from step 2; the output of the failed ranks is in {failed}"
    )
    assert (failed / "1.status").read_text().strip() == "at step 3"


def test_when_the_launcher_is_killed_its_ranks_end_and_the_same_command_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    config.save(small_run(tmp_path / "run", steps=100000, ranks=2), path)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli", "train", str(path)], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while manifest.latest_step(tmp_path / "run" / "checkpoints") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while living_in(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with_group = process.pid
        if living_in(with_group):
            os.killpg(with_group, signal.SIGKILL)
    step = manifest.latest_step(tmp_path / "run" / "checkpoints")
    assert train(small_run(tmp_path / "run", steps=step + 1)) == (step, step + 1)
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == list(range(1, step + 2))


def living_in(group: int) -> bool:
    """Whether a process group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# --- when to stop ----------------------------------------------------------------------------------------------------


def failure(doing: str, kind: type[RankError] = FailedRankError) -> RankError:
    error = kind("it failed")
    error.doing = doing
    return error


def saved(directory: Path, step: int) -> None:
    path = directory / manifest.step_name(step)
    path.mkdir(parents=True)
    fields: dict[str, object] = dict.fromkeys(("model", "fingerprint", "optimizer", "torch", "meshwright", "data"), "")
    fields |= {"files": {}, "tensors": {}, "plan": {}, "step": step}
    manifest.commit(path, msgspec.convert(fields, manifest.Manifest))


def restarts(directory: Path, say: Callable[[str], object]) -> Restarts:
    """Restarts that do not wait, between failures that are far apart."""
    return Restarts(directory, say, clock=itertools.count(step=1000.0).__next__, wait=lambda seconds: None)


def test_the_third_failure_at_one_place_is_the_last(tmp_path: Path) -> None:
    messages: list[str] = []
    again, kept = restarts(tmp_path, messages.append), tmp_path / "failed-1"
    assert again(failure("at step 7"), kept)
    assert again(failure("at step 7"), kept)
    assert again(failure("at step 5"), kept), "another place"
    assert not again(failure("at step 7"), kept)
    expected = f"all ranks start again from the beginning; the output of the failed ranks is in {kept}"
    assert messages[0] == f"it failed\n  -> {expected}"
    assert messages[-1] == "it has failed 3 times at step 7 after the beginning, and is not started again"


def test_a_later_checkpoint_counts_as_progress(tmp_path: Path) -> None:
    again = restarts(tmp_path, lambda text: None)
    for step in range(4):
        assert again(failure("while starting"), tmp_path)
        assert again(failure("while starting", LostRankError), tmp_path)
        saved(tmp_path, step)
    assert again(failure(""), tmp_path)
    assert again(failure(""), tmp_path)
    assert not again(failure(""), tmp_path)
