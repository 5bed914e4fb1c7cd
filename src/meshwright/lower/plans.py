"""A plan -> the programs of its stages, without processes: planning costs them, ``plan --program`` shows them."""

from collections.abc import Mapping

from meshwright.capture.garbage import nothing_collected
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import AxisGroup, members
from meshwright.ir.plan import Plan
from meshwright.ir.program import Program
from meshwright.ir.stages import cut
from meshwright.lower.counts import Counter
from meshwright.lower.describe import describe
from meshwright.lower.stage import lower_stage
from meshwright.ops.base import OperatorRule, Target


class PlanLowering:
    """Lowers plans of one graph; ``rules`` are the user's. An ``ir.program.Lower``."""

    def __init__(self, graph: Graph, rules: Mapping[Target, OperatorRule] | None = None) -> None:
        self._graph, self._rules, self._counter = graph, rules or {}, Counter(rules or {})

    @nothing_collected()
    def __call__(self, plan: Plan, rank: int = 0) -> tuple[Program, ...]:
        """The programs of all stages, each on the rank of its submesh at the place of ``rank``. The first has the
        largest parts, where parts differ."""
        divided, found = cut(self._graph, plan.firsts), []
        for stage in range(divided.num_stages):
            groups = groups_of(plan, stage, rank)
            lowered = lower_stage(self._graph, plan, stage, groups, rules=self._rules, divided=divided)
            found.append(describe(lowered, self._graph, plan, groups, self._counter))
        return tuple(found)


def groups_of(plan: Plan, stage: int, rank: int) -> dict[str, AxisGroup]:
    """The groups of a rank of a stage's submesh, called as their axes."""
    mesh = plan.submesh(stage)
    joined = [name for name in plan.algorithms if len(members(name)) > 1 and mesh.has(name)]
    found = {}
    for name in (*mesh.names, *joined):
        ranks = mesh.group_ranks(name, rank % mesh.world_size)
        if len(ranks) > 1:
            index = ranks.index(rank % mesh.world_size)
            found[name] = AxisGroup(name, len(ranks), index, plan.algorithms.get(name, "native"))
    return found
