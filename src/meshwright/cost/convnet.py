"""A layer of a convolutional network: seconds and bytes on one rank, for part of the images, inputs or outputs."""

import msgspec

from meshwright.cost.compute import Rates
from meshwright.ir.convnet import NetLayer

FUSED = (2, 3)
"""How often bias and activation read or write the outputs, forward and backward."""

NORM = (3, 5)
"""How often batch norm does: statistics and application; both sums and the gradient."""


class LayerCost(msgspec.Struct, frozen=True):
    """Seconds of forward and backward, and bytes saved in between."""

    forward_s: float
    backward_s: float
    saved_bytes: float


def layer_cost(
    layer: NetLayer, images: float, rates: Rates, element_bytes: int, *, outputs: int = 1, inputs: int = 1,
    first: bool = False,
) -> LayerCost:  # fmt: skip
    """The layer on ``images``, with a rank's ``1 / outputs`` of the filters or ``1 / inputs`` of their channels.

    A convolution is the matrix product of positions by filters (Chellapilla et al. 2006). ``first``: no gradient of
    what comes in is needed.
    """
    rows = images * layer.pixels_out
    columns = layer.outputs / layer.groups / outputs
    depth = layer.depth / inputs
    forward_s = rates.matmul_s(rows, columns, depth, batch=layer.groups, element_bytes=element_bytes)
    backward_s = rates.matmul_s(depth, columns, rows, batch=layer.groups, element_bytes=element_bytes)
    if not first:
        backward_s += rates.matmul_s(rows, depth, columns, batch=layer.groups, element_bytes=element_bytes)
    made = images * layer.outputs / outputs * layer.pixels_out * element_bytes
    forward_s += rates.stream_s(made * (FUSED[0] + NORM[0] * layer.norm), 1 + layer.norm)
    backward_s += rates.stream_s(made * (FUSED[1] + NORM[1] * layer.norm), 2 + layer.norm)
    return LayerCost(
        forward_s=max(forward_s, (2 + layer.norm) * rates.launch_s),
        backward_s=max(backward_s, (4 + layer.norm) * rates.launch_s),
        saved_bytes=made * (1 + layer.norm),
    )
