"""Compares pipeline schedules of a run under jitter, in the simulator."""

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from meshwright.api.planned_runs import CPU, captured, cluster_of
from meshwright.api.plans import choose
from meshwright.errors import LayoutError
from meshwright.ir.run import Run
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import foretell
from meshwright.simulate.faults import Faults


class ScheduleTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated steps under one schedule. ``quiet_s``: the step without slow ranks and jitter. ``mean_s``, ``worst_s``:
    the mean and the slowest of several steps with different draws of jitter. ``peak_bytes``: the largest memory of any
    rank."""

    schedule: str
    quiet_s: float
    mean_s: float
    worst_s: float
    peak_bytes: int


class ComparedSchedules(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated steps under several schedules, in the order in which they were asked for."""

    schedules: tuple[ScheduleTimes, ...]


def compare_schedules_of_run(
    runs: Sequence[Run],
    ranks: int = 0,
    *,
    contention: bool = False,
    slow: dict[int, float] | None = None,
    jitter: float = 0.0,
    seeds: Sequence[int] = (0,),
    progress: Callable[[str], None] = lambda what: None,
) -> ComparedSchedules:
    """Simulate ``runs``, which differ only in their layouts' schedules. All schedules see the same slow ranks. They
    also see the same draws of jitter, in the order in which each rank computes.

    Raises:
        LayoutError: a layout is searched, is not a pipeline, or does not fit the model.
    """
    result = list[ScheduleTimes]()
    graph, optimizer, world_size = captured(runs[0], ranks)
    for run in runs:
        layout, clips = run.layout.chosen(), run.train.max_grad_norm > 0
        if run.layout.searched:
            remedy = "give layout.pp, layout.microbatches, ..., and leave out layout.plan = auto"
            raise LayoutError("schedules are compared in a given layout", where="--schedule", remedy=remedy)
        progress(run.layout.schedule)
        plan = choose(layout, graph, world_size, run.layout.cluster or None, CPU, optimizer, clips=clips)
        if plan.layout.pp == 1:
            raise LayoutError("the layout is no pipeline", where="--schedule", remedy="give layout.pp of 2 or more")
        cluster, lower = cluster_of(run, CPU, world_size), PlanLowering(graph)
        quiet = foretell(lower, plan, cluster, optimizer=optimizer, clips=clips, contention=contention)
        steps = []
        for seed in seeds:
            faults = Faults(slow=slow or {}, jitter=jitter, seed=seed)
            noisy = foretell(lower, plan, cluster, contention=contention, faults=faults, work=quiet.work)
            steps.append(noisy.played.step_s)
        times = ScheduleTimes(
            schedule=plan.layout.schedule,
            quiet_s=quiet.played.step_s,
            mean_s=fmean(steps),
            worst_s=max(steps),
            peak_bytes=quiet.peak.peak_bytes,
        )
        result.append(times)
    return ComparedSchedules(schedules=tuple(result))
