"""What is said of a plan, its simulation and its run: figures, sentences, and the content of the page."""

from collections.abc import Sequence

import msgspec

from meshwright.ir import units
from meshwright.report.serve_page import ServeFigure, ServeOperator, ServePage, ServeWorker
from meshwright.serving.choose import NeighbouringPlans, keep_latency, neighbours
from meshwright.serving.plan import OperatorCost, WorkflowPlan, difference, operator_costs, slowest_route_s
from meshwright.serving.simulate import Arrivals, PlayedItems, capacity_per_s, simulate
from meshwright.serving.workflow import Workflow

HEADROOMS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""The largest utilisations of workers that are tried until waiting is short enough for a limit of latency."""
EQUAL = 1e-9
"""Prices that differ by less are equal."""
PLANNED_ITEMS = 1000
"""The items that are simulated for a plan."""


class PlannedWorkflow(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of a workflow, its simulation, what each operator costs, and the choices beside it in words (empty: there
    is none)."""

    plan: WorkflowPlan
    gap: float
    usd_per_hour: float
    throughput_per_s: float
    p50_s: float
    p99_s: float
    slowest_route_s: float
    operators: tuple[OperatorCost, ...]
    cheaper: str
    more_accurate: str


def plan_workflow(workflow: Workflow, *, arrivals: Arrivals = "even", seed: int = 0) -> PlannedWorkflow:
    """The cheapest plan that keeps all limits, also that of latency with waiting, and what is beside it. Of equally
    cheap plans, the most accurate. The choices beside it keep the limit of latency without waiting.

    Raises:
        WorkflowError: no plan keeps the limits.
    """

    def played(plan: WorkflowPlan) -> PlayedItems:
        return simulate(workflow, plan, items=PLANNED_ITEMS, arrivals=arrivals, seed=seed)

    plan = keep_latency(workflow, lambda plan: played(plan).percentile_s(99), HEADROOMS)
    simulated, beside = played(plan), neighbours(workflow, plan)
    while (other := beside.more_accurate) is not None and other.usd_per_hour <= plan.usd_per_hour * (1 + EQUAL):
        played_too = played(other)
        if workflow.limits.latency_s and played_too.percentile_s(99) > workflow.limits.latency_s:
            break
        bound = {"bound_usd_per_hour": plan.bound_usd_per_hour, "method": plan.method}
        plan, simulated = msgspec.structs.replace(other, **bound), played_too
        beside = neighbours(workflow, plan)
    return PlannedWorkflow(
        plan=plan, gap=plan.gap, usd_per_hour=plan.usd_per_hour,
        throughput_per_s=min(workflow.rate_per_s, capacity_per_s(workflow, plan)), p50_s=simulated.percentile_s(50),
        p99_s=simulated.percentile_s(99), slowest_route_s=slowest_route_s(workflow, plan),
        operators=tuple(operator_costs(workflow, plan)), cheaper=_words(plan, beside, "cheaper"),
        more_accurate=_words(plan, beside, "more_accurate"),
    )  # fmt: skip


def _words(plan: WorkflowPlan, beside: NeighbouringPlans, kind: str) -> str:
    other: WorkflowPlan | None = getattr(beside, kind)
    return difference(plan, other) if other is not None else ""


def proof(plan: WorkflowPlan) -> str:
    """How good the plan is, in words."""
    if plan.proven:
        return f"proven to be the cheapest ({plan.method})"
    return f"within {plan.gap:.2%} of the cheapest ({plan.method})"


def figures(predicted: PlayedItems, measured: PlayedItems | None = None) -> tuple[ServeFigure, ...]:
    """Throughput, p50 and p99: predicted, and measured beside them."""

    def figure(name: str, value: float, other: float | None, text: str) -> ServeFigure:
        def shown(number: float) -> str:
            return f"{number:.4g} items/s" if text == "rate" else units.seconds(number)

        if other is None:
            return ServeFigure(name=name, predicted=shown(value))
        ratio = other / value if value else None
        return ServeFigure(name=name, predicted=shown(value), measured=shown(other), ratio=ratio)

    own = measured
    return (
        figure("throughput", predicted.throughput_per_s, own.throughput_per_s if own else None, "rate"),
        figure("p50 latency", predicted.percentile_s(50), own.percentile_s(50) if own else None, "s"),
        figure("p99 latency", predicted.percentile_s(99), own.percentile_s(99) if own else None, "s"),
    )  # fmt: skip


def page_of(
    workflow: Workflow, planned: PlannedWorkflow, predicted: PlayedItems, measured: PlayedItems | None, *, command: str,
    notes: Sequence[str] = (),
) -> ServePage:  # fmt: skip
    """The content of the page of a plan, and of its run if it was ``measured``."""
    plan = planned.plan
    limit_s = workflow.limits.latency_s
    late = measured is not None and limit_s > 0 and measured.percentile_s(99) > limit_s
    tier_of = {worker.name: worker.tier for worker in workflow.workers}
    facts = [
        ("price", f"{plan.usd_per_hour:.5g} $/h"), ("workers", f"{plan.workers_usd_per_hour:.5g} $/h"),
        ("links", f"{plan.links_usd_per_hour:.5g} $/h"), ("accuracy", f"{plan.accuracy:g}"),
        ("rate", f"{workflow.rate_per_s:g} items/s"), ("slowest route", units.seconds(planned.slowest_route_s)),
    ]  # fmt: skip
    return ServePage(
        workflow=workflow.name, verdict="close" if late else "fits",
        sentence=f"The plan costs {plan.usd_per_hour:.5g} $ an hour; it is {proof(plan)}."
        + (f" Its measured p99 is above the limit of {units.seconds(limit_s)}." if late else ""),
        facts=tuple(facts),
        operators=tuple(
            ServeOperator(
                name=operator.operator, variant=operator.variant, workers=operator.workers,
                tiers=", ".join(plan.rates_by_tier(workflow, operator.operator)),
                workers_usd=operator.workers_usd_per_hour, links_usd=operator.links_usd_per_hour,
            )
            for operator in planned.operators
        ),
        workers=tuple(
            ServeWorker(
                name=load.worker, operator=choice.operator, tier=tier_of[load.worker], rate_per_s=load.rate_per_s,
                planned=load.utilisation, simulated=predicted.utilisation[load.worker],
                measured=measured.utilisation[load.worker] if measured else None,
            )
            for choice in plan.choices
            for load in choice.workers
        ),
        beside=(
            ("next cheaper", planned.cheaper or "none: no choice of models is cheaper"),
            ("next more accurate", planned.more_accurate or "none: the workers do nothing more accurate"),
        ),
        figures=figures(predicted, measured), notes=tuple(notes), command=command,
        latencies_s={"predicted": predicted.latencies_s} | ({"measured": measured.latencies_s} if measured else {}),
    )  # fmt: skip
