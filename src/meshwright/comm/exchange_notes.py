"""Collectives of torch.distributed over values that are not tensors, as bytes (``notes.py``)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.notes import from_bytes, to_bytes
from meshwright.torch_private import device_of_objects


def gather_everywhere(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks of a group, in the order of its ranks. All ranks of the group must call this."""
    own, sizes = _sized(value, group)
    parts = [own.new_empty(max(sizes)) for _ in sizes]
    dist.all_gather(parts, _padded(own, max(sizes)), group)
    return _values(parts, sizes)


def gather_on_first(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """The values of all ranks of a group on its first rank; None on the others. All ranks of the group must call
    this."""
    own, sizes = _sized(value, group)
    parts = [own.new_empty(max(sizes)) for _ in sizes] if group.rank() == 0 else None
    dist.gather(_padded(own, max(sizes)), parts, dst=dist.get_global_rank(group, 0), group=group)
    return None if parts is None else _values(parts, sizes)


def bytes_of_first(data: bytes, group: dist.ProcessGroup) -> bytes:
    """The bytes that the first rank of a group gives. All ranks of the group must call this."""
    first, device = dist.get_global_rank(group, 0), device_of_objects(group)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, first, group)
    message = _tensor(data, device) if group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(message, first, group)
    return bytes(message.cpu().numpy())


def _sized(value: Any, group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """This rank's value as bytes, and the numbers of bytes of all ranks."""
    own = _tensor(to_bytes(value), device_of_objects(group))
    size = torch.tensor([own.numel()], device=own.device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group)
    return own, [int(each) for each in sizes]


def _tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _padded(own: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(own, [0, size - own.numel()])


def _values(parts: list[Tensor], sizes: list[int]) -> list[Any]:
    return [from_bytes(bytes(each[:size].cpu().numpy())) for each, size in zip(parts, sizes, strict=True)]
