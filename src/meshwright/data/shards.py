"""Tar shards in the manner of WebDataset: the files of a sample share a name, and lie next to each other."""

import glob
import io
import logging
import os
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.data.stores import IMAGE_SUFFIXES, Decode, Raw, Store, decode_image, decoded, hash_of, read_span
from meshwright.errors import DataError
from meshwright.schedules.samples import Indices

log = logging.getLogger("meshwright")


class ShardFile(NamedTuple):
    """A file in a shard: its suffix, and where its content lies from the begin of its sample's span."""

    suffix: str
    begin: int
    size: int


class Shards(Store):
    """Samples in tar files. The index of each shard (names, positions) is made once from its headers; a sample is then
    read alone.

    Files ``a/001.jpg`` and ``a/001.cls`` make the sample ``a/001``, a dict of ``jpg`` and ``cls``. Decoders by suffix
    turn contents into values; by default images become float32 [3, height, width], ``cls`` a number, ``npy`` a tensor.

    Args:
        paths: tar files, or globs.
        decoders: decoders by suffix, beside the usual ones.
        skip_bad: leave out what follows the damage of a truncated shard; the log and ``truncated`` name it.

    Raises:
        DataError: no file matches, or a shard is unreadable, truncated, compressed or has a file of an unknown kind.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        decoders: Mapping[str, Decode] | None = None,
        *,
        skip_bad: bool = False,
    ) -> None:
        patterns = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        self._paths = [path for pattern in patterns for path in _matches(os.fspath(pattern))]
        self.where = self._paths[0] if len(self._paths) == 1 else f"{len(self._paths)} shards"
        self._decoders = {**_USUAL, **(decoders or {})}
        truncated: list[str] = []
        self.truncated = truncated
        self._keys: list[str] = []
        self._members: list[tuple[ShardFile, ...]] = []
        places: list[tuple[int, int, int]] = []
        for number, path in enumerate(self._paths):
            for key, begin, members in self._index(path, truncated if skip_bad else None):
                self._keys.append(key)
                self._members.append(members)
                places.append((number, begin, members[-1].begin + members[-1].size))
        if not places:
            raise DataError("there are no samples", where=self.where, remedy="give tar files that hold files")
        self._places = np.array(places)

    def _index(self, path: str, truncated: list[str] | None) -> list[tuple[str, int, tuple[ShardFile, ...]]]:
        """The samples of a shard: name, begin and members of each. A damaged shard is added to ``truncated``, or
        refused if that is None."""
        samples: list[tuple[str, int, tuple[ShardFile, ...]]] = []
        begin, members, last = 0, list[ShardFile](), ""
        try:
            with tarfile.open(path, "r:") as shard:
                for info in shard:
                    folder, _, name = info.name.rpartition("/")
                    stem, dot, suffix = name.partition(".")
                    if not info.isfile() or not stem or not dot:
                        continue
                    key, suffix = f"{folder}/{stem}".lstrip("/"), suffix.lower()
                    if suffix not in self._decoders:
                        problem = f"nothing decodes files of suffix {suffix!r}"
                        remedy = f"give decoders={{{suffix!r}: function}}; known: {', '.join(self._decoders)}"
                        raise DataError(problem, where=f"{path}: {info.name}", remedy=remedy)
                    if key != last and members:
                        samples.append((last, begin, tuple(members)))
                        members = []
                    if not members:
                        begin, last = info.offset_data, key
                    members.append(ShardFile(suffix, info.offset_data - begin, info.size))
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=path, remedy="correct the path") from None
        except tarfile.TarError as error:
            if truncated is None:
                remedy = "write it again as a tar file without compression, or set skip_bad to use what is whole"
                raise DataError(f"is truncated, or no tar file: {error}", where=path, remedy=remedy) from None
            truncated.append(path)
            members = []  # the last sample may lack a file
            log.warning("%s is truncated, or no tar file (%s): its first %d samples are used, no others", path,
                        error, len(samples))  # fmt: skip
        if members:
            samples.append((last, begin, tuple(members)))
        return samples

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._keys)

    @property
    def sizes(self) -> Indices:
        """The bytes of each sample, from the first of its files to the end of the last."""
        sizes: Indices = self._places[:, 2]
        return sizes

    def read(self, index: int) -> Raw:
        """Read the files of a sample together."""
        number, begin, size = map(int, self._places[index])
        try:
            return read_span(self._paths[number], begin, size)
        except DataError as error:
            raise DataError(error.problem, where=self.name(index), remedy=error.remedy) from None

    def decode(self, index: int, raw: Raw) -> Any:
        """The values of a sample's files, by suffix."""
        view = memoryview(raw)
        return {
            suffix: decoded(self._decoders[suffix], view[begin : begin + size], f"{self.name(index)}.{suffix}")
            for suffix, begin, size in self._members[index]
        }

    def name(self, index: int) -> str:
        """The shard and the sample."""
        return f"{self._paths[int(self._places[index, 0])]}: {self._keys[index]}"

    def describe(self) -> str:
        """The number of samples, with a hash of their names and places."""
        return f"{len(self)} samples in {len(self._paths)} shards, hash {hash_of(self._places, *self._keys)}"


def _matches(pattern: str) -> list[str]:
    paths = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
    if not paths:
        raise DataError("no file matches", where=pattern, remedy="correct the path or glob")
    return paths


def _number(content: memoryview) -> int:
    return int(bytes(content))


def _array(content: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))


def _text(content: memoryview) -> str:
    return bytes(content).decode()


_USUAL: dict[str, Decode] = {
    **{suffix.removeprefix("."): decode_image for suffix in IMAGE_SUFFIXES},
    "cls": _number, "npy": _array, "txt": _text,
}  # fmt: skip
