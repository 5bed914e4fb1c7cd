"""The carrier on Ray: every assignment is a Ray task on the node that the scheduler chose."""

import math
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import JobError
from meshwright.ir.job_graph import JobNode
from meshwright.jobs.assignment import Outcome, UnitAssignment, of_threads
from meshwright.jobs.carrier import lost
from meshwright.jobs.execute import execute
from meshwright.jobs.placement import NodeSlot

LOCAL = "local"
_STORE_BYTES = 80 * 2**20
"""The memory of a local cluster's object store: it carries only assignments and outcomes."""


class OnRay:
    """The carrier on a Ray cluster: one that runs at ``address``, or a local one that starts here and ends with this
    process.

    A local cluster has the cores and GPUs of ``nodes`` together. All nodes of a cluster must share the file system of
    the run's directory. ``threads`` counts, by their threads, the vertices for which a local cluster starts workers.

    Raises:
        JobError: Ray is not installed, or no cluster answers.
    """

    def __init__(
        self, nodes: Mapping[str, JobNode], address: str = "", threads: Mapping[int, int] | None = None
    ) -> None:
        if address:
            _check_address(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise JobError(
                "ray is not installed", where="--on ray", remedy="pip install 'meshwright[ray]', or run it --on here"
            ) from None
        self._ray: Any = ray
        self._local = not address
        self._nodes = dict(nodes)
        self._ids: dict[str, str] = {}
        sizes: dict[str, Any] = {}
        workers: dict[int, int] = {}
        if not address:
            sizes = {"num_cpus": math.ceil(sum(node.cpus for node in nodes.values()))}
            sizes |= {"num_gpus": sum(node.gpus for node in nodes.values())}
            sizes |= {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
            workers = {of: min(count, max(1, sizes["num_cpus"] // of)) for of, count in (threads or {}).items()}
            if workers:  # Ray would end more idle ones than there are cores
                limit = max(sizes["num_cpus"], sum(workers.values()))
                sizes |= {"_system_config": {"num_workers_soft_limit": limit}}
        try:
            ray.init(address or LOCAL, log_to_driver=False, logging_level="ERROR", configure_logging=True, **sizes)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise JobError(
                f"no Ray cluster answers: {str(error).splitlines()[0]}", where=f"--address {address or LOCAL}",
                remedy="start one with `ray start --head`, or leave the address out",
            ) from None  # fmt: skip
        # Ray prints each end of a worker on this process's standard output, and has no public switch for that.
        ray._private.worker._worker_logs_enabled = False
        self._execute = ray.remote(execute)
        self._running: dict[Any, tuple[UnitAssignment, float]] = {}
        if workers:
            try:
                self._warm(workers)
            except BaseException:
                ray.shutdown()
                raise

    def nodes(self) -> Mapping[str, JobNode]:
        """The nodes of the cluster at the address that are alive; of a local cluster, the given ones."""
        if self._local:
            return self._nodes
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        self._ids |= {_name_of(node): node["NodeID"] for node in alive}
        return {
            _name_of(node): JobNode(
                cpus=node["Resources"].get("CPU", 0.0), gpus=int(node["Resources"].get("GPU", 0)),
                memory_bytes=int(node["Resources"].get("memory", 0)) or None,
                labels={name: value for name, value in node["Labels"].items() if name != "ray.io/node-id"},
            )
            for node in alive
        }  # fmt: skip

    def start(self, assignment: UnitAssignment, slot: NodeSlot) -> None:
        """Submit the assignment as a task, which Ray does not retry: the scheduler does."""
        options: dict[str, Any] = {"num_cpus": slot.cpus, "num_gpus": len(slot.gpus), "max_retries": 0}
        options["runtime_env"] = {"env_vars": assignment.worker_variables}
        if not self._local:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._ids[slot.node], soft=False)
            options["memory"] = slot.memory_bytes
        reference = self._execute.options(**options).remote(msgspec.json.encode(assignment))
        self._running[reference] = assignment, time.time()

    def wait(self) -> list[Outcome]:
        """Wait until at least one task has ended."""
        ended, _ = self._ray.wait(list(self._running), num_returns=1)
        outcomes = []
        for reference in ended:
            assignment, start_s = self._running.pop(reference)
            try:
                outcomes.append(msgspec.json.decode(self._ray.get(reference), type=Outcome))
            except self._ray.exceptions.LocalRayletDiedError as error:
                self._nodes = {}
                outcomes.append(lost(assignment, start_s, f"the local Ray cluster died ({str(error).splitlines()[0]})"))
            except self._ray.exceptions.RayError as error:
                kind, text = type(error).__name__, str(error).strip().splitlines()
                outcomes.append(lost(assignment, start_s, f"its worker was lost ({kind}: {text[0] if text else ''})"))
        return outcomes

    def stop(self) -> None:
        """End all tasks; a local cluster ends too."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def _warm(self, workers: Mapping[int, int]) -> None:
        """Let every worker of a local cluster, so many by their threads, import what it needs: the first vertices would
        wait for it. Each waits until all are there, so that none runs two of these tasks; nobody waits for one that
        died."""
        meet, num_workers = self._ray.remote(_meet), sum(workers.values())
        options = [{"env_vars": of_threads(threads)} for threads, count in workers.items() for _ in range(count)]
        with tempfile.TemporaryDirectory(prefix="meshwright-jobs-") as directory:
            waiting = [
                meet.options(num_cpus=0, max_retries=0, runtime_env=of).remote(directory, num_workers) for of in options
            ]
            while waiting:
                (ended,), waiting = self._ray.wait(waiting, num_returns=1)
                try:
                    self._ray.get(ended)
                except self._ray.exceptions.WorkerCrashedError:
                    Path(directory, f"died-{len(waiting)}").touch()


def _meet(directory: str, num_workers: int) -> None:
    """Wait until so many workers are here, but not for ever."""
    Path(directory, f"{os.getpid()}").touch()
    end_s = time.monotonic() + WARM_S
    while len(os.listdir(directory)) < num_workers and time.monotonic() < end_s:
        time.sleep(0.01)


def _name_of(node: Mapping[str, Any]) -> str:
    """The name of a node of Ray: its address, and the beginning of its id, because nodes may share an address."""
    return f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"


def _check_address(address: str) -> None:
    """Raise a JobError if nobody listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (ValueError, OSError) as error:
        raise JobError(
            f"no Ray cluster answers: {error}", where=f"--address {address}",
            remedy="write HOST:PORT of a cluster that `ray start --head` has started, or leave the address out",
        ) from None  # fmt: skip


CONNECT_S = 10.0
"""Seconds in which a cluster must answer."""
WARM_S = 60.0
"""Seconds in which the workers of a local cluster must have started; then the graph starts without the late ones."""
