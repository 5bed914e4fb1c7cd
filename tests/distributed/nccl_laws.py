"""A process group of CPUs that keeps NCCL's laws: what would hang between GPUs hangs here, with real tensors.

    law                                                           here
    a send ends when its peer receives it, not before             the receiver asks for each message
    a communicator runs one operation at a time, in order         one thread runs a communicator's operations
    unbatched messages of two ranks share one communicator        one for each pair of ranks in a group
    collectives and batches of a group share one communicator     one for each group
    a batch is one operation, whose messages progress together    its messages run side by side; it ends with the last
    coalesced collectives are one operation                       they run in order; it ends with the last
    a wait holds the rank's later kernels and operations          the program waits

gloo carries the bytes. Within a group of its own, its messages have tags by communicator, so that they do not mix.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.device_channel import device_channels
from meshwright.comm.process_group.identity import NamedGroup
from meshwright.runtime import steps

NAME = "nccl-laws"
ASK, DATA = 0, 1
Run = Callable[[], None]


class LawfulWork(dist.Work):
    """An operation that a rank has started. ``error`` is why it failed."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self.ended, self._timeout_s = threading.Event(), timeout_s
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(self._timeout_s):
            raise TimeoutError(f"an operation has not ended after {self._timeout_s} s")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Communicator:
    """Runs the operations of one communicator on this rank, one after the other."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started: queue.SimpleQueue[tuple[LawfulWork, Run] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def start(self, run: Run) -> LawfulWork:
        work = LawfulWork(self._timeout_s)
        self._started.put((work, run))
        return work

    def end(self) -> None:
        self._started.put(None)

    def _serve(self) -> None:
        while (entry := self._started.get()) is not None:
            work, run = entry
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                work.error = error
            work.ended.set()


class LawfulGroup(NamedGroup):
    """This rank's end of a group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(store, rank, size, name)
        carrier = dist.PrefixStore("carrier", store)
        self.timeout_s = timeout.total_seconds()
        self._gloo: Any = dist.ProcessGroupGloo(carrier, rank, size, timeout)
        self._communicators: dict[tuple[int, ...], Communicator] = {}

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.end()
        self._gloo = None

    abort = shutdown

    def _start(self, key: tuple[int, ...], run: Run) -> LawfulWork:
        if key not in self._communicators:
            self._communicators[key] = Communicator(self.timeout_s)
        return self._communicators[key].start(run)

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> LawfulWork:
        return self._start(self._pair(peer), partial(self._send, tensors[0], peer, self._tags(self._pair(peer))))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> LawfulWork:
        return self._start(self._pair(peer), partial(self._recv, tensors[0], peer, self._tags(self._pair(peer))))

    def batch(self, messages: Sequence[tuple[bool, Tensor, int]]) -> LawfulWork:
        """Start messages as one operation. Each is (whether it is sent, tensor, peer)."""
        sides: dict[tuple[bool, int], list[Run]] = {}
        for sends, tensor, peer in messages:
            run = partial(self._send if sends else self._recv, tensor, peer, self._tags(()))
            sides.setdefault((sends, peer), []).append(run)  # messages of a direction keep their order
        return self._start((), partial(_side_by_side, list(sides.values())))

    def _pair(self, peer: int) -> tuple[int, int]:
        low, high = sorted((self.rank(), peer))
        return low, high

    def _tags(self, key: tuple[int, ...]) -> int:
        """The first of a communicator's two tags for messages."""
        return 2 * bool(key)

    def _send(self, tensor: Tensor, peer: int, tags: int) -> None:
        self._gloo.recv([torch.empty(1)], peer, tags + ASK).wait()
        self._gloo.send([tensor], peer, tags + DATA).wait()

    def _recv(self, tensor: Tensor, peer: int, tags: int) -> None:
        self._gloo.send([torch.empty(1)], peer, tags + ASK).wait()
        self._gloo.recv([tensor], peer, tags + DATA).wait()

    # --- collectives -------------------------------------------------------------------------------------------------

    def _collective(self, name: str, *args: Any) -> LawfulWork:
        return self._start((), lambda: getattr(self._gloo, name)(*args).wait())

    def allreduce(self, tensors: Any, opts: Any = None) -> LawfulWork:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._collective("allreduce", given, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> LawfulWork:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._collective("broadcast", given, opts or dist.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LawfulWork:
        return self._collective("allgather", outputs, inputs)

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any = None) -> LawfulWork:
        return self._start((), partial(self._gather, output, value))

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = None) -> LawfulWork:
        return self._start((), partial(self._scatter_sum, output, value, opts.reduceOp))

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> LawfulWork:
        return self._as_one([partial(self._gather, *pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> LawfulWork:
        return self._as_one([partial(self._scatter_sum, *pair) for pair in zip(outputs, inputs, strict=True)])

    def _as_one(self, runs: Sequence[Run]) -> LawfulWork:
        """Start several collectives as one operation."""

        def run() -> None:
            for each in runs:
                each()

        return self._start((), run)

    def _gather(self, output: Tensor, value: Tensor) -> None:
        self._gloo.allgather([list(output.view(self.size(), -1))], [value.reshape(-1)]).wait()

    def _scatter_sum(self, output: Tensor, value: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        total = value.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._gloo.allreduce([total], options).wait()
        output.copy_(total.view(self.size(), *output.shape)[self.rank()])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, value: Tensor, received: Any, sent: Any, opts: Any = None
    ) -> LawfulWork:
        return self._collective("alltoall_base", output, value, list(received), list(sent))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> LawfulWork:
        return self._collective("barrier")


def _side_by_side(sides: Sequence[Sequence[Run]]) -> None:
    """Run the messages of all sides at the same time; return when all have ended. Raise the first error."""
    errors: list[BaseException] = []

    def ran(side: Sequence[Run]) -> None:
        try:
            for run in side:
                run()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=ran, args=(side,), daemon=True) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LawfulGroup:
    return LawfulGroup(store, rank, size, timeout, "")


def _batch(operations: Sequence[dist.P2POp]) -> list[LawfulWork]:
    """Stands in for ``dist.batch_isend_irecv``, which batches only in groups of PyTorch's own class."""
    group: Any = operations[0].group
    return [group.batch([(each.op is dist.isend, each.tensor, each.group_peer) for each in operations])]


@contextmanager
def nccl_laws(timeout_s: float | None = None) -> Iterator[None]:
    """New groups keep NCCL's laws, and pipelines send by the channels of accelerators, while this block runs. An
    operation fails after ``timeout_s`` (default: as the group says)."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu"])
    make = dist.new_group

    def new_group(ranks: Any = None, **options: Any) -> Any:
        group = make(ranks, **(options | {"backend": NAME}))
        if isinstance(group, LawfulGroup) and timeout_s is not None:
            group.timeout_s = timeout_s
        return group

    def channels(peers: Any, device: torch.device) -> Any:
        assert dist.group.WORLD is not None
        return device_channels(dist.group.WORLD, set(peers), device)

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "batch_isend_irecv", _batch),
        mock.patch.object(steps, "channels", channels),
    ):
        yield
