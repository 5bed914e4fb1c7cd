"""Mixtures of experts on devices that run behind the host: sizes follow from shapes alone, never from values.

How many tokens an expert has is known to the device only. The rows of a token's experts are put into groups, the rows
of one expert each, in a buffer that has room for every routing. A group begins at a multiple of ``block`` rows:

    experts of 3 tokens     b d, a b, b d             this rank has a, b, c; block = 2
    groups                  a - | b b | b - |  -  -   room for 6 rows and 3 unfilled blocks; unused rows are zero

Matrix products take the ends of the groups as a tensor on the device. PyTorch's grouped product has kernels for
bfloat16 on GPUs of the capability 9.0 and 10.0; elsewhere it waits for the device. There, and in other dtypes, each
block is multiplied by the matrix of its expert. Blocks are small in the first case and large in the second.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ir.kernel import ALIGNED_ROWS, BLOCK_ROWS, COPIED_BYTES

aten = torch.ops.aten

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, aten.silu_backward.default),
    "gelu": (F.gelu, aten.gelu_backward.default),
    "gelu_tanh": (
        lambda value: F.gelu(value, approximate="tanh"),
        lambda grad, value: aten.gelu_backward.default(grad, value, approximate="tanh"),
    ),
    "relu": (F.relu, lambda grad, value: aten.threshold_backward.default(grad, value, 0)),
}
"""Maps an activation to its function, and to the gradient of its input, given those of its output and its input."""


def gated(hidden: Tensor, activation: str, width: int) -> Tensor:
    """Return ``act(gate) * up`` if ``hidden`` has two halves, gate and up; else ``act(hidden)``."""
    function = ACTIVATIONS[activation][0]
    if hidden.shape[-1] == width:
        return function(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return function(gate) * up


def gated_backward(grad: Tensor, hidden: Tensor, activation: str) -> Tensor:
    """Return the gradient of ``hidden``, given that of the result of ``gated``."""
    function, backward = ACTIVATIONS[activation]
    if hidden.shape[-1] == grad.shape[-1]:
        return backward(grad, hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return torch.cat([backward(grad * up, gate), grad * function(gate)], -1)


def has_grouped_product(tokens: Tensor, *matrices: Tensor) -> bool:
    """Whether PyTorch has a kernel for grouped products of these tensors that needs no numbers on the host."""
    aligned = all(size % ALIGNED_ROWS == 0 for matrix in matrices for size in matrix.shape[1:])
    if tokens.device.type != "cuda" or tokens.dtype != torch.bfloat16 or not aligned:
        return False
    return torch.cuda.get_device_capability(tokens.device)[0] in (9, 10)


@dataclass(frozen=True)
class Groups:
    """Rows grouped by expert. ``source`` [room]: the slot (token, choice) of each row; the number of slots if a row is
    unused. ``place`` [slots]: the row of each slot; ``room`` if its expert is on another rank. ``ends`` [e]: the end of
    each expert's group. ``slots`` is the number of experts of a token."""

    source: Tensor
    place: Tensor
    ends: Tensor
    slots: int
    block: int
    grouped: bool

    @classmethod
    def of(cls, index: Tensor, first: int, num_experts: int, *, grouped: bool) -> "Groups":
        """Group the experts ``index`` [t, a] of which this rank has ``num_experts``, from number ``first`` on."""
        block = ALIGNED_ROWS if grouped else BLOCK_ROWS
        own = index.reshape(-1) - first
        elsewhere = (own < 0) | (own >= num_experts)
        expert = own.masked_fill(elsewhere, num_experts)
        number = expert.numel()
        room = (number + num_experts * (block - 1)) // block * block
        counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))
        padded = (counts + (block - 1)) // block * block
        ends, begins = padded.cumsum(0), counts.cumsum(0) - counts
        order = expert.argsort(stable=True)
        sorted_expert = expert[order]
        row = torch.arange(number, device=index.device) - begins[sorted_expert] + (ends - padded)[sorted_expert]
        row = row.masked_fill(sorted_expert == num_experts, room)
        place = torch.empty_like(order).scatter_(0, order, row)
        source = order.new_full((room + 1,), number).scatter_(0, row, order)[:room]
        return cls(source, place, ends[:num_experts], index.shape[1], block, grouped)

    @cached_property
    def _unused(self) -> Tensor:
        return (self.source == len(self.place)).unsqueeze(1)

    def rows(self, values: Tensor) -> Tensor:
        """Put the values of tokens [t, k] into groups [room, k]."""
        slot = self.source.clamp(max=len(self.place) - 1)
        return values[slot // self.slots].masked_fill_(self._unused, 0)

    def rows_of_slots(self, values: Tensor) -> Tensor:
        """Put the values of slots [slots, k] into groups [room, k]."""
        return values[self.source.clamp(max=len(self.place) - 1)].masked_fill_(self._unused, 0)

    def of_slots(self, rows: Tensor) -> Tensor:
        """Return the rows of all slots [slots, k]; zeros for experts on other ranks."""
        absent = (self.place == len(rows)).unsqueeze(1)
        return rows[self.place.clamp(max=len(rows) - 1)].masked_fill_(absent, 0)

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Multiply each group of rows [room, k] by its expert's matrix [e, k, n]. Return [room, n]."""
        if self.grouped:
            result: Tensor = F.grouped_mm(rows, matrices, offs=self.ends.to(torch.int32))
            return result.masked_fill_(self._unused, 0)  # rows after the last group are not written
        result = rows.new_empty(len(rows), matrices.shape[2])
        for blocks, expert in self._batches(matrices[0].numel() * matrices.element_size()):
            torch.bmm(self._blocks(rows)[blocks], matrices[expert], out=self._blocks(result)[blocks])
        return result

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply the transposes of groups [room, m] by groups [room, n]. Return a matrix of each expert [e, m, n]."""
        if self.grouped:
            product: Tensor = F.grouped_mm(left.t(), right, offs=self.ends.to(torch.int32))
            return product
        size = left.shape[1] * right.shape[1]
        result = left.new_zeros(len(self.ends), left.shape[1], right.shape[1])
        for blocks, expert in self._batches(size * left.element_size()):
            columns, rows = self._blocks(left)[blocks].transpose(1, 2), self._blocks(right)[blocks]
            result.index_add_(0, expert, torch.bmm(columns, rows))  # no name keeps the terms during the next product
        return result

    def _blocks(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.block, rows.shape[1])

    def _batches(self, num_bytes: int) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of blocks whose matrices have not too many bytes together, and the experts of these blocks. Unused
        blocks are zero, and count as blocks of the last expert."""
        number = len(self.source) // self.block
        begins = torch.arange(number, device=self.ends.device) * self.block
        expert = torch.searchsorted(self.ends, begins, right=True).clamp_(max=len(self.ends) - 1)
        step = max(1, COPIED_BYTES // num_bytes)
        for begin in range(0, number, step):
            yield slice(begin, begin + step), expert[begin : begin + step]


def forward(
    tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, first: int
) -> tuple[Tensor, Groups, Tensor]:
    """Apply experts: tokens [t, k], index and weights [t, a], up [e, 2 f or f, k], down [e, o, f] -> [t, o]. Return the
    groups, and their activations after ``up`` [room, 2 f or f], too."""
    groups = Groups.of(index, first, len(up), grouped=has_grouped_product(tokens, up, down))
    hidden = groups.product(groups.rows(tokens), up.transpose(1, 2))
    inner = gated(hidden, activation, down.shape[2])
    outputs = groups.of_slots(groups.product(inner, down.transpose(1, 2)))
    summed = (outputs.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)
    return summed.to(tokens.dtype), groups, hidden


def backward(
    grad: Tensor, tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, kept: Tensor | None,
    activation: str, first: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of tokens, weights, up and down. ``kept`` has forward's activations after ``up`` of all
    slots; if it is None, they are recomputed."""
    groups = Groups.of(index, first, len(up), grouped=has_grouped_product(tokens, up, down))
    rows, grad_rows = groups.rows(tokens), groups.rows(grad)
    hidden = groups.product(rows, up.transpose(1, 2)) if kept is None else groups.rows_of_slots(kept)
    inner = gated(hidden, activation, down.shape[2])
    back = groups.product(grad_rows, down)
    share = groups.rows_of_slots(weights.reshape(-1, 1)).to(grad.dtype)
    grad_weights = groups.of_slots((back * inner).sum(-1, keepdim=True)).view(weights.shape).to(weights.dtype)
    grad_down = groups.outer(grad_rows * share, inner)
    inside = gated_backward(back * share, hidden, activation)
    grad_tokens = groups.of_slots(groups.product(inside, up)).view(*index.shape, -1).sum(1)
    return grad_tokens.to(tokens.dtype), grad_weights, groups.outer(inside, rows), grad_down
