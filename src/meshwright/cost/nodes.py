"""What one rank runs for one stage, as nodes with costs: operators, and the collectives between their placements.

The walk is that of ``lower/spmd.py`` and ``lower/pipeline.py``, on sizes instead of tensors:

    prologue   once a step       what depends on no parameter
    forward    each micro-batch
    backward   each micro-batch  its gradients are added up where there are stages or micro-batches
    reduce     once a step       reductions of gradients
    finish     once a step       loss and metrics
"""

from dataclasses import dataclass, field
from math import prod

import msgspec

from meshwright.cost.decomposed import Decomposed, Fetch
from meshwright.cost.node import Exchange, Node, storage_readers
from meshwright.cost.operators import Cost, Parts, Rates, operator_cost
from meshwright.ir.graph import ITEM_BYTES, Graph, Operator
from meshwright.ir.kind import kind_of
from meshwright.ir.layout import TIME
from meshwright.ir.placement import Partial, Placements, Shard, local_shape, unflattened
from meshwright.ir.plan import Plan, Strategy
from meshwright.ir.resharding import Move, Mover
from meshwright.ir.stages import BACKWARD, FINISH, FORWARD, PROLOGUE, STEP, Cut, border, given_batch

_IN_PLACE = frozenset({
    "aten.add", "aten.sub", "aten.mul", "aten.div", "aten.exp", "aten.neg", "aten.gelu_backward", "aten.tanh_backward",
    "aten.sigmoid_backward", "aten.silu_backward", "aten.threshold_backward", "aten.scatter_add",
    "aten.relu", "meshwright.cross_entropy_backward",
})  # fmt: skip
"""Operators that write into an input that nobody reads again (``lower/fuse.py``: reuse_memory)."""


@dataclass
class _Value:
    node: Node
    placements: Placements
    phase: str
    storage: str
    versions: dict[tuple[tuple[str, object], ...], Node] = field(default_factory=dict)


class Walk:
    """Operators of one stage, and what brings their tensors together. ``nodes`` come in the order in which they run,
    all phases together; ``cost/gradients.py`` adds those of gradients."""

    def __init__(self, graph: Graph, plan: Plan, divided: Cut, stage: int, rates: Rates) -> None:
        self.graph, self.plan, self.divided, self.stage, self.rates = graph, plan, divided, stage, rates
        self.sizes = {axis: size for axis, size in plan.sizes(stage).items() if size > 1}
        self.mover = Mover({axis: size for axis, size in self.sizes.items() if axis != TIME}, plan.links)
        self.parts = Parts(graph, self.sizes)
        self.whole = plan.whole_step
        self.last = stage == divided.num_stages - 1
        self.nodes: list[Node] = []
        self.values: dict[str, _Value] = {}
        self.accumulators: dict[str, int] = {}
        self.gathered: dict[str, _Value] = {}
        self.gather_of = {
            name: bucket for bucket in plan.gathers if bucket.axis in self.sizes for name in bucket.parameters
        }
        self.up: list[str] = []
        self.down: list[str] = []
        self.strategies = {
            name: {axis: choice for axis, choice in strategy.items() if axis in self.sizes}
            for name, strategy in plan.strategies(graph).items()
        }
        self._producers = graph.producers()
        self._readers = storage_readers(graph)
        self._consumers = graph.consumers()
        self.decomposed = Decomposed(self.parts)
        self.halos: dict[tuple[object, ...], Node] = {}

    def _given(self) -> None:
        """What is there before the first operator."""
        for name, tensor in self.graph.tensors.items():
            if name in self._producers:
                continue
            placements = self.parts.known(self.plan.storage(name))
            if tensor.kind == "input":
                placements = given_batch(self.graph, name, self.sizes)
            self._put(name, placements, Node(name, STEP, "", Cost()), STEP)
        up, down = self.divided.received(self.stage)
        for names, phase in ((up, FORWARD), (down, BACKWARD)):
            for name in names:
                placements = self.border(name)
                node = Node(name, phase, "received", Cost(), storages={name: self.parts.num_bytes(name, placements)})
                self.nodes.append(node)
                self._put(name, placements, node, phase)

    def border(self, name: str) -> Placements:
        """How a tensor crosses borders."""
        maker = self._producers[name]
        strategy = self.strategies[maker.name]
        return self.parts.known(border(self.graph, name, maker, strategy, self.sizes, uneven=self.plan.uneven))

    def _put(self, name: str, placements: Placements, node: Node, phase: str) -> None:
        self.values[name] = _Value(node, placements, phase, self.graph.tensors[name].storage)

    def _phase_of(self, operator: Operator) -> str:
        if self.whole:
            return self.divided.phase_of(operator)
        return self.divided.phase_under(operator, self.plan.stages[self.stage].released)

    def _operator(self, operator: Operator, fused: bool) -> None:
        strategy, phase = self.strategies[operator.name], self._phase_of(operator)
        inputs = [
            self._want(name, self.parts.wanted(operator, strategy, position), phase)
            for position, name in enumerate(operator.inputs)
        ]
        cost = operator_cost(self.parts, self.rates, operator, strategy)
        if fused:  # addmm writes the bias first, and adds the product to it
            made = self.parts.num_bytes(operator.outputs[0], self.parts.made(operator, strategy, 0))
            cost = self.rates.stream("pointwise", made)
        base = ".".join(operator.target.split(".")[:2])
        scratch = self._scratch_bytes(operator, strategy) if self.rates.device.kind == "cpu" else 0
        node = Node(
            operator.name, phase, operator.name, cost, inputs, in_place=base in _IN_PLACE, scratch_bytes=scratch
        )
        inside = self.decomposed.of(operator, strategy)
        for one in inside.fetched:
            node.inputs.append(self._fetched(operator, inputs[one.operand], one, phase))
        node.exchanges += inside.exchanges
        copied = inside.copied_bytes
        if copied and self.plan.computes_interior_first(operator.name):
            copied -= copied // (len(inside.fetched) or len(inside.exchanges))
            if inside.fetched:
                self._interior(node)
        node.cost += self.rates.stream("copy", 2 * copied)
        node.scratch_bytes += copied
        self.nodes.append(node)
        for index, name in enumerate(operator.outputs):
            if name not in self.graph.tensors:
                continue
            placements = self.parts.made(operator, strategy, index)
            storage = self.graph.tensors[name].storage
            if storage == name:
                node.storages[name] = self.parts.num_bytes(name, placements)
            else:
                node.views.append(storage)
            self._put(name, placements, node, phase)
        same = not node.storages or base == "aten._to_copy"
        node.released = same and bool(node.inputs) and all(source.released for source in node.inputs)

    def _interior(self, node: Node) -> None:
        """What an operator computes while its last halo travels, as a node of its own; borders are small kernels."""
        halo = node.inputs[-1]
        halo.early = True
        inside = Node(f"{node.what} interior", node.phase, node.operator, node.cost, node.inputs[:-1])
        self.nodes.append(inside)
        node.inputs.append(inside)
        node.cost = Cost(6 * self.rates.kernel_s)

    def _fetched(self, operator: Operator, value: Node, fetch: Fetch, phase: str) -> Node:
        """The rows of neighbours, which are kept for whoever reads them too."""
        key = (value, *fetch.key)
        if key not in self.halos:
            node = Node(f"{fetch.exchange.what}", phase, operator.name, Cost(), [value], [fetch.exchange], halo=True)
            node.storages[f"{operator.name} {fetch.exchange.what}"] = fetch.num_bytes
            self.nodes.append(node)
            self.halos[key] = node
        return self.halos[key]

    def _scratch_bytes(self, operator: Operator, strategy: Strategy) -> int:
        """oneDNN convolutions copy images in blocks of channels: one of them, for the weights' gradient both."""
        kind = kind_of(operator)
        if not kind.startswith("convolution"):
            return 0
        sizes = sorted(
            self.parts.num_bytes(name, self.parts.wanted(operator, strategy, position))
            for position, name in enumerate(operator.inputs)
        )
        return sum(sizes[-2:]) if kind == "convolution_weight" else sizes[-1]

    def _fused_additions(self) -> set[str]:
        """Additions of a bias that become part of the product before them."""
        found = set()
        for operator in self.graph.operators:
            if not operator.target.startswith("aten.add.Tensor") or len(operator.inputs) != 2:
                continue
            for name, other in (operator.inputs, operator.inputs[::-1]):
                root = self._product_behind(name)
                vector = len(self.graph.tensors[other].shape) == 1
                if root is None or not vector or len(self._consumers.get(name, ())) != 1:
                    continue
                made = self.parts.made(root, self.strategies[root.name], 0)
                if not any(isinstance(one, Partial) for axis, one in made.items() if axis != TIME):
                    found.add(operator.name)
        return found

    def _maker(self, name: str) -> Operator | None:
        """What computes a tensor, behind its views."""
        maker = self._producers.get(name)
        while maker is not None and maker.bytes == 0 and maker.inputs:
            maker = self._producers.get(maker.inputs[0])
        return maker

    def _product_behind(self, name: str) -> Operator | None:
        maker = self._producers.get(name)
        return maker if maker is not None and kind_of(maker) == "matmul" else None

    # --- placements --------------------------------------------------------------------------------------------------

    def _want(self, name: str, wanted: Placements, phase: str) -> Node:
        """The node that gives a value as it is wanted; what resharding costs is a node of its own."""
        value = self._gathered(name, phase) if name in self.gather_of else self.values[name]
        stepwise = value.phase in (STEP, PROLOGUE)
        if stepwise:  # whole in time: parts of it are views
            wanted = {axis: one for axis, one in wanted.items() if axis != TIME}
        have = {axis: one for axis, one in value.placements.items() if not (stepwise and axis == TIME)}
        steps = self._moves(name, have, wanted)
        if not steps:
            return value.node
        key = tuple(sorted(wanted.items()))
        if key not in value.versions:
            value.versions[key] = self._reshard(name, value, steps, PROLOGUE if stepwise else phase)
        return value.versions[key]

    def _gathered(self, name: str, phase: str) -> _Value:
        """A parameter that was gathered with its bucket: before its first use, or once for all micro-batches."""
        if name not in self.gathered:
            bucket = self.gather_of[name]
            again = any(one in self.plan.stages[self.stage].released for one in bucket.parameters)
            phase = phase if self.whole or again else PROLOGUE
            number = self.plan.gathers.index(bucket)
            node = Node(f"gather {number}", phase, "", Cost(), early=True, gathers=True, released=again)
            node.exchanges.append(Exchange(node.what, "all_gather", bucket.axis, bucket.num_bytes))
            self.nodes.append(node)
            for one in bucket.parameters:
                placements = unflattened(self.values[one].placements)
                node.storages[one] = self.parts.num_bytes(one, placements)
                self.gathered[one] = _Value(node, placements, STEP, one)
        return self.gathered[name]

    def _moves(self, name: str, have: Placements, want: Placements) -> list[Move]:
        """What brings a tensor from one placement to another; what micro-batches have of it, all of them cut alike."""
        tensor = self.graph.tensors[name]
        over_time = {TIME: have[TIME]} if TIME in have else {}
        shape = local_shape(tensor.shape, over_time, self.sizes)
        found = self.mover.moves(have, want, shape, ITEM_BYTES[tensor.dtype])
        replace = msgspec.structs.replace
        return [replace(one, before=one.before | over_time, after=one.after | over_time) for one in found]

    def _reshard(self, name: str, value: _Value, steps: list[Move], phase: str) -> Node:
        node = Node(f"{name} resharded", phase, value.node.operator, Cost(), [value.node], early=True)
        owned = self._readers.get(value.storage, 0) <= 1 and value.phase != STEP and not value.versions
        tensor = self.graph.tensors[name]
        stream = self.rates.stream
        fresh = 0
        for number, move in enumerate(steps):
            before, after = (self._bytes(tensor.shape, tensor.dtype, one) for one in (move.before, move.after))
            what = f"{name} to {move.axis} #{number}"
            if move.kind == "slice":
                continue
            node.exchanges.append(Exchange(what, move.kind, move.axis, max(before, after)))
            if move.kind == "all_reduce" and not owned:
                node.cost += stream("copy", 2 * before)
            inner = isinstance(move.placement, Shard) and (move.placement.dim > 0 or move.placement.outer > 1)
            if move.kind != "all_reduce" and inner:  # parts are put in order
                node.cost += stream("copy", 2 * max(before, after))
            if move.target is not None:  # and taken apart
                node.cost += stream("copy", 2 * before)
            if move.kind != "all_reduce" or not owned:
                fresh = after
            owned = True
        if fresh:
            node.storages[f"{name} resharded"] = fresh
        else:
            node.views.append(value.storage)
        self.nodes.append(node)
        return node

    def _bytes(self, shape: tuple[int, ...], dtype: str, placements: Placements) -> int:
        return prod(local_shape(shape, self.parts.known(placements), self.sizes)) * ITEM_BYTES[dtype]

    # --- borders, scalars ---------------------------------------------------------------------------------------------

    def _borders(self) -> None:
        up, down = self.divided.sent(self.stage)
        for names, phase, found in ((up, FORWARD, self.up), (down, BACKWARD, self.down)):
            for name in names:
                self._want(name, self.border(name), phase).returned = phase == BACKWARD
                found.append(name)

    def _scalars(self) -> None:
        """Loss and metrics, reduced over the mesh."""
        phase = BACKWARD if self.whole else FINISH
        for label, name in (("loss", self.graph.loss), *self.graph.metrics.items()):
            value = self.values[name]
            if value.phase in (STEP, PROLOGUE):
                self._want(name, {}, phase)
                continue
            have = {axis: one for axis, one in value.placements.items() if axis != TIME}
            item = ITEM_BYTES[self.graph.tensors[name].dtype]
            node = Node(label, phase, "", Cost(), returned=True)
            for number, move in enumerate(self._moves(name, have, {})):
                node.exchanges.append(Exchange(f"{label} #{number}", move.kind, move.axis, item))
            if node.exchanges:
                self.nodes.append(node)
