"""The state that collectives of one kind share: one rank's steps, and the functions that reduce and copy.

Collectives are of one kind if operation, algorithm, length, dtype, reduction, root and counts are equal.
"""

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
    "max": lambda target, message: torch.maximum(target, message, out=target),
    "min": lambda target, message: torch.minimum(target, message, out=target),
    "product": Tensor.mul_,
    "and": Tensor.bitwise_and_,
    "or": Tensor.bitwise_or_,
    "xor": Tensor.bitwise_xor_,
}
"""Functions that reduce their second tensor into the first. For short tensors, ``Tensor.add_`` is faster than
``torch.add``."""
REDUCE_ARRAY: Mapping[str, Callable[[Any, Any], object]] = {
    "sum": operator.iadd,
    "max": lambda target, message: np.maximum(target, message, out=target),
    "min": lambda target, message: np.minimum(target, message, out=target),
    "product": operator.imul,
    "and": operator.iand,
    "or": operator.ior,
    "xor": operator.ixor,
}
ARRAY_TYPES: Mapping[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip
"""The dtypes whose reductions by numpy have the same results as PyTorch's and are as fast."""
SHORT_BYTES = 2**14
"""In shared memory, numpy copies and reduces vectors of ``ARRAY_TYPES`` up to this size: PyTorch's dispatcher would
take longer than the copy or reduction."""
SLOTS = 4
"""The number of messages for which a lane of shared memory has room: one more than the ``compiled.LAG`` + 1 messages
that it needs. With more slots, long vectors would use more of the cache."""
AHEAD = 7
"""Upper limit on the messages to a peer that a collective sends at its start, if a lane of the group is a
``TorchLane``."""
ARRAYS = 64
"""Upper limit on the numpy arrays that a ``Kind`` caches."""
UNKNOWN = -1
"""The length of a collective if no rank knows the lengths of all parts."""
LABELS = 4096
"""Upper limit on the descriptions that a ``Kind`` caches, one for each label."""
LaneStep = tuple[int, Any, int, int, int]
"""The fields of a :class:`~meshwright.comm.compiled.CompiledStep`, with the lane in place of the peer's number."""


class Named:
    """The description of collectives of one kind. ``code`` is a number for messages' tags."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.code = zlib.crc32(text.encode())
        self.descriptions: dict[str, bytes] = {}

    def say(self, label: str) -> bytes:
        """The description of a collective of this kind with this label; ``descriptions`` caches it."""
        if len(self.descriptions) >= LABELS:
            self.descriptions.clear()
        self.descriptions[label] = words = (self._text + (f" ({label})" if label else "")).encode()
        return words


class Kind(Named):
    """The state that collectives of one kind share: the steps of this rank, and their description in errors.

    ``first`` holds the steps that may run before all others. ``whole`` tells whether every step covers the whole
    vector. ``tensors`` holds the functions that reduce and copy tensors. For short vectors, ``arrays`` holds the same
    functions for numpy arrays; else it is None. If ``length`` is ``UNKNOWN``, the description has no length.
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
        length: int | None = None,
    ) -> None:
        ahead = AHEAD if expects else SLOTS - 1
        program = compiled(rank, programs(steps)[rank], MESSAGE_BYTES // dtype.itemsize, ahead, expects=expects)
        self.steps: tuple[LaneStep, ...] = tuple(
            (step.kind, lanes.get(step.peer), *step[2:5]) for step in program.steps
        )
        self.first = tuple(self.steps[index] for index in program.ahead)
        early = set(program.ahead)
        self.rest = tuple(step for index, step in enumerate(self.steps) if index not in early)
        self.ahead, self.rest_puts, self.writes = program.ahead, program.rest_puts, program.writes
        self.lanes, self.num_first = tuple(lanes.values()) if expects else (), len(self.first)
        self.tensors = _Means(dtype, REDUCE[op], Tensor.copy_)
        short = in_arrays and dtype in ARRAY_TYPES and 0 < steps.space * dtype.itemsize <= SHORT_BYTES
        self.arrays = _arrays(dtype, op) if short else None
        self.whole = all(step[2:5] == (0, steps.space, 0) for step in program.steps)
        elements = str(dtype).removeprefix("torch.")
        if length != UNKNOWN:
            elements = f"{steps.length} x {elements}"
        text = f"{steps.operation} of {elements}, {op}, {steps.algorithm}"
        super().__init__(text + (f", root {root}" if root else ""))
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}

    def array(self, memory: Tensor) -> np.ndarray[Any, Any]:
        """The memory of a tensor as a numpy array, valid while the tensor lives. Arrays are cached by address, because
        making an array takes longer than reducing it."""
        address = memory.data_ptr()
        array = self._arrays.get(address)
        if array is None:
            assert self.arrays is not None
            if len(self._arrays) >= ARRAYS:
                self._arrays.clear()
            whole: Any = (ctypes.c_char * memory.nbytes).from_address(address)
            array = self._arrays[address] = np.frombuffer(whole, self.arrays.dtype)
        return array


class _Means(NamedTuple):
    """The functions that process messages, as tensors or as numpy arrays, and the dtype of the messages. ``reduce``
    reduces its second argument into the first; ``keep`` copies its second argument to the first."""

    dtype: Any
    reduce: Callable[[Any, Any], object]
    keep: Callable[[Any, Any], object]


def _arrays(dtype: torch.dtype, op: str) -> _Means:
    """Reduction and copy by numpy. The reduction runs in a context without floating-point warnings and errors, as in
    PyTorch. Entering this context takes a tenth of the time of ``np.errstate``."""
    quiet = copy_context()
    quiet.run(lambda: np.seterr(all="ignore"))
    return _Means(np.dtype(ARRAY_TYPES[dtype]), partial(quiet.run, REDUCE_ARRAY[op]), np.copyto)  # type: ignore[call-arg]
