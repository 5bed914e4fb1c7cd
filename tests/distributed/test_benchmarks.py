"""The benchmarks measure what they say: sides compute the same, take turns, and are compared fairly."""

from __future__ import annotations

import math
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

import meshwright as mw
from benchmarks import (
    course,
    foundation,
    kills,
    large_batch,
    matrix,
    pipelines,
    prediction,
    report,
    scaling,
    search,
    zero,
)
from meshwright import models
from meshwright.bench.lint import lint
from meshwright.bench.repeat import WARMUP_STEPS, alternate
from meshwright.bench.scaling import EAGER, OURS, LaunchTimes, findings, name_of
from meshwright.ir import files
from meshwright.ir.result import Machine, Result, Scaling, Settings
from meshwright.ir.statistics import ratio, ratio_of_medians
from meshwright.models import GPT, GPTConfig
from tests.distributed.oracle import Case
from tests.distributed.pool import Ranks


def tiny() -> GPT:
    return GPT(GPTConfig(layers=1, width=16, heads=2, vocabulary=256, sequence_length=8))


def test_sides_take_turns() -> None:
    calls = []
    sides = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = alternate(sides, rounds=5, steps=2)
    assert "".join(calls[: 3 * WARMUP_STEPS]) == "a" * WARMUP_STEPS + "b" * WARMUP_STEPS + "c" * WARMUP_STEPS
    assert "".join(calls[3 * WARMUP_STEPS :]) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc" + "bbccaa"
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 5)


def test_ratio_is_the_median_of_the_rounds_ratios_and_its_interval_holds_it() -> None:
    estimate = ratio([1.0, 1.1, 9.0, 1.2, 1.0], [2.0, 2.2, 2.1, 30.0, 2.0])
    assert estimate.value == pytest.approx(0.5)
    assert estimate.low < estimate.value < estimate.high


def test_a_drift_of_the_machine_leaves_the_ratio() -> None:
    """If the machine slows down, both sides of a round slow down alike, and their ratio does not change."""
    drift = [1.0 + 0.1 * index for index in range(31)]
    estimate = ratio([0.9 * value for value in drift], drift)
    apart = ratio_of_medians([0.9 * value for value in drift], drift)
    assert estimate.high - estimate.low < 1e-12 < apart.high - apart.low
    assert estimate.value == pytest.approx(apart.value) == pytest.approx(0.9)


def test_a_ratio_of_medians_takes_sides_of_unequal_length() -> None:
    assert ratio_of_medians([1.0, 2.0, 3.0], [4.0] * 9).value == 0.5
    with pytest.raises(ValueError, match="argument 2 is longer"):
        ratio([1.0, 2.0, 3.0], [4.0] * 9)


def rising(first: float) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and losses as a benchmark's measurement gives them; no process communicates."""
    return {"ours": [first] * 5 + [1.2] * 3, "theirs": [1.0] * 8}, {"ours": [0.0], "theirs": [0.0]}


@pytest.mark.parametrize(("limit", "rounds"), [(1.0, 16), (2.0, 8), (0.5, 8)], ids=["undecided", "pass", "fail"])
def test_what_is_undecided_is_measured_once_more(limit: float, rounds: int) -> None:
    comparison = report.decided(
        lambda seconds, losses: report.judged(
            "any", seconds, "ours", limit, settings="any", num_ranks=1, steps=1, losses=losses
        ),
        1,
        rising,
        0.9,
    )
    assert [len(series.seconds) for series in comparison.series.values()] == [rounds, rounds]


def test_the_interval_of_equal_rounds_is_a_point() -> None:
    same = ratio([3.0] * 5, [4.0] * 5)
    assert (same.low, same.value, same.high) == (0.75, 0.75, 0.75)


@pytest.mark.parametrize(
    ("layout", "peers"),
    [
        (mw.Layout(), foundation.EAGER),
        (mw.Layout(dp=2), foundation.DDP),
        (mw.Layout(tp=2), foundation.PARALLELIZE_MODULE),
    ],
    ids=["eager", "dp2", "tp2"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_peers_train_the_same_model(ranks: Ranks, layout: mw.Layout, peers: dict[str, dict[str, bool]]) -> None:
    """Four steps from the same weights over the same batches give the same losses."""
    comparison = foundation.SpeedTarget("tiny", layout, tiny, peers, 1.0)
    for seconds, losses in ranks(comparison.num_ranks, foundation.measure, comparison, 1, 1):
        assert list(seconds) == list(losses) == [foundation.OURS, *peers]
        assert all(len(values) == 1 for values in seconds.values())
        for loss in losses.values():
            assert loss == pytest.approx(losses[foundation.OURS], abs=foundation.LOSS_SPREAD)
        assert len(set(losses[foundation.OURS])) == foundation.NUM_BATCHES, "it trains"


@pytest.mark.parametrize(
    ("stage", "peers"), [(3, zero.FSDP), (1, zero.DDP)], ids=["fully_shard", "DistributedDataParallel"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_peers_of_zero_train_the_same_model(ranks: Ranks, stage: int, peers: zero.Peers) -> None:
    model = zero.ZeroModel(
        "tiny", tiny, models.language_model_loss, partial(prediction.text, length=8, vocabulary=256), 8
    )
    layout = mw.Layout(dp=2, zero=3 if stage == 3 else 1)
    comparison = zero.ZeroTarget(model, layout, peers, 1.0)
    for seconds, losses in ranks(zero.NUM_RANKS, zero.measure, comparison, 1, 1):
        assert list(seconds) == list(losses) == [foundation.OURS, *peers]
        for loss in losses.values():
            assert loss == pytest.approx(losses[foundation.OURS], abs=foundation.LOSS_SPREAD)
        assert len(set(losses[foundation.OURS])) == foundation.NUM_BATCHES, "it trains"


def test_every_reference_model_is_compared_with_data_parallel() -> None:
    known = {model_class for name in models.__all__ if isinstance(model_class := getattr(models, name), type)}
    compared = {type(comparison.model.make()) for comparison in zero.COMPARISONS if not comparison.layout.zero}
    assert compared == {model_class for model_class in known if issubclass(model_class, nn.Module)}


def test_memory_is_judged_by_the_rank_that_needs_most_and_not_on_small_cases() -> None:
    gib = 2**30
    predicted, measured = (
        zero.MeasuredMemory(4 * gib, 4 * gib),
        [zero.MeasuredMemory(gib, 4 * gib), zero.MeasuredMemory(4 * gib, 5 * gib)],
    )
    persistent, peak = zero.compared(zero.LAYOUTS[0], predicted, measured)
    assert (persistent.verdict, peak.verdict) == ("pass", "fail")
    assert peak.measured == "-20.0%: predicted 4096 MiB, measured 5120 MiB"
    small = zero.MeasuredMemory(gib // 2, gib // 2)
    assert {finding.verdict for finding in zero.compared(zero.LAYOUTS[0], small, [small])} == {"fail"}


def test_sides_that_compute_different_things_fail() -> None:
    seconds = {"a": [1.0] * 5, "b": [2.0] * 5}
    common: dict[str, Any] = {"settings": "s", "num_ranks": 1, "steps": 1, "loss_spread": 0.1}
    same = report.judged("t", seconds, "a", 1.0, losses={"a": [1.0], "b": [1.05]}, **common)
    other = report.judged("t", seconds, "a", 1.0, losses={"a": [1.0], "b": [1.2]}, **common)
    assert (same.verdict, other.verdict) == ("pass", "fail")
    assert other.measured.endswith("the sides do not compute the same: their losses differ by 2.0e-01")
    lost = report.judged("t", seconds, "a", 1.0, losses={"a": [1.0], "b": [float("nan")]}, **common)
    assert lost.verdict == "fail"


def test_what_an_interval_does_not_decide_is_undecided() -> None:
    common: dict[str, Any] = {"settings": "s", "num_ranks": 1, "steps": 1, "losses": {"a": [1.0], "b": [1.0]}}
    seconds = {"a": [0.9, 1.0, 1.1, 0.95, 1.05], "b": [1.0] * 5}
    verdicts = [report.judged("t", seconds, "a", limit, **common).verdict for limit in (0.8, 1.0, 1.2)]
    assert verdicts == ["fail", "undecided", "pass"]


class Canned:
    """In place of the pool of ranks: what they would return."""

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, count: int, function: Any, case: Any, *_: Any, **__: Any) -> list[Any]:
        seconds = [0.300, 0.301, 0.299, 0.302, 0.300]
        if function is pipelines.measure_ours:
            return [[2 * value / count for value in seconds]] * count
        if function is pipelines.measure:
            sides = {pipelines.OURS: seconds, pipelines.PEER: [value + 0.05 for value in seconds]}
            return [(sides, {name: [2.0] for name in sides})] * 2
        names = [foundation.OURS, *case.peers]
        sides = {name: [value + 0.01 * k for value in seconds] for k, name in enumerate(names)}
        return [(sides, {name: [2.0] for name in names})] * count


def test_what_benchmarks_write_is_honest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (report, pipelines):
        monkeypatch.setattr(module, "Ranks", Canned)
    monkeypatch.setattr(report, "num_cores", lambda: 2)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "COMMIT", "0123456789ab")  # tests may run outside of a checkout
    judgements = [foundation.speed(comparison, 5, 1) for comparison in foundation.COMPARISONS]
    judgements += [foundation.duration(command, slow=False) for command in foundation.LIMITS_S]
    foundation.write(judgements, 5, 1)
    judgements = [pipelines.speed(pipelines.CASES[0], 5, 1), pipelines.throughput(5, 1)]
    report.write("pipelines", "Pipelines", "make bench-pipelines", "a step", pipelines.settings(), judgements, "text")
    judgements = [zero.speed(comparison, 5, 1) for comparison in zero.COMPARISONS]
    memory = zero.MeasuredMemory(2 * 2**30, 3 * 2**30)
    zero.write([*judgements, *zero.compared(zero.LAYOUTS[0], memory, [memory, memory])], 5, 1)
    expected = {"foundation": "pass", "pipelines": "pass", "zero": "fail"}  # 0.97 is more than 0.85 x fully_shard
    for name, first in expected.items():
        written = files.load(tmp_path / f"{name}.json", Result)
        assert lint(written) == ()
        assert [finding.verdict for finding in written.findings][:2] == [first, "pass"]
    assert "| meshwright | 300.0 ms | 299.0 ms | 302.0 ms |" in (tmp_path / "foundation.md").read_text()
    with pytest.raises(ValueError, match=r"timed: nothing says what is timed"):
        report.write("none", "None", "make none", "", pipelines.settings(), judgements, "text")
    assert not (tmp_path / "none.json").exists()


def test_searches_are_judged_by_as_many_rounds_as_lint_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The times of processes are given: first 5 % below every limit, then far above."""
    limits = {case.name: case.limit_s for case in search.CASES}

    def in_a_process(option: str, name: str) -> dict[str, Any]:
        seconds = 0.95 * limits[name] if option == "--case" else 10.0
        return {"seconds": seconds, "captured_s": 1.0, "peak_bytes": 2**30, "layout": "dp8", "step_s": 1.0}

    monkeypatch.setattr(search, "in_a_process", in_a_process)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "COMMIT", "0123456789ab")
    search.write(list(search.findings(search.ROUNDS, ())))
    written = files.load(tmp_path / "search.json", Result)
    assert lint(written) == ()
    assert [finding.verdict for finding in written.findings] == ["pass"] * (len(search.CASES) + 2)
    with pytest.raises(ValueError, match="repetitions"):
        search.write(list(search.findings(search.ROUNDS - 1, ())))
    limits = dict.fromkeys(limits, 1000.0)
    assert {finding.verdict for finding in search.findings(1, [search.CASES[0].name])} == {"fail"}


def scaled(kind: str, counts: list[int]) -> Result:
    """What ``bench.scaling.scaling`` returns if n ranks make n steps in the time in which one rank makes 1.25."""
    grows = {count: count if kind != "strong" else 1 for count in counts}
    launches = {
        count: [
            LaunchTimes(
                seconds={side: [1.25 * grows[count] / count] * 5 for side in ([OURS, EAGER] if count == 1 else [OURS])},
                losses={side: [2.0] for side in (OURS, EAGER)},
                parameters=10 * (grows[count] if kind == "model" else 1),
                flops=float(grows[count]), items=8 * (grows[count] if kind == "batch" else 1), unit="tok",
            )
        ]
        for count in counts
    }  # fmt: skip
    batches = {count: 8 * grows[count] if kind == "batch" else 8 for count in counts}
    settings = {
        name_of(count): Settings(dtype="float32", ranks=count, threads=1, sizes={"batch": batches[count]})
        for count in counts
    }
    return Result(
        date="2026-01-01", name=f"scaling-{kind}", command="", machine=Machine(cpu="c", cores=2), versions={},
        timed="a step", settings=settings, findings=findings(kind, batches, launches, 1),
    )  # fmt: skip


def test_scaling_is_kept_by_kind_and_ranks_that_share_cores_are_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scaling, "scaling", lambda run, kind, counts, **_: scaled(kind, list(counts)))
    monkeypatch.setattr(scaling, "num_cores", lambda: 2)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "COMMIT", "0123456789ab")  # tests may run outside of a checkout
    assert scaling.main([]) == 0
    written = files.load(tmp_path / "scaling.json", Result)
    assert lint(written) == ()
    points = [finding for finding in written.findings if isinstance(finding, Scaling)]
    assert [finding.target for finding in points] == [
        "strong scaling to 2 ranks: the same step",
        "strong scaling to 4 ranks: the same step (4 ranks share 2 cores)",
        "batch scaling to 2 ranks: the batch grows with the ranks",
        "batch scaling to 4 ranks: the batch grows with the ranks (4 ranks share 2 cores)",
        "model scaling to 2 ranks: the model grows with the ranks",
        "model scaling to 4 ranks: the model grows with the ranks (4 ranks share 2 cores)",
    ]
    assert {finding.verdict for finding in written.findings} == {"reported"}
    assert written.settings_of(points[3].points[1].series).sizes["batch"] == 32
    assert [finding.measured.split(" (")[0] for finding in points[:2]] == ["speed-up 2.00", "speed-up 4.00"]
    table = (tmp_path / "scaling.md").read_text()
    assert "| model | 4, sharing 2 cores | 8 | 40 | 1250.0 ms | 4.00 (4.00 to 4.00) | 100% |" in table


def test_experiments_of_the_course_are_programs_that_run_as_their_chapter_says() -> None:
    assert len(course.CHAPTERS) == 12
    on_two = set()
    for name, page in course.CHAPTERS.items():
        program, starts_two = course.experiment(page)
        compile(program, name, "exec")
        assert program in page.read_text()
        on_two |= {name} if starts_two else set()
    assert "02-data-parallelism" in on_two
    assert "03-all-reduce" not in on_two
    assert [course.finding("all", "all", seconds, 60.0).verdict for seconds in (59.0, 60.0)] == ["reported", "fail"]


def test_a_duration_of_one_run_can_fail_but_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(code: int, limit_s: float) -> str:
        monkeypatch.setitem(foundation.LIMITS_S, "make demo", limit_s)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code))
        return foundation.duration("make demo", slow=True).verdict

    assert verdict(0, 300.0) == "reported"
    assert verdict(0, 1e-12) == "fail"
    assert verdict(2, 300.0) == "fail"


def test_matrix_table_shows_failures() -> None:
    case = Case("MLP", "dp2", "SGD", "whole", "full")
    rows = [
        matrix.Combination(case, 2e-16, 1e-9),
        matrix.Combination(Case("MLP", "tp2", "SGD", "whole", "full"), 1e-3, 1e-9),
        matrix.Combination(Case("MLP", "dp2 x tp2", "SGD", "whole", "full"), float("inf"), 1e-9, "ValueError: no"),
    ]
    assert [row.passed for row in rows] == [True, False, False]
    last = matrix.table(rows).splitlines()[-1]
    assert last == "| MLP | SGD | whole | full | 2e-16 | **1e-03** | **failed**: ValueError: no |"


def test_the_matrix_is_linted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed combination fails its model's check, and what ``make matrix`` writes is a result that lint reads."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    settings = ("SGD", "whole", "full")
    rows = [matrix.Combination(Case(model, "dp2", *settings), 2e-16, 1e-9) for model in ("MLP", "GPT")]
    failed = matrix.Combination(Case("MLP", "tp2", *settings), float("inf"), 1e-9, "ValueError: no")
    judgements = matrix.findings([*rows, failed])
    assert [(each.target.split(":")[0], each.verdict) for each in judgements] == [("MLP", "fail"), ("GPT", "pass")]
    report.write("matrix", "The matrix", "make matrix", "", {}, judgements, matrix.table(rows))
    written = files.load(tmp_path / "matrix.json", Result)
    assert written.findings[0].notes["errors"] == {str(rows[0].case): 2e-16, str(failed.case): "ValueError: no"}
    assert lint(msgspec.structs.replace(written, commit="")) != lint(written) == ()


def test_a_disturbed_run_is_judged_by_its_largest_difference() -> None:
    alone = {1: 2.0, 2: 1.5}
    assert kills.difference({1: 2.0, 2: 1.5}, alone) == 0.0
    assert kills.difference({1: 2.0, 2: 1.5 + 2**-50}, alone) == 2**-50
    assert kills.difference({1: 2.0}, alone) == float("inf")
    row = kills.KillResult("killed", {"step": 2, "cut": 1}, 2, 2**-50, 0.0, 4.0)
    assert not row.passed
    assert str(row) == (
        "FAIL  killed: 3 kills (2 step, 1 cut; the launcher gave up 0 times) in 2 steps, 4.0 s a kill; "
        "largest difference 9e-16, allowed 0e+00"
    )


def test_a_large_batch_is_judged_by_the_base_runs_loss() -> None:
    def verdicts(lamb: float, linear: float) -> list[str]:
        losses = {recipe.name: [2.0, 2.1, 1.9] for recipe in large_batch.RECIPES}
        losses |= {large_batch.LAMB_WARM.name: [lamb] * 3, large_batch.LINEAR.name: [linear] * 3}
        return [finding.verdict for finding in large_batch.judged(losses)]

    assert verdicts(2.03, math.inf) == ["pass", "pass", "reported", "reported"]
    assert verdicts(2.05, 2.03) == ["fail", "fail", "reported", "reported"]
