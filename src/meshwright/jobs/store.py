"""Stores outputs of vertices by the SHA-256 of their contents, and checks them when they are read.

    objects/3f/3fa9...      a file, or the list of a directory's files (JSON: path, sha256, bytes)

A file is moved in under its hash, so that a reader never sees half of it, and equal outputs are stored once.
"""

import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from meshwright.ir import files

_CHUNK = 1 << 20


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """An output: the hash and the size of its file, or of the list of its files if it is a directory."""

    sha256: str
    num_bytes: int
    directory: bool = False


class DamagedError(Exception):
    """A stored output that is missing or changed; ``stored`` says which."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(f"{stored.sha256} is missing, or was changed")
        self.stored = stored


class OutputStore:
    """A directory of stored outputs. Several processes may use it at the same time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, stored: Stored) -> Path:
        """The file of an output, or of a directory's list."""
        return self.root / stored.sha256[:2] / stored.sha256

    def put(self, path: Path) -> Stored:
        """Store a file or a directory. Its files are moved."""
        if not path.is_dir():
            return self._put_file(path)
        parts = {
            str(file.relative_to(path)): self._put_file(file) for file in sorted(path.rglob("*")) if file.is_file()
        }
        return msgspec.structs.replace(self.put_bytes(msgspec.json.encode(parts)), directory=True)

    def put_bytes(self, data: bytes) -> Stored:
        """Store bytes as a file."""
        stored = Stored(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
        if not self.whole(stored):
            files.write_atomically(self.path(stored), data)
        return stored

    def _put_file(self, path: Path) -> Stored:
        source = path.resolve()
        stored = Stored(sha256=_hash(source), num_bytes=source.stat().st_size)
        target = self.path(stored)
        if self.whole(stored):
            return stored
        target.parent.mkdir(parents=True, exist_ok=True)
        if source != path.absolute():
            copy = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copyfile(source, copy)
            os.replace(copy, target)
        else:
            os.replace(path, target)
        return stored

    def whole(self, stored: Stored) -> bool:
        """Whether the output is there, with the contents that it had when it was stored."""
        path = self.path(stored)
        try:
            if path.stat().st_size != stored.num_bytes or _hash(path) != stored.sha256:
                return False
        except OSError:
            return False
        return not stored.directory or all(map(self.whole, self._parts(stored).values()))

    def is_at(self, stored: Stored, path: Path) -> bool:
        """Whether a path outside has the contents of the output, and nothing more."""
        if not stored.directory:
            return path.is_file() and _hash(path) == stored.sha256
        if not path.is_dir() or not self.whole(stored):
            return False
        digests = {str(file.relative_to(path)): _hash(file) for file in path.rglob("*") if file.is_file()}
        return digests == {name: part.sha256 for name, part in self._parts(stored).items()}

    def read(self, stored: Stored) -> bytes:
        """The contents of a file. Raise a DamagedError if it is missing or changed."""
        try:
            data = self.path(stored).read_bytes()
        except OSError:
            raise DamagedError(stored) from None
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise DamagedError(stored)
        return data

    def place(self, stored: Stored, target: Path, *, copy: bool = False) -> None:
        """Make the output appear at ``target``, as links to the stored files or as copies. Raise a DamagedError if it
        is missing or changed."""
        if not self.whole(stored):
            raise DamagedError(stored)
        if not stored.directory:
            self._place_file(stored, target, copy=copy)
            return
        target.mkdir(parents=True)
        for name, part in self._parts(stored).items():
            self._place_file(part, target / name, copy=copy)

    def _place_file(self, stored: Stored, target: Path, *, copy: bool) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if copy:
            shutil.copyfile(self.path(stored), target)
        else:
            target.symlink_to(self.path(stored).absolute())

    def _parts(self, stored: Stored) -> dict[str, Stored]:
        return msgspec.json.decode(self.path(stored).read_bytes(), type=dict[str, Stored])


def outside(path: Path) -> str:
    """The hash of a file or directory that is not stored."""
    if not path.is_dir():
        return _hash(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path)} {_hash(file)}\n".encode())
    return digest.hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
