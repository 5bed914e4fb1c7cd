"""Runs with the optimizers and schedules of large batches, named in RUN.toml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import build, config
from meshwright.cli import run as cli
from meshwright.data.loaders import TensorLoader
from meshwright.errors import DataError
from meshwright.optim import LAMB, LARC, LARS, OneBitAdam, ZeroOneAdam

RUN = """
[model]
name = "mlp"
sizes = [6, 8, 4]
[data]
kind = "random"
shape = [6]
classes = 4
samples = 64
batch_size = 4
held_out = 0.25
[optimizer]
name = "lamb"
lr = 0.02
[schedule]
scaling = "sqrt"
base_batch_size = 4
batch_sizes = [[2, 16], [4, 36]]
[train]
steps = 6
ranks = 1
log_every = 3
checkpoint_every = 3
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def test_a_batch_grows_in_a_run_and_the_learning_rate_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("grows.toml").write_text(RUN)
    assert cli(["train", "grows.toml"]) == 0
    text = capsys.readouterr().out
    assert "the batch is 16 samples from step 3 on" in text
    assert "the batch is 36 samples from step 5 on" in text
    assert [row["lr"] for row in rows_of("grows")] == pytest.approx([0.02, 0.02, 0.04, 0.04, 0.06, 0.06])


def test_a_run_that_stopped_goes_on_with_the_batch_that_is_due(capsys: pytest.CaptureFixture[str]) -> None:
    Path("whole.toml").write_text(RUN)
    Path("stopped.toml").write_text(RUN)
    assert cli(["train", "whole.toml"]) == 0
    assert cli(["train", "stopped.toml", "--train.steps", "3"]) == 0
    assert cli(["train", "stopped.toml"]) == 0
    assert [row["loss"] for row in rows_of("stopped")] == [row["loss"] for row in rows_of("whole")]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("[[2, 6]]", "schedule.batch_sizes: a batch of 6 does not divide over 4 parts (ranks and micro-batches)"),
        ("[[2, 64]]", "a batch of 64 samples, of a data set of 48"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_before_the_first_step(
    sizes: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.toml").write_text(RUN)
    assert cli(["train", "bad.toml", "--layout.microbatches", "4", "--schedule.batch_sizes", sizes]) == 2
    assert message in capsys.readouterr().err
    assert not list(Path("runs/bad").glob("checkpoints/*"))


@pytest.mark.parametrize("kind", [LARS, LARC, LAMB, OneBitAdam, ZeroOneAdam])
def test_the_optimizers_have_the_same_defaults_in_a_run_as_in_python(kind: Any) -> None:
    name = kind.__name__.lower()
    raw = {"model": {"name": "mlp"}, "data": {"kind": "random"}, "optimizer": {"name": name}}
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = build.optimizer(config.make(raw, where="run"))([("w", parameter)])
    assert type(optimizer) is kind
    settings: dict[str, Any] = {"weight_decay": 0.01} if name == "lamb" else {}
    assert optimizer.defaults == kind([parameter], **settings).defaults


def test_a_bad_value_is_the_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text(RUN)
    assert cli(["train", "bad.toml", "--optimizer.betas", "[0.9, 1.5]"]) == 2
    assert "betas are (0.9, 1.5), which must be from 0 to less than 1" in capsys.readouterr().err
    Path("zero.toml").write_text(RUN)
    assert (
        cli(
            [
                "train",
                "zero.toml",
                "--optimizer.name",
                "lars",
                "--optimizer.nesterov",
                "true",
                "--optimizer.momentum",
                "0",
            ]
        )
        == 2
    )
    assert "nesterov needs a momentum above 0" in capsys.readouterr().err


def test_a_loader_goes_on_at_the_same_sample() -> None:
    loader = TensorLoader({"x": torch.arange(20)}, 4, shuffle=False, shard=(1, 2))
    batches = iter(loader)
    assert next(batches)["x"].tolist() == [2, 3]
    loader.resize(8)
    assert next(batches)["x"].tolist() == [8, 9, 10, 11]
    with pytest.raises(DataError, match="a batch of 5 samples does not divide into 2 shards"):
        loader.resize(5)
    assert loader.batch_size == 8
