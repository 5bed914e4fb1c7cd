"""The ``StepWork`` of a step from its lowered programs: compute, communication and memory of every action."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

import msgspec

from meshwright.cost.closed_form import collective_s
from meshwright.cost.coded import CodecCosts
from meshwright.cost.collective import Network
from meshwright.cost.crossing import NOTHING, Crossing, received
from meshwright.cost.fabric import axis_group
from meshwright.cost.graphs import GraphBytes, graph_bytes
from meshwright.cost.kernels import Cost
from meshwright.cost.lifetimes import lifetimes, sizes_of
from meshwright.cost.node_costs import NodeCosts, communicated, moved_by_rank, of_parameters
from meshwright.cost.optimizer import SGD, OptimizerCost
from meshwright.cost.scratch import symmetric_bytes
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait, launched
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import codec_of
from meshwright.ir.layout import DATA_AXES
from meshwright.ir.mesh import members
from meshwright.ir.part import stage_cluster
from meshwright.ir.placement import Shard
from meshwright.ir.plan import Plan
from meshwright.ir.program import Accumulator, Collective, Held, Node, Program, Transfer
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import CAPTURED, FINISH, PHASE_OF, PROLOGUE
from meshwright.schedules.pipeline import schedule_of

HOST_S_PER_BYTE = 1 / 25e9
"""Seconds per byte copied between device and pinned host memory: copies reach about 25 GB/s of the 31.5 GB/s of PCIe
4.0 x16."""
CHUNK_BYTES = 2**26
"""Bytes of parameters that are updated together if optimizer state is kept on the host (``runtime/offload.py``)."""
ZEROING = "zeroing gradients"
"""The name of the piece that sets the memory of gradients to zero before a step."""
GRAPH_LAUNCHES = 4
"""Launches of a phase that is a graph: the graph, and copies of values into its memory and out of it."""
CHECK_KERNELS = 3
"""Number of kernels that check whether the loss is finite."""


class HeldBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one rank of a stage holds for the whole step. If a step runs as one function, gradients and gathered
    parameters have shorter lives: they are counted with the activations."""

    parameters_bytes: int
    gathered_bytes: int
    """Whole copies of parameters that are stored in parts or in another dtype. They live until the last micro-batch."""
    prologue_bytes: int
    """Other values that are computed once for all micro-batches: masks, positions, counts of labels."""
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    codecs_bytes: int = 0
    """Residuals, momenta and factors of codecs."""
    shared_bytes: int = 0
    """Memory that other devices reach, for products in pieces."""

    @property
    def persistent_bytes(self) -> int:
        """Bytes that stay between steps, including the memory in which gradients accumulate."""
        return self.total_bytes - self.gathered_bytes - self.prologue_bytes - self.inputs_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


def step_work(
    programs: Sequence[Program],
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer: OptimizerCost = SGD,
    clips: bool = False,
    threads: int = 1,
    num_ranks: int = 0,
) -> StepWork:
    """The work of one training step of ``plan`` on ``cluster``. ``programs`` are the programs to which the plan was
    lowered. ``threads`` is the number of threads of each rank. ``num_ranks`` is the number of ranks that work at the
    same time (0: the ranks of the plan).

    On a CPU every rank moves the bytes of its collectives itself. Collectives then do not overlap with compute: the
    rank blocks where it waits for a collective. Only shifts between boxes overlap. On other devices, a collective
    overlaps with the kernels between its start and its wait.
    """
    stages = [_Stage(programs, program, plan, cluster, optimizer, clips, threads, num_ranks) for program in programs]
    heap_factor = cluster.software.heap if cluster.device.kind == "cpu" else 1.0
    return StepWork(tuple(stage.work() for stage in stages), heap_factor)


def stage_held(
    programs: Sequence[Program], plan: Plan, stage: int, cluster: Cluster, optimizer: OptimizerCost = SGD
) -> HeldBytes:
    """The bytes that a stage keeps during a step, by kind: parameters, gradients, optimizer state, ..."""
    return _Stage(programs, programs[stage], plan, cluster, optimizer, False, 1).held()


class _Stage:
    def __init__(
        self, programs: Sequence[Program], program: Program, plan: Plan, cluster: Cluster, optimizer: OptimizerCost,
        clips: bool, threads: int, num_ranks: int = 0,
    ) -> None:  # fmt: skip
        self.programs, self.program, self.plan = programs, program, plan
        self.pipeline = plan.pipeline
        cluster = stage_cluster(cluster, plan.mesh, self.pipeline.rank_of(program.stage))
        self.costs, self.network = NodeCosts(plan.mesh, cluster, threads, num_ranks), Network(cluster)
        self.codecs = CodecCosts(cluster)
        self.blocking = cluster.device.kind == "cpu"
        self.graphs = plan.graphs and not self.blocking
        self.mesh = plan.submesh(program.stage) if plan.uneven else plan.mesh
        self.optimizer, self.clips = optimizer, clips
        self.trained = {name for other in programs for name in other.gradients}
        self.begun: dict[str, tuple[str, Collective]] = {}
        self.labels: Counter[str] = Counter()
        self.sizes = sizes_of(program)

    def work(self) -> StageWork:
        program, held = self.program, self.held()
        before = self._before()
        pieces = {kind.value: self._pieces(self._nodes(phase), phase) for kind, phase in PHASE_OF.items()}
        self._add_coding(pieces)
        self._add_gathers(pieces)
        memory = lifetimes(program, on_cpu=self.blocking, joined_bytes=self._joined_bytes())
        passing = held.gathered_bytes + held.prologue_bytes
        graphs = GraphBytes(0, 0, memory.actions)
        if self.graphs:
            actions = schedule_of(self.plan).ranks[self.pipeline.rank_of(program.stage)].actions
            kinds = {action.kind.value for action in actions}
            graphs = graph_bytes(program, memory, passing, kinds)
        return StageWork(
            pieces={kind: launched(action) for kind, action in pieces.items()},
            before=before,
            after=self._after(),
            sent_up_bytes=self._received(program.stage + 1, ActionKind.RECV_F).sent_bytes,
            sent_down_bytes=self._received(program.stage - 1, ActionKind.RECV_B).sent_bytes,
            saved_bytes=memory.saved_bytes,
            held_bytes=held.total_bytes,
            workspace_bytes=memory.workspace_bytes,
            passing_bytes=0 if self.graphs else passing,
            inputs_bytes=held.inputs_bytes,
            actions=graphs.actions,
            slot_bytes=graphs.slot_bytes,
            more_bytes=graphs.more_bytes,
        )

    def _received(self, stage: int, receives: ActionKind) -> Crossing:
        """What a stage receives; nothing if there is no such stage."""
        return received(self.programs, self.plan, stage, receives) if 0 <= stage < len(self.programs) else NOTHING

    def _add_gathers(self, pieces: dict[str, list[Piece]]) -> None:
        """Put the gathers of received values before the actions that read these values."""
        for kinds, receives in (("F", ActionKind.RECV_F), ("BI", ActionKind.RECV_B)):
            gathers = self._received(self.program.stage, receives).gathers
            for kind in kinds:
                if kind in pieces:
                    pieces[kind][:0] = gathers

    def _add_coding(self, pieces: dict[str, list[Piece]]) -> None:
        """Add the seconds to encode values that leave the stage, and to decode values that arrive."""
        if not self.plan.border_codec:
            return
        encode, decode = self.codecs.seconds_per_byte(codec_of(self.plan.border_codec))
        for kinds, sends, receives in (
            ((ActionKind.F,), ActionKind.SEND_F, ActionKind.RECV_F),
            ((ActionKind.B, ActionKind.I), ActionKind.SEND_B, ActionKind.RECV_B),
        ):
            seconds = sum(
                per_byte * transfer.value.num_bytes
                for kind, per_byte in ((sends, encode), (receives, decode))
                for transfer in self.program.crossing(kind)
                if transfer.codec
            )
            for kind in (kind for kind in kinds if kind.value in pieces and seconds):
                pieces[kind.value].append(Compute("coding", seconds))

    def _nodes(self, phase: str) -> tuple[Node, ...]:
        return self.program.phase(phase).nodes

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _pieces(self, nodes: Sequence[Node], what: str) -> list[Piece]:
        """The pieces of a list of nodes. Kernels between two collectives are joined into one piece. Views between two
        collectives take a GPU no time; their launches count for the kernels that follow. The host launches the kernels
        of a phase that is a graph at once."""
        pieces: list[Piece] = []
        pending: list[Node] = []
        launches = float(GRAPH_LAUNCHES)

        def flush(*, last: bool = False) -> None:
            nonlocal launches
            cost = self.costs.of(pending)
            if not cost.seconds and not (last and cost.launches):
                return
            if self.graphs and what in CAPTURED:
                cost = msgspec.structs.replace(cost, launches=launches)
            pieces.append(self.costs.piece(what, cost))
            launches = 0.0
            pending.clear()

        for node in nodes:
            pending.append(node)
            for collective in node.inside:
                flush()
                pieces.append(self._communicate(self._name(collective), collective, True))
            if node.starts is not None:
                if node.name not in self.begun:  # both forms of backward start the same collectives
                    self.begun[node.name] = self._name(node.starts), node.starts
                if not self._blocks(node.starts):
                    flush()
                    pieces.append(self._communicate(*self.begun[node.name], False))
            if node.waits:
                flush()
                name, collective = self.begun[node.waits]
                if self._blocks(collective):
                    pieces.append(self._communicate(name, collective, True))
                elif pieces and isinstance(last := pieces[-1], Communicate) and last.what == name:
                    pieces[-1] = self._communicate(name, collective, True)
                else:
                    pieces.append(Wait(name))
        flush(last=True)
        return pieces

    def _blocks(self, collective: Collective) -> bool:
        """Whether the rank itself moves the bytes of a collective, in its wait."""
        if collective.kind != "shift":
            return self.blocking
        return moved_by_rank(collective, self.network, axis_group(self.mesh, collective.axis))

    def _name(self, collective: Collective) -> str:
        """A unique name for a collective of the stage."""
        self.labels[collective.label] += 1
        return (
            f"{collective.label} #{self.labels[collective.label]}"
            if self.labels[collective.label] > 1
            else collective.label
        )

    def _communicate(self, what: str, collective: Collective, blocking: bool) -> Communicate:
        """The piece for a collective. Over dp, the host is assumed to stop launching kernels, because layers of layouts
        that differ in dp share prices."""
        piece = communicated(what, collective, blocking)
        if not blocking or not self.costs.launch_s or set(DATA_AXES) & set(members(piece.axis)):
            return piece
        return msgspec.structs.replace(piece, ahead_s=collective_s(piece, self.mesh, self.network))

    def _before(self) -> tuple[Piece, ...]:
        pieces = self._pieces(self._nodes(PROLOGUE), PROLOGUE)
        program = self.program
        memory = (*program.buckets, *(gradient.value for gradient in program.accumulators if gradient.value.owns))
        zeroed = [value.num_bytes for value in memory]
        if zeroed:
            cost = self.costs.rates.memory_bound("pointwise", sum(zeroed), len(zeroed))
            pieces.append(self.costs.piece(ZEROING, cost))
        return launched(pieces)

    def _after(self) -> tuple[Piece, ...]:
        pieces = self._pieces(self._nodes(FINISH), FINISH)
        stage, count = self.program.stage, self.pipeline.num_ranks
        if count > 1 and stage + count >= len(self.programs):  # once per rank, not once per chunk
            for name, owners in self._owners().items():
                if len(owners) > 1 and self.pipeline.rank_of(stage) in owners:
                    size = next(held.bytes for other in self.programs for held in other.parameters if held.name == name)
                    what = f"gradient of {name} of all stages"
                    pieces.append(Communicate(what, "all_reduce", "pp", size, members=owners))
            pieces.append(Communicate("loss and metrics", "broadcast", "pp", 8 * len(self.programs[-1].scalars)))
        pieces.append(self.costs.piece("update", self._update()))
        return launched(pieces)

    def _owners(self) -> dict[str, tuple[int, ...]]:
        """The pipeline ranks that hold each trained parameter."""
        owners: dict[str, set[int]] = {}
        for program in self.programs:
            for parameter in program.parameters:
                if parameter.name in self.trained:
                    owners.setdefault(parameter.name, set()).add(self.pipeline.rank_of(program.stage))
        return {name: tuple(sorted(ranks)) for name, ranks in owners.items()}

    def _update(self) -> Cost:
        """The cost of checking the loss, of clipping, and of the optimizer. Each pass is launched once for all
        parameters (PyTorch's ``foreach``), but the time of its kernels is counted separately for each parameter. The
        fused kernel of a GPU takes all parameters together."""
        rates, on_cpu = self.costs.rates, self.blocking
        parameters = [parameter.bytes for parameter in self.program.parameters if parameter.name in self.trained]
        # On GPUs, checks count as launches alone: the seconds of layers' updates are added, the launches are not.
        cost = Cost(CHECK_KERNELS * rates.kernel_s if on_cpu else 0.0)
        checked, fused = self.plan.precision in ("bfloat16", "float16"), self.optimizer.fused_moved and not on_cpu
        if checked and fused and self.plan.precision == "bfloat16":  # the device reads gradients, and skips the update
            cost += rates.memory_bound("update", sum(parameters), kernels=0)
        elif checked:  # gradients are unscaled in place
            for size in parameters:
                cost += rates.memory_bound("update", 2 * size)
        if self.clips:
            for size in parameters:
                cost += rates.memory_bound("reduction", size)
                cost += rates.memory_bound("update", 2 * size)
        moved, passes = self.optimizer.passes(on_cpu=on_cpu)
        if fused:  # once for the parameters of all layers, whose costs may be added
            cost += rates.memory_bound("update", moved * sum(parameters), kernels=0)
        else:
            for size in parameters:
                for _ in range(passes):
                    cost += rates.memory_bound("update", moved * size)
        if self._offloads:  # state moves to the device and back; only time beyond the kernels' time counts
            state_bytes = 2 * self.optimizer.states * sum(parameters)
            cost += Cost(max(0.0, state_bytes * HOST_S_PER_BYTE - cost.seconds), 0.0, state_bytes)
        checks = CHECK_KERNELS + checked + 2 * self.clips
        return msgspec.structs.replace(cost, launches=checks + passes)

    # --- memory ------------------------------------------------------------------------------------------------------

    def held(self) -> HeldBytes:
        program = self.program
        once = set() if program.together else set(program.phase(PROLOGUE).outputs)
        derived = {value.name for node in of_parameters(program) for value in node.outputs}
        kept = {value.storage: value.name for node in self._nodes(PROLOGUE) for value in node.outputs
                if value.name in once}  # fmt: skip
        whole = {storage for storage, name in kept.items() if name in derived}
        return HeldBytes(
            parameters_bytes=sum(parameter.bytes for parameter in self._own_parameters()),
            gathered_bytes=sum(self.sizes[storage] for storage in whole),
            prologue_bytes=sum(self.sizes[storage] for storage in kept.keys() - whole),
            gradients_bytes=_num_bytes(program.accumulators),
            codecs_bytes=sum(state.num_bytes for state in program.codec_states),
            shared_bytes=symmetric_bytes(node for phase in program.phases for node in phase.nodes),
            optimizer_bytes=self._optimizer_bytes(),
            buffers_bytes=sum(buffer.bytes for buffer in program.buffers),
            # A rank holds these once, not once per chunk.
            inputs_bytes=sum(map(self._input_bytes, program.inputs)) if program.stage < self.pipeline.num_ranks else 0,
        )

    def _own_parameters(self) -> list[Held]:
        """The parameters of the stage, without those that an earlier stage of the same rank holds."""
        rank, stage = self.pipeline.rank_of(self.program.stage), self.program.stage
        earlier = (other for other in self.programs[:stage] if self.pipeline.rank_of(other.stage) == rank)
        known = {held.name for other in earlier for held in other.parameters}
        return [held for held in self.program.parameters if held.name not in known]

    def _input_bytes(self, held: Held) -> int:
        """The bytes of an input of the step on this rank. On a CPU it is a view of the whole batch, which the caller
        holds; other devices get a copy of this rank's part."""
        if self.blocking:
            return held.bytes
        sizes = self.plan.submesh(self.program.stage).sizes if self.plan.uneven else self.plan.mesh.sizes
        placements = self.program.input_placements.get(held.name, {})
        parts = prod(sizes.get(axis, 1) for axis, placement in placements.items() if isinstance(placement, Shard))
        return -(-held.bytes // parts)

    def _joined_bytes(self) -> int:
        """The bytes that the sum of a tied parameter's gradients over stages needs: the terms of the other stages."""
        rank = self.pipeline.rank_of(self.program.stage)
        own = {held.name: held.bytes for held in self.program.parameters}
        terms = ((len(ranks) - 1) * own[name] for name, ranks in self._owners().items()
                 if name in own and rank in ranks)  # fmt: skip
        return max(terms, default=0) if self.pipeline.num_ranks > 1 else 0

    def _optimizer_bytes(self) -> int:
        """Bytes of optimizer state on the device. If the state is kept on the host, two chunks of it are on the
        device."""
        trained = [parameter.bytes for parameter in self._own_parameters() if parameter.name in self.trained]
        state_bytes = sum(trained) * self.optimizer.states
        if not self._offloads:
            return state_bytes
        return min(state_bytes, 2 * max(CHUNK_BYTES, *trained, 0) * self.optimizer.states)

    @property
    def _offloads(self) -> bool:
        return self.plan.offload == "optimizer" and not self.blocking


def _num_bytes(holders: Iterable[Transfer | Accumulator]) -> int:
    return sum(holder.value.num_bytes for holder in holders)
