"""Samples of a torch.utils.data.Dataset as bytes, so that they can be kept, written to disk and sent to other ranks."""

from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from meshwright.data.stores import Raw, Store, hash_of
from meshwright.errors import DataError
from meshwright.schedules.samples import Indices

_TENSOR, _ARRAY, _TUPLE = 1, 2, 3
_ALIGNED = 64


class Samples(Store):
    """The samples of a map-style dataset of torch.utils.data, of equal sizes as far as placement is concerned.

    A sample is a tensor, an array, a number, a text or bytes, or a dict, list or tuple of such.

    ``__getitem__`` must return equal values each time: what it returned once is kept and given again in later epochs.
    It must be safe in threads: several call it at once. Put random changes, such as augmentation, into the step.

    Raises:
        DataError: the dataset is empty or has no length, or a sample holds another kind of value.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.where = dataset, type(dataset).__name__
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            problem = "is no map-style dataset: it has no length, or no items by number"
            raise DataError(problem, where=self.where, remedy="give a Dataset with __len__ and __getitem__")

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._dataset)

    @cached_property
    def sizes(self) -> Indices:
        """The bytes of the first sample that can be read, for all."""
        return np.full(len(self), self._first[0] if len(self) else 1)

    @cached_property
    def _first(self) -> tuple[int, str]:
        """The bytes of the first sample that can be read, and their hash.

        Raises:
            DataError: there is none; the first sample's error.
        """
        errors: list[DataError] = []
        for index in range(len(self)):
            try:
                raw = self.read(index)
            except DataError as error:
                errors = errors or [error]
            else:
                return len(raw), hash_of(np.frombuffer(raw, np.uint8))
        raise errors[0] if errors else DataError("there are no samples", where=self.where, remedy="give at least one")

    def read(self, index: int) -> Raw:
        """Get a sample from the dataset, and encode it."""
        try:
            value = self._dataset[index]
        except DataError:
            raise
        except Exception as error:
            text = str(error).strip().splitlines()
            problem = f"cannot be read: {type(error).__name__}: {text[0] if text else ''}"
            remedy = "correct the dataset, or set skip_bad to go on without it"
            raise DataError(problem, where=self.name(index), remedy=remedy) from error
        return encode(value, self.name(index))

    def decode(self, index: int, raw: Raw) -> Any:
        """The sample that the bytes hold."""
        return decode(raw)

    def name(self, index: int) -> str:
        """The dataset and the number of the sample."""
        return f"{self.where}: sample {index}"

    def describe(self) -> str:
        """The dataset's class and length, with a hash of the first sample that can be read."""
        return f"{len(self)} samples of {self.where}, hash of the first {self._first[1]}"


def encode(value: Any, name: str) -> bytearray:
    """A sample as bytes: a table of its values in MessagePack, then the bytes of its tensors."""
    blobs: list[np.ndarray[Any, Any]] = []
    end = 0

    def place(array: np.ndarray[Any, Any]) -> int:
        nonlocal end
        begin = -(-end // _ALIGNED) * _ALIGNED
        blobs.append(array)
        end = begin + array.nbytes
        return begin

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            whole = value.detach().cpu().contiguous()
            begin = place(whole.reshape(-1).view(torch.uint8).numpy())
            return [_TENSOR, str(whole.dtype).removeprefix("torch."), list(whole.shape), begin]
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            whole_array = np.ascontiguousarray(value)
            begin = place(whole_array.reshape(-1).view(np.uint8))
            return [_ARRAY, whole_array.dtype.str, list(value.shape), begin]
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [_TUPLE if isinstance(value, tuple) else 0, [plain(each) for each in value]]
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        problem = f"holds a {type(value).__name__}, which cannot be kept as bytes"
        remedy = "let the dataset return tensors, arrays, numbers, texts, and dicts, lists or tuples of them"
        raise DataError(problem, where=name, remedy=remedy)

    table = msgspec.msgpack.encode(plain(value))
    first = -(-(8 + len(table)) // _ALIGNED) * _ALIGNED
    raw = bytearray(first + end)
    raw[:8] = len(table).to_bytes(8, "little")
    raw[8 : 8 + len(table)] = table
    content = np.frombuffer(raw, np.uint8)
    at = first
    for blob in blobs:
        at = first + -(-(at - first) // _ALIGNED) * _ALIGNED
        content[at : at + blob.nbytes] = blob
        at += blob.nbytes
    return raw


def decode(raw: Raw) -> Any:
    """The sample that ``encode`` turned into bytes. Its tensors and arrays share the bytes."""
    view = memoryview(raw)
    length = int.from_bytes(view[:8], "little")
    content = view[-(-(8 + length) // _ALIGNED) * _ALIGNED :]

    def value(table: Any) -> Any:
        if isinstance(table, dict):
            return {key: value(each) for key, each in table.items()}
        if not isinstance(table, list):
            return table
        if table[0] in (0, _TUPLE):
            items = [value(each) for each in table[1]]
            return tuple(items) if table[0] == _TUPLE else items
        kind, dtype, shape, begin = table
        if kind == _ARRAY:
            count = int(np.prod(shape))
            return np.frombuffer(content, np.dtype(dtype), count, begin).reshape(shape)
        exact: torch.dtype = getattr(torch, dtype)
        count = int(np.prod(shape))
        if count == 0:
            return torch.empty(shape, dtype=exact)
        return torch.frombuffer(content, dtype=exact, count=count, offset=begin).reshape(shape)

    return value(msgspec.msgpack.decode(view[8 : 8 + length]))
