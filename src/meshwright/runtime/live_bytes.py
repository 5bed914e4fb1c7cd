"""Counts the bytes of tensors while they live."""

from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.rehearsed_memory import DeviceMemory
from meshwright.torch_private import TorchDispatchMode, pytree


class CountingBytes(TorchDispatchMode):
    """Counts the results of all operators that run in this mode. Memory that kernels take for themselves is not
    seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = DeviceMemory()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self.live.hold(value)
        return result
