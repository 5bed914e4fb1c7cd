"""MPI's own collectives in a group, through mpi4py, in a program started by ``mpirun``."""

import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.transport.base import UnderWay, Work
from meshwright.comm.transport.progress import RankStreams
from meshwright.errors import RankError

LOOKS, LONGEST_S = 1000, 0.0005
"""How often a request is tested without a pause, and the longest pause after that in seconds."""


def is_there() -> bool:
    """Whether torch.distributed and MPI have the same ranks, in the same order. This function does not import mpi4py:
    the code that starts the ranks (``runtime/launch.py``) has done so."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not dist.is_initialized():
        return False
    world = module.COMM_WORLD
    return bool(world.size == dist.get_world_size() and world.rank == dist.get_rank())


class Mpi:
    """Starts MPI's collectives in a group. The methods are called like those of ``comm/collectives.py``. All ranks of
    the group must start the same collectives in the same order.

    Raises:
        RankError: the ranks were not started by MPI.
    """

    def __init__(self, group: dist.ProcessGroup, streams: RankStreams) -> None:
        if not is_there():
            raise RankError(
                "a plan wants MPI's collectives, and the ranks were not started by MPI",
                where=f"rank {dist.get_rank()}",
                remedy="start them by mpirun with mpi4py installed, or calibrate again without MPI",
            )
        self._mpi: Any = sys.modules["mpi4py.MPI"]
        self._streams = streams
        world = self._mpi.COMM_WORLD
        self._ranks = world.Create_group(world.Get_group().Incl(dist.get_process_group_ranks(group)))

    def all_reduce(self, value: Tensor, op: str = "sum", algorithm: str = "mpi", label: str = "") -> Work:
        """Start to reduce a contiguous tensor in place (``MPI_Iallreduce``)."""
        request = self._ranks.Iallreduce(self._mpi.IN_PLACE, self._buffer(value), self._op(op))
        return UnderWay(partial(self._wait, request), value)

    def reduce_scatter(
        self, value: Tensor, into: Tensor, op: str = "sum", algorithm: str = "mpi", label: str = ""
    ) -> Work:
        """Start to reduce a tensor ``[size, ...]`` and write this rank's row to ``into``
        (``MPI_Ireduce_scatter_block``)."""
        request = self._ranks.Ireduce_scatter_block(self._buffer(value), self._buffer(into), self._op(op))
        return UnderWay(partial(self._wait, request), value, into)

    def all_gather(self, value: Tensor, into: Tensor, algorithm: str = "mpi", label: str = "") -> Work:
        """Start to collect every rank's ``value`` in ``into``, a tensor ``[size, ...]`` (``MPI_Iallgather``)."""
        request = self._ranks.Iallgather(self._buffer(value), self._buffer(into))
        return UnderWay(partial(self._wait, request), value, into)

    def _wait(self, request: Any) -> None:
        """Wait for a request. MPI's own wait would let nothing else of this rank move, and could not be ended."""
        looks = 0
        while not request.Test():
            looks += 1
            if looks > LOOKS:
                time.sleep(min(self._streams.move(), LONGEST_S))

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, op.upper())

    def _buffer(self, value: Tensor) -> Any:
        if value.dtype in (torch.bfloat16, torch.float16) or value.device.type != "cpu":
            raise RankError(
                f"MPI does not reduce {str(value.dtype).removeprefix('torch.')} on {value.device.type}",
                where="algorithm mpi",
                remedy="choose another algorithm for this axis",
            )
        return value.detach().numpy()
