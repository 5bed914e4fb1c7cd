"""The process group of the backend "meshwright": torch.distributed's calls, as operations of Meshwright's executor.

dist.all_reduce ──▶ MeshwrightGroup.allreduce ──▶ InOrder ──▶ operations.all_reduce ──▶ Collectives (step lists)
dist.send, recv ──▶ MeshwrightGroup.send      ──▶ Messages ──▶ lanes of shared memory
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from meshwright.comm.member import attend, leave, member
from meshwright.comm.process_group import operations
from meshwright.comm.process_group.identity import NamedGroup
from meshwright.comm.process_group.in_order import CollectiveWork, InOrder
from meshwright.comm.process_group.links import GroupConnections
from meshwright.comm.process_group.messages import Messages
from meshwright.comm.process_group.monitored import monitored_barrier
from meshwright.comm.process_group.other_devices import OtherDevices
from meshwright.comm.process_group.tensors import check, check_sizes, reduction_of
from meshwright.comm.process_group.work import GroupError
from meshwright.comm.transport.progress import RankStreams

_Tensors = Sequence[Tensor]
ALIKE = ("all_reduce", "broadcast", "barrier", "_all_gather_base", "_reduce_scatter_base", "reduce")
"""Collectives for which all ranks must give tensors of equal sizes."""


class MeshwrightGroup(NamedGroup):
    """This rank's end of a group. Threads may share it; all ranks must start the group's collectives in one order.

    ``ranks`` holds the numbers of the group's ranks in the world; ``rank`` counts within the group.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: tuple[int, ...], timeout_s: float, name: str) -> None:
        super().__init__(store, rank, len(ranks), name)
        self._timeout_s, self._num_monitored, self._process = timeout_s, 0, os.getpid()
        self._links = GroupConnections(store, rank, ranks, timeout_s)
        self._in_order = InOrder(self._links, f"group {name}")
        self._messages = Messages(self._links, self._in_order.check, f"group {name}", self.profiled_as)
        self._others = OtherDevices(store, rank, len(ranks), timeout_s)

    @property
    def _device_types(self) -> list[torch.device]:
        """The kinds of devices whose tensors the group carries."""
        return self._others.device_types(self)

    def _get_backend(self, device: torch.device) -> Any:
        """What carries the tensors of a device: this group for CPUs."""
        return self if torch.device(device).type == "cpu" else self._others.backend(self, torch.device(device).type)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long the ranks of the group wait for each other."""
        self._timeout_s = timeout.total_seconds()
        self._messages.timeout_s = self._timeout_s

    def shutdown(self) -> None:
        """Run the collectives that have been started, and leave the group. Nothing stays behind in the system."""
        self._in_order.close()
        if os.getpid() != self._process:
            return
        self._messages.close()
        self._others.shutdown()
        self._links.leave()
        leave(self)

    def abort(self) -> None:
        """Leave the group at once: what has been started fails."""
        self._in_order.abort()
        self._messages.close("the group was aborted")
        self._others.abort()

    def __del__(self) -> None:
        links = getattr(self, "_links", None)
        if links is not None:
            links.leave()

    # --- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: "_Tensors | Tensor", opts: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if (work := self._elsewhere("allreduce", tensors, tensors, opts or dist.AllreduceOptions())) is not None:
            return work
        check((), "all_reduce", written=tensors, sparse=True)
        reduction = reduction_of(getattr(opts, "reduceOp", opts or dist.ReduceOp.SUM), tensors, "all_reduce")
        steps = partial(operations.all_reduce, tensors=tensors, reduction=reduction, label=self._label)
        return self._start("all_reduce", steps, tensors, tensors, opts)

    allreduce_coalesced = allreduce

    def allgather(
        self, outputs: "Sequence[_Tensors] | _Tensors", inputs: "_Tensors | Tensor", opts: Any = None
    ) -> dist.Work:
        """Copy each rank's tensor into every rank's list."""
        values = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        lists = _lists(outputs)
        if (work := self._elsewhere("allgather", values, lists, values, opts or AllgatherOptions())) is not None:
            return work
        return self._all_gather_lists(lists, values, opts)

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Copy each rank's tensors into every rank's lists: ``outputs[r][i]`` is the i-th tensor of rank r."""
        by_tensor = [list(each) for each in zip(*outputs, strict=True)]
        return self._all_gather_lists(by_tensor, list(inputs), opts)

    def _all_gather_lists(self, lists: list[list[Tensor]], values: list[Tensor], opts: Any) -> dist.Work:
        what, written = "all_gather", [output for outputs in lists for output in outputs]
        check(values, what, written=written)
        check_sizes(len(lists), len(values), what, "the list of outputs")
        for outputs, value in zip(lists, values, strict=True):
            check_sizes(len(outputs), self.size(), what, "a list of outputs")
            check_sizes(value.numel(), outputs[self.rank()].numel(), what, "this rank's tensor")

        def steps(links: GroupConnections) -> None:
            for outputs, value in zip(lists, values, strict=True):
                operations.all_gather(links, outputs, value, self._label)

        return self._start(what, steps, lists, values, opts)

    def _allgather_base(self, output: Tensor, value: Tensor, opts: Any = None) -> dist.Work:
        """Concatenate the ranks' tensors."""
        return self.all_gather_single_coalesced([output], [value], opts)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Concatenate the ranks' tensors, for each output."""
        outputs, inputs, what = list(outputs), list(inputs), "all_gather_into_tensor"
        options = opts or AllgatherOptions()
        if (work := self._elsewhere("all_gather_single_coalesced", inputs, outputs, inputs, options)) is not None:
            return work
        for output, value in zip(outputs, inputs, strict=True):
            check((value,), what, written=(output,))
            check_sizes(output.numel(), self.size() * value.numel(), what, "the output")
        steps = partial(operations.all_gather_single, outputs=outputs, values=inputs, label=self._label)
        return self._start("_all_gather_base", steps, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: "_Tensors | Tensor", inputs: "Sequence[_Tensors] | _Tensors", opts: Any = None
    ) -> dist.Work:
        """Reduce the entries of a list; this rank gets its entry."""
        into = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        lists = _lists(inputs)
        options = self._reduce_options(opts)
        if (work := self._elsewhere("reduce_scatter", into, into, lists, options)) is not None:
            return work
        for output, values in zip(into, lists, strict=True):
            check(values, "reduce_scatter", written=(output,))
            check_sizes(len(values), self.size(), "reduce_scatter", "the list of inputs")
            check_sizes(output.numel(), values[self.rank()].numel(), "reduce_scatter", "the output")
        reduction = reduction_of(options.reduceOp, into, "reduce_scatter")

        def steps(links: GroupConnections) -> None:
            for output, values in zip(into, lists, strict=True):
                operations.reduce_scatter(links, output, values, reduction, self._label)

        return self._start("reduce_scatter", steps, into, [value for values in lists for value in values], options)

    def _reduce_scatter_base(self, output: Tensor, value: Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor; this rank gets its part."""
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Reduce tensors; this rank gets its part of each."""
        outputs, inputs, options, what = (
            list(outputs),
            list(inputs),
            self._reduce_options(opts),
            "reduce_scatter_tensor",
        )
        if (work := self._elsewhere("reduce_scatter_single_coalesced", inputs, outputs, inputs, options)) is not None:
            return work
        for output, value in zip(outputs, inputs, strict=True):
            check((value,), what, written=(output,))
            check_sizes(value.numel(), self.size() * output.numel(), what, "the input")
        reduction = reduction_of(options.reduceOp, inputs, what)
        steps = partial(
            operations.reduce_scatter_single, outputs=outputs, values=inputs, reduction=reduction, label=self._label
        )
        return self._start("_reduce_scatter_base", steps, outputs, inputs, options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, tensors: "_Tensors | Tensor", opts: Any = None) -> dist.Work:
        """Copy the root's tensors to all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        options = _rooted(dist.BroadcastOptions(), opts)
        if (work := self._elsewhere("broadcast", tensors, tensors, options)) is not None:
            return work
        check((), "broadcast", written=tensors)
        steps = partial(operations.broadcast, tensors=tensors, root=options.rootRank, label=self._label)
        return self._start("broadcast", steps, tensors, tensors, options)

    def reduce(self, tensors: "_Tensors | Tensor", opts: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place on the root."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        options = _rooted(dist.ReduceOptions(), opts)
        if (work := self._elsewhere("reduce", tensors, tensors, options)) is not None:
            return work
        check((), "reduce", written=tensors)
        reduction = reduction_of(options.reduceOp, tensors, "reduce")
        steps = partial(
            operations.reduce, tensors=tensors, root=options.rootRank, reduction=reduction, label=self._label
        )
        return self._start("reduce", steps, tensors, tensors, options)

    def gather(self, outputs: Any, inputs: "_Tensors | Tensor", opts: Any = None) -> dist.Work:
        """Copy each rank's tensor into the root's list."""
        (value,) = [inputs] if isinstance(inputs, Tensor) else inputs
        options = _rooted(dist.GatherOptions(), opts)
        if (work := self._elsewhere("gather", [value], outputs, [value], options)) is not None:
            return work
        into = _only_list(outputs)
        check((value,), "gather", written=into)
        if self.rank() == options.rootRank:
            check_sizes(len(into), self.size(), "gather", "the list of outputs")
        for output in into:
            check_sizes(output.numel(), value.numel(), "gather", "an output")
        steps = partial(operations.gather, outputs=into, value=value, root=options.rootRank, label=self._label)
        return self._start("gather", steps, into, [value], options)

    def scatter(self, outputs: "_Tensors | Tensor", inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the entries of the root's list to the ranks."""
        (output,) = [outputs] if isinstance(outputs, Tensor) else outputs
        options = _rooted(dist.ScatterOptions(), opts)
        if (work := self._elsewhere("scatter", [output], [output], inputs, options)) is not None:
            return work
        values = _only_list(inputs)
        check(values, "scatter", written=(output,))
        if self.rank() == options.rootRank:
            check_sizes(len(values), self.size(), "scatter", "the list of inputs")
        for value in values:
            check_sizes(value.numel(), output.numel(), "scatter", "an input")
        steps = partial(operations.scatter, output=output, values=values, root=options.rootRank, label=self._label)
        return self._start("scatter", steps, [output], values or [output], options)

    def all_to_all_single(
        self, output: Tensor, value: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Send rows to each rank: ``sent[r]`` and ``received[r]`` rows, or equal numbers if a list is empty."""
        options, what = opts or AllToAllOptions(), "all_to_all"
        if (work := self._elsewhere("all_to_all_single", [value], output, value, received, sent, options)) is not None:
            return work
        check((value,), what, written=(output,))
        counts = [_counts(tensor, splits, self.size(), what) for tensor, splits in ((output, received), (value, sent))]
        steps = partial(
            operations.all_to_all_single, output=output, value=value, received=counts[0], sent=counts[1],
            label=self._label,
        )  # fmt: skip
        return self._start("all_to_all", steps, [output], [value], options)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> dist.Work:
        """Send entry r of a list to each rank r."""
        outputs, inputs, what = list(outputs), list(inputs), "all_to_all"
        if (work := self._elsewhere("alltoall", inputs, outputs, inputs, opts or AllToAllOptions())) is not None:
            return work
        check(inputs, what, written=outputs)
        check_sizes(len(outputs), self.size(), what, "the list of outputs")
        check_sizes(len(inputs), self.size(), what, "the list of inputs")
        steps = partial(operations.all_to_all, outputs=outputs, values=inputs, label=self._label)
        return self._start(what, steps, outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have called this method."""
        return self._start("barrier", lambda links: links.collectives.barrier(label=self._label), [], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called this method. Rank 0 names the ranks that have not within ``timeout``.

        Raises:
            GroupError: a rank has not come.
        """
        self._in_order.check("monitored_barrier")
        seconds = (
            timeout.total_seconds() if isinstance(timeout, timedelta) else -1.0 if timeout is None else float(timeout)
        )
        self._num_monitored += 1
        monitored_barrier(
            self._links, self._num_monitored, seconds if seconds >= 0 else self._timeout_s, wait_all_ranks
        )

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: _Tensors, rank: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group."""
        (tensor,) = tensors
        if (work := self._elsewhere("send", [tensor], [tensor], rank, tag)) is not None:
            return work
        check((tensor,), "send")
        return self._messages.send(tensor, rank, tag)

    def recv(self, tensors: _Tensors, rank: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group."""
        (tensor,) = tensors
        if (work := self._elsewhere("recv", [tensor], [tensor], rank, tag)) is not None:
            return work
        check((), "recv", written=(tensor,))
        return self._messages.receive(tensor, rank, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank of the group; the returned work knows from which."""
        (tensor,) = tensors
        check((), "recv", written=(tensor,))
        return self._messages.receive(tensor, None, tag)

    # --- how an operation starts --------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        """The group in errors about a collective."""
        return f"group {self._name}"

    def _start(
        self, what: str, steps: Callable[[GroupConnections], object], value: Any, shapes: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """Start a collective. A profiler sees it as it sees gloo's, from now until it is complete."""
        timeout_s = opts.timeout.total_seconds() if opts is not None and hasattr(opts, "timeout") else -1.0
        work = CollectiveWork(what, steps, value, self._in_order, timeout_s if timeout_s >= 0 else self._timeout_s)
        work.profile(f"{self.profiled_as}:{what}", shapes)
        self._number += 1
        work.record = self._record(what, shapes)
        self._in_order.start(work, handed_over=getattr(opts, "asyncOp", True))
        return work

    def _record(self, what: str, tensors: Sequence[Tensor]) -> tuple[RankStreams, int] | None:
        """Record a collective in this rank's flight recorder, which the world's first collective makes."""
        if dist.group.WORLD is None or attend() is None:
            return None
        state, num = member(self), sum(tensor.numel() for tensor in tensors)
        dtype = tensors[0].dtype if tensors else None
        event = state.record(self, what, num, dtype, self._label, is_alike=what in ALIKE, ranks=self._links.ranks)
        return state.progress, event

    def _elsewhere(self, method: str, tensors: _Tensors, *args: Any) -> Any:
        """The work of the backend that carries tensors of another device than CPUs; None for CPUs."""
        if not tensors or tensors[0].device.type == "cpu" or not self._others.has(self, tensors[0].device.type):
            return None
        backend = self._others.backend(self, tensors[0].device.type)
        if method in ("all_gather_single_coalesced", "reduce_scatter_single_coalesced"):
            base = backend._allgather_base if method.startswith("all") else backend._reduce_scatter_base
            return [base(output, value, args[2]) for output, value in zip(args[0], args[1], strict=True)][-1]
        return getattr(backend, "alltoall_base" if method == "all_to_all_single" else method)(*args)

    def _reduce_options(self, opts: Any) -> Any:
        if isinstance(opts, dist.ReduceScatterOptions):
            return opts
        options = dist.ReduceScatterOptions()
        if opts is not None:
            options.reduceOp = opts
        return options


def _rooted(options: Any, opts: Any) -> Any:
    """The options of an operation with a root, which may be given as its number alone."""
    if opts is None:
        return options
    if isinstance(opts, int):
        options.rootRank = opts
        return options
    return opts


def _lists(outputs: Any) -> list[list[Tensor]]:
    """A list of lists of tensors. A single list of tensors counts as a list with this one entry."""
    return [list(outputs)] if isinstance(outputs[0], Tensor) else [list(each) for each in outputs]


def _only_list(lists: Any) -> list[Tensor]:
    """The list of tensors in a list of lists, as roots give it; empty on other ranks."""
    lists = list(lists)
    return lists if lists and isinstance(lists[0], Tensor) else list(lists[0]) if lists else []


def _counts(tensor: Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """The elements for each rank, from numbers of rows. Without numbers, rows are divided equally."""
    splits = list(splits)
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise GroupError(f"{rows} rows cannot be divided equally", where=what, remedy="give the splits' sizes")
        splits = [rows // size] * size
    check_sizes(len(splits), size, what, "the list of splits")
    check_sizes(sum(splits), rows, what, "the sum of splits")
    width = tensor.numel() // rows if rows else 0
    return [split * width for split in splits]
