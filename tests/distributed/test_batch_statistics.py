"""Batch norm with statistics of each rank's samples: equal to the same done by hand in one process, and to DDP."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from meshwright.errors import LayoutError, PlanError
from meshwright.ir.plan_check import check_fits
from meshwright.models import ResNet, classification_loss
from tests.distributed.oracle import TOLERANCE, Batch, largest_error, shards
from tests.distributed.pipelines import once_a_step
from tests.distributed.pool import Ranks

STEPS = 3
OWN: dict[str, Any] = {"batch_statistics": "rank"}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def network() -> ResNet:
    torch.manual_seed(0)
    return ResNet(depth=8, width=4).double()


def batches(samples: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "image": torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64),
            "label": torch.randint(10, (samples,), generator=generator),
        }
        for _ in range(STEPS)
    ]


def loss_of(model: torch.nn.Module, batch: Batch) -> Tensor:
    return classification_loss(model, batch)[0]


def by_hand(samples: int, parts: int, microbatches: int) -> dict[str, Tensor]:
    """Every part through the model as it was before, running statistics averaged; micro-batch after micro-batch."""
    model = network()
    optimizer = sgd(model.parameters())
    for batch in batches(samples):
        update(model, optimizer, batch, parts, microbatches)
    return once_a_step(model.state_dict(), mw.Layout(microbatches=microbatches))


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, parts: int, microbatches: int
) -> None:
    optimizer.zero_grad()
    of_ranks = [list(shards(part, microbatches)) for part in shards(batch, parts)]
    for rank_parts in zip(*of_ranks, strict=True):
        before, after = buffers(model), []
        for part in rank_parts:
            model.load_state_dict(before, strict=False)
            (loss_of(model, part) * (len(part["label"]) / len(batch["label"]))).backward()
            after.append(buffers(model))
        means = {name: torch.stack([state[name] for state in after]).double().mean(0) for name in before}
        model.load_state_dict(means, strict=False)
    optimizer.step()


def buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def train(layout: mw.Layout, samples: int) -> dict[str, Tensor]:
    given = batches(samples)
    trainer = mw.parallelize(network(), loss_of, given[0], plan=layout, optimizer=sgd)
    for batch in given:
        trainer.step(batch)
    return trainer.full_state_dict()


@pytest.mark.parametrize(
    ("layout", "samples", "parts"),
    [
        pytest.param(mw.Layout(dp=2, **OWN), 8, 2, id="dp2"),
        pytest.param(mw.Layout(dp=2, **OWN), 7, 2, id="dp2, a rank has one sample more"),
        pytest.param(mw.Layout(dp=2, zero=3, **OWN), 8, 2, id="dp2, zero3"),
        pytest.param(mw.Layout(dp=2, microbatches=2, **OWN), 8, 2, id="dp2, 2 micro-batches"),
        pytest.param(mw.Layout(dp=2, spatial=(2,), **OWN), 8, 2, id="dp2 x spatial2"),
        pytest.param(mw.Layout(dp=2, tp=2, **OWN), 8, 2, id="dp2 x tp2"),
        pytest.param(mw.Layout(mixed=(4,), pin={"*": "sample@m1"}, **OWN), 8, 4, id="mixed4"),
    ],
)
def test_statistics_are_of_each_ranks_samples(ranks: Ranks, layout: mw.Layout, samples: int, parts: int) -> None:
    expected = by_hand(samples, parts, layout.microbatches)
    state = ranks(layout.num_ranks, train, layout, samples)[0]
    assert largest_error(state, expected) <= TOLERANCE
    whole = by_hand(samples, 1, 1)
    assert largest_error(whole, expected) > 1e-3, "statistics of the whole batch are others"


def distributed_data_parallel() -> dict[str, Tensor]:
    model = DistributedDataParallel(network(), forward_sync_buffers=False)
    optimizer = sgd(model.parameters())
    for batch in batches(8):
        optimizer.zero_grad()
        loss_of(model, list(shards(batch, 2))[torch.distributed.get_rank()]).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def test_training_equals_distributed_data_parallel(ranks: Ranks) -> None:
    first, second = ranks(2, distributed_data_parallel)
    expected = {name: ((first[name] + second[name]) / 2).to(first[name].dtype) for name in first}
    state = ranks(2, train, mw.Layout(dp=2, **OWN), 8)[0]
    assert largest_error(state, expected) <= TOLERANCE


def train_with_a_ragged_last_batch() -> dict[str, Tensor]:
    trainer = mw.parallelize(network(), loss_of, batches(8)[0], plan=mw.Layout(dp=2, **OWN), optimizer=sgd)
    for samples in (8, 7):
        trainer.step(batches(samples)[0])
    return trainer.full_state_dict()


def test_other_batches_have_statistics_of_each_rank_too(ranks: Ranks) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    for samples in (8, 7):
        update(model, optimizer, batches(samples)[0], parts=2, microbatches=1)
    assert largest_error(ranks(2, train_with_a_ragged_last_batch)[0], model.state_dict()) <= TOLERANCE


def test_an_evaluation_uses_the_mean_of_all_ranks(ranks: Ranks) -> None:
    expected = network()
    expected.load_state_dict(by_hand(8, 2, 1))
    expected.eval()
    loss = float(loss_of(expected, batches(8)[0]).detach())
    for result in ranks(2, evaluated):
        assert abs(result - loss) <= TOLERANCE


def evaluated() -> float:
    given = batches(8)
    trainer = mw.parallelize(network(), loss_of, given[0], plan=mw.Layout(dp=2, **OWN), optimizer=sgd)
    for batch in given:
        trainer.step(batch)
    return float(trainer.evaluate(given[0]))


# --- what is refused -------------------------------------------------------------------------------------------------


def normalized(samples: int) -> mw.Graph:
    batch = {"inputs": torch.zeros(samples, 6), "label": torch.zeros(samples, dtype=torch.int64)}
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    return mw.capture(model, lambda m, b: F.cross_entropy(m(b["inputs"]), b["label"]), batch)


def test_a_single_value_of_a_channel_has_no_statistics() -> None:
    with pytest.raises(PlanError, match="a rank would have 1 value of a channel, and statistics need 2") as caught:
        mw.plan(normalized(2), layout=mw.Layout(dp=2, **OWN))
    assert "batch_statistics='global'" in caught.value.remedy
    mw.plan(normalized(4), layout=mw.Layout(dp=2, **OWN))


def test_a_gradient_must_go_on_with_the_statistics_of_its_forward() -> None:
    graph = normalized(8)
    plan = mw.plan(graph, layout=mw.Layout(dp=2, **OWN))
    name = next(operator.name for operator in graph.operators if "native_batch_norm_backward" in operator.target)
    edited = {**plan.stage.strategies, name: {"dp": "b"}}
    stage = msgspec.structs.replace(plan.stage, strategies=edited)
    with pytest.raises(PlanError, match="own samples are split over dp, those of its gradient over nothing"):
        check_fits(msgspec.structs.replace(plan, stages=(stage,)), graph)


def test_what_one_process_does_not_compute_is_not_verified() -> None:
    with pytest.raises(LayoutError, match="another computation than that of one process") as caught:
        mw.verify(network(), loss_of, batches(8)[0], mw.Layout(microbatches=2, batch_statistics="microbatch"))
    assert caught.value.remedy == "verify with batch_statistics='global'"


class SplitChannels(torch.nn.Module):
    """A convolution and a batch norm whose channels are split: so are the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(image)).mean((2, 3)))


def split_statistics() -> float:
    torch.manual_seed(4)
    model, plain = SplitChannels().double(), SplitChannels().double()
    plain.load_state_dict(model.state_dict())
    layout = mw.Layout(
        tp=2, microbatches=2, batch_statistics="microbatch", pin={"conv": "filter@tp", "norm": "c@tp"}
    )  # fmt: skip
    trainer = mw.parallelize(model, loss_of, batches(8)[0], plan=layout, optimizer=sgd)
    optimizer = sgd(plain.parameters())
    for batch in batches(8):
        optimizer.zero_grad()
        for part in shards(batch, 2):
            (loss_of(plain, part) / 2).backward()
        optimizer.step()
        trainer.step(batch)
    expected = once_a_step(plain.state_dict(), mw.Layout(microbatches=2))
    return largest_error(trainer.full_state_dict(all_ranks=True), expected)


def test_every_micro_batch_enters_statistics_of_split_channels(ranks: Ranks) -> None:
    assert max(ranks(2, split_statistics)) <= TOLERANCE
