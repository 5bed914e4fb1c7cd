"""While a step is traced, attention is one operator, by whichever way a model comes to it."""

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


class Attention:
    """Attention as PyTorch's function takes it, but captured as one operator wherever that is possible."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self._calls += 1
        given, named = lowered((args, kwargs))
        result = library.attention(*given, **{**named, "number": self._calls})
        return SCALED_DOT_PRODUCT(*args, **kwargs) if result is None else result

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Stand for PyTorch's function also inside ``F.multi_head_attention_forward``, which a torch-function mode
        sees from outside only: there torch.nn's layers look it up.

        The fused forms that these layers have for evaluation are off meanwhile. A mask is not asked whether it is
        causal, which would be a question about values: unless the caller says so it is applied as it is.
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
