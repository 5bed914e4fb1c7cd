"""Coded chunks: their bytes, the values they decode to, and the random numbers of quantization."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.compress.bits import pack, packed_bytes, unpack
from meshwright.compress.coder import coder_of, draw_of
from meshwright.compress.elias import gamma_bits, read_gamma, write_gamma
from meshwright.errors import MeshwrightError, PlanError
from meshwright.ir.codec import codec_of
from tests.tries import tries

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FIXED = ("fp16", "bf16", "qsgd(2)", "qsgd(4, bucket=64)", "qsgd(8)", "qsgd(8, norm=l2)", "onebit", "onebit(bucket=64)")
VARIABLE = ("lossless", "bf16+lossless", "qsgd(4, elias=on)", "qsgd(2, elias=on)+lossless", "onebit+lossless")


def normal(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encoded(text: str, values: Tensor, draw: int = 1) -> Tensor:
    """The message, written at an odd byte, with bytes of others before and behind it."""
    coder = coder_of(codec_of(text), values.dtype)
    room = torch.full((coder.num_bytes(len(values)) + 2,), 77, dtype=torch.uint8)
    size = coder.encode(values, room[1:-1], draw)
    assert room[0] == 77
    assert room[size + 1] == 77
    return room[1 : size + 1]


def decoded(text: str, values: Tensor, draw: int = 1) -> Tensor:
    output = torch.full_like(values, 7.0)
    coder_of(codec_of(text), values.dtype).decode(encoded(text, values, draw), output, add=False)
    return output


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", FIXED)
def test_messages_have_the_bytes_of_the_codec(text: str, dtype: torch.dtype) -> None:
    codec, values = codec_of(text), normal(2000, dtype)
    coder = coder_of(codec, dtype)
    assert coder.is_fixed
    room = torch.empty(2 * 2000, dtype=torch.uint8)
    for length in range(2001):
        size = coder.encode(values[:length], room, 1)
        assert size == coder.num_bytes(length) == coder.coded_bytes(room, length)
        assert size == codec.message_bytes(length, dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", VARIABLE)
def test_variable_messages_have_at_most_the_bytes_of_the_codec(text: str, dtype: torch.dtype) -> None:
    codec = codec_of(text)
    coder = coder_of(codec, dtype)
    for length in (0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 512, 513, 2000):
        for values in (normal(length, dtype), torch.zeros(length, dtype=dtype)):
            message = encoded(text, values)
            assert len(message) <= coder.num_bytes(length) == codec.message_bytes(length, dtype.itemsize)
            assert len(message) == coder.coded_bytes(torch.cat([message, message]), length)


def test_a_coded_chunk_has_at_most_512_kib_and_whole_buckets() -> None:
    for text in (*FIXED, *VARIABLE, "qsgd(4, bucket=4096)", "qsgd(8, bucket=1000)"):
        for dtype in DTYPES:
            coder = coder_of(codec_of(text), dtype)
            assert coder.num_bytes(coder.chunk) <= 2**19
            assert coder.chunk % getattr(coder.codec.values, "bucket", 1) == 0
            values = normal(coder.chunk, dtype)
            assert len(encoded(text, values)) <= 2**19
    with pytest.raises(PlanError, match="bucket=1048576") as refused:
        coder_of(codec_of("qsgd(8, bucket=1048576)"), torch.float32)
    assert "at most" in refused.value.remedy


@given(st.integers(0, 300), st.sampled_from((1, 2, 4, 8)), st.integers(0, 10**6))
def test_packed_codes_are_read_again(length: int, bits: int, seed: int) -> None:
    low, high = (0, 2) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    packed = torch.full((packed_bytes(length, bits),), 99, dtype=torch.uint8)
    pack(codes, bits, packed)
    unpacked_codes = unpack(packed, bits, length)
    assert torch.equal(
        unpacked_codes.short() if bits > 1 else unpacked_codes.short().abs(), codes.short() * 2 ** (8 - bits)
    )


@given(st.lists(st.integers(-127, 127)))
def test_elias_codes_have_the_bits_of_the_formula_and_are_read_again(numbers: list[int]) -> None:
    """The gamma code of z has 2 floor(log2 z) + 1 bits; z is 2 x for x > 0, otherwise 1 - 2 x."""
    levels = torch.tensor(numbers, dtype=torch.int8)
    positive = [2 * x if x > 0 else 1 - 2 * x for x in numbers]
    assert gamma_bits(levels) == sum(2 * (z.bit_length() - 1) + 1 for z in positive)
    message = torch.empty(packed_bytes(gamma_bits(levels), 1), dtype=torch.uint8)
    write_gamma(levels, message)
    assert read_gamma(message, len(levels)).tolist() == numbers


def test_elias_codes_change_the_bytes_and_nothing_else() -> None:
    values = normal(5000) ** 5
    for bits in (2, 4, 8):
        assert torch.equal(decoded(f"qsgd({bits}, elias=on)", values), decoded(f"qsgd({bits})", values))
    assert len(encoded("qsgd(8, elias=on)", values)) < 0.7 * len(encoded("qsgd(8)", values))


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lossless_messages_decode_to_the_same_bits(dtype: torch.dtype) -> None:
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = normal(5000, dtype)
    values[::7] = float("nan")
    assert torch.equal(decoded("lossless", values).view(word), values.view(word))
    assert torch.equal(decoded("bf16+lossless", values).view(word), decoded("bf16", values).view(word))


@pytest.mark.parametrize("text", [*FIXED, *VARIABLE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_message_is_added_or_written(text: str, dtype: torch.dtype) -> None:
    coder, values, sums = coder_of(codec_of(text), dtype), normal(1000, dtype), normal(1000, dtype, seed=1)
    expected = sums.double() + decoded(text, values).double()
    coder.decode(encoded(text, values), sums, add=True)
    torch.testing.assert_close(sums.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("text", [*FIXED, *VARIABLE])
@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        pytest.param(length, dtype, marks=pytest.mark.product if (number + turn) % 3 else ())
        for number, length in enumerate([1, 9, 600])
        for turn, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_values_that_are_not_finite_arrive(text: str, dtype: torch.dtype, length: int) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        values = normal(length, dtype)
        values[length // 2] = bad
        assert not decoded(text, values)[length // 2].isfinite()


@pytest.mark.parametrize("text", [*FIXED, *VARIABLE])
def test_zeros_arrive_as_zeros(text: str) -> None:
    for length in (0, 1, 513):
        assert torch.equal(decoded(text, torch.zeros(length)), torch.zeros(length))
        assert torch.equal(decoded(text, torch.full((length,), 1e-45)).round(), torch.zeros(length))


@pytest.mark.parametrize("text", [*FIXED, *VARIABLE])
def test_equal_draws_give_equal_bytes(text: str) -> None:
    values = normal(5000)
    assert torch.equal(encoded(text, values, draw_of(3, 1)), encoded(text, values, draw_of(3, 1)))
    if "qsgd" in text:
        assert not torch.equal(encoded(text, values, draw_of(3, 1)), encoded(text, values, draw_of(3, 2)))


def test_draws_of_near_numbers_are_far_apart() -> None:
    draws = [draw_of(seed, step, rank) for seed in range(10) for step in range(10) for rank in range(10)]
    assert len(set(draws)) == len(draws)
    assert draw_of(1, 2) != draw_of(2, 1)
    low = torch.tensor([draw % 2**18 for draw in draws]).double() / 2**18
    assert abs(float(low.mean()) - 0.5) < 3 / math.sqrt(12 * len(draws))


def test_casts_are_those_of_torch() -> None:
    values = normal(1000) * 1e3
    assert torch.equal(decoded("fp16", values), values.half().float())
    assert torch.equal(decoded("bf16", values), values.bfloat16().float())


def test_signs_decode_to_the_means_of_their_bucket() -> None:
    values = normal(1000, torch.float64).float()
    decoded_values = decoded("onebit(bucket=64)", values)
    for begin in range(0, 1000, 64):
        bucket, decoded_bucket = values[begin : begin + 64].double(), decoded_values[begin : begin + 64].double()
        for side in (bucket < 0, bucket >= 0):
            if side.any():
                expected = bucket[side].mean().expand(int(side.sum()))
                torch.testing.assert_close(decoded_bucket[side], expected, rtol=1e-6, atol=0)
    assert torch.equal(decoded("onebit", torch.tensor([-3.0])), torch.tensor([-3.0]))


def test_elements_at_the_scale_and_at_zero_are_exact() -> None:
    values = torch.tensor([3.0, -3.0, 0.0, 3.0] * 1000)
    for bits in (2, 4, 8):
        for draw in range(20):
            torch.testing.assert_close(decoded(f"qsgd({bits})", values, draw_of(draw)), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantization_has_the_mean_and_the_exact_variance_of_qsgd(bits: int, norm: str) -> None:
    """E Q(v) = v, and the variance is (norm / s)² f (1 - f), f the fraction of |v| s / norm, for each element. Over
    elements, the squared errors of one draw have the sum of these variances as their mean. All within 3 standard errors
    (of the mean over elements: independent within a draw)."""
    num_draws, bucket, length = 1000, 512, 512 * 4 + 100
    values, levels = normal(length).double(), 2 ** (bits - 1) - 1
    unit = torch.empty_like(values)
    for begin in range(0, length, bucket):
        part = values[begin : begin + bucket]
        unit[begin : begin + bucket] = (part.abs().max() if norm == "max" else part.norm()) / levels
    fraction = (values.abs() / unit).frac()
    variance = unit**2 * fraction * (1 - fraction)
    text = f"qsgd({bits}, bucket={bucket}, norm={norm})"
    errors = torch.stack(
        [
            decoded(text, values.float(), draw_of(0, draw)).double() - values.float().double()
            for draw in range(num_draws)
        ]
    )
    sums = errors.sum(1)
    assert abs(float(sums.mean())) < 3 * math.sqrt(float(variance.sum()) / num_draws)
    squares = errors.square().sum(1)
    assert abs(float(squares.mean() - variance.sum())) < 3 * float(squares.std()) / math.sqrt(num_draws)
    assert float(squares.std()) < float(variance.sum())
    # Of each element: 3 standard errors hold for 99.7 % of them.
    inside = errors.mean(0).abs() <= 3 * (variance / num_draws).sqrt() + 1e-6 * unit
    assert float(inside.double().mean()) > 0.99


@tries(8)
@given(st.integers(0, 2**63 - 1), st.floats(-1, 1, width=32))
def test_over_all_windows_each_element_is_rounded_up_as_often_as_its_fraction_says(draw: int, value: float) -> None:
    """The 2**14 different numbers of the table round a fraction f up exactly round(2**14 f) times out of 2**14."""
    values = torch.full((2**19,), value)
    values[0] = 1.0
    decoded_values = decoded("qsgd(4, bucket=524288)", values, draw)[1:].double()
    assert abs(float(decoded_values.mean()) - value) <= 2**-14 / 7


@tries(10)
@given(st.sampled_from([*FIXED, "qsgd(4, elias=on)"]), st.integers(1, 600), st.integers(0, 10**6),
       st.sampled_from((torch.float32, torch.float64)))  # fmt: skip
def test_sent_and_residual_are_the_value(text: str, length: int, seed: int, dtype: torch.dtype) -> None:
    """Exactly, where the subtraction is exact (x / 2 <= y <= 2 x, Sterbenz), otherwise to rounding."""
    value = normal(length, dtype, seed)
    sent = decoded(text, value, seed)
    total = sent + (value - sent)
    near = (sent / value >= 0.5) & (sent / value <= 2)
    assert torch.equal(total[near], value[near])
    largest = float(torch.maximum(value.abs(), sent.abs()).max())
    tolerance = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    torch.testing.assert_close(total, value, rtol=0, atol=tolerance * largest)


def test_without_zstandard_lossless_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MeshwrightError, match="zstandard") as refused:
        coder_of(codec_of("lossless"), torch.float32)
    assert "pip install" in refused.value.remedy


def test_lossless_refuses_tensors_of_other_devices() -> None:
    coder = coder_of(codec_of("lossless"), torch.float32)
    with pytest.raises(MeshwrightError, match="on meta") as refused:
        coder.encode(torch.zeros(8, device="meta"), torch.empty(100, dtype=torch.uint8), 0)
    assert "CPU" in refused.value.remedy
