"""The functions that lowered graphs call for some operators, directly instead of through PyTorch's dispatcher."""

from types import MappingProxyType

from meshwright.comm import backend
from meshwright.lower.stage import Kernels
from meshwright.lower.static import KEYED
from meshwright.ops import collectives
from meshwright.runtime.fake_operators import kernel_of

KERNELS: Kernels = MappingProxyType(
    {getattr(collectives.OPERATORS, name).default: function for name, function in backend.KERNELS.items()}
)
"""Collectives: the dispatcher takes longer than a short one."""
CAPTURED_KERNELS: Kernels = MappingProxyType(
    {operator: kernel for operator in KEYED if (kernel := kernel_of(operator)) is not None}
)
"""Operators of graphs, whose random key may be a tensor (their schemas say a number)."""
