"""Operators of this project: attention for all devices, a gradient of cross-entropy."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from meshwright.ir.kernel import fused_attention

aten = torch.ops.aten
LIBRARY = Library("meshwright", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator ``NAME`` by its schema; ``kernel`` computes it, ``fake`` makes its results on fake tensors.
    The operator's attribute ``kernel`` is that function: a dry run calls it on fake tensors."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"meshwright::{name}", fake, lib=LIBRARY)
    getattr(torch.ops.meshwright, name).default.kernel = kernel


_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(*values: int) -> int:
    """Return a 63-bit hash of integers (the finalizer of SplitMix64; Steele, Lea, Flood 2014)."""
    state = 0
    for value in values:
        state = (state + value * 2 + 1 + _MIX[0]) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * _MIX[1]) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * _MIX[2]) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left`` times the transpose of ``right``, in float32 or wider. Float16 is cast before the product,
    because its sums could overflow."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == torch.float16:
        left, right = left.to(wide), right.to(wide)
    return torch.matmul(left, right.transpose(-2, -1)).to(wide)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, first: int = 0) -> Tensor:
    """Return the scores of queries and keys. ``first`` is the position of the first query, for the causal mask."""
    scores = _product(query * scale, key)
    if causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril_(first)
        scores = scores.masked_fill_(~allowed, -math.inf)
    return scores if mask is None else scores + mask


def _unknown(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor | None:
    """Find the queries with a NaN among their allowed scores. PyTorch's fused kernel returns 0 if all scores are NaN.

    Return None if no score can be NaN, because the product of the norms of ``query`` and ``key`` is finite. It is an
    upper limit of every product of a query and a key.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    bound = torch.linalg.vector_norm(query, dtype=wide) * torch.linalg.vector_norm(key, dtype=wide)
    if bound.isfinite():
        return None
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])
    parts = []
    for first in range(0, query.shape[-2], 256):  # all scores at once may not fit into memory
        rows = slice(first, first + 256)
        scores = _scores(query[..., rows, :], key, None if mask is None else mask[..., rows, :], causal, scale, first)
        parts.append(scores.isnan().any(-1, keepdim=True))
    return torch.cat(parts, -2)


def _weights(scores: Tensor, logsumexp: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the softmax of the scores in place. The weights of a query without allowed keys are 0. NaN stays NaN."""
    if mask is not None:
        logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    return scores.sub_(logsumexp.unsqueeze(-1)).exp_()


def _keep(scores: Tensor, dropout: float, random_key: int, salt: int) -> Tensor:
    kept: Tensor = torch.ops.meshwright.bernoulli(scores, 1.0 - dropout, random_key, salt)
    return kept.div_(1.0 - dropout if dropout < 1.0 else 1.0)


def _fused(query: Tensor, value: Tensor, dropout: float) -> bool:
    dtype = str(query.dtype).removeprefix("torch.")
    return fused_attention(query.device.type == "cpu", dtype, dropout > 0, query.shape[-1] == value.shape[-1])


def _laid_out(value: Tensor) -> Tensor:
    """Return the tensor in the memory order of the fused kernels: (batch, length, heads, ...)."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _attention_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float,
    random_key: int, salt: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = _additive(mask, query)
    if _fused(query, value, dropout):
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        if mask is not None:  # the kernel gives 0 where no key is allowed
            logsumexp.masked_fill_((mask == -math.inf).all(-1), -math.inf)
        output, unknown = _laid_out(output), _unknown(query, key, mask, causal, scale)
        return output if unknown is None else output.masked_fill_(unknown, math.nan), logsumexp
    scores = _scores(query, key, mask, causal, scale)
    logsumexp = scores.logsumexp(-1)
    weights = _weights(scores, logsumexp, mask)
    if dropout:
        weights = weights * _keep(weights, dropout, random_key, salt)
    return _laid_out(torch.matmul(weights.to(value.dtype), value)), _laid_out(logsumexp)


def _attention_backward_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logsumexp: Tensor,
    dropout: float, causal: bool, scale: float, random_key: int, salt: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mask = _additive(mask, query)
    if _fused(query, value, dropout):
        if mask is not None:
            logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, query, key, value, output, logsumexp, 0.0, causal, attn_mask=mask, scale=scale
        )
        return _laid_out(gradients[0]), _laid_out(gradients[1]), _laid_out(gradients[2])
    weights = _weights(_scores(query, key, mask, causal, scale), logsumexp, mask)
    grad_weights = _product(grad, value)
    dropped = weights
    if dropout:
        keep = _keep(weights, dropout, random_key, salt)
        dropped = weights * keep
        grad_weights = grad_weights * keep
    grad_value = torch.matmul(dropped.transpose(-2, -1).to(grad.dtype), grad)
    delta = (grad.to(weights.dtype) * output).sum(-1, keepdim=True)
    grad_scores = (weights * (grad_weights - delta)).to(query.dtype)
    grad_query = torch.matmul(grad_scores, key) * scale
    grad_key = torch.matmul(grad_scores.transpose(-2, -1), query) * scale
    return _laid_out(grad_query), _laid_out(grad_key), _laid_out(grad_value)


def _cross_entropy_backward(grad: Tensor, logarithms: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    weights = grad.expand(target.shape).masked_fill(target == ignore_index, 0).unsqueeze(-1)
    indices = target.masked_fill(target == ignore_index, 0).unsqueeze(-1)
    return logarithms.exp().mul_(weights).scatter_add_(-1, indices, -weights)


def _unfilled(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor (batch, heads, length, ...) in the memory order of ``_laid_out``."""
    batch, heads, length, *rest = shape
    return like.new_empty(batch, length, heads, *rest, dtype=dtype or like.dtype).transpose(1, 2)


def _attention_shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    statistics = torch.promote_types(query.dtype, torch.float32)
    output = _unfilled(query, *query.shape[:3], value.shape[-1])
    return output, _unfilled(query, *query.shape[:3], dtype=statistics)


def _attention_backward_shape(grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return tuple(_unfilled(value, *value.shape) for value in values[:3])


QUERY = "Tensor query, Tensor key, Tensor value, Tensor? mask"
RESULTS = "Tensor output, Tensor logsumexp"
KEY = "SymInt random_key, SymInt salt"
SETTINGS = f"float dropout, bool causal, float scale, {KEY}"
"""Groups of arguments in the schemas of attention."""
define(f"attention({QUERY}, {SETTINGS}) -> (Tensor, Tensor)", _attention_cpu, _attention_shape)
define(
    f"attention_backward(Tensor grad, {QUERY}, {RESULTS}, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _attention_backward_cpu,
    _attention_backward_shape,
)
define(
    "cross_entropy_backward(Tensor grad, Tensor logarithms, Tensor target, SymInt ignore_index) -> Tensor",
    _cross_entropy_backward,
    lambda grad, logarithms, *_: torch.empty_like(logarithms),
)


class _Attention(torch.autograd.Function):
    """Attention as one forward and one backward operator, so that a captured graph names no kernel of a device."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *settings: Any) -> Tensor:
        output, logsumexp = torch.ops.meshwright.attention(query, key, value, mask, *settings)
        context.save_for_backward(query, key, value, mask, output, logsumexp)
        context.settings = settings
        result: Tensor = output
        return result

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, logsumexp = context.saved_tensors
        gradients = torch.ops.meshwright.attention_backward(
            grad, query, key, value, mask, output, logsumexp, *context.settings
        )
        return (*gradients, *[None] * 6)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, number: int = 0,
) -> Tensor | None:  # fmt: skip
    """Run ``F.scaled_dot_product_attention`` as one operator. Return None where that is not possible (a mask that needs
    a gradient, tensors without four dims). The caller must then call PyTorch's own function.

    ``number`` identifies the call within a step, so that its forward and its backward draw the same dropout mask.
    """
    if attn_mask is not None and (attn_mask.requires_grad or is_causal or attn_mask.dim() not in (2, 4)):
        return None
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or query.shape[0] != key.shape[0]:
        return None
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if query.shape[1] != key.shape[1]:
        return None
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    return _Attention.apply(query, key, value, attn_mask, dropout_p, is_causal, scale, 0, number)
