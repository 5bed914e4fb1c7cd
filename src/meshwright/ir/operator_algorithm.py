"""Algorithms of an operator as text: the samples are divided into pieces, and each piece names the algorithm that
computes it.

A text is either the name of an algorithm (all samples at once), or pieces of the form ``COUNTxSAMPLES NAME``, joined by
" + ":

    fft                                  all samples at once
    8x32 fft                             8 pieces of 32 samples
    7x32 winograd(2) + 1x16 gemm         7 pieces of 32 samples, then 1 piece of 16 samples by another algorithm
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Literal

import msgspec

from meshwright.errors import PlanError

NATIVE = "native"
"""The name of PyTorch's own algorithm."""
CONVOLUTIONS = (NATIVE, "gemm", "implicit", "fft", "winograd(2)", "winograd(4)")
"""The names of the algorithms of convolutions (``ir/convolution.py``)."""
GATHER = "gather"
"""The algorithm of mixtures of experts in which each rank gathers the tokens of all ranks that share the experts."""
PIECES = "pieces"
"""The algorithm of a matrix product that runs in pieces, while its operand or result travels: ``pieces 4``."""
FLOAT8_MULTIPLE = 16
"""GPUs multiply matrices in float8 whose inner and last dims are multiples of this."""
FLOAT8 = "float8"
"""The algorithm of a matrix product in float8, with its scaling and the formats of its operands:
``float8 tensorwise e5m2 e4m3``."""

_PIECE = re.compile(r"(?:(?P<count>\d+)x(?P<samples>\d+) )?(?P<name>\S+)")


class Pieces(msgspec.Struct, frozen=True):
    """``count`` pieces of ``samples`` samples, each computed by the algorithm ``name``. 0 samples mean all samples."""

    count: int
    samples: int
    name: str

    def __str__(self) -> str:
        return f"{self.count}x{self.samples} {self.name}" if self.samples else self.name


@lru_cache(maxsize=2**12)
def parse(text: str) -> tuple[Pieces, ...]:
    """The pieces that a text names.

    Raises:
        PlanError: the text is not of this form, or names an unknown algorithm.
    """
    result = []
    words = text.split(" + ")
    for word in words:
        match = _PIECE.fullmatch(word)
        if match is None or match["name"] not in CONVOLUTIONS:
            remedy = f"write NAME, or COUNTxSAMPLES NAME joined by ' + ', with a name of {', '.join(CONVOLUTIONS)}"
            raise PlanError(f"{word!r} is no algorithm", where=f"operator_algorithms: {text!r}", remedy=remedy)
        counts = int(match["count"] or 1), int(match["samples"] or 0)
        if match["count"] and min(counts) < 1:
            remedy = "give 1 or more pieces of 1 or more samples"
            raise PlanError(f"{word!r} computes nothing", where=f"operator_algorithms: {text!r}", remedy=remedy)
        result.append(Pieces(*counts, match["name"]))
    if len(words) > 1 and not all(pieces.samples for pieces in result):
        remedy = "write COUNTxSAMPLES before each name"
        raise PlanError("a piece of several has no size", where=f"operator_algorithms: {text!r}", remedy=remedy)
    return tuple(result)


def divide(text: str, samples: int) -> Iterator[tuple[str, int]]:
    """The name of the algorithm and the number of samples of each piece, for a call with ``samples`` samples.

    A call with fewer samples than the text has ends within its pieces. A call with more repeats the last piece. So the
    ranks' numbers of samples may differ by one, and the last batch of an epoch may be smaller, within the same
    workspace.

    Raises:
        PlanError: the text is not of the form that ``parse`` reads.
    """
    pieces = parse(text)
    left = samples
    for index, piece in enumerate(pieces):
        count = 0
        while left and (count < piece.count or index == len(pieces) - 1):
            taken = min(left, piece.samples or left)
            yield piece.name, taken
            left, count = left - taken, count + 1


def text_of(pieces: Iterable[tuple[str, int]]) -> str:
    """The text of pieces (name, number of samples), in their order. A single piece gives the name alone."""
    listed = list(pieces)
    if len(listed) == 1:
        return listed[0][0]
    runs = ((key, len(list(run))) for key, run in groupby(listed))
    return " + ".join(str(Pieces(count, samples, name)) for (name, samples), count in runs)


def piece_sizes(samples: int) -> list[int]:
    """The numbers of samples that are considered for a piece: the powers of 2, and all samples."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()) if 2**power <= samples)})


class Float8(msgspec.Struct, frozen=True):
    """A product in float8 (``ops/float8.py``): its scaling, and the formats of its left and right operand."""

    scaling: Literal["tensorwise", "rowwise"]
    left: Literal["e4m3", "e5m2"] = "e4m3"
    right: Literal["e4m3", "e5m2"] = "e4m3"

    @property
    def rowwise(self) -> bool:
        """Whether each row of the left operand and each column of the right one has its own scale."""
        return self.scaling == "rowwise"

    def __str__(self) -> str:
        return f"{FLOAT8} {self.scaling} {self.left} {self.right}"


def float8_of(text: str) -> Float8:
    """The product in float8 that a text names.

    Raises:
        PlanError: the text is not of this form.
    """
    name, *rest = text.split(" ")
    try:
        if name == FLOAT8 and len(rest) == 3:
            return msgspec.convert(dict(zip(("scaling", "left", "right"), rest, strict=True)), Float8)
    except msgspec.ValidationError:
        pass
    remedy = f"write `{FLOAT8} SCALING LEFT RIGHT`, with tensorwise or rowwise, and e4m3 or e5m2 for each operand"
    raise PlanError("it is no product in float8", where=f"operator_algorithms: {text!r}", remedy=remedy)


def in_pieces(count: int) -> str:
    """The text of a matrix product that runs in ``count`` pieces."""
    return f"{PIECES} {count}"


def pieces_of(text: str) -> int:
    """The number of pieces in which a matrix product runs.

    Raises:
        PlanError: the text is no algorithm of matrix products.
    """
    name, _, count = text.partition(" ")
    if name != PIECES or not count.isdecimal() or int(count) < 2:
        remedy = f"write `{PIECES} N`, with N a multiple of the number of ranks that share the product"
        raise PlanError("it is no algorithm of matrix products", where=f"operator_algorithms: {text!r}", remedy=remedy)
    return int(count)
