"""Collectives as pairs of operators, start and wait, that lowered graphs call and that compilers can trace.

``comm`` registers the kernels. ``algorithm`` is the text by which a plan names an algorithm
(``schedules/collectives/choice.py``). ``label`` names the tensor or the operator in errors. A value that was started
must be waited for before it is read.

``exchange_rows`` is called only inside other operators' kernels, because the number of received rows is known only at
run time. It sends the next ``counts[rank].sum()`` rows of ``rows`` to each rank. It returns the received rows in order
of their senders, and the senders' counts for this rank. ``shift`` starts to send a tensor to the next rank of the
group. Its result is the tensor of the previous rank. ``permute`` starts to send row i of ``rows`` to rank
``goes[i]``; row i of its result comes from rank ``comes[i]``. Rows between the same two ranks keep their order.

``gather_multiply`` gathers the rows of ``value`` [rows, k] and multiplies them by each of ``weights`` [k, n]. It
returns the gathered rows and the products, in order of the ranks. ``multiply_scatter`` multiplies ``left``
[size x rows, k] by ``right`` and sums the products over the ranks; each rank gets its rows of the sum. Both run in
pieces, in memory that the ranks' accelerators share (``lower/pieces.py``).

``gather_parts`` and ``reduce_to_parts`` move the Flat parts of many tensors together (``ir.placement.Flat``). Gathered
tensors are stored one after the other, each with its padding. The parts of the sums that a rank keeps are stored in the
same way:

    parts a [2], b [1] on each of 2 ranks    ->    a0 a0 a1 a1 b0 b1           a0: rank 0's
    tensors a [4], b [2]                     ->    a0 a0 b0 on rank 0, a1 a1 b1 on rank 1

``again`` says that the result is freed soon and that similar results follow. On a CPU they reuse the same memory.

``codec`` is the text of a codec (``ir/codec.py``) that encodes the elements for sending. ``before`` is the state that
the codec has kept from the previous step (``Codec.state_lengths``), in one vector. The collective writes the whole new
state to ``state``, which may be the same vector. ``draw`` is the seed of the codec's random numbers. ``shapes`` has the
number of dims and the dims of each tensor in the vector.

Halos (``ir.halo``): part ``index`` of a dim owns the rows from ``edges[index]`` up to ``edges[index + 1]`` and reads
the rows from ``lows[index]`` up to ``highs[index]``. ``halo_exchange`` returns the rows that the part reads but does
not own, the rows before the part first. Rows that no part owns have the value ``fill``. ``halo_reduce`` is its adjoint:
``value`` has terms of sums for all rows that the part reads, and the owner of a row adds up the terms for the row. The
result has the part's own rows. ``halo_return`` sends ``strips``, the terms for rows that the part does not own, to the
owners of these rows. The halos of all parts must have the same size. It returns the terms that it receives from the
neighbours: first the terms for the part's first rows (as many as the halo after a part has), then the terms for its
last rows (as many as the halo before a part has). ``add_rows`` adds rows in place, without communication.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from torch.library import Library, register_fake

from meshwright.ir.halo import outside, owned
from meshwright.ir.placement import flat_shape

NAMESPACE = "meshwright_comm"
LIBRARY = Library(NAMESPACE, "DEF")

Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``exchange_rows`` over a group. It takes rows in order of their destinations, with the counts, and returns received
rows in order of their senders, with the counts."""


def exchange_over(group: str, size: int) -> Exchange:
    """Return the exchange of rows over a group of ``size`` ranks."""
    return lambda rows, counts: EXCHANGE_ROWS(rows, counts, group, size)


def _parts_size(values: list[Tensor], size: int) -> int:
    return sum(prod(flat_shape(tuple(value.shape), size)) for value in values)


def _resized(value: Tensor, dim: int, rows: int) -> Tensor:
    shape = list(value.shape)
    shape[dim] = rows
    return value.new_empty(shape)


def _halo(
    value: Tensor, dim: int, lows: list[int], highs: list[int], edges: list[int], fill: float, group: str, index: int,
    label: str = "",
) -> Tensor:  # fmt: skip
    sides = outside((lows[index], highs[index]), owned(edges, index))
    return _resized(value, dim, sum(high - low for low, high in sides))


def _gathered_products(value: Tensor, weights: list[Tensor], group: str, size: int) -> list[Tensor]:
    rows = size * value.shape[0]
    return [value.new_empty(rows, value.shape[1]), *(value.new_empty(rows, each.shape[1]) for each in weights)]


_HALO = "int dim, int[] lows, int[] highs, int[] edges"
_PARTS = "str group, int size, str algorithm, str label='', bool again=False"
_CODEC = "str codec='', Tensor? before=None, Tensor(b!)? state=None, SymInt draw=0"
_SCHEMAS: dict[str, Callable[..., Tensor | list[Tensor]] | None] = {
    "all_reduce_start(Tensor(a!) value, str op, str group, str algorithm, str label='', "
    f"{_CODEC}, int[] shapes=[]) -> Tensor(a!)": lambda value, *_: value,
    "all_gather_start(Tensor value, str group, int size, str algorithm, str label='') -> Tensor": (
        lambda value, group, size, *_: value.new_empty(size, *value.shape)
    ),
    "reduce_scatter_start(Tensor value, str op, str group, int size, str algorithm, str label='') -> Tensor": (
        lambda value, *_: value.new_empty(value.shape[1:])
    ),
    "all_to_all_start(Tensor value, str group, str algorithm, str label='') -> Tensor": (
        lambda value, *_: value.new_empty(value.shape)
    ),
    f"gather_parts_start(Tensor[] parts, {_PARTS}, str codec='', SymInt draw=0) -> Tensor": (
        lambda parts, group, size, *_: parts[0].new_empty(size * sum(part.numel() for part in parts))
    ),
    f"reduce_to_parts_start(Tensor[] values, {_PARTS}, {_CODEC}) -> Tensor": (
        lambda values, group, size, *_: values[0].new_empty(_parts_size(values, size))
    ),
    "exchange_rows(Tensor rows, Tensor counts, str group, SymInt size) -> (Tensor, Tensor)": None,
    "shift(Tensor value, str group, SymInt size, str algorithm='native', str label='') -> Tensor": (
        lambda value, *_: value.new_empty(value.shape)
    ),
    "gather_multiply(Tensor value, Tensor[] weights, str group, int size) -> Tensor[]": _gathered_products,
    "multiply_scatter(Tensor left, Tensor right, str group, int size) -> Tensor": (
        lambda left, right, group, size: left.new_empty(left.shape[0] // size, right.shape[1])
    ),
    "permute(Tensor rows, SymInt[] goes, SymInt[] comes, str group) -> Tensor": None,
    f"halo_exchange_start(Tensor value, {_HALO}, float fill, str group, int index, str label='') -> Tensor": _halo,
    f"halo_reduce_start(Tensor value, {_HALO}, str group, int index, str label='') -> Tensor": (
        lambda value, dim, lows, highs, edges, group, index, *_: _resized(value, dim, edges[index + 1] - edges[index])
    ),
    f"halo_return_start(Tensor strips, {_HALO}, str group, int index, str label='') -> Tensor": (
        lambda strips, *_: torch.empty_like(strips)
    ),
    "add_rows(Tensor(a!) value, Tensor rows, int dim, int start) -> Tensor(a!)": lambda value, *_: value,
    "wait(Tensor(a!) value) -> Tensor(a!)": lambda value: value,
}
"""Maps a schema to a function that makes results on fake tensors, or to None if graphs never call the operator."""
for _schema, _fake in _SCHEMAS.items():
    LIBRARY.define(_schema)
    if _fake is not None:
        register_fake(f"{NAMESPACE}::{_schema.partition('(')[0]}", _fake, lib=LIBRARY)

OPERATORS = torch.ops.meshwright_comm
ALL_REDUCE = OPERATORS.all_reduce_start.default
ALL_GATHER = OPERATORS.all_gather_start.default
REDUCE_SCATTER = OPERATORS.reduce_scatter_start.default
ALL_TO_ALL = OPERATORS.all_to_all_start.default
GATHER_PARTS = OPERATORS.gather_parts_start.default
REDUCE_TO_PARTS = OPERATORS.reduce_to_parts_start.default
EXCHANGE_ROWS = OPERATORS.exchange_rows.default
SHIFT = OPERATORS.shift.default
PERMUTE = OPERATORS.permute.default
GATHER_MULTIPLY = OPERATORS.gather_multiply.default
MULTIPLY_SCATTER = OPERATORS.multiply_scatter.default
HALO_EXCHANGE = OPERATORS.halo_exchange_start.default
HALO_REDUCE = OPERATORS.halo_reduce_start.default
HALO_RETURN = OPERATORS.halo_return_start.default
ADD_ROWS = OPERATORS.add_rows.default
WAIT = OPERATORS.wait.default
STARTS = frozenset({
    ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER_PARTS, REDUCE_TO_PARTS, SHIFT, HALO_EXCHANGE,
    HALO_REDUCE, HALO_RETURN,
})  # fmt: skip
