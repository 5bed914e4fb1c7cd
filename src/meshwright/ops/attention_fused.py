"""Attention by fused kernels, which keep no scores: the calls of PyTorch's operators on CPUs and GPUs.

Queries [b, g r, s, d] share keys [b, g, t, d] in groups of r heads. FlashAttention, cuDNN and the CPU's kernel take
such keys as they are. Only memory-efficient attention needs copies of them.

A causal mask or a window goes to a kernel that has it. Otherwise, it becomes a mask.
"""

import math

import torch
from torch import Tensor

from meshwright.ir.attention import Band
from meshwright.ops.attention_scores import (
    Results,
    ScoreSettings,
    causal_or_terms,
    finite,
    unknown_queries,
    without_keys,
)

aten = torch.ops.aten


def flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: ScoreSettings) -> Results:
    """PyTorch's fused kernel for CPUs."""
    band, scale = settings.band, settings.scale
    causal, terms = causal_or_terms(mask, query, band)
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, causal, attn_mask=terms, scale=scale
    )
    if (empty := without_keys(terms)) is not None:  # the kernel gives 0 where no key is allowed
        logsumexp.masked_fill_(empty, -math.inf)
    unknown = unknown_queries(query, key, mask, band, scale)
    return output if unknown is None else output.masked_fill(unknown, math.nan), logsumexp


def flash_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logsumexp: Tensor,
    settings: ScoreSettings,
) -> Results:  # fmt: skip
    """The gradients by PyTorch's fused kernel for CPUs."""
    causal, terms = causal_or_terms(mask, query, settings.band)
    gradients: Results = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, query, key, value, output, finite(logsumexp, terms), 0.0, causal, attn_mask=terms, scale=settings.scale
    )
    return gradients


# --- fused kernels of GPUs --------------------------------------------------------------------------------------------


def _edges(band: Band) -> tuple[bool, dict[str, int]]:
    """FlashAttention's causal flag and window of a band that is cut to its visible part. The kernel aligns the last
    query with the last key; its window counts the visible keys before and after that diagonal."""
    if not band.causal:
        return False, {}
    after = band.first + band.queries - band.keys
    before = band.window - 1 - after if band.window else -1
    if not after and not band.window:
        return True, {}
    return not after, {"window_size_left": before, "window_size_right": after}


def _dense(*values: Tensor) -> list[Tensor]:
    """The tensors [b, s, h, d] with the elements of a head side by side, as the kernels need them."""
    return [(value if value.stride(-1) == 1 else value.contiguous()).transpose(1, 2) for value in values]


def _no_seed(query: Tensor, dtype: torch.dtype = torch.int64, *shape: int) -> Tensor:
    """Stands in for the state of random numbers, which the kernels read only with dropout."""
    return query.new_empty(shape, dtype=dtype)


def flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: ScoreSettings) -> Results:
    """FlashAttention 2."""
    band, (causal, window) = settings.band, _edges(settings.band)
    output, logsumexp, *_ = aten._flash_attention_forward.default(
        *_dense(query, key, value), None, None, band.queries, band.keys, 0.0, causal, False, scale=settings.scale,
        **window,
    )  # fmt: skip
    return output.transpose(1, 2), logsumexp


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logsumexp: Tensor,
    settings: ScoreSettings,
) -> Results:  # fmt: skip
    """The gradients by FlashAttention 2."""
    band, (causal, window) = settings.band, _edges(settings.band)
    unused = _no_seed(query, torch.uint64, 2), _no_seed(query, torch.uint64)
    gradients = aten._flash_attention_backward.default(
        *_dense(grad, query, key, value, output), logsumexp.contiguous(), None, None, band.queries, band.keys, 0.0,
        causal, *unused, scale=settings.scale, **window,
    )  # fmt: skip
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


def _expanded(mask: Tensor | None, query: Tensor, key: Tensor, step: int = 1) -> Tensor | None:
    """Terms of the scores [b, h, s, t] as a view. Rows begin at multiples of ``step`` elements."""
    if mask is None:
        return None
    terms = mask.to(query.dtype)
    rows, columns = terms.shape[-2:]
    if step > 1 and columns > 1 and (rows == 1 or terms.stride(-2) % step or terms.stride(-1) != 1):
        padded = terms.new_empty(*terms.shape[:-1], -(-columns // step) * step)[..., :columns]
        terms = padded.copy_(terms)
    return terms.expand(*query.shape[:3], key.shape[2])


def cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: ScoreSettings) -> Results:
    """cuDNN's fused kernel."""
    causal, terms = causal_or_terms(mask, query, settings.band)
    output, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, _expanded(terms, query, key), True, 0.0, causal, False, scale=settings.scale
    )
    return _emptied(output, logsumexp.squeeze(-1), terms)


def cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logsumexp: Tensor,
    settings: ScoreSettings,
) -> Results:  # fmt: skip
    """The gradients by cuDNN's fused kernel."""
    band, (causal, terms) = settings.band, causal_or_terms(mask, query, settings.band)
    statistics = finite(logsumexp, terms).contiguous().unsqueeze(-1)
    gradients: Results = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, query, key, value, output, statistics, _no_seed(query), _no_seed(query), _expanded(terms, query, key),
        None, None, band.queries, band.keys, 0.0, causal, scale=settings.scale,
    )  # fmt: skip
    return gradients


def _emptied(output: Tensor, logsumexp: Tensor, mask: Tensor | None) -> Results:
    """The results with those of queries without keys, for which kernels return different numbers."""
    empty = without_keys(mask)
    if empty is None:
        return output, logsumexp
    return output.masked_fill(empty.unsqueeze(-1), 0.0), logsumexp.masked_fill(empty, -math.inf)


_ALIGNMENT = 16
"""Elements to which memory-efficient attention needs the rows of a mask aligned."""
_ROWS = 32
"""The multiple to which memory-efficient attention pads the log-sum-exp."""


def _repeated(value: Tensor, shared: int) -> Tensor:
    """A copy [b, g r, t, d] of [b, g, t, d] in which ``shared`` query heads have their own key head."""
    return value if shared == 1 else value.unsqueeze(2).expand(-1, -1, shared, -1, -1).flatten(1, 2)


def efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: ScoreSettings) -> Results:
    """Memory-efficient attention of CUTLASS."""
    causal, terms = causal_or_terms(mask, query, settings.band)
    shared = query.shape[1] // key.shape[1]
    output, logsumexp, *_ = aten._scaled_dot_product_efficient_attention.default(
        query, _repeated(key, shared), _repeated(value, shared), _expanded(terms, query, key, _ALIGNMENT), True, 0.0,
        causal, scale=settings.scale,
    )  # fmt: skip
    return _emptied(output, logsumexp[:, :, : query.shape[2]], terms)


def efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor, logsumexp: Tensor,
    settings: ScoreSettings,
) -> Results:  # fmt: skip
    """The gradients by memory-efficient attention."""
    causal, terms = causal_or_terms(mask, query, settings.band)
    shared = query.shape[1] // key.shape[1]
    statistics = finite(logsumexp, terms).contiguous()
    if missing := -query.shape[2] % _ROWS:
        statistics = torch.nn.functional.pad(statistics, (0, missing), value=math.inf)
    gradients = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, query, _repeated(key, shared), _repeated(value, shared), _expanded(terms, query, key, _ALIGNMENT),
        output, statistics, _no_seed(query), _no_seed(query), 0.0, [True, True, True, False], causal,
        scale=settings.scale,
    )[:3]  # fmt: skip
    if shared == 1:
        return tuple(gradients)
    return gradients[0], *(gradient.unflatten(1, (-1, shared)).sum(2) for gradient in gradients[1:])
