"""The integer program of a workflow: models, workers and traffic together.

Whole numbers: x[o, m] operator o runs variant m; y[o, m, i] worker i does; z[r] row r of the accuracies holds.
Others: l[o, m, i] items per second; f[u, m, v, a, b] items per second from u in tier a to v in tier b.

    sum_m x[o, m] = 1                       y[o, m, i] <= x[o, m]              sum_(o, m) y[o, m, i] <= 1
    l[o, m, i] <= y[o, m, i] * headroom / seconds                              sum_(m, i) l[o, m, i] = rate
    sum_b f[u, m, v, a, b] = sum_(i in a) l[u, m, i]                           v does in b what is sent to it there

There is no f from a tier to an earlier one. A limit of latency adds the time done[o, a] at which o is done in tier a.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.integer_program import ColumnValues, Rows, minimize
from meshwright.serving.plan import WorkflowPlan, make_plan
from meshwright.serving.workflow import Link, Variant, Workflow

Goal = Literal["usd", "accuracy", "rate", "latency"]
"""What is best: the least price, the highest accuracy, the highest rate, or the shortest slowest route."""
MOST_TIMES = 1e6
"""The most by which rates are multiplied in the search of the highest."""
ABOVE = 1e-5
"""The least difference of two accuracies of which one is higher, relative; the solver's tolerance is 1e-6."""


class BoundedPlan(NamedTuple):
    """The plan (None: none exists, or none was found in time) and the least value that is possible of the goal. The
    goals ``accuracy`` and ``rate`` count as negative."""

    plan: WorkflowPlan | None
    bound: float
    value: float


class WorkflowProgram:
    """The program of a workflow.

    Args:
        headroom: the largest part of its time that a worker may be busy.
        accuracy: the least accuracy; None: the workflow's limit.
        latency_s: the longest slowest route; None: the workflow's limit; 0: none.
        goal: what is best.
        most_usd: the highest price, if the goal is not the price.
        unlimited: an operator whose workers are as fast as it needs.
        usable: whether a worker may be used.
    """

    def __init__(
        self, workflow: Workflow, *, headroom: float = 1.0, accuracy: float | None = None,
        latency_s: float | None = None, goal: Goal = "usd", most_usd: float = math.inf, unlimited: str = "",
        usable: Callable[[str], bool] = lambda worker: True,
    ) -> None:  # fmt: skip
        self.workflow, self.headroom, self.goal = workflow, headroom, goal
        self._accuracy = workflow.limits.accuracy if accuracy is None else accuracy
        self._latency_s = workflow.limits.latency_s if latency_s is None else latency_s
        self._unlimited = unlimited
        self._workers = [worker for worker in workflow.workers if usable(worker.name)]
        self._timed = goal == "latency" or self._latency_s > 0
        self.columns: dict[Hashable, int] = {}
        self._usd: list[float] = []
        self._upper: list[float] = []
        self.rows = Rows()
        self._whole_columns()
        self.num_integer = len(self.columns)
        self._other_columns()
        self._models()
        self._accuracies()
        self._loads()
        self._flows()
        self._links()
        if self._timed:
            self._times()
        if most_usd < math.inf:
            self.rows.add([(index, usd) for index, usd in enumerate(self._usd) if usd], -math.inf, most_usd)
        self._goals = self._usd if goal == "usd" else self._other_goal()

    def solve(self, fixed: Mapping[str, str] | None = None) -> BoundedPlan:
        """The best plan with the variants ``fixed`` of some operators."""
        solution = self._solved(fixed or {}, self.num_integer)
        if solution.values is None:
            return BoundedPlan(None, solution.bound, math.inf)
        return BoundedPlan(self._plan(solution.values), solution.bound, float(np.dot(solution.values, self._goals)))

    def relaxed(self, fixed: Mapping[str, str]) -> float:
        """A lower bound on the goal of every plan with these variants of some operators: workers and variants may be
        used in part. Infinite: there is no such plan."""
        values = self._solved(fixed, 0).values
        return math.inf if values is None else float(np.dot(values, self._goals))

    def _solved(self, fixed: Mapping[str, str], num_integer: int) -> ColumnValues:
        upper = list(self._upper)
        for key, column in self.columns.items():
            if isinstance(key, tuple) and key[0] == "x" and fixed.get(key[1], key[2]) != key[2]:
                upper[column] = 0.0
        return minimize(self._goals, upper, self.rows, num_integer, gap=0.0)

    # --- columns -----------------------------------------------------------------------------------------------------

    def _add(self, key: Hashable, usd: float, upper: float) -> None:
        self.columns[key] = len(self.columns)
        self._usd.append(usd)
        self._upper.append(upper)

    def _runs(self, operator: str) -> list[tuple[Variant, str]]:
        """Pairs of a variant of an operator and a worker that can run it."""
        variants = self.workflow.operator_of[operator].variants
        return [
            (variant, worker.name)
            for variant in variants
            for worker in self._workers
            if worker.device in variant.seconds
        ]

    def _whole_columns(self) -> None:
        workflow = self.workflow
        for operator in workflow.order:
            for variant in workflow.operator_of[operator].variants:
                impossible = not workflow.accuracies and variant.accuracy == 0 and self._accuracy > 0
                self._add(("x", operator, variant.name), 0.0, 0.0 if impossible else 1.0)
            for variant, worker in self._runs(operator):
                self._add(("y", operator, variant.name, worker), workflow.worker_of[worker].usd_per_hour, 1.0)
        for index, row in enumerate(workflow.accuracies):
            if row.accuracy >= self._accuracy:
                self._add(("z", index), 0.0, 1.0)
        if self._timed:
            for operator in workflow.order:
                for tier in workflow.tiers:
                    self._add(("w", operator, tier.name), 0.0, 1.0)

    def _other_columns(self) -> None:
        workflow = self.workflow
        for operator in workflow.order:
            for variant, worker in self._runs(operator):
                self._add(("l", operator, variant.name, worker), 0.0, math.inf)
        for source, target in workflow.edges:
            for model, num_bytes in self._messages(source):
                for first, second, link in self._ways(source):
                    usd = workflow.usd_per_hour(link, num_bytes, 1.0)
                    self._add(("f", source, model, target, first, second), usd, math.inf)
        if self._timed:
            limit = self._latency_s or math.inf
            for operator in workflow.order:
                for tier in workflow.tiers:
                    self._add(("done", operator, tier.name), 0.0, limit)
            self._add("slowest", 0.0, limit)
        if self.goal == "rate":
            self._add("times", 0.0, MOST_TIMES)

    def _messages(self, name: str) -> list[tuple[str, float]]:
        """Pairs of a variant of an operator (empty for a source) and the bytes of its messages."""
        if name in self.workflow.source_of:
            return [("", self.workflow.source_of[name].item_bytes)]
        return [(variant.name, variant.message_bytes) for variant in self.workflow.operator_of[name].variants]

    def _ways(self, name: str) -> list[tuple[str, str, Link]]:
        """Tiers between which messages of a source or operator may go, and their link."""
        tiers = [tier.name for tier in self.workflow.tiers]
        firsts = [self.workflow.source_of[name].tier] if name in self.workflow.source_of else tiers
        pairs = ((first, second, self.workflow.link(first, second)) for first in firsts for second in tiers)
        return [(first, second, link) for first, second, link in pairs if link is not None]

    # --- rows --------------------------------------------------------------------------------------------------------

    def _models(self) -> None:
        """One variant for each operator, and one operator for each worker; equal workers in order."""
        columns, workflow = self.columns, self.workflow
        by_worker: dict[str, list[int]] = {worker.name: [] for worker in self._workers}
        ranks: dict[int, int] = {}
        for rank, operator in enumerate(workflow.order, start=1):
            names = [variant.name for variant in workflow.operator_of[operator].variants]
            self.rows.add([(columns["x", operator, name], 1.0) for name in names], 1.0, 1.0)
            for variant, worker in self._runs(operator):
                column = columns["y", operator, variant.name, worker]
                self.rows.add([(column, 1.0), (columns["x", operator, variant.name], -1.0)], -math.inf, 0.0)
                by_worker[worker].append(column)
                ranks[column] = rank
        for own in by_worker.values():
            self.rows.add([(column, 1.0) for column in own], -math.inf, 1.0)
        equal = {
            worker.name: (worker.tier, worker.device, worker.usd_per_hour)
            for worker in sorted(self._workers, key=lambda worker: (worker.tier, worker.device, worker.usd_per_hour))
        }
        for (worker_name, kind), (next_name, next_kind) in pairwise(equal.items()):
            if kind == next_kind:
                terms = [(column, float(ranks[column])) for column in by_worker[worker_name]]
                terms += [(column, -float(ranks[column])) for column in by_worker[next_name]]
                self.rows.add(terms, 0.0, math.inf)

    def _accuracies(self) -> None:
        workflow, columns = self.workflow, self.columns
        if not workflow.accuracies:
            if self._accuracy <= 0:
                return
            terms = [
                (columns["x", operator.name, variant.name], math.log(variant.accuracy))
                for operator in workflow.operators
                for variant in operator.variants
                if variant.accuracy
            ]
            self.rows.add(terms, math.log(self._accuracy), math.inf)
            return
        held = {index: row for index, row in enumerate(workflow.accuracies) if ("z", index) in columns}
        self.rows.add([(columns["z", index], 1.0) for index in held], 1.0, 1.0)
        for operator in workflow.accuracies[0].models:
            for variant in workflow.operator_of[operator].variants:
                terms = [(columns["x", operator, variant.name], 1.0)]
                named = [index for index, row in held.items() if row.models[operator] == variant.name]
                self.rows.add([*terms, *((columns["z", index], -1.0) for index in named)], 0.0, 0.0)

    def _loads(self) -> None:
        workflow, columns = self.workflow, self.columns
        for operator in workflow.order:
            total = []
            for variant, worker in self._runs(operator):
                load = columns["l", operator, variant.name, worker]
                seconds = variant.seconds[workflow.worker_of[worker].device]
                most = self.headroom / seconds
                if operator == self._unlimited:
                    most = MOST_TIMES * workflow.rate_per_s
                self.rows.add(
                    [(load, 1.0), (columns["y", operator, variant.name, worker], -most)], -math.inf, 0.0
                )  # fmt: skip
                total.append((load, 1.0))
            self._equal_to_rate(total)

    def _equal_to_rate(self, terms: list[tuple[int, float]]) -> None:
        if self.goal == "rate":
            self.rows.add([*terms, (self.columns["times"], -self.workflow.rate_per_s)], 0.0, 0.0)
        else:
            self.rows.add(terms, self.workflow.rate_per_s, self.workflow.rate_per_s)

    def _flows(self) -> None:
        workflow, columns = self.workflow, self.columns
        for source, target in workflow.edges:
            ways = [
                (model, first, second) for model, _ in self._messages(source) for first, second, _ in self._ways(source)
            ]
            flows = {way: columns["f", source, way[0], target, *way[1:]] for way in ways}
            if source in workflow.source_of:
                self._equal_to_rate([(flow, 1.0) for flow in flows.values()])
            else:
                for model, _ in self._messages(source):
                    for tier in workflow.tiers:
                        sent = [(flow, 1.0) for way, flow in flows.items() if way[:2] == (model, tier.name)]
                        self.rows.add([*sent, *self._loads_in(source, tier.name, -1.0, model)], 0.0, 0.0)
            for tier in workflow.tiers:
                received = [(flow, 1.0) for way, flow in flows.items() if way[2] == tier.name]
                self.rows.add([*received, *self._loads_in(target, tier.name, -1.0)], 0.0, 0.0)

    def _links(self) -> None:
        """No link carries more than its rate."""
        workflow = self.workflow
        for link in workflow.links:
            bits = [
                (self.columns["f", source, model, target, link.source, link.target], 8 * num_bytes / link.bits_per_s)
                for source, target in workflow.edges
                for model, num_bytes in self._messages(source)
                if link.bits_per_s and any(way[2] is link for way in self._ways(source))
            ]
            if bits:
                self.rows.add(bits, -math.inf, self.headroom)

    def _loads_in(self, operator: str, tier: str, weight: float, model: str = "") -> list[tuple[int, float]]:
        return [
            (self.columns["l", operator, variant.name, worker], weight)
            for variant, worker in self._runs(operator)
            if self.workflow.worker_of[worker].tier == tier and model in ("", variant.name)
        ]

    def _times(self) -> None:
        """``done[v, b] >= done[u, a] + transfer + seconds`` for all workers in use of u in a and of v in b."""
        workflow, columns = self.workflow, self.columns
        longest = self._longest_s()
        for operator in workflow.order:
            for variant, worker in self._runs(operator):
                tier = workflow.worker_of[worker].tier
                used = columns["y", operator, variant.name, worker]
                self.rows.add([(columns["w", operator, tier], 1.0), (used, -1.0)], 0.0, math.inf)
        for source, target in workflow.edges:
            for model, num_bytes in self._messages(source):
                for first, second, link in self._ways(source):
                    for variant, worker in self._runs(target):
                        place = workflow.worker_of[worker]
                        if place.tier != second:
                            continue
                        least = link.transfer_s(num_bytes) + variant.seconds[place.device]
                        terms = [(columns["done", target, second], 1.0)]
                        conditions: list[Hashable] = [("y", target, variant.name, worker)]
                        if model:
                            terms.append((columns["done", source, first], -1.0))
                            conditions += [("w", source, first), ("x", source, model)]
                        terms += [(columns[key], -longest) for key in conditions]
                        self.rows.add(terms, least - longest * len(conditions), math.inf)
        for operator in workflow.sinks:
            for each in workflow.tiers:
                self.rows.add(
                    [(columns["slowest"], 1.0), (columns["done", operator, each.name], -1.0)], 0.0, math.inf
                )  # fmt: skip

    def _longest_s(self) -> float:
        """Seconds that no route exceeds."""
        workflow = self.workflow
        links = [link for first in workflow.tiers for second in workflow.tiers
                 if (link := workflow.link(first.name, second.name)) is not None]  # fmt: skip
        total = 0.0
        for operator in workflow.order:
            total += max(
                (s for variant in workflow.operator_of[operator].variants for s in variant.seconds.values()),
                default=0.0,
            )
        for source, _ in workflow.edges:
            total += max(link.transfer_s(size) for link in links for _, size in self._messages(source))
        return total

    def _other_goal(self) -> list[float]:
        goals = [0.0] * len(self.columns)
        if self.goal == "rate":
            goals[self.columns["times"]] = -1.0
        elif self.goal == "latency":
            goals[self.columns["slowest"]] = 1.0
        elif self.workflow.accuracies:
            for index, row in enumerate(self.workflow.accuracies):
                if ("z", index) in self.columns:
                    goals[self.columns["z", index]] = -row.accuracy
        else:
            for operator in self.workflow.operators:
                for variant in operator.variants:
                    if variant.accuracy is not None:
                        goals[self.columns["x", operator.name, variant.name]] = -math.log(variant.accuracy or ABOVE)
        return goals

    # --- the plan of a solution --------------------------------------------------------------------------------------

    def _plan(self, values: NDArray[np.float64]) -> WorkflowPlan:
        workflow, columns = self.workflow, self.columns
        models = {
            key[1]: key[2]
            for key, column in columns.items()
            if isinstance(key, tuple) and key[0] == "x" and values[column] > 0.5
        }
        workers: dict[str, list[str]] = {operator: [] for operator in workflow.order}
        rates: dict[str, dict[str, float]] = {operator: {} for operator in workflow.order}
        for operator, model in models.items():
            for variant, worker in self._runs(operator):
                load = float(values[columns["l", operator, model, worker]]) if variant.name == model else 0.0
                if load > 1e-7 * workflow.rate_per_s:
                    tier = workflow.worker_of[worker].tier
                    workers[operator].append(worker)
                    rates[operator][tier] = rates[operator].get(tier, 0.0) + load
        flows: dict[tuple[str, str, str, str], float] = {}
        for source, target in workflow.edges:
            for first, second, _ in self._ways(source):
                flow = float(values[columns["f", source, models.get(source, ""), target, first, second]])
                if flow > 1e-7 * workflow.rate_per_s:
                    flows[source, target, first, second] = flow
        return make_plan(workflow, models, workers, rates, flows, headroom=self.headroom)
