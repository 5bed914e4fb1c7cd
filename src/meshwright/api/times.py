"""Finds and checks the table of measured times of algorithms of operators."""

import os
from pathlib import Path

import torch

from meshwright.errors import ClusterError
from meshwright.ir import files
from meshwright.ir.algorithm_times import AlgorithmTimes
from meshwright.ir.cluster import Cluster
from meshwright.runtime import launch
from meshwright.runtime.machine import machine_name

HERE = ("this-machine", "cpu-local")
"""The names of the clusters that stand for this machine."""


def times_file() -> Path:
    """The default file of this machine's table, beside its calibration."""
    return launch.cache_directory() / "this-machine-algorithms.json"


def load_times(path: str | os.PathLike[str]) -> AlgorithmTimes:
    """Read a table.

    Raises:
        FileFormatError: the file is missing, or is no such table.
        ClusterError: it was measured on another machine, or with another torch.
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


def times_of(cluster: Cluster) -> AlgorithmTimes | None:
    """The table of this machine if the cluster is this machine and the table exists; else None."""
    path = times_file()
    return load_times(path) if cluster.name in HERE and path.exists() else None
