"""The quick answer of ``meshwright plan RUN.toml``: by the sizes of the model, before the exact search."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright import api, config
from meshwright.api import planned_runs
from meshwright.api.quick import sizes_of
from meshwright.catalog import load_cluster
from meshwright.cli import run as cli
from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan
from meshwright.models import GPT, MLP, GPTConfig, language_model_loss
from meshwright.planner.by_sizes import quick_answer
from meshwright.planner.time_limit import TimeLimit, was_stopped

pytestmark = pytest.mark.usefixtures("without_workers")

CLUSTER = load_cluster("cpu-local", 4, "meshwright")
TOKENS = torch.zeros(8, 16, dtype=torch.int64)
BATCH = {"tokens": TOKENS, "targets": TOKENS}
SMALL = ["--model.layers", "2", "--model.width", "32", "--data.sequence_length", "16", "--ranks", "2"]
SEARCH = ["plan", "gpt", *SMALL, "--cluster", "cpu-local", "--layout.plan", "auto", "--fresh"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def gpt(**sizes: Any) -> GPT:
    return GPT(GPTConfig(**({"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "sequence_length": 16} | sizes)))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def graph() -> Graph:
    return mw.capture(gpt(), language_model_loss, BATCH)


def test_sizes_are_read_from_models_of_ours_and_of_hugging_face() -> None:
    ours = sizes_of(gpt(sequence_length=24, tied_head=False), BATCH)
    assert ours is not None
    assert (ours.layers, ours.hidden, ours.heads, ours.vocabulary, ours.sequence) == (2, 32, 4, 64, 16)
    assert (ours.ffn, ours.tied, ours.dropout) == (128, False, False)
    theirs = sizes_of(llama(), {"input_ids": TOKENS, "labels": TOKENS})
    assert theirs is not None
    assert (theirs.layers, theirs.ffn, theirs.kv_heads, theirs.gated, theirs.sequence) == (3, 96, 2, True, 16)


def frozen(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


def larger(model: nn.Module) -> nn.Module:
    model.adapter = nn.Linear(64, 64)
    return model


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: MLP((16, 8, 4)), BATCH),
        (lambda: frozen(gpt()), BATCH),
        (lambda: larger(gpt()), BATCH),
        (lambda: gpt().to(torch.bfloat16), BATCH),
        (gpt, {"tokens": TOKENS, "label": TOKENS[:, 0]}),
        (gpt, {"tokens": TOKENS, "targets": TOKENS[:, :8]}),
        (gpt, [TOKENS, TOKENS]),
    ],
    ids=["another model", "frozen", "more parameters", "bfloat16", "one label", "other lengths", "no names"],
)
def test_what_sizes_do_not_describe_has_no_quick_answer(make: Callable[[], nn.Module], batch: Any) -> None:
    assert sizes_of(make(), batch) is None


def test_where_no_layout_divides_or_fits_there_is_no_quick_answer() -> None:
    model = sizes_of(gpt(), BATCH)
    assert model is not None
    asked = {"batch_size": 8, "precision": "fp32"}
    assert quick_answer(model, CLUSTER, 4, **asked) is not None  # type: ignore[arg-type]
    assert quick_answer(model, CLUSTER, 4, **asked, memory_bytes=1000.0) is None  # type: ignore[arg-type]
    assert quick_answer(model, CLUSTER, 7, **asked) is None, "there are only 4 devices"  # type: ignore[arg-type]


def test_the_quick_answer_comes_first_and_is_near_the_exact_one() -> None:
    run = config.make(config.REFERENCES["gpt"] | {"layout": {"plan": "auto", "cluster": "cpu-local"}}, where="run")
    answers: list[api.QuickAnswer] = []
    num_answers: list[int] = []
    planned = api.plan_run(
        run, 2, fresh=True, quick=answers.append, progress=lambda what: num_answers.append(len(answers))
    )
    (answer,) = answers
    assert set(num_answers) == {1}, "before the search"
    assert answer.layout.num_ranks == 2
    exact = planned.plan.prediction
    assert exact is not None
    assert answer.step_s == pytest.approx(exact.step_s, rel=0.25)
    assert answer.text.startswith(f"quick answer, by the model's sizes: dp{answer.layout.dp}")


def test_a_search_that_ends_at_once_takes_the_guess() -> None:
    guess = mw.Layout(dp=2, tp=2, zero=1)
    plan = mw.plan(graph(), CLUSTER, devices=4, stop=lambda: True, guess=guess)
    assert plan.layout == guess
    assert was_stopped(plan)
    with pytest.raises(LayoutError, match="no layout that fits was found"):
        mw.plan(graph(), CLUSTER, devices=4, stop=lambda: True)
    with pytest.raises(LayoutError, match="no layout that fits was found"):
        mw.plan(graph(), CLUSTER, devices=4, stop=lambda: True, guess=guess, memory_bytes=1000.0)


def test_a_search_that_ends_by_itself_does_not_depend_on_the_guess() -> None:
    plain, guessed = (
        mw.plan(graph(), CLUSTER, devices=2, fresh=True, guess=guess) for guess in (None, mw.Layout(pp=2))
    )
    assert plain == guessed


def test_without_time_the_command_plans_the_quick_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli([*SEARCH, "--seconds", "1e-9", "--output", "plan.json"]) == 0
    text = capsys.readouterr()
    line = r"^quick answer, by the model's sizes: (.*): about [\d.]+ ms a step, [\d.e-]+ GiB a rank; the exact search"
    match = re.search(line, text.err, re.MULTILINE)
    assert match is not None
    plan = files.load(Path("plan.json"), Plan)
    assert match[1].startswith(f"dp{plan.layout.dp}" if plan.layout.dp > 1 else ("tp", "pp"))
    assert "stopped after 1e-09 s" in text.out
    assert cli([*SEARCH, "--json"]) == 0
    assert files.decode(capsys.readouterr().out.encode(), Plan, where="output").mesh.world_size == 2


@pytest.fixture
def interrupted_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = planned_runs.capture

    def captured(*arguments: Any, **options: Any) -> Graph:
        os.kill(os.getpid(), signal.SIGINT)
        return capture(*arguments, **options)

    monkeypatch.setattr(planned_runs, "capture", captured)


def test_ctrl_c_after_the_quick_answer_plans_it(interrupted_capture: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli([*SEARCH, "--output", "plan.json"]) == 130
    assert was_stopped(files.load(Path("plan.json"), Plan))
    assert "quick answer, by the model's sizes" in capsys.readouterr().err


def test_a_model_without_sizes_has_its_first_estimate_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("meshwright.planner.time_limit.time.monotonic", lambda: now)
    clock = TimeLimit()
    with caplog.at_level(logging.INFO, "meshwright"):
        for seconds, has_layout in ((1.0, False), (2.5, False), (3.0, True), (4.0, False), (9.0, False), (14.0, False)):
            now = 100.0 + seconds
            if has_layout:
                clock.note_layout("dp8", 0.25, 2.0**30)
            clock.say(f"{seconds:g}")
    best = "; best so far: dp8, 250 ms a step, 1 GiB a rank"
    assert caplog.messages == [f"planning: 3{best}", f"planning: 14{best}"]
