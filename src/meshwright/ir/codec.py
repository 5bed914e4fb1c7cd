"""Codecs: how gradients, parameters and activations are encoded when they travel between ranks, and how many bytes they
then have.

A codec is a text in a plan:

    fp16, bf16                16-bit floating point
    qsgd(4)                   QSGD: stochastic rounding to 4 bits, unbiased, in buckets of 512 (Alistarh et al. 2017)
    onebit                    the sign, and two means for each bucket (Seide et al. 2014)
    topk(1%)                  the elements of largest magnitude; threshold(0.01): those above a magnitude
    randk(1%)                 random elements, the same on every rank
    powersgd(4)               factors of rank 4 (Vogels et al. 2019)
    factors                   dense layers gather the factors of their gradients (sufficient factors, Xie et al. 2016)
    lossless                  zstandard after a byte shuffle
    topk(1%)+qsgd(4)          a chain: the chosen elements are quantized

Options follow the number: ``qsgd(4, bucket=512, norm=l2, elias=on)``, ``topk(0.1%, momentum=0.9, warmup=500)``,
``feedback=off``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from math import ceil, prod
from typing import Literal

import msgspec

from meshwright.errors import PlanError
from meshwright.ir.call_text import SWITCH, CallText, Wrong

Exchange = Literal["hops", "merges", "sums", "factors"]
"""How a collective adds up encoded messages. ``hops``: each rank decodes a received message, adds its own values, and
encodes the sum again. ``merges``: messages are lists of indices and values, and two messages merge into a message of
their sum. ``sums``: messages are vectors that can be added without decoding, so any collective works. ``factors``:
ranks gather the operands of a matrix product."""

HEADER_BYTES = 8
"""Bytes of the header of a message whose size the receiver does not know. The header is the number of entries."""
INDEX_BYTES = 4
"""Bytes of the index of an element."""
SCALE_BYTES = 4
"""Bytes of the scale of a bucket."""
CANDIDATES = ("bf16", "qsgd(8)", "qsgd(4)", "onebit", "topk(1%)", "topk(1%)+qsgd(4)")
"""The codecs among which the planner chooses, in the order of rising error. A calibration measures them."""
LOSSLESS = "lossless"
"""A lossless codec. If a calibration has measured it, the planner may use it even where the user did not allow
errors."""
LEAST_RATE = 2
"""A matrix is replaced by factors if the factors have at most 1 / LEAST_RATE of its elements (as in PyTorch's PowerSGD
hook)."""


class Cast(msgspec.Struct, frozen=True, tag=True):
    """Elements in a 16-bit format."""

    dtype: Literal["float16", "bfloat16"]


class Quantize(msgspec.Struct, frozen=True, tag=True):
    """Each element is rounded to one of 2**bits - 1 multiples of its bucket's scale. Rounding up or down is random, so
    that the mean is the element.

    The scale is the largest magnitude of the bucket (``max``) or its Euclidean norm (``l2``, as in the paper), divided
    by the number of levels. ``elias``: levels are written in Elias' gamma code, in which small levels are short."""

    bits: int
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"
    elias: bool = False

    @property
    def levels(self) -> int:
        """The number of positive levels."""
        return (1 << (self.bits - 1)) - 1


class OneBit(msgspec.Struct, frozen=True, tag=True):
    """The sign of each element. All negative elements of a bucket decode to their mean, and so do all other
    elements."""

    bucket: int = 4096


class Select(msgspec.Struct, frozen=True, tag=True):
    """A part of the elements, each with its index; the rest is 0.

    ``topk``: the fraction ``amount`` of largest magnitude. ``threshold``: all elements whose magnitude is at least
    ``amount``. ``randk``: a random fraction ``amount``, equal on all ranks, so that indices are not sent."""

    rule: Literal["topk", "threshold", "randk"]
    amount: float

    def count(self, length: int) -> int:
        """The number of chosen elements of a vector. For a threshold, this number is unknown in advance, and all
        elements count."""
        return length if self.rule == "threshold" else min(length, max(1, ceil(self.amount * length)))


class LowRank(msgspec.Struct, frozen=True, tag=True):
    """Matrices are written as two factors of ``rank`` columns. Other tensors, and matrices that are too small to gain
    from it, stay unchanged."""

    rank: int


class Factors(msgspec.Struct, frozen=True, tag=True):
    """The gradient of a dense layer is the product of its input and its output's gradient. The ranks gather these
    operands and multiply them on every rank."""


class Lossless(msgspec.Struct, frozen=True, tag=True):
    """Messages are compressed without loss by zstandard, after a byte shuffle: bytes of equal significance stand
    together."""


Part = Cast | Quantize | OneBit | Select | LowRank | Factors | Lossless


class Codec(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """A codec: its parts, in the order in which they encode.

    ``feedback``: the residual, which a message leaves out, is added to the values of the next step (error feedback).
    ``momentum``: ranks exchange a momentum instead of gradients, as in Deep Gradient Compression (for selections) and
    1-bit Adam (for ``onebit``). ``warmup``: number of first steps in which the exchange is dense (``onebit``), or in
    which the fraction falls from 25 % (selections)."""

    parts: tuple[Part, ...]
    feedback: bool = False
    momentum: float = 0.0
    warmup: int = 0

    @cached_property
    def select(self) -> Select | None:
        """The part that chooses elements, if any."""
        return next((part for part in self.parts if isinstance(part, Select)), None)

    @cached_property
    def values(self) -> Cast | Quantize | OneBit | None:
        """The part that says how values are written; None: in the dtype of the elements."""
        return next((part for part in self.parts if isinstance(part, Cast | Quantize | OneBit)), None)

    @cached_property
    def rank(self) -> int:
        """The columns of low-rank factors; 0 if the codec has none."""
        return next((part.rank for part in self.parts if isinstance(part, LowRank)), 0)

    @cached_property
    def lossless(self) -> bool:
        """Whether messages are compressed without loss after the other parts."""
        return any(isinstance(part, Lossless) for part in self.parts)

    @cached_property
    def is_lossy(self) -> bool:
        """Whether decoded values can differ from the original values."""
        return not all(isinstance(part, Lossless | Factors) for part in self.parts)

    @cached_property
    def exchange(self) -> Exchange:
        """How collectives add up messages of the codec."""
        if isinstance(self.parts[0], Factors):
            return "factors"
        if self.rank or (self.select is not None and self.select.rule == "randk"):
            return "sums"
        return "hops" if self.select is None else "merges"

    @cached_property
    def shares_momentum(self) -> bool:
        """Whether the momentum belongs to the sum of all ranks' gradients and is equal on all ranks, as in 1-bit Adam.
        In Deep Gradient Compression, it belongs to the rank's own gradients."""
        return bool(self.momentum) and self.select is None

    @cached_property
    def chooses_first(self) -> bool:
        """Whether each rank must choose its elements before the collective starts, also in a hierarchical collective,
        because its momentum becomes 0 at the chosen elements."""
        return bool(self.momentum) and self.exchange == "merges"

    @cached_property
    def needs_whole_sum(self) -> bool:
        """Whether every rank needs the whole sum, so that a reduce-scatter does not suffice."""
        return self.exchange == "sums" or self.shares_momentum

    @cached_property
    def is_fixed(self) -> bool:
        """Whether the number of elements alone determines the size of a message."""
        varies = isinstance(self.values, Quantize) and self.values.elias
        return self.exchange in ("hops", "sums") and not self.lossless and not varies

    def value_bytes(self, length: int, item_bytes: int) -> int:
        """The bytes of the values of ``length`` elements, without indices."""
        match self.values:
            case Cast():
                return 2 * length
            case Quantize(bits=bits, bucket=bucket):
                return ceil(length * bits / 8) + SCALE_BYTES * ceil(length / bucket)
            case OneBit(bucket=bucket):
                return ceil(length / 8) + 2 * SCALE_BYTES * ceil(length / bucket)
            case _:
                return length * item_bytes

    def message_bytes(self, length: int, item_bytes: int, terms: int = 1) -> int:
        """Bytes of a message of ``length`` elements of ``item_bytes`` each. The number is exact if ``is_fixed``. For a
        selection, it is the expected size of the sum over ``terms`` ranks that choose elements independently and
        uniformly: N(1 - (1 - k/N)**terms) of N elements (SparCML, Renggli et al. 2019), but at most the size of a dense
        message, because messages become dense beyond that. For a lossless codec, it is the upper limit."""
        header = 0 if self.is_fixed else HEADER_BYTES
        dense = header + self.value_bytes(length, item_bytes)
        if self.exchange != "merges":
            return dense
        assert self.select is not None
        kept = self.select.count(length)
        union = kept if terms == 1 else round(length * (1 - (1 - kept / length) ** terms)) if length else 0
        return min(dense, header + self.sparse_bytes(union, item_bytes))

    def sparse_bytes(self, entries: int, item_bytes: int) -> int:
        """Bytes of ``entries`` indices and values."""
        return INDEX_BYTES * entries + self.value_bytes(entries, item_bytes)

    def factored(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Rows and columns of the matrix that low-rank factors replace; None if the tensor stays unchanged."""
        if not self.rank or len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        gains = self.rank * (rows + columns) * LEAST_RATE < rows * columns
        return (rows, columns) if gains else None

    def summed_lengths(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """For tensors of these shapes, the lengths of the vectors that are all-reduced, in order (codecs whose exchange
        is ``sums``)."""
        length = sum(map(prod, shapes))
        if self.select is not None:
            return (self.select.count(length),)
        matrices = [pair for shape in shapes if (pair := self.factored(shape))]
        whole = length - sum(rows * columns for rows, columns in matrices)
        left, right = (sum(self.rank * pair[side] for pair in matrices) for side in (0, 1))
        return (left + whole, right) if matrices else (whole,)

    def state_lengths(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The lengths of the vectors that a rank keeps between steps, for tensors of these shapes. They lie one after
        the other: ``residual`` (what messages left out), ``momentum``, ``right`` (the right factors of the previous
        step, with which PowerSGD starts), and ``steps`` (the number of accepted steps, for a warm-up). Empty if the
        codec keeps nothing."""
        length = sum(map(prod, shapes))
        lengths = {"residual": length} if self.feedback else {}
        if self.momentum:
            lengths["momentum"] = length
        if self.rank and (matrices := [pair for shape in shapes if (pair := self.factored(shape))]):
            lengths["right"] = sum(self.rank * columns for _, columns in matrices)
        if self.warmup:
            lengths["steps"] = 1
        return lengths

    def __str__(self) -> str:
        texts = [_words(part) for part in self.parts]
        if self.feedback != _default_feedback(self.parts):
            texts[0].append(f"feedback={'on' if self.feedback else 'off'}")
        texts[0] += [f"momentum={self.momentum:g}"] * bool(self.momentum)
        texts[0] += [f"warmup={self.warmup}"] * bool(self.warmup)
        return "+".join(f"{name}({', '.join(inside)})" if inside else name for name, *inside in texts)


_NAMES = (
    "fp16, bf16, qsgd(BITS), onebit, topk(SHARE), threshold(VALUE), randk(SHARE), powersgd(RANK), factors, lossless"
)


@lru_cache(maxsize=256)
def codec_of(text: str) -> Codec:
    """The codec that a text names.

    Raises:
        PlanError: the text is malformed, a name, number or option is unknown or out of range, or the parts cannot be
            chained.
    """
    wrong, parts, shared = partial(_wrong, text), list[Part](), _Shared()
    for piece in text.split("+"):
        call = CallText(piece, wrong, _NAMES, "codec")
        part = _part(call, wrong)
        shared.take(call, part)
        call.end()
        parts.append(part)
    _check_chain(text, parts)
    feedback = _default_feedback(parts) if shared.feedback is None else shared.feedback
    if feedback and not any(isinstance(part, Cast | Quantize | OneBit | Select | LowRank) for part in parts):
        raise _wrong(text, "error feedback for a codec without errors", "leave feedback out")
    if shared.momentum == 1:
        raise _wrong(text, "momentum=1", "a momentum is less than 1")
    if shared.momentum and not feedback:
        raise _wrong(text, "momentum without error feedback", "leave feedback=off out")
    return Codec(parts=tuple(parts), feedback=feedback, momentum=shared.momentum, warmup=shared.warmup)


@dataclass
class _Shared:
    """The options of a codec that may follow any of its parts."""

    feedback: bool | None = None
    momentum: float = 0.0
    warmup: int = 0

    def take(self, call: CallText, part: Part) -> None:
        """Take the options that follow a part."""
        if not isinstance(part, Factors | Lossless) and call.has("feedback"):
            self.feedback = call.choice("feedback", SWITCH, "on") == "on"
        if isinstance(part, Select | OneBit):
            self.momentum = call.number("momentum", 0, 1, self.momentum)
        if isinstance(part, OneBit) or (isinstance(part, Select) and part.rule != "threshold"):
            self.warmup = call.whole("warmup", 0, self.warmup)


def _part(call: CallText, wrong: Wrong) -> Part:
    match call.name:
        case "fp16" | "bf16":
            return Cast("float16" if call.name == "fp16" else "bfloat16")
        case "qsgd":
            bits = call.whole("bits", 2)
            if bits not in (2, 4, 8):
                raise wrong(f"{bits} bits", "2, 4 and 8 bits can be packed")
            norm: Literal["max", "l2"] = "l2" if call.choice("norm", ("max", "l2"), "max") == "l2" else "max"
            elias = call.choice("elias", SWITCH, "off") == "on"
            return Quantize(bits, _bucket(call, wrong, Quantize(bits).bucket), norm, elias)
        case "onebit":
            return OneBit(_bucket(call, wrong, OneBit().bucket))
        case "topk":
            return Select("topk", _share(call, wrong))
        case "randk":
            return Select("randk", _share(call, wrong))
        case "threshold":
            return Select("threshold", call.number("threshold", 0, float("inf")))
        case "powersgd":
            return LowRank(call.whole("rank", 1))
        case "factors":
            return Factors()
        case "lossless":
            return Lossless()
        case _:
            raise wrong(f"there is no codec {call.name!r}", f"one of {_NAMES}")


def _check_chain(text: str, parts: Sequence[Part]) -> None:
    """Refuse every chain except: a selection, then a format of its values, then ``lossless``."""
    order = [
        0 if isinstance(part, Select) else 1 if isinstance(part, Cast | Quantize | OneBit) else 2 for part in parts
    ]
    alone = [part for part in parts if isinstance(part, LowRank | Factors)]
    if (alone and len(parts) > 1) or any(first >= second for first, second in pairwise(order)):
        raise _wrong(
            text,
            "its parts cannot be chained in this order",
            "a chain is a selection (topk, threshold, randk), then fp16, bf16, qsgd or onebit, then lossless",
        )
    if isinstance(parts[0], Select) and parts[0].rule == "randk" and len(parts) > 1:
        raise _wrong(text, "randk cannot be chained: its messages are added up as they are", "write randk alone")


def _default_feedback(parts: Sequence[Part]) -> bool:
    """Error feedback is the default for codecs whose messages are biased (their mean differs from the values)."""
    return any(isinstance(part, OneBit | Select | LowRank) for part in parts)


def _words(part: Part) -> list[str]:
    """The name of a part, its number, and the options that differ from their defaults."""
    match part:
        case Cast(dtype=dtype):
            return ["fp16" if dtype == "float16" else "bf16"]
        case Quantize(bits=bits, bucket=bucket, norm=norm, elias=elias):
            options = [f"bucket={bucket}"] * (bucket != Quantize(bits).bucket)
            return ["qsgd", str(bits), *options, *[f"norm={norm}"] * (norm != "max"), *["elias=on"] * elias]
        case OneBit(bucket=bucket):
            return ["onebit", *[f"bucket={bucket}"] * (bucket != OneBit().bucket)]
        case Select(rule="threshold", amount=amount):
            return ["threshold", f"{amount:g}"]
        case Select(rule=rule, amount=amount):
            return [rule, f"{100 * amount:.10g}%"]
        case LowRank(rank=rank):
            return ["powersgd", str(rank)]
        case Factors():
            return ["factors"]
        case Lossless():
            return ["lossless"]


def _bucket(call: CallText, wrong: Wrong, default: int) -> int:
    size = call.whole("bucket", 8, default)
    if size % 8:
        raise wrong(f"bucket={size}", "a bucket is a multiple of 8 elements: whole bytes of bits")
    return size


def _share(call: CallText, wrong: Wrong) -> float:
    word = call.first("share")
    value = call.as_number("share", word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    if not 0 < value <= 1:
        raise wrong(f"{call.name} of {word} of all elements", "a share is more than 0 and at most 1, or 100%")
    return value


def _wrong(text: str, problem: str, remedy: str) -> PlanError:
    return PlanError(problem, where=f"codec {text!r}", remedy=remedy)
