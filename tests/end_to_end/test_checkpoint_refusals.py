"""Checkpoints that cannot be loaded: what each is refused with; nothing has changed then."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.errors import CheckpointError, DataError
from meshwright.models import MLP, classification_loss
from meshwright.runtime import manifest
from meshwright.runtime.manifest import DamagedCheckpointError
from tests.end_to_end.checkpoint_cases import (
    OPTIMIZERS,
    Factory,
    a_batch,
    a_checkpoint,
    a_trainer,
    adamw,
    data_of,
    log_messages,
    same,
    sgd,
    unchanged,
    weights,
)

RESTORE = "restore it from a copy, or load another checkpoint"
LEAVE = "load(..., optimizer=False) leaves the optimizer as it is"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return a_checkpoint(tmp_path)


def rewrite(path: Path, **changes: Any) -> None:
    """Change a manifest as a program would that knows its checksum."""
    raw = json.loads((path / "manifest.json").read_bytes()) | changes
    raw["checksum"] = manifest._checksum(raw)
    (path / "manifest.json").write_text(json.dumps(raw))


def refusal(path: Path, trainer: mw.Trainer | None = None, **options: Any) -> tuple[type, str]:
    """The error of a load, which must not have changed the trainer."""
    trainer = trainer or unchanged()
    before, step = weights(trainer), trainer.step_number
    with pytest.raises((CheckpointError, DataError)) as caught:
        trainer.load(path, **options)
    assert same(weights(trainer), before)
    assert trainer.step_number == step
    return type(caught.value), str(caught.value)


def test_missing(saved: Path) -> None:
    missing = saved.parent / "elsewhere"
    assert refusal(missing) == (CheckpointError, f"{missing}: there is no checkpoint\n  -> check the path")
    near = saved.parent / "ckp"
    assert refusal(near) == (CheckpointError, f"{near}: there is no checkpoint\n  -> did you mean `ckpt`?")
    file = saved / "manifest.json"
    problem = f"{file}: is a file; a checkpoint is a directory\n  -> check the path"
    assert refusal(file) == (CheckpointError, problem)


def test_a_directory_of_checkpoints(tmp_path: Path) -> None:
    trainer = a_trainer()
    path = trainer.save_in(tmp_path)
    problem = f"{tmp_path}: is a directory of checkpoints\n  -> call load_latest, or load {path}"
    assert refusal(tmp_path) == (CheckpointError, problem)


def test_half_written(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    problem = f"{saved}: half-written: there is no manifest.json\n  -> load another checkpoint"
    assert refusal(saved) == (DamagedCheckpointError, problem)


@pytest.mark.parametrize("name", ["__0_0.distcp", "trainer.pt", ".metadata", "index.json"])
def test_a_changed_cut_or_missing_file(saved: Path, name: str) -> None:
    file = data_of(saved) / name
    data = file.read_bytes()
    file.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    problem = f"{file}: damaged: its checksum is not the one that was written\n  -> {RESTORE}"
    assert refusal(saved) == (DamagedCheckpointError, problem)
    file.write_bytes(data[:-1])
    problem = f"{file}: damaged: {len(data) - 1:,} bytes, {len(data):,} were written\n  -> {RESTORE}"
    assert refusal(saved) == (DamagedCheckpointError, problem)
    file.unlink()
    assert refusal(saved) == (DamagedCheckpointError, f"{file}: damaged: the file is missing\n  -> {RESTORE}")


def test_a_changed_manifest(saved: Path) -> None:
    file = saved / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"step": 1', '"step": 2'))
    problem = f"{saved}: damaged: manifest.json has changed since\n  -> {RESTORE}"
    assert refusal(saved) == (DamagedCheckpointError, problem)
    file.write_text(text[: len(text) // 2])
    problem = f"{saved}: damaged: manifest.json is not a manifest\n  -> {RESTORE}"
    assert refusal(saved) == (DamagedCheckpointError, problem)


def test_a_newer_version(saved: Path) -> None:
    rewrite(saved, version=3, something_new=1)
    problem = f"{saved}/manifest.json: version is 3, this Meshwright reads up to version 2"
    assert refusal(saved) == (CheckpointError, f"{problem}\n  -> use the Meshwright that wrote it, or a newer one")


@pytest.mark.parametrize(
    ("trainer", "difference"),
    [
        (lambda: a_trainer(sizes=(6, 9, 4)), "layers.0.weight is float64[8, 6], in this model float64[9, 6]"),
        (lambda: a_trainer(sizes=(6, 8, 5)), "layers.2.weight is float64[4, 8], in this model float64[5, 8]"),
        (lambda: a_trainer(sizes=(6, 8, 4, 4)), "layers.4.weight is not there, in this model float64[4, 4]"),
        (lambda: a_trainer(sizes=(6, 8)), "layers.2.weight is float64[4, 8], in this model not there"),
    ],
)
def test_another_model(saved: Path, trainer: Callable[[], mw.Trainer], difference: str) -> None:
    remedy = "build the model that was saved (MLP, step 1), or load another checkpoint"
    problem = f"{saved}: the checkpoint is of another model: {difference}\n  -> {remedy}"
    assert refusal(saved, trainer()) == (CheckpointError, problem)


def test_another_dtype(saved: Path) -> None:
    batch = a_batch() | {"inputs": torch.randn(8, 6)}
    trainer = mw.parallelize(MLP((6, 8, 4)), classification_loss, batch, optimizer=sgd)
    assert "in another precision: layers.0.weight is float64, in this model float32" in refusal(saved, trainer)[1]


def frozen(parameters: Any) -> torch.optim.Optimizer:
    return sgd([(name, value) for name, value in parameters if name != "layers.0.bias"])


@pytest.mark.parametrize(
    ("there", "here", "problem", "remedy"),
    [
        (None, sgd, "there is no optimizer state", LEAVE),
        (adamw, sgd, "the optimizer state is of AdamW, this trainer has SGD", f"train on with AdamW; {LEAVE}"),
        (frozen, sgd, "there is no optimizer state of layers.0.bias", LEAVE),
        (sgd, frozen, "there is optimizer state of layers.0.bias, which this trainer's optimizer does not hold", LEAVE),
        (adamw, OPTIMIZERS["two groups"], "the optimizer's parameters are in other groups than the saved ones", LEAVE),
    ],
)
def test_another_optimizer(tmp_path: Path, there: Factory | None, here: Factory, problem: str, remedy: str) -> None:
    a_trainer(there).save(tmp_path / "ckpt")
    expected = f"{tmp_path}/ckpt: {problem}\n  -> {remedy}"
    assert refusal(tmp_path / "ckpt", a_trainer(here)) == (CheckpointError, expected)


def test_parts_that_were_not_saved(saved: Path) -> None:
    trainer = a_trainer()
    loader = TensorLoader({"x": torch.arange(10)}, batch_size=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    problem = f"{saved}: there is no position in the data\n  -> load without loader=: it then starts where it stands"
    assert refusal(saved, loader=loader) == (CheckpointError, problem)
    problem = f"{saved}: there is no extra 'scheduler'\n  -> it has: nothing"
    assert refusal(saved, trainer, extra={"scheduler": scheduler}) == (CheckpointError, problem)


def test_other_data(saved: Path) -> None:
    trainer = a_trainer()
    trainer.save(saved, loader=TensorLoader({"x": torch.arange(10)}, batch_size=2))
    kind, text = refusal(saved, trainer, loader=TensorLoader({"x": torch.arange(12)}, batch_size=2))
    assert kind is DataError
    assert "the saved position is of other data" in text


def test_a_position_that_nobody_asks_for_is_told(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = a_trainer()
    trainer.save(saved, loader=TensorLoader({"x": torch.arange(10)}, batch_size=2))
    with caplog.at_level(logging.WARNING, "meshwright"):
        trainer.load(saved)
    assert log_messages(caplog) == [f"{saved} holds a position in the data that was not asked for (loader=)"]


class Harmful:
    """A pickle that runs a function when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


@pytest.mark.parametrize("name", [".metadata", "trainer.pt"])
def test_code_in_a_checkpoint_is_not_run(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checksums do not help here: who can write the file can write the manifest. Only checkpoints without an index of
    ours are read by torch's."""
    file = data_of(saved) / name
    if name == "trainer.pt":
        torch.save({"step": Harmful()}, file)
    else:
        file.write_bytes(pickle.dumps(Harmful()))
    raw = json.loads((saved / "manifest.json").read_bytes())
    saved_file = manifest.written(file.parent, [name])[name]
    raw["files"].pop("index.json")
    rewrite(saved, files=raw["files"] | {name: {"num_bytes": saved_file.num_bytes, "sha256": saved_file.sha256}})
    with pytest.raises(CheckpointError):
        a_trainer().load(saved)
    assert "this must not run" not in capsys.readouterr().out
