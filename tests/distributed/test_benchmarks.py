"""The benchmarks measure what they say: sides compute the same, take turns, and are compared fairly."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from benchmarks import foundation, kills, matrix, pipelines, report
from meshwright.bench.lint import lint
from meshwright.bench.repeat import WARMUP_STEPS, alternate
from meshwright.ir import files
from meshwright.ir.result import Result
from meshwright.ir.statistics import ratio
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


def test_ratio_is_of_medians_and_its_interval_holds_it() -> None:
    one = ratio([1.0, 1.1, 9.0, 1.2, 1.0], [2.0, 2.2, 2.1, 30.0, 2.0])
    assert one.value == pytest.approx(1.1 / 2.1)
    assert one.low < one.value < one.high
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
    comparison = foundation.Comparison("tiny", layout, tiny, peers, 1.0)
    for seconds, losses in ranks(comparison.num_ranks, foundation.measure, comparison, 1, 1):
        assert list(seconds) == list(losses) == [foundation.OURS, *peers]
        assert all(len(values) == 1 for values in seconds.values())
        for found in losses.values():
            assert found == pytest.approx(losses[foundation.OURS], abs=foundation.LOSS_SPREAD)
        assert len(set(losses[foundation.OURS])) == foundation.NUM_BATCHES, "it trains"


class Canned:
    """In place of the pool of ranks: what they would return."""

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, count: int, function: Any, case: Any, *_: Any, **__: Any) -> list[Any]:
        seconds = [0.30, 0.31, 0.29, 0.32, 0.30]
        if function is pipelines.measure_alone:
            return [[2 * value for value in seconds]]
        if function is pipelines.measure:
            sides = {pipelines.OURS: seconds, pipelines.PEER: [value + 0.05 for value in seconds]}
            return [(sides, [[2.0], [2.0]])] * 2
        names = [foundation.OURS, *case.peers]
        sides = {name: [value + 0.01 * k for value in seconds] for k, name in enumerate(names)}
        return [(sides, {name: [2.0] for name in names})] * count


def test_what_benchmarks_write_is_honest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (foundation, pipelines):
        monkeypatch.setattr(module, "Ranks", Canned)
    for module in (report, pipelines):
        monkeypatch.setattr(module, "num_cores", lambda: 2)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    found = [foundation.speed(one, 5, 1) for one in foundation.COMPARISONS]
    found += [foundation.duration(command, slow=False) for command in foundation.LIMITS_S]
    foundation.write(found, 5, 1)
    found = [pipelines.speed(pipelines.CASES[0], 5, 1), pipelines.throughput(5, 1)]
    report.write("pipelines", "Pipelines", "make bench-pipelines", "a step", pipelines.settings(), found, "text")
    for name in ("foundation", "pipelines"):
        written = files.load(tmp_path / f"{name}.json", Result)
        assert lint(written) == ()
        assert [finding.verdict for finding in written.findings][:2] == ["pass", "pass"]
    assert "| meshwright | 300.0 ms | 290.0 ms | 320.0 ms |" in (tmp_path / "foundation.md").read_text()
    with pytest.raises(ValueError, match=r"timed: nothing says what is timed"):
        report.write("none", "None", "make none", "", pipelines.settings(), found, "text")
    assert not (tmp_path / "none.json").exists()


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
        matrix.Row(case, 2e-16, 1e-9),
        matrix.Row(Case("MLP", "tp2", "SGD", "whole", "full"), 1e-3, 1e-9),
        matrix.Row(Case("MLP", "dp2 x tp2", "SGD", "whole", "full"), float("inf"), 1e-9, "ValueError: no"),
    ]
    assert [row.passed for row in rows] == [True, False, False]
    last = matrix.table(rows).splitlines()[-1]
    assert last == "| MLP | SGD | whole | full | 2e-16 | **1e-03** | **failed**: ValueError: no |"


def test_a_disturbed_run_is_judged_by_its_largest_difference() -> None:
    alone = {1: 2.0, 2: 1.5}
    assert kills.difference({1: 2.0, 2: 1.5}, alone) == 0.0
    assert kills.difference({1: 2.0, 2: 1.5 + 2**-50}, alone) == 2**-50
    assert kills.difference({1: 2.0}, alone) == float("inf")
    row = kills.Row("killed", {"step": 2, "cut": 1}, 2, 2**-50, 0.0, 4.0)
    assert not row.passed
    assert str(row) == (
        "FAIL  killed: 3 kills (2 step, 1 cut; the launcher gave up 0 times) in 2 steps, 4.0 s a kill; "
        "largest difference 9e-16, allowed 0e+00"
    )
