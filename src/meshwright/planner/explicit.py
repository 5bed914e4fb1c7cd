"""Layout to plan: stages on pp, micro-batches on time, and the factors of dp and tp as the integer program chooses."""

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import msgspec

from meshwright.catalog import load_cluster
from meshwright.cost.collective import Network
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError, PlanError, refuse
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.own_samples import owned, owned_problems
from meshwright.ir.placement import Placement
from meshwright.ir.plan import Note, Plan, Stage, Strategy, starred
from meshwright.ir.program import Lower
from meshwright.ir.resharding import Mover
from meshwright.ir.stages import Cut, cut
from meshwright.planner.algorithms import algorithms_of, links_of
from meshwright.planner.bucket_size import fit_buckets
from meshwright.planner.buckets import BUCKET_BYTES, filled, gathered_members, reduced_members
from meshwright.planner.cut import between_sizes, choose_cut, follow_cut
from meshwright.planner.derive import (
    grouped,
    parameter_storage,
    pass_partials,
    recomputed,
)
from meshwright.planner.factors import Factors, dividing_heads
from meshwright.planner.follow import follow_storage, inherit
from meshwright.planner.interiors import interiors
from meshwright.planner.intra_op.assign import Assigned, assign
from meshwright.planner.intra_op.explain import notes_of
from meshwright.planner.microbatch import check_microbatches
from meshwright.planner.notes import module_notes, unsplit_notes
from meshwright.planner.pins import read_pins
from meshwright.planner.precision import check_precision
from meshwright.planner.sequence_rule import sequences_between, split_experts, split_sequence
from meshwright.planner.spatial_rule import SpatialRule
from meshwright.planner.tensor_rule import TensorRule
from meshwright.planner.zero import in_parts, zero_storage
from meshwright.schedules.pipeline import build


@dataclass(frozen=True)
class Ask:
    """What is wanted of the program.

    ``explains``: with what other ways would cost. ``memory_bytes``: the limit of a rank, if the program must regard it.
    ``whole``: parameters that must not be cut. ``by_rule``: tensor parallel as Megatron-LM divides it by hand (columns,
    then rows; whole heads; the vocabulary where that pays), for comparisons. ``room_bytes``: of a rank, within which
    buckets are as large as is best (default: what a device has). ``fits_buckets``: whether their sizes are chosen; if
    not, they have the usual size. ``lower`` makes the programs by whose cost the planner chooses: strategies under
    ``tp``, mixed axes and pins, sizes of buckets, interiors. ``known`` keeps solutions.
    """

    explains: bool = True
    memory_bytes: float | None = None
    whole: frozenset[str] = frozenset()
    optimizer: OptimizerCost = ADAMW
    by_rule: bool = False
    room_bytes: float | None = None
    lower: Lower | None = None
    fits_buckets: bool = True
    known: dict[tuple[object, ...], Assigned] = field(default_factory=dict)


def plan_layout(
    graph: Graph,
    layout: Layout,
    *,
    world_size: int,
    cluster: Cluster | None = None,
    base: Plan | None = None,
    ask: Ask | None = None,
) -> Plan:
    """The plan of ``layout`` for ``graph`` on ``world_size`` ranks.

    ``base`` is a plan of the same model for another batch shape or for training: its storage is kept, and
    operators that it names keep their strategy.

    Raises:
        LayoutError: the layout does not fit the ranks, the batch, the heads, the cut points, or names unknown modules
            in ``pin``.
        ScheduleError: the schedule is not defined for so many micro-batches.
    """
    check_precision(layout.precision, graph, cluster)
    return _planned(graph, layout.resolved(world_size), cluster, base, ask or Ask())


def adapt_plan(plan: Plan, graph: Graph) -> Plan:
    """``plan`` for another capture of the same model: a ragged last batch, or an evaluation.

    Raises:
        LayoutError: the new batch does not divide over dp.
    """
    layout = plan.layout
    parts = layout.microbatches * math.lcm(*(one.get("dp", 1) for one in layout.stage_sizes or ({"dp": layout.dp},)))
    if not graph.gradients and graph.batch_size % parts:  # an evaluation of a ragged batch
        layout = msgspec.structs.replace(layout, microbatches=1)
    return _planned(graph, layout, None, plan, Ask())


def _planned(graph: Graph, layout: Layout, cluster: Cluster | None, base: Plan | None, ask: Ask) -> Plan:
    """One plan; where stages differ in sizes, put together from one plan for each."""
    if not layout.stage_sizes:
        return _Planner(graph, layout, layout.mesh(), cluster, base, ask).plan()
    shared = between_sizes(graph, layout, cluster) if base is None else frozenset()
    ask = replace(ask, whole=ask.whole | shared, fits_buckets=False)  # each of the plans knows but a part of its stages
    plans = []
    for index in range(layout.pp):
        own = layout.of_stage(index)
        plans.append(_Planner(graph, own, own.mesh(), cluster, base, ask).plan())
    divided = cut(graph, plans[0].firsts)
    stages = []
    for index in range(divided.num_stages):
        plan = plans[index % layout.pp]
        axes = {axis.name: axis.size for axis in plan.mesh.axes if axis.name != "pp"}
        stages.append(msgspec.structs.replace(plan.stages[index], axes=axes))
    return msgspec.structs.replace(
        plans[0],
        mesh=layout.mesh(),
        layout=layout,
        stages=tuple(stages),
        buckets=tuple(
            bucket
            for index, plan in enumerate(plans)
            for bucket in plan.buckets
            if all(stage % layout.pp == index for stage in divided.owners[bucket.parameters[0]])
        ),
        algorithms={axis: one for plan in plans for axis, one in plan.algorithms.items()},
        links={axis: one for plan in plans for axis, one in plan.links.items()},
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


class _Planner:
    def __init__(
        self, graph: Graph, layout: Layout, mesh: Mesh, cluster: Cluster | None, base: Plan | None, ask: Ask
    ) -> None:
        self.ask = ask
        self.graph, self.layout, self.mesh, self.cluster, self.base = graph, layout, mesh, cluster, base
        self.sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1 and axis.name != "pp"}
        if layout.microbatches > 1:
            self.sizes[TIME] = layout.microbatches
        self.space = [axis for axis in layout.spatial_axes if axis in self.sizes]
        self.mixes = not self.sizes.keys().isdisjoint(layout.mixed_axes)
        self.strategies: dict[str, Strategy] = {operator.name: {} for operator in graph.operators}
        self.factors = Factors(graph, self.sizes, self.strategies)
        self.notes: dict[str, dict[str, str]] = defaultdict(dict)
        self.axis_notes: list[Note] = []
        self.missed: set[str] = set()
        self.solved: Assigned | None = None

    def plan(self) -> Plan:
        self._check_batch()
        if self.layout.pp > 1 and (self.graph.gradients or self.base is None):  # an evaluation runs forwards only
            build(self.layout.schedule, self.layout.pp, self.layout.microbatches, self.layout.chunks)
        if self.base is not None:
            inherit(self.factors, self.base, self._firsts())
            if "tp" in self.sizes:
                follow_storage(self.factors, self.base, "tp")
        else:
            pins = read_pins(self.factors, self.layout.pin, self.mesh.names)
            space = [] if self.mixes else self.space
            ruled = self.ask.by_rule or self.layout.sequence_parallel
            if ruled or not self.sizes.keys().isdisjoint(("cp", "ep", *space)):
                self._fix(pins)
            elif "tp" in self.sizes or pins or self.mixes:
                self._require_heads("tp", pins)
                self._solve(self._of_space(pins) if self.space else pins)
        if "dp" in self.sizes:
            self._split_batch("dp")
        if "dp_shard" in self.sizes:
            self._split_batch("dp_shard")
        if "ep" in self.sizes:
            split_experts(self.factors, "ep", required=self.base is None)
            self._split_batch("ep")
        if "cp" in self.sizes:
            split_sequence(self.factors, "cp", self.layout.context, required=self.base is None)
        if self.space and self.solved is None:
            rule = SpatialRule(self.factors, self.notes)
            rule.split(self.space, required=self.base is None)
            self.axis_notes += rule.whole
        if "tp" in self.sizes and self.base is None and self.solved is None:
            TensorRule(self.factors, self.notes, self.cluster).split("tp")
        if TIME in self.sizes:
            self._split_batch(TIME)
        if self.layout.batch_statistics == "rank":
            for operator in self.graph.operators:
                self.strategies[operator.name] = owned(operator, self.strategies[operator.name])
            for operator in self.graph.operators:
                refuse(PlanError, owned_problems(self.graph, operator, self.strategies, self.sizes), "layout")
        firsts = self._firsts()
        divided = cut(self.graph, firsts)
        settled = [axis for axis in self.sizes if axis != TIME] if self.solved is not None else []
        asked = self.layout.sequence_parallel and "tp" in self.sizes
        otherwise = sequences_between(self.factors, "tp", required=self.base is None) if asked else None
        placements = pass_partials(self.graph, divided, self.strategies, self.sizes, settled, otherwise)
        if TIME in self.sizes:
            check_microbatches(self.graph, self.strategies, self.sizes, self.layout)
        storage = self._storage()
        used = {
            name: {a: c for a, c in strategy.items() if a in self.sizes} for name, strategy in self.strategies.items()
        }
        axes = [axis for axis in self.sizes if axis != TIME]
        algorithms = self.base.algorithms if self.base is not None else algorithms_of(self.mesh, axes, self.cluster)
        network = Network(self.cluster or load_cluster("cpu-local"))
        links = self.base.links if self.base is not None else links_of(self.mesh, axes, network)
        sizes = {axis: self.sizes[axis] for axis in axes}
        reduced = reduced_members(self.graph, divided, placements, storage, Mover(sizes, links))
        gathered = gathered_members(self.graph, divided, storage, self.sizes)
        plan = Plan(
            model=self.graph.model,
            graph_fingerprint=self.graph.fingerprint,
            batch_size=self.graph.batch_size,
            cluster=self.cluster.name if self.cluster is not None else self.base.cluster if self.base else "unknown",
            mesh=self.mesh,
            stages=tuple(
                self._stage(divided, index, first, used, storage) for index, first in enumerate(("", *firsts))
            ),
            layout=msgspec.structs.replace(self.layout, precision=self.graph.precision),
            microbatches=self.layout.microbatches,
            precision=self.graph.precision,
            offload=self.layout.offload,
            schedule="none" if len(firsts) == 0 else self.layout.schedule,
            chunks=self.layout.chunks,
            buckets=filled(reduced, BUCKET_BYTES, algorithms, self.base.buckets if self.base else ()),
            gathers=filled(gathered, BUCKET_BYTES, algorithms, self.base.gathers if self.base else ()),
            algorithms=algorithms,
            links=links,
            interiors=self._interiors(used),
            notes=self.base.notes if self.base is not None else self._explained(),
        )
        if self.base is not None or self.cluster is None or self.ask.lower is None or not self.ask.fits_buckets:
            return plan
        room = self.ask.room_bytes or self.cluster.device.memory_bytes
        return fit_buckets(self.ask.lower, plan, self.cluster, reduced, gathered, self.ask.optimizer, room)

    def _solve(self, pins: dict[str, Strategy]) -> None:
        """The factors of all axes but time, by the integer program."""
        key = (tuple(self.sizes.items()), self.mesh if self.ask.memory_bytes else self.mesh.world_size,
               self.ask.memory_bytes, self.ask.whole, self.layout.batch_statistics)  # fmt: skip
        if key not in self.ask.known:
            assert self.ask.lower is not None, "strategies are chosen by the cost of programs: Ask(lower=...)"
            self.ask.known[key] = assign(
                self.graph,
                self.mesh,
                self.cluster or load_cluster("cpu-local"),
                self.ask.lower,
                microbatches=self.layout.microbatches,
                own_statistics=self.layout.batch_statistics == "rank",
                pins=pins,
                uses_axes=True,
                optimizer=self.ask.optimizer,
                memory_bytes=self.ask.memory_bytes,
                whole=self.ask.whole,
            )
        self.solved = self.ask.known[key]
        self.strategies |= {name: dict(one) for name, one in self.solved.strategies.items()}

    def _of_space(self, pins: dict[str, Strategy]) -> dict[str, Strategy]:
        """Pins, and what the axes of space split, beside which the other axes are solved."""
        found = {operator.name: dict(pins.get(operator.name, {})) for operator in self.graph.operators}
        factors = Factors(self.graph, self.sizes, found)
        rule = SpatialRule(factors, defaultdict(dict))
        rule.split(self.space, required=True)
        self.axis_notes += rule.whole
        return {name: one for name, one in found.items() if one}

    def _fix(self, pins: dict[str, Strategy]) -> None:
        """Pins are strategies, where rules choose the others."""
        for operator in self.graph.operators:
            for axis, letter in pins.get(operator.name, {}).items():
                self.strategies[operator.name][axis] = letter
                self.notes[operator.module][axis] = f"{letter or 'none'}@{axis}\0pinned"

    def _require_heads(self, axis: str, pins: dict[str, Strategy]) -> None:
        """That some factor of the heads divides over the axis, where nothing else is asked of attention."""
        if axis not in self.sizes:
            return
        for operator in self.graph.operators:
            attends = operator.target.startswith("meshwright.attention.") and operator.rule is not None
            if not attends or axis in pins.get(operator.name, {}) or operator.rule is None:
                continue
            heads = operator.rule.parsed.outputs[0].dims[1]
            sizes = [operator.rule.sizes[one.name] for one in heads if one.name]
            dividing_heads(sizes, axis, self.sizes[axis], operator.module)

    def _storage(self) -> dict[str, dict[str, Placement]]:
        if self.base is not None:
            return {name: self.base.storage(name) for name in self.graph.parameters}
        if self.solved is not None:
            storage = self.solved.storage
        else:
            storage = parameter_storage(self.graph, self.strategies, self.sizes) | {name: {} for name in self.ask.whole}
        axis = self.layout.zero_axis
        return zero_storage(self.graph, storage, axis, self.layout.zero) if axis else storage

    def _firsts(self) -> tuple[str, ...]:
        """The first operators of the stages: chosen, or those of the base plan (or what runs next to them here)."""
        if self.base is not None:
            return follow_cut(self.graph, self.base.firsts)
        return choose_cut(self.graph, self.layout.pp * self.layout.chunks, self.cluster)

    def _stage(
        self,
        divided: Cut,
        index: int,
        first: str,
        strategies: dict[str, Strategy],
        storage: dict[str, dict[str, Placement]],
    ) -> Stage:
        mine = [one for one in self.graph.operators if divided.stage_of.get(one.name, index) == index]
        held = {name: storage[name] for name in storage if index in divided.owners[name]}
        base = self.base.stages[min(index, len(self.base.stages) - 1)] if self.base is not None else None
        reduced, released = in_parts(self.graph, self.layout, held, base)
        return Stage(
            strategies=grouped({one.name: strategies[one.name] for one in mine}),
            storage=held,
            gradients={name: held[name] for name in reduced},
            released=released,
            first=first,
            recompute=recomputed(mine, divided, self.layout.recompute),
        )

    def _interiors(self, strategies: dict[str, Strategy]) -> tuple[str, ...]:
        if self.base is not None:
            return self.base.interiors
        if self.cluster is None or self.ask.lower is None:
            return ()
        axes = {axis: size for axis, size in self.sizes.items() if axis != TIME}
        known = {name: {a: c for a, c in one.items() if a in axes} for name, one in strategies.items()}
        return interiors(
            self.graph, self.mesh, axes, self.cluster, self.ask.lower, known, self.layout.microbatches
        )  # fmt: skip

    # --- data parallel -------------------------------------------------------------------------------------------

    def _check_batch(self) -> None:
        parts = self.layout.dp * self.sizes.get(TIME, 1)
        size = self.graph.batch_size
        evaluates = self.base is not None and not self.graph.gradients
        whole = self.layout.microbatches == 1  # parts need not be equal, but micro-batches must
        if (size < parts if whole else size % parts) and not evaluates:  # an evaluation of fewer runs whole everywhere
            lower = size // parts * parts
            fits = f"{lower} or {lower + parts}" if lower else str(parts)
            over = f"dp={self.layout.dp}"
            if whole:
                raise LayoutError(
                    f"a global batch of {size} is too small for {over}",
                    where="batch",
                    remedy=f"use a batch of {parts} or more, or drop the last batch",
                )
            if TIME in self.sizes:
                over = f"{self.layout.microbatches} micro-batches" + (f" on {over}" if self.layout.dp > 1 else "")
            raise LayoutError(
                f"a global batch of {size} does not divide over {over}",
                where="batch",
                remedy=f"use a batch of {fits}, or drop the ragged last batch",
            )

    def _split_batch(self, axis: str) -> None:
        """Every operator with a batch factor splits it, unless that was decided; those that cannot are noted."""
        missed: dict[str, str] = {}
        for operator in self.graph.operators:
            if axis in self.strategies[operator.name] or (axis == TIME and operator.prologue):
                continue
            letters = [letter for letter, name in operator.classes.items() if self.factors.is_batch(name)]
            chosen = next((letter for letter in letters if self.factors.fits(operator, letter, axis)), None)
            if chosen is not None:
                if self.solved is None or axis == TIME:
                    self.strategies[operator.name][axis] = chosen
            elif letters and operator.rule is not None:
                taken = any(letter in self.strategies[operator.name].values() for letter in letters)
                why = "is split over another axis, and too small for both" if taken else "cannot be split"
                missed[operator.name] = f"the batch factor of {operator.rule.pattern!r} {why}"
            elif operator.rule is None and self.factors.touches_batch(operator):
                missed[operator.name] = ""
        if axis == TIME:  # there, what communicates is refused
            return
        self.missed |= missed.keys()
        for name, reason in missed.items():
            if not reason:  # it has no rule, and a line of its own
                continue
            self.axis_notes.append(Note(module=starred(name), split=f"replicated on {axis}", reason=reason))

    def _explained(self) -> tuple[Note, ...]:
        unsplit = unsplit_notes(self.graph, self.mesh, self.cluster, self.ask.lower) if self.sizes else ()
        if self.solved is not None:
            pins = read_pins(Factors(self.graph, self.sizes, {one.name: {} for one in self.graph.operators}),
                             self.layout.pin, self.mesh.names)  # fmt: skip
            own = notes_of(self.graph, self.solved, pins) if self.ask.explains else ()
            return (*own, *dict.fromkeys(self.axis_notes), *unsplit)
        data = "dp" in self.sizes
        return (*module_notes(self.graph, self.notes, self.missed, data), *dict.fromkeys(self.axis_notes), *unsplit)
