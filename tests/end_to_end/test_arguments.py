"""What parallelize is given: a mistake has a clear error, before anything of the caller's has changed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import LaunchError, LayoutError, MeshwrightError, OptimizerError
from meshwright.models import MLP, classification_loss
from tests.distributed.pool import Ranks

BATCH = {"inputs": torch.ones(4, 6), "label": torch.zeros(4, dtype=torch.int64)}


def model() -> nn.Module:
    return MLP((6, 8, 4))


def parallelize(**options: Any) -> mw.Trainer:
    options = {"optimizer": torch.optim.AdamW, **options}
    return mw.parallelize(options.pop("model", None) or model(), classification_loss, BATCH, **options)


def foreign(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1)


def empty(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([], lr=0.1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"plan": 3}, LayoutError, "plan: it is 3\n  -> pass \"auto\", a mw.Layout"),
        ({"plan": None}, LayoutError, "plan: it is None\n"),
        ({"plan": {"dp": 1}}, LayoutError, "plan: it is {'dp': 1}\n"),
        ({"optimizer": torch.optim.SGD(model().parameters())}, OptimizerError, "optimizer: it is a SGD that is"),
        ({"optimizer": "AdamW"}, OptimizerError, "optimizer: it is a str\n  -> pass a function such"),
        ({"optimizer": lambda p: None}, OptimizerError, "optimizer: the function returned a NoneType\n"),
        ({"optimizer": empty}, OptimizerError, "it could not be made: ValueError: optimizer got an"),
        ({"optimizer": foreign}, OptimizerError, "4 of its 4 tensors are not of those that"),
        ({"max_grad_norm": "1"}, OptimizerError, "max_grad_norm: '1' is not a norm\n  -> give a positive"),
        ({"max_grad_norm": 0.0}, OptimizerError, "max_grad_norm: 0.0 is not a norm\n"),
        ({"device": "gpu"}, LaunchError, "device: there is no device 'gpu' here\n  -> use cpu"),
        ({"device": "meta"}, LaunchError, "device: there is no device 'meta' here\n"),
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], kind: type[MeshwrightError], message: str) -> None:
    with pytest.raises(kind) as caught:
        parallelize(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": "2"}, "layout: dp is '2'\n  -> Expected int, got str"),
        ({"tp": True}, "layout: tp is True\n  -> Expected int | array, got bool"),
        ({"pin": ["head"]}, "layout: pin is ['head']\n  -> Expected object, got array"),
        ({"pin": {"head": 1}}, "layout: pin is {'head': 1}\n  -> Expected str, got int"),
    ],
)
def test_layout_of_wrong_types(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        mw.Layout(**fields)
    assert message in str(caught.value)


def refused_by_factory(optimizer: Any) -> tuple[str, bool]:
    module = model()
    with pytest.raises(OptimizerError) as caught:
        parallelize(model=module, plan=mw.Layout(tp=2), optimizer=optimizer)
    return str(caught.value), any(value.is_meta for value in module.parameters())


def test_refused_optimizer_leaves_the_model_whole(ranks: Ranks) -> None:
    """Its parameters would otherwise be meta tensors already."""
    for text, is_meta in ranks(2, refused_by_factory, foreign):
        assert "would not be trained" in text
        assert not is_meta


class Whitening(torch.optim.SGD):
    """An optimizer that nobody knows."""


def warnings_of(optimizer: Any) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    parallelize(plan=mw.Layout(tp=2), optimizer=optimizer)
    logging.getLogger("meshwright").removeHandler(handler)
    return messages


def test_unknown_optimizer_over_split_parameters_is_warned_of(ranks: Ranks) -> None:
    assert ranks(2, warnings_of, torch.optim.AdamW) == [[], []]
    for result in ranks(2, warnings_of, Whitening):
        assert len(result) == 1
        assert "Whitening may not update every element independently" in result[0]
