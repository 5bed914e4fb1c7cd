"""Ray without a cluster: what is passed on to actors, and what is said of those that fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import config
from meshwright.api import Restarts, Status, Trained
from meshwright.engines import ray
from meshwright.engines.job import Job
from meshwright.errors import FailedRankError, LostRankError, MeshwrightError

DONE = Trained(directory="run", steps=3, resumed_from=0, checkpoint="")


class FakeRay:
    """As much of Ray as waiting for ranks needs: each call of ``wait`` ends one more task. A result that is an error is
    raised."""

    class exceptions:  # noqa: N801 - Ray's name
        class RayActorError(Exception):
            """An actor that died."""

    def __init__(self, waits: int = 0) -> None:
        self.waits = waits

    def wait(self, waiting: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        if self.waits:
            self.waits -= 1
            return [], waiting
        return waiting[:1], waiting[1:]

    def get(self, task: Any) -> Any:
        if isinstance(task, Exception) and not isinstance(task, MeshwrightError):
            raise task
        return task


class FakeActor:
    """An actor that is told to stop, with a handle that notes it."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.stop = SimpleNamespace(remote=self.warnings.append)


def test_a_warning_is_passed_on_to_each_actor_once_and_outside_of_the_handler(tmp_path: Path) -> None:
    actors = [FakeActor(), FakeActor()]
    with ray._warned() as warnings:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert warnings == ["SIGUSR1"], "the other one is the same warning"
        assert ray._result(FakeRay(3), actors, [DONE, DONE], warnings, tmp_path) is DONE
    assert [actor.warnings for actor in actors] == [["SIGUSR1"], ["SIGUSR1"]]


def test_a_failure_says_what_the_actor_did_and_that_rays_logs_have_its_output(tmp_path: Path) -> None:
    Status(tmp_path, 0).set("while reading the data")
    Status(tmp_path, 1).set("at step 3")
    tasks = [LostRankError("rank 1 is gone"), FakeRay.exceptions.RayActorError("it died\nmore")]
    with pytest.raises(
        FailedRankError, match="rank 1 has failed at step 3: RayActorError: it died\n  -> its"
    ) as caught:
        ray._result(FakeRay(), [], tasks, [], tmp_path)
    assert caught.value.doing == "at step 3"
    messages: list[str] = []
    again = Restarts(tmp_path, messages.append, wait=lambda seconds: None, output="the output is in Ray's logs")
    assert [again(caught.value, tmp_path) for _ in range(3)] == [True, True, False]
    assert messages[0].endswith("all ranks start again from the beginning; the output is in Ray's logs")
    assert messages[-1] == "it has failed 3 times at step 3 after the beginning, and is not started again"
    Status.clear(tmp_path)
    assert Status.read(tmp_path, 1) == ""


def test_a_job_goes_on_with_the_nodes_that_are_left() -> None:
    """Of four nodes of two ranks one is dead and one is too small; batches of 8 divide over four ranks."""
    raw = {
        "model": {"name": "mlp"},
        "data": {"kind": "random", "shape": [64], "batch_size": 8},
        "layout": {"dp": 8},
        "nodes": {"count": 4, "ranks_per_node": 2},
    }
    job = Job(run=config.make(raw, where="test"), file=Path("RUN.toml"))
    room, small = {"CPU": 2.0}, {"CPU": 1.0}
    nodes = [{"Alive": alive, "Resources": each} for alive, each in [(True, room)] * 2 + [(False, room), (True, small)]]
    assert ray.left(nodes, job).nodes.count == 2
    assert ray.left(nodes[:1], job).nodes.count == 1
    assert ray.left([{"Alive": True, "Resources": room}] * 3, job).nodes.count == 2, "three nodes have six ranks"
    assert ray.left([{"Alive": True, "Resources": room}] * 9, job).nodes.count == 4
    assert ray.left([], job) is job
