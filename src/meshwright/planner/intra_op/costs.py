"""Cost models of the integer program: a cluster's kernels and network, or plain latency and bytes per mesh axis."""

from collections.abc import Iterable, Mapping
from math import ceil, log2
from typing import Protocol

from meshwright.cost.collective import Network
from meshwright.cost.fabric import axis_group
from meshwright.cost.node_costs import NodeCosts
from meshwright.cost.optimizer import OptimizerCost
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import CollectiveKind, Node
from meshwright.ir.resharding import AxisLink
from meshwright.planner.algorithms import links_of
from meshwright.planner.buckets import BUCKET_BYTES


class CostModel(Protocol):
    """The prices of kernels and collectives."""

    @property
    def links(self) -> Mapping[str, AxisLink]:
        """The links of axes and of joined axes, for the search for cheap resharding."""
        ...

    @property
    def bucket_bytes(self) -> float:
        """The size of the buckets that the reductions of gradients share; 0: each gradient is reduced alone."""
        ...

    def nodes_s(self, nodes: Iterable[Node]) -> float:
        """Seconds of the kernels of nodes that run one after the other, without their collectives."""
        ...

    def collective_s(self, kind: CollectiveKind, num_bytes: float, axis: str) -> float:
        """Seconds of a collective over an axis, or over joined axes. ``num_bytes`` is defined as in ``Network``."""
        ...

    def copy_s(self, num_bytes: float) -> float:
        """Seconds of a copy that reads and writes ``num_bytes`` bytes in all."""
        ...

    def update_s(self, num_bytes: float, optimizer: OptimizerCost) -> float:
        """Seconds of the optimizer's update of ``num_bytes`` bytes of parameters."""
        ...


class ClusterCosts:
    """The cost model of a cluster: its device's rates, and its network. ``axes`` are the axes with more than one
    rank."""

    bucket_bytes = float(BUCKET_BYTES)

    def __init__(self, mesh: Mesh, axes: Iterable[str], cluster: Cluster) -> None:
        names = list(axes)
        self._nodes, self._network = NodeCosts(mesh, cluster, undecided=True), Network(cluster)
        self.links = links_of(mesh, (axis for axis in names if axis in mesh.names), self._network)
        self._groups = {axis: axis_group(mesh, axis) for axis in (*names, *self.links)}

    def nodes_s(self, nodes: Iterable[Node]) -> float:
        """Seconds of the nodes' kernels on the cluster's device."""
        return self._nodes.of(nodes).seconds

    def collective_s(self, kind: CollectiveKind, num_bytes: float, axis: str) -> float:
        """Seconds of a collective on the cluster's network."""
        return self._network.collective_s(kind, num_bytes, self._groups[axis])

    def copy_s(self, num_bytes: float) -> float:
        """Seconds of a copy in the device's memory."""
        return self._nodes.rates.memory_bound("copy", num_bytes).seconds

    def update_s(self, num_bytes: float, optimizer: OptimizerCost) -> float:
        """Seconds of an update whose passes are limited by the device's memory."""
        rates = self._nodes.rates
        moved, passes = optimizer.passes(on_cpu=rates.device.kind == "cpu")
        apart = passes > 1 or rates.device.kind == "cpu"  # a fused kernel takes all parameters together
        return passes * rates.memory_bound("update", moved * num_bytes, kernels=int(apart)).seconds


class AlphaBetaCosts:
    """A cost model of communication alone: a collective over n ranks takes ``alpha`` + ``beta`` x (bytes that a rank
    sends) + ``added``. Kernels, copies and updates cost nothing.

    A rank sends 2 (n-1)/n of its bytes in an all-reduce and (n-1)/n in an all-gather or a reduce-scatter, as in
    Alpa's device mesh (Zheng et al., OSDI 2022). In an all-to-all, a rank sends (n-1)/n of its bytes, times ``spread``
    x n. Use ``spread`` for networks on which the messages of an all-to-all disturb each other. A halo or a shift is one
    message.
    Gradients do not share buckets.

    Args:
        sizes: the size of each axis.
        alpha: the seconds of latency of each axis.
        beta: the seconds per byte of each axis.
        added: additional seconds per collective, by its kind.
        spread: the factor of an all-to-all, divided by n; None: 1 / n, no disturbance.
        scatters: whether reduce-scatters are cheaper than all-reduces. Alpa's integer program knows only all-reduces;
            a later pass turns some of them into reduce-scatters.
    """

    bucket_bytes = 0.0

    def __init__(
        self,
        sizes: Mapping[str, int],
        alpha: Mapping[str, float],
        beta: Mapping[str, float],
        added: Mapping[str, float] | None = None,
        spread: float | None = None,
        scatters: bool = True,
    ) -> None:
        self._sizes, self._alpha, self._beta = dict(sizes), dict(alpha), dict(beta)
        self._added, self._spread, self._scatters = dict(added or {}), spread, scatters
        self.links = {
            axis: AxisLink(latency_s=alpha[axis] / max(1, ceil(log2(size))), byte_s=beta[axis])
            for axis, size in self._sizes.items()
            if size > 1
        }

    def nodes_s(self, nodes: Iterable[Node]) -> float:
        """Kernels cost nothing."""
        return 0.0

    def collective_s(self, kind: CollectiveKind, num_bytes: float, axis: str) -> float:
        """Seconds of a collective by the closed form."""
        kind = "all_reduce" if kind == "reduce_scatter" and not self._scatters else kind
        ranks = self._sizes[axis]
        part = (ranks - 1) / ranks
        sent = {
            "all_reduce": 2 * part,
            "all_to_all": part * (1.0 if self._spread is None else self._spread * ranks),
            "halo": 1.0,
            "shift": 1.0,
            "broadcast": 1.0,
        }.get(kind, part)
        return self._alpha[axis] + self._beta[axis] * sent * num_bytes + self._added.get(kind, 0.0)

    def copy_s(self, num_bytes: float) -> float:
        """Copies cost nothing."""
        return 0.0

    def update_s(self, num_bytes: float, optimizer: OptimizerCost) -> float:
        """Updates cost nothing."""
        return 0.0
