"""Stores for tests: samples in memory that count their reads, and files on disk."""

import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.data.ahead import PrefetchLoader
from meshwright.data.stores import Raw, Store
from meshwright.errors import DataError
from meshwright.schedules.samples import Indices


class Counted(Store):
    """Samples whose bytes are their number; ``reads`` counts how often each was read, ``bad`` cannot be read."""

    where = "counted"

    def __init__(self, num_samples: int, size: int = 8, bad: frozenset[int] = frozenset()) -> None:
        self._size, self._bad = size, bad
        self.reads = [0] * num_samples
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.reads)

    @property
    def sizes(self) -> Indices:
        return np.full(len(self), self._size)

    def read(self, index: int) -> Raw:
        with self._lock:
            self.reads[index] += 1
        if index in self._bad:
            raise DataError("cannot be read: Input/output error", where=self.name(index), remedy="set skip_bad")
        return bytearray(index.to_bytes(self._size, "little"))

    def decode(self, index: int, raw: Raw) -> Any:
        assert int.from_bytes(raw, "little") == index
        return torch.tensor(index)

    def name(self, index: int) -> str:
        return f"counted/{index}"

    def describe(self) -> str:
        return f"{len(self)} numbers"


def in_one_process(count: int, make: Any) -> list[PrefetchLoader]:
    """The loaders of ``count`` ranks that have met; ``make(shard)`` makes one."""
    loaders = [make((index, count)) for index in range(count)]
    introductions = [loader.introduce() for loader in loaders]
    for loader in loaders:
        loader.meet(introductions)
    return loaders


def image_folder(folder: Path, per_class: int = 4, side: int = 6) -> Path:
    """Images of two classes, as .png files."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def shard(path: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """A tar file of the files of samples."""
    with tarfile.open(path, "w") as file:
        for key, files in samples.items():
            for suffix, content in files.items():
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    return path


def npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()
