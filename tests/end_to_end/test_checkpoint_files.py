"""Checkpoints beyond one trainer: other programs, older versions, object stores, and the command line."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import json
import logging
import os
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import meshwright as mw
from meshwright import api
from meshwright.cli import run
from meshwright.errors import CheckpointError
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Shard
from meshwright.models import MLP
from meshwright.runtime import checkpoint_files, manifest, saving, shards, share
from meshwright.runtime.chunk_files import ChunkReader, frame_of, numbers_of, verify_chunks
from meshwright.runtime.chunk_index import Index, IndexedTensor, read_index
from meshwright.runtime.chunk_writer import PIECE_BYTES, ChunkFile
from meshwright.runtime.manifest import DamagedCheckpointError
from meshwright.runtime.object_path import ObjectPath, place_of
from meshwright.runtime.rehearsal import Rehearsal
from meshwright.runtime.rehearsed_kind import RehearsedKind
from meshwright.runtime.shards import part_at
from meshwright.runtime.share_copy import HostMemory, to_host
from tests.end_to_end.checkpoint_cases import (
    a_batch,
    a_checkpoint,
    a_trainer,
    adamw,
    after_one_step,
    data_of,
    log_messages,
    same,
    weights,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return a_checkpoint(tmp_path)


@pytest.fixture
def store() -> Iterator[str]:
    """A store in memory, empty before and after."""
    files: Any = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield "memory://bucket"
    files.store.clear()
    files.pseudo_dirs[:] = [""]


# --- files of chunks --------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3))
def test_a_frame_around_numbers_is_what_torch_saves(dtype: torch.dtype, sizes: list[int]) -> None:
    value = (torch.rand(sizes) * 100).to(dtype)
    frame = frame_of(dtype, tuple(sizes))
    data = frame.head + bytes(numbers_of(value)) + frame.ending(checksum(value))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, value)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None, "its checksums are right"


def checksum(value: torch.Tensor) -> int:
    return zlib.crc32(numbers_of(value))


def test_any_flipped_bit_in_a_file_of_chunks_is_found(tmp_path: Path) -> None:
    file = ChunkFile(tmp_path / "__0_0.distcp")
    file.add("x", torch.arange(5.0), (0,))
    file.add("x", torch.arange(3), (5,))
    chunks = file.close()["x"]
    verify_chunks(tmp_path, chunks)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    assert sum(chunk.num_bytes for chunk in chunks) == len(data), "all bytes belong to a chunk"
    for place in range(0, len(data), 7):
        (tmp_path / "__0_0.distcp").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DamagedCheckpointError):
            verify_chunks(tmp_path, chunks)
    (tmp_path / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(DamagedCheckpointError):
        verify_chunks(tmp_path, chunks)


@pytest.mark.parametrize(("numbers", "most"), [(1000, 64 * 2**10), (2**20, 3 * 2**22)])
def test_a_file_of_chunks_reserves_little_more_than_it_needs(tmp_path: Path, numbers: int, most: int) -> None:
    file = ChunkFile(tmp_path / "__0_0.distcp")
    file.add("x", torch.zeros(numbers), (0,))
    status = (tmp_path / "__0_0.distcp").stat()
    assert status.st_blocks * 512 <= most, "others would lack the room until the save is done"
    file.close()


def test_a_chunk_is_compared_when_it_is_read(tmp_path: Path) -> None:
    file = ChunkFile(tmp_path / "__0_0.distcp")
    file.add("x", torch.arange(5.0), (0,))
    (chunk,) = file.close()["x"]
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    data[chunk.numbers_at] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(data)
    index = Index({"x": IndexedTensor((5,), "float32", (chunk,))})
    with ChunkReader(tmp_path, index) as reader, pytest.raises(DamagedCheckpointError, match="its checksum is not"):
        reader.read(chunk, torch.float32)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=12))
def test_threads_write_each_chunk_to_its_place(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    directory = tmp_path_factory.mktemp("threads")
    file, values = ChunkFile(directory / "__0_0.distcp"), [(torch.rand(sizes) * 9).to(dtype) for dtype, sizes in kinds]
    for number, value in enumerate(values):
        file.add(f"{number % 3}", value, (number,))
    by_name = file.close()
    chunks = sorted(itertools.chain(*by_name.values()), key=lambda chunk: chunk.offsets)
    assert [chunk.offsets for chunk in by_name.get("0", ())] == [(number,) for number in range(0, len(values), 3)]
    data, end = (directory / "__0_0.distcp").read_bytes(), 0
    for chunk, value in zip(chunks, values, strict=True):
        assert chunk.at == end, "one after the other, in the order in which they were given"
        end += chunk.num_bytes
        assert torch.equal(torch.load(io.BytesIO(data[chunk.at : end]), weights_only=True), value)
    assert end == len(data)
    verify_chunks(directory, chunks)


def test_a_system_that_writes_less_than_it_is_given_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, counts = os.pwritev, list[int]()

    def little(number: int, pieces: list[memoryview], at: int) -> int:
        counts.append(write(number, [pieces[0][:100]], at))
        return counts[-1]

    monkeypatch.setattr(os, "pwritev", little)
    file = ChunkFile(tmp_path / "__0_0.distcp")
    file.add("x", torch.arange(1000.0), (0,))
    (chunk,) = file.close()["x"]
    assert sum(counts) == chunk.num_bytes == (tmp_path / "__0_0.distcp").stat().st_size
    verify_chunks(tmp_path, [chunk])


@pytest.mark.parametrize("way", ["around the cache", "not opened", "not written"])
def test_large_chunks_are_whole_whichever_way_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whole pages go to the disk directly, where the system lets them; what is left of their chunks goes beside."""
    write, opened, refused = os.pwritev, os.open, list[int]()

    def not_opened(path: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *mode)

    def not_written(number: int, pieces: list[memoryview], at: int) -> int:
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(number, pieces, at)

    if way == "not opened":
        monkeypatch.setattr(os, "open", not_opened)
    elif way == "not written":
        monkeypatch.setattr(os, "pwritev", not_written)
    values = [torch.rand(size) for size in (2**18 + 5, 3, PIECE_BYTES // 2 + 1, 2**18, 0, 7)]
    file = ChunkFile(tmp_path / "__0_0.distcp")
    for number, value in enumerate(values):
        file.add("x", value, (number,))
    chunks = file.close()["x"]
    assert bool(refused) == (way == "not written")
    monkeypatch.undo()
    verify_chunks(tmp_path, chunks)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    assert len(data) == sum(chunk.num_bytes for chunk in chunks), "what was reserved is given back"
    for chunk, value in zip(chunks, values, strict=True):
        piece = io.BytesIO(data[chunk.at : chunk.at + chunk.num_bytes])
        assert torch.equal(torch.load(piece, weights_only=True), value)


def test_an_error_in_a_thread_ends_the_file(tmp_path: Path) -> None:
    """Nothing more is written, and nobody waits for ever for a place in the queue."""

    def refuse(value: torch.Tensor) -> None:
        raise ZeroDivisionError("not worth it")

    file = ChunkFile(tmp_path / "__0_0.distcp")
    with pytest.raises(ZeroDivisionError, match="not worth it"):  # noqa: PT012 - by the call that notices it
        file.add("x", torch.arange(3), (0,), refuse)
        for number in range(20):
            file.add("y", torch.arange(3), (number,))
        file.close()
    file.abandon()


# --- saves beside the steps -------------------------------------------------------------------------------------------


def test_an_update_waits_for_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, other, order = a_trainer(adamw), a_trainer(adamw), []
    complete, update = share.Share.complete, trainer.optimizer.step

    def completed_late(self: share.Share) -> None:
        time.sleep(0.1)
        complete(self)
        order.append("copied")

    def updated() -> None:
        order.append("updated")
        update()

    monkeypatch.setattr(share.Share, "complete", completed_late)
    monkeypatch.setattr(trainer.optimizer, "step", updated)
    for _ in range(3):
        trainer.step(a_batch())
        before = weights(trainer)
        trainer.save(tmp_path / "ckpt", blocking=False)
        order.append("saving")
        trainer.step(a_batch())
        trainer.wait_for_save()
        other.load(tmp_path / "ckpt")
        assert same(weights(other), before)
    assert order == ["updated", "saving", "copied", "updated"] * 3


def test_a_tensor_that_is_changed_by_hand_during_a_save_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = a_trainer()
    complete = share.Share.complete

    def changed_before(self: share.Share) -> None:
        with torch.no_grad():
            trainer.parameters["layers.0.bias"].add_(1)
        complete(self)

    monkeypatch.setattr(share.Share, "complete", changed_before)
    trainer.save(tmp_path / "ckpt", blocking=False)
    with pytest.raises(CheckpointError) as caught:
        trainer.wait_for_save()
    assert str(caught.value) == (
        "tensor model.layers.0.bias: it was changed while it was copied for a save, and is not saved\n"
        "  -> call trainer.wait_for_save() before changing it between steps, or save with blocking=True"
    )
    trainer.step(a_batch())  # updates are not held up


def test_a_second_save_plans_nothing_and_meets_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = a_trainer(adamw)
    trainer.step(a_batch())
    trainer.save_in(tmp_path)
    before = shards._places.cache_info().misses, shards._own_chunks.cache_info().misses
    monkeypatch.setattr(saving, "from_rank_0", None)
    trainer.step(a_batch())
    trainer.save_in(tmp_path)
    assert (shards._places.cache_info().misses, shards._own_chunks.cache_info().misses) == before


# --- other programs ---------------------------------------------------------------------------------------------------


def test_torch_makes_a_nested_state_dict_of_our_checkpoint(saved: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(data_of(saved), tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    model = MLP((6, 8, 4)).double()
    model.load_state_dict(loaded["model"])
    assert same(dict(model.state_dict()), weights(after_one_step()))
    assert {"momentum_buffer.layers.0.weight"} <= loaded["optimizer"].keys()


@pytest.mark.parametrize("prefix", ["model.", "", "module."])
def test_weights_of_a_program_with_torchs_checkpoints_are_loaded(tmp_path: Path, prefix: str) -> None:
    theirs = weights(after_one_step())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = {prefix + name: value for name, value in theirs.items()}
        dcp.save({**state, "epoch": 3}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    trainer = a_trainer()
    trainer.load_weights(tmp_path / "theirs")
    assert same(weights(trainer), theirs)
    assert trainer.step_number == 0


def test_weights_of_our_checkpoint_are_loaded_into_another_dtype(saved: Path) -> None:
    batch = a_batch()
    batch["inputs"] = batch["inputs"].float()
    trainer = mw.parallelize(MLP((6, 8, 4)), mw.models.classification_loss, batch)
    trainer.load_weights(saved)
    expected = {name: value.float() for name, value in weights(after_one_step()).items()}
    assert same(weights(trainer), expected)


def test_weights_of_another_model_are_refused(saved: Path, tmp_path: Path) -> None:
    trainer = a_trainer(sizes=(6, 9, 4))
    with pytest.raises(CheckpointError, match=r"of another model: model.layers.0.weight has shape \[8, 6\]"):
        trainer.load_weights(saved)
    (tmp_path / "empty").mkdir()
    for path, problem in (
        (tmp_path / "nowhere", "there are no weights"),
        (tmp_path / "empty", "there is no such file"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            trainer.load_weights(path)


# --- older versions ---------------------------------------------------------------------------------------------------


def as_version_1(path: Path) -> None:
    """Turn a checkpoint into one of the first format: no index of ours, and checksums of whole files."""
    data = data_of(path)
    raw = json.loads((path / "manifest.json").read_bytes())
    (data / "index.json").unlink()
    files = manifest.written(data, [name for name in raw["files"] if name != "index.json"])
    raw["files"] = {name: {"num_bytes": file.num_bytes, "sha256": file.sha256} for name, file in files.items()}
    del raw["written_as"]
    raw["version"] = 1
    raw["checksum"] = manifest._checksum(raw)
    (path / "manifest.json").write_text(json.dumps(raw))


def test_version_1_is_read_and_written_anew(saved: Path, tmp_path: Path) -> None:
    as_version_1(saved)
    trainer = a_trainer()
    trainer.load(saved)
    assert same(weights(trainer), weights(after_one_step()))
    (row,) = api.list_checkpoints(f"{saved}")
    assert (row.version, row.step, row.problem) == (1, 1, "")
    api.reshard_checkpoint(f"{saved}", f"{tmp_path / 'new'}", 2)
    (row,) = api.list_checkpoints(f"{tmp_path / 'new'}")
    assert (row.version, row.files) == (2, 2)
    other = a_trainer()
    other.load(tmp_path / "new")
    assert same(weights(other), weights(trainer))
    assert other.step(a_batch()).item() == trainer.step(a_batch()).item(), "with the optimizer's state"
    file = data_of(saved) / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    with pytest.raises(DamagedCheckpointError, match="its checksum is not"):
        trainer.load(saved)


# --- object stores ----------------------------------------------------------------------------------------------------


def test_checkpoints_in_an_object_store(store: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = a_trainer()
    kept, path = [], None
    for _ in range(4):
        trainer.step(a_batch())
        path = trainer.save_in(f"{store}/run", keep=2, blocking=False)
        trainer.wait_for_save()
        kept.append(manifest.steps_in(place_of(f"{store}/run")))
    assert f"{path}" == f"{store}/run/step-00000004"
    assert [len(names) for names in kept] == [1, 2, 2, 2]
    other = a_trainer()
    assert other.load_latest(f"{store}/run") == place_of(f"{store}/run/step-00000004")
    assert same(weights(other), weights(trainer))
    names = [entry.name for entry in place_of(f"{store}/run/step-00000004").iterdir()]
    assert sorted(name.split("-")[0] for name in names) == ["data", "manifest.json"]
    # a flipped bit: the one before is taken
    latest = manifest.read(ObjectPath(f"{store}/run/step-00000004"))
    file = ObjectPath(f"{store}/run/step-00000004/{latest.data}/__0_0.distcp")
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert f"{other.load_latest(f'{store}/run')}" == f"{store}/run/step-00000003"
    assert log_messages(caplog)[0].startswith(f"{file}: damaged: its checksum is not the one that was written")


def test_retention_in_a_store_leaves_what_it_did_not_write(store: str) -> None:
    trainer = a_trainer()
    first = ObjectPath(f"{trainer.save_in(f'{store}/run')}")
    (first / "notes.txt").write_bytes(b"mine")
    ObjectPath(f"{store}/run/step-00000007/results.txt").write_bytes(b"mine")
    trainer.step(a_batch())
    trainer.save_in(f"{store}/run", keep=1)
    assert [entry.name for entry in first.iterdir()] == ["notes.txt"]
    assert ObjectPath(f"{store}/run/step-00000007/results.txt").read_bytes() == b"mine"


def test_a_store_without_its_package_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"nosuchstore://bucket.*: .*\n  -> install the store's package"):
        a_trainer().load("nosuchstore://bucket/run")


def test_files_go_from_a_disk_to_a_store_and_back(saved: Path, store: str, tmp_path: Path) -> None:
    api.reshard_checkpoint(f"{saved}", f"{store}/copy", 3)
    api.reshard_checkpoint(f"{store}/copy", f"{tmp_path / 'back'}", 1)
    trainer = a_trainer()
    trainer.load(tmp_path / "back")
    assert same(weights(trainer), weights(after_one_step()))


# --- the command line -------------------------------------------------------------------------------------------------


def test_ls_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = a_trainer()
    for _ in range(3):
        trainer.step(a_batch())
        trainer.save_in(tmp_path / "checkpoints", keep=3)
    assert run(["checkpoint", "verify", str(tmp_path)]) == 0
    damaged = data_of(tmp_path / "checkpoints" / "step-00000003") / "__0_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[500] ^= 1
    damaged.write_bytes(data)
    (data_of(tmp_path / "checkpoints" / "step-00000002") / "trainer.pt").unlink()
    capsys.readouterr()
    assert run(["checkpoint", "ls", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    listing = [(row["step"], row["problem"]) for row in rows]
    assert listing == [(3, ""), (2, "damaged: the file is missing"), (1, "")]
    assert run(["checkpoint", "verify", str(tmp_path), "--json"]) == 1
    problems = [row["problem"] for row in json.loads(capsys.readouterr().out)]
    assert problems[0] == f"{damaged}: damaged: its checksum is not the one that was written"
    assert problems[1:] == ["damaged: the file is missing", ""]
    assert run(["checkpoint", "ls", str(tmp_path / "nowhere")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_reshard_refuses_to_overwrite(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "reshard", str(saved), str(tmp_path / "new"), "--ranks", "2"]) == 0
    assert run(["checkpoint", "reshard", str(saved), str(tmp_path / "new"), "--ranks", "2"]) == 2
    assert "is a checkpoint already" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert run(["checkpoint", "reshard", str(saved), str(tmp_path / "other")]) == 2
    assert [entry.name for entry in (tmp_path / "other").iterdir()] == ["notes.txt"]


def test_a_damaged_checkpoint_is_not_resharded(saved: Path, tmp_path: Path) -> None:
    file = data_of(saved) / "__0_0.distcp"
    index = read_index(data_of(saved), manifest.read(saved))
    data = bytearray(file.read_bytes())
    data[index.tensors["model.layers.0.weight"].chunks[0].numbers_at] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="its checksum is not"):
        checkpoint_files.reshard(saved, tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()


# --- saves on a device that is not there ------------------------------------------------------------------------------


def test_the_copies_of_a_save_wait_once_for_a_gpu_and_in_the_saving_thread() -> None:
    """All parts, also blocks of a part, and step counts on the device, go to pinned memory in one stream."""
    part = part_at(torch.empty(6, 8), (6, 16), {"tp": Shard(1, 2)}, {"tp": AxisGroup("tp", 2, 1)})
    with FakeTensorMode(allow_non_fake_inputs=True), Rehearsal(0) as rehearsal:
        kind = RehearsedKind(rehearsal)
        values = {f"model.{number}": torch.empty(6, 8, device="cuda:0") for number in range(5)}
        parts = {name: replace(part, value=value) for name, value in values.items()}
        steps = {"states": {name: {"values": {"step": torch.empty((), device="cuda:0")}} for name in values}}
        rehearsal.begin("step 1")
        copies = kind.copies()
        memory: HostMemory = {}
        copying = share.Share(parts).copy(kind, copies, memory)
        on_host = to_host(steps, kind, copies)
        copying.hold()
        assert rehearsal.findings == [], "the host and the kernels of the next step go on"
        assert {state["values"]["step"].device.type for state in on_host["states"].values()} == {"cpu"}
        copying.finish()
        (finding,) = rehearsal.findings
        assert (finding.what, finding.times) == ("the host waits for the copies", 1)
        copied = list(copying.values())
        assert len(copied) == len(memory) == 10, "two blocks of each part"
        assert {value.device.type for _, value in copied} == {"cpu"}
        again = share.Share(parts).copy(kind, copies, memory)
        assert len(memory) == 10, "pinned memory is used again"
        again.finish()


# --- what disks refuse ------------------------------------------------------------------------------------------------


def test_a_place_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    trainer = a_trainer()
    saved = Path(trainer.save_in(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(CheckpointError) as caught:
            trainer.save(tmp_path / "other")
    assert str(caught.value) == (
        f"{tmp_path}/other: tensors could not be written (rank 0: Permission denied)\n"
        "  -> check the disk's space and permissions"
    )
    assert not (tmp_path / "other").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(CheckpointError, match=r"__0_0.distcp: Permission denied|Permission denied"):
            trainer.load(saved)
    trainer.load(saved)


@given(st.data())
def test_a_torn_write_is_never_taken_for_a_checkpoint(tmp_path_factory: Any, data: st.DataObject) -> None:
    """A file of chunks that is cut, or in which a block is zeros, as after a power cut."""
    path = tmp_path_factory.mktemp("torn")
    file = ChunkFile(path / "__0_0.distcp")
    file.add("x", torch.arange(1.0, 200.0), (0,))
    (chunk,) = file.close()["x"]
    whole = (path / "__0_0.distcp").read_bytes()
    begin = data.draw(st.integers(0, len(whole) - 1))
    size = data.draw(st.integers(1, 128))
    cut = whole[:begin] if data.draw(st.booleans()) else whole[:begin] + bytes(size) + whole[begin + size :]
    (path / "__0_0.distcp").write_bytes(cut[: len(whole)])
    if cut[: len(whole)] == whole:
        return
    with pytest.raises(DamagedCheckpointError):
        verify_chunks(path, [chunk])
