"""Seconds of operators under a strategy, and of bringing tensors from one placement to another, over a whole step."""

from collections.abc import Mapping
from math import inf, prod

from meshwright.cost.closed_form import axis_group
from meshwright.cost.collective import Network
from meshwright.cost.decomposed import Decomposed
from meshwright.cost.kernels import Rates
from meshwright.cost.node import Exchange
from meshwright.cost.operators import Parts, operator_cost
from meshwright.cost.optimizer import OptimizerCost
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import ITEM_BYTES, Graph, Operator, Tensor
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import Partial, Placements, Shard, local_shape
from meshwright.ir.plan import Strategy
from meshwright.ir.resharding import Mover
from meshwright.planner.algorithms import links_of
from meshwright.planner.buckets import BUCKET_BYTES


class Prices:
    """The cost model of ``cost.nodes`` for single operators and tensors. A step of ``microbatches`` pays each of them
    so often, for a part of the batch; gradients are brought to their parameters once."""

    def __init__(
        self, graph: Graph, mesh: Mesh, sizes: Mapping[str, int], cluster: Cluster, microbatches: int = 1
    ) -> None:
        self.graph, self.sizes, self.microbatches = graph, dict(sizes), microbatches
        at_once = max(1, min(mesh.world_size, cluster.num_devices))
        self.rates = Rates(cluster.device.under(ranks=at_once, threads=1))
        self.parts = Parts(graph, {**self.sizes, **({TIME: microbatches} if microbatches > 1 else {})})
        self.network = Network(cluster)
        links = links_of(mesh, (axis for axis in sizes if axis in mesh.names), self.network)
        self.mover = Mover(self.sizes, links)
        self.groups = {axis: axis_group(mesh, axis) for axis in (*sizes, *links)}
        gradients = {entry.gradient for entry in graph.gradients if entry.gradient is not None}
        self.bucket_bytes = min(BUCKET_BYTES, sum(graph.tensors[name].num_bytes for name in gradients))
        self._known: dict[object, float] = {}
        self._batch = {name for name, one in graph.factor_classes.items() if one.role == "batch"}

    def operator_s(self, operator: Operator, strategy: Strategy) -> float:
        """Its kernels, and what its decompositions communicate but for what they fetch (``fetched``)."""
        times, within = self.times(operator), self._within(operator, strategy)
        seconds = operator_cost(self.parts, self.rates, operator, within).seconds
        inside = Decomposed(self.parts).of(operator, within)
        seconds += self.rates.stream("copy", 2 * inside.copied_bytes).seconds
        return times * (seconds + sum(self.exchange_s(one) for one in inside.exchanges))

    def fetched(self, operator: Operator, strategy: Strategy, position: int) -> dict[object, float]:
        """The halos that an operator reads of an input, with their seconds. Who reads an equal one of the same tensor
        has it for nothing."""
        inside = Decomposed(self.parts).of(operator, self._within(operator, strategy))
        lies = tuple(sorted(self.parts.wanted(operator, strategy, position).items()))
        times = self.times(operator)
        return {
            (lies, *one.key): times * self.exchange_s(one.exchange)
            for one in inside.fetched if one.operand == position
        }  # fmt: skip

    def _within(self, operator: Operator, strategy: Strategy) -> Strategy:
        """The strategy of one micro-batch."""
        letter = self._time_letter(operator, strategy) if self.times(operator) > 1 else ""
        return {**strategy, TIME: letter} if letter else strategy

    def exchange_s(self, one: Exchange) -> float:
        """A collective between the ranks of an axis."""
        return self.network.collective_s(one.kind, one.bytes, self.groups[one.axis])  # type: ignore[arg-type]

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

    def bytes_of(self, tensor: Tensor, placements: Placements) -> int:
        """Of one rank's part."""
        return prod(local_shape(tensor.shape, placements, self.sizes)) * ITEM_BYTES[tensor.dtype]

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
            before, after = (self.bytes_of(tensor, one) // parts for one in (move.before, move.after))
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
        size = self.bytes_of(tensor, placements)
        each = self.rates.stream("update", optimizer.moved / optimizer.kernels * size).seconds
        return optimizer.kernels * each
