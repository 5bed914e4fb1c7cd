"""Collectives as operators of two halves, start and wait: lowered graphs call them, compilers see through them.

``comm`` gives them their kernels; ``algorithm`` is a text of a plan (``schedules/collectives/choice.py``). A value that
has been started must be waited for before it is read. ``exchange_rows`` is only called inside of other operators'
kernels, because how many rows come is known at run time: it sends ``rows``, of which ``counts[rank].sum()`` go to each
rank in order, and returns what came, by sender, with the senders' counts for this rank; ``shift`` starts to send to the
next rank of the group and gives what the one before sends.
"""

import torch
from torch.library import Library, register_fake

NAMESPACE = "meshwright_comm"
LIBRARY = Library(NAMESPACE, "DEF")
LIBRARY.define("all_reduce_start(Tensor(a!) value, str op, str group, str algorithm) -> Tensor(a!)")
LIBRARY.define("all_gather_start(Tensor value, str group, int size, str algorithm) -> Tensor")
LIBRARY.define("reduce_scatter_start(Tensor value, str op, str group, int size, str algorithm) -> Tensor")
LIBRARY.define("exchange_rows(Tensor rows, Tensor counts, str group, SymInt size) -> (Tensor, Tensor)")
LIBRARY.define("shift(Tensor value, str group, SymInt size) -> Tensor")
LIBRARY.define("wait(Tensor(a!) value) -> Tensor(a!)")

register_fake(f"{NAMESPACE}::all_reduce_start", lambda value, op, group, algorithm: value, lib=LIBRARY)
register_fake(
    f"{NAMESPACE}::all_gather_start",
    lambda value, group, size, algorithm: value.new_empty(size, *value.shape),
    lib=LIBRARY,
)
register_fake(
    f"{NAMESPACE}::reduce_scatter_start",
    lambda value, op, group, size, algorithm: value.new_empty(value.shape[1:]),
    lib=LIBRARY,
)
register_fake(f"{NAMESPACE}::wait", lambda value: value, lib=LIBRARY)

_OPERATORS = torch.ops.meshwright_comm
ALL_REDUCE = _OPERATORS.all_reduce_start.default
ALL_GATHER = _OPERATORS.all_gather_start.default
REDUCE_SCATTER = _OPERATORS.reduce_scatter_start.default
EXCHANGE_ROWS = _OPERATORS.exchange_rows.default
SHIFT = _OPERATORS.shift.default
WAIT = _OPERATORS.wait.default
STARTS = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER})
