"""Trace events: what Perfetto reads, and that nothing on a track overlaps."""

import itertools
import json
from typing import Any

from hypothesis import given

from meshwright.ir.trace import MemorySample, Span, Trace
from meshwright.report.trace_event import trace_events
from tests.pure.test_trace import TRACES


def events(trace: Trace) -> list[dict[str, Any]]:
    document = json.loads(trace_events(trace))
    assert document["otherData"] == {"source": trace.source}
    entries: list[dict[str, Any]] = document["traceEvents"]
    return entries


def test_spans_are_complete_events_in_microseconds_on_the_tracks_of_their_rank() -> None:
    trace = Trace(
        source="simulated",
        spans=(Span(1, "compute", "1F0", 2.0, 2.5, flops=8.0), Span(1, "wait", "1RECV_F0", 1.5, 2.0)),
        memory=(MemorySample(1, 1.0, 64),),
    )
    assert events(trace) == [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 1"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "compute"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 0}},
        {"ph": "X", "name": "1F0", "cat": "compute", "pid": 1, "tid": 0, "ts": 1e6, "dur": 5e5, "args": {"flops": 8.0}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "wait"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
        {"ph": "X", "name": "1RECV_F0", "cat": "wait", "pid": 1, "tid": 1, "ts": 5e5, "dur": 5e5},
        {"ph": "C", "name": "memory", "pid": 1, "ts": 0.0, "args": {"bytes": 64}},
    ]


def test_transfers_at_one_time_have_tracks_of_their_own() -> None:
    spans = tuple(
        Span(0, "communication", name, start, start + 2.0) for name, start in (("a", 0.0), ("b", 1.0), ("c", 2.0))
    )
    tracks = {
        event["name"]: event["tid"] for event in events(Trace(source="measured", spans=spans)) if event["ph"] == "X"
    }
    assert tracks == {"a": 0, "b": 1, "c": 0}


def test_two_traces_stand_apart_each_from_its_own_beginning() -> None:
    predicted = Trace(source="simulated", spans=(Span(0, "compute", "0F0", 0.0, 1.0), Span(1, "wait", "x", 0.0, 1.0)))
    measured = Trace(source="measured", spans=(Span(0, "compute", "0F0", 70.0, 71.5),))
    document = json.loads(trace_events(predicted, measured))
    assert document["otherData"] == {"source": "simulated and measured"}
    entries = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in entries if event["name"] == "process_name"}
    assert names == {0: "simulated rank 0", 1: "simulated rank 1", 2: "measured rank 0"}
    spans = [(event["pid"], event["ts"], event["dur"]) for event in entries if event["ph"] == "X"]
    assert sorted(spans) == [(0, 0.0, 1e6), (1, 0.0, 1e6), (2, 0.0, 1.5e6)]


@given(TRACES)
def test_all_is_there_and_nothing_on_a_track_overlaps(trace: Trace) -> None:
    entries = events(trace)
    complete = [event for event in entries if event["ph"] == "X"]
    assert sorted((event["pid"], event["name"]) for event in complete) == sorted(
        (span.rank, span.what) for span in trace.spans
    )
    assert sum(event["ph"] == "C" for event in entries) == len(trace.memory)
    assert all(event["ts"] >= 0 for event in entries if event["ph"] in "XC")
    named = {(event["pid"], event["tid"]) for event in entries if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} == named
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in complete:
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    origin = min((span.start_s for span in trace.spans), default=0.0)
    slack = 1.0 + 1e-6 * abs(origin)  # of 1e15 µs a float holds no millionth
    for track in tracks.values():
        for (start, duration), (after, _) in itertools.pairwise(track):
            assert start + duration <= after + slack
