"""Replicas of captured models: what each rank exchanges, rules side by side, and rules that the user allows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meshwright as mw
from meshwright.api.plans import plan as make_plan
from meshwright.catalog import load_cluster
from meshwright.cli import run as cli
from meshwright.cost.optimizer import ADAMW
from meshwright.errors import LayoutError, PlanError
from meshwright.ir.cluster import Cluster
from meshwright.ir.consistency import consistency_of
from meshwright.ir.graph import Graph
from meshwright.ir.level import Level
from meshwright.planner.replicas import UNKNOWN, exchanged_bytes, replica_step, variants_of
from meshwright.runtime.worlds import World
from meshwright.simulate.replicas import simulate_replicas
from tests.distributed import oracle

pytestmark = pytest.mark.usefixtures("without_workers")


def boxes(gbit: float) -> Cluster:
    """Four boxes of one core, joined by a network of this rate."""
    network = Level(name="network", fan_out=4, alpha_s=1e-6, beta_s_per_byte=8e-9 / gbit)
    return msgspec.structs.replace(
        load_cluster("cpu-local"), name="boxes", num_devices=4, levels=(network,), collectives=()
    )


@cache
def graph_of(count: int) -> Graph:
    subject = oracle.gpt(False, layers=1, size=8)
    return mw.capture(subject.model, subject.loss_fn, World(num_replicas=count).part(subject.batches[0]))


def _step_s(plan: mw.Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def chosen(allow: list[str], gbit: float, **options: Any) -> mw.Plan:
    return make_plan(graph_of(1), boxes(gbit), devices=4, allow=allow, graph_of=graph_of, **options)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (mw.Layout(), {0}), (mw.Layout(dp=2), {0}), (mw.Layout(tp=2), {0, 1}), (mw.Layout(dp=2, tp=2), {0, 1}),
        (mw.Layout(dp=2, zero=1), {0, 1}), (mw.Layout(dp=2, zero=3), {0, 1}),
    ],
)  # fmt: skip
def test_first_copies_are_exchanged(layout: mw.Layout, ranks: set[int]) -> None:
    graph = graph_of(1)
    plan = mw.plan(graph, load_cluster("cpu-local").resized(4), layout=layout)
    parts = exchanged_bytes(graph, plan)
    assert set(parts) == ranks
    assert sum(parts.values()) == sum(graph.tensors[name].num_bytes for name in graph.parameters)


def test_each_stage_exchanges_its_parameters() -> None:
    subject = oracle.gpt(False, layers=2, size=8)
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    plan = mw.plan(graph, load_cluster("cpu-local").resized(4), layout=mw.Layout(pp=2, dp=2, microbatches=2))
    parts = exchanged_bytes(graph, plan)
    assert set(parts) == {0, 2}
    held = [name for stage in plan.stages for name in stage.storage]  # the first and the last share a tied parameter
    assert len(held) == len(graph.parameters) + 1
    assert sum(parts.values()) == sum(graph.tensors[name].num_bytes for name in held)
    step = replica_step(graph, plan, 1.0, ADAMW, 1.25)
    assert (step.num_ranks, step.exposed_s) == (4, 0.25)
    assert step.state_bytes == 2 * step.num_bytes


@pytest.mark.parametrize("gbit", [pytest.param(0.01, marks=pytest.mark.product), 1.0])
def test_the_planner_takes_the_fastest_of_all_allowed_rules_and_numbers(gbit: float) -> None:
    """Beside an exhaustive comparison."""
    allow = ["local(16)", "gossip(complete)", "server(async)"]
    seconds = {("sync", 1): _step_s(make_plan(graph_of(1), boxes(gbit), devices=4))}
    for count in (2, 4):
        alone = make_plan(graph_of(count), boxes(gbit), devices=4 // count)
        step = replica_step(graph_of(count), alone, _step_s(alone), ADAMW)
        for rule in allow:
            steps = 32 if rule == "local(16)" else 20
            times = simulate_replicas(consistency_of(rule), count, step, boxes(gbit), steps=steps)
            seconds[rule, count] = times.step_s
    plan = chosen(allow, gbit)
    best = min(seconds, key=seconds.__getitem__)
    assert (plan.consistency, plan.layout.consistency, plan.layout.replicas) == (best[0], *best)
    assert plan.mesh.world_size == 4 // best[1]
    note = next(note for note in plan.notes if note.module == "(replicas)")
    assert note.split == f"{best[1]} replicas, {best[0]}"
    assert note.reason.startswith(f"{seconds[best] * 1e3:.4g} ms for as many samples as a synchronous step of ")
    assert UNKNOWN in note.reason
    named = [other for other in plan.alternatives if any(rule in other.layout for rule in allow)]
    assert [other.step_s for other in named] == sorted(other.step_s for other in named)
    assert all(other.step_s >= seconds[best] for other in named)


def test_the_planner_stays_in_step_where_allowed_rules_are_slower() -> None:
    """Over a slow network, a server's link carries the parameters of all replicas in turn."""
    stays = chosen(["server(sync)"], gbit=0.01)
    assert (stays.layout.replicas, stays.consistency) == (1, "sync")
    assert any(note.module == "(replicas)" and UNKNOWN in note.reason for note in stays.notes)
    assert any("server(sync)" in other.layout for other in stays.alternatives)


def test_of_a_rule_without_a_number_it_takes_the_fewest_steps_that_cost_little() -> None:
    steps = [int(chosen(["local"], gbit).consistency.removeprefix("local(").removesuffix(")")) for gbit in (1.0, 10.0)]
    assert steps[0] > steps[1] > 2
    assert [str(rule) for rule in variants_of("diloco")][:2] == ["diloco(2)", "diloco(4)"]


def test_what_cannot_be_allowed_is_refused() -> None:
    with pytest.raises(PlanError, match="there is no rule 'hogwild'"):
        chosen(["hogwild"], 1.0)
    with pytest.raises(LayoutError, match="no rule but sync"):
        chosen(["sync"], 1.0)
    with pytest.raises(LayoutError, match="a layout is given too"):
        chosen(["local"], 1.0, layout=mw.Layout(dp=4))
    with pytest.raises(LayoutError, match="no graph of a replica"):
        mw.plan(graph_of(1), boxes(1.0), allow=["local"])
    subject = oracle.gpt(False, layers=1, size=8)
    with pytest.raises(LayoutError, match="a plan is given too"):
        mw.parallelize(subject.model, subject.loss_fn, subject.batches[0], plan=mw.Layout(), allow=["local"])


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "digits.toml"
    path.write_text(
        '[model]\nname = "mlp"\nsizes = [64, 16, 10]\n[data]\nkind = "digits"\nbatch_size = 32\n[train]\nranks = 4\n'
        '[layout]\ncluster = "cpu-local"\n'
    )
    return str(path)


def test_simulate_compares_rules(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    rules = ["--replicas", "4", "--consistency", "server(ssp=3)", "--consistency", "local(4)", "--steps", "50"]
    slow = ["--slow", "2x:turns", "--slow", "1:1.5", "--slow", "2x:0.1", "--jitter", "0.1"]
    assert cli(["simulate", run_file, *rules, *slow]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 replicas of one rank: ")
    assert [line.split("  ")[0] for line in lines[2:5]] == ["sync", "server(ssp=3)", "local(4)"]
    assert cli(["simulate", run_file, *rules, *slow, "--json"]) == 0
    decoded = json.loads(capsys.readouterr().out)
    assert [row["times"]["rule"] for row in decoded["rows"]] == ["sync", "server(ssp=3)", "local(4)"]
    sync, bounded, _ = decoded["rows"]
    assert bounded["speedup"] == pytest.approx(sync["times"]["step_s"] / bounded["times"]["step_s"])
    assert decoded["batch_size"] == 32
    assert sync["sample_s"] == pytest.approx(sync["times"]["step_s"] / 32)
    assert max(map(int, bounded["times"]["staleness"])) <= 3


def test_a_trace_of_replicas_is_written_for_one_rule(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layout.replicas", "2", "--consistency", "gossip(ring)", "--steps", "3", "--trace", "replicas.json"]
    assert cli(["simulate", run_file, *options]) == 0
    assert json.loads(Path("replicas.json").read_text())["traceEvents"]
    capsys.readouterr()
    assert cli(["simulate", run_file, *options, "--consistency", "local(2)"]) == 2
    assert "a trace of 2 rules" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--consistency", "local(2)"], "1 replica"),
        (["--replicas", "3", "--consistency", "local(2)"], "do not divide into 3 replicas"),
        (["--replicas", "4", "--consistency", "local(0)"], "every=0"),
        (["--replicas", "4", "--consistency", "partial(5)"], "partial(5) with 4 replicas"),
        (["--replicas", "4", "--consistency", "local(2)", "--slow", "1=2"], "cannot be read as a slow replica"),
        (["--replicas", "4", "--consistency", "local(2)", "--slow", "2x:2"], "a probability is 2"),
        (["--replicas", "4", "--consistency", "local(2)", "--slow", "7:2"], "there is no replica 7"),
        (["--replicas", "4", "--consistency", "local(2)", "--contention"], "letters between replicas always share"),
        (["--steps", "5"], "without replicas"),
    ],
)
def test_simulate_refuses_what_replicas_cannot_be(
    run_file: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["simulate", run_file, *words]) == 2
    assert says in capsys.readouterr().err


def test_plan_allows_rules(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    allowed = ["--layout.plan", "auto", "--ranks", "4", "--allow", "local(16)", "--fresh"]
    assert cli(["plan", run_file, *allowed, "--output", "plan.json"]) == 0
    assert "(replicas)" in capsys.readouterr().out
    assert json.loads(Path("plan.json").read_text())["layout"]["replicas"] >= 1
    assert cli(["plan", run_file, "--dp", "4", "--allow", "local(16)"]) == 2
    assert "allow: a layout is given" in capsys.readouterr().err
