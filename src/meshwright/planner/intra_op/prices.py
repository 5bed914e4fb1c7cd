"""Seconds of operators under a strategy, and of bringing tensors from one placement to another, over a whole step."""

from collections.abc import Mapping
from math import inf, prod

from meshwright.cost.closed_form import axis_group
from meshwright.cost.collective import Network
from meshwright.cost.optimizer import OptimizerCost
from meshwright.cost.program import NodeCosts
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import ITEM_BYTES, Graph, Operator, Tensor
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import Partial, Placements, Shard, input_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.program import Lower, Node, OperatorProgram
from meshwright.ir.resharding import Mover
from meshwright.planner.algorithms import links_of
from meshwright.planner.buckets import BUCKET_BYTES, part_bytes


class Prices:
    """The seconds of single operators, as ``lower`` emits them, and of tensors that are brought to other placements. A
    step of ``microbatches`` pays each of them so often, for a part of the batch; gradients are brought to their
    parameters once."""

    def __init__(
        self, graph: Graph, mesh: Mesh, sizes: Mapping[str, int], cluster: Cluster, lower: Lower, microbatches: int
    ) -> None:
        self.graph, self.sizes, self.microbatches, self.lower = graph, dict(sizes), microbatches, lower
        self.costs = NodeCosts(mesh, cluster)
        self.rates = self.costs.rates
        self.network = Network(cluster)
        links = links_of(mesh, (axis for axis in sizes if axis in mesh.names), self.network)
        self.mover = Mover(self.sizes, links)
        self.groups = {axis: axis_group(mesh, axis) for axis in (*sizes, *links)}
        gradients = {entry.gradient for entry in graph.gradients if entry.gradient is not None}
        self.bucket_bytes = min(BUCKET_BYTES, sum(graph.tensors[name].num_bytes for name in gradients))
        self._known: dict[object, float] = {}
        self._batch = {name for name, one in graph.factor_classes.items() if one.role == "batch"}

    def operator_s(self, operator: Operator, strategy: Strategy) -> float:
        """Its kernels, and what they communicate but for what they fetch (``fetched``)."""
        program = self.program(operator, strategy)
        if program not in self._known:
            nodes = [node for node in program.nodes if node.name not in program.fetches]
            self._known[program] = self.costs.of(program.nodes).seconds + sum(map(self.node_exchanges_s, nodes))
        return self.times(operator) * self._known[program]

    def fetched(self, operator: Operator, strategy: Strategy, position: int) -> dict[object, float]:
        """The halos that an operator reads of an input, with their seconds. Who reads an equal one of the same tensor
        has it for nothing."""
        program = self.program(operator, strategy)
        found: dict[object, float] = {}
        for node in program.nodes if program.fetches else ():
            fetch = program.fetches.get(node.name)
            if fetch is not None and fetch.position == position and operator.rule is not None:
                wanted = input_placements(operator.rule, strategy, position, self.sizes)
                lies = tuple(sorted((axis, one) for axis, one in wanted.items() if axis in self.sizes))
                found[lies, *fetch.rows] = self.times(operator) * self.node_exchanges_s(node)
        return found

    def program(self, operator: Operator, strategy: Strategy, interior_first: bool = False) -> OperatorProgram:
        """The operator in one micro-batch."""
        sizes, letter = self.sizes, self._time_letter(operator, strategy) if self.times(operator) > 1 else ""
        if letter:
            sizes, strategy = {**sizes, TIME: self.microbatches}, {**strategy, TIME: letter}
        return self.lower.operator(operator, strategy, sizes, interior_first)

    def node_exchanges_s(self, node: Node) -> float:
        """The collectives that a node starts, or that are inside of its kernel."""
        every = (*([node.starts] if node.starts is not None else ()), *node.inside)
        return sum(self.network.collective_s(one.kind, one.bytes, self.groups[one.axis]) for one in every)

    def times(self, operator: Operator) -> int:
        """How often a step runs it."""
        return 1 if operator.prologue else self.microbatches

    def _time_letter(self, operator: Operator, strategy: Strategy) -> str:
        """The batch factor that micro-batches divide."""
        rule = operator.rule
        for letter, name in operator.classes.items() if rule is not None else ():
            if name in self._batch and rule is not None and rule.splittable(letter):
                others = prod(self.sizes[axis] for axis, choice in strategy.items() if choice == letter)
                if rule.sizes[letter] % (others * self.microbatches) == 0:
                    return letter
        return ""

    def reshard_s(
        self, tensor: Tensor, have: Placements, want: Placements, owned: bool, times: int = 1, gradient: bool = False
    ) -> float:
        """Bringing a tensor from one placement to another, ``times`` a step if it is made by micro-batches; infinite
        where a sum is wanted of what is none. ``owned``: nobody else reads it, so it may be overwritten. Gradients that
        only lack one sum go in buckets."""
        for axis, placement in want.items():
            if isinstance(placement, Partial) and have.get(axis) != placement:
                return inf
        if have == want:
            return 0.0
        batch = any(name in self._batch for dim in tensor.dims for name in dim)
        parts = times if batch else 1
        places = (tuple(sorted(have.items())), tuple(sorted(want.items())))
        key = (tensor.shape, tensor.dtype, places, owned, times, parts, gradient)
        if key not in self._known:
            self._known[key] = times * self._reshard_s(tensor, have, want, owned, parts, gradient)
        return self._known[key]

    def _reshard_s(
        self, tensor: Tensor, have: Placements, want: Placements, owned: bool, parts: int, gradient: bool
    ) -> float:
        steps = self.mover.moves(have, want, tensor.shape, ITEM_BYTES[tensor.dtype])
        seconds = 0.0
        for move in steps:
            if move.kind == "slice":
                continue
            before, after = (part_bytes(tensor, one, self.sizes) // parts for one in (move.before, move.after))
            largest, group = max(before, after), self.groups[move.axis]
            if gradient and len(steps) == 1 and move.kind == "all_reduce":
                bucket = max(largest, self.bucket_bytes)
                seconds += self.network.collective_s(move.kind, bucket, group) * largest / bucket
                continue
            seconds += self.network.collective_s(move.kind, largest, group)
            if move.kind == "all_reduce" and not owned:
                seconds += self.rates.stream("copy", 2 * before).seconds
            inner = isinstance(move.placement, Shard) and (move.placement.dim > 0 or move.placement.outer > 1)
            if move.kind != "all_reduce" and inner:  # parts are put in order
                seconds += self.rates.stream("copy", 2 * largest).seconds
            if move.target is not None:  # and taken apart
                seconds += self.rates.stream("copy", 2 * before).seconds
            owned = True
        return seconds

    def update_s(self, tensor: Tensor, placements: Placements, optimizer: OptimizerCost) -> float:
        """The optimizer's step of a parameter."""
        size = part_bytes(tensor, placements, self.sizes)
        each = self.rates.stream("update", optimizer.moved / optimizer.kernels * size).seconds
        return optimizer.kernels * each
