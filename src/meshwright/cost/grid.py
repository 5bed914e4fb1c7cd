"""Products on a grid of tensor-parallel ranks (AxoNN's four-dimensional tensor parallelism): the numbers of words
(elements) that they communicate.

A product of m rows, k input features and n output features runs on x * y * z * d ranks. Ranks along ``tx`` split input
features, ranks along ``ty`` split output features, and ranks along ``tz`` and ``dp`` split samples. In the next
product, x and y swap:

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
    """All-gathers of the weight over ``tz``: for forward, and again for backward unless the gathered weight is kept."""
    output_sum: float
    """All-reduce of the output over the ranks that split input features."""
    input_gradient_sum: float
    """All-reduce of the gradient of the input over the ranks that split output features."""
    gradient_scatter: float
    """Reduce-scatter of the gradient of the weight over ``tz``."""
    data_sum: float
    """All-reduce over ``dp`` of the parts of the weight's gradient."""

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return float(sum(msgspec.structs.astuple(self)))


class LinearParts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of elements on one rank of the tensors that the collectives of a product gather or sum."""

    weight: float
    """The weight, gathered over ``tz``."""
    output: float
    input: float
    """The input, or its gradient."""
    gradient: float
    """The part of the weight's gradient that is summed over ``dp``."""


def linear_parts(rows: int, inputs: int, outputs: int, grid: tuple[int, int, int], dp: int = 1) -> LinearParts:
    """The parts of a product with ``rows`` samples in the whole batch. ``grid`` is defined as in ``linear_words``."""
    x, y, z = grid
    samples, weight = rows / (z * dp), inputs * outputs / (x * y)
    return LinearParts(
        weight=weight, output=samples * outputs / y, input=samples * inputs / x, gradient=weight / z
    )  # fmt: skip


def linear_words(
    rows: int, inputs: int, outputs: int, grid: tuple[int, int, int], dp: int = 1, *, kept: bool = False
) -> LinearWords:
    """The words of a product with ``rows`` samples in the whole batch. ``grid``: the numbers of ranks that split input
    features, output features and depth. ``kept``: the gathered weight is kept for backward.

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
