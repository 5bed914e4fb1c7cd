"""Where the time of a step went on every rank: computing, communication that shows, and the rest."""

import msgspec

from meshwright.ir.trace import Interval, Trace, length, union


class RankTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's step, in seconds and bytes.

    ``step_s`` is that of all ranks: from the first start to the last end in the trace; it is the sum of
    ``compute_s`` (while not waiting), ``exposed_s`` (computing stood still for communication, peers that came late to
    a collective included) and ``bubble_s`` (waiting for another stage's values, and what nothing is noted of).
    ``hidden_s`` is communication under way while the rank computed. ``peak_bytes`` is the largest sample; 0 of none.
    """

    rank: int
    step_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    bubble_s: float
    peak_bytes: int


def summarize(trace: Trace) -> tuple[RankTimes, ...]:
    """The times of every rank of a trace, by rank, from the streams ``compute``, ``communication`` and ``wait``."""
    streams: dict[int, dict[str, list[Interval]]] = {rank: {} for rank in trace.ranks}
    for span in trace.spans:
        stream = "receive" if span.stream == "wait" and _RECEIVE in span.what else span.stream
        streams[span.rank].setdefault(stream, []).append((span.start_s, span.end_s))
    peaks = dict.fromkeys(trace.ranks, 0)
    for sample in trace.memory:
        peaks[sample.rank] = max(peaks[sample.rank], sample.bytes)
    step_s = trace.duration_s
    result = []
    for rank, found in streams.items():
        waits, receives = union(found.get("wait", [])), union(found.get("receive", []))
        still = union([*waits, *receives])
        compute_s = _without(union(found.get("compute", [])), still)
        exposed_s = length(waits)
        result.append(
            RankTimes(
                rank=rank,
                step_s=step_s,
                compute_s=compute_s,
                exposed_s=exposed_s,
                hidden_s=_without(union(found.get("communication", [])), still),
                bubble_s=max(0.0, step_s - compute_s - exposed_s),
                peak_bytes=peaks[rank],
            )
        )
    return tuple(result)


_RECEIVE = "RECV_"


def _without(intervals: list[Interval], others: list[Interval]) -> float:
    """How long is inside of the first and outside of the second; both are unions."""
    left, place = length(intervals), 0
    for start, end in intervals:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            left -= min(end, others[at][1]) - max(start, others[at][0])
            at += 1
    return left
