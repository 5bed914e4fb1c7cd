"""The simulator without contention: bubbles, collectives and memory are those of the closed forms."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.cost.collective import Group, Network
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.errors import ClusterError, LayoutError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import Schedule
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from meshwright.schedules.timing import Costs, run
from meshwright.simulate.engine import play
from meshwright.simulate.faults import Faults
from tests.tries import tries

DEVICE = Device(
    name="x", kind="cpu", memory_bytes=10**9, memory_bandwidth_bytes_per_s=1e9, peak_flops_per_s={"float32": 1e9}
)
PIPELINES = st.one_of(
    st.tuples(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 7), st.just(1)),
    st.tuples(st.just("zb-h1"), st.integers(1, 4), st.integers(4, 7), st.just(1)),
    st.tuples(st.just("zb-h2"), st.integers(1, 4), st.integers(7, 9), st.just(1)),
    st.tuples(st.sampled_from(["zb-v", "dualpipe-v"]), st.integers(1, 4), st.integers(8, 10), st.just(2)),
    st.integers(1, 4).flatmap(
        lambda p: st.tuples(
            st.just("interleaved"), st.just(p), st.integers(1, 3).map(lambda k: k * p), st.integers(1, 3)
        )
    ),
)


def cluster(*fan_outs: int, alpha_s: float = 0.0, beta_s_per_byte: float = 0.0, **changes: Any) -> Cluster:
    levels = tuple(
        Level(
            name=f"level{index}",
            fan_out=fan_out,
            alpha_s=alpha_s,
            beta_s_per_byte=beta_s_per_byte * 4**index,
            **changes,
        )
        for index, fan_out in enumerate(fan_outs)
    )
    count = 1
    for fan_out in fan_outs:
        count *= fan_out
    return Cluster(name="c", num_devices=count, device=DEVICE, levels=levels)


FREE = cluster(64)


def work(num_stages: int, *, after: tuple[Piece, ...] = (), reduce: tuple[Piece, ...] = (), **stage: Any) -> StepWork:
    pieces: dict[str, tuple[Piece, ...]] = {
        "F": (Compute("f", 1.0, 8.0, 4),),
        "B": (Compute("b", 2.0),),
        "I": (Compute("i", 1.0),),
        "W": (Compute("w", 1.0),),
        "REDUCE_GRAD": reduce,
    }
    stage_work = StageWork(**({"pieces": pieces, "after": after} | stage))
    return StepWork((stage_work,) * num_stages)


def full(schedule: Schedule) -> Schedule:
    return add_reduction(add_communication(schedule))


# --- bubbles ---------------------------------------------------------------------------------------------------------


@given(PIPELINES, st.tuples(*[st.integers(1, 9)] * 4))
def test_every_action_runs_when_the_simplest_version_says(
    pipeline: tuple[str, int, int, int], costs: tuple[int, int, int, int]
) -> None:
    """Receives are posted early, so a value is waited for where it is used: as in a schedule that only computes."""
    name, num_ranks, _, chunks = pipeline
    schedule = build(*pipeline)
    forward, backward, backward_input, backward_weight = map(float, costs)
    pieces: dict[str, tuple[Piece, ...]] = {
        "F": (Compute("f", forward),),
        "B": (Compute("b", backward / 4), Compute("b", backward * 3 / 4)),
        "I": (Compute("i", backward_input),),
        "W": (Compute("w", backward_weight),),
    }
    names = ("forward", "backward", "backward_input", "backward_weight")
    whole = Costs(**{name: float(cost * chunks) for name, cost in zip(names, costs, strict=True)})  # of all chunks
    trace = play(full(schedule), work(num_ranks * chunks, pieces=pieces), Mesh.of(pp=num_ranks), FREE).trace()
    for rank, times in enumerate(run(schedule, whole)):
        spans = [
            (span.what, span.start_s, span.end_s) for span in trace.of_rank(rank).spans if span.stream == "compute"
        ]
        wanted = [(str(action), start, end) for action, (start, end) in zip(schedule.ranks[rank], times, strict=True)]
        assert spans == wanted


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(0, 6))
def test_the_bubble_of_a_pipeline(name: str, num_ranks: int, more: int) -> None:
    m = num_ranks + more
    played = play(full(build(name, num_ranks, m)), work(num_ranks), Mesh.of(pp=num_ranks), FREE)
    assert played.step_s / (3.0 * m) - 1 == pytest.approx((num_ranks - 1) / m)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_chunks_divide_the_bubble(num_ranks: int, rounds: int, chunks: int) -> None:
    m = rounds * num_ranks
    schedule = full(build("interleaved", num_ranks, m, chunks))
    played = play(schedule, work(num_ranks * chunks), Mesh.of(pp=num_ranks), FREE)
    assert played.step_s / (3.0 * m * chunks) - 1 == pytest.approx((num_ranks - 1) / (chunks * m))


@given(
    st.sampled_from([("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2)]),
    st.integers(2, 5),
    st.integers(0, 3),
)
def test_zero_bubble_schedules_wait_for_their_first_forward(case: tuple[str, int], num_ranks: int, more: int) -> None:
    """And keep as many micro-batches as the papers say: p, 2 p - 1, p and p + 1/2."""
    (name, chunks), m = case, 2 * num_ranks + more
    step = work(num_ranks * chunks, saved_bytes=2 // chunks)
    played = play(full(build(name, num_ranks, m, chunks)), step, Mesh.of(pp=num_ranks), FREE)
    assert played.step_s == 3.0 * m * chunks + num_ranks - 1
    kept = {"zb-h2": 2 * num_ranks - 1, "dualpipe-v": num_ranks + 0.5}.get(name, num_ranks)
    assert [played.peak_bytes(rank) for rank in range(num_ranks)] == [2 * kept] * num_ranks


def test_messages_take_their_time_between_the_stages() -> None:
    """One micro-batch on two stages: F, message, F, B, message, B."""
    slow = cluster(2, alpha_s=0.5, beta_s_per_byte=2.5e-4)
    trace = play(
        full(build("gpipe", 2, 1)), work(2, sent_up_bytes=2000, sent_down_bytes=6000), Mesh.of(pp=2), slow
    ).trace()
    assert [(span.rank, span.stream, span.what, span.start_s, span.end_s, span.bytes) for span in trace.spans] == [
        (0, "compute", "0F0", 0, 1, 4),
        (0, "communication", "0SEND_F0", 1, 2, 2000),
        (0, "wait", "0RECV_B0", 1, 7, 0),
        (0, "compute", "0B0", 7, 9, 0),
        (1, "wait", "1RECV_F0", 0, 2, 0),
        (1, "compute", "1F0", 2, 3, 4),
        (1, "compute", "1B0", 3, 5, 0),
        (1, "communication", "1SEND_B0", 5, 7, 6000),
    ]


def test_a_schedule_that_only_computes_gets_its_messages() -> None:
    trace, other = (play(schedule, work(3), Mesh.of(pp=3), FREE).trace() for schedule in _with_and_without_messages())
    assert trace == other


def _with_and_without_messages() -> tuple[Schedule, Schedule]:
    schedule = build("1f1b", 3, 4)
    return schedule, add_communication(schedule)


# --- collectives -----------------------------------------------------------------------------------------------------

BOXES = cluster(4, 4, alpha_s=1e-3, beta_s_per_byte=1e-6)


@given(
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]),
    st.sampled_from([Mesh.of(dp=4, tp=4), Mesh.of(dp=8, tp=2), Mesh.of(dp=2, tp=8), Mesh.of(tp=2, dp=2)]),
    st.sampled_from(["dp", "tp"]),
    st.integers(0, 10**6),
)
def test_a_blocking_collective_takes_what_the_closed_form_says(
    collective: Any, mesh: Mesh, axis: str, size: int
) -> None:
    step = work(1, reduce=(Communicate("g", collective, axis, size),))
    stride = 1 if mesh.names[-1] == axis else mesh.axes[-1].size
    wanted = Network(BOXES).collective_s(collective, size, Group(mesh.size(axis), stride))
    assert play(full(build("none", 1, 1)), step, mesh, BOXES).step_s == pytest.approx(3.0 + wanted)


def test_a_collective_hides_behind_computing_until_it_is_waited_for() -> None:
    mesh, network = Mesh.of(dp=2), cluster(2, beta_s_per_byte=1e-3)
    seconds = Network(network).collective_s("all_reduce", 10**4, Group(2))
    for hidden_s in (1.0, 50.0):
        after = (Compute("other", hidden_s), Wait("g"), Compute("optimizer", 1.0))
        step = work(1, reduce=(Communicate("g", "all_reduce", "dp", 10**4, blocking=False),), after=after)
        trace = play(full(build("none", 1, 1)), step, mesh, network).trace([1])
        assert trace.duration_s == pytest.approx(3.0 + max(seconds, hidden_s) + 1.0)
        assert trace.busy_s(1, "communication") == pytest.approx(seconds)
        assert trace.busy_s(1, "wait") == pytest.approx(max(0.0, seconds - hidden_s))


def test_without_overlap_a_collective_takes_its_time_when_it_is_waited_for() -> None:
    mesh, network = Mesh.of(dp=2), cluster(2, beta_s_per_byte=1e-3)
    seconds = Network(network).collective_s("all_reduce", 10**4, Group(2))
    after = (Compute("other", 50.0), Wait("g"))
    step = work(1, reduce=(Communicate("g", "all_reduce", "dp", 10**4, blocking=False),), after=after)
    schedule = full(build("none", 1, 1))
    trace = play(schedule, step, mesh, network, overlap=False, faults=Faults(slow={1: 2.0})).trace()
    assert [trace.busy_s(rank, "wait") for rank in (0, 1)] == pytest.approx([seconds, seconds])
    assert trace.of_rank(0).duration_s == pytest.approx(53.0 + seconds)
    assert trace.of_rank(1).duration_s == pytest.approx(106.0 + seconds)
    with pytest.raises(LayoutError, match="ask for contention with overlap, or for neither"):
        play(schedule, step, mesh, network, overlap=False, contention=True).trace()


def test_without_overlap_a_send_keeps_its_rank() -> None:
    """Two micro-batches on two stages, messages of 1 s: 0F0 S 0F1 S, and 1F0 1F1 1B0 S 1B1 S."""
    slow = cluster(2, alpha_s=1.0)
    trace = play(full(build("gpipe", 2, 2)), work(2), Mesh.of(pp=2), slow, overlap=False).trace()
    ends = {span.what: span.end_s for span in trace.spans if span.stream == "compute"}
    assert ends == {"0F0": 1, "0F1": 3, "1F0": 3, "1F1": 5, "1B0": 7, "1B1": 10, "0B0": 10, "0B1": 13}
    waits = [(span.what, span.start_s, span.end_s) for span in trace.of_rank(0).spans if span.stream == "wait"]
    assert waits == [("0SEND_F0", 1, 2), ("0SEND_F1", 3, 4), ("0RECV_B0", 4, 8), ("0RECV_B1", 10, 11)]


def test_a_collective_starts_when_the_last_has_come() -> None:
    step = work(1, reduce=(Communicate("g", "all_reduce", "dp", 8),))
    mesh, network = Mesh.of(dp=4, tp=2), cluster(8, beta_s_per_byte=1e-3)
    trace = play(full(build("none", 1, 1)), step, mesh, network, faults=Faults(slow={3: 2.0})).trace()
    starts_s = {span.rank: span.start_s for span in trace.spans if span.stream == "communication"}
    assert starts_s == {rank: 6.0 if rank % 2 else 3.0 for rank in range(8)}


def test_an_axis_of_one_rank_costs_nothing() -> None:
    pieces = (Communicate("g", "all_reduce", "dp", 10, blocking=False),)
    trace = play(full(build("none", 1, 1)), work(1, reduce=pieces, after=(Wait("g"),)), Mesh.of(tp=2), BOXES).trace()
    assert trace.streams == ("compute",)


# --- memory ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 8))
def test_gpipe_keeps_all_microbatches_and_1f1b_at_most_as_many_as_stages(num_ranks: int, m: int) -> None:
    step = work(num_ranks, held_bytes=1000, saved_bytes=10, workspace_bytes=3)
    for name, live in (("gpipe", lambda rank: m), ("1f1b", lambda rank: min(m, num_ranks - rank))):
        played = play(full(build(name, num_ranks, m)), step, Mesh.of(pp=num_ranks, dp=2), FREE)
        for rank in range(num_ranks * 2):
            assert played.peak_bytes(rank) == 1003 + 10 * live(rank // 2)


@given(PIPELINES)
def test_at_the_end_only_what_is_held_is_left(pipeline: tuple[str, int, int, int]) -> None:
    _, num_ranks, _, chunks = pipeline
    step = work(num_ranks * chunks, held_bytes=7, saved_bytes=5, workspace_bytes=3)
    trace = play(full(build(*pipeline)), step, Mesh.of(pp=num_ranks), FREE).trace()
    for rank in range(num_ranks):
        samples = trace.of_rank(rank).memory
        assert samples[0].bytes == samples[-1].bytes == 7 * chunks
        assert list(samples) == sorted(samples, key=lambda sample: sample.time_s)


# --- ranks that behave alike -----------------------------------------------------------------------------------------


@tries(15)
@given(
    PIPELINES,
    st.permutations(["pp", "dp", "tp"]),
    st.dictionaries(st.integers(0, 3), st.floats(0.5, 3.0), max_size=2),
    st.dictionaries(st.integers(0, 3), st.floats(0.0, 30.0), max_size=1),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
@example(("interleaved", 2, 4, 2), ["dp", "tp", "pp"], {0: 0.5}, {0: 12.75}, 0.1, False)  # it dies while it sends
def test_playing_one_of_alike_ranks_is_exact(
    pipeline: tuple[str, int, int, int],
    order: list[str],
    slow: dict[int, float],
    deaths_s: dict[int, float],
    jitter: float,
    overlap: bool,
) -> None:
    _, num_ranks, _, chunks = pipeline
    mesh = Mesh.of(**{axis: {"pp": num_ranks, "dp": 2, "tp": 2}[axis] for axis in order})
    pieces: dict[str, tuple[Piece, ...]] = {
        kind: (Compute("c", 1.0), Communicate("t", "all_reduce", "tp", 60), Compute("d", 0.5)) for kind in "FBIW"
    }
    pieces["REDUCE_GRAD"] = (Communicate("g", "reduce_scatter", "dp", 90, blocking=False),)
    after = (Wait("g"), Communicate("norm", "all_reduce", "pp", 8), Compute("optimizer", 1.0))
    step = work(num_ranks * chunks, pieces=pieces, after=after, sent_up_bytes=30, saved_bytes=1, workspace_bytes=1)
    schedule = full(build(*pipeline))
    faults = Faults(slow=slow, jitter=jitter, deaths_s=deaths_s)
    slow_links = cluster(4, 8, alpha_s=0.1, beta_s_per_byte=2e-4)
    folded, unfolded = (
        play(schedule, step, mesh, slow_links, overlap=overlap, faults=faults, fold=fold) for fold in (True, False)
    )
    assert folded.trace() == unfolded.trace()
    assert folded.halted == unfolded.halted
    assert len(unfolded.timelines) == mesh.world_size
    if not slow and not deaths_s and not jitter:
        assert len(folded.timelines) == num_ranks


def test_a_straggler_divides_its_neighbours_from_the_rest() -> None:
    step = work(2, reduce=(Communicate("g", "all_reduce", "dp", 8), Communicate("h", "all_reduce", "tp", 8)))
    played = play(full(build("1f1b", 2, 4)), step, Mesh.of(pp=2, dp=8, tp=4), FREE, faults=Faults(slow={5: 1.5}))
    assert len(played.timelines) == 8


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_does_not_belong_together_is_refused() -> None:
    schedule = full(build("1f1b", 2, 4))
    with pytest.raises(LayoutError, match="pp is 1, and the schedule has 2 ranks"):
        play(schedule, work(2), Mesh.of(dp=2), FREE).trace()
    with pytest.raises(ScheduleError, match="it has 2 stages, the work has 3"):
        play(schedule, work(3), Mesh.of(pp=2), FREE).trace()
    with pytest.raises(ScheduleError, match="the work of stage 0 has no pieces for F"):
        play(schedule, work(2, pieces={}), Mesh.of(pp=2), FREE).trace()
    with pytest.raises(ClusterError, match="it has 64 devices, the mesh 128 ranks"):
        play(schedule, work(2), Mesh.of(pp=2, dp=64), FREE).trace()
    with pytest.raises(LayoutError, match="faults: there is no rank 9"):
        play(schedule, work(2), Mesh.of(pp=2), FREE, faults=Faults(slow={9: 2.0})).trace()
    with pytest.raises(LayoutError, match="there is no rank 2"):
        play(schedule, work(2), Mesh.of(pp=2), FREE).trace([2])


def test_a_wait_for_what_never_started_is_refused() -> None:
    with pytest.raises(ScheduleError, match="`after` waits for `g`, which was not started"):
        play(full(build("none", 1, 1)), work(1, after=(Wait("g"),)), Mesh.of(dp=2), FREE).trace()


def test_ranks_that_wait_for_ever_are_refused() -> None:
    """Rank 0 wants the gradient of micro-batch 1 first, rank 1 makes that of micro-batch 0 first and awaits F1."""
    stuck = Schedule.from_text(
        "0F0 0SEND_F0 0RECV_B1 0B1 0F1 0SEND_F1 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1\n",
        name="stuck",
    )
    with pytest.raises(ScheduleError, match="rank 0: it waits for ever: `0B1` for `0RECV_B1`"):
        play(stuck, work(2), Mesh.of(pp=2), FREE).trace()


def test_collectives_that_do_not_match_are_refused() -> None:
    first, last = (
        StageWork(pieces=dict(work(1).stages[0].pieces), after=(Communicate(name, "all_reduce", "pp", size),))
        for name, size in (("norm", 8), ("loss", 4))
    )
    with pytest.raises(
        ScheduleError, match=r"`norm` is all_reduce of 8 bytes, and meets `loss`, all_reduce of 4 bytes"
    ):
        play(full(build("gpipe", 2, 1)), StepWork((first, last)), Mesh.of(pp=2), FREE).trace()
