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
from meshwright.comm.record import COMPUTE, SpanRecorder
from meshwright.ir.summary import summarize
from meshwright.ir.trace import Trace
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
    for rank, (mine, _) in enumerate(ranks(2, traces_of, mw.Layout(**{axis: 2}))):  # type: ignore[arg-type]
        assert mine.ranks == (rank,)
        assert names(mine, "compute") == ["data", "forward", "backward", "clip", "optimizer"]
        compute = [span for span in mine.spans if span.stream == "compute"]
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(compute))
        under_way = set(names(mine, "communication"))
        assert f"all_reduce {axis}" in under_way
        assert all(name.endswith(axis) for name in under_way)
        assert set(names(mine, "wait")) == under_way
        forward, backward = compute[1:3]
        for span in mine.spans:
            if span.stream != "compute":
                assert span.start_s >= forward.start_s
        assert any(backward.start_s <= span.start_s <= backward.end_s for span in mine.spans if span.bytes)
        assert len(mine.memory) > 0
        (times,) = summarize(mine)
        assert times.compute_s > 0
        assert times.exposed_s > 0
        assert times.compute_s + times.exposed_s + times.bubble_s == pytest.approx(times.step_s)


def test_an_evaluation_goes_forward_only(ranks: Ranks) -> None:
    ((mine, _),) = ranks(1, traces_of, mw.Layout(), True)
    assert names(mine, "compute") == ["data", "forward"]


def test_rank_0_gets_what_all_ranks_did_on_its_clock(ranks: Ranks) -> None:
    (first, both), (second, only) = ranks(2, traces_of, mw.Layout(dp=2))
    assert only == second
    assert both.plan == second.plan != ""
    assert both.of_rank(0) == first
    assert [span.what for span in both.of_rank(1).spans] == [span.what for span in second.spans]
    # Nobody is done with a collective before both have begun; the clocks may be off by half a round trip.
    for one, other in zip(
        *([span for span in both.of_rank(rank).spans if span.stream == "communication"] for rank in (0, 1)), strict=True
    ):
        assert one.what == other.what
        assert max(one.start_s, other.start_s) <= min(one.end_s, other.end_s) + 1e-3


def test_in_a_pipeline_values_are_waited_for_before_they_are_used(ranks: Ranks) -> None:
    layout = mw.Layout(pp=2, microbatches=4)
    traces = ranks(2, traces_of, layout)
    for rank, (mine, _) in enumerate(traces):
        actions = [what for what in names(mine, "compute") if re.match(r"\d", what)]
        assert sorted(actions) == sorted(f"{rank}{kind}{m}" for kind in "FB" for m in range(4))
        used = {span.what: span.start_s for span in mine.spans if span.stream == "compute"}
        waits = {span.what: span.end_s for span in mine.spans if span.stream == "wait" and "RECV" in span.what}
        kind = "F" if rank else "B"
        assert sorted(waits) == [f"{rank}RECV_{kind}{m}" for m in range(4)]
        assert all(end_s <= used[what.replace("RECV_", "")] for what, end_s in waits.items())
        assert "broadcast pp" in names(mine, "wait")
    times = summarize(traces[0][1])
    assert [one.rank for one in times] == [0, 1]
    assert len({one.step_s for one in times}) == 1
    assert all(one.bubble_s > 0 for one in times)


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
    recorder.collective("all_reduce", "group", (2.0, 2.5, 3.5, 4.0), 8)
    found = {(span.stream, span.what): (span.start_s, span.end_s) for span in recorder.trace(0).spans[:3]}
    assert found == {
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
