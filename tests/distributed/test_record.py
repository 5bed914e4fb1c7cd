"""Traces of real runs: what is noted of a step, on one clock, and what it adds up to."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm.clock import Offset, clock_offsets
from meshwright.comm.member import member
from meshwright.comm.record import COMPUTE, CollectiveTimes, SpanRecorder, blocking, recording
from meshwright.comm.started import attach, wait
from meshwright.comm.transport.base import UnderWay
from meshwright.ir.summary import exposed_share, summarize
from meshwright.ir.trace import COPY, Trace
from meshwright.runtime import device
from meshwright.runtime.device import CpuKind, InputCopies
from tests import streams
from tests.distributed import oracle
from tests.distributed.pool import Ranks

CPU = torch.device("cpu")


def offsets_of_clocks_that_differ() -> list[Offset]:
    rank = torch.distributed.get_rank()
    return clock_offsets(CPU, clock=lambda: time.perf_counter() + 1000.0 * rank)


def test_the_offset_of_a_clock_is_found_to_half_a_round_trip(ranks: Ranks) -> None:
    """On one machine all ranks have one clock, to which a known offset is added here."""
    first, *others = ranks(3, offsets_of_clocks_that_differ)
    assert others == [[], []]
    for rank, offset in enumerate(first):
        assert abs(offset.seconds - 1000.0 * rank) <= offset.round_trip_s / 2 + 1e-9


def traces_of(layout: mw.Layout, evaluates: bool = False) -> tuple[Trace, Trace]:
    """This rank's trace of the third step (or of an evaluation after it), and that of all ranks."""
    torch.manual_seed(0)
    subject = oracle.gpt(True, layers=2)
    trainer = mw.parallelize(
        subject.model,
        subject.loss_fn,
        subject.batches[0],
        plan=layout,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_grad_norm=1.0,
    )
    for batch in subject.batches[:3]:
        trainer.step(batch)
    if evaluates:
        trainer.evaluate(subject.batches[0])
    return trainer.trace(), trainer.trace(all_ranks=True)


def names(trace: Trace, stream: str) -> list[str]:
    return [span.what for span in trace.spans if span.stream == stream]


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_step_in_one_piece_has_its_parts_and_collectives(ranks: Ranks, axis: str) -> None:
    for rank, (trace, _) in enumerate(ranks(2, traces_of, mw.Layout(**{axis: 2}))):  # type: ignore[arg-type]
        assert trace.ranks == (rank,)
        assert names(trace, "compute") == ["data", "forward", "backward", "clip", "optimizer"]
        compute = [span for span in trace.spans if span.stream == "compute"]
        assert all(earlier.end_s <= later.start_s for earlier, later in itertools.pairwise(compute))
        under_way = set(names(trace, "communication"))
        assert f"all_reduce {axis}" in under_way
        assert all(name.endswith(axis) for name in under_way)
        assert set(names(trace, "wait")) == under_way
        forward, backward = compute[1:3]
        for span in trace.spans:
            if span.stream != "compute":
                assert span.start_s >= forward.start_s
        assert any(backward.start_s <= span.start_s <= backward.end_s for span in trace.spans if span.bytes)
        assert len(trace.memory) > 0
        (times,) = summarize(trace)
        assert times.compute_s > 0
        assert times.exposed_s > 0
        assert times.compute_s + times.exposed_s + times.bubble_s == pytest.approx(times.step_s)


def test_an_evaluation_goes_forward_only(ranks: Ranks) -> None:
    ((trace, _),) = ranks(1, traces_of, mw.Layout(), True)
    assert names(trace, "compute") == ["data", "forward"]


def test_rank_0_gets_what_all_ranks_did_on_its_clock(ranks: Ranks) -> None:
    (first, both), (second, only) = ranks(2, traces_of, mw.Layout(dp=2))
    assert only == second
    assert both.plan == second.plan != ""
    assert both.of_rank(0) == first
    assert [span.what for span in both.of_rank(1).spans] == [span.what for span in second.spans]
    # Nobody is done with a collective before both have begun; the clocks may be off by half a round trip.
    for first_span, second_span in zip(
        *([span for span in both.of_rank(rank).spans if span.stream == "communication"] for rank in (0, 1)), strict=True
    ):
        assert first_span.what == second_span.what
        assert max(first_span.start_s, second_span.start_s) <= min(first_span.end_s, second_span.end_s) + 1e-3


def test_in_a_pipeline_values_are_waited_for_before_they_are_used(ranks: Ranks) -> None:
    layout = mw.Layout(pp=2, microbatches=4)
    traces = ranks(2, traces_of, layout)
    for rank, (trace, _) in enumerate(traces):
        actions = [what for what in names(trace, "compute") if re.match(r"\d", what)]
        assert sorted(actions) == sorted(f"{rank}{kind}{m}" for kind in "FB" for m in range(4))
        used = {span.what: span.start_s for span in trace.spans if span.stream == "compute"}
        waits = {span.what: span.end_s for span in trace.spans if span.stream == "wait" and "RECV" in span.what}
        kind = "F" if rank else "B"
        assert sorted(waits) == [f"{rank}RECV_{kind}{m}" for m in range(4)]
        assert all(end_s <= used[what.replace("RECV_", "")] for what, end_s in waits.items())
        assert "broadcast pp" in names(trace, "wait")
    times = summarize(traces[0][1])
    assert [rank_times.rank for rank_times in times] == [0, 1]
    assert len({rank_times.step_s for rank_times in times}) == 1
    assert all(rank_times.bubble_s > 0 for rank_times in times)


def steps_without_notes() -> int:
    torch.manual_seed(0)
    subject = oracle.gpt(True, layers=1)
    batch = subject.batches[0]
    trainer = mw.parallelize(
        subject.model, subject.loss_fn, batch, plan=mw.Layout(dp=2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    trainer.recorder = None
    trainer.step(batch)
    return len(trainer.trace().spans)


def test_without_a_recorder_nothing_is_noted(ranks: Ranks) -> None:
    assert ranks(2, steps_without_notes) == [0, 0]


# --- devices that run behind the host ---------------------------------------------------------------------------------


class Behind:
    """A host's clock that a test sets, and a device that does at 100 + 2 t what the host launches at t."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def mark(self) -> float:
        return self.now_s

    def mark_end(self, lane: str, operations: Sequence[Any]) -> float:
        return sum(operations)

    def times_s(self, marks: Sequence[Any]) -> list[float]:
        return [100.0 + 2.0 * mark for mark in marks]


def test_spans_of_a_device_have_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Behind()
    monkeypatch.setattr("meshwright.comm.record.time", clock)
    recorder = SpanRecorder({"group": "dp"}, memory=lambda: 7, timeline=clock)
    recorder.clear()
    clock.now_s = 1.0
    recorder.mark()  # where a phase begins within a function
    clock.now_s = 4.0
    recorder.span(COMPUTE, "forward", 0.0, 1.0)
    recorder.span(COMPUTE, "backward", 1.0, 3.0)
    recorder.sample()
    recorder.collective("all_reduce", "group", CollectiveTimes(2.0, 4.0, ((2.0, 2.5), (3.5, 4.0))), 8)
    span_times = {(span.stream, span.what): (span.start_s, span.end_s) for span in recorder.trace(0).spans[:3]}
    assert span_times == {
        (COMPUTE, "forward"): (100.0, 102.0), (COMPUTE, "backward"): (102.0, 106.0),
        ("communication", "all_reduce dp"): (104.0, 108.0),
    }  # fmt: skip
    assert [sample.time_s for sample in recorder.trace(0).memory] == [108.0]


def test_waits_for_data_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Behind()
    monkeypatch.setattr("meshwright.comm.record.time", clock)
    recorder = SpanRecorder(timeline=clock)
    recorder.waited_for_data(1.0, 2.0)
    recorder.clear()
    (span,) = recorder.trace(0).spans
    assert (span.start_s, span.end_s) == (1.0, 2.0)


def test_messages_have_the_name_of_the_span_that_is_recorded_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages start at 1 and 2, and end at 9 and 7."""
    clock = Behind()
    monkeypatch.setattr("meshwright.comm.record.time", clock)
    recorder = SpanRecorder(timeline=clock)
    recorder.clear()
    for begin, end in ((1.0, 9.0), (2.0, 7.0)):
        clock.now_s = begin
        recorder.message(f"peer {begin}", end)  # type: ignore[arg-type]
    recorder.span("communication", "0SEND_F1", 1.0, 2.0)
    clock.now_s = 3.0
    recorder.message("peer", 5.0)  # type: ignore[arg-type]
    recorder.span("wait", "0RECV_B1", 2.0, 3.0)
    recorder.span("communication", "0SEND_F2", 3.0, 3.0)
    assert [(span.stream, span.what, span.start_s, span.end_s) for span in recorder.trace(0).spans] == [
        ("communication", "0SEND_F1", 102.0, 118.0), ("communication", "0RECV_B1", 106.0, 110.0),
        ("wait", "0RECV_B1", 104.0, 106.0), ("communication", "0SEND_F2", 106.0, 106.0),
    ]  # fmt: skip


def spans_of(trace: Trace, stream: str) -> list[tuple[str, float, float]]:
    return [(span.what, span.start_s, span.end_s) for span in trace.spans if span.stream == stream]


def collectives_on_a_stream() -> tuple[Trace, float]:
    """The trace of kernels and collectives on a device's streams, and when the kernels end. d blocks the kernels,
    and e is a product in pieces, which computes meanwhile.

    host            launches all at 0
    kernels         | 1 | a starts | 2 3 4 5 6 | wait a: none | wait c . . . . . . | 12 | d: 13 14 | e: 15 16 17
    communication       | a, 2 s |             | b, 4 s      | c, 1 s |
    """
    there = streams.Device()
    group: Any = torch.distributed.group.WORLD
    with there.there():
        recorder = SpanRecorder({group.group_name: "dp"}, timeline=device._CudaTimeline(CPU))

        def start(seconds: float) -> torch.Tensor:
            work = UnderWay(None, works=(there.collective(seconds),))
            return attach(torch.zeros(2), work, "all_gather", "", 8, group, member(group), there.host_s)

        with recording(recorder):
            recorder.clear()
            there.work(1.0)
            first = start(2.0)
            there.work(5.0)
            recorder.span(COMPUTE, "forward", 0.0, 0.0)
            wait(first)
            both = [start(4.0), start(1.0)]
            wait(both[1])
            wait(both[0])
            there.work(1.0)
            with blocking("broadcast", group.group_name, 8):
                there.work(2.0)
            begins = recorder.moment(0.0)
            with blocking("reduce_scatter", group.group_name, 8, computes=True):
                there.work(3.0)
            recorder.span(COMPUTE, "backward", begins, recorder.moment(0.0))
        assert there.host_s == 0.0, "the host waits for nothing before the trace is read"
        return recorder.trace(0), there.kernels.now_s


def test_collectives_have_the_times_of_their_own_stream(ranks: Ranks) -> None:
    ((trace, end_s),) = ranks(1, collectives_on_a_stream)
    assert end_s == 17.0, "marks delay no kernel"
    assert spans_of(trace, "communication") == [
        ("all_gather dp", 1.0, 3.0), ("all_gather dp", 10.0, 11.0), ("all_gather dp", 6.0, 10.0),
        ("broadcast dp", 12.0, 14.0), ("reduce_scatter dp", 14.0, 17.0),
    ]  # fmt: skip
    assert spans_of(trace, "wait") == [
        ("all_gather dp", 6.0, 6.0), ("all_gather dp", 6.0, 11.0), ("all_gather dp", 11.0, 11.0),
        ("broadcast dp", 12.0, 14.0),
    ]  # fmt: skip
    (times,) = summarize(trace)
    assert times.hidden_s == 5.0, "one ended before anybody waited for it, and one ran within a product"
    assert times.compute_s == 3.0, "of the product"
    assert exposed_share([times]) == pytest.approx(7 / 17)


class Late(CpuKind):
    """A CPU whose copies take 3 seconds on a stream of their own, from memory that counts as pinned."""

    def __init__(self, there: streams.Device) -> None:
        super().__init__()
        self.there = there

    def copies(self) -> Any:
        copies = device._CudaCopies(CPU)
        copies.lend = lambda value: None  # type: ignore[method-assign]
        return copies

    def pinned(self, like: torch.Tensor) -> Any:
        return self

    def copy_(self, value: torch.Tensor) -> Any:
        self.nbytes = value.nbytes
        return self

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        self.there.work(3.0)
        return torch.zeros(2)


def test_copies_of_inputs_have_the_times_of_their_stream_and_do_not_lengthen_the_step() -> None:
    """The device runs the step before until 10. The batch of this step arrives at 3, and a second tensor at 6."""
    there = streams.Device()
    there.work(10.0)
    with there.there():
        recorder = SpanRecorder(timeline=device._CudaTimeline(CPU))
        copies = InputCopies(Late(there))
        with recording(recorder):
            recorder.clear()
            copies(torch.zeros(2))
            copies(torch.zeros(4))
            there.work(2.0)
            recorder.span(COMPUTE, "forward", 0.0, 0.0)
        trace = recorder.trace(0)
    assert spans_of(trace, COPY) == [("inputs", 0.0, 3.0), ("inputs", 3.0, 6.0)]
    assert [span.bytes for span in trace.spans if span.stream == COPY] == [8, 16]
    assert there.kernels.now_s == 12.0, "they were there before the kernels that read them"
    (times,) = summarize(trace)
    assert times.step_s <= 2.0
