"""Random numbers as a function of a key and a position: Philox4x64-10 (Salmon, Moraes, Dror, Shaw, "Parallel Random
Numbers: As Easy as 1, 2, 3", 2011).

A block of four words of 64 bits gives the numbers of eight (in float64: four) neighbours in the last dim of the whole
tensor, over all ranks and micro-batches. A block follows from four words of counter and two words of key:

    counter    number of the block in the whole tensor | operator | 0 | 0
    key        seed and step | 0

A rank computes the blocks of its own part. So an element has the same number under every layout, and again when its
block of the model is recomputed. CPUs run NumPy's Philox, CUDA devices with Triton a kernel (``gpu_kernels.py``).
Other devices run integer operations of PyTorch. All give the same words, and the host waits for none of them.

The operators ``bernoulli``, ``uniform`` and ``normal`` draw a tensor like the given one. The place of a part is given
by letters, the factors of the whole tensor's dims: each has a size, and the part has ``lengths`` indices of it from
``begins`` on. The last ``inner`` letters are the last dim. Micro-batches have ``lengths`` indices each of the letter
number ``time``, one after the other. Without letters, the tensor is whole, and each micro-batch draws other numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import product
from operator import xor
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.ops.library import KEY, define, mix, uses_triton
from meshwright.torch_private import FakeTensor

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1
_MICROBATCHES = 1 << 16
_TILE = 1 << 14
"""The number of blocks that a CPU computes together: few enough for its cache."""
_LARGE_TILE = 1 << 21
"""The most blocks that operators of PyTorch compute together on another device."""
_GAP = 200
"""Blocks that NumPy computes in the time of one call."""

Word = int | Tensor
"""A word of 64 bits, or a tensor of words in int64."""
Convert = Callable[[Tensor], Tensor]
"""Makes numbers [r, n] of blocks [r, 4 b] in int64."""
Kind = Literal["bernoulli", "uniform", "normal"]


def key_of(microbatch: int, *numbers: int) -> int:
    """Return the random key of a micro-batch: a hash of ``numbers`` (seed, step), and the micro-batch in its lowest 16
    bits."""
    return mix(*numbers) // _MICROBATCHES * _MICROBATCHES + microbatch % _MICROBATCHES


def philox(counter: Sequence[Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Return the words of blocks. The words of ``counter`` and ``key`` are numbers or tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = _xor(high1, c1, k0), low1, _xor(high0, c3, k1), low0
        k0, k1 = _sum(k0, _INCREMENTS[0]), _sum(k1, _INCREMENTS[1])
    return c0, c1, c2, c3


def _sum(word: Word, number: int) -> Word:
    return (word + number) & _WORD if isinstance(word, int) else word + _signed(number)


def _product(word: Word, multiplier: int) -> tuple[Word, Word]:
    """Return the upper and the lower word of a product. A tensor's upper word comes from products of halves."""
    if isinstance(word, int):
        return word * multiplier >> 64, word * multiplier & _WORD
    low, high = word & _HALF, word >> 32 & _HALF
    m_low, m_high = multiplier & _HALF, multiplier >> 32
    outer = low * m_high
    middle = high * m_low + (low * m_low >> 32 & _HALF) + (outer & _HALF)
    return high * m_high + (outer >> 32 & _HALF) + (middle >> 32 & _HALF), word * _signed(multiplier)


def _xor(*words: Word) -> Word:
    number = reduce(xor, (word for word in words if isinstance(word, int)), 0)
    tensors = [word for word in words if isinstance(word, Tensor)]
    return reduce(xor, tensors, _signed(number)) if tensors else number


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


Letters = Sequence[tuple[int, Any, int]]
"""The factors of some dims, outermost first: the size of each, this rank's first index, and its number of indices. A
first index that follows from a key on a device is a tensor."""
Run = tuple[int, int]
"""A range of indices: begin and end."""


class Part(NamedTuple):
    """A rank's part of a tensor: the letters of all dims before the last, and those of the last dim."""

    outer: Letters
    inner: Letters

    @property
    def width(self) -> int:
        """The size of the last dim of the whole tensor."""
        return math.prod(size for size, _, _ in self.inner)


def _runs(letters: Letters) -> list[Run]:
    """Return the ranges of consecutive indices in the product of the letters' whole sizes."""
    if not letters:
        return [(0, 1)]
    *rest, (size, first, length) = letters
    while rest and size == length:  # whole: together with the letter before it
        outer, begin, number = rest.pop()
        size, first, length = outer * size, begin * size, number * size
    starts = [0]
    for outer, begin, number in rest:
        starts = [start * outer + index for start, index in product(starts, range(begin, begin + number))]
    return [(start * size + first, start * size + first + length) for start in starts]


def _indices(letters: Letters, device: torch.device) -> Tensor:
    """Return the indices of all runs as a tensor on a device, without a copy from the host."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for size, first, length in letters:
        total = (total.unsqueeze(1) * size + (torch.arange(length, device=device) + first)).flatten()
    return total


def _fill(result: Tensor, part: Part, key: Any, salt: int, per_block: int, convert: Convert) -> None:
    """Fill a contiguous tensor with random numbers, ``per_block`` of each block."""
    words_of = _by_numpy if result.device.type == "cpu" and isinstance(key, int) else _by_pytorch
    flat = result.view(math.prod(length for _, _, length in part.outer), -1)
    across, column = -(-part.width // per_block), 0
    for begin, end in _runs(part.inner):
        blocks = begin // per_block, -(-end // per_block)
        for lines, first, words in words_of(part, blocks, across, key, salt, result):
            skipped = first * per_block
            low, high = max(begin, skipped), min(end, skipped + words.shape[1] // 4 * per_block)
            into = flat[lines, column + low - begin : column + high - begin]
            into.copy_(convert(words)[:, low - skipped : high - skipped])
        column += end - begin


Tile = tuple[slice, int, Tensor]
"""Rows of the result, the first block in each of them, and the words of these blocks in int64."""


def _tiles(num_rows: int, blocks: Run, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows of blocks into tiles of at most ``most`` blocks, in the order of their numbers: the first and last row,
    the first and last block."""
    first, last = blocks
    width = min(most, last - first)
    height = max(1, most // width) if width == last - first else 1
    for row in range(0, num_rows, height):
        for begin in range(first, last, width):
            yield row, min(row + height, num_rows), begin, min(begin + width, last)


def _by_numpy(part: Part, blocks: Run, across: int, key: int, salt: int, result: Tensor) -> Iterator[Tile]:
    runs = _runs(part.outer)
    position = runs[0][0] * across + blocks[0]
    generator = np.random.Philox(counter=(position - 1 + (salt << 64)) % (1 << 256), key=key)  # adds 1 at first

    def read(block: int, number: int) -> Any:
        nonlocal position
        if block != position:
            generator.advance((block - position) % (1 << 256))
        position = block + number
        return generator.random_raw(4 * number).view(np.int64)

    line = 0
    for begin, end in runs:
        for low, high, first, last in _tiles(end - begin, blocks, _TILE):
            width, height, start = last - first, high - low, (begin + low) * across + first
            if across <= width + _GAP:  # one call for all rows, and what lies between them
                words = read(start, height * across).reshape(height, -1)[:, : 4 * width]
            else:
                words = np.stack([read(start + row * across, width) for row in range(height)])
            yield slice(line + low, line + high), first, torch.from_numpy(np.ascontiguousarray(words))
        line += end - begin


def _by_pytorch(part: Part, blocks: Run, across: int, key: Word, salt: int, result: Tensor) -> Iterator[Tile]:
    rows = _indices(part.outer, result.device).unsqueeze(1) * across
    for low, high, first, last in _tiles(len(rows), blocks, _LARGE_TILE):
        position = rows[low:high] + torch.arange(first, last, device=result.device)
        words = philox((position, salt, 0, 0), (key, 0))
        yield slice(low, high), first, torch.stack(words, -1).flatten(1)  # type: ignore[arg-type]


def _by_triton(
    into: Tensor, part: Part, key: Word, salt: int, kind: Kind, per_block: int, parameters: Sequence[float]
) -> None:
    """Fill a contiguous tensor on a CUDA device in one pass."""
    rows = _indices(part.outer, into.device)
    if isinstance(into, FakeTensor):
        return
    from meshwright.ops import gpu_kernels

    gpu_kernels.draw(
        into.view(len(rows), -1), rows, -(-part.width // per_block), _runs(part.inner), key, salt, per_block, kind,
        (parameters[0], parameters[-1]), _limit(parameters[0]) if kind == "bernoulli" else 0,
        _bits(into.dtype if kind == "uniform" else torch.promote_types(into.dtype, torch.float32)),
    )  # fmt: skip


def _limit(probability: float) -> int:
    return round(probability * 2.0**32) - 2**31  # words count from -2 ** 31


def _bits(dtype: torch.dtype) -> int:
    return round(1 - math.log2(torch.finfo(dtype).eps))


def _bernoulli(dtype: torch.dtype, probability: float) -> Convert:
    limit = _limit(probability)
    if limit == 2**31:
        return lambda words: torch.ones_like(words.view(torch.int32), dtype=dtype)
    return lambda words: words.view(torch.int32) < limit


def _fractions(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of [0, 1) with as many bits as the dtype's mantissa, from half a word each; in float64, from a word."""
    bits = _bits(dtype)
    source, size = (words, 64) if dtype == torch.float64 else (words.view(torch.int32), 32)
    return (source >> size - bits).to(dtype).add_(2.0 ** (bits - 1)).mul_(2.0**-bits)


def _uniform(dtype: torch.dtype, low: float, high: float) -> Convert:
    return lambda words: _fractions(words, dtype).mul_(high - low).add_(low)


def _normal(dtype: torch.dtype, mean: float, std: float) -> Convert:
    """Pairs of numbers from pairs of uniform ones (Box, Muller 1958)."""
    wide = torch.promote_types(dtype, torch.float32)

    def convert(words: Tensor) -> Tensor:
        pairs = _fractions(words, wide).view(len(words), -1, 2)
        radius = (1 - pairs[..., 0]).log_().mul_(-2).sqrt_().mul_(std)
        angle = pairs[..., 1] * (2 * math.pi)
        pairs[..., 0], pairs[..., 1] = radius * angle.cos(), radius * angle.sin()
        return pairs.add_(mean).flatten(1)

    return convert


_WHOLE: tuple[Any, ...] = ((), (), (), 1, -1)


def _drawn(
    kind: Kind, make: Callable[..., Convert], num_parameters: int, per_block: Callable[[torch.dtype], int]
) -> Any:
    """Return a kernel that draws a tensor like the given one. Its random key is a number, or a tensor of a number on
    the device, which graphs read whenever they run."""

    def kernel(like: Tensor, *values: Any) -> Tensor:
        parameters, (random_key, salt, *place) = values[:num_parameters], values[num_parameters:]
        sizes, begins, lengths, inner, time = (*place, *_WHOLE[len(place) :])  # PyTorch leaves default values out
        microbatch = 0
        if time >= 0:  # the micro-batch says where its part begins
            microbatch = random_key % _MICROBATCHES
            begins = [*begins[:time], begins[time] + microbatch * lengths[time], *begins[time + 1 :]]
        letters = list(zip(sizes, begins, lengths, strict=True)) or [(size, 0, size) for size in like.shape or (1,)]
        result = contiguous = torch.empty_like(like)
        if not result.is_contiguous():
            contiguous = torch.empty_like(like, memory_format=torch.contiguous_format)
        if result.numel():
            part, key = Part(letters[:-inner], letters[-inner:]), random_key - microbatch
            if uses_triton(like):
                _by_triton(contiguous, part, key, salt, kind, per_block(like.dtype), parameters)
            else:
                _fill(contiguous, part, key, salt, per_block(like.dtype), make(like.dtype, *parameters))
        return result if contiguous is result else result.copy_(contiguous)

    return kernel


def _by_dtype(dtype: torch.dtype) -> int:
    return 4 if dtype == torch.float64 else 8


bernoulli = _drawn("bernoulli", _bernoulli, 1, lambda dtype: 8)
uniform, normal = _drawn("uniform", _uniform, 2, _by_dtype), _drawn("normal", _normal, 2, _by_dtype)
_PLACE = "int[] sizes=[], int[] begins=[], int[] lengths=[], int inner=1, int time=-1"
for _name, _parameters, _kernel in (
    ("bernoulli", "float probability", bernoulli), ("uniform", "float low, float high", uniform),
    ("normal", "float mean, float std", normal),
):  # fmt: skip
    _schema = f"{_name}(Tensor like, {_parameters}, {KEY}, {_PLACE}) -> Tensor"
    define(_schema, _kernel, lambda like, *_: torch.empty_like(like))
