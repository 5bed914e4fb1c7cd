"""Join the plans of the stages of a layout whose stages differ."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.part import stage_cluster
from meshwright.ir.pipeline import Pipeline
from meshwright.ir.plan import Bucket, Note, Plan, starred
from meshwright.ir.stages import Cut, cut


@dataclass
class AlikeRanks:
    """Pipeline ranks that one plan serves: the layout in which all stages have their sizes, their part of the cluster,
    and the plan that theirs is adapted from. ``indices`` are the ranks. Groups are equal if one plan serves both."""

    layout: Layout
    cluster: Cluster | None
    base: Plan | None
    indices: list[int] = field(default_factory=list, compare=False)


def alike_ranks(layout: Layout, cluster: Cluster | None, base: Plan | None) -> list[AlikeRanks]:
    """The pipeline ranks of a layout with ``stage_sizes``, in groups that one plan serves."""
    groups: list[AlikeRanks] = []
    for index in range(layout.pp):
        part = stage_cluster(cluster, layout.mesh(), index) if cluster is not None else None
        own = base and msgspec.structs.replace(base, algorithms=base.algorithms_of(index), links=base.links_of(index))
        given = AlikeRanks(layout.of_stage(index), part, own)
        group = next((each for each in groups if each == given), None)
        if group is None:
            groups.append(group := given)
        group.indices.append(index)
    return groups


def join_plans(graph: Graph, layout: Layout, plans: Sequence[Plan]) -> Plan:
    """The plan of ``layout``. ``plans`` has a plan for each pipeline rank, in which all stages have the sizes of this
    pipeline rank. All plans have the same cut. Each stage is taken from the plan of its pipeline rank."""
    divided, places = cut(graph, plans[0].firsts), layout.pipeline
    stages = []
    for index in range(divided.num_stages):
        plan = plans[places.rank_of(index)]
        stages.append(msgspec.structs.replace(plan.stages[index], algorithms=plan.algorithms, links=plan.links))

    def of_all(buckets: Sequence[tuple[Bucket, ...]]) -> tuple[Bucket, ...]:
        return tuple(
            bucket
            for index, own in enumerate(buckets)
            for bucket in own
            if all(places.rank_of(stage) == index for stage in divided.owners[bucket.parameters[0]])
        )

    return msgspec.structs.replace(
        plans[0],
        mesh=layout.mesh(),
        layout=msgspec.structs.replace(layout, precision=graph.precision),
        stages=tuple(stages),
        buckets=of_all([plan.buckets for plan in plans]),
        gathers=of_all([plan.gathers for plan in plans]),
        algorithms={},
        links={},
        notes=_notes(graph, divided, plans, places),
    )


def _notes(graph: Graph, divided: Cut, plans: Sequence[Plan], places: Pipeline) -> tuple[Note, ...]:
    """The notes on the modules of each stage. A note that does not hold for all stages names its pipeline rank."""
    modules: dict[int, set[str]] = {index: set() for index in range(len(plans))}
    for operator in graph.operators:
        if operator.name in divided.stage_of:
            modules[places.rank_of(divided.stage_of[operator.name])].add(starred(operator.module))
    all_modules = set().union(*modules.values())
    notes: dict[Note, None] = {}
    for index, plan in enumerate(plans):
        for note in plan.notes:
            module = note.module.removesuffix(" (backward)")
            if module in all_modules and module not in modules[index]:
                continue
            if not all(note in other.notes for other in plans):
                note = msgspec.structs.replace(note, module=f"pp rank {index}: {note.module}")
            notes[note] = None
    return tuple(notes)
