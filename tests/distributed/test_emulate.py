"""The emulated device: real ranks run the schedule, and nothing is done before its simulated time."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.emulation.devices import emulate
from meshwright.emulation.slow import slow_down, stretch
from meshwright.emulation.stages import Doing, EmulatedStage, emulated_stages
from meshwright.errors import LayoutError, RankError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import ActionList, Schedule
from meshwright.ir.trace import Trace
from meshwright.runtime.executor import Executor
from meshwright.schedules.check import check
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build, training_schedule
from meshwright.simulate.engine import play
from meshwright.simulate.faults import Faults
from tests.distributed.pool import Ranks

DEVICE = Device(
    name="x", kind="cpu", memory_bytes=10**9, memory_bandwidth_bytes_per_s=1e9, peak_flops_per_s={"float32": 1e9}
)
CLUSTER = Cluster(
    name="c", num_devices=8, device=DEVICE, levels=(Level(name="b", fan_out=8, alpha_s=1e-3, beta_s_per_byte=1e-6),)
)


def work(num_stages: int) -> StepWork:
    pieces: dict[str, tuple[Piece, ...]] = {
        "F": (Compute("f", 2e-3), Communicate("tp", "all_reduce", "dp", 100)),
        "B": (Compute("b", 4e-3),),
        "I": (Compute("i", 2e-3),),
        "W": (Compute("w", 2e-3),),
        "REDUCE_GRAD": (Communicate("g", "all_reduce", "dp", 4000, blocking=False),),
    }
    after = (Compute("other", 1e-3), Wait("g"), Communicate("norm", "all_reduce", "pp", 8), Compute("optimizer", 1e-3))
    stage = StageWork(
        pieces=pieces, before=(Compute("data", 1e-3),), after=after, sent_up_bytes=500, sent_down_bytes=900
    )
    return StepWork((stage,) * num_stages)


def emulated(schedule: Schedule, stages: tuple[EmulatedStage, ...]) -> list[Trace]:
    return emulate(stages, schedule, 2)


@pytest.mark.parametrize(
    ("num_ranks", "name", "chunks"),
    [(3, "gpipe", 1), (3, "1f1b", 1), (2, "interleaved", 2), (2, "zb-h1", 1), (2, "zb-v", 2), (1, "none", 1)],
)
def test_the_schedule_is_run_and_nothing_ends_before_its_time(
    ranks: Ranks, num_ranks: int, name: str, chunks: int
) -> None:
    schedule = add_reduction(add_communication(build(name, num_ranks, 4, chunks)))
    step, mesh = work(num_ranks * chunks), Mesh.of(pp=num_ranks, dp=2)
    first, *others = ranks(num_ranks, emulated, schedule, emulated_stages(step, mesh, CLUSTER, schedule))
    wanted = play(schedule, step, mesh, CLUSTER).trace(range(0, 2 * num_ranks, 2))
    assert [trace.ranks for trace in first] == [tuple(range(num_ranks))] * 2
    for rank, other in enumerate(others, 1):
        assert [trace.ranks for trace in other] == [(rank,)] * 2
    for trace in first:
        assert trace.source == "emulated"
        begun = min(span.start_s for span in trace.spans)
        for rank in range(num_ranks):
            spans = [span for span in trace.of_rank(rank).spans if span.stream == "compute" and span.what[0].isdigit()]
            assert [span.what for span in spans] == [
                str(action) for action in schedule.ranks[rank] if action.kind.computes
            ]
            assert all(span.end_s <= other.start_s for span, other in itertools.pairwise(spans))
            ends = {
                span.what: span.end_s
                for span in wanted.of_rank(2 * rank).spans
                if span.stream == "compute" and span.what[0].isdigit()
            }
            # The clocks of a merged trace are off by less than a millisecond.
            assert all(span.end_s - begun >= ends[span.what] - 1e-3 for span in spans)
        assert trace.duration_s >= wanted.duration_s - 1e-3


def emulated_with_faults(stages: tuple[EmulatedStage, ...], schedule: Schedule, faults: Faults) -> list[Trace]:
    return emulate(stages, schedule, 3, faults)


def test_messages_decide_under_jitter_and_a_slow_rank(ranks: Ranks) -> None:
    """Every order is one that the rule allows; the slow middle rank has the largest part of its time to compute."""
    schedule = training_schedule("message-driven", 3, 6)
    stage = StageWork(
        pieces={"F": (Compute("f", 2e-3),), "B": (Compute("b", 4e-3),)}, sent_up_bytes=9, sent_down_bytes=9
    )
    stages = emulated_stages(StepWork((stage,) * 3), Mesh.of(pp=3), CLUSTER, schedule)
    first, *_ = ranks(3, emulated_with_faults, stages, schedule, Faults(jitter=0.5, slow={1: 3.0}))
    orders = set()
    for trace in first:
        lists = []
        for rank in range(3):
            spans = [span for span in trace.of_rank(rank).spans if span.stream == "compute" and span.what[0].isdigit()]
            lists.append(ActionList.from_text(" ".join(span.what for span in spans)))
        report = check(Schedule.of("executed", lists))
        assert [rank.live_activations <= 6 for rank in report.ranks] == [True] * 3
        assert report.ranks[2].live_activations == 1
        orders.add(tuple(lists))
        busy = [
            sum(span.end_s - span.start_s for span in trace.of_rank(rank).spans if span.stream == "compute")
            for rank in range(3)
        ]
        assert busy[1] > max(busy[0], busy[2])
    assert all(len(actions) == 12 for lists in orders for actions in lists)


def wrong_number(stages: tuple[EmulatedStage, ...], schedule: Schedule) -> str:
    try:
        emulate(stages, schedule, 1)
    except LayoutError as error:
        return str(error)
    raise RankError("it was not refused")


def test_another_number_of_ranks_is_refused(ranks: Ranks) -> None:
    stages = emulated_stages(work(2), Mesh.of(pp=2), CLUSTER, build("1f1b", 2, 2, 1))
    (message,) = ranks(1, wrong_number, stages, build("1f1b", 2, 2))
    assert "the schedule has 2 ranks, and 1 are there" in message


def test_collectives_become_waits() -> None:
    (stage, _) = emulated_stages(work(2), Mesh.of(pp=2, dp=2), CLUSTER, build("1f1b", 2, 2, 1))
    tp, g, norm = (stage.actions["F"][1], stage.actions["REDUCE_GRAD"][0], stage.after[2])
    assert (tp.role, g.role, norm.role) == ("communicate", "start", "meet")
    assert 0 < norm.seconds < tp.seconds < g.seconds
    assert stage.after[1] == Doing("g", "until")
    assert (stage.sent_up_s, stage.sent_down_s) == pytest.approx((1e-3 + 500e-6, 1e-3 + 900e-6))


def test_a_collective_along_pp_that_does_not_block_is_refused() -> None:
    stage = StageWork(pieces={}, after=(Communicate("g", "all_reduce", "pp", 8, blocking=False),))
    with pytest.raises(ScheduleError, match="`g` goes on along pp"):
        emulated_stages(StepWork((stage,) * 2), Mesh.of(pp=2), CLUSTER, build("1f1b", 2, 2, 1))


def test_a_slow_device_sleeps_after_it_has_computed() -> None:
    """Four times the time of its core, at least."""
    computed: list[float] = []

    def compute(values: list[Any]) -> list[Any]:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.02:
            pass
        computed.append(time.thread_time() - begun)
        return values

    stage = SimpleNamespace(functions={"forward": compute})
    slow_down(cast(Executor, SimpleNamespace(stages={0: stage})), 4.0)
    begun = time.perf_counter()
    assert stage.functions["forward"]([1]) == [1]
    assert time.perf_counter() - begun >= 4 * computed[0]


@pytest.mark.parametrize(
    ("where", "slept_before"), [("reduce", ["prologue"]), ("finish", ["prologue", "reduce", "finish"])]
)
def test_a_stretched_step_sleeps_before_gradients_are_late_or_at_its_end(where: Any, slept_before: list[str]) -> None:
    called: list[str] = []
    past: list[float] = []

    def phase(name: str) -> Any:
        def run(values: Any) -> Any:
            called.append(name)
            return values

        return run

    def until_s(past_s: float) -> float:
        past.append(past_s)
        assert called == slept_before
        return 0.03

    stage = SimpleNamespace(functions={name: phase(name) for name in ("prologue", "reduce", "finish")})
    stretch(cast(Executor, SimpleNamespace(stages={0: stage})), until_s, where)
    begun = time.perf_counter()
    assert [function([7]) for function in stage.functions.values()] == 3 * [[7]]
    assert time.perf_counter() - begun >= 0.03
    assert len(past) == 1
