"""``meshwright bench products``: named grids and the chosen plan against sizes, with bounds; refusals."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from meshwright.bench.lint import lint
from meshwright.cli import run as cli
from meshwright.cli.bench_products import SHAPES, sizes_of
from meshwright.ir.result import Comparison, Result
from meshwright.schedules.products.bounds import lower_bound


def test_products_are_timed_beside_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "products", "--shape", "tall", "--sides", "32,48", "--ranks", "2", "--repetitions", "5",
                "--json"]) == 0  # fmt: skip
    decoded = msgspec.json.decode(capsys.readouterr().out, type=Result)
    assert lint(decoded) == ()
    assert shlex.split(decoded.command)[:3] == ["meshwright", "bench", "products"]
    compared = [each for each in decoded.findings if isinstance(each, Comparison)]
    assert [each.target.partition(":")[0] for each in compared] == ["8x512x8", "12x768x12"]
    for each in compared:
        m, k, n = map(int, each.target.partition(":")[0].split("x"))
        assert {"1d-column", "1d-row", "chosen"} <= set(each.series)
        m, k, n = map(int, each.target.partition(":")[0].split("x"))
        for row in each.notes.values():
            assert row["peak_words"] <= row["planned_words"]
            assert row["bound_words"] == round(lower_bound(m, k, n, 2))
    assert compared[0].notes["1d-row"]["words"] > compared[0].notes["1d-row"]["bound_words"]


def test_shapes_have_the_flops_of_the_square() -> None:
    for shape in SHAPES:
        m, k, n = sizes_of(shape, 1024)
        assert m * k * n == 1024**3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "round"], "--shape round"), (["--sides", "x"], "--sides"),
        (["--ranks", "1"], "--ranks"), (["--ranks", "3", "--boxes", "2"], "3 ranks in 2 boxes"),
        (["--sides", "32", "--ranks", "2", "--memory", "10"], "hold no plan"),
    ],
)  # fmt: skip
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "products", *arguments]) != 0
    assert words in capsys.readouterr().err
