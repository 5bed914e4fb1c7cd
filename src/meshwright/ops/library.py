"""Operators of this project: how they are defined, whether kernels in Triton work on a tensor, and a gradient of
cross-entropy."""

import functools
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from meshwright.torch_private import FakeTensor

LIBRARY = Library("meshwright", "DEF")
log = logging.getLogger(__name__)


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator ``NAME`` by its schema; ``kernel`` computes it, ``fake`` makes its results on fake tensors.
    The operator's attribute ``kernel`` is that function: a dry run calls it on fake tensors."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"meshwright::{name}", fake, lib=LIBRARY)
    getattr(torch.ops.meshwright, name).default.kernel = kernel


def uses_triton(value: Tensor) -> bool:
    """Whether kernels in Triton (``gpu_kernels.py``) work on a tensor. They do on CUDA devices. PyTorch for CUDA brings
    Triton on Linux; without it, operators of PyTorch do the same work more slowly."""
    return value.device.type == "cuda" and (isinstance(value, FakeTensor) or _has_triton())


@functools.cache
def _has_triton() -> bool:
    has = find_spec("triton") is not None
    if not has:
        log.warning(
            "Triton is not installed: random numbers and products in float8 take several times as long, and need more "
            "memory than predicted"
        )
    return has


_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(*values: int) -> int:
    """Return a 63-bit hash of integers (the finalizer of SplitMix64; Steele, Lea, Flood 2014)."""
    state = 0
    for value in values:
        state = (state + value * 2 + 1 + _MIX[0]) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * _MIX[1]) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * _MIX[2]) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def _cross_entropy_backward(grad: Tensor, logarithms: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    weights = grad.expand(target.shape).masked_fill(target == ignore_index, 0).unsqueeze(-1)
    indices = target.masked_fill(target == ignore_index, 0).unsqueeze(-1)
    return logarithms.exp().mul_(weights).scatter_add_(-1, indices, -weights)


KEY = "SymInt random_key, SymInt salt"
"""Arguments of operators that draw random numbers."""
define(
    "cross_entropy_backward(Tensor grad, Tensor logarithms, Tensor target, SymInt ignore_index) -> Tensor",
    _cross_entropy_backward,
    lambda grad, logarithms, *_: torch.empty_like(logarithms),
)
