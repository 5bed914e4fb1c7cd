"""Learn a software profile from a table of runs, or from the logged steps of one run, and give it to a cluster."""

import math
import os
import statistics
from collections.abc import Sequence

from meshwright.catalog import load_cluster, with_software
from meshwright.cost.setup import Setup
from meshwright.errors import FileFormatError
from meshwright.ir.cluster import Cluster
from meshwright.planner.cases import Case, read_cases
from meshwright.planner.learn import LearnedCluster, learn


def learn_table(path: str | os.PathLike[str], *, cluster: str = "", software: str = "") -> LearnedCluster:
    """Learn from all usable rows of a table (``planner.cases.COLUMNS``).

    ``cluster`` is the cluster that gets the profile (default: the cluster of the rows). ``software`` is the initial
    profile for rows that name no profile.

    Raises:
        FileFormatError: the table cannot be read or has no usable row; its rows are of several clusters and ``cluster``
            is not given; they are of another device than the cluster; or ``learn`` refuses them.
    """
    cases, left_out = read_cases(path, software)
    where = os.fspath(path)
    names = list(dict.fromkeys(case.named for case in cases))
    if not cluster and len(names) > 1:
        raise FileFormatError(
            f"the runs are of {len(names)} clusters: {', '.join(names)}", where=where,
            remedy="name the cluster that you plan for with --cluster",
        )  # fmt: skip
    if not cases:
        first = f": {left_out[0].case}: {left_out[0].reason}" if left_out else ""
        raise FileFormatError(f"no row can be used{first}", where=where, remedy="correct the rows")
    target = load_cluster(cluster or names[0])
    for case in cases:
        if case.cluster.device.name != target.device.name:
            raise FileFormatError(
                f"the run is of a {case.cluster.device.name}, the cluster {target.name} has {target.device.name}",
                where=f"{where}: {case.name}", remedy="learn from runs of the device that you plan for",
            )  # fmt: skip
    learned = learn(cases, cases[0].cluster.software)
    return LearnedCluster(cluster=with_software(target, learned.software), learned=learned, left_out=tuple(left_out))


def learn_step(setup: Setup, cluster: Cluster, seconds: Sequence[float]) -> LearnedCluster:
    """Learn from the logged seconds of a few steps of one run. They count as one run with the median time.

    Raises:
        FileFormatError: the times are impossible.
    """
    if not seconds or not all(0 < each < math.inf for each in seconds):
        raise FileFormatError(
            "a step takes more than 0 seconds", where="--measured", remedy="give seconds of steps: 1.52,1.49,1.50"
        )
    case = Case(
        name="the run", setup=setup, cluster=cluster, measured_s=statistics.median(seconds), measured_peak_bytes=None,
        out_of_memory=False,
    )  # fmt: skip
    learned = learn([case], cluster.software)
    return LearnedCluster(cluster=with_software(cluster, learned.software), learned=learned)
