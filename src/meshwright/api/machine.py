"""Measures the constants of this machine (speeds of kernels and links), and finds those of other clusters."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from meshwright.api import measured_gpus
from meshwright.api.measured_gpus import gpu_cluster, gpu_name
from meshwright.catalog import load_cluster, reported_cluster, with_software
from meshwright.comm.groups import from_rank_0
from meshwright.comm.transport import mpi
from meshwright.errors import ClusterError, FileFormatError, LaunchError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import NETWORK, Calibration, Cluster
from meshwright.ir.ledger import Ledger
from meshwright.ir.software import Software
from meshwright.planner.learn import LearnedCluster
from meshwright.planner.learn_ledgers import learn_ledgers
from meshwright.report.run_files import read_run
from meshwright.runtime import calibrate as calibration
from meshwright.runtime import calibrate_gpus, launch
from meshwright.runtime.device import cuda_support, device_names, has_cuda, num_cuda_devices, properties
from meshwright.runtime.device_check import check_alike, check_driver, unavailable
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
    device: str = "",
) -> Cluster:
    """Measure this machine's GPUs, or its cores if it has none, and the links between them, without running any model;
    takes less than a minute.

    Under a launcher (torchrun on one or several machines, or mpirun) every rank must call this function, and the links
    between these ranks are measured. Under mpirun, the collectives of MPI are measured too. Rank 0 writes the file.

    Args:
        path: where the cluster file is written; default: this user's cache, where ``calibrated`` finds it.
        again: measure even if the existing calibration still holds.
        measured_by: a top-level function that every rank runs to measure, for example to show progress.
        device: ``"cuda"`` or ``"cpu"``; default: ``"cuda"`` if this machine has GPUs (several: experimental).

    Raises:
        LaunchError: the ranks could not be started, the file cannot be written, or there is no such device.
    """
    kind = measured_kind(device)
    target = Path(path) if path is not None else calibration_file(kind)
    if not again and path is None and (known := calibrated(kind)) is not None:
        return known
    measure = measured_by or (measure_machine if kind == "cpu" else measure_gpus)
    if launch.launched():
        measured = measure()
        return from_rank_0(lambda: save_cluster(measured, target))
    scratch = Path(tempfile.mkdtemp(prefix="meshwright-calibrate-"))
    num_ranks = calibration.num_ranks() if kind == "cpu" else num_cuda_devices()
    cluster = run_ranks(measure, num_ranks=num_ranks, directory=scratch)
    shutil.rmtree(scratch)  # after an error the folder stays, because it holds the ranks' output
    return save_cluster(cluster, target)


def recalibrate(*ledgers: Ledger, where: str = "--recalibrate") -> LearnedCluster:
    """Correct this machine's calibration by the ledgers of runs, and save the result as the new calibration.

    Raises:
        ClusterError: this machine was not calibrated, or a ledger deviates so far that no constant explains it.
        LaunchError: the file cannot be written.
    """
    known = calibrated()
    if known is None:
        raise ClusterError(
            "there is nothing to correct: this machine was not calibrated", where=where,
            remedy="run `meshwright calibrate` first",
        )  # fmt: skip
    return _saved(learn_ledgers(ledgers, known), calibration_file())


def learn_from_runs(
    directories: Sequence[Path], cluster: str = "", output: Path | None = None
) -> tuple[LearnedCluster, Path]:
    """Learn a cluster's numbers from runs of ``meshwright train``. Return it and the file to which it was written.

    Without ``cluster``, this machine's calibration is corrected. ``output`` then defaults to the file of the
    calibration. With ``cluster`` (a name or a file), ``output`` is needed.

    Raises:
        FileFormatError: a directory holds no run, or its run has no ledger.
        ClusterError: as for ``recalibrate``; or there is no file to write to.
        LaunchError: the file cannot be written.
    """
    ledgers = []
    for directory in directories:
        ledger = read_run(directory).ledger
        if ledger is None:
            raise FileFormatError(
                "prediction and measurement were not compared in this run", where=str(directory),
                remedy="give a run that made at least 2 steps with a predicted plan",
            )  # fmt: skip
        ledgers.append(ledger)
    if not cluster and output is None:
        return recalibrate(*ledgers, where="--from"), calibration_file()
    known = _ours(load_cluster(cluster)) if cluster else calibrated()
    if known is None:
        raise ClusterError(
            "there is nothing to correct: this machine was not calibrated", where="--from",
            remedy="run `meshwright calibrate` first, or name a cluster with --cluster",
        )  # fmt: skip
    if output is None or output.suffix != ".toml":
        raise ClusterError(
            "no file is named that ends in .toml", where="--output", remedy="name the cluster file to write: mine.toml"
        )
    return _saved(learn_ledgers(ledgers, known), output), output


def _saved(learned: LearnedCluster, target: Path) -> LearnedCluster:
    save_cluster(learned.cluster, target)
    return learned


def save_cluster(cluster: Cluster | None, target: Path) -> Cluster:
    """Write a cluster file, and return the cluster; raises a LaunchError if it cannot be written."""
    assert cluster is not None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.save(cluster, target)
    except OSError as error:
        raise LaunchError(
            f"the cluster file cannot be written: {error.strerror}", where=str(target), remedy="choose another path"
        ) from None
    return cluster


def measured_kind(device: str) -> str:
    """The kind of device to calibrate; raises a LaunchError if there is none of the kind that is asked for. Without a
    choice, the error of a driver that is too old says why there is no GPU."""
    known = ("cuda", "cpu") if has_cuda() else ("cpu",)
    if device and device not in known:
        raise unavailable(device, cuda_support(), known)
    if not device and len(known) == 1:
        check_driver(cuda_support())
    return device or known[0]


def measure_machine(progress: Progress | None = None) -> Cluster | None:
    """Measure cores on every rank of a calibration. Return the cluster on rank 0, None on other ranks."""
    progress = progress or Silent()
    cluster = calibration.measure(calibration.Effort(), _told_once(progress))
    progress.end()
    return cluster


def measure_gpus(progress: Progress | None = None) -> Cluster | None:
    """Measure GPUs on every rank of a calibration. Return the cluster on rank 0, None on other ranks."""
    progress = progress or Silent()
    measured = calibrate_gpus.measure(calibrate_gpus.GpuEffort(), _told_once(progress))
    progress.end()
    return gpu_cluster(measured) if measured is not None else None


def _told_once(progress: Progress) -> Callable[[str], None]:
    shown = ""

    def advance(what: str) -> None:
        nonlocal shown
        if what != shown:
            progress.begin(what)
            shown = what

    return advance


def calibrated(kind: str = "cpu") -> Cluster | None:
    """The last calibration of this machine's cores, or with ``cuda`` of its GPUs. None if there is none, or if it no
    longer holds (another machine, another version of torch, or too old)."""
    path = calibration_file(kind)
    if not path.exists():
        return None
    try:
        cluster = files.load(path, Cluster)
    except MeshwrightError as error:  # damaged, or of another version: the machine can be measured again
        log.warning("%s cannot be used: %s", path, error)
        return None
    machine = gpu_name(properties(torch.device("cuda", 0)).name) if kind == "cuda" else ""
    reason = stale(cluster, time.time(), machine=machine)
    if reason:
        log.info("%s is stale: %s", path, reason)
        return None
    return _ours(cluster)


def is_busy(measurement: Calibration) -> bool:
    """Whether other programs used the machine while it was calibrated."""
    return measurement.spread > BUSY_SPREAD


def calibration_file(kind: str = "cpu") -> Path:
    """The default file in which ``calibrate`` keeps the calibration of this machine's cores, or with ``cuda`` of its
    GPUs."""
    return launch.cache_directory() / ("this-machine.toml" if kind == "cpu" else f"{measured_gpus.NAME}.toml")


def known_cluster(cluster: Cluster | str | None, device: torch.device, num_ranks: int = 0) -> Cluster:
    """The given cluster. If none is given, the cluster is this machine: on a CPU its calibration, or ``cpu-local`` if
    there is no calibration; on CUDA the calibration too, or this machine's devices as the catalog has them. If CUDA
    ranks are on several machines, the calibration of several machines is taken, or the catalog's usual fabric joins
    boxes with as many devices as this machine has ranks.

    A cluster that names no software profile gets Meshwright's own profile.

    ``num_ranks``: an open-ended cluster grows to at least this number of devices. This machine grows too: more ranks
    than cores are planned as if each rank had its own core.

    Raises:
        ClusterError: the cluster is unknown; or none is given, and the devices differ, or the catalog lacks them or
            their fabric; or the ranks do not fill whole boxes.
    """
    if isinstance(cluster, Cluster):
        return _ours(cluster)
    if cluster is not None:
        known = _ours(load_cluster(cluster))
        return known.resized(num_ranks) if known.open_ended and num_ranks > known.num_devices else known
    if device.type == "cpu":
        generic = _ours(load_cluster("cpu-local"))
        this_machine = _runnable(calibrated() or generic)
        if num_ranks <= this_machine.num_devices:
            return this_machine
        inside = msgspec.structs.replace((this_machine.levels or generic.levels)[0], fan_out=num_ranks)
        return msgspec.structs.replace(this_machine, num_devices=num_ranks, levels=(inside,))
    return _gpus_here(device, num_ranks)


def _gpus_here(device: torch.device, num_ranks: int) -> Cluster:
    """This machine's GPUs, and equal boxes beside it if they are fewer than the ranks."""
    check_alike(device_names(), whose="device")
    name, memory_bytes, processors, num_devices = properties(device)
    each = launch.num_ranks_here() or num_devices
    num_boxes = max(1, -(-num_ranks // each))
    measured = calibrated("cuda")
    if (
        measured is not None
        and num_ranks <= measured.num_devices
        and (num_boxes == 1 or NETWORK in measured.level_names)
    ):
        return measured
    if num_ranks > each and num_ranks % each:
        raise ClusterError(
            f"{num_ranks} ranks do not fill whole boxes, which have {each} ranks as this machine has", where="cluster",
            remedy=f"start a multiple of {each} ranks, or pass cluster=, the name or the file of a cluster",
        )  # fmt: skip
    assumed = _ours(reported_cluster(name, memory_bytes, processors, each, num_boxes))
    if num_boxes > 1:
        log.info(
            "%d boxes with %d ranks each are planned as %s: the fabric between them was not measured, and may be "
            "another (cluster=)", num_boxes, each, assumed.name,
        )  # fmt: skip
        if measured is not None:
            inner = msgspec.structs.replace((measured.levels or assumed.levels)[0], fan_out=each)
            return msgspec.structs.replace(
                measured, num_devices=assumed.num_devices, levels=(inner, *assumed.levels[1:]), open_ended=True
            )
    log.info("%s was not measured: predictions rest on the catalog, and are wide (`meshwright calibrate`)", device)
    return assumed


def _ours(cluster: Cluster) -> Cluster:
    """The cluster with Meshwright's own software profile, unless the cluster names a profile."""
    return with_software(cluster, "meshwright") if cluster.software == Software() else cluster


def check_size(cluster: Cluster, num_ranks: int) -> None:
    """Raise a ClusterError unless ``num_ranks`` ranks fill the whole cluster, or whole units (such as boxes) of it."""
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


def _runnable(cluster: Cluster) -> Cluster:
    """This machine's cluster. Measurements of MPI are left out if MPI did not start the ranks."""
    rows = tuple(row for row in cluster.collectives if row.algorithm != MPI or mpi.is_there())
    if len(rows) < len(cluster.collectives):
        log.info("the measurements of MPI are left out: these ranks were not started by mpirun")
    return msgspec.structs.replace(cluster, collectives=rows)
