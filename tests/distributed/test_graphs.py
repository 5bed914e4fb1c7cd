"""Phases as graphs of kernels, on recorded operators: the losses of one process, and nothing that is stale or free."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, fx, nn

import meshwright as mw
from meshwright.comm.groups import from_rank_0
from meshwright.errors import GraphError, NonFiniteLossError
from meshwright.ir.files import decode, encode_json
from meshwright.ir.schedule import ActionList
from meshwright.lower.static import moving_parts
from meshwright.models import MLP, classification_loss
from meshwright.planner.explicit import adapt_plan
from meshwright.runtime.device import CPU
from meshwright.runtime.trainer import Trainer
from tests.distributed import oracle
from tests.distributed.pool import Ranks
from tests.distributed.recorded_graphs import RecordedGraphs, RecordedKind

STEPS = 5
LAYOUTS = {
    "one process": mw.Layout(),
    "micro-batches": mw.Layout(microbatches=4),
    "recompute": mw.Layout(microbatches=2, recompute="full"),
    "dp2": mw.Layout(dp=2),
    "dp2, recompute": mw.Layout(dp=2, recompute="full"),
    "dp2, zero 3": mw.Layout(dp=2, zero=3),
    "dp2, zero 2, m2": mw.Layout(dp=2, zero=2, microbatches=2),
    "tp2": mw.Layout(tp=2, microbatches=2),
    "1f1b": mw.Layout(pp=2, microbatches=4),
    "gpipe": mw.Layout(pp=2, microbatches=4, schedule="gpipe"),
    "zb-h1": mw.Layout(pp=2, microbatches=4, schedule="zb-h1"),
    "zb-h1 of 3": mw.Layout(pp=3, microbatches=4, schedule="zb-h1"),
    "interleaved": mw.Layout(pp=2, microbatches=4, chunks=2, schedule="interleaved"),
    "zb-v": mw.Layout(pp=2, microbatches=4, chunks=2, schedule="zb-v"),
    "dualpipe-v": mw.Layout(pp=2, microbatches=4, chunks=2, schedule="dualpipe-v"),
    "1 + 2": mw.Layout(pp=2, stage_sizes=({"dp": 1}, {"dp": 2}), microbatches=4),
    "2 + 1, zero 2": mw.Layout(pp=2, stage_sizes=({"dp": 2}, {"tp": 1}), microbatches=2, zero=2),
}


class WithDropout(nn.Module):
    """Masks of activations, and of a part that only the last dim tells apart from others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.first(inputs).relu(), 0.3)
        heads = hidden.unflatten(-1, (2, 2, 4)).transpose(-3, -2)
        hidden = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).flatten(1)
        result: Tensor = self.last(hidden + 0.1 * torch.rand_like(hidden))
        return result


class WithScale(nn.Module):
    """A value of parameters alone is used in two stages: only weights' gradients read the gradient that comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), *[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 4)])
        self.scale = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third, fourth, fifth, last = self.layers
        hidden = third(second(first(inputs).tanh()).tanh()).tanh()
        scale = self.scale.exp()
        hidden = fifth(fourth(hidden * scale).tanh()).tanh()
        result: Tensor = last(hidden * scale)
        return result


def subject(model: str) -> oracle.Subject:
    torch.manual_seed(7)
    if model in oracle.MODELS and model != "MLP":
        original = oracle.MODELS[model](True)
        return oracle.Subject(original.model, original.loss_fn, (original.batches * 2)[:STEPS])
    batches: list[oracle.Batch] = [
        {"inputs": torch.randn(16, 6, dtype=torch.float64), "label": torch.randint(4, (16,))} for _ in range(STEPS)
    ]
    own: dict[str, Callable[[], nn.Module]] = {"dropout": WithDropout, "scale": WithScale}
    made_model = own[model]() if model in own else MLP((6, *[8] * 9, 4))
    return oracle.Subject(made_model.double(), classification_loss, batches)


def train(model: str, name: str) -> tuple[float, int, int, int]:
    """Train with graphs. The largest error on rank 0, and this rank's captures, pools and replays."""
    key, parallel, layout = ("graphs", model), subject(model), LAYOUTS[name]
    before = {each: value.clone() for each, value in parallel.model.state_dict().items()}
    graph = oracle.captured(key, parallel).graph

    def planned() -> bytes:
        plan = mw.plan(graph, devices=layout.num_ranks, layout=layout)
        return encode_json(msgspec.structs.replace(plan, graphs=True))

    plan, kind = decode(from_rank_0(planned), mw.Plan, where="plan of rank 0"), RecordedKind()
    settings = oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM
    run, trainer = oracle.in_parallel(parallel, plan, *settings, partial(oracle.sharing_capture(key), kind=kind))
    serial = oracle.reference(subject(model), *settings, key=key)
    error = oracle.compared(before, serial, run, trainer).error if trainer.rank == 0 else 0.0
    return error, kind.recorded.captures, kind.recorded.pools, kind.recorded.replays


OF_OTHERS = ("one process", "recompute", "dp2", "gpipe", "zb-h1", "zb-h1 of 3", "interleaved")
"""Layouts whose techniques other layouts have: ``dp2, recompute`` and ``zb-v``; "dropout, whole" has one process."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.product if name in OF_OTHERS else ()) for name in LAYOUTS]
)
def test_losses_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    layout = LAYOUTS[name]
    for error, captures, pools, replays in ranks(layout.num_ranks, train, "MLP", name, timeout=60):
        assert error <= oracle.TOLERANCE
        assert captures >= pools >= 1
        assert replays >= captures * (STEPS - 1) / max(1, pools)


def test_a_phase_may_be_the_first_to_read_what_came_long_ago(ranks: Ranks) -> None:
    for error, *_ in ranks(3, train, "scale", "zb-h1 of 3", timeout=60):
        assert error <= oracle.TOLERANCE


def test_slots_that_share_a_pool_spoil_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As forwards of two micro-batches follow each other, a pool for all would be used out of order."""
    layout, shared = mw.Layout(microbatches=4), RecordedGraphs().pool()

    def trained(kind: RecordedKind) -> Trainer:
        trainer = a_trainer(layout, kind)
        schedule = trainer.executor.schedule
        assert schedule.num_microbatches == 4
        computing = ActionList.from_text("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3")
        ends = (each for each in schedule.ranks[0] if not each.kind.computes)
        trainer.executor._actions = (*computing, *ends)
        for batch in subject("MLP").batches:
            trainer.step(batch)
        return trainer

    expected = trained(RecordedKind())
    assert bool(expected.metrics["loss"].isfinite())
    monkeypatch.setattr(RecordedGraphs, "pool", lambda self: shared)
    with pytest.raises(NonFiniteLossError):
        trained(RecordedKind())


def a_trainer(layout: mw.Layout, kind: RecordedKind | None = None, model: str = "MLP", **change: Any) -> Trainer:
    """A trainer in this process; with ``kind``, its phases are graphs."""
    training = subject(model)
    captured = oracle.captured(("graphs", model), training)
    plan = msgspec.structs.replace(mw.plan(captured.graph, layout=layout), graphs=kind is not None, **change)
    return Trainer(
        training.model, training.loss_fn, captured, plan, optimizer=oracle.OPTIMIZERS["SGD"], max_grad_norm=None,
        seed=3, device=CPU, replan=adapt_plan, kind=kind,
    )  # fmt: skip


def losses(trainer: Trainer, batches: list[oracle.Batch]) -> list[float]:
    return [float(trainer.step(batch)) for batch in batches]


MODELS = {
    "GPT": (mw.Layout(microbatches=2), "GPT"),
    "dropout": (mw.Layout(microbatches=2), "dropout"),
    "dropout, whole": (mw.Layout(), "dropout"),
    "batch norm": (mw.Layout(microbatches=2, batch_statistics="microbatch"), "ResNet"),
    "batch norm, recompute": (mw.Layout(microbatches=2, batch_statistics="microbatch", recompute="full"), "ResNet"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_states_and_random_numbers_do_the_same_as_without_graphs(name: str) -> None:
    layout, model = MODELS[name]
    kind, batches = RecordedKind(), subject(model).batches
    with_graphs, without = a_trainer(layout, kind, model), a_trainer(layout, None, model)
    assert losses(with_graphs, batches) == pytest.approx(losses(without, batches), rel=1e-12)
    assert kind.recorded.replays > 0
    state = without.full_state_dict()
    for key, value in with_graphs.full_state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=1e-12, atol=1e-12)


def test_a_smaller_batch_runs_without_graphs_and_leaves_those_of_the_others() -> None:
    kind, batches = RecordedKind(), subject("MLP").batches
    trainer, plain = a_trainer(mw.Layout(microbatches=2), kind), a_trainer(mw.Layout(microbatches=2))
    small = {key: value[:8] for key, value in batches[0].items()}
    run = [*batches[:3], small, *batches[3:]]
    assert losses(trainer, run) == pytest.approx(losses(plain, run), rel=1e-12)
    once = kind.recorded.captures
    assert once == 3, "prologue, forward and backward"
    run = [small, small, small]
    assert losses(trainer, run) == pytest.approx(losses(plain, run), rel=1e-12)
    assert kind.recorded.captures == 2 * once, "another shape that stays is captured"
    assert losses(trainer, batches[:2]) == pytest.approx(losses(plain, batches[:2]), rel=1e-12)
    assert kind.recorded.captures == 3 * once, "and those of the first shape were freed for it"


def test_an_evaluation_has_no_graphs() -> None:
    kind, batch = RecordedKind(), subject("MLP").batches[0]
    trainer = a_trainer(mw.Layout(), kind)
    losses(trainer, [batch] * 3)
    replays = kind.recorded.replays
    for _ in range(3):
        trainer.evaluate(batch)
    assert kind.recorded.replays == replays


def test_parameters_that_moved_are_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    kind, batches = RecordedKind(), subject("MLP").batches
    trainer, plain = a_trainer(mw.Layout(), kind), a_trainer(mw.Layout())
    with caplog.at_level("INFO", "meshwright"):
        for step, batch in enumerate(batches):
            if step == 3:
                for value in trainer.parameters.own.values():
                    value.data = value.data.clone()
            assert losses(trainer, [batch]) == pytest.approx(losses(plain, [batch]), rel=1e-12)
    assert kind.recorded.captures == 2
    assert "parameters have moved" in caplog.text


def test_a_host_that_reads_a_value_is_refused_by_the_phase_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, batch = a_trainer(mw.Layout(microbatches=2), RecordedKind()), subject("MLP").batches[0]
    trainer.step(batch)
    graphs = trainer.executor.stages[0].graphs
    assert graphs is not None
    forward = trainer.executor.stages[0].functions["forward"]
    monkeypatch.setitem(
        trainer.executor.stages[0].functions, "forward", lambda values: [values[0].sum().item(), *forward(values)][1:]
    )
    with pytest.raises(GraphError) as caught:
        trainer.step(batch)
    assert caught.value.where == "stage 0, forward"
    assert "the host reads a value" in str(caught.value)


def test_what_cannot_be_captured_is_named() -> None:
    graph = fx.Graph()
    values = graph.placeholder("values")
    mask = graph.call_function(torch.ops.aten.gt.Scalar, (values, 0))
    mask.meta["val"] = torch.zeros(3, dtype=torch.bool)
    graph.output(graph.call_function(torch.ops.aten.index.Tensor, (values, [mask])))
    assert moving_parts(graph, "key") == ("the shape of aten.index.Tensor depends on values",)
