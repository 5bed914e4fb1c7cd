"""Worked examples with plans of captured models: the chain is the longest path, and every example has a function."""

import json

import pytest

from benchmarks import lectures
from meshwright import api, worked
from meshwright.api import worked_examples, worked_plans
from meshwright.cli import run as cli
from meshwright.ir.graph import Operator
from meshwright.ir.result import Result
from meshwright.worked import kept


def _operator(name: str, reads: str, flops: float) -> Operator:
    return Operator(name=name, target="aten.mm.default", inputs=tuple(reads), outputs=(name,), rule=None, flops=flops)


def test_the_longest_path_has_the_most_flops() -> None:
    operators = [_operator("a", "x", 1), _operator("b", "a", 5), _operator("c", "a", 2), _operator("d", "c", 2)]
    operators += [_operator("e", "bd", 1)]
    assert [each.name for each in worked_plans.longest_path(operators)] == ["a", "b", "e"]
    assert [each.name for each in worked_plans.longest_path(operators[:1] + operators[2:4])] == ["a", "c", "d"]


def test_every_example_with_captured_models_has_a_function() -> None:
    assert set(worked_examples._EXAMPLES) == set(worked.CAPTURED)


def test_a_named_example_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["recompute", "cross-entropy-cat", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert (line["ours"], line["verdict"]) == ("0.6162", "agrees")


def test_the_lines_of_a_result_file_are_those_that_were_computed() -> None:
    result = Result(name="lectures", findings=tuple(lectures.findings("cross-entropy-cat")))
    assert list(kept.example_of("cross-entropy-cat", result)) == list(api.recompute_captured("cross-entropy-cat"))
    assert not list(kept.example_of("cat", result))
