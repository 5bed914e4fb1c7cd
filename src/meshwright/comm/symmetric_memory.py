"""Products in pieces in memory that the GPUs of a group share: PyTorch's symmetric memory, where there is some.

No GPU has run this module yet. The CPU's form of the same operators checks plans and numbers, and dry runs check their
order, dtypes and memory on fake tensors.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.exchange_notes import gather_everywhere
from meshwright.comm.groups import boxes_of, process_group
from meshwright.ir.mesh import AxisGroup
from meshwright.torch_private import define_symmetric_memory, enable_symmetric_memory

ops = torch.ops.symm_mem


def symmetric_groups(groups: Iterable[AxisGroup], device: torch.device) -> frozenset[str]:
    """The names of the groups whose GPUs share memory: GPUs of one box that reach each other's memory. All ranks of the
    groups must call this."""
    return frozenset(group.name for group in groups if _enabled(process_group(group.name), device))


def rehearsed_groups(groups: Iterable[AxisGroup], box: int) -> frozenset[str]:
    """The names of the groups that would share memory in a dry run, where no other rank exists to be asked: those whose
    ranks lie in one box. A box has ``box`` consecutive ranks."""
    define_symmetric_memory()
    ranks = {group.name: dist.get_process_group_ranks(process_group(group.name)) for group in groups}
    return frozenset(name for name, own in ranks.items() if len({rank // box for rank in own}) == 1)


def _enabled(group: dist.ProcessGroup, device: torch.device) -> bool:
    if len(boxes_of(group)) > 1:
        return False
    seen = torch.tensor([int(_reaches(device, gather_everywhere(device.index, group)))], device=device)
    dist.all_reduce(seen, dist.ReduceOp.MIN, group)
    if not seen.item():
        return False
    enable_symmetric_memory(group.group_name)
    return True


def _reaches(device: torch.device, indices: Sequence[int]) -> bool:
    """Whether a GPU reaches the memory of the GPUs with these indices, one for each rank of its group. It does not if a
    process sees only its own GPU, as under Ray or Slurm: other ranks' indices then are the same."""
    if len(set(indices)) < len(indices) or max(indices) >= torch.cuda.device_count():
        return False
    return all(torch.cuda.can_device_access_peer(device, other) for other in indices if other != device.index)


def gather_multiply(value: Tensor, weights: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Gather the rows of all ranks and multiply them; the result is the gathered rows, then the products."""
    whole, products = ops.fused_all_gather_matmul(value, weights, 0, group.group_name)
    return [whole, *products]


def multiply_scatter(left: Tensor, right: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Multiply, sum over the ranks, and keep this rank's rows of the sum."""
    result: Tensor = ops.fused_matmul_reduce_scatter(left, right, "sum", 0, group.group_name)
    return result
