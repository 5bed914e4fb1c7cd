"""In which floating-point format a step computes; parameters, gradients and optimizer state stay in float32."""

from typing import Literal

Precision = Literal["float32", "bfloat16", "float16"]

LOSS_SCALE = "loss_scale"
"""The input by which a step in float16 multiplies its loss before backward: small gradients are 0 in float16."""


def is_scaled(precision: str | None) -> bool:
    """Whether backward needs a scaled loss: float16 reaches down to 6e-8 only, bfloat16 as far as float32."""
    return precision == "float16"
