"""Clusters that tests of this folder share: a Slurm of two nodes, and a Ray of two nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm import Slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cache = Path(os.environ.get("MESHWRIGHT_CLUSTERS", Path.home() / ".cache" / "meshwright-clusters"))
    with Slurm(cache / "slurm", tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    cluster.add_node(**small)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()
