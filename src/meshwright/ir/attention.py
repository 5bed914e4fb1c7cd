"""The algorithms of attention: the calls that each algorithm supports, and the pairs of queries and keys that a causal
mask or a window leaves.

An algorithm is one kernel of a device, named as PyTorch names its backends. ``ops/attention_kernels.py`` calls them.

    flash        FlashAttention 2 (Dao 2023) on GPUs; PyTorch's own fused kernel on CPUs
    cudnn        cuDNN's kernel
    efficient    memory-efficient attention (Rabe, Staats 2021; CUTLASS)
    plain        two products and a softmax, with the scores in memory
"""

from functools import lru_cache
from typing import NamedTuple

FLASH, CUDNN, EFFICIENT, PLAIN = "flash", "cudnn", "efficient", "plain"
ATTENTIONS = (FLASH, CUDNN, EFFICIENT, PLAIN)
"""The names of the algorithms."""

_HALVES = ("float16", "bfloat16")
_CPU_FLASH = ("float32", "float64", "bfloat16")
"""The dtypes of the CPU's fused kernel. Its sums of float16 could overflow."""
_FLASH_WIDTH, _CUDNN_WIDTH = 256, 128
"""The largest head sizes of FlashAttention 2, and of cuDNN for all devices and versions."""
_CUDNN_LENGTH = 128
"""cuDNN before 9.15.1 is wrong for sequences that this does not divide."""
BLOCK = {True: 512, False: 128}
"""The number of keys that a fused kernel computes at a time, on CPUs (True) and GPUs (False). It skips whole blocks."""


class AttentionForm(NamedTuple):
    """The properties of a call on which it depends which algorithms support it.

    ``width`` is the head size of queries and keys, ``values`` that of values. ``shifted``: the queries see a window of
    keys, or the first query does not stand beside the first key."""

    dtype: str
    width: int
    values: int
    queries: int
    keys: int
    dropout: bool = False
    masked: bool = False
    shifted: bool = False


@lru_cache(maxsize=2**12)
def algorithms_of(form: AttentionForm, on_cpu: bool) -> tuple[str, ...]:
    """The algorithms that support a call, the usual one first.

    The limits are those of PyTorch 2.13 (``sdp_utils.cpp``). Only ``plain`` draws the random numbers of dropout by
    key, so that all layouts draw the same."""
    dtype, width, values, queries, keys, dropout, masked, shifted = form
    if dropout:
        return (PLAIN,)
    if on_cpu:
        return (FLASH, PLAIN) if dtype in _CPU_FLASH and width == values else (PLAIN,)
    algorithms = []
    step = 8 if dtype in _HALVES else 4
    divides = width % step == values % step == 0
    if dtype in _HALVES and divides:
        if width == values <= _FLASH_WIDTH and not masked:
            algorithms.append(FLASH)
        whole = queries % _CUDNN_LENGTH == keys % _CUDNN_LENGTH == 0
        if max(width, values) <= _CUDNN_WIDTH and whole and not shifted:
            algorithms.append(CUDNN)
    if divides and dtype in (*_HALVES, "float32"):
        algorithms.append(EFFICIENT)
    return (*algorithms, PLAIN)


class Band(NamedTuple):
    """The keys that queries see. If ``causal``, query i sees key j if ``j <= i + first``, and with a ``window`` only if
    also ``j > i + first - window``. ``first`` is the position of the first query minus that of the first key.

        first = 1, window = 2      keys   0 1 2 3
                                query 0   x x . .
                                      1   . x x .
    """

    queries: int
    keys: int
    causal: bool = False
    window: int = 0
    first: int = 0

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        if not self.causal:
            return self.queries * self.keys
        before = _sum_of_clamped(self.first + 1 - self.window, self.queries, self.keys) if self.window else 0
        return _sum_of_clamped(self.first + 1, self.queries, self.keys) - before

    @property
    def is_whole(self) -> bool:
        """Whether all queries see all keys."""
        if not self.causal:
            return True
        sees_start = not self.window or self.queries - 1 + self.first < self.window
        return self.first >= self.keys - 1 and sees_start

    @property
    def is_triangle(self) -> bool:
        """Whether it is the causal mask of a query that stands beside the first key."""
        return self.causal and not self.first and not 0 < self.window < self.queries

    def seen(self) -> "tuple[slice, slice, Band]":
        """The queries that see a key, the keys that are seen, and the band of these. All three are empty if no query
        sees a key."""
        if not self.causal:
            return slice(0, self.queries), slice(0, self.keys), self
        top = max(0, -self.first)
        bottom = min(self.queries, self.keys - self.first + self.window - 1) if self.window else self.queries
        left = max(0, self.first + top - self.window + 1) if self.window else 0
        right = min(self.keys, self.first + bottom)
        if bottom <= top or right <= left:
            return slice(0, 0), slice(0, 0), Band(0, 0)
        first, queries, keys = self.first + top - left, bottom - top, right - left
        window = self.window if self.window < queries + first else 0
        band = Band(queries, keys, True, window, first)
        return slice(top, bottom), slice(left, right), Band(queries, keys) if band.is_whole else band


def _sum_of_clamped(start: int, count: int, most: int) -> int:
    """The sum of ``min(max(start + i, 0), most)`` over the ``count`` first i."""
    low = min(count, max(0, -start))
    high = min(count, max(low, most - start))
    return (2 * start + low + high - 1) * (high - low) // 2 + (count - high) * most


def computed_fraction(pairs: float, queries: int, keys: int, on_cpu: bool) -> float:
    """The fraction of all pairs of queries and keys that a fused kernel computes, if it skips the blocks of keys
    without one of the ``pairs``."""
    all_pairs = queries * keys
    if not all_pairs or keys <= BLOCK[on_cpu]:
        return 1.0
    return min(1.0, (pairs + queries * BLOCK[on_cpu] / 2) / all_pairs) if pairs < all_pairs else 1.0


def backward_bytes(rows: int, width: int) -> int:
    """Bytes that a fused kernel of GPUs allocates itself in backward: the sums of the queries' gradients in float32,
    and for each of the ``rows`` (queries of all heads) the product of its output and the output's gradient."""
    return 4 * rows * (width + 1)
