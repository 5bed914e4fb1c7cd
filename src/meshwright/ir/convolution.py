"""The algorithms of convolutions: the settings that each algorithm supports, its workspace in bytes, and its kernels.

``ops/convolution_kernels.py`` computes them. The workspace is the memory of the temporary tensors that an algorithm
needs to compute all samples of a call at once, for contiguous operands.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import msgspec

from meshwright.ir.graph import ITEM_BYTES
from meshwright.ir.kernel import ConvolutionSizes, Kernel, Product
from meshwright.ir.operator_algorithm import NATIVE, divide

FLOATS = ("float32", "float64")
"""The dtypes that all algorithms except PyTorch's own support. In narrower dtypes, their sums would lose too much
precision."""
BLOCK = 16
"""Channels in a block of oneDNN's memory formats."""
_KINDS = {"forward": "convolution", "input": "convolution_input", "weight": "convolution_weight"}
_FACTORS = (2, 3, 5, 7)


class CallRequirements(NamedTuple):
    """Requirements of a call: bytes of temporary tensors, and kernels."""

    workspace_bytes: int
    kernels: tuple[Kernel, ...]


def algorithms_of(sizes: ConvolutionSizes) -> tuple[str, ...]:
    """The names of the algorithms that support a convolution. PyTorch's own is the first."""
    if sizes.transposed or len(sizes.kernel) > 2 or sizes.dtype not in FLOATS:
        return (NATIVE,)
    if sizes.groups > 1:
        return NATIVE, "gemm"
    # Winograd's gradient of the input is a convolution with padding 2 - p.
    small = sizes.kernel == (3, 3) and set(sizes.stride + sizes.dilation) == {1}
    small = small and (sizes.direction != "input" or max(sizes.padding) <= 2)
    return NATIVE, "gemm", "implicit", "fft", *(("winograd(2)", "winograd(4)") if small else ())


def fft_size(least: int) -> int:
    """The smallest number of at least ``least`` whose prime factors are at most 7. The FFT is fast at such sizes."""
    size = max(1, least)
    while True:
        rest = size
        for factor in _FACTORS:
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 1


def tiles(output: tuple[int, ...], m: int) -> tuple[int, int]:
    """The numbers of tiles of m x m results along both dims."""
    height, width = output
    return -(-height // m), -(-width // m)


def flops_of(sizes: ConvolutionSizes) -> float:
    """The FLOPs of a convolution: two operations for each weight at each position."""
    weights = sizes.filters * sizes.channels // sizes.groups * prod(sizes.kernel)
    return 2.0 * weights * sizes.samples * prod(sizes.image if sizes.transposed else sizes.output)


def native_kernel(sizes: ConvolutionSizes) -> Kernel:
    """PyTorch's own kernel of a convolution, or of one of its gradients (``ir.kernel.product_of``)."""
    item, flops = ITEM_BYTES[sizes.dtype], flops_of(sizes)
    rows, columns = sizes.samples * prod(sizes.output), sizes.filters / sizes.groups
    depth = max(1.0, flops / (2 * rows * sizes.filters)) if rows else 1.0
    order = {"forward": (rows, columns, depth), "input": (rows, depth, columns), "weight": (depth, columns, rows)}
    return Kernel(
        _KINDS[sizes.direction], sizes.dtype, flops, item * sum(_elements(sizes)),
        product=Product(*order[sizes.direction], sizes.groups), convolution=sizes,
    )  # fmt: skip


def native_bytes(sizes: ConvolutionSizes) -> int:
    """The bytes of temporary memory that PyTorch's own algorithm takes on a CPU, as measured with torch 2.13.

    oneDNN computes on copies in blocks of 16 channels. oneDNN also writes its result to such a copy; then the operands
    are freed, and the result is copied. With strides, the gradient of the input takes two copies of its result. oneDNN
    does not support float64: PyTorch then unfolds the windows of all samples (for the gradient of the input, of one
    sample at a time)."""
    item, (images, weight, output) = ITEM_BYTES[sizes.dtype], _elements(sizes)
    if sizes.dtype == "float64":
        samples = 1 if sizes.direction == "input" else sizes.samples
        alone = prod(sizes.kernel) == prod(sizes.stride) == 1 and not any(sizes.padding)
        return 0 if alone else samples * sizes.channels * prod(sizes.kernel) * prod(sizes.output) * item
    if sizes.direction == "weight":
        return item * max(images + output, weight)
    if sizes.direction == "forward":
        blocked = _blocked(sizes.filters) * sizes.samples * prod(sizes.output)
        return item * max(images + weight + blocked - output, blocked)
    if max(sizes.stride) > 1:
        return item * max(output + weight, 2 * images)
    grads, image_grads = (_blocked(count) * sizes.samples for count in (sizes.filters, sizes.channels))
    return item * (grads * prod(sizes.output) + weight + image_grads * prod(sizes.image) - images)


def _blocked(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def workspace_bytes(kernel: Kernel, on_cpu: bool) -> int:
    """Bytes of temporary memory while a kernel of a convolution runs. They are the temporary tensors of the algorithm
    and, on a CPU, oneDNN's copies. cuDNN's own workspace is not known here."""
    copied = native_bytes(kernel.convolution) if kernel.convolution is not None and on_cpu else 0
    return kernel.workspace_bytes + copied


def work_of(sizes: ConvolutionSizes, text: str) -> CallRequirements:
    """The requirements of a call whose samples are computed as ``text`` says (``ir/operator_algorithm.py``). The
    workspace of PyTorch's own algorithm is not counted here (see ``native_bytes``)."""
    pieces = list(divide(text, sizes.samples))
    done = [piece_work(sizes._replace(samples=samples), name, len(pieces) == 1) for name, samples in pieces]
    most = max((work.workspace_bytes for work in done), default=0)
    return CallRequirements(most, tuple(kernel for work in done for kernel in work.kernels))


@lru_cache(maxsize=2**14)
def piece_work(sizes: ConvolutionSizes, name: str, alone: bool = True) -> CallRequirements:
    """The requirements of an algorithm for all samples of ``sizes`` at once. If the call is a piece of a larger call
    (``alone`` is false), the result of PyTorch's own algorithm is copied. The first kernel carries the workspace."""
    if name == NATIVE:
        results = {"forward": 2, "input": 0, "weight": 1}
        copied = 0 if alone else ITEM_BYTES[sizes.dtype] * _elements(sizes)[results[sizes.direction]]
        return _with_workspace(copied, native_kernel(sizes), *([_copy(sizes, 2 * copied)] if copied else []))
    flat = _flat(sizes)
    if name in ("gemm", "implicit"):
        return (_gemm if name == "gemm" else _implicit)(flat)
    return _fft(flat) if name == "fft" else _winograd(flat, int(name[-2]))


def _with_workspace(workspace_bytes: int, first: Kernel, *rest: Kernel) -> CallRequirements:
    return CallRequirements(workspace_bytes, (msgspec.structs.replace(first, workspace_bytes=workspace_bytes), *rest))


def _elements(sizes: ConvolutionSizes) -> tuple[int, int, int]:
    """The numbers of elements of input, weight and result."""
    return (
        sizes.samples * sizes.channels * prod(sizes.image),
        sizes.filters * sizes.channels // sizes.groups * prod(sizes.kernel),
        sizes.samples * sizes.filters * prod(sizes.output),
    )


def _flat(sizes: ConvolutionSizes) -> ConvolutionSizes:
    """The same convolution with two spatial dims: a sequence becomes an image with one row."""
    if len(sizes.kernel) == 2:
        return sizes
    return sizes._replace(
        image=(1, *sizes.image), output=(1, *sizes.output), kernel=(1, *sizes.kernel), stride=(1, *sizes.stride),
        padding=(0, *sizes.padding), dilation=(1, *sizes.dilation),
    )  # fmt: skip


def _copy(sizes: ConvolutionSizes, num_bytes: int) -> Kernel:
    return Kernel("copy", sizes.dtype, 0.0, num_bytes)


def _products(sizes: ConvolutionSizes, m: int, n: int, k: int, batch: int, complex_: bool = False) -> Kernel:
    """``batch`` matrix products; a product of complex numbers counts as four."""
    numbers = batch * (m * k + k * n + m * n) * (2 if complex_ else 1)
    flops = 2.0 * batch * m * n * k * (4 if complex_ else 1)
    product = Product(m, n, k, batch * (4 if complex_ else 1))
    return Kernel("matmul", sizes.dtype, flops, ITEM_BYTES[sizes.dtype] * numbers, product=product)


def _gemm(sizes: ConvolutionSizes) -> CallRequirements:
    item, groups, positions = ITEM_BYTES[sizes.dtype], sizes.groups, prod(sizes.output)
    window = sizes.channels // groups * prod(sizes.kernel)
    columns = sizes.samples * groups * window * positions * item
    filters, batch = sizes.filters // groups, sizes.samples * groups
    unfold = _copy(sizes, columns + item * _elements(sizes)[0])
    order = {"forward": (filters, positions, window), "input": (window, positions, filters)}
    product = _products(sizes, *order.get(sizes.direction, (filters, window, positions)), batch)
    return _with_workspace(columns, unfold, product)


def _implicit(sizes: ConvolutionSizes) -> CallRequirements:
    item, samples, (height, width) = ITEM_BYTES[sizes.dtype], sizes.samples, sizes.output
    rows, wide = (size + 2 * pad for size, pad in zip(sizes.image, sizes.padding, strict=True))
    elements, channels, filters = prod(sizes.kernel), sizes.channels, sizes.filters
    padded = samples * channels * rows * wide * item if any(sizes.padding) else 0
    weights = filters * channels * item * (elements > 1)  # a copy of one element's matrix
    if sizes.direction == "weight":
        weights = filters * channels * item * elements
    if set(sizes.stride) == {1}:
        span = (height - 1) * wide + width
        beside = samples * filters * height * wide * item if wide != width else 0
        moved = 0
    else:
        span = height * width
        beside = samples * channels * height * width * item
        moved = 2 * beside
    order = {"forward": (filters, span, channels), "input": (channels, span, filters)}
    product = _products(sizes, *order.get(sizes.direction, (filters, channels, span)), samples)
    each = (product, _copy(sizes, moved)) if moved else (product,)
    return _with_workspace(padded + weights + beside, _copy(sizes, 2 * (padded + beside)), *each * elements)


def _fft(sizes: ConvolutionSizes) -> CallRequirements:
    height, width = (fft_size(size + 2 * pad) for size, pad in zip(sizes.image, sizes.padding, strict=True))
    item, frequencies = ITEM_BYTES[sizes.dtype], height * (width // 2 + 1)
    frame = height, width
    images = sizes.samples * sizes.channels, sizes.image
    grads = sizes.samples * sizes.filters, sizes.output
    weights = sizes.filters * sizes.channels, sizes.kernel
    first, second, result = {
        "forward": (weights, images, grads), "input": (weights, grads, images), "weight": (images, grads, weights),
    }[sizes.direction]  # fmt: skip

    def placed(count: int, shape: tuple[int, ...]) -> int:
        return 0 if shape == frame else count * height * width * item

    def spectra(count: int) -> int:
        return count * frequencies * 2 * item

    left, other, product = spectra(first[0]), spectra(second[0]), spectra(result[0])
    held = 1 + (height > 1)  # for the inverse transform: the FFT makes a copy for every dim but the last
    peak = max(
        placed(*first) + left, 2 * left, left + placed(*second) + other, left + 2 * other, left + other + product,
        (1 + held) * product, held * product + result[0] * height * width * item,
    )  # fmt: skip
    transforms = [Kernel("activation", sizes.dtype, 0.0, 4 * spectra(count)) for count, _ in (first, second, result)]
    samples, channels, filters = sizes.samples, sizes.channels, sizes.filters
    order = {"forward": (samples, filters, channels), "input": (samples, channels, filters)}
    shape = order.get(sizes.direction, (filters, channels, samples))
    return _with_workspace(peak, transforms[0], *transforms[1:], _products(sizes, *shape, frequencies, True))


def _winograd(sizes: ConvolutionSizes, m: int) -> CallRequirements:
    item, samples, points = ITEM_BYTES[sizes.dtype], sizes.samples, (m + 2) ** 2
    turned = sizes.direction == "input"
    channels, filters = (sizes.filters, sizes.channels) if turned else (sizes.channels, sizes.filters)
    image, output = (sizes.output, sizes.image) if turned else (sizes.image, sizes.output)
    down, right = tiles(output, m)
    count = samples * down * right
    frame = down * m + 2, right * m + 2
    padded = 0 if image == frame else samples * channels * prod(frame) * item
    taken, kernels = points * channels * count * item, points * filters * channels * item
    products, results = points * filters * count * item, m * m * filters * count * item
    if sizes.direction == "weight":
        whole = 0 if output == (down * m, right * m) else results
        last = taken + products + kernels
        peak = max(padded + taken, 2 * taken, taken + whole + results, taken + results + products, last)
        peak = max(peak, kernels + 9 * filters * channels * item)
    else:
        peak = max(padded + taken, 2 * taken, taken + kernels + products, products + results)
    order = (filters, channels, count) if sizes.direction == "weight" else (filters, count, channels)
    return _with_workspace(
        peak, _copy(sizes, padded + 2 * taken), _products(sizes, points, channels * count, points, 1),
        _products(sizes, points, filters * channels, 9, 1), _products(sizes, *order, points),
        _products(sizes, m * m, filters * count, points, 1), _copy(sizes, 2 * results),
    )  # fmt: skip
