"""Kernels for CUDA devices in Triton, for work that operators of PyTorch would do in many passes over memory: random
numbers by counters, and numbers rounded to float8.

PyTorch for CUDA brings Triton along. This module is imported when the first such kernel runs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 128
"""The blocks of random numbers that a program computes."""
_TILE = 64
"""The rows and columns that a program rounds."""
_KINDS = ("bernoulli", "uniform", "normal")
_FLOAT8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _half(word):  # type: ignore[no-untyped-def]
    """The lower half of words, as signed integers."""
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _fractions(number, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of [0, 1) with ``BITS`` bits, from signed integers (``philox._fractions``)."""
    if BITS > 32:
        return ((number >> (64 - BITS)).to(tl.float64) + 2.0 ** (BITS - 1)) * 2.0**-BITS
    else:  # without this word, Triton compiles both lines
        return ((number >> (32 - BITS)).to(tl.float32) + 2.0 ** (BITS - 1)) * 2.0**-BITS


@triton.jit
def _joined(a, b, c, d):  # type: ignore[no-untyped-def]
    """[n], four times -> [n, 4]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4))


@triton.jit(
    do_not_specialize=[
        "salt", "limit", "num_rows", "first", "across", "blocks", "begin", "end", "column", "stride",
    ]
)  # fmt: skip
def _draw(  # type: ignore[no-untyped-def]
    result, rows, key, salt, limit, num_rows, first, across, blocks, begin, end, column, stride,
    KIND: tl.constexpr, BITS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PER_BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Fill columns of a matrix, from ``column`` on: the numbers ``begin`` to ``end`` of each row, in ``blocks`` blocks
    from ``first`` on. ``across``: the blocks of a row of the whole tensor. ``stride``: of rows in memory. ``A``, ``B``:
    the bounds of uniform numbers, or mean and deviation of normal ones."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    row, block = at // blocks, first + at % blocks
    inside = row < num_rows
    c0 = (tl.load(rows + row, inside, other=0) * across + block).to(tl.uint64)
    k0 = tl.load(key).to(tl.uint64) + tl.zeros_like(c0)
    c1 = salt.to(tl.uint64) + tl.zeros_like(c0)
    c2, c3, k1 = tl.zeros_like(c0), tl.zeros_like(c0), tl.zeros_like(c0)
    m0 = tl.full((N,), 0xD2E7470EE14C6C93, tl.uint64)
    m1 = tl.full((N,), 0xCA5A826395121157, tl.uint64)
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, c2 * m1, high0 ^ c3 ^ k1, c0 * m0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    if PER_BLOCK == 4:
        numbers = _joined(
            c0.to(tl.int64, bitcast=True), c1.to(tl.int64, bitcast=True), c2.to(tl.int64, bitcast=True),
            c3.to(tl.int64, bitcast=True),
        )  # fmt: skip
    else:
        words = _joined(c0, c1, c2, c3)
        numbers = tl.reshape(tl.join(_half(words), _half(words >> 32)), (N, 8))
    if KIND == 0:
        values = (numbers < limit).to(tl.float32)
    else:
        values = _fractions(numbers, BITS)
        if KIND == 1:
            values = values * (B - A) + A
        else:  # pairs of normal numbers from pairs of uniform ones (Box, Muller 1958)
            radial, angular = tl.split(tl.reshape(values, (N, PER_BLOCK // 2, 2)))
            radius, angle = tl.sqrt(tl.log(1 - radial) * -2) * B, angular * 6.283185307179586
            values = tl.reshape(tl.join(radius * tl.cos(angle) + A, radius * tl.sin(angle) + A), (N, PER_BLOCK))
    number = block[:, None] * PER_BLOCK + tl.arange(0, PER_BLOCK)[None, :]
    where = result + row[:, None] * stride + (number - begin + column)
    tl.store(where, values.to(result.dtype.element_ty), inside[:, None] & (number >= begin) & (number < end))


def draw(
    into: Tensor, rows: Tensor, across: int, runs: Sequence[tuple[int, int]], key: int | Tensor, salt: int,
    per_block: int, kind: str, parameters: tuple[float, float], limit: int, bits: int,
) -> None:  # fmt: skip
    """Fill a contiguous matrix with random numbers, ``per_block`` of each block.

    ``rows``: the number of each row in the whole tensor. ``across``: the blocks of a row there. ``runs``: the ranges of
    numbers of the last dim that the matrix has. ``limit``: a Bernoulli number is 1 if 32 random bits, as a signed
    integer, are below it. ``bits``: the bits of a uniform number.
    """
    if isinstance(key, int):  # graphs read it from memory, and the kernel is to be the same
        key = torch.full((), _signed(key), dtype=torch.int64, device=into.device)
    column = 0
    with torch.cuda.device(into.device):
        for begin, end in runs:
            first, blocks = begin // per_block, -(-end // per_block) - begin // per_block
            grid = (triton.cdiv(len(rows) * blocks, _BLOCKS),)
            _draw[grid](
                into, rows, key, _signed(salt), limit, len(rows), first, across, blocks, begin, end, column,
                into.stride(0), KIND=_KINDS.index(kind), BITS=bits, A=parameters[0], B=parameters[1],
                PER_BLOCK=per_block, N=_BLOCKS,
            )  # fmt: skip
            column += end - begin


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    value, scale, result, rows, columns, row_stride, column_stride, scale_row_stride, scale_column_stride,
    result_row_stride, result_column_stride,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round a tile of a matrix. The stride of a scale is 0 in a dim of one element."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    number = tl.load(value + row * row_stride + column * column_stride, inside, other=0.0).to(tl.float32)
    by = tl.load(scale + row * scale_row_stride + column * scale_column_stride, inside, other=1.0)
    quotient = tl.div_rn(number, by + tl.zeros_like(number))
    kept = tl.where(quotient != quotient, quotient, tl.clamp(quotient, -LIMIT, LIMIT))
    tl.store(result + row * result_row_stride + column * result_column_stride, kept.to(FORMAT), inside)


def round_to_float8(value: Tensor, scale: Tensor, result: Tensor) -> None:
    """Write ``value / scale`` [r, c] into ``result``, a tensor in float8. ``scale``: of one element, [r, 1] or [1, c],
    in float32."""
    rows, columns = value.shape
    strides = [0 if size == 1 else step for size, step in zip(scale.shape, scale.stride(), strict=True)] or [0, 0]
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    with torch.cuda.device(value.device):
        _round[grid](
            value, scale, result, rows, columns, *value.stride(), *strides, *result.stride(),
            LIMIT=torch.finfo(result.dtype).max, FORMAT=_FLOAT8[result.dtype], TILE=_TILE,
        )  # fmt: skip
