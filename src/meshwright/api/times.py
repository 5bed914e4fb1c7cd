"""Finds and checks the tables of measured times of operator algorithms. There is a table for each number of threads."""

import logging
import os
from pathlib import Path

import torch

from meshwright.errors import ClusterError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.algorithm_times import AlgorithmTimes
from meshwright.ir.cluster import Cluster
from meshwright.runtime import launch
from meshwright.runtime.machine import machine_name

log = logging.getLogger("meshwright")

HERE = ("this-machine", "cpu-local")
"""The names of the clusters that stand for this machine."""


def times_file(threads: int = 1) -> Path:
    """The default file of this machine's table for ``threads`` threads. It lies beside the calibration."""
    return launch.cache_directory() / f"this-machine-algorithms-{threads}.json"


def load_times(path: str | os.PathLike[str]) -> AlgorithmTimes:
    """Read a table.

    Raises:
        FileFormatError: the file is missing, or is not such a table.
        ClusterError: the table was measured on another machine, or with another version of torch.
    """
    times = files.load(path, AlgorithmTimes)
    for what, then, now in (
        ("on another machine", times.machine, machine_name()), ("with another torch", times.torch, torch.__version__)
    ):  # fmt: skip
        if then != str(now):
            raise ClusterError(
                f"it was measured {what}, {then}; here is {now}", where=str(path),
                remedy="remove the file, and measure again: meshwright bench convolutions MODEL",
            )  # fmt: skip
    return times


def times_of(cluster: Cluster, num_ranks: int) -> AlgorithmTimes | None:
    """The table of this machine for the number of threads that each of ``num_ranks`` ranks will have. None if the
    cluster is not this machine, or there is no table. If a table no longer holds, the log says so."""
    path = times_file(launch.threads_of(num_ranks))
    if cluster.name not in HERE or not path.exists():
        return None
    try:
        return load_times(path)
    except MeshwrightError as error:
        log.warning("the measured times of algorithms are not used: %s", error)
        return None
