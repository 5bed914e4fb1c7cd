"""The operators of attention, forward and backward: an algorithm computes the part of the scores that is visible.

Forward returns the output and the logarithm of the sum of exponentials of each query's scores (log-sum-exp). Backward
gets both. They may be those of more keys than the call has: so the results of several calls can be merged, and the
gradients of some keys do not depend on others. All algorithms (``ir/attention.py``) return the same log-sum-exp.

Rows and columns without a visible pair are cut away first. Queries without keys have the output 0 and the log-sum-exp
``-inf``. NaN stays NaN.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.ir.attention import CUDNN, EFFICIENT, FLASH, PLAIN, AttentionForm, Band, algorithms_of
from meshwright.ops.attention_fused import (
    cudnn,
    cudnn_backward,
    efficient,
    efficient_backward,
    flash,
    flash_backward,
    flash_on_cpu,
    flash_on_cpu_backward,
)
from meshwright.ops.attention_scores import Dropout, Results, ScoreSettings, laid_out, plain, plain_backward
from meshwright.ops.library import define

_Kernel = Callable[..., Results]
_KERNELS: dict[tuple[str, bool], tuple[_Kernel, _Kernel]] = {
    (PLAIN, True): (plain, plain_backward),
    (PLAIN, False): (plain, plain_backward),
    (FLASH, True): (flash_on_cpu, flash_on_cpu_backward),
    (FLASH, False): (flash, flash_backward),
    (CUDNN, False): (cudnn, cudnn_backward),
    (EFFICIENT, False): (efficient, efficient_backward),
}
"""Maps an algorithm, and whether it runs on a CPU, to its forward and its backward."""


def _kernels(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, shifted: bool, algorithm: str
) -> tuple[_Kernel, _Kernel]:
    on_cpu, dtype = query.device.type == "cpu", str(query.dtype).removeprefix("torch.")
    lengths = query.shape[2], key.shape[2]
    form = AttentionForm(dtype, query.shape[3], value.shape[3], *lengths, dropout > 0, mask is not None, shifted)
    served = algorithms_of(form, on_cpu)
    if algorithm and algorithm not in served:
        raise PlanError(
            f"{algorithm} does not compute attention of {dtype} with heads of {form.width} on a {query.device.type}",
            where="operator_algorithms", remedy=f"use {' or '.join(served)}, or plan for this device",
        )  # fmt: skip
    return _KERNELS[algorithm or served[0], on_cpu]


def _statistics(logsumexp: Tensor) -> Tensor:
    """The log-sum-exp [b, h, s] in the memory order of the device's fused kernels."""
    return laid_out(logsumexp) if logsumexp.device.type == "cpu" else logsumexp.contiguous()


def _visible(query: Tensor, key: Tensor, mask: Tensor | None, band: Band) -> tuple[slice, slice, Band]:
    """The rows and columns that are computed, and their band. With a mask all are."""
    return band.seen() if mask is None else (slice(0, query.shape[2]), slice(0, key.shape[2]), band)


def _is_part(rows: slice, columns: slice, band: Band) -> bool:
    return rows != slice(0, band.queries) or columns != slice(0, band.keys)


def _dropout(
    query: Tensor, key: Tensor, probability: float, random_key: Any, salt: int, sizes: Sequence[int] = (),
    begins: Sequence[int] = (), lengths: Sequence[int] = (), time: int = -1, rows: Sequence[int] = (0,),
    columns: Sequence[int] = (0,),
) -> Dropout | None:  # fmt: skip
    """The dropout of a call. Without ``sizes``, its scores are all scores. ``rows`` and ``columns`` are the first
    positions of ranges of queries and of keys that are equally long."""
    if not probability:
        return None
    if not sizes:
        sizes, begins, lengths = (*query.shape[:3], key.shape[2]), (0, 0), query.shape[:2]
    queries, keys = (
        tuple((first, count // len(firsts)) for first in firsts)
        for firsts, count in ((rows, query.shape[2]), (columns, key.shape[2]))
    )
    return Dropout(probability, random_key, salt, sizes, begins, lengths, time, queries, keys)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float,
    random_key: Any, salt: int, window: int = 0, first: int = 0, algorithm: str = "", *place: Any,
) -> Results:  # fmt: skip
    """The kernel of ``meshwright::attention``: the output [b, h, s, e] and the log-sum-exp [b, h, s]."""
    band = Band(query.shape[2], key.shape[2], causal, window, first)
    run, _ = _kernels(query, key, value, mask, dropout, causal and bool(window or first), algorithm)
    rows, columns, inner = _visible(query, key, mask, band)
    dropped = _dropout(query, key, dropout, random_key, salt, *place)
    settings = ScoreSettings(inner, scale, dropped and dropped.part(rows, columns))
    if not _is_part(rows, columns, band):
        output, logsumexp = run(query, key, value, mask, settings)
        return laid_out(output), _statistics(logsumexp)
    if rows == slice(0, band.queries):
        output, logsumexp = run(query, key[:, :, columns], value[:, :, columns], mask, settings)
        return laid_out(output), _statistics(logsumexp)
    output, logsumexp = attention_shape(query, key, value)
    output, logsumexp = output.zero_(), logsumexp.fill_(-math.inf)
    if inner.queries:
        part, own = run(query[:, :, rows], key[:, :, columns], value[:, :, columns], mask, settings)
        output[:, :, rows].copy_(part)
        logsumexp[:, :, rows].copy_(own)
    return output, logsumexp


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logsumexp: Tensor,
    dropout: float, causal: bool, scale: float, random_key: Any, salt: int, window: int = 0, first: int = 0,
    algorithm: str = "", *place: Any,
) -> Results:  # fmt: skip
    """The kernel of ``meshwright::attention_backward``: the gradients of query, key and value."""
    band = Band(query.shape[2], key.shape[2], causal, window, first)
    _, run = _kernels(query, key, value, mask, dropout, causal and bool(window or first), algorithm)
    rows, columns, inner = _visible(query, key, mask, band)
    dropped = _dropout(query, key, dropout, random_key, salt, *place)
    settings = ScoreSettings(inner, scale, dropped and dropped.part(rows, columns))
    if not _is_part(rows, columns, band):
        return tuple(map(laid_out, run(grad, query, key, value, mask, output, logsumexp, settings)))
    gradients = [whole.zero_() for whole in attention_backward_shape(grad, query, key, value)]
    if inner.queries:
        grad, query, output, logsumexp = (whole[:, :, rows] for whole in (grad, query, output, logsumexp))
        key, value = key[:, :, columns], value[:, :, columns]
        parts = run(grad, query, key, value, mask, output, logsumexp, settings)
        for whole, part, within in zip(gradients, parts, (rows, columns, columns), strict=True):
            whole[:, :, within].copy_(part)
    return tuple(gradients)


def _unfilled(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor (batch, heads, length, ...) in the memory order of ``laid_out``."""
    batch, heads, length, *rest = shape
    return like.new_empty(batch, length, heads, *rest, dtype=dtype or like.dtype).transpose(1, 2)


def attention_shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Results:
    """Empty results of ``attention``."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = _unfilled(query, *query.shape[:3], value.shape[-1])
    if query.device.type == "cpu":
        return output, _unfilled(query, *query.shape[:3], dtype=dtype)
    return output, query.new_empty(query.shape[:3], dtype=dtype)


def attention_backward_shape(grad: Tensor, *values: Any) -> Results:
    """Empty results of ``attention_backward``."""
    return tuple(_unfilled(value, *value.shape) for value in values[:3])


QUERY = "Tensor query, Tensor key, Tensor value, Tensor? mask"
RESULTS = "Tensor output, Tensor logsumexp"
SETTINGS = "float dropout, bool causal, float scale, SymInt random_key, SymInt salt"
BAND = "SymInt window=0, SymInt first=0, str algorithm=''"
PLACE = "int[] sizes=[], int[] begins=[], int[] lengths=[], int time=-1, int[] rows=[0], int[] columns=[0]"
"""Groups of arguments in the schemas of attention. The place says which numbers dropout draws (``Dropout``)."""
define(f"attention({QUERY}, {SETTINGS}, {BAND}, {PLACE}) -> (Tensor, Tensor)", attention, attention_shape)
define(
    f"attention_backward(Tensor grad, {QUERY}, {RESULTS}, {SETTINGS}, {BAND}, {PLACE}) -> (Tensor, Tensor, Tensor)",
    attention_backward,
    attention_backward_shape,
)
