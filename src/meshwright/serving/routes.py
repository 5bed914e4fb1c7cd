"""The way of each item through a plan: which worker runs which operator for it. Simulation and runs share the ways.

Items of an operator are divided over its workers in proportion to the plan's rates, as evenly as possible in time. For
one operator, a tier is chosen by its rates. Then the choice spreads along the edges, in both directions, by the traffic
on each edge. Operators meet on one way only (``check.py``), so that all rates of the plan are kept.
"""

from collections.abc import Hashable, Mapping

from meshwright.serving.plan import WorkflowPlan
from meshwright.serving.workflow import Workflow


class Turns:
    """Chooses among names again and again, each as often as its weight says, as evenly as possible."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items() if weight > 0}
        self._credits = dict.fromkeys(self._shares, 0.0)

    def next(self) -> str:
        """The next name: the one that is furthest behind its share."""
        for name, share in self._shares.items():
            self._credits[name] += share
        chosen = max(self._credits, key=lambda name: self._credits[name])
        self._credits[chosen] -= 1.0
        return chosen


class Router:
    """The ways of the items of a plan, in the order of the items."""

    def __init__(self, workflow: Workflow, plan: WorkflowPlan) -> None:
        self._workflow, self._plan = workflow, plan
        self._turns: dict[Hashable, Turns] = {}
        self._steps = self._spread()

    def next(self) -> dict[str, str]:
        """Maps every operator to the worker that runs it for the next item."""
        tiers: dict[str, str] = {}
        for operator, neighbour in self._steps:
            key = (operator, neighbour, tiers.get(neighbour, ""))
            if key not in self._turns:
                self._turns[key] = Turns(self._tier_rates(operator, neighbour, tiers.get(neighbour, "")))
            tiers[operator] = self._turns[key].next()
        return {operator: self._worker(operator, tier) for operator, tier in tiers.items()}

    def _spread(self) -> list[tuple[str, str]]:
        """Every operator with the operator before it from which the choice comes; empty: the choice begins there."""
        pairs = [(source, target) for source, target in self._workflow.edges if source in self._workflow.operator_of]
        near = {name: {*(b for a, b in pairs if a == name), *(a for a, b in pairs if b == name)}
                for name in self._workflow.order}  # fmt: skip
        steps: dict[str, str] = {}
        for start in reversed(self._workflow.order):
            pending = [(start, "")] if start not in steps else []
            while pending:
                name, neighbour = pending.pop()
                steps[name] = neighbour
                pending += [(target, name) for target in sorted(near[name]) if target not in steps]
        return list(steps.items())

    def _tier_rates(self, operator: str, neighbour: str, tier: str) -> dict[str, float]:
        """Items per second of an operator in each tier, of those that its neighbour does in ``tier``."""
        if not neighbour:
            return self._plan.rates_by_tier(self._workflow, operator)
        rates: dict[str, float] = {}
        for traffic in self._plan.traffic:
            ends = (traffic.source, traffic.source_tier), (traffic.target, traffic.target_tier)
            for (name, own), other in (ends, ends[::-1]):
                if name == operator and other == (neighbour, tier):
                    rates[own] = rates.get(own, 0.0) + traffic.rate_per_s
        return rates

    def _worker(self, operator: str, tier: str) -> str:
        key = operator, tier
        if key not in self._turns:
            self._turns[key] = Turns({
                load.worker: load.rate_per_s
                for load in self._plan.choice(operator).workers
                if self._workflow.worker_of[load.worker].tier == tier
            })  # fmt: skip
        return self._turns[key].next()


def routes(workflow: Workflow, plan: WorkflowPlan, items: int) -> list[dict[str, str]]:
    """The ways of the first ``items`` items."""
    router = Router(workflow, plan)
    return [router.next() for _ in range(items)]
