"""Lowers a plan to the programs of its stages, without starting processes.

The planner computes costs from these programs, and ``plan --program`` shows them.
"""

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence

import msgspec

from meshwright.garbage import collect_young, nothing_collected
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.mesh import AxisGroup, members
from meshwright.ir.placement import is_linear
from meshwright.ir.plan import Plan, Strategy
from meshwright.ir.program import OperatorProgram, Program
from meshwright.lower.alike import StageKey, renamed, stage_key
from meshwright.lower.counts import Counter
from meshwright.lower.describe import describe
from meshwright.lower.operator import lower_operator
from meshwright.lower.partition import EmittedStage, partition
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.stage import emit_stage
from meshwright.ops.attention import SETTINGS_AT
from meshwright.ops.base import OperatorRule, Target
from meshwright.torch_private import DisableTorchFunction

MOST_KEPT = 6
"""The number of plans whose programs are kept. A choice of how many buckets to gather ahead needs five."""
_SETTINGS_AT = {str(target): at for target, at in SETTINGS_AT.items()}


class PlanLowering:
    """Lowers plans of one graph; implements ``ir.program.Lower``. ``rules`` are the user's operator rules. ``box``: if
    not 0, devices of a box of so many consecutive ranks share memory, and run products in pieces there.

    PyTorch's function modes, such as the mode that ``torch.set_default_device`` leaves on, are hidden from the many
    calls on fake tensors that lowering makes. Otherwise they would take a third of the time."""

    def __init__(self, graph: Graph, rules: Mapping[Target, OperatorRule] | None = None, box: int = 0) -> None:
        self._graph, self._rules, self._counter, self._box = graph, rules or {}, Counter(rules or {}), box
        self._operators: dict[object, OperatorProgram] = {}
        self._calls: dict[str, tuple[object, ...]] = {}
        self._planned: PlannedGraph | None = None
        self._recent: deque[tuple[Plan, int, tuple[Program, ...]]] = deque(maxlen=MOST_KEPT)

    def __call__(self, plan: Plan, rank: int = 0) -> tuple[Program, ...]:
        """The programs of all stages. Each program is for the rank of its stage's submesh that corresponds to ``rank``.
        If parts have different sizes, rank 0 has the largest part."""
        known = self._known(plan, rank)
        if known is None:
            (known,) = self._programs([plan], rank, None)
            self._recent.append((_lowered_part(plan), rank, known))
            collect_young()
        return known

    def _known(self, plan: Plan, rank: int) -> tuple[Program, ...] | None:
        """The programs of a plan that was lowered lately: a search needs the memory and the time of the same plan."""
        asked = _lowered_part(plan), rank
        return next((programs for *recent, programs in self._recent if tuple(recent) == asked), None)

    def variants(self, plans: Sequence[Plan], stages: Collection[int] | None = None) -> list[tuple[Program, ...]]:
        """The programs of plans that differ only in recomputation, prefetching and graphs. They share most of the
        work. ``stages``: only of these stages; None: of all."""
        if stages is not None:
            programs = self._programs(plans, 0, stages)
            collect_young()
            return programs
        known = {place: own for place, plan in enumerate(plans) if (own := self._known(plan, 0)) is not None}
        missing = [place for place in range(len(plans)) if place not in known]
        lowered = self._programs([plans[place] for place in missing], 0, None) if missing else []
        self._recent.extend((_lowered_part(plans[place]), 0, own) for place, own in zip(missing, lowered, strict=True))
        known |= zip(missing, lowered, strict=True)
        collect_young()
        return [known[place] for place in range(len(plans))]

    @nothing_collected()
    def _programs(self, plans: Sequence[Plan], rank: int, stages: Collection[int] | None) -> list[tuple[Program, ...]]:
        planned_graphs = []
        for plan in plans:
            self._planned = self._planned.following(plan) if self._planned else PlannedGraph(self._graph, plan)
            planned_graphs.append(self._planned)
        programs: list[list[Program]] = [[] for _ in plans]
        alike: dict[Hashable, tuple[StageKey, list[Program]]] = {}
        for stage in range(len(plans[0].stages)) if stages is None else stages:
            groups = groups_of(plans[0], stage, rank)
            symmetric = [self._within_boxes(plan, stage, rank, groups) for plan in plans]
            key = stage_key(planned_graphs, stage, groups, symmetric, self._call_of)
            if key is not None and key.facts in alike:
                other, lowered = alike[key.facts]
                own = [renamed(program, other, key, stage, planned_graphs[0], groups) for program in lowered]
            else:
                own = self._lowered(planned_graphs, stage, groups, symmetric)
            if key is not None:
                alike.setdefault(key.facts, (key, own))
            for of_plan, program in zip(programs, own, strict=True):
                of_plan.append(program)
        return [tuple(of_plan) for of_plan in programs]

    def _lowered(
        self, planned_graphs: Sequence[PlannedGraph], stage: int, groups: Mapping[str, AxisGroup],
        symmetric: Sequence[frozenset[str]],
    ) -> list[Program]:  # fmt: skip
        """The programs of a stage, one for each plan. ``symmetric``: for each plan, the groups that share memory."""
        sizes = {group.name: group.size for group in groups.values()}
        emitted: dict[frozenset[str], EmittedStage] = {}
        programs = []
        with DisableTorchFunction():
            for planned, within in zip(planned_graphs, symmetric, strict=True):
                again = planned.mixtures_again(stage)
                if again not in emitted:
                    emitted[again] = emit_stage(planned, stage, groups, rules=self._rules)
                lowered = partition(
                    emitted[again], planned.recomputation(stage), {}, ahead=planned.plan.prefetch,
                    graphs=planned.plan.graphs, symmetric=within,
                )  # fmt: skip
                programs.append(describe(lowered, sizes, self._counter))
        return programs

    def _within_boxes(self, plan: Plan, stage: int, rank: int, groups: Collection[str]) -> frozenset[str]:
        """The groups of a rank of a stage's submesh whose ranks share memory."""
        mesh, first = plan.submesh(stage), plan.mesh.stage_ranks(plan.pipeline.rank_of(stage)).start
        ranks = {name: mesh.group_ranks(name, rank % mesh.world_size) for name in groups if self._box}
        return frozenset(name for name, own in ranks.items() if len({(first + each) // self._box for each in own}) == 1)

    def operator(
        self, operator: Operator, strategy: Strategy, sizes: Mapping[str, int], interior_first: bool = False
    ) -> OperatorProgram:
        """The program of an operator on the first rank of a mesh. ``sizes`` maps a mesh axis to its size. Equal calls
        are lowered only once."""
        splits = {axis: choice for axis, choice in strategy.items() if choice and not is_linear(choice)}
        used = {axis: size for axis, size in sizes.items() if axis in splits}
        key = (*self._call_of(operator), tuple(splits.items()), tuple(used.items()), interior_first)
        if key not in self._operators:
            with DisableTorchFunction():
                self._operators[key] = lower_operator(
                    self._graph, operator, splits, used, self._counter, self._rules, interior_first
                )
        return self._operators[key]

    def _call_of(self, operator: Operator) -> tuple[object, ...]:
        """A key made of everything that an operator's program depends on, except its strategy."""
        if operator.name not in self._calls:
            tensors = [self._graph.tensors[name] for name in (*operator.inputs, *operator.outputs)]
            rule = operator.rule
            self._calls[operator.name] = (
                operator.target, _without_number(operator), tuple((tensor.shape, tensor.dtype) for tensor in tensors),
                operator.prologue, msgspec.json.encode((rule, operator.letters)),
            )  # fmt: skip
        return self._calls[operator.name]


def _lowered_part(plan: Plan) -> Plan:
    """The plan without all that changes no program."""
    stages = tuple(msgspec.structs.replace(stage, receivers={}) for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages, notes=(), alternatives=(), prediction=None)


def _without_number(operator: Operator) -> str:
    """The arguments of an operator, without the number of a call of attention. Only random numbers depend on it."""
    if operator.target not in _SETTINGS_AT:
        return operator.arguments
    number = _SETTINGS_AT[operator.target] + 4  # after dropout, causal, scale and the random key
    arguments = operator.arguments.split(", ")
    return ", ".join((*arguments[:number], *arguments[number + 1 :]))


def groups_of(plan: Plan, stage: int, rank: int) -> dict[str, AxisGroup]:
    """A rank's groups within a stage's submesh. Maps the name of an axis to the group; groups of one rank are left
    out."""
    mesh = plan.submesh(stage)
    algorithms = plan.algorithms_of(stage)
    joined = [name for name in algorithms if len(members(name)) > 1 and mesh.has(name)]
    groups = {}
    for name in (*mesh.names, *joined):
        ranks = mesh.group_ranks(name, rank % mesh.world_size)
        if len(ranks) > 1:
            index = ranks.index(rank % mesh.world_size)
            groups[name] = AxisGroup(name, len(ranks), index, algorithms.get(name, "native"))
    return groups
