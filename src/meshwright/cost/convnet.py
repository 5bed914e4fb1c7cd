"""The cost of a layer of a convolutional network on one rank, for a part of the images, inputs or outputs."""

import msgspec

from meshwright.cost.host import launched_s
from meshwright.cost.kernels import Rates, element_bytes
from meshwright.ir.convnet import NetLayer
from meshwright.ir.kernel import Product

CONVOLUTIONS = ("convolution", "convolution_weight", "convolution_input")
FUSED = (2, 3)
"""How often bias and activation read or write the outputs, forward and backward."""

NORM = (3, 5)
"""How often batch norm reads or writes the outputs: statistics and application in forward, both sums and the gradient
in backward."""


class LayerCost(msgspec.Struct, frozen=True):
    """Seconds of a layer's forward and backward, and the bytes saved in between."""

    forward_s: float
    backward_s: float
    saved_bytes: float


def layer_cost(
    layer: NetLayer, images: float, rates: Rates, dtype: str, *, outputs: int = 1, inputs: int = 1,
    first: bool = False,
) -> LayerCost:  # fmt: skip
    """The cost of a layer on ``images``; a rank has ``1 / outputs`` of the filters or ``1 / inputs`` of their channels.

    A convolution counts as the matrix product of positions by filters (Chellapilla et al. 2006). ``first``: the
    gradient of the layer's input is not needed.
    """
    rows = images * layer.pixels_out
    columns = layer.outputs / layer.groups / outputs
    depth = layer.depth / inputs
    kinds = ("matmul",) * 3 if layer.kind == "dense" else CONVOLUTIONS
    output_bytes = images * layer.outputs / outputs * layer.pixels_out * element_bytes(dtype)
    input_bytes = images * layer.inputs / inputs * layer.pixels_in * element_bytes(dtype)
    moved = input_bytes + output_bytes + layer.weights / outputs / inputs * element_bytes(dtype)
    flops = 2.0 * layer.groups * rows * columns * depth

    def product_s(kind: str, m: float, n: float, k: float) -> float:
        return rates.seconds(kind, dtype, flops, moved, Product(m, n, k, layer.groups))

    forward_s = product_s(kinds[0], rows, columns, depth)
    backward_s = product_s(kinds[1], depth, columns, rows)
    if not first:
        backward_s += product_s(kinds[2], rows, depth, columns)
    forward_s += rates.memory_bound("pointwise", output_bytes * FUSED[0]).seconds
    backward_s += rates.memory_bound("pointwise", output_bytes * FUSED[1], 2).seconds
    if layer.norm:
        forward_s += rates.memory_bound("batch_norm", output_bytes * NORM[0]).seconds
        backward_s += rates.memory_bound("batch_norm_backward", output_bytes * NORM[1]).seconds
    return LayerCost(
        forward_s=launched_s(forward_s, (2 + layer.norm) * rates.launch_s),
        backward_s=launched_s(backward_s, (4 + layer.norm) * rates.launch_s),
        saved_bytes=output_bytes * (1 + layer.norm),
    )
