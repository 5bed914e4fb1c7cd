"""Fits the constants of matrix products (``ir.device.Kernels``) to measured products of a device."""

import math
import statistics
from collections.abc import Sequence
from itertools import product as every_pair

import msgspec

from meshwright.cost.kernels import Rates
from meshwright.ir.device import Device, Kernels
from meshwright.ir.kernel import Product

DEPTHS = (0.0, 30.0, 60.0, 100.0, 145.0, 200.0, 300.0, 450.0, 700.0)
OPERANDS = (0.0, 2.0, 4.0, 5.6, 8.0, 12.0, 18.0, 27.0, 40.0)
"""The values of ``extra_depth`` and ``operand_cost`` that are tried."""
TURNS = 6
"""How often ``matmul_fraction`` is corrected by the mean deviation."""


class FittedKernels(msgspec.Struct, frozen=True):
    """Fitted constants. ``deviation`` is the standard deviation of the logarithm of measured over computed seconds."""

    kernels: Kernels
    deviation: float


def fitted_kernels(device: Device, kernels: Kernels, products: Sequence[tuple[Product, str, float]]) -> FittedKernels:
    """The constants with which the products of ``products`` (their sizes, dtype and measured seconds) come out best.

    ``matmul_fraction`` follows from the other two: with it, computed times are right in the geometric mean. It is at
    most 1. Constants other than these three stay those of ``kernels``.
    """
    best: FittedKernels | None = None
    for extra_depth, operand_cost in every_pair(DEPTHS, OPERANDS):
        tried = msgspec.structs.replace(kernels, extra_depth=extra_depth, operand_cost=operand_cost)
        for _ in range(TURNS):  # again, because products that memory bounds do not follow the fraction
            off = statistics.fmean(_deviations(device, tried, products))
            fraction = min(1.0, tried.matmul_fraction * math.exp(-off))
            tried = msgspec.structs.replace(tried, matmul_fraction=fraction)
        deviation = math.sqrt(statistics.fmean(off * off for off in _deviations(device, tried, products)))
        if best is None or deviation < best.deviation:
            best = FittedKernels(tried, deviation)
    assert best is not None
    return best


def _deviations(device: Device, kernels: Kernels, products: Sequence[tuple[Product, str, float]]) -> list[float]:
    """The logarithm of measured over computed seconds, for each product."""
    rates = Rates(msgspec.structs.replace(device, kernels=kernels, efficiency={}))
    return [
        math.log(seconds / rates.matmul_s(size.m, size.n, size.k, batch=size.batch, dtype=dtype))
        for size, dtype, seconds in products
    ]
