"""Stages with different submeshes: what crosses is cut and put together, and training equals one process."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.errors import LayoutError
from meshwright.ir.placement import Shard
from meshwright.models import GPT, GPTConfig, language_model_loss
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
    trainer = mw.parallelize(
        _model(vocabulary), language_model_loss, _batch(0), plan=layout, optimizer=_adamw, max_grad_norm=0.5
    )
    losses = [float(trainer.step(_batch(number))) for number in range(3)]
    losses.append(float(trainer.evaluate(_batch(9))))
    return losses, trainer.full_state_dict(all_ranks=True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_stages_of_other_shapes_train_as_one_process(ranks: Ranks, sizes: tuple[dict[str, int], ...]) -> None:
    base = mw.Layout(pp=2, microbatches=2, stage_sizes=sizes, **sizes[0])  # type: ignore[arg-type]
    wanted, state = _train(mw.Layout())
    for losses, found in ranks(4, _train, base):
        assert losses == pytest.approx(wanted, rel=1e-9)
        for name, value in state.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-9), name


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


def test_sizes_that_do_not_make_up_a_stage_are_refused() -> None:
    graph = mw.capture(_model(), language_model_loss, _batch(0))
    with pytest.raises(LayoutError, match=r"stage_sizes\[1\].*\{'tp': 4\} does not make up the 2 ranks of a stage"):
        mw.plan(graph, layout=mw.Layout(pp=2, dp=2, microbatches=2, stage_sizes=({"dp": 2}, {"tp": 4})))
