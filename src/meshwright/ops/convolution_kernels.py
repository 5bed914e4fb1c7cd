"""Convolutions by several algorithms, from PyTorch's operators: explicit and implicit GEMM, FFT, Winograd.

An algorithm computes forward and both gradients (of input and weight) for images with two spatial dims. Kernels need
not be square. ``ir/convolution.py`` says which settings an algorithm supports, and gives the bytes of its temporary
tensors. Gradients of the weight are added to the result, so that pieces of samples can follow one another.

    gemm          unfold the windows of all positions to columns, then one product (Chellapilla et al. 2006)
    implicit      a product for each position of the kernel, of a shifted view of the image; nothing is unfolded
    fft           a product for each frequency (Mathieu, Henaff, LeCun, "Fast Training of Convolutional Networks
                  through FFTs", 2014)
    winograd(m)   a product for each of (m + 2)^2 points of tiles with m x m results (Lavin, Gray, "Fast Algorithms for
                  Convolutional Neural Networks", 2016)
    native        PyTorch's own
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ir.convolution import fft_size, tiles
from meshwright.ir.operator_algorithm import divide

aten = torch.ops.aten


@dataclass(frozen=True)
class ConvolutionSettings:
    """The settings of a convolution with two spatial dims: a pair of numbers each, and the number of groups."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


Compute = Callable[[Tensor, Tensor, Tensor, ConvolutionSettings], None]
"""Writes the convolution of its first two arguments to the third, or adds a weight's gradient to it. Forward takes
input and weight, the gradient of the input takes the result's gradient and weight, the gradient of the weight takes
the result's gradient and input."""


# --- explicit GEMM ---------------------------------------------------------------------------------------------------


def _columns(images: Tensor, kernel: torch.Size, positions: int, settings: ConvolutionSettings) -> Tensor:
    """The windows of all positions: (samples, channels x kernel, positions)."""
    columns = images.new_empty(*images.shape[:1], images.shape[1] * kernel.numel(), positions)
    return aten.im2col.out(images, kernel, settings.dilation, settings.padding, settings.stride, out=columns)


def _by_group(settings: ConvolutionSettings, weight: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The parts of a weight (dim 0) and of other tensors (dim 1) that belong to one group."""
    parts = (weight.chunk(settings.groups, 0), *(other.chunk(settings.groups, 1) for other in others))
    return zip(*parts, strict=True)


def _gemm_forward(images: Tensor, weight: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    columns = _columns(images, weight.shape[2:], out.shape[2:].numel(), settings)
    for filters, part, result in _by_group(settings, weight.flatten(1), columns, out.flatten(2)):
        torch.bmm(filters.expand(len(images), -1, -1), part, out=result)


def _gemm_input(grad: Tensor, weight: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    matrix, grads = weight.flatten(1), grad.flatten(2)
    columns = grad.new_empty(len(grad), settings.groups * matrix.shape[1], grads.shape[2])
    for filters, part, terms in _by_group(settings, matrix, grads, columns):
        torch.bmm(filters.t().expand(len(grad), -1, -1), part, out=terms)
    windows = weight.shape[2:], settings.dilation, settings.padding, settings.stride
    aten.col2im.out(columns, out.shape[2:], *windows, out=out)


def _gemm_weight(grad: Tensor, images: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    columns = _columns(images, out.shape[2:], grad.shape[2:].numel(), settings)
    for result, part, windows in _by_group(settings, out.flatten(1), grad.flatten(2), columns):
        result.addbmm_(part, windows.transpose(1, 2))


# --- implicit GEMM ---------------------------------------------------------------------------------------------------
#
# With stride 1, the positions of a kernel's element are a run of the padded image's pixels, row after row:
#
#     image 4 x 4, kernel 2 x 2, output 3 x 3         run of element (0, 1): o o o . o o o . o o o
#       a o o o                                       The run has a pixel too many (.) after each row. In forward its
#       . o o o                                       results are dropped; in backward its gradients are 0.
#       . o o o
#       b c d e
#
# So each element's product reads or writes a view of the whole image, without a copy.


def _padded(images: Tensor, settings: ConvolutionSettings) -> Tensor:
    height, width = settings.padding
    return F.pad(images, (width, width, height, height)) if height or width else images


def _positions(kernel: torch.Size, settings: ConvolutionSettings) -> Iterator[tuple[int, int]]:
    """The first row and column of the padded image that each element of the kernel reads."""
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            yield row * settings.dilation[0], column * settings.dilation[1]


def _matrix(weight: Tensor, index: int) -> Tensor:
    """The matrix (filters, channels) of one element of the kernel."""
    return weight.flatten(2)[..., index].contiguous()


def _strided(images: Tensor, row: int, column: int, output: torch.Size, settings: ConvolutionSettings) -> Tensor:
    """The view of the pixels that the kernel's element at (row, column) reads, one for each position."""
    (height, width), (down, right) = output, settings.stride
    return images[:, :, row : row + (height - 1) * down + 1 : down, column : column + (width - 1) * right + 1 : right]


def _in_rows(grad: Tensor, width: int) -> Tensor:
    """A gradient with rows of ``width`` elements, filled up with 0, as (samples, filters, run)."""
    height, own = grad.shape[2:]
    if own == width:
        return grad.flatten(2)
    rows = grad.new_zeros(*grad.shape[:2], height, width)
    rows[..., :own] = grad
    return rows.flatten(2)[..., : (height - 1) * width + own]


def _implicit_forward(images: Tensor, weight: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    padded, output = _padded(images, settings), out.shape[2:]
    height, width = output
    runs = settings.stride == (1, 1)
    wide = padded.shape[3] if runs else width
    result = out if wide == width else out.new_empty(*out.shape[:2], height, wide)
    span = (height - 1) * wide + width
    total = result.flatten(2)[..., :span]
    taken = None if runs else images.new_empty(*images.shape[:2], *output)
    for index, (row, column) in enumerate(_positions(weight.shape[2:], settings)):
        if taken is None:
            first = row * wide + column
            read = padded.flatten(2)[..., first : first + span]
        else:
            read = taken.copy_(_strided(padded, row, column, output, settings)).flatten(2)
        total.baddbmm_(_matrix(weight, index).expand(len(images), -1, -1), read, beta=min(index, 1))
    if result is not out:
        out.copy_(result[..., :width])


def _implicit_input(grad: Tensor, weight: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    output = grad.shape[2:]
    (top, left), (height, width) = settings.padding, out.shape[2:]
    whole = out.new_zeros(*out.shape[:2], height + 2 * top, width + 2 * left) if top or left else out.zero_()
    runs = settings.stride == (1, 1)
    grads = _in_rows(grad, whole.shape[3]) if runs else grad.flatten(2)
    terms = None if runs else grad.new_empty(*out.shape[:2], *output)
    for index, (row, column) in enumerate(_positions(weight.shape[2:], settings)):
        matrix = _matrix(weight, index).t().expand(len(grad), -1, -1)
        if terms is None:
            first = row * whole.shape[3] + column
            whole.flatten(2)[..., first : first + grads.shape[2]].baddbmm_(matrix, grads)
        else:
            torch.bmm(matrix, grads, out=terms.flatten(2))
            _strided(whole, row, column, output, settings).add_(terms)
    if whole is not out:
        out.copy_(whole[:, :, top : top + height, left : left + width])


def _implicit_weight(grad: Tensor, images: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    padded, output = _padded(images, settings), grad.shape[2:]
    sums = out.new_empty(out.shape[2:].numel(), *out.shape[:2])
    runs = settings.stride == (1, 1)
    grads = _in_rows(grad, padded.shape[3]) if runs else grad.flatten(2)
    taken = None if runs else images.new_empty(*images.shape[:2], *output)
    for index, (row, column) in enumerate(_positions(out.shape[2:], settings)):
        if taken is None:
            first = row * padded.shape[3] + column
            read = padded.flatten(2)[..., first : first + grads.shape[2]]
        else:
            read = taken.copy_(_strided(padded, row, column, output, settings)).flatten(2)
        sums[index].addbmm_(grads, read.transpose(1, 2), beta=0)
    out.add_(sums.view(*out.shape[2:], *out.shape[:2]).permute(2, 3, 0, 1))


# --- FFT -------------------------------------------------------------------------------------------------------------


def _placed(
    values: Tensor, size: tuple[int, int], first: tuple[int, int] = (0, 0), step: tuple[int, int] = (1, 1)
) -> Tensor:
    """Images of ``size`` that have the values from the row and column ``first`` on, every ``step``; elsewhere 0."""
    (height, width), (top, left), (down, right) = values.shape[2:], first, step
    if (height, width) == size:
        return values
    images = values.new_zeros(*values.shape[:2], *size)
    images[:, :, top : top + (height - 1) * down + 1 : down, left : left + (width - 1) * right + 1 : right] = values
    return images


def _spectra(
    values: Tensor, size: tuple[int, int], first: tuple[int, int] = (0, 0), step: tuple[int, int] = (1, 1)
) -> Tensor:
    """A matrix of the first two dims for each frequency of the images that ``_placed`` makes."""
    spectra = torch.fft.rfft2(_placed(values, size, first, step))
    return spectra.flatten(2).permute(2, 0, 1).contiguous()


def _products(operands: list[Tensor], size: tuple[int, int]) -> Tensor:
    """The images whose spectra are the products of two matrices for each frequency. ``operands`` is emptied, so that
    they are freed early."""
    product = torch.bmm(*operands)
    operands.clear()
    spectra = product.permute(1, 2, 0).contiguous().unflatten(2, (size[0], size[1] // 2 + 1))
    del product
    rows = torch.fft.ifft(spectra, dim=2) if size[0] > 1 else spectra
    del spectra
    return torch.fft.irfft(rows, n=size[1], dim=3)


def _frame(image: torch.Size, settings: ConvolutionSettings) -> tuple[int, int]:
    """The height and width of the FFT. They are at least those of the padded image, so that its last rows do not wrap
    around to the first."""
    top, left = settings.padding
    return fft_size(image[0] + 2 * top), fft_size(image[1] + 2 * left)


def _fft_forward(images: Tensor, weight: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    size = _frame(images.shape[2:], settings)
    operands = [_spectra(weight, size, step=settings.dilation).conj_physical_().transpose(1, 2)]
    operands.insert(0, _spectra(images, size, settings.padding))
    out.copy_(_strided(_products(operands, size), 0, 0, out.shape[2:], settings))


def _fft_input(grad: Tensor, weight: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    size, (top, left), (height, width) = _frame(out.shape[2:], settings), settings.padding, out.shape[2:]
    operands = [_spectra(weight, size, step=settings.dilation)]
    operands.insert(0, _spectra(grad, size, step=settings.stride))
    out.copy_(_products(operands, size)[:, :, top : top + height, left : left + width])


def _fft_weight(grad: Tensor, images: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
    size, (height, width), (down, right) = _frame(images.shape[2:], settings), out.shape[2:], settings.dilation
    operands = [_spectra(images, size, settings.padding)]
    operands.insert(0, _spectra(grad, size, step=settings.stride).conj_physical_().transpose(1, 2))
    result = _products(operands, size)
    out.add_(result[:, :, : (height - 1) * down + 1 : down, : (width - 1) * right + 1 : right])


# --- Winograd --------------------------------------------------------------------------------------------------------

_OF_IMAGE = {
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1),
    ),
}  # fmt: skip
_OF_KERNEL = {
    2: ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    4: (
        (1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1),
    ),
}  # fmt: skip
_TO_RESULT = {
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
"""B^T, G and A^T of Lavin and Gray, for tiles with m x m results: Y = A^T [(G g G^T) * (B^T d B)] A."""


@cache
def _both_dims(
    matrices: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device, turned: bool = False
) -> Tensor:
    """The matrix that applies a matrix to both dims of a tile whose elements are stored in one row. ``turned`` reverses
    the order of the elements that it reads."""
    with torch.inference_mode(False):
        matrix = torch.tensor(matrices, dtype=torch.float64)
        matrix = torch.kron(matrix, matrix)
        return (matrix.flip(1) if turned else matrix).to(device, dtype)


def _points(images: Tensor, m: int, first: tuple[int, int], output: tuple[int, int]) -> Tensor:
    """B^T d B of all tiles d of the images, which are placed at ``first``: (points, channels, samples x tiles)."""
    (down, right), (samples, channels) = tiles(output, m), images.shape[:2]
    placed = _placed(images, (down * m + 2, right * m + 2), first)
    windows = placed.unfold(2, m + 2, m).unfold(3, m + 2, m)
    taken = windows.permute(4, 5, 1, 0, 2, 3).reshape((m + 2) ** 2, -1)
    del placed, windows
    points = _both_dims(_OF_IMAGE[m], images.dtype, images.device) @ taken
    return points.view((m + 2) ** 2, channels, samples * down * right)


def _winograd(images: Tensor, weight: Tensor, out: Tensor, m: int, padding: tuple[int, int], turned: bool) -> None:
    """Convolve images with a kernel. With ``turned``, convolve a gradient with the reversed kernel; its filters are
    then the channels of the images."""
    (down, right), (height, width) = tiles(out.shape[2:], m), out.shape[2:]
    points = _points(images, m, padding, (height, width))
    kernels = _both_dims(_OF_KERNEL[m], weight.dtype, weight.device, turned) @ weight.flatten(2).flatten(0, 1).t()
    kernels = kernels.view(-1, *weight.shape[:2])
    product = torch.bmm(kernels.transpose(1, 2) if turned else kernels, points)
    del points, kernels
    result = _both_dims(_TO_RESULT[m], out.dtype, out.device) @ product.flatten(1)
    del product
    result = result.view(m, m, out.shape[1], out.shape[0], down, right).transpose(2, 3)
    for row in range(min(m, height)):
        for column in range(min(m, width)):
            target = out[:, :, row::m, column::m]
            target.copy_(result[row, column, :, :, : target.shape[2], : target.shape[3]])


def _winograd_forward(m: int) -> Compute:
    return lambda images, weight, out, settings: _winograd(images, weight, out, m, settings.padding, False)


def _winograd_input(m: int) -> Compute:
    def compute(grad: Tensor, weight: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
        top, left = settings.padding
        _winograd(grad, weight, out, m, (2 - top, 2 - left), True)

    return compute


def _winograd_weight(m: int) -> Compute:
    """G^T [(A dY A^T) * (B^T d B)] G, summed over samples and tiles: the adjoint of forward in g."""

    def compute(grad: Tensor, images: Tensor, out: Tensor, settings: ConvolutionSettings) -> None:
        samples, filters, height, width = grad.shape
        down, right = tiles((height, width), m)
        points = _points(images, m, settings.padding, (height, width))
        whole = _placed(grad, (down * m, right * m)).view(samples, filters, down, m, right, m)
        taken = whole.permute(3, 5, 1, 0, 2, 4).reshape(m * m, -1)
        del whole
        grads = _both_dims(_TO_RESULT[m], grad.dtype, grad.device).t() @ taken
        del taken
        sums = torch.bmm(grads.view(len(grads), filters, -1), points.transpose(1, 2))
        del grads, points
        result = _both_dims(_OF_KERNEL[m], grad.dtype, grad.device).t() @ sums.flatten(1)
        out.add_(result.t().unflatten(0, out.shape[:2]).unflatten(2, (3, 3)))

    return compute


# --- pieces of samples -----------------------------------------------------------------------------------------------

_COMPUTE: dict[str, dict[str, Compute]] = {
    "forward": {"gemm": _gemm_forward, "implicit": _implicit_forward, "fft": _fft_forward}
    | {f"winograd({m})": _winograd_forward(m) for m in (2, 4)},
    "input": {"gemm": _gemm_input, "implicit": _implicit_input, "fft": _fft_input}
    | {f"winograd({m})": _winograd_input(m) for m in (2, 4)},
    "weight": {"gemm": _gemm_weight, "implicit": _implicit_weight, "fft": _fft_weight}
    | {f"winograd({m})": _winograd_weight(m) for m in (2, 4)},
}
"""Maps a direction and the name of an algorithm to its kernel."""


def compute(
    direction: str, name: str, first: Tensor, second: Tensor, out: Tensor, settings: ConvolutionSettings
) -> None:
    """Compute a convolution or a gradient (see ``Compute``) by the algorithm ``name``, for images with one or two
    spatial dims. All tensors are contiguous."""
    if first.dim() == 3:
        first, second, out = (tensor.unsqueeze(2) for tensor in (first, second, out))
    if out.numel():
        _COMPUTE[direction][name](first, second, out, settings)


def parts(algorithm: str, samples: int) -> Iterator[tuple[str, slice]]:
    """The name of the algorithm of each piece of samples, and the piece."""
    start = 0
    for name, count in divide(algorithm, samples):
        yield name, slice(start, start + count)
        start += count
