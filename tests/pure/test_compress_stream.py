"""Selections and streams: exact choice, sums, messages, and what stays in the residual."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.compress.select import chosen, largest, random_indices, share_of
from meshwright.compress.stream import Stream, merge, read_coded, recode, select_with_feedback
from meshwright.ir.codec import HEADER_BYTES, Codec, codec_of
from tests.tries import tries

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CHAINS = ("topk(10%)", "topk(10%)+qsgd(4)", "topk(10%)+bf16", "topk(10%)+onebit", "threshold(1)",
          "threshold(1)+qsgd(8, elias=on)+lossless", "topk(100%)+fp16", "threshold(9)")  # fmt: skip


def normal(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_sorting(values: Tensor, count: int) -> Tensor:
    """The simplest correct selection: a stable sort by magnitude."""
    numbers = values.tolist()
    order = sorted(range(len(values)), key=lambda k: (not math.isnan(numbers[k]), -abs(numbers[k]), k))
    return torch.tensor(sorted(order[:count]), dtype=torch.int32)


def state_of(codec: Codec, length: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    names = codec.state_lengths([(length,)]).keys() & {"residual", "momentum"}
    return {name: torch.zeros(length, dtype=dtype) for name in names}


# --- selection -------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from((0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, math.inf, -math.inf, math.nan)), min_size=1),
       st.floats(0, 1), st.sampled_from(DTYPES))  # fmt: skip
def test_the_largest_elements_are_those_of_a_stable_sort(
    numbers: list[float], fraction: float, dtype: torch.dtype
) -> None:
    values = torch.tensor(numbers, dtype=dtype)
    count = max(1, round(fraction * len(values)))
    assert torch.equal(largest(values, count), by_sorting(values, count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selection_of_long_vectors_is_exact(dtype: torch.dtype) -> None:
    """Also in low precision, where many elements are equal."""
    length = 300_001
    values = normal(length, dtype)
    for count in (1, 10, 3000, 200_000, length):
        expected = values.abs().sort(descending=True, stable=True).indices[:count].sort().values.int()
        assert torch.equal(largest(values, count), expected)


def test_selection_is_exact_where_the_sample_misleads() -> None:
    """All sampled elements are large and no others, or no sampled element is large."""
    length = 2**14 * 16
    for inside, outside in ((100.0, 1.0), (1.0, 100.0), (0.0, 1.0)):
        values = normal(length).abs() + 1
        values *= outside
        values[::16] *= inside / outside if outside else 1
        for count in (1, 1000, 2**14 + 5, length // 2):
            expected = values.sort(descending=True, stable=True).indices[:count].sort().values.int()
            assert torch.equal(largest(values, count), expected)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5])
def test_selection_is_exact_where_most_elements_are_equal(share: float) -> None:
    """Such as the zeros of an embedding's gradient: the first of them fill up the selection."""
    length = 300_000
    for base in (0.0, 1.0):
        values = torch.full((length,), base)
        others = random_indices(length, round(share * length), 1)
        values[others] += normal(len(others))
        for count in (1, 300, 3000, 290_000):
            expected = values.abs().sort(descending=True, stable=True).indices[:count].sort().values.int()
            assert torch.equal(largest(values, count), expected)


@given(st.integers(0, 2000), st.sampled_from((0.0, 0.5, 1.0, 3.0)))
def test_a_threshold_selects_magnitudes_that_reach_it(length: int, amount: float) -> None:
    values = normal(length, seed=length)
    values[::5] = -amount
    values[::11] = math.nan
    part = codec_of(f"threshold({amount})").select
    assert part is not None
    assert torch.equal(chosen(values, part, None, 0).long(), (~(values.abs() < amount)).nonzero().view(-1))


@given(st.integers(1, 500), st.floats(0, 1), st.integers(0, 2**63 - 1))
def test_random_indices_are_distinct_sorted_and_a_function_of_the_draw(length: int, share: float, draw: int) -> None:
    count = round(share * length)
    indices = random_indices(length, count, draw)
    assert len(indices) == count
    assert (indices.diff() > 0).all()
    assert all(0 <= place < length for place in indices.tolist())
    assert torch.equal(indices, random_indices(length, count, draw))


@pytest.mark.parametrize("count", [3, 15])
def test_random_indices_are_uniform(count: int) -> None:
    """Each of 20 elements is chosen in count / 20 of all draws, within 4 standard errors."""
    hits, draws = torch.zeros(20), 4000
    for draw in range(draws):
        hits[random_indices(20, count, draw)] += 1
    share = count / 20
    assert float((hits / draws - share).abs().max()) < 4 * math.sqrt(share * (1 - share) / draws)


def test_the_share_falls_exponentially_in_the_warm_up() -> None:
    codec = codec_of("topk(1%, warmup=4)")
    shares = [share_of(codec, step) for step in range(6)]
    assert shares == pytest.approx([0.25 * 0.04 ** (step / 4) for step in range(4)] + [0.01, 0.01])
    assert share_of(codec_of("topk(50%, warmup=4)"), 0) == 0.5
    assert share_of(codec_of("threshold(1)"), 0) is None
    stream = select_with_feedback(normal(1000), state_of(codec, 1000), codec, 0)
    assert stream.indices is not None
    assert len(stream.indices) == 250


# --- streams ---------------------------------------------------------------------------------------------------------


@tries(15)
@given(st.integers(1, 400), st.floats(0.001, 1), st.floats(0.001, 1), st.sampled_from(DTYPES))
def test_sums_of_streams_are_sums_of_vectors(
    length: int, first_share: float, second_share: float, dtype: torch.dtype
) -> None:
    codec = codec_of("topk(1%)")
    first, second = (
        Stream.select(normal(length, dtype, seed), codec, share)
        for seed, share in ((1, first_share), (2, second_share))
    )
    total = merge(first, second)
    assert torch.equal(total.dense(), first.dense() + second.dense())
    union = len(set(_indices(first)) | set(_indices(second)))
    dense = length * dtype.itemsize < union * (4 + dtype.itemsize)
    if first.indices is not None and second.indices is not None:
        assert (total.indices is None) == dense
        assert total.num_bytes == HEADER_BYTES + min(length * dtype.itemsize, union * (4 + dtype.itemsize))
    if total.indices is not None:
        assert (total.indices.diff() > 0).all()
    added = normal(length, dtype, 3)
    expected = added + total.dense()
    total.add_to(added)
    assert torch.equal(added, expected)


def _indices(stream: Stream) -> list[int]:
    return list(range(stream.length)) if stream.indices is None else stream.indices.tolist()


def test_a_sum_is_dense_exactly_when_the_dense_form_has_fewer_bytes() -> None:
    """Of 1,000 float32, up to 500 indices and values have no more bytes."""
    for shared, is_sparse in ((0, False), (1, True), (250, True)):
        first = Stream(1000, torch.arange(250, dtype=torch.int32), torch.ones(250))
        second = Stream(1000, torch.arange(251, dtype=torch.int32) + 250 - shared, torch.ones(251))
        assert (merge(first, second).indices is not None) == is_sparse


@tries(15)
@given(st.integers(0, 300), st.sampled_from(DTYPES), st.sampled_from(("topk(3%)", "threshold(0.5)", "threshold(0)")),
       st.lists(st.floats(0, 1), max_size=4))  # fmt: skip
def test_streams_are_cut_written_and_read(length: int, dtype: torch.dtype, text: str, places: list[float]) -> None:
    stream = (
        Stream.select(normal(length, dtype), codec_of(text)) if length else Stream(0, None, torch.empty(0).to(dtype))
    )
    bounds = sorted([0, length, *(round(place * length) for place in places)])
    pieces = [stream.cut(begin, end) for begin, end in pairwise(bounds)]
    for piece, (begin, end) in zip(pieces, pairwise(bounds), strict=True):
        assert torch.equal(piece.dense(), stream.dense()[begin:end])
    assert torch.equal(torch.cat([piece.dense() for piece in pieces]), stream.dense())
    room = torch.empty(stream.num_bytes + 1, dtype=torch.uint8)[1:]
    assert stream.write(room) == stream.num_bytes
    copy = Stream.read(room, length, dtype)
    assert torch.equal(copy.dense(), stream.dense())
    assert (copy.indices is None) == (stream.indices is None)


@pytest.mark.parametrize("text", CHAINS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_receivers_decode_the_stream_that_the_sender_has_decoded(text: str, dtype: torch.dtype) -> None:
    codec = codec_of(text)
    for length in (1, 100, 5000):
        stream = Stream.select(normal(length, dtype), codec)
        decoded, message = recode(stream, codec, draw=3)
        assert torch.equal(read_coded(message, codec, length, dtype).dense(), decoded.dense())
        assert torch.equal(recode(stream, codec, draw=3)[1], message)
        assert (decoded.indices is None) == (stream.indices is None)
        if not codec.lossless and stream.indices is not None:
            entries = len(stream.indices)
            assert len(message) == HEADER_BYTES + codec.sparse_bytes(entries, dtype.itemsize)


@pytest.mark.parametrize("text", ["topk(100%)", "threshold(0)"])
def test_everything_is_sent_where_nothing_is_left_out(text: str) -> None:
    values, codec = normal(1000), codec_of(text)
    assert torch.equal(Stream.select(values, codec).dense(), values)
    state = state_of(codec, 1000)
    for step in range(3):
        assert torch.equal(select_with_feedback(values, state, codec, step).dense(), values)
        assert not state["residual"].any()


@pytest.mark.parametrize("text", ["topk(1%)", "randk(10%)", "threshold(1)"])
def test_streams_of_zeros_and_of_values_that_are_not_finite(text: str) -> None:
    codec = codec_of(text)
    assert not Stream.select(torch.zeros(1000), codec).dense().any()
    values = normal(1000)
    values[::2], values[1::2] = math.nan, math.inf
    sent = Stream.select(values, codec)
    assert not sent.values.isfinite().any()
    for length in (0, 1):
        assert len(Stream.select(torch.zeros(length), codec).dense()) == length


# --- feedback --------------------------------------------------------------------------------------------------------


@tries(12)
@given(st.sampled_from(("topk(10%)", "topk(10%)+qsgd(4)", "threshold(1)", "threshold(0.5)+onebit", "randk(20%)")),
       st.integers(1, 300), st.sampled_from((torch.float32, torch.float64)))  # fmt: skip
def test_sent_and_new_residual_are_value_and_old_residual(text: str, length: int, dtype: torch.dtype) -> None:
    codec = codec_of(text)
    state = state_of(codec, length, dtype)
    for step in range(4):
        value, before = normal(length, dtype, seed=step), state["residual"].clone()
        unchanged = value.clone()
        stream = select_with_feedback(value, state, codec, step, draw=step)
        assert torch.equal(value, unchanged)
        sent = stream
        if codec.values is not None:
            sent, _ = recode(stream, codec, draw=step)
            Stream(stream.length, stream.indices, stream.values - sent.values).add_to(state["residual"])
            tolerance = 1e-12 if dtype == torch.float64 and "onebit" not in text else 1e-6
            torch.testing.assert_close(
                sent.dense() + state["residual"],
                value + before,
                rtol=0,
                atol=tolerance * 10 * float(before.norm() + 10),
            )
        else:
            assert torch.equal(sent.dense() + state["residual"], value + before)


def test_momentum_is_that_of_deep_gradient_compression() -> None:
    """Equations 4 to 6 element by element: u = m u + g, v = v + u; where v is sent, both become 0."""
    codec, length = codec_of("topk(20%, momentum=0.9)"), 50
    state = state_of(codec, length, torch.float64)
    u, v = [0.0] * length, [0.0] * length
    for step in range(10):
        gradient = normal(length, torch.float64, seed=step)
        sent = select_with_feedback(gradient, state, codec, step)
        u = [0.9 * old + g for old, g in zip(u, gradient.tolist(), strict=True)]
        v = [old + new for old, new in zip(v, u, strict=True)]
        expected = sorted(sorted(range(length), key=lambda k: -abs(v[k]))[:10])
        assert sent.indices is not None
        assert sent.indices.tolist() == expected
        assert sent.values.tolist() == pytest.approx([v[k] for k in expected], rel=1e-12)
        for k in expected:
            u[k] = v[k] = 0.0
        assert state["residual"].tolist() == pytest.approx(v, rel=1e-12, abs=1e-15)
        assert state["momentum"].tolist() == pytest.approx(u, rel=1e-12, abs=1e-15)


def test_without_feedback_nothing_is_kept() -> None:
    codec = codec_of("topk(10%, feedback=off)")
    value = normal(100)
    assert torch.equal(select_with_feedback(value, {}, codec, 0).dense(), Stream.select(value, codec).dense())


def test_sums_of_random_selections_are_selections_of_sums() -> None:
    codec = codec_of("randk(10%)")
    first, second = normal(1000, seed=1), normal(1000, seed=2)
    sent = [Stream.select(values, codec, draw=7) for values in (first, second, first + second)]
    assert torch.equal(sent[0].values + sent[1].values, sent[2].values)
    assert len(sent[0].values) == codec.summed_lengths([(1000,)])[0]
