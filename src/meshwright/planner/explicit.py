"""Layout to plan by explicit rule: batch on dp and time; heads, hidden features, vocabulary on tp; stages on pp."""

import fnmatch
import math
from collections import defaultdict

import msgspec

from meshwright.cost.collective import Group, Network
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import Placement, Shard
from meshwright.ir.plan import Note, Plan, Stage, Strategy, starred
from meshwright.ir.stages import Cut, cut
from meshwright.planner.cut import choose_cut, follow_cut
from meshwright.planner.derive import gradient_buckets, grouped, parameter_storage, pass_partials, recomputed
from meshwright.planner.factors import Factors, repeated_heads
from meshwright.planner.microbatch import check_microbatches
from meshwright.planner.notes import module_notes, unsplit_notes
from meshwright.planner.tensor_rule import TensorRule
from meshwright.schedules.pipeline import build


def plan_layout(
    graph: Graph, layout: Layout, *, world_size: int, cluster: Cluster | None = None, base: Plan | None = None
) -> Plan:
    """The plan of ``layout`` for ``graph`` on ``world_size`` ranks.

    ``base`` is a plan of the same model for another batch shape or for training: its storage is kept, and
    operators that it names keep their strategy.

    Raises:
        LayoutError: the layout does not fit the ranks, the batch, the heads, the cut points, or names unknown modules
            in ``pin``.
        ScheduleError: the schedule is not defined for so many micro-batches.
    """
    return _planned(graph, layout.resolved(world_size), cluster, base)


def adapt_plan(plan: Plan, graph: Graph) -> Plan:
    """``plan`` for another capture of the same model: a ragged last batch, or an evaluation.

    Raises:
        LayoutError: the new batch does not divide over dp.
    """
    layout = plan.layout
    parts = layout.microbatches * math.lcm(*(one.get("dp", 1) for one in layout.stage_sizes or ({"dp": layout.dp},)))
    if not graph.gradients and graph.batch_size % parts:  # an evaluation of a ragged batch
        layout = msgspec.structs.replace(layout, microbatches=1)
    return _planned(graph, layout, None, plan)


def _planned(graph: Graph, layout: Layout, cluster: Cluster | None, base: Plan | None) -> Plan:
    """One plan; where stages differ in sizes, put together from one plan for each."""
    if not layout.stage_sizes:
        return _Planner(graph, layout, layout.mesh(), cluster, base).plan()
    plans = []
    for index in range(layout.pp):
        own = layout.of_stage(index)
        plans.append(_Planner(graph, own, own.mesh(), cluster, base).plan())
    divided = cut(graph, plans[0].firsts)
    stages = []
    for index in range(divided.num_stages):
        plan = plans[index % layout.pp]
        axes = {axis.name: axis.size for axis in plan.mesh.axes if axis.name != "pp"}
        stages.append(msgspec.structs.replace(plan.stages[index], axes=axes))
    shared = {name for name, owners in divided.owners.items() if len(owners) > 1}
    for name in shared.intersection(graph.parameters):
        if len({repr(stages[index].storage.get(name)) for index in divided.owners[name]}) > 1:
            raise LayoutError(
                "it is shared by stages that would split it differently",
                where=f"parameter {name}",
                remedy="pin its modules to be whole ('none@tp'), or give these stages the same sizes",
            )
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
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


class _Planner:
    def __init__(self, graph: Graph, layout: Layout, mesh: Mesh, cluster: Cluster | None, base: Plan | None) -> None:
        self.graph, self.layout, self.mesh, self.cluster, self.base = graph, layout, mesh, cluster, base
        self.sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1 and axis.name != "pp"}
        if layout.microbatches > 1:
            self.sizes[TIME] = layout.microbatches
        self.strategies: dict[str, Strategy] = {operator.name: {} for operator in graph.operators}
        self.factors = Factors(graph, self.sizes, self.strategies)
        self.notes: dict[str, dict[str, str]] = defaultdict(dict)
        self.axis_notes: list[Note] = []
        self.missed: set[str] = set()

    def plan(self) -> Plan:
        self._check_batch()
        if self.layout.pp > 1 and (self.graph.gradients or self.base is None):  # an evaluation runs forwards only
            build(self.layout.schedule, self.layout.pp, self.layout.microbatches, self.layout.chunks)
        if self.base is not None:
            self._inherit(self.base)
        self._pin()
        if "dp" in self.sizes:
            self._split_batch("dp")
        if "ep" in self.sizes:
            self._split_experts("ep")
            self._split_batch("ep")
        if "cp" in self.sizes:
            self._split_sequence("cp")
        if "tp" in self.sizes and (self.base is None or not any(stage.strategies for stage in self.base.stages)):
            TensorRule(self.factors, self.notes, self.cluster).split("tp")
        elif "tp" in self.sizes:
            self._follow_storage("tp")
        if TIME in self.sizes:
            self._split_batch(TIME)
        firsts = self._firsts()
        divided = cut(self.graph, firsts)
        placements = pass_partials(self.graph, divided, self.strategies, self.sizes, self._sequence_parallel())
        if TIME in self.sizes:
            check_microbatches(self.graph, self.strategies, self.sizes, self.layout)
        storage = self._storage()
        used = {
            name: {a: c for a, c in strategy.items() if a in self.sizes} for name, strategy in self.strategies.items()
        }
        algorithms = self._algorithms()
        return Plan(
            model=self.graph.model,
            graph_fingerprint=self.graph.fingerprint,
            batch_size=self.graph.batch_size,
            cluster=self.cluster.name if self.cluster is not None else self.base.cluster if self.base else "unknown",
            mesh=self.mesh,
            stages=tuple(
                self._stage(divided, index, first, used, storage) for index, first in enumerate(("", *firsts))
            ),
            layout=self.layout,
            microbatches=self.layout.microbatches,
            schedule="none" if len(firsts) == 0 else self.layout.schedule,
            chunks=self.layout.chunks,
            buckets=gradient_buckets(self.graph, divided, placements, storage, self.sizes, algorithms),
            algorithms=algorithms,
            notes=self.base.notes if self.base is not None else self._explained(),
        )

    def _storage(self) -> dict[str, dict[str, Placement]]:
        if self.base is None:
            return parameter_storage(self.graph, self.strategies)
        return {name: self.base.storage(name) for name in self.graph.parameters}

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
        return Stage(
            strategies=grouped({one.name: strategies[one.name] for one in mine}),
            storage={name: storage[name] for name in storage if index in divided.owners[name]},
            first=first,
            recompute=recomputed(mine, divided, self.layout.recompute),
        )

    def _algorithms(self) -> dict[str, str]:
        """By axis, what the cluster's file has measured to be the fastest. Where that is nothing, two CPU ranks of one
        box swap what they have in one round, and others take torch.distributed's own collectives."""
        if self.base is not None:
            return self.base.algorithms
        return {axis: self._measured(axis) or self._usual(axis) for axis in self.sizes if axis != TIME}

    def _measured(self, axis: str) -> str:
        if self.sizes[axis] < 2 or self.cluster is None or self.cluster.device.kind != "cpu":
            return ""
        ranks = self.mesh.groups(axis)[0]
        return Network(self.cluster).algorithms(Group(len(ranks), ranks[1] - ranks[0]))

    def _usual(self, axis: str) -> str:
        return "exchange" if self._swaps(axis) else "native"

    def _swaps(self, axis: str) -> bool:
        if self.sizes[axis] != 2 or self.cluster is None:
            return self.sizes[axis] == 2
        if self.cluster.device.kind != "cpu" or not self.cluster.levels:
            return False
        box = self.cluster.levels[-1]
        one_box = len(self.cluster.levels) == 1  # which may hold more ranks than devices
        return one_box or all(self.cluster.level_of(*ranks).name == box.name for ranks in self.mesh.groups(axis))

    # --- data parallel -------------------------------------------------------------------------------------------

    def _check_batch(self) -> None:
        parts = self.layout.dp * self.sizes.get(TIME, 1)
        size = self.graph.batch_size
        evaluates = self.base is not None and not self.graph.gradients
        if size % parts and not evaluates:  # an evaluation of a ragged batch runs whole on every rank
            lower = size // parts * parts
            fits = f"{lower} or {lower + parts}" if lower else str(parts)
            over = f"dp={self.layout.dp}"
            if TIME in self.sizes:
                over = f"{self.layout.microbatches} micro-batches" + (f" on {over}" if self.layout.dp > 1 else "")
            raise LayoutError(
                f"a global batch of {size} does not divide over {over}",
                where="batch",
                remedy=f"use a batch of {fits}, or drop the ragged last batch",
            )

    def _inherit(self, base: Plan) -> None:
        held = cut(self.graph, self._firsts()).stage_of
        for operator in self.graph.operators:
            for axis, choice in base.stages[held.get(operator.name, 0)].strategy(operator.name).items():
                if operator.rule is None or axis not in self.sizes:
                    continue
                if operator.rule.splittable(choice) and operator.rule.sizes[choice] % self.sizes[axis] == 0:
                    self.strategies[operator.name][axis] = choice

    def _split_batch(self, axis: str) -> None:
        """Every operator with a batch factor splits it."""
        missed: dict[str, str] = {}
        for operator in self.graph.operators:
            if axis in self.strategies[operator.name] or (axis == TIME and operator.prologue):
                continue
            letters = [letter for letter, name in operator.classes.items() if self.factors.is_batch(name)]
            chosen = next((letter for letter in letters if self.factors.fits(operator, letter, axis)), None)
            if chosen is not None:
                self.strategies[operator.name][axis] = chosen
            elif letters and operator.rule is not None:
                taken = any(letter in self.strategies[operator.name].values() for letter in letters)
                why = "is split over another axis, and does not divide over both" if taken else "cannot be split"
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

    def _split_experts(self, axis: str) -> None:
        """Mixtures of experts divide their experts where everything else divides the batch."""
        found = [operator for operator in self.graph.operators if operator.target.startswith("meshwright.experts")]
        for operator in found:
            if axis in self.strategies[operator.name]:
                continue
            letter = (
                next((one for one in operator.rule.joint if self.factors.fits(operator, one, axis)), None)
                if (operator.rule is not None)
                else None
            )
            if letter is not None:
                self.strategies[operator.name][axis] = letter
            elif self.base is None:
                tokens, experts = self.graph.tensors[operator.inputs[0]], self.graph.tensors[operator.inputs[-1]]
                raise LayoutError(
                    f"{experts.shape[0]} experts or {tokens.shape[0]} tokens do not divide over ep={self.sizes[axis]}",
                    where=f"module {operator.module or '(model)'}",
                    remedy="use an ep that divides the experts, and a batch that dp divides",
                )
        if not found and self.base is None:
            raise LayoutError(f"{axis}={self.sizes[axis]}, and there are no experts", where="layout", remedy="use ep=1")

    def _split_sequence(self, axis: str) -> None:
        """Every operator with a sequence splits it; of attention the queries, so that it gathers keys and values."""
        sequences = self.factors.sequences()
        whole = repeated_heads(self.graph) if self.layout.context == "gather" else set()
        for operator in self.graph.operators:
            if axis not in self.strategies[operator.name] and not operator.prologue and operator.name not in whole:
                letter = self.factors.letter_of(operator, sequences, axis)
                if self.layout.context == "ring" and operator.target.startswith("meshwright.attention") and letter:
                    rings = operator.rule.joint if operator.rule is not None else {}
                    letter = next((one for one in rings if self.factors.fits(operator, one, axis)), letter)
                if letter is not None:
                    self.strategies[operator.name][axis] = letter
                elif operator.target.startswith("meshwright.attention.") and self.base is None:
                    length = self.graph.tensors[operator.inputs[0]].shape[2]
                    raise LayoutError(
                        f"a sequence of {length} does not divide over {axis}={self.sizes[axis]}",
                        where=f"module {operator.module or '(model)'}",
                        remedy=f"use a sequence that {self.sizes[axis]} divides",
                    )

    def _sequence_parallel(self) -> dict[str, Strategy]:
        """What is not split over tp, but has a batch and a sequence, splits the sequence there."""
        if not self.layout.sequence_parallel or "tp" not in self.sizes:
            return {}
        sequences = self.factors.sequences()
        found: dict[str, Strategy] = {}
        for operator in self.graph.operators:
            has_batch = any(self.factors.is_batch(name) for name in operator.classes.values())
            letter = self.factors.letter_of(operator, sequences, "tp")
            if letter is not None and has_batch and not operator.prologue:
                found[operator.name] = {"tp": letter}
        if not found and self.base is None:
            sizes = sorted({self.graph.factor_classes[name].size for name in sequences})
            raise LayoutError(
                f"no sequence divides over tp={self.sizes['tp']}: sizes are {', '.join(map(str, sizes)) or 'none'}",
                where="layout: sequence_parallel",
                remedy="use a sequence that tp divides, or leave sequence_parallel out",
            )
        return found

    # --- evaluation and other shapes -----------------------------------------------------------------------------

    def _follow_storage(self, axis: str) -> None:
        """Operators that the base plan does not name follow what their inputs are split by."""
        placed: dict[str, str | None] = {}
        for name in self.graph.parameters:
            shard = self.base.storage(name).get(axis) if self.base else None
            if isinstance(shard, Shard):
                placed[name] = self._class_at(name, shard)
        for operator in self.graph.operators:
            strategy = self.strategies[operator.name]
            if axis not in strategy:
                for tensor in operator.inputs:
                    source = placed.get(tensor)
                    letter = next((one for one, other in operator.classes.items() if other == source), None)
                    if letter is not None and self.factors.fits(operator, letter, axis):
                        strategy[axis] = letter
                        break
            choice = strategy.get(axis)
            for output in operator.outputs:
                found = operator.classes.get(choice) if choice else None
                dims = [name for dim in self.graph.tensors[output].dims for name in dim]
                placed[output] = found if found in dims else None

    def _class_at(self, tensor: str, shard: Shard) -> str | None:
        outer = 1
        for name in self.graph.tensors[tensor].dims[shard.dim]:
            if outer == shard.outer:
                return name
            outer *= self.graph.factor_classes[name].size
        return None

    # --- pins ----------------------------------------------------------------------------------------------------

    def _pin(self) -> None:
        for glob, text in self.layout.pin.items():
            factor, at, axis = text.partition("@")
            where = f"layout: pin[{glob!r}]"
            if not at:
                raise LayoutError(f"{text!r} is not factor@axis", where=where, remedy="write for example 'batch@tp'")
            if axis not in self.mesh.names:
                raise LayoutError(
                    f"unknown axis {axis!r}", where=where, remedy=f"axes are {', '.join(self.mesh.names)}"
                )
            members = [one for one in self.graph.operators if fnmatch.fnmatch(one.module, glob)]
            if not members and self.base is not None:
                continue
            if not members:
                modules = sorted({one.module for one in self.graph.operators if one.module})
                raise LayoutError("matches no module", where=where, remedy=f"modules are: {', '.join(modules[:20])}")
            if axis not in self.sizes:
                continue
            hits = 0
            for operator in members:
                if axis in self.strategies[operator.name]:  # the base plan has settled it
                    continue
                for letter, name in operator.classes.items():
                    wanted = self.factors.is_batch(name) if factor == "batch" else letter == factor
                    if wanted and self.factors.fits(operator, letter, axis):
                        self.strategies[operator.name][axis] = letter
                        hits += 1
                        break
                else:
                    self.strategies[operator.name].setdefault(axis, "")
                self.notes[operator.module][axis] = f"{text}\0pinned"
            if not hits and factor != "none" and self.base is None:
                known = sorted({letter for one in members for letter in one.classes})
                raise LayoutError(
                    f"no operator there can split {factor!r} over {axis}={self.sizes[axis]}",
                    where=where,
                    remedy=f"factors are: batch, none, {', '.join(known)}",
                )

    def _explained(self) -> tuple[Note, ...]:
        data = "dp" in self.sizes
        unsplit = unsplit_notes(self.graph, self.cluster) if self.sizes else ()
        return (*module_notes(self.graph, self.notes, self.missed, data), *dict.fromkeys(self.axis_notes), *unsplit)
