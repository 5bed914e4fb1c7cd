"""Choose the ranks that receive together what crosses between stages: all ranks of a stage, those of a box, or none.

Ranks that receive together receive each element once and gather. The forms differ in the bytes that cross between the
stages and in the bytes that are gathered, inside a box or between boxes (Zhuang et al. 2023, On Optimizing the
Communication of Model Parallelism). The form with the smallest predicted time is taken for each border and
direction.
"""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from meshwright.cost.crossing import Crossed, Crossing, crossing
from meshwright.cost.fabric import Fabric
from meshwright.errors import PlanError
from meshwright.ir.cluster import NETWORK, Cluster
from meshwright.ir.graph import ITEM_BYTES, Graph
from meshwright.ir.layout import TIME
from meshwright.ir.level import units_of
from meshwright.ir.placement import Placements, local_shape
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import Cut, border, cut
from meshwright.schedules.timing import PARTNER

_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)


def with_receivers(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """The plan with the ranks that receive together on the cluster. A plan whose micro-batches have no fixed order
    keeps its messages without gathers: ranks of a stage would meet in them."""
    if len(plan.stages) < 2 or plan.schedule == "message-driven" or plan.mesh.world_size > cluster.num_devices:
        return plan
    fabric, crossings = Fabric(cluster, plan.mesh), _Crossings(plan, graph)
    stages = []
    for number, stage in enumerate(plan.stages):
        receivers = dict[ActionKind, tuple[int, ...]]()
        for kind in _RECEIVES:
            tensors = crossings.into(number, kind)
            if not tensors:
                continue
            source, target = (plan.pipeline.rank_of(each) for each in (number + PARTNER[kind][0], number))
            if source == target:
                continue
            try:
                best, _ = cheapest(fabric, source, target, tensors)
            except PlanError:  # parts that differ by a unit are sent as they are
                continue
            if best != _forms(fabric, target)[0]:
                receivers[kind] = best
        stages.append(msgspec.structs.replace(stage, receivers=receivers))
    return msgspec.structs.replace(plan, stages=tuple(stages))


def follow_receivers(plan: Plan, base: Plan, graph: Graph) -> Plan:
    """``plan``, of another capture of the same model, with the receivers of ``base`` where the new sizes are cut
    evenly."""
    if not any(stage.receivers for stage in base.stages):
        return plan
    crossings, stages = _Crossings(plan, graph), []
    for number, (stage, other) in enumerate(zip(plan.stages, base.stages, strict=True)):
        even = {kind: each for kind, each in other.receivers.items() if crossings.divide(number, kind, each)}
        stages.append(msgspec.structs.replace(stage, receivers=even))
    return msgspec.structs.replace(plan, stages=tuple(stages))


def cheapest(fabric: Fabric, source: int, target: int, tensors: Sequence[Crossed]) -> tuple[tuple[int, ...], Crossing]:
    """The cheapest receivers of ``tensors`` that pipeline rank ``source`` sends to pipeline rank ``target``, and the
    crossing with them. Of forms that take equally long, the form that sends the fewest bytes between the stages is
    taken, and else the form that a plan need not name.

    Raises:
        PlanError: a tensor is not cut evenly.
    """
    mesh = fabric.mesh
    forms = dict.fromkeys(_forms(fabric, target))
    crossings = [(form, crossing(tensors, mesh.submesh(source), mesh.submesh(target), form)) for form in forms]
    return min(crossings, key=lambda each: (crossing_s(fabric, source, target, each[1]), each[1].sent_bytes))


def crossing_s(fabric: Fabric, source: int, target: int, crossing: Crossing) -> float:
    """Seconds of a crossing between two pipeline ranks: its messages, then its gathers."""
    return fabric.send_s(crossing.sent_bytes, source, target) + fabric.pieces_s(crossing.gathers, target)


def _forms(fabric: Fabric, target: int) -> tuple[tuple[int, ...], ...]:
    """All ranks of a stage together, the ranks of each box, and each rank by itself. The first is the form without an
    entry in the plan (``ir.plan.Stage``)."""
    ranks = fabric.mesh.stage_ranks(target)
    boxes = tuple(len(list(inside)) for _, inside in groupby(ranks, lambda rank: _box_of(fabric.cluster, rank)))
    forms = (len(ranks),), boxes, (1,) * len(ranks)
    return forms if fabric.mesh.stages else forms[::-1]


def _box_of(cluster: Cluster, rank: int) -> int:
    """The first rank of the box that holds ``rank``."""
    levels, first = cluster.levels, 0
    while len(levels) > 1 or any(level.name == NETWORK or level.members for level in levels):
        unit = next(unit for unit in units_of(levels, cluster.device) if rank - first < unit.stop)
        levels, first = unit.levels, first + unit.start
    return first


class _Crossings:
    """The tensors that cross between the stages of a plan."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.divided: Cut = cut(graph, plan.firsts)
        self._makers = graph.producers()

    def into(self, stage: int, kind: ActionKind) -> list[Crossed]:
        """The tensors that a stage receives from the previous stage (``RECV_F``) or the next stage (``RECV_B``)."""
        names = self.divided.received(stage)[_RECEIVES.index(kind)]
        return [self._of(name, stage + PARTNER[kind][0], stage) for name in names]

    def divide(self, stage: int, kind: ActionKind, receivers: tuple[int, ...]) -> bool:
        """Whether all tensors that a stage receives are cut evenly."""
        near = stage + PARTNER[kind][0]
        try:
            crossing(self.into(stage, kind), self.plan.submesh(near), self.plan.submesh(stage), receivers)
        except PlanError:
            return False
        return True

    def _of(self, name: str, source: int, target: int) -> Crossed:
        tensor = self.graph.tensors[name]
        ends = [self._border(name, stage) for stage in (source, target)]
        over_time: Placements = {axis: placement for axis, placement in ends[0].items() if axis == TIME}
        whole = local_shape(tensor.shape, over_time, self.plan.sizes(source))
        first, second = ({axis: placed for axis, placed in end.items() if axis != TIME} for end in ends)
        return Crossed(name, whole, ITEM_BYTES[tensor.dtype], first, second)

    def _border(self, name: str, stage: int) -> Placements:
        maker, sizes = self._makers[name], self.plan.sizes(stage)
        maker_stage = self.divided.stage_of[maker.name]
        strategy = self.plan.stages[maker_stage].strategy(maker.name)
        own = {axis: choice for axis, choice in strategy.items() if axis in sizes}
        return border(self.graph, name, maker, own, sizes, uneven=self.plan.uneven)
