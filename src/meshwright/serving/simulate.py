"""Simulates a plan item by item: sources, links and workers with queues, as discrete events.

Every worker handles its items one after the other, in the order in which their last input comes. A message occupies its
link for the time of its bits; messages of a link follow each other. All times are drawn from the seed and the item's
number, so that a run with emulated devices draws the same ones.
"""

import heapq
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from meshwright.serving.plan import WorkflowPlan
from meshwright.serving.routes import routes
from meshwright.serving.workflow import Variant, Workflow

Arrivals = Literal["even", "poisson"]
"""When items come: at equal distances, or at random with the same rate."""


class PlayedItems(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What happened to the items of a simulation or a run.

    ``injected_s`` and ``finished_s`` have the times of each item, from the start of its first source to its last
    result. ``busy_s`` has the seconds for which each worker computed."""

    injected_s: tuple[float, ...]
    finished_s: tuple[float, ...]
    busy_s: dict[str, float]

    @property
    def latencies_s(self) -> tuple[float, ...]:
        """The latency of each item."""
        return tuple(end - begin for begin, end in zip(self.injected_s, self.finished_s, strict=True))

    @property
    def duration_s(self) -> float:
        """Seconds from the first item's start to the last result."""
        return max(self.finished_s) - min(self.injected_s)

    @property
    def throughput_per_s(self) -> float:
        """Results per second, from the first result to the last."""
        ended = sorted(self.finished_s)
        return (len(ended) - 1) / (ended[-1] - ended[0]) if len(ended) > 1 and ended[-1] > ended[0] else 0.0

    @property
    def utilisation(self) -> dict[str, float]:
        """The part of the time for which each worker computed."""
        return {worker: seconds / self.duration_s for worker, seconds in self.busy_s.items()}

    def percentile_s(self, percent: float) -> float:
        """The latency that ``percent`` of the items do not exceed."""
        return float(np.percentile(self.latencies_s, percent))


class _Event(NamedTuple):
    """An input of an item comes to an operator (``arrives``), or the results of one leave it."""

    time_s: float
    number: int
    item: int
    name: str
    arrives: bool


def simulate(
    workflow: Workflow, plan: WorkflowPlan, *, items: int = 1000, arrivals: Arrivals = "even", seed: int = 0
) -> PlayedItems:
    """Simulate the first ``items`` items of a plan."""
    return _Simulation(workflow, plan, items, arrivals, seed).played()


def injections(rate_per_s: float, items: int, arrivals: Arrivals, seed: int) -> list[float]:
    """The times at which items start."""
    if arrivals == "even":
        return [item / rate_per_s for item in range(items)]
    gaps = np.random.default_rng([seed, 0]).exponential(1 / rate_per_s, items)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def service_s(variant: Variant, device: str, items: int, seed: int, operator: int) -> list[float]:
    """Seconds of a variant for each item: the mean of the profile, with its variation (a gamma distribution).
    ``operator`` is the number of the operator."""
    mean_s = variant.seconds[device]
    if variant.variation == 0:
        return [mean_s] * items
    shape = variant.variation**-2
    drawn: list[float] = (
        np.random.default_rng([seed, 1 + operator]).gamma(shape, 1 / shape, items) * mean_s
    ).tolist()  # fmt: skip
    return drawn


class _Simulation:
    def __init__(self, workflow: Workflow, plan: WorkflowPlan, items: int, arrivals: Arrivals, seed: int) -> None:
        self._workflow, self._models = workflow, plan.models
        self._routes = routes(workflow, plan, items)
        self._injected = injections(workflow.rate_per_s, items, arrivals, seed)
        self._free_s = {load.worker: 0.0 for choice in plan.choices for load in choice.workers}
        self._busy_s = dict.fromkeys(self._free_s, 0.0)
        self._link_free_s: dict[tuple[str, str], float] = {}
        self._left = [{name: len(workflow.operator_of[name].inputs) for name in workflow.order} for _ in range(items)]
        self._unfinished = [len(workflow.sinks)] * items
        self._finished = [0.0] * items
        self._seconds = {
            load.worker: service_s(
                workflow.operator_of[choice.operator].variant(choice.variant),
                workflow.worker_of[load.worker].device, items, seed, number,
            )
            for number, choice in enumerate(plan.choices)
            for load in choice.workers
        }  # fmt: skip
        self._events: list[_Event] = []
        self._number = 0

    def played(self) -> PlayedItems:
        """Play all events in the order of their times."""
        for item, begin_s in enumerate(self._injected):
            for source in self._workflow.sources:
                self._at(begin_s, item, source.name, arrives=False)
        while self._events:
            event = heapq.heappop(self._events)
            (self._arrives if event.arrives else self._leaves)(event)
        return PlayedItems(
            injected_s=tuple(self._injected), finished_s=tuple(self._finished), busy_s=self._busy_s
        )  # fmt: skip

    def _at(self, time_s: float, item: int, name: str, *, arrives: bool) -> None:
        self._number += 1
        heapq.heappush(self._events, _Event(time_s, self._number, item, name, arrives))

    def _arrives(self, event: _Event) -> None:
        """The worker begins once all inputs are there and earlier items are done."""
        left = self._left[event.item]
        left[event.name] -= 1
        if left[event.name]:
            return
        worker = self._routes[event.item][event.name]
        seconds = self._seconds[worker][event.item]
        self._free_s[worker] = max(event.time_s, self._free_s[worker]) + seconds
        self._busy_s[worker] += seconds
        self._at(self._free_s[worker], event.item, event.name, arrives=False)

    def _leaves(self, event: _Event) -> None:
        route, consumers = self._routes[event.item], self._workflow.consumers[event.name]
        tiers = self._workflow.tier_of
        first = tiers[route.get(event.name, event.name)]
        for consumer in consumers:
            way = first, tiers[route[consumer]]
            link = self._workflow.link(*way)
            assert link is not None, "routes follow links"
            occupied_s = link.occupied_s(self._workflow.message_bytes(event.name, self._models))
            sent_s = max(event.time_s, self._link_free_s.get(way, 0.0)) + occupied_s
            self._link_free_s[way] = sent_s
            self._at(sent_s + link.latency_s, event.item, consumer, arrives=True)
        if not consumers:
            self._unfinished[event.item] -= 1
            self._finished[event.item] = max(self._finished[event.item], event.time_s)


def capacity_per_s(workflow: Workflow, plan: WorkflowPlan) -> float:
    """The most items per second that the plan's shares allow: the first worker or link that is busy all the time limits
    them."""
    busiest = [load.utilisation for choice in plan.choices for load in choice.workers]
    bits: dict[tuple[str, str], float] = {}
    for traffic in plan.traffic:
        way = traffic.source_tier, traffic.target_tier
        bits[way] = bits.get(way, 0.0) + 8 * traffic.rate_per_s * workflow.message_bytes(traffic.source, plan.models)
    for way, rate in bits.items():
        link = workflow.link(*way)
        if link is not None and link.bits_per_s:
            busiest.append(rate / link.bits_per_s)
    return workflow.rate_per_s / max(busiest)
