"""Captures attention as one operator, in whichever way a model calls it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import transformer

from meshwright.capture.precision import lowered
from meshwright.ops import library

SCALED_DOT_PRODUCT: Callable[..., Tensor] = F.scaled_dot_product_attention


class CapturedAttention:
    """Replaces PyTorch's attention function. A call is captured as one operator wherever that is possible."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call attention as one operator, or PyTorch's own function where one operator is not possible."""
        self._calls += 1
        given, named = lowered((args, kwargs))
        result = library.attention(*given, **{**named, "number": self._calls})
        return SCALED_DOT_PRODUCT(*args, **kwargs) if result is None else result

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Replace PyTorch's function also inside ``F.multi_head_attention_forward``, which torch.nn's layers call. A
        torch-function mode sees only this outer function.

        Inside the context, torch.nn's fused kernels for evaluation are off (``torch.backends.mha``). PyTorch's test of
        whether a mask is causal is off too, because it would read values. A mask is applied as it is, unless the caller
        passes ``is_causal=True``.
        """
        fused, detect = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
        functions: Any = F
        layers: Any = transformer
        functions.scaled_dot_product_attention = self
        layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            functions.scaled_dot_product_attention = SCALED_DOT_PRODUCT
            layers._detect_is_causal_mask = detect
            torch.backends.mha.set_fastpath_enabled(fused)
