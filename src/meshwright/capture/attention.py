"""Captures attention as one operator, in whichever way a model calls it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwright.ops.attention_kernels  # noqa: F401 - defines meshwright::attention
from meshwright.capture.precision import lowered
from meshwright.torch_private import unread_masks

SCALED_DOT_PRODUCT: Callable[..., Tensor] = F.scaled_dot_product_attention


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
        return (*gradients, *[None] * (1 + len(context.settings)))


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, number: int = 0,
) -> Tensor | None:  # fmt: skip
    """Run ``F.scaled_dot_product_attention`` as one operator. Return None where that is not possible (a mask that needs
    a gradient, tensors without four dims). The caller must then call PyTorch's own function.

    With ``enable_gqa``, query heads share keys and values, which are not repeated. ``number`` identifies the call
    within a step, so that its forward and its backward draw the same dropout mask.
    """
    if attn_mask is not None and (attn_mask.requires_grad or is_causal or attn_mask.dim() not in (2, 4)):
        return None
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or query.shape[0] != key.shape[0]:
        return None
    heads, key_heads = query.shape[1], key.shape[1]
    if key_heads != value.shape[1] or (heads % key_heads if enable_gqa else heads != key_heads):
        return None
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    return _Attention.apply(query, key, value, attn_mask, dropout_p, is_causal, scale, 0, number)


class CapturedAttention:
    """Replaces PyTorch's attention function. A call is captured as one operator wherever that is possible."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call attention as one operator, or PyTorch's own function where one operator is not possible. It then does
        plain products, and not a kernel of a device: PyTorch 2.15 has a kernel for three dims, too."""
        self._calls += 1
        given, named = lowered((args, kwargs))
        result = attention(*given, **{**named, "number": self._calls})
        if result is not None:
            return result
        with sdpa_kernel(SDPBackend.MATH):
            return SCALED_DOT_PRODUCT(*args, **kwargs)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Replace PyTorch's function also inside ``F.multi_head_attention_forward``, which torch.nn's layers call. A
        torch-function mode sees only this outer function.

        Inside the context, torch.nn's fused kernels for evaluation are off (``torch.backends.mha``). PyTorch's test of
        whether a mask is causal is off too, because it would read values. A mask is applied as it is, unless the caller
        passes ``is_causal=True``.
        """
        fused = torch.backends.mha.get_fastpath_enabled()
        functions: Any = F
        functions.scaled_dot_product_attention = self
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with unread_masks():
                yield
        finally:
            functions.scaled_dot_product_attention = SCALED_DOT_PRODUCT
            torch.backends.mha.set_fastpath_enabled(fused)
