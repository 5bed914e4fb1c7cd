"""Costs in seconds per step: of operators under a strategy, and of resharding tensors."""

from collections.abc import Mapping
from math import inf, prod

from meshwright.cost.optimizer import OptimizerCost
from meshwright.ir.graph import ITEM_BYTES, Graph, Operator, Tensor
from meshwright.ir.layout import TIME
from meshwright.ir.placement import Flat, Partial, Placements, Shard, input_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.program import Lower, Node, OperatorProgram
from meshwright.ir.resharding import Mover
from meshwright.planner.buckets import part_bytes
from meshwright.planner.intra_op.costs import CostModel


class Prices:
    """Computes the seconds per step of single operators and of resharding tensors.

    The costs of an operator come from the program that ``lower`` makes. A step pays each cost once per micro-batch, for
    that part of the batch. Only the resharding of gradients to the placements of their parameters is paid once per
    step.
    """

    def __init__(
        self, graph: Graph, sizes: Mapping[str, int], costs: CostModel, lower: Lower, microbatches: int
    ) -> None:
        self.graph, self.sizes, self.microbatches, self.lower = graph, dict(sizes), microbatches, lower
        self.costs = costs
        self.mover = Mover(self.sizes, costs.links)
        gradients = {entry.gradient for entry in graph.gradients if entry.gradient is not None}
        self.bucket_bytes = min(costs.bucket_bytes, sum(graph.tensors[name].num_bytes for name in gradients))
        self._known: dict[object, float] = {}
        self._part_bytes: dict[object, int] = {}
        self._batch = {name for name, factor_class in graph.factor_classes.items() if factor_class.role == "batch"}

    def operator_s(self, operator: Operator, strategy: Strategy) -> float:
        """The seconds of an operator's kernels and collectives, without the halos that it fetches (see ``fetched``)."""
        program = self.program(operator, strategy)
        if program not in self._known:
            nodes = [node for node in program.nodes if node.name not in program.fetches]
            self._known[program] = self.costs.nodes_s(program.nodes) + sum(map(self.node_exchanges_s, nodes))
        return self.times(operator) * self._known[program]

    def fetched(self, operator: Operator, strategy: Strategy, position: int) -> dict[object, float]:
        """Maps each halo that an operator reads of the input ``position`` to its seconds. Halos with equal keys are the
        same halo. If two operators read the same halo of a tensor, the halo is paid once."""
        program = self.program(operator, strategy)
        halos: dict[object, float] = {}
        for node in program.nodes if program.fetches else ():
            fetch = program.fetches.get(node.name)
            if fetch is not None and fetch.position == position and operator.rule is not None:
                wanted = input_placements(operator.rule, strategy, position, self.sizes)
                lies = tuple(sorted((axis, placement) for axis, placement in wanted.items() if axis in self.sizes))
                halos[lies, *fetch.rows] = self.times(operator) * self.node_exchanges_s(node)
        return halos

    def program(self, operator: Operator, strategy: Strategy, interior_first: bool = False) -> OperatorProgram:
        """The operator's program for one micro-batch."""
        sizes, letter = self.sizes, self._time_letter(operator, strategy) if self.times(operator) > 1 else ""
        if letter:
            sizes, strategy = {**sizes, TIME: self.microbatches}, {**strategy, TIME: letter}
        return self.lower.operator(operator, strategy, sizes, interior_first)

    def node_exchanges_s(self, node: Node) -> float:
        """The seconds of the collectives that a node starts, plus the seconds of the collectives inside its kernel."""
        collectives = (*([node.starts] if node.starts is not None else ()), *node.inside)
        return sum(
            self.costs.collective_s(collective.kind, collective.bytes, collective.axis) for collective in collectives
        )

    def times(self, operator: Operator) -> int:
        """How often a step runs the operator."""
        return 1 if operator.prologue else self.microbatches

    def _time_letter(self, operator: Operator, strategy: Strategy) -> str:
        """The letter of the batch factor that micro-batches divide; empty if the operator has no batch."""
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
        """The seconds to bring a tensor from placement ``have`` to placement ``want``, ``times`` times per step.

        The result is infinite if ``want`` has a Partial that ``have`` lacks. ``owned``: no other operator reads the
        tensor, so it may be overwritten. If a ``gradient`` only needs an all-reduce, its cost is a share of the
        all-reduce of a bucket. The gathers of parameters that ZeRO divides share buckets too, and so do the reductions
        of their gradients.
        """
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
            before, after = (
                self._bytes_of_part(tensor, move.before) // parts,
                self._bytes_of_part(tensor, move.after) // parts,
            )
            largest = max(before, after)
            shares = (gradient and move.kind == "all_reduce") or isinstance(move.placement, Flat)
            if shares and len(steps) == 1:
                bucket = max(largest, self.bucket_bytes)
                seconds += self.costs.collective_s(move.kind, bucket, move.axis) * largest / bucket
                continue
            seconds += self.costs.collective_s(move.kind, largest, move.axis)
            if move.kind == "all_reduce" and not owned:
                seconds += self.costs.copy_s(2 * before)
            inner = isinstance(move.placement, Shard) and (move.placement.dim > 0 or move.placement.outer > 1)
            if move.kind != "all_reduce" and inner:  # a copy puts the received parts in order
                seconds += self.costs.copy_s(2 * largest)
            if move.target is not None:  # a copy separates the parts
                seconds += self.costs.copy_s(2 * before)
            owned = True
        return seconds

    def update_s(self, tensor: Tensor, placements: Placements, optimizer: OptimizerCost) -> float:
        """The seconds of the update of a parameter by the optimizer."""
        return self.costs.update_s(part_bytes(tensor, placements, self.sizes), optimizer)

    def _bytes_of_part(self, tensor: Tensor, placements: Placements) -> int:
        """The bytes of the largest part of a tensor (``part_bytes``), computed once for equal tensors."""
        key = (tensor.shape, tensor.dtype, *placements.items())
        if key not in self._part_bytes:
            self._part_bytes[key] = part_bytes(tensor, placements, self.sizes)
        return self._part_bytes[key]
