"""Memory over a schedule: what lives with which micro-batches, and the verdict against a limit."""

import itertools
import math
from statistics import NormalDist

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog import load_cluster
from meshwright.cost.closed_form import predict_step, predict_steps
from meshwright.cost.collective import Group, Network
from meshwright.cost.occupancy import (
    box_of,
    fit_chance,
    memory_verdict,
    most_peers,
    num_peers,
    peak_memory,
    room_of,
    taken_bytes,
)
from meshwright.cost.work import ActionBytes, Communicate, Compute, StageWork, StepWork
from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster, CollectiveTiming, Operation
from meshwright.ir.device import Condition, Device, Kernels
from meshwright.ir.level import Level
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.ir.software import Software, Spread
from meshwright.schedules.check import check
from meshwright.schedules.message_driven import with_most_in_flight
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build, training_schedule
from meshwright.schedules.timing import Costs, order_of, run

CORE = Device(
    name="core",
    kind="cpu",
    memory_bytes=4_000_000_000,
    memory_bandwidth_bytes_per_s=1e10,
    peak_flops_per_s={"float32": 1e11},
    efficiency={"matmul": ((1e6, 1.0),), "norm": ((1e6, 0.5),)},
    conditions=(
        Condition(threads=2, ranks=1, kernel_s=4e-6, efficiency={"matmul": ((1e6, 0.9),)}),
        Condition(threads=1, ranks=4, kernel_s=3e-6, efficiency={"matmul": ((1e6, 0.7),)}),
    ),
    kernels=Kernels(processors=1, kernel_s=2e-6),
)
BOX = Level(name="box", fan_out=4, alpha_s=1e-5, beta_s_per_byte=1e-9)


def timing(operation: Operation, algorithm: str, ranks: int, num_bytes: int, time_s: float) -> CollectiveTiming:
    return CollectiveTiming(
        operation=operation, algorithm=algorithm, level="box", ranks=ranks, bytes=num_bytes, time_s=time_s
    )


def cluster(*rows: CollectiveTiming) -> Cluster:
    return Cluster(name="box", num_devices=4, device=CORE, levels=(BOX,), collectives=rows)


def stage(**changes: object) -> StageWork:
    fields: dict[str, object] = {
        "pieces": {"F": (Compute("F", 1.0),), "B": (Compute("B", 2.0),), "REDUCE_GRAD": ()},
        "saved_bytes": 10,
        "held_bytes": 100,
        "workspace_bytes": 7,
    }
    return StageWork(**(fields | changes))  # type: ignore[arg-type]


def schedule(name: str, ranks: int, microbatches: int) -> Schedule:
    return add_reduction(add_communication(build(name, ranks, microbatches, 1)))


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_as_many_micro_batches_as_the_validator_counts(name: str, ranks: int) -> None:
    full_schedule = schedule(name, ranks, 8)
    work = StepWork(tuple(stage() for _ in range(ranks)))
    for rank, report in zip(peak_memory(work, full_schedule), check(full_schedule).ranks, strict=True):
        assert rank.saved_bytes == 10 * report.live_activations
        assert rank.peak_bytes == 100 + 10 * report.live_activations + 7


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe-v"])
def test_chunks_of_a_rank_are_counted_together(name: str) -> None:
    full_schedule = add_reduction(add_communication(build(name, 2, 4, 2)))
    (first, second) = peak_memory(StepWork(tuple(stage() for _ in range(4))), full_schedule)
    assert first.held_bytes == second.held_bytes == 200
    live = [report.live_activations for report in check(full_schedule).ranks]
    assert [first.saved_bytes, second.saved_bytes] == [10 * count for count in live]


def test_the_peak_is_where_workspace_and_saved_are_most_together() -> None:
    uneven = StepWork((stage(workspace_bytes=1), stage(saved_bytes=1, workspace_bytes=500)))
    first, second = peak_memory(uneven, schedule("gpipe", 2, 3))
    assert (first.peak_bytes, first.action) == (100 + 30 + 1, "0F2")
    assert (second.peak_bytes, second.action) == (100 + 3 + 500, "1F2")


SIZES = st.integers(0, 1000)
ACTION_BYTES = st.builds(ActionBytes, SIZES, SIZES, SIZES)
KINDS = ("before", "after", "F", "B", "I", "W", "RECV_F", "RECV_B", "REDUCE_GRAD")
STAGES = st.builds(
    StageWork, pieces=st.just({}), saved_bytes=SIZES, held_bytes=st.integers(2000, 3000), workspace_bytes=SIZES,
    passing_bytes=SIZES, inputs_bytes=SIZES, actions=st.dictionaries(st.sampled_from(KINDS), ACTION_BYTES),
    slot_bytes=st.sampled_from([0, 0, 7]), more_bytes=SIZES,
)  # fmt: skip
SCHEDULES = [
    training_schedule(*each)
    for each in (
        ("none", 1, 3), ("gpipe", 3, 4), ("1f1b", 3, 5), ("interleaved", 2, 4, 2), ("zb-h1", 3, 4), ("zb-h2", 2, 5),
        ("zb-v", 3, 6, 2), ("dualpipe-v", 2, 4, 2), ("message-driven", 3, 5), ("message-driven", 3, 5, 1, 3),
    )
]  # fmt: skip


@given(st.sampled_from(SCHEDULES), st.data(), st.sampled_from([1.0, 1.3]))
def test_peaks_are_those_of_actions_one_after_the_other(full: Schedule, data: st.DataObject, heap: float) -> None:
    work = StepWork(tuple(data.draw(STAGES) for _ in range(full.num_stages)), heap)
    for memory, actions in zip(peak_memory(work, full), with_most_in_flight(full), strict=True):
        parts = memory.held_bytes, memory.saved_bytes, memory.workspace_bytes, memory.action
        assert parts == highest(work, tuple(actions))


def highest(work: StepWork, actions: tuple[Action, ...]) -> tuple[int, int, int, str]:
    """The first of the highest moments of a rank: bytes that are held, saved, and workspace, and the action."""
    stages = sorted({action.stage for action in actions})
    held, live = sum(work.held_bytes(stage, actions) for stage in stages), 0
    best, received = (held, 0, 0, ""), set[tuple[int, ActionKind, int | None]]()

    def look(each: ActionBytes, text: str) -> None:
        nonlocal best
        most, others = max(each.most_bytes, each.taken_bytes), live - each.taken_bytes
        saved = min(most, max(each.taken_bytes, each.left_bytes))
        if held + others + most > sum(best[:3]):
            best = held, others + saved, most - saved, text

    def run_action(stage: int, kind: str, text: str) -> None:
        nonlocal live
        each = work.memory_of(stage, kind)
        look(each, text)
        live += each.left_bytes - each.taken_bytes

    def come(stage: int, kind: ActionKind, number: int | None) -> None:
        if stage in stages and (stage, kind, number) not in received:
            received.add((stage, kind, number))
            run_action(stage, kind.value, f"{stage}{kind.value}{number}")

    held -= sum(work.stages[stage].passing_bytes for stage in stages)
    for stage in stages:
        look(work.memory_of(stage, "before"), "prologue")
        held += work.stages[stage].passing_bytes
    sends = ActionKind.SEND_F, ActionKind.SEND_B
    for action in (each for each in actions if each.kind not in sends):
        stage, kind, number = action.stage, action.kind, action.microbatch
        receive, step = (ActionKind.RECV_F, 1) if kind is ActionKind.F else (ActionKind.RECV_B, -1)
        if kind.transfers:
            come(stage, kind, number)
        elif kind is ActionKind.REDUCE_GRAD:
            held -= work.stages[stage].passing_bytes
            run_action(stage, kind.value, str(action))
        elif kind is ActionKind.W:
            run_action(stage, kind.value, str(action))
        else:
            come(stage, receive, number)
            run_action(stage, kind.value, str(action))
            come(stage + step, receive, number)
    for stage in stages:
        run_action(stage, "after", "the end of the step")
    held -= sum(work.stages[stage].inputs_bytes for stage in stages)
    look(ActionBytes(), "update")
    return best


@pytest.mark.parametrize(
    ("limit", "verdict"), [(127, "fits"), (125, "fits"), (124, "marginal"), (117, "marginal"), (116, "does not fit")]
)
def test_the_verdict_leaves_a_margin(limit: float, verdict: str) -> None:
    """With a deviation of 5 %, 9 of 10 peaks are at most 6.6 % above the predicted."""
    peaks = peak_memory(StepWork((stage(),)), schedule("none", 1, 1))
    assert peaks[0].peak_bytes == 117
    assert memory_verdict(max(peak.peak_bytes for peak in peaks), limit, 0.05) == verdict


@given(st.floats(1e6, 1e12), st.floats(1e6, 1e12), st.floats(0.01, 1.0))
def test_the_chance_to_fit_is_that_of_a_lognormal_peak(peak: float, limit: float, deviation: float) -> None:
    expected = NormalDist(math.log(peak), deviation).cdf(math.log(limit))
    assert fit_chance(peak, limit, deviation) == pytest.approx(expected, abs=1e-9)
    assert fit_chance(peak, limit, 0.0) == (peak <= limit)


@pytest.mark.parametrize(("name", "context"), [("h100-dgx", 2.0**30), ("cpu-local", 0.0)])
@pytest.mark.parametrize("peers", [0, 3])
def test_the_room_of_tensors_is_what_surely_fits(name: str, context: float, peers: int) -> None:
    machine = load_cluster(name, software=Software(fragmentation=0.1, peer_bytes=2.0**28, spread=Spread(memory=0.05)))
    kind, memory_bytes = machine.device.kind, machine.device.memory_bytes
    taken = taken_bytes(room_of(machine, range(1), peers), machine.software, kind, peers)
    assert fit_chance(taken, memory_bytes, 0.05) == pytest.approx(0.9, abs=1e-6)
    beside = context + peers * 2.0**28 if context else 0.0
    assert taken_bytes(100.0, machine.software, kind, peers) == pytest.approx((110.0 if context else 100.0) + beside)


def test_a_rank_has_buffers_for_a_neighbour_in_each_group_and_for_all_of_its_box_in_an_all_to_all() -> None:
    assert num_peers({}, 8) == 0
    assert num_peers({"dp": 4, "cp": 1, "tp": 2, "pp": 2, "ep": 1}, 8) == 3
    assert num_peers({"dp": 4, "ep": 4}, 8) == 1 + 3
    assert num_peers({"dp": 4, "ep": 64}, 8) == 1 + 7, "messages between boxes share a buffer"
    assert num_peers({"ep": 2}, 1) == 1
    assert [most_peers(ranks) for ranks in (1, 2, 4, 6, 7, 8, 64, 10**6)] == [0, 1, 2, 2, 1, 3, 3, 3]
    for ranks in (2, 4, 8, 12):
        for dp, tp in itertools.product(range(1, ranks + 1), repeat=2):
            if ranks % (dp * tp) == 0:
                assert num_peers({"dp": dp, "tp": tp, "pp": ranks // dp // tp}, 8) <= most_peers(ranks)


def test_without_a_layout_room_is_left_for_the_most_groups() -> None:
    machine = load_cluster("h100-dgx", software=Software(peer_bytes=2.0**28))
    assert room_of(machine, range(8)) == room_of(machine, range(8), 3) < room_of(machine, range(8), 1)
    assert box_of(machine) == 8
    assert box_of(load_cluster("h100-80gb-dgx-ndr400x8", 64)) == 8


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_function_may_tell_the_cost_of_each_action() -> None:
    full_schedule = schedule("1f1b", 2, 4)

    def cost(action: Action) -> float:
        return {"F": 1.0, "B": 2.0}.get(action.kind.value, 0.0)

    assert run(full_schedule, cost) == run(full_schedule, Costs(forward=1.0, backward=2.0))


def test_stages_of_equal_work_have_the_bubble_of_the_closed_form() -> None:
    """m micro-batches of 3 s, and p - 1 more of them for filling and draining (GPipe, 1F1B)."""
    work = StepWork((stage(), stage(), stage()))
    for name in ("gpipe", "1f1b"):
        prediction = predict_step(work, schedule(name, 3, 6), Mesh.of(pp=3), cluster())
        assert prediction.step_s == pytest.approx((6 + 2) * 3.0)
        assert prediction.compute_s == 6 * 3.0


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_schedules_with_few_and_more_micro_batches_are_predicted_together(name: str) -> None:
    chunks = 2 if name == "zb-v" else 1
    work = StepWork((stage(sent_up_bytes=10**6), *(stage() for _ in range(3 * chunks - 1))))
    schedules = [training_schedule(name, 3, number, chunks) for number in (6, 9)]
    alone = [predict_step(work, each, Mesh.of(pp=3), cluster()) for each in schedules]
    assert predict_steps(work, schedules, Mesh.of(pp=3), cluster()) == alone
    order = order_of(schedules[0])
    seconds = [1.0 + number for number in range(len(order.distinct))]
    times = order.times((seconds[kind] for kind in order.kinds), 3)
    assert order.ends(seconds, [0.0] * 3) == [each[-1][1] for each in times]


def test_messages_and_collectives_are_added() -> None:
    pieces = {
        "F": (Compute("F", 1.0),),
        "B": (Compute("B", 2.0),),
        "REDUCE_GRAD": (Communicate("g", "all_reduce", "dp", 10**6),),
    }
    stage_work = stage(pieces=pieces, sent_up_bytes=10**6, sent_down_bytes=10**6)
    machine, mesh = cluster(), Mesh.of(pp=2, dp=2)
    network = Network(machine)
    prediction = predict_step(StepWork((stage_work, stage_work)), schedule("gpipe", 2, 1), mesh, machine)
    expected = 6.0 + 2 * network.send_s(10**6, 2) + network.collective_s("all_reduce", 10**6, Group(2))
    assert prediction.step_s == pytest.approx(expected)


# --- measured tables -------------------------------------------------------------------------------------------------


def test_what_was_measured_is_taken_from_the_table() -> None:
    rows = [
        timing("all_reduce", "native", 2, size, time_s) for size, time_s in ((100, 1e-3), (300, 3e-3), (1000, 5e-3))
    ]
    network = Network(cluster(*rows))
    pair = Group(2)
    assert network.collective_s("all_reduce", 50, pair) == 1e-3  # the least that any takes
    assert network.collective_s("all_reduce", 200, pair) == pytest.approx(2e-3)
    assert network.collective_s("all_reduce", 1000, pair) == 5e-3
    assert network.collective_s("all_reduce", 4000, pair) == pytest.approx(20e-3)  # at the rate of the largest


def test_the_fastest_algorithm_counts() -> None:
    rows = [timing("all_reduce", "native", 2, 64, 5e-4), timing("all_reduce", "exchange", 2, 64, 1e-4)]
    assert Network(cluster(*rows)).collective_s("all_reduce", 64, Group(2)) == 1e-4


def test_what_was_not_measured_has_the_closed_form() -> None:
    plain, measured = Network(cluster()), Network(cluster(timing("all_reduce", "native", 2, 64, 1e-4)))
    for ask in (
        lambda network: network.collective_s("all_reduce", 1e6, Group(4)),
        lambda network: network.collective_s("all_gather", 1e6, Group(2)),
        lambda network: network.collective_s("broadcast", 1e6, Group(2)),
        lambda network: network.send_s(1e6, 1),
    ):
        assert ask(plain) == ask(measured)
    assert plain.collective_s("broadcast", 1e6, Group(1)) == 0.0
    assert plain.collective_s("broadcast", 1e6, Group(4)) == pytest.approx(2 * 1e-5 + 2 * 1e6 * 1e-9, rel=0.5)


# --- conditions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "threads", "fraction", "kernel_s"),
    [(1, 1, 1.0, 2e-6), (4, 1, 0.7, 3e-6), (3, 1, 0.7, 3e-6), (1, 2, 0.9, 4e-6), (1, 8, 0.9, 4e-6)],
)
def test_the_nearest_condition_counts(ranks: int, threads: int, fraction: float, kernel_s: float) -> None:
    inner = CORE.under(ranks=ranks, threads=threads)
    assert inner.efficiency_at("matmul", 1e6) == fraction
    assert inner.efficiency_at("norm", 1e6) == 0.5  # not measured then
    assert inner.kernels is not None
    assert inner.kernels.kernel_s == kernel_s


def test_several_threads_have_the_peak_of_all() -> None:
    two = CORE.under(threads=2)
    assert two.peak("float32") == 2e11
    assert two.memory_bandwidth_bytes_per_s == 2e10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": 0}, "device.conditions[0]: 0 threads on 1 ranks\n  -> give 1 or more of both"),
        (
            {"efficiency": {"matmull": ((1.0, 0.5),)}},
            "device.conditions[0].efficiency: unknown kind of operator 'matmull'\n  -> did you mean `matmul`",
        ),
        ({"efficiency": {"matmul": ((1.0, 1.5),)}}, "device.conditions[0].efficiency.matmul: [[1.0, 1.5]] is not"),
    ],
)
def test_an_impossible_condition_is_refused(changes: dict[str, object], message: str) -> None:
    device = msgspec.structs.replace(CORE, conditions=(Condition(**changes),))  # type: ignore[arg-type]
    with pytest.raises(ClusterError) as caught:
        Cluster(name="box", num_devices=4, device=device, levels=(BOX,))
    assert str(caught.value).startswith(message)
