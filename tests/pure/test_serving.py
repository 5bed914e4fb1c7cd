"""Workflows on tiers: plans equal brute force, simulation equals closed forms, ways keep the plan's rates, errors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.cli import run as cli
from meshwright.errors import MeshwrightError, WorkflowError
from meshwright.serving import reading
from meshwright.serving.choose import (
    choose,
    choose_exactly,
    choose_models_by_beam,
    keep_latency,
    neighbours,
    one_tier_plans,
    uniform_plans,
)
from meshwright.serving.explain import HEADROOMS, plan_workflow
from meshwright.serving.plan import WorkflowPlan, operator_costs, slowest_route_s
from meshwright.serving.routes import routes
from meshwright.serving.simulate import capacity_per_s, simulate
from meshwright.serving.workflow import Limits, Link, Operator, Source, Tier, Variant, Worker, Workflow
from tests.pure.workflows import by_brute_force, every_plan_of_vqa, random_workflow

CASES = 15
VQA = reading.load("vqa")


def changed(workflow: Workflow, **limits: float) -> Workflow:
    return msgspec.structs.replace(workflow, limits=msgspec.structs.replace(workflow.limits, **limits))


def line(*, variation: float = 0.0, rate: float = 8.0, workers: int = 1, seconds: float = 0.1) -> Workflow:
    """One operator on equal workers."""
    return Workflow(
        name="line", tiers=(Tier(name="edge"),), sources=(Source(name="camera", tier="edge", rate_per_s=rate),),
        workers=tuple(Worker(name=f"w{i}", tier="edge", device="cpu", usd_per_hour=1.0) for i in range(workers)),
        operators=(Operator(name="detect", inputs=("camera",), variants=(
            Variant(name="m", seconds={"cpu": seconds}, variation=variation),
        )),),
    )  # fmt: skip


def chain(*, bits_per_s: float = 0.0, latency_s: float = 0.0) -> Workflow:
    """A detector at the edge, and a reader in the cloud."""
    return Workflow(
        name="chain", tiers=(Tier(name="edge"), Tier(name="cloud")),
        workers=(
            Worker(name="near", tier="edge", device="cpu", usd_per_hour=0.5),
            Worker(name="far", tier="cloud", device="gpu", usd_per_hour=2.0),
        ),
        links=(Link(source="edge", target="cloud", usd_per_gib=0.1, bits_per_s=bits_per_s, latency_s=latency_s),),
        sources=(Source(name="camera", tier="edge", rate_per_s=10.0, message_bytes=1e6),),
        operators=(
            Operator(name="detect", inputs=("camera",), variants=(
                Variant(name="small", seconds={"cpu": 0.05}, message_bytes=1e5, accuracy=0.8),
            )),
            Operator(name="read", inputs=("detect",), variants=(Variant(name="ocr", seconds={"gpu": 0.02}),)),
        ),
    )  # fmt: skip


# --- choice ----------------------------------------------------------------------------------------------------------


def test_the_published_workflow_is_planned_below_its_published_plan_with_proof() -> None:
    """The published optimizer's plan costs 6.242 + 1.26678 = 7.50878 (Wu et al., PVLDB 16(3))."""
    plan = choose(VQA)
    assert plan.usd_per_hour == pytest.approx(7.48502, abs=5e-6)
    assert plan.workers_usd_per_hour == pytest.approx(6.242)
    assert plan.accuracy == 56.59
    assert plan.proven
    assert plan.gap < 1e-9
    assert {load.worker for load in plan.choice("speech-recognition").workers} == {"gpu-1", "cpu-4"}


def test_the_published_workflow_has_no_cheaper_plan_among_all() -> None:
    few = msgspec.structs.replace(VQA, accuracies=VQA.accuracies[:4])  # the benchmark tries all
    best, feasible, _ = every_plan_of_vqa(few)
    assert choose(VQA).usd_per_hour == pytest.approx(best, rel=1e-9)
    assert feasible > 50_000


def test_random_workflows_are_planned_as_by_brute_force() -> None:
    outcomes = Counter[str]()
    for seed in range(CASES):
        workflow = random_workflow(seed)
        expected = by_brute_force(workflow)
        for kind, choice in (("exact", choose_exactly), ("beam", choose_models_by_beam)):
            try:
                plan = choice(workflow)
            except WorkflowError:
                assert expected is None, workflow.name
                outcomes["none"] += 1
                continue
            assert expected is not None, workflow.name
            assert plan.bound_usd_per_hour <= expected + 1e-6
            assert plan.usd_per_hour <= expected / (1 - plan.gap) + 1e-6
            assert plan.usd_per_hour >= expected - 1e-6
            if kind == "exact":
                assert plan.usd_per_hour == pytest.approx(expected, abs=1e-6), workflow.name
                check_keeps_limits(workflow, plan)
                outcomes["plans"] += 1
    assert outcomes["plans"] > CASES / 3
    assert outcomes["none"] > 4


def check_keeps_limits(workflow: Workflow, plan: WorkflowPlan) -> None:
    assert plan.accuracy >= workflow.limits.accuracy * (1 - 1e-5)
    used = [load.worker for choice in plan.choices for load in choice.workers]
    assert len(used) == len(set(used))
    for choice in plan.choices:
        assert sum(load.rate_per_s for load in choice.workers) == pytest.approx(workflow.rate_per_s)
        assert all(load.utilisation <= plan.headroom + 1e-6 for load in choice.workers)
    for traffic in plan.traffic:
        assert workflow.tier_index[traffic.source_tier] <= workflow.tier_index[traffic.target_tier]
    if workflow.limits.latency_s:
        assert slowest_route_s(workflow, plan) <= workflow.limits.latency_s + 1e-6


def test_a_narrow_beam_states_its_gap() -> None:
    cost = choose_exactly(VQA).usd_per_hour
    for beam in (1, 2, 10):
        plan = choose_models_by_beam(VQA, beam=beam)
        assert plan.bound_usd_per_hour <= cost + 1e-9
        assert plan.usd_per_hour * (1 - plan.gap) <= cost + 1e-9
        assert f"{beam} choices" in plan.method


def test_costs_follow_the_formula() -> None:
    """Price of traffic: price * rate * bytes * 3600 / 1024^3."""
    plan = choose(chain())
    link = 0.1 * 10.0 * 1e5 * 3600 / 1024**3
    assert plan.links_usd_per_hour == pytest.approx(link)
    assert plan.usd_per_hour == pytest.approx(2.5 + link)
    parts = [cost.workers_usd_per_hour + cost.links_usd_per_hour for cost in operator_costs(chain(), plan)]
    assert sum(parts) == pytest.approx(plan.usd_per_hour)


def test_neighbours_are_the_next_on_either_side() -> None:
    plan = choose(VQA)
    beside = neighbours(VQA, plan)
    assert beside.cheaper is not None
    assert beside.more_accurate is not None
    assert (beside.cheaper.accuracy, beside.more_accurate.accuracy) == (54.02, 56.85)
    assert beside.cheaper.usd_per_hour < plan.usd_per_hour < beside.more_accurate.usd_per_hour
    assert beside.more_accurate.usd_per_hour == pytest.approx(choose(changed(VQA, accuracy=56.6)).usd_per_hour)
    most = choose(changed(VQA, accuracy=58.33))
    assert neighbours(VQA, most).more_accurate is None


def test_single_tiers_and_uniform_models_cost_more() -> None:
    cost = choose(VQA).usd_per_hour
    tiers, uniform = one_tier_plans(VQA), uniform_plans(VQA)
    assert set(tiers) == {"cloud"}
    assert min(tier.usd_per_hour for tier in tiers.values()) > 1.3 * cost
    assert min(plan.usd_per_hour for plan in uniform.values()) > 1.3 * cost


def test_a_limit_of_latency_leaves_room_for_waiting() -> None:
    workflow = changed(line(variation=0.5, rate=9.5, workers=3), latency_s=0.35)

    def p99_s(plan: WorkflowPlan) -> float:
        return simulate(workflow, plan, items=2000).percentile_s(99)

    plan = keep_latency(workflow, p99_s, HEADROOMS)
    assert p99_s(plan) <= 0.35 < p99_s(choose(workflow))
    assert len(plan.choices[0].workers) > len(choose(workflow).choices[0].workers)


# --- simulation ------------------------------------------------------------------------------------------------------


def mean_latency_s(rate_per_s: float, seconds: float, variation: float) -> float:
    """The mean time in a queue and on one worker, for Poisson arrivals (Pollaczek 1930, Khinchine 1932): M/D/1 with
    variation 0, M/M/1 with variation 1."""
    busy = rate_per_s * seconds
    return seconds + busy * seconds * (1 + variation**2) / (2 * (1 - busy))


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0])
def test_one_worker_waits_as_queueing_theory_says(variation: float) -> None:
    """M/D/1, M/G/1 and M/M/1: Pollaczek and Khinchine's formula."""
    workflow = line(variation=variation, rate=6.0)
    played = simulate(workflow, choose(workflow), items=30_000, arrivals="poisson", seed=1)
    assert np.mean(played.latencies_s) == pytest.approx(mean_latency_s(6.0, 0.1, variation), rel=0.06)
    assert played.throughput_per_s == pytest.approx(6.0, rel=0.02)
    assert played.utilisation["w0"] == pytest.approx(0.6, rel=0.02)


def test_exponential_service_has_an_exponential_latency() -> None:
    """M/M/1: the time in the system is exponential with rate mu - lambda, so that p99 = ln(100) / (mu - lambda)."""
    workflow = line(variation=1.0, rate=5.0)
    played = simulate(workflow, choose(workflow), items=30_000, arrivals="poisson", seed=2)
    assert played.percentile_s(99) == pytest.approx(np.log(100) / 5.0, rel=0.08)
    assert played.percentile_s(50) == pytest.approx(np.log(2) / 5.0, rel=0.05)


def test_an_idle_chain_takes_the_sum_of_its_parts() -> None:
    """1e6 B do not cross the link, 1e5 B do: 0.05 s + 8e5 bits / 1e7 bit/s + 0.01 s + 0.02 s."""
    workflow = chain(bits_per_s=1e7, latency_s=0.01)
    plan = choose(workflow)
    played = simulate(workflow, plan, items=20)
    assert played.latencies_s == pytest.approx([0.16] * 20)
    assert slowest_route_s(workflow, plan) == pytest.approx(0.16)


def test_throughput_is_that_of_the_busiest_worker_or_link() -> None:
    worker = choose(line(rate=9.0))
    fast = msgspec.structs.replace(line().sources[0], rate_per_s=20.0)
    over = msgspec.structs.replace(line(), sources=(fast,))
    assert simulate(over, worker, items=500).throughput_per_s == pytest.approx(10.0, rel=1e-3)
    assert capacity_per_s(line(rate=9.0), worker) == pytest.approx(10.0)
    slow = msgspec.structs.replace(chain(), links=chain(bits_per_s=4e6).links)  # 8e5 bits an item: 5 items a second
    assert simulate(slow, choose(chain()), items=200).throughput_per_s == pytest.approx(5.0, rel=1e-3)
    assert capacity_per_s(slow, choose(chain())) == pytest.approx(5.0)


def test_ways_keep_the_rates_of_workers_and_traffic() -> None:
    plan, items = choose(VQA), 4000
    ways = routes(VQA, plan, items)
    counts = Counter(worker for way in ways for worker in way.values())
    for choice in plan.choices:
        for load in choice.workers:
            assert counts[load.worker] / items == pytest.approx(load.rate_per_s / VQA.rate_per_s, abs=2e-3)
    for traffic in plan.traffic:
        own = [
            (VQA.tier_of[way.get(traffic.source, traffic.source)], VQA.tier_of[way[traffic.target]]) for way in ways
        ]  # fmt: skip
        share = own.count((traffic.source_tier, traffic.target_tier)) / items
        assert share == pytest.approx(traffic.rate_per_s / VQA.rate_per_s, abs=2e-3)


@pytest.mark.parametrize("seed", [1, 4, 9, 16, 23, 31, 40])
def test_ways_keep_the_rates_of_random_plans(seed: int) -> None:
    """Chains, joins and forks: each edge carries from tier to tier what the plan says."""
    drawn = random_workflow(seed)
    pairs = [(tier.name, other.name) for index, tier in enumerate(drawn.tiers) for other in drawn.tiers[index + 1 :]]
    workflow = msgspec.structs.replace(
        drawn, limits=Limits(), links=tuple(Link(source=a, target=b, usd_per_gib=1.0) for a, b in pairs),
        sources=tuple(msgspec.structs.replace(source, rate_per_s=3.0) for source in drawn.sources),
    )  # fmt: skip
    try:
        plan = choose(workflow)
    except WorkflowError:
        pytest.skip("no plan does three items per second")
    items = 2000
    ways = routes(workflow, plan, items)
    for traffic in plan.traffic:
        tiers = [
            (workflow.tier_of[way.get(traffic.source, traffic.source)], workflow.tier_of[way[traffic.target]])
            for way in ways
        ]
        share = tiers.count((traffic.source_tier, traffic.target_tier)) / items
        assert share == pytest.approx(traffic.rate_per_s / workflow.rate_per_s, abs=5e-3)


def test_of_equally_cheap_plans_the_most_accurate_is_taken() -> None:
    workflow = line()
    variants = (
        msgspec.structs.replace(workflow.operators[0].variants[0], accuracy=0.7),
        Variant(name="better", seconds={"cpu": 0.12}, accuracy=0.9),
        Variant(name="slow", seconds={"cpu": 0.2}, accuracy=0.95),
    )
    operators = (msgspec.structs.replace(workflow.operators[0], variants=variants),)
    planned = plan_workflow(msgspec.structs.replace(workflow, operators=operators))
    assert planned.plan.models == {"detect": "better"}
    assert planned.plan.proven
    assert planned.more_accurate == ""


def test_simulations_are_equal_for_equal_seeds() -> None:
    workflow = line(variation=0.5, rate=6.0)
    first, second = (simulate(workflow, choose(workflow), items=50, arrivals="poisson", seed=seed) for seed in (3, 3))
    assert first == second
    assert first != simulate(workflow, choose(workflow), items=50, arrivals="poisson", seed=4)


# --- files and errors ------------------------------------------------------------------------------------------------


def test_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    for workflow in (VQA, chain(bits_per_s=1e7), random_workflow(3)):
        reading.save(workflow, tmp_path / "one.toml")
        assert reading.load(tmp_path / "one.toml") == workflow


BASE = """name = "w"
limits = { accuracy = 0.5 }
tiers = [{ name = "edge" }, { name = "cloud" }]
links = [{ source = "edge", target = "cloud", usd_per_gib = 0.1 }]
workers = [{ name = "near", tier = "edge", device = "cpu", usd_per_hour = 0.5 }]
sources = [{ name = "camera", tier = "edge", rate_per_s = 10.0, message_bytes = 1e6 }]
[[operators]]
name = "detect"
inputs = ["camera"]
variants = [{ name = "small", seconds = { cpu = 0.05 }, accuracy = 0.8 }]
[[operators]]
name = "read"
inputs = ["detect"]
variants = [{ name = "ocr", seconds = { cpu = 0.05 } }]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("usd_per_hour = 0.5", "usd_per_hour = -0.5", "workers.near.usd_per_hour: -0.5 is negative"),
        ("usd_per_gib = 0.1", "usd_per_gib = -1", "links.edge-cloud.usd_per_gib: -1 is negative"),
        ("cpu = 0.05 }, acc", "cpu = nan }, acc", "operators.detect.small.seconds.cpu: it is nan"),
        ("cpu = 0.05 }, acc", "cpu = 0.0 }, acc", "operators.detect.small.seconds.cpu: 0 is not above 0"),
        ("rate_per_s = 10.0", "rate_per_s = inf", "sources.camera.rate_per_s: it is inf"),
        ("accuracy = 0.8", "accuracy = nan", "operators.detect.small.accuracy: it is nan"),
        ("accuracy = 0.8", "accuracy = 80", "operators.detect.small.accuracy: 80 is above 1"),
        ('inputs = ["camera"]', 'inputs = ["camera", "read"]', "they form a circle: detect -> read -> detect"),
        ('inputs = ["detect"]', 'inputs = ["detct"]', "operator 'detct'\n  -> did you mean `detect`?"),
        ('tier = "edge", device', 'tier = "egde", device', "unknown tier 'egde'\n  -> did you mean `edge`?"),
        ('target = "cloud"', 'target = "clod"', "unknown tier 'clod'"),
        ('source = "edge", target = "cloud"', 'source = "cloud", target = "edge"', "it leads back to an earlier tier"),
        ('device = "cpu"', 'device = "cpuu"', "no variant has seconds on the device 'cpuu'\n  -> did you mean `cpu`?"),
        ("accuracy = 0.5", "accuracy = 0.9", "no choice of models reaches an accuracy of 0.9; the most is 0.8"),
        (
            "rate_per_s = 10.0", "rate_per_s = 30.0",
            "detect must do 30 items per second; on all workers that can run it, its fastest variant does 20",
        ),
        ("seconds = { cpu = 0.05 }, ", "", "operators.detect.small: it has no seconds on any device"),
        ("variants = [{ name", "variant = [{ name", "known keys: name, inputs, variants"),
        ('name = "read"', 'name = "detect"', "'detect' stands there twice"),
        ("tiers = [", "tiers = ", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_key(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in BASE
    path = tmp_path / "w.toml"
    path.write_text(BASE.replace(old, new, 1))
    assert cli(["serve", "plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert "\n  -> " in error


def test_operators_that_need_one_worker_together_are_refused(tmp_path: Path) -> None:
    """Each could do 20 items a second alone; two operators need two workers."""
    (tmp_path / "w.toml").write_text(BASE)
    with pytest.raises(WorkflowError, match="the workers do at most 0 of 10 items per second"):
        choose(reading.load(tmp_path / "w.toml"))


def test_a_limit_of_latency_that_no_way_keeps_names_the_shortest() -> None:
    with pytest.raises(WorkflowError, match=r"at most 0.1 s; the shortest has 0.16 s"):
        choose(changed(chain(bits_per_s=1e7, latency_s=0.01), latency_s=0.1))
    workflow = changed(line(variation=1.0), latency_s=0.11)
    with pytest.raises(WorkflowError, match=r"with waiting, no plan keeps 99 % of the items within 0.11 s"):
        plan_workflow(workflow)


def test_sources_of_different_rates_and_ways_that_meet_are_refused() -> None:
    sources = (*chain().sources, Source(name="voice", tier="edge", rate_per_s=5.0))
    with pytest.raises(WorkflowError, match="their rates differ: camera 10, voice 5"):
        msgspec.structs.replace(chain(), sources=sources, operators=(
            msgspec.structs.replace(chain().operators[0], inputs=("camera", "voice")), chain().operators[1],
        ))  # fmt: skip
    end = Operator(name="end", inputs=("detect", "read"), variants=chain().operators[1].variants)
    with pytest.raises(WorkflowError, match="the same results come on two ways"):
        msgspec.structs.replace(chain(), operators=(*chain().operators, end))


def test_an_unknown_workflow_and_a_missing_file_are_named() -> None:
    with pytest.raises(MeshwrightError, match="did you mean `vqa`"):
        reading.load("vqaa")


# --- commands --------------------------------------------------------------------------------------------------------


def test_plans_and_simulations_are_printed_and_leave_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert cli(["serve", "plan", "vqa", "--page", str(page)]) == 0
    output = capsys.readouterr().out
    assert "7.48502 $/h at accuracy 56.59: proven to be the cheapest" in output
    assert "next cheaper:" in output
    assert "next more accurate: +0.3905 $/h, accuracy +0.26 (56.85)" in output
    text = page.read_text()
    assert "<svg" in text
    assert "speech-recognition" in text
    assert "meshwright serve plan vqa" in text
    assert cli(["serve", "simulate", "vqa", "--items", "200", "--json"]) == 0
    decoded = msgspec.json.decode(capsys.readouterr().out)
    assert [figure["name"] for figure in decoded["figures"]] == ["throughput", "p50 latency", "p99 latency"]
    assert len(decoded["latencies_s"]) == 200
    assert cli(["serve", "plan", "vqa", "--accuracy", "54", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["plan"]["accuracy"] == 54.02
    assert cli(["serve", "simulate", "vqa", "--arrivals", "late"]) == 2
    assert "unknown arrivals 'late'" in capsys.readouterr().err
