"""Are workflows on tiers planned at the least cost, and do they run as predicted? ``python -m benchmarks.serving``.

Without ``--only PART``, the result file is written. The exit code is 1 if a target is missed.

reference  The published workflow (Wu et al., "JellyBean", PVLDB 16(3), 2022): its plan beside every plan of its nine
           workers and five sets of models, beside its published plan, and beside the best plans on a single tier and
           with uniform models (every operator runs the variant at the same relative place of its list).
random     1,000 random workflows of up to three operators, three variants and five workers on up to three tiers, with
           limits of accuracy, latency and link rates: one integer program, and beam search with ten and with three
           kept choices, beside brute force.
emulated   The published workflow with 10 % variation and a link of 100 Mbit/s, planned for a p99 limit, on this
           machine: workers wait for the seconds of their profile, tiers are network namespaces joined by ``tc``
           (``emulation/network.py``; as root, else links are not emulated). Predicted by simulation, with equal draws.
models     Two PyTorch models, profiled on this machine and then run as two processes under the rate that keeps the
           first busy half of the time, with the same links.
ray        The emulated workflow of two operators on a local Ray cluster with a node for each tier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from benchmarks import report
from meshwright.emulation.network import why_not
from meshwright.errors import WorkflowError
from meshwright.ir.result import Check, Finding, PredictedTime, Series, Settings, Verdict
from meshwright.ir.run_model import MLPModel, ResNetModel
from meshwright.ir.statistics import median
from meshwright.serving import reading
from meshwright.serving.choose import (
    choose,
    choose_exactly,
    choose_models_by_beam,
    one_tier_plans,
    uniform_plans,
)
from meshwright.serving.explain import plan_workflow
from meshwright.serving.local import run_locally
from meshwright.serving.on_ray import run_on_ray
from meshwright.serving.plan import WorkflowPlan
from meshwright.serving.profile import profile, with_profiles
from meshwright.serving.simulate import PlayedItems, simulate
from meshwright.serving.station import StationJob
from meshwright.serving.workflow import Limits, Link, Operator, Source, Tier, Variant, Worker, Workflow
from tests.pure.workflows import by_brute_force, every_plan_of_vqa, random_workflow

COMMAND = "python -m benchmarks.serving"
ROUNDS, CASES, ITEMS = 7, 1000, 400
PUBLISHED, LEAST = 7.50878, 7.48502
"""The price of the published plan, 6.242 + 1.26678, and of the cheapest."""
BELOW, MEAN_OFF, P99_OFF = 0.30, 0.10, 0.20
EMULATED, MODELS = "workers that wait, emulated 100 Mbit/s", "PyTorch models, 2 workers, emulated 100 Mbit/s"


# --- plans -----------------------------------------------------------------------------------------------------------


def reference_findings(rounds: int) -> list[Finding]:
    """The published workflow; nothing is timed."""
    workflow = reading.load("vqa")
    plan, beam = choose(workflow), choose_models_by_beam(workflow)
    best, feasible, needed = every_plan_of_vqa(workflow)
    tiers, uniform = one_tier_plans(workflow), uniform_plans(workflow)
    results: list[Finding] = [
        report.share(
            f"published workflow: at most {LEAST} $/h at accuracy 56.59 or more, with proof",
            int(plan.usd_per_hour <= LEAST + 5e-6 and plan.accuracy >= 56.59 and plan.gap < 1e-9), 1,
            f"{plan.usd_per_hour:.5f} $/h at accuracy {plan.accuracy:g}, gap {plan.gap:.1g}; published {PUBLISHED}",
        ),
        report.share(
            "published workflow: no plan among all is cheaper", int(abs(best - plan.usd_per_hour) < 1e-9), 1,
            f"{best:.5f} $/h; {feasible:,} feasible plans, {needed:,} of them without a worker too many",
        ),
        report.share(
            "published workflow: beam search equals it within its stated gap",
            int(beam.usd_per_hour * (1 - beam.gap) <= plan.usd_per_hour + 1e-9), 1,
            f"{beam.usd_per_hour:.5f} $/h, gap {beam.gap:.1g}",
        ),
    ]  # fmt: skip
    for name, plans in (("on a single tier", tiers), ("with uniform models", uniform)):
        other = min(plans.values(), key=lambda candidate: candidate.usd_per_hour)
        below = 1 - plan.usd_per_hour / other.usd_per_hour
        results.append(report.share(
            f"published workflow: at least {BELOW:.0%} below the best plan {name}", int(below >= BELOW), 1,
            f"{below:.1%} below {other.usd_per_hour:.5f} $/h",
        ))  # fmt: skip
    return results


def random_findings(rounds: int) -> list[Finding]:
    """Random workflows beside brute force; nothing is timed."""
    exact = {"equal": 0, "none": 0}
    beams = {10: [0, 0], 3: [0, 0]}
    for seed in range(CASES):
        workflow = random_workflow(seed)
        expected = by_brute_force(workflow)
        exact["none"] += expected is None
        plan = _plan_or_none(choose_exactly, workflow)
        exact["equal"] += _equal(plan, expected)
        for beam, counts in beams.items():
            kept = _plan_or_none(partial(choose_models_by_beam, beam=beam), workflow)
            within = kept is not None and expected is not None and (
                expected - 1e-6 <= kept.usd_per_hour <= expected / (1 - kept.gap) + 1e-6
            )  # fmt: skip
            counts[0] += within or (kept is None and expected is None)
            counts[1] += _equal(kept, expected)
    return [
        report.share(
            "one integer program of models and workers equals brute force on random workflows", exact["equal"], CASES,
            f"{exact['equal']:,} of {CASES:,}, {exact['none']:,} of which have no plan",
        ),
        *(
            report.share(
                f"beam search with {beam} kept choices is within its stated gap of brute force", counts[0], CASES,
                f"{counts[0]:,} of {CASES:,}, {counts[1]:,} of which are equal",
            )
            for beam, counts in beams.items()
        ),
    ]  # fmt: skip


def _plan_or_none(choice: Callable[[Workflow], WorkflowPlan], workflow: Workflow) -> WorkflowPlan | None:
    try:
        return choice(workflow)
    except WorkflowError:
        return None


def _equal(plan: WorkflowPlan | None, expected: float | None) -> bool:
    if plan is None or expected is None:
        return plan is None and expected is None
    return abs(plan.usd_per_hour - expected) <= 1e-6 * max(1.0, expected)


# --- runs ------------------------------------------------------------------------------------------------------------


def emulated_workflow() -> Workflow:
    """The published workflow with varying seconds, a link and a limit of latency."""
    workflow = reading.load("vqa")
    operators = tuple(
        msgspec.structs.replace(
            operator, variants=tuple(msgspec.structs.replace(variant, variation=0.1) for variant in operator.variants)
        )
        for operator in workflow.operators
    )
    links = (msgspec.structs.replace(workflow.links[0], bits_per_s=1e8),)
    limits = Limits(accuracy=workflow.limits.accuracy, latency_s=0.5)
    return msgspec.structs.replace(workflow, operators=operators, links=links, limits=limits)


def emulated_findings(rounds: int) -> list[Finding]:
    """The published workflow in emulated boxes."""
    workflow = emulated_workflow()
    plan = plan_workflow(workflow).plan
    return _rounds(EMULATED, StationJob(workflow=workflow, plan=plan, items=ITEMS, emulate=True), rounds)


def model_findings(rounds: int) -> list[Finding]:
    """PyTorch models on this machine."""
    workflow = model_workflow(10.0)
    workflow = with_profiles(workflow, profile(workflow), "core")
    rate = round(0.5 / workflow.operators[0].variants[0].seconds["core"], 1)
    sources = (msgspec.structs.replace(workflow.sources[0], rate_per_s=rate),)
    workflow = msgspec.structs.replace(workflow, sources=sources)
    return _rounds(MODELS, StationJob(workflow=workflow, plan=choose(workflow), items=ITEMS), rounds)


def model_workflow(rate_per_s: float) -> Workflow:
    """Features of pictures at the edge, and their class in the cloud."""
    residual = ResNetModel(depth=14, width=32, classes=64, image_channels=3)
    return Workflow(
        name="pictures", tiers=(Tier(name="edge"), Tier(name="cloud")),
        links=(Link(source="edge", target="cloud", usd_per_gib=0.1, bits_per_s=1e8),),
        workers=(
            Worker(name="near", tier="edge", device="core", usd_per_hour=0.1),
            Worker(name="far", tier="cloud", device="core", usd_per_hour=0.2),
        ),
        sources=(Source(name="camera", tier="edge", rate_per_s=rate_per_s, shape=(3, 128, 128)),),
        operators=(
            Operator(name="features", inputs=("camera",), variants=(Variant(name="residual", model=residual),)),
            Operator(name="classify", inputs=("features",), variants=(
                Variant(name="dense", model=MLPModel(sizes=(64, 2048, 2048, 10))),
            )),
        ),
    )  # fmt: skip


def ray_findings(rounds: int) -> list[Finding]:
    """Stations as Ray actors on two labelled nodes."""
    workflow = model_workflow(20.0)
    operators = tuple(
        msgspec.structs.replace(operator, variants=(
            msgspec.structs.replace(operator.variants[0], model=None, seconds={"core": 0.03}, message_bytes=1e4),
        ))
        for operator in workflow.operators
    )  # fmt: skip
    workflow = msgspec.structs.replace(workflow, operators=operators)
    plan = choose(workflow)
    measured = run_on_ray(StationJob(workflow=workflow, plan=plan, items=ITEMS, emulate=True))
    predicted = simulate(workflow, plan, items=ITEMS)
    ratio = measured.percentile_s(99) / predicted.percentile_s(99)
    finished = sum(latency > 0 for latency in measured.latencies_s)
    return [report.share(
        "Ray: all items pass through workers on the nodes of their tiers", finished, ITEMS,
        f"{finished:,} of {ITEMS:,}; p99 {ratio:.2f} x the predicted one",
    )]  # fmt: skip


def _rounds(what: str, job: StationJob, rounds: int) -> list[Finding]:
    missing = why_not()
    played = [run_locally(job, emulate_links=not missing) for _ in range(rounds)]
    predicted = simulate(job.workflow, job.plan, items=job.items, arrivals=job.arrivals, seed=job.seed)
    place = what if not missing else f"{what.partition(', emulated')[0]}, no links ({missing})"
    figures: dict[str, tuple[float, Callable[[PlayedItems], float]]] = {
        "time between results": (MEAN_OFF, lambda items: 1 / items.throughput_per_s),
        "p99 latency": (P99_OFF, lambda items: items.percentile_s(99)),
        "p50 latency": (P99_OFF, lambda items: items.percentile_s(50)),
    }
    run = report.new_run()
    return [
        _figure(
            what, f"{place}: {name} within {off:.0%}", off, [of(items) for items in played], of(predicted), job, run
        )
        for name, (off, of) in figures.items()
    ]


def _figure(
    what: str, target: str, off: float, seconds: Sequence[float], predicted_s: float, job: StationJob, run: str
) -> Finding:
    """A predicted time beside the measured ones. Emulated workers wait and need no core of their own, so that their
    times are a check; the times of models are times."""
    estimate = median(seconds).inverse().times(predicted_s)
    kept = [abs(limit - 1) <= off for limit in estimate.interval]
    outside = not any(kept) and (estimate.high < 1 or estimate.low > 1)
    verdict: Verdict = "pass" if all(kept) else "fail" if outside else "undecided"
    error = f"{estimate.value - 1:+.1%} (95 %: {estimate.low - 1:+.1%} to {estimate.high - 1:+.1%})"
    if job.emulate:
        return Check(target=target, verdict=verdict, measured=error, passed=int(all(kept)), total=1)
    series = Series.of(list(seconds), steps=job.items, settings=what, run=run)
    return PredictedTime(
        target=target, verdict=verdict, series=series, predicted_s=predicted_s, error=estimate.value - 1, limit=off,
        measured=f"{error}: predicted {report.ms(predicted_s)}, measured {report.ms(series.value_s)}",
    )  # fmt: skip


PARTS: dict[str, Callable[[int], list[Finding]]] = {
    "reference": reference_findings, "random": random_findings, "emulated": emulated_findings,
    "models": model_findings, "ray": ray_findings,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    results, _, whole = report.measured(COMMAND, __doc__, PARTS, ROUNDS, arguments)
    if whole:
        timed = "An item, from the start of its first source to its last result; and the time between results."
        settings = {MODELS: Settings(dtype="float32", ranks=2, threads=1, sizes={"items": ITEMS})}
        text = (__doc__ or "").partition("is missed.")[2].strip()
        report.write("serving", "Workflows on tiers", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
