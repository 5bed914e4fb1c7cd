"""The floating-point format in which a step computes; parameters, gradients and optimizer state stay in float32."""

from typing import Literal

Precision = Literal["float32", "bfloat16", "float16"]

LOSS_SCALE = "loss_scale"
"""The input that multiplies the loss of a float16 step before backward, because small gradients are 0 in float16."""


def is_scaled(precision: str | None) -> bool:
    """Whether the loss must be scaled: float16 gradients below 6e-8 become 0. Bfloat16 has the range of float32."""
    return precision == "float16"
