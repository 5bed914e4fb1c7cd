"""Simulates replicas of the run that a RUN.toml describes, under several consistency rules."""

from collections.abc import Callable, Sequence

import msgspec

from meshwright.api.planned_runs import CPU, cluster_of, planned
from meshwright.api.plans import simulate
from meshwright.errors import LayoutError
from meshwright.ir.consistency import Sync, consistency_of
from meshwright.ir.layout import Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.run import Run
from meshwright.planner.replicas import RuleComparison, compare_rules, replica_step
from meshwright.schedules.replicas import all_ranks, of_replica, server_ranks
from meshwright.simulate.faults import ReplicaFaults
from meshwright.simulate.replicas import STEPS

ALONE = "ensemble"
"""The rule under which replicas exchange nothing, each in a process group of its own."""


def compare_rules_of_run(
    run: Run,
    rules: Sequence[str],
    ranks: int = 0,
    *,
    faults: ReplicaFaults | None = None,
    steps: int = STEPS,
    progress: Callable[[str], None] = lambda what: None,
) -> RuleComparison:
    """Simulate the replicas of a run file (``layout.replicas``) under each of these rules, and under ``sync``. The step
    of one replica is simulated from its plan, as ``simulate`` does. ``faults`` are the faults of the replicas.

    ``ranks``: the ranks of all replicas together (0: the number that the layout needs or the cluster has).

    Raises:
        LayoutError: the layout has one replica, or does not fit the model, the batch, the ranks or a rule.
        PlanError: a rule is malformed.
        ClusterError: the cluster is too small, or its units are not alike.
    """
    if run.layout.replicas < 2:
        remedy = "give 2 or more: --replicas 4, or layout.replicas"
        raise LayoutError(f"{run.layout.replicas} replica", where="layout: replicas", remedy=remedy)
    known = [consistency_of(rule) for rule in dict.fromkeys(rules)]
    progress("one replica")
    alone = _with_rule(run, ALONE)
    graph, plan, optimizer = planned(alone, ranks)
    cluster, clips = run.layout.cluster or None, run.train.max_grad_norm > 0
    trace = simulate(graph, cluster, plan, optimizer=optimizer, clips=clips)
    num_ranks = plan.mesh.world_size * run.layout.replicas
    for rule in known:
        of_replica(_layout(run, str(rule)), num_ranks + server_ranks(_layout(run, str(rule))))
    progress("all replicas in step")
    in_step_s = _synchronous_s(run, num_ranks)
    progress("replicas")
    one = layout_text(msgspec.structs.replace(plan.layout, replicas=1, consistency=str(Sync())))
    most = max([num_ranks, *(all_ranks(_layout(run, str(rule)), plan.mesh.world_size) for rule in known)])
    return compare_rules(
        known, run.layout.replicas, replica_step(graph, plan, trace.duration_s, optimizer, in_step_s),
        cluster_of(run, CPU, most), batch_size=graph.batch_size, layout=one, faults=faults, steps=steps,
    )  # fmt: skip


def _synchronous_s(run: Run, num_ranks: int) -> float | None:
    """The step time if one plan spans all replicas; None if the replicas cannot be data-parallel ranks of one plan."""
    try:
        graph, plan, optimizer = planned(_with_rule(run, str(Sync())), num_ranks)
    except LayoutError:
        return None
    cluster, clips = run.layout.cluster or None, run.train.max_grad_norm > 0
    return simulate(graph, cluster, plan, optimizer=optimizer, clips=clips).duration_s


def _with_rule(run: Run, rule: str) -> Run:
    layout = msgspec.structs.replace(run.layout, consistency=rule)
    return msgspec.structs.replace(run, layout=layout)


def _layout(run: Run, rule: str) -> Layout:
    return msgspec.structs.replace(run.layout.sizes(), consistency=rule)
