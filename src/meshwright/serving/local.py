"""Runs a plan in processes of this machine, one for each station; on request with emulated links between tiers.

    rank 0   waits for all addresses, says when to begin, and collects the logs
    rank r   station r - 1: writes its address, waits for the beginning, runs, writes its log

The files of these messages lie in one directory, which all ranks see.
"""

import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import msgspec

from meshwright.emulation.network import EmulatedNetwork, NetworkBox, address_of, enter, why_not
from meshwright.errors import LaunchError, WorkflowError
from meshwright.ir import files
from meshwright.runtime import launch, trust
from meshwright.runtime.ranks import run_ranks
from meshwright.serving.simulate import PlayedItems
from meshwright.serving.station import Station, StationJob, StationLog, played
from meshwright.serving.wire import Address
from meshwright.serving.workflow import Workflow

HOST = "127.0.0.1"
START_S = 0.5
"""Seconds from the last station's readiness to the first item."""
POLL_S = 0.02
T = TypeVar("T")


class _Place(msgspec.Struct, frozen=True):
    """Where a station listens."""

    address: Address


class _Begin(msgspec.Struct, frozen=True):
    """When the first item starts, and where the stations are."""

    time_s: float
    addresses: dict[str, Address]


def run_locally(job: StationJob, *, emulate_links: bool = False) -> PlayedItems:
    """Run all items of a job on this machine. With ``emulate_links``, each tier is an emulated box whose links have the
    workflow's rates, by ``tc`` (as root, on Linux).

    Raises:
        WorkflowError: links cannot be emulated: latencies, or different rates from one tier.
        LaunchError: this machine cannot emulate links.
        MeshwrightError: the error of the first station that failed.
    """
    rates = tier_rates(job.workflow) if emulate_links else []
    if emulate_links and (missing := why_not()):
        raise LaunchError(missing, where="links", remedy="run without emulated links")
    with tempfile.TemporaryDirectory(prefix="meshwright-serve-") as name:
        directory = Path(name)
        (directory / "stations").mkdir()
        with EmulatedNetwork(rates) if emulate_links else nullcontext() as network:
            places = network.places if network is not None else ()
            logs = run_ranks(
                _rank, job, directory / "stations", places, num_ranks=1 + len(job.stations), directory=directory
            )
    return played(logs, job.workflow)


def tier_rates(workflow: Workflow) -> list[float]:
    """The rate of each tier's box, in bits per second: that of its links to later tiers.

    Raises:
        WorkflowError: a link has a latency, or the links from one tier have different rates.
    """
    unlimited = 1e11
    rates = []
    for tier in workflow.tiers:
        links = [link for link in workflow.links if link.source == tier.name and link.target != tier.name]
        for link in links:
            if link.latency_s:
                raise WorkflowError(
                    f"a latency of {link.latency_s:g} s cannot be emulated", where=f"links.{link.source}-{link.target}",
                    remedy="run without emulated links, or with latency_s = 0",
                )  # fmt: skip
        bit_rates = {link.bits_per_s or unlimited for link in links}
        if len(bit_rates) > 1:
            raise WorkflowError(
                f"the links from {tier.name} have different rates, and one box has one", where="links",
                remedy="give them one rate, or run without emulated links",
            )  # fmt: skip
        rates.append(next(iter(bit_rates), unlimited))
    return rates


# --- in a rank -------------------------------------------------------------------------------------------------------


def _rank(job: StationJob, directory: Path, places: tuple[NetworkBox, ...]) -> list[StationLog]:
    rank = launch.launched_rank()
    if rank == 0:
        return _coordinate(job, directory)
    name = job.stations[rank - 1]
    host = HOST
    if places:
        box = job.workflow.tier_index[job.workflow.tier_of[name]]
        enter(places[box])
        host = address_of(box)
    station = Station(job, name, host, trust.launched_token())
    _write(directory / f"{rank}.address", _Place(station.address))
    begin = _awaited(directory / "begin", _Begin)
    _write(directory / f"{rank}.log", station.run(begin.addresses, begin.time_s))
    return []


def _coordinate(job: StationJob, directory: Path) -> list[StationLog]:
    ranks = range(1, 1 + len(job.stations))
    addresses = {job.stations[rank - 1]: _awaited(directory / f"{rank}.address", _Place).address for rank in ranks}
    _write(directory / "begin", _Begin(time.time() + START_S, addresses))
    return [_awaited(directory / f"{rank}.log", StationLog) for rank in ranks]


def _write(path: Path, value: object) -> None:
    files.write_atomically(path, msgspec.msgpack.encode(value))


def _awaited(path: Path, kind: type[T]) -> T:
    """The content of a file, as soon as it is there. If its writer fails, the launcher ends this rank."""
    while not path.exists():
        time.sleep(POLL_S)
    return msgspec.msgpack.decode(path.read_bytes(), type=kind)
