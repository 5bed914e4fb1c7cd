"""The ledger: predicted beside measured by rank and part, what was off most, and which constant would explain it."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import TraceError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.copies import KEPT, STAGED, MemoryPart
from meshwright.ir.data_use import DataUse
from meshwright.ir.device import Device
from meshwright.ir.interval import interval
from meshwright.ir.layout import Layout
from meshwright.ir.ledger import Ledger
from meshwright.ir.level import Level
from meshwright.ir.make_ledger import make_ledger
from meshwright.ir.plan import Alternative, Note, Plan, Prediction, Stage
from meshwright.ir.trace import MemorySample, Span, Trace, TraceSource

MIB = 2**20
BOX = Cluster(
    name="box",
    num_devices=4,
    device=Device(
        name="core", kind="cpu", memory_bytes=2**32, memory_bandwidth_bytes_per_s=1e10,
        peak_flops_per_s={"float32": 1e11},
    ),
    levels=(
        Level(name="socket", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1e-10, origin="measured"),
        Level(name="box", fan_out=2, alpha_s=2e-5, beta_s_per_byte=2e-10),
    ),
)  # fmt: skip


def plan_of(layout: Layout) -> Plan:
    return Plan(
        model="GPT-S", graph_fingerprint="f" * 16, batch_size=8, cluster="box", mesh=layout.mesh(),
        stages=(Stage(strategies={}, storage={}),) * layout.pp, layout=layout,
    )  # fmt: skip


DP = plan_of(Layout(dp=2))
PP = plan_of(Layout(pp=2))


def step(
    plan: Plan,
    times: Mapping[int, tuple[float, float, float]],
    source: TraceSource = "measured",
    peaks: Mapping[int, int] | None = None,
) -> Trace:
    """A step in which each rank computes, then waits for a collective, then for a message, for so many seconds."""
    spans = []
    for rank, (compute_s, exposed_s, bubble_s) in times.items():
        spans += [
            Span(rank, "compute", "forward", 0.0, compute_s),
            Span(rank, "wait", "all_reduce dp", compute_s, compute_s + exposed_s),
            Span(rank, "wait", f"{rank}RECV_B0", compute_s + exposed_s, compute_s + exposed_s + bubble_s),
        ]
    samples = tuple(MemorySample(rank, 0.0, size) for rank, size in (peaks or {}).items())
    return Trace(source=source, plan=plan.digest, spans=tuple(spans), memory=samples)


def ledger(
    predicted: Mapping[int, tuple[float, float, float]],
    *measured: Mapping[int, tuple[float, float, float]],
    plan: Plan = DP,
    peaks: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {}),
) -> Ledger:
    before = step(plan, predicted, "simulated", peaks[0])
    return make_ledger(plan, before, [step(plan, times, peaks=peaks[1]) for times in measured], BOX)


AS_PREDICTED = {0: (8.0, 2.0, 0.0), 1: (8.0, 2.0, 0.0)}


def test_measured_times_are_medians_over_steps_by_rank_and_part() -> None:
    run_ledger = ledger(
        AS_PREDICTED,
        {0: (8.0, 2.0, 0.0), 1: (9.0, 1.0, 0.0)},
        {0: (10.0, 3.0, 0.0), 1: (12.0, 1.0, 0.0)},
        {0: (9.0, 9.0, 0.0), 1: (10.0, 8.0, 0.0)},
    )
    assert run_ledger.num_steps == 3
    assert [rank.measured.compute_s for rank in run_ledger.ranks] == [9.0, 10.0]
    assert [rank.measured.exposed_s for rank in run_ledger.ranks] == [3.0, 1.0]
    assert run_ledger.measured_step_s == 13.0
    assert run_ledger.step_ratio == 10.0 / 13.0


def test_the_table_lays_them_side_by_side_and_ends_in_words() -> None:
    assert BOX.constants == "device given, box given, socket measured"
    run_ledger = ledger(
        AS_PREDICTED, {0: (10.0, 2.5, 0.0), 1: (10.0, 2.5, 0.0)}, peaks=({0: 3 * MIB, 1: 3 * MIB}, {0: 3 * MIB})
    )
    assert run_ledger.table() == "\n".join([
        f"GPT-S as dp2 on box ({BOX.constants}): predicted (simulated) beside 1 step (measured)",
        "  rank  part                    predicted   measured pred/meas",
        "  0     computing                     8 s       10 s      0.80",
        "        exposed communication         2 s      2.5 s      0.80",
        "        bubble                       0 us       0 us         -",
        "        step                         10 s     12.5 s      0.80",
        "        peak memory                 3 MiB      3 MiB      1.00",
        "  1     computing                     8 s       10 s      0.80",
        "        exposed communication         2 s      2.5 s      0.80",
        "        bubble                       0 us       0 us         -",
        "        step                         10 s     12.5 s      0.80",
        "        peak memory                 3 MiB      0 MiB         -",
        "in 80 % of runs a step takes 8.31 s to 12 s (software unknown): this run is outside",
        "and the highest peak is 2.64 MiB to 3.41 MiB: this run is inside",
        "off most: computing on rank 0, 8 s predicted and 10 s measured: +16.0% of the step",
        run_ledger.explanation,
    ])  # fmt: skip
    assert run_ledger.explanation == (
        "The device's efficiency would explain it: computing takes 1.25 times as long as its curves say, over all "
        "ranks. Memory agrees within 10%."
    )


def test_copies_of_the_state_are_named_parts_of_a_peak() -> None:
    parts = (
        MemoryPart(what=KEPT, predicted_bytes=2 * MIB, measured_bytes=2 * MIB),
        MemoryPart(what=STAGED, predicted_bytes=MIB, measured_bytes=0),
    )
    before = step(DP, AS_PREDICTED, "simulated", {0: 8 * MIB, 1: 5 * MIB})
    after = step(DP, AS_PREDICTED, peaks={0: 7 * MIB, 1: 5 * MIB})
    made_ledger = make_ledger(DP, before, [after], BOX, parts={0: parts})
    lines = [line for line in made_ledger.table().splitlines() if line.startswith(("        peak", "        of it"))]
    assert lines == [
        "        peak memory                 8 MiB      7 MiB      1.14",
        "        of it copies in memory      2 MiB      2 MiB      1.00",
        "        of it staging of saves      1 MiB      0 MiB         -",
        "        peak memory                 5 MiB      5 MiB      1.00",
    ]
    assert files.decode(files.encode_json(made_ledger), Ledger, where="test") == made_ledger


def test_steps_and_peaks_have_intervals_of_80_percent() -> None:
    run_ledger = ledger(AS_PREDICTED, AS_PREDICTED, peaks=({0: 3 * MIB, 1: 5 * MIB}, {0: 3 * MIB, 1: 9 * MIB}))
    intervals = {(row.rank, row.what): row.interval for row in run_ledger.rows() if row.interval is not None}
    assert intervals == {
        (rank, what): interval(value, deviation)
        for rank, peak in ((0, 3 * MIB), (1, 5 * MIB))
        for what, value, deviation in (
            ("step", 10.0, run_ledger.deviation),
            ("peak memory", peak, BOX.software.spread.memory),
        )
    }
    assert run_ledger.interval_bytes == intervals[1, "peak memory"]
    assert run_ledger.highest_bytes == (5 * MIB, 9 * MIB)
    assert "and the highest peak is 4.4 MiB to 5.68 MiB: this run is outside" in run_ledger.table()
    silent = ledger(AS_PREDICTED, AS_PREDICTED)
    assert silent.interval_bytes is None
    assert "highest peak" not in silent.table()
    assert all(row.interval is None for row in silent.rows() if row.what == "peak memory")


def test_what_agrees_is_said_to_agree() -> None:
    assert ledger(AS_PREDICTED, AS_PREDICTED).explanation == (
        "Prediction and measurement agree: no part is off by more than 5% of the step. Memory was not sampled."
    )


def test_one_slow_rank_is_no_matter_of_a_constant() -> None:
    run_ledger = ledger(AS_PREDICTED, {0: (8.0, 6.0, 0.0), 1: (12.0, 2.0, 0.0)})
    assert (run_ledger.worst.part, run_ledger.worst.rank) == ("computing", 1)
    assert (
        "Rank 1 computes for 1.50 times as long as predicted, the others for 1.00: no constant"
        in run_ledger.explanation
    )


def test_waiting_for_a_late_rank_is_not_blamed_on_the_network() -> None:
    run_ledger = ledger(AS_PREDICTED, {0: (8.0, 7.0, 0.0), 1: (12.0, 2.0, 1.0)})
    assert (run_ledger.worst.part, run_ledger.worst.rank) == ("exposed communication", 0)
    assert (
        "5 s are waiting for rank 1, which came later to collectives and computed for 1.50 times as long"
        in run_ledger.explanation
    )
    assert run_ledger.communication_factor == 1.0


def test_slow_communication_is_blamed_on_the_levels_that_the_ranks_cross() -> None:
    slow = {0: (8.0, 6.0, 0.0), 1: (8.0, 6.0, 0.0)}
    run_ledger = ledger(AS_PREDICTED, slow)
    assert run_ledger.levels == ("socket",)
    assert (
        "alpha and beta of the level socket would explain it: communication takes 3.00 times" in run_ledger.explanation
    )
    four = range(4)
    predicted, measured = dict.fromkeys(four, (8.0, 2.0, 0.0)), dict.fromkeys(four, (8.0, 6.0, 0.0))
    more = ledger(predicted, measured, plan=plan_of(Layout(dp=4)))
    assert more.levels == ("socket", "box")
    assert "of the levels socket and box would explain it" in more.explanation


def test_communication_that_nobody_foretold_gives_no_constant() -> None:
    run_ledger = ledger({0: (8.0, 0.0, 0.0), 1: (8.0, 0.0, 0.0)}, {0: (8.0, 4.0, 0.0), 1: (8.0, 4.0, 0.0)})
    assert run_ledger.explanation.startswith("Too little communication was predicted there, or measured")


def test_a_bubble_follows_from_the_stage_whose_computing_was_off() -> None:
    run_ledger = ledger({0: (8.0, 0.0, 2.0), 1: (8.0, 0.0, 2.0)}, {0: (8.0, 0.0, 7.0), 1: (12.0, 0.0, 2.0)}, plan=PP)
    assert (run_ledger.worst.part, run_ledger.worst.rank) == ("bubble", 0)
    assert "the computing of stage 1, which takes 1.50 times as long as predicted" in run_ledger.explanation


def test_a_bubble_follows_from_waiting_where_computing_was_as_predicted() -> None:
    run_ledger = ledger({0: (8.0, 0.0, 2.0), 1: (8.0, 0.0, 2.0)}, {0: (8.0, 0.0, 7.0), 1: (8.0, 0.0, 7.0)}, plan=PP)
    assert "It follows from waiting" in run_ledger.explanation
    assert "messages between stages (socket)" in run_ledger.explanation
    alone = ledger(AS_PREDICTED, {0: (8.0, 2.0, 3.0), 1: (8.0, 2.0, 3.0)})
    assert alone.explanation.startswith("Nothing is noted of that time")


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (150, "rank 0 holds 150 MiB at its peak, 1.50 times the 100 MiB predicted; workspace of its operators"),
        (50, "rank 0 holds 50 MiB at its peak, 0.50 times the 100 MiB predicted; saved activations that are counted"),
        (105, "Memory agrees within 10%."),
    ],
)
def test_memory_is_explained_by_activations_or_workspace(measured: int, words: str) -> None:
    peaks = ({0: 100 * MIB, 1: 100 * MIB}, {0: measured * MIB, 1: 100 * MIB})
    assert words in ledger(AS_PREDICTED, AS_PREDICTED, peaks=peaks).explanation


_STEPS = st.fixed_dictionaries(dict.fromkeys((0, 1), st.tuples(*[st.floats(0.1, 10.0)] * 3)))


@given(_STEPS, st.lists(_STEPS, min_size=1, max_size=4))
def test_a_ledger_is_read_as_it_was_written(
    predicted: dict[int, tuple[float, float, float]], measured: list[dict[int, tuple[float, float, float]]]
) -> None:
    run_ledger = ledger(predicted, *measured)
    assert files.decode(files.encode_json(run_ledger), Ledger, where="ledger.json") == run_ledger


@given(_STEPS, _STEPS)
def test_nothing_is_off_more_than_the_worst(
    predicted: dict[int, tuple[float, float, float]], measured: dict[int, tuple[float, float, float]]
) -> None:
    run_ledger = ledger(predicted, measured)
    differences = [
        abs(row.predicted - row.measured) for row in run_ledger.rows() if row.what not in ("step", "peak memory")
    ]
    assert abs(run_ledger.worst.share) * run_ledger.measured_step_s == pytest.approx(max(differences))


def test_a_plan_is_the_same_whatever_was_predicted_for_it() -> None:
    other = msgspec.structs.replace(
        DP, prediction=Prediction(step_s=1.0, peak_memory_bytes=1), notes=(Note(module="m", split="s", reason="r"),),
        alternatives=(Alternative(layout="tp2", step_s=2.0, peak_memory_bytes=1, why="slower"),),
    )  # fmt: skip
    assert other.digest == DP.digest
    assert files.decode(files.encode_json(other), Plan, where="plan.json").digest == DP.digest
    assert len({plan.digest for plan in (DP, PP, msgspec.structs.replace(DP, microbatches=2))}) == 3


def test_traces_of_other_plans_sources_and_ranks_are_refused() -> None:
    predicted, measured = step(DP, AS_PREDICTED, "simulated"), step(DP, AS_PREDICTED)

    def refusal(before: Trace, *after: Trace) -> str:
        with pytest.raises(TraceError) as caught:
            make_ledger(DP, before, after, BOX)
        return str(caught.value)

    other = step(plan_of(Layout(dp=2, schedule="gpipe")), AS_PREDICTED)
    assert refusal(predicted, measured, other) == (
        f"measured step 1: the trace is of plan {other.plan}, the run's plan is {DP.digest}\n"
        "  -> take the traces of this run"
    )
    assert "predicted: the trace is of no plan" in refusal(msgspec.structs.replace(predicted, plan=""), measured)
    assert "predicted: the trace is measured\n  -> one that is simulated or emulated" in refusal(measured, measured)
    assert "measured step 0: the trace is simulated" in refusal(predicted, predicted)
    assert "measured step 0: the trace has 1 ranks (1), the plan 2" in refusal(predicted, measured.of_rank(1))
    assert "ledger: no step was measured" in refusal(predicted)
    empty = step(DP, {0: (0.0, 0.0, 0.0), 1: (0.0, 0.0, 0.0)})
    assert "the step takes no time" in refusal(predicted, empty)


def test_memory_is_counted_above_what_a_process_held_before() -> None:
    trace = step(DP, AS_PREDICTED, peaks={0: 500, 1: 300}).above({0: 200, 1: 400})
    assert [trace.peak_bytes(rank) for rank in (0, 1)] == [300, 0]


def test_waiting_for_data_is_a_part_of_its_own_and_says_what_the_disk_lacks() -> None:
    times = {0: (1.0, 0.0, 0.0), 1: (1.0, 0.0, 0.0)}
    late = step(DP, times)
    waits = tuple(Span(rank, "data", "waiting for data", -0.5, 0.0) for rank in times)
    waited = msgspec.structs.replace(late, spans=(*waits, *late.spans))
    run_ledger = make_ledger(DP, step(DP, times, "simulated"), [waited], BOX)
    assert [(row.rank, row.measured) for row in run_ledger.rows() if row.what == "waiting for data"] == [
        (0, 0.5),
        (1, 0.5),
    ]
    assert [row.measured for row in run_ledger.rows() if row.what == "step"] == [1.5, 1.5]
    assert run_ledger.worst.part == "waiting for data"
    assert "The data lie in memory" in run_ledger.explanation
    use = DataUse(
        data="files", num_ranks=2, num_steps=9, fetches={"own memory": 30, "file system": 10}, misses=10,
        predicted_misses=10, belady_misses=9, lru_misses=35, waited_s=0.5, predicted_waited_s=0.4,
        file_bytes_per_s=2.0**20, needed_bytes_per_s=2.0**21, num_bad=2, bad=("a.png",),
    )  # fmt: skip
    with_data = msgspec.structs.replace(run_ledger, data=use)
    assert "need 2 MiB/s from the file system, which gives 1 MiB/s" in with_data.explanation
    for text in ("own memory", "75.0%", "(Belady)", "400 ms", "500 ms"):
        assert text in with_data.table()
    assert ("skipped", "2 fetches of bad samples: a.png") in use.facts()
    assert not [row for row in ledger(times, times).rows() if row.what == "waiting for data"]
