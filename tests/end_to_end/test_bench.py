"""``meshwright bench``: tiny measurements of this machine, whose results are honest by our own rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import config
from meshwright.bench import machine
from meshwright.bench.lint import lint
from meshwright.bench.scaling import EAGER, OURS, LaunchTimes, findings, grown, measure
from meshwright.bench.utilization import product_by_rows, utilization
from meshwright.cli import run as cli
from meshwright.cli.bench import counts_of
from meshwright.errors import ClusterError, FileFormatError
from meshwright.ir import files
from meshwright.ir.result import Comparison, Result, Scaling, Utilization
from meshwright.ir.run import Run
from meshwright.models import GPTConfig
from meshwright.runtime import launch

SMALL = [
    "--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--data.sequence_length", "8",
    "--data.max_bytes", "10000",
]  # fmt: skip


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_cores", lambda: 2)


# --- utilization -----------------------------------------------------------------------------------------------------


def test_utilization_is_a_result_that_names_its_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "SIZES", (64,))
    monkeypatch.setattr(machine, "LEAST_S", 0.0)
    path = tmp_path / "utilization.json"
    asked = "--size 32 --batch 1 --repetitions 5 --threads 1"
    assert cli(["bench", "utilization", *asked.split(), "--output", str(path)]) == 0
    text = capsys.readouterr().out
    result = files.load(path, Result)
    assert lint(result) == ()
    utilizations = [each for each in result.findings if isinstance(each, Utilization)]
    names = ["matrix product", "rows one at a time", "naive step", "step of small operators"]
    assert [each.target for each in utilizations] == [f"{name}: part of the peak" for name in names]
    product, rows, step, _ = utilizations
    assert (product.flops, rows.flops) == (2 * 32**3, 2 * 64 * 32**2)
    assert [len(each.series.seconds) for each in utilizations] == [5] * 4
    assert result.command == f"meshwright bench utilization {asked.replace('--threads 1', '').strip()} --threads 1"
    assert re.search(r"^naive step .* \d+\.\d% +\d+\.\d% to \d+\.\d%$", text, re.MULTILINE)
    assert f"100 %: {step.peak.flops_per_s / 1e9:.1f} GFLOP/s, {step.peak.found}" in text


def test_rows_one_at_a_time_are_products_of_a_matrix_and_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    operands: list[torch.Tensor] = []
    plain = torch.randn

    def remembered(*sizes: int) -> torch.Tensor:
        operands.append(plain(*sizes))
        return operands[-1]

    monkeypatch.setattr(torch, "randn", remembered)
    multiply, flops = product_by_rows(16, 4)
    rows, right = operands
    torch.testing.assert_close(multiply(), rows @ right.T)
    assert flops == 2 * 4 * 16 * 16


def test_a_given_peak_that_is_passed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SIZES", (64,))
    monkeypatch.setattr(machine, "LEAST_S", 0.0)
    tiny = GPTConfig(layers=1, width=8, heads=1, vocabulary=16, sequence_length=4)
    with pytest.raises(ClusterError, match=r"--peak: 1e\+06 FLOP/s is no peak"):
        utilization(size=32, config=tiny, batch_size=1, repetitions=5, threads=1, peak_flops_per_s=1e6)
    result = utilization(size=32, config=tiny, batch_size=1, repetitions=5, threads=1, peak_flops_per_s=1e15)
    first = result.findings[0]
    assert isinstance(first, Utilization)
    assert (first.peak.flops_per_s, first.peak.found) == (1e15, "given with --peak")


def test_the_nominal_peak_is_clock_times_width_times_cores() -> None:
    x86 = "processor\t: 0\ncpu MHz\t\t: 2400.0\nflags\t\t: fpu avx2 fma\ncpu MHz\t\t: 2500.0\n"
    peak = machine.peak_of(x86, 0.0, 4)
    assert peak is not None
    assert peak.flops_per_s == 2.5e9 * 32 * 4
    assert peak.found == "nominal: clock in /proc/cpuinfo 2.50 GHz x 32 FLOP a cycle (fma) x 4 cores"
    boosted = machine.peak_of(x86.replace("fma", "fma avx512f"), 3.5e9, 1)
    assert boosted is not None
    assert boosted.flops_per_s == 3.5e9 * 64
    assert machine.peak_of("Features\t: fp asimd\n", 0.0, 1) is None, "a clock that is not told is not guessed"
    assert machine.peak_of("cpu MHz : 1000\nflags : sse2\n", 0.0, 1) is None


# --- scaling ---------------------------------------------------------------------------------------------------------


def test_strong_scaling_over_two_ranks_computes_the_same_and_is_honest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scaling.json"
    asked = ["bench", "scaling", "gpt", "--ranks", "2", "--turns", "1", "--steps", "1", *SMALL]
    assert cli([*asked, "--json", "--output", str(path)]) == 0
    assert capsys.readouterr().out == path.read_text()
    result = files.load(path, Result)
    assert lint(result) == ()
    scaling, beside = result.findings
    assert isinstance(scaling, Scaling)
    assert isinstance(beside, Comparison)
    assert [result.settings_of(point.series).ranks for point in scaling.points] == [1, 2]
    assert [point.batch for point in scaling.points] == [8, 8]
    serial_losses, parallel_losses = (point.series.losses for point in scaling.points)
    assert serial_losses == pytest.approx(parallel_losses, rel=1e-5)
    assert serial_losses == pytest.approx(beside.series[EAGER].losses, rel=1e-5)
    assert serial_losses[0] != serial_losses[1], "it trains"
    assert result.command.startswith("meshwright bench scaling gpt --kind strong --ranks 1,2 --turns 1")
    assert result.command.endswith(" ".join(SMALL))


def measured(seconds: float, flops: float = 1.0, items: int = 8, *sides: str) -> LaunchTimes:
    return LaunchTimes(
        seconds={side: [seconds] * 5 for side in sides or (OURS,)}, losses={side: [2.0] for side in sides or (OURS,)},
        parameters=10 * int(flops), flops=flops, items=items, unit="tok",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "two", "batch"),
    [
        ("strong", measured(1.0), 8),
        ("batch", measured(2.0, items=16), 16),
        ("model", measured(2.0, flops=2.0), 8),
    ],
)
def test_a_speedup_is_of_work_a_second(kind: str, two: LaunchTimes, batch: int) -> None:
    """One rank takes 1.6 s. Two take 1 s for the same work, or 2 s for twice as much."""
    scaling, _ = findings(kind, {1: 8, 2: batch}, {1: [measured(1.6, 1.0, 8, OURS, EAGER)], 2: [two]}, steps=1)
    assert isinstance(scaling, Scaling)
    assert scaling.points[1].speedup == pytest.approx(1.6)
    assert scaling.points[1].efficiency == pytest.approx(0.8)
    assert scaling.measured == "speed-up 1.60 (95 %: 1.60 to 1.60), efficiency 80%"


def test_more_ranks_than_cores_are_marked(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = []

    def instead(function: Any, *args: Any, num_ranks: int) -> LaunchTimes:
        counted.append(num_ranks)
        return measured(1 / num_ranks, 1.0, 8, *([OURS, EAGER] if num_ranks == 1 else [OURS]))

    monkeypatch.setattr("meshwright.api.run_ranks", instead)
    assert cli(["bench", "scaling", "--ranks", "4", "--turns", "2", *SMALL, "--data.batch_size", "4"]) == 0
    assert counted == [1, 2, 4, 2, 4, 1], "by turns"
    rows = re.findall(r"^ +([124]) .* (\d+%) *(.*?) *$", capsys.readouterr().out, re.MULTILINE)
    assert rows == [("1", "100%", ""), ("2", "100%", ""), ("4", "100%", "more ranks than cores: not to be judged")]


def test_what_grows_is_what_the_kind_says() -> None:
    def sizes(run: Run) -> tuple[object, ...]:
        return (getattr(run.model, "layers", None), run.data.batch_size, run.layout.dp, run.layout.tp)

    gpt = config.make(config.REFERENCES["gpt"], where="gpt")
    assert sizes(grown(gpt, "strong", 2)) == (4, 8, -1, 1)
    assert sizes(grown(gpt, "batch", 2)) == (4, 16, -1, 1)
    assert sizes(grown(gpt, "model", 2)) == (8, 8, 1, -1)
    assert grown(gpt, "model", 3, "width") != gpt
    deep = config.make(
        {
            "model": {"factory": "a:b", "loss": "a:c", "arguments": {"depth": 3}},
            "data": {"kind": "random"},
            "layout": {"dp": 2},
        },
        where="deep",
    )
    larger = grown(deep, "model", 2, "arguments.depth")
    assert getattr(larger.model, "arguments", None) == {"depth": 6}
    assert larger.layout.dp == 2, "what was asked for stays"
    for key in ("arguments.width", "depth", ""):
        with pytest.raises(FileFormatError, match="--grow"):
            grown(deep, "model", 2, key)


def test_numbers_of_ranks_are_read() -> None:
    assert counts_of("", 6) == [1, 2, 4, 6]
    assert counts_of("4", 1) == [1, 2, 4]
    assert counts_of("1,3", 1) == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "weak"], "--kind: unknown kind 'weak'\n  -> write strong, batch, model"),
        (["--ranks", "two"], "--ranks: 'two' are no numbers"),
        (["--ranks", "1"], "--ranks: [1] are not at least two rising numbers of ranks"),
        (["--ranks", "2,3", "--kind", "batch"], "--ranks: 3 ranks are no multiple of 2"),
        (["--ranks", "1,9", *SMALL], "batch: a global batch of 8 is too small for dp=9"),
        (["--layout.plan", "plan.json"], "layout.plan: a plan is for one number of ranks"),
        (["--repetitions", "3"], "Invalid value for '--repetitions'"),
        (["--rank", "2"], "--rank: there is no such key in RUN.toml"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(
    two_cores: None,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("meshwright.api.run_ranks", lambda *_, **__: pytest.fail("it was measured"))
    assert cli(["bench", "scaling", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_does_not_start_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli(["bench", "scaling", "--ranks", "2"]) == 2
    assert "call it without torchrun" in capsys.readouterr().err


def test_bench_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("scaling", "utilization", "lint"))
    for name in ("scaling", "utilization", "lint"):
        assert cli(["bench", name, "--help"]) == 0
        assert f"meshwright bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["layout.seconds", "layout.strict", "train.compile"])
def test_a_benchmark_trains_as_the_run_file_says(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the keys that decide how, not only what."""
    given: list[dict[str, Any]] = []

    def instead(*args: Any, **options: Any) -> None:
        given.append(options)
        raise InterruptedError

    monkeypatch.setattr("meshwright.api.runs.parallelize", instead)
    table, _, name = key.partition(".")
    value = 1.5 if name == "seconds" else True
    run = config.make({**config.REFERENCES["mlp"], table: {name: value}}, where="mlp")
    with pytest.raises(InterruptedError):
        measure(run, 5, 1, torch.get_num_threads())
    assert given[0][name] == value
