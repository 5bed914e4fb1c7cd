"""Random workflows, and their cheapest plans by trying every choice of models and workers: the oracle of serving."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import product

import msgspec
import numpy as np
from scipy.optimize import linprog

from meshwright.serving.workflow import (
    Limits,
    Link,
    MeasuredAccuracy,
    Operator,
    Source,
    Tier,
    Variant,
    Worker,
    Workflow,
)

RATE = 10.0
TIERS = ("edge", "site", "cloud")


def random_workflow(seed: int) -> Workflow:
    """One to three operators, up to three variants each, two to five workers in one to three tiers."""
    draw = random.Random(seed)
    tiers = TIERS[: draw.choice((1, 2, 2, 2, 3))]
    devices = ["a", "b", "c"][: draw.randint(1, 3)]
    workers = tuple(
        Worker(name=f"w{i}", tier=draw.choice(tiers), device=draw.choice(devices), usd_per_hour=draw.randint(1, 8) / 4)
        for i in range(draw.randint(2, 5))
    )
    links = tuple(
        Link(
            source=tier, target=other, usd_per_gib=draw.choice((0.0, 1.0, 10.0)),
            bits_per_s=draw.choice((0.0, 0.0, 2e7)), latency_s=draw.choice((0.0, 0.02)),
        )
        for index, tier in enumerate(tiers)
        for other in tiers[index + 1 :]
        if draw.random() < 0.9
    )  # fmt: skip
    sources = tuple(
        Source(name=f"s{i}", tier=tiers[0] if draw.random() < 0.8 else draw.choice(tiers), rate_per_s=RATE,
               message_bytes=draw.choice((1e3, 1e5, 1e6)))
        for i in range(draw.randint(1, 2))
    )  # fmt: skip
    measured, operators = draw.random() < 0.5, []
    names = [f"o{i}" for i in range(draw.randint(1, 3))]
    for index, name in enumerate(names):
        before = set(draw.sample(names[:index], min(index, draw.choice((0, 1, 1)))))
        unread = {source.name for source in sources} if index == 0 else set()
        variants = tuple(
            Variant(
                name=f"m{i}", message_bytes=draw.choice((0.0, 1e4, 1e5)),
                seconds={device: draw.choice((0.02, 0.05, 0.1, 0.15, 0.3)) for device in devices if draw.random() < 0.9}
                or {devices[0]: 0.1},
                accuracy=None if measured else draw.choice((0.7, 0.8, 0.9, 1.0)),
            )
            for i in range(draw.randint(1, 3))
        )  # fmt: skip
        inputs = sorted(before | unread) or [sources[0].name]
        operators.append(Operator(name=name, inputs=tuple(inputs), variants=variants))
    rows: tuple[MeasuredAccuracy, ...] = ()
    if measured:
        rows = tuple(
            MeasuredAccuracy(models=dict(zip(names, models, strict=True)), accuracy=draw.randint(50, 90))
            for models in product(*([variant.name for variant in operator.variants] for operator in operators))
        )
    accuracy = draw.choice((0.0, 60.0, 70.0)) if measured else draw.choice((0.0, 0.5, 0.7))
    limits = Limits(accuracy=accuracy, latency_s=draw.choice((0.0, 0.0, 0.3, 0.5)))
    known = sorted({device for operator in operators for variant in operator.variants for device in variant.seconds})
    workers = tuple(
        worker if worker.device in known else msgspec.structs.replace(worker, device=known[0]) for worker in workers
    )
    return Workflow(
        name=f"random {seed}", tiers=tuple(Tier(name=name) for name in tiers), workers=workers, links=links,
        sources=sources, operators=tuple(operators), accuracies=rows, limits=limits,
    )  # fmt: skip


def by_brute_force(workflow: Workflow) -> float | None:
    """The price of the cheapest plan that keeps the limits; None: there is none."""
    names = workflow.order
    assignments = sorted(
        (
            sum(worker.usd_per_hour for worker, operator in zip(workflow.workers, chosen, strict=True) if operator),
            chosen,
        )
        for chosen in product(("", *names), repeat=len(workflow.workers))
        if set(chosen) >= set(names)
    )
    best: float | None = None
    for models in _choices(workflow):
        accuracy = workflow.accuracy(models)
        if accuracy is None or accuracy < workflow.limits.accuracy - 1e-9:
            continue
        known: dict[tuple[float, ...], float | None] = {}
        for usd, chosen in assignments:
            if best is not None and usd >= best:
                break
            capacity = _capacity(workflow, models, chosen)
            if capacity is None or any(sum(row.values()) < workflow.rate_per_s - 1e-9 for row in capacity.values()):
                continue
            if workflow.limits.latency_s and _route_s(workflow, models, chosen) > workflow.limits.latency_s + 1e-9:
                continue
            key = tuple(value for name in names for value in capacity[name].values())
            if key not in known:
                known[key] = _traffic_usd(workflow, models, capacity)
            traffic = known[key]
            if traffic is not None and (best is None or usd + traffic < best):
                best = usd + traffic
    return best


def _capacity(
    workflow: Workflow, models: Mapping[str, str], chosen: tuple[str, ...]
) -> dict[str, dict[str, float]] | None:
    """Items per second of each operator in each tier; None: a worker cannot run what it should."""
    rates = {name: dict.fromkeys((tier.name for tier in workflow.tiers), 0.0) for name in workflow.order}
    for worker, operator in zip(workflow.workers, chosen, strict=True):
        if operator:
            seconds = workflow.operator_of[operator].variant(models[operator]).seconds
            if worker.device not in seconds:
                return None
            rates[operator][worker.tier] += 1 / seconds[worker.device]
    return rates


def _route_s(workflow: Workflow, models: Mapping[str, str], chosen: tuple[str, ...]) -> float:
    """The slowest way of an item through any workers in use, without waiting."""

    def ends(name: str) -> Iterator[tuple[str, float]]:
        if name in workflow.source_of:
            yield workflow.source_of[name].tier, 0.0
            return
        operator = workflow.operator_of[name]
        for worker, own in zip(workflow.workers, chosen, strict=True):
            if own == name:
                before = [
                    seconds + link.latency_s + (8 * size / link.bits_per_s if link.bits_per_s else 0.0)
                    for input_name in operator.inputs
                    for tier, seconds in ends(input_name)
                    if (link := workflow.link(tier, worker.tier)) is not None
                    and (size := workflow.message_bytes(input_name, models)) >= 0
                ]
                yield worker.tier, max(before, default=0.0) + operator.variant(models[name]).seconds[worker.device]

    return max(seconds for sink in workflow.sinks for _, seconds in ends(sink))


def _traffic_usd(
    workflow: Workflow, models: Mapping[str, str], capacity: Mapping[str, Mapping[str, float]]
) -> float | None:
    """The least price of the traffic, by a linear program over tiers; None: there is no way."""
    rate, tiers = workflow.rate_per_s, [tier.name for tier in workflow.tiers]
    loads = {(name, tier): index for index, (name, tier) in enumerate(product(workflow.order, tiers))}
    flows = {
        (source, target, source_tier, target_tier): len(loads) + index
        for index, (source, target, source_tier, target_tier) in enumerate(
            (source, target, source_tier, target_tier)
            for source, target in workflow.edges
            for source_tier, target_tier in product(tiers, tiers)
            if workflow.link(source_tier, target_tier) is not None
        )
    }
    count = len(loads) + len(flows)
    costs, upper = np.zeros(count), np.full(count, np.inf)
    for (name, tier), column in loads.items():
        upper[column] = capacity[name][tier]
    rows: list[tuple[dict[int, float], float]] = [
        ({loads[name, tier]: 1.0 for tier in tiers}, rate) for name in workflow.order
    ]
    full: list[tuple[dict[int, float], float]] = []
    for (source, _, source_tier, target_tier), column in flows.items():
        link = workflow.link(source_tier, target_tier)
        assert link is not None
        costs[column] = link.usd_per_gib * workflow.message_bytes(source, models) * 3600 / 1024**3
    for link in workflow.links:
        if link.bits_per_s:
            own = {
                column: 8 * workflow.message_bytes(source, models)
                for (source, _, source_tier, target_tier), column in flows.items()
                if (source_tier, target_tier) == (link.source, link.target)
            }
            full.append((own, link.bits_per_s))
    for source, target in workflow.edges:
        for tier in tiers:
            sent = {column: 1.0 for key, column in flows.items() if key[:3] == (source, target, tier)}
            here = rate if source in workflow.source_of and workflow.source_of[source].tier == tier else 0.0
            rows.append((sent | ({} if source in workflow.source_of else {loads[source, tier]: -1.0}), here))
            received = {column: 1.0 for key, column in flows.items() if key[:2] == (source, target) and key[3] == tier}
            rows.append((received | {loads[target, tier]: -1.0}, 0.0))
    equal, limits = np.zeros((len(rows), count)), np.zeros((len(full), count))
    for matrix, given in ((equal, rows), (limits, full)):
        for index, (terms, _) in enumerate(given):
            for column, value in terms.items():
                matrix[index, column] = value
    optimum = linprog(
        costs, A_eq=equal, b_eq=[value for _, value in rows], A_ub=limits if full else None,
        b_ub=[value for _, value in full] if full else None, bounds=np.column_stack([np.zeros(count), upper]),
    )  # fmt: skip
    return float(optimum.fun) if optimum.status == 0 else None


def every_plan_of_vqa(workflow: Workflow) -> tuple[float, int, int]:
    """The cheapest price of ``vqa`` over all 4^9 uses of its workers and all accurate enough choices of models; how
    many of these plans are feasible, and how many of them would not be without any one of their workers.

    An item is cheapest where its messages are small. Traffic to an operator costs more than from it, so that the edge
    does as many items as its workers can; answers are made at the edge as far as both inputs are there."""
    order, rate = workflow.order, workflow.rate_per_s
    uses = np.array(list(product(range(len(order) + 1), repeat=len(workflow.workers))))
    prices = np.array([worker.usd_per_hour for worker in workflow.workers])
    edge = np.array([worker.tier == "edge" for worker in workflow.workers])
    usd = (uses > 0) @ prices
    link = workflow.link("edge", "cloud")
    assert link is not None
    best, feasible, least = np.inf, 0, 0
    for models in _choices(workflow):
        accuracy = workflow.accuracy(models)
        if accuracy is None or accuracy < workflow.limits.accuracy:
            continue
        here, rest, speeds = {}, {}, {}
        for index, name in enumerate(order, start=1):
            seconds = workflow.operator_of[name].variant(models[name]).seconds
            speeds[name] = (uses == index) * np.array([1 / seconds[worker.device] for worker in workflow.workers])
            here[name], rest[name] = speeds[name] @ edge, speeds[name] @ ~edge
        at = {name: np.minimum(here[name], rate) for name in order}
        sink = workflow.sinks[0]
        inputs = workflow.operator_of[sink].inputs
        at[sink] = np.minimum(at[sink], np.minimum(at[inputs[0]], at[inputs[1]]))
        enough = np.all([rate - at[name] <= rest[name] + 1e-9 for name in order], axis=0)
        total = usd.copy()
        for name in inputs:
            (source,) = workflow.operator_of[name].inputs
            total += workflow.usd_per_hour(link, workflow.message_bytes(source, models), 1.0) * (rate - at[name])
            total += workflow.usd_per_hour(link, workflow.message_bytes(name, models), 1.0) * (at[name] - at[sink])
        feasible += int(enough.sum())
        if enough.any():
            best = min(best, float(total[enough].min()))
        needed = enough.copy()
        for name in order:
            slack = speeds[name].sum(axis=1) - rate
            needed &= ~np.any((speeds[name] > 0) & (speeds[name] <= slack[:, None]), axis=1)
        least += int(needed.sum())
    return best, feasible, least


def _choices(workflow: Workflow) -> Iterator[dict[str, str]]:
    """Every choice of a variant for each operator."""
    names = [[variant.name for variant in workflow.operator_of[name].variants] for name in workflow.order]
    for models in product(*names):
        yield dict(zip(workflow.order, models, strict=True))
