"""Stores: samples that lie in files, found by their number and read one by one, from any thread."""

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.errors import DataError
from meshwright.schedules.samples import Indices

Raw = bytearray | memoryview
"""The bytes of a sample as they lie in storage."""
Decode = Callable[[memoryview], Any]
"""Turns the bytes of a file into a value of a sample, such as a tensor."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class Store(ABC):
    """Samples by number. ``where`` names the data in error messages, ``truncated`` the files whose rest was left out
    when they were listed."""

    where: str
    truncated: Sequence[str] = ()

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @property
    @abstractmethod
    def sizes(self) -> Indices:
        """The bytes of each sample in storage [n], by which samples are placed."""

    @abstractmethod
    def read(self, index: int) -> Raw:
        """Read a sample's bytes from the file system.

        Raises:
            DataError: it is unreadable, truncated or gone; the file is named.
        """

    @abstractmethod
    def decode(self, index: int, raw: Raw) -> Any:
        """The sample that the bytes hold: a tensor, or a dict, tuple or list of tensors and numbers.

        Raises:
            DataError: the bytes cannot be decoded; the file is named.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Where a sample lies, such as the path of its file."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the data in words: equal descriptions mean equal data, as far as can be told without reading it."""


class PartOfStore(Store):
    """Some samples of another store."""

    def __init__(self, store: Store, index: Indices) -> None:
        self._store, self._index = store, index
        self.where, self.truncated = store.where, store.truncated

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._index)

    @cached_property
    def sizes(self) -> Indices:
        """The bytes of each sample in storage."""
        return self._store.sizes[self._index]

    def read(self, index: int) -> Raw:
        """Read a sample's bytes."""
        return self._store.read(int(self._index[index]))

    def decode(self, index: int, raw: Raw) -> Any:
        """The sample that the bytes hold."""
        return self._store.decode(int(self._index[index]), raw)

    def name(self, index: int) -> str:
        """Where a sample lies."""
        return self._store.name(int(self._index[index]))

    def describe(self) -> str:
        """Describe the samples in words."""
        key = hash_of(self._index)
        return f"{len(self)} samples (hash {key}) of: {self._store.describe()}"


class Images(Store):
    """Files of images in folders: the samples of a class lie in a folder of its own, which may have folders inside.

    A sample is a dict of ``image`` (what ``decode`` returns; default: ``decode_image``) and ``label``, the number of
    its class in alphabetical order. The folder is listed once; ``classes`` has the names.

    Args:
        folder: the folder whose folders are the classes.
        decode: turns a file's bytes into a value.
        suffixes: the suffixes of files that are samples.

    Raises:
        DataError: the folder cannot be listed, or has no such files.
    """

    def __init__(
        self, folder: str | os.PathLike[str], decode: Decode | None = None, suffixes: Sequence[str] = IMAGE_SUFFIXES
    ) -> None:
        self._folder, self.where = Path(folder), str(folder)
        self._decode = decode or decode_image
        try:
            self.classes = sorted(entry.name for entry in os.scandir(self._folder) if entry.is_dir())
            images = [
                (path, label, path.stat().st_size)
                for label, name in enumerate(self.classes)
                for path in sorted((self._folder / name).rglob("*"))
                if path.suffix.lower() in suffixes and path.is_file()
            ]
        except OSError as error:
            raise DataError(
                f"cannot be listed: {error.strerror}", where=str(error.filename or folder), remedy="give a folder"
            ) from None
        if not images:
            raise DataError(
                f"there are no files with suffix {', '.join(suffixes)} in folders of it",
                where=self.where,
                remedy="give a folder that has a folder of files for each class",
            )
        self._names = [str(path.relative_to(self._folder)) for path, _, _ in images]
        self._labels = np.array([label for _, label, _ in images])
        self._sizes = np.array([size for _, _, size in images])

    def __len__(self) -> int:
        """The number of files."""
        return len(self._names)

    @property
    def sizes(self) -> Indices:
        """The bytes of each file, as they were listed."""
        return self._sizes

    def read(self, index: int) -> Raw:
        """Read a file."""
        return read_span(self.name(index), 0, int(self._sizes[index]), whole=True)

    def decode(self, index: int, raw: Raw) -> Any:
        """The image and its label."""
        return {"image": decoded(self._decode, raw, self.name(index)), "label": int(self._labels[index])}

    def name(self, index: int) -> str:
        """The path of a file."""
        return str(self._folder / self._names[index])

    def describe(self) -> str:
        """The folder's files, with a hash of their names and sizes."""
        return f"{len(self)} files in {len(self.classes)} folders, hash {hash_of(self._sizes, *self._names)}"


class Tokens(Store):
    """Windows of a file of tokens, which is never read whole: ``tokens`` [s] and ``targets`` [s], int64.

    Each window begins where the window before it ends, as in ``TextLoader``.

    Args:
        path: a .npy file of a vector of integers, or a file of integers of ``dtype`` alone.
        sequence_length: s, in tokens.
        dtype: the type of a token in a file that is not .npy.

    Raises:
        DataError: the file cannot be read, is truncated, holds no integers, or is too short for a window.
    """

    def __init__(self, path: str | os.PathLike[str], sequence_length: int, dtype: str = "uint16") -> None:
        self.where, self._length = str(path), sequence_length
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}", where=self.where, remedy="give at least 1")
        try:
            size = os.path.getsize(path)
            self._begin, self._dtype, count = _npy(path) if self.where.endswith(".npy") else (0, np.dtype(dtype), None)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=self.where, remedy="give a file") from None
        except (ValueError, TypeError) as error:
            raise DataError(
                f"is not a file of tokens ({error})", where=self.where, remedy="write it with numpy.save, or give dtype"
            ) from None
        if self._dtype.kind not in "iu":
            raise DataError(f"holds {self._dtype}, not integers", where=self.where, remedy="give a file of token ids")
        whole, rest = divmod(size - self._begin, self._dtype.itemsize)
        if rest or (count is not None and count != whole):
            announced = f"{count:,} tokens are announced, " if count is not None else ""
            problem = f"is truncated: {announced}{whole:,} tokens and {rest} bytes are there"
            raise DataError(problem, where=self.where, remedy="write the file again, or give its dtype")
        self._count = (whole - 1) // sequence_length
        if self._count < 1:
            problem = f"has {whole:,} tokens, but a window of {sequence_length} needs {sequence_length + 1}"
            raise DataError(problem, where=self.where, remedy="give more tokens, or a smaller sequence_length")

    def __len__(self) -> int:
        """The number of windows."""
        return self._count

    @cached_property
    def sizes(self) -> Indices:
        """The bytes of each window."""
        return np.full(self._count, (self._length + 1) * self._dtype.itemsize)

    def read(self, index: int) -> Raw:
        """Read a window."""
        begin = self._begin + index * self._length * self._dtype.itemsize
        return read_span(self.where, begin, int(self.sizes[index]))

    def decode(self, index: int, raw: Raw) -> Any:
        """The tokens of a window, and those that follow them."""
        window = torch.from_numpy(np.frombuffer(raw, self._dtype).astype(np.int64))
        return {"tokens": window[:-1], "targets": window[1:]}

    def name(self, index: int) -> str:
        """The file and the window."""
        return f"{self.where}: window {index}"

    def describe(self) -> str:
        """The number and type of the tokens, and a hash of the first window."""
        key = hash_of(np.frombuffer(self.read(0), np.uint8))
        return f"{self._count} windows of {self._length} tokens of {self._dtype}, hash of the first {key}"


def _npy(path: str | os.PathLike[str]) -> tuple[int, np.dtype[Any], int]:
    """The offset of the data in a .npy file, their type and their number."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if len(shape) != 1:
            raise ValueError(f"shape {shape}, not a vector")
        return file.tell(), dtype, shape[0]


def decode_image(content: memoryview, side: int = 0) -> torch.Tensor:
    """An image as float32 [3, height, width] from 0 to 1; with ``side``, scaled to this height and width."""
    from PIL import Image, UnidentifiedImageError  # an optional dependency

    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise ValueError("it is no image") from None
    with image:
        whole = image.convert("RGB")
        pixels = np.array(whole.resize((side, side)) if side else whole)
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def read_span(path: str, begin: int, size: int, *, whole: bool = False) -> bytearray:
    """Read ``size`` bytes of a file into a new buffer, without another copy; ``whole``: they are the whole file.

    Raises:
        DataError: the file cannot be read, is gone, or has not that many bytes.
    """
    buffer = bytearray(size)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            filled = fill(descriptor, buffer, begin)
            length = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        remedy = "put it back, or set skip_bad to go on without it"
        raise DataError("has vanished since the data were listed", where=path, remedy=remedy) from None
    except OSError as error:
        remedy = "make it readable, or set skip_bad to go on without it"
        raise DataError(f"cannot be read: {error.strerror}", where=path, remedy=remedy) from None
    if filled < size or (whole and length != size):
        problem = f"has {length:,} bytes, but had {size:,} when the data were listed"
        if not whole:
            problem = f"is truncated: {filled:,} of {size:,} bytes from byte {begin:,} on"
        raise DataError(problem, where=path, remedy="write it again, or set skip_bad to go on without it")
    return buffer


def fill(descriptor: int, buffer: bytearray, begin: int) -> int:
    """Read from an open file into a buffer, from a position on; the number of bytes that were there."""
    filled, view = 0, memoryview(buffer)
    while filled < len(buffer):
        count = os.preadv(descriptor, [view[filled:]], begin + filled)
        if count == 0:
            break
        filled += count
    return filled


def decoded(decode: Decode, raw: Raw, name: str) -> Any:
    """What ``decode`` returns.

    Raises:
        DataError: it raises any error; the file is named.
    """
    try:
        return decode(memoryview(raw))
    except ImportError:
        raise DataError(
            "pillow, which decodes images, is not installed", where=name,
            remedy="pip install 'meshwright[demo]', or give decode=",
        ) from None  # fmt: skip
    except Exception as error:
        text = str(error).strip().splitlines()
        raise DataError(
            f"cannot be decoded: {text[0] if text else type(error).__name__}",
            where=name,
            remedy="write it again, give another decode=, or set skip_bad to go on without it",
        ) from error


def hash_of(values: Any, *names: str) -> str:
    """A hash of an array and names."""
    key = hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=8)
    for name in names:
        key.update(name.encode(errors="surrogateescape") + b"\0")
    return key.hexdigest()
