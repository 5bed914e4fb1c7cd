"""torch.distributed's own collectives in a group: by gloo, or by NCCL between GPUs."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Native:
    """Starts torch.distributed's collectives in a group. The methods are called like those of
    ``comm/collectives.py``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, value: Tensor, op: str, algorithm: str, label: str) -> Any:
        """Start to reduce a tensor in place."""
        return dist.all_reduce(value, _OPS[op], self._group, async_op=True)

    def reduce_scatter(self, value: Tensor, into: Tensor, op: str, algorithm: str, label: str) -> Any:
        """Start to reduce a tensor ``[size, ...]`` and write this rank's row ``[...]`` to ``into``."""
        return dist.reduce_scatter_single(into.view(-1), value.view(-1), _OPS[op], self._group, async_op=True)

    def all_gather(self, value: Tensor, into: Tensor, algorithm: str, label: str) -> Any:
        """Start to collect every rank's ``value`` in ``into``, a tensor ``[size, ...]``."""
        return dist.all_gather_single(into.view(-1), value.view(-1), self._group, async_op=True)

    def all_gather_each(self, values: list[Tensor], into: list[Tensor]) -> Any:
        """Start to collect every rank's parts of several tensors, between accelerators: one operation, which reads and
        writes the tensors where they are."""
        return self._group.all_gather_single_coalesced([each.view(-1) for each in into], values)

    def reduce_scatter_each(self, values: list[Tensor], into: list[Tensor]) -> Any:
        """Start to sum the rows of several tensors ``[size, ...]``, and to write this rank's row of each, as
        ``all_gather_each``."""
        return self._group.reduce_scatter_single_coalesced(into, [each.view(-1) for each in values])
