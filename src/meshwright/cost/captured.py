"""A captured graph under a plan -> its ``Work``: what every action of every stage computes, communicates and keeps."""

from collections.abc import Sequence

import msgspec

from meshwright.cost.gradients import StageNodes
from meshwright.cost.liveness import highest, last_reads
from meshwright.cost.node import Node
from meshwright.cost.operators import Cost, Rates
from meshwright.cost.optimizer import SGD, OptimizerCost
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, Wait, Work
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import ITEM_BYTES, Graph
from meshwright.ir.plan import Plan
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.stages import BACKWARD, FINISH, FORWARD, PROLOGUE, REDUCE, Cut, cut

HEAP_FACTOR = 1.15
"""On a CPU: what glibc's heap takes from the system for what lives in it, because free pieces between live ones are too
small to be used again. Measured 1.06 to 1.3 on the cases of ``benchmarks/prediction.py``."""
HOST_S_PER_BYTE = 1 / 25e9
"""Between a device and its host's pinned memory: PCIe 4.0 with 16 lanes, of whose 31.5 GB/s copies reach about 25."""
CHUNK_BYTES = 2**26
"""Parameters that are stepped together where optimizer state lies on the host (``runtime/offload.py``)."""
CHECK_KERNELS = 3
"""Kernels that look whether the loss is finite."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one rank of a stage holds for the whole step. Where a step runs in one piece its gradients come and go
    with the activations, and are counted with those."""

    parameters_bytes: int
    gathered_bytes: int
    """Parameters that are stored in parts, or in another dtype, and whole from the first micro-batch to the last."""
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    inputs_bytes: int

    @property
    def persistent_bytes(self) -> int:
        """What stays between steps: gathered parameters go, and the memory in which gradients are summed up stays."""
        return self.total_bytes - self.gathered_bytes - self.inputs_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


def step_work(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer: OptimizerCost = SGD,
    clips: bool = False,
    threads: int = 1,
) -> Work:
    """The work of one training step of ``graph`` under ``plan`` on ``cluster``, whose devices have ``threads`` threads.

    A plan without a pipeline is one stage. On a CPU every rank moves the bytes of its collectives itself, so that they
    hide behind nothing: they block where they are awaited. Elsewhere they start as soon as there is something to send.

    Raises:
        PlanError: the graph cannot be cut as the plan says.
    """
    divided = cut(graph, plan.firsts)
    return Work(
        tuple(
            _Stage(graph, plan, divided, stage, cluster, optimizer, clips, threads).work()
            for stage in range(divided.num_stages)
        ),
        HEAP_FACTOR if cluster.device.kind == "cpu" else 1.0,
    )


def stage_held(graph: Graph, plan: Plan, stage: int, cluster: Cluster, optimizer: OptimizerCost = SGD) -> Held:
    """What ``held_bytes`` of a stage's work is made of."""
    return _Stage(graph, plan, cut(graph, plan.firsts), stage, cluster, optimizer, False, 1).held()


def stage_orders(graph: Graph, plan: Plan, stage: int, cluster: Cluster) -> dict[str, list[Node]]:
    """What a stage runs in which order: forward (``F``) and backward (``B``) of a micro-batch, and, by phase, what it
    does before all of them and what it reduces after."""
    one = _Stage(graph, plan, cut(graph, plan.firsts), stage, cluster, SGD, False, 1)
    return {phase: one.of(phase) for phase in (PROLOGUE, REDUCE)} | {
        "F": one.of(FORWARD),
        "B": one.late(one.of(BACKWARD)),
    }


class _Stage:
    def __init__(
        self, graph: Graph, plan: Plan, divided: Cut, stage: int, cluster: Cluster, optimizer: OptimizerCost,
        clips: bool, threads: int,
    ) -> None:  # fmt: skip
        at_once = max(1, min(plan.mesh.world_size, cluster.num_devices))
        self.rates = Rates(cluster.device.under(ranks=at_once, threads=threads))
        self.blocking = cluster.device.kind == "cpu"
        self.walk = StageNodes(graph, plan, divided, stage, self.rates)
        self.graph, self.plan, self.divided, self.stage = graph, plan, divided, stage
        self.optimizer, self.clips = optimizer, clips
        modules = {one.name: one.module for one in graph.operators}
        self.again = Recomputation(plan.stages[stage].recompute, modules)
        self.by_phase: dict[str, list[Node]] = {}
        self.readers: dict[Node, list[Node]] = {}
        for node in self.walk.nodes:
            self.by_phase.setdefault(node.phase, []).append(node)
            for source in node.inputs:
                self.readers.setdefault(source, []).append(node)
        self.repeated: dict[Node, bool] = {}

    def work(self) -> StageWork:
        forward = self.of(FORWARD)
        orders = {"F": forward, "B": self.late(self.of(BACKWARD))}
        if not self.walk.whole:
            inputs, weights = self._input_and_weight()
            orders |= {"I": self.late(inputs), "W": self.late(weights)}
        pieces = {kind: self._pieces(order, kind) for kind, order in orders.items()}
        pieces["REDUCE_GRAD"] = self._pieces(self.of(REDUCE), "reduce")
        saved = self._saved(orders["B"])
        return StageWork(
            pieces=pieces,
            before=self._before(),
            after=self._after(),
            sent_up_bytes=sum(self.walk.parts.num_bytes(name, self.walk.border(name)) for name in self.walk.up),
            sent_down_bytes=sum(self.walk.parts.num_bytes(name, self.walk.border(name)) for name in self.walk.down),
            saved_bytes=sum(saved.values()),
            held_bytes=self.held().total_bytes,
            workspace_bytes=self._workspace(orders["F"], orders["B"], saved),
        )

    def of(self, phase: str) -> list[Node]:
        return self.by_phase.get(phase, [])

    # --- what runs when ----------------------------------------------------------------------------------------------

    def late(self, nodes: list[Node]) -> list[Node]:
        """With forward nodes that are computed again, each before its first use, and every gradient added up as soon
        as it is made. Buckets that are reduced to parts start when their last gradient is made, and are waited for
        when the next one starts (``lower/partition.py``: order)."""
        inside, done, order = set(nodes), set[Node](), list[Node]()
        under_way: list[Node] = []

        def place(node: Node) -> None:
            if node in done or (node not in inside and not self._again(node)):
                return
            done.add(node)
            for source in node.inputs:
                place(source)
            order.append(node)
            for reader in self.readers.get(node, ()):
                if reader.accumulates:
                    place(reader)
                elif reader.joins and reader not in under_way and inside.intersection(reader.inputs) <= done:
                    while under_way:
                        place(under_way.pop())
                    under_way.append(reader)

        for node in nodes:
            place(node)
        return order

    def _again(self, node: Node) -> bool:
        """Whether backward computes a forward node again (``lower/partition.py``: _computed_again)."""
        if node.phase == FORWARD and node.released:
            return True
        if node.phase != FORWARD or node.returned or not self.again.holds(node.operator):
            return False
        if node not in self.repeated:
            self.repeated[node] = False
            if node.exchanges and (node.early or node.halo):
                self.repeated[node] = all(self._again(source) for source in node.inputs)
            elif self.again.whole_block(node.operator):
                block = self.again.block(node.operator)
                self.repeated[node] = all(
                    self.again.block(reader.operator) == block for reader in self.readers.get(node, ())
                )
            else:
                self.repeated[node] = True
        return self.repeated[node]

    def _input_and_weight(self) -> tuple[list[Node], list[Node]]:
        """Backward in two: what the gradients that are sent depend on, and the rest."""
        backward = self.of(BACKWARD)
        inside, needed = set(backward), set[Node]()
        pending = [self.walk.values[name].node for name in self.walk.down]
        pending += [node for name in self.walk.down for node in self.walk.values[name].versions.values()]
        while pending:
            node = pending.pop()
            if node in inside and node not in needed:
                needed.add(node)
                pending.extend(node.inputs)
        return [node for node in backward if node in needed], [node for node in backward if node not in needed]

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _pieces(self, order: Sequence[Node], what: str) -> tuple[Piece, ...]:
        """Kernels between collectives become one piece."""
        found: list[Piece] = []
        pending = Cost()
        place = {node: index for index, node in enumerate(order)}
        starts: dict[int, list[Node]] = {}
        ahead: set[Node] = set()
        if not self.blocking:
            arrived = joined = -1
            for node in order:
                ready = max((place.get(source, -1) for source in node.inputs), default=-1)
                if node.gathers:
                    ready, arrived = arrived, place[node]
                if node.joins and ready >= 0:  # one at a time
                    ready, joined = max(ready, joined), place[node]
                if node.early and node.exchanges and ready >= 0:
                    starts.setdefault(ready, []).append(node)
                    ahead.add(node)

        def flush() -> None:
            nonlocal pending
            if pending.seconds:
                found.append(Compute(what, pending.seconds, pending.flops, pending.bytes))
            pending = Cost()

        def communicate(node: Node, first: int, blocking: bool) -> None:
            if node.exchanges[first:]:
                flush()
            for one in node.exchanges[first : None if blocking else first + 1]:
                found.append(Communicate(one.what, one.kind, one.axis, one.bytes, blocking))  # type: ignore[arg-type]

        for index, node in enumerate(order):
            if node in ahead:
                flush()
                found.append(Wait(node.exchanges[0].what))
                communicate(node, 1, blocking=True)
            else:
                pending += node.cost
                communicate(node, 0, blocking=True)
            for waiting in starts.get(index, ()):
                pending += waiting.cost
                communicate(waiting, 0, blocking=False)
        flush()
        return tuple(found)

    def _before(self) -> tuple[Piece, ...]:
        zeroed = sum(self.walk.accumulators.values())
        found = list(self._pieces(self.of(PROLOGUE), "prologue"))
        if zeroed:
            cost = self.rates.stream("pointwise", zeroed, len(self.walk.accumulators))
            found.append(Compute("zeroing gradients", cost.seconds, 0.0, cost.bytes))
        return tuple(found)

    def _after(self) -> tuple[Piece, ...]:
        found = list(self._pieces(self.of(FINISH), "finish"))
        pipeline = self.plan.mesh.size("pp") if "pp" in self.plan.mesh.names else 1
        if pipeline > 1 and self.stage + pipeline >= self.divided.num_stages:  # once a rank, whatever its chunks
            for name in self.graph.parameters:
                owners = sorted({stage % pipeline for stage in self.divided.owners[name]})
                if name in self.divided.terms and len(owners) > 1 and self.stage % pipeline in owners:
                    size = self.walk.parts.num_bytes(name, self.plan.storage(name))
                    what = f"gradient of {name} of all stages"
                    found.append(Communicate(what, "all_reduce", "pp", size, members=tuple(owners)))
            found.append(Communicate("loss and metrics", "broadcast", "pp", 8 * (1 + len(self.graph.metrics))))
        parameters = [
            self.walk.parts.num_bytes(name, self.plan.storage(name))
            for name in self._owned(self.graph.parameters)
            if name in self._trained()
        ]
        cost = Cost(CHECK_KERNELS * self.rates.kernel_s)
        if self.graph.precision in ("bfloat16", "float16"):  # gradients are looked at, and unscaled
            for size in parameters:
                cost += self.rates.stream("update", 2 * size)
        if self.clips:
            for size in parameters:
                cost += self.rates.stream("reduction", size)
                cost += self.rates.stream("update", 2 * size)
        each = self.optimizer
        for size in parameters:
            for _ in range(each.kernels):
                cost += self.rates.stream("update", each.moved / each.kernels * size)
        if self._offloads:  # what moves both ways, less what hides behind the kernels
            moved = 2 * each.states * sum(parameters)
            cost += Cost(max(0.0, moved * HOST_S_PER_BYTE - cost.seconds), 0.0, moved)
        found.append(Compute("update", cost.seconds, cost.flops, cost.bytes))
        return tuple(found)

    # --- memory ------------------------------------------------------------------------------------------------------

    def held(self) -> Held:
        parts, storage = self.walk.parts, self.plan.storage
        parameters = sum(parts.num_bytes(name, storage(name)) for name in self._owned(self.graph.parameters))
        states = sum(
            parts.num_bytes(name, storage(name))
            for name in self._owned(self.graph.parameters)
            if name in self._trained()
        )
        pipeline = self.plan.mesh.size("pp") if "pp" in self.plan.mesh.names else 1
        # A rank has them once, whatever its chunks.
        inputs = [self.graph.tensors[name] for name in self.graph.inputs] if self.stage < pipeline else []
        return Held(
            parameters_bytes=parameters,
            gathered_bytes=sum(
                size
                for node in self.of(PROLOGUE)
                if node.gathers or node.operator in self.divided.casts
                for size in node.storages.values()
            ),
            gradients_bytes=sum(self.walk.accumulators.values()),
            optimizer_bytes=self._optimizer_bytes(states),
            buffers_bytes=sum(parts.num_bytes(name, {}) for name in self._owned(self.graph.buffers)),
            inputs_bytes=sum(one.num_elements * ITEM_BYTES[one.dtype] for one in inputs),
        )

    def _optimizer_bytes(self, trained_bytes: int) -> int:
        """Of its state, on the device: all, or, where it lies on the host, the chunk that is stepped and the next."""
        every = trained_bytes * self.optimizer.states
        if not self._offloads:
            return every
        largest = max((self.walk.parts.num_bytes(name, self.plan.storage(name)) for name in self._trained()), default=0)
        return min(every, 2 * max(CHUNK_BYTES, largest) * self.optimizer.states)

    @property
    def _offloads(self) -> bool:
        return self.plan.offload == "optimizer" and not self.blocking

    def _trained(self) -> set[str]:
        return {entry.parameter for entry in self.graph.gradients if entry.gradient is not None}

    def _owned(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.stage in self.divided.owners.get(name, (0,))]

    def _saved(self, backward: Sequence[Node]) -> dict[str, int]:
        """The memory, by storage, that a micro-batch's backward takes from its forward."""
        inside, sizes = set(backward), self._sizes()
        found: dict[str, int] = {}
        for node in backward:
            for source in node.inputs:
                if source not in inside and source.phase == FORWARD:
                    for storage in (*source.storages, *source.views):
                        if storage in sizes and self._read(node, source, storage):
                            found[storage] = sizes[storage]
        return found

    def _sizes(self) -> dict[str, int]:
        """The bytes of what forward makes, by storage."""
        return {key: size for node in self.of(FORWARD) for key, size in node.storages.items()}

    def _read(self, node: Node, source: Node, storage: str) -> bool:
        """Whether a node reads this of the several results of another."""
        if len(source.storages) + len(source.views) == 1:
            return True
        operator = self._operators.get(node.operator)
        if operator is None or node.early:
            return True
        return any(self.graph.tensors[name].storage == storage for name in operator)

    @property
    def _operators(self) -> dict[str, tuple[str, ...]]:
        if not hasattr(self, "_inputs_of"):
            self._inputs_of = {one.name: one.inputs for one in self.graph.operators}
        return self._inputs_of

    def _workspace(self, forward: Sequence[Node], backward: Sequence[Node], saved: dict[str, int]) -> int:
        """The most that one action needs beyond what is saved of all micro-batches under way."""
        total = sum(saved.values())
        kept = set(saved) | {key for node in forward if node.returned for key in node.storages}
        gradients = {key for node in backward if node.returned for key in (*node.storages, *node.views)}
        rising = highest(forward, {}, kept, last_reads(forward))
        falling = highest(backward, saved, gradients if self.walk.whole else set(), last_reads(backward))
        return max(0, rising - total, falling - total)
