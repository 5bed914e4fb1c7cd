"""Runs a plan on Ray: every station is an actor on a node with the labels of its tier.

Ray places and supervises the stations; items go from station to station over TCP, as in local processes. Without an
address, a local Ray cluster is started, with one node for each tier, and ends with the run.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from time import time
from types import ModuleType
from typing import Any

import msgspec

from meshwright.errors import FailedRankError, LaunchError, MeshwrightError
from meshwright.serving.simulate import PlayedItems
from meshwright.serving.station import Station, StationJob, StationLog, played
from meshwright.serving.workflow import Tier

START_S, PLACE_S = 0.5, 120.0
"""Seconds from the last station's readiness to the first item; and until all stations must be placed and ready."""
TIER_LABEL = "meshwright-tier"
"""The label of a local node, with the name of its tier; and of a node of a tier without labels."""


def run_on_ray(job: StationJob, address: str = "") -> PlayedItems:
    """Run all items of a job on the Ray cluster at ``address`` (empty: a local one that is started for the run).

    Raises:
        LaunchError: Ray is not installed, the cluster cannot be reached, or no node has the labels of a tier.
    """
    ray = _ray()
    with _cluster(ray, job, address):
        actor = ray.remote(_Actor)
        encoded, token = msgspec.json.encode(job), secrets.token_hex(16)
        labels = {tier.name: labels_of(tier) for tier in job.workflow.tiers}
        _check_labels(ray, labels)
        stations = {
            name: actor.options(num_cpus=1, label_selector=labels[job.workflow.tier_of[name]]).remote(
                encoded, name, token
            )
            for name in job.stations
        }
        try:
            addresses = ray.get([station.address.remote() for station in stations.values()], timeout=PLACE_S)
        except ray.exceptions.GetTimeoutError:
            raise LaunchError(
                f"not all of {len(stations)} stations were placed within {PLACE_S:g} s", where=address or "local Ray",
                remedy="give the cluster a core for each station, on nodes with the labels of its tier",
            ) from None  # fmt: skip
        except ray.exceptions.RayError as error:
            raise _cause(error) from None
        where = dict(zip(stations, addresses, strict=True))
        begin_s = time() + START_S
        try:
            logs = ray.get([station.run.remote(where, begin_s) for station in stations.values()])
        except ray.exceptions.RayError as error:
            raise _cause(error) from None
    return played([msgspec.msgpack.decode(log, type=StationLog) for log in logs], job.workflow)


def labels_of(tier: Tier) -> dict[str, str]:
    """The labels that a node must have to hold workers of a tier."""
    return tier.labels or {TIER_LABEL: tier.name}


class _Actor:
    """A station as a Ray actor."""

    def __init__(self, job: bytes, name: str, token: str) -> None:
        from ray.util import get_node_ip_address

        self._station = Station(msgspec.json.decode(job, type=StationJob), name, get_node_ip_address(), token)

    def address(self) -> tuple[str, int]:
        """Where the station listens."""
        return self._station.address

    def run(self, addresses: dict[str, tuple[str, int]], begin_s: float) -> bytes:
        """Run the station, and return its log."""
        return msgspec.msgpack.encode(self._station.run(addresses, begin_s))


def _cause(error: Any) -> MeshwrightError:
    """The error of a station, or the end of its actor as a FailedRankError."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, MeshwrightError):
        return cause
    lines = str(cause or error).strip().splitlines() or [type(error).__name__]
    return FailedRankError(f"a station has ended: {lines[-1]}", where="Ray", remedy="look at the log of its actor")


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise LaunchError(
            "Ray is not installed", where="serve run", remedy="pip install 'meshwright[ray]', or run without --ray"
        ) from None
    return ray


@contextmanager
def _cluster(ray: Any, job: StationJob, address: str) -> Iterator[None]:
    """A context in which this process is connected to a Ray cluster."""
    if address:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise LaunchError(
                f"there is no Ray cluster: {next(iter(str(error).splitlines()), '')}", where=address,
                remedy="start one (ray start --head --labels ...), or leave the address out",
            ) from None  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        try:
            for tier in job.workflow.tiers:
                cluster.add_node(num_cpus=len(job.stations), labels=labels_of(tier), include_dashboard=False)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises exceptions of several kinds
            raise LaunchError(
                f"a local Ray cluster does not start: {next(iter(str(error).splitlines()), '')}", where="local Ray",
                remedy="see whether other programs have all cores, or give the address of a cluster",
            ) from error  # fmt: skip
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def _check_labels(ray: Any, labels: dict[str, dict[str, str]]) -> None:
    """Raise a LaunchError if no node of the cluster has the labels of a tier."""
    nodes = [node.get("Labels", {}) for node in ray.nodes() if node.get("Alive")]
    for tier, wanted in labels.items():
        if not any(wanted.items() <= node.items() for node in nodes):
            text = ",".join(f"{key}={value}" for key, value in wanted.items())
            raise LaunchError(
                f"no node of the Ray cluster has the labels {text}", where=f"tiers.{tier}",
                remedy=f"start a node with them: ray start --labels {text}",
            )  # fmt: skip
