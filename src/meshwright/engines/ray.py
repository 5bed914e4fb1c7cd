"""Starts a run on a Ray cluster: a placement group with a bundle for each node, and an actor for each rank."""

import itertools
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from meshwright import api
from meshwright.api import TOGETHER_S, WARNINGS, Preemption, Restarts, Status, Trained
from meshwright.engines.job import Job
from meshwright.errors import FailedRankError, LaunchError, LostRankError, MeshwrightError, PreemptedError
from meshwright.ir.run import Run

PLACED_S = 600.0
"""Seconds in which the cluster must have room for all ranks."""
POLL_S = 0.5
INFORMED_S = 5.0
"""Seconds to wait for the error of the rank that failed first, once a rank has failed."""


class RankActor:
    """A rank, as a Ray actor with two threads: one trains, and the other takes ``stop``."""

    def __init__(self, grace_s: float) -> None:
        self._preemption = Preemption(grace_s)

    def endpoint(self) -> tuple[str, int]:
        """The address of this rank's node, and a free port of it."""
        import ray

        return ray.util.get_node_ip_address(), api.free_port()

    def train(self, run: Run, environment: dict[str, str]) -> Trained | MeshwrightError:
        """Train as the rank that ``environment`` describes in torchrun's variables. Return the error of a user."""
        api.add_environment(environment)
        logging.getLogger("meshwright").setLevel(logging.INFO if environment["RANK"] == "0" else logging.WARNING)
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        try:
            return api.train(run, preemption=self._preemption)
        except MeshwrightError as error:
            return error

    def stop(self, reason: str) -> None:
        """Ask all ranks to save and to end."""
        self._preemption.ask(reason)


def described(job: Job) -> str:
    """The placement group and the actors in words of Ray's API."""
    return "\n".join([
        f"ray.init(address={job.nodes.cluster_address or 'auto'!r})",
        f"placement_group({_bundles(job)}, strategy={_strategy(job)!r})",
        *(f"rank {rank}: an actor in bundle {rank // job.ranks_per_node}, with {_variables(job, rank)}"
          for rank in range(job.nodes.count * job.ranks_per_node)),
    ])  # fmt: skip


def start(job: Job, say: Callable[[str], object]) -> Trained:
    """Start the ranks as actors, and wait for them. If actors die, all start again from the last checkpoint, on as many
    of the nodes that are left as the run can use.

    Raises:
        LaunchError: Ray is not installed, there is no cluster, or it has no room.
        MeshwrightError: the error of a rank.
    """
    ray = _ray()
    try:
        ray.init(address=job.nodes.cluster_address or "auto", log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError) as error:
        raise LaunchError(
            f"no Ray cluster answers: {str(error).splitlines()[0]}",
            where="nodes.cluster_address",
            remedy="start one with `ray start --head`, or give its address",
        ) from None
    try:
        again = Restarts(job.directory / "checkpoints", say, output="the output of the ranks is in Ray's logs")
        for attempt in itertools.count(1):
            try:
                return _once(ray, job if attempt == 1 else left(ray.nodes(), job), say, attempt)
            except FailedRankError as error:
                if not again(error, job.directory):
                    raise
        raise AssertionError("count has no end")
    finally:
        ray.shutdown()


def left(nodes: Sequence[Mapping[str, Any]], job: Job) -> Job:
    """The job on as many of a cluster's living nodes as have room for a bundle, and as the run can use. If there are
    none, it is the same: nodes may come.

    Args:
        nodes: the result of ``ray.nodes()``.
    """
    bundle = _bundles(job)[0]
    living = [node["Resources"] for node in nodes if node["Alive"]]
    room = sum(all(each.get(name, 0) >= amount for name, amount in bundle.items()) for each in living)
    for count in range(min(room, job.nodes.count), 0, -1):
        if api.can_use(job.run, count * job.ranks_per_node):
            fewer = msgspec.structs.replace(job.nodes, count=count)
            return msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, nodes=fewer))
    return job


def _once(ray: Any, job: Job, say: Callable[[str], object], attempt: int) -> Trained:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    Status.clear(job.directory)
    group = placement_group(_bundles(job), strategy=_strategy(job))
    actors: list[Any] = []
    try:
        if not group.wait(PLACED_S):
            raise LaunchError(
                f"the cluster has no room for {_bundles(job)} within {PLACED_S:g} s; it has {ray.cluster_resources()}",
                where="nodes",
                remedy="give fewer nodes or ranks, or add nodes to the cluster",
            )
        say(f"{job.nodes.count * job.ranks_per_node} ranks on {job.nodes.count} nodes of the Ray cluster")
        kind = ray.remote(RankActor)
        for rank in range(job.nodes.count * job.ranks_per_node):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // job.ranks_per_node)
            actors.append(
                kind.options(
                    num_cpus=job.nodes.cpus_per_rank, num_gpus=job.nodes.gpus_per_rank, max_concurrency=2,
                    scheduling_strategy=where,
                ).remote(job.run.train.grace_s)
            )  # fmt: skip
        address, port = ray.get(actors[0].endpoint.remote())
        meet = {
            "MASTER_ADDR": address,
            "MASTER_PORT": f"{port}",
            "OMP_NUM_THREADS": f"{job.nodes.cpus_per_rank}",
            api.ATTEMPT: f"{attempt}",
        } | api.passed_on()
        tasks = [actor.train.remote(job.run, meet | _variables(job, rank)) for rank, actor in enumerate(actors)]
        with _warned() as warnings:
            try:
                return _result(ray, actors, tasks, warnings, job.directory)
            except FailedRankError as error:
                if not warnings:
                    raise
                remedy = "give the same command again: it goes on from the last checkpoint"
                raise PreemptedError(f"ended after {warnings[0]}, without saving", remedy=remedy) from error
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _result(ray: Any, actors: list[Any], tasks: list[Any], warnings: list[str], directory: Path) -> Trained:
    """Wait for all ranks, and pass the first of ``warnings`` on to them; return rank 0's result. Raise the first error
    of a rank that is not a lost connection."""
    waiting, failed, warned = list(tasks), dict[int, Exception](), False
    deadline = float("inf")
    while waiting and time.monotonic() < deadline:
        done, waiting = ray.wait(waiting, timeout=POLL_S)
        if warnings and not warned:
            warned = True
            for actor in actors:
                actor.stop.remote(warnings[0])
        for task in done:
            try:
                result = ray.get(task)
                if isinstance(result, MeshwrightError):
                    raise result
            except Exception as error:  # noqa: BLE001 - of any actor, as Ray or the rank raised it
                failed[tasks.index(task)] = error
                deadline = min(deadline, time.monotonic() + INFORMED_S)
    if not failed:
        trained: Trained = ray.get(tasks[0])
        return trained
    for own in failed.values():
        if isinstance(own, MeshwrightError) and not isinstance(own, LostRankError):
            raise own
    dead = {rank: own for rank, own in failed.items() if isinstance(own, ray.exceptions.RayActorError)}
    rank, first = next(iter((dead or failed).items()))
    text, doing = f"{type(first).__name__}: {str(first).strip().splitlines()[0]}", Status.read(directory, rank)
    what = f"rank {rank} has failed{f' {doing}' if doing else ''}: {text}"
    lost = FailedRankError(what, remedy="its output is in Ray's logs")
    lost.doing = doing
    raise lost from first


@contextmanager
def _warned() -> Iterator[list[str]]:
    """Add the name of the first SIGTERM or SIGUSR1 to the list that this yields; a second one ends this program, and
    its actors with it. The handler calls nothing of Ray, which the signal may have interrupted."""
    names: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield names
        return
    warned_s: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        if warned_s and time.monotonic() - warned_s[0] > TOGETHER_S:
            raise SystemExit(128 + number)
        if not warned_s:
            warned_s.append(time.monotonic())
            names.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in WARNINGS}
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _variables(job: Job, rank: int) -> dict[str, str]:
    each = job.ranks_per_node
    return {
        "RANK": f"{rank}", "WORLD_SIZE": f"{job.nodes.count * each}", "LOCAL_RANK": f"{rank % each}",
        "LOCAL_WORLD_SIZE": f"{each}",
    }  # fmt: skip


def _bundles(job: Job) -> list[dict[str, float]]:
    nodes, each = job.nodes, job.ranks_per_node
    bundle: dict[str, float] = {"CPU": nodes.cpus_per_rank * each}
    if nodes.gpus_per_rank:
        bundle["GPU"] = nodes.gpus_per_rank * each
    return [bundle] * nodes.count


def _strategy(job: Job) -> str:
    return "STRICT_SPREAD" if job.nodes.count > 1 else "STRICT_PACK"


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise LaunchError("ray is not installed", where="--on ray", remedy="pip install ray") from None
    return ray
