"""Choose the collective algorithm for each mesh axis of a plan, and find the link that each axis uses. Choose how the
tokens of experts travel."""

from collections.abc import Iterable

from meshwright.cost.collective import Network
from meshwright.cost.fabric import axis_group
from meshwright.ir.cluster import NETWORK, Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import JOIN, Mesh
from meshwright.ir.operator_algorithm import GATHER
from meshwright.ir.resharding import AxisLink


def communicating(axes: Iterable[str]) -> list[str]:
    """The axes in the given order, then every run of two or more neighbouring axes as one joined axis (``dp+tp``)."""
    names = list(axes)
    runs = [names[first:last] for first in range(len(names)) for last in range(first + 2, len(names) + 1)]
    return [*names, *(JOIN.join(run) for run in runs)]


def links_of(mesh: Mesh, axes: Iterable[str], network: Network) -> dict[str, AxisLink]:
    """The link of each axis and of each joined axis (see ``communicating``). All ``axes`` must have more than one
    rank."""
    return {axis: network.link(axis_group(mesh, axis)) for axis in communicating(axes)}


def algorithms_of(mesh: Mesh, axes: Iterable[str], cluster: Cluster | None) -> dict[str, str]:
    """Choose the collective algorithm of each axis and of each joined axis (see ``communicating``).

    On a CPU cluster, the algorithm is the fastest that was measured. If none was measured, an axis of two ranks in one
    box uses ``exchange``: the two ranks exchange their data in one round. All other axes use ``native``, the
    collectives of torch.distributed. Without a cluster, all ranks are assumed to be CPU ranks of one box.
    """
    network = Network(cluster) if cluster is not None and cluster.device.kind == "cpu" else None
    algorithms = {}
    for axis in communicating(axes):
        measured = network.algorithms(axis_group(mesh, axis)) if network is not None else ""
        usual = "exchange" if mesh.size(axis) == 2 and in_a_box(mesh, axis, cluster) else "native"
        algorithms[axis] = measured or usual
    return algorithms


def in_a_box(mesh: Mesh, axis: str, cluster: Cluster | None) -> bool:
    """Whether the ranks of each group of ``axis`` are CPU ranks of one box. Without a cluster, the result is True. A
    mesh may have more ranks than the cluster, if stages are priced separately. It is then laid over the cluster several
    times."""
    if cluster is None:
        return True
    if cluster.device.kind != "cpu" or not cluster.levels:
        return False
    box = cluster.levels[0]
    if box.name == NETWORK:
        return False
    one_box = len(cluster.levels) == 1  # a single box may hold more ranks than devices
    # The search prices each layer as a separate stage, so there may be more stages than devices.
    groups = [ranks for ranks in mesh.groups(axis) if max(ranks) < cluster.num_devices]
    return one_box or all(cluster.level_of(*ranks).name == box.name for ranks in groups)


def experts_algorithms(graph: Graph, cluster: Cluster | None) -> dict[str, str]:
    """Maps mixtures of experts to the algorithm that moves their tokens if a device runs behind its host: there, the
    host does not wait to learn how many tokens each expert has."""
    if cluster is None or cluster.device.kind == "cpu":
        return {}
    return {operator.name: GATHER for operator in graph.operators if operator.target.startswith("meshwright.experts")}
