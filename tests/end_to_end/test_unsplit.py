"""An operator without a rule runs whole on every rank: the plan names it with its cost, and strict refuses it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cli import run
from meshwright.errors import RuleError
from meshwright.models import classification_loss
from meshwright.ops.base import Call, OperatorRule, make_rule


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(value: Tensor) -> Tensor:
    return value * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda context, grad: grad * 2)
RULES: dict[Any, OperatorRule] = {
    torch.ops.tests.doubled.default: OperatorRule(lambda call: make_rule(call, "^b k -> b k"))
}


class Doubling(nn.Module):
    """Two layers with an operator of its own after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = doubled(layer(inputs))
        return inputs


def batch() -> dict[str, Tensor]:
    return {"inputs": torch.randn(4, 8), "label": torch.randint(8, (4,))}


@pytest.mark.parametrize("layout", [mw.Layout(dp=2), mw.Layout(tp=2)], ids=["dp2", "tp2"])
def test_plan_names_it_with_its_cost(layout: mw.Layout) -> None:
    plan = mw.plan(mw.capture(Doubling(), classification_loss, batch()), layout=layout)
    lines = [note for note in plan.notes if "tests.doubled" in note.reason]
    assert [(note.module, note.split) for note in lines] == [("doubled#0", "replicated"), ("doubled#1", "replicated")]
    expected = r"no rule for tests\.doubled\.default; every rank works through 0\.000244 MiB in [0-9.]+ us"
    assert all(re.fullmatch(expected, note.reason) for note in lines), lines


def test_plan_of_one_rank_has_nothing_to_say() -> None:
    plan = mw.plan(mw.capture(Doubling(), classification_loss, batch()), layout=mw.Layout())
    assert not [note for note in plan.notes if note.split == "replicated"]


def test_strict_names_module_and_source_line() -> None:
    graph = mw.capture(Doubling(), classification_loss, batch())
    with pytest.raises(
        RuleError, match=r"(?s)module \(model\), .*test_unsplit\.py:\d+: tests\.doubled\.default .*rules="
    ):
        mw.plan(graph, layout=mw.Layout(dp=2), strict=True)
    with pytest.raises(RuleError, match=r"tests\.doubled"):
        mw.parallelize(Doubling(), classification_loss, batch(), plan=mw.Layout(), strict=True)
    with pytest.raises(RuleError, match=r"tests\.doubled"):
        mw.verify(Doubling(), classification_loss, batch(), mw.Layout(), strict=True)


def test_with_a_rule_strict_has_nothing_against_it() -> None:
    graph = mw.capture(Doubling(), classification_loss, batch(), rules=RULES)
    plan = mw.plan(graph, layout=mw.Layout(dp=2), strict=True, rules=RULES)
    assert "doubled" not in plan.explain()
    assert mw.simulate(graph, None, plan, rules=RULES).spans


def test_a_rule_that_capture_had_and_planning_has_not_is_asked_for() -> None:
    graph = mw.capture(Doubling(), classification_loss, batch(), rules=RULES)
    plan = mw.plan(graph, layout=mw.Layout(dp=2), rules=RULES)
    with pytest.raises(RuleError, match=r"(?s)doubled.*captured with a rule that is not given here.*give the rules="):
        mw.simulate(graph, None, plan)


def test_a_decomposition_is_one_of_the_known_words() -> None:
    call = Call(torch.ops.aten.exp.default, (torch.ones(4),), {}, (torch.ones(4),))
    with pytest.raises(RuleError, match=r"(?s)decomposition of k: \('sum b',\).*use one word of sum, gather, ring"):
        make_rule(call, "!k -> !k", decompositions={"k": ("sum b",)})  # type: ignore[dict-item]


RUN = """
[model]
name = "factory"
factory = "tests.end_to_end.test_unsplit:Doubling"
loss = "meshwright.models:classification_loss"
[data]
kind = "random"
shape = [8]
classes = 8
batch_size = 4
"""


def test_commands_have_the_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    assert run(["plan", str(file), "--dp", "2"]) == 0
    assert "no rule for tests.doubled.default" in capsys.readouterr().out
    assert run(["plan", str(file), "--dp", "2", "--strict"]) == 2
    assert "tests.doubled.default cannot be split" in capsys.readouterr().err
