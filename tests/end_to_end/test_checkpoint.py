"""Checkpoints in one process: what they hold, how they are refused, and the chunks that parts are made of."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import meshwright as mw
from meshwright.errors import CheckpointError, DataError
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Placements, Shard
from meshwright.lower.reshard import local_part
from meshwright.models import MLP, ResNet, classification_loss
from meshwright.runtime import manifest, shards
from meshwright.runtime.data import TensorLoader
from meshwright.runtime.manifest import DamagedCheckpointError
from meshwright.runtime.shards import Chunk, Part, chunks_of

Factory = Callable[[Any], torch.optim.Optimizer]
RESTORE = "restore it from a copy, or load another checkpoint"
LEAVE = "load(..., optimizer=False) leaves the optimizer as it is"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def a_batch(inputs: int = 6, classes: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "inputs": torch.randn(8, inputs, dtype=torch.float64, generator=generator),
        "label": torch.randint(classes, (8,), generator=generator),
    }


def a_trainer(optimizer: Factory | None = sgd, sizes: tuple[int, ...] = (6, 8, 4), **options: Any) -> mw.Trainer:
    batch = a_batch(sizes[0], sizes[-1])
    return mw.parallelize(MLP(sizes).double(), classification_loss, batch, optimizer=optimizer, **options)


def weights(trainer: mw.Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_state_dict().items()}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``a_trainer`` after one step."""
    path = tmp_path_factory.mktemp("good") / "ckpt"
    trainer = a_trainer()
    trainer.step(a_batch())
    trainer.save(path)
    return path


@pytest.fixture
def saved(good: Path, tmp_path: Path) -> Path:
    """A copy of the good checkpoint, to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "ckpt"))


@functools.cache
def unchanged() -> mw.Trainer:
    """A trainer for loads that are refused."""
    return a_trainer()


def data_of(path: Path) -> Path:
    (found,) = path.glob("data-*")
    return found


def rewrite(path: Path, **changes: Any) -> None:
    """Change a manifest as a program would that knows its checksum."""
    raw = json.loads((path / "manifest.json").read_bytes()) | changes
    raw["checksum"] = manifest._checksum(raw)
    (path / "manifest.json").write_text(json.dumps(raw))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own messages (torch logs its progress too)."""
    return [record.getMessage() for record in caplog.records if record.name == "meshwright"]


# --- what a checkpoint holds -----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Factory] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": sgd,
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": adamw,
    "AdamW without names": lambda p: torch.optim.AdamW([value for _, value in p], lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "weight_decay": 0.0, "lr": 1e-3}]),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_bit_by_bit_in_a_fresh_trainer(tmp_path: Path, optimizer: str) -> None:
    batch, first = a_batch(), a_trainer(OPTIMIZERS[optimizer])
    for _ in range(3):
        first.step(batch)
    first.save(tmp_path / "ckpt")
    second = a_trainer(OPTIMIZERS[optimizer])
    assert not same(weights(first), weights(second))
    second.load(tmp_path / "ckpt")
    for _ in range(3):
        assert first.step(batch).item() == second.step(batch).item()
    assert same(weights(first), weights(second))
    assert first.step_number == second.step_number == 6


def test_options_of_groups_are_restored_but_not_how_they_are_computed(tmp_path: Path) -> None:
    first = a_trainer(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5), weight_decay=0.25, foreach=False))
    first.save(tmp_path / "ckpt")
    second = a_trainer(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.125)))
    lr = second.optimizer.param_groups[0]["lr"]
    second.load(tmp_path / "ckpt")
    (group,) = second.optimizer.param_groups
    assert group["lr"] is lr, "who holds the tensor sees the new value"
    assert lr.item() == 0.5
    assert (group["weight_decay"], group["foreach"]) == (0.25, None)


def test_buffers_of_the_state_dict_are_restored(tmp_path: Path) -> None:
    batch = {"image": torch.randn(4, 1, 8, 8), "label": torch.randint(4, (4,))}

    def trainer() -> mw.Trainer:
        model = ResNet(depth=8, width=2, image_channels=1, classes=4)
        return mw.parallelize(model, classification_loss, batch, optimizer=sgd)

    first = trainer()
    first.step(batch)
    first.save(tmp_path / "ckpt")
    second = trainer()
    second.load(tmp_path / "ckpt")
    assert same(weights(first), weights(second))
    assert any(name.endswith("running_var") for name in weights(second))


def test_the_seed_is_restored(tmp_path: Path) -> None:
    a_trainer(seed=3).save(tmp_path / "ckpt")
    trainer = a_trainer(seed=4)
    trainer.load(tmp_path / "ckpt")
    assert trainer.seed == 3


def test_loader_and_schedulers_are_restored(tmp_path: Path) -> None:
    def parts() -> tuple[mw.Trainer, TensorLoader, dict[str, Any]]:
        trainer = a_trainer()
        loader = TensorLoader({"x": torch.arange(10)}, batch_size=2)
        optimizer, lr = trainer.optimizer, torch.optim.lr_scheduler
        warm_up = lr.LinearLR(optimizer, 0.1, total_iters=2)
        extra = {
            "sequence": lr.SequentialLR(optimizer, [warm_up, lr.CosineAnnealingLR(optimizer, 9)], milestones=[2]),
            "steps": lr.MultiStepLR(optimizer, [1, 3]),
            "plateau": lr.ReduceLROnPlateau(optimizer),
        }
        return trainer, loader, extra

    trainer, loader, extra = parts()
    batches = iter(loader)
    next(batches), next(batches)
    for _ in range(3):
        trainer.step(a_batch())
        extra["sequence"].step(), extra["steps"].step(), extra["plateau"].step(1.0)
    trainer.save(tmp_path / "ckpt", loader=loader, extra=extra)
    other, other_loader, other_extra = parts()
    other.load(tmp_path / "ckpt", loader=other_loader, extra=other_extra)
    assert other_loader.state_dict() == loader.state_dict()
    assert {name: one.state_dict() for name, one in other_extra.items()} == {
        name: one.state_dict() for name, one in extra.items()
    }
    assert other.optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"]
    assert next(iter(other_loader))["x"].tolist() == next(batches)["x"].tolist()


def test_a_trainer_without_optimizer_loads_to_evaluate(saved: Path) -> None:
    trainer, other = a_trainer(None), a_trainer()
    trainer.load(saved)
    other.load(saved)
    assert trainer.evaluate(a_batch()).item() == other.evaluate(a_batch()).item()


def test_the_optimizer_can_be_left_as_it_is(saved: Path) -> None:
    trainer = a_trainer(adamw)
    trainer.load(saved, optimizer=False)
    assert (trainer.step_number, len(trainer.optimizer.state)) == (1, 0)


def test_the_manifest_says_what_is_there(saved: Path) -> None:
    raw = json.loads((saved / "manifest.json").read_bytes())
    trainer = a_trainer()
    assert (raw["version"], raw["step"], raw["model"], raw["optimizer"]) == (1, 1, "MLP", "SGD")
    assert (raw["fingerprint"], raw["torch"]) == (trainer.graph.fingerprint, str(torch.__version__))
    assert raw["tensors"]["layers.0.weight"] == {"shape": [8, 6], "dtype": "float64"}
    assert raw["plan"]["mesh"] == {"axes": [{"name": "dp", "size": 1}, {"name": "tp", "size": 1}]}
    assert raw["data"] == data_of(saved).name
    assert sorted(raw["files"]) == sorted(one.name for one in data_of(saved).iterdir())


def test_torch_reads_the_tensors_without_meshwright(saved: Path) -> None:
    trainer = a_trainer()
    trainer.load(saved)
    whole = {"model.layers.0.weight": torch.empty(8, 6, dtype=torch.float64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this is one process
        dcp.load(whole, checkpoint_id=data_of(saved), no_dist=True)
    assert torch.equal(whole["model.layers.0.weight"], weights(trainer)["layers.0.weight"])


# --- a save is whole or not at all -----------------------------------------------------------------------------------


class Stopped(BaseException):
    """As if the process ended here."""


@pytest.mark.parametrize(
    "place",
    ["meshwright.runtime.shards.write", "meshwright.runtime.manifest.written", "meshwright.ir.files.os.replace"],
)
def test_a_save_that_stops_anywhere_leaves_the_checkpoint_before(
    saved: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> None:
        raise Stopped

    trainer = a_trainer()
    trainer.load(saved)
    before = weights(trainer)
    trainer.step(a_batch())
    with monkeypatch.context() as patch:
        patch.setattr(place, stop)
        patch.setattr(manifest, "abandon", lambda *args: None)  # a killed process cleans nothing up
        with pytest.raises(Stopped):
            trainer.save(saved)
    trainer.load(saved)
    assert same(weights(trainer), before)
    trainer.save(saved)
    assert len(list(saved.iterdir())) == 2, "the next save has removed what the stopped one left"


def test_a_first_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "ckpt"))

    trainer = a_trainer()
    monkeypatch.setattr(manifest, "written", full_disk)
    with pytest.raises(CheckpointError) as caught:
        trainer.save(tmp_path / "ckpt")
    assert str(caught.value) == (
        f"{tmp_path}/ckpt: No space left on device\n  -> check the disk's space and permissions"
    )
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_tensors_are_written_is_ctrl_c(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    trainer = a_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(Part, "view", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(saved)
    trainer.load(saved)
    assert trainer.step_number == 1
    assert len(list(saved.iterdir())) == 2


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    trainer = a_trainer()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for path, problem in (
        (tmp_path / "notes", "the directory holds other files (a.txt)"),
        (tmp_path / "notes" / "a.txt", "is a file"),
    ):
        with pytest.raises(CheckpointError) as caught:
            trainer.save(path)
        assert (
            str(caught.value) == f"{path}: {problem}\n  -> choose another path: a checkpoint is a directory of its own"
        )
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def test_values_that_are_not_finite_are_not_saved(saved: Path) -> None:
    trainer = a_trainer()
    with torch.no_grad():
        trainer.parameters["layers.0.bias"][3] = math.nan
    with pytest.raises(CheckpointError) as caught:
        trainer.save(saved)
    assert str(caught.value) == (
        "parameter layers.0.bias: it holds NaN or infinite values, and is not saved\n"
        "  -> load the last checkpoint, and lower the learning rate or clip gradients (max_grad_norm)"
    )
    trainer.load(saved)
    assert trainer.step_number == 1


def test_state_that_is_not_plain_data_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("x")}

        def load_state_dict(self, state_dict: Any, /) -> None:
            raise AssertionError

    with pytest.raises(CheckpointError) as caught:
        a_trainer().save(tmp_path / "ckpt", extra={"odd": Odd()})
    text = str(caught.value)
    assert text.startswith("extra 'odd': its state is not plain data (")
    assert text.endswith("\n  -> let state_dict() return numbers, strings, tensors, lists and dicts")
    assert list(tmp_path.iterdir()) == []


# --- what is refused -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["__0_0.distcp", "trainer.pt", ".metadata"])
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
    rewrite(saved, version=2, something_new=1)
    problem = f"{saved}/manifest.json: version is 2, this Meshwright reads up to version 1"
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
    assert "layers.0.weight is float64[8, 6], in this model float32[8, 6]" in refusal(saved, trainer)[1]


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
    assert told(caplog) == [f"{saved} holds a position in the data that was not asked for (loader=)"]


class Harmful:
    """A pickle that runs a function when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


@pytest.mark.parametrize("name", [".metadata", "trainer.pt"])
def test_code_in_a_checkpoint_is_not_run(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checksums do not help here: who can write the file can write the manifest."""
    file = data_of(saved) / name
    if name == "trainer.pt":
        torch.save({"step": Harmful()}, file)
    else:
        file.write_bytes(pickle.dumps(Harmful()))
    raw = json.loads((saved / "manifest.json").read_bytes())
    found = manifest.written(file.parent, [name])[name]
    rewrite(saved, files=raw["files"] | {name: {"num_bytes": found.num_bytes, "sha256": found.sha256}})
    with pytest.raises(CheckpointError):
        a_trainer().load(saved)
    assert "this must not run" not in capsys.readouterr().out


# --- a directory of checkpoints --------------------------------------------------------------------------------------


def test_the_latest_are_kept(tmp_path: Path) -> None:
    trainer, kept = a_trainer(), []
    for _ in range(4):
        trainer.step(a_batch())
        path = trainer.save_in(tmp_path / "runs", keep=2)
        kept.append(sorted(one.name for one in (tmp_path / "runs").iterdir()))
        assert path == tmp_path / "runs" / kept[-1][-1]
    assert kept == [
        ["step-00000001"],
        ["step-00000001", "step-00000002"],
        ["step-00000002", "step-00000003"],
        ["step-00000003", "step-00000004"],
    ]
    other = a_trainer()
    assert other.load_latest(tmp_path / "runs") == tmp_path / "runs" / "step-00000004"
    assert same(weights(other), weights(trainer))


def test_half_written_ones_do_not_count_and_are_removed(tmp_path: Path) -> None:
    trainer = a_trainer()
    paths = []
    for _ in range(3):
        paths.append(trainer.save_in(tmp_path, keep=3))
        trainer.step(a_batch())
    (paths[1] / "manifest.json").unlink()
    trainer.save_in(tmp_path, keep=3)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000000", "step-00000002", "step-00000003"]


def test_a_damaged_latest_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer()
    first = trainer.save_in(tmp_path)
    before = weights(trainer)
    trainer.step(a_batch())
    second = trainer.save_in(tmp_path)
    (data_of(second) / "trainer.pt").unlink()
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert trainer.load_latest(tmp_path) == first
    assert told(caplog) == [f"{data_of(second)}/trainer.pt: damaged: the file is missing; the one before it is tried"]
    assert same(weights(trainer), before)
    shutil.rmtree(data_of(first))
    with pytest.raises(CheckpointError) as caught:
        trainer.load_latest(tmp_path)
    assert str(caught.value).splitlines()[0] == f"{tmp_path}: none of its 2 checkpoints is whole:"
    assert str(caught.value).splitlines()[-1] == "  -> restore one from a copy, or start without"


def test_where_there_is_none_nothing_is_loaded(tmp_path: Path) -> None:
    trainer = a_trainer()
    assert trainer.load_latest(tmp_path) is None
    assert trainer.load_latest(tmp_path / "nowhere") is None


def test_a_checkpoint_of_another_model_is_no_reason_to_take_an_older_one(tmp_path: Path) -> None:
    a_trainer().save_in(tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        a_trainer(sizes=(6, 9, 4)).load_latest(tmp_path)


def test_later_steps_of_an_abandoned_run_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = a_trainer()
    early = trainer.save_in(tmp_path)
    trainer.step(a_batch())
    trainer.save_in(tmp_path)
    trainer.load(early)
    with caplog.at_level(logging.WARNING, "meshwright"):
        trainer.save_in(tmp_path, keep=1)
    assert told(caplog) == [f"{tmp_path} holds later steps than the one just saved; load_latest takes step-00000001"]
    assert early.is_dir()


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        a_trainer().save_in(tmp_path, keep=0)
    assert str(caught.value) == f"{tmp_path}: keep is 0\n  -> keep at least 1 checkpoint"


# --- chunks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A tensor whose dims are products of factors, and the mesh axes that cut some of them.

    ``factors[dim]`` are sizes, outermost first; ``axes[name]`` is (size, dim, factor), or (size, -1, -1) if replicated.
    """

    factors: tuple[tuple[int, ...], ...]
    axes: dict[str, tuple[int, int, int]]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(dim) for dim in self.factors)

    @property
    def placements(self) -> Placements:
        return {
            name: Shard(dim, math.prod(self.factors[dim][:factor]))
            for name, (_, dim, factor) in self.axes.items()
            if dim >= 0
        }

    def ranks(self) -> Iterator[dict[str, AxisGroup]]:
        """The groups of each rank (axes of size 1 have none)."""
        sizes = {name: size for name, (size, _, _) in self.axes.items() if size > 1}
        for place in itertools.product(*map(range, sizes.values())):
            yield {name: AxisGroup(name, sizes[name], index) for name, index in zip(sizes, place, strict=True)}

    def holds(self, groups: dict[str, AxisGroup], index: tuple[int, ...]) -> bool:
        """Brute force: whether a rank holds an element, from the digits of its index in the factors' sizes."""
        for dim, sizes in enumerate(self.factors):
            digits: list[int] = []
            rest = index[dim]
            for size in reversed(sizes):
                rest, digit = divmod(rest, size)
                digits.insert(0, digit)
            for factor, size in enumerate(sizes):
                digit = digits[factor]
                for name, group in groups.items():
                    if self.axes[name][1:] == (dim, factor):
                        size //= group.size
                        if digit // size != group.index:
                            return False
                        digit %= size
        return True


@st.composite
def splits(draw: st.DrawFn, dims: tuple[tuple[int, ...], ...] | None = None) -> Split:
    sizes = st.sampled_from([1, 2, 3, 4, 6])
    factors = (
        dims
        if dims is not None
        else tuple(tuple(draw(st.lists(sizes, min_size=1, max_size=3))) for _ in range(draw(st.integers(0, 3))))
    )
    left = {(dim, factor): size for dim, inner in enumerate(factors) for factor, size in enumerate(inner)}
    axes = {}
    for name in draw(st.permutations(["dp", "cp", "tp"])):
        size = draw(st.sampled_from([1, 2, 3]))
        places = [place for place, rest in left.items() if size > 1 and rest % size == 0]
        place = draw(st.sampled_from([(-1, -1), *places]))
        if place in left:
            left[place] //= size
        axes[name] = (size, *place)
    return Split(factors, axes)


def part(split: Split, groups: dict[str, AxisGroup], whole: Tensor) -> Part:
    value = local_part(whole, split.placements, groups).clone()
    return Part(value, split.shape, chunks_of(split.shape, split.placements, groups))


@given(splits())
def test_chunks_are_what_a_rank_holds(split: Split) -> None:
    whole = torch.arange(math.prod(split.shape)).view(split.shape)
    for groups in split.ranks():
        one = part(split, groups, whole)
        expected = {
            int(whole[index]) for index in itertools.product(*map(range, split.shape)) if split.holds(groups, index)
        }
        covered = torch.zeros_like(one.value, dtype=torch.int64)
        for chunk in one.chunks:
            source = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                source = source.narrow(dim, offset, size)
            assert torch.equal(one.view(chunk), source), "a chunk's place in the whole and in the part are one"
            Part(covered, split.shape, one.chunks).view(chunk).add_(1)
        assert bool((covered == 1).all()), "chunks cover the part, each element once"
        assert set(one.value.flatten().tolist()) == expected, "the part is what the factors say"


@given(st.data())
def test_any_split_is_put_together_from_any_other(data: st.DataObject) -> None:
    """Through the planners that torch runs, with memory in place of files."""
    saved = data.draw(splits())
    loaded = data.draw(splits(saved.factors))
    whole = torch.rand(saved.shape)
    writers = [shards._SavePlanner({"x": part(saved, groups, whole)}) for groups in saved.ranks()]
    plans, metadata = writers[0].create_global_plan([writer.create_local_plan() for writer in writers])
    stored: dict[MetadataIndex, Tensor] = {}
    for writer, plan in zip(writers, plans, strict=True):
        for item in plan.items:
            assert item.index not in stored
            stored[item.index] = writer.resolve_data(item).clone()
    assert sum(value.numel() for value in stored.values()) == whole.numel(), "replicas are written once"
    for groups in loaded.ranks():
        expected = part(loaded, groups, whole)
        found = Part(torch.full_like(expected.value, math.nan), loaded.shape, expected.chunks)
        reader = shards._LoadPlanner({"x": found})
        reader.set_up_planner({}, metadata)
        for request in reader.create_local_plan().items:
            source = stored[request.storage_index]
            for dim, (start, size) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
                source = source.narrow(dim, start, size)
            reader.resolve_tensor(request).copy_(source)
        assert torch.equal(found.value, expected.value)


def test_a_fused_projection_is_three_chunks() -> None:
    groups = {"tp": AxisGroup("tp", 2, 1)}
    assert chunks_of((4, 12), {"tp": Shard(1, 3)}, groups) == [
        Chunk(offsets=(0, 2), starts=(0, 0), sizes=(4, 2)),
        Chunk(offsets=(0, 6), starts=(0, 2), sizes=(4, 2)),
        Chunk(offsets=(0, 10), starts=(0, 4), sizes=(4, 2)),
    ]
    assert chunks_of((), {}, groups) == [Chunk((), (), ())]
    assert chunks_of((0, 3), {}, groups) == []


def test_saved_chunks_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    groups = {"tp": AxisGroup("tp", 2, 0)}
    half = Part(torch.zeros(2), (4,), chunks_of((4,), {"tp": Shard(0)}, groups))
    shards.write(tmp_path / "data", {"x": half})
    with pytest.raises(CheckpointError) as caught:
        shards.read(tmp_path / "data", {"x": Part(torch.zeros(4), (4,), chunks_of((4,), {}, {}))})
    assert str(caught.value) == (
        f"{tmp_path}/data: tensors could not be read (rank 0: x: the saved chunks do not cover the tensor)\n"
        "  -> load this or another checkpoint before training on: parameters may be half read"
    )


def test_empty_and_scalar_parameters(tmp_path: Path) -> None:
    parts = {
        "empty": Part(torch.empty(0, 3), (0, 3), chunks_of((0, 3), {}, {})),
        "scalar": Part(torch.tensor(2.5), (), chunks_of((), {}, {})),
        "strided": Part(torch.arange(6.0).view(2, 3).t(), (3, 2), chunks_of((3, 2), {}, {})),
    }
    shards.write(tmp_path / "data", parts)
    found = {name: Part(nn.Parameter(torch.zeros(one.shape)), one.shape, one.chunks) for name, one in parts.items()}
    shards.read(tmp_path / "data", found)
    assert all(torch.equal(found[name].value, one.value) for name, one in parts.items())
