"""Warnings: a run that is told to end saves, ends with a code for "later", and goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright import api, config
from meshwright.cli import run as cli
from meshwright.errors import FileFormatError, LaunchError, LostRankError, PreemptedError
from meshwright.ir import files
from meshwright.ir.plan import Plan
from meshwright.ir.run import Run
from meshwright.runtime import manifest
from meshwright.runtime.lock import TRAINER, locked
from meshwright.runtime.preemption import TOGETHER_S, WARNINGS, Preemption
from meshwright.runtime.restarts import MOST, STORM, Restarts
from tests.distributed.pool import Ranks
from tests.end_to_end.test_survive import STEPS, Steps, failure, living_in, losses, small_run, train


class Warned(Steps):
    """Progress that sends a signal to this process after one of its steps."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__(self.warn)
        self.at, self.number = at, number

    def warn(self, steps: int) -> None:
        if steps == self.at:
            os.kill(os.getpid(), self.number)


def train_and_be_warned(run: Run, warnings: dict[int, tuple[int, int]]) -> tuple[int, int, str]:
    """``warnings``: by rank the step after which it gets a signal, and the signal."""
    at, number = warnings.get(api.launched_rank(), (-1, 0))
    done = api.train(run, Warned(at, number))
    return done.resumed_from, done.steps, done.stopped


# --- save, end, go on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_rank_saves_the_step_it_has_reached(tmp_path: Path, number: int) -> None:
    api.train(small_run(tmp_path / "whole"))
    directory = tmp_path / "run"
    stopped = train_and_be_warned(small_run(directory), {0: (3, number)})
    assert stopped in ((0, 3, signal.Signals(number).name), (0, 4, signal.Signals(number).name))
    assert manifest.latest_step(directory / "checkpoints") == stopped[1]
    assert train(small_run(directory)) == (stopped[1], STEPS)
    assert losses(directory) == losses(tmp_path / "whole")


def test_a_warning_of_one_rank_stops_all_at_one_step(ranks: Ranks, tmp_path: Path) -> None:
    """Whichever rank is warned, and when: no rank waits for another, nothing is lost, and losses are the same."""
    drawn = random.Random(7)
    whole, directory, done = tmp_path / "whole", tmp_path / "run", 0
    ranks(3, train, small_run(whole, dp=-1, evaluate_every=3, steps=16, batch=6))
    while done < 16:
        warnings = {
            rank: (drawn.randint(1, 4), drawn.choice([signal.SIGTERM, signal.SIGUSR1]))
            for rank in drawn.sample(range(3), drawn.randint(1, 2))
        }
        run = small_run(directory, dp=-1, evaluate_every=3, steps=16, batch=6)
        results = ranks(3, train_and_be_warned, run, warnings)
        assert {(first, last) for first, last, _ in results} == {(done, results[0][1])}, "all stop at the same step"
        assert results[0][1] > done
        assert all(why for _, _, why in results) or results[0][1] == 16
        done = results[0][1]
        assert manifest.latest_step(directory / "checkpoints") == done
    assert losses(directory) == losses(whole)


def test_stages_of_a_pipeline_stop_together(ranks: Ranks, tmp_path: Path) -> None:
    """Stages are not at the same step at the same time."""
    whole, directory = tmp_path / "whole", tmp_path / "run"
    ranks(2, train, small_run(whole, dp=1, pp=2, microbatches=4))
    for rank in (0, 1):
        results = ranks(2, train_and_be_warned, small_run(directory, dp=1, pp=2, microbatches=4), {rank: (2, 15)})
        assert len({last for _, last, _ in results}) == 1
    ranks(2, train, small_run(directory, dp=1, pp=2, microbatches=4))
    assert losses(directory) == losses(whole)


def test_an_evaluation_is_not_lost(tmp_path: Path) -> None:
    """A run that was stopped has the same held-out losses as one that was not."""
    whole, directory = tmp_path / "whole", tmp_path / "run"
    expected = api.train(small_run(whole)).held_out
    for at in (1, 2, 2):
        train_and_be_warned(small_run(directory), {0: (at, signal.SIGTERM)})
    assert api.train(small_run(directory)).held_out == expected


class Absent:
    """The attendance of a world whose rank 1 is lost."""

    def is_gone(self, rank: int) -> bool:
        return rank == 1

    def check(self, rank: int) -> None:
        raise LostRankError("its process has ended", where=f"rank {rank}")


def test_a_rank_that_is_told_to_end_does_not_wait_for_one_that_is_lost() -> None:
    """A launcher tells the ranks beside a lost one to end, and they may notice the loss later than that."""
    with Preemption(1000.0) as preemption:
        preemption._store, preemption._size, preemption._attendance = dist.HashStore(), 2, Absent()  # type: ignore[assignment]
        preemption._store.set(preemption._key(0, "begun"), "4")
        preemption.ask("SIGTERM")
        with pytest.raises(LostRankError, match="rank 1: its process has ended"):
            preemption.due(3)
        preemption._store.set(preemption._key(1, "begun"), "5")
        assert preemption.due(3) == ""


# --- time, and a second signal ---------------------------------------------------------------------------------------


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_after_the_time_for_a_save_the_process_ends_with_the_code_for_later() -> None:
    codes: list[int] = []
    with Preemption(0.02, codes.append) as preemption:
        preemption.ask("SIGTERM")
        until(lambda: bool(codes))
        assert preemption.due(5) == "SIGTERM"
    assert codes == [PreemptedError.CODE] == [75]


def test_a_run_that_has_saved_in_time_is_left_alone() -> None:
    codes: list[int] = []
    with Preemption(0.1, codes.append) as preemption:
        assert preemption.due(1) == ""
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: preemption.due(2) == "SIGTERM")
    time.sleep(0.2)
    assert codes == []


def test_without_memory_for_a_thread_a_rank_is_still_asked_to_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    with Preemption(5.0) as preemption:
        monkeypatch.setattr(threading.Timer, "start", refuse)
        preemption.ask("SIGTERM")
        assert preemption.due(5) == "SIGTERM"
    assert "SIGTERM: no thread can be started that would end this rank in 5 s" in caplog.text


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that this process's own handler gets."""
    numbers: list[int] = []
    before = {number: signal.signal(number, lambda number, _: numbers.append(number)) for number in WARNINGS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_come_back(received: list[int]) -> None:
    before = [signal.getsignal(number) for number in WARNINGS]
    with Preemption(60) as preemption:
        assert preemption.due(1) == ""
    assert [signal.getsignal(number) for number in WARNINGS] == before


def test_a_warning_that_is_passed_on_after_the_end_is_ignored_and_a_later_one_is_not(received: list[int]) -> None:
    with Preemption(60) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: preemption.due(2) == "SIGTERM")
        preemption._asked_s = time.monotonic() + 1000
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert received == []
    preemption._asked_s -= 2000
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: received == [signal.SIGTERM, signal.SIGTERM])


def test_a_second_signal_ends_at_once_but_one_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    with Preemption(60, codes.append) as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # through the launcher, too
        until(lambda: preemption.due(2) == "SIGUSR1")
        assert codes == []
        time.sleep(TOGETHER_S + 0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: bool(codes))
    assert codes == [128 + signal.SIGTERM]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_ends_with_75_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """As Slurm and Docker do it, the signal reaches the launcher, its server and the ranks."""
    path, directory = tmp_path / "RUN.toml", tmp_path / "run"
    config.save(small_run(directory, steps=100000, ranks=2, evaluate_every=0), path)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli", "train", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while manifest.latest_step(directory / "checkpoints") < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGUSR1)
        output, _ = process.communicate(timeout=100)
    finally:
        if living_in(process.pid) and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    step = manifest.latest_step(directory / "checkpoints")
    assert f"stopped by SIGUSR1; step {step} of 100000 is saved: the same command goes on from there\n" in output
    assert train(small_run(directory, steps=step + 1, evaluate_every=0)) == (step, step + 1)
    assert [number for number, _ in losses(directory)] == list(range(1, step + 2))


def test_a_command_that_ends_at_once_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "RUN.toml"
    config.save(small_run(tmp_path / "run", steps=1, ranks=2), path)

    def told_twice(*arguments: object, **options: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr(api, "run_ranks", told_twice)
    assert cli(["train", str(path)]) == 143
    assert capsys.readouterr().err == (
        "meshwright: stopped at once by SIGTERM\n"
        "  -> the same command goes on from the last checkpoint, or from the beginning if there is none\n"
    )


def test_ranks_that_end_before_they_listen_have_lost_nothing(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError, match=r"ended after SIGTERM, while starting, without saving\n  -> give"):
        api.run_ranks(warn_the_launcher, os.getpid(), num_ranks=2, directory=tmp_path)


def warn_the_launcher(process: int) -> None:
    if api.launched_rank() == 0:
        os.kill(process, signal.SIGTERM)
    time.sleep(60)


# --- another number of ranks -----------------------------------------------------------------------------------------


def test_a_run_goes_on_with_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """As on a cluster that takes nodes away and gives them back: the same batches, in float64 the same losses."""
    whole, directory = tmp_path / "whole", tmp_path / "run"
    ranks(1, train, small_run(whole, evaluate_every=3))
    for number, at in ((2, 2), (4, 2), (1, 2)):
        ranks(number, train_and_be_warned, small_run(directory, evaluate_every=3), {0: (at, signal.SIGTERM)})
    ranks(2, train, small_run(directory, evaluate_every=3))
    run_losses, expected = losses(directory), losses(whole)
    assert [step for step, _ in run_losses] == [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert [loss for _, loss in run_losses] == pytest.approx([loss for _, loss in expected], rel=0, abs=1e-9)


def auto(directory: Path, **train: Any) -> Run:
    run = small_run(directory, **train)
    return config.make(
        {
            "model": {"name": "mlp", "sizes": [8, 16, 4]},
            "data": {"kind": "random", "shape": [8], "classes": 4, "samples": 64, "batch_size": 8, "held_out": 0.0},
            "layout": {"plan": "auto", "cluster": "a100-80gb-dgx"},
            "train": {"directory": run.train.directory, "steps": train.get("steps", 6), "checkpoint_every": 2,
                      "log_every": 1, "dtype": "float64"},
        },
        where="test",
    )  # fmt: skip


def world_size(plan: bytes) -> int:
    return files.decode(plan, Plan, where="plan").mesh.world_size


def test_a_searched_plan_is_searched_again_for_other_ranks_and_kept_for_the_same(
    ranks: Ranks, tmp_path: Path, without_workers: None
) -> None:
    whole, directory = tmp_path / "whole", tmp_path / "run"
    ranks(1, train, auto(whole))
    ranks(2, train, auto(directory, steps=2))
    first = (directory / "plan.json").read_bytes()
    ranks(1, train, auto(directory, steps=4))
    assert [world_size(first), world_size((directory / "plan.json").read_bytes())] == [2, 1]
    ranks(2, train, auto(directory))
    expected = [loss for _, loss in losses(whole)]
    assert [loss for _, loss in losses(directory)] == pytest.approx(expected, rel=0, abs=1e-9)
    (directory / "plan.json").write_text("{")
    with pytest.raises(FileFormatError, match=r"plan\.json: the plan of this run is damaged: .*\n  -> remove it: the"):
        api.train(auto(directory, steps=7))


# --- two runs, and restarts ------------------------------------------------------------------------------------------


def test_two_runs_in_one_directory_under_any_launcher(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "run", TRAINER),
        pytest.raises(LaunchError, match=rf"at work in this directory: process {os.getpid()} on .*\n  -> wait for it"),
    ):
        api.train(small_run(tmp_path / "run"))
    api.train(small_run(tmp_path / "run"))


class Clock:
    def __init__(self, step_s: float) -> None:
        self.now, self.step_s, self.waits = 0.0, step_s, list[float]()

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def test_restarts_wait_twice_as_long_each_time_and_at_most_a_minute(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    again = Restarts(tmp_path, lambda text: None, clock, clock.waits.append)
    for step in range(10):
        assert again(failure(f"at step {step}"), tmp_path)
    assert clock.waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_too_many_failures_in_a_short_time_or_in_all_are_the_end(tmp_path: Path) -> None:
    messages: list[str] = []
    for step_s, most, words in ((1.0, STORM, f"{STORM} times within 600 s"), (1000.0, MOST, f"{MOST} times")):
        again = Restarts(tmp_path, messages.append, Clock(step_s), lambda seconds: None)
        for step in range(most - 1):
            assert again(failure(f"at step {step}"), tmp_path)
        assert not again(failure("at step 1000"), tmp_path)
        assert messages[-1].endswith(f"it has failed {words}, and is not started again")


def test_more_ranks_than_cores_are_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "RUN.toml"
    config.save(small_run(tmp_path / "run", steps=1, ranks=2), path)
    monkeypatch.setattr(api, "num_cores", lambda: 1)
    monkeypatch.setattr(api, "num_devices", lambda: 1)
    assert cli(["train", str(path)]) == 0
    assert "warning: 2 ranks share 1 cores: they take turns" in capfd.readouterr().out
