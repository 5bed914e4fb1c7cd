"""Bytes of temporary memory that a kernel needs while it runs."""

from collections.abc import Iterable

from meshwright.cost import attention, experts
from meshwright.ir.convolution import workspace_bytes
from meshwright.ir.kernel import Kernel
from meshwright.ir.program import Node


def scratch_bytes(kernel: Kernel, on_cpu: bool) -> int:
    """The bytes of the scores of attention that is not fused, of a convolution's workspace, of experts' groups, or of
    what a GPU holds while it draws random numbers."""
    if kernel.kind == "random" and on_cpu:
        return 0
    grouped = experts.scratch_bytes(kernel, on_cpu)
    return attention.scratch_bytes(kernel, on_cpu) + workspace_bytes(kernel, on_cpu) + grouped


def symmetric_bytes(nodes: Iterable[Node]) -> int:
    """The bytes of the memory that devices share for products in pieces. PyTorch keeps it for each group, as large as
    the largest product needs it: this rank's rows of an operand, or two blocks of terms that other ranks fetch
    (``_pipelined_multi_all_gather_and_consume`` and ``_pipelined_produce_and_all2all`` of
    ``torch.distributed._symmetric_memory``)."""
    most: dict[str, int] = {}
    for node in nodes:
        for collective in node.inside if node.target.startswith(_SHARING) else ():
            blocks = 1 if collective.kind == "all_gather" else 2
            needed = blocks * collective.bytes // collective.size
            most[collective.axis] = max(most.get(collective.axis, 0), needed)
    return sum(most.values())


_SHARING = ("meshwright_comm.gather_multiply.", "meshwright_comm.multiply_scatter.")
