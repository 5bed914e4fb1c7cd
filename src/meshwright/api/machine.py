"""The constants of this machine and of other clusters: finds them, and measures those of this machine."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from meshwright.catalog import load_cluster, reported_cluster
from meshwright.comm.groups import from_rank_0
from meshwright.comm.transport import mpi
from meshwright.cost.recalibrate import recalibrate as corrected
from meshwright.errors import ClusterError, LaunchError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import Calibration, Cluster
from meshwright.ir.ledger import Ledger
from meshwright.runtime import calibrate as calibration
from meshwright.runtime import launch
from meshwright.runtime.loop import Progress, Silent
from meshwright.runtime.measured import BUSY_SPREAD, stale
from meshwright.runtime.ranks import run_ranks
from meshwright.schedules.collectives.choice import MPI

log = logging.getLogger("meshwright")


def calibrate(
    path: str | os.PathLike[str] | None = None,
    *,
    again: bool = True,
    measured_by: Callable[[], Cluster | None] | None = None,
) -> Cluster:
    """Measure this machine's cores and the links between them, without running any model; takes less than a
    minute.

    Under a launcher (torchrun on one or several machines, mpirun) every rank must call it, and the links between these
    ranks are measured; under mpirun also MPI's own collectives. Rank 0 writes the file.

    Args:
        path: where the cluster file is written; default: this user's cache, where ``calibrated`` finds it.
        again: measure even if the existing calibration still holds.
        measured_by: a top-level function that every rank runs to measure, for example to show progress.

    Raises:
        LaunchError: the ranks could not be started, or the file cannot be written.
    """
    target = Path(path) if path is not None else calibration_file()
    if not again and path is None and (known := calibrated()) is not None:
        return known
    if launch.launched():
        measured = (measured_by or measure_machine)()
        return from_rank_0(lambda: _keep(measured, target))
    scratch = Path(tempfile.mkdtemp(prefix="meshwright-calibrate-"))
    cluster = run_ranks(measured_by or measure_machine, num_ranks=calibration.num_ranks(), directory=scratch)
    shutil.rmtree(scratch)  # after an error it stays: it holds the ranks' output
    return _keep(cluster, target)


def recalibrate(ledger: Ledger) -> Cluster:
    """Correct this machine's calibration by the ledger of a run, and keep the result in place of the calibration.

    Raises:
        ClusterError: this machine was not calibrated, or the ledger deviates by more than any constant explains.
        LaunchError: the file cannot be written.
    """
    known = calibrated()
    if known is None:
        raise ClusterError(
            "there is nothing to correct: this machine was not calibrated", where="--recalibrate",
            remedy="run `meshwright calibrate` first",
        )  # fmt: skip
    return _keep(corrected(known, ledger), calibration_file())


def _keep(cluster: Cluster | None, target: Path) -> Cluster:
    assert cluster is not None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.save(cluster, target)
    except OSError as error:
        raise LaunchError(
            f"the cluster file cannot be written: {error.strerror}", where=str(target), remedy="choose another path"
        ) from None
    return cluster


def measure_machine(progress: Progress | None = None) -> Cluster | None:
    """Measure on every rank of a calibration. Return the cluster on rank 0, None on other ranks."""
    progress = progress or Silent()
    shown = ""

    def advance(what: str) -> None:
        nonlocal shown
        if what != shown:
            progress.begin(what)
            shown = what

    cluster = calibration.measure(calibration.Effort(), advance)
    progress.end()
    return cluster


def calibrated() -> Cluster | None:
    """This machine as it was last calibrated; None if it was not, or if the calibration no longer holds (another
    machine, another torch, too old)."""
    path = calibration_file()
    if not path.exists():
        return None
    try:
        cluster = files.load(path, Cluster)
    except MeshwrightError as error:  # damaged, or of another version: it can be measured again
        log.warning("%s cannot be used: %s", path, error)
        return None
    reason = stale(cluster, time.time())
    if reason:
        log.info("%s is stale: %s", path, reason)
        return None
    return cluster


def is_busy(measurement: Calibration) -> bool:
    """Whether other programs used the machine while it was calibrated."""
    return measurement.spread > BUSY_SPREAD


def calibration_file() -> Path:
    """The default file in which ``calibrate`` keeps this machine's calibration."""
    return launch.cache_directory() / "this-machine.toml"


def known_cluster(cluster: Cluster | str | None, device: torch.device, num_ranks: int = 0) -> Cluster:
    """The given cluster. If none is given, this machine: on a CPU as it was calibrated, else ``cpu-local``; on CUDA one
    box of this machine's devices.

    ``num_ranks``: an open-ended cluster grows to at least this number of devices. This machine grows too: more ranks
    than cores are planned as if each rank had its own core.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None:
        known = load_cluster(cluster)
        return known.resized(num_ranks) if known.open_ended and num_ranks > known.num_devices else known
    if device.type == "cpu":
        generic = load_cluster("cpu-local")
        here = _runnable(calibrated() or generic)
        if num_ranks <= here.num_devices:
            return here
        inside = msgspec.structs.replace((here.levels or generic.levels)[0], fan_out=num_ranks)
        return msgspec.structs.replace(here, num_devices=num_ranks, levels=(inside,))
    properties = torch.cuda.get_device_properties(device)
    return reported_cluster(properties.name, properties.total_memory, torch.cuda.device_count())


def check_size(cluster: Cluster, num_ranks: int) -> None:
    """Raise a ClusterError unless ``num_ranks`` ranks fill the whole cluster, or a part of it that consists of whole
    units of its levels."""
    if num_ranks > cluster.num_devices:
        held = " x ".join(str(level.fan_out) for level in cluster.levels)
        raise ClusterError(
            f"there are {num_ranks} ranks, but its levels hold {f'{held} = ' * (len(cluster.levels) > 1)}"
            f"{cluster.num_devices}",
            where=f"cluster {cluster.name}",
            remedy=f"start {cluster.num_devices} ranks, or correct num_devices and a fan_out",
        )
    if cluster.homogeneous:
        cluster.resized(num_ranks)


def _runnable(here: Cluster) -> Cluster:
    """This machine, without its measurements of MPI if MPI did not start the ranks."""
    rows = tuple(row for row in here.collectives if row.algorithm != MPI or mpi.is_there())
    if len(rows) < len(here.collectives):
        log.info("what was measured of MPI is left out: these ranks were not started by mpirun")
    return msgspec.structs.replace(here, collectives=rows)
