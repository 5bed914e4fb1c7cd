"""The directory of a checkpoint: a data directory with a unique name, and a manifest, which is replaced last.

    ckpt/
      manifest.json       step, model, plan, and every file of the data with its size and checksum
      data-9c41d0e2/      the tensors (torch.distributed.checkpoint), their indices, and trainer.pt
      data-77aa01b3/      a save under way: it is not read until the manifest names it

A save that fails or is killed at any point leaves the old manifest and the old data unchanged. The next save removes
the files of the failed save. Only a directory with a valid manifest is a checkpoint and may be removed. When a
checkpoint is removed, only files that a save wrote are removed; other files stay. This module only handles files, and
does not use torch. The directory may lie in an object store (``object_path.py``).

Version 1 of the format had no index.json, and checksums of whole files. Such checkpoints are read, and written anew in
version 2 by ``meshwright checkpoint reshard``.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, ClassVar

import msgspec

from meshwright.errors import CheckpointError, DiskError, FileFormatError
from meshwright.ir import files
from meshwright.runtime.object_path import AnyPath, ObjectPath

log = logging.getLogger("meshwright")

MANIFEST, TRAINER = "manifest.json", "trainer.pt"
_DATA = re.compile(r"data-[0-9a-f]{8}")
_DATA_FILE = re.compile(
    r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|(trainer\.pt|index\.json)|\.(trainer\.pt|index\.json|\.metadata)\..*"
)
"""Matches the names of files that a save writes into its data directory, and of temporary files that a killed save
leaves there."""
_TEMPORARY = f".{MANIFEST}."  # left by files.write_atomically if it was killed
_STEP = re.compile(r"step-\d{8,}")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that was not written completely, or whose files have changed since."""


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Size and checksum of a file as it was written. Files of tensors have none here: their chunks have theirs in the
    index."""

    num_bytes: int
    sha256: str = ""


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape and dtype of a whole parameter or buffer."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of a checkpoint. ``plan`` is the plan under which it was saved. A checkpoint can be loaded under
    any plan, but the amendments of ``plan`` are restored only under the same plan."""

    VERSION: ClassVar[int] = 2
    version: int = 2
    step: int
    model: str
    fingerprint: str
    optimizer: str | None
    torch: str
    meshwright: str
    data: str
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]
    plan: dict[str, Any]
    written_as: int = 2
    """The version in which it was written."""
    checksum: str = ""
    """SHA-256 of everything else in the manifest."""


def begin(path: AnyPath, num_bytes: int) -> None:
    """Prepare ``path`` for a save of ``num_bytes``. Raise a CheckpointError if ``path`` is a file, or a directory with
    other files. Raise a DiskError if the disk has no room."""
    remedy = "choose another path: a checkpoint is a directory of its own"
    if path.exists() and not path.is_dir():
        raise CheckpointError("is a file", where=f"{path}", remedy=remedy)
    if path.is_dir() and not _is_manifest(path / MANIFEST):
        names = {entry.name for entry in path.iterdir()}
        left = {name for name in names if _is_data(path / name) or name.startswith(_TEMPORARY)}
        if others := sorted(names - left - ({MANIFEST} if left else set())):
            raise CheckpointError(f"the directory holds other files ({others[0]})", where=f"{path}", remedy=remedy)
    if full := no_room(path, num_bytes):
        raise full
    path.mkdir(parents=True, exist_ok=True)


def new_name(token: str) -> str:
    """The name of a data directory."""
    return f"data-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def no_room(path: AnyPath, num_bytes: int) -> DiskError | None:
    """Return the error to raise if ``num_bytes`` do not fit on the disk of ``path``, or None if they fit, or in an
    object store."""
    if isinstance(path, ObjectPath):
        return None
    there = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    free = shutil.disk_usage(there).free
    if free >= num_bytes:
        return None
    needed, left, missing = (_size(size) for size in (num_bytes, free, num_bytes - free))
    problem = f"no space left on the disk: a checkpoint takes {needed}, {left} are free, {missing} are missing"
    return DiskError(problem, where=f"{path}", remedy="make room there; earlier checkpoints are unchanged")


def abandon(path: AnyPath, data: str) -> None:
    """Remove the files of a failed save, unless the manifest already names them."""
    with suppress(OSError):  # files that cannot be removed now are removed by the next save
        manifest = path / MANIFEST
        if manifest.is_file() and f'"{data}"' in manifest.read_text():
            return
        if (path / data).is_dir():
            _remove(path / data, [file for file in _entries(path / data) if _DATA_FILE.fullmatch(file.name)])
        if not any(_entries(path)):
            path.rmdir()


def complete(
    path: AnyPath, described: Manifest, data: str, saved: dict[str, SavedFile], small: dict[str, bytes]
) -> Manifest:
    """Complete a save whose files of tensors (``saved``) are written: write the ``small`` files too, and the manifest.
    Return the manifest."""
    for name, content in small.items():
        write(path / data / name, content)
    all_files = saved | written(path / data, small)
    result = msgspec.structs.replace(described, data=data, files=dict(sorted(all_files.items())))
    commit(path, result)
    return result


def commit(path: AnyPath, manifest: Manifest) -> None:
    """Complete a save: write ``manifest``, which names the new data directory, and remove the data of earlier saves."""
    _sync(path / manifest.data)
    _sync(path)
    checksum = _checksum(json.loads(files.encode_json(manifest)))
    write(path / MANIFEST, files.encode_json(msgspec.structs.replace(manifest, checksum=checksum)))
    _sync(path)
    _sync(path.parent)
    _remove_data(path, manifest.data)


def write(file: AnyPath, data: bytes) -> None:
    """Write or replace a small file in one move."""
    if isinstance(file, ObjectPath):
        file.write_bytes(data)
    else:
        files.write_atomically(file, data)


def _inside(folder: AnyPath, name: str) -> AnyPath:
    """The path of a file that a manifest names in its folder. Raise a FileFormatError if it is not plain."""
    if isinstance(folder, ObjectPath):
        files.check_plain(name, f"{folder}")
        return folder / name
    return files.inside(folder, name)


def read(path: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint, and check that its files exist with the saved sizes. Raise a
    DamagedCheckpointError if the manifest is missing or changed, or if a file is missing or has another size. Raise a
    CheckpointError if ``path`` is no checkpoint, or if a newer version of Meshwright wrote it."""
    manifest = _parsed(path)
    for name, saved in manifest.files.items():
        try:
            file = _inside(_inside(path, manifest.data), name)
        except FileFormatError as error:
            raise damaged(f"it names a file that is not its own: {error.problem}", path / MANIFEST) from None
        if not file.is_file():
            raise damaged("the file is missing", file)
        if (size := file.stat().st_size) != saved.num_bytes:
            raise damaged(f"{size:,} bytes, {saved.num_bytes:,} were written", file)
    return manifest


def written(directory: AnyPath, names: Iterable[str]) -> dict[str, SavedFile]:
    """Return the size and checksum of each file."""
    saved_files = {}
    for name in names:
        with (directory / name).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        saved_files[name] = SavedFile(num_bytes=(directory / name).stat().st_size, sha256=checksum)
    return saved_files


def verify(directory: AnyPath, saved: dict[str, SavedFile]) -> None:
    """Raise a DamagedCheckpointError that names the first file whose size or checksum differs from its saved one. Files
    without a checksum are not read."""
    for name, expected in saved.items():
        if expected.sha256 and written(directory, [name])[name] != expected:
            raise damaged("its checksum is not the one that was written", directory / name)


def steps_in(directory: AnyPath) -> list[str]:
    """Return the names of the checkpoints in a directory, complete or not, with the latest step first. Directories that
    are named like a checkpoint but were not written by a save are left out."""
    if not directory.is_dir():
        return []
    named = [entry for entry in directory.iterdir() if entry.is_dir() and _STEP.fullmatch(entry.name)]
    names = [entry.name for entry in named if _is_manifest(entry / MANIFEST) or any(map(_is_data, _entries(entry)))]
    return sorted(names, key=lambda name: int(name.removeprefix("step-")), reverse=True)


def latest_step(directory: AnyPath) -> int:
    """Return the latest step that has a complete checkpoint in ``directory``, or -1 if there is none."""
    names = (name for name in steps_in(directory) if _is_valid(directory / name))
    return next((int(name.removeprefix("step-")) for name in names), -1)


def step_name(step: int) -> str:
    """The name of a step's checkpoint, such as ``step-00000120``."""
    return f"step-{step:08d}"


def prune(directory: AnyPath, newest: str, keep: int) -> list[str]:
    """Keep ``newest`` and the ``keep`` - 1 latest checkpoints before it, and remove earlier checkpoints. Later
    checkpoints stay, and their names are returned. A directory without a valid manifest is neither counted nor
    removed."""
    names = [name for name in steps_in(directory) if _is_valid(directory / name)]
    place = names.index(newest)
    for name in names[place + keep :]:
        _remove_data(directory / name)
        _remove(directory / name, [directory / name / MANIFEST])  # last: it marks the others as ours
    return names[:place]


def _parsed(path: AnyPath) -> Manifest:
    """Return the manifest of ``path`` if its checksum is right. Otherwise raise the errors that ``read`` describes."""
    try:
        data = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise _absent(path, error) from None
    try:
        raw = json.loads(data)
        version, checksum = int(raw["version"]), str(raw["checksum"])
    except (ValueError, KeyError, TypeError):
        raise damaged(f"{MANIFEST} is not a manifest", path) from None
    if version > Manifest.VERSION:
        raise CheckpointError(
            f"version is {version}, this Meshwright reads up to version {Manifest.VERSION}",
            where=f"{path / MANIFEST}",
            remedy="use the Meshwright that wrote it, or a newer one",
        )
    if version < 1:
        raise CheckpointError(
            f"version is {version}, this Meshwright reads versions 1 to {Manifest.VERSION}",
            where=f"{path / MANIFEST}",
            remedy="load another checkpoint",
        )
    if checksum != _checksum(raw):
        raise damaged(f"{MANIFEST} has changed since", path)
    try:
        current = json.dumps(
            raw | {"version": Manifest.VERSION, "written_as": version}
        ).encode()  # version 1 has all of 2
        return files.decode(current, Manifest, where=f"{path / MANIFEST}")
    except FileFormatError as error:
        raise damaged(error.problem, error.where) from None


def damaged(problem: str, where: AnyPath | str) -> DamagedCheckpointError:
    """The error to raise if a file is not what was written."""
    remedy = "restore it from a copy, or load another checkpoint"
    return DamagedCheckpointError(f"damaged: {problem}", where=f"{where}", remedy=remedy)


def _is_valid(path: AnyPath) -> bool:
    """Whether the directory is a complete checkpoint that Meshwright wrote."""
    with suppress(CheckpointError):
        _parsed(path)
        return True
    return False


def _entries(directory: AnyPath) -> list[AnyPath]:
    """The entries of a directory; none if another process has just removed it."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _remove_data(path: AnyPath, kept: str = "") -> None:
    """Remove from a checkpoint the data of all saves, even killed saves, except the data directory ``kept``."""
    for entry in _entries(path):
        if entry.is_symlink():  # its target is not ours
            continue
        if _DATA.fullmatch(entry.name) and entry.name != kept and entry.is_dir():
            _remove(entry, [file for file in _entries(entry) if _DATA_FILE.fullmatch(file.name)])
        elif entry.name.startswith(_TEMPORARY):
            entry.unlink(missing_ok=True)


def _remove(directory: AnyPath, files_of_saves: Iterable[AnyPath]) -> None:
    """Remove these files, then ``directory`` unless it holds other files."""
    try:
        for file in files_of_saves:
            file.unlink(missing_ok=True)
        if others := [file.name for file in directory.iterdir()]:
            log.warning("%s holds files that no save wrote (%s), and is left there", directory, min(others))
        else:
            directory.rmdir()
    except OSError as error:
        log.warning("%s cannot be removed: %s", directory, error.strerror)


def _absent(path: AnyPath, error: OSError) -> CheckpointError:
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = files.did_you_mean(path.name, beside)
        return CheckpointError("there is no checkpoint", where=f"{path}", remedy=near or "check the path")
    if not path.is_dir():
        return CheckpointError("is a file; a checkpoint is a directory", where=f"{path}", remedy="check the path")
    if isinstance(error, FileNotFoundError):
        if steps := steps_in(path):
            remedy = f"call load_latest, or load {path / steps[0]}"
            return CheckpointError("is a directory of checkpoints", where=f"{path}", remedy=remedy)
        problem = f"half-written: there is no {MANIFEST}"
        return DamagedCheckpointError(problem, where=f"{path}", remedy="load another checkpoint")
    problem = f"{MANIFEST} cannot be read: {error.strerror}"
    return CheckpointError(problem, where=f"{path}", remedy="check its permissions")


def _is_manifest(file: AnyPath) -> bool:
    """Whether the file is a manifest of Meshwright. It may be changed or have another version."""
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and {"version", "data", "checksum"} <= raw.keys()


def _is_data(directory: AnyPath) -> bool:
    """Whether a save wrote the directory: its name and the names of all its files have the form that a save uses."""
    named = _DATA.fullmatch(directory.name) is not None and directory.is_dir()
    return named and all(_DATA_FILE.fullmatch(file.name) for file in _entries(directory))


def _size(num_bytes: int) -> str:
    """A size as text: ``1.25 GiB``, ``12 KiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{-(-num_bytes // 1024)} KiB"


def _checksum(raw: dict[str, Any]) -> str:
    rest = {key: value for key, value in raw.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync(directory: AnyPath) -> None:
    """Flush a directory's entries to the disk."""
    if isinstance(directory, ObjectPath):
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
