"""While a step is traced: which operators compute in bfloat16 or float16, and which stay in float32.

The lists are those of PyTorch's automatic mixed precision (torch.amp, "Autocast Op Reference"): products and
convolutions in the low precision, as torch.autocast casts for them; what sums or has a wide range in float32, by the
list that autocast has for CUDA. Norms are in float32 here too. A gradient has the dtype of what it is the gradient of:
those of parameters are float32.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.errors import CaptureError

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precisions whose products are not float32."""
IN_FLOAT32 = frozenset({
    "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "pow", "float_power", "acos", "asin", "cosh", "sinh", "tan",
    "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "softplus", "logsumexp",
    "softmax", "log_softmax", "softmin", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm",
    "local_response_norm", "norm", "vector_norm", "normalize", "renorm", "cdist", "dist", "pdist", "cosine_similarity",
    "sum", "prod", "mean", "var", "std", "var_mean", "std_mean", "cumsum", "cumprod", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "gaussian_nll_loss",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss",
})  # fmt: skip
"""Functions of torch, of Tensor and of torch.nn.functional, by name."""


def computing_in(precision: str | None) -> AbstractContextManager[Any]:
    """Products in ``precision``; as the model says where that is None or float32."""
    return torch.autocast("cpu", LOW[precision]) if precision in LOW else nullcontext()


def called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, in float32 if it is one of ``IN_FLOAT32`` and products are not."""
    if torch.is_autocast_enabled("cpu") and getattr(function, "__name__", "") in IN_FLOAT32:
        args, kwargs = tree_map(_widened, (args, kwargs))
    return function(*args, **kwargs)


def lowered(values: Any) -> Any:
    """A tree of what operators of our own take, in the dtype of products: torch.autocast does not know them."""
    if not torch.is_autocast_enabled("cpu"):
        return values
    dtype = torch.get_autocast_dtype("cpu")
    floats = (torch.float32, *LOW.values())
    return tree_map(lambda one: one.to(dtype) if isinstance(one, Tensor) and one.dtype in floats else one, values)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW.values() else value


def check_masters(precision: str | None, parameters: Mapping[str, Tensor]) -> None:
    """That parameters are float32 where a precision is asked for.

    Raises:
        CaptureError: one is not.
    """
    for name, value in parameters.items() if precision is not None else ():
        if value.is_floating_point() and value.dtype != torch.float32:
            dtype = str(value.dtype).removeprefix("torch.")
            raise CaptureError(
                f"it is {dtype}; under precision {precision!r} parameters are kept in float32",
                where=f"parameter {name}",
                remedy="pass model.float(), or leave precision out: the model then computes in its own dtypes",
            )
