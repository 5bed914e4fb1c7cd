"""A plan file with another batch or another cluster: new costs, and errors that name what does not divide."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.cli import run as cli
from meshwright.ir.graph import Graph
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.explicit import adapt_plan
from meshwright.planner.foretell import foretell

CLUSTER = load_cluster("cpu-local", 4, "meshwright")
RUN = ["plan", "gpt", "--model.layers", "1", "--model.width", "32", "--data.sequence_length", "16"]
CARRIED = [*RUN, "--layout.plan", "plan.json"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@cache
def gpt(batch_size: int) -> Graph:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=1, width=32, heads=4, vocabulary=256, sequence_length=16))
        tokens = torch.zeros(batch_size, 16, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


@pytest.mark.parametrize("batch_size", [8, 4])
def test_an_adapted_plan_splits_no_operator_that_the_plan_leaves_whole(batch_size: int) -> None:
    """Otherwise each split of such an operator is undone by a collective."""
    plan, own = (mw.plan(gpt(size), CLUSTER, devices=4, layout=mw.Layout(dp=2, tp=2)) for size in (8, batch_size))
    graph = gpt(batch_size)
    adapted = adapt_plan(plan, graph)
    added = [
        name for name, strategy in adapted.stage.strategies.items()
        if strategy.get("tp", "^") != "^" and strategy.get("tp") != plan.stage.strategy(name).get("tp")
    ]  # fmt: skip
    assert added == []
    lower = PlanLowering(graph)
    assert foretell(lower, adapted, CLUSTER).played.step_s < 1.3 * foretell(lower, own, CLUSTER).played.step_s


def test_a_plan_is_carried_to_another_batch_and_another_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli([*RUN, "--cluster", "cpu-local", "--dp", "2", "--tp", "2", "--output", "plan.json"]) == 0
    first = capsys.readouterr().out
    pattern = (
        r"made for batches of 8 on cpu-local \(([\d.]+) ms a step, [\d.e-]+ GiB a rank\): a sample takes ([\d.]+) times"
    )
    for more in (["--cluster", "cpu-local", "--data.batch_size", "4"], ["--cluster", "a100-80gb-dgx-hdr200x8"]):
        assert cli([*CARRIED, *more]) == 0
        text = capsys.readouterr().out
        carried = re.search(pattern, text)
        assert carried is not None
        assert f"predicted: {carried[1]} ms a step" in first
        (step,) = re.findall(r"predicted: ([\d.]+) ms a step", text)
        batch = 4 if "--data.batch_size" in more else 8
        assert float(carried[2]) == pytest.approx(float(step) / batch / (float(carried[1]) / 8), rel=0.01)
        assert "  memory: fits in " in text
    assert cli([*CARRIED, "--cluster", "cpu-local"]) == 0
    assert "made for batches" not in capsys.readouterr().out, "nothing has changed"


@pytest.mark.parametrize(
    ("layout", "more", "problem"),
    [
        (["--dp", "4"], ["--data.batch_size", "3"], "plan.json: batch: a global batch of 3 is too small for dp=4"),
        (
            ["--dp", "2", "--layout.microbatches", "2"],
            ["--data.batch_size", "6"],
            "plan.json: batch: a global batch of 6 does not divide over 2 micro-batches on dp=2",
        ),
        (["--dp", "2"], ["--data.sequence_length", "8"], "the plan was made for GPT (fingerprint"),
        (["--dp", "2"], ["--ranks", "4"], "the plan is for 2 ranks, there are 4"),
    ],
)
def test_what_does_not_divide_is_named(
    layout: list[str], more: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli([*RUN, "--cluster", "cpu-local", *layout, "--output", "plan.json"]) == 0
    assert cli([*CARRIED, "--cluster", "cpu-local", *more]) == 2
    assert problem in capsys.readouterr().err
