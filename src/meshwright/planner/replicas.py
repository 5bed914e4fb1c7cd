"""Replicas of a plan: the parameters that ranks exchange, their steps under consistency rules, and the choice of a
rule."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import DataError, LayoutError, PlanError
from meshwright.ir.cluster import Cluster
from meshwright.ir.consistency import Consistency, DiLoCo, ElasticAverage, Local, Sync, consistency_of
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.placement import is_split
from meshwright.ir.plan import Alternative, Note, Plan
from meshwright.schedules.replicas import of_replica, server_ranks
from meshwright.simulate.faults import ReplicaFaults
from meshwright.simulate.letters import ReplicaStep
from meshwright.simulate.replicas import STEPS, ReplicaTimes, simulate_replicas


class RuleTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated times under one consistency rule, as a row of a comparison. ``sample_s``: seconds per sample, for
    all replicas together. ``speedup``: the time of a synchronous step divided by the time of a step under this rule.
    The traces are not stored."""

    times: ReplicaTimes
    sample_s: float
    speedup: float


class RuleComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Consistency rules side by side, beginning with the synchronous rule. ``batch_size``: the number of samples in a
    step of all replicas. ``alone_s``: the step time of one replica without exchange and faults."""

    num_replicas: int
    batch_size: int
    layout: str
    alone_s: float
    num_bytes: float
    rows: tuple[RuleTimes, ...]


def compare_rules(
    rules: Sequence[Consistency],
    num_replicas: int,
    step: ReplicaStep,
    cluster: Cluster,
    *,
    batch_size: int,
    layout: str = "",
    faults: ReplicaFaults | None = None,
    steps: int = STEPS,
) -> RuleComparison:
    """Simulate replicas under each of ``rules`` and under ``sync``, with the same faults. ``batch_size``: the number of
    samples in a step of one replica.

    Raises:
        LayoutError, ClusterError: as ``simulate_replicas``.
    """
    known = {
        str(rule): simulate_replicas(rule, num_replicas, step, cluster, steps=steps, faults=faults)
        for rule in dict.fromkeys([Sync(), *rules])
    }
    sync = known["sync"]
    rows = tuple(
        RuleTimes(
            times=times, sample_s=times.step_s / (batch_size * num_replicas), speedup=sync.step_s / times.step_s
        )
        for times in known.values()
    )  # fmt: skip
    return RuleComparison(
        num_replicas=num_replicas, batch_size=batch_size * num_replicas, layout=layout, alone_s=step.step_s,
        num_bytes=step.num_bytes, rows=rows,
    )  # fmt: skip


def replica_step(
    graph: Graph, plan: Plan, step_s: float, optimizer: OptimizerCost, sync_step_s: float | None = None
) -> ReplicaStep:
    """The step of one replica of a plan, which takes ``step_s``. Of several ranks with equal copies of a parameter, the
    first exchanges it with other replicas. ``sync_step_s``: the step time if the ranks of all replicas are
    data-parallel ranks of one plan."""
    parts = exchanged_bytes(graph, plan)
    return ReplicaStep(
        step_s=step_s, parts={rank: float(size) for rank, size in parts.items()}, num_ranks=plan.mesh.world_size,
        state_bytes=float(optimizer.states * sum(parts.values())),
        exposed_s=None if sync_step_s is None else max(0.0, sync_step_s - step_s),
    )  # fmt: skip


def exchanged_bytes(graph: Graph, plan: Plan) -> dict[int, int]:
    """Maps the ranks that exchange parameters with other replicas to the bytes that each exchanges."""
    result: dict[int, int] = {}
    for place in range(plan.mesh.num_stages):
        mesh, ranks = plan.mesh.submesh(place), plan.mesh.stage_ranks(place)
        kinds: defaultdict[frozenset[str], int] = defaultdict(int)
        for stage in plan.pipeline.stages_of(place):
            for name, placements in plan.stages[stage].storage.items():
                if name in graph.parameters:
                    split = frozenset(axis for axis, placement in placements.items() if is_split(placement))
                    kinds[split] += graph.tensors[name].num_bytes // _parts(mesh.sizes, split)
        for index, rank in enumerate(ranks):
            place_on = mesh.coordinates(index)
            size = sum(
                size
                for split, size in kinds.items()
                if all(at == 0 for axis, at in place_on.items() if axis not in split and axis != "pp")
            )
            if size:
                result[rank] = size
    return result


def _parts(sizes: Mapping[str, int], axes: frozenset[str]) -> int:
    count = 1
    for axis in axes:
        count *= sizes.get(axis, 1)
    return count


# --- the choice of a rule --------------------------------------------------------------------------------------------

LEAST_STEPS = 20
"""The smallest number of steps that are simulated. For rules with longer periods, a whole period is simulated."""
LITTLE = 1.05
"""An exchange costs little if a step with it takes at most this number times a step without it."""
PERIODS = tuple(2**power for power in range(1, 10))
"""Candidates for the steps between two exchanges, if the user leaves this number to the planner."""
UNKNOWN = "what a rule does to the loss, the planner cannot know"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas under an allowed rule: the graph and plan of one replica, and the time in which every replica makes one
    step."""

    graph: Graph
    plan: Plan
    step_s: float


def choose_rule(
    graph: Graph,
    devices: int,
    cluster: Cluster,
    allow: Sequence[str],
    graph_of: Callable[[int], Graph],
    search: Callable[[Graph, int], Plan],
    optimizer: OptimizerCost,
) -> tuple[Graph, Plan]:
    """Choose between the best synchronous plan and replicas under an allowed rule, by simulated time for an equal
    number of samples. Return the plan with its graph. For replicas, both are those of one replica.

    The number of replicas must divide the devices and the batch. All replicas are assumed to be equally fast.
    ``graph_of`` makes the graph of one replica, given the number of replicas that share the batch. ``search`` finds the
    best plan for a graph and a number of devices.

    Raises:
        PlanError: a rule is malformed.
        LayoutError: nothing is allowed besides ``sync``, or no plan fits.
    """
    rules = [variants for variants in map(variants_of, dict.fromkeys(allow)) if not isinstance(variants[0], Sync)]
    if not rules:
        raise LayoutError("no rule but sync is allowed", where="allow", remedy='allow some, such as "local(16)"')
    in_step = search(graph, devices)
    in_step_s = in_step.prediction.step_s if in_step.prediction else math.inf
    searched: dict[tuple[int, int], tuple[Graph, Plan] | None] = {}
    found = []
    for count in (count for count in range(2, devices + 1) if graph.batch_size % count == 0):
        for variants in rules:
            world_size = _ranks_of_one(in_step, variants[0], count, devices)
            if not world_size:
                continue
            if (count, world_size) not in searched:
                searched[count, world_size] = _searched(count, world_size, graph_of, search)
            if (one := searched[count, world_size]) is not None:
                found.append(_candidate(*one, variants, count, cluster, optimizer))
    found.sort(key=lambda candidate: candidate.step_s)
    if not found or found[0].step_s >= in_step_s:
        return graph, _with_notes(in_step, in_step_s, in_step, found, in_step_s, cluster)
    best, *others = found
    return best.graph, _with_notes(best.plan, best.step_s, in_step, others, in_step_s, cluster)


def variants_of(text: str) -> list[Consistency]:
    """The rules that the user allows with a text. ``local`` or ``diloco`` without a number allow several rules, with
    rising numbers of steps.

    Raises:
        PlanError: the rule is malformed.
    """
    if text in ("local", "diloco"):
        return [consistency_of(f"{text}({every})") for every in PERIODS]
    return [consistency_of(text)]


def _ranks_of_one(plan: Plan, rule: Consistency, count: int, devices: int) -> int:
    """The number of ranks of one of ``count`` replicas; 0 if the devices cannot be divided into them, or the rule does
    not allow it."""
    layout = msgspec.structs.replace(plan.layout, stage_sizes=(), replicas=count, consistency=str(rule))
    if devices <= server_ranks(layout):
        return 0
    try:
        return of_replica(layout, devices)[1]
    except (LayoutError, PlanError):
        return 0


def _searched(
    count: int, world_size: int, graph_of: Callable[[int], Graph], search: Callable[[Graph, int], Plan]
) -> tuple[Graph, Plan] | None:
    try:
        graph = graph_of(count)
        return graph, search(graph, world_size)
    except (LayoutError, DataError):
        return None


def _candidate(
    graph: Graph, plan: Plan, variants: Sequence[Consistency], count: int, cluster: Cluster, optimizer: OptimizerCost
) -> Candidate:
    """The first variant whose exchange costs little, or else the last variant."""
    assert plan.prediction is not None
    step = replica_step(graph, plan, plan.prediction.step_s, optimizer)
    rule, step_s = variants[0], math.inf
    for rule in variants:
        step_s = _rule_step_s(rule, count, step, cluster)
        if step_s <= LITTLE * step.step_s:
            break
    layout = msgspec.structs.replace(plan.layout, replicas=count, consistency=str(rule))
    return Candidate(
        graph=graph, plan=msgspec.structs.replace(plan, layout=layout, consistency=str(rule)), step_s=step_s
    )  # fmt: skip


def _rule_step_s(rule: Consistency, count: int, step: ReplicaStep, cluster: Cluster) -> float:
    period = rule.every if isinstance(rule, Local | DiLoCo | ElasticAverage) else 1
    steps = period * math.ceil(LEAST_STEPS / period)
    return simulate_replicas(rule, count, step, cluster, steps=steps).step_s


def _with_notes(
    chosen: Plan, step_s: float, in_step: Plan, others: Sequence[Candidate], in_step_s: float, cluster: Cluster
) -> Plan:
    """The chosen plan, with a note on its expected time, and with the alternatives that were compared."""
    rule = chosen.consistency if chosen.layout.replicas > 1 else str(Sync())
    if rule == str(Sync()):
        reason = "no allowed rule takes less time for as many samples while all replicas are equally fast"
        split = rule
    else:
        split = f"{chosen.layout.replicas} replicas, {rule}"
        reason = (
            f"{step_s * 1e3:.4g} ms for as many samples as a synchronous step of {in_step_s * 1e3:.4g} ms, "
            f"{in_step_s / step_s:.2f} x as fast while all replicas are equally fast"
        )
        if cluster.device.kind != "cpu":
            reason += "; so far, letters between replicas carry tensors of the CPU only"
    note = Note(module="(replicas)", split=split, reason=f"{reason}; {UNKNOWN}")
    weighed = (*_alternatives(in_step, step_s, others), *chosen.alternatives)
    return msgspec.structs.replace(chosen, notes=(*chosen.notes, note), alternatives=weighed)


def _alternatives(in_step: Plan, step_s: float, others: Sequence[Candidate]) -> Iterator[Alternative]:
    """The fastest candidate of each rule that was not chosen, and the synchronous plan."""
    best = {candidate.plan.consistency: candidate for candidate in reversed(others)}
    for candidate in sorted(best.values(), key=lambda candidate: candidate.step_s):
        plan = candidate.plan
        peak = plan.prediction.peak_memory_bytes if plan.prediction else 0
        why = f"{candidate.step_s / step_s:.2f} x the time for as many samples"
        yield Alternative(
            layout=layout_text(plan.layout), step_s=candidate.step_s, peak_memory_bytes=peak, why=why
        )  # fmt: skip
    if in_step.prediction is not None and step_s < in_step.prediction.step_s:
        yield Alternative(
            layout=layout_text(in_step.layout), step_s=in_step.prediction.step_s,
            peak_memory_bytes=in_step.prediction.peak_memory_bytes,
            why=f"{in_step.prediction.step_s / step_s:.2f} x the time for as many samples",
        )  # fmt: skip
