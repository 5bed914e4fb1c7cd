"""Where a step's time went: computing, exposed communication and the rest add up to the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.collective import Group, Network
from meshwright.cost.work import Communicate, Compute, StageWork, StepWork, Wait
from meshwright.ir.mesh import Mesh
from meshwright.ir.summary import RankTimes, summarize
from meshwright.ir.trace import MemorySample, Span, Trace
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from meshwright.simulate.engine import play
from tests.pure.test_simulate import FREE, cluster


def test_the_times_of_a_rank() -> None:
    """
    compute         0──────────4     6────8
    communication         3─────────6       8───────10
    wait                       4────6        8──────10   (the last for a receive)
    """
    trace = Trace(
        source="measured",
        spans=(
            Span(0, "compute", "forward", 0.0, 4.0),
            Span(0, "communication", "all_reduce tp", 3.0, 6.0),
            Span(0, "wait", "all_reduce tp", 4.0, 6.0),
            Span(0, "compute", "backward", 6.0, 8.0),
            Span(0, "communication", "other", 8.0, 10.0),
            Span(0, "wait", "0RECV_B0", 8.0, 10.0),
        ),
        memory=(MemorySample(0, 1.0, 7), MemorySample(0, 2.0, 5)),
    )
    assert summarize(trace) == (
        RankTimes(rank=0, step_s=10.0, compute_s=6.0, exposed_s=2.0, hidden_s=1.0, bubble_s=2.0, peak_bytes=7),
    )


def test_rounding_is_no_time() -> None:
    """The parts of a step of 0.9 s are a little less than 0.9 s in floating point: the rest is no bubble."""
    ends = [0.0, 0.2, 0.5, 0.8, 0.9]
    streams = ("compute", "wait", "compute", "wait")
    spans = tuple(Span(0, stream, "work", ends[at], ends[at + 1]) for at, stream in enumerate(streams))
    (times,) = summarize(Trace(source="measured", spans=spans))
    assert 0.9 - (0.2 + 0.8 - 0.5) - (0.5 - 0.2 + 0.9 - 0.8) > 0
    assert times.bubble_s == 0


def test_what_is_waited_for_inside_of_computing_is_no_computing() -> None:
    spans = (
        Span(2, "compute", "forward", 0.0, 10.0),
        Span(2, "wait", "a", 1.0, 3.0),
        Span(2, "wait", "b", 2.0, 4.0),
        Span(2, "wait", "c", 9.0, 12.0),
    )
    (times,) = summarize(Trace(source="measured", spans=spans))
    assert (times.rank, times.compute_s, times.exposed_s, times.bubble_s) == (2, 6.0, 6.0, 0.0)


_TIMES = st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(st.sampled_from(["compute", "communication", "wait"]), _TIMES), min_size=1, max_size=9))
def test_counting_second_by_second_gives_the_same(spans: list[tuple[str, tuple[int, int]]]) -> None:
    trace = Trace(
        source="measured", spans=tuple(Span(0, stream, "x", float(start), float(end)) for stream, (start, end) in spans)
    )
    seconds = {
        name: {second for stream, (start, end) in spans if stream == name for second in range(start, end)}
        for name in ("compute", "communication", "wait")
    }
    (times,) = summarize(trace)
    assert times.compute_s == len(seconds["compute"] - seconds["wait"])
    assert times.exposed_s == len(seconds["wait"])
    assert times.hidden_s == len(seconds["communication"] - seconds["wait"])
    assert times.compute_s + times.exposed_s + times.bubble_s == times.step_s == trace.duration_s


@given(st.integers(1, 4), st.integers(0, 4))
def test_a_simulated_pipeline_has_the_bubble_of_the_closed_form(num_ranks: int, more: int) -> None:
    m = num_ranks + more
    step = StepWork((StageWork(pieces={"F": (Compute("f", 1.0),), "B": (Compute("b", 2.0),)}),) * num_ranks)
    trace = play(add_communication(build("1f1b", num_ranks, m)), step, Mesh.of(pp=num_ranks), FREE).trace()
    for times in summarize(trace):
        assert times.bubble_s / times.compute_s == pytest.approx((num_ranks - 1) / m)
        assert times.exposed_s == times.hidden_s == 0.0


def test_simulated_communication_is_hidden_or_exposed() -> None:
    """A collective beside 1 s of other computing."""
    started = (Communicate("g", "all_reduce", "dp", 4000, blocking=False),)
    stage = StageWork(
        pieces={"F": (Compute("f", 1.0),), "B": (Compute("b", 2.0),), "REDUCE_GRAD": started},
        after=(Compute("other", 1.0), Wait("g")),
    )
    slow = cluster(2, beta_s_per_byte=1e-3)
    seconds = Network(slow).collective_s("all_reduce", 4000, Group(2))
    for times in summarize(play(add_reduction(build("none", 1, 1)), StepWork((stage,)), Mesh.of(dp=2), slow).trace()):
        assert seconds > 2.0
        assert (times.compute_s, times.exposed_s) == pytest.approx((4.0, seconds - 1.0))
        assert (times.hidden_s, times.bubble_s) == pytest.approx((1.0, 0.0))
