"""Products on a grid of tensor-parallel ranks (AxoNN's four-dimensional tensor parallelism): the words they move.

A product of m rows, k input features and n output features runs on x * y * z * d ranks. Ranks of ``tx`` split input
features, ranks of ``ty`` output features, ranks of ``tz`` and ``dp`` samples. The next product swaps x and y:

              first product               second product
    input     features over tx            features over ty
    weight    (tx, ty), in parts over tz  (ty, tx), in parts over tz
    output    summed over tx, over ty     summed over ty, over tx
"""

import msgspec


class LinearWords(msgspec.Struct, frozen=True, kw_only=True):
    """Elements that a rank receives in one step, for one product with its two gradients (Singh et al. 2023,
    "A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs", section 5)."""

    weight_gathers: float
    """All-gathers of the weight over ``tz``: for forward, and again for backward unless it is kept."""
    output_sum: float
    """All-reduce of the output over the ranks that split input features."""
    input_gradient_sum: float
    """All-reduce of the gradient of the input over the ranks that split output features."""
    gradient_scatter: float
    """Reduce-scatter of the gradient of the weight over ``tz``."""
    data_sum: float
    """All-reduce of the parts of this gradient over ``dp``."""

    @property
    def total(self) -> float:
        """All of these."""
        return float(sum(msgspec.structs.astuple(self)))


class LinearParts(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of the tensors of a product that its collectives gather or sum, on one rank."""

    weight: float
    """The weight, whole over ``tz``."""
    output: float
    input: float
    """The input, or its gradient."""
    gradient: float
    """The part of the weight's gradient that ranks of ``dp`` sum."""


def linear_parts(rows: int, inputs: int, outputs: int, grid: tuple[int, int, int], dp: int = 1) -> LinearParts:
    """The parts of a product of ``rows`` samples of the whole batch. ``grid``: as in ``linear_words``."""
    x, y, z = grid
    samples, weight = rows / (z * dp), inputs * outputs / (x * y)
    return LinearParts(
        weight=weight, output=samples * outputs / y, input=samples * inputs / x, gradient=weight / z
    )  # fmt: skip


def linear_words(
    rows: int, inputs: int, outputs: int, grid: tuple[int, int, int], dp: int = 1, *, kept: bool = False
) -> LinearWords:
    """The words of a product of ``rows`` samples of the whole batch. ``grid``: the ranks that split input features,
    output features and depth. ``kept``: the gathered weight is kept for backward.

    >>> linear_words(64, 16, 32, (2, 1, 1)).output_sum  # all 64 x 32 outputs are summed over two ranks
    2048.0
    """
    x, y, z = grid
    parts = linear_parts(rows, inputs, outputs, grid, dp)

    def once(ranks: int, words: float) -> float:
        return (ranks - 1) / ranks * words

    return LinearWords(
        weight_gathers=(1 if kept else 2) * once(z, parts.weight),
        output_sum=2 * once(x, parts.output),
        input_gradient_sum=2 * once(y, parts.input),
        gradient_scatter=once(z, parts.weight),
        data_sum=2 * once(dp, parts.gradient),
    )
