"""Costs of the nodes of a lowered program: their kernels, and the pieces for their collectives."""

from collections.abc import Iterable
from functools import lru_cache

from meshwright.cost.collective import Group, Network
from meshwright.cost.kernels import Cost, Rates
from meshwright.cost.work import CodedElements, Communicate, Compute
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import Collective, Node, Program
from meshwright.ir.stages import PROLOGUE


def of_parameters(program: Program) -> list[Node]:
    """The nodes of the prologue that depend on parameters: gathers, casts, and operators that use their results."""
    values = {parameter.value for parameter in program.parameters}
    nodes = []
    for node in program.phase(PROLOGUE).nodes:
        if not values.isdisjoint(node.inputs):
            values.update(value.name for value in node.outputs)
            nodes.append(node)
    return nodes


VIEW_LAUNCHES = 0.5
"""The host's time for a view, in launches of a kernel: it dispatches an operator and starts nothing. By this, a step of
a small GPT without graphs on an H200 takes 29 ms; 34 ms were measured (benchmarks/results/gpu-nvidia-h200.md)."""


class NodeCosts:
    """Seconds, FLOPs and bytes of nodes on the ranks of a mesh, or on ``num_ranks`` ranks. ``launch_s``: the host's
    seconds for each launch; 0 on a CPU, whose measured times include the launch. ``undecided``: the nodes are of
    operators whose algorithms the planner still chooses (``Rates.chosen_cost``)."""

    def __init__(
        self, mesh: Mesh, cluster: Cluster, threads: int = 1, num_ranks: int = 0, undecided: bool = False
    ) -> None:
        at_once = max(1, min(num_ranks or mesh.world_size, cluster.num_devices))
        self.rates = Rates(cluster.device.under(ranks=at_once, threads=threads), cluster.software)
        self.on_cpu = cluster.device.kind == "cpu"
        self.launch_s = 0.0 if self.on_cpu else self.rates.launch_s
        self._known = lru_cache(maxsize=None)(self.rates.chosen_cost if undecided else self.rates.cost)

    def of(self, nodes: Iterable[Node]) -> Cost:
        """The cost of nodes that run one after the other on the device, without their collectives. A node without
        kernels (a view) costs ``kernel_s`` on a CPU, and elsewhere ``VIEW_LAUNCHES`` launches of the host."""
        seconds, flops, num_bytes, launches = 0.0, 0.0, 0, 0.0
        for node in nodes:
            if not node.kernels and node.starts is None and not node.waits:
                if self.on_cpu:
                    seconds += self.rates.kernel_s
                else:
                    launches += VIEW_LAUNCHES
            for kernel in node.kernels:
                cost = self._known(kernel)
                seconds, flops, num_bytes = seconds + cost.seconds, flops + cost.flops, num_bytes + cost.bytes
                launches += cost.launches
        return Cost(seconds, flops, num_bytes, launches)

    def piece(self, what: str, cost: Cost) -> Compute:
        """A piece of work with this cost. The time that it waits for the host is added later."""
        return Compute(what, cost.seconds, cost.flops, cost.bytes, self.launch_s * cost.launches)


def moved_by_rank(collective: Collective, network: Network, group: Group) -> bool:
    """Whether a rank itself moves the bytes of a collective, in its wait. On CPUs it does, except that between boxes
    the system carries the message of a shift, of which nothing is added up."""
    if network.cluster.device.kind != "cpu":
        return False
    return collective.kind != "shift" or not network.leaves_box(group)


def communicated(what: str, collective: Collective, blocking: bool) -> Communicate:
    """The piece for a collective."""
    coding = CodedElements(collective.codec, collective.algorithm, collective.item_bytes, collective.summed)
    return Communicate(
        what, collective.kind, collective.axis, collective.bytes, blocking, coding=coding if collective.codec else None
    )
