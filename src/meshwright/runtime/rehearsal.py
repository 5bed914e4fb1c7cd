"""A rank of a dry run: its operators run on fake tensors of a device that is not there, and are watched.

Three things stand in for the device. Fake tensors have its name, shapes and dtypes, but no values. The ``fake`` process
group has the ranks, but sends nothing. ``RehearsedKind`` has streams and events. ``Rehearsal`` sees every operator
below autograd, and notes

- where the host waits for the device: reads of values, copies that are not asynchronous, shapes that depend on values;
- operators with tensors of both host and device, operators without a kernel on the device, and kernels that do not
  wait for the copy of a tensor that they read;
- the messages and collectives that the rank starts, and its waits for them, in order;
- the bytes of all tensors on the device.

After a finding the rank goes on as if the value were zero (true, if it is a truth value), so that one run finds all.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.record import DeviceOperation, place
from meshwright.ir.dry_run import Finding, FindingKind
from meshwright.runtime.fake_operators import (
    BY_VALUES,
    DEVICE,
    UnfollowableError,
    fake_mode,
    is_view,
    kernel_of,
    marks,
    results,
    selects_by_mask,
    tensors_in,
    workspace_bytes,
    written,
)
from meshwright.runtime.rehearsed_line import running_line
from meshwright.runtime.rehearsed_memory import DeviceMemory, GraphPool
from meshwright.runtime.rehearsed_work import Done, Mark
from meshwright.runtime.unguarded import Unguarded
from meshwright.schedules.rendezvous import Awaited, Message, StartedOperation, communicator
from meshwright.torch_private import (
    EnableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    Work,
    pytree,
    resolve_process_group,
)

aten = torch.ops.aten

CAPABILITY = (9, 0)
"""The CUDA capability of the fake device, for which torch.distributed asks: that of an H100."""
SET_UP = "set-up"
_DEVICE_OF = torch.ops.prim.device.default
_COPIES = (aten._to_copy.default, aten.copy_.default)


@dataclass
class _CountedFinding:
    finding: Finding
    times: int = 1


class Rehearsal(TorchDispatchMode):
    """Watches the operators of one rank, on top of a ``FakeTensorMode``. ``moment`` names what the rank does now."""

    def __init__(self, rank: int, dtypes: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.rank, self._dtypes = rank, dtypes
        self.moment = SET_UP
        self.stream: dict[str, list[StartedOperation | Awaited]] = {}
        self.memory = DeviceMemory()
        self._findings: dict[tuple[str, ...], _CountedFinding] = {}
        self._number = 0
        self._batch: list[Message] | None = None
        self._works: list[Work] = []
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._copies = False
        self._beside: list[int] | None = None  # what a stream for the ends of operations waits for
        self.marks: list[Mark] = []
        self._captured: list[StartedOperation | Awaited] | None = None
        self._kernels = 0
        self.on_their_way: set[int] = set()  # storages that copies write, and for which kernels do not wait yet
        self.unfinished: dict[int, str] = {}  # storages that collectives write, and that nobody has waited for

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def findings(self) -> list[Finding]:
        """What was found, each with the number of times."""
        return [
            Finding(
                each.finding.kind, each.finding.what, each.finding.where, each.finding.moment, (self.rank,), each.times
            )
            for each in self._findings.values()
        ]

    def note(self, kind: FindingKind, what: str, where: str = "") -> None:
        """Note a finding at the code that runs now."""
        if kind == "wait" and self.moment == SET_UP:
            return
        finding = Finding(kind, what, where or running_line(), self.moment, (self.rank,))
        key = (finding.kind, finding.what, finding.where, finding.moment)
        if key in self._findings:
            self._findings[key].times += 1
        else:
            self._findings[key] = _CountedFinding(finding)

    def begin(self, moment: str) -> None:
        """Begin the next part of the run: its peak of memory is counted anew."""
        self.moment = moment
        self.memory.peak = self.memory.held
        self._works.clear()
        self.marks.clear()
        self.unfinished.clear()

    # --- operators ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # PyTorch asks for it several times in an operator
        kwargs = kwargs or {}
        if function.namespace == "c10d":
            return self._communicate(function, args)
        kernel = kernel_of(function)
        if kernel is not None:
            with self, EnableTorchFunction(), Unguarded():
                return kernel(*args, **kwargs)
        values = list(tensors_in((*args, *kwargs.values())))
        devices = {value.device.type for value in values}
        if function is aten._local_scalar_dense.default:
            return self._read(args[0])
        if DEVICE.type in devices and (function in BY_VALUES or selects_by_mask(function, args)):
            self.note("wait", f"{function}: its result depends on values on the device")
            largest = BY_VALUES.get(function)
            if largest is None:
                raise UnfollowableError(f"{function}: the shape of its result depends on values on the device")
            return largest(*args, **kwargs)
        if DEVICE.type in devices:
            self._kernels += not is_view(function)
            self._check_kernel(function, values)
        if self.unfinished and not is_view(function):
            for name in {self.unfinished[key] for key in map(_storage, values) if key in self.unfinished}:
                self.note("error", f"{function} has a tensor that {name} still writes")
        if self.on_their_way and not self._copies and any(_storage(value) in self.on_their_way for value in values):
            self.note("error", f"{function} reads a tensor that a copy still writes")
        if function in _COPIES:
            self._check_copy(function, args, kwargs)
        elif len(devices) > 1 and function.namespace in ("aten", "prims") and self._is_mixed(values):
            self.note("mixed devices", f"{function}: {' and '.join(_tensor_text(value) for value in values)}")
            args, kwargs = pytree.tree_map_only(Tensor, lambda value: value.to(DEVICE), (args, kwargs))
        if DEVICE.type in devices and (names := written(function)) is not None:  # nothing is allocated
            given = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | kwargs
            return given[names[0]] if len(names) == 1 else tuple(given[name] for name in names) or None
        result = results(function, args, kwargs)
        for value in tensors_in((result,)):
            if value.device.type == DEVICE.type:
                self.memory.hold(value)
                if self._copies:
                    self.on_their_way.add(_storage(value))
        if function.namespace == "symm_mem":
            self._multiply_together(function, *args)
        self.memory.need(workspace_bytes(function, args))
        return result

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Work that is started in this block runs on a stream for copies."""
        if self._captured is not None:
            self.note("error", "a copy on another stream within a graph")
        self._copies = True
        try:
            yield
        finally:
            self._copies = False

    def mark(self) -> Mark:
        """Mark the current stream in a trace."""
        if self._captured is not None:
            self.note("error", "an event for a trace within a graph")
        self.marks.append(Mark("copies" if self._copies else "kernels", self._number))
        return self.marks[-1]

    def mark_end(self, lane: str, operations: Sequence[DeviceOperation]) -> Mark:
        """Mark the end of operations on a stream of its own, which waits for them; the kernels do not."""
        self._beside = []
        for operation in operations:
            operation.block_current_stream()
        self.marks.append(Mark(f"ends of {lane}", self._number, tuple(self._beside)))
        self._beside = None
        return self.marks[-1]

    @contextmanager
    def capturing(self, pool: GraphPool) -> Iterator[list[StartedOperation | Awaited]]:
        """Work that is started in this block is captured as a graph, with memory from a pool. Yields the operations of
        torch.distributed that the graph starts and awaits."""
        self._captured, self.memory.taken = [], pool
        try:
            yield self._captured
        finally:
            self._captured = self.memory.taken = None

    def _read(self, value: Tensor) -> Any:
        """A number that the host reads: a known constant, or a stand-in for what only the device knows."""
        if value.device.type == DEVICE.type:
            self.note("wait", f"the host reads a value of {_tensor_text(value)}")
        elif isinstance(value, FakeTensor) and value.constant is not None:
            return value.constant.item()
        elif not isinstance(value, FakeTensor):
            return value.item()
        return True if value.dtype == torch.bool else 0.0 if value.is_floating_point() else 0

    def _check_kernel(self, function: Any, values: list[Tensor]) -> None:
        name, of_cpus, only_floats = marks(function)
        if of_cpus:
            self.note("no kernel", f"{name} is an operator of CPUs")
        if only_floats:
            dtype = values[0].dtype
            text = str(dtype).removeprefix("torch.")
            if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
                self.note("no kernel", f"{name} has no kernel for {text}")
            elif self._dtypes and dtype.is_floating_point and text not in self._dtypes:
                self.note("no kernel", f"{name}: the device does not compute in {text}")

    def _check_copy(self, function: Any, args: Any, kwargs: Any) -> None:
        """Note a copy between host and device for which the host waits: one that is not asked to be asynchronous, or
        whose memory on the host is not pinned."""
        if function is aten.copy_.default:
            target, source = args[0].device, args[1]
            asynchronous = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
            host = args[0] if target.type == "cpu" else source
        else:
            source, host = args[0], args[0]
            target = torch.device(kwargs.get("device") or source.device)
            asynchronous = bool(kwargs.get("non_blocking")) and target.type != "cpu"
        if source.device.type == target.type or DEVICE.type not in (source.device.type, target.type):
            return
        if function is aten.copy_.default and source.device.type == "cpu" and not source.dim():
            return  # a number, which travels with the kernel
        if not (asynchronous and self._is_pinned(host)):
            way = "to the host" if target.type == "cpu" else "to the device, not asynchronously from pinned memory"
            self.note("wait", f"a copy of {_tensor_text(source)} {way}")

    def _is_pinned(self, value: Tensor) -> bool:
        return any(value.untyped_storage()._cdata == storage._cdata for storage in self.pinned)

    @staticmethod
    def _is_mixed(values: list[Tensor]) -> bool:
        """Whether tensors of the host that have dims meet tensors of the device."""
        return any(value.device.type == "cpu" and value.dim() for value in values)

    # --- communication -----------------------------------------------------------------------------------------------

    def _communicate(self, function: Any, args: Any) -> Any:
        """Note an operation of torch.distributed in place of running it."""
        name = function.name().partition("::")[2].partition(".")[0].strip("_")
        position = next(index for index, value in enumerate(args) if isinstance(value, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(args[position])
        ranks = tuple(dist.get_process_group_ranks(group))
        value = pytree.tree_leaves(args[:position])[0]
        dtype, label = str(value.dtype).removeprefix("torch."), f"{name} {_moment(self.moment)}"
        if value.device.type != DEVICE.type and name != "barrier":
            self.note("mixed devices", f"{name} of {_tensor_text(value)}")
        if name in ("send", "recv"):
            if self._captured is not None:
                self.note("error", f"{name} within a graph")
            message = Message(name == "send", ranks[args[position + 1]], dtype, value.numel())
            if self._batch is not None:
                self._batch.append(message)
                return Work.boxed(self._work(self._number, lambda: None))
            pair = communicator(sorted((self.rank, message.peer)), f"of:{group.group_name}")
            return Work.boxed(self._start(pair, label, messages=(message,)))
        most = max(item.numel() for item in pytree.tree_leaves(args[:position]))
        started = self._start(self._name(group), label, ranks=ranks, kind=name, dtype=dtype, elements=most)
        if name != "barrier":
            started.writes = {_storage(item): name for item in pytree.tree_leaves(args[0])}
            self.unfinished |= started.writes
        work = Work.boxed(started)
        return work if len(function._schema.returns) == 1 else (args[0], work)

    def _multiply_together(self, function: Any, left: Tensor, *others: Any) -> None:
        """Note a product in memory that devices share: a collective among the kernels, and the memory, which PyTorch
        keeps."""
        name, ranks = str(others[-1]), tuple(dist.get_process_group_ranks(resolve_process_group(others[-1])))
        shared = left.nbytes
        if function is torch.ops.symm_mem.fused_matmul_reduce_scatter.default:
            shared = 2 * left.shape[0] // len(ranks) * others[0].shape[1] * left.itemsize
        before = self.memory.shared.get(name, 0)
        if shared > before and self._captured is not None:
            self.note("error", f"{function} needs more shared memory within a graph")
        self.memory.shared[name] = max(before, shared)
        kind, dtype = function.name().partition("::")[2], str(left.dtype).removeprefix("torch.")
        label = f"{kind} {_moment(self.moment)}"
        group = communicator(ranks, "shared memory")
        self._start(group, label, ranks=ranks, kind=kind, dtype=dtype, elements=left.numel()).wait()

    def _start(self, communicator: str, label: str, **what: Any) -> Any:
        number, before = self.number(), self._kernels
        self.started(StartedOperation(number, communicator, label, **what))
        return self._work(number, lambda: self.started(Awaited(number, self._kernels - before)))

    def number(self) -> int:
        """The number of the next operation of torch.distributed."""
        self._number += 1
        return self._number - 1

    def started(self, entry: StartedOperation | Awaited) -> None:
        """Note an operation of torch.distributed, or a wait for it, in the stream of this moment or in a graph."""
        stream = self.stream.setdefault(self.moment, []) if self._captured is None else self._captured
        stream.append(entry)

    @staticmethod
    def _name(group: dist.ProcessGroup) -> str:
        """The name of a group's communicator, equal on all its ranks. Only of the whole world there are several groups,
        which all ranks make in the same order."""
        ranks = dist.get_process_group_ranks(group)
        return communicator(ranks, f"of:{group.group_name}" if len(ranks) == dist.get_world_size() else "")

    def _work(self, number: int, waited: Callable[[], None]) -> Work:
        def ended(work: Done) -> None:
            if self._beside is not None:
                self._beside.append(work.number)
                return
            for key in work.writes:
                self.unfinished.pop(key, None)
            waited()

        work = Done(number, ended)
        self._works.append(work)  # torch.distributed does not keep it
        return work

    def batch(self, operations: list[Any]) -> list[Any]:
        """Stands in for ``dist.batch_isend_irecv``: the messages are one operation."""
        self._batch = []
        for each in operations:
            side = "group_dst" if each.op.__name__ == "isend" else "group_src"
            each.op(each.tensor, group=each.group, **{side: each.group_peer})
        messages, self._batch = tuple(self._batch), None
        group = operations[0].group
        return [self._start(self._name(group), f"batch {_moment(self.moment)}", messages=messages)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs in this block, on fake tensors and without autograd: a graph on fake CUDA tensors would end
        the process."""
        with (
            fake_mode(), torch.no_grad(), self, Unguarded(),
            mock.patch.object(dist, "batch_isend_irecv", self.batch),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITY),
        ):  # fmt: skip
            yield


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _tensor_text(value: Tensor) -> str:
    return (
        f"{'x'.join(map(str, value.shape)) or 'one'} {str(value.dtype).removeprefix('torch.')} on {value.device.type}"
    )


def _moment(moment: str) -> str:
    here = place()
    return f"in {moment}" + f", {here}" * (here is not None)
