"""Folders of Hugging Face: weights in safetensors files, an index of several files, and the model's config.

    folder/
      config.json
      model.safetensors.index.json       {"weight_map": {"embed.weight": "model-00001-of-00002.safetensors", ...}}
      model-00001-of-00002.safetensors   length of the header, header (JSON: dtype, shape, place), numbers

Reading uses the library of safetensors, which maps files and reads slices only. It writes only tensors that are all in
memory, so a file is written here, tensor by tensor.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.ir import files
from meshwright.runtime.chunk_files import numbers_of

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
MAX_FILE_BYTES = 5 * 10**9
"""Largest size of a file of a folder, as in Hugging Face's ``save_pretrained``. A larger tensor has its own file."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Weight:
    """A whole tensor to be written. ``load`` returns it on the CPU."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
    folder: Path, weights: Sequence[Weight], config: Mapping[str, Any] | None, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a folder that ``from_pretrained`` loads, one tensor in memory at a time. The files appear when they are
    complete, the index and the config last.

    Raises:
        CheckpointError: the folder holds weights already, or a dtype has no name in the format.
        OSError: the folder cannot be written.
    """
    if taken := [entry.name for entry in folder.glob("*.safetensors*")] if folder.is_dir() else []:
        problem = f"the folder holds weights already ({min(taken)})"
        raise CheckpointError(problem, where=f"{folder}", remedy="choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    groups = _by_file(weights, max_file_bytes)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = [SINGLE] if len(groups) == 1 else names
    for name, group in zip(names, groups, strict=True):
        _write_file(folder / name, group)
    if len(groups) > 1:
        places = {weight.name: name for name, group in zip(names, groups, strict=True) for weight in group}
        total = sum(weight.num_bytes for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        files.write_atomically(folder / INDEX, json.dumps(index, indent=2).encode())
    if config is not None:
        files.write_atomically(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())


def _by_file(weights: Iterable[Weight], max_file_bytes: int) -> list[list[Weight]]:
    groups: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if groups[-1] and filled + weight.num_bytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(weight)
        filled += weight.num_bytes
    return groups


def _write_file(path: Path, weights: Sequence[Weight]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in weights:
        if weight.dtype not in _NAMES:
            problem = f"{weight.dtype} has no name in safetensors"
            raise CheckpointError(problem, where=f"tensor {weight.name}", remedy="give another dtype=")
        end = position + weight.num_bytes
        header[weight.name] = {
            "dtype": _NAMES[weight.dtype], "shape": list(weight.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in weights:
            value = weight.load()
            if tuple(value.shape) != weight.shape:
                raise CheckpointError(f"has shape {list(value.shape)}", where=f"tensor {weight.name}")
            file.write(numbers_of(value.to(weight.dtype)))


class SafetensorsSource:
    """The weights of a folder of Hugging Face, or of one safetensors file. Slices are read, whole tensors never.

    Attributes:
        num_bytes: the bytes that were read.

    Raises:
        CheckpointError: there are no such weights, or a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self.num_bytes = 0
        self._where = path
        if path.is_file():
            self._folder, names = path.parent, [path.name]
        elif (path / INDEX).is_file():
            self._folder, names = path, sorted(set(_weight_map(path / INDEX).values()))
        else:
            self._folder, names = path, [SINGLE]
        self._file_of: dict[str, str] = {}
        for name in names:
            self._file_of.update(dict.fromkeys(self._opened(name).keys(), name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def names(self) -> set[str]:
        """The names of its tensors."""
        return {*self._file_of}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._opened(self._file_of[name]).get_slice(name).get_shape())

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A block of a tensor."""
        try:
            if not sizes:
                value: Tensor = self._opened(self._file_of[name]).get_tensor(name)
            else:
                slices = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
                value = self._opened(self._file_of[name]).get_slice(name)[slices]
        except Exception as error:
            raise self._damaged(self._file_of[name], error) from error
        self.num_bytes += value.nbytes
        return value

    def _opened(self, name: str) -> Any:
        if name in self._files:
            return self._files[name]
        try:
            from safetensors import safe_open
        except ImportError:
            remedy = "pip install 'meshwright[safetensors]'"
            raise CheckpointError("the package safetensors is missing", where=f"{self._where}", remedy=remedy) from None
        path = self._folder / name
        if name != Path(name).name or not path.is_file():
            problem = "there is no such file" if self._folder.is_dir() else "there is no such folder"
            remedy = f"give a folder with {SINGLE} or {INDEX}, and all files that it names"
            raise CheckpointError(problem, where=f"{path}", remedy=remedy)
        try:
            self._files[name] = self._open.enter_context(safe_open(path, framework="pt"))
        except OSError:
            raise
        except Exception as error:
            raise self._damaged(name, error) from error
        return self._files[name]

    def _damaged(self, name: str, error: Exception) -> CheckpointError:
        problem = f"damaged: {type(error).__name__}: {error}"
        return CheckpointError(problem, where=f"{self._folder / name}", remedy="download or copy it again")


def _weight_map(path: Path) -> dict[str, str]:
    try:
        files_by_name = json.loads(path.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in files_by_name.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        remedy = "download or copy it again"
        raise CheckpointError("is no index of safetensors files", where=f"{path}", remedy=remedy) from None
