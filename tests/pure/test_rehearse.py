"""Rehearsed steps: the closed form is the schedule timed one by one where stages are alike, and near it elsewhere."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_model
from meshwright.cost.memory import stage_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step, step_pieces
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.planner.rehearse import rehearse, rehearsed_trace
from meshwright.schedules import pipeline, timing
from meshwright.schedules.timing import Costs

DGX = "a100-80gb-dgx-hdr200x8"
GPT = load_model("gpt3-13b")
ALIKE = msgspec.structs.replace(GPT, vocabulary=0, dropout=False)
"""Without a head; what is left of the embedding is small."""


def setup(**changes: Any) -> Setup:
    fields: dict[str, Any] = {"model": GPT, "pp": 4, "global_batch": 64, "micro_batch": 2}
    return Setup(**(fields | changes))


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 5), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)],
)
def test_the_closed_form_is_the_schedule_where_stages_are_alike(schedule: str, chunks: int) -> None:
    step_setup = setup(model=ALIKE, schedule=schedule, chunks=chunks)
    cluster = load_cluster(DGX, 4)
    rehearsed = rehearse(step_setup, cluster)
    assert rehearsed is not None
    assert rehearsed == pytest.approx(estimate_step(step_setup, cluster).step_s, rel=0.015)


def test_a_step_under_zb_h2_ends_for_all_ranks_together() -> None:
    """The closed form of ``zb-h2`` is the paper's: a rank begins the next step without waiting for the others."""
    step_setup = setup(model=ALIKE, schedule="zb-h2")
    cluster = load_cluster(DGX, 4)
    together, at_once, h1 = (
        rehearse(step_setup, cluster),
        estimate_step(step_setup, cluster).step_s,
        setup(schedule="zb-h1"),
    )
    first_s = 3 * step_pieces(step_setup, cluster).stages[1].forward.total_s
    assert together == pytest.approx(at_once + first_s, rel=0.015)
    rehearsed = rehearse(msgspec.structs.replace(h1, model=ALIKE), cluster)
    assert rehearsed is not None
    assert together is not None
    assert together <= rehearsed


@pytest.mark.parametrize("changes", [{}, {"schedule": "zb-h1"}, {"pp": 8, "dp": 2, "tp": 2}, {"pp": 1, "dp": 4}])
def test_with_embedding_and_head_the_two_are_near(changes: dict[str, Any]) -> None:
    step_setup = setup(**changes)
    cluster = load_cluster(DGX, step_setup.world_size)
    rehearsed = rehearse(step_setup, cluster)
    assert rehearsed is not None
    assert rehearsed == pytest.approx(estimate_step(step_setup, cluster).step_s, rel=0.05)


def test_pieces_add_up_to_the_estimate() -> None:
    for chunks in (1, 2):
        step_setup = setup(schedule="interleaved", chunks=chunks)
        pieces = step_pieces(step_setup, load_cluster(DGX, 4))
        assert len(pieces.stages) == 4 * chunks
        estimate = estimate_step(step_setup, load_cluster(DGX, 4))
        pace = max(sum(pieces.stages[at].total_s for at in range(rank, 4 * chunks, 4)) for rank in range(4))
        parts = estimate.compute_s + estimate.tensor_comm_s + estimate.host_s
        assert step_setup.microbatches * pace == pytest.approx(parts)
        assert pieces.after_s == pytest.approx(estimate.data_comm_s + estimate.optimizer_s)


def test_gradients_of_parameters_are_less_than_half_of_the_backward() -> None:
    stage = step_pieces(setup(), load_cluster(DGX, 4)).stages[1]
    assert 0.3 < stage.backward.weight_s / stage.backward.total_s < 0.5
    assert 1.8 < stage.backward.total_s / stage.forward.total_s < 2.4


def test_what_is_not_defined_is_not_rehearsed() -> None:
    cluster = load_cluster(DGX, 4)
    assert rehearse(setup(schedule="zb-h1", global_batch=4), cluster) is None  # fewer micro-batches than stages


def test_the_trace_is_the_schedule_and_its_memory_the_estimate() -> None:
    step_setup = setup()
    cluster = load_cluster(DGX, 4)
    trace = rehearsed_trace(step_setup, cluster)
    rehearsed = rehearse(step_setup, cluster)
    assert trace is not None
    assert rehearsed is not None
    assert trace.ranks == (0, 1, 2, 3)
    assert trace.duration_s == pytest.approx(rehearsed)
    for rank in trace.ranks:
        actions = [span.what for span in trace.of_rank(rank).spans][:-1]
        assert actions == [str(action) for action in pipeline.build("1f1b", 4, step_setup.microbatches).ranks[rank]]
        memory = stage_memory(step_setup, rank, cluster)
        if "loss" not in memory.moment:
            assert trace.peak_bytes(rank) == pytest.approx(memory.peak_bytes, rel=1e-6)


def by_stage(*costs: Costs) -> Callable[[Action], float]:
    return lambda action: costs[action.stage].of(action.kind)


def test_stages_of_a_schedule_may_cost_unlike() -> None:
    """Two stages, the second twice as slow: it never waits but for the first forward.

    rank 0   F0 F1 ..           B0 .. B1
    rank 1      F0F0 B0B0B0B0 F1F1 ...
    """
    schedule = pipeline.build("1f1b", 2, 2)
    slow = Costs(forward=2, backward=4)
    times = timing.run(schedule, by_stage(Costs(), slow))
    assert times[1] == ((1, 3), (3, 7), (7, 9), (9, 13))
    assert times[0][-1] == (13, 15)
    assert timing.run(schedule, by_stage(Costs(), Costs())) == timing.run(schedule, Costs())


def test_costs_of_stages_are_not_divided_by_chunks() -> None:
    schedule = Schedule.of("two", [[Action(0, ActionKind.F, 0), Action(1, ActionKind.F, 0)]], num_chunks=2)
    assert timing.run(schedule, by_stage(Costs(), Costs()))[0][-1] == (1, 2)
    assert timing.run(schedule, Costs())[0][-1] == (0.5, 1)
