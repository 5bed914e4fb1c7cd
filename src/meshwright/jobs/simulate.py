"""Simulates a job graph on nodes: when each unit starts and ends, the makespan, and what no schedule beats. Pure."""

import heapq
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

from meshwright.ir.job_graph import JobNode
from meshwright.jobs.order import Unit, before_units, critical_path, remaining_s
from meshwright.jobs.placement import Free, NodeSlot, next_starts


class UnitTime(NamedTuple):
    """When a unit runs, and where."""

    unit: str
    node: str
    start_s: float
    end_s: float


def simulate(units: Mapping[str, Unit], nodes: Mapping[str, JobNode], seconds: Mapping[str, float]) -> list[UnitTime]:
    """The times of all units, in order of their starts. Starting a unit takes no time, and units do not slow each
    other."""
    left_s = remaining_s(before_units(units), seconds)
    free, now_s, finished = Free(nodes), 0.0, set[str]()
    waiting, running, number = dict(units), list[tuple[float, int, Unit, NodeSlot]](), count()
    times = []
    while waiting or running:
        ready = [unit for unit in waiting.values() if finished.issuperset(unit.before)]
        for unit, slot in next_starts(ready, left_s, free):
            del waiting[unit.name]
            end_s = now_s + seconds[unit.name]
            times.append(UnitTime(unit.name, slot.node, now_s, end_s))
            heapq.heappush(running, (end_s, next(number), unit, slot))
        if not running:
            raise AssertionError("a unit that no node can run was not refused")
        now_s = running[0][0]
        while running and running[0][0] <= now_s:
            _, _, unit, slot = heapq.heappop(running)
            free.give(slot)
            finished.add(unit.name)
    return times


def makespan(times: list[UnitTime]) -> float:
    """The end of the last unit."""
    return max((time.end_s for time in times), default=0.0)


def lower_bound(units: Mapping[str, Unit], nodes: Mapping[str, JobNode], seconds: Mapping[str, float]) -> float:
    """Seconds that no schedule beats: the critical path, or all core-seconds (or GPU-seconds) over all cores (GPUs)."""
    path_s, _ = critical_path(before_units(units), seconds)
    bounds = [path_s]
    for asked, there in (("cpus", sum(n.cpus for n in nodes.values())), ("gpus", sum(n.gpus for n in nodes.values()))):
        work = sum(getattr(unit, asked) * seconds[name] for name, unit in units.items())
        if there and work:
            bounds.append(work / there)
    return max(bounds)
