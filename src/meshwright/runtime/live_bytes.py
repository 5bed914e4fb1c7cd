"""Counts the bytes of tensors while they live."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.torch_private import TorchDispatchMode, pytree


@dataclass
class LiveBytes:
    """The bytes of the storages that live now, and the most so far. Its owner may set ``peak`` to begin anew."""

    held: int = 0
    peak: int = 0
    known: dict[int, Any] = field(default_factory=dict)

    def hold(self, value: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        num_bytes = storage.nbytes()

        def free(_: object) -> None:
            self.held -= num_bytes
            del self.known[key]

        self.known[key] = weakref.ref(storage, free)
        self.held += num_bytes
        self.peak = max(self.peak, self.held)


class CountingBytes(TorchDispatchMode):
    """Counts the results of all operators that run in this mode. Memory that kernels take for themselves is not
    seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self.live.hold(value)
        return result
