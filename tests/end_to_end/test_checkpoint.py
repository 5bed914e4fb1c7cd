"""What a checkpoint in one process holds, that it is whole or not there, and a directory of several."""

from __future__ import annotations

import json
import logging
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.errors import CheckpointError
from meshwright.models import ResNet, classification_loss
from meshwright.runtime import manifest
from meshwright.runtime.chunk_writer import ChunkFile
from meshwright.runtime.saving import Save, SaveReport
from meshwright.runtime.shards import StoredPart
from tests.end_to_end.checkpoint_cases import (
    OPTIMIZERS,
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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return a_checkpoint(tmp_path)


# --- what a checkpoint holds -----------------------------------------------------------------------------------------


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
    assert {name: scheduler.state_dict() for name, scheduler in other_extra.items()} == {
        name: scheduler.state_dict() for name, scheduler in extra.items()
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
    assert (raw["version"], raw["step"], raw["model"], raw["optimizer"]) == (2, 1, "MLP", "SGD")
    assert (raw["fingerprint"], raw["torch"]) == (trainer.graph.fingerprint, str(torch.__version__))
    assert raw["tensors"]["layers.0.weight"] == {"shape": [8, 6], "dtype": "float64"}
    assert raw["plan"]["mesh"] == {"axes": [{"name": "dp", "size": 1}, {"name": "tp", "size": 1}]}
    assert raw["data"] == data_of(saved).name
    assert sorted(raw["files"]) == sorted(file.name for file in data_of(saved).iterdir())


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
    ["meshwright.runtime.share.Share.write", "meshwright.runtime.manifest.written", "meshwright.ir.files.os.replace"],
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
    monkeypatch.setattr(ChunkFile, "add", full_disk)
    with pytest.raises(CheckpointError) as caught:
        trainer.save(tmp_path / "ckpt")
    assert str(caught.value) == (
        f"{tmp_path}/ckpt: tensors could not be written (rank 0: No space left on device)\n"
        "  -> check the disk's space and permissions"
    )
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_tensors_are_written_is_ctrl_c(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    trainer = a_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(StoredPart, "view", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(saved)
    trainer.load(saved)
    assert trainer.step_number == 1
    assert len(list(saved.iterdir())) == 2


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    trainer = unchanged()
    for name in ("a.txt", "manifest.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}")
        for path, problem in (
            (tmp_path / name, f"the directory holds other files ({name})"),
            (tmp_path / name / name, "is a file"),
        ):
            with pytest.raises(CheckpointError) as caught:
                trainer.save(path)
            remedy = "choose another path: a checkpoint is a directory of its own"
            assert str(caught.value) == f"{path}: {problem}\n  -> {remedy}"
        assert (tmp_path / name / name).read_text() == "{}"


def test_what_people_put_beside_a_checkpoint_stays(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    a_trainer().save(saved)
    assert (saved / "notes.txt").read_text() == "mine"


def test_a_damaged_checkpoint_may_be_replaced(saved: Path) -> None:
    (saved / "manifest.json").write_text("{")
    (saved / ".manifest.json.k2j4").write_text("{")
    trainer = a_trainer()
    trainer.save(saved)
    trainer.load(saved)
    assert len(list(saved.iterdir())) == 2


def test_ranks_that_do_not_share_the_directory_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conclude = Save._conclude

    def conclude_elsewhere(save: Save, packed: bytes, report: SaveReport) -> Any:
        (data_of(tmp_path / "ckpt") / "__0_0.distcp").unlink()
        return conclude(save, packed, report)

    monkeypatch.setattr(Save, "_conclude", conclude_elsewhere)
    with pytest.raises(CheckpointError) as caught:
        a_trainer().save(tmp_path / "ckpt")
    assert ": rank 0 does not see a file that another rank wrote (__0_0.distcp)" in str(caught.value)
    assert str(caught.value).endswith("\n  -> save to a directory that all ranks share")
    assert list(tmp_path.iterdir()) == []


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


# --- a directory of checkpoints --------------------------------------------------------------------------------------


def test_the_latest_are_kept(tmp_path: Path) -> None:
    trainer, kept = a_trainer(), []
    for _ in range(4):
        trainer.step(a_batch())
        path = trainer.save_in(tmp_path / "runs", keep=2)
        kept.append(sorted(entry.name for entry in (tmp_path / "runs").iterdir()))
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


def test_half_written_ones_do_not_count_and_stay(tmp_path: Path) -> None:
    trainer = a_trainer()
    paths = []
    for _ in range(3):
        paths.append(trainer.save_in(tmp_path, keep=3))
        trainer.step(a_batch())
    (paths[1] / "manifest.json").unlink()
    trainer.save_in(tmp_path, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000002", "step-00000003"]


def test_directories_of_other_people_are_neither_removed_nor_counted_nor_loaded(tmp_path: Path) -> None:
    others = {
        "step-00000001/results.txt": "mine",
        "step-00000002/manifest.json": '{"files": []}',
        "step-00000003/data-20240101/photo.jpg": "mine",
        "step-90000000/manifest.json": "{",
    }
    for name, text in others.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    trainer = a_trainer()
    assert trainer.load_latest(tmp_path) is None
    assert manifest.latest_step(tmp_path) == -1
    for step in (10, 20, 30, 40):
        trainer.step_number = step
        trainer.save_in(tmp_path, keep=2)
    assert manifest.steps_in(tmp_path) == ["step-00000040", "step-00000030"]
    assert {name: (tmp_path / name).read_text() for name in others} == others
    assert trainer.load_latest(tmp_path) == tmp_path / "step-00000040"
    trainer.step_number = 3
    with pytest.raises(CheckpointError, match=r"step-00000003: the directory holds other files \(data-20240101\)"):
        trainer.save_in(tmp_path)


def test_what_people_put_into_a_checkpoint_stays_when_it_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer()
    first = Path(trainer.save_in(tmp_path))
    data = data_of(first)
    (first / "notes.txt").write_text("mine")
    (data / "more.txt").write_text("mine")
    trainer.step(a_batch())
    with caplog.at_level(logging.WARNING, "meshwright"):
        trainer.save_in(tmp_path, keep=1)
    assert sorted(file for file in first.rglob("*") if file.is_file()) == [data / "more.txt", first / "notes.txt"]
    assert log_messages(caplog) == [
        f"{data} holds files that no save wrote (more.txt), and is left there",
        f"{first} holds files that no save wrote ({data.name}), and is left there",
    ]
    assert manifest.steps_in(tmp_path) == ["step-00000001"]


def test_a_damaged_latest_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = a_trainer()
    first = Path(trainer.save_in(tmp_path))
    before = weights(trainer)
    trainer.step(a_batch())
    second = Path(trainer.save_in(tmp_path))
    (data_of(second) / "trainer.pt").unlink()
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert trainer.load_latest(tmp_path) == first
    assert log_messages(caplog) == [
        f"{data_of(second)}/trainer.pt: damaged: the file is missing; the one before it is tried"
    ]
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
    assert log_messages(caplog) == [
        f"{tmp_path} holds later steps than the one just saved; load_latest takes step-00000001"
    ]
    assert early.is_dir()
    (tmp_path / "step-00000001" / "manifest.json").unlink()  # it never was one, and will be replaced
    caplog.clear()
    trainer.save_in(tmp_path, keep=1)
    assert log_messages(caplog) == []


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        a_trainer().save_in(tmp_path, keep=0)
    assert str(caught.value) == f"{tmp_path}: keep is 0\n  -> keep at least 1 checkpoint"
