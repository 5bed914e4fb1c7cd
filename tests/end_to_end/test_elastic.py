"""Lost ranks and hosts: the run goes on from memory, with fewer ranks, and with more again."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousParameters

from meshwright import api
from meshwright.errors import FailedRankError, LaunchError, LostRankError, MeshwrightError, RankError
from meshwright.ir.run import Run
from meshwright.runtime import lock, memory_copies
from meshwright.runtime.launchers import Meeting
from meshwright.runtime.lock import LAUNCHER, LockHolder, locked
from meshwright.runtime.meeting_point import free_port
from meshwright.runtime.open_files import allow_files
from meshwright.runtime.ranks import _keep_files
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.restarts import STARTING, Restarts
from meshwright.runtime.roll_call import RollCall
from tests.distributed.pool import Ranks
from tests.end_to_end.test_survive import STEPS, Steps, die, losses, small_run, train

# --- from memory -----------------------------------------------------------------------------------------------------


class Dies(Steps):
    """Progress that kills a rank after so many steps of each attempt."""

    def __init__(self, directory: Path, kills: list[tuple[int, int]]) -> None:
        super().__init__(self.kill)
        attempt = len(list((directory / "ranks").glob("failed-*")))
        self.rank, self.at = kills[attempt] if attempt < len(kills) else (-1, 0)

    def kill(self, steps: int) -> None:
        if steps == self.at and api.launched_rank() == self.rank:
            die()


def train_and_die(run: Run, kills: list[tuple[int, int]]) -> tuple[int, int]:
    memory_copies.SHARE = 1e9  # copies after the steps 2, 4, 6, 7, 8, ... of each attempt
    done = api.train(run, Dies(Path(run.train.directory), kills))
    return done.resumed_from, done.steps


def test_lost_ranks_are_replaced_from_memory_without_a_look_at_the_disk(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 is lost in step 5, when step 4 is copied, and rank 0 in step 8, when step 6 is: two copies, no disk."""
    messages: list[str] = []
    directory = tmp_path / "run"
    run = small_run(directory, dp=2, evaluate_every=0, checkpoint_every=0, log_every=5)
    done = api.run_ranks(
        train_and_die, run, [(1, 5), (0, 4)], num_ranks=2, directory=directory,
        again=Restarts(directory / "checkpoints", messages.append),
    )  # fmt: skip
    assert done == (6, STEPS)
    assert len(messages) == 2
    ranks(2, train, small_run(tmp_path / "whole", dp=2, evaluate_every=0))
    assert losses(directory) == losses(tmp_path / "whole")


# --- on other ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 1, "tp": 2}], ids=str)
def test_a_fixed_layout_goes_on_with_fewer_ranks(ranks: Ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    """Without a word: with fewer data-parallel ranks, or as the planner says."""
    whole, directory = tmp_path / "whole", tmp_path / "run"
    ranks(2, train, small_run(whole, evaluate_every=0, **layout))
    assert ranks(2, train, small_run(directory, evaluate_every=0, steps=4, **layout)) == [(0, 4)] * 2
    assert ranks(1, train, small_run(directory, evaluate_every=0, steps=6, **layout)) == [(4, 6)]
    assert ranks(2, train, small_run(directory, evaluate_every=0, **layout)) == [(6, STEPS)] * 2
    run_losses, expected = losses(directory), losses(whole)
    assert [step for step, _ in run_losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in run_losses] == pytest.approx([loss for _, loss in expected], rel=0, abs=1e-9)


# --- hosts -----------------------------------------------------------------------------------------------------------


class Hosts:
    """Launchers of several hosts, whose ranks only say how they ended."""

    def __init__(self, count: int, fits: Callable[[int], bool] | None = None) -> None:
        self.port, self.count, self.fits = free_port(), count, fits
        self.calls: list[RollCall] = []
        for number in range(count):
            self.come(first=number == 0)

    def come(self, *, first: bool = False) -> RollCall:
        meeting = Meeting(self.count, first, "127.0.0.1", self.port, "test", timeout_s=60.0)
        self.calls.append(RollCall(meeting, 1, self.fits))
        return self.calls[-1]

    def begin(self, *numbers: int) -> list[Any]:
        """Begin an attempt on these hosts; the number of hosts that each was told to meet."""
        return self.together([self.calls[number].begin for number in numbers], lambda met: met.num_hosts)

    def end(self, errors: dict[int, MeshwrightError | None], again: bool = True) -> list[Any]:
        def ends(number: int) -> Callable[[], bool]:
            return lambda: self.calls[number].end(errors[number], lambda error: again, lambda: None)

        return self.together([ends(number) for number in errors], bool)

    @staticmethod
    def together(functions: list[Callable[[], object]], read: Callable[..., object]) -> list[Any]:
        results: list[object] = [None] * len(functions)

        def run(index: int) -> None:
            try:
                results[index] = read(functions[index]())
            except (MeshwrightError, SystemExit) as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results

    def close(self) -> None:
        self.together([call.close for call in reversed(self.calls)], lambda nothing: nothing)


def test_the_run_goes_on_with_the_hosts_that_are_left_and_grows_again() -> None:
    hosts = Hosts(3)
    try:
        assert hosts.begin(0, 1, 2) == [3, 3, 3]
        hosts.calls[2].close()  # as if it had died: no more signs of life
        lost = LostRankError("the other ranks are gone")
        assert hosts.end({0: lost, 1: lost}) == [False, False]
        assert hosts.begin(0, 1) == [2, 2]
        late = hosts.come()
        hosts.calls[0]._grow_s = 0.0
        assert hosts.calls[0].ask.wait(60), "the ranks are asked to save"
        assert hosts.end({0: None, 1: None}) == [False, False]
        assert hosts.begin(0, 1, 3) == [3, 3, 3]
        assert late.attempt == 3
        assert hosts.end({0: None, 1: None, 3: None}) == [True, True, True]
    finally:
        hosts.close()


def test_hosts_that_the_run_cannot_use_are_spares() -> None:
    """Of three hosts, a run for one or two needs two; the spare takes over when a host is lost."""
    hosts = Hosts(3, fits=lambda num_ranks: num_ranks != 3)
    try:
        hosts.begin(0, 1, 2)
        failed = FailedRankError("rank 1 was killed")
        assert (
            hosts.end({0: failed, 1: LostRankError("rank 1 is gone"), 2: LostRankError("rank 1 is gone")})
            == [False] * 3
        )
        assert hosts.begin(0, 1) == [2, 2]
        waiting = threading.Thread(target=hosts.calls[2].begin)
        waiting.start()
        hosts.calls[1].close()
        assert hosts.end({0: LostRankError("rank 1 is gone")}) == [False]
        assert hosts.begin(0) == [2]
        waiting.join(60)
        assert hosts.calls[2].attempt == 3
        assert hosts.end({0: None, 2: None}) == [True, True]
    finally:
        hosts.close()


def test_a_mistake_or_too_many_failures_end_the_run_on_all_hosts() -> None:
    for error, again in ((FailedRankError("rank 1 failed"), False), (MeshwrightError("a wrong key"), True)):
        hosts = Hosts(2)
        try:
            hosts.begin(0, 1)
            first, second = hosts.end({0: LostRankError("rank 1 is gone"), 1: error}, again)
            assert isinstance(first, RankError)
            assert first.problem == error.problem, "the first host says what was wrong on the other"
            assert second is error
        finally:
            hosts.close()


def rendezvous_of(met: Meeting) -> Rendezvous:
    return Rendezvous(
        RendezvousParameters(
            "meshwright", f"{met.address}:{met.port}", met.name, met.num_hosts, met.num_hosts, timeout=met.timeout_s,
            is_host=met.is_host, is_kept=met.is_kept,
        )
    )  # fmt: skip


def test_hosts_meet_where_they_were_counted() -> None:
    """The roll call's store is that of the meetings, too: a second one could not have its port."""
    hosts = Hosts(2)
    try:
        mets = hosts.together([call.begin for call in hosts.calls], lambda met: met)
        meetings = [rendezvous_of(met) for met in mets]
        assert sorted(hosts.together([each.next_rendezvous for each in meetings], lambda info: info.rank)) == [0, 1]
        assert hosts.end({0: None, 1: None}) == [True, True]
    finally:
        hosts.close()


def test_a_host_does_not_wait_for_ranks_that_failed_before_it_met_them() -> None:
    """The first host's ranks could not be started. The second host, which waits in the meeting, learns of it."""
    hosts = Hosts(2)
    try:
        mets = hosts.together([call.begin for call in hosts.calls], lambda met: met)
        waiting = rendezvous_of(mets[1])
        failed = LaunchError("no more processes")
        first = threading.Thread(target=hosts.end, args=({0: failed}, False))
        first.start()
        with pytest.raises(RendezvousClosedError):
            waiting.next_rendezvous()
        (second,) = hosts.end({1: LostRankError("the meeting was called off")})
        first.join(60)
        assert second.problem == failed.problem
    finally:
        hosts.close()


# --- memory, and restarts --------------------------------------------------------------------------------------------


def killed(doing: str) -> RankError:
    error = FailedRankError(f"rank 1 was killed by SIGKILL {doing}")
    error.doing = doing
    return error


@pytest.mark.parametrize("doing", STARTING)
def test_ranks_that_the_kernel_kills_before_their_first_step_are_not_started_again(tmp_path: Path, doing: str) -> None:
    messages: list[str] = []
    counts = itertools.count()
    again = Restarts(tmp_path, messages.append, wait=lambda seconds: None, killed=counts.__next__)
    assert not again(killed(doing), tmp_path)
    assert again.out_of_memory
    assert messages == [f"rank 1 was killed by SIGKILL {doing}: it takes too much memory, and is not started again"]


def test_if_the_kernel_says_nothing_the_second_kill_is_enough(tmp_path: Path) -> None:
    again = Restarts(tmp_path, lambda text: None, wait=lambda seconds: None, killed=lambda: -1)
    assert again(killed("while capturing and planning"), tmp_path)
    assert again(killed("at step 7"), tmp_path)
    assert not again.out_of_memory
    assert not again(killed("while capturing and planning"), tmp_path)
    assert again.out_of_memory


def test_the_error_says_what_is_too_large(tmp_path: Path) -> None:
    error = api.too_large(small_run(tmp_path), killed("while capturing and planning"), 4)  # type: ignore[arg-type]
    assert "each of 4 ranks builds the whole model before it keeps its part: 0.0 MiB, 0.0 MiB on this machine" in str(
        error
    )
    assert "the global batch is 0.0 MiB" in str(error)
    assert "train.ranks" in str(error)
    assert error.doing == "while capturing and planning"


# --- two hosts, one directory ----------------------------------------------------------------------------------------


def test_a_run_on_another_host_is_seen_where_locks_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may lock a file on each host alone. The times of the file tell whether its holder lives."""
    monkeypatch.setattr(lock, "BEAT_S", 0.2)
    file = tmp_path / LAUNCHER
    holder = msgspec.json.encode(LockHolder("elsewhere", 71, "2026-01-02 03:04:05"))
    file.write_bytes(holder)
    ended = threading.Event()
    beat = threading.Thread(target=lock._show_life, args=(file, ended))
    beat.start()
    try:
        with (
            pytest.raises(LaunchError, match="process 71 on elsewhere, since 2026-01-02 03:04:05"),
            locked(tmp_path, LAUNCHER),
        ):
            pass
    finally:
        ended.set()
        beat.join()
    with locked(tmp_path, LAUNCHER):
        assert file.read_bytes() != holder, "that one has ended"
    assert file.read_bytes() == b"", "and this one, too"


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable = r"file.*: the folder of the run cannot be used: Not a directory\n  -> check"
    with pytest.raises(LaunchError, match=unusable), locked(tmp_path / "file" / "run", LAUNCHER):
        pass
    with pytest.raises(LaunchError, match=r"files of ranks that failed cannot be kept: Not a directory\n  -> check"):
        _keep_files(tmp_path / "file", 1)


def test_a_lock_ends_well_on_a_disk_that_has_become_read_only(tmp_path: Path) -> None:
    with locked(tmp_path, LAUNCHER):
        for number in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{number}") == f"{tmp_path / LAUNCHER}":
                readable = os.open(tmp_path / LAUNCHER, os.O_RDONLY)
                os.dup2(readable, int(number))  # from now on it cannot be written
                os.close(readable)
                break


# --- open files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "then"),
    [(1024, 4096, 2, None), (1024, 4096, 100, 1240), (48, -1, 2, 64), (-1, -1, 256, None), (32, 48, 2, "refused")],
)
def test_ranks_may_open_the_files_that_they_need(
    soft: int, hard: int, ranks: int, then: int | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resource.RLIM_INFINITY == -1
    new_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: new_limits.append(limits))
    if then == "refused":
        with pytest.raises(LaunchError, match=r"\(ulimit -n\): 2 ranks need about 64 open files, and .* have 48 here"):
            allow_files(ranks)
    else:
        allow_files(ranks)
    assert new_limits == ([(then, hard)] if isinstance(then, int) else [])
