"""Runs matrix products on grids of ranks, forward and backward, by the rounds of ``schedules/products/rounds.py``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import collectives, groups_once, process_group, sum_of_all
from meshwright.comm.transport.base import Work
from meshwright.errors import LayoutError
from meshwright.schedules.collectives.steps import Span
from meshwright.schedules.products.grid import AXIS, DIMS, Operand, ProductPlan, part
from meshwright.schedules.products.rounds import Round, backward, forward, panel_span, shares

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes for which PyTorch has fast products and Meshwright's collectives have sums."""


class GridProduct:
    """The groups of this rank for a product on a grid. All ranks of the world must make it together.

    ``shard`` makes the operands and ``matmul`` multiplies them. ``peak_words`` is the largest number of words
    (elements) of parts and buffers that a call held at the same time, counted when they are allocated.

    Raises:
        LayoutError: the grid needs more ranks than the program has.
    """

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        if plan.grid.num_ranks > world:
            raise LayoutError(
                f"grid {plan.grid} has {plan.grid.num_ranks} ranks, and there are {world}",
                where=str(plan),
                remedy="give a grid whose product is at most the number of ranks",
            )
        self.is_idle = self.rank >= plan.grid.num_ranks
        self.at = plan.grid.coordinates(0 if self.is_idle else self.rank)
        groups = groups_once(plan.grid.mesh, self.rank) if plan.grid.num_ranks > 1 else {}
        self._collectives: dict[str, Collectives] = {}
        for axis, group in groups.items():
            self._collectives[axis] = collectives(process_group(group.name))
        self.peak_words = 0

    def shape(self, operand: Operand) -> tuple[int, int]:
        """The rows and columns of the whole operand."""
        rows, columns = DIMS[operand]
        return self.plan.sizes[rows], self.plan.sizes[columns]

    def part(self, operand: Operand) -> tuple[Span, Span]:
        """The rows and columns that this rank stores."""
        return part(self.plan, operand, self.rank)

    def part_shape(self, operand: Operand) -> tuple[int, int]:
        """The shape of the part that this rank stores; (0, 0) on an idle rank."""
        (top, bottom), (left, right) = self.part(operand)
        return bottom - top, right - left

    def shard(self, operand: Operand, whole: Tensor) -> "ShardedMatrix":
        """This rank's part, as a copy, of a matrix that every rank holds whole.

        Raises:
            LayoutError: the matrix has another shape, or a dtype without a kernel.
        """
        if tuple(whole.shape) != self.shape(operand):
            raise LayoutError(
                f"operand {operand} has the shape {list(whole.shape)}",
                where=str(self.plan),
                remedy=f"give a matrix of shape {list(self.shape(operand))}",
            )
        rows, columns = (slice(*span) for span in self.part(operand))
        return ShardedMatrix(self, operand, whole.detach()[rows, columns].clone(memory_format=torch.contiguous_format))

    # --- rounds ------------------------------------------------------------------------------------------------------

    def run(
        self, rounds: Sequence[Round], inputs: Mapping[Operand, Tensor], outputs: Sequence[Operand]
    ) -> dict[Operand, Tensor]:
        """Run rounds on this rank's parts of the inputs, and return its parts of the outputs. ``inputs`` and
        ``outputs`` are keyed by operands. In backward rounds, outputs are gradients of operands, and the input ``c`` is
        the gradient of C."""
        like = next(iter(inputs.values()))
        if self.is_idle:
            return {operand: like.new_empty(0, 0) for operand in outputs}
        with torch.no_grad():
            return _Run(self, inputs, outputs, like).all(rounds)

    def group(self, operand: Operand) -> Collectives | None:
        """The collectives of the ranks that share a block of the operand; None if no other rank has the block."""
        return self._collectives.get(AXIS[operand])


class ShardedMatrix:
    """A matrix whose parts are stored on the ranks of a product's grid. ``part`` is this rank's part, an ordinary
    tensor. If it requires gradients, ``matmul`` gives it the matching part of the gradient.

    Raises:
        LayoutError: the part does not have the shape in the plan, is not contiguous, or has a dtype without a kernel.
    """

    def __init__(self, product: GridProduct, operand: Operand, part: Tensor) -> None:
        self.product, self.operand, self.part = product, operand, part
        where = f"{product.plan}, operand {operand}"
        if tuple(part.shape) != product.part_shape(operand):
            shape = list(product.part_shape(operand))
            raise LayoutError(f"a part of shape {list(part.shape)}", where=where, remedy=f"this rank stores {shape}")
        if part.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise LayoutError(f"{part.dtype} has no kernel", where=where, remedy=f"convert it to one of {names}")
        if part.device.type != "cpu":
            raise LayoutError(f"a part on {part.device}", where=where, remedy="products on grids run on CPUs so far")
        if not part.is_contiguous():
            raise LayoutError("a part that is not contiguous", where=where, remedy="call .contiguous() on it")

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the whole matrix."""
        return self.product.shape(self.operand)

    def gather(self) -> Tensor:
        """The whole matrix, on every rank. All ranks must call this method. The result has no gradient."""
        whole = self.part.new_zeros(self.shape)
        rows, columns = (slice(*span) for span in self.product.part(self.operand))
        whole[rows, columns] = self.part.detach()
        return sum_of_all(whole)

    def as_operand(self, product: GridProduct, operand: Operand) -> "ShardedMatrix":
        """The same parts as an operand of another product. For example, C of one product becomes A of the next. Nothing
        is communicated.

        Raises:
            LayoutError: on some rank, the other product stores a different part.
        """
        here, there = self.product.plan, product.plan
        for rank in range(max(here.grid.num_ranks, there.grid.num_ranks)):
            mine, other = part(here, self.operand, rank), part(there, operand, rank)
            if mine != other:
                raise LayoutError(
                    f"rank {rank} has rows {_text(mine[0])} and columns {_text(mine[1])} of {self.operand}, and needs "
                    f"rows {_text(other[0])} and columns {_text(other[1])}",
                    where=f"{there}, operand {operand}",
                    remedy="plan the second product with following(), or gather and shard",
                )
        return ShardedMatrix(product, operand, self.part)


def matmul(a: ShardedMatrix, b: ShardedMatrix) -> ShardedMatrix:
    """C = A B on the grid of the operands. All ranks of the world must call this. Gradients flow to the parts of A and
    B; both are computed together, and the gradient of C is gathered once for them.

    Raises:
        LayoutError: the operands belong to different products, have different dtypes, or are not A and B.
    """
    if a.product is not b.product or (a.operand, b.operand) != ("a", "b"):
        raise LayoutError(
            f"operands {a.operand} of {a.product.plan} and {b.operand} of {b.product.plan}",
            where="matmul",
            remedy="make both by shard() of one product, the first as 'a' and the second as 'b'",
        )
    if a.part.dtype != b.part.dtype:
        raise LayoutError(f"{a.part.dtype} and {b.part.dtype}", where="matmul", remedy="convert to one dtype")
    return ShardedMatrix(a.product, "c", _Matmul.apply(a.part, b.part, a.product))


class _Matmul(torch.autograd.Function):
    """The product of two parts, with the gradients of the parts."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, product: GridProduct) -> Tensor:
        """This rank's part of C."""
        ctx.save_for_backward(a, b)
        ctx.product = product
        return product.run(forward(product.plan), {"a": a, "b": b}, ("c",))["c"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """This rank's parts of the gradients that are needed."""
        a, b = ctx.saved_tensors
        product: GridProduct = ctx.product
        wanted: list[Operand] = []
        if ctx.needs_input_grad[0]:
            wanted.append("a")
        if ctx.needs_input_grad[1]:
            wanted.append("b")
        rounds = backward(product.plan, wanted)
        found = product.run(rounds, {"a": a, "b": b, "c": grad.contiguous()}, wanted)
        return found.get("a"), found.get("b"), None


class _Run:
    """One pass over rounds. In a buffer, the dim in which a block is cut comes first, so that each part is
    contiguous."""

    def __init__(
        self, product: GridProduct, inputs: Mapping[Operand, Tensor], outputs: Sequence[Operand], like: Tensor
    ) -> None:
        self._product, self._plan, self._at = product, product.plan, product.at
        self._like, self._inputs = like, inputs
        self._words = sum(value.numel() for value in inputs.values())
        self._results: dict[Operand, Tensor] = {}
        for operand in outputs:
            self._results[operand] = self._empty(*product.part_shape(operand))
        self._held: dict[Operand, Tensor] = {}
        """The gathered blocks or panels, with the rows of the operand first."""
        self._sums: dict[Operand, Tensor] = {}
        """Buffers of outputs that are not reduced yet."""

    def all(self, rounds: Sequence[Round]) -> dict[Operand, Tensor]:
        gathering = self._gather(rounds[0])
        reducing: list[tuple[Operand, int, Tensor, Work]] = []
        for number, this_round in enumerate(rounds):
            for operand, buffer, work in gathering:
                if work is not None:
                    work.wait()
                    self._words -= self._held[operand].numel() if operand in self._held else 0
                self._held[operand] = buffer
            gathering = self._gather(rounds[number + 1]) if number + 1 < len(rounds) else []
            for operand in this_round.computes:
                self._multiply(operand, this_round.panel)
            self._finish(reducing)
            reducing = self._reduce(this_round)
        self._finish(reducing)
        return self._results

    def _gather(self, this_round: Round) -> list[tuple[Operand, Tensor, Work | None]]:
        started: list[tuple[Operand, Tensor, Work | None]] = []
        for operand in this_round.gathers:
            begin, end = panel_span(self._plan, operand, this_round.panel, self._at)
            own, group = self._cut_first(operand, self._inputs[operand])[:, begin:end], self._product.group(operand)
            if group is None:
                started.append((operand, own, None))
                continue
            places = shares(self._plan, operand, self._at)
            buffer = self._empty(places[-1][1], end - begin)
            first, last = places[group.rank]
            buffer[first:last].copy_(own)
            counts = [(last - first) * (end - begin) for first, last in places]
            label = f"{operand} of {self._plan}"
            work = group.all_gather_parts(buffer.view(-1), counts, self._plan.algorithm(operand), label)
            started.append((operand, buffer, work))
        return started

    def _multiply(self, output: Operand, panel: int) -> None:
        moves = output != self._plan.stationary
        first = panel == 0
        if self._product.group(output) is None:
            begin, end = panel_span(self._plan, output, panel if moves else -1, self._at)
            target = self._cut_first(output, self._results[output])[:, begin:end]
        else:
            if moves or first:
                length = shares(self._plan, output, self._at)[-1][1]
                begin, end = panel_span(self._plan, output, panel if moves else -1, self._at)
                self._sums[output] = self._empty(length, end - begin)
            target = self._sums[output]
        into = self._cut_first(output, target)
        left, right = self._operands(output, panel)
        if moves or first:
            torch.mm(left, right, out=into)
        else:
            into.addmm_(left, right)

    def _operands(self, output: Operand, panel: int) -> tuple[Tensor, Tensor]:
        """The two factors of an output: C = A B, dA = dC B', dB = A' dC."""
        if output == "c":
            return self._natural("a", panel), self._natural("b", panel)
        if output == "a":
            return self._natural("c", panel), self._natural("b", panel).t()
        return self._natural("a", panel).t(), self._natural("c", panel)

    def _natural(self, operand: Operand, panel: int) -> Tensor:
        return self._cut_first(operand, self._held[operand])

    def _reduce(self, this_round: Round) -> list[tuple[Operand, int, Tensor, Work]]:
        started: list[tuple[Operand, int, Tensor, Work]] = []
        for operand in this_round.reduces:
            group = self._product.group(operand)
            if group is None:
                continue
            buffer = self._sums.pop(operand)
            counts = [(last - first) * buffer.shape[1] for first, last in shares(self._plan, operand, self._at)]
            label = f"{operand} of {self._plan}"
            work = group.reduce_scatter_parts(buffer.view(-1), counts, self._plan.algorithm(operand), label)
            started.append((operand, this_round.panel, buffer, work))
        return started

    def _finish(self, reducing: list[tuple[Operand, int, Tensor, Work]]) -> None:
        for operand, panel, buffer, work in reducing:
            work.wait()
            begin, end = panel_span(self._plan, operand, panel, self._at)
            group = self._product.group(operand)
            assert group is not None
            first, last = shares(self._plan, operand, self._at)[group.rank]
            self._cut_first(operand, self._results[operand])[:, begin:end].copy_(buffer[first:last])
            self._words -= buffer.numel()
        reducing.clear()

    def _cut_first(self, operand: Operand, value: Tensor) -> Tensor:
        """Swap between two forms of a tensor: the operand's rows first, and the dim of the cut first."""
        return value if self._plan.cut_dim(operand) == DIMS[operand][0] else value.t()

    def _empty(self, rows: int, columns: int) -> Tensor:
        self._words += rows * columns
        self._product.peak_words = max(self._product.peak_words, self._words)
        return self._like.new_empty(rows, columns)


def _text(span: Span) -> str:
    return f"{span[0]} to {span[1]}"
