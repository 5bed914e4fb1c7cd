"""Selections: the elements of a vector that are sent, selected exactly and equally in every run.

Magnitudes are compared as integers: without the sign bit, the bits of floating numbers have the order of the
magnitudes, and NaN is larger than infinity.
"""

from math import ceil, inf

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compress.bits import set_places
from meshwright.ir.codec import Codec, Select

_CHUNK = 2**18
"""The number of elements that are compared at a time."""
_SAMPLE = 2**14
"""The least number of elements in the sample of a long vector."""
_MARGIN = 1.15
"""The number of candidates for each element that is selected."""
_FIRST_SHARE = 0.25
"""Share of elements at the start of a warm-up (Lin et al. 2018, "Deep Gradient Compression", section 3.3)."""

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type with as many bytes as a floating number."""
_INFINITY = {
    dtype: int(torch.tensor(inf, dtype=dtype).view(_WORDS[dtype.itemsize]))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""The bits of infinity, as an integer. All larger integers are NaN."""


def share_of(codec: Codec, step: int) -> float | None:
    """The share of elements that are sent in a step; None for a threshold.

    During the warm-up, it falls exponentially from 25 % to the codec's share, unless the codec's share is larger.
    """
    part = codec.select
    assert part is not None
    if part.rule == "threshold":
        return None
    if step >= codec.warmup or part.amount >= _FIRST_SHARE:
        return part.amount
    return float(_FIRST_SHARE * (part.amount / _FIRST_SHARE) ** (step / codec.warmup))


def chosen(values: Tensor, part: Select, share: float | None, draw: int) -> Tensor:
    """Indices (int32, ascending) of the elements that a rule selects.

    Args:
        values: flat and contiguous, fewer than 2**31 elements.
        share: replaces the share of ``part``.
        draw: the seed for ``randk``.
    """
    if part.rule == "threshold":
        least = torch.tensor(part.amount, dtype=values.dtype).view(_WORDS[values.dtype.itemsize])
        return _at_least(values, int(least))
    count = Select(part.rule, part.amount if share is None else share).count(len(values))
    if part.rule == "randk":
        return random_indices(len(values), count, draw).to(values.device)
    return largest(values, count)


def largest(values: Tensor, count: int) -> Tensor:
    """Indices (int32, ascending) of the ``count`` elements of largest magnitude. Of equal elements, the first are
    selected.

    From a sample, it estimates a magnitude that slightly more than ``count`` elements reach. The selection among these
    candidates is exact. If there are too few candidates, the selection is among all elements.
    """
    if count >= len(values):
        return _every(values)
    least = _sampled_threshold(values, count)
    above = _at_least(values, least + 1)
    if len(above) >= count:
        return _largest_of(values, above, count)
    # Many elements are equal, such as zeros, or the sample is not representative.
    equal = _first_equal(values, least, count - len(above))
    if len(above) + len(equal) == count:
        return torch.cat([above, equal]).sort().values
    return _largest_of(values, _every(values), count)


def random_indices(length: int, count: int, draw: int) -> Tensor:
    """Indices (int32, ascending) of ``count`` of ``length`` elements; every set of them is equally likely."""
    generator = torch.Generator().manual_seed(draw)
    if 4 * count > length:
        return torch.randperm(length, generator=generator, dtype=torch.int32)[:count].sort().values
    found = torch.empty(0, dtype=torch.int32)
    while len(found) < count:
        more = torch.randint(length, (2 * (count - len(found)) + 8,), generator=generator, dtype=torch.int32)
        found = torch.cat([found, more]).unique()
    dropped = torch.randperm(len(found), generator=generator)[: len(found) - count]
    kept = torch.ones(len(found), dtype=torch.bool)
    kept[dropped] = False
    return found[kept]


def _every(values: Tensor) -> Tensor:
    return torch.arange(len(values), dtype=torch.int32, device=values.device)


def _largest_of(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The ``count`` candidates (indices, ascending) with the largest elements. Of equal elements, the first are
    selected."""
    magnitudes = _magnitudes(values.index_select(0, candidates))
    least = magnitudes.kthvalue(len(candidates) - count + 1).values
    selected = magnitudes > least
    equal = (magnitudes == least).nonzero().view(-1)
    selected[equal[: count - int(selected.sum())]] = True
    return candidates[selected]


def _first_equal(values: Tensor, magnitude: int, count: int) -> Tensor:
    """Indices (int32, ascending) of the first ``count`` elements of a magnitude, or of all of them if there are
    fewer."""
    found, missing = [], count
    for begin in range(0, len(values), _CHUNK):
        places = set_places(_magnitudes(values[begin : begin + _CHUNK]) == magnitude)[:missing]
        found.append((places + begin).int())
        missing -= len(places)
        if not missing:
            break
    return torch.cat(found)


def _magnitudes(values: Tensor) -> Tensor:
    word = _WORDS[values.dtype.itemsize]
    return values.view(word).bitwise_and(torch.iinfo(word).max)


def _sampled_threshold(values: Tensor, count: int) -> int:
    """A magnitude that slightly more than ``count`` elements reach, if the sample is representative."""
    step = max(1, len(values) // _SAMPLE)
    sample = _magnitudes(values[::step].contiguous())
    expected = count * len(sample) / len(values)
    rank = min(len(sample), ceil(_MARGIN * expected + 3 * expected**0.5) + 1)
    return int(sample.kthvalue(len(sample) - rank + 1).values)


def _at_least(values: Tensor, least: int) -> Tensor:
    """Indices (int32, ascending) of the elements whose magnitude, as an integer, is at least ``least``."""
    if least == 0:
        return _every(values)
    word = _WORDS[values.dtype.itemsize]
    # The largest number below it, which an element must exceed. hardshrink keeps NaN, and is faster than a comparison.
    limit = float(torch.tensor(min(least, _INFINITY[values.dtype]) - 1, dtype=word).view(values.dtype))
    found = []
    for begin in range(0, len(values), _CHUNK):
        flags = F.hardshrink(values[begin : begin + _CHUNK], limit).to(torch.bool)
        found.append((set_places(flags) + begin).int())
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int32, device=values.device)
