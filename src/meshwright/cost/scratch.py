"""Bytes of temporary memory that a kernel needs while it runs."""

from meshwright.cost import attention, experts
from meshwright.ir.convolution import workspace_bytes
from meshwright.ir.kernel import Kernel


def scratch_bytes(kernel: Kernel, on_cpu: bool) -> int:
    """The bytes of the scores of attention that is not fused, of a convolution's workspace, or of experts' groups."""
    grouped = experts.scratch_bytes(kernel, on_cpu)
    return attention.scratch_bytes(kernel, on_cpu) + workspace_bytes(kernel, on_cpu) + grouped
