"""The collective operators get their kernels: through PyTorch's dispatcher, and for graphs that go without."""

from torch._C import DispatchKey

from meshwright.comm.backend import KERNELS
from meshwright.ops import collectives

for _name, _function in KERNELS.items():
    getattr(collectives.OPERATORS, _name).default.py_impl(DispatchKey.CPU)(_function)
