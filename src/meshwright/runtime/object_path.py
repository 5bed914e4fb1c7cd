"""Places of checkpoints: directories of this machine, and object stores that fsspec reaches (``s3://bucket/run``).

Code that reads and writes checkpoints is written for ``pathlib.Path``. An ``ObjectPath`` has the methods that it calls.
A store has objects, and no directories: one exists while an object lies under its name. An object appears as a whole
when it is closed, so that a manifest is replaced in one move there too.
"""

import errno
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from meshwright.errors import CheckpointError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


class ObjectStatus(NamedTuple):
    """What is known of an object."""

    st_size: int


class ObjectPath:
    """The place of an object, or of several under one name, in a store.

    Args:
        url: such as ``s3://bucket/runs/gpt`` or ``memory://runs/gpt``.

    Raises:
        CheckpointError: the package of the store is missing, or the store cannot be reached.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @cached_property
    def _store(self) -> Any:
        return self._opened[0]

    @cached_property
    def _key(self) -> str:
        return str(self._opened[1]).rstrip("/")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        try:
            store, key = fsspec.url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{error}", where=self._url, remedy="install the store's package") from error
        return store, key

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"ObjectPath({self._url!r})"

    def __fspath__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """The place without the last part of its name."""
        return ObjectPath(self._url.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is an object of this name, or under it."""
        return bool(self._store.exists(self._key))

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return bool(self._store.isfile(self._key))

    def is_dir(self) -> bool:
        """Whether there are objects under this name."""
        return bool(self._store.isdir(self._key))

    def is_symlink(self) -> bool:
        """False: a store has no links."""
        return False

    def iterdir(self) -> Iterator["ObjectPath"]:
        """The places one level below this one."""
        for key in self._store.ls(self._key, detail=False):
            if str(key).rstrip("/") != self._key:
                yield self / str(key).rstrip("/").rpartition("/")[2]

    def stat(self) -> ObjectStatus:
        """The size of the object."""
        return ObjectStatus(int(self._store.size(self._key)))

    def open(self, mode: str = "rb") -> IO[bytes]:
        """The object as a file."""
        file: IO[bytes] = self._store.open(self._key, mode)
        return file

    def read_bytes(self) -> bytes:
        """The whole object."""
        data: bytes = self._store.cat_file(self._key)
        return data

    def write_bytes(self, data: bytes) -> None:
        """Replace the object in one move."""
        self._store.pipe_file(self._key, data)

    def read_text(self) -> str:
        """The whole object as text."""
        return self.read_bytes().decode()

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing to do in most stores; a directory in those that have them."""
        self._store.makedirs(self._key, exist_ok=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        try:
            self._store.rm_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Forget the directory, in stores that have them."""
        if any(True for _ in self.iterdir()) if self.exists() else False:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
        if self.exists():
            self._store.rmdir(self._key)


AnyPath = Path | ObjectPath


def place_of(path: "str | os.PathLike[str]") -> AnyPath:
    """The place that a text or a path names."""
    text = os.fspath(path)
    return ObjectPath(text) if _URL.match(text) else Path(path)
