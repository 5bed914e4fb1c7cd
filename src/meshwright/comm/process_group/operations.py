"""Runs torch.distributed's collectives by Meshwright's executor: each function blocks until its collective is done.

The functions get the group's connections. Tensors need not be contiguous: others are copied before and after.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from meshwright.comm.process_group.links import GroupConnections
from meshwright.comm.process_group.tensors import flat, overlaps

Reduction = tuple[str, float | Tensor | None]
"""A reduction of the executor, and the factor of PREMUL_SUM; ``mean`` is AVG."""


def all_reduce(links: GroupConnections, tensors: Sequence[Tensor], reduction: Reduction, label: str) -> None:
    """Reduce each tensor over all ranks, in place."""
    op = "sum" if reduction[0] == "mean" else reduction[0]
    works = []
    for tensor in tensors:
        if tensor.is_sparse:
            _all_reduce_sparse(links, tensor, reduction, label)
            continue
        memory = _scaled(flat(tensor), reduction)
        algorithm = links.algorithm("all_reduce", memory.nbytes)
        works.append((tensor, memory, links.collectives.all_reduce(memory, op, algorithm, label)))
    for tensor, memory, work in works:
        work.wait()
        _divide(memory, reduction, links.size)
        _write(memory, tensor)


def _all_reduce_sparse(links: GroupConnections, tensor: Tensor, reduction: Reduction, label: str) -> None:
    """Sum sparse tensors: every rank gathers the indices and values of all ranks, and adds them up."""
    coalesced = tensor.coalesce()
    counts = torch.empty(links.size, 1, dtype=torch.int64)
    links.collectives.all_gather(torch.tensor([coalesced._nnz()]), counts, "star", label).wait()
    numbers = [int(count) for count in counts]
    indices, values = coalesced.indices().t().contiguous(), coalesced.values().contiguous()
    gathered = []
    for part in (indices, values):
        width = prod(part.shape[1:])
        memory = part.new_empty(sum(numbers) * width)
        begin = sum(numbers[: links.rank]) * width
        memory[begin : begin + part.numel()] = part.reshape(-1)
        sizes = [number * width for number in numbers]
        links.collectives.all_gather_parts(memory, sizes, "star", label).wait()
        gathered.append(memory.view(sum(numbers), *part.shape[1:]))
    whole = torch.sparse_coo_tensor(gathered[0].t(), gathered[1], tensor.shape, check_invariants=False)
    whole = whole.coalesce()
    if reduction[0] == "mean":
        whole = whole / links.size
    tensor.copy_(whole)


def all_gather(links: GroupConnections, outputs: Sequence[Tensor], value: Tensor, label: str) -> None:
    """Copy each rank's tensor to its place in the list ``outputs``; the tensors may differ in size."""
    counts = [output.numel() for output in outputs]
    memory = value.new_empty(sum(counts))
    parts = memory.split(counts)
    parts[links.rank].copy_(value.reshape(-1))
    algorithm = links.algorithm("all_gather", memory.nbytes)
    if len(set(counts)) == 1:
        links.collectives.all_gather(parts[links.rank], memory.view(links.size, -1), algorithm, label).wait()
    else:
        links.collectives.all_gather_parts(memory, counts, algorithm, label).wait()
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part.view(output.shape))


def all_gather_single(links: GroupConnections, outputs: Sequence[Tensor], values: Sequence[Tensor], label: str) -> None:
    """Concatenate the ranks' tensors, for each pair of an output and this rank's value."""
    works = []
    for output, value in zip(outputs, values, strict=True):
        memory = flat(output)
        algorithm = links.algorithm("all_gather", memory.nbytes)
        rows = memory.view(links.size, value.numel())
        works.append((output, memory, links.collectives.all_gather(flat(value), rows, algorithm, label)))
    for output, memory, work in works:
        work.wait()
        _write(memory, output)


def reduce_scatter(
    links: GroupConnections, output: Tensor, values: Sequence[Tensor], reduction: Reduction, label: str
) -> None:
    """Reduce the list ``values`` over all ranks; ``output`` gets this rank's entry. Entries may differ in size."""
    counts = [value.numel() for value in values]
    memory = torch.cat([value.reshape(-1) for value in values])
    if len(set(counts)) == 1:
        reduce_scatter_single(links, (output,), (memory,), reduction, label)
        return
    memory = _scaled(memory, reduction)
    algorithm = links.algorithm("reduce_scatter", memory.nbytes)
    op = "sum" if reduction[0] == "mean" else reduction[0]
    links.collectives.reduce_scatter_parts(memory, counts, algorithm, label, op).wait()
    part = memory.split(counts)[links.rank]
    _divide(part, reduction, links.size)
    output.copy_(part.view(output.shape))


def reduce_scatter_single(
    links: GroupConnections, outputs: Sequence[Tensor], values: Sequence[Tensor], reduction: Reduction, label: str
) -> None:
    """Reduce each value over all ranks; the output gets this rank's part of it."""
    op, works = "sum" if reduction[0] == "mean" else reduction[0], []
    for output, value in zip(outputs, values, strict=True):
        rows, into = _scaled(flat(value), reduction).view(links.size, output.numel()), flat(output)
        if overlaps(rows, into):
            rows = rows.clone()
        algorithm = links.algorithm("reduce_scatter", rows.nbytes)
        works.append((output, into, links.collectives.reduce_scatter(rows, into, op, algorithm, label)))
    for output, into, work in works:
        work.wait()
        _divide(into, reduction, links.size)
        _write(into, output)


def broadcast(links: GroupConnections, tensors: Sequence[Tensor], root: int, label: str) -> None:
    """Copy the root's tensors to all ranks."""
    for tensor in tensors:
        memory = flat(tensor)
        links.collectives.broadcast(memory, root, links.algorithm("broadcast", memory.nbytes), label).wait()
        _write(memory, tensor)


def reduce(links: GroupConnections, tensors: Sequence[Tensor], root: int, reduction: Reduction, label: str) -> None:
    """Reduce each tensor over all ranks, in place on the root. Other ranks keep their tensors."""
    op = "sum" if reduction[0] == "mean" else reduction[0]
    for tensor in tensors:
        memory = _scaled(flat(tensor), reduction)
        if links.rank != root and memory.data_ptr() == tensor.data_ptr():
            memory = memory.clone()
        links.collectives.reduce(memory, root, op, links.algorithm("reduce", memory.nbytes), label).wait()
        if links.rank == root:
            _divide(memory, reduction, links.size)
            _write(memory, tensor)


def gather(links: GroupConnections, outputs: Sequence[Tensor], value: Tensor, root: int, label: str) -> None:
    """Copy each rank's tensor to its place in the list ``outputs`` of the root."""
    rows = value.new_empty(links.size, value.numel())
    algorithm = links.algorithm("gather", rows.nbytes)
    links.collectives.gather(value.reshape(-1), rows, root, algorithm, label).wait()
    for output, row in zip(outputs, rows, strict=False):
        output.copy_(row.view(output.shape))


def scatter(links: GroupConnections, output: Tensor, values: Sequence[Tensor], root: int, label: str) -> None:
    """Copy entry r of the root's list ``values`` to ``output`` of each rank r."""
    rows = output.new_empty(links.size, output.numel())
    for row, value in zip(rows, values, strict=False):
        row.copy_(value.reshape(-1))
    links.collectives.scatter(rows, root, links.algorithm("scatter", rows.nbytes), label).wait()
    output.copy_(rows[links.rank].view(output.shape))


def all_to_all_single(
    links: GroupConnections, output: Tensor, value: Tensor, received: Sequence[int], sent: Sequence[int], label: str
) -> None:
    """Send the next ``sent[r]`` elements of ``value`` to each rank r, and write the next ``received[r]`` elements of
    ``output`` with those of rank r."""
    memory = flat(output)
    links.collectives.exchange_parts(flat(value), memory, sent, received, label).wait()
    _write(memory, output)


def all_to_all(links: GroupConnections, outputs: Sequence[Tensor], values: Sequence[Tensor], label: str) -> None:
    """Send ``values[r]`` to each rank r, and write ``outputs[r]`` with the tensor of rank r."""
    received, sent = [output.numel() for output in outputs], [value.numel() for value in values]
    memory = outputs[0].new_empty(sum(received))
    joined = torch.cat([value.reshape(-1) for value in values])
    links.collectives.exchange_parts(joined, memory, sent, received, label).wait()
    for output, part in zip(outputs, memory.split(received), strict=True):
        output.copy_(part.view(output.shape))


def _scaled(memory: Tensor, reduction: Reduction) -> Tensor:
    """The elements times the factor of PREMUL_SUM."""
    return memory if reduction[1] is None else memory * reduction[1]


def _divide(memory: Tensor, reduction: Reduction, size: int) -> None:
    """Divide sums by the number of ranks for AVG."""
    if reduction[0] == "mean":
        exact = memory.is_floating_point() or memory.is_complex()
        memory.div_(size) if exact else memory.div_(size, rounding_mode="trunc")


def _write(memory: Tensor, tensor: Tensor) -> None:
    """Copy the elements to the tensor, unless they are its own."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(memory.view(tensor.shape))
