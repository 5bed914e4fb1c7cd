"""Chooses models and workers of a workflow: exactly, or by beam search over the models; and says why nothing fits."""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from meshwright.errors import WorkflowError
from meshwright.ir.files import did_you_mean
from meshwright.serving.plan import WorkflowPlan
from meshwright.serving.program import ABOVE, WorkflowProgram
from meshwright.serving.workflow import Workflow

BEAM = 10
"""The choices of models that a beam search keeps."""
MOST_EXACT = 2000
"""Whole numbers up to which models and workers are chosen together."""
CHEAPER = 1e-4
"""A cheaper plan is cheaper by at least this part."""
TIED = 1e-9
"""Bounds that differ by less are equal."""


class NeighbouringPlans(NamedTuple):
    """The most accurate of the cheaper plans, and the cheapest of the more accurate ones; None: there is none."""

    cheaper: WorkflowPlan | None
    more_accurate: WorkflowPlan | None


def choose(workflow: Workflow, *, headroom: float = 1.0) -> WorkflowPlan:
    """The cheapest plan that keeps the limits: proven, or within its stated gap of the cheapest (``WorkflowPlan.gap``).
    Models and workers are chosen together where that is small enough, else models by beam search.

    ``limits.latency_s`` is kept without waiting (``plan.slowest_route_s``); waiting is simulated.

    Raises:
        WorkflowError: no plan keeps the limits; the error names the limit and the best that is possible.
    """
    program = _program(workflow, headroom=headroom)
    return _exact(program) if program.num_integer <= MOST_EXACT else choose_models_by_beam(workflow, headroom=headroom)


def choose_exactly(workflow: Workflow, *, headroom: float = 1.0) -> WorkflowPlan:
    """The cheapest plan, by one integer program of models and workers. Raises as ``choose`` does."""
    return _exact(_program(workflow, headroom=headroom))


def choose_models_by_beam(workflow: Workflow, *, beam: int = BEAM, headroom: float = 1.0) -> WorkflowPlan:
    """The cheapest plan that a beam search finds. Raises as ``choose`` does.

    Operators get their variants in the order of the data. Of all partial choices, the ``beam`` with the least bounds
    are kept: the price if workers and later variants could be used in part. For each complete choice, an integer
    program finds the workers. No plan is cheaper than the least bound of the choices that were left out.
    """
    program = _program(workflow, headroom=headroom)
    kept: list[tuple[float, dict[str, str]]] = [(0.0, {})]
    left_out = math.inf
    for operator in workflow.order:
        names = [variant.name for variant in workflow.operator_of[operator].variants]
        candidates = [models | {operator: name} for _, models in kept for name in names]
        bounded = [(program.relaxed(models), models) for models in candidates]
        ranked = sorted((pair for pair in bounded if pair[0] < math.inf), key=lambda pair: pair[0])
        kept = ranked[:beam]
        left_out = min([left_out, *(bound for bound, _ in ranked[beam:])])
    best: WorkflowPlan | None = None
    least = left_out
    for bound, models in kept:
        if best is not None and bound >= best.usd_per_hour * (1 - TIED):
            break  # this choice and those after it are no cheaper
        answer = program.solve(models)
        least = min(least, answer.bound)
        if answer.plan is not None and (best is None or answer.plan.usd_per_hour < best.usd_per_hour):
            best = answer.plan
    if best is None:
        raise why_none(workflow, headroom)
    return _bounded(best, least, f"beam search, {beam} choices of models kept")


def neighbours(workflow: Workflow, plan: WorkflowPlan) -> NeighbouringPlans:
    """The next cheaper and the next more accurate choice beside a plan."""
    free = msgspec.structs.replace(workflow, limits=msgspec.structs.replace(workflow.limits, accuracy=0.0))
    most_usd = plan.usd_per_hour * (1 - CHEAPER)
    cheaper = WorkflowProgram(free, headroom=plan.headroom, goal="accuracy", most_usd=most_usd).solve().plan
    if cheaper is not None:
        cheaper = WorkflowProgram(free, headroom=plan.headroom, accuracy=cheaper.accuracy * (1 - ABOVE)).solve().plan
    above = plan.accuracy * (1 + ABOVE)
    more = (
        WorkflowProgram(free, headroom=plan.headroom, accuracy=above).solve().plan
        if plan.accuracy < free.most_accurate
        else None
    )
    return NeighbouringPlans(cheaper, more)


def one_tier_plans(workflow: Workflow, *, headroom: float = 1.0) -> dict[str, WorkflowPlan]:
    """For each tier, the cheapest plan with workers of this tier alone; tiers that cannot do it are left out."""
    plans = {}
    for tier in workflow.tiers:
        inside = _named_workers(workflow, tier.name)
        if (plan := WorkflowProgram(workflow, headroom=headroom, usable=inside.__contains__).solve().plan) is not None:
            plans[tier.name] = plan
    return plans


def uniform_plans(workflow: Workflow, *, headroom: float = 1.0) -> dict[str, WorkflowPlan]:
    """The cheapest plan in which every operator runs its first variant, its last, and so on at the same relative place
    of its list; places at which no plan keeps the limits are left out."""
    plans, program = {}, WorkflowProgram(workflow, headroom=headroom)
    steps = max(len(operator.variants) for operator in workflow.operators)
    for step in range(steps):
        models = {
            operator.name: operator.variants[round(step / max(1, steps - 1) * (len(operator.variants) - 1))].name
            for operator in workflow.operators
        }
        if (plan := program.solve(models).plan) is not None:
            plans[" + ".join(models[name] for name in workflow.order)] = plan
    return plans


def check_profiled(workflow: Workflow, where: str = "") -> None:
    """Raise a WorkflowError if a variant has no seconds, or no variant has seconds on a worker's device."""
    place = where or workflow.name
    known: dict[str, None] = {}
    for operator in workflow.operators:
        for variant in operator.variants:
            if not variant.seconds:
                raise WorkflowError(
                    "it has no seconds on any device", where=f"{place}: operators.{operator.name}.{variant.name}",
                    remedy="measure it: meshwright serve profile, or write seconds = { DEVICE = ... }",
                )  # fmt: skip
            known |= dict.fromkeys(variant.seconds)
    for worker in workflow.workers:
        if worker.device not in known:
            remedy = did_you_mean(worker.device, known, f"devices with seconds: {', '.join(known)}")
            raise WorkflowError(
                f"no variant has seconds on the device {worker.device!r}", where=f"{place}: workers.{worker.name}",
                remedy=remedy,
            )  # fmt: skip


def why_none(workflow: Workflow, headroom: float = 1.0) -> WorkflowError:
    """The error that says which limit no plan keeps, and the best that is possible."""
    most = workflow.most_accurate
    if most < workflow.limits.accuracy:
        return WorkflowError(
            f"no choice of models reaches an accuracy of {workflow.limits.accuracy:g}; the most is {most:g}",
            where="limits.accuracy", remedy=f"ask for at most {most:g}, or add variants",
        )  # fmt: skip
    part = f" at {headroom:.0%} utilisation" if headroom < 1 else ""
    for operator in workflow.operators:
        most = max(_capacity(workflow, operator.name, variant.name) for variant in operator.variants) * headroom
        if most < workflow.rate_per_s:
            return WorkflowError(
                f"{operator.name} must do {workflow.rate_per_s:g} items per second; on all workers that can run it, "
                f"its fastest variant does {most:.4g}{part}",
                where="sources.rate_per_s", remedy="lower the rates, or add workers or a faster variant",
            )  # fmt: skip
    reached = _most_times(workflow, headroom)
    if reached < 1:
        by_operator = {name: _most_times(workflow, headroom, name) for name in workflow.order}
        slowest = max(by_operator, key=lambda name: by_operator[name])
        if by_operator[slowest] <= reached * (1 + CHEAPER):
            slowest = "a link, or several operators together"
        return WorkflowError(
            f"the workers do at most {reached * workflow.rate_per_s:.4g} of {workflow.rate_per_s:g} items per second "
            f"with an accuracy of {workflow.limits.accuracy:g} and no traffic back{part}; the limit is {slowest}",
            where="sources.rate_per_s", remedy="lower the rates or the accuracy, or add workers",
        )  # fmt: skip
    least = WorkflowProgram(workflow, headroom=headroom, latency_s=0.0, goal="latency").solve()
    return WorkflowError(
        f"no plan has a slowest route of at most {workflow.limits.latency_s:g} s; the shortest has {least.value:.4g} s"
        f"{part}",
        where="limits.latency_s", remedy="allow more, or add faster workers or links",
    )  # fmt: skip


def keep_latency(
    workflow: Workflow, p99_s: Callable[[WorkflowPlan], float], headrooms: tuple[float, ...]
) -> WorkflowPlan:
    """The cheapest plan whose ``p99_s`` is within the limit of latency, with the largest headroom of ``headrooms`` that
    has one. Without such a limit: the cheapest plan with the first headroom. Raises as ``choose`` does, and a
    WorkflowError if waiting makes every plan too slow."""
    if not workflow.limits.latency_s:
        return choose(workflow, headroom=headrooms[0])
    seen: list[float] = []
    for headroom in headrooms:
        try:
            plan = choose(workflow, headroom=headroom)
        except WorkflowError:
            if not seen:
                raise
            break
        seen.append(p99_s(plan))
        if seen[-1] <= workflow.limits.latency_s:
            return plan
    raise WorkflowError(
        f"with waiting, no plan keeps 99 % of the items within {workflow.limits.latency_s:g} s; the best has "
        f"{min(seen):.4g} s",
        where="limits.latency_s", remedy="allow more, or add faster workers or links",
    )  # fmt: skip


def _program(workflow: Workflow, *, headroom: float) -> WorkflowProgram:
    check_profiled(workflow)
    if workflow.most_accurate < workflow.limits.accuracy:
        raise why_none(workflow, headroom)
    return WorkflowProgram(workflow, headroom=headroom)


def _exact(program: WorkflowProgram) -> WorkflowPlan:
    answer = program.solve()
    if answer.plan is None:
        raise why_none(program.workflow, program.headroom)
    return _bounded(answer.plan, answer.bound, "one integer program of models and workers")


def _bounded(plan: WorkflowPlan, bound: float, method: str) -> WorkflowPlan:
    return msgspec.structs.replace(plan, bound_usd_per_hour=min(bound, plan.usd_per_hour), method=method)


def _named_workers(workflow: Workflow, tier: str) -> set[str]:
    return {worker.name for worker in workflow.workers if worker.tier == tier}


def _capacity(workflow: Workflow, operator: str, variant: str) -> float:
    """Items per second of a variant on all workers that can run it."""
    seconds = workflow.operator_of[operator].variant(variant).seconds
    return sum(1 / seconds[worker.device] for worker in workflow.workers if worker.device in seconds)


def _most_times(workflow: Workflow, headroom: float, unlimited: str = "") -> float:
    """The most by which all rates could be multiplied, without the limit of latency."""
    answer = WorkflowProgram(workflow, headroom=headroom, latency_s=0.0, goal="rate", unlimited=unlimited).solve()
    return max(0.0, -answer.value) if answer.plan is not None else 0.0
