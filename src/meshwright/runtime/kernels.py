"""The collective operators get their kernels: through PyTorch's dispatcher, and for graphs that go without."""

from meshwright.comm.backend import KERNELS
from meshwright.ops import collectives

collectives.KERNELS |= {getattr(collectives.OPERATORS, name).default: function for name, function in KERNELS.items()}
