"""What collectives of one kind have in common: one rank's steps, and the means by which they are carried out."""

import ctypes
import operator
import zlib
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.comm.compiled import compiled
from meshwright.comm.transport.base import MESSAGE_BYTES, Lane
from meshwright.schedules.collectives.steps import Steps, programs

REDUCE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
}
"""In place of the first. ``Tensor.add_`` takes less time than ``torch.add(..., out=...)`` where tensors are short."""
REDUCE_ARRAY: Mapping[str, Callable[[Any, Any], object]] = {
    "sum": operator.iadd,
    "max": lambda mine, theirs: np.maximum(mine, theirs, out=mine),
    "min": lambda mine, theirs: np.minimum(mine, theirs, out=mine),
}
ARRAY_TYPES: Mapping[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip
"""What numpy reduces as PyTorch does, and as fast."""
SHORT_BYTES = 2**14
"""A vector of ``ARRAY_TYPES`` of at most so many, in memory that ranks share, is copied and reduced by numpy, not by
PyTorch's dispatcher, which takes longer than what it dispatches."""
SLOTS = 4
"""Messages of a lane of shared memory that may not have been taken: one more than must be (``compiled.LAG``), for in
more of them long vectors go round more of the cache."""
AHEAD = 7
"""Messages to a peer that a collective sends when it starts, where some lanes of the group are wires."""
ARRAYS = 64
"""Vectors of which a kind of collective keeps the arrays."""
LABELS = 4096
"""Labels of which a kind of collective keeps what is said."""
LaneStep = tuple[int, Any, int, int, int]
"""A :class:`~meshwright.comm.compiled.Step` with the lane to its peer."""


class Kind:
    """What collectives of one kind have in common: the steps of this rank, and what they are called.

    ``first`` are the steps that may be done before all others, ``whole`` says that each is of the whole vector.
    ``tensors`` and, where it is short, ``arrays`` are the means by which it is carried out.
    """

    def __init__(
        self,
        rank: int,
        steps: Steps,
        dtype: torch.dtype,
        op: str,
        root: int,
        lanes: Mapping[int, Lane],
        *,
        expects: bool,
        in_arrays: bool,
    ) -> None:
        ahead = AHEAD if expects else SLOTS - 1
        found = compiled(rank, programs(steps)[rank], MESSAGE_BYTES // dtype.itemsize, ahead, expects=expects)
        self.steps: tuple[LaneStep, ...] = tuple((one.kind, lanes.get(one.peer), *one[2:]) for one in found.steps)
        self.first = tuple(self.steps[index] for index in found.ahead)
        early = set(found.ahead)
        self.rest = tuple(one for index, one in enumerate(self.steps) if index not in early)
        self.ahead, self.rest_puts, self.writes = found.ahead, found.rest_puts, found.writes
        self.lanes, self.num_first = tuple(lanes.values()) if expects else (), len(self.first)
        self.tensors = _Means(dtype, REDUCE[op], Tensor.copy_)
        short = in_arrays and dtype in ARRAY_TYPES and 0 < steps.space * dtype.itemsize <= SHORT_BYTES
        self.arrays = _arrays(dtype, op) if short else None
        self.whole = all(one[2:] == (0, steps.space, 0) for one in found.steps)
        text = f"{steps.operation} of {steps.length} x {str(dtype).removeprefix('torch.')}, {op}, {steps.algorithm}"
        self._text = text + (f", root {root}" if root else "")
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self.code = zlib.crc32(self._text.encode())
        self.said: dict[str, bytes] = {}

    def array(self, memory: Tensor) -> np.ndarray[Any, Any]:
        """The memory of a tensor as an array, valid while the tensor lives. Arrays are kept by address, for to make one
        takes longer than to reduce it."""
        address = memory.data_ptr()
        found = self._arrays.get(address)
        if found is None:
            assert self.arrays is not None
            if len(self._arrays) >= ARRAYS:
                self._arrays.clear()
            whole: Any = (ctypes.c_char * memory.nbytes).from_address(address)
            found = self._arrays[address] = np.frombuffer(whole, self.arrays.dtype)
        return found

    def say(self, label: str) -> bytes:
        """What such a collective is, in words; ``said`` keeps them."""
        if len(self.said) >= LABELS:
            self.said.clear()
        self.said[label] = words = (self._text + (f" ({label})" if label else "")).encode()
        return words


class _Means(NamedTuple):
    """In what messages are: tensors of a dtype or arrays of one; how they are reduced, and kept, in place of the first
    of two."""

    dtype: Any
    reduce: Callable[[Any, Any], object]
    keep: Callable[[Any, Any], object]


def _arrays(dtype: torch.dtype, op: str) -> _Means:
    """By numpy, in a context in which it does not warn of infinities and the like, or raise, as PyTorch does not. To
    enter a context takes a tenth of what ``np.errstate`` does."""
    quiet = copy_context()
    quiet.run(lambda: np.seterr(all="ignore"))
    return _Means(np.dtype(ARRAY_TYPES[dtype]), partial(quiet.run, REDUCE_ARRAY[op]), np.copyto)  # type: ignore[call-arg]
