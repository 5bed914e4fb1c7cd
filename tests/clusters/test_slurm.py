"""Runs on a real Slurm of two nodes (`make clusters`): as one process would train, warned, killed and queued again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright import api, config
from meshwright.ir.run import Run
from meshwright.runtime import manifest
from tests.clusters.slurm import Slurm, until
from tests.end_to_end.test_survive import losses, small_run

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]


def long_run(directory: Path, steps: int) -> Run:
    return small_run(directory, steps=steps, evaluate_every=0, checkpoint_every=20)


def submitted(slurm: Slurm, run: Run, path: Path, *options: str) -> int:
    config.save(run, path)
    words = [sys.executable, "-m", "meshwright.cli", "launch", str(path), "--on", "slurm", "--detach"]
    nodes = ["--nodes.count", "2", "--nodes.ranks_per_node", "1", *options]
    done = subprocess.run(
        [*words, *nodes], env=slurm.environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[1])


def ended(slurm: Slurm, number: int) -> dict[str, Any]:
    until(lambda: slurm.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 300)
    return slurm.job(number)


def expected(tmp_path: Path, steps: int) -> list[tuple[int, float]]:
    api.train(long_run(tmp_path / "whole", steps))
    return losses(tmp_path / "whole")


def close(losses: list[tuple[int, float]], whole: list[tuple[int, float]]) -> None:
    assert [step for step, _ in losses] == [step for step, _ in whole]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in whole], rel=0, abs=1e-9)


def test_two_nodes_train_as_one_process(slurm: Slurm, tmp_path: Path) -> None:
    number = submitted(slurm, long_run(tmp_path / "run", 30), tmp_path / "RUN.toml")
    assert ended(slurm, number)["ExitCode"] == "0:0"
    close(losses(tmp_path / "run"), expected(tmp_path, 30))


def test_a_warned_job_saves_is_queued_again_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """SIGUSR1 reaches the steps as ``sbatch --signal`` sends it before the time limit."""
    run = long_run(tmp_path / "run", 1000)
    number = submitted(slurm, run, tmp_path / "RUN.toml")
    until(lambda: manifest.latest_step(tmp_path / "run" / "checkpoints") >= 20)
    slurm("scancel", "--signal=USR1", f"{number}")
    slurm.go_on(number)
    assert ended(slurm, number)["ExitCode"] == "0:0"
    log = (tmp_path / "run" / f"slurm-{number}.log").read_text()
    assert "stopped by SIGUSR1; step" in log
    assert "queued again after exit code 75" in log
    assert slurm.job(number)["Restarts"] == "1"
    close(losses(tmp_path / "run"), expected(tmp_path, 1000))


def test_a_killed_rank_queues_the_job_again(slurm: Slurm, tmp_path: Path) -> None:
    number = submitted(slurm, long_run(tmp_path / "run", 600), tmp_path / "RUN.toml")
    until(lambda: manifest.latest_step(tmp_path / "run" / "checkpoints") >= 20)
    os.kill(_rank(str(tmp_path / "RUN.toml"), 1), signal.SIGKILL)
    slurm.go_on(number)
    assert ended(slurm, number)["ExitCode"] == "0:0"
    close(losses(tmp_path / "run"), expected(tmp_path, 600))


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    number = submitted(slurm, long_run(directory, 100_000), tmp_path / "RUN.toml")
    until(lambda: manifest.latest_step(directory / "checkpoints") >= 20)
    slurm("scancel", f"{number}")
    assert ended(slurm, number)["JobState"] == "CANCELLED"
    until(lambda: "stopped by SIGTERM" in (directory / f"slurm-{number}.log").read_text())
    step = manifest.latest_step(directory / "checkpoints")
    done = api.train(long_run(directory, step + 1))
    assert (done.resumed_from, done.steps) == (step, step + 1)


def test_rank_0_may_sit_on_any_node(slurm: Slurm, tmp_path: Path) -> None:
    """Ranks in the order that a host file says: rank 0 on the second node, while the first one keeps the store.

    The last test: the controller of Slurm 22.05 does not outlive an arbitrary distribution."""
    hosts = tmp_path / "hosts"
    hosts.write_text("n2\nn1\n")
    config.save(long_run(tmp_path / "run", 10), tmp_path / "RUN.toml")
    done = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=2", "--distribution=arbitrary", f"--nodelist={hosts}", sys.executable, "-m",
         "meshwright.cli", "train", str(tmp_path / "RUN.toml")],
        env=slurm.environment | {"SLURM_HOSTFILE": str(hosts), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    close(losses(tmp_path / "run"), expected(tmp_path, 10))


def _rank(file: str, rank: int) -> int:
    """The process of a rank of the run of this file."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if file.encode() in words and f"SLURM_PROCID={rank}".encode() in variables and b"srun" not in words:
            return int(path.name)
    raise AssertionError(f"rank {rank} of {file} is not there")
