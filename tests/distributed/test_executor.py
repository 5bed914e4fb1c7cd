"""Pipelines at work: what is executed and kept, and what the trainer promises also holds with stages."""

from __future__ import annotations

import copy
import itertools
import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm.transport import stream
from meshwright.comm.transport.point_to_point import PointToPoint
from meshwright.comm.transport.progress import RankStreams
from meshwright.errors import LostRankError, NonFiniteLossError
from meshwright.ir.pipeline import ScheduleName
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.runtime.executor import Executor
from meshwright.schedules.check import check
from meshwright.schedules.pipeline import schedule_of
from tests.distributed import oracle
from tests.distributed.oracle import TOLERANCE, Batch, Subject, error_of, largest_error
from tests.distributed.pool import Ranks

PIPELINE = mw.Layout(pp=2, microbatches=4)
_ACTION = re.compile(r"\d+[A-Z]")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def twins(layers: int = 2, dropout: float = 0.0) -> tuple[Subject, Subject]:
    """The same GPT twice: for the trainer, and for eager PyTorch."""
    torch.manual_seed(3)
    subject = oracle.gpt(True, layers=layers, dropout=dropout)
    return subject, copy.deepcopy(subject)


def trainer_of(subject: Subject, layout: mw.Layout, share: str = "", **options: Any) -> mw.Trainer:
    """A trainer; those with the same ``share`` share a capture."""
    options.setdefault("optimizer", sgd)
    parallelize = oracle.sharing_capture(("executor", share)) if share else mw.parallelize
    return parallelize(subject.model, subject.loss_fn, subject.batches[0], plan=layout, **options)


def eager_step(subject: Subject, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    optimizer.zero_grad()
    loss, metrics = subject.loss_fn(subject.model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach(), metrics


# --- what is executed, and kept --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one rank did in a step, and the most (stage, micro-batch) pairs that it kept values of."""

    actions: list[str]
    in_order: bool
    live: int


def executor_of(trainer: mw.Trainer) -> Executor:
    step = trainer._last
    return step.executor


def work_of(layout: mw.Layout) -> tuple[Work, list[list[str]], list[int]]:
    """What this rank did, and what every rank should have done."""
    subject, _ = twins(layers=3)
    trainer = trainer_of(subject, layout, "three layers")
    for batch in subject.batches[:2]:
        trainer.step(batch)
    spans = [span for span in trainer.trace().spans if span.stream != "wait" and _ACTION.match(span.what)]
    in_order = all(span.start_s <= span.end_s for span in spans) and all(
        span.end_s <= other.start_s for span, other in itertools.pairwise(spans)
    )
    schedule = schedule_of(trainer.plan)
    wanted = [[str(action) for action in actions] for actions in schedule.ranks]
    done = Work([span.what for span in spans], in_order, executor_of(trainer).live_activations)
    return done, wanted, [rank.live_activations for rank in check(schedule).ranks]


class Residual(nn.Module):
    """Two products and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def live_of_residuals(layout: mw.Layout) -> tuple[int, list[int]]:
    """The number of micro-batches that this rank keeps, and that every rank keeps under the schedule. Blocks are cut
    before ``down``: a gradient that leaves a stage is also read by the gradients of its weights."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(Residual(), Residual()), torch.randn(16, 8)
    graph = mw.capture(model, mean_square, batch)
    ask = Ask(firsts=("0.down:t#0", "1.up:t#0", "1.down:t#0"))
    plan = plan_layout(graph, layout, world_size=2, cluster=mw.Cluster.load("cpu-local", 2), ask=ask)
    trainer = mw.parallelize(model, mean_square, batch, plan=plan, optimizer=sgd)
    trainer.step(batch)
    live = [rank.live_activations for rank in check(schedule_of(trainer.plan)).ranks]
    return executor_of(trainer).live_activations, live


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_gradient_that_has_left_its_stage_is_kept_for_weights_only(ranks: Ranks, schedule: ScheduleName) -> None:
    layout = mw.Layout(pp=2, microbatches=8, schedule=schedule, chunks=2)
    for rank, (activations, live) in enumerate(ranks(2, live_of_residuals, layout)):
        assert activations == live[rank]


@pytest.mark.parametrize(
    "layout",
    [
        mw.Layout(pp=2, microbatches=4, schedule="gpipe"),
        mw.Layout(pp=2, microbatches=4, schedule="1f1b"),
        mw.Layout(pp=2, microbatches=4, schedule="interleaved", chunks=2),
        mw.Layout(pp=2, microbatches=4, schedule="zb-h1"),
        mw.Layout(pp=2, microbatches=4, schedule="zb-h2"),
        mw.Layout(pp=2, microbatches=4, schedule="zb-v", chunks=2),
        mw.Layout(pp=2, microbatches=4, schedule="dualpipe-v", chunks=2),
        mw.Layout(microbatches=4),
    ],
    ids=lambda layout: f"{layout.schedule}-{layout.pp}",
)
def test_executed_actions_and_live_values_are_the_schedules(ranks: Ranks, layout: mw.Layout) -> None:
    for rank, (done, wanted, live) in enumerate(ranks(layout.pp, work_of, layout)):
        assert done.actions == wanted[rank]
        assert done.in_order
        assert done.live == live[rank]


def losses_with_dropout(layout: mw.Layout) -> tuple[list[Tensor], dict[str, Tensor]]:
    subject, _ = twins(layers=3, dropout=0.3)
    trainer = trainer_of(subject, layout, "dropout", seed=5)
    losses = [trainer.step(batch) for batch in subject.batches[:3]]
    return losses, trainer.full_state_dict()


def test_recomputation_in_a_pipeline_changes_no_bit(ranks: Ranks) -> None:
    kinds = ("none", "selective", "full")
    runs = [ranks(2, losses_with_dropout, mw.Layout(pp=2, microbatches=4, recompute=kind)) for kind in kinds]  # type: ignore[arg-type]
    (losses, state), _ = runs[0]
    assert len({float(loss) for loss in losses}) == 3
    for other in runs[1:]:
        for other_losses, _ in other:
            assert all(torch.equal(loss, expected) for loss, expected in zip(other_losses, losses, strict=True))
        again = other[0][1]
        assert again.keys() == state.keys() != set()
        assert all(torch.equal(again[name], value) for name, value in state.items())


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate_between_steps(layout: mw.Layout) -> list[float]:
    """Batches of 8, and a ragged one of 5 samples, which no number of micro-batches divides."""
    parallel, plain = twins(layers=3)
    trainer, optimizer = trainer_of(parallel, layout, "three layers"), sgd(plain.model.parameters())
    errors = []
    for batch in parallel.batches[:2]:
        loss, _ = eager_step(plain, optimizer, batch)
        errors.append(error_of(trainer.step(batch), loss))
        for part in (batch, {name: value[:5] for name, value in batch.items()}):
            plain.model.eval()
            with torch.no_grad():
                expected, metrics = plain.loss_fn(plain.model, part)
            plain.model.train()
            errors.append(error_of(trainer.evaluate(part), expected))
            errors.append(largest_error(trainer.metrics, {"loss": expected, **metrics}))
    return errors


@pytest.mark.parametrize(
    "layout",
    [
        mw.Layout(pp=2, microbatches=4, recompute="full"),
        mw.Layout(pp=2, microbatches=4, schedule="interleaved", chunks=2),
        mw.Layout(pp=2, dp=2, microbatches=2, schedule="zb-h1"),
        mw.Layout(pp=2, microbatches=4, schedule="zb-v", chunks=2),
    ],
    ids=["1f1b", "interleaved", "zb-h1 x dp2", "zb-v"],
)
def test_evaluation_in_a_pipeline_equals_eval_mode(ranks: Ranks, layout: mw.Layout) -> None:
    for errors in ranks(layout.num_ranks, evaluate_between_steps, layout):
        assert max(errors) <= TOLERANCE, errors


# --- what every trainer promises -------------------------------------------------------------------------------------


def states_after_a_step(all_ranks: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    parallel, plain = twins()
    trainer = trainer_of(parallel, PIPELINE)
    trainer.step(parallel.batches[0])
    eager_step(plain, sgd(plain.model.parameters()), plain.batches[0])
    state = trainer.full_state_dict(all_ranks=all_ranks)
    if state:
        plain.model.load_state_dict(state)  # by name, all of them
    elsewhere = any(parameter.is_meta for parameter in parallel.model.parameters())
    return state, dict(plain.model.state_dict()), elsewhere


def test_the_full_state_dict_is_whole_on_rank_0_or_everywhere(ranks: Ranks) -> None:
    on_rank_0, every = (ranks(2, states_after_a_step, all_ranks) for all_ranks in (False, True))
    assert not on_rank_0[1][0]
    reference = on_rank_0[0][0]
    assert "token_embedding.weight" in reference
    assert torch.equal(reference["head.weight"], reference["token_embedding.weight"])
    for state, expected, elsewhere in [on_rank_0[0], *every]:
        assert elsewhere, "each rank holds its stages only"
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], reference[name]) for name in reference)


def metrics_seen() -> list[tuple[list[str], list[float], list[float]]]:
    parallel, plain = twins()
    trainer = trainer_of(parallel, PIPELINE, max_grad_norm=0.1)
    optimizer = sgd(plain.model.parameters())
    seen = []
    for batch in parallel.batches[:3]:
        trainer.step(batch)
        optimizer.zero_grad()
        loss, metrics = plain.loss_fn(plain.model, batch)
        loss.backward()
        metrics = {"loss": loss, **metrics, "grad_norm": torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)}
        optimizer.step()
        names = sorted(trainer.metrics)
        errors = [error_of(trainer.metrics[name], metrics[name].detach()) for name in sorted(metrics)]
        seen.append((names, errors, [float(trainer.metrics[name]) for name in names]))
    return seen


def test_metrics_are_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, metrics_seen)
    assert [names for names, _, _ in first] == [["grad_norm", "loss", "tokens"]] * 3
    assert max(max(errors) for seen in (first, second) for _, errors, _ in seen) <= TOLERANCE
    assert [values for _, _, values in first] == [values for _, _, values in second]


def freeze_and_train(names: list[str], late: bool) -> list[float]:
    """Parameters frozen before parallelize, or after the first step; a whole stage among them."""
    parallel, plain = twins()
    losses = []

    def freeze(subject: Subject) -> None:
        for name, parameter in subject.model.named_parameters():
            if any(name.startswith(prefix) for prefix in names):
                parameter.requires_grad_(False)

    if not late:
        freeze(parallel)
    freeze(plain)
    trainer, optimizer = (
        trainer_of(parallel, PIPELINE),
        sgd([parameter for parameter in plain.model.parameters() if parameter.requires_grad]),
    )
    if late:
        freeze(parallel)
    for batch in parallel.batches[:3]:
        loss, _ = eager_step(plain, optimizer, batch)
        losses.append(error_of(trainer.step(batch), loss))
    return [*losses, largest_error(trainer.full_state_dict(all_ranks=True), plain.model.state_dict())]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after parallelize"])
@pytest.mark.parametrize(
    "names",
    [["blocks.0"], ["blocks.1.mlp", "final_norm"], ["token_embedding", "position_embedding", "blocks.0"]],
    ids=["a block of the first stage", "of the last", "the whole first stage"],
)
def test_frozen_parameters_in_a_pipeline(ranks: Ranks, names: list[str], late: bool) -> None:
    for errors in ranks(2, freeze_and_train, names, late):
        assert max(errors) <= TOLERANCE, errors


def losses_in_little_room() -> list[float]:
    """Streams that hold one message, which a rank that waits for longer than 10 s finds too few."""
    parallel, _ = twins(layers=6)
    layout = mw.Layout(pp=3, microbatches=8, schedule="interleaved", chunks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "SLOTS", 1)
        trainer = trainer_of(parallel, layout)
    for channel in executor_of(trainer)._channels.values():
        channel._lane.timeout_s = 10.0  # type: ignore[attr-defined]
    return [float(trainer.step(batch)) for batch in parallel.batches[:2]]


def test_a_pipeline_needs_no_room_for_what_is_under_way(ranks: Ranks) -> None:
    each = ranks(3, losses_in_little_room, timeout=100)
    assert each[0] == each[1] == each[2]


def wait_in_vain(transport: str) -> str:
    """Rank 1 makes the first step only; rank 0 waits for the first gradient of the second."""
    parallel, _ = twins()
    trainer = trainer_of(parallel, PIPELINE)
    trainer.step(parallel.batches[0])
    message, channels = "", executor_of(trainer)._channels
    if transport == "point to point":
        group = dist.new_group(timeout=timedelta(seconds=0.5))
        channels[1 - trainer.rank] = PointToPoint(group, 1 - trainer.rank, RankStreams())  # type: ignore[index]
    else:
        channels[1 - trainer.rank]._lane.timeout_s = 0.5  # type: ignore[attr-defined]
    dist.barrier()
    if trainer.rank == 0:
        with pytest.raises(LostRankError) as caught:
            trainer.step(parallel.batches[1])
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.parametrize("transport", ["shared memory", "point to point"])
def test_a_peer_that_stops_answering_is_named_with_stage_and_microbatch(ranks: Ranks, transport: str) -> None:
    message = ranks(2, wait_in_vain, transport)[0]
    assert message.startswith("rank 1: it has sent nothing"), message
    assert "stage 0, micro-batch 0, 0RECV_B0 is due" in message
    assert "MESHWRIGHT_TIMEOUT_S" in message


def step_into_nan() -> tuple[str, bool, float]:
    parallel, _ = twins()
    trainer = trainer_of(parallel, PIPELINE)
    trainer.step(parallel.batches[0])
    before = {name: value.detach().clone() for name, value in trainer.parameters.trainable.items()}
    batch = {**parallel.batches[1], "targets": torch.full_like(parallel.batches[1]["targets"], -100)}
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.step(batch)
    same = all(torch.equal(value, before[name]) for name, value in trainer.parameters.trainable.items())
    return str(caught.value), same, float(trainer.step(parallel.batches[2]))


def test_a_loss_that_is_no_number_stops_every_rank_and_leaves_the_parameters(ranks: Ranks) -> None:
    for message, same, after in ranks(2, step_into_nan):
        assert message.startswith("step 2: the loss became nan at step 2")
        assert same
        assert math.isfinite(after), "the trainer goes on"
