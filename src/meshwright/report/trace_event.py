"""A trace as Chrome's trace events for Perfetto and chrome://tracing: a process per rank, a track per stream."""

from typing import Any

import msgspec

from meshwright.ir.trace import Span, Trace

_US = 1e6


def trace_events(*traces: Trace) -> bytes:
    """Traces as JSON in the trace event format (Google, "Trace Event Format": X, C and M events), in microseconds from
    each trace's first event. Overlapping spans of a stream are on separate tracks, because spans of one track can only
    nest. Each trace has its own processes, and those of the first trace are on top. With several traces, process names
    include the source."""
    events: list[dict[str, Any]] = []
    stride = 1 + max((rank for trace in traces for rank in trace.ranks), default=0)
    for number, trace in enumerate(traces):
        called = f"{trace.source} rank" if len(traces) > 1 else "rank"
        events += _events(trace, number * stride, called)
    other = {"source": " and ".join(trace.source for trace in traces)}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _events(trace: Trace, first: int, called: str) -> list[dict[str, Any]]:
    """The events of a trace whose rank 0 is process number ``first``."""
    times = [span.start_s for span in trace.spans] + [sample.time_s for sample in trace.memory]
    origin_s = min(times, default=0.0)
    events: list[dict[str, Any]] = []

    def named(kind: str, process: int, **values: Any) -> dict[str, Any]:
        track = {"tid": values.pop("track")} if "track" in values else {}
        return {"ph": "M", "name": kind, "pid": process, **track, "args": values}

    for rank in trace.ranks:
        process = first + rank
        events.append(named("process_name", process, name=f"{called} {rank}"))
        events.append(named("process_sort_index", process, sort_index=process))
    by_track: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        by_track.setdefault((span.rank, span.stream), []).append(span)
    numbers: dict[int, int] = {}
    for stream in trace.streams:
        for rank in trace.ranks:
            for index, lane in enumerate(_lanes(by_track.get((rank, stream), []))):
                number = numbers[rank] = numbers.get(rank, -1) + 1
                name = stream if index == 0 else f"{stream} {index + 1}"
                events.append(named("thread_name", first + rank, track=number, name=name))
                events.append(named("thread_sort_index", first + rank, track=number, sort_index=number))
                events += [_complete(span, first + rank, number, origin_s) for span in lane]
    for sample in trace.memory:
        events.append(
            {"ph": "C", "name": "memory", "pid": first + sample.rank, "ts": (sample.time_s - origin_s) * _US,
             "args": {"bytes": sample.bytes}}
        )  # fmt: skip
    return events


def _complete(span: Span, process: int, track: int, origin_s: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X", "name": span.what, "cat": span.stream, "pid": process, "tid": track,
        "ts": (span.start_s - origin_s) * _US, "dur": span.duration_s * _US,
    }  # fmt: skip
    if args := {key: value for key, value in (("bytes", span.bytes), ("flops", span.flops)) if value}:
        event["args"] = args
    return event


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """The spans in the fewest lanes in which no two spans overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for lane in lanes:
            if lane[-1].end_s <= span.start_s:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes
