"""Probes: calls whose time is measured, in a few sizes for each kind of operator. They need no model."""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import Any

import msgspec
import torch
from torch import Tensor

import meshwright.ops.attention_kernels  # noqa: F401 - defines meshwright::attention
from meshwright.ir.graph import ITEM_BYTES

aten = torch.ops.aten
COLD_BYTES = 64 * 2**20
"""Bytes that are read or written before an operand is used again, so that it is no longer in a core's caches."""
ROW, FLAT = 256, 24
DTYPES = ("float32", "float64", "bfloat16")


class Probe(msgspec.Struct, frozen=True):
    """A call to measure: its kind (``ir/kind.py``), its size (FLOPs, or bytes of inputs and outputs), and its function.
    ``other`` is set only for products and convolutions: their bytes if ``size`` is FLOPs, their FLOPs if ``size`` is
    bytes."""

    kind: str
    size: float
    call: Callable[[], Any]
    other: float = 0.0


def kernel_probe() -> Probe:
    """A call so small that nearly all of its time is dispatch."""
    left, right = torch.ones(1), torch.ones(1)
    return Probe("dispatch", 0.0, lambda: torch.add(left, right))


def matmul_probe(side: int, dtype: str) -> Probe:
    """A product of square matrices. The second operand is transposed, as in linear layers."""
    matrix = torch.randn(side, side).to(getattr(torch, dtype))
    return Probe("matmul", 2.0 * side**3, lambda: torch.mm(matrix, matrix.t()), 3.0 * matrix.nbytes)


def flat_probe(side: int) -> Probe:
    """A product of a few rows with weights that are not in the caches, because other weights were used in between."""
    rows = torch.randn(FLAT, side)
    size = (side * side + 2 * FLAT * side) * 4
    weights = cycle(list(torch.randn(max(2, COLD_BYTES // 2 // size), side, side)))
    return Probe("operands", size, lambda: torch.mm(rows, next(weights).t()), 2.0 * FLAT * side * side)


def compute_probes(scale: float = 1.0) -> Iterator[Probe]:
    """Attention and convolution; ``scale`` multiplies the sequence lengths and the sides of images."""
    for batch, length in ((1, 64), (2, 128), (4, 256)):
        yield from _attention(batch, max(8, int(length * scale)))
    for batch, channels, side in ((2, 16, 16), (8, 32, 16), (8, 64, 32)):
        yield from _convolution(batch, channels, max(4, int(side * scale)))
    for batch, channels, side in ((8, 32, 16), (8, 64, 32)):
        yield _flat_convolution(batch, channels, max(4, int(side * scale)))


def attention_probes(lengths: Iterable[int], heads: int, width: int) -> Iterator[Probe]:
    """Probes of attention in bfloat16 over sequences of these lengths, for GPUs."""
    for length in lengths:
        yield from _attention(max(1, 8192 // length), length, heads, width, torch.bfloat16)


def _attention(
    batch: int, length: int, heads: int = 4, width: int = 64, dtype: torch.dtype = torch.float32
) -> Iterator[Probe]:
    """Probes of attention. Queries, keys and values lie side by side in memory, as one joint projection writes them."""
    joined = torch.randn(batch, length, 3, heads, width).to(dtype)
    query, key, value = (part.transpose(1, 2) for part in joined.unbind(2))
    flops = 4.0 * query.numel() * length
    run, back = torch.ops.meshwright.attention.default, torch.ops.meshwright.attention_backward.default
    options = (0.0, True, width**-0.5, 0, 0)
    output, logsumexp = run(query, key, value, None, *options)
    gradient = torch.randn_like(output)
    yield Probe("attention", flops, lambda: run(query, key, value, None, *options))
    arguments = (gradient, query, key, value, None, output, logsumexp, *options)
    yield Probe("attention_backward", 2.5 * flops, lambda: back(*arguments))


def _convolution(batch: int, channels: int, side: int) -> Iterator[Probe]:
    image, weight = torch.randn(batch, channels, side, side), torch.randn(channels, channels, 3, 3)
    flops = 2.0 * image.numel() * channels * 9
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    size = 2.0 * image.nbytes + weight.nbytes
    run, back = aten.convolution.default, aten.convolution_backward.default
    yield Probe("convolution", flops, lambda: run(image, weight, *rest), size)
    yield Probe("convolution_input", flops, lambda: back(image, image, weight, *rest, [True, False, False]), size)
    yield Probe("convolution_weight", flops, lambda: back(image, image, weight, *rest, [False, True, False]), size)


def _flat_convolution(batch: int, channels: int, side: int) -> Probe:
    """A convolution with kernels of one pixel, which spends most of its time on the memory layout of its images."""
    image, weight = torch.randn(batch, channels, side, side), torch.randn(channels, channels, 1, 1)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    size, flops = 2.0 * image.nbytes + weight.nbytes, 2.0 * image.numel() * channels
    return Probe("convolution_operands", size, lambda: aten.convolution.default(image, weight, *rest), flops)


def _update(count: int) -> Probe:
    """An update of parameters that are not in the caches, because other parameters were used in between."""
    size = count * ITEM_BYTES["float32"]
    vectors = [torch.randn(count) for _ in range(2 * max(1, COLD_BYTES // (2 * size)))]
    pairs = cycle(list(zip(vectors[::2], vectors[1::2], strict=True)))

    def call() -> None:
        parameter, gradient = next(pairs)
        parameter.add_(gradient, alpha=-1e-9)

    return Probe("update", 3 * size, call)


def memory_probes(
    elements: tuple[int, ...] = (2**14, 2**18, 2**21), update: Callable[[int], Probe] = _update
) -> Iterator[Probe]:
    """Operators that are bound by memory, in float32, for each number of ``elements``. A call uses other tensors than
    the call before it, because in a step much other work runs between the creation of a tensor and its use.
    ``update`` makes the probe of an optimizer's update."""
    for count in elements:
        pool = list(torch.rand(max(2, COLD_BYTES // 8 // count), count))
        yield from _element_wise(pool)
        yield from _by_rows([x.view(-1, ROW) for x in pool])
        yield from _by_channels([x.view(-1, 64, 16, 16) for x in pool])
        yield from _by_index([x.view(-1, ROW) for x in pool])
        yield update(count)


def _element_wise(pool: list[Tensor]) -> Iterator[Probe]:
    x, y, out = cycle(pool), cycle(pool[1:] + pool[:1]), torch.empty_like(pool[0])
    size = out.numel() * ITEM_BYTES["float32"]
    yield Probe("pointwise", 3 * size, lambda: torch.add(next(x), next(y), out=out))
    yield Probe("activation", 2 * size, lambda: aten.gelu.default(next(x)))
    yield Probe("activation_backward", 3 * size, lambda: aten.gelu_backward.default(next(x), next(y)))
    # each call makes and seeds a generator, as keyed random numbers do
    yield Probe("random", size, lambda: torch.ops.meshwright.bernoulli.default(out, 0.9, 1, 2))


def _by_rows(pool: list[Tensor]) -> Iterator[Probe]:
    x, y, tensor = cycle(pool), cycle(pool[1:] + pool[:1]), pool[0]
    size = tensor.numel() * ITEM_BYTES["float32"]
    weight = torch.ones(ROW)
    _, mean, scale = aten.native_layer_norm.default(tensor, [ROW], weight, weight, 1e-5)
    back = aten.native_layer_norm_backward.default
    yield Probe("softmax", 2 * size, lambda: aten._log_softmax.default(next(x), 1, False))
    yield Probe("norm", 2 * size, lambda: aten.native_layer_norm.default(next(x), [ROW], weight, weight, 1e-5))
    yield Probe(
        "norm_backward", 3 * size, lambda: back(next(x), next(y), [ROW], mean, scale, weight, weight, [True] * 3)
    )
    yield Probe("reduction", size, lambda: aten.sum.dim_IntList(next(x), [0], True))
    yield Probe("copy", 2 * size, lambda: torch.cat(next(x).chunk(2, 1)[::-1], 1))


def _by_channels(pool: list[Tensor]) -> Iterator[Probe]:
    x, y, tensor = cycle(pool), cycle(pool[1:] + pool[:1]), pool[0]
    size = tensor.numel() * ITEM_BYTES["float32"]
    vector = torch.ones(tensor.shape[1])
    run = aten._native_batch_norm_legit_functional.default
    back = aten.native_batch_norm_backward.default
    _, mean, scale, _, _ = run(tensor, vector, vector, vector, vector, True, 0.1, 1e-5)
    yield Probe("batch_norm", 2 * size, lambda: run(next(x), vector, vector, vector, vector, True, 0.1, 1e-5))
    yield Probe(
        "batch_norm_backward", 3 * size,
        lambda: back(next(x), next(y), vector, vector, vector, mean, scale, True, 1e-5, [True] * 3),
    )  # fmt: skip


def _by_index(pool: list[Tensor]) -> Iterator[Probe]:
    x, rows = cycle(pool), len(pool[0])
    size = pool[0].numel() * ITEM_BYTES["float32"]
    index = torch.randint(rows, (rows,))
    yield Probe("gather", 2 * size, lambda: aten.embedding.default(next(x), index))
    yield Probe("scatter", 2 * size, lambda: aten.embedding_dense_backward.default(next(x), index, rows, -1, False))
