"""The gradients of a stage, as nodes with costs: they fill buckets, are added up over micro-batches, and reduced."""

from meshwright.cost.node import Exchange, Node
from meshwright.cost.nodes import Walk
from meshwright.cost.operators import Cost, Rates
from meshwright.ir.graph import Graph
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import members
from meshwright.ir.placement import Flat, Placements
from meshwright.ir.plan import Bucket, Plan
from meshwright.ir.stages import BACKWARD, REDUCE, Cut

_WRITES_INTO = frozenset({"aten.mm", "aten.add", "aten.sum"})
"""Operators that compute a gradient where it is summed up, or in its bucket."""


class StageNodes(Walk):
    """Walks one stage, from its operators to its gradients."""

    def __init__(self, graph: Graph, plan: Plan, divided: Cut, stage: int, rates: Rates) -> None:
        super().__init__(graph, plan, divided, stage, rates)
        self._walk()

    def _walk(self) -> None:
        self._given()
        biased = self._fused_additions()
        results = (self.graph.loss, *self.graph.metrics.values()) if self.last else ()
        needed = self.graph.tensors if self.whole else results
        for operator in self.divided.operators(self.graph, self.stage, needed):
            self._operator(operator, operator.name in biased)
        self._borders()
        if self.whole:
            self._gradients_of_whole_step()
        else:
            self._gradients()
        if self.last:
            self._scalars()

    def _bucketed(self) -> dict[str, int]:
        return {
            parameter: index
            for index, bucket in enumerate(self.plan.buckets)
            if self._divides(bucket)
            for parameter in bucket.parameters
        }

    def _gradients_of_whole_step(self) -> None:
        """Buckets are filled while gradients are made; what else must be reduced is reduced one by one."""
        bucketed = self._bucketed()
        gradients = {entry.parameter: entry.gradient for entry in self.graph.gradients if entry.gradient is not None}
        for parameter, gradient in gradients.items():
            if parameter not in bucketed:
                self.values[gradient].node.returned = True
                want = self.parts.known(self.plan.storage(parameter))
                self._want(gradient, want, BACKWARD).returned = True
        for index, bucket in enumerate(self.plan.buckets):
            if not self._divides(bucket):
                continue
            if self._in_parts(bucket):
                self._reduced_to_parts(index, bucket, [self.values[gradients[one]].node for one in bucket.parameters])
                continue
            copied = 0
            for parameter in bucket.parameters:
                maker = self._maker(gradients[parameter])
                if maker is None or ".".join(maker.target.split(".")[:2]) not in _WRITES_INTO:
                    copied += 2 * self.parts.num_bytes(parameter, self.plan.storage(parameter))
            sources = [self.values[gradients[parameter]].node for parameter in bucket.parameters]
            for source in sources:
                source.returned = True
            cost = self.rates.stream("pointwise", copied)
            node = Node(f"bucket {index}", BACKWARD, "", cost, sources, early=True, reduces=index)
            node.exchanges += self._summed(bucket, node.what, bucket.num_bytes)
            node.returned = True
            self.nodes.append(node)

    def _divides(self, bucket: Bucket) -> bool:
        return self.sizes.keys() >= set(members(bucket.axis))

    def _summed(self, bucket: Bucket, what: str, num_bytes: int) -> list[Exchange]:
        axes = (bucket.axis, *bucket.across)
        return [Exchange(f"{what} over {axis}" if axis in bucket.across else what, "all_reduce", axis, num_bytes)
                for axis in axes]  # fmt: skip

    def _in_parts(self, bucket: Bucket) -> bool:
        return isinstance(self.plan.storage(bucket.parameters[0]).get(bucket.axis), Flat)

    def _reduced_to_parts(self, index: int, bucket: Bucket, sources: list[Node], phase: str = BACKWARD) -> Node:
        """A bucket that is reduced when its last gradient is made; parts of the sums stay."""
        node = Node(
            f"bucket {index}", phase, "", Cost(), sources, early=True, joins=True, reduces=index, returned=self.whole
        )
        node.exchanges.append(Exchange(node.what, "reduce_scatter", bucket.axis, bucket.num_bytes))
        part = bucket.num_bytes // self.sizes[bucket.axis]
        node.exchanges += [Exchange(f"{node.what} over {axis}", "all_reduce", axis, part) for axis in bucket.across]
        node.storages[node.what] = part
        self.nodes.append(node)
        return node

    def _gradients(self) -> None:
        """Every micro-batch adds to its parameters' totals, which are reduced once a step; or its gradients are
        reduced, and parts of them added up."""
        bucketed, waiting = self._bucketed(), dict[int, dict[str, Node]]()
        in_parts = self.plan.stages[self.stage].gradients
        for parameter, by_stage in self.divided.terms.items():
            terms = by_stage.get(self.stage)
            if not terms:
                continue
            storage = self.parts.known(self.plan.storage(parameter))
            own = self.values[terms[0]].placements
            placements = storage if len(terms) > 1 else {axis: one for axis, one in own.items() if axis != TIME}
            if parameter in in_parts:
                placements = storage
            total = self._bytes(self.graph.tensors[parameter].shape, self.graph.tensors[terms[0]].dtype, placements)
            self.accumulators[parameter] = total
            if parameter in in_parts and parameter in bucketed:
                waiting.setdefault(bucketed[parameter], {})[parameter] = self.values[terms[0]].node
                continue
            for name in terms:
                made = self.values[name].placements
                over_time = {TIME: made[TIME]} if TIME in made else {}
                source = self._want(name, {**placements, **over_time}, BACKWARD)
                maker = self._maker(name)
                product = maker is not None and maker.target.startswith("aten.mm.")
                cost = Cost() if product else self.rates.stream("pointwise", 3 * total)
                node = Node(f"{parameter} summed up", BACKWARD, "", cost, [source], returned=True, accumulates=True)
                self.nodes.append(node)
            if parameter not in bucketed:
                self._reduce(parameter, placements, storage)
        for index, makers in waiting.items():
            source = self._reduced_to_parts(index, self.plan.buckets[index], list(makers.values()))
            for parameter in makers:
                cost = self.rates.stream("pointwise", 3 * self.accumulators[parameter])
                node = Node(f"{parameter} summed up", BACKWARD, "", cost, [source], returned=True, accumulates=True)
                self.nodes.append(node)
        for index, bucket in enumerate(self.plan.buckets):
            held = [parameter for parameter in bucket.parameters if parameter in self.accumulators]
            if self._divides(bucket) and held and index not in waiting:
                if self._in_parts(bucket):
                    self._reduced_to_parts(index, bucket, [], REDUCE)
                    continue
                num_bytes = sum(self.accumulators[parameter] for parameter in held)
                node = Node(f"bucket {index}", REDUCE, "", Cost(), early=True, reduces=index)
                node.exchanges += self._summed(bucket, node.what, num_bytes)
                self.nodes.append(node)

    def _reduce(self, parameter: str, have: Placements, want: Placements) -> None:
        tensor = self.graph.tensors[parameter]
        node = Node(f"gradient of {parameter}", REDUCE, "", Cost(), early=True)
        for number, move in enumerate(self._moves(parameter, have, want)):
            if move.kind != "slice":
                size = max(self._bytes(tensor.shape, tensor.dtype, one) for one in (move.before, move.after))
                node.exchanges.append(Exchange(f"gradient of {parameter} #{number}", move.kind, move.axis, size))
        if node.exchanges:
            self.nodes.append(node)
