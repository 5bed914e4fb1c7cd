"""Runs on a real Ray of two nodes (`make clusters`): as one process would train, warned, and inside Ray Train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import api, config
from meshwright.runtime import manifest
from tests.clusters.slurm import until
from tests.clusters.test_slurm import close, expected, long_run
from tests.end_to_end.test_survive import losses

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]


def launched(address: str, path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "meshwright.cli", "launch", str(path), "--on", "ray"]
    nodes = ["--nodes.count", "2", "--nodes.ranks_per_node", "1", "--nodes.cluster_address", address]
    return subprocess.Popen([*words, *nodes], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_actor_a_rank_trains_as_one_process_would(ray_address: str, tmp_path: Path) -> None:
    config.save(long_run(tmp_path / "run", 30), tmp_path / "RUN.toml")
    process = launched(ray_address, tmp_path / "RUN.toml")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    close(losses(tmp_path / "run"), expected(tmp_path, 30))


def test_a_warned_run_saves_and_goes_on_and_a_killed_actor_starts_again(ray_address: str, tmp_path: Path) -> None:
    directory, path = tmp_path / "run", tmp_path / "RUN.toml"
    config.save(long_run(directory, 1500), path)
    process = launched(ray_address, path)
    until(lambda: manifest.latest_step(directory / "checkpoints") >= 20, 300)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    step = manifest.latest_step(directory / "checkpoints")
    assert f"stopped by SIGTERM; step {step} of 1500 is saved" in output
    process = launched(ray_address, path)
    until(lambda: manifest.latest_step(directory / "checkpoints") > step, 300)
    os.kill(_an_actor(), signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "all ranks start again from step" in output
    close(losses(directory), expected(tmp_path, 1500))


def _an_actor() -> int:
    """The process of an actor: Ray names it by its class."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::RankActor" in path.read_bytes():
                return int(path.parent.name)
        except OSError:
            continue
    raise AssertionError("there is no actor")


def in_ray_train(settings: dict[str, str]) -> None:
    """The loop of a worker of Ray Train: the process group is there, and the trainer takes it."""
    from ray import train

    done = api.train(config.load(settings["file"]))
    train.report({"steps": done.steps})


def test_the_trainer_inside_ray_train(ray_address: str, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("pandas", reason="Ray Train needs the extra ray[train]")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config.save(long_run(tmp_path / "run", 20), tmp_path / "RUN.toml")
    ray.init(address=ray_address)
    try:
        TorchTrainer(
            in_ray_train,
            train_loop_config={"file": str(tmp_path / "RUN.toml")},
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(name="test", storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    close(losses(tmp_path / "run"), expected(tmp_path, 20))
