"""Checks the tensors of an operation before it starts, so that a mistake is an error on the rank that made it."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.process_group.work import GroupError

_INTEGERS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64
)  # fmt: skip
_BITS = ("and", "or", "xor")
_ORDERED = ("max", "min")
_NAMES = {
    "SUM": "sum", "AVG": "mean", "PRODUCT": "product", "MIN": "min", "MAX": "max", "BAND": "and", "BOR": "or",
    "BXOR": "xor", "PREMUL_SUM": "sum",
}  # fmt: skip


def reduction_of(op: Any, tensors: Sequence[Tensor], what: str) -> tuple[str, Any]:
    """The executor's name of a ``ReduceOp``, and the factor of PREMUL_SUM (else None).

    Raises:
        GroupError: tensors of this dtype have no such reduction.
    """
    kind = getattr(op, "op", op)
    name = _NAMES[str(kind).rpartition(".")[2]]
    for tensor in tensors:
        dtype = tensor.dtype
        if name in _BITS and dtype not in _INTEGERS:
            raise GroupError(f"cannot reduce {dtype} by bitwise {name}", where=what, remedy="reduce integers or bools")
        if name in _ORDERED and dtype.is_complex:
            raise GroupError(f"complex numbers have no {name}", where=what, remedy="reduce torch.view_as_real(tensor)")
        if name == "mean" and dtype == torch.bool:
            raise GroupError("bools have no mean", where=what, remedy="convert the tensor to a float")
    factor = None
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.factor
        factor = factor[0] if isinstance(factor, (list, tuple)) else factor
    return name, factor


def check(tensors: Iterable[Tensor], what: str, *, written: Sequence[Tensor] = (), sparse: bool = False) -> None:
    """Check the tensors that an operation reads and those that it writes (``written``).

    Raises:
        GroupError: a tensor is not on the CPU, or sparse; dtypes differ; a written tensor has elements that share
            memory, or two of them overlap.
    """
    dtype: torch.dtype | None = None
    for tensor in (*tensors, *written):
        if tensor.device.type != "cpu":
            raise GroupError(
                f"a tensor is on {tensor.device}, and the backend meshwright carries tensors of CPUs",
                where=what,
                remedy='make the group with a backend for each device, such as "cpu:meshwright,cuda:nccl"',
            )
        if tensor.layout != torch.strided and not (sparse and tensor.layout == torch.sparse_coo):
            raise GroupError(f"a tensor is {tensor.layout}", where=what, remedy="use dense tensors")
        if dtype is not None and tensor.dtype != dtype:
            raise GroupError(f"tensors of {dtype} and {tensor.dtype}", where=what, remedy="use one dtype")
        dtype = tensor.dtype
    for tensor in written:
        if not tensor.is_contiguous() and not tensor.is_sparse and shares_elements(tensor):
            raise GroupError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements that share memory",
                where=what,
                remedy="write to a tensor of its own memory, such as tensor.contiguous()",
            )
    if len(written) > 1:
        _check_apart(written, what)


def check_sizes(actual: int, wanted: int, what: str, tensor_name: str) -> None:
    """Raise an error if a number of elements is wrong.

    Raises:
        GroupError: ``actual`` is not ``wanted``.
    """
    if actual != wanted:
        raise GroupError(
            f"{tensor_name} has {actual} elements, not {wanted}", where=what, remedy="check the tensors' shapes"
        )


def shares_elements(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may share memory: sorted by stride, a dim steps into another one."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def overlaps(first: Tensor, second: Tensor) -> bool:
    """Whether the memory of two contiguous tensors overlaps."""
    begin, end = first.data_ptr(), first.data_ptr() + first.nbytes
    return begin < second.data_ptr() + second.nbytes and second.data_ptr() < end


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor in a row: its own memory if it is contiguous, else a copy. Writing to them does not
    count as a change for autograd, as with torch.distributed's own backends."""
    tensor = tensor.data
    return tensor.view(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)


def _check_apart(written: Sequence[Tensor], what: str) -> None:
    """Check that contiguous tensors do not overlap."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in written
        if tensor.numel() and not tensor.is_sparse and tensor.is_contiguous()
    )
    if any(former[1] > latter[0] for former, latter in pairwise(spans)):
        raise GroupError("two tensors to be written overlap", where=what, remedy="give each its own memory")
