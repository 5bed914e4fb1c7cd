"""A trace as Chrome's trace events, which Perfetto and chrome://tracing open: a process a rank, a track a stream."""

from typing import Any

import msgspec

from meshwright.ir.trace import Span, Trace

_US = 1e6


def trace_events(trace: Trace) -> bytes:
    """The trace as JSON in the trace event format (Google, "Trace Event Format": X, C and M events), in microseconds
    from the first event on. Spans of a stream that overlap stand on tracks of their own, because tracks only nest.
    """
    times = [span.start_s for span in trace.spans] + [sample.time_s for sample in trace.memory]
    origin_s = min(times, default=0.0)
    events: list[dict[str, Any]] = []
    for rank in trace.ranks:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    by_track: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        by_track.setdefault((span.rank, span.stream), []).append(span)
    numbers: dict[int, int] = {}
    for stream in trace.streams:
        for rank in trace.ranks:
            for index, lane in enumerate(_lanes(by_track.get((rank, stream), []))):
                number = numbers[rank] = numbers.get(rank, -1) + 1
                name = stream if index == 0 else f"{stream} {index + 1}"
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
                events.append(
                    {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
                )
                events += [_complete(span, number, origin_s) for span in lane]
    for sample in trace.memory:
        events.append(
            {"ph": "C", "name": "memory", "pid": sample.rank, "ts": (sample.time_s - origin_s) * _US,
             "args": {"bytes": sample.bytes}}
        )  # fmt: skip
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": trace.source}}
    return msgspec.json.encode(document)


def _complete(span: Span, track: int, origin_s: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X", "name": span.what, "cat": span.stream, "pid": span.rank, "tid": track,
        "ts": (span.start_s - origin_s) * _US, "dur": span.duration_s * _US,
    }  # fmt: skip
    if args := {key: value for key, value in (("bytes", span.bytes), ("flops", span.flops)) if value}:
        event["args"] = args
    return event


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """The spans in as few lanes as need be, such that none in a lane overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for lane in lanes:
            if lane[-1].end_s <= span.start_s:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes
