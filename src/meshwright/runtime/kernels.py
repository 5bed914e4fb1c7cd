"""The functions that lowered graphs call for some operators, directly instead of through PyTorch's dispatcher."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from meshwright.comm import backend
from meshwright.lower.stage import Kernels
from meshwright.lower.static import KEYED
from meshwright.ops import collectives
from meshwright.ops.attention import SETTINGS_AT
from meshwright.ops.base import Target
from meshwright.runtime.fake_operators import kernel_of

KERNELS: Kernels = MappingProxyType(
    {getattr(collectives.OPERATORS, name).default: function for name, function in backend.KERNELS.items()}
)
"""Collectives: the dispatcher takes longer than a short one."""


def _keyed(operator: Target) -> Callable[..., Any]:
    """The kernel of an operator that draws. Attention draws only with dropout, and is else called as an operator."""
    kernel = kernel_of(operator)
    assert kernel is not None, operator
    if operator not in SETTINGS_AT:
        return kernel
    dropout = SETTINGS_AT[operator]
    return lambda *arguments: (kernel if arguments[dropout] else operator)(*arguments)


CAPTURED_KERNELS: Kernels = MappingProxyType({operator: _keyed(operator) for operator in KEYED})
"""Operators of graphs, whose random key may be a tensor (their schemas say a number)."""
