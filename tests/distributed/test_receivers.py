"""What crosses between stages is received once per box and gathered inside, as the plan says: by all ranks, in float64,
and with the bytes that the plan is costed with."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.comm.transport.base import Channel
from meshwright.cost.program import step_work
from meshwright.errors import PlanError
from meshwright.ir.cluster import Cluster
from meshwright.ir.files import decode, encode_json
from meshwright.ir.graph import Graph
from meshwright.ir.level import Level
from meshwright.ir.plan_check import check_fits
from meshwright.ir.program import Program
from meshwright.ir.schedule import ActionKind
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.explicit import adapt_plan
from meshwright.schedules.pipeline import schedule_of
from meshwright.simulate.engine import play
from tests.distributed import oracle
from tests.distributed.oracle import LargestErrors, Subject
from tests.distributed.pool import Ranks

BOX, SAMPLES, LENGTH, WIDTH, MICROBATCHES = 2, 12, 6, 16, 2
WHOLE = SAMPLES // MICROBATCHES * LENGTH * WIDTH * 8
"""The bytes of the activations of a micro-batch, which cross between the stages. So do as many bytes of gradients."""


def boxes(count: int) -> Cluster:
    """Boxes of two ranks behind a slow network."""
    device = load_cluster("cpu-local", BOX).device
    inside = Level(name="box", fan_out=BOX, alpha_s=1e-7, beta_s_per_byte=1e-10)
    between = Level(name="network", fan_out=count, alpha_s=1e-7, beta_s_per_byte=1e-8)
    return Cluster(name="boxes", num_devices=BOX * count, device=device, levels=(inside, between))


def subject_of() -> Subject:
    torch.manual_seed(7)
    config = GPTConfig(layers=2, width=WIDTH, heads=4, vocabulary=64, sequence_length=LENGTH, dropout=0.0)
    batches = []
    for _ in range(2):
        tokens = torch.randint(64, (SAMPLES, LENGTH + 1))
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
    return Subject(GPT(config).double(), language_model_loss, batches)


class Counted:
    """A channel that counts the bytes that are sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.sent_bytes = channel, 0

    def send(self, tensor: torch.Tensor) -> Any:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        return self._channel.send(tensor)

    def receive(self, into: torch.Tensor, label: str = "") -> Any:
        return self._channel.receive(into, label)


class Trained(NamedTuple):
    errors: LargestErrors
    sent: dict[int, int]
    """The bytes of a micro-batch that the rank sent to each other rank."""


def train(text: bytes) -> Trained:
    serial, parallel, key = subject_of(), subject_of(), ("receivers",)
    before = {name: value.clone() for name, value in serial.model.state_dict().items()}
    optimizer, plan = oracle.OPTIMIZERS["AdamW"], decode(text, mw.Plan, where="plan of the test")
    expected = oracle.reference(serial, optimizer, key=key)
    counted: dict[int, Counted] = {}

    def parallelize(*given: Any, **options: Any) -> mw.Trainer:
        trainer = oracle.sharing_capture(key)(*given, **options)
        counted.update((peer, Counted(channel)) for peer, channel in trainer.executor._channels.items())
        trainer.executor._channels = counted
        return trainer

    run, trainer = oracle.in_parallel(parallel, plan, optimizer, None, parallelize)
    times = MICROBATCHES * len(parallel.batches)
    sent = {peer: channel.sent_bytes // times for peer, channel in counted.items()}
    return Trained(oracle.compared(before, expected, run, trainer), sent)


@cache
def graph_of() -> Graph:
    subject = subject_of()
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


@cache
def unequal() -> mw.Plan:
    """Ranks 0 and 1 send to ranks 2 to 5, which hold equal activations and lie in two boxes."""
    layout = mw.Layout(pp=2, stage_sizes=({"dp": 2}, {"tp": 4}), microbatches=MICROBATCHES)
    return mw.plan(graph_of(), boxes(3), devices=6, layout=layout)


@cache
def equal() -> mw.Plan:
    """Two boxes, whose ranks hold equal activations."""
    return mw.plan(graph_of(), boxes(2), devices=4, layout=mw.Layout(pp=2, tp=2, microbatches=MICROBATCHES))


@cache
def lowered() -> tuple[Program, ...]:
    """The programs of the unequal stages, which are the same for all receivers."""
    return PlanLowering(graph_of())(unequal())


def with_receivers(plan: mw.Plan, receivers: tuple[dict[ActionKind, tuple[int, ...]], ...]) -> mw.Plan:
    stages = tuple(
        msgspec.structs.replace(stage, receivers=own) for stage, own in zip(plan.stages, receivers, strict=True)
    )
    return msgspec.structs.replace(plan, stages=stages)


def between_boxes(trained: list[Trained]) -> int:
    """The bytes of a micro-batch that all ranks sent to ranks of other boxes."""
    return sum(
        size for rank, each in enumerate(trained) for peer, size in each.sent.items() if rank // BOX != peer // BOX
    )


UP, DOWN = ActionKind.RECV_F, ActionKind.RECV_B


@pytest.mark.parametrize(
    ("receivers", "up"),
    [
        ((2, 2), 2 * WHOLE),  # once per box
        ((4,), WHOLE + 2 * WHOLE),  # once, and every rank sends its quarter to the two ranks of the other box
        ((1, 1, 1, 1), 4 * WHOLE),
    ],
    ids=str,
)
def test_bytes_between_boxes(ranks: Ranks, receivers: tuple[int, ...], up: int) -> None:
    plan = with_receivers(unequal(), ({}, {UP: receivers}))
    trained = ranks(6, train, encode_json(plan))
    for each in trained:
        assert each.errors.error <= oracle.TOLERANCE, each.errors
        assert each.errors.moved > 1e-3, "the parameters were trained"
    assert between_boxes(trained) == up + WHOLE
    (stage, _) = step_work(lowered(), plan, boxes(3)).stages
    assert stage.sent_up_bytes == sum(trained[0].sent.values()), "what the plan is costed with"


def test_equal_stages_receive_once_per_box(ranks: Ranks) -> None:
    """Both ranks of a stage hold the activations: each sends a half to its partner, and the two partners exchange."""
    plan = equal()
    assert [stage.receivers for stage in plan.stages] == [{DOWN: (2,)}, {UP: (2,)}], plan.explain()
    assert "from stage 0 to stage 1: equal values are received once per 2 ranks, which gather" in plan.explain()
    trained = ranks(4, train, encode_json(plan))
    for each in trained:
        assert each.errors.error <= oracle.TOLERANCE, each.errors
    assert between_boxes(trained) == 2 * WHOLE
    assert all(each.sent[rank ^ 1] == WHOLE // 2 for rank, each in enumerate(trained))


def test_the_cheapest_form_is_planned_and_simulated() -> None:
    plan = unequal()
    assert [stage.receivers for stage in plan.stages] == [{}, {UP: (2, 2)}]
    assert "from stage 0 to stage 1: equal values are received once per 2 ranks, which gather" in plan.explain()
    seconds = dict[tuple[int, ...], float]()
    for receivers in ((2, 2), (4,), (1, 1, 1, 1)):
        other = with_receivers(plan, ({}, {UP: receivers}))
        played = play(schedule_of(other), step_work(lowered(), other, boxes(3)), other.mesh, boxes(3), overlap=False)
        seconds[receivers] = played.step_s
        gathers = [span for span in played.trace().spans if "gather of" in span.what and span.rank == 2]
        assert len({span.what for span in gathers}) == (0 if receivers[0] == 1 else MICROBATCHES)
    assert min(seconds, key=lambda receivers: seconds[receivers]) == (2, 2)


@pytest.mark.parametrize(
    ("receivers", "message"),
    [
        ({UP: (2, 1)}, r"stages\[1\].receivers: groups of 2 \+ 1 ranks receive, the stage has 4\n  -> give sizes"),
        ({UP: ()}, r"groups of no ranks receive, the stage has 4"),
        ({ActionKind.SEND_B: (4,)}, r"SEND_B receives nothing\n  -> name RECV_F or RECV_B"),
    ],
    ids=str,
)
def test_receivers_that_do_not_fit_the_stage_are_refused(
    receivers: dict[ActionKind, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_fits(with_receivers(unequal(), ({}, receivers)), graph_of())


@pytest.mark.parametrize(("samples", "receivers"), [(6, {UP: (2, 2)}), (7, {})])
def test_another_batch_keeps_the_receivers_if_it_is_cut_evenly(
    samples: int, receivers: dict[ActionKind, tuple[int, ...]]
) -> None:
    """A rank of dp=2 has 4 of 7 samples, or 3: these are sent as they are."""
    layout = mw.Layout(pp=2, dp=2, tp=2)
    plan = with_receivers(mw.plan(graph_of(), boxes(4), devices=8, layout=layout), ({}, {UP: (2, 2)}))
    subject = subject_of()
    batch = {name: value[:samples] for name, value in subject.batches[0].items()}
    graph = mw.capture(subject.model, subject.loss_fn, batch)
    assert [stage.receivers for stage in adapt_plan(plan, graph).stages] == [{}, receivers]
