"""Make the plan of a layout: its stages, and the factors that rules or the integer program split in every operator."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from meshwright.catalog import load_cluster
from meshwright.cost.collective import Network
from meshwright.cost.occupancy import box_of, num_peers, room_of
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError, refuse
from meshwright.ir.algorithm_times import AlgorithmTimes
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import DATA_AXES, FEATURE_AXES, TIME, Layout
from meshwright.ir.part import part_of
from meshwright.ir.placement import Placement
from meshwright.ir.plan import Note, Plan, Stage, Strategy, starred
from meshwright.ir.program import Lower
from meshwright.ir.resharding import Mover
from meshwright.ir.stages import Cut, cut
from meshwright.planner import convolutions, derive
from meshwright.planner.ahead import follow_ahead, look_ahead
from meshwright.planner.algorithms import algorithms_of, experts_algorithms, links_of
from meshwright.planner.bucket_size import fit_buckets
from meshwright.planner.buckets import BUCKET_BYTES, filled, gathered_members, reduced_members
from meshwright.planner.checks import batch_problems, check_microbatches, check_precision
from meshwright.planner.codecs import FACTORS, NONE, BucketCodecs, codec_problems, follow_codings, undecided
from meshwright.planner.cut import between_sizes, choose_cut, follow_cut
from meshwright.planner.factor_choice import better_by_factors, gather_factors
from meshwright.planner.factors import FactorChoices, require_heads
from meshwright.planner.follow import follow_storage, inherit
from meshwright.planner.intra_op.assign import Assigned, Chosen, assign
from meshwright.planner.intra_op.costs import CostModel
from meshwright.planner.intra_op.explain import notes_of
from meshwright.planner.join_plans import alike_ranks, join_plans
from meshwright.planner.notes import ModuleNotes, module_notes, unsplit_notes
from meshwright.planner.pieces import with_pieces
from meshwright.planner.pins import read_pins
from meshwright.planner.receivers import follow_receivers, with_receivers
from meshwright.planner.sequence_rule import sequences_between, split_attention, split_experts, split_sequence
from meshwright.planner.spatial_rule import SpatialRule
from meshwright.planner.tensor_rule import TensorRule
from meshwright.schedules.pipeline import build


@dataclass(frozen=True)
class Ask:
    """Options of the planner.

    ``explains``: note what other strategies would cost. ``memory_bytes``: the memory limit of a rank that the integer
    program must respect. ``whole``: parameters that must not be split. ``by_rule``: split ``tp`` by the explicit rule
    of Megatron-LM (``tensor_rule``) instead of by the integer program, for comparisons. ``fits_buckets``: choose bucket
    sizes by their cost, instead of using ``BUCKET_BYTES``. ``room_bytes``: the memory limit of a rank while bucket
    sizes are chosen (default: the device's memory). ``known`` caches solutions of the integer program. ``learned`` has
    solutions that other processes found; these cannot be explained. ``firsts``: the first operators of all stages
    except the first stage (None: ``choose_cut`` chooses the cut). ``recompute``: the kind of recomputation of each
    stage, if stages differ. ``alike`` maps a layout to the layout whose strategies it uses. ``costs``: the cost model
    of the integer program. ``parameter_bytes``: the limit on the parameters that a rank stores between steps, which the
    integer program must respect. ``factors``: as ``codec="factors"``. ``times``: measured times of the algorithms of
    convolutions. ``receives``: choose the ranks that receive together. ``lower`` makes programs. Their costs decide
    strategies, bucket sizes, and which convolutions compute their interior rows first."""

    explains: bool = True
    memory_bytes: float | None = None
    whole: frozenset[str] = frozenset()
    optimizer: OptimizerCost = ADAMW
    by_rule: bool = False
    room_bytes: float | None = None
    lower: Lower | None = None
    fits_buckets: bool = True
    firsts: tuple[str, ...] | None = None
    recompute: tuple[str, ...] = ()
    alike: Callable[[Layout], Layout] | None = None
    costs: CostModel | None = None
    parameter_bytes: float | None = None
    factors: bool = False
    receives: bool = True
    times: AlgorithmTimes | None = None
    known: dict[tuple[object, ...], Assigned] = field(default_factory=dict)
    learned: dict[tuple[object, ...], Chosen] = field(default_factory=dict)


def plan_layout(
    graph: Graph, layout: Layout, *, world_size: int, cluster: Cluster | None = None, ask: Ask | None = None
) -> Plan:
    """Make the plan of ``layout`` for ``graph`` on ``world_size`` ranks.

    Raises:
        LayoutError: the layout does not fit the number of ranks, the batch, the attention heads or the points where the
            graph can be cut; or its ``pin`` names unknown modules.
        ScheduleError: the schedule is not defined for this number of micro-batches.
    """
    check_precision(layout.precision, graph, cluster)
    plan = _planned(graph, layout.resolved(world_size), cluster, None, ask := ask or Ask())
    return with_receivers(plan, graph, cluster) if cluster is not None and ask.receives else plan


def adapt_plan(plan: Plan, graph: Graph) -> Plan:
    """Adapt ``plan`` to another capture of the same model, such as a smaller last batch or an evaluation.

    The storage of parameters stays the same. Operators that the plan names keep their strategies, as far as the sizes
    in the new capture allow.

    Raises:
        LayoutError: the new batch is too small for dp, does not divide into the micro-batches, or does not use a module
            at which a stage begins.
    """
    layout = plan.layout
    parts = layout.microbatches * math.lcm(layout.data_ranks, *(axes.get("dp", 1) for axes in layout.stage_sizes))
    if not graph.gradients and graph.batch_size % parts:  # an evaluation of an incomplete last batch
        layout = msgspec.structs.replace(layout, microbatches=1)
    return follow_receivers(_planned(graph, layout, None, plan, Ask()), plan, graph)


def _planned(graph: Graph, layout: Layout, cluster: Cluster | None, base: Plan | None, ask: Ask) -> Plan:
    """The plan of a layout. If stages have different sizes, it is joined from one plan for each pipeline rank."""
    if not layout.stage_sizes:  # equal stages are split for the slowest device
        slowest = cluster if cluster is None or cluster.homogeneous else part_of(cluster, range(layout.num_ranks))
        planner, lower = _Planner(graph, layout, slowest, base, ask), ask.lower
        if base is not None or cluster is None or slowest is None or lower is None or not ask.fits_buckets:
            return planner.plan()
        other, room = _Planner(graph, layout, slowest, None, replace(ask, factors=True)), planner.room_bytes(slowest)
        plain, gathering = (partial(_completed, each, cluster, lower, ask, room) for each in (planner, other))
        return better_by_factors(plain(), gathering, graph, slowest, lower, ask.optimizer, room)
    shared = between_sizes(graph, layout, _cut_of(graph, layout, cluster, ask)) if base is None else frozenset()
    lower = ask.lower if base is None and ask.fits_buckets else None
    ask = replace(ask, whole=ask.whole | shared, fits_buckets=False)  # each of these plans serves some stages only
    plans, rooms = dict[int, Plan](), list[float]()
    for ranks in alike_ranks(layout, cluster, base):
        part = ranks.cluster
        planner = _Planner(graph, ranks.layout, part, ranks.base, ask)
        plan = planner.plan()
        if part is not None and lower is not None:
            stages = [stage for index in ranks.indices for stage in layout.pipeline.stages_of(index)]
            plan = with_pieces(lower, plan, graph, part, stages)
            rooms.append(planner.room_bytes(part))
        plans |= dict.fromkeys(ranks.indices, plan)
    plan = join_plans(graph, layout, [plans[index] for index in range(layout.pp)])
    if cluster is None or lower is None or not graph.gradients:
        return plan
    return look_ahead(lower, plan, cluster, ask.optimizer, min(rooms))


def _completed(planner: "_Planner", cluster: Cluster, lower: Lower, ask: Ask, room: float) -> Plan:
    """The plan of ``planner``, with what the devices of all stages decide."""
    plan = with_pieces(lower, planner.plan(), planner.graph, cluster)
    return look_ahead(lower, plan, cluster, ask.optimizer, room) if planner.graph.gradients else plan


def _cut_of(graph: Graph, layout: Layout, cluster: Cluster | None, ask: Ask) -> tuple[str, ...]:
    return choose_cut(graph, layout.pipeline.num_stages, cluster) if ask.firsts is None else ask.firsts


class _Planner:
    def __init__(self, graph: Graph, layout: Layout, cluster: Cluster | None, base: Plan | None, ask: Ask) -> None:
        self.graph, self.layout, self.cluster, self.base = graph, layout, cluster, base
        self.ask, self.lower, self.mesh = ask, ask.lower, layout.mesh()
        self.axes = {axis.name: axis.size for axis in self.mesh.axes if axis.size > 1 and axis.name != "pp"}
        self.sizes = self.axes | ({TIME: layout.microbatches} if layout.microbatches > 1 else {})
        self.space = [axis for axis in layout.spatial_axes if axis in self.sizes]
        self.strategies: dict[str, Strategy] = {operator.name: {} for operator in graph.operators}
        self.factors = FactorChoices(graph, self.sizes, self.strategies)
        self.pins: dict[str, Strategy] = {}
        self.notes: ModuleNotes = defaultdict(dict)
        self.axis_notes: list[Note] = []
        self.missed: set[str] = set()
        self.solved: Chosen | None = None
        self.convolutions = convolutions.ChosenAlgorithms()
        self.experts = experts_algorithms(graph, cluster) if "ep" in self.sizes else {}

    def plan(self) -> Plan:
        base, layout, graph = self.base, self.layout, self.graph
        refuse(LayoutError, batch_problems(graph, layout, runs_forward=base is not None and not graph.gradients))
        refuse(LayoutError, codec_problems(layout))
        if layout.pp > 1 and (graph.gradients or base is None):  # an evaluation runs forwards only
            build(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
        firsts = follow_cut(graph, base.firsts) if base is not None else ()
        if base is not None:
            inherit(self.factors, base, firsts)
            follow_storage(self.factors, base, [axis for axis in FEATURE_AXES if axis in self.sizes])
        else:
            self._choose()
        self._follow_rules()
        if layout.batch_statistics == "rank":
            derive.take_own_samples(graph, self.strategies, self.sizes)
        if base is None:
            if layout.codec == FACTORS or self.ask.factors:
                gather_factors(graph, self.strategies, self.sizes)
            firsts = _cut_of(graph, layout, self.cluster, self.ask)
        divided = cut(graph, firsts)
        settled = self.axes if self.solved is not None else ()
        asked = layout.sequence_parallel and "tp" in self.sizes
        otherwise = sequences_between(self.factors, "tp", required=base is None) if asked else None
        placements = derive.pass_partials(graph, divided, self.strategies, self.sizes, settled, otherwise)
        if TIME in self.sizes:
            check_microbatches(graph, self.strategies, self.sizes, layout)
        zero = derive.zero_stages(layout, divided, self.solved.zero if self.solved is not None else {})
        storage = self._storage(zero)
        if base is not None:
            name, algorithms, links = base.cluster, base.algorithms, base.links
            buckets, gathers, inside, notes = base.buckets, base.gathers, base.interiors, base.notes
        else:
            name = self.cluster.name if self.cluster is not None else "unknown"
            algorithms = algorithms_of(self.mesh, self.axes, self.cluster)
            links = links_of(self.mesh, self.axes, Network(self.cluster or load_cluster("cpu-local")))
            rank_of = {name: layout.pipeline.rank_of(stage) for name, stage in divided.stage_of.items()}
            given = self.cluster, self.lower, layout, self.ask.times, rank_of
            self.convolutions = convolutions.choose_on_rank(graph, self.mesh, self.axes, self.strategies, *given)
            buckets, gathers, inside, notes = (), (), self.convolutions.interiors, self._explained()
        mover, coded = Mover(self.axes, links), layout.codec not in ("", NONE)
        reduced = reduced_members(graph, divided, placements, storage, mover, zero, coded=coded)
        gathered = gathered_members(graph, divided, storage, self.sizes, zero)
        plan = Plan(
            model=graph.model,
            graph_fingerprint=graph.fingerprint,
            batch_size=graph.batch_size,
            cluster=name,
            mesh=self.mesh,
            stages=tuple(
                self._stage(divided, index, first, storage, zero) for index, first in enumerate(("", *firsts))
            ),
            layout=msgspec.structs.replace(layout, precision=graph.precision),
            microbatches=layout.microbatches,
            precision=graph.precision,
            offload=layout.offload,
            schedule=layout.schedule if firsts else "none",
            chunks=layout.chunks,
            buckets=filled(reduced, BUCKET_BYTES, algorithms, buckets),
            gathers=filled(gathered, BUCKET_BYTES, algorithms, gathers),
            algorithms=algorithms,
            links=links,
            interiors=inside,
            border_codec=layout.activation_codec,
            consistency=layout.consistency,
            notes=notes,
        )
        if base is not None:
            return follow_ahead(follow_codings(plan, base), base, trains=bool(graph.gradients))
        if self.cluster is None or self.lower is None or not self.ask.fits_buckets:
            return undecided(BucketCodecs(self.mesh, self.cluster).of(plan), self.cluster)
        room = self.room_bytes(self.cluster)
        return fit_buckets(self.lower, plan, self.cluster, reduced, gathered, self.ask.optimizer, room)

    def room_bytes(self, cluster: Cluster) -> float:
        """The memory, in bytes, for live tensors on a rank."""
        peers = num_peers(self.mesh.sizes, box_of(cluster))
        return self.ask.room_bytes or room_of(cluster, range(self.mesh.world_size), peers)

    def _choose(self) -> None:
        """Apply the pins, and let the integer program choose the other strategies. For layouts with sequence
        parallelism, and for layouts that leave nothing to choose, explicit rules give the other strategies later
        (``_follow_rules``)."""
        self.pins = read_pins(self.factors, self.layout.pin, self.mesh.names)
        mixes = not self.axes.keys().isdisjoint({*self.layout.mixed_axes, "tx", "ty"})
        ruled = self.layout.sequence_parallel or (self.ask.by_rule and not mixes)
        if ruled or not (mixes or self.axes.keys().isdisjoint(self.space)):
            for operator in self.graph.operators:
                for axis, letter in self.pins.get(operator.name, {}).items():
                    self.strategies[operator.name][axis] = letter
                    self.notes[operator.module][axis] = f"{letter or 'none'}@{axis}", "pinned"
        elif "tp" in self.axes or self.pins or mixes or self.layout.zero == -1:
            require_heads(self.graph, self.pins, "tp", self.sizes.get("tp", 1))
            self._solve(self._of_axes())

    def _follow_rules(self) -> None:
        """Add the strategies that the explicit rule of each axis gives, unless a strategy is already decided. With a
        ``base`` plan, an operator that an axis cannot split stays whole on that axis. Without a ``base`` plan, an axis
        that cannot split the model is an error."""
        required = self.base is None
        for axis in (*DATA_AXES, "ep"):
            if axis in self.sizes:
                if axis == "ep" and self.solved is None:
                    split_experts(self.factors, axis, required=required)
                self._split_batch(axis)
        if "cp" in self.sizes and self.solved is None:
            split_sequence(self.factors, "cp", self.layout.context, required=required)
        if self.solved is None:
            if self.space:
                self.axis_notes += SpatialRule(self.factors, self.notes).split(self.space, required=required)
            if "tp" in self.sizes and required:
                TensorRule(self.factors, self.notes, self.cluster).split("tp")
        if TIME in self.sizes:
            self._split_batch(TIME)

    def _solve(self, pins: dict[str, Strategy]) -> None:
        """Let the integer program choose the factors that all axes except ``TIME`` split."""
        memory, zero = self.ask.memory_bytes, self.layout.zero == -1
        if zero and memory is None and self.cluster is not None:
            memory = self.room_bytes(self.cluster)
        layout = self.ask.alike(self.layout) if self.ask.alike is not None else self.layout
        mesh = layout.mesh()
        pinned = tuple((name, *sorted(strategy.items())) for name, strategy in pins.items())
        key = (mesh, layout.microbatches, memory, self.ask.parameter_bytes, self.ask.whole,
               layout.batch_statistics, zero, pinned)  # fmt: skip
        if key not in self.ask.known and (self.ask.explains or key not in self.ask.learned):
            assert self.lower is not None, "strategies are chosen by the cost of programs: Ask(lower=...)"
            self.ask.known[key] = assign(
                self.graph,
                mesh,
                self.cluster or load_cluster("cpu-local"),
                self.lower,
                microbatches=layout.microbatches,
                own_statistics=self.layout.batch_statistics == "rank",
                pins=pins,
                uses_axes=True,
                optimizer=self.ask.optimizer,
                memory_bytes=memory,
                whole=self.ask.whole,
                costs=self.ask.costs,
                zero=self.layout.zero_axis if zero else "",
                parameter_bytes=self.ask.parameter_bytes,
            )
        self.solved = self.ask.known.get(key) or self.ask.learned[key]
        self.strategies |= {name: dict(strategy) for name, strategy in self.solved.strategies.items()}

    def _of_axes(self) -> dict[str, Strategy]:
        """Join the pins with the splits of the spatial axes, of attention over ``cp``, and of experts over ``ep``. The
        integer program must keep all of them."""
        strategies = {operator.name: dict(self.pins.get(operator.name, {})) for operator in self.graph.operators}
        factors = FactorChoices(self.graph, self.sizes, strategies)
        if self.space:
            self.axis_notes += SpatialRule(factors, defaultdict(dict)).split(self.space, required=True)
        if "ep" in self.sizes:
            split_experts(factors, "ep", required=True)
        if "cp" in self.sizes:
            split_attention(factors, "cp", self.layout.context, required=True)
        return {name: strategy for name, strategy in strategies.items() if strategy}

    def _storage(self, zero: Mapping[str, int]) -> dict[str, dict[str, Placement]]:
        if self.base is not None:
            return {name: self.base.storage(name) for name in self.graph.parameters}
        if self.solved is not None:
            storage = self.solved.storage
        else:
            storage = derive.parameter_storage(self.graph, self.strategies, self.sizes) | {
                name: {} for name in self.ask.whole
            }
        axis = self.layout.zero_axis if self.layout.zero > 0 else ""
        return derive.zero_storage(self.graph, storage, axis, zero, self.ask.whole) if axis else storage

    def _stage(
        self, divided: Cut, index: int, first: str, storage: dict[str, dict[str, Placement]], zero: Mapping[str, int]
    ) -> Stage:
        operators = derive.stage_operators(self.graph, divided, index)
        held = {name: storage[name] for name in storage if index in divided.owners[name]}
        base = self.base.stages[min(index, len(self.base.stages) - 1)] if self.base is not None else None
        reduced, released = derive.in_parts(self.graph, zero, held, base)
        kind = self.ask.recompute[index] if self.ask.recompute else self.layout.recompute
        return Stage(
            strategies=derive.grouped({op.name: self.strategies[op.name] for op in operators}),
            storage=held,
            gradients={name: held[name] for name in reduced},
            released=released,
            first=first,
            operator_algorithms=derive.algorithms(operators, {**self.convolutions.texts, **self.experts}, base),
            recompute=derive.recomputed(operators, divided, kind) if base is None else base.recompute,
        )

    # --- data parallel -------------------------------------------------------------------------------------------

    def _split_batch(self, axis: str) -> None:
        """Split the batch over ``axis`` in all operators that have no factor on this axis yet. Add notes on operators
        whose batch cannot be split."""
        for operator in self.graph.operators:
            strategy = self.strategies[operator.name]
            if axis in strategy or (axis == TIME and operator.prologue):
                continue
            letters = [letter for letter, name in operator.classes.items() if self.factors.is_batch(name)]
            chosen = next((letter for letter in letters if self.factors.fits(operator, letter, axis)), None)
            if chosen is not None:
                if self.solved is None or axis == TIME:
                    strategy[axis] = chosen
            elif axis == TIME:  # check_microbatches refuses communication over time
                continue
            elif operator.rule is None:  # unsplit_notes reports it
                if self.factors.touches_batch(operator):
                    self.missed.add(operator.name)
            elif letters:
                taken = any(letter in strategy.values() for letter in letters)
                why = "is split over another axis, and too small for both" if taken else "cannot be split"
                reason = f"the batch factor of {operator.rule.pattern!r} {why}"
                self.missed.add(operator.name)
                self.axis_notes.append(
                    Note(module=starred(operator.name), split=f"replicated on {axis}", reason=reason)
                )

    def _explained(self) -> tuple[Note, ...]:
        unsplit = unsplit_notes(self.graph, self.mesh, self.cluster, self.lower) if self.sizes else ()
        own: tuple[Note, ...] = ()
        if self.solved is None:
            own = module_notes(self.graph, self.notes, self.missed, "dp" in self.sizes)
        elif self.ask.explains:
            assert isinstance(self.solved, Assigned), "what other processes found is not looked up then"
            own = notes_of(self.graph, self.solved, self.pins)
        return (*own, *dict.fromkeys(self.axis_notes), *unsplit, *self.convolutions.notes)
