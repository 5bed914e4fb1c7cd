"""Attention of sequences of different lengths that lie one after the other (``torch.nn.attention.varlen``).

Queries [t, h, d], keys [u, h, d] and values [u, h, e] have the tokens of all sequences. Sequence i has the queries from
``bounds[i]`` up to ``bounds[i + 1]``, and the keys likewise. Its last query stands beside its last key. On GPUs,
FlashAttention takes the bounds. On CPUs, the sequences are computed one by one. Where there is no fused kernel, and the
host must not wait for the bounds, one mask hides the other sequences.

Only heads are split: a part of the tokens would not know where its sequences begin.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.attention import FLASH, AttentionForm, Band, algorithms_of
from meshwright.ir.rule import Rule
from meshwright.ops.attention_kernels import attention, attention_backward
from meshwright.ops.attention_scores import ScoreSettings, plain, plain_backward
from meshwright.ops.base import Call, OperatorRule, Target, make_rule
from meshwright.ops.library import define

aten = torch.ops.aten
ours = torch.ops.meshwright


def _is_flash(query: Tensor, value: Tensor) -> bool:
    dtype = str(query.dtype).removeprefix("torch.")
    return FLASH in algorithms_of(AttentionForm(dtype, query.shape[2], value.shape[2], len(query), len(query)), False)


def _window(causal: bool, window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if causal and window else {}


def _sequences(bounds: Tensor, key_bounds: Tensor) -> list[tuple[slice, slice]]:
    """The queries and keys of each sequence."""
    queries, keys = ([slice(*pair) for pair in pairwise(edges.tolist())] for edges in (bounds, key_bounds))
    return list(zip(queries, keys, strict=True))


def _alone(value: Tensor, rows: slice) -> Tensor:
    """One sequence as [1, h, s, ...]."""
    return value[rows].transpose(0, 1).unsqueeze(0)


def _settings(rows: slice, columns: slice, causal: bool, scale: float, window: int) -> tuple[Any, ...]:
    first = (columns.stop - columns.start) - (rows.stop - rows.start)
    return 0.0, causal, scale, 0, 0, window if causal else 0, first if causal else 0


def _hidden(query: Tensor, key: Tensor, bounds: Tensor, key_bounds: Tensor, causal: bool, window: int) -> Tensor:
    """The mask [t, u]: true where a query sees a key of its own sequence."""

    def numbered(value: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(value.shape[0], device=value.device, dtype=edges.dtype)
        number = torch.bucketize(places, edges, right=True)
        return number, places - edges[number.clamp(max=edges.shape[0] - 1)]

    (number, place), (key_number, key_place) = numbered(query, bounds), numbered(key, key_bounds)
    seen = number[:, None] == key_number[None]
    if causal:
        seen = seen & (key_place[None] <= place[:, None])
        if window:
            seen = seen & (key_place[None] > place[:, None] - window)
    return seen


def packed(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, key_bounds: Tensor, longest: int, longest_key: int,
    causal: bool, scale: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [t, h, e] and the log-sum-exp [h, t]."""
    if query.device.type != "cpu" and _is_flash(query, value):
        output, logsumexp, *_ = aten._flash_attention_forward.default(
            query, key, value, bounds, key_bounds, longest, longest_key, 0.0, causal, False, scale=scale,
            **_window(causal, window),
        )  # fmt: skip
        return output, logsumexp
    if query.device.type != "cpu":
        mask = _hidden(query, key, bounds, key_bounds, causal, window)
        queries, keys, values = (_alone(part, slice(None)) for part in (query, key, value))
        output, logsumexp = plain(queries, keys, values, mask, ScoreSettings(Band(len(query), len(key)), scale))
        return output[0].transpose(0, 1).contiguous(), logsumexp[0].contiguous()
    output, logsumexp = packed_shape(query, key, value)
    output, logsumexp = output.zero_(), logsumexp.fill_(-math.inf)
    for rows, columns in _sequences(bounds, key_bounds):
        parts = (_alone(query, rows), _alone(key, columns), _alone(value, columns))
        part, own = attention(*parts, None, *_settings(rows, columns, causal, scale, window))
        output[rows] = part[0].transpose(0, 1)
        logsumexp[:, rows] = own[0]
    return output, logsumexp


def packed_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, bounds: Tensor,
    key_bounds: Tensor, longest: int, longest_key: int, causal: bool, scale: float, window: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of query, key and value."""
    if query.device.type != "cpu" and _is_flash(query, value):
        unused = query.new_empty((2,), dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        gradients: tuple[Tensor, ...] = aten._flash_attention_backward.default(
            grad, query, key, value, output, logsumexp, bounds, key_bounds, longest, longest_key, 0.0, causal, *unused,
            scale=scale, **_window(causal, window),
        )  # fmt: skip
        return gradients
    if query.device.type != "cpu":
        mask = _hidden(query, key, bounds, key_bounds, causal, window)
        settings = ScoreSettings(Band(len(query), len(key)), scale)
        grads, queries, keys, values, outputs = (
            _alone(part, slice(None)) for part in (grad, query, key, value, output)
        )
        sequence_gradients = plain_backward(
            grads, queries, keys, values, mask, outputs, logsumexp.unsqueeze(0), settings
        )
        return tuple(gradient[0].transpose(0, 1).contiguous() for gradient in sequence_gradients)
    totals = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
    for rows, columns in _sequences(bounds, key_bounds):
        parts = (_alone(grad, rows), _alone(query, rows), _alone(key, columns), _alone(value, columns))
        kept = _alone(output, rows), logsumexp[:, rows].unsqueeze(0)
        sequence_gradients = attention_backward(*parts, None, *kept, *_settings(rows, columns, causal, scale, window))
        for total, part, place in zip(totals, sequence_gradients, (rows, columns, columns), strict=True):
            total[place] = part[0].transpose(0, 1)
    return tuple(totals)


def packed_shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Empty results of ``packed``."""
    tokens, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(tokens, heads, value.shape[2]), query.new_empty(heads, tokens, dtype=dtype)


def _gradients_shape(grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(value, memory_format=torch.contiguous_format) for value in values[:3])


_BOUNDS = (
    "Tensor bounds, Tensor key_bounds, SymInt longest, SymInt longest_key, bool causal, float scale, SymInt window"
)
define(f"attention_packed(Tensor query, Tensor key, Tensor value, {_BOUNDS}) -> (Tensor, Tensor)", packed, packed_shape)
define(
    "attention_packed_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, "
    f"{_BOUNDS}) -> (Tensor, Tensor, Tensor)",
    packed_backward,
    _gradients_shape,
)


def _heads(query: Tensor, key: Tensor) -> str:
    return "h" if query.shape[1] == key.shape[1] else "(h r)"


def packed_rule(call: Call) -> Rule:
    """``!t h !d, !u h !d, !u h !e, !n, !m -> !t h !e, h !t``; query heads that share key heads are ``(h r)``."""
    query, key = call.args[:2]
    heads = _heads(query, key)
    pattern = f"!t {heads} !d, !u h !d, !u h !e, !n, !m -> !t {heads} !e, {heads} !t"
    return make_rule(call, pattern, h=key.shape[1])


def packed_backward_rule(call: Call) -> Rule:
    """The same heads as in forward."""
    query, key = call.args[1:3]
    heads = _heads(query, key)
    q, k, v, o = f"!t {heads} !d", "!u h !d", "!u h !e", f"!t {heads} !e"
    return make_rule(call, f"{o}, {q}, {k}, {v}, {o}, {heads} !t, !n, !m -> {q}, {k}, {v}", h=key.shape[1])


def _flops(first: int, products: int) -> Callable[[Call, Rule | None], float]:
    """Count the products as if every query saw as many keys as the longest sequence has: only the batch tells more."""

    def count(call: Call, rule: Rule | None) -> float:
        query, _, value = call.args[first : first + 3]
        longest = call.args[first + (6 if first == 0 else 8)]
        return 1.0 * query.shape[0] * query.shape[1] * longest * (query.shape[2] + value.shape[2]) * products

    return count


RULES = {
    ours.attention_packed.default: OperatorRule(packed_rule, flops=_flops(0, 2)),
    ours.attention_packed_backward.default: OperatorRule(packed_backward_rule, flops=_flops(1, 5)),
}


# --- capture ----------------------------------------------------------------------------------------------------------


def _read(sizes: Sequence[int] | None, causal: bool) -> tuple[bool, int] | None:
    """The causal flag and the window that PyTorch's pair of window sizes means; None for windows of later keys."""
    left, right = sizes or (-1, -1)
    if right not in (0, -1) or (right == -1 and left != -1 and not causal):
        return None
    return causal or right == 0, left + 1


def _captured(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, key_bounds: Tensor | None, longest: int,
    longest_key: int, causal: bool = False, scale: float | None = None, window: Sequence[int] | None = None, *rest: Any,
) -> Any:  # fmt: skip
    """Capture PyTorch's operator as ours, except with the options of inference."""
    band = _read(window, causal)
    if key_bounds is None or band is None or any(option is not None for option in rest[1:3]):
        return NotImplemented
    given = scale or 1.0 / math.sqrt(query.shape[2])
    results = ours.attention_packed.default(
        query, key, value, bounds, key_bounds, longest, longest_key, band[0], given, band[1]
    )
    return *results, query.new_empty(2, dtype=torch.int64)  # the state of random numbers, which nothing reads


def _captured_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, bounds: Tensor,
    key_bounds: Tensor, longest: int, longest_key: int, causal: bool, state: Tensor, scale: float | None = None,
    window: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    band = _read(window, causal)
    if band is None:
        return NotImplemented
    given = scale or 1.0 / math.sqrt(query.shape[2])
    return ours.attention_packed_backward.default(
        grad, query, key, value, output, logsumexp, bounds, key_bounds, longest, longest_key, band[0], given, band[1]
    )


def rewrites() -> dict[Target, Callable[..., Any]]:
    """Maps the operators of ``torch.nn.attention.varlen`` to functions that capture calls in their place. PyTorch
    defines them when that module is imported, which imports the compiler too."""
    library = torch.ops.torch_attn
    if not hasattr(library, "_varlen_attn"):
        return {}
    return {library._varlen_attn.default: _captured, library._varlen_attn_backward.default: _captured_backward}
