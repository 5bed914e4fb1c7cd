"""Every collective of training says of which axis, tensor, stage and micro-batch it is; also where it is not ours."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.comm.collectives import Collectives
from meshwright.errors import LostRankError
from meshwright.models import MLP, classification_loss
from meshwright.ops import collectives
from tests.distributed.pool import Ranks


def labels_of(layout: mw.Layout) -> list[str]:
    """Of all collectives in a step."""
    labels: list[str] = []
    usual = Collectives._start

    def start(self: Collectives, operation: str, *args: Any, **options: Any) -> Any:
        work = usual(self, operation, *args, **options)
        labels.append(self._open[-1].text() if self._open else "")
        return work

    model, generator = MLP((6, 16, 4)), torch.Generator().manual_seed(1)
    batch = {"inputs": torch.randn(8, 6, generator=generator), "label": torch.arange(8) % 4}
    trainer = mw.parallelize(
        model, classification_loss, batch, plan=layout, device="cpu", cluster="cpu-local",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "_start", start)
        trainer.step(batch)
    return labels


def test_tensor_parallel_traffic_is_named_by_micro_batch(ranks: Ranks) -> None:
    (first, second) = ranks(2, labels_of, mw.Layout(tp=2, microbatches=2))
    assert first == second
    for microbatch in range(2):
        (label,) = [text for text in first if text.endswith(f", stage 0, micro-batch {microbatch})")]
        assert label.startswith("#")
        assert "all_reduce of 16 x float32, sum, butterfly (axis tp, layers.2:" in label


def test_gradients_are_named_by_their_parameters(ranks: Ranks) -> None:
    labels = ranks(2, labels_of, mw.Layout(dp=2))[0]
    assert any("(axis dp, gradients of layers.2.bias to layers.0.weight)" in text for text in labels), labels


def wait_in_vain() -> str:
    """Rank 1 never comes."""
    rank, message = dist.get_rank(), ""
    name = dist.new_group([0, 1], timeout=timedelta(seconds=1)).group_name
    if rank == 0:
        started = collectives.ALL_REDUCE(torch.zeros(5), "sum", name, "native", label="gradients of w")
        with pytest.raises(LostRankError) as error:
            collectives.WAIT(started)
        message = str(error.value)
    else:
        time.sleep(3)
    return message


def test_a_native_collective_that_is_waited_for_in_vain_is_named(ranks: Ranks) -> None:
    message = ranks(2, wait_in_vain)[0]
    assert "rank 0 is in #1 all_reduce of 5 x float32 (gradients of w), native" in message
