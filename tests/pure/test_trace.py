"""The trace: durations, what one rank did, and files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.trace import COPY, MemorySample, Span, Trace, merge

TWO_RANKS = Trace(
    source="simulated",
    spans=(
        Span(0, "compute", "0F0", 1.0, 2.0, flops=8.0),
        Span(0, "communication", "0SEND_F0", 2.0, 2.5, bytes=64),
        Span(1, "compute", "1F0", 2.5, 4.0),
    ),
    memory=(MemorySample(0, 1.0, 100), MemorySample(0, 2.0, 300), MemorySample(1, 2.5, 50)),
)

TIMES = st.floats(-1e9, 1e9)
SPANS = st.builds(
    lambda rank, stream, what, times, size, flops: Span(rank, stream, what, min(times), max(times), size, flops),
    st.integers(0, 9),
    st.sampled_from(["compute", "communication"]),
    st.text(st.characters(codec="utf-8"), max_size=9),
    st.tuples(TIMES, TIMES),
    st.integers(0, 2**53),
    st.floats(0, 1e18),
)
SAMPLES = st.builds(MemorySample, st.integers(0, 9), TIMES, st.integers(0, 2**53))
TRACES = st.builds(
    Trace,
    source=st.sampled_from(["measured", "simulated", "emulated"]),
    spans=st.lists(SPANS, max_size=9).map(tuple),
    memory=st.lists(SAMPLES, max_size=9).map(tuple),
)


def test_a_trace_lasts_from_its_first_start_to_its_last_end() -> None:
    assert TWO_RANKS.duration_s == 3.0
    assert TWO_RANKS.of_rank(0).duration_s == 1.5
    assert TWO_RANKS.spans[1].duration_s == 0.5
    assert Trace(source="measured").duration_s == 0.0


def test_one_rank_keeps_only_what_is_its_own() -> None:
    rank_trace = TWO_RANKS.of_rank(1)
    assert rank_trace.spans == (TWO_RANKS.spans[2],)
    assert rank_trace.memory == (MemorySample(1, 2.5, 50),)
    assert rank_trace.source == "simulated"
    assert TWO_RANKS.of_rank(7) == Trace(source="simulated")


def test_ranks_and_streams_are_listed() -> None:
    assert TWO_RANKS.ranks == (0, 1)
    assert TWO_RANKS.streams == ("compute", "communication")


def test_peak_memory_is_the_largest_sample() -> None:
    assert TWO_RANKS.peak_bytes(0) == 300
    assert TWO_RANKS.peak_bytes(7) == 0


def test_overlapping_spans_are_busy_once() -> None:
    spans = [(0.0, 2.0), (1.0, 1.5), (1.0, 3.0), (5.0, 6.0)]
    trace = Trace(source="measured", spans=tuple(Span(0, "compute", "x", *span) for span in spans))
    assert trace.busy_s(0, "compute") == 4.0
    assert trace.busy_s(0, "communication") == 0.0


@given(TRACES)
def test_a_trace_is_read_as_it_was_written(trace: Trace) -> None:
    assert files.decode(files.encode_json(trace), Trace, where="trace.json") == trace


@given(TRACES)
def test_ranks_share_out_a_trace(trace: Trace) -> None:
    parts = [trace.of_rank(rank) for rank in trace.ranks]
    assert sum(len(part.spans) for part in parts) == len(trace.spans)
    assert sum(len(part.memory) for part in parts) == len(trace.memory)
    assert all(part.duration_s <= trace.duration_s for part in parts)


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^span `0F0` lasts from 2.0 s to 1.0 s$"):
        Span(0, "compute", "0F0", 2.0, 1.0)
    with pytest.raises(ValueError, match=r"lasts from nan s to 1.0 s"):
        Span(0, "compute", "0F0", float("nan"), 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"source": "measured", "spans": [{"rank": 0, "stream": "c", "what": "x", "start_s": 2, "end_s": 1}]}',
            "t.json: spans[0]: span `x` lasts from 2.0 s to 1.0 s\n  -> correct that key",
        ),
        (
            '{"source": "measured", "memory": [{"rank": 0, "time_s": 0.0, "bytes": -1}]}',
            "t.json: memory[0].bytes: Expected `int` >= 0\n  -> correct that key",
        ),
        ('{"source": "guessed"}', "t.json: source: Invalid enum value 'guessed'\n  -> correct that key"),
    ],
)
def test_a_bad_file_is_named_with_its_key(text: str, message: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        files.decode(text.encode(), Trace, where="t.json")
    assert str(caught.value) == message


def test_traces_of_ranks_are_put_on_one_clock_and_together() -> None:
    late = TWO_RANKS.of_rank(1).shifted(100.0)
    assert (late.spans[0].start_s, late.spans[0].end_s, late.memory[0].time_s) == (102.5, 104.0, 102.5)
    both = merge([TWO_RANKS.of_rank(0), late.shifted(-100.0)])
    assert both == TWO_RANKS


def test_traces_of_different_sources_are_not_merged() -> None:
    with pytest.raises(ValueError, match="traces of measured, simulated cannot be merged"):
        merge([TWO_RANKS, Trace(source="measured")])
    with pytest.raises(ValueError, match="traces of 2 different plans cannot be merged"):
        merge([TWO_RANKS, Trace(source="simulated", plan="0123")])


def test_copies_before_a_step_do_not_lengthen_it() -> None:
    """A device may copy a batch while it still runs the step before."""
    spans = (Span(0, COPY, "inputs", -5.0, -3.0), Span(0, COPY, "inputs", -3.0, 1.0), Span(0, "compute", "F", 0.0, 2.0))
    trace = Trace(source="measured", spans=spans)
    assert (trace.start_s, trace.duration_s) == (0.0, 2.0)
    assert Trace(source="measured", spans=spans[:1]).duration_s == 2.0
