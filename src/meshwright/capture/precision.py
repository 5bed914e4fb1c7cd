"""The dtypes of a traced step: which operators compute in bfloat16 or float16, and which in float32.

The lists are those of PyTorch's automatic mixed precision (torch.amp, "Autocast Op Reference"). torch.autocast casts
the inputs of products and convolutions to the low precision. The functions of ``IN_FLOAT32`` run in float32: norms, and
the functions of PyTorch's float32 list for CUDA (sums, exponentials, losses). A gradient has the dtype of its tensor,
which is float32 for parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.errors import CaptureError
from meshwright.torch_private import pytree

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Maps each 16-bit precision to the dtype of its products."""
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
"""Functions that compute in float32: names in torch, Tensor and torch.nn.functional."""


def computing_in(precision: str | None) -> AbstractContextManager[Any]:
    """Return a context that computes products in ``precision``, or in the model's own dtypes for None and float32."""
    return torch.autocast("cpu", LOW[precision]) if precision in LOW else nullcontext()


@contextmanager
def eagerly_in(precision: str | None, device: str) -> Iterator[None]:
    """The same for code that runs eagerly on tensors of a device, with all casts of a traced step."""
    if precision not in LOW:
        yield
        return
    with computing_in(precision), torch.autocast(device, LOW[precision]), _Casts():
        yield


class _Casts(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(function, args, kwargs or {})


def called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)``. Under autocast, cast its arguments to float32 if ``IN_FLOAT32`` names it."""
    if torch.is_autocast_enabled("cpu") and getattr(function, "__name__", "") in IN_FLOAT32:
        args, kwargs = pytree.tree_map(_widened, (args, kwargs))
    return function(*args, **kwargs)


def lowered(values: Any) -> Any:
    """Cast the arguments of our own operators to the dtype of matrix products. torch.autocast does not cast them."""
    if not torch.is_autocast_enabled("cpu"):
        return values
    dtype = torch.get_autocast_dtype("cpu")
    floats = (torch.float32, *LOW.values())
    return pytree.tree_map(
        lambda value: value.to(dtype) if isinstance(value, Tensor) and value.dtype in floats else value, values
    )


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW.values() else value


def check_masters(precision: str | None, parameters: Mapping[str, Tensor]) -> None:
    """Check that floating-point parameters are float32 if a precision is given.

    Raises:
        CaptureError: a parameter has another dtype.
    """
    for name, value in parameters.items() if precision is not None else ():
        if value.is_floating_point() and value.dtype != torch.float32:
            dtype = str(value.dtype).removeprefix("torch.")
            raise CaptureError(
                f"it is {dtype}; under precision {precision!r} parameters are kept in float32",
                where=f"parameter {name}",
                remedy="pass model.float(), or leave precision out: the model then computes in its own dtypes",
            )
