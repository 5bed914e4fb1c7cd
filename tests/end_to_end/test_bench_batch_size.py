"""``meshwright bench batch-size``: a tiny measurement, and what follows from numbers that are known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright import config
from meshwright.bench.batch_size import Counted, batch_size, cases_of, finding, knee
from meshwright.bench.lint import lint
from meshwright.cli import run as cli
from meshwright.errors import MeshwrightError
from meshwright.ir import files
from meshwright.ir.result import BatchSizes, Result
from meshwright.ir.run import Run

TINY = [
    "--model.layers", "1", "--model.width", "16", "--data.sequence_length", "8", "--data.max_bytes", "20000",
    "--optimizer.lr", "0.01", "--train.steps", "60",
]  # fmt: skip


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


def a_run(**schedule: object) -> Run:
    raw = {
        "model": {"name": "mlp", "sizes": [6, 8, 4]},
        "data": {"kind": "random", "shape": [6], "classes": 4, "samples": 64},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": schedule,
    }
    return config.make(raw, where="run")


def test_steps_fall_as_the_batch_grows_and_the_result_is_honest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    asked = ["--sizes", "4,8,16", "--target", "4.6", "--rules", "none,sqrt", "--evaluate-every", "2"]
    assert cli(["bench", "batch-size", *asked, *TINY, "--output", str(path)]) == 0
    text = capsys.readouterr().out
    result = files.load(path, Result)
    assert lint(result) == ()
    (batch_sizes,) = result.findings
    assert isinstance(batch_sizes, BatchSizes)
    assert [(point.rule, point.batch) for point in batch_sizes.points] == [
        ("none", 4), ("sqrt", 4), ("none", 8), ("sqrt", 8), ("none", 16), ("sqrt", 16),
    ]  # fmt: skip
    for point in batch_sizes.points:
        assert 0 < point.steps_to_target <= 60
        assert max(point.losses) <= 4.6
        assert result.settings_of(point.series).sizes["data.batch_size"] == point.batch
    by_rule = {
        rule: {point.batch: point.steps_to_target for point in batch_sizes.points if point.rule == rule}
        for rule in ("none", "sqrt")
    }
    assert by_rule["sqrt"][16] <= by_rule["none"][16] <= by_rule["none"][4]
    assert [point.lr for point in batch_sizes.points if point.rule == "sqrt"] == pytest.approx(
        [0.01, 0.01 * math.sqrt(2), 0.02]
    )
    assert "steps and time to a held-out loss of 4.6; none: " in text
    assert "time to target" in text
    assert result.command.startswith(
        "meshwright bench batch-size --sizes 4,8,16 --target 4.6 --rules none,sqrt --seeds 1"
    )
    assert result.command.endswith(" ".join(TINY))


def test_a_target_that_is_not_reached_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the learning rate is so high that the loss becomes infinite."""
    run = msgspec.structs.replace(a_run(), optimizer=msgspec.structs.replace(a_run().optimizer, lr=1e30))
    run = msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, steps=4))
    result = batch_size(run, [4, 8], 0.01, rules=["none"], seeds=2, command="here")
    (batch_sizes,) = result.findings
    assert isinstance(batch_sizes, BatchSizes)
    assert [point.steps for point in batch_sizes.points] == [(0, 0), (0, 0)]
    assert batch_sizes.measured == (
        "none: no knee: fewer than 3 sizes reached the target, or steps do not follow S + E / batch"
    )
    assert lint(result) == ()


def test_cases_scale_the_rate_and_keep_the_samples_of_the_warmup() -> None:
    cases = cases_of(a_run(warmup_steps=10), [8, 32], ["none", "linear", "sqrt"], seeds=2)
    assert [(case.batch, case.rule) for case in cases] == [(8, "none"), (32, "none"), (32, "linear"), (32, "sqrt")]
    assert [run.train.seed for run in cases[0].runs] == [0, 1]
    assert [case.runs[0].schedule.warmup_steps for case in cases] == [10, 3, 3, 3]
    assert [case.runs[0].lr_factors()[-1] for case in cases] == [1.0, 1.0, 4.0, 2.0]


@given(st.floats(1.0, 1e4), st.floats(1.0, 1e4), st.sets(st.integers(1, 4096), min_size=3, max_size=8))
def test_a_knee_is_found_in_steps_that_follow_the_model(least: float, critical: float, sizes: set[int]) -> None:
    """S(B) = S_min (1 + B_crit / B); steps are whole numbers, so that many are taken."""
    steps = {size: round(1e6 * least * (1 + critical / size)) for size in sizes}
    knee_size = knee(steps)
    assert knee_size is not None
    spread = max(critical / size for size in sizes) - min(critical / size for size in sizes)
    if spread > 0.01:
        assert knee_size == pytest.approx(critical, rel=0.01)


def test_a_knee_may_lie_outside_of_what_was_measured() -> None:
    assert knee({8: 800, 16: 400, 32: 200}) == math.inf
    assert knee({8: 100, 16: 100, 32: 101}) == 0.0
    assert knee({8: 800, 16: 400}) is None
    assert knee({8: 190, 16: 95, 32: 230}) is None, "the largest batch learnt too fast: steps follow another law"


def batch_sizes_of(steps: dict[int, tuple[int, ...]], seconds: float = 0.5) -> BatchSizes:
    cases = cases_of(a_run(), list(steps), ["none"], seeds=3)
    counted = Counted(
        steps=list(steps.values()), losses=[(1.0,) * 3] * len(steps), seconds={size: [seconds] * 5 for size in steps}
    )
    return finding(cases, counted, 1.5, steps=3)


def test_time_is_steps_by_the_time_of_one_and_a_lost_seed_is_not_left_out() -> None:
    batch_sizes = batch_sizes_of({8: (99, 100, 130), 16: (60, 62, 61), 32: (50, 0, 49)})
    assert [point.steps_to_target for point in batch_sizes.points] == [100, 61, 0]
    assert [point.samples_to_target for point in batch_sizes.points] == [800, 976, 0]
    assert [point.target_s for point in batch_sizes.points] == [50.0, 30.5, 0.0]
    assert batch_sizes.measured.endswith("least time at batch 16 (none): 30.5 s")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"target_s": 1.0}, "findings[0].points[1].target_s"),
        ({"samples_to_target": 1}, "findings[0].points[1].samples_to_target"),
        ({"steps": (60, 0, 61)}, "findings[0].points[1].steps_to_target"),
    ],
)
def test_figures_that_do_not_follow_are_refused(change: dict[str, object], key: str) -> None:
    batch_sizes = batch_sizes_of({8: (99, 100, 130), 16: (60, 62, 61), 32: (50, 48, 49)})
    points = list(batch_sizes.points)
    points[1] = msgspec.structs.replace(points[1], **change)

    def refused(sizes: BatchSizes) -> list[str]:
        return [
            refusal.key for refusal in lint(Result(name="batch-size", findings=(sizes,))) if refusal.rule == "ratio"
        ]

    assert refused(batch_sizes) == []
    assert refused(msgspec.structs.replace(batch_sizes, points=tuple(points))) == [key]


@pytest.mark.parametrize(
    ("run", "sizes", "target", "rules", "message"),
    [
        (a_run(), [8], 1.0, ["none"], r"--sizes: \[8\] are not at least two rising batch sizes"),
        (a_run(), [16, 8], 1.0, ["none"], r"--sizes: \[16, 8\] are not"),
        (a_run(), [8, 16], 1.0, ["cubic"], r"--rules: unknown rule 'cubic'\n  -> write none,linear,sqrt"),
        (a_run(), [8, 16], math.nan, ["none"], "--target: nan is no loss"),
        (a_run(name="cosine"), [8, 16], 1.0, ["none"], r"schedule\.name: it is 'cosine': how long it takes would"),
        (a_run(), [8, 4096], 1.0, ["none"], "the data set is too short: 61 samples, but a batch has 4096"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    run: Run, sizes: list[int], target: float, rules: list[str], message: str
) -> None:
    with pytest.raises(MeshwrightError, match=message):
        batch_size(run, sizes, target, rules=rules)
