"""A plan of a workflow: the variant and the workers of each operator, the traffic between tiers, and what it costs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import msgspec

from meshwright.errors import WorkflowError
from meshwright.serving.workflow import Workflow


class WorkerLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker in use: the items per second that come to it, and the part of its time that they take."""

    worker: str
    rate_per_s: float
    utilisation: float


class OperatorChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The variant that an operator runs, and its workers."""

    operator: str
    variant: str
    workers: tuple[WorkerLoad, ...]


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Messages from a source or operator in one tier to an operator in the same or a later tier."""

    source: str
    target: str
    source_tier: str
    target_tier: str
    rate_per_s: float
    usd_per_hour: float


class WorkflowPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The choices for every operator, in an order in which each stands after its inputs.

    ``bound_usd_per_hour`` is a lower bound on the price of every plan that keeps the limits. ``headroom`` is the
    largest part of its time that a worker may be busy."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    workflow: str
    choices: tuple[OperatorChoice, ...]
    traffic: tuple[Traffic, ...]
    workers_usd_per_hour: float
    links_usd_per_hour: float
    bound_usd_per_hour: float
    accuracy: float
    headroom: float = 1.0
    method: str = ""

    @property
    def usd_per_hour(self) -> float:
        """The price of an hour: workers and links."""
        return self.workers_usd_per_hour + self.links_usd_per_hour

    @property
    def gap(self) -> float:
        """The largest part by which a cheaper plan could be cheaper; 0: the plan is proven to be the cheapest."""
        return max(0.0, 1.0 - self.bound_usd_per_hour / self.usd_per_hour) if self.usd_per_hour else 0.0

    @property
    def proven(self) -> bool:
        """Whether no plan is cheaper by more than a millionth."""
        return self.gap <= 1e-6

    @property
    def models(self) -> dict[str, str]:
        """Maps each operator to its variant."""
        return {choice.operator: choice.variant for choice in self.choices}

    @property
    def operator_of(self) -> dict[str, str]:
        """Maps each worker in use to its operator."""
        return {load.worker: choice.operator for choice in self.choices for load in choice.workers}

    def choice(self, operator: str) -> OperatorChoice:
        """The choice for an operator."""
        return next(choice for choice in self.choices if choice.operator == operator)

    def rates_by_tier(self, workflow: Workflow, operator: str) -> dict[str, float]:
        """Items per second of an operator in each tier where it has workers."""
        rates: dict[str, float] = {}
        for load in self.choice(operator).workers:
            tier = workflow.worker_of[load.worker].tier
            rates[tier] = rates.get(tier, 0.0) + load.rate_per_s
        return rates


def make_plan(
    workflow: Workflow, models: Mapping[str, str], workers: Mapping[str, Sequence[str]],
    rates: Mapping[str, Mapping[str, float]], flows: Mapping[tuple[str, str, str, str], float], *,
    headroom: float = 1.0,
) -> WorkflowPlan:  # fmt: skip
    """A plan with its prices; the bound on every plan's price is its own.

    Links have prices between tiers, so that the division of an operator's items over its workers in one tier changes no
    price. All of these workers get equal utilisation.

    Args:
        workers: the workers of each operator.
        rates: items per second of each operator in each tier.
        flows: items per second by source or operator, operator, tier of the first and tier of the second.
    """
    choices = []
    for name in workflow.order:
        variant = workflow.operator_of[name].variant(models[name])
        loads: list[WorkerLoad] = []
        for tier, rate in rates[name].items():
            own = [worker for worker in workers[name] if workflow.worker_of[worker].tier == tier]
            seconds = {worker: variant.seconds[workflow.worker_of[worker].device] for worker in own}
            capacity = sum(1 / item_s for item_s in seconds.values())
            loads += [
                WorkerLoad(worker=worker, rate_per_s=rate / item_s / capacity, utilisation=rate / capacity)
                for worker, item_s in seconds.items()
            ]
        choices.append(OperatorChoice(operator=name, variant=variant.name, workers=tuple(loads)))
    traffic = tuple(
        Traffic(
            source=source, target=target, source_tier=first, target_tier=second, rate_per_s=rate,
            usd_per_hour=_link_usd(workflow, first, second, workflow.message_bytes(source, models), rate),
        )
        for (source, target, first, second), rate in flows.items()
    )  # fmt: skip
    used = [load.worker for choice in choices for load in choice.workers]
    workers_usd = sum(workflow.worker_of[worker].usd_per_hour for worker in used)
    links_usd = sum(each.usd_per_hour for each in traffic)
    return WorkflowPlan(
        workflow=workflow.name, choices=tuple(choices), traffic=traffic, workers_usd_per_hour=workers_usd,
        links_usd_per_hour=links_usd, accuracy=workflow.accuracy(models) or 0.0, headroom=headroom,
        bound_usd_per_hour=workers_usd + links_usd,
    )  # fmt: skip


def _link_usd(workflow: Workflow, source: str, target: str, num_bytes: float, rate_per_s: float) -> float:
    link = workflow.link(source, target)
    if link is None:
        raise WorkflowError(f"there is no link from {source} to {target}", where="links", remedy="add it")
    return workflow.usd_per_hour(link, num_bytes, rate_per_s)


def slowest_route_s(workflow: Workflow, plan: WorkflowPlan) -> float:
    """Seconds of an item's slowest way through workers in use, if it never waits.

    Every pair of workers of an operator and of its input counts, even where the plan sends no items that way."""
    done: dict[tuple[str, str], float] = {(source.name, source.tier): 0.0 for source in workflow.sources}
    for choice in plan.choices:
        operator = workflow.operator_of[choice.operator]
        variant = operator.variant(choice.variant)
        workers = [workflow.worker_of[load.worker] for load in choice.workers]
        before = [(key, seconds) for key, seconds in done.items() if key[0] in operator.inputs]
        for tier in plan.rates_by_tier(workflow, choice.operator):
            arrivals = [
                seconds + link.transfer_s(workflow.message_bytes(name, plan.models))
                for (name, source_tier), seconds in before
                if (link := workflow.link(source_tier, tier)) is not None
            ]
            own_s = max(variant.seconds[worker.device] for worker in workers if worker.tier == tier)
            done[choice.operator, tier] = own_s + max(arrivals, default=0.0)
    return max(seconds for (name, _), seconds in done.items() if name in workflow.sinks)


# --- in words --------------------------------------------------------------------------------------------------------


class OperatorCost(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator costs in an hour: its workers, and the traffic to it."""

    operator: str
    variant: str
    workers: str
    utilisation: float
    workers_usd_per_hour: float
    links_usd_per_hour: float


def operator_costs(workflow: Workflow, plan: WorkflowPlan) -> Iterator[OperatorCost]:
    """The costs by operator, whose sum is the plan's price. ``utilisation`` is that of the busiest worker."""
    for choice in plan.choices:
        prices = [workflow.worker_of[load.worker].usd_per_hour for load in choice.workers]
        yield OperatorCost(
            operator=choice.operator, variant=choice.variant,
            workers=" + ".join(load.worker for load in choice.workers),
            utilisation=max(load.utilisation for load in choice.workers), workers_usd_per_hour=sum(prices),
            links_usd_per_hour=sum(flow.usd_per_hour for flow in plan.traffic if flow.target == choice.operator),
        )  # fmt: skip


def difference(plan: WorkflowPlan, other: WorkflowPlan) -> str:
    """The other plan in words: its price and accuracy beside the plan's, and the operators that change."""
    changes = [
        f"{before.operator} on {' + '.join(load.worker for load in after.workers)}"
        + (f" with {after.variant}" if after.variant != before.variant else "")
        for before, after in zip(plan.choices, other.choices, strict=True)
        if (before.variant, _names(before)) != (after.variant, _names(after))
    ]
    usd, accuracy = other.usd_per_hour - plan.usd_per_hour, other.accuracy - plan.accuracy
    return f"{usd:+.4g} $/h, accuracy {accuracy:+.4g} ({other.accuracy:g}): {'; '.join(changes)}"


def _names(choice: OperatorChoice) -> list[str]:
    return sorted(load.worker for load in choice.workers)
