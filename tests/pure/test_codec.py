"""Codecs as values: their texts, the bytes of their messages, and the refusal of malformed texts."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.ir.codec import HEADER_BYTES, codec_of

TEXTS = (
    "fp16", "bf16", "qsgd(4)", "qsgd(8, bucket=64, norm=l2, elias=on)", "qsgd(4, feedback=on)", "onebit",
    "onebit(momentum=0.9, warmup=100)", "topk(1%)", "topk(0.1%, momentum=0.9, warmup=500)", "topk(1%)+qsgd(4)",
    "threshold(0.01, feedback=off)", "randk(1%)", "powersgd(4)", "factors", "lossless", "bf16+lossless",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_and_written_again(text: str) -> None:
    assert str(codec_of(text)) == text


def test_shares_may_be_fractions() -> None:
    assert codec_of("topk(0.01)") == codec_of("topk(1%)") == codec_of(" topk( 1% ) ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a codec"), ("foo", "no codec 'foo'"), ("qsgd", "without a number"), ("qsgd(3)", "3 bits"),
        ("qsgd(4, bucket=12)", "bucket=12"), ("fp16(3)", "with a number"), ("topk(0)", "0 of all"),
        ("topk(200%)", "200%"), ("topk(x)", "not a number"), ("topk(nan)", "nan"), ("powersgd(0)", "rank=0"),
        ("topk(1%, bucket=8)", "option 'bucket'"), ("qsgd(4)+topk(1%)", "order"), ("fp16+bf16", "order"),
        ("randk(1%)+fp16", "chained"), ("powersgd(4)+fp16", "order"), ("lossless(feedback=on)", "option"),
        ("topk(1%, feedback=off, momentum=0.9)", "momentum"), ("topk(1%, momentum=1)", "momentum=1"),
        ("threshold(-1)", "-1"), ("threshold(nan)", "nan"),
    ],
)  # fmt: skip
def test_malformed_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        codec_of(text)
    assert repr(text) in refused.value.where
    assert refused.value.remedy


@given(st.integers(1, 10**6), st.sampled_from((2, 4, 8)), st.sampled_from((64, 512)))
def test_quantized_messages_have_the_bytes_of_the_paper(length: int, bits: int, bucket: int) -> None:
    """n b / 8 and 4 bytes for each bucket of d elements (QSGD, section 3)."""
    codec = codec_of(f"qsgd({bits}, bucket={bucket})")
    assert codec.message_bytes(length, 4) == ceil(length * bits / 8) + 4 * ceil(length / bucket)


@given(st.integers(1, 10**6), st.floats(0.001, 1), st.integers(1, 64), st.sampled_from((2, 4, 8)))
def test_sums_of_selections_grow_to_the_dense_vector_and_no_further(
    length: int, share: float, terms: int, item_bytes: int
) -> None:
    codec = codec_of(f"topk({share!r})")
    selection_bytes, sum_bytes = (codec.message_bytes(length, item_bytes, count) for count in (1, terms))
    kept = min(length, max(1, ceil(share * length)))
    assert selection_bytes == min(HEADER_BYTES + kept * (4 + item_bytes), HEADER_BYTES + length * item_bytes)
    assert selection_bytes <= sum_bytes <= HEADER_BYTES + length * item_bytes
    assert sum_bytes <= HEADER_BYTES + terms * kept * (4 + item_bytes)
    assert codec.message_bytes(0, item_bytes, terms) == HEADER_BYTES


def test_low_rank_factors_stand_for_matrices_that_gain_by_it() -> None:
    codec = codec_of("powersgd(2)")
    shapes = ((64, 32), (32,), (4, 4), (16, 8, 3, 3))
    assert [codec.factored(shape) for shape in shapes] == [(64, 32), None, None, (16, 72)]
    assert codec.summed_lengths(shapes) == (2 * (64 + 16) + 32 + 16, 2 * (32 + 72))
    assert codec.state_lengths(shapes) == {"residual": 64 * 32 + 32 + 16 + 16 * 72, "right": 2 * (32 + 72)}
    assert list(codec_of("topk(1%, momentum=0.9, warmup=5)").state_lengths(shapes)) == ["residual", "momentum", "steps"]
    assert codec_of("qsgd(4)").state_lengths(shapes) == {}
    assert codec.summed_lengths(((3,),)) == (3,)


def test_each_codec_says_which_collectives_it_may_ride() -> None:
    rides = {text: codec_of(text).exchange for text in TEXTS}
    assert {text for text, exchange in rides.items() if exchange == "sums"} == {"randk(1%)", "powersgd(4)"}
    assert {text for text, exchange in rides.items() if exchange == "factors"} == {"factors"}
    assert {text for text, exchange in rides.items() if exchange == "merges"} == {
        "topk(1%)", "topk(0.1%, momentum=0.9, warmup=500)", "topk(1%)+qsgd(4)", "threshold(0.01, feedback=off)",
    }  # fmt: skip
    assert [text for text in TEXTS if not codec_of(text).is_lossy] == ["factors", "lossless"]
