"""The functions that lowered graphs call for collective operators. They are called directly instead of through
PyTorch's dispatcher."""

from types import MappingProxyType

from meshwright.comm import backend
from meshwright.lower.stage import Kernels
from meshwright.ops import collectives

KERNELS: Kernels = MappingProxyType(
    {getattr(collectives.OPERATORS, name).default: function for name, function in backend.KERNELS.items()}
)
