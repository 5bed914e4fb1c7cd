"""Stages with different submeshes: what crosses is cut and put together, and training equals one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import meshwright as mw
from meshwright.cost.program import step_work
from meshwright.cost.work import Communicate, StepWork
from meshwright.ir.pipeline import ScheduleName
from meshwright.ir.placement import Shard
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.schedules.pipeline import schedule_of
from meshwright.simulate.engine import play
from meshwright.simulate.faults import Faults
from tests.distributed import oracle
from tests.distributed.pool import Ranks

SIZES = [({"dp": 2}, {"tp": 2}), ({"tp": 2}, {"dp": 2})]


def _model(vocabulary: int = 32) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=16, heads=2, vocabulary=vocabulary, sequence_length=8)).double()


def _batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(32, (8, 9), generator=generator)
    targets = text[:, 1:].clone()
    for row in range(8):
        targets[row, 8 - row % 5 :] = -100
    return {"tokens": text[:, :-1].contiguous(), "targets": targets}


def _adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]


def _train(layout: mw.Layout, vocabulary: int = 32) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = oracle.sharing_capture(("borders", vocabulary))(
        _model(vocabulary), language_model_loss, _batch(0), plan=layout, optimizer=_adamw, max_grad_norm=0.5
    )
    losses = [float(trainer.step(_batch(number))) for number in range(3)]
    losses.append(float(trainer.evaluate(_batch(9))))
    return losses, trainer.full_state_dict(all_ranks=True)


@pytest.mark.parametrize(
    ("sizes", "schedule", "chunks", "microbatches"),
    [
        (SIZES[0], "1f1b", 1, 2),
        (SIZES[1], "dualpipe-v", 2, 4),
        pytest.param(SIZES[0], "dualpipe-v", 2, 4, marks=pytest.mark.product),
        pytest.param(SIZES[1], "1f1b", 1, 2, marks=pytest.mark.product),
    ],
    ids=str,
)
def test_stages_of_other_shapes_train_as_one_process(
    ranks: Ranks, sizes: tuple[dict[str, int], ...], schedule: ScheduleName, chunks: int, microbatches: int
) -> None:
    base = mw.Layout(
        pp=2,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        stage_sizes=sizes,
        **sizes[0],  # type: ignore[arg-type]
    )
    wanted, state = _train(mw.Layout())
    for losses, parallel_state in ranks(4, _train, base):
        assert losses == pytest.approx(wanted, rel=1e-9)
        for name, value in state.items():
            assert torch.allclose(parallel_state[name], value, rtol=1e-9, atol=1e-9), name


def test_what_splits_the_sequence_keeps_a_shared_parameter_whole_too(ranks: Ranks) -> None:
    sizes = {"tp": 2}, {"dp": 2}
    layout = mw.Layout(pp=2, microbatches=2, stage_sizes=sizes, sequence_parallel=True, tp=2)
    wanted, _ = _train(mw.Layout(), vocabulary=1024)
    for losses, _ in ranks(4, _train, layout, 1024):
        assert losses == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_parameter_that_stages_of_other_sizes_share_is_whole_in_all(sizes: tuple[dict[str, int], ...]) -> None:
    """Though on equal stages it is cut: a vocabulary of 1024 pays."""
    graph = mw.capture(_model(1024), language_model_loss, _batch(0))
    alike = mw.plan(graph, layout=mw.Layout(pp=2, tp=2, microbatches=2))
    assert all(stage.storage["token_embedding.weight"] == {"tp": Shard(0)} for stage in alike.stages)
    plan = mw.plan(graph, layout=mw.Layout(pp=2, microbatches=2, stage_sizes=sizes, **sizes[0]))  # type: ignore[arg-type]
    assert [stage.storage["token_embedding.weight"] for stage in plan.stages] == [{}, {}]


# --- predicted -------------------------------------------------------------------------------------------------------


@cache
def _graph() -> mw.Graph:
    return mw.capture(_model(), language_model_loss, _batch(0))


def _work(layout: mw.Layout) -> tuple[mw.Plan, StepWork]:
    graph = _graph()
    plan = plan_layout(
        graph, layout, world_size=4, cluster=FOUR, ask=Ask(lower=PlanLowering(graph), fits_buckets=False)
    )
    return plan, step_work(PlanLowering(graph)(plan), plan, FOUR)


FOUR = mw.Cluster.load("cpu-local", 4)


@pytest.mark.parametrize(("sizes", "other"), [({"dp": 2}, "tp"), ({"tp": 2}, "dp")], ids=str)
def test_equal_stages_that_are_given_one_by_one_cost_what_equal_stages_cost(sizes: dict[str, int], other: str) -> None:
    """Though the layout itself has the other axis: only the sizes of the stages count."""
    alike = mw.Layout(pp=2, microbatches=2, **sizes)  # type: ignore[arg-type]
    given = mw.Layout(pp=2, microbatches=2, stage_sizes=(sizes, sizes), **{other: 2})  # type: ignore[arg-type]
    seconds = []
    for layout in (alike, given):
        plan, work = _work(layout)
        assert plan.uneven is bool(layout.stage_sizes)
        seconds.append(play(schedule_of(plan), work, plan.mesh, FOUR, overlap=False).step_s)
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-9)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_unlike_stages_are_simulated(sizes: tuple[dict[str, int], ...]) -> None:
    """By one rank of each kind as by all. The stage of dp=2 communicates over dp only, the stage of tp=2 over tp."""
    plan, work = _work(mw.Layout(pp=2, microbatches=2, stage_sizes=sizes, **sizes[0]))  # type: ignore[arg-type]
    folded, every = (play(schedule_of(plan), work, plan.mesh, FOUR, overlap=False, fold=fold) for fold in (True, False))
    assert folded.step_s == pytest.approx(every.step_s, rel=1e-12)
    assert len(folded.timelines) == 2
    over = [
        {piece.axis for pieces in (*stage.pieces.values(), stage.before, stage.after) for piece in pieces
         if isinstance(piece, Communicate) and piece.axis != "pp"}
        for stage in work.stages
    ]  # fmt: skip
    assert over == [set(each) for each in sizes]


@pytest.mark.parametrize("fold", [True, False])
def test_a_slow_rank_holds_up_the_ranks_of_its_own_stage(fold: bool) -> None:
    """Ranks 2 and 3 are the stage of tp=2: rank 2 waits for rank 3 in every collective."""
    plan, work = _work(mw.Layout(pp=2, microbatches=2, dp=2, stage_sizes=SIZES[0]))
    ends = []
    for faults in (None, Faults(slow={3: 100.0})):
        played = play(schedule_of(plan), work, plan.mesh, FOUR, overlap=False, fold=fold, faults=faults)
        spans = played.trace([2]).spans
        ends.append(max(span.end_s for span in spans if span.what.startswith("1B")))
    assert ends[1] > 2 * ends[0]


@pytest.mark.parametrize(("sizes", "up", "down"), [(SIZES[0], 4096, 2048), (SIZES[1], 2048, 4096)], ids=str)
def test_bytes_between_unlike_stages(sizes: tuple[dict[str, int], ...], up: int, down: int) -> None:
    """A micro-batch of 4 x 8 x 16 float64 is 4096 bytes. A rank of dp=2 sends its half to both ranks of tp=2, because
    the latency of a gather is longer than the time of 2048 bytes. A rank of tp=2 sends a half to one rank."""
    _, work = _work(mw.Layout(pp=2, microbatches=2, stage_sizes=sizes, **sizes[0]))  # type: ignore[arg-type]
    assert (work.stages[0].sent_up_bytes, work.stages[1].sent_down_bytes) == (up, down)


def test_a_plan_of_unlike_stages_has_a_prediction() -> None:
    graph = mw.capture(_model(), language_model_loss, _batch(0))
    plan = mw.plan(graph, FOUR, layout=mw.Layout(pp=2, dp=2, microbatches=2, stage_sizes=SIZES[0]))
    trace = mw.simulate(graph, FOUR, plan)
    assert {span.rank for span in trace.spans} == {0, 1, 2, 3}
    assert foretell(PlanLowering(graph), plan, FOUR).prediction.step_s == max(span.end_s for span in trace.spans)


UNEQUAL = [({"dp": 1}, {"dp": 2}, {"tp": 1}), ({"tp": 2}, {"dp": 1}, {"dp": 1}), ({"dp": 2}, {"tp": 2})]


@pytest.mark.parametrize("slow", [None, 1, 3])
@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
def test_unequal_stages_are_simulated_alike_by_one_rank_of_each_kind_and_by_all(
    sizes: tuple[dict[str, int], ...], slow: int | None
) -> None:
    plan, work = _work(mw.Layout(pp=len(sizes), microbatches=2, stage_sizes=sizes))
    faults = Faults(slow={slow: 3.0}) if slow is not None else None
    folded, every = (
        play(schedule_of(plan), work, plan.mesh, FOUR, overlap=False, fold=fold, faults=faults)
        for fold in (True, False)
    )
    assert folded.trace() == every.trace()
    assert len(every.timelines) == 4
    assert slow is not None or len(folded.timelines) == len(sizes)


def test_explain_names_the_stage_of_a_split() -> None:
    graph = mw.capture(_model(), language_model_loss, _batch(0))
    text = mw.plan(graph, layout=mw.Layout(pp=2, microbatches=2, stage_sizes=({"dp": 1}, {"dp": 2}))).explain()
    head, *lines = text.splitlines()
    assert "pp=2 of (dp=1 x tp=1), (dp=2 x tp=1), 3 ranks" in head
    splits = {line.split("  ")[1]: line.split()[-1] for line in lines if "pp rank" in line and "stage" not in line}
    assert splits["pp rank 0: token_embedding"] == "whole"
    assert splits["pp rank 1: head"] == "batch@dp"
    assert "pp rank 0: head" not in splits
