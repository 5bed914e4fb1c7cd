"""CUDA graphs on CPUs: operators that are recorded once, and that run again on the memory that they had.

Nothing runs while a graph is captured, as on a GPU: its results hold no values before a replay, and nothing that exists
is written. A read by the host, a shape that depends on values, and a message between ranks are refused.

A pool's memory is used again. So after each replay, all memory of its pool that was free when the graph had been
captured is filled with NaN: a value that was kept there too long spoils the losses.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.ops import collectives
from meshwright.runtime.cuda_graphs import Graphs, KernelGraph
from meshwright.runtime.device import CpuKind
from meshwright.runtime.fake_operators import BY_VALUES, selects_by_mask, written

aten = torch.ops.aten
T = TypeVar("T")


class RecordedKind(CpuKind):
    """A CPU with graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = RecordedGraphs()

    def graphs(self) -> Graphs | None:
        """Graphs of recorded operators."""
        return self.recorded


class RecordedGraphs(Graphs):
    """Counts its captures, pools and replays."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = self.pools = self.replays = 0

    def prepare(self) -> None:
        pass

    def pool(self) -> Any:
        self.pools += 1
        return _Pool()

    def capture(self, work: Callable[[], T], pool: Any) -> tuple[KernelGraph, T]:
        self.captures += 1
        recorded = _Recorded(self, pool)
        with torch.no_grad(), _Recorder(recorded):
            result = work()
        recorded.free = [memory for key, memory in pool.memory.items() if not pool.users[key]]
        return recorded, result


class _Pool:
    """Storages by their identity, and the number of tensors through which the program still holds each."""

    def __init__(self) -> None:
        self.memory: dict[int, Tensor] = {}
        self.users: Counter[int] = Counter()

    def hold(self, value: Tensor) -> None:
        key = _key(value)
        if key not in self.memory:
            self.memory[key] = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        self.users[key] += 1
        weakref.finalize(value, self.users.subtract, {key: 1})


class _Recorded:
    def __init__(self, graphs: RecordedGraphs, pool: _Pool) -> None:
        self.graphs, self.pool = graphs, pool
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.free: list[Tensor] = []

    def replay(self) -> None:
        self.graphs.replays += 1
        under_way: dict[int, Tensor] = {}
        with torch.no_grad():
            for function, args, kwargs, outputs in self.calls:
                if function is collectives.WAIT:
                    value = function(under_way.pop(_key(args[0])))
                    if value.data_ptr() != outputs[0].data_ptr():
                        outputs[0].copy_(value)
                elif function in collectives.STARTS:
                    under_way[_key(outputs[0])] = function(*args, **kwargs)
                elif function._schema.is_mutable:
                    function(*args, **kwargs)
                elif not _is_view(args, kwargs, outputs):
                    for memory, value in zip(outputs, tree_leaves(function(*args, **kwargs)), strict=True):
                        if isinstance(value, Tensor):
                            memory.copy_(value)
            for memory in self.free:
                memory.fill_(torch.nan if memory.is_floating_point() else 0)


class _Recorder(TorchDispatchMode):
    def __init__(self, recorded: _Recorded) -> None:
        super().__init__()
        self.recorded = recorded

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a value while a stream is captured")
        if function in BY_VALUES or selects_by_mask(function, args):
            raise RuntimeError(f"the shape of {function} depends on values while a stream is captured")
        if function.namespace == "c10d":
            raise RuntimeError(f"{function} outside of a collective while a stream is captured")
        given = tuple(_tensors((args, kwargs)))
        result = self._result(function, args, kwargs)
        own = [value for value in _tensors(result) if not any(value is each for each in given)]
        for value in own:
            if _key(value) not in {_key(each) for each in given if _key(each) not in self.recorded.pool.memory}:
                self.recorded.pool.hold(value)
        kept = tree_map_only(Tensor, Tensor.detach, (args, kwargs, tree_leaves(result)))
        self.recorded.calls.append((function, *kept))
        return result

    def _result(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function.namespace == "meshwright_comm":
            if function in (collectives.WAIT, collectives.ALL_REDUCE):
                return args[0]
            return self._unfilled(function, args, kwargs)
        if (names := written(function)) is not None:  # nothing is written
            values = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | kwargs
            return values[names[0]] if len(names) == 1 else tuple(values[name] for name in names) or None
        assert not function._schema.is_mutable, function
        if any(each.alias_info is not None for each in function._schema.returns):
            return function(*args, **kwargs)  # a view
        return self._unfilled(function, args, kwargs)

    @staticmethod
    def _unfilled(function: Any, args: Any, kwargs: Any) -> Any:
        """Results of the right shapes without values."""
        shapes = tree_map_only(Tensor, _on_meta, (args, kwargs))

        def filled_with_nan(value: Tensor) -> Tensor:
            result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            return result.fill_(torch.nan if value.is_floating_point() else 0)

        return tree_map_only(Tensor, filled_with_nan, function(*shapes[0], **shapes[1]))


def _on_meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def _key(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _is_view(args: Any, kwargs: Any, outputs: list[Any]) -> bool:
    given = {_key(value) for value in _tensors((args, kwargs))}
    output_keys = [_key(value) for value in _tensors(outputs)]
    return bool(output_keys) and given.issuperset(output_keys)
