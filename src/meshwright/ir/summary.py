"""The parts of a step's time on every rank: computing, exposed communication, waiting for data, and the rest."""

from collections.abc import Sequence

import msgspec

from meshwright.ir.trace import Interval, Trace, length, union


class RankTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's step, in seconds and bytes.

    ``step_s`` is equal on all ranks: the time from the first start to the last end in the trace. It is the sum of
    ``compute_s``, ``exposed_s``, ``data_s`` and ``bubble_s``. ``compute_s`` is the time of computing without waits.
    ``exposed_s`` is the time of waits for communication, including waits for peers that come late to a collective.
    ``data_s`` is the time of waits for the step's data. ``bubble_s`` is the time of waits for values of another stage,
    and the time without any span. ``hidden_s`` is the time of communication while the rank does not wait.
    ``peak_bytes`` is the largest memory sample; 0 without samples.
    """

    rank: int
    step_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    bubble_s: float
    peak_bytes: int
    data_s: float = 0.0


def summarize(trace: Trace) -> tuple[RankTimes, ...]:
    """The times of every rank, in order of rank, from streams ``compute``, ``communication``, ``wait``,
    ``data``."""
    streams: dict[int, dict[str, list[Interval]]] = {rank: {} for rank in trace.ranks}
    for span in trace.spans:
        stream = "receive" if span.stream == "wait" and _RECEIVE in span.what else span.stream
        streams[span.rank].setdefault(stream, []).append((span.start_s, span.end_s))
    peaks = dict.fromkeys(trace.ranks, 0)
    for sample in trace.memory:
        peaks[sample.rank] = max(peaks[sample.rank], sample.bytes)
    step_s = trace.duration_s
    result = []
    for rank, intervals in streams.items():
        waits, receives = union(intervals.get("wait", [])), union(intervals.get("receive", []))
        data = union(intervals.get("data", []))
        still = union([*waits, *receives, *data])
        compute_s = _without(union(intervals.get("compute", [])), still)
        exposed_s = length(waits)
        hidden_s = _without(union(intervals.get("communication", [])), still)
        data_s = length(data)
        bubble_s = step_s - compute_s - exposed_s - data_s
        result.append(
            RankTimes(
                rank=rank,
                step_s=step_s,
                compute_s=compute_s,
                exposed_s=exposed_s,
                hidden_s=hidden_s if hidden_s > ROUNDING * step_s else 0.0,
                bubble_s=bubble_s if bubble_s > ROUNDING * step_s else 0.0,
                peak_bytes=peaks[rank],
                data_s=data_s,
            )
        )
    return tuple(result)


_RECEIVE = "RECV_"
ROUNDING = 1e-9
"""Hidden and bubble times below this fraction of a step are rounding errors and count as 0."""


def exposed_share(ranks: Sequence[RankTimes]) -> float:
    """The part of a step for which the rank waits that waits longest for communication."""
    return max(times.exposed_s / times.step_s if times.step_s else 0.0 for times in ranks)


def _without(intervals: list[Interval], others: list[Interval]) -> float:
    """The seconds inside ``intervals`` and outside ``others``. Both are sorted and without overlaps."""
    left, place = length(intervals), 0
    for start, end in intervals:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            left -= min(end, others[at][1]) - max(start, others[at][0])
            at += 1
    return left
