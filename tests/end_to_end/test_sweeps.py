"""Plans for several numbers of devices, what limits data parallelism there, and searches that are interrupted."""

from __future__ import annotations

import json
import re
import signal
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meshwright as mw
from meshwright.api import planned_runs, sweeps
from meshwright.cli import run as cli
from meshwright.cli.display import INTERRUPTED
from meshwright.errors import ClusterError
from meshwright.ir import files
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.plan import Prediction
from meshwright.lower.plans import PlanLowering
from meshwright.planner.data_limits import DataLimit, data_limits
from meshwright.planner.foretell import foretell
from meshwright.planner.time_limit import TimeLimit, was_stopped
from tests.distributed import oracle

CLUSTER = mw.Cluster.load("cpu-local", 4)
MLP = ["plan", "mlp", "--cluster", "cpu-local"]
H100 = mw.Cluster.load("h100-dgx", 2)
SLOW = msgspec.structs.replace(CLUSTER, levels=(msgspec.structs.replace(CLUSTER.levels[0], beta_s_per_byte=1e-7),))
"""A cluster with slow links."""


@cache
def gpt(size: int = 8) -> Graph:
    subject = oracle.gpt(False, layers=1, size=size)
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


# --- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_sweep_captures_once_and_plans_each_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs: list[Graph] = []
    capture = planned_runs.capture

    def counted(*arguments: Any, **options: Any) -> Graph:
        graphs.append(capture(*arguments, **options))
        return graphs[-1]

    monkeypatch.setattr(planned_runs, "capture", counted)
    assert cli([*MLP, "--vary", "devices=1..4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(graphs) == 1
    assert [row["devices"] for row in rows] == [1, 2, 4]
    for row in rows:
        plan = mw.plan(graphs[0], "cpu-local", devices=row["devices"])
        assert plan.prediction is not None
        assert (row["layout"], row["step_s"]) == (layout_text(plan.layout), plan.prediction.step_s)
        assert row["peak_memory_bytes"] == plan.prediction.peak_memory_bytes
        assert row["samples_per_s"] * row["step_s"] == pytest.approx(row["batch"])
        assert row["efficiency"] == pytest.approx(rows[0]["step_s"] / row["step_s"] / row["devices"])
        assert row["search_s"] > 0
    assert cli([*MLP, "--vary", "devices=1..4"]) == 0
    text, stderr = capsys.readouterr()
    assert re.search(r"^devices +ms a step +samples/s +efficiency +GiB a rank +search s +layout", text)
    assert re.search(
        rf"^ +1 +{rows[0]['step_s'] * 1e3:.4g} +[\d.e+]+ +100% +[\d.e-]+ +[\d.]+ +one rank", text, re.MULTILINE
    )
    assert "strong scaling: the batch stays" in text
    assert "`meshwright bench batch-size` measures it" in text
    assert stderr.count("the plan is from the cache") == 3


def test_a_size_without_a_plan_says_why_and_the_sweep_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "mlp", "--vary", "devices=12,2", "--cluster", "h100-dgx-ndr400x8"]
    assert cli(words) == 1
    text = capsys.readouterr().out
    assert re.search(r"^ +12 .* no plan *$", text, re.MULTILINE)
    assert re.search(r"^ +2 .* 100% .* [dtp]p2", text, re.MULTILINE), (
        "the first with a plan is what others are compared with"
    )
    assert "  12 devices: 12 devices do not fill whole units of level 'box', which hold 8\n    -> ask for" in text
    assert cli([*words[:2], "--vary", "devices=1,2", "--memory", "1KiB", "--cluster", "cpu-local"]) == 1
    text = capsys.readouterr().out
    assert re.search(
        r"  1 device: no layout fits in .* GiB for .*; the smallest, .*\n    -> give every rank [\d.e-]+ GiB", text
    )
    assert re.search(r"  2 devices: no layout fits in .*\n    -> give every rank", text)
    assert "strong scaling" not in text
    assert cli([*words[:2], "--vary", "cluster=h100-dgx,nowhere", "--ranks", "2"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^h100-dgx .* 100% .* [dtp]p2", text, re.MULTILINE)
    assert "  nowhere: unknown cluster 'nowhere'" in text


def test_ctrl_c_prints_the_rows_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    plan = sweeps.plan

    def stopped_at_four(graph: Graph, cluster: mw.Cluster, *, devices: int, **options: Any) -> mw.Plan:
        if devices == 4:
            signal.raise_signal(signal.SIGINT)
        return plan(graph, cluster, devices=devices, **options)

    monkeypatch.setattr(sweeps, "plan", stopped_at_four)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores the signal
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    assert cli([*MLP, "--vary", "devices=1..8"]) == INTERRUPTED
    text, stderr = capsys.readouterr()
    assert re.findall(r"^ +(\d+) .* \d+% ", text, re.MULTILINE) == ["1", "2"]
    assert text.endswith("  stopped: 2 of 4 were planned\n")
    assert stderr.endswith("meshwright: stopped\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--vary devices=0..4", "--vary: 0 is less than 1"),
        ("--vary devices=8..4", "--vary: 8..4 runs backwards"),
        ("--vary devices=few", "--vary: 'few' are no numbers"),
        ("--vary speed=2", "--vary: 'speed=2' varies nothing"),
        ("--vary seq=64", "--vary: the sequence length of a captured model is the run's"),
        ("--vary batch=64", "--vary: the batch of a captured model is the run's"),
        ("--vary devices=1..2 --scaling weak", "--scaling: weak scaling needs a batch that grows"),
        ("--vary devices=1..2 --tp 2", "--tp: --vary searches for a plan at each value"),
        ("--vary devices=1..2 --ranks 2", "--ranks: --vary gives the numbers of devices"),
        ("--vary devices=1..2 --only intra", "--only: --vary searches"),
        ("--vary devices=1..2 --layout.tp 2", "layout: a layout is given, but each row of a sweep is searched for"),
        ("--scaling weak", "--scaling: there is one number of devices"),
        ("--memory 0GiB", "--memory: 0GiB is no memory"),
        ("--layout.plan auto --ranks -3", "devices: -3 is not above 0"),
        ("--layout.plan auto --ranks 16 --cluster h100-dgx", "there are 16 ranks, but its levels hold 8"),
        ("--dp 2 --tp 4 --ranks 4", "layout: dp=2 x tp=4 needs 8 ranks, there are 4"),
        (
            "--layout.pp 2 --dp 4 --layout.stage_sizes [{dp=1},{dp=2}] --ranks 3",
            "layout: dp=4, but stage_sizes give 1 and 2\n  -> leave out dp, or stage_sizes",
        ),
        (
            "--layout.pp 2 --layout.tp 3 --layout.stage_sizes [{dp=1},{dp=2}] --ranks 3",
            "layout: tp=3, but stage_sizes give 1 and 1\n  -> leave out tp, or stage_sizes",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(words: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "mlp", *words.split()]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "\n  -> " in error


@pytest.mark.parametrize(("batch", "ranks"), [(8, 7), (8, 13), (3, 4), (1, 4), (2, 1)])
def test_primes_and_small_batches_have_a_plan(batch: int, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--layout.plan",
        "auto",
        "--ranks",
        str(ranks),
        "--data.batch_size",
        str(batch),
        "--model.sizes",
        "64,16,10",
    ]
    assert cli([*MLP, *words, "--json"]) == 0
    plan = files.decode(capsys.readouterr().out.encode(), mw.Plan, where="output")
    assert (plan.mesh.world_size, plan.batch_size) == (ranks, batch)


def test_members_that_do_not_sum_are_refused() -> None:
    fast = mw.Cluster.load("h100-dgx", 8)
    raw = msgspec.to_builtins(fast)
    member = {"count": 1, "levels": raw["levels"]}
    level = raw["levels"][0] | {"name": "pod", "fan_out": 3, "members": [member, member]}
    unlike = {**raw, "num_devices": 16, "levels": [level]}
    with pytest.raises(ClusterError, match="fan_out is 3, but the members count 2"):
        msgspec.convert(unlike, mw.Cluster)
    unlike["levels"] = [level | {"fan_out": 2}]
    with pytest.raises(ClusterError, match="num_devices is 12, but the levels hold 16"):
        msgspec.convert(unlike | {"num_devices": 12}, mw.Cluster)
    cluster = msgspec.convert(unlike, mw.Cluster)
    with pytest.raises(ClusterError, match="there are 24 ranks, but its levels hold 16"):
        mw.plan(gpt(), cluster, devices=24)


# --- what limits data parallelism ------------------------------------------------------------------------------------


def limits(
    plan: mw.Plan, graph: Graph, cluster: mw.Cluster = CLUSTER, step_s: float | None = None, **options: Any
) -> tuple[DataLimit, ...]:
    """The limits beside a plan with a step of ``step_s`` (None: its own)."""
    known = foretell(PlanLowering(graph), plan, cluster).prediction
    predicted = Prediction(step_s=step_s or known.step_s, peak_memory_bytes=known.peak_memory_bytes)
    return data_limits(graph, msgspec.structs.replace(plan, prediction=predicted), cluster, PlanLowering, **options)


def test_data_parallelism_alone_has_no_limit() -> None:
    graph = gpt()
    assert limits(mw.plan(graph, CLUSTER, devices=2, layout=mw.Layout(dp=2)), graph) == ()


def test_the_batch_limits_it() -> None:
    graph = gpt(3)
    plan = mw.plan(graph, CLUSTER, devices=2, layout=mw.Layout(tp=2))
    assert limits(plan, graph) == (DataLimit("batch", "dp ends at 1: 3 samples do not divide over 2 ranks"),)


@pytest.mark.parametrize("size", [8, 3])
def test_the_memory_of_one_sample_limits_it(size: int) -> None:
    """One sample at a time, under ZeRO 3, with all else computed again, is what needs the least."""
    graph, dp = gpt(size), 2 if size == 8 else 1
    least = mw.Layout(dp=dp, zero=3 if dp > 1 else 0, microbatches=size // dp, recompute="full")
    lowered = foretell(PlanLowering(graph), mw.plan(graph, CLUSTER, devices=dp, layout=least), CLUSTER).peak.peak_bytes
    plan = mw.plan(graph, CLUSTER, devices=2, layout=mw.Layout(tp=2))
    *before, limit = limits(plan, graph, memory_bytes=0.8 * lowered)
    assert [limit.kind for limit in before] == ["batch"] * (dp == 1)
    assert limit.kind == "memory"
    numbers = re.match(r"one sample at a time needs about ([\d.e-]+) of ([\d.e-]+) GiB with", limit.text)
    assert numbers
    assert float(numbers[1]) * 2**30 == pytest.approx(lowered, rel=0.2)
    assert float(numbers[2]) * 2**30 == pytest.approx(0.8 * lowered, rel=0.01)
    assert "memory" not in [limit.kind for limit in limits(plan, graph, memory_bytes=1.3 * lowered)]


@pytest.mark.parametrize(("cluster", "kind"), [(SLOW, "communication"), (H100, "computing")])
def test_time_limits_it(cluster: mw.Cluster, kind: str) -> None:
    """Beside a plan that is much faster, what takes the time of dp2 is named; beside one as fast, nothing is."""
    graph, cluster = gpt(), cluster.without_graphs()
    plans = [mw.plan(graph, cluster, devices=2, layout=each) for each in (mw.Layout(dp=2), mw.Layout(pp=2))]
    alone, plan = foretell(PlanLowering(graph), plans[0], cluster), plans[1]
    (limit,) = limits(plan, graph, cluster, step_s=alone.played.step_s / 2)
    assert limit.kind == kind
    numbers = re.match(r"dp2.* takes ([\d.]+) ms a step, ([\d.]+) of them to communicate", limit.text)
    assert numbers
    assert float(numbers[1]) / 1e3 <= 1.05 * alone.played.step_s
    (limit,) = limits(plan, graph, cluster, step_s=alone.played.step_s)
    assert limit.kind == "none"


# --- interrupted -----------------------------------------------------------------------------------------------------


def interrupt_at(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C once, when the search first reports ``when``."""
    say, pressed = TimeLimit.say, list[str]()

    def pressing(clock: TimeLimit, what: str) -> None:
        say(clock, what)
        message = what + clock._best
        if when in message and not pressed:
            pressed.append(message)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TimeLimit, "say", pressing)


def test_after_ctrl_c_the_best_so_far_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at("best so far: ", monkeypatch)
    path = tmp_path / "plan.json"
    words = [*MLP, "--ranks", "4", "--layout.plan", "auto", "--output", str(path)]
    before = signal.getsignal(signal.SIGINT)
    assert cli(words) == INTERRUPTED
    text, stderr = capsys.readouterr()
    assert re.search(r"\(planner\) +stopped after [\d.]+ s +\d+ of \d+ layouts were considered, \d+ simulated", text)
    assert re.search(r"^  predicted: [\d.]+ ms a step", text, re.MULTILINE)
    assert "warning: planning has stopped after " in stderr
    assert stderr.endswith("meshwright: stopped\n")
    assert signal.getsignal(signal.SIGINT) is before
    assert was_stopped(files.load(path, mw.Plan)), "it is written"
    assert cli(words) == 0, "what was stopped is not kept as an answer"
    text, stderr = capsys.readouterr()
    assert "stopped" not in text + stderr


def test_ctrl_c_before_anything_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    interrupt_at("layout 1 of ", monkeypatch)
    words = [*MLP, "--ranks", "2", "--layout.plan", "auto", "--memory", "1KiB"]
    assert cli(words) == INTERRUPTED
    text, stderr = capsys.readouterr()
    assert not text
    assert re.search(r"meshwright: no layout that fits was found in [\d.e-]+ s: \d+ of \d+ were considered\n", stderr)
