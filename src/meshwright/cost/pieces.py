"""Seconds of matrix products that run in pieces while their operand arrives or their result leaves
(``lower/pieces.py``).

    computing  | own rows | rows of rank 2     | rows of rank 1     |
    link       | shift 1             | shift 2            |
"""

from collections.abc import Sequence

import msgspec

from meshwright.cost.collective import Group, Network
from meshwright.cost.fabric import axis_group, piece_s
from meshwright.cost.host import launched_s
from meshwright.cost.node_costs import NodeCosts, communicated, moved_by_rank
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.kernel import Kernel
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import Collective, Node


class PieceCosts:
    """The times of products in pieces, and of nodes, on the ranks of a mesh. On a link, one message follows another."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self._mesh, self._costs, self._network = mesh, NodeCosts(mesh, cluster), Network(cluster)

    def hides(self, collective: Collective) -> bool:
        """Whether ranks compute while shifts replace this collective."""
        shift = msgspec.structs.replace(collective, kind="shift")
        return not moved_by_rank(shift, self._network, self._group(collective))

    def whole_s(self, product: Kernel, collective: Collective) -> float:
        """Seconds of the plain form: the whole collective, and the whole product."""
        return self._collective_s(collective) + self._costs.rates.cost(product).seconds

    def pieces_s(self, product: Kernel, collective: Collective, pieces: int) -> float:
        """Seconds of a product that runs in pieces, instead of after an all-gather of its rows, or before a
        reduce-scatter of them. Sums are added up in memory. No part of a product is more efficient than the whole,
        whatever measured curves say of small products in caches."""
        size, chunks, gathers = collective.size, pieces // collective.size, collective.kind == "all_gather"
        whole_s, part_s = (self._costs.rates.cost(each).seconds for each in (product, part_of(product, pieces)))
        product_s = max(part_s, whole_s / pieces)
        num_bytes = collective.bytes // pieces
        add_s = 0.0 if gathers else self._costs.rates.memory_bound("pointwise", 3 * num_bytes).seconds
        shift_s = self._network.collective_s("shift", num_bytes, self._group(collective))
        now = link = 0.0
        arrivals = [0.0] * chunks
        if gathers:
            arrivals = [shift_s * (number + 1) for number in range(chunks)]
            link = arrivals[-1]
        for step in range(size):
            for number in range(chunks):
                if gathers and step:
                    now = max(now, arrivals[number])
                    if step + 1 < size:
                        arrivals[number] = link = max(link, now) + shift_s
                now += product_s
                if not gathers:
                    now = max(now, arrivals[number]) + add_s * (step > 0)
                    if step + 1 < size:
                        arrivals[number] = link = max(link, now) + shift_s
        return now

    def played_s(self, nodes: Sequence[Node]) -> float:
        """Seconds of nodes in their order, with the collectives that they start."""
        now, links, begun = 0.0, dict[str, float](), dict[str, tuple[float, bool]]()
        for node in nodes:
            now += self._costs.of([node]).seconds + sum(map(self._collective_s, node.inside))
            if (collective := node.starts) is not None:
                seconds, group = self._collective_s(collective), self._group(collective)
                waits = moved_by_rank(collective, self._network, group)
                if not waits:
                    seconds += max(now, links.get(collective.axis, 0.0))
                    links[collective.axis] = seconds
                begun[node.name] = seconds, waits
            elif node.waits in begun:
                seconds, waits = begun[node.waits]
                now = now + seconds if waits else max(now, seconds)
        return now

    def launched_s(self, nodes: Sequence[Node]) -> float:
        """``played_s`` if the host launches each kernel by itself."""
        return launched_s(self.played_s(nodes), self._costs.launch_s * self._costs.of(nodes).launches)

    def _collective_s(self, collective: Collective) -> float:
        return piece_s(communicated("", collective, True), self._network, self._group(collective))

    def _group(self, collective: Collective) -> Group:
        return axis_group(self._mesh, collective.axis)


def part_of(kernel: Kernel, pieces: int) -> Kernel:
    """One of ``pieces`` equal parts of a matrix product, divided by its rows."""
    assert kernel.product is not None, "it is a matrix product"
    product = kernel.product._replace(m=max(1.0, kernel.product.m / pieces))
    m, n, k, batch = product
    num_bytes = ITEM_BYTES[kernel.dtype] * batch * (m * k + k * n + m * n)
    return msgspec.structs.replace(kernel, flops=kernel.flops / pieces, bytes=round(num_bytes), product=product)
